"""What a crew promises: every unit is done once, tried again if its worker dies, and accounted for.

The last part needs Ray, on this machine alone. tests/test_cluster.py has two nodes.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.errors import CaprmilError, RunError
from caprmil.executors import (
    Done,
    Failed,
    Here,
    OnRay,
    Unit,
    read_notes,
)
from caprmil.executors import (
    job_status as notes,
)
from caprmil.executors import (
    ray as cluster,
)
from caprmil.executors.job_status import attended, place
from caprmil.experiments.status import read_status
from crews import Blind, Diligent, Equipped, Foresighted, Mortal, Secretive, Slow, count


def units(folder: Path, **tasks: str) -> list[Unit]:
    folder.mkdir(parents=True, exist_ok=True)
    return [Unit(name, place(folder, name), task) for name, task in tasks.items()]


def silent(*_: object) -> None:
    pass


# In this process


def test_units_are_done_in_order_and_leave_no_notes(tmp_path: Path) -> None:
    heard: list[tuple[Any, ...]] = []
    found = list(Here().do(units(tmp_path, a="", b=""), Diligent, lambda *said: heard.append(said)))
    assert [each.result for each in found if isinstance(each, Done)] == ["A", "B"]
    assert [(unit.name, *rest) for unit, *rest in heard] == [
        ("a", 1, 2, "half"),
        ("b", 1, 2, "half"),
    ]
    assert read_notes(tmp_path) == {}


def test_a_worker_may_hear_what_comes_next(tmp_path: Path) -> None:
    found = Here().do(units(tmp_path, a="", b="", c=""), Foresighted, silent)
    assert [each.result for each in found if isinstance(each, Done)] == ["b", "b,c", "b,c"]


def test_a_unit_is_not_asked_for_before_somebody_is_free(tmp_path: Path) -> None:
    asked: list[str] = []

    def coming() -> Iterator[Unit]:
        for unit in units(tmp_path, a="", b="", c=""):
            asked.append(unit.name)
            yield unit

    for number, _ in enumerate(Here().do(coming(), Diligent, silent), 1):
        assert len(asked) == number


def test_what_fails_is_told_with_its_reason_and_the_rest_goes_on(tmp_path: Path) -> None:
    found = list(Here().do(units(tmp_path, a="refuse", b="bug", c=""), Diligent, silent))
    assert [type(each) for each in found] == [Failed, Failed, Done]
    told = {name: note.reason for name, (note, _) in read_notes(tmp_path).items()}
    assert told == {"a": "This slide is broken.", "b": "TypeError: nobody thought of this"}
    assert "Traceback" in read_notes(tmp_path)["b"][0].trace


# Notes


def test_a_note_is_signed_as_long_as_somebody_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "BEAT", 0.02)
    path = place(tmp_path, "a")
    with attended(path) as tell:
        before = read_notes(tmp_path)["a"][0].signed
        await_(lambda: read_notes(tmp_path)["a"][0].signed > before)
        tell(3, 7, "epochs")
        await_(lambda: read_notes(tmp_path)["a"][0].done == 3)
    assert read_notes(tmp_path) == {}


def test_who_is_interrupted_leaves_no_note(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), attended(place(tmp_path, "a")):
        raise KeyboardInterrupt
    assert read_notes(tmp_path) == {}


def await_(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# Status


def test_a_note_of_a_process_that_is_gone_is_not_told_as_running(tmp_path: Path) -> None:
    with attended(place(tmp_path, "slide")):
        (unit,) = read_status(tmp_path).units
        assert unit.state == "running"
        assert f"process {os.getpid()}" in unit.remark
        notes.Note(state="running", signed=1.0).write(place(tmp_path, "slide"))
        (unit,) = read_status(tmp_path).units
        assert unit.state == "stopped"
        assert "no sign of life" in unit.remark


def test_a_result_counts_more_than_a_note(tmp_path: Path) -> None:
    notes.Note(state="waiting", reason="Its worker was lost.").write(place(tmp_path, "slide"))
    assert read_status(tmp_path).count() == {"waiting": 1}
    (tmp_path / "slide.h5").touch()
    assert read_status(tmp_path).count() == {"done": 1}


def test_a_folder_of_something_else_has_no_status(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(RunError, match="holds no bags, run, sweep or reproduction"):
        read_status(tmp_path)


def test_the_command_says_what_failed_and_why(tmp_path: Path) -> None:
    list(Here().do(units(tmp_path, a="refuse"), Diligent, silent))
    said = CliRunner().invoke(app, ["status", str(tmp_path)]).stdout
    assert "This slide is broken." in said
    assert "1 failed" in said


# Ray


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray"], "local"),
        (["--ray", "--device", "cpu"], "local"),
        (["--ray", "auto"], "auto"),
        (["--ray", "10.0.0.7:6379"], "10.0.0.7:6379"),
    ],
)
def test_ray_stands_alone_or_before_an_address(
    words: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caprmil.cli import studies

    asked: list[str] = []

    def find_crew(ray: str, *_: object) -> None:
        asked.append(ray)
        raise CaprmilError("enough")

    monkeypatch.setattr(studies, "find_crew", find_crew)
    CliRunner().invoke(app, ["train", *words, "--out", "run", "slides.csv"])
    assert asked == [address]


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CaprmilError, match=r'pip install "caprmil\[cluster\]"'):
        OnRay()


def test_an_address_where_nobody_listens_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CaprmilError, match=rf"no Ray cluster to be had at {address}"):
            OnRay(address).__enter__()


@pytest.fixture(scope="module")
def crew() -> Iterator[OnRay]:
    """Two workers of Ray on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = OnRay()
        options: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "log_to_driver": False,
        }
        options |= {"num_cpus": 2, "num_gpus": 1}  # Ray takes our word for it
        found.ray.init(object_store_memory=100 * 2**20, logging_level=40, **options)
        try:
            yield found
        finally:
            found.ray.shutdown()


def test_on_ray_what_dies_or_fails_is_tried_three_times_and_the_rest_goes_on(
    crew: OnRay, tmp_path: Path
) -> None:
    tasks = {"a": "", "b": "die", "c": "bug", "d": "refuse", "e": "die once", "f": ""}
    found = {each.unit.name: each for each in crew.do(units(tmp_path, **tasks), Diligent, silent)}
    results = {name: each.result for name, each in found.items() if isinstance(each, Done)}
    failures = {name: each.reason for name, each in found.items() if isinstance(each, Failed)}
    assert results == {"a": "A", "e": "E", "f": "F"}
    assert failures["c"] == "TypeError: nobody thought of this"
    assert failures["d"] == "This slide is broken."
    assert failures["b"].startswith("Its worker was lost")
    times = {name: count(tmp_path, name) for name in tasks}
    assert times == {"a": 1, "b": 3, "c": 3, "d": 1, "e": 2, "f": 1}
    told = {unit.name: unit.state for unit in read_status(tmp_path).units}
    assert told == dict.fromkeys("bcd", "failed")


def test_who_leaves_early_stops_what_is_in_work(crew: OnRay, tmp_path: Path) -> None:
    work = crew.do(units(tmp_path, **{f"u{n}": "" for n in range(50)}), Diligent, silent)
    next(iter(work))
    work.close()  # type: ignore[attr-defined]
    assert read_notes(tmp_path) == {}
    assert len((tmp_path / "begun.txt").read_text().split()) < 50


def test_a_worker_that_cannot_be_hired_is_an_error_that_says_why(
    crew: OnRay, tmp_path: Path
) -> None:
    with pytest.raises(CaprmilError, match=r"No worker can start\. There is no encoder here"):
        list(crew.do(units(tmp_path, a=""), Blind, silent))


def test_on_ray_a_worker_hears_what_comes_next_but_for_the_last(
    crew: OnRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "workers", 1)
    found = crew.do(units(tmp_path, a="", b="", c=""), Foresighted, silent)
    assert [each.result for each in found if isinstance(each, Done)] == ["b", "b,c", "b,c"]


def test_what_a_dead_worker_had_coming_is_done_by_another(crew: OnRay, tmp_path: Path) -> None:
    tasks = {"a": "die", **dict.fromkeys("bcdef", "")}
    found = list(crew.do(units(tmp_path, **tasks), Mortal, silent))
    assert {each.unit.name for each in found if isinstance(each, Done)} == set("bcdef")
    assert [each.unit.name for each in found if isinstance(each, Failed)] == ["a"]


def test_what_comes_after_a_long_unit_is_done_by_whoever_is_free(
    crew: OnRay, tmp_path: Path
) -> None:
    tasks = {"long": "3", **dict.fromkeys("bcdefg", "")}
    found = list(crew.do(units(tmp_path, **tasks), Slow, silent))
    assert [each.unit.name for each in found][-1] == "long"
    assert sorted(each.unit.name for each in found if isinstance(each, Done)) == sorted(tasks)
    assert all(count(tmp_path, name) == 1 for name in tasks)


def test_a_result_that_cannot_be_sent_is_a_failure_after_three_tries(
    crew: OnRay, tmp_path: Path
) -> None:
    (found,) = crew.do(units(tmp_path, a=""), Secretive, silent)
    assert isinstance(found, Failed)
    assert found.attempts == 3
    assert read_status(tmp_path).count() == {"failed": 1}


def test_workers_share_a_gpu_and_have_cores_beside_it(
    crew: OnRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "gpus", 0.5)
    found = crew.do(units(tmp_path, a="", b=""), Equipped, silent)
    assert {each.result for each in found if isinstance(each, Done)} == {"gpu 0"}
    assert crew.room() == 2
    monkeypatch.setattr(crew, "gpus", 0.1)
    assert crew.room() == 2, "there are two cores"
    monkeypatch.setattr(crew, "cpus", lambda: 0.1)
    assert crew.room() == 10
    monkeypatch.setattr(crew, "gpus", 0.6)
    assert crew.room() == 1, "a share of one GPU is not of two"
    monkeypatch.undo()
    monkeypatch.setattr(crew, "gpus", 1.0)
    monkeypatch.setattr(crew, "readers", 2)
    assert (crew.cpus(), crew.room()) == (2, 1)


def test_a_worker_larger_than_any_node_is_refused(
    crew: OnRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.OnRay, "cpus", lambda _: 999)
    with pytest.raises(CaprmilError, match="No node of the cluster has 999 cores"):
        list(crew.do(units(tmp_path, a=""), Diligent, silent))
