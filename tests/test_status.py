"""The status of a folder: read from its files, without torch, from any machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.errors import RunError
from caprmil.executors.job_status import JobStatus, heartbeat, status_path
from caprmil.experiments.status import read_status
from caprmil.io.json_files import as_json
from caprmil.runs.run import Run

SWEEP = """search = "grid"
[axes]
"model.tokens" = "2,4,8,16"
"""


def write_sweep(folder: Path) -> None:
    """Write a grid of four points: done, pruned, stopped, and one without a folder."""
    for name in (2, 4, 8):
        (folder / f"points/tokens={name}").mkdir(parents=True)
    (folder / "sweep.toml").write_text(SWEEP)
    (folder / "points/tokens=2/scores.json").touch()
    (folder / "points/tokens=4/pruned.json").write_text(as_json({"fold": "fold-1", "epoch": 7}))


def test_a_task_whose_process_is_gone_is_not_shown_as_running(tmp_path: Path) -> None:
    with heartbeat(status_path(tmp_path, "slide")):
        (task,) = read_status(tmp_path).tasks
        assert task.state == "running"
        assert f"process {os.getpid()}" in task.detail
        JobStatus(state="running", last_heartbeat=1.0).write(status_path(tmp_path, "slide"))
        (task,) = read_status(tmp_path).tasks
        assert task.state == "stopped"
        assert "no heartbeat" in task.detail


def test_a_result_takes_precedence_over_a_status_file(tmp_path: Path) -> None:
    JobStatus(state="waiting", reason="Its worker was lost.").write(status_path(tmp_path, "slide"))
    assert read_status(tmp_path).count() == {"waiting": 1}
    (tmp_path / "slide.h5").touch()
    assert read_status(tmp_path).count() == {"done": 1}


def test_a_folder_of_something_else_has_no_status(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(RunError, match="holds no bags, run, sweep or reproduction"):
        read_status(tmp_path)


def test_the_status_of_a_run_and_of_a_reproduction_names_every_fold(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = tmp_path / "runs/mean"
    shutil.copytree(tiny_run.folder, run)
    assert read_status(run).count() == {"done": 4}
    (run / "scores.json").unlink()
    (run / "folds/fold-2").rename(run / "folds/.fold-2.part")
    shutil.rmtree(run / "folds/fold-1")
    states = {task.name: task.state for task in read_status(run.parent).tasks}
    assert states == {
        "mean/fold-0": "done",
        "mean/fold-1": "to do",
        "mean/fold-2": "stopped",
        "mean/scores": "to do",
    }
    (run / "splits.json").unlink()
    assert read_status(run).count() == {"to do": 1}


def test_the_status_of_a_sweep_names_every_point_of_its_grid(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    tasks = {task.name: (task.state, task.detail) for task in read_status(tmp_path).tasks}
    assert tasks == {
        "tokens=2": ("done", ""),
        "tokens=4": ("pruned", "fold-1, after epoch 7"),
        "tokens=8": ("stopped", "resumes from its last epoch"),
        "tokens=16": ("to do", ""),
    }
    (tmp_path / "sweep.png").touch()  # it was finished with --trials 3
    assert "to do" not in read_status(tmp_path).count()


def test_a_search_or_a_grid_beyond_the_limit_has_only_the_points_that_were_started(
    tmp_path: Path,
) -> None:
    write_sweep(tmp_path)
    numbers = ",".join(map(str, range(1000)))
    for plan in (SWEEP.replace("grid", "random"), SWEEP.replace("2,4,8,16", numbers)):
        (tmp_path / "sweep.toml").write_text(plan)
        assert len(read_status(tmp_path).tasks) == 3


def test_the_status_command_shows_what_failed_and_why(tmp_path: Path) -> None:
    failed = JobStatus(state="failed", reason="This slide is broken.")
    failed.write(status_path(tmp_path, "slide"))
    output = CliRunner().invoke(app, ["status", str(tmp_path)]).stdout
    assert "This slide is broken." in output
    assert "1 failed" in output


def test_a_status_is_read_without_torch_and_optuna(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    program = """
import sys
from caprmil.cli import app
from caprmil.experiments.status import read_status
read_status(sys.argv[1])
print({"torch", "lightning", "optuna"} & {*sys.modules})
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_folds_of_the_mean_beside_a_model_are_tasks_of_its_run(
    tiny_run: Run, tmp_path: Path
) -> None:
    run = shutil.copytree(tiny_run.folder, tmp_path / "run")
    mean = shutil.copytree(tiny_run.folder, run / "mean")
    (run / "scores.json").unlink()
    shutil.rmtree(mean / "folds" / "fold-2")
    states = {task.name: task.state for task in read_status(run).tasks}
    assert states["mean/fold-1"] == "done"
    assert states["mean/fold-2"] == "to do"
    assert "mean/scores" not in states  # only its predictions are needed
    assert list(states)[-1] == "scores"
