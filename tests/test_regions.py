"""Regions: any GeoJSON of QuPath becomes a mask by pixel centres, and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caprmil.errors import SlideError
from caprmil.slides import regions

SQUARE = [[10, 20], [50, 20], [50, 60], [10, 60], [10, 20]]
HOLE = [[20, 30], [30, 30], [30, 40], [20, 40], [20, 30]]
POLYGON = {"type": "Polygon", "coordinates": [SQUARE, HOLE]}


def feature(geometry: Any, **properties: Any) -> dict[str, Any]:
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def write(folder: Path, content: Any) -> Path:
    path = folder / "slide_07.geojson"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    "content",
    [
        {"type": "FeatureCollection", "features": [feature(POLYGON)]},
        [feature(POLYGON)],
        feature(POLYGON),
        POLYGON,
        {"type": "MultiPolygon", "coordinates": [POLYGON["coordinates"]]},
        {"type": "GeometryCollection", "geometries": [POLYGON]},
    ],
    ids=["collection", "list", "feature", "polygon", "multipolygon", "geometries"],
)
def test_every_form_of_geojson_polygon_is_read(tmp_path: Path, content: Any) -> None:
    mask = regions.read_regions(write(tmp_path, content)).to_mask((100, 80), (1, 1))
    assert mask.sum() == 40 * 40 - 10 * 10
    assert mask[20, 10]
    assert not mask[19, 10]
    assert not mask[35, 25]


def test_a_mask_has_one_scale_per_axis(tmp_path: Path) -> None:
    mask = regions.read_regions(write(tmp_path, POLYGON)).to_mask((50, 20), (0.25, 0.5))
    assert np.argwhere(mask).min(axis=0).tolist() == [10, 2]
    assert np.argwhere(mask).max(axis=0).tolist() == [29, 11]  # 50 is at 12.5, a pixel centre


def test_a_polygon_may_extend_beyond_the_slide(tmp_path: Path) -> None:
    mask = regions.read_regions(write(tmp_path, POLYGON)).to_mask((30, 15), (1, 1))
    assert mask.sum() == 10 * 5
    assert not regions.read_regions(write(tmp_path, POLYGON)).to_mask((10, 5), (1, 1)).any()


def test_overlapping_polygons_do_not_cancel(tmp_path: Path) -> None:
    path = write(tmp_path, [feature(POLYGON), feature({**POLYGON, "coordinates": [SQUARE]})])
    assert regions.read_regions(path).to_mask((100, 80), (1, 1)).sum() == 40 * 40


@pytest.mark.parametrize(
    "written",
    ["Tumor", {"name": "Tumor", "colorRGB": -3670016}, {"names": ["Tumor"], "color": [1, 2, 3]}],
    ids=["text", "name", "names"],
)
def test_polygons_are_selected_by_class(tmp_path: Path, written: Any) -> None:
    other = feature({**POLYGON, "coordinates": [HOLE]}, classification={"name": "Stroma"})
    path = write(tmp_path, [feature(POLYGON, classification=written), other, feature(POLYGON)])
    assert regions.read_regions(path).classes == ("Tumor", "Stroma", "")
    assert regions.read_regions(path, classes=["Tumor", "Necrosis"]).classes == ("Tumor",)


def test_points_and_lines_are_counted_and_ignored(tmp_path: Path) -> None:
    point = {"type": "Point", "coordinates": [1, 2]}
    line = {"type": "LineString", "coordinates": [[1, 2], [3, 4]]}
    path = write(tmp_path, [feature(point), feature(line), feature(POLYGON), feature(None)])
    found = regions.read_regions(path)
    assert (len(found.polygons), found.ignored) == (1, 3)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"slide_07\.geojson is not a GeoJSON file: "),
        ("\x00", r"slide_07\.geojson is not a GeoJSON file: "),
        (
            {"type": "Point", "coordinates": [1, 2]},
            r"slide_07\.geojson has no polygon, but 1 other",
        ),
        ([], r"slide_07\.geojson has no polygon, but 0 other"),
        ({"name": "x"}, r"slide_07\.geojson is not valid GeoJSON"),
        (3, r"slide_07\.geojson is not valid GeoJSON"),
        (feature({"type": "Polygon", "coordinates": [[[1, 2], [3, 4]]]}), "at least three corners"),
        (feature({"type": "Polygon", "coordinates": [["a", "b"]]}), "at least three corners"),
    ],
)
def test_an_invalid_file_is_named(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(SlideError, match=words):
        regions.read_regions(write(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match=r"There is no region file .*none\.geojson"):
        regions.read_regions(tmp_path / "none.geojson")


def test_an_unknown_class_lists_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, [feature(POLYGON, classification="Tumor"), feature(POLYGON)])
    with pytest.raises(SlideError, match=r"class 'Tumour'\. Did you mean 'Tumor'\? Known: \(no"):
        regions.read_regions(path, classes=["Tumour"])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_an_outline_gives_the_same_mask(share: float) -> None:
    mask = np.random.default_rng(0).random((40, 60)) < share
    found = regions.outlines(mask)
    drawn = regions.Regions(polygons=tuple(found), classes=("",) * len(found))
    assert (drawn.to_mask(mask.shape, (1, 1)) == mask).all()


def test_empty_and_full_masks_have_outlines() -> None:
    assert regions.outlines(np.zeros((5, 7), dtype=bool)) == []
    [[ring]] = regions.outlines(np.ones((5, 7), dtype=bool))
    assert (ring.min(), ring.max(axis=0).tolist()) == (0, [7, 5])


def test_geojson_for_qupath_is_read_back_unchanged(tmp_path: Path) -> None:
    mask = np.zeros((30, 40), dtype=bool)
    mask[5:25, 10:35] = True
    mask[10:15, 20:25] = False
    written = regions.as_geojson(mask, (32.01, 31.99))
    assert "crs" not in written
    found = regions.read_regions(write(tmp_path, written), classes=["Tissue"])
    assert [len(polygon) for polygon in found.polygons] == [2]
    assert found.polygons[0][0][:, 0].min() == pytest.approx(10 * 32.01)
    assert (found.to_mask(mask.shape, (1 / 32.01, 1 / 31.99)) == mask).all()
