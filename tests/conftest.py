"""Shape checks on: under pytest, every annotated tensor of the models is checked at run time."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the cores

from jaxtyping import install_import_hook

install_import_hook("caprmil.models", "beartype.beartype")
