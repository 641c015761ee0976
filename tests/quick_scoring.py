"""Scoring without figures and with few bootstrap draws, for tests of something else."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from caprmil import figures
from caprmil.evaluation import comparison, external_scores, predictions, recalibration, shift
from caprmil.evaluation.paired_tests import draw_patients
from caprmil.explain import flips
from caprmil.targets.metric import bootstrap


@contextmanager
def quick_scoring() -> Iterator[None]:
    """Finish and report runs in a fraction of the time. Metrics are as always, intervals not."""

    def few_draws(*args: Any, **options: Any) -> Any:
        return bootstrap(*args, **options | {"draws": 10})

    def few_patients(patients: int, draws: int, seed: int) -> Any:
        return draw_patients(patients, min(draws, 50), seed)

    def save(figure: Any, path: Path, **_: Any) -> Path:
        path.touch()
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", save)
        patch.setattr(predictions, "bootstrap", few_draws)
        for module in (comparison, external_scores, recalibration):
            patch.setattr(module, "draw_patients", few_patients)
        patch.setattr(shift, "SPLITS", 130)  # enough for p in a table of six
        patch.setattr(flips, "SLIDES", 4)
        yield
