"""The demo: from pixels to predictions, resumed, with the result that the paper describes."""

from pathlib import Path

import numpy as np
import pytest

from caprmil import demo

pytestmark = pytest.mark.slow


def files(folder: Path) -> dict[Path, int]:
    """Return when each slide, bag and model was written."""
    found = [path for kind in ("tiff", "h5", "safetensors") for path in folder.rglob(f"*.{kind}")]
    return {path: path.stat().st_mtime_ns for path in found}


@pytest.mark.timeout(2400)
def test_a_plain_mean_misses_a_rare_signal_that_caprmil_finds(tmp_path: Path) -> None:
    results, answers, reports = demo.demo(tmp_path, progress=False)
    assert [result.name for result in results] == ["Mean", "ABMIL", "CAPRMIL + Mean"]
    assert all(len(result.folds("auc")) == 3 for result in results)
    aucs = {result.name: np.mean(result.folds("auc")) for result in results}
    assert aucs["ABMIL"] > 0.9
    assert aucs["CAPRMIL + Mean"] > 0.9
    assert aucs["Mean"] < aucs["CAPRMIL + Mean"]
    assert answers.slides == ("new_normal", "new_tumour")
    assert answers.answers[:, 1].argmax() == 1
    assert (tmp_path / "demo.png").stat().st_size > 1000
    assert (tmp_path / "features" / "qc" / "slide_000.png").exists()
    assert [page.name for page in reports] == ["index.html", "new_tumour.html"]
    assert "data:image/jpeg" in reports[1].read_text()
    made = files(tmp_path)
    demo.demo(tmp_path, progress=False)  # nothing is repeated
    assert files(tmp_path) == made
