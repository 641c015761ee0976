"""A full disk, a quota, a limit or a read-only folder: one line, and nothing half-written."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caprmil.cli import run
from caprmil.errors import CaprmilError
from caprmil.features import bags
from caprmil.features.convert import FORMATS, convert
from caprmil.io.output_stream import create_hdf5
from caprmil.runs.run import Run


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write files beyond a size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_bag(folder: Path, n: int = 4000) -> Path:
    """Write a bag of 1 MB that can be converted to every format."""
    cells = np.stack([np.arange(n) % 64, np.arange(n) // 64], axis=1)
    return bags.write(
        folder / "slide.h5",
        np.random.default_rng(0).normal(size=(n, 128)),
        cells * 512,
        encoder="uni",
        mpp=0.5,
        scale_rule="exact",
        patch_px=256,
        patch_level0=512.0,
        step=512.0,
        slide_mpp=0.25,
        slide_size=(64 * 512, 64 * 512),
    )


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("size", [1, 3000, 500_000])
def test_a_conversion_without_space_is_an_error_of_one_line_and_leaves_nothing(
    tmp_path: Path, to: str, size: int
) -> None:
    bag, out = write_bag(tmp_path / "in"), tmp_path / "out"
    with largest_file(size):
        done = convert({"slide": bag}, out, to)
    assert "cannot be written (File too large)" in done.failed["slide"]
    assert "\n" not in done.failed["slide"]
    assert not any(path.stat().st_size > size or path.name[0] == "." for path in files(out))
    assert convert({"slide": bag}, out, to).failed == {}  # with space again, it is completed


def test_the_process_survives_until_its_end(tmp_path: Path) -> None:
    """HDF5 ended it with a segmentation fault, at the latest when Python exits."""
    bag, out = write_bag(tmp_path / "in"), tmp_path / "out"
    command = [sys.executable, "-m", "caprmil", "convert", str(bag), "--to", "stamp"]
    found = subprocess.run(
        [*command, "--out", str(out)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert "cannot be written (File too large)" in found.stderr
    assert files(out) == []


def test_an_hdf5_file_is_what_h5py_writes_itself(tmp_path: Path) -> None:
    arrays = {"a": np.random.default_rng(0).normal(size=(1000, 30)), "b": np.arange(10)}
    with create_hdf5(tmp_path / "ours.h5") as (file, check):
        for name, values in arrays.items():
            file.create_dataset(name, data=values, chunks=(5, 30) if name == "a" else None)
        file.attrs["text"] = "x" * 1000
        check()
    with h5py.File(tmp_path / "ours.h5") as file:
        assert file.attrs["text"] == "x" * 1000
        for name, values in arrays.items():
            np.testing.assert_array_equal(file[name], values)


def test_a_long_work_is_stopped_by_the_first_error(tmp_path: Path) -> None:
    info = bags.BagInfo(
        path=tmp_path / "slide.h5", kind="caprmil", n_patches=100, width=1000, dtype="float32"
    )
    appended = 0

    def write() -> None:
        nonlocal appended
        with largest_file(100_000), bags.writing(info, None) as append:
            for _ in range(100):
                append(np.ones((1, 1000), np.float32))
                appended += 1

    with pytest.raises(CaprmilError, match=r"slide\.h5 cannot be written"):
        write()
    assert appended < 50
    assert files(tmp_path) == []


@pytest.mark.slow
def test_without_a_folder_for_temporary_files_a_command_ends_in_one_line(tiny_run: Run) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "caprmil", "push", str(tiny_run.folder), "lab/run"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: No folder for temporary files can be written.")


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EFBIG"])
def test_any_command_without_space_ends_in_one_line(
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        number = getattr(errno, code)
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))

    monkeypatch.setattr("caprmil.features.convert.convert", fail)
    with pytest.raises(SystemExit, match="2"):
        run(["convert", str(write_bag(tmp_path)), "--to", "stamp", "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1].startswith(f"error: {tmp_path / 'x'} cannot be written (")
