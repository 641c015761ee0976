"""Tables, HDF5 and GeoJSON hold every number of an explanation, in the row of its patch."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import h5py
import numpy as np
import pytest

from caprmil.errors import BagError, CaprmilError
from caprmil.explain import (
    Explanation,
    explain,
    explanation_figures,
    patch_boxes,
    top_patches,
    write_csv,
    write_geojson,
    write_hdf5,
    write_parquet,
)
from caprmil.explain.patch_tables import patch_columns
from caprmil.features import bags
from caprmil.slides import regions
from caprmil.targets import Classification, Regression, Target
from small_models import small_model

CLASSES = ("normal", 'tumour, "high" grade')
TARGET = Classification(classes=CLASSES)


def make(
    model: str = "caprmil",
    n: int = 30,
    *,
    placed: bool = True,
    target: Target = TARGET,
    **settings: object,
) -> Explanation:
    rng = np.random.default_rng(0)
    coords = np.stack([np.arange(n) % 6, np.arange(n) // 6], axis=1) * 224 + 11
    features = rng.normal(size=(n, 8)).astype(np.float32)
    sizes = {"patch_level0": 224.0, "step": 224.0} if placed else {}
    bag = bags.from_arrays(features, coords if placed else None, **sizes)
    network = small_model(model, 8, target.n_outputs, **settings)
    return explain(network, bag, target=target, slide="s", fold="fold-0")


def geojson(explanation: Explanation, path: Path, **options: bool | int) -> list[dict]:
    write_geojson(
        explanation, patch_boxes(explanation.info, explanation.coords, None), path, **options
    )  # type: ignore[arg-type]
    content = json.loads(path.read_text())
    assert set(content) == {"type", "features"}  # no coordinate system: QuPath takes pixels
    return content["features"]


def of_type(features: list[dict], kind: str) -> list[dict]:
    return [f["properties"] for f in features if f["properties"]["objectType"] == kind]


def test_a_table_restores_every_number(tmp_path: Path) -> None:
    explanation = make()
    with write_csv(explanation, tmp_path / "patches.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for name, values in patch_columns(explanation).items():
        found = np.array([row[name] for row in rows], dtype=values.dtype)
        np.testing.assert_array_equal(found, values)
    assert list(rows[0])[:5] == ["row", "x", "y", "term-0", "term-1"]


def test_the_terms_of_a_table_sum_to_the_logit() -> None:
    explanation = make()
    found = patch_columns(explanation)
    for number in range(2):
        total = found[f"term-{number}"].sum(dtype=np.float64) + explanation.rest[number]
        assert total == pytest.approx(explanation.logits[number], abs=1e-5)
    contrast = found["term-1"] - found["term-0"]
    np.testing.assert_allclose(found["evidence-1"], contrast, rtol=1e-5, atol=1e-7)


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    explanation = make()
    table = parquet.read_table(write_parquet(explanation, tmp_path / "patches.parquet"))
    assert table.column_names == list(patch_columns(explanation))
    for name, values in patch_columns(explanation).items():
        np.testing.assert_array_equal(table[name].to_numpy(), values)
    assert json.loads(table.schema.metadata[b"classes"]) == list(CLASSES)


def test_parquet_without_pyarrow_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CaprmilError, match=r'pip install "caprmil\[parquet\]"'):
        write_parquet(make(), tmp_path / "patches.parquet")
    assert list(tmp_path.iterdir()) == []


def test_hdf5_holds_all_arrays(tmp_path: Path) -> None:
    explanation = make(depth=2)
    with h5py.File(write_hdf5(explanation, tmp_path / "scores.h5")) as file:
        assert explanation.assignments is not None
        np.testing.assert_array_equal(file["assignments"], explanation.assignments)
        total = file["evidence"][:].sum(axis=0) + file["rest"][:]
        np.testing.assert_allclose(total, file["logits"], atol=1e-5)
        np.testing.assert_array_equal(file["coords"], explanation.coords)
        assert list(file.attrs["classes"]) == list(CLASSES)
        assert (file.attrs["slide"], file.attrs["fold"]) == ("s", "fold-0")
        assert (file.attrs["method"], file.attrs["model"]) == ("exact", "CAPRMIL + mean")


def test_every_patch_is_a_detection_with_all_measurements(tmp_path: Path) -> None:
    explanation = make()
    features = geojson(explanation, tmp_path / "patches.geojson")
    found = of_type(features, "detection")
    assert len(found) == len(explanation)
    layers = [layer for layer in explanation.layers() if "head-" not in layer.key]
    for row, patch in enumerate(found):
        expected = {layer.title: pytest.approx(layer.values[row], rel=1e-5) for layer in layers}
        assert patch["measurements"] == expected
    weights = explanation.assignments[-1].mean(axis=0)  # type: ignore[index]
    kinds = [f"Token {token + 1}" for token in weights.argmax(axis=1)]
    assert [patch["classification"]["name"] for patch in found] == kinds


def test_the_boxes_of_patches_are_their_coordinates(tmp_path: Path) -> None:
    explanation, path = make(), tmp_path / "patches.geojson"
    last = geojson(explanation, path)[-1]["geometry"]["coordinates"][0]
    x, y = explanation.coords[-1].tolist()  # type: ignore[index]
    assert last == [[x, y], [x + 224, y], [x + 224, y + 224], [x, y + 224], [x, y]]
    read = regions.read_regions(path, classes=["Top of token 1"])
    assert len(read.polygons) == 8


def test_top_patches_are_annotations(tmp_path: Path) -> None:
    explanation = make()
    found = of_type(geojson(explanation, tmp_path / "patches.geojson", top=3), "annotation")
    names = [patch["name"] for patch in found if "token" in patch["name"]]
    assert names == [f"Top of token {t}, {r}" for t in (1, 2, 3) for r in (1, 2, 3)]
    best = top_patches(explanation.token(0), 1)[0]
    first = next(patch for patch in found if patch["name"] == "Top of token 1, 1")
    assert first["measurements"] == {
        "Token 1, all heads": pytest.approx(explanation.token(0)[best])
    }


def test_there_is_no_annotation_against_without_patches_against(tmp_path: Path) -> None:
    explanation = make()
    ((name, values),) = explanation.maps.items()
    explanation = replace(explanation, maps={name: np.abs(values)})
    found = of_type(geojson(explanation, tmp_path / "patches.geojson"), "annotation")
    assert not any("against" in patch["name"] for patch in found)


def test_without_tokens_a_patch_has_the_class_that_it_is_evidence_for(tmp_path: Path) -> None:
    explanation = make("abmil")
    found = of_type(geojson(explanation, tmp_path / "patches.geojson"), "detection")
    expected = [f"For {CLASSES[n]}" for n in explanation.evidence.argmax(axis=1)]
    assert [patch["classification"]["name"] for patch in found] == expected


def test_without_tokens_a_patch_is_for_a_higher_or_a_lower_value(tmp_path: Path) -> None:
    explanation = make("abmil", target=Regression())
    found = geojson(explanation, tmp_path / "patches.geojson")
    ends = ("For a lower value", "For a higher value")
    expected = [ends[int(value > 0)] for value in explanation.evidence[:, 0]]
    assert set(expected) == set(ends)
    names = [patch["classification"]["name"] for patch in of_type(found, "detection")]
    assert names == expected
    assert not any("against" in patch["name"] for patch in of_type(found, "annotation"))


def test_heads_are_optional_measurements(tmp_path: Path) -> None:
    found = of_type(geojson(make(), tmp_path / "patches.geojson", heads=True), "detection")
    assert "Head 2, token 3" in found[0]["measurements"]


def test_nan_is_left_out(tmp_path: Path) -> None:
    explanation = make()
    explanation.attention[4] = np.nan
    found = of_type(geojson(explanation, tmp_path / "patches.geojson"), "detection")
    assert ["Attention" in patch["measurements"] for patch in found[3:6]] == [True, False, True]


def test_without_coordinates_there_is_a_table_but_no_geojson(tmp_path: Path) -> None:
    explanation = make(placed=False)
    with pytest.raises(BagError, match="has no coordinates"):
        write_geojson(explanation, None, tmp_path / "patches.geojson")
    assert list(tmp_path.iterdir()) == []
    header = write_csv(explanation, tmp_path / "patches.csv").read_text().splitlines()[0]
    assert header.startswith("row,term-0")
    with h5py.File(write_hdf5(explanation, tmp_path / "scores.h5")) as file:
        assert "coords" not in file


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "existing"
    path.write_text("existing")
    for write in (write_csv, write_parquet, write_hdf5):
        with pytest.raises(CaprmilError, match="already exists"):
            write(make(n=2), path)
    with pytest.raises(CaprmilError, match="already exists"):
        geojson(make(n=2), path)
    assert path.read_text() == "existing"


def test_all_rows_of_a_long_bag_are_written(tmp_path: Path) -> None:
    lines = write_csv(make("mean", 5000), tmp_path / "patches.csv").read_text().splitlines()
    assert len(lines) == 5001
    assert lines[-1].startswith("4999,")


def test_a_gallery_of_one_sign_has_no_patch_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation_figures, "read_patch", lambda *_: np.zeros((1, 1, 3)))
    drawing = object.__new__(explanation_figures.ExplanationFigures)
    drawing.slide, drawing.boxes, drawing.top = (
        cast(Any, object()),
        cast(Any, SimpleNamespace(side=1.0)),
        4,
    )
    values = np.array([0.5, -0.2, 3.0, 0.1, -0.7])
    for sign, rows in ((1, [2, 0, 3]), (-1, [4, 1])):
        found = drawing.gallery(sign * values, values, signed=True)
        assert list(found.rows) == rows
        assert all(caption.startswith("+" if sign > 0 else "-") for caption in found.captions)
    weakest = drawing.gallery(-np.abs(values), np.abs(values), signed=True)
    assert list(weakest.rows) == [3, 1, 0, 4]  # none is against: the title says so
