"""Faithfulness: the curves are those of a plain loop, and the map that is right wins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caprmil import explain
from caprmil.errors import RunError
from caprmil.explain.faithfulness import (
    RANDOM,
    SHARES,
    Curves,
    Faithfulness,
    Track,
    rank,
    steps,
)
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.models import MILModel, create, list_models
from caprmil.runs.run import Run

WIDTH = 8


def planted() -> MILModel:
    """A mean whose weights are set by hand: feature 0 speaks for class 1, nothing else does."""
    model = create("mean", in_dim=WIDTH, n_outputs=2, dim=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.project.weight[0, 0] = 1.0
        model.classify.weight[1, 0] = 40.0
        model.classify.bias[1] = -2.0
    return model.eval()


def make_bag(n: int, seed: int = 0) -> Bag:
    rng = np.random.default_rng(seed)
    corners = 224 * np.stack(np.divmod(np.arange(n), 7), axis=1)
    features = rng.normal(size=(n, WIDTH)).astype(np.float32)
    return bags.from_arrays(features, corners, step=224.0)


def needle(n: int = 20) -> Bag:
    """A bag in which patch 3 carries class 1, and every other patch carries nothing."""
    features = np.zeros((n, WIDTH), dtype=np.float32)
    features[3, 0] = 6.0
    return bags.from_arrays(features)


def ask(model: MILModel, bag: Bag, **options: Any) -> Faithfulness:
    told = explain.explain(model, bag, classes=("normal", "tumour"), slide="a slide")
    return explain.faithfulness(model, bag, told, **options)


def make(name: str) -> MILModel:
    torch.manual_seed(0)
    return create(name, in_dim=WIDTH, n_outputs=2).eval()


@pytest.mark.parametrize("name", ["abmil", "transmil", "caprmil", "bayesmil"])
def test_curves_are_those_of_a_plain_loop(name: str) -> None:
    model, bag = make(name), make_bag(30)
    values = np.random.default_rng(1).normal(size=30)
    found = ask(model, bag, of=1, maps={"mine": values}).curves["mine"]

    cells = torch.from_numpy(bag.grid())
    for track, sign in ((found.most, -1), (found.least, 1)):
        for step, share in enumerate(found.removed):
            gone = sorted(range(30), key=lambda row: sign * values[row])[: round(share * 30)]
            stay = [row for row in range(30) if row not in gone]
            with torch.no_grad():
                left = torch.from_numpy(bag.features[stay])[None]
                (logits,) = model(left, grid=cells[stay][None]).logits
            assert track.probability[step] == pytest.approx(float(logits.softmax(0)[1]), abs=1e-5)
            assert track.lead[step] == pytest.approx(float(logits[1] - logits[0]), abs=1e-4)


def test_the_area_is_that_of_trapezoids() -> None:
    most = Track(np.array([1, 0.4, 0.0]), np.array([3.0, 0, -3]))
    least = Track(np.array([1, 1, 0.5]), np.array([3.0, 4, 0]))
    curves = Curves(removed=np.array([0, 0.2, 0.6]), most=most, least=least)
    assert curves.area == pytest.approx(0.2 * 0.3 + 0.4 * (0.6 + 0.5) / 2)
    assert curves.lead_area == pytest.approx(0.2 * 2 + 0.4 * 3.5)


def test_evidence_finds_the_one_patch_that_carries_the_class() -> None:
    curves = ask(planted(), needle()).curves
    assert curves["evidence"].most.probability[1] < 0.2  # with one patch gone
    assert curves["evidence"].most.probability[0] > 0.9
    assert np.diff(curves["evidence"].most.probability).max() <= 1e-6  # it falls and stays down
    assert curves["evidence"].area > 0.7
    assert curves[RANDOM].area == 0


def test_the_other_way_round_is_the_negative() -> None:
    values = np.random.default_rng(0).normal(size=20)
    curves = ask(planted(), needle(), maps={"map": values, "inverse": -values}).curves
    assert curves["map"].area == pytest.approx(-curves["inverse"].area)
    assert curves["map"].lead_area == pytest.approx(-curves["inverse"].lead_area)


def test_a_map_that_says_nothing_is_the_random_one() -> None:
    bag = make_bag(40)
    bag.features[:10, 0] += 20  # the signal lies in the first rows
    curves = ask(planted(), bag).curves
    np.testing.assert_array_equal(curves["attention"].most, curves[RANDOM].most)
    assert (curves["attention"].area, curves[RANDOM].lead_area) == (0, 0)


def test_random_curves_are_the_mean_over_orders() -> None:
    bag = make_bag(30)
    bag.features[:10, 0] += 5
    often = ask(planted(), bag, maps={}, pairs=50).curves[RANDOM]
    model, rng = planted(), np.random.default_rng(5)
    orders = [rng.permutation(30)[15:] for _ in range(100)]
    with torch.no_grad():
        naive = [
            model(torch.from_numpy(bag.features[rows])[None]).logits.softmax(1) for rows in orders
        ]
    half = often.most.probability[list(often.removed).index(0.5)]
    assert half == pytest.approx(float(torch.cat(naive)[:, 1].mean()), abs=0.03)


def test_ties_are_broken_by_chance_and_never_by_row() -> None:
    few = rank(np.array([1.0, *range(2, 40), 1.0]))
    assert len(few) == 1
    firsts = [rank(np.r_[np.zeros(10), np.ones(30)], seed=seed) for seed in range(20)]
    assert {len(orders) for orders in firsts} == {6}
    assert len({int(orders[0][0]) for orders in firsts}) > 5
    assert all(set(order[:30]) == set(range(10, 40)) for order in firsts[0])
    assert np.array_equal(rank(np.zeros(9))[0], rank(np.ones(9))[0])


@pytest.mark.parametrize(
    ("n", "counts"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (5, [0, 1, 2, 3, 4]), (100, [0, 1, 2, 5, 10])],
)
def test_one_patch_always_stays(n: int, counts: list[int]) -> None:
    assert steps(n).tolist()[: len(counts)] == counts
    assert steps(n)[-1] == n - 1


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ["abmil", "transmil", "dgrmil", "caprmil"])
def test_tiny_bags_have_short_curves(name: str, n: int) -> None:
    found = ask(make(name), make_bag(n))
    assert found.curves["evidence"].removed.tolist() == [k / n for k in range(n)]
    assert all(np.isnan(curves.area) == (n == 1) for curves in found.curves.values())


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        ("mean", ["evidence", "attention", "gradients", RANDOM]),
        (
            "dsmil",
            ["evidence", "attention", "class attention", "patch scores", "gradients", RANDOM],
        ),
        ("transmil", ["evidence", "attention", "gradients", RANDOM]),
    ],
)
def test_every_map_that_a_model_has_is_tried(name: str, maps: list[str]) -> None:
    found = ask(make(name), make_bag(12))
    assert list(found.curves) == maps
    assert found.method == ("integrated gradients" if name == "transmil" else "exact")
    assert all(f"| {name} |" in found.as_markdown() for name in maps)
    assert list(json.loads(json.dumps(found.as_dict()))["maps"]) == maps


@pytest.mark.parametrize("name", list_models())
def test_no_model_is_without_gradients(name: str) -> None:
    model, bag = make(name), make_bag(12)
    cells = torch.from_numpy(bag.grid())
    slope = explain.gradient(model, torch.from_numpy(bag.features)[None], cells, of=1)
    assert slope.shape == (12,)
    assert slope.abs().sum() > 0


def test_progress_counts_every_question() -> None:
    told: list[tuple[int, int]] = []
    ask(make("abmil"), make_bag(9), progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(1, told[0][1] + 1))


def test_nothing_is_written_into_the_bag() -> None:
    bag = make_bag(15)
    before = bag.features.copy()
    ask(make("caprmil"), bag)
    np.testing.assert_array_equal(bag.features, before)


def test_an_explanation_of_another_bag_is_refused() -> None:
    model = make("mean")
    told = explain.explain(model, make_bag(4), classes=("a", "b"))
    with pytest.raises(ValueError, match="patches"):
        explain.faithfulness(model, make_bag(5), told)
    with pytest.raises(ValueError, match="NaN"):
        rank(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        steps(5, [0.5, 1.5])


# over slides


def fake(slide: str, *, patches: int = 50, **areas: float) -> Faithfulness:
    """A slide whose maps have such areas: the least relevant first changes nothing."""

    def curves(area: float) -> Curves:
        removed, flat = np.array([0.0, 1.0]), Track(np.ones(2), np.ones(2))
        fall = np.array([1.0, 1 - 2 * area])
        return Curves(removed=removed, most=Track(fall, fall), least=flat)

    return Faithfulness(
        slide=slide,
        model="ABMIL",
        fold="fold-0",
        followed="tumour",
        method="exact",
        patches=patches,
        curves={name: curves(area) for name, area in {**areas, RANDOM: 0.0}.items()},
    )


def test_the_map_with_the_largest_area_is_trusted() -> None:
    rng = np.random.default_rng(0)
    slides = [
        fake(str(n), evidence=0.4 + noise, attention=0.1 + noise / 2, gradients=-noise)
        for n, noise in enumerate(rng.normal(0, 0.1, 30))
    ]
    judged = explain.trust(slides)
    assert [area.map for area in judged.areas][:2] == ["evidence", "attention"]
    values = np.array([slide.curves["evidence"].area for slide in slides])
    error = 1.96 * values.std(ddof=1) / np.sqrt(30)
    low, high = judged.areas[0].interval
    assert (low, high) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.01)
    assert judged.verdict() == (
        "Trust evidence: the answer rests on the patches that it names. "
        "Not shown to be better than chance: gradients."
    )


def test_maps_that_cannot_be_told_apart_are_said_to_be_as_good() -> None:
    slides = [fake(str(n), a=0.4 + n / 200, b=0.48 - n / 200) for n in range(20)]
    assert "may be as good" in explain.trust(slides).verdict()


def test_a_map_that_is_not_shown_is_not_the_one_to_trust() -> None:
    slides = [fake(str(n), wild=(2.0, -1.2)[n % 2], calm=0.3 + n / 100) for n in range(10)]
    judged = explain.trust(slides)
    assert [area.map for area in judged.areas if area.shown] == ["calm"]
    assert judged.areas[0].map == "wild"
    assert judged.verdict() == (
        "Trust calm: the answer rests on the patches that it names. "
        "Not shown to be better than chance: wild."
    )


def test_one_slide_proves_nothing() -> None:
    judged = explain.trust([fake("one", evidence=0.8)])
    assert "trust none of them, or look at more slides" in judged.verdict()
    assert judged.rows()[0] == ["evidence", "0.800", "-", "0.80"]


def test_slides_of_one_patient_count_as_one() -> None:
    areas = np.linspace(0, 0.5, 20)
    slides = [fake(str(n), evidence=area) for n, area in enumerate(areas)]
    patients = {str(n): str(n // 10) for n in range(20)}
    alone, together = explain.trust(slides), explain.trust(slides, patients)
    assert (alone.patients, together.patients) == (20, 2)
    assert np.ptp(together.areas[0].interval) > np.ptp(alone.areas[0].interval)


def test_slides_of_one_patch_do_not_count() -> None:
    judged = explain.trust([fake("a", evidence=0.4), fake("b", evidence=0.1, patches=1)])
    assert (judged.slides, judged.areas[0].mean) == (1, pytest.approx(0.4))
    with pytest.raises(RunError, match="nothing can be taken out"):
        explain.trust([fake("b", evidence=0.1, patches=1)])


def test_mean_curves_lie_on_common_shares() -> None:
    model = make("abmil")
    slides = [ask(model, make_bag(n, seed=n)) for n in (2, 7, 40)]
    judged = explain.trust(slides)
    curves = judged.curves["evidence"]
    assert curves.removed.tolist() == list(SHARES)
    half = np.mean(
        [
            np.interp(0.5, s.curves["evidence"].removed, s.curves["evidence"].most.lead)
            for s in slides
        ]
    )
    assert curves.most.lead[list(SHARES).index(0.5)] == pytest.approx(half)
    assert len(judged.draw().axes) == len(slides[0].draw().axes) == 2


# the command


@pytest.fixture
def caprmil() -> Callable[..., str]:
    from typer.testing import CliRunner

    from caprmil.cli import app

    def call(*words: object) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


def test_a_run_says_which_map_to_trust(
    tiny_run: Run, tmp_path: Path, caprmil: Callable[..., str]
) -> None:
    out = tmp_path / "out"
    said = caprmil("faithfulness", tiny_run.folder, "--most", 4, "--out", out)
    assert "4 slides, each followed in the class of its answer; drawn from 24" in said
    assert "rust" in said.split("└")[1]
    assert {path.name for path in out.iterdir()} == {
        "faithfulness.csv", "faithfulness.json", "faithfulness.png", "slides.png",
    }  # fmt: skip
    told = json.loads((out / "faithfulness.json").read_text())
    tests = {slide: fold.name for fold in tiny_run.splits for slide in fold.test}
    asked = {name: slide["fold"] for name, slide in told["slides_by_name"].items()}
    assert asked == {name: tests[name] for name in asked}  # by models that have not seen them
    assert (told["slides"], len(asked)) == (4, 4)
    lines = (out / "faithfulness.csv").read_text().splitlines()
    assert lines[0] == "slide,fold,class,patches,map,area,area_in_logits"
    assert len(lines) == 1 + 4 * 4
    with pytest.raises(ValueError, match="already exists"):
        caprmil("faithfulness", tiny_run.folder, "--out", out)


def test_slides_can_be_named_or_chosen_by_their_answer(
    tiny_run: Run, tmp_path: Path, caprmil: Callable[..., str]
) -> None:
    name = tiny_run.predictions.slides[0]
    said = caprmil("faithfulness", tiny_run.folder, name, "--out", tmp_path / "one")
    assert "1 slide, each" in said
    run, chosen = tiny_run.folder, tmp_path / "chosen"
    caprmil("faithfulness", run, "--class", "tumour", "--most", 3, "--out", chosen)
    told = json.loads((chosen / "faithfulness.json").read_text())
    assert {slide["followed"] for slide in told["slides_by_name"].values()} == {"tumour"}
    with pytest.raises(ValueError, match="Known: normal, tumour"):
        caprmil("faithfulness", tiny_run.folder, "--class", "tumor", "--out", tmp_path / "x")


# the picture


def test_the_picture_has_two_lines_a_map_and_says_the_area() -> None:
    from caprmil import figures

    flip = figures.Flip([0, 0.5, 0.99], [0.9, 0.1, 0.1], [0.9, 0.9, 0.8], 0.5)
    panels = [
        figures.FlipPanel(name, "Probability", {"evidence": flip, "random": flip}, (0, 1))
        for name in ("a", "b", "c", "d")
    ]
    figure = figures.flipping(panels)
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in shown] == ["a", "b", "c", "d"]
    solid, dashed = shown[0].lines[:2]
    assert solid.get_xdata().tolist() == [0, 50, 99]
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert [text.get_text() for text in shown[0].get_legend().get_texts()] == [
        "evidence  0.50", "random  0.50",
    ]  # fmt: skip
