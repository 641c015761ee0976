"""Shape checks on: under pytest, every annotated tensor of the models is checked at run time."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the cores

from jaxtyping import install_import_hook

install_import_hook("caprmil.models", "beartype.beartype")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 slides whose signal is plain to see, beside their bags in `features`."""
    from caprmil.synthetic import RareSignal

    study = RareSignal(slides=24, width=64, patches=(40, 80), signal=0.3, stain=0.5)
    return study.write(tmp_path_factory.mktemp("tiny_cohort"))
