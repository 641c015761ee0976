"""Patches of one slide are added to another, and the change of its prediction is measured."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from caprmil import explain
from caprmil.cli import app
from caprmil.errors import BagError, CaprmilError
from caprmil.explain.chosen_patches import (
    MarkedMost,
    parse_region,
    patches_inside,
    patches_marked_most,
)
from caprmil.explain.implant import (
    Implant,
    ImplantAnswers,
    check_alike,
    implant_answers,
    implant_region,
    implanted,
    unseen_models,
)
from caprmil.explain.implant_folder import draw_implant
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.runs.inference import TrainedModel
from caprmil.runs.run import Run
from caprmil.slides.regions import Regions
from caprmil.targets import Classification, Regression
from small_models import small_model

pytestmark = pytest.mark.slow

NAMES = ("a", "b")


def caprmil(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def bag(n: int, *, seed: int, width: int = 6, **metadata: Any) -> Bag:
    rng = np.random.default_rng(seed)
    coords = 100 * np.stack([np.arange(n) % 4, np.arange(n) // 4], axis=1)
    sizes: dict[str, Any] = {"patch_level0": 100.0, "step": 100.0, "unit": "px"}
    return bags.from_arrays(
        rng.normal(size=(n, width)).astype(np.float32), coords, **sizes, **metadata
    )


def answers(model: Any, features: NDArray[Any]) -> NDArray[np.float64]:
    with torch.no_grad():
        logits = model(torch.from_numpy(features)[None]).logits[0].double()
    return logits.softmax(dim=0).numpy()


def test_every_bag_is_predicted_as_a_bag_of_these_patches() -> None:
    models = [small_model("abmil", 6, 2, seed=seed) for seed in (0, 1)]
    trained = [TrainedModel(model, Classification(classes=NAMES)) for model in models]
    source, slide = bag(10, seed=0), bag(7, seed=1)
    inside = np.zeros(10, dtype=bool)
    inside[[2, 5, 6]] = True
    found = implant_answers(trained, source, slide, inside, draws=2, seed=3)
    rng = np.random.default_rng(3)
    drawn = [np.sort(rng.permutation(np.flatnonzero(~inside))[:3]) for _ in range(2)]
    for row, model in enumerate(models):
        joined = np.concatenate([slide.features, source.features[inside]])
        np.testing.assert_allclose(found.slide[row], answers(model, slide.features), atol=1e-6)
        np.testing.assert_allclose(found.with_region[row], answers(model, joined), atol=1e-6)
        np.testing.assert_allclose(found.source[row], answers(model, source.features), atol=1e-6)
        left = answers(model, source.features[~inside])
        assert found.without_region is not None
        np.testing.assert_allclose(found.without_region[row], left, atol=1e-6)
        others = [
            answers(model, np.concatenate([slide.features, source.features[rows]]))
            for rows in drawn
        ]
        assert found.with_others is not None
        np.testing.assert_allclose(found.with_others[row], np.mean(others, axis=0), atol=1e-6)
        others = [answers(model, np.delete(source.features, rows, axis=0)) for rows in drawn]
        assert found.without_others is not None
        np.testing.assert_allclose(found.without_others[row], np.mean(others, axis=0), atol=1e-6)


def test_a_region_of_all_patches_has_no_control() -> None:
    trained = [TrainedModel(small_model("mean", 6, 2), Classification(classes=NAMES))]
    everything = np.ones(10, dtype=bool)
    found = implant_answers(trained, bag(10, seed=0), bag(7, seed=1), everything)
    assert found.with_others is None
    assert found.without_region is None


def test_added_patches_keep_their_arrangement_to_the_right_of_the_slide() -> None:
    slide, part = bag(8, seed=0), bag(8, seed=1).select(np.array([5, 6]))
    joined = implanted(slide, part)
    cells = joined.grid()
    assert cells is not None
    np.testing.assert_array_equal(cells[:8], slide.grid())
    np.testing.assert_array_equal(cells[8:], [[5, 0], [6, 0]])
    bare = replace(part, coords=None)
    assert implanted(slide, bare).grid() is None


def naive_inside(polygon: Any, point: tuple[float, float]) -> bool:
    """Count the edges that a ray to the right crosses, one by one."""
    crossings, (x, y) = 0, point
    for ring in polygon:
        for n in range(len(ring) - 1):
            (x0, y0), (x1, y1) = ring[n], ring[n + 1]
            if min(y0, y1) <= y < max(y0, y1) and x0 + (y - y0) / (y1 - y0) * (x1 - x0) > x:
                crossings += 1
    return crossings % 2 == 1


def test_points_are_inside_of_polygons_and_outside_of_holes() -> None:
    rng = np.random.default_rng(0)
    outline = np.array([[0, 0], [9, 1], [7, 5], [10, 9], [1, 8], [3, 4], [0, 0]], dtype=float)
    hole = np.array([[4, 3], [6, 3], [6, 6], [4, 6], [4, 3]], dtype=float)
    regions = Regions(polygons=((outline, hole), (hole + 8,)), classes=("", ""))
    points = rng.uniform(-1, 15, size=(500, 2))
    expected = [
        naive_inside((outline, hole), tuple(point)) or naive_inside((hole + 8,), tuple(point))
        for point in points
    ]
    np.testing.assert_array_equal(regions.contains(points), expected)
    assert 50 < sum(expected) < 450
    assert not regions.contains(np.array([[5.0, 4.5]])).any()


def test_a_region_is_a_file_a_rectangle_or_the_top_patches(tmp_path: Path) -> None:
    rings = [[[90, 90], [310, 90], [310, 210], [90, 210], [90, 90]]]
    feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": rings}}
    path = tmp_path / "region.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    own = bag(16, seed=0)
    reference = explain.SlideReference(name="s", bag=tmp_path)
    for text in (str(path), "90,90,220,120", "90, 90, 220.0, 120"):
        region = parse_region(text)
        assert isinstance(region, Regions)
        # The centres are at 50, 150, 250 and 350: the second row, second and third column.
        np.testing.assert_array_equal(
            np.flatnonzero(patches_inside(region, reference, own)), [5, 6]
        )
    assert parse_region("top:5%") == MarkedMost(share=0.05)
    assert parse_region("top:12") == MarkedMost(number=12)
    assert [MarkedMost(share=0.05).count(n) for n in (3, 100)] == [1, 5]
    assert MarkedMost(number=12).count(5) == 5


@pytest.mark.parametrize("text", ["top:", "top:0", "top:101%", "top:2.5", "nowhere.geojson", "1,2"])
def test_a_region_that_is_none_of_these_is_an_error(text: str) -> None:
    with pytest.raises(CaprmilError, match="a GeoJSON file, x,y,width,height"):
        parse_region(text)


def test_a_region_that_cannot_be_found_is_an_error() -> None:
    region = parse_region("5000,5000,10,10")
    assert isinstance(region, Regions)
    reference = explain.SlideReference(name="s", bag=Path("s.h5"))
    with pytest.raises(BagError, match="between x = 0 and 400, y = 0 and 400"):
        patches_inside(region, reference, bag(16, seed=0))
    with pytest.raises(BagError, match="has no coordinates, so it is not known"):
        patches_inside(region, reference, replace(bag(4, seed=0), coords=None))
    with pytest.raises(CaprmilError, match="is empty"):
        parse_region("0,0,0,10")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"encoder": "uni"}, "encoders gigapath and uni"),
        ({"encoder": "gigapath", "fingerprint": "b"}, "different weights"),
        ({"encoder": "gigapath", "mpp": 1.0}, r"0\.5 and 1 um/px"),
        ({"width": 5}, "6 and 5 features"),
    ],
)
def test_bags_of_another_encoder_or_scale_are_not_mixed(
    metadata: dict[str, Any], message: str
) -> None:
    own = bag(4, seed=0, encoder="gigapath", mpp=0.5, fingerprint="a").info
    other = bag(4, seed=0, **metadata).info
    with pytest.raises(BagError, match=message):
        check_alike("one", own, "other", other)
    if "width" not in metadata:
        check_alike("one", own, "other", other, force=True)
    check_alike("one", own, "other", own)


def test_models_are_those_that_saw_neither_slide(tiny_run: Run) -> None:
    fold = tiny_run.splits[0]
    names, seen = unseen_models(tiny_run, fold.test[0], fold.test[1])
    assert (names, seen) == ((fold.name,), ())
    other = tiny_run.splits[1].test[0]
    names, seen = unseen_models(tiny_run, other, fold.test[0])
    assert names == (fold.name,)
    assert seen == (other,)
    assert unseen_models(tiny_run, "new", "newer")[1] == ()
    assert len(unseen_models(tiny_run, "new", "newer")[0]) == 3


def found_with(target: Any, *rows: Any) -> Implant:
    """Return an implant with these answers: slide, with region, with other patches, source."""
    slide, region, others, source = (np.array([row], dtype=float) for row in rows)
    given = ImplantAnswers(
        slide=slide,
        with_region=region,
        with_others=others,
        source=source,
        without_region=slide,
        without_others=source,
    )
    numbers: dict[str, Any] = {"region": 3, "others": 3, "map": None, "followed": 0}
    return Implant(
        **numbers,
        source="s",
        slide="t",
        folds=("fold-0",),
        seen=(),
        target=target,
        answers=given,
        sizes=(10, 20),
    )


def test_the_verdict_compares_with_other_patches() -> None:
    classes = Classification(classes=NAMES)
    follows = found_with(classes, (0.9, 0.1), (0.2, 0.8), (0.7, 0.3), (0.1, 0.9)).in_words()
    assert "follows the region: a 0.9000 before, b 0.8000 with the region, a 0.7000" in follows
    assert "other patches move it too" in (
        found_with(classes, (0.9, 0.1), (0.2, 0.8), (0.3, 0.7), (0.1, 0.9)).in_words()
    )
    alike = found_with(classes, (0.9, 0.1), (0.8, 0.2), (0.8, 0.2), (0.9, 0.1)).in_words()
    assert "does not turn" in alike
    assert "s has the same prediction" in alike
    number = Regression(mean=10.0, std=2.0)
    assert "follows" in found_with(number, (10.5,), (12.5,), (11,), (14,)).in_words()
    assert "move it too" in found_with(number, (10.5,), (12,), (11.4,), (14,)).in_words()
    assert "does not turn" in found_with(number, (20,), (16,), (19,), (2,)).in_words()


def test_marked_patches_of_a_low_value_are_those_for_a_lower_value() -> None:
    model = small_model("mean", 6, 1)
    own = bag(30, seed=0)
    for mean, sign in ((-100.0, 1), (100.0, -1)):
        target = Regression(mean=mean, std=1e-3)
        found = explain.explain(model, own, target=target, first="influence")
        object.__setattr__(found, "answer", np.array([0.0]))
        values = sign * found.values("influence", 0)
        marked = patches_marked_most(MarkedMost(number=4), found)
        assert set(np.flatnonzero(marked)) == set(np.argsort(-values)[:4])


@pytest.fixture(scope="module")
def run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy of the tiny run."""
    folder = tmp_path_factory.mktemp("implant") / "run"
    return Run(shutil.copytree(tiny_run.folder, folder))


def test_the_command_writes_a_table_a_file_and_a_figure(run: Run) -> None:
    source, slide = run.splits[0].test[:2]
    output = caprmil("explain", run.folder, source, "--implant", "top:10%", "--into", slide)
    folder = run.folder / "explain" / f"{source}-into-{slide}"
    assert {path.name for path in folder.iterdir()} == {"implant.json", "implant.png"}
    record = json.loads((folder / "implant.json").read_text())
    assert record["verdict"] in output.replace("\n", " ")
    assert "by 1 model that saw neither slide in training" in output
    assert len(record["bags"]) == 6
    n = len(bags.read(run.paths[source]).features)
    assert record["region_patches"] == round(0.1 * n)
    before = run.predict({slide: Path(run.paths[slide])}, device="cpu").answers[0]
    stored = record["bags"][0]["probabilities"]
    assert [stored[name] for name in run.target.titles] == pytest.approx(before.tolist(), abs=1e-5)
    for row in record["bags"]:
        assert row["bag"] in output
    with pytest.raises(CaprmilError, match="already exists"):
        caprmil("explain", run.folder, source, "--implant", "top:10%", "--into", slide)


def test_options_that_do_not_belong_together_are_refused(run: Run) -> None:
    source, slide = run.splits[0].test[:2]
    for words in (
        ("--implant", "top:3"),
        ("--into", slide),
        ("--implant", "top:3", "--into", slide, "--parquet"),
    ):
        with pytest.raises(CaprmilError, match="belong together"):
            caprmil("explain", run.folder, source, *words)
    with pytest.raises(CaprmilError, match="cannot be added to itself"):
        caprmil("explain", run.folder, source, "--implant", "top:3", "--into", source)
    assert not (run.folder / "explain" / f"{source}-into-{source}").exists()


def test_a_rectangle_of_the_slide_is_added(run: Run) -> None:
    source, slide = (explain.locate_slide(run, name) for name in run.splits[0].test[:2])
    region = parse_region("0,0,448,448")
    found = implant_region(run, source, region, slide, device="cpu")
    assert (found.region, found.map) == (4, None)
    own, other = (bags.read(each.bag).features for each in (source, slide))
    rows = bags.read(source.bag).coords
    assert rows is not None
    joined = np.concatenate([other, own[(rows < 448).all(axis=1)]])
    expected = answers(run.model(found.folds[0]), joined)
    np.testing.assert_allclose(found.answers.with_region[0], expected, atol=1e-5)
    assert len(draw_implant(found).axes[0].get_yticks()) == 6
