"""Every command works with every kind of target, or says why not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_cohorts import CELLS
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.explain import explain_slide, locate_slide
from caprmil.explain.map_ranking import MapRanking
from caprmil.export import model_export
from caprmil.report import slide_report
from caprmil.runs.patient_inputs import group_bags
from caprmil.runs.run import Run
from quick_scoring import quick_scoring
from small_runs import patient_run, small_run

pytestmark = pytest.mark.slow

# To measure maps takes longer than all else that is tested here.
GIVEN = MapRanking(
    first="evidence", beats_chance=True, slides=1, areas={"evidence": (0.1, 0.0, 0.2)}
)


@pytest.fixture
def quick() -> Iterator[None]:
    """Score without figures. The atlas needs its own."""
    with quick_scoring():
        yield


@pytest.fixture(scope="module", params=CELLS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with quick_scoring():
        return small_run(request.param, tmp_path_factory.mktemp(request.param))


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, f"{arguments}\n{result.output}\n{result.exception!r}"
    return result.output + str(result.exception or "")


def test_evaluate_prints_every_metric(run: Run) -> None:
    shown = call("evaluate", run.folder)
    assert [name for name in run.target.metrics if name not in shown] == []


def test_calibrate_measures_or_says_what_cannot_be_calibrated(run: Run) -> None:
    (run.folder / "calibration.json").unlink(missing_ok=True)
    shown = call("calibrate", run.folder)
    if run.target.calibrates:
        assert set(run.calibration.temperatures or run.calibration.targets)
    else:  # measured only
        assert "alibrat" in shown


@pytest.mark.usefixtures("quick")
def test_a_sweep_of_two_points_trains_and_chooses_one(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    arguments = ["--set", "model.tokens=1,2", "--set", "train.epochs=1", "--device", "cpu"]
    shown = call("sweep", run.folder / "recipe.toml", "--out", out, *arguments)
    assert "Bold is the best" in shown
    points = [Run(path) for path in sorted((out / "points").iterdir())]
    assert [point.model("fold-0").settings["tokens"] for point in points] == [1, 2]
    assert all(point.finished and point.target.kind == run.target.kind for point in points)


def test_atlas_check_and_cost_describe_the_model(run: Run, tmp_path: Path) -> None:
    call("atlas", run.folder, "--most", 6, "--out", tmp_path / "atlas", "--device", "cpu")
    assert (tmp_path / "atlas" / "index.html").exists()
    slide = next(iter(run.paths.values()))
    assert "promise" in call("check", run.folder, slide)  # a broken one is another exit code
    sizes = ["--patches", 16, "--features", 8, "--repeats", 1]
    assert "caprmil" in call("cost", "--run", run.folder, *sizes).lower()


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_an_exported_file_answers_as_the_model_does(
    run: Run, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_export, "SIZES", (1, 17))
    out = tmp_path / f"model.{form}"
    shown = call("export", run.folder, "--to", form, "--fold", "fold-0", "--out", out)
    assert out.exists()
    assert "largest deviation" in shown


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("combine", ["bag", "mean"])
def test_patients_are_predicted_from_two_sources_and_a_covariate(
    run: Run, combine: Any, tmp_path: Path
) -> None:
    found = patient_run(run.target.kind, tmp_path, combine)
    assert found.predictions.unit == "patient"
    assert len(found.sources) == 2
    assert found.covariate_names == ("age",)
    patient = found.predictions.slides[0]
    expected = found.predictions.answers[0]
    reference = locate_slide(found, patient)
    explained = explain_slide(found, reference, ranking=GIVEN, device="cpu")
    np.testing.assert_allclose(explained.answer.mean, expected, atol=1e-4)
    assert len(explained.explanation.info.slides) == 2
    own = {slide: path for slide, path in found.slide_bags.items() if found.owner(slide) == patient}
    grouped, owners = group_bags(found, own)
    again = found.predict(grouped, patients=owners, device="cpu")
    np.testing.assert_allclose(again.answers[0], expected, atol=1e-4)
    assert "Slides of the patient" in slide_report(found, explained)
