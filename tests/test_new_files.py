"""Files that belong together appear together, and a killed command is completed by the same one."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caprmil import cli
from caprmil.errors import CaprmilError
from caprmil.io.new_files import DIGESTS, check_new_files, new_files
from caprmil.runs.run import Run

NAMES = ("a.txt", "deep/b.txt", "c.txt")

KILL = """
import os, signal, sys
count, root = int(sys.argv[1]), sys.argv[2] + os.sep

def watch(event, values):
    global count
    if event == "os.rename" and str(values[1]).startswith(root):
        count -= "/.caprmil-" not in str(values[1])
        if not count:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
"""  # before the n-th file gets its name

WRITE = """
from pathlib import Path
from caprmil.io.new_files import new_files
with new_files(sys.argv[2], sys.argv[3:]) as folder:
    for name in sys.argv[3:]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
"""

COMMAND = """
from caprmil.cli import run
run([*sys.argv[3:], "--out", sys.argv[2]])
"""


def kill(script: str, count: int, *words: object) -> None:
    command = [sys.executable, "-c", KILL + script, str(count), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -9, done.stderr


def write(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    with new_files(folder, names) as new:
        for name in names:
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(name)


def contents(folder: Path) -> dict[str, str]:
    """The content of every file, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def names_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


WHOLE = {name: name for name in NAMES}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_writer_killed_at_any_file_is_completed_by_the_next(tmp_path: Path, count: int) -> None:
    kill(WRITE, count, tmp_path, *NAMES)
    assert len(WHOLE.keys() & contents(tmp_path)) == count - 1
    write(tmp_path)
    assert contents(tmp_path) == WHOLE
    assert names_of(tmp_path) == {*NAMES, "deep"}
    with pytest.raises(CaprmilError, match="already exists"):  # it is complete now
        write(tmp_path)


def test_a_file_that_a_user_changed_or_made_after_a_kill_stays(tmp_path: Path) -> None:
    kill(WRITE, 3, tmp_path, *NAMES)
    (tmp_path / "a.txt").write_text("mine")
    (tmp_path / "c.txt").write_text("mine")
    with pytest.raises(CaprmilError, match=r"a\.txt already exists"):
        write(tmp_path)
    assert contents(tmp_path) == {"a.txt": "mine", "c.txt": "mine"}


def test_another_command_leaves_the_files_of_a_killed_one(tmp_path: Path) -> None:
    kill(WRITE, 2, tmp_path, *NAMES)
    write(tmp_path, ("other.txt",))
    write(tmp_path)
    assert contents(tmp_path) == {**WHOLE, "other.txt": "other.txt"}


def test_a_list_of_files_outside_of_the_folder_removes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(tmp_path, ("mine.txt",))
    kill(WRITE, 1, folder, *NAMES)
    (hidden,) = folder.glob(f".caprmil-*/{DIGESTS}")
    outside = ("../mine.txt", str(tmp_path / "mine.txt"), "deep/../../mine.txt")
    hidden.write_text(json.dumps(dict.fromkeys(outside, sha256(b"mine.txt").hexdigest())))
    check_new_files(folder, NAMES)
    assert (tmp_path / "mine.txt").read_text() == "mine.txt"


def test_nothing_appears_if_the_writing_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with new_files(tmp_path, NAMES) as new:
            (new / "a.txt").write_text("a")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_meanwhile_stays_and_the_others_do_not_appear(tmp_path: Path) -> None:
    def meet() -> None:
        with new_files(tmp_path, ("a.txt", "c.txt")) as new:
            for name in ("a.txt", "c.txt"):
                (new / name).write_text("ours")
            (tmp_path / "c.txt").write_text("mine")

    with pytest.raises(CaprmilError, match=r"c\.txt already exists"):
        meet()
    assert contents(tmp_path) == {"c.txt": "mine"}


COST = ("cost", "--models", "mean", "--patches", "20", "--features", "16", "--repeats", "1")
COMMANDS: dict[str, tuple[int, Callable[[Path, Path], list[object]]]] = {
    "compare": (2, lambda run, _: ["compare", run / "predictions.csv", run / "again.csv"]),
    "cost": (4, lambda *_: [*COST, "--device", "cpu"]),  # its first is commands.txt
    "paper": (3, lambda _, folder: ["paper", folder / "costs"]),
    "report": (2, lambda run, _: ["report", run, "--slides", "1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_killed_between_two_of_its_files_is_completed_by_itself(
    tiny_run: Run, tmp_path: Path, name: str
) -> None:
    run = Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    shutil.copy(run / "predictions.csv", run / "again.csv")
    if name == "paper":
        invoke(*COST, "--device", "cpu", "--out", tmp_path / "costs")
    count, words = COMMANDS[name]
    command = words(run, tmp_path)
    kill(COMMAND, count, tmp_path / "out", *command)
    half = names_of(tmp_path / "out")
    invoke(*command, "--out", tmp_path / "out")
    invoke(*command, "--out", tmp_path / "undisturbed")
    whole = names_of(tmp_path / "undisturbed")
    assert names_of(tmp_path / "out") == whole
    shown = {path for path in half if not path.startswith(".")}
    assert shown
    assert shown < whole


def invoke(*words: object) -> None:
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
