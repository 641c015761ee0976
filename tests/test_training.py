"""Cross-validation: folds scored on unseen slides, a folder per run, and resuming."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import caprmil
from caprmil import config
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CohortError, RecipeError, RunError, UnknownNameError
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bags
from caprmil.features.batches import Sample
from caprmil.io.json_files import read_json
from caprmil.models import create
from caprmil.runs.facts import RECIPE
from caprmil.runs.history import read_history
from caprmil.runs.inference import predict_samples
from caprmil.runs.run import Run
from caprmil.runs.timing import read_timing
from caprmil.training import cross_validation as training
from caprmil.training.cross_validation import cross_validate
from caprmil.training.module import load_weights
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.recipe_files import read_recipe
from executor_workers import run_contents
from quick_scoring import quick_scoring


@pytest.fixture(scope="module", autouse=True)
def quick_runs(tiny_run: Run) -> Iterator[None]:
    """Save no figures and resample little after the shared run: other tests cover that."""
    with quick_scoring():
        yield


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The content of a run that was never interrupted."""
    return run_contents(run_recipe(short(tiny_recipe), tmp_path_factory.mktemp("a") / "run").folder)


def run_recipe(recipe: Recipe, out: Path) -> Run:
    return cross_validate(recipe, out, device="cpu", progress=False)


def quick(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with two folds of one epoch, and other changes."""
    train = replace(recipe.train, epochs=1, warmup_epochs=0)
    splits = replace(recipe.splits, folds=2)
    return replace(recipe, **{"train": train, "splits": splits, "loggers": {}, **changes})


def short(recipe: Recipe) -> Recipe:
    """The recipe with two folds of two epochs: enough to be interrupted in the middle."""
    return quick(recipe, train=replace(recipe.train, epochs=2))


def relabel(table: Path, folder: Path, column: Callable[[int], str], header: str) -> Path:
    """Write the table of the tiny cohort with other columns after the patient."""
    rows = [f"slide_{n:03d},patient_{n:03d},{column(n)}" for n in range(24)]
    path = folder / "table.csv"
    path.write_text("\n".join([f"slide,patient,{header}", *rows]) + "\n")
    return path


# The content of a run


def test_each_test_part_is_predicted_by_the_model_of_its_fold(tiny_run: Run) -> None:
    for fold in tiny_run.splits:
        predicted = Predictions.read(tiny_run.fold_folder(fold.name) / "test.csv")
        samples = [Sample(slide, Path(tiny_run.paths[slide])) for slide in fold.test]
        own = predict_samples(tiny_run.trained(fold.name), samples)
        assert predicted.slides == fold.test
        np.testing.assert_array_equal(predicted.answers, own)
        others = [f.name for f in tiny_run.splits if f != fold]
        assert not any(
            np.allclose(predict_samples(tiny_run.trained(o), samples), own) for o in others
        )


def test_each_validation_part_is_predicted_by_the_model_of_its_fold(tiny_run: Run) -> None:
    for fold in tiny_run.splits:
        predicted = Predictions.read(tiny_run.fold_folder(fold.name) / "validation.csv")
        assert predicted.slides == fold.validation


def test_every_slide_is_predicted_once_in_the_fold_that_left_it_out(tiny_run: Run) -> None:
    predicted = tiny_run.predictions
    assert sorted(predicted.slides) == [f"slide_{n:03d}" for n in range(24)]
    home = {slide: fold.name for fold in tiny_run.splits for slide in fold.test}
    assert predicted.folds == tuple(home[slide] for slide in predicted.slides)
    assert predicted.labels is not None
    assert predicted.labels.tolist() == [int(slide[-3:]) % 2 for slide in predicted.slides]


def test_the_recipe_in_a_run_reproduces_the_run(tiny_run: Run, tiny_recipe: Recipe) -> None:
    assert read_recipe(tiny_run.folder / RECIPE) == tiny_recipe
    assert tiny_run.facts.digest == config.digest(tiny_recipe)


def test_a_run_has_scores_and_figures_and_no_checkpoints(tiny_run: Run) -> None:
    assert tiny_run.scores["slides"] == 24
    assert tiny_run.scores["metrics"]["auc"]["folds_counted"] == 3
    files = {str(file.relative_to(tiny_run.folder)) for file in tiny_run.folder.rglob("*")}
    assert {"curves.png", "roc.png", "scores.md"} < files
    assert not [name for name in files if name.endswith(".ckpt") or ".part" in name]


def test_every_epoch_and_the_test_part_of_a_fold_are_timed(tiny_run: Run) -> None:
    for fold in tiny_run.splits:
        folder = tiny_run.fold_folder(fold.name)
        timing = read_timing(folder)
        epochs = [each.epoch for each in timing.epochs]
        assert epochs == read_history(folder / "history.csv")["epoch"]
        assert timing.test is not None
        assert (timing.test.slides, timing.test.seconds > 0) == (len(fold.test), True)


def test_the_epoch_that_was_kept_is_recorded(tiny_run: Run) -> None:
    for fold in tiny_run.splits:
        folder = tiny_run.fold_folder(fold.name)
        losses = read_history(folder / "history.csv")["val_loss"]
        facts = read_json(folder / "fold.json")
        assert facts["kept_epoch"] == losses.index(min(losses))
        assert facts["epochs"] == 3


def test_tensorboard_has_a_point_per_epoch(tiny_run: Run) -> None:
    folder = tiny_run.fold_folder("fold-1")
    log = EventAccumulator(str(folder / "log")).Reload()
    history = read_history(folder / "history.csv")
    points = log.Scalars("val_loss")
    assert [point.step for point in points] == [0, 1, 2]
    assert [point.value for point in points] == pytest.approx(history["val_loss"])


def test_two_runs_of_a_recipe_are_equal(
    tiny_recipe: Recipe, uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    assert run_contents(run_recipe(short(tiny_recipe), tmp_path / "run").folder) == uninterrupted


# Other cohorts and settings


def test_without_validation_all_epochs_are_run_and_the_last_is_kept(
    tiny_recipe: Recipe, tmp_path: Path
) -> None:
    splits = SplitConfig(folds=2, validation=0)
    run = run_recipe(replace(tiny_recipe, splits=splits, loggers={}), tmp_path / "run")
    folder = run.fold_folder("fold-0")
    facts = read_json(folder / "fold.json")
    assert (facts["kept_epoch"], facts["epochs"]) == (2, 3)
    assert "val_loss" not in read_history(folder / "history.csv")
    assert not (folder / "validation.csv").exists()


def test_three_classes_are_separated(tiny_recipe: Recipe, tmp_path: Path) -> None:
    table = relabel(Path(tiny_recipe.cohort), tmp_path, lambda n: "abc"[n % 3], "label")
    run = run_recipe(quick(tiny_recipe, cohort=str(table)), tmp_path / "run")
    assert run.target.classes == ("a", "b", "c")
    assert run.predictions.answers.shape == (24, 3)
    assert run.model("fold-0").n_outputs == 3


def test_test_parts_of_one_class_have_no_roc_figure(tiny_recipe: Recipe, tmp_path: Path) -> None:
    def cells(n: int) -> str:
        parts = ["test" if n in test else "train" for test in ((0, 2, 4), (1, 3, 5))]
        return ",".join(["ab"[n % 2], *parts])

    table = relabel(Path(tiny_recipe.cohort), tmp_path, cells, "label,fold_0,fold_1")
    fixed = SplitConfig(kind="fixed", validation=0.2)
    run = run_recipe(quick(tiny_recipe, cohort=str(table), splits=fixed), tmp_path / "run")
    assert run.finished
    assert not (run.folder / "roc.png").exists()
    assert (run.folder / "curves.png").exists()


def test_each_repeat_predicts_every_slide_once(tiny_recipe: Recipe, tmp_path: Path) -> None:
    splits = SplitConfig(folds=2, repeats=2)
    run = run_recipe(quick(tiny_recipe, splits=splits), tmp_path / "run")
    assert len(run.predictions) == 48
    seeds = [fold.seed for fold in run.splits]
    assert len(set(seeds)) == 4


def test_any_logger_of_lightning_can_be_named(tiny_recipe: Recipe, tmp_path: Path) -> None:
    loggers: dict[str, Any] = {"CSVLogger": {}, "lightning.pytorch.loggers.TensorBoardLogger": {}}
    run = run_recipe(quick(tiny_recipe, loggers=loggers), tmp_path / "run")
    log = run.fold_folder("fold-0") / "log"
    assert list(log.glob("events.out.*"))
    lines = (log / "metrics.csv").read_text().splitlines()
    assert "val_loss" in lines[0]
    assert len(lines) == 2  # one epoch, one row


# Errors before anything is written


@pytest.mark.parametrize(
    ("loggers", "expected"),
    [
        ({"Tensorbored": {}}, "no logger 'Tensorbored'. Lightning has: .*CSVLogger"),
        ({"nowhere.Logger": {}}, r"would run code of nowhere\. .* --allow-logger nowhere\.Logger"),
        ({"Logger": {}}, "no logger 'Logger'"),
        ({"CSVLogger": {"save_dir": "/tmp"}}, "CSVLogger: save_dir is '/tmp'"),
        ({"CSVLogger": {"name": "../../x"}}, "loggers write in the folder of the run"),
        ({"MLFlowLogger": {"tracking_uri": "file:/elsewhere"}}, "MLFlowLogger: tracking_uri"),
        ({"MLFlowLogger": {"tags": {"a": ["~/x"]}}}, "MLFlowLogger: tags"),
        ({"csv_logs": {}}, "no logger 'csv_logs'"),
        ({"CSVLogger": {"colour": "red"}}, "CSVLogger cannot be made: .*colour"),
        ({"CSVLogger": 3}, "CSVLogger takes a table of settings, not 3"),
    ],
    ids=str,
)
def test_an_unknown_logger_is_an_error_before_training(
    tiny_recipe: Recipe, tmp_path: Path, loggers: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RecipeError, match=expected):
        run_recipe(quick(tiny_recipe, loggers=loggers), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module with a logger, on the path. It writes a file when it is imported."""
    code = (
        "from pathlib import Path\n"
        "from lightning.pytorch.loggers import CSVLogger\n"
        f"Path({str(tmp_path / 'imported')!r}).touch()\n"
        "class Mine(CSVLogger): pass\n"
        "class Other: pass\n"
    )
    (tmp_path / "stranger.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "imported"
    sys.modules.pop("stranger", None)


def test_a_logger_of_another_package_is_imported_only_if_it_is_allowed(
    tiny_recipe: Recipe, tmp_path: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = (
        quick(tiny_recipe, loggers={"stranger.Mine": {"save_dir": "own"}}),
        tmp_path / "run",
    )
    for allowed in ((), ("stranger", "stranger.Other", "stranger.*")):
        with pytest.raises(RecipeError, match=r"--allow-logger stranger\.Mine"):
            cross_validate(recipe, out, device="cpu", progress=False, allow_loggers=allowed)
    assert not stranger.exists()
    assert not out.exists()
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    at_call(2, monkeypatch, "training.fold_worker.train_fold")
    with pytest.raises(KeyboardInterrupt):
        cross_validate(recipe, out, **options, allow_loggers=["stranger.Mine"])
    monkeypatch.undo()
    assert list(out.glob("folds/fold-0/own/log/metrics.csv"))
    with pytest.raises(RecipeError, match=r"--allow-logger stranger\.Mine"):  # also when resumed
        cross_validate(recipe, out, **options)
    with pytest.raises(RecipeError, match="is not a logger of Lightning"):
        cross_validate(
            quick(tiny_recipe, loggers={"stranger.Other": {}}),
            tmp_path / "other",
            **options,
            allow_loggers=["stranger.Other"],
        )


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (ModelConfig(settings={"mlp_ratio": float("inf")}), RecipeError),
        (ModelConfig(settings={"dim": 10**30}), RecipeError),
        (ModelConfig(settings={"tokenz": 4}), RecipeError),
        (ModelConfig(settings={"heads": 0}), RecipeError),
        (ModelConfig(settings={"dim": -16}), RecipeError),
        (ModelConfig(settings={"pool": "swimming"}), UnknownNameError),
        (ModelConfig(name="caprmill"), UnknownNameError),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_built_is_an_error_before_training(
    tiny_recipe: Recipe, tmp_path: Path, model: ModelConfig, problem: type[Exception]
) -> None:
    with pytest.raises(problem):
        run_recipe(quick(tiny_recipe, model=model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_device_or_cohort_is_an_error_before_training(
    tiny_recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="A device is"):
        cross_validate(tiny_recipe, tmp_path / "run", device="banana", progress=False)
    with pytest.raises(CohortError, match="no_table"):
        run_recipe(replace(tiny_recipe, cohort="no_table.csv"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# A folder is never overwritten


def test_a_finished_run_is_not_changed(tiny_recipe: Recipe, tiny_run: Run) -> None:
    before = run_contents(tiny_run.folder)
    with pytest.raises(RunError, match="holds a finished run"):
        run_recipe(tiny_recipe, tiny_run.folder)
    assert run_contents(tiny_run.folder) == before


@pytest.mark.parametrize("name", ["thesis.tex", "run"])
def test_a_folder_of_something_else_is_not_changed(
    tiny_recipe: Recipe, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("years of work")
    out = tmp_path if name == "thesis.tex" else tmp_path / name
    with pytest.raises(RunError, match="exists and is not a run"):
        run_recipe(tiny_recipe, out)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_empty_folder_is_accepted(tiny_recipe: Recipe, tmp_path: Path) -> None:
    assert run_recipe(quick(tiny_recipe), tmp_path).finished


# Interruptions


def at_call(number: int, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Press Ctrl-C instead of the nth call of a function."""
    *words, name = target.split(".")
    scope: Any = reduce(getattr, words, caprmil)
    original, calls = getattr(scope, name), iter(range(1, 1000))

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(scope, name, interrupted)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("target", "number"),
    [
        slow("training.cross_validation.open_run", 1),
        slow("training.run_folder.as_json", 2),  # recipe and splits are written, run.json is not
        ("training.checkpoints.write_history", 4),  # in the middle of the second fold
        slow("models.MILModel.save_pretrained", 2),  # trained, and nothing saved
        slow("training.fold_worker.predict_samples", 4),  # validation is predicted, test is not
        ("training.fold_worker.Path.rename", 2),  # the fold is complete, but not renamed yet
        ("training.fold_worker.train_fold", 2),  # between folds
        slow("evaluation.predictions.Predictions.concatenate", 1),
        slow("figures.roc_curves", 1),
        ("evaluation.score_summary.summary", 1),
    ],
)
def test_an_interrupted_run_resumes_and_ends_with_the_same_numbers(
    tiny_recipe: Recipe,
    uninterrupted: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    number: int,
) -> None:
    at_call(number, monkeypatch, target)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(short(tiny_recipe), tmp_path / "run")
    monkeypatch.undo()
    assert run_contents(run_recipe(short(tiny_recipe), tmp_path / "run").folder) == uninterrupted


@pytest.fixture
def broken(tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was interrupted between its folds."""
    at_call(2, monkeypatch, "training.fold_worker.train_fold")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(quick(tiny_recipe), tmp_path / "broken")
    monkeypatch.undo()
    return tmp_path / "broken"


def other_checkpoint() -> bytes:
    """A sound checkpoint of something else."""
    stream = BytesIO()
    torch.save({"state_dict": {}}, stream)
    return stream.getvalue()


DAMAGED = {"empty": b"", "cut": other_checkpoint()[:200], "other": other_checkpoint()}


def test_a_damaged_or_missing_checkpoint_is_a_line_that_says_what_to_remove(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_call(2, monkeypatch, "training.checkpoints.write_history")  # in the second epoch
    with pytest.raises(KeyboardInterrupt):
        run_recipe(short(tiny_recipe), tmp_path / "run")
    monkeypatch.undo()
    part = tmp_path / "run" / "folds" / ".fold-0.part"
    advice = r" is missing or damaged .* Remove .*fold-0\.part and repeat"
    for content in DAMAGED.values():
        (part / "last.ckpt").write_bytes(content)
        with pytest.raises(RunError, match=r"last\.ckpt" + advice):
            run_recipe(short(tiny_recipe), tmp_path / "run")
    (part / "kept.ckpt").unlink()
    with pytest.raises(RunError, match=r"kept\.ckpt" + advice):
        run_recipe(short(tiny_recipe), tmp_path / "run")


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_of_the_kept_epoch_are_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "kept.ckpt").write_bytes(content)
    with pytest.raises(RunError, match=r"kept\.ckpt is missing or damaged"):
        load_weights(create("mean", 8, 2), tmp_path / "kept.ckpt")


def test_an_interrupted_run_can_be_opened(broken: Path) -> None:
    run = Run(broken)
    assert not run.finished
    assert [fold.name for fold in run.done] == ["fold-0"]


def test_another_recipe_is_refused_and_the_difference_is_named(
    broken: Path, tiny_recipe: Recipe
) -> None:
    other = quick(tiny_recipe, model=ModelConfig(settings={"dim": 16, "heads": 4}))
    with pytest.raises(RunError, match=r"another recipe \(model.heads: 2 -> 4\)"):
        run_recipe(other, broken)


def test_finished_folds_are_not_trained_again(
    broken: Path, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = broken / "folds" / "fold-0" / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run_recipe(quick(tiny_recipe), broken).finished
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize("change", ["slide", "label", "bag"])
def test_a_cohort_that_has_changed_is_refused(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def split(n: int) -> str:
        return ["test", "val", "train"][n // 8]

    bag = bags.write(tmp_path / "slide_023.h5", np.ones((50, 64)), encoder="synthetic", mpp=1.0)
    table = tmp_path / "table.csv"

    def write(*, swap: bool = False, leave: int = 0) -> None:
        rows = [f"slide_{n:03d},{'ab'[(n + swap) % 2]},{split(n)}," for n in range(23 - leave)]
        table.write_text("\n".join(["slide,label,split,path", *rows, f"x,b,train,{bag}"]) + "\n")

    write()
    fixed = SplitConfig(kind="fixed")
    recipe = quick(tiny_recipe, cohort=str(table), splits=fixed)
    at_call(1, monkeypatch, "training.fold_worker.train_fold")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, tmp_path / "run")
    if change == "bag":
        bag.unlink()
        bags.write(bag, np.ones((51, 64)), encoder="synthetic", mpp=1.0)
    else:
        write(swap=change == "label", leave=int(change == "slide"))
    with pytest.raises(RunError, match=r"splits\.json is not what this recipe gives now"):
        run_recipe(recipe, tmp_path / "run")


@pytest.mark.slow
def test_a_killed_process_loses_no_finished_work(
    tiny_recipe: Recipe, tiny_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(config.dump(tiny_recipe))
    program = "import sys; from caprmil import *; r, out = sys.argv[1:]; "
    program += "cross_validate(read_recipe(r), out, device='cpu', progress=False)"
    command = [sys.executable, "-c", program, str(tmp_path / "recipe.toml"), str(tmp_path / "run")]
    for number, how in enumerate([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]):
        seen = f".fold-{number}.part/last.ckpt"
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not (tmp_path / "run" / "folds" / seen).exists():
            assert process.poll() is None
            time.sleep(0.002)
        os.kill(process.pid, how)
        assert process.wait(timeout=60) != 0
    assert subprocess.run(command, timeout=120).returncode == 0
    assert run_contents(tmp_path / "run") == run_contents(tiny_run.folder)


# Recipes


def test_a_recipe_with_only_a_table_is_the_papers_recipe() -> None:
    recipe = read_recipe("slides.csv", features="bags", changes=["train.epochs=7"])
    assert recipe.model == ModelConfig()
    assert (recipe.cohort, recipe.features, recipe.train.epochs) == ("slides.csv", "bags", 7)


@pytest.mark.parametrize("folder", ["it's here", 'say "bags"', "C:\\new\\bags", "3", "true"])
def test_a_folder_may_have_any_name(folder: str) -> None:
    assert read_recipe("slides.csv", features=folder).features == folder


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    first, second = training.lock_run(tmp_path), training.lock_run(tmp_path)
    with first, pytest.raises(RunError, match="Another process"), second:
        pass
