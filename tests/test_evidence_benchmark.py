"""The benchmark of maps writes a page from generated slides, and resumes after an interruption."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import evidence
from caprmil.features import bags
from caprmil.models import list_models
from caprmil.synthetic import SlideCohort

pytestmark = pytest.mark.slow

PLAN = evidence.Plan(
    cohort=SlideCohort(slides=8, width=700, height=700, tumour=0.3, seed=1), folds=2, epochs=2
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "Plan", lambda: PLAN)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    evidence.prepare(PLAN, folder)
    return folder


def run(page: Path, slides: Path, **changes: Any) -> str:
    options = {"models": "mean,caprmil", "seeds": 1, "processes": 1, "folder": slides, "out": page}
    arguments = [str(w) for n, v in (options | changes).items() for w in (f"--{n}", v)]
    evidence.main(arguments)
    return page.read_text()


@pytest.mark.slow
def test_the_page_has_every_map_and_an_interrupted_run_is_resumed(
    slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    first = run(page, slides)
    assert "python benchmarks/evidence.py --models mean,caprmil --seeds 1\n" in first
    assert "tumour=" in first or "'tumour': 0.3" in first
    assert "evidence | perturbation | integrated gradients | gradients | attention |" in first
    assert first.count("\n| caprmil |") == 4
    assert (tmp_path / "page-maps.png").stat().st_size > 5000
    record = tmp_path / "page.jsonl"
    record.write_text(record.read_text().splitlines(keepends=True)[0])
    assert run(page, slides).split("### ")[1:4] == first.split("### ")[1:4]  # not the costs
    assert "1 of 2 are already in" in capsys.readouterr().out


def test_a_map_is_compared_with_the_truth_of_its_slide(slides: Path, tmp_path: Path) -> None:
    run(tmp_path / "page.md", slides, models="mean")
    (result,) = evidence.Record(
        tmp_path / "page.jsonl", evidence.Result, evidence.fingerprint(PLAN)
    ).kept()
    trained = evidence.Run(slides / "mean-0")
    slide = result.slides[0]
    (fold,) = [fold.name for fold in trained.splits if slide in fold.test]
    bag = bags.read(trained.paths[slide])
    terms = trained.model(fold).evidence(evidence.torch.from_numpy(bag.features)[None]).terms
    truth = evidence.tumour(slides / "cohort" / "truth" / f"{slide}.png")
    tumour = evidence.shares(bag, truth) >= 0.5
    found = roc_auc_score(tumour, terms[:, 1] - terms[:, 0])
    assert result.maps["evidence"]["found"][0] == pytest.approx(found, abs=1e-4)
    assert result.maps["attention"]["found"][0] == 0.5  # the attention of a mean is constant


def test_the_share_of_tumour_is_that_of_the_pixels_in_a_patch() -> None:
    truth = np.zeros((8, 8), dtype=bool)  # of 8 um, under patches of 32 um
    truth[:2, :4] = True
    corners = [[0, 0], [32, 0], [0, 32], [48, 48]]
    info = {"step": 32.0, "patch_level0": 32.0, "unit": "px", "slide_mpp": 1.0}
    bag = bags.from_arrays(np.ones((4, 3)), corners, **info)
    assert evidence.shares(bag, truth).tolist() == [0.5, 0, 0, 0]


def test_a_model_that_has_not_learnt_is_named() -> None:
    scores = {name: {"found": [0.9], "clear": [0.9], "area": [0.3]} for name in ("attention",)}
    good = evidence.Result("abmil", 0, "", [1.0, 0.9], ["a"], scores, 1.0)
    bad = evidence.Result("caprmil", 0, "", [1.0, 0.5], ["a"], scores, 1.0)
    first = evidence.report([good, bad], settings={}, command="", image="")
    assert "Not learnt (an AUC over slides below 0.8): caprmil in 1 of 2 folds." in first
    second = evidence.report([good], settings={}, command="", image="")
    assert "the worst AUC over slides is 0.90" in second


def test_an_unknown_model_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "page.md", tmp_path, models="abmill")
    assert "Did you mean 'abmil'" in capsys.readouterr().err


def test_every_model_is_in_the_benchmark() -> None:
    assert set(list_models()) <= set(evidence.MODELS)
