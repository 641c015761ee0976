"""The demo: from pixels to predictions, resumed, with the result that the paper describes."""

from pathlib import Path

import numpy as np
import pytest

from caprmil import demo
from caprmil.synthetic import SlideCohort

SMALL = demo.Plan(
    cohort=SlideCohort(slides=12, width=700, height=700, tumour=0.3), epochs=2, lr=1e-3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small demo that is finished."""
    folder = tmp_path_factory.mktemp("demo")
    demo.demo(folder, plan=SMALL, progress=False)
    return folder


def test_the_demo_makes_slides_scores_and_predictions(folder: Path) -> None:
    results, answers, reports = demo.demo(folder, plan=SMALL, progress=False)
    assert [result.name for result in results] == ["Mean", "ABMIL", "CAPRMIL + Mean"]
    assert all(len(result.folds("auc")) == 3 for result in results)
    assert answers.slides == ("new_normal", "new_tumour")
    assert (folder / "demo.png").stat().st_size > 1000
    assert (folder / "features" / "qc" / "slide_000.png").exists()
    assert [page.name for page in reports] == ["index.html", "new_tumour.html"]
    assert "data:image/jpeg" in reports[1].read_text()


def test_a_finished_demo_is_not_repeated(folder: Path) -> None:
    made = ("*.safetensors", "*.h5", "*.tiff")
    files = {path: path.stat().st_mtime_ns for each in made for path in folder.rglob(each)}
    demo.demo(folder, plan=SMALL, progress=False)
    assert files == {path: path.stat().st_mtime_ns for each in made for path in folder.rglob(each)}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("plan", [demo.SHORT, demo.FULL], ids=["short", "full"])
def test_a_plain_mean_loses_a_rare_signal_and_context_finds_it(
    plan: demo.Plan, tmp_path: Path
) -> None:
    results, answers, _ = demo.demo(tmp_path, plan=plan)
    aucs = {result.name: np.mean(result.folds("auc")) for result in results}
    assert aucs["ABMIL"] > 0.9
    assert aucs["CAPRMIL + Mean"] > 0.9
    assert aucs["Mean"] < aucs["CAPRMIL + Mean"]
    assert answers.answers[:, 1].argmax() == 1  # the new slide with tumour
