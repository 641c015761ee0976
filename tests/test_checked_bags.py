"""Bags that were checked once are not read again, unless their file has changed."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from caprmil.cohort.cohort_bags import inspect_bags
from caprmil.features import bags, checked_bags
from caprmil.io.findings import Findings


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Three bags that were written a while ago, of which some are read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checked_bags, "WORTHWHILE", 0)
    monkeypatch.setattr(checked_bags, "RECENT", -1.0)
    rng = np.random.default_rng(0)
    names = ("a", "b", "c")
    return {n: bags.write(tmp_path / f"{n}.h5", rng.random((9, 4), np.float32)) for n in names}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of bags that were read completely."""
    found: list[str] = []
    read = bags.read

    def recorded(path: Path) -> bags.Bag:
        found.append(path.stem)
        return read(path)

    monkeypatch.setattr(bags, "read", recorded)
    return found


def check(paths: dict[str, Path]) -> list[str]:
    """Check bags as a training does, and return what is wrong."""
    found = Findings()
    inspect_bags(paths, found, None, scan=True)
    return found.problems


def test_a_bag_is_read_once(paths: dict[str, Path], reads: list[str]) -> None:
    first = inspect_bags(paths, Findings(), None, scan=True)
    assert reads == ["a", "b", "c"]
    assert inspect_bags(paths, Findings(), None, scan=True) == first
    assert reads == ["a", "b", "c"]


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_bag_that_has_changed_is_read_again(
    paths: dict[str, Path], reads: list[str], keeps_times: bool
) -> None:
    check(paths)
    path, before = paths["b"], paths["b"].stat()
    content = bytearray(path.read_bytes())
    damaged = np.full(4, np.nan, np.float16).tobytes()
    at = content.index(bags.read(path).features[5].tobytes())
    content[at : at + len(damaged)] = damaged
    path.write_bytes(content)  # the same size, in the same file
    if keeps_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    reads.clear()
    (problem,) = check(paths)
    assert reads == ["b"]
    assert "1 of 9 patches have NaN" in problem
    check(paths)
    assert reads == ["b", "b"]  # what is broken is not remembered


def test_a_bag_that_has_just_been_written_is_not_remembered(
    paths: dict[str, Path], reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_bags, "RECENT", 60.0)
    check(paths)
    check(paths)
    assert len(reads) == 6


@pytest.mark.parametrize("text", ["", "{", "[]", '{"method": 1}', '{"method": 1, "bags": 3}'])
def test_a_damaged_memory_is_ignored(paths: dict[str, Path], reads: list[str], text: str) -> None:
    check(paths)
    (file,) = checked_bags.cache_folder().glob("checked/*.json")
    file.write_text(text)
    assert check(paths) == []
    assert len(reads) == 6


def test_a_memory_that_was_not_used_for_long_is_removed(paths: dict[str, Path]) -> None:
    other = checked_bags.cache_folder() / "checked" / "other.json"
    other.parent.mkdir(parents=True)
    other.touch()
    long_ago = time.time() - 100 * 86_400
    os.utime(other, (long_ago, long_ago))
    check(paths)
    assert not other.exists()


def test_small_cohorts_and_folders_that_cannot_be_written_are_checked_each_time(
    paths: dict[str, Path], reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check(paths)
    monkeypatch.setattr(checked_bags, "WORTHWHILE", 10**9)
    check(paths)
    assert len(reads) == 6
