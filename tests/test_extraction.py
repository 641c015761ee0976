"""Extraction makes one bag per slide, resumes by content, and survives failures and kills."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import pyvips
from numpy.typing import NDArray
from PIL import Image

from caprmil.encoders import Card
from caprmil.errors import CohortError, RecipeError, RunError, SlideError
from caprmil.executors.job_status import JobStatus, status_path
from caprmil.experiments.status import read_status
from caprmil.features import bags, prepared_slide
from caprmil.features.extract import Extraction
from caprmil.features.settings import ExtractionConfig, configure
from caprmil.slides import isolated_file
from caprmil.slides.patches import PatchConfig
from caprmil.slides.qc import Record
from caprmil.slides.selection import parse_shard, select_listed, select_shard
from caprmil.slides.slide import find_slides
from image_bombs import BOMBS

DATA = Path(__file__).parents[2] / "shared" / "data"
DATA = Path(os.environ.get("CAPRMIL_DATA", DATA)) / "slides"
TISSUE = (slice(100, 500), slice(200, 700))  # rows and columns of level 0, at 2 um/px


class Colour:
    """A stand-in for an encoder: the mean colour of a patch, and the number of patches so far."""

    name, width, fingerprint, mpp, patch_px = "colour", 3, "abc123", 2.0, 64

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.seen += len(pixels)
        return pixels.mean((1, 2)).astype(np.float32)


def save(path: Path, image: NDArray[np.uint8], mpp: float | None = 2.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tags = {"xres": 1000 / mpp, "yres": 1000 / mpp, "resunit": "cm"} if mpp else {}
    options: dict[str, Any] = {"tile": True, "pyramid": True, "compression": "jpeg", "Q": 90}
    pyvips.Image.new_from_array(image).tiffsave(str(path), **options, **tags)
    return path


def section(seed: int = 0) -> NDArray[np.uint8]:
    """Return an image of glass with a purple block of tissue."""
    rng = np.random.default_rng(seed)
    image = np.full((640, 900, 3), 240.0)
    image[TISSUE] = (180, 100, 160)
    image[TISSUE] += rng.normal(0, 25, image[TISSUE].shape)
    image += rng.normal(0, 1.5, image.shape)
    return image.clip(0, 255).astype(np.uint8)


def blank() -> NDArray[np.uint8]:
    image = np.full((640, 900, 3), 240.0) + np.random.default_rng(1).normal(0, 1.5, (640, 900, 3))
    return image.astype(np.uint8)


@pytest.fixture
def slides(tmp_path: Path) -> dict[str, Path]:
    for number in range(3):
        save(tmp_path / "slides" / f"s{number}.tiff", section(number))
    return find_slides([tmp_path / "slides"])


@pytest.fixture
def job(tmp_path: Path) -> Extraction:
    config = ExtractionConfig(patches=PatchConfig(px=64, mpp=2.0))
    return Extraction(out=tmp_path / "out", encoder=Colour(), config=config, batch=8)  # type: ignore[arg-type]


def states(records: Sequence[Record]) -> list[str]:
    return [record.state for record in records]


def seen(job: Extraction) -> int:
    assert isinstance(job.encoder, Colour)
    return job.encoder.seen


def test_every_slide_becomes_a_bag_with_its_settings(
    job: Extraction, slides: dict[str, Path]
) -> None:
    records = job.run(slides)
    bag = bags.read(job.out / "s1.h5")
    assert states(records) == ["done"] * 3
    assert bag.info.n_patches == records[1].patches == len(bag.features)
    info = bag.info
    assert (info.encoder, info.fingerprint, info.mpp) == ("colour", "abc123", 2.0)
    assert (info.patch_px, info.patch_level0, info.step) == (64, 64.0, 64.0)
    assert (info.slide_size, info.slide_mpp, info.scale_rule) == ((900, 640), 2.0, "exact")


def test_features_and_coordinates_have_the_same_rows(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    bag = bags.read(job.out / "s0.h5")
    assert bag.coords is not None
    with Image.open(slides["s0"]) as opened:
        image = np.array(opened.convert("RGB"))
    for (x, y), feature in zip(bag.coords, bag.features, strict=True):
        patch = image[y : y + 64, x : x + 64]
        if patch.shape == (64, 64, 3):
            assert np.abs(patch.mean((0, 1)) - feature).max() < 1
    rows, columns = TISSUE
    outside = (bag.coords + 64 <= [columns.start, rows.start]).any(axis=1)
    assert not outside.any()


def test_a_second_run_does_nothing(job: Extraction, slides: dict[str, Path]) -> None:
    first = job.run(slides)
    before, stamp = seen(job), (job.out / "s0.h5").stat().st_mtime_ns
    assert job.run(slides) == first
    assert seen(job) == before
    assert (job.out / "s0.h5").stat().st_mtime_ns == stamp


def test_only_missing_bags_are_made(job: Extraction, slides: dict[str, Path]) -> None:
    job.run({"s0": slides["s0"]})
    before = seen(job)
    job.run(slides)
    assert seen(job) == 3 * before  # all three have the same tissue


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"patches": PatchConfig(px=64, mpp=2.5)}, "extraction.patches.mpp: 2.0 -> 2.5"),
        ({"dtype": "float32"}, "extraction.dtype: float16 -> float32"),
    ],
)
def test_bags_with_other_settings_are_an_error_that_names_the_setting_and_are_kept(
    job: Extraction, slides: dict[str, Path], change: dict[str, Any], named: str
) -> None:
    job.run(slides)
    stamp = (job.out / "s0.h5").stat().st_mtime_ns
    job.config = ExtractionConfig(**{"patches": job.config.patches, **change})
    with pytest.raises(RunError, match=f"{re.escape(named)}.*2 more.*--replace"):
        job.run(slides)
    assert (job.out / "s0.h5").stat().st_mtime_ns == stamp


def test_other_weights_of_the_encoder_are_another_setting(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    assert job.encoder is not None
    job.encoder.fingerprint = "def456"
    with pytest.raises(RunError, match="fingerprint: abc123 -> def456"):
        job.run(slides)


def test_bags_with_other_settings_are_made_again_with_replace(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    job.config, job.replace = ExtractionConfig(patches=PatchConfig(px=32, mpp=2.0)), True
    assert states(job.run(slides)) == ["done"] * 3
    assert {bags.inspect(job.out / f"{name}.h5").patch_px for name in slides} == {32}
    before = seen(job)
    job.run(slides)
    assert seen(job) == before  # --replace keeps bags with the right settings


def test_another_slide_of_the_same_name_is_noticed(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    save(slides["s0"], section(99))
    with pytest.raises(RunError, match="slide_file"):
        job.run(slides)


def test_a_damaged_bag_and_a_bag_of_another_tool_are_an_error(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    bag = job.out / "s0.h5"
    bag.write_bytes(bag.read_bytes()[:-5000])
    with pytest.raises(RunError, match=r"s0.h5 exists and is not a bag of `caprmil encode`"):
        job.run(slides)
    bag.unlink()
    bags.write(bag, np.ones((4, 3)))
    with pytest.raises(RunError, match=r"s0.h5 exists and is not a bag of `caprmil encode`"):
        job.run(slides)


def test_the_other_slides_are_encoded_if_one_is_broken(
    job: Extraction, slides: dict[str, Path]
) -> None:
    whole = slides["s1"].read_bytes()
    third = len(whole) // 3
    slides["s1"].write_bytes(whole[:third] + bytes(third) + whole[2 * third :])
    records = job.run(slides)
    assert states(records) == ["done", "failed", "done"]
    assert "s1.tiff cannot be read" in records[1].reason
    assert not (job.out / "s1.h5").exists()
    slides["s1"].write_bytes(whole)
    assert states(job.run(slides)) == ["done"] * 3


def test_the_error_of_an_encoder_is_in_the_record(
    job: Extraction, slides: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Colour):
        def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
            raise RuntimeError("out of memory")

    job.encoder = Failing()  # type: ignore[assignment]
    records = job.run({"s0": slides["s0"]})
    assert (records[0].state, records[0].reason) == ("failed", "RuntimeError: out of memory")
    assert [path.name for path in job.out.glob("*.h5")] == []


def test_features_with_nan_are_not_stored(job: Extraction, slides: dict[str, Path]) -> None:
    class ReturnsNan(Colour):
        def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
            return np.full((len(pixels), 3), np.nan, dtype=np.float32)

    job.encoder = ReturnsNan()  # type: ignore[assignment]
    assert "NaN" in job.run({"s0": slides["s0"]})[0].reason


def test_a_blank_slide_is_not_opened_again(
    job: Extraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slides = {"empty": save(tmp_path / "slides" / "empty.tiff", blank())}
    records = job.run(slides)
    assert (records[0].state, records[0].patches) == ("no tissue", 0)
    assert "no tissue" in records[0].flags
    monkeypatch.setattr(prepared_slide, "Slide", None)
    assert job.run(slides) == records


def test_the_table_has_every_slide_and_the_suspicious_ones_first(
    job: Extraction, slides: dict[str, Path], tmp_path: Path
) -> None:
    slides["empty"] = save(tmp_path / "slides" / "empty.tiff", blank())
    slides["nowhere"] = save(tmp_path / "slides" / "nowhere.tiff", section(), mpp=None)
    job.run(slides)
    with (job.out / "qc.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["slide"] for row in rows] == ["nowhere", "empty", "s0", "s1", "s2"]
    assert "has no scale" in rows[0]["reason"] or "um/px" in rows[0]["reason"]
    area = 400 * 500 * (2.0 / 1000) ** 2
    assert float(rows[2]["tissue_mm2"]) == pytest.approx(area, rel=0.05)


def test_every_slide_gets_a_picture_and_an_outline(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    with Image.open(job.out / "qc" / "s0.png") as opened:
        picture = np.array(opened.convert("RGB")).reshape(-1, 3)
    colours = {tuple(colour) for colour in np.unique(picture, axis=0).tolist()}
    assert {(0, 158, 115), (0, 114, 178)} <= colours  # outline and grid
    assert (job.out / "qc" / "s0.geojson").exists()


def test_a_written_outline_can_be_used_as_regions(
    job: Extraction, slides: dict[str, Path], tmp_path: Path
) -> None:
    job.run(slides)
    config = ExtractionConfig(patches=job.config.patches, regions="alone")
    again = Extraction(
        out=tmp_path / "again",
        encoder=Colour(),  # type: ignore[arg-type]
        config=config,
        regions=shutil.copytree(job.out / "qc", tmp_path / "drawn"),
    )
    again.run(slides)
    first, second = (bags.read(each.out / "s0.h5") for each in (job, again))
    assert first.coords is not None
    assert second.coords is not None
    assert len({*map(tuple, first.coords)} ^ {*map(tuple, second.coords)}) <= 2


def test_regions_restrict_the_tissue_and_a_change_of_them_is_noticed(
    job: Extraction, slides: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "left.geojson"
    ring = [[0, 0], [400, 0], [400, 640], [0, 640], [0, 0]]
    file.write_text(f'{{"type": "Polygon", "coordinates": [{ring}]}}')
    job.regions = file
    job.run(slides)
    coords = bags.read(job.out / "s0.h5").coords
    assert coords is not None
    assert coords[:, 0].max() <= 400
    assert coords[:, 0].min() >= 128
    file.write_text(file.read_text().replace("400", "500"))
    with pytest.raises(RunError, match="regions"):
        job.run(slides)


def test_regions_can_replace_the_tissue(job: Extraction, tmp_path: Path) -> None:
    slides = {"empty": save(tmp_path / "slides" / "empty.tiff", blank())}
    ring = [[0, 0], [400, 0], [400, 640], [0, 640], [0, 0]]
    job.regions = tmp_path / "empty.geojson"
    job.regions.write_text(f'{{"type": "Polygon", "coordinates": [{ring}]}}')
    job.config = ExtractionConfig(patches=job.config.patches, regions="alone")
    (record,) = job.run(slides)
    assert (record.state, record.flags) == ("done", "")


def outline_of(tool: str, ring: list[list[int]]) -> dict[str, Any]:
    """Return an outline as a tool writes it: LazySlide by geopandas, with the name of the file."""
    polygon = {"type": "Polygon", "coordinates": [ring]}
    several = {"type": "MultiPolygon", "coordinates": [[ring]]}
    geometry = polygon if tool == "trident" else several
    feature = {"type": "Feature", "properties": {"tissue_id": 0}, "geometry": geometry}
    found: dict[str, Any] = {"type": "FeatureCollection", "features": [feature]}
    return found if tool == "trident" else {**found, "name": "s0"}


@pytest.mark.parametrize("tool", ["trident", "lazyslide"])
def test_outlines_of_trident_and_lazyslide_are_regions(
    tool: str, job: Extraction, slides: dict[str, Path], tmp_path: Path
) -> None:
    ring = [[256, 128], [512, 128], [512, 320], [256, 320], [256, 128]]
    job.regions = tmp_path / "job" / "contours_geojson"
    job.regions.mkdir(parents=True)
    (job.regions / "s0.geojson").write_text(json.dumps(outline_of(tool, ring)))
    job.config = ExtractionConfig(patches=job.config.patches, regions="alone")
    (record,) = job.run({"s0": slides["s0"]})
    coords = bags.read(job.out / "s0.h5").coords
    assert coords is not None
    assert set(coords[:, 0].tolist()) == {256, 320, 384, 448}
    assert set(coords[:, 1].tolist()) == {128, 192, 256}
    assert record.patches == 12


def test_a_bag_is_removed_if_other_settings_leave_no_patch(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    none = PatchConfig(px=64, mpp=2.0, min_tissue=1.0)
    job.config, job.replace = ExtractionConfig(patches=replace(none, px=600)), True
    assert states(job.run(slides)) == ["no tissue"] * 3
    assert list(job.out.glob("*.h5")) == []


def test_missing_regions_are_an_error_before_any_work(
    job: Extraction, slides: dict[str, Path], tmp_path: Path
) -> None:
    job.regions = tmp_path / "nowhere"
    with pytest.raises(SlideError, match="no file or folder of regions"):
        job.run(slides)


def test_regions_in_the_folder_of_the_outlines_are_an_error(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    job.regions = job.out / "qc"
    with pytest.raises(SlideError, match="Copy your regions to another folder"):
        job.run(slides)


def test_settings_of_regions_without_regions_are_an_error(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.config = ExtractionConfig(patches=job.config.patches, regions="alone")
    with pytest.raises(RecipeError, match="need --regions"):
        job.run(slides)


def test_pictures_without_bags_need_another_folder(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    job.encoder = None
    with pytest.raises(RunError, match="holds bags"):
        job.run(slides)


def test_a_kill_between_a_bag_and_its_record_changes_nothing(
    job: Extraction, slides: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(self: Record, folder: Path) -> None:
        raise KeyboardInterrupt

    undisturbed = replace(job, out=tmp_path / "undisturbed", encoder=Colour())  # type: ignore[arg-type]
    undisturbed.run(slides)
    with monkeypatch.context() as patch:
        patch.setattr(Record, "write", kill)
        with pytest.raises(KeyboardInterrupt):
            job.run(slides)
    assert [path.name for path in job.out.glob("*.h5")] == ["s0.h5"]
    before, stamp = seen(job), (job.out / "s0.h5").stat().st_mtime_ns
    job.run(slides)
    assert seen(job) == 3 * before  # s0 is not encoded again
    assert (job.out / "s0.h5").stat().st_mtime_ns == stamp
    assert contents(job.out) == contents(undisturbed.out)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of an extraction, without the seconds that it took."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".json":
            content = re.sub(rb'"seconds": [0-9.e-]+', b"", content)
        if path.name == "qc.csv":
            rows = csv.DictReader(content.decode().splitlines())
            content = repr([{**row, "seconds": ""} for row in rows]).encode()
        files[str(path.relative_to(folder))] = content
    return files


def test_a_missing_record_of_a_bag_is_made_again(job: Extraction, slides: dict[str, Path]) -> None:
    records = job.run(slides)
    before = seen(job)
    (job.out / "qc" / "s1.json").unlink()
    again = job.run(slides)
    assert [replace(each, seconds=0) for each in again] == [
        replace(each, seconds=0) for each in records
    ]
    assert seen(job) == before


def test_a_status_that_a_killed_process_left_is_removed(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    JobStatus(state="running").write(status_path(job.out, "s0"))
    job.run(slides)
    assert not status_path(job.out, "s0").exists()


@pytest.mark.parametrize("checked", [True, False], ids=["header", "crash"])
def test_a_file_that_aborts_a_library_fails_alone(
    job: Extraction, slides: dict[str, Path], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checked:
        monkeypatch.setattr(isolated_file, "check_header", lambda path: None)
    slides["s1"].write_bytes(BOMBS["tile.tif"])
    job.mpp = 2.0
    for _ in range(2):
        records = job.run(slides)
        assert states(records) == ["done", "failed", "done"]
        assert re.search(r"s1\.tiff .*Copy it again", records[1].reason)
        found = {task.name: task.state for task in read_status(job.out).tasks}
        assert found == {"s0": "done", "s1": "failed", "s2": "done"}


def test_the_reason_of_a_failed_replacement_says_that_the_old_bag_is_still_there(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.run(slides)
    slides["s0"].write_bytes(slides["s0"].read_bytes()[:4000])
    job.replace = True
    assert job.run(slides)[0].reason.endswith("s0.h5 is still there, with other settings.")


def test_slides_that_cannot_be_prepared_are_closed(
    job: Extraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(prepared_slide.Slide, "close", lambda self: closed.append(self.name))
    job.run({"s": save(tmp_path / "slides" / "s.tiff", section(), mpp=None)})
    assert closed == ["s"]


def test_a_scale_that_differs_from_the_file_is_flagged(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.mpp = 1.0
    flags = job.run({"s0": slides["s0"]})[0].flags
    assert flags.endswith("scale given as 1 um/px, the file says 2")


def test_a_slide_without_a_regions_file_fails(
    job: Extraction, slides: dict[str, Path], tmp_path: Path
) -> None:
    job.regions = tmp_path
    assert "no s0.geojson" in job.run({"s0": slides["s0"]})[0].reason


def test_a_missing_scale_can_be_given_in_the_table(job: Extraction, tmp_path: Path) -> None:
    slides = {"s": save(tmp_path / "slides" / "s.tiff", section(), mpp=None)}
    assert states(job.run(slides)) == ["failed"]
    table = tmp_path / "labels.csv"
    table.write_text("slide,label,mpp\ns.tiff,0,2.0\n")
    chosen, job.mpps = select_listed(slides, table)
    assert states(job.run(chosen)) == ["done"]
    assert bags.inspect(job.out / "s.h5").slide_mpp == 2.0


def test_a_table_may_list_slides_of_other_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,mpp\na,0.5\nb,0.25\n")
    found, mpps = select_listed({"a": Path("a.svs"), "c": Path("c.svs")}, table)
    assert (found, mpps["a"]) == ({"a": Path("a.svs")}, 0.5)
    assert "not found (1): b." in caplog.text
    with pytest.raises(CohortError, match=r"None of the slides in .*: a, b\..* called c\."):
        select_listed({"c": Path("c.svs")}, table)
    table.write_text("slide,mpp\na,0.5\nb,x\n")
    with pytest.raises(CohortError, match="mpp is 'x', not a number"):
        select_listed({"a": Path("a.svs"), "b": Path("b.svs")}, table)


def test_without_an_encoder_there_are_pictures_and_no_bags(
    job: Extraction, slides: dict[str, Path]
) -> None:
    job.encoder = None
    records = job.run(slides)
    assert states(records) == ["done"] * 3
    assert sorted(path.name for path in (job.out / "qc").glob("*.png")) == [
        *("s0.png", "s1.png", "s2.png")
    ]
    assert list(job.out.glob("*.h5")) == []


# Array jobs


def test_every_slide_is_in_one_shard_in_any_order() -> None:
    slides = {f"s{number}": Path(f"s{number}.svs") for number in (4, 1, 3, 0, 2)}
    shares = [select_shard(slides, which, 3) for which in (1, 2, 3)]
    assert [list(own) for own in shares] == [["s0", "s3"], ["s1", "s4"], ["s2"]]
    assert select_shard(dict(sorted(slides.items())), 2, 3) == shares[1]
    assert select_shard(slides, 7, 9) == {}


def test_shards_make_the_same_bags_as_one_job(
    job: Extraction, slides: dict[str, Path], tmp_path: Path
) -> None:
    whole = {record.slide: record for record in job.run(slides)}
    parts = replace(job, out=tmp_path / "parts")
    for which in (2, 1, 3, 4):  # the last has nothing to do
        for record in parts.run(select_shard(slides, which, 4)):
            assert replace(record, seconds=0) == replace(whole.pop(record.slide), seconds=0)
    assert not whole
    with (parts.out / "qc.csv").open() as table:
        assert sorted(row["slide"] for row in csv.DictReader(table)) == sorted(slides)
    for name in slides:
        one, other = bags.read(job.out / f"{name}.h5"), bags.read(parts.out / f"{name}.h5")
        assert np.array_equal(one.features, other.features)


@pytest.mark.parametrize("wrong", ["0/4", "5/4", "x", "1/0", "-1/4", "1/4/2", ""])
def test_an_invalid_shard_is_an_error(wrong: str) -> None:
    with pytest.raises(RecipeError, match=f"I from 1 to N, e.g. 2/8, not '{wrong}'"):
        parse_shard(wrong)


# Settings


def test_the_default_scale_is_that_of_the_encoder() -> None:
    encoder = Card(name="colour", input_px=64, mpp=2.0)
    assert configure(encoder).patches == PatchConfig(px=64, mpp=2.0)
    assert configure(encoder, magnification=20).patches.mpp == 0.5
    nominal = configure(encoder, magnification=10, nominal=True).patches
    assert (nominal.mpp, nominal.scale_rule) == (1.0, "nominal")
    changed = configure(encoder, changes=["patches.px=32", "tissue.min_density=0.05"])
    assert (changed.patches.px, changed.tissue.min_density) == (32, 0.05)
    with pytest.raises(RecipeError, match="both set the scale"):
        configure(encoder, mpp=1.0, magnification=10)
    with pytest.raises(RecipeError, match="mpp is 0 um/px"):
        configure(encoder, mpp=0.0)


@pytest.mark.skipif(not DATA.is_dir(), reason="no slides next to the repository")
def test_real_slides_are_encoded_and_those_without_a_scale_need_one(
    tmp_path: Path,
) -> None:
    slides = find_slides([DATA])
    config = ExtractionConfig(patches=PatchConfig(px=64, mpp=2.0))
    job = Extraction(out=tmp_path / "out", encoder=Colour(), config=config)  # type: ignore[arg-type]
    records = {record.slide: record for record in job.run(slides)}
    assert records["CMU-1-Small-Region"].state == "done"
    assert records["CMU-1-Small-Region-dicom"].patches == records["CMU-1-Small-Region"].patches
    assert "has no scale" in records["tcga-cr-7395-01a-01-ts1"].reason
    assert "896.056 um/px" in records["six-levels-wrong-mpp"].reason
    failed = {name: slides[name] for name, record in records.items() if record.state == "failed"}
    job.mpp = 2.0
    assert set(states(job.run(failed))) == {"done"}


SLOW_ENCODER = """
import time, torch
def encode(pictures):
    with open("{log}", "a") as log:
        log.write("batch\\n")
    time.sleep({seconds})
    return pictures.mean((2, 3))
"""


def start(tmp_path: Path, *, seconds: float) -> "subprocess.Popen[str]":
    """Start `caprmil encode` with a slow encoder."""
    log = tmp_path / "log.txt"
    (tmp_path / "slowly.py").write_text(SLOW_ENCODER.format(log=log, seconds=seconds))
    command = [sys.executable, "-m", "caprmil", "encode", str(tmp_path / "slides")]
    command += ["--out", str(tmp_path / "out"), "--encoder", "slowly:encode"]
    command += ["--mpp", "2.0", "--set", "patches.px=64", "--batch", "8", "--device", "cpu"]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_kill_loses_only_the_slide_that_was_being_encoded(
    tmp_path: Path, slides: dict[str, Path]
) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, seconds=0.2)
    while not list(out.glob("s*.h5")):
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = sorted(out.glob("*.h5"))
    assert 1 <= len(finished) < len(slides)
    for bag in finished:
        assert bags.read(bag).info.settings is not None
    stamps = [bag.stat().st_mtime_ns for bag in finished]

    process = start(tmp_path, seconds=0)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert [bag.stat().st_mtime_ns for bag in finished] == stamps
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".h5") == [
        *("s0.h5", "s1.h5", "s2.h5")
    ]


@pytest.mark.slow
def test_after_an_interrupt_the_same_command_resumes(
    tmp_path: Path, slides: dict[str, Path]
) -> None:
    process = start(tmp_path, seconds=0.2)
    while not list((tmp_path / "out").glob("s*.h5")):
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Stopped. Repeat the command to resume." in output
    assert "Traceback" not in output
    assert (tmp_path / "out" / "qc.csv").exists()


@pytest.mark.slow
def test_two_processes_share_a_folder_and_encode_every_slide_once(
    tmp_path: Path, slides: dict[str, Path]
) -> None:
    for number in range(3, 6):
        save(tmp_path / "slides" / f"s{number}.tiff", section(number))
    processes = [start(tmp_path, seconds=0.05) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert "6 slides done" in output
    found = [bags.read(tmp_path / "out" / f"s{number}.h5") for number in range(6)]
    batches = sum(-(-bag.info.n_patches // 8) for bag in found)
    probes = (tmp_path / "log.txt").read_text().count("batch") - batches
    assert probes <= 4  # an encoder is called once or twice when it is loaded
    with h5py.File(tmp_path / "out" / "s5.h5") as file:
        assert file["features"].chunks is None
