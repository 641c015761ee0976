"""Remote bags, cohorts, slides and recipes: read and written like local ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from caprmil.cohort import cohort
from caprmil.errors import BagError, SlideError, StorageError
from caprmil.executors.job_status import JobStatus, heartbeat, status_path
from caprmil.experiments.status import read_status
from caprmil.features import bags
from caprmil.features.extract import Extraction
from caprmil.features.settings import ExtractionConfig, hash_slide_file
from caprmil.io.atomic import write_text
from caprmil.io.paths import RemotePath, as_path, upload
from caprmil.slides.patches import PatchConfig
from caprmil.slides.slide import Slide, find_slides
from caprmil.training.recipe_files import read_recipe
from remote_faults import fail_uploads_after, reset_connections
from test_extraction import Colour, save, section

pytestmark = pytest.mark.slow

# Bags and cohorts


def test_a_remote_bag_equals_the_local_one(remote_cohort: RemotePath, tiny_cohort: Path) -> None:
    path, local = (
        remote_cohort / "features" / "slide_003.h5",
        tiny_cohort.parent / "features/slide_003.h5",
    )
    one, other = bags.read(str(path)), bags.read(local)
    np.testing.assert_array_equal(one.features, other.features)
    np.testing.assert_array_equal(one.coords, other.coords)
    assert replace(one.info, path=local) == other.info
    assert bags.inspect(path) == one.info
    with bags.streaming(path, rows=7) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream())), other.features)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt", ".hdf5"])
def test_every_format_of_bag_may_be_remote(suffix: str, memory: RemotePath, tmp_path: Path) -> None:
    import torch

    features, local = np.random.default_rng(0).normal(size=(9, 4)), tmp_path / f"a{suffix}"
    match suffix:
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


def test_inspecting_a_large_bag_downloads_a_small_part_of_it(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = np.zeros((40_000, 128), np.float16)
    local = bags.write(tmp_path / "large.h5", features, np.zeros((40_000, 2)), step=256, mpp=0.5)
    upload(local, as_path(s3) / "large.h5")
    system, downloaded = fsspec.get_filesystem_class("s3"), []
    cat = system._cat_file

    async def cat_file(self: Any, path: str, start: int, end: int, **options: Any) -> Any:
        downloaded.append(end - start)
        return await cat(self, path, start=start, end=end, **options)

    monkeypatch.setattr(system, "_cat_file", cat_file)
    reset_connections(monkeypatch)
    assert replace(bags.inspect(f"{s3}/large.h5"), path=local) == bags.inspect(local)
    assert sum(downloaded) < 0.2 * local.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"not a bag" * 99, "HDF5|cannot be read"), (None, "There is no file")],
)
def test_the_error_of_a_broken_remote_bag_has_its_url(
    content: bytes | None, message: str, memory: RemotePath
) -> None:
    if content is not None:
        (memory / "a.h5").write_bytes(content)
    for function in (bags.read, bags.inspect):
        with pytest.raises(BagError, match=message) as caught:
            function(memory / "a.h5")
        assert str(memory / "a.h5") in str(caught.value)


def test_a_remote_cohort_equals_the_local_one(remote_cohort: RemotePath, tiny_cohort: Path) -> None:
    folder = tiny_cohort.parent / "features"
    one, _ = cohort.load_cohort(str(remote_cohort / "labels.csv"), str(remote_cohort / "features"))
    other, _ = cohort.load_cohort(tiny_cohort, folder)
    assert one.labels == other.labels
    assert [e.path.name for e in one.entries] == [e.path.name for e in other.entries]
    assert all(isinstance(entry.path, RemotePath) for entry in one.entries)
    mixed, _ = cohort.load_cohort(tiny_cohort, remote_cohort / "features")
    assert mixed.labels == other.labels


def test_a_table_may_name_bags_by_url(remote_cohort: RemotePath, tmp_path: Path) -> None:
    rows = [f"slide_{n:03d},{remote_cohort}/features/slide_{n:03d}.h5,{n % 2}" for n in range(4)]
    (tmp_path / "table.csv").write_text("\n".join(["slide,path,label", *rows]))
    found, _ = cohort.load_cohort(tmp_path / "table.csv", None)
    assert [str(entry.path) for entry in found.entries] == [row.split(",")[1] for row in rows]


# Slides, status and recipes


@pytest.fixture(scope="module")
def slides(remote_cohort: RemotePath, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(2):
        file = save(folder / f"s{number}.tiff", section(number))
        upload(file, remote_cohort / "slides" / file.name)
    return find_slides([folder])


def extraction(out: Path) -> Extraction:
    config = ExtractionConfig(patches=PatchConfig(px=64, mpp=2.0))
    return Extraction(out=out, encoder=Colour(), config=config, batch=8)  # type: ignore[arg-type]


def test_remote_slides_give_the_same_bags_as_local_ones(
    remote_cohort: RemotePath,
    slides: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    found = find_slides([f"{remote_cohort}/slides"], exclude=remote_cohort / "encoded")
    assert [hash_slide_file(found[name]) for name in slides] == [
        hash_slide_file(slides[name]) for name in slides
    ]
    records = extraction(remote_cohort / "encoded").run(found)
    assert [record.state for record in records] == ["done", "done"]
    extraction(tmp_path / "out").run(slides)
    for name in slides:
        one, other = (
            bags.read(remote_cohort / "encoded" / f"{name}.h5"),
            tmp_path / "out" / f"{name}.h5",
        )
        np.testing.assert_array_equal(one.features, bags.read(other).features)
        assert one.info.settings == bags.inspect(other).settings
    files = {
        str(path.relative_to(remote_cohort / "encoded"))
        for path in (remote_cohort / "encoded").rglob("*")
    }
    kinds = ("png", "geojson", "json")
    assert files == {f"{n}.h5" for n in slides} | {"qc.csv"} | {
        f"qc/{name}.{kind}" for name in slides for kind in kinds
    }
    assert list((tmp_path / "scratch").iterdir()) == []

    again = extraction(remote_cohort / "encoded")
    assert [record.state for record in again.run(found)] == ["done", "done"]
    assert again.encoder.seen == 0  # type: ignore[union-attr]


def test_a_slide_whose_upload_failed_is_extracted_again(memory: RemotePath, tmp_path: Path) -> None:
    upload(save(tmp_path / "s0.tiff", section()), memory / "slides" / "s0.tiff")
    found = find_slides([memory / "slides"])
    with pytest.MonkeyPatch.context() as patch:
        fail_uploads_after(patch, 2)  # the thumbnail and the outline, but not the bag
        with pytest.raises(StorageError):
            extraction(memory / "out").run(found)
    assert not (memory / "out" / "s0.h5").exists()
    assert [record.state for record in extraction(memory / "out").run(found)] == ["done"]


def test_the_error_of_a_broken_remote_slide_has_its_url(memory: RemotePath) -> None:
    (memory / "slides" / "s0.svs").write_bytes(b"not a slide")
    with pytest.raises(SlideError, match=f"{memory}/slides/s0.svs"):
        Slide(memory / "slides" / "s0.svs")


def test_the_status_of_remote_tasks_is_running_or_stopped(memory: RemotePath) -> None:
    with heartbeat(status_path(memory, "slide")):
        assert read_status(str(memory)).count() == {"running": 1}
        JobStatus(state="running", last_heartbeat=1.0).write(status_path(memory, "slide"))
        assert read_status(memory).count() == {"stopped": 1}
    write_text(memory / "qc.csv", "")
    assert read_status(memory).count() == {}


def test_a_recipe_may_be_remote(memory: RemotePath) -> None:
    (memory / "a.toml").write_bytes(b'cohort = "s3://lab/labels.csv"\n')
    recipe = read_recipe(str(memory / "a.toml"), features=Path("s3://lab/features"))
    assert (recipe.cohort, recipe.features) == ("s3://lab/labels.csv", "s3://lab/features")
    assert read_recipe(Path("s3://lab/x.csv")).cohort == "s3://lab/x.csv"
