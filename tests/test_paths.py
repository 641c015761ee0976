"""Paths: a remote path behaves like a local one, and no upload is left incomplete.

The remote file systems are fsspec's memory, and S3 on a local server of moto.
"""

import pickle
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest

from caprmil.errors import CaprmilError, CohortError, StorageError
from caprmil.features import bags
from caprmil.io import tables
from caprmil.io.atomic import check_new, write_text
from caprmil.io.blocks import PartialFile, read_blocks
from caprmil.io.paths import BLOCK_BYTES, RemotePath, as_path, is_remote, upload
from remote_faults import fail_uploads_after, reset_connections

# Names


def test_a_url_survives_conversion_to_a_path() -> None:
    url = "s3://lab/runs/a.b"
    assert str(as_path(url)) == str(as_path(Path(url))) == str(as_path(as_path(url))) == url
    assert str(as_path(url) / "x.h5") == "s3://lab/runs/a.b/x.h5"
    assert str(as_path(url).parent) == "s3://lab/runs"
    assert as_path(url).with_name("y.h5") == as_path("s3://lab/runs/y.h5")
    assert str(pickle.loads(pickle.dumps(as_path(url)))) == url


@pytest.mark.parametrize("text", ["a/b.csv", "/a/b.csv", "../b", "C:/b", "./s3/b", "a:b"])
def test_a_local_path_is_a_plain_path(text: str) -> None:
    assert type(as_path(text)) is type(Path())
    assert as_path(text) == Path(text)


def test_capitals_are_accepted_and_chains_are_an_error() -> None:
    assert str(as_path("S3://lab/a")) == "s3://lab/a"
    with pytest.raises(StorageError, match="chain of file systems"):
        as_path("simplecache::s3://lab/a")


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    assert (
        as_path(f"file://{tmp_path}/x") == as_path(Path(f"file://{tmp_path}/x")) == tmp_path / "x"
    )
    assert not is_remote(f"file://{tmp_path}")
    bags.write(tmp_path / "a.h5", np.ones((3, 4)))
    assert bags.inspect(f"file://{tmp_path}/a.h5") == bags.inspect(tmp_path / "a.h5")


def test_passing_a_remote_path_to_a_library_is_a_one_line_error() -> None:
    with pytest.raises(StorageError, match=r"s3://lab/x is a remote path.*Copy it"):
        h5py.File(as_path("s3://lab/x"))


# Files


def test_a_folder_does_not_list_itself(memory: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.get_filesystem_class("memory")
    base = system._strip_protocol(str(memory))
    monkeypatch.setattr(system, "ls", lambda *_, **__: [f"{base}/", f"{base}/a"])
    assert list(memory.iterdir()) == [memory / "a"]


def test_a_remote_folder_lists_like_a_local_one(
    remote_cohort: RemotePath, tiny_cohort: Path
) -> None:
    for pattern in ("*", "*.h5", "*.csv"):
        local = [p for p in tiny_cohort.parent.rglob(pattern) if p.is_file()]
        found = {
            str(p.relative_to(remote_cohort)) for p in (remote_cohort / "features").rglob(pattern)
        }
        assert found == {
            str(p.relative_to(tiny_cohort.parent)) for p in local if p.parent.name == "features"
        }
    assert [p.name for p in remote_cohort.glob("*.csv")] == ["labels.csv"]
    assert {"labels.csv", "features"} <= {p.name for p in remote_cohort.iterdir()}
    assert (remote_cohort / "features").is_dir()
    assert not (remote_cohort / "features").is_file()
    assert (remote_cohort / "labels.csv").is_file()
    assert not (remote_cohort / "nothing").exists()


def test_a_pattern_may_contain_folders(memory: RemotePath) -> None:
    for name in ("a/x.toml", "b/x.toml", "x.toml", "a/b/x.toml", "a/y.csv"):
        write_text(memory / name, "")
    assert sorted(memory.glob("*/x.toml")) == [memory / "a/x.toml", memory / "b/x.toml"]
    assert len(list(memory.rglob("x.toml"))) == 4


def test_a_remote_text_file_is_not_overwritten(remote_cohort: RemotePath) -> None:
    write_text(remote_cohort / "texts" / "a.txt", "ä")
    assert (remote_cohort / "texts" / "a.txt").read_text() == "ä"
    with pytest.raises(CaprmilError, match="already exists"):
        write_text(remote_cohort / "texts" / "a.txt", "b")
    assert (remote_cohort / "texts" / "a.txt").read_text() == "ä"
    assert [p.name for p in (remote_cohort / "texts").iterdir()] == ["a.txt"]


def test_a_failed_upload_leaves_no_file(
    memory: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_uploads_after(monkeypatch, 0)
    with pytest.raises(StorageError, match=r"cannot be reached \(the network is gone\)"):
        bags.write(memory / "a.h5", np.ones((3, 4)))
    assert list(memory.rglob("*")) == []


def test_a_failed_multipart_upload_to_s3_leaves_no_file(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs uploads large files in several parts. The second of them fails here."""
    s3fs = pytest.importorskip("s3fs")
    call, parts = s3fs.S3FileSystem._call_s3, []

    async def fail(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if method == "upload_part":
            parts.append(1)
            if len(parts) > 1:
                raise OSError("the network is gone")
        return await call(self, method, *args, **options)

    (tmp_path / "large.bin").write_bytes(bytes(12 * 2**20))
    put = partialmethod(s3fs.S3FileSystem._put_file, chunksize=5 * 2**20)
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", fail)
    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put)
    reset_connections(monkeypatch)
    with pytest.raises(StorageError, match="the network is gone"):
        upload(tmp_path / "large.bin", as_path(s3) / "half" / "large.bin")
    assert parts
    assert not (as_path(s3) / "half").exists()


def test_the_error_of_a_missing_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageError, match=r"install gcsfs, or pip install 'caprmil\[remote\]'"):
        as_path("gs://lab/x").exists()


def test_an_unknown_protocol_is_a_one_line_error() -> None:
    with pytest.raises(StorageError, match=r"no file system for s4://\. Known: s3://"):
        as_path("s4://lab/x").exists()


def test_a_missing_bucket_is_a_one_line_error(s3: str) -> None:
    with pytest.raises(StorageError, match="s3://missing does not exist"):
        check_new("s3://missing/out.csv")
    with pytest.raises(CohortError, match=r"There is no file s3://missing/labels\.csv"):
        tables.read_table("s3://missing/labels.csv")


def test_creating_a_remote_folder_creates_no_bucket(s3: str) -> None:
    as_path("s3://missing/folder").mkdir(parents=True, exist_ok=True)
    assert not as_path("s3://missing").exists()


def test_a_file_from_a_listing_needs_no_further_request(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(memory / "a.txt", "")
    (file,) = memory.rglob("*")
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", None)
    assert file.exists()
    assert file.is_file()
    assert not file.is_dir()


def test_a_remote_file_is_not_opened_for_writing(memory: RemotePath) -> None:
    with pytest.raises(StorageError, match="cannot be opened for writing"):
        (memory / "a.txt").open("w")


def test_only_the_blocks_that_are_read_are_downloaded(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.random.default_rng(0).bytes(6 * BLOCK_BYTES + 5)
    (memory / "a.bin").write_bytes(content)
    starts, read_range = [], RemotePath.read_range

    def record(self: RemotePath, start: int, end: int) -> bytes:
        starts.append(start // BLOCK_BYTES)
        return read_range(self, start, end)

    def read(file: PartialFile) -> bytes:
        file.seek(3 * BLOCK_BYTES - 2)
        return file.read(4)

    monkeypatch.setattr(RemotePath, "read_range", record)
    found = read_blocks(memory / "a.bin", read)
    assert found == content[3 * BLOCK_BYTES - 2 : 3 * BLOCK_BYTES + 2]
    assert starts == [0, 6, 2, 3]


def test_no_network_and_no_access_are_one_line_errors(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import EndpointConnectionError

    system = fsspec.get_filesystem_class("s3")
    for problem, message in (
        (EndpointConnectionError(endpoint_url="http://x"), "cannot be reached .*Check the network"),
        (PermissionError("Access Denied"), "You have no access to"),
    ):

        async def fail(*_: Any, problem: Exception = problem, **__: Any) -> None:
            raise problem

        monkeypatch.setattr(system, "_call_s3", fail)
        path = as_path("s3://lab/features/slide_000.h5")
        for method in (path.exists, path.is_file, path.is_dir, path.read_text, path.unlink):
            with pytest.raises(StorageError, match=message):
                method()
        with pytest.raises(StorageError, match=message):
            bags.read(path)
