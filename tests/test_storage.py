"""What storage promises: what is elsewhere reads as if it were here, and nothing is there by half.

Elsewhere is fsspec's memory, and S3 as a server of moto speaks it, over a socket.
"""

import pickle
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest

from caprmil import config, figures
from caprmil.cli import app
from caprmil.cohort import cohort
from caprmil.errors import (
    BagError,
    CaprmilError,
    CohortError,
    RunError,
    SlideError,
    StorageError,
)
from caprmil.evaluation import predictions
from caprmil.evaluation.predictions import Predictions
from caprmil.executors.job_status import JobStatus, heartbeat, status_path
from caprmil.experiments.status import read_status
from caprmil.features import bags
from caprmil.features.extract import Extraction
from caprmil.features.settings import ExtractionConfig, hash_slide_file
from caprmil.io import tables
from caprmil.io.atomic import check_new, write_text
from caprmil.io.paths import RemotePath, as_path, is_remote, upload, upload_all, write_small
from caprmil.runs import remote
from caprmil.runs.remote import (
    LOCK,
    Mirror,
    _held,
    _sign,
    cache,
    finished_folds,
    mirrored,
)
from caprmil.runs.run import Run
from caprmil.slides.patches import PatchConfig
from caprmil.slides.slide import Slide, find_slides
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe, read_recipe
from test_extraction import Colour, save, section

SLOWLY = pytest.param("s3", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of a server that speaks S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="lab")
        yield "s3://lab"
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own; and no pictures and few draws, since others test them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(figures, "save", lambda _, path, **__: path.touch())
        patch.setattr(predictions, "summary", partial(predictions.summary, draws=5))
        yield
        fsspec.get_filesystem_class("memory").store.clear()


@pytest.fixture(scope="module", params=["memory", "s3"])
def lab(request: pytest.FixtureRequest, tiny_cohort: Path) -> RemotePath:
    """A place elsewhere, with the tiny cohort in it."""
    url = "memory://lab" if request.param == "memory" else request.getfixturevalue("s3")
    folder = as_path(url)
    assert isinstance(folder, RemotePath)
    found = [tiny_cohort, *(tiny_cohort.parent / "features").iterdir()]
    upload_all(found, tiny_cohort.parent, folder)
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> RemotePath:
    folder = as_path(f"memory://{tmp_path.name}")
    assert isinstance(folder, RemotePath)
    return folder


def away(recipe: Recipe, lab: Path) -> Recipe:
    """The tiny recipe with two folds of one epoch, on what is elsewhere."""
    return replace(
        recipe,
        cohort=str(lab / "labels.csv"),
        features=str(lab / "features"),
        train=replace(recipe.train, epochs=1, warmup_epochs=0),
        splits=replace(recipe.splits, folds=2),
        loggers={},
    )


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Recipe, tiny_cohort: Path) -> Recipe:
    """The tiny recipe with two folds of one epoch, on what is here."""
    return away(tiny_recipe, tiny_cohort.parent)


@pytest.fixture(scope="module")
def local(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of it here."""
    return train(recipe, tmp_path_factory.mktemp("local") / "run")


def train(recipe: Recipe, out: Path) -> Run:
    return cross_validate(recipe, out, device="cpu", progress=False)


def shell(*words: Any) -> None:
    app([str(word) for word in words], standalone_mode=False)


def fail_after(patch: pytest.MonkeyPatch, puts: int) -> None:
    """Let uploads to memory fail when so many files are there, in the midst of the next."""
    system = fsspec.get_filesystem_class("memory")
    put, left = system.put_file, [puts]

    def put_file(self: Any, local: str, path: str, **words: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            self.pipe_file(path, Path(local).read_bytes()[:10])
            raise OSError("the network is gone")
        put(self, local, path, **words)

    patch.setattr(system, "put_file", put_file)


def anew(patch: pytest.MonkeyPatch) -> None:
    """Forget connections to S3, which keep the methods they were made with."""
    system = fsspec.get_filesystem_class("s3")
    system.clear_instance_cache()
    patch.setattr(system, "_cache", {})


# Names


def test_a_url_that_was_a_path_in_between_is_itself_again() -> None:
    url = "s3://lab/runs/a.b"
    assert str(as_path(url)) == str(as_path(Path(url))) == str(as_path(as_path(url))) == url
    assert str(as_path(url) / "x.h5") == "s3://lab/runs/a.b/x.h5"
    assert str(as_path(url).parent) == "s3://lab/runs"
    assert as_path(url).with_name("y.h5") == as_path("s3://lab/runs/y.h5")
    assert str(pickle.loads(pickle.dumps(as_path(url)))) == url


@pytest.mark.parametrize("word", ["a/b.csv", "/a/b.csv", "../b", "C:/b", "./s3/b", "a:b"])
def test_a_plain_path_stays_plain(word: str) -> None:
    assert type(as_path(word)) is type(Path())
    assert as_path(word) == Path(word)


def test_capitals_are_understood_and_chains_are_refused() -> None:
    assert str(as_path("S3://lab/a")) == "s3://lab/a"
    with pytest.raises(StorageError, match="chain of storages"):
        as_path("simplecache::s3://lab/a")


def test_a_folder_that_lists_itself_is_empty(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = fsspec.get_filesystem_class("memory")
    base = system._strip_protocol(str(memory))
    monkeypatch.setattr(system, "ls", lambda *_, **__: [f"{base}/", f"{base}/a"])
    assert list(memory.iterdir()) == [memory / "a"]


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    assert (
        as_path(f"file://{tmp_path}/x") == as_path(Path(f"file://{tmp_path}/x")) == tmp_path / "x"
    )
    assert not is_remote(f"file://{tmp_path}")
    bags.write(tmp_path / "a.h5", np.ones((3, 4)))
    assert bags.inspect(f"file://{tmp_path}/a.h5") == bags.inspect(tmp_path / "a.h5")


def test_what_only_a_local_file_can_do_is_one_line() -> None:
    with pytest.raises(StorageError, match=r"s3://lab/x is not on this machine.*Copy it"):
        h5py.File(as_path("s3://lab/x"))


# Files


def test_a_folder_elsewhere_lists_like_a_local_one(lab: RemotePath, tiny_cohort: Path) -> None:
    for pattern in ("*", "*.h5", "*.csv"):
        local = [p for p in tiny_cohort.parent.rglob(pattern) if p.is_file()]
        found = {str(p.relative_to(lab)) for p in (lab / "features").rglob(pattern)}
        assert found == {
            str(p.relative_to(tiny_cohort.parent)) for p in local if p.parent.name == "features"
        }
    assert [p.name for p in lab.glob("*.csv")] == ["labels.csv"]
    assert {"labels.csv", "features"} <= {p.name for p in lab.iterdir()}
    assert (lab / "features").is_dir()
    assert not (lab / "features").is_file()
    assert (lab / "labels.csv").is_file()
    assert not (lab / "nothing").exists()


def test_a_unit_in_work_elsewhere_is_told_and_so_is_one_that_was_left(memory: RemotePath) -> None:
    with heartbeat(status_path(memory, "slide")):
        assert read_status(str(memory)).count() == {"running": 1}
        JobStatus(state="running", last_heartbeat=1.0).write(status_path(memory, "slide"))
        assert read_status(memory).count() == {"stopped": 1}
    write_text(memory / "qc.csv", "")
    assert read_status(memory).count() == {}


def test_a_pattern_may_name_folders_elsewhere_too(memory: RemotePath) -> None:
    for name in ("a/x.toml", "b/x.toml", "x.toml", "a/b/x.toml", "a/y.csv"):
        write_text(memory / name, "")
    assert sorted(memory.glob("*/x.toml")) == [memory / "a/x.toml", memory / "b/x.toml"]
    assert len(list(memory.rglob("x.toml"))) == 4


def test_a_text_is_written_once_and_never_over_another(lab: RemotePath) -> None:
    write_text(lab / "texts" / "a.txt", "ä")
    assert (lab / "texts" / "a.txt").read_text() == "ä"
    with pytest.raises(CaprmilError, match="already exists"):
        write_text(lab / "texts" / "a.txt", "b")
    assert (lab / "texts" / "a.txt").read_text() == "ä"
    assert [p.name for p in (lab / "texts").iterdir()] == ["a.txt"]


def test_an_upload_that_fails_half_way_leaves_nothing(
    memory: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(monkeypatch, 0)
    with pytest.raises(StorageError, match=r"cannot be reached \(the network is gone\)"):
        bags.write(memory / "a.h5", np.ones((3, 4)))
    assert list(memory.rglob("*")) == []


def test_an_upload_to_s3_that_fails_half_way_leaves_nothing(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several parts, as s3fs does with large files, and the second of them fails."""
    s3fs = pytest.importorskip("s3fs")
    call, parts = s3fs.S3FileSystem._call_s3, []

    async def fail(self: Any, method: str, *args: Any, **words: Any) -> Any:
        if method == "upload_part":
            parts.append(1)
            if len(parts) > 1:
                raise OSError("the network is gone")
        return await call(self, method, *args, **words)

    (tmp_path / "large.bin").write_bytes(bytes(12 * 2**20))
    put = partialmethod(s3fs.S3FileSystem._put_file, chunksize=5 * 2**20)
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", fail)
    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put)
    anew(monkeypatch)
    with pytest.raises(StorageError, match="the network is gone"):
        upload(tmp_path / "large.bin", as_path(s3) / "half" / "large.bin")
    assert parts
    assert not (as_path(s3) / "half").exists()


def test_without_the_package_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageError, match=r"install gcsfs, or pip install 'caprmil\[remote\]'"):
        as_path("gs://lab/x").exists()


def test_an_unknown_storage_is_one_line() -> None:
    with pytest.raises(StorageError, match=r"no storage called s4://\. Known are s3://"):
        as_path("s4://lab/x").exists()


def test_a_bucket_that_is_not_there_is_found_before_the_work(s3: str, tiny_recipe: Recipe) -> None:
    with pytest.raises(StorageError, match="there is no s3://nobody"):
        train(tiny_recipe, as_path("s3://nobody/run"))
    with pytest.raises(StorageError, match="there is no s3://nobody"):
        check_new("s3://nobody/out.csv")
    with pytest.raises(CohortError, match=r"There is no file s3://nobody/labels\.csv"):
        tables.read("s3://nobody/labels.csv")


def test_no_network_and_no_rights_are_one_line(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import EndpointConnectionError

    system = fsspec.get_filesystem_class("s3")
    for problem, told in (
        (EndpointConnectionError(endpoint_url="http://x"), "cannot be reached .*Check the network"),
        (PermissionError("Access Denied"), "may not be read or written by you"),
    ):

        async def fail(*_: Any, problem: Exception = problem, **__: Any) -> None:
            raise problem

        monkeypatch.setattr(system, "_call_s3", fail)
        with pytest.raises(StorageError, match=told):
            bags.read("s3://lab/features/slide_000.h5")


# Bags and cohorts


def test_a_bag_elsewhere_is_the_bag_here(lab: RemotePath, tiny_cohort: Path) -> None:
    path, local = lab / "features" / "slide_003.h5", tiny_cohort.parent / "features/slide_003.h5"
    one, other = bags.read(str(path)), bags.read(local)
    np.testing.assert_array_equal(one.features, other.features)
    np.testing.assert_array_equal(one.coords, other.coords)
    assert replace(one.info, path=local) == other.info
    assert bags.inspect(path) == one.info
    with bags.streaming(path, rows=7) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream())), other.features)


@pytest.mark.parametrize("ending", [".npy", ".npz", ".pt", ".hdf5"])
def test_every_kind_of_bag_may_be_elsewhere(
    ending: str, memory: RemotePath, tmp_path: Path
) -> None:
    import torch

    features, local = np.random.default_rng(0).normal(size=(9, 4)), tmp_path / f"a{ending}"
    match ending:
        case ".npy":
            np.save(local, features)
        case ".npz":
            np.savez(local, features=features)
        case ".pt":
            torch.save(torch.from_numpy(features), local)
        case _:
            bags.write(local, features, dtype="float32")
    upload(local, memory / local.name)
    np.testing.assert_array_equal(
        bags.read(memory / local.name).features, bags.read(local).features
    )
    with bags.streaming(memory / local.name, rows=4) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream())), bags.read(local).features)


def test_to_inspect_a_large_bag_fetches_little_of_it(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = np.zeros((40_000, 128), np.float16)
    local = bags.write(tmp_path / "large.h5", features, np.zeros((40_000, 2)), step=256, mpp=0.5)
    upload(local, as_path(s3) / "large.h5")
    system, fetched = fsspec.get_filesystem_class("s3"), []
    cat = system._cat_file

    async def cat_file(self: Any, path: str, start: int, end: int, **words: Any) -> Any:
        fetched.append(end - start)
        return await cat(self, path, start=start, end=end, **words)

    monkeypatch.setattr(system, "_cat_file", cat_file)
    anew(monkeypatch)
    assert replace(bags.inspect(f"{s3}/large.h5"), path=local) == bags.inspect(local)
    assert sum(fetched) < 0.2 * local.stat().st_size


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "has 0 bytes"), (b"no bag" * 99, "HDF5|cannot be read"), (None, "There is no file")],
)
def test_a_broken_bag_elsewhere_is_named_by_its_url(
    content: bytes | None, told: str, memory: RemotePath
) -> None:
    if content is not None:
        write_small(memory / "a.h5", content)
    for look in (bags.read, bags.inspect):
        with pytest.raises(BagError, match=told) as caught:
            look(memory / "a.h5")
        assert str(memory / "a.h5") in str(caught.value)


def test_a_cohort_elsewhere_is_the_cohort_here(lab: RemotePath, tiny_cohort: Path) -> None:
    folder = tiny_cohort.parent / "features"
    one, _ = cohort.load_cohort(str(lab / "labels.csv"), str(lab / "features"))
    other, _ = cohort.load_cohort(tiny_cohort, folder)
    assert one.labels == other.labels
    assert [e.path.name for e in one.entries] == [e.path.name for e in other.entries]
    assert all(isinstance(entry.path, RemotePath) for entry in one.entries)
    mixed, _ = cohort.load_cohort(tiny_cohort, lab / "features")
    assert mixed.labels == other.labels


def test_a_table_may_name_bags_by_url(lab: RemotePath, tmp_path: Path) -> None:
    rows = [f"slide_{n:03d},{lab}/features/slide_{n:03d}.h5,{n % 2}" for n in range(4)]
    (tmp_path / "table.csv").write_text("\n".join(["slide,path,label", *rows]))
    found, _ = cohort.load_cohort(tmp_path / "table.csv", None)
    assert [str(entry.path) for entry in found.entries] == [row.split(",")[1] for row in rows]


# Runs


@pytest.mark.parametrize("lab", ["memory", SLOWLY], indirect=True)
def test_a_run_elsewhere_ends_with_the_numbers_of_one_here(
    lab: RemotePath, recipe: Recipe, local: Run, tiny_cohort: Path
) -> None:
    recipe = away(recipe, lab)
    run = train(recipe, lab / "runs" / "a")
    assert run.scores == local.scores
    assert str(run.folder) == f"{lab}/runs/a"
    ours = {str(p.relative_to(lab / "runs" / "a")) for p in (lab / "runs" / "a").rglob("*")}
    theirs = {str(p.relative_to(local.folder)) for p in local.folder.rglob("*") if p.is_file()}
    assert ours == {name for name in theirs if not PurePosixPath(name).name.startswith(".")}
    assert not any((cache() / "runs").iterdir())
    with pytest.raises(RunError, match=f"{lab}/runs/a holds a finished run"):
        train(recipe, lab / "runs" / "a")

    bag = {"slide_000": lab / "features" / "slide_000.h5"}
    answer = Run(f"{lab}/runs/a").predict(bag, device="cpu")
    same = local.predict({"slide_000": tiny_cohort.parent / "features/slide_000.h5"}, device="cpu")
    np.testing.assert_array_equal(answer.probabilities, same.probabilities)
    assert len(run.bag_paths()) == 24
    assert run.predictions.slides == local.predictions.slides
    assert set(run.shortcuts) == set(local.shortcuts)
    assert set(run.validation) == set(local.validation)


@pytest.mark.parametrize("lab", ["memory", SLOWLY], indirect=True)
def test_a_killed_run_goes_on_elsewhere_with_the_folds_that_were_finished(
    lab: RemotePath, recipe: Recipe, local: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = away(recipe, lab), lab / "runs" / "killed"
    shared = []

    def die(self: Mirror) -> None:
        self.finish()
        shared.append(self.folder)
        if len(shared) == 2:  # the start, and the first fold
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "share", die)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, out)
    assert [fold.name for fold in Run(out).done] == ["fold-0"]
    assert not Run(out).finished
    before = (out / "folds/fold-0/fold.json").read_bytes()
    shutil.rmtree(shared[0])  # another machine has none
    fitted = []
    monkeypatch.setattr("caprmil.training.study.fit", _noting(fitted))
    run = train(recipe, out)
    assert len(fitted) == 1
    assert run.scores == local.scores
    assert (out / "folds/fold-0/fold.json").read_bytes() == before


def _noting(fitted: list[int]) -> Any:
    from caprmil.training.module import fit

    def noted(*args: Any, **words: Any) -> Any:
        fitted.append(1)
        return fit(*args, **words)

    return noted


@pytest.fixture
def half(memory: RemotePath, recipe: Recipe) -> RemotePath:
    """A run elsewhere with its start, and a fold that was uploaded in part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("caprmil.training.study._train_fold", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, memory / "run")
    write_small(memory / "run/folds/fold-0/model/model.safetensors", b"half")
    return memory / "run"


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_fold_that_was_uploaded_in_part_counts_for_nothing(
    half: RemotePath, recipe: Recipe
) -> None:
    assert Run(half).done == []
    with pytest.raises(RunError, match="has no trained model yet"):
        Run(half).answering()
    run = train(recipe, half)
    assert len(run.done) == 2
    assert run.model("fold-0")


def test_the_status_of_half_a_run_does_not_call_it_done(half: RemotePath) -> None:
    assert read_status(half).count() == {"to do": 3}


def test_scores_that_were_not_uploaded_are_when_the_command_is_given_again(
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
    monkeypatch.setattr("caprmil.training.study.fit", _noting(fitted))
    assert train(recipe, memory / "run").finished
    assert fitted == []


def test_folds_that_never_reached_the_other_side_are_not_thrown_away(
    memory: RemotePath, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", fail)
        with pytest.raises(StorageError):
            train(recipe, memory / "run")
    fitted: list[int] = []
    monkeypatch.setattr("caprmil.training.study.fit", _noting(fitted))
    assert train(recipe, memory / "run").finished
    assert fitted == []


def test_a_mirror_of_another_cohort_is_put_aside(
    half: RemotePath, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Mirror(half, config.digest(recipe)).folder
    (folder / "splits.json").write_text("of another")
    assert train(recipe, half).finished
    assert "what was made here is in" in caplog.text
    (aside,) = folder.parent.glob(f"{folder.name}.*")
    assert (aside / "splits.json").read_text() == "of another"
    shutil.rmtree(aside)


def test_another_recipe_or_something_else_is_refused_as_it_is_here(
    half: RemotePath, recipe: Recipe
) -> None:
    other = replace(recipe, train=replace(recipe.train, epochs=2))
    with pytest.raises(RunError, match=r"memory://.*/run holds a run of another recipe"):
        train(other, half)
    write_small(half.parent / "mine" / "notes.txt", b"mine")
    with pytest.raises(RunError, match="exists and is not a run"):
        train(other, half.parent / "mine")
    assert [p.name for p in (half.parent / "mine").iterdir()] == ["notes.txt"]


def test_two_processes_do_not_train_one_run(
    half: RemotePath, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sign(half / LOCK, "another host")
    with pytest.raises(RunError, match=r"is being trained by another host.*wait for 3 minutes"):
        train(recipe, half)
    assert (half / LOCK).exists()
    monkeypatch.setattr(remote, "STALE", 0.0)  # and if the other was not heard of for long
    with mirrored(half, "recipe"):
        assert (half / LOCK).exists()
    assert not (half / LOCK).exists()


def test_whoever_lost_a_run_to_another_uploads_nothing_more(half: RemotePath) -> None:
    lost = Mirror(half, "recipe")
    lost.fetch()
    (lost.folder / "scores.json").write_text("{}")
    _sign(half / LOCK, "another host")
    with pytest.raises(RunError, match="another host has taken over"):
        lost.finish()
    assert not (half / "scores.json").exists()


def test_signs_of_life_are_given_while_a_run_is_held(
    memory: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BEAT", 0.01)
    lock = memory / LOCK
    with _held(lock, "us"):
        first = lock.read_text()
        for _ in range(500):
            if lock.read_text() != first:
                break
            time.sleep(0.01)
        else:
            pytest.fail("no sign of life")
    assert not lock.exists()


def test_a_fold_that_cannot_be_uploaded_is_kept_and_sent_with_the_next(
    memory: RemotePath, local: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with mirrored(memory / "run", "recipe") as copy, pytest.MonkeyPatch.context() as patch:
        shutil.copytree(local.folder, copy.folder, dirs_exist_ok=True)
        fail_after(patch, 5)
        copy.share()
        assert "not uploaded yet, and kept in" in caplog.text
        assert finished_folds(memory / "run") == []
        patch.undo()
        copy.share()
        assert finished_folds(memory / "run") == ["fold-0", "fold-1"]
    assert Run(memory / "run").scores == local.scores


# Slides


@pytest.fixture(scope="module")
def slides(lab: RemotePath, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(2):
        file = save(folder / f"s{number}.tiff", section(number))
        upload(file, lab / "slides" / file.name)
    return find_slides([folder])


def job(out: Path) -> Extraction:
    config = ExtractionConfig(patches=PatchConfig(px=64, mpp=2.0))
    return Extraction(out=out, encoder=Colour(), config=config, batch=8)  # type: ignore[arg-type]


def test_slides_elsewhere_become_the_bags_they_become_here(
    lab: RemotePath, slides: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    found = find_slides([f"{lab}/slides"], exclude=lab / "encoded")
    assert [hash_slide_file(found[name]) for name in slides] == [
        hash_slide_file(slides[name]) for name in slides
    ]
    records = job(lab / "encoded").run(found)
    assert [record.state for record in records] == ["done", "done"]
    job(tmp_path / "out").run(slides)
    for name in slides:
        one, other = bags.read(lab / "encoded" / f"{name}.h5"), tmp_path / "out" / f"{name}.h5"
        np.testing.assert_array_equal(one.features, bags.read(other).features)
        assert one.info.settings == bags.inspect(other).settings
    there = {str(path.relative_to(lab / "encoded")) for path in (lab / "encoded").rglob("*")}
    kinds = ("png", "geojson", "json")
    assert there == {f"{n}.h5" for n in slides} | {"qc.csv"} | {
        f"qc/{name}.{kind}" for name in slides for kind in kinds
    }
    assert list((tmp_path / "scratch").iterdir()) == []

    again = job(lab / "encoded")
    assert [record.state for record in again.run(found)] == ["done", "done"]
    assert again.encoder.seen == 0  # type: ignore[union-attr]


def test_a_slide_whose_upload_fails_is_not_done_and_made_again(
    memory: RemotePath, tmp_path: Path
) -> None:
    upload(save(tmp_path / "s0.tiff", section()), memory / "slides" / "s0.tiff")
    found = find_slides([memory / "slides"])
    with pytest.MonkeyPatch.context() as patch:
        fail_after(patch, 2)  # the picture and the outline are there, the bag is not
        with pytest.raises(StorageError):
            job(memory / "out").run(found)
    assert not (memory / "out" / "s0.h5").exists()
    assert [record.state for record in job(memory / "out").run(found)] == ["done"]


def test_a_broken_slide_elsewhere_is_named_by_its_url(memory: RemotePath) -> None:
    write_small(memory / "slides" / "s0.svs", b"nothing of the kind")
    with pytest.raises(SlideError, match=f"{memory}/slides/s0.svs"):
        Slide(memory / "slides" / "s0.svs")


# The command line


def test_the_commands_take_urls(
    s3: str, recipe: Recipe, local: Run, tiny_cohort: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = as_path(s3) / "cli"
    assert isinstance(folder, RemotePath)
    found = [tiny_cohort, *(tiny_cohort.parent / "features").iterdir()]
    upload_all(found, tiny_cohort.parent, folder)
    write_text(folder / "recipe.toml", config.dump(away(recipe, folder)))
    shell("train", f"{folder}/recipe.toml", "--out", f"{folder}/run", "--device", "cpu")
    assert f"caprmil predict {folder}/run BAGS" in capsys.readouterr().out
    assert Run(f"{folder}/run").scores == local.scores
    upload(found[1], folder / "new" / "a.h5")
    shell("predict", f"{folder}/run", f"{folder}/new", "--out", f"{folder}/answers.csv")
    assert Predictions.read(folder / "answers.csv").slides == ("a",)
    shell("status", f"{folder}/run")
    assert f"{folder}/run holds a run: 3 done." in capsys.readouterr().out
    shell("evaluate", f"{folder}/run")
    shell("calibrate", f"{folder}/run")
    shell("compare", f"{folder}/run", f"{folder}/run/predictions.csv", "--out", f"{folder}/versus")
    assert (folder / "versus" / "comparison.md").is_file()
    shell("check", f"{folder}/run", "--most", 1)
    assert "holds" in capsys.readouterr().out
    assert not Path("s3:").exists()


def test_what_cannot_write_elsewhere_says_so(tiny_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(config.dump(tiny_recipe))
    for words in (
        ("sweep", tmp_path / "a.toml", "--set", "train.epochs=1,2", "--out", "s3://lab/x"),
        ("reproduce", "bracs", "--rehearse", "--out", "s3://lab/x"),
        ("demo", "--out", "s3://lab/x"),
    ):
        with pytest.raises(StorageError, match="s3://lab/x cannot be written to by this command"):
            shell(*words)
    assert not Path("s3:").exists()


def test_a_recipe_may_be_elsewhere(memory: RemotePath) -> None:
    write_small(memory / "a.toml", b'cohort = "s3://lab/labels.csv"\n')
    recipe = read_recipe(str(memory / "a.toml"), features=Path("s3://lab/features"))
    assert (recipe.cohort, recipe.features) == ("s3://lab/labels.csv", "s3://lab/features")
    assert read_recipe(Path("s3://lab/x.csv")).cohort == "s3://lab/x.csv"
