"""Input and output: paths here and elsewhere, atomic writes, tables, progress."""
