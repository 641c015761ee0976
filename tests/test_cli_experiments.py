"""The commands compare, calibrate, cost, sweep and reproduce, as a user runs them."""

import csv
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from caprmil import cli
from caprmil.runs.run import Run
from caprmil.training import cross_validation as training
from caprmil.training.recipe import Recipe
from quick_scoring import quick_scoring

pytestmark = pytest.mark.slow


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)


def caprmil(*words: object) -> str:
    """Run a command and return its output."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def run(tiny_run: Run, tmp_path: Path) -> Path:
    """A copy of a run, which a test may change."""
    return Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))


# compare


def test_a_run_is_compared_with_another_and_with_baselines(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    output = caprmil("compare", run, other, "--out", tmp_path / "out")
    assert "run and other: no difference in auc is shown" in output
    assert (tmp_path / "out/comparison.csv").read_text().count("\nrun,other,") == 9
    headings = [f"# {name} and its baselines" for name in ("run", "other")]
    text = (tmp_path / "out/comparison.md").read_text()
    assert all(heading in text for heading in headings)


def test_predictions_that_cannot_be_compared_are_an_error_of_one_line(
    run: Path, mistake: Callable[..., str], tmp_path: Path
) -> None:
    table = run / "predictions.csv"
    lines = table.read_text().splitlines(keepends=True)
    (tmp_path / "less.csv").write_text("".join(lines[:-1]))
    assert "There is no file" in mistake("compare", run, tmp_path / "nowhere.csv")
    assert "is not a run" in mistake("compare", run, tmp_path)
    assert "not tested on the same slides" in mistake("compare", run, tmp_path / "less.csv")
    assert "named twice" in mistake("compare", run, tmp_path / "run")
    assert "has no baselines" in mistake("compare", table)


# calibrate


def test_calibration_is_printed_and_missing_files_are_written(run: Path) -> None:
    kept = (run / "calibration.json").read_text()
    (run / "reliability.png").unlink()
    output = caprmil("calibrate", run)
    assert "| before |" in output
    assert f"Written to {run}: reliability.png." in output
    assert (run / "reliability.png").read_bytes().startswith(b"\x89PNG")
    (run / "calibration.json").unlink()
    caprmil("calibrate", run)
    assert (run / "calibration.json").read_text() == kept


def test_calibrating_an_unfinished_run_is_an_error_of_one_line(
    run: Path, mistake: Callable[..., str], tmp_path: Path
) -> None:
    assert "is not a run" in mistake("calibrate", tmp_path)
    (run / "scores.json").unlink()
    assert "is not finished" in mistake("calibrate", run)


# cost


QUICK = ("--patches", 20, "--features", 16, "--repeats", 1, "--device", "cpu")


def test_models_are_measured_and_nothing_is_written_without_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = caprmil("cost", "--models", "mean, abmil", *QUICK)
    assert all(name in output for name in ("mean", "abmil", "One bag of 20 patches"))
    assert list(tmp_path.iterdir()) == []


def test_two_runs_with_the_same_name_are_both_measured(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "more" / "run")
    caprmil("cost", "--run", run, "--run", other, "--out", tmp_path / "out", *QUICK)
    with (tmp_path / "out/cost.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == [
            f"caprmil ({run})",
            f"caprmil ({other})",
        ]
    assert (tmp_path / "out/performance.png").exists()


def test_a_mistake_in_what_to_measure_is_an_error_of_one_line(
    mistake: Callable[..., str], tmp_path: Path
) -> None:
    assert "Did you mean 'abmil'?" in mistake("cost", "--models", "abmill", *QUICK)
    assert "is not a run" in mistake("cost", "--run", tmp_path, *QUICK)
    (tmp_path / "cost.tex").write_text("mine")
    error = mistake("cost", "--models", "mean", "--out", tmp_path, *QUICK)
    assert "cost.tex already exists" in error
    assert [path.name for path in tmp_path.iterdir()] == ["cost.tex"]


# sweep


@pytest.fixture
def words(tiny_cohort: Path, tmp_path: Path) -> list[object]:
    """A sweep command without the settings that vary."""
    settings = ["model.dim=16", "train.epochs=2", "train.warmup_epochs=0", "splits.folds=2"]
    changes = [word for setting in settings for word in ("--set", setting)]
    where = ["--features", tiny_cohort.parent / "features", "--out", tmp_path / "out"]
    return ["sweep", tiny_cohort, *where, *changes, "--device", "cpu"]


def test_a_sweep_reports_a_failed_point_and_exits_with_2(
    words: list[object], tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(recipe: Recipe, out: Path, **_: object) -> Run:
        recipe.try_model()
        return Run(shutil.copytree(tiny_run.folder, out))

    monkeypatch.setattr(training, "complete", complete)
    result = invoke(*words, "--set", "model.heads=2,99", "--metric", "brier")
    assert result.exit_code == 2
    assert "1/2 heads=2\n    brier on validation 0." in result.stderr
    assert "2/2 heads=99\n    failed: " in result.stderr
    assert "Bold is the best Brier score on the validation parts: heads=2." in result.stdout
    assert "- Failed: heads=99: " in (tmp_path / "out/sweep.md").read_text()
    assert (tmp_path / "out/sweep.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in (tmp_path / "out").iterdir() if path.name[0] != "."}
    assert names == {
        *("points", "seconds.json", "sweep.csv", "sweep.md", "sweep.png", "sweep.toml"),
        "commands.txt",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.heads=2"], "No setting varies"),
        (["model.heads=2..4"], "is a range, and a grid needs values"),
        (["model.heds=2,4"], "Did you mean 'heads'"),
        (["modl.heads=2,4"], "Did you mean 'model'"),
        (["model.heads"], "A change has the form KEY=VALUE"),
        (["=2,4"], "A change has the form KEY=VALUE"),
        (["model.heads=2,4", "--metric", "auk"], "Did you mean 'auc'"),
        (["model.heads=2,4", "--device", "gpu"], "A device is auto, cpu"),
    ],
)
def test_a_mistake_in_a_sweep_is_an_error_before_anything_is_written(
    options: list[str], message: str, words: list[object], mistake: Callable[..., str]
) -> None:
    assert message in mistake(*words, "--set", *options)
    assert not Path(str(words[5])).exists()


# reproduce


def test_a_rehearsal_runs_and_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = ["--set", "model.dim=16", "--set", "splits.folds=2", "--device", "cpu"]
    words = ["reproduce", "tcga-nsclc", "--rehearse", "--models", "mean,caprmil", *changes]
    with quick_scoring():
        output = caprmil(*words)
    out = Path("runs/tcga-nsclc-rehearsal")
    assert "its figures mean nothing" in output
    assert "- 40 slides; the paper has 1,006." in output
    assert f"caprmil compare {out / 'mean'} {out / 'caprmil'}" in output
    assert {path.name for path in out.iterdir()} == {
        *("stand-in", "cohort.csv", "mean", "caprmil", "table.md", "table.csv", "table.tex"),
        *("protocol.json", "commands.txt", ".lock"),
    }
    assert (out / "commands.txt").read_text() == f"caprmil {shlex.join(map(str, words))}\n"
    before = (out / "caprmil/scores.json").stat().st_mtime_ns
    assert caprmil(*words) == output
    assert (out / "caprmil/scores.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["camelyon17", "--rehearse"], "Did you mean 'camelyon16'"),
        (["bracs"], "or --rehearse to try it"),
        (["bracs", "--rehearse", "--labels", "labels.csv"], "generates its own bags"),
        (["bracs", "--rehearse", "--models", ""], "Name a model"),
        (["bracs", "--features", ".", "--labels", "nowhere.csv"], "There is no file nowhere.csv"),
    ],
)
def test_a_mistake_in_a_reproduction_is_an_error_before_anything_is_written(
    options: list[str],
    message: str,
    mistake: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in mistake("reproduce", *options)
    assert list(tmp_path.iterdir()) == []
