"""The command line: training, prediction, scoring and errors."""

import os
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from caprmil import cli
from caprmil.cli import app, run
from caprmil.cli.shared import answers_table, show_table
from caprmil.cli.terminal import accept_any_text
from caprmil.errors import CaprmilError
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bags
from caprmil.synthetic import RareSignal, Section
from caprmil.targets import Classification

COHORT = RareSignal(slides=24, width=16, patches=(30, 60), signal=0.3, stain=0.3)
QUICK = ["train.epochs=4", "train.warmup_epochs=1", "splits.folds=2", "model.dim=16"]


def caprmil(*words: object) -> str:
    """Run a command in this process and return what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def process(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, as a user does."""
    command = [sys.executable, "-m", "caprmil", *map(str, words)]
    options: dict[str, Any] = {"env": {**os.environ, **environment}, "encoding": "utf-8"}
    return subprocess.run(command, cwd=cwd, capture_output=True, **options, check=False)


def shell(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command from its entry point, in this process: importing torch takes seconds."""
    command, out, err, code = [str(word) for word in words], StringIO(), StringIO(), 0
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        try:
            run(command)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cohort and a run in it."""
    home = tmp_path_factory.mktemp("home")
    table = COHORT.write(home)
    changes = [word for change in QUICK for word in ("--set", change)]
    output = caprmil(
        "train", table, "--features", home / "features", "--out", home / "run", *changes
    )
    assert "mean over folds" in output
    return home


def test_a_run_has_all_its_files(home: Path) -> None:
    names = {path.name for path in (home / "run").iterdir()}
    expected = {"recipe.toml", "run.json", "splits.json", "predictions.csv", "scores.json"}
    expected |= {"scores.md", "curves.png", "roc.png", "folds", "maps.json", "mean"}
    expected |= {"baselines", "calibration.json", "reliability.png"}
    assert names == expected | {"guarantees.json", "novelty.safetensors"}


def test_training_that_was_killed_before_its_maps_measures_them_when_repeated(home: Path) -> None:
    measured = (home / "run" / "maps.json").read_text()
    (home / "run" / "maps.json").unlink()
    changes = [word for change in QUICK for word in ("--set", change)]
    table, features = home / "labels.csv", home / "features"
    output = caprmil("train", table, "--features", features, "--out", home / "run", *changes)
    assert "mean over folds" in output
    assert (home / "run" / "maps.json").read_text() == measured


def test_training_again_into_the_same_folder_is_refused(home: Path) -> None:
    with pytest.raises(CaprmilError, match="finished run"):
        caprmil(
            "train", home / "labels.csv", "--features", home / "features", "--out", home / "run"
        )


def test_bags_without_labels_get_probabilities(home: Path, tmp_path: Path) -> None:
    bag = bags.write(tmp_path / "new.h5", np.ones((7, 16)), encoder="synthetic", mpp=1.0)
    caprmil("predict", home / "run", bag, "--out", tmp_path / "answers.csv")
    header, row = (tmp_path / "answers.csv").read_text().splitlines()
    columns = "slide,patient,fold,label,predicted,prob_normal,prob_tumour"
    assert header == f"{columns},models,spread,unlike_training"
    assert row.startswith("new,,,,")
    assert sum(map(float, row.split(",")[5:7])) == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "width", "message"),
    [
        ({"encoder": "uni_v1"}, 16, "encoder uni_v1, not synthetic as the models"),
        ({"mpp": 0.5}, 16, "0.5 um/px, not 1 as the models"),
        ({}, 8, "8 features, not 16 as the models"),
    ],
)
def test_bags_of_another_encoder_or_width_are_refused(
    settings: dict[str, object], width: int, message: str, home: Path, tmp_path: Path
) -> None:
    bag = bags.write(tmp_path / "new.h5", np.ones((7, width)), **settings)  # type: ignore[arg-type]
    words = ("predict", home / "run", bag, "--out", tmp_path / "answers.csv")
    with pytest.raises(CaprmilError, match=message):
        caprmil(*words)
    assert not (tmp_path / "answers.csv").exists()
    if width == 16:
        caprmil(*words, "--force")


def test_a_file_of_predictions_is_never_overwritten(home: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.csv"
    answers.write_text("mine")
    with pytest.raises(CaprmilError, match="already exists"):
        caprmil("predict", home / "run", home / "features", "--out", answers)
    assert answers.read_text() == "mine"


def test_a_run_and_any_table_of_predictions_can_be_scored(home: Path) -> None:
    of_run = caprmil("evaluate", home / "run")
    of_table = caprmil("evaluate", home / "run" / "predictions.csv")
    assert of_run == of_table
    assert "| auc |" in of_run


def test_another_cohort_is_scored_by_every_folds_model(home: Path, tmp_path: Path) -> None:
    table = RareSignal(slides=8, width=16, patches=(30, 60), seed=5).write(tmp_path)
    text = table.read_text().replace("slide_", "other_").replace("patient_", "someone_")
    table.write_text(text)
    for path in (tmp_path / "features").iterdir():
        path.rename(path.with_name(path.name.replace("slide_", "other_")))
    words = ("--cohort", table, "--features", tmp_path / "features", "--out", tmp_path / "out.csv")
    output = caprmil("evaluate", home / "run", *words)
    assert output.strip().startswith("8 slides, 8 patients, 2 folds.")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 2 * 8

    bag = tmp_path / "features" / "other_003.h5"
    bag.write_bytes(bag.read_bytes()[:-500])
    result = process(
        *("evaluate", home / "run", *words[:-1], tmp_path / "others.csv"), cwd=tmp_path
    )
    assert result.returncode == 2
    assert "failed: other_003: " in result.stderr
    assert len((tmp_path / "others.csv").read_text().splitlines()) == 1 + 2 * 7


def test_another_cohort_is_scored_with_the_label_column_of_the_run(
    home: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(home / "run", tmp_path / "run")
    recipe = (run / "recipe.toml").read_text()
    assert recipe.count("[data]\n") == 1
    (run / "recipe.toml").write_text(recipe.replace("[data]\n", '[data]\nlabel = "outcome"\n'))
    table = RareSignal(slides=8, width=16, patches=(30, 60), seed=5).write(tmp_path)
    frame = pd.read_csv(table).rename(columns={"label": "outcome"})
    frame["slide"], frame["patient"] = "other_" + frame["slide"], "other_" + frame["patient"]
    frame.assign(label="something else").to_csv(table, index=False)
    for path in (tmp_path / "features").iterdir():
        path.rename(path.with_name(f"other_{path.name}"))
    output = caprmil("evaluate", run, "--cohort", table, "--features", tmp_path / "features")
    assert output.strip().startswith("8 slides, 8 patients, 2 folds.")


def test_slides_of_the_training_cohort_are_not_scored_again(home: Path) -> None:
    words = ("--cohort", home / "labels.csv", "--features", home / "features")
    with pytest.raises(CaprmilError, match="trained on 24 of these slides"):
        caprmil("evaluate", home / "run", *words)


def test_the_checks_are_measured(home: Path) -> None:
    output = caprmil("check", home / "run")
    assert output.count("yes") == 6 + 9  # promises of the model, and of its maps
    assert "Measured on 8 bags" in output


def test_models_and_doctor_print_their_tables() -> None:
    assert "314,318" in caprmil("models")
    assert "torch" in caprmil("doctor")
    assert caprmil("--version").strip() == __import__("caprmil").__version__


def test_a_users_mistake_is_one_line_and_exits_with_2(tmp_path: Path) -> None:
    result = shell("train", "nowhere.toml", "--out", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.strip() == "error: There is no recipe nowhere.toml."
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_a_cohort_are_reported_before_anything_is_written(tmp_path: Path) -> None:
    table = RareSignal(slides=12, width=16, patches=(5, 9)).write(tmp_path)
    (tmp_path / "features" / "slide_003.h5").write_bytes(b"cut short")
    (tmp_path / "features" / "slide_004.h5").unlink()
    words = ("--features", tmp_path / "features", "--out", tmp_path / "run")
    result = shell("train", table, *words, cwd=tmp_path)
    assert result.returncode == 2
    assert "slide_003.h5 is not an HDF5 file" in result.stderr
    assert "Slides without a bag" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("predictions.csv", "--cohort", "labels.csv"),
        ("predictions.csv", "--out", "x.csv"),
        (".", "--label", "label"),
        (".", "--features", "features"),
        (".", "--vectors", "vectors.csv"),
        ("nowhere", "--cohort", "labels.csv", "--features", "features"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(words: tuple[str, ...], home: Path) -> None:
    target, *options = words
    with pytest.raises(CaprmilError, match="--"):
        caprmil("evaluate", home / "run" / target, *options)


def test_a_path_that_cannot_be_written_is_an_error_of_one_line(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    words = ("train", home / "labels.csv", "--features", home / "features")
    for command in (words, ("predict", home / "run", home / "features")):
        with pytest.raises(CaprmilError, match="file is not a folder that you can write to"):
            caprmil(*command, "--out", tmp_path / "file" / "x.csv")
    assert (tmp_path / "file").read_text() == "mine"


def test_one_broken_bag_does_not_stop_the_predictions_of_the_others(
    home: Path, tmp_path: Path
) -> None:
    bags.write(tmp_path / "good.h5", np.ones((7, 16)))
    np.save(tmp_path / "bad.npy", np.full((7, 16), np.nan))
    np.save(tmp_path / "extreme.npy", np.full((7, 16), 1e30))
    result = process("predict", home / "run", tmp_path, "--out", tmp_path / "out.csv", cwd=tmp_path)
    assert result.returncode == 2
    failed = [line for line in result.stderr.splitlines() if line.startswith("failed: ")]
    assert ["bad.npy: 7 of 7 patches have NaN" in failed[0], "1e+30" in failed[1]] == [True, True]
    answers = (tmp_path / "out.csv").read_text().splitlines()
    assert len(answers) == 2
    assert answers[1].startswith("good,")


def test_of_many_classes_only_the_predicted_one_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = Classification(classes=tuple(f"class_{n}" for n in range(1000)))
    answers = np.full((1, 1000), 0.5 / 999)
    answers[0, 7] = 0.5
    answers_table(Predictions(slides=("s",), target=target, answers=answers))
    shown = capsys.readouterr().out
    assert "class_7 0.5000" in shown
    assert len(shown) < 500


@pytest.mark.slow
@pytest.mark.parametrize(("code", "words"), [(130, "Stopped."), (143, "Stopped by SIGTERM.")])
def test_a_stopped_training_says_so_and_how_to_resume(
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(_: object) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(cli, "app", stop)
    for command, more in (("train", " Repeat the command to resume."), ("predict", "")):
        with pytest.raises(SystemExit, match=str(code)):
            cli.run([command])
        assert capsys.readouterr().err == f"{words}{more}\n"


def test_training_in_an_ascii_terminal_ends_with_its_table(home: Path, tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    table = (home / "labels.csv").read_text(encoding="utf-8").replace("tumour", "tumör")
    (tmp_path / "labels.csv").write_text(table, encoding="utf-8")
    changes = [word for change in QUICK for word in ("--set", change)]
    words = ("train", "labels.csv", "--features", home / "features", "--out", "run", "--no-mean")
    trained = process(*words, *changes, cwd=tmp_path, **ascii_only)
    assert (trained.returncode, "Traceback" in trained.stderr) == (0, False), trained.stderr
    assert "Predict new bags with" in trained.stdout


def test_a_terminal_without_a_character_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown, encoding="ascii"))
    accept_any_text()
    show_table(["slide", "AUC"], [["tumör", "0.900 ± 0.010"]])
    sys.stdout.flush()
    assert "0.900 +/- 0.010" in shown.getvalue().decode("ascii")


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two small slides and a file that is not a slide."""
    folder = tmp_path_factory.mktemp("slides")
    for seed in range(2):
        Section(seed=seed, width=600, height=600).write(folder / f"s{seed}.tiff")
    (folder / "broken.svs").write_text("nothing of the kind")
    return folder


def test_slides_are_encoded_and_the_broken_one_is_named_at_the_end(
    slides: Path, tmp_path: Path
) -> None:
    output = shell("encode", slides, "--out", tmp_path / "features", cwd=tmp_path)
    assert output.returncode == 2
    assert "2 slides done" in output.stdout
    assert "failed: broken: " in output.stderr.splitlines()[-2]
    assert "Traceback" not in output.stderr
    assert bags.inspect(tmp_path / "features" / "s0.h5").encoder == "lite0"
    assert (tmp_path / "features" / "qc.csv").read_text().count("\n") == 4


def test_tissue_can_be_checked_without_encoding(slides: Path, tmp_path: Path) -> None:
    output = caprmil("patch", slides / "s0.tiff", "--out", tmp_path / "check", "--magnification", 5)
    assert "1 slide done" in output
    assert (tmp_path / "check" / "qc" / "s0.png").exists()
    assert list((tmp_path / "check").glob("*.h5")) == []


def test_bags_are_converted_to_other_tools_and_back(home: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "trident", tmp_path / "ours"
    size = ["--patch-px", 224]
    output = caprmil("convert", home / "features", "--to", "trident", "--out", there, *size)
    assert "24 files written" in output
    (features,) = there.glob("*/features_*")
    caprmil("convert", features, "--to", "caprmil", "--out", back)
    one, other = (bags.read(folder / "slide_001.h5") for folder in (home / "features", back))
    np.testing.assert_array_equal(one.features, other.features)
    np.testing.assert_array_equal(one.coords, other.coords)


def test_an_unknown_format_is_an_error_of_one_line(home: Path, tmp_path: Path) -> None:
    output = process("convert", "features", "--to", "clamm", "--out", tmp_path / "x", cwd=home)
    assert output.returncode == 2
    assert "Did you mean 'clam'?" in output.stderr


def test_encoders_are_listed_with_width_and_licence() -> None:
    output = caprmil("encoders")
    assert "lite0" in output
    assert "uni2-h" in output


def test_an_invalid_shard_is_refused_before_any_work(slides: Path, tmp_path: Path) -> None:
    with pytest.raises(CaprmilError, match="I from 1 to N"):
        caprmil("encode", slides, "--shard", "0/4", "--out", tmp_path / "features")
    assert not (tmp_path / "features").exists()


def test_an_unknown_encoder_is_an_error_of_one_line(slides: Path, tmp_path: Path) -> None:
    words = ["encode", slides, "--encoder", "unni", "--out", tmp_path / "features"]
    output = shell(*words, cwd=tmp_path)
    assert (output.returncode, output.stderr.count("\n")) == (2, 1)
    assert "Did you mean 'uni'?" in output.stderr


@pytest.mark.parametrize(
    ("command", "entry"),
    [
        ("train", "caprmil.training.cross_validation.cross_validate"),
        ("sweep", "caprmil.experiments.sweep.runner.run_sweep"),
    ],
)
def test_loggers_are_allowed_on_the_command_line(
    command: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def stop(*_: object, allow_loggers: object, **__: object) -> None:
        given.append(allow_loggers)
        raise CaprmilError("enough")

    monkeypatch.setattr(entry, stop)
    monkeypatch.setattr("caprmil.training.early_checks.check_early", lambda *_: None)
    words = [command, "labels.csv", "--out", str(tmp_path / "out"), "--set", "model.tokens=2,4"]
    words = words if command == "sweep" else words[:-2]
    runner = CliRunner()
    for more in ([], ["--allow-logger", "lab.Logger", "--allow-logger", "lab.Other"]):
        assert isinstance(runner.invoke(app, [*words, *more]).exception, CaprmilError)
    assert given == [(), ["lab.Logger", "lab.Other"]]
