"""Projected patches in a temporary file: the same bits, and nothing is left of it."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_forms import check, make_model
from torch import Tensor

from caprmil.models import spool, streaming
from caprmil.models.spool import Spool, is_in_memory

CHUNKS = [torch.randn(5, 8, generator=torch.Generator().manual_seed(n)) for n in range(4)]


class Source:
    """Chunks that count how often they are read."""

    passes = 0

    def __call__(self) -> Iterator[Tensor]:
        self.passes += 1
        return iter(CHUNKS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spool, "is_in_memory", lambda _: False)
    monkeypatch.setattr(spool, "RESERVE", 0)
    return tmp_path


def same(found: Iterator[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, CHUNKS, strict=True))


def test_the_source_is_read_once_and_the_file_has_no_name(folder: Path) -> None:
    source = Source()
    kept = Spool(source)
    assert all(same(kept()) for _ in range(3))
    assert same(one for one, _ in zip(kept(), kept(), strict=True))  # two passes at once
    assert source.passes == 1
    assert list(folder.iterdir()) == []


def test_a_pass_that_ends_early_is_repeated_from_the_source() -> None:
    source = Source()
    kept = Spool(source)
    next(kept())
    assert same(kept())
    assert same(kept())
    assert source.passes == 2


def test_without_space_each_pass_reads_the_source(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    source = Source()
    monkeypatch.setattr(spool, "RESERVE", 2**60)
    kept = Spool(source)
    assert same(kept())
    assert same(kept())
    assert source.passes == 2
    monkeypatch.setattr(spool, "is_in_memory", lambda _: True)  # the files of TMPDIR take memory
    assert same(Spool(source)())
    assert list(folder.iterdir()) == []


def test_a_disk_that_is_full_in_the_middle_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        written = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def write(self, data: memoryview) -> int:
            self.written += 1
            return len(data) if self.written < 3 else 10

        def close(self) -> None:
            raise OSError

    source = Source()
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    kept = Spool(source)
    assert same(kept())
    assert same(kept())
    assert source.passes == 2


def test_the_file_is_closed_with_the_bag() -> None:
    kept = Spool(Source())
    assert same(kept())
    file = kept.file
    assert file is not None
    del kept
    gc.collect()
    assert file.closed


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="Linux")
def test_nothing_is_left_after_a_kill(folder: Path) -> None:
    script = (
        "import tempfile, torch, time; from caprmil.models import spool;"
        "spool.is_in_memory = lambda _: False; spool.RESERVE = 0;"
        "kept = spool.Spool(lambda: [torch.ones(5, 8)]); list(kept()); assert kept.complete;"
        "print('kept', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "kept\n"
        process.send_signal(signal.SIGKILL)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pool", ["mean", "gated"])
def test_a_streamed_bag_is_the_same_from_its_file(
    depth: int, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bag = make_model(depth=depth, pool=pool).eval(), torch.randn(1, 30, 24).double()
    reads = []

    def chunks() -> Iterator[Tensor]:
        reads.append(1)
        return iter(bag.split(7, dim=1))

    outputs = []
    for times in (1, 100):  # 24 features are more than once the width of 16, not 100 times
        monkeypatch.setattr(streaming, "SPOOLED", times)
        outputs.append(model.stream(chunks))
    check(*outputs)
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert len(reads) == 1 + (depth + 1)


def test_an_unfinished_pass_adds_nothing_to_a_later_one() -> None:
    kept = Spool(Source())
    assert same(one for one, _ in zip(kept(), kept(), strict=True))  # two first passes at once
    assert same(kept())


def test_chunks_without_rows_are_left_out() -> None:
    kept = Spool(lambda: iter([CHUNKS[0], CHUNKS[0][:0], *CHUNKS[1:]]))
    assert len(list(kept())) == 5
    assert same(kept())


def test_without_a_folder_for_temporary_files_each_pass_reads_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_folder() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    monkeypatch.setattr("caprmil.io.leftovers.gettempdir", no_folder)
    source = Source()
    kept = Spool(source)
    assert all(same(kept()) for _ in range(2))
    assert source.passes == 2


def test_a_folder_in_memory_is_told_from_one_on_a_disk(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(b"/dev/a / ext4 rw\nnone /quick tmpfs rw\n/dev/b /quick/disk ext4 \xff\n")
    for name, expected in (("/a", False), ("/quick/a", True), ("/quick/disk/a", False)):
        assert is_in_memory(Path(name), mounts) == expected
    assert not is_in_memory(Path("/a"), tmp_path / "none")
