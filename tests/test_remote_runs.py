"""Remote runs: trained, resumed, locked and read like local ones."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from caprmil import config, figures
from caprmil.cli import app
from caprmil.errors import RunError, StorageError
from caprmil.evaluation import score_summary
from caprmil.evaluation.predictions import Predictions
from caprmil.experiments.status import read_status
from caprmil.io.atomic import write_text
from caprmil.io.cache_folder import cache_folder
from caprmil.io.paths import RemotePath, as_path, upload, upload_all
from caprmil.runs import remote
from caprmil.runs.remote import (
    LOCK,
    RemoteRun,
    _lock,
    _write_heartbeat,
    finished_folds,
    remote_run,
)
from caprmil.runs.run import Run
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from quick_scoring import quick_scoring
from remote_faults import fail_uploads_after

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def fast_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A separate cache folder, no figures, and few bootstrap draws: other tests check those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(figures, "save", lambda _, path, **__: path.touch())
        patch.setattr(score_summary, "summary", partial(score_summary.summary, draws=5))
        yield


def with_data(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe with two folds of one epoch on the cohort in a folder."""
    return replace(
        recipe,
        cohort=str(folder / "labels.csv"),
        features=str(folder / "features"),
        train=replace(recipe.train, epochs=1, warmup_epochs=0),
        splits=replace(recipe.splits, folds=2),
        loggers={},
    )


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe, tiny_cohort: Path) -> Recipe:
    """The tiny recipe with two folds of one epoch, on local data."""
    return with_data(tiny_recipe, tiny_cohort.parent)


@pytest.fixture(scope="module")
def local(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A local run of that recipe."""
    return train(recipe, tmp_path_factory.mktemp("local") / "run")


def train(recipe: Recipe, out: Path) -> Run:
    with quick_scoring():
        return cross_validate(recipe, out, device="cpu", progress=False)


def counting(fitted: list[int]) -> Any:
    """Return `fit` with a record of its calls."""
    from caprmil.training.module import fit

    def counted(*args: Any, **options: Any) -> Any:
        fitted.append(1)
        return fit(*args, **options)

    return counted


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def partial_run(memory: RemotePath, recipe: Recipe) -> RemotePath:
    """A remote run that was just started, with a partially uploaded fold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("caprmil.training.fold_worker.train_fold", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, memory / "run")
    (memory / "run/folds/fold-0/model/model.safetensors").write_bytes(b"half")
    return memory / "run"


# Training


def test_a_missing_bucket_is_found_before_training(s3: str, tiny_recipe: Recipe) -> None:
    with pytest.raises(StorageError, match="s3://missing does not exist"):
        train(tiny_recipe, as_path("s3://missing/run"))


@pytest.mark.parametrize("remote_cohort", ["memory", "s3"], indirect=True)
def test_a_remote_run_has_the_scores_of_a_local_one(
    remote_cohort: RemotePath, recipe: Recipe, local: Run, tiny_cohort: Path
) -> None:
    recipe = with_data(recipe, remote_cohort)
    run = train(recipe, remote_cohort / "runs" / "a")
    assert run.scores == local.scores
    assert str(run.folder) == f"{remote_cohort}/runs/a"
    uploaded = {
        str(p.relative_to(remote_cohort / "runs" / "a"))
        for p in (remote_cohort / "runs" / "a").rglob("*")
    }
    expected = {str(p.relative_to(local.folder)) for p in local.folder.rglob("*") if p.is_file()}
    assert uploaded == {name for name in expected if not PurePosixPath(name).name.startswith(".")}
    assert not any((cache_folder() / "runs").iterdir())
    with pytest.raises(RunError, match=f"{remote_cohort}/runs/a holds a finished run"):
        train(recipe, remote_cohort / "runs" / "a")

    bag = {"slide_000": remote_cohort / "features" / "slide_000.h5"}
    found = Run(f"{remote_cohort}/runs/a").predict(bag, device="cpu")
    same = local.predict({"slide_000": tiny_cohort.parent / "features/slide_000.h5"}, device="cpu")
    np.testing.assert_array_equal(found.answers, same.answers)
    assert len(run.bag_paths()) == 24
    assert run.predictions.slides == local.predictions.slides
    assert set(run.baselines) == set(local.baselines)
    assert set(run.validation) == set(local.validation)


@pytest.mark.parametrize("remote_cohort", ["memory", "s3"], indirect=True)
def test_another_machine_resumes_a_killed_run_after_its_finished_folds(
    remote_cohort: RemotePath, recipe: Recipe, local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = with_data(recipe, remote_cohort), remote_cohort / "runs" / "killed"
    folders = []

    def die(self: RemoteRun) -> None:
        self.upload()
        folders.append(self.folder)
        if len(folders) == 2:  # at the start and after the first fold
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "try_upload", die)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out)
    assert [fold.name for fold in Run(out).done] == ["fold-0"]
    assert not Run(out).finished
    before = (out / "folds/fold-0/fold.json").read_bytes()
    shutil.rmtree(folders[0])  # another machine does not have it
    fitted = []
    monkeypatch.setattr("caprmil.training.fold_worker.fit", counting(fitted))
    run = train(recipe, out)
    assert len(fitted) == 1
    assert run.scores == local.scores
    assert (out / "folds/fold-0/fold.json").read_bytes() == before


def test_a_partially_uploaded_fold_is_trained_again(
    partial_run: RemotePath, recipe: Recipe
) -> None:
    assert Run(partial_run).done == []
    with pytest.raises(RunError, match="has no trained model yet"):
        Run(partial_run).trained_folds()
    run = train(recipe, partial_run)
    assert len(run.done) == 2
    assert run.model("fold-0")


def test_the_status_of_a_partially_uploaded_fold_is_not_done(partial_run: RemotePath) -> None:
    assert read_status(partial_run).count() == {"to do": 3}


def test_repeating_the_command_uploads_missing_scores(
    memory: RemotePath, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, to: Path) -> None:
        if to.name == "scores.json":
            raise StorageError("the network is gone")
        upload(file, to)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", fail)
        with pytest.raises(StorageError, match="the network is gone"):
            train(recipe, memory / "run")
    assert not Run(memory / "run").finished
    fitted: list[int] = []
    monkeypatch.setattr("caprmil.training.fold_worker.fit", counting(fitted))
    assert train(recipe, memory / "run").finished
    assert fitted == []


def test_folds_that_could_not_be_uploaded_are_not_trained_again(
    memory: RemotePath, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", fail)
        with pytest.raises(StorageError):
            train(recipe, memory / "run")
    fitted: list[int] = []
    monkeypatch.setattr("caprmil.training.fold_worker.fit", counting(fitted))
    assert train(recipe, memory / "run").finished
    assert fitted == []


def test_a_local_folder_of_another_cohort_is_renamed(
    partial_run: RemotePath, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RemoteRun(partial_run, config.digest(recipe)).folder
    (folder / "splits.json").write_text("of another")
    assert train(recipe, partial_run).finished
    assert "its local folder was renamed to" in caplog.text
    (renamed,) = folder.parent.glob(f"{folder.name}.*")
    assert (renamed / "splits.json").read_text() == "of another"
    shutil.rmtree(renamed)


def test_a_folder_of_another_recipe_or_of_other_files_is_an_error(
    partial_run: RemotePath, recipe: Recipe
) -> None:
    other = replace(recipe, train=replace(recipe.train, epochs=2))
    with pytest.raises(RunError, match=r"memory://.*/run holds a run of another recipe"):
        train(other, partial_run)
    (partial_run.parent / "mine" / "notes.txt").write_bytes(b"mine")
    with pytest.raises(RunError, match="exists and is not a run"):
        train(other, partial_run.parent / "mine")
    assert [p.name for p in (partial_run.parent / "mine").iterdir()] == ["notes.txt"]


# Locks and uploads


def test_a_locked_run_is_not_trained_by_a_second_process(
    partial_run: RemotePath, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_heartbeat(partial_run / LOCK, "another host")
    with pytest.raises(RunError, match=r"is being trained by another host.*wait for 3 minutes"):
        train(recipe, partial_run)
    assert (partial_run / LOCK).exists()
    monkeypatch.setattr(remote, "STALE_SECONDS", 0.0)  # as if its last heartbeat were long ago
    with remote_run(partial_run, "recipe"):
        assert (partial_run / LOCK).exists()
    assert not (partial_run / LOCK).exists()


@pytest.mark.parametrize("content", [b"[" * 10**5, b'{"time": ' + b"9" * 400 + b"}", b"\xff", b"3"])
def test_a_damaged_lock_is_free(memory: RemotePath, content: bytes) -> None:
    (memory / LOCK).write_bytes(content)
    with _lock(memory / LOCK, "this host"):
        assert b"this host" in (memory / LOCK).read_bytes()


def test_a_process_that_lost_the_lock_uploads_nothing(partial_run: RemotePath) -> None:
    lost = RemoteRun(partial_run, "recipe")
    lost.download()
    (lost.folder / "scores.json").write_text("{}")
    _write_heartbeat(partial_run / LOCK, "another host")
    with pytest.raises(RunError, match="another host has taken over"):
        lost.upload()
    assert not (partial_run / "scores.json").exists()


def test_heartbeats_are_written_while_a_run_is_locked(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HEARTBEAT_SECONDS", 0.01)
    lock = memory / LOCK
    with _lock(lock, "us"):
        first = lock.read_text()
        for _ in range(500):
            if lock.read_text() != first:
                break
            time.sleep(0.01)
        else:
            pytest.fail("no heartbeat")
    assert not lock.exists()


def test_a_failed_upload_is_repeated_with_the_next_one(
    memory: RemotePath, local: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with remote_run(memory / "run", "recipe") as run, pytest.MonkeyPatch.context() as patch:
        shutil.copytree(local.folder, run.folder, dirs_exist_ok=True)
        fail_uploads_after(patch, 5)
        run.try_upload()
        assert "upload failed, the files are kept in" in caplog.text
        assert finished_folds(memory / "run") == []
        patch.undo()
        run.try_upload()
        assert finished_folds(memory / "run") == ["fold-0", "fold-1"]
    assert Run(memory / "run").scores == local.scores


# The command line


def call(*arguments: Any) -> None:
    app([str(argument) for argument in arguments], standalone_mode=False)


def test_the_commands_accept_urls(
    s3: str, recipe: Recipe, local: Run, tiny_cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = as_path(s3) / "cli"
    assert isinstance(folder, RemotePath)
    found = [tiny_cohort, *(tiny_cohort.parent / "features").iterdir()]
    upload_all(found, tiny_cohort.parent, folder)
    write_text(folder / "recipe.toml", config.dump(with_data(recipe, folder)))
    with quick_scoring():
        call("train", f"{folder}/recipe.toml", "--out", f"{folder}/run", "--device", "cpu")
    assert f"caprmil predict {folder}/run BAGS" in capsys.readouterr().out
    assert Run(f"{folder}/run").scores == local.scores
    upload(found[1], folder / "new" / "a.h5")
    call("predict", f"{folder}/run", f"{folder}/new", "--out", f"{folder}/answers.csv")
    assert Predictions.read(folder / "answers.csv").slides == ("a",)
    call("status", f"{folder}/run")
    assert f"{folder}/run holds a run: 3 done." in capsys.readouterr().out
    call("evaluate", f"{folder}/run")
    call("calibrate", f"{folder}/run")
    call("compare", f"{folder}/run", f"{folder}/run/predictions.csv", "--out", f"{folder}/versus")
    assert (folder / "versus" / "comparison.md").is_file()
    call("check", f"{folder}/run", "--most", 1)
    assert "holds" in capsys.readouterr().out
    assert not Path("s3:").exists()


def test_commands_that_only_write_locally_refuse_a_url(tiny_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(config.dump(tiny_recipe))
    for arguments in (
        ("sweep", tmp_path / "a.toml", "--set", "train.epochs=1,2", "--out", "s3://lab/x"),
        ("reproduce", "bracs", "--rehearse", "--out", "s3://lab/x"),
        ("demo", "--out", "s3://lab/x"),
    ):
        with pytest.raises(StorageError, match="This command cannot write to s3://lab/x"):
            call(*arguments)
    assert not Path("s3:").exists()
