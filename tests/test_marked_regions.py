"""Regions are adjacent patches of equal sign, and their effect is that of a bag without them."""

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from caprmil.explain import (
    Explanation,
    explain,
    find_regions,
    patch_boxes,
    region_effects,
    write_csv,
    write_parquet,
    write_region_geojson,
)
from caprmil.explain.browser import row_ranges
from caprmil.explain.marked_regions import LEAST, MOST, connected, relevance_of
from caprmil.explain.patch_boxes import PatchBoxes
from caprmil.explain.region_outlines import area, area_mm2, outline
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.models import MILModel
from caprmil.targets import Classification, Regression, Target
from small_models import small_model

SIDE = 224
TARGET = Classification(classes=("normal", "tumour"))
Cells = set[tuple[int, int]]

cell_sets = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1)


def make_bag(n: int = 80, *, columns: int = 10, seed: int = 0) -> Bag:
    rng = np.random.default_rng(seed)
    coords = SIDE * np.stack(np.divmod(np.arange(n), columns)[::-1], axis=1)
    features = rng.normal(size=(n, 8)).astype(np.float32)
    return bags.from_arrays(features, coords, patch_level0=float(SIDE), step=float(SIDE))


def explained(
    bag: Bag, model: str = "caprmil", *, target: Target = TARGET, **options: Any
) -> tuple[MILModel, Explanation]:
    torch.manual_seed(0)
    network = small_model(model, 8, target.n_outputs)
    return network, explain(network, bag, target=target, slide="s", fold="fold-0", **options)


def with_map(explanation: Explanation, values: Iterable[float]) -> Explanation:
    """Return an explanation whose first map has these values for the predicted class."""
    terms = np.zeros_like(explanation.evidence)
    terms[:, explanation.predicted] = list(values)
    return replace(explanation, maps={"influence": terms}, first="influence")


def flood(cells: Cells, *, diagonal: bool) -> list[Cells]:
    """Return the connected components of cells by a flood fill."""
    rest, found = set(cells), []
    while rest:
        stack, part = [rest.pop()], set()
        while stack:
            x, y = stack.pop()
            part.add((x, y))
            for dx in (-1, 0, 1):
                for dy in (-1, 0, 1):
                    if (diagonal or 0 in (dx, dy)) and (x + dx, y + dy) in rest:
                        rest.remove((x + dx, y + dy))
                        stack.append((x + dx, y + dy))
        found.append(part)
    return found


def boxes_of(cells: Iterable[tuple[int, int]], side: float = 1.0, step: float = 1.0) -> PatchBoxes:
    return PatchBoxes(corners=step * np.array(sorted(cells), dtype=np.float64), side=side)


def all_rows(boxes: PatchBoxes) -> NDArray[np.int64]:
    return np.arange(len(boxes.corners))


# Finding


@given(cell_sets)
def test_components_are_those_of_a_flood_fill(cells: Cells) -> None:
    ordered = sorted(cells)
    labels = connected(np.array(ordered))
    found = {
        frozenset(cell for cell, own in zip(ordered, labels, strict=True) if own == label)
        for label in labels
    }
    assert found == {frozenset(part) for part in flood(cells, diagonal=True)}


def test_two_patches_in_one_cell_are_connected() -> None:
    assert connected(np.array([[3, 3], [9, 9], [3, 3]])).tolist() == [0, 1, 0]


def naive_regions(values: NDArray[np.float64], cells: NDArray[np.int64]) -> list[tuple[int, Cells]]:
    found = []
    for sign in (1, -1):
        relevance = {tuple(c): sign * v for c, v in zip(cells.tolist(), values, strict=True)}
        relevance = {cell: value for cell, value in relevance.items() if value > 0}
        whole = sum(relevance.values())
        core, held = set(), 0.0
        for cell in sorted(relevance, key=lambda c: -relevance[c]):
            if held < whole / 2:
                core.add(cell)
            held += relevance[cell]
        weakest = min(relevance[cell] for cell in core)
        wide = {cell for cell, value in relevance.items() if value >= weakest / 2}
        parts = [p for p in flood(wide, diagonal=True) if p & core]
        sums = {frozenset(p): sum(relevance[c] for c in p) for p in parts}
        kept = [p for p in sums if sums[p] >= LEAST * whole]
        found += [(sign, set(p)) for p in sorted(kept, key=lambda p: -sums[p])[:MOST]]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_regions_are_those_of_a_naive_search(seed: int) -> None:
    bag = make_bag(300, columns=20)
    _, explanation = explained(bag, "mean")
    values = np.random.default_rng(seed).normal(size=300)
    explanation = with_map(explanation, values)
    cells = bag.grid()
    assert cells is not None
    found = [
        (region.sign, {tuple(cell) for cell in cells[region.rows].tolist()})
        for region in find_regions(explanation)
    ]
    assert found == naive_regions(relevance_of(explanation), cells)
    assert {sign for sign, _ in found} == {1, -1}


def test_a_weak_patch_inside_a_region_does_not_split_it() -> None:
    values = np.full(80, -0.01)
    values[[20, 21, 23, 24]] = 1.0
    values[22] = 0.6
    _, explanation = explained(make_bag(), "mean")
    first = find_regions(with_map(explanation, values))[0]
    assert first.rows.tolist() == [20, 21, 22, 23, 24]
    assert first.share == pytest.approx(1.0)


def test_patches_of_different_sign_are_in_different_regions() -> None:
    values = np.zeros(80)
    values[[33, 34]], values[[35, 36]] = 1.0, -1.0
    _, explanation = explained(make_bag(), "mean")
    found = find_regions(with_map(explanation, values))
    assert [(region.sign, region.rows.tolist()) for region in found] == [
        (1, [33, 34]),
        (-1, [35, 36]),
    ]


def test_a_map_without_a_sign_is_replaced_by_evidence_relative_to_its_mean() -> None:
    _, explanation = explained(make_bag(), "abmil", first="attention")
    evidence = explanation.evidence_for(explanation.predicted).astype(np.float64)
    np.testing.assert_allclose(relevance_of(explanation), evidence - evidence.mean())


@pytest.mark.parametrize(
    ("coords", "why"),
    [
        (None, "has no coordinates"),
        (np.array([[0, 0], [17, 90], [400, 31]]), "distance of neighbouring patches is not known"),
    ],
)
def test_without_a_grid_there_are_no_regions_and_a_reason(coords: Any, why: str) -> None:
    bag = bags.from_arrays(np.random.default_rng(0).normal(size=(3, 8)), coords)
    model, explanation = explained(bag)
    found = region_effects(model, bag, explanation)
    assert found.regions == ()
    assert why in found.reason


def test_a_map_without_differences_has_no_regions() -> None:
    bag = make_bag()
    model, explanation = explained(bag)
    found = region_effects(model, bag, with_map(explanation, np.zeros(80)))
    assert "all patches have the same value" in found.reason


# Effects


@pytest.mark.parametrize("name", ["caprmil", "abmil", "transmil"])
def test_the_effect_of_a_region_is_that_of_a_bag_without_its_rows(name: str) -> None:
    bag = make_bag()
    model, explanation = explained(bag, name)
    found = region_effects(model, bag, explanation)
    of = explanation.predicted
    assert len(found.regions) > 2
    for removal in (*found.regions, *found.together.values()):
        kept = np.setdiff1d(np.arange(80), removal.rows)
        rest = bags.from_arrays(bag.features[kept], bag.coords[kept], step=float(SIDE))  # type: ignore[index]
        with torch.no_grad():
            grid = torch.from_numpy(rest.grid())[None]
            logits = model(torch.from_numpy(rest.features)[None], grid=grid).logits[0]
        alone = logits.double().softmax(dim=0).numpy()
        np.testing.assert_allclose(removal.answer, alone, rtol=1e-5)
        before, after = explanation.answer[of], alone[of]
        assert found.effect(removal) == pytest.approx(before - after, abs=1e-6)


def test_regions_are_in_the_order_of_their_effect() -> None:
    bag = make_bag(200, columns=20)
    model, explanation = explained(bag)
    found = region_effects(model, bag, explanation)
    assert [region.number for region in found.regions] == list(range(1, len(found.regions) + 1))
    effects = [found.effect(region) for region in found.of_sign(1)]
    assert effects == sorted(effects, reverse=True)
    against = [found.effect(region) for region in found.of_sign(-1)]
    assert against == sorted(against)
    assert [region.sign for region in found.regions] == sorted(
        (region.sign for region in found.regions), reverse=True
    )


def test_all_regions_of_a_sign_are_also_removed_together() -> None:
    bag = make_bag(200, columns=20)
    model, explanation = explained(bag)
    found = region_effects(model, bag, explanation)
    for sign in (1, -1):
        rows = sorted(row for region in found.of_sign(sign) for row in region.rows.tolist())
        assert found.together[sign].rows.tolist() == rows


def test_random_removals_of_equal_patches_change_nothing() -> None:
    features = np.ones((80, 8), dtype=np.float32)
    bag = make_bag()
    bag = bags.from_arrays(features, bag.coords, step=float(SIDE))
    model, explanation = explained(bag)
    explanation = with_map(explanation, np.r_[np.ones(3), np.zeros(77)])
    (region,) = region_effects(model, bag, explanation).regions
    np.testing.assert_allclose(region.random, explanation.answer, rtol=1e-5)
    np.testing.assert_allclose(region.answer, explanation.answer, rtol=1e-5)


def test_a_bag_that_is_read_in_chunks_has_the_same_effects(tmp_path: Path) -> None:
    bag = make_bag()
    path = bags.write(
        tmp_path / "s.h5", bag.features, bag.coords, dtype="float32", step=float(SIDE)
    )
    model, explanation = explained(bag)
    whole = region_effects(model, bag, explanation)
    with bags.streaming(path, rows=13) as stream:
        chunked = region_effects(model, stream, explanation)
    for one, other in zip(whole.regions, chunked.regions, strict=True):
        np.testing.assert_array_equal(one.rows, other.rows)
        np.testing.assert_allclose(one.answer, other.answer, rtol=1e-5)
        np.testing.assert_allclose(one.random, other.random, rtol=1e-5)


def test_progress_ends_at_its_total() -> None:
    steps: list[tuple[int, int]] = []
    bag = make_bag()
    model, explanation = explained(bag)
    region_effects(model, bag, explanation, progress=lambda *step: steps.append(step))
    assert [done for done, _ in steps] == list(range(1, steps[-1][1] + 1))


# Outlines


def check_ring(ring: list[list[float]], *, is_hole: bool) -> None:
    """Check a ring by the rules of RFC 7946, 3.1.6, pair by pair."""
    assert len(ring) >= 4
    assert ring[0] == ring[-1]
    points = [tuple(point) for point in ring[:-1]]
    assert all(len(point) == 2 and all(map(math.isfinite, point)) for point in points)
    assert len(set(points)) == len(points), "the ring meets a corner twice"
    twice = sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise(ring))
    assert twice < 0 if is_hole else twice > 0, "right-hand rule"
    edges = list(pairwise(ring))
    for n, one in enumerate(edges):
        for m in range(n + 1, len(edges)):
            neighbours = m == n + 1 or (n == 0 and m == len(edges) - 1)
            shared = common_points(one, edges[m])
            assert shared <= (1 if neighbours else 0), (one, edges[m])


def common_points(one: Any, other: Any) -> float:
    """Return how many points two edges along the axes share; infinity if they share a line."""
    spans = []
    for axis in (0, 1):
        low = max(min(one[0][axis], one[1][axis]), min(other[0][axis], other[1][axis]))
        high = min(max(one[0][axis], one[1][axis]), max(other[0][axis], other[1][axis]))
        spans.append(high - low)
    if min(spans) < 0:
        return 0
    return 1 if max(spans) == 0 else math.inf


def inside(point: tuple[float, float], rings: list[list[list[float]]]) -> bool:
    """Return whether a ray from a point crosses the rings an odd number of times."""
    x, y = point
    crossings = 0
    for ring in rings:
        for (x0, y0), (x1, y1) in pairwise(ring):
            crossings += (y0 > y) != (y1 > y) and x < (x1 - x0) * (y - y0) / (y1 - y0) + x0
    return crossings % 2 == 1


def check_geometry(geometry: dict[str, Any]) -> list[Any]:
    """Check a geometry, and return its polygons."""
    assert set(geometry) == {"type", "coordinates"}
    assert geometry["type"] in ("Polygon", "MultiPolygon")
    several = geometry["type"] == "MultiPolygon"
    polygons = geometry["coordinates"] if several else [geometry["coordinates"]]
    assert not several or len(polygons) > 1
    for outer, *holes in polygons:
        check_ring(outer, is_hole=False)
        for hole in holes:
            check_ring(hole, is_hole=True)
            (x, y), (u, v) = hole[0], hole[1]
            beside = ((x + u) / 2 + (v - y) * 1e-3, (y + v) / 2 - (u - x) * 1e-3)
            assert inside(beside, [outer])
    return polygons


@given(cell_sets)
def test_an_outline_holds_exactly_its_cells(cells: Cells) -> None:
    boxes = boxes_of(cells)
    polygons = [[ring.tolist() for ring in p] for p in outline(boxes, all_rows(boxes))]
    kind = "MultiPolygon" if len(polygons) > 1 else "Polygon"
    check_geometry({"type": kind, "coordinates": polygons if len(polygons) > 1 else polygons[0]})
    assert len(polygons) == len(flood(cells, diagonal=False))
    for x in range(-1, 7):
        for y in range(-1, 7):
            covering = sum(inside((x + 0.5, y + 0.5), polygon) for polygon in polygons)
            assert covering == ((x, y) in cells)
    assert area(outline(boxes, all_rows(boxes))) == pytest.approx(len(cells))


def test_a_ring_of_cells_has_a_hole_also_if_the_hole_touches_the_outside() -> None:
    ring = {(x, y) for x in range(3) for y in range(3)} - {(1, 1)}
    ((outer, hole),) = outline(boxes_of(ring), np.arange(8))
    assert (len(outer), len(hole)) == (5, 5)
    ((outer, hole),) = outline(boxes_of(ring - {(2, 2)}), np.arange(7))
    assert (len(outer), len(hole)) == (7, 5)


def test_overlapping_patches_count_once() -> None:
    boxes = boxes_of({(0, 0), (1, 0), (2, 0)}, side=200, step=100)
    ((ring,),) = outline(boxes, all_rows(boxes))
    assert area(outline(boxes, all_rows(boxes))) == 400 * 200
    assert len(ring) == 5
    assert area_mm2(outline(boxes, all_rows(boxes)), 0.5) == pytest.approx(0.2 * 0.1)


def test_patches_with_gaps_are_separate_squares() -> None:
    boxes = boxes_of({(0, 0), (1, 0)}, side=80, step=100)
    assert len(outline(boxes, all_rows(boxes))) == 2
    assert area(outline(boxes, all_rows(boxes))) == 2 * 80 * 80


def test_edges_that_differ_by_rounding_are_merged() -> None:
    corners = np.array([[0.0, 0.0], [223.999_999, 0.0], [448.000_001, 0.0]])
    boxes = PatchBoxes(corners=corners, side=224.0)
    ((ring,),) = outline(boxes, np.arange(3))
    assert len(ring) == 5


# Files


@pytest.mark.parametrize("target", [TARGET, Regression()])
def test_geojson_has_an_annotation_with_its_effect_for_each_region(
    target: Target, tmp_path: Path
) -> None:
    bag = make_bag()
    model, explanation = explained(bag, target=target)
    found = region_effects(model, bag, explanation)
    boxes = patch_boxes(explanation.info, explanation.coords, None)
    assert boxes is not None
    path = write_region_geojson(found, explanation, boxes, tmp_path / "regions.geojson", mpp=0.5)
    content = json.loads(path.read_text())
    assert set(content) == {"type", "features"}
    assert content["type"] == "FeatureCollection"
    assert len(content["features"]) == len(found.regions)
    of = found.of
    contrast = target.contrasts[of]
    title = (
        "Predicted value" if target.number_name == "value" else f"Probability of {contrast.name}"
    )
    for region, feature in zip(found.regions, content["features"], strict=True):
        assert feature["type"] == "Feature"
        polygons = check_geometry(feature["geometry"])
        for row, corner in enumerate(boxes.corners):
            covering = sum(inside(tuple(corner + SIDE / 2), rings) for rings in polygons)
            assert covering == (row in region.rows)
        properties = feature["properties"]
        words = contrast.positive if region.sign > 0 else contrast.negative
        assert properties["objectType"] == "annotation"
        assert properties["classification"]["name"] == f"Region {words}"
        assert properties["name"].startswith(f"Region {region.number}, {words}: ")
        numbers = properties["measurements"]
        before, after = found.answer[of], region.answer[of]
        assert numbers[f"{title}: effect of the region"] == pytest.approx(before - after, rel=1e-4)
        assert numbers[f"{title}: without the region"] == pytest.approx(after, rel=1e-5)
        assert numbers[f"{title}: with all patches"] == pytest.approx(before, rel=1e-5)
        assert numbers["Patches"] == len(region.rows)
        square = (SIDE * 0.5 / 1000) ** 2
        assert numbers["Area mm^2"] == pytest.approx(len(region.rows) * square, rel=1e-4)


def test_tables_have_the_number_of_the_region_or_an_empty_cell(tmp_path: Path) -> None:
    bag = make_bag()
    model, explanation = explained(bag)
    found = region_effects(model, bag, explanation)
    expected = ["" for _ in range(80)]
    for region in found.regions:
        for row in region.rows:
            expected[row] = str(region.number)
    path = write_csv(explanation, tmp_path / "patches.csv", regions=found)
    with path.open(newline="") as stream:
        assert [row["region"] for row in csv.DictReader(stream)] == expected
    assert "" in expected
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write_parquet(explanation, tmp_path / "patches.parquet", regions=found)
    column = parquet.read_table(path)["region"].to_pylist()
    assert column == [int(cell) if cell else None for cell in expected]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_of_rows_hold_exactly_these_rows(rows: set[int]) -> None:
    ranges = row_ranges(np.array(sorted(rows)))
    assert [row for first, end in ranges for row in range(first, end)] == sorted(rows)
    assert all(end < first for (_, end), (first, _) in pairwise(ranges))
