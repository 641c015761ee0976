"""The lock of an experiment's folder: a second process waits, and finds the work done."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from caprmil.experiments.folder_lock import hold_folder
from caprmil.synthetic import BenchmarkCohort


def test_a_second_one_waits_for_the_first_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entered, order = Event(), []

    def second() -> None:
        entered.wait()
        with hold_folder(tmp_path / "out"):
            order.append("second")

    with ThreadPoolExecutor(1) as other, caplog.at_level(logging.WARNING, "caprmil"):
        with hold_folder(tmp_path / "out"):
            waiting = other.submit(second)
            entered.set()
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            order.append("first")
        waiting.result()
    assert order == ["first", "second"]
    assert "Another process is working in" in caplog.text


def test_two_at_once_write_one_cohort(tmp_path: Path) -> None:
    together = Barrier(2)

    def write(_: int) -> Path:
        together.wait()
        with hold_folder(tmp_path):
            return BenchmarkCohort(protocol="camelyon16").write(tmp_path / "stand-in")

    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(write, range(2))) == {tmp_path / "stand-in" / "labels.csv"}
