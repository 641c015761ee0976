"""Quality control: records, their table, and overlay images."""

import csv
from pathlib import Path

import numpy as np

from caprmil.slides import qc
from caprmil.slides.patches import Patches
from caprmil.slides.qc import GRID, OUTLINE, PEN, Record
from caprmil.slides.slide import Thumbnail


def grid(*corners: tuple[int, int]) -> Patches:
    coords = np.array(corners).reshape(-1, 2)
    return Patches(coords=coords, tissue=np.ones(len(coords)), px=64, side=160.0, step=160.0)


def test_a_record_is_read_back_unchanged(tmp_path: Path) -> None:
    record = Record(slide="ä b", state="done", patches=3, tissue_mm2=0.5, flags="pen")
    record.write(tmp_path)
    assert Record.read(tmp_path, "ä b") == record
    assert Record.read(tmp_path, "another") is None


def test_an_invalid_record_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"slide": "b", "colour": "red"}')
    assert (Record.read(tmp_path, "a"), Record.read(tmp_path, "b")) == (None, None)


def test_failed_and_flagged_slides_come_first(tmp_path: Path) -> None:
    for slide, state, flags in [
        ("fine", "done", ""),
        ("inked", "done", "pen"),
        ("empty", "no tissue", "no tissue"),
        ("broken", "failed", ""),
    ]:
        Record(slide=slide, state=state, flags=flags).write(tmp_path / "qc")  # type: ignore[arg-type]
    qc.write_table(tmp_path / "qc", tmp_path / "qc.csv")
    with (tmp_path / "qc.csv").open() as stream:
        slides = [row["slide"] for row in csv.DictReader(stream)]
    assert slides == ["broken", "empty", "inked", "fine"]


def test_the_overlay_shows_outline_grid_and_pen() -> None:
    image = np.full((700, 900, 3), 240, dtype=np.uint8)
    mask, pen = np.zeros((2, 700, 900), dtype=bool)
    mask[100:300, 100:300] = True
    pen[350:450, 400:500] = True
    thumbnail = Thumbnail(image=image, scale=4.0, mpp=8.0)
    overlay = np.array(qc.overlay(thumbnail, mask, pen, grid((800, 800))))
    assert overlay.shape == image.shape
    assert tuple(overlay[200, 100]) == OUTLINE
    assert tuple(overlay[400, 400]) == PEN
    assert tuple(overlay[200, 220]) == GRID  # 800 / 4, on its upper line
    assert tuple(overlay[50, 50]) == (240, 240, 240)


def test_the_overlay_of_a_large_slide_is_downsampled() -> None:
    image = np.full((3000, 4000, 3), 240, dtype=np.uint8)
    thumbnail = Thumbnail(image=image, scale=32.0, mpp=8.0)
    nothing = np.zeros((3000, 4000), dtype=bool)
    overlay = qc.overlay(thumbnail, nothing, nothing, grid())
    assert overlay.size == (1600, 1200)
    captioned = qc.add_caption(overlay, "a long line of text " * 20)
    assert captioned.height > overlay.height
    assert captioned.width >= overlay.width
