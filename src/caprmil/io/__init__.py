"""Input and output: local and remote paths, atomic writes, tables, progress."""
