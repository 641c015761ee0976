"""Leftovers of killed processes are removed, and nothing else is."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from caprmil.errors import RunError
from caprmil.io import leftovers
from caprmil.io.atomic import atomic_write, check_new
from caprmil.io.leftovers import clear_leftovers, final_name, temporary_folder, temporary_name
from caprmil.report import write_run_report
from caprmil.runs import slide_covariates
from caprmil.runs.facts import EARLY
from caprmil.runs.run import Run
from caprmil.training import run_folder
from caprmil.training.cross_validation import cross_validate
from caprmil.training.distributed import ProcessGroup
from caprmil.training.early_checks import check_folder
from caprmil.training.recipe import Recipe
from caprmil.training.trainer import make_trainer

WRITER = """
import sys, time
from caprmil.io.atomic import atomic_write
from caprmil.io.leftovers import temporary_folder
with temporary_folder(), atomic_write(sys.argv[1]) as file:
    file.write_text("half")
    print(file, flush=True)
    time.sleep(60)
"""


def start_writer(path: Path) -> "subprocess.Popen[str]":
    """Start a process that has written half of a file, and waits."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert Path(writer.stdout.readline().strip()).exists()
    return writer


def dead_name(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A temporary name of a process that does not exist."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 999_999_999)
        return temporary_name(name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_leftovers_of_a_killed_process_are_removed_and_those_of_a_running_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, out = tmp_path / "tmp", tmp_path / "out"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with start_writer(out / "a.txt") as writer:
        clear_leftovers(out)
        leftovers.clear_temporary_folders()
        found = names(out), names(scratch)
        writer.send_signal(signal.SIGKILL)
    assert [len(each) for each in found] == [1, 1]
    clear_leftovers(out)
    with temporary_folder() as own:
        assert (names(out), names(scratch)) == ([], [Path(own).name])


def test_nothing_that_a_user_made_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [
        "a.h5",
        ".mine.a.h5",
        ".caprmil-notes",
        ".caprmil-0-1-2.a.h5",
        "caprmil-runs",
        ".0123abcd.a",
    ]
    for name in mine:
        (tmp_path / name).touch()
    (tmp_path / dead_name("a.h5", monkeypatch)).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / dead_name("folder", monkeypatch)).mkdir()
    clear_leftovers(tmp_path, locked=True)
    assert names(tmp_path) == sorted([*mine, "deep"])
    assert names(tmp_path / "deep") == []


def test_leftovers_of_another_machine_are_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "_machine", lambda: "0123abcd")
        new, old = (tmp_path / temporary_name(name) for name in ("new", "old"))
    for path in (new, old):
        path.touch()
    yesterday = time.time() - 2 * leftovers.ABANDONED_SECONDS
    os.utime(old, (yesterday, yesterday))
    clear_leftovers(tmp_path)
    assert names(tmp_path) == [new.name]
    clear_leftovers(tmp_path, locked=True)
    assert names(tmp_path) == []


def test_a_temporary_name_has_the_final_one(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "a.b.txt") as file:
        file.touch()
        assert final_name(file) == "a.b.txt"
    assert final_name(tmp_path / "a.b.txt") is None


def test_a_check_before_long_work_removes_what_a_killed_writer_of_the_same_file_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dead_name("b.a.txt", monkeypatch)
    (tmp_path / other).touch()
    (tmp_path / dead_name("a.txt", monkeypatch)).touch()
    check_new(tmp_path / "a.txt")
    assert names(tmp_path) == [other]


def test_a_run_that_was_killed_at_its_first_file_starts_again(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / dead_name("recipe.toml", monkeypatch)).touch()
    check_folder(tmp_path, tiny_recipe)
    assert names(tmp_path) == []


def test_the_recipe_is_the_first_file_of_a_run_so_that_a_kill_at_any_other_can_be_resumed(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = tmp_path / "vectors.csv"
    rows = [f"slide_{n:03d},{n % 5},{n % 3}" for n in range(24)]
    vectors.write_text("\n".join(["slide,a,b", *rows]))
    recipe = replace(tiny_recipe, data=replace(tiny_recipe.data, vectors=str(vectors)))
    written: list[str] = []

    def killed(path: Path, **_: object) -> None:
        written.append(path.name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for module in (run_folder, slide_covariates):
            for name in {"atomic_write", "write_text"} & vars(module).keys():
                patch.setattr(module, name, lambda path, *_, **__: killed(path))
        with pytest.raises(KeyboardInterrupt):
            cross_validate(recipe, tmp_path / "run", device="cpu", progress=False)
    assert written == ["recipe.toml"]


@pytest.mark.parametrize("name", EARLY)
def test_what_is_written_before_the_recipe_does_not_make_a_folder_somebody_elses(
    tiny_recipe: Recipe, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).touch()
    check_folder(tmp_path, tiny_recipe)


def test_a_folder_of_a_user_with_a_leftover_in_it_is_still_refused_and_not_touched(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / dead_name("recipe.toml", monkeypatch)).touch()
    (tmp_path / "thesis.txt").touch()
    before = names(tmp_path)
    with pytest.raises(RunError, match="exists and is not a run"):
        check_folder(tmp_path, tiny_recipe)
    assert names(tmp_path) == before


@pytest.mark.slow
def test_a_report_removes_what_a_killed_report_left(tiny_run: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_run.folder, tmp_path / "run")
    slides = copy / "report" / "slides"
    slides.mkdir(parents=True)
    left = slides / temporary_name("slide_004.html").replace(f"-{os.getpid()}-", "-999999999-")
    beside = copy / temporary_name("flips.json").replace(f"-{os.getpid()}-", "-999999999-")
    mine = slides / ".mine.html"
    for file in (left, beside, mine):
        file.touch()
    write_run_report(Run(copy), slides=0, device="cpu")
    assert not left.exists()
    assert not beside.exists()
    assert mine.exists()


def test_a_checkpoint_is_written_to_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a temporary file elsewhere, which a killed process would leave")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    options = {"epochs": 1, "precision": "fp32", "clip": 0.0, "callbacks": (), "loggers": ()}
    trainer = make_trainer(ProcessGroup("cpu"), **options)  # type: ignore[arg-type]
    trainer.strategy.checkpoint_io.save_checkpoint({"a": torch.ones(2)}, tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["a"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
