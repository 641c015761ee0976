"""Faithfulness: the curves agree with a plain loop, and the correct map has the largest area."""

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
    AnswerCurve,
    DeletionCurves,
    Faithfulness,
    removal_counts,
    removal_orders,
)
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.models import MILModel, create, list_models
from caprmil.runs.run import Run
from caprmil.targets import Classification
from small_models import small_model

pytestmark = pytest.mark.slow

WIDTH = 8

TARGET = Classification(classes=("normal", "tumour"))


def planted() -> MILModel:
    """A mean with given weights: only feature 0 is evidence for class 1."""
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
    """A bag in which only patch 3 is evidence for class 1."""
    features = np.zeros((n, WIDTH), dtype=np.float32)
    features[3, 0] = 6.0
    return bags.from_arrays(features)


def measure(model: MILModel, bag: Bag, **options: Any) -> Faithfulness:
    explanation = explain.explain(model, bag, target=TARGET, slide="a slide")
    return explain.faithfulness(model, bag, explanation, **options)


def make(name: str) -> MILModel:
    return small_model(name, WIDTH, 2)


@pytest.mark.parametrize("name", ["abmil", "transmil", "caprmil", "bayesmil"])
def test_curves_agree_with_a_plain_loop(name: str) -> None:
    model, bag = make(name), make_bag(30)
    values = np.random.default_rng(1).normal(size=30)
    found = measure(model, bag, of=1, maps={"mine": values}).curves["mine"]

    cells = torch.from_numpy(bag.grid())
    for curve, sign in ((found.most, -1), (found.least, 1)):
        for step, share in enumerate(found.removed):
            gone = sorted(range(30), key=lambda row: sign * values[row])[: round(share * 30)]
            stay = [row for row in range(30) if row not in gone]
            with torch.no_grad():
                left = torch.from_numpy(bag.features[stay])[None]
                (logits,) = model(left, grid=cells[stay][None]).logits
            assert curve.answer[step] == pytest.approx(float(logits.softmax(0)[1]), abs=1e-5)
            assert curve.contrast[step] == pytest.approx(float(logits[1] - logits[0]), abs=1e-4)


def test_the_area_is_computed_by_trapezoids() -> None:
    most = AnswerCurve(np.array([1, 0.4, 0.0]), np.array([3.0, 0, -3]))
    least = AnswerCurve(np.array([1, 1, 0.5]), np.array([3.0, 4, 0]))
    curves = DeletionCurves(removed=np.array([0, 0.2, 0.6]), most=most, least=least)
    assert curves.area == pytest.approx(0.2 * 0.3 + 0.4 * (0.6 + 0.5) / 2)
    assert curves.contrast_area == pytest.approx(0.2 * 2 + 0.4 * 3.5)


def test_evidence_finds_the_only_relevant_patch() -> None:
    curves = measure(planted(), needle()).curves
    assert curves["evidence"].most.answer[1] < 0.2  # after the removal of one patch
    assert curves["evidence"].most.answer[0] > 0.9
    assert np.diff(curves["evidence"].most.answer).max() <= 1e-6  # it decreases and stays low
    assert curves["evidence"].area > 0.7
    assert curves[RANDOM].area == 0


def test_an_inverted_map_has_the_negative_area() -> None:
    values = np.random.default_rng(0).normal(size=20)
    curves = measure(planted(), needle(), maps={"map": values, "inverse": -values}).curves
    assert curves["map"].area == pytest.approx(-curves["inverse"].area)
    assert curves["map"].contrast_area == pytest.approx(-curves["inverse"].contrast_area)


def test_a_constant_map_equals_the_random_one() -> None:
    bag = make_bag(40)
    bag.features[:10, 0] += 20  # the signal lies in the first rows
    curves = measure(planted(), bag).curves
    np.testing.assert_array_equal(curves["attention"].most, curves[RANDOM].most)
    assert (curves["attention"].area, curves[RANDOM].contrast_area) == (0, 0)


def test_random_curves_are_the_mean_over_orders() -> None:
    bag = make_bag(30)
    bag.features[:10, 0] += 5
    of_25_pairs = measure(planted(), bag, maps={}, pairs=25).curves[RANDOM]
    model, rng = planted(), np.random.default_rng(5)
    orders = [rng.permutation(30)[15:] for _ in range(100)]
    with torch.no_grad():
        naive = [
            model(torch.from_numpy(bag.features[rows])[None]).logits.softmax(1) for rows in orders
        ]
    half = of_25_pairs.most.answer[list(of_25_pairs.removed).index(0.5)]
    assert half == pytest.approx(float(torch.cat(naive)[:, 1].mean()), abs=0.03)


def test_ties_are_broken_at_random_not_by_row() -> None:
    few = removal_orders(np.array([1.0, *range(2, 40), 1.0]))
    assert len(few) == 1
    firsts = [removal_orders(np.r_[np.zeros(10), np.ones(30)], seed=seed) for seed in range(20)]
    assert {len(orders) for orders in firsts} == {6}
    assert len({int(orders[0][0]) for orders in firsts}) > 5
    assert all(set(order[:30]) == set(range(10, 40)) for order in firsts[0])
    assert np.array_equal(removal_orders(np.zeros(9))[0], removal_orders(np.ones(9))[0])


@pytest.mark.parametrize(
    ("n", "counts"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (5, [0, 1, 2, 3, 4]), (100, [0, 1, 2, 5, 10])],
)
def test_at_least_one_patch_remains(n: int, counts: list[int]) -> None:
    assert removal_counts(n).tolist()[: len(counts)] == counts
    assert removal_counts(n)[-1] == n - 1


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ["abmil", "caprmil"])
def test_small_bags_have_short_curves(name: str, n: int) -> None:
    found = measure(make(name), make_bag(n))
    assert found.curves["evidence"].removed.tolist() == [k / n for k in range(n)]
    assert all(np.isnan(curves.area) == (n == 1) for curves in found.curves.values())


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        ("mean", ["evidence", "attention", "influence", "integrated gradients"]),
        (
            "dsmil",
            [
                *("evidence", "attention", "class attention", "patch scores"),
                *("influence", "integrated gradients"),
            ],
        ),
        ("transmil", ["evidence", "attention", "influence"]),  # its evidence is an estimate
    ],
)
def test_every_map_of_a_model_is_measured(name: str, maps: list[str]) -> None:
    found = measure(make(name), make_bag(12))
    maps = ["sampled influence", *maps, "gradients", RANDOM]
    assert list(found.curves) == maps
    assert found.method == ("integrated gradients" if name == "transmil" else "exact")
    assert all(f"| {name} |" in found.as_markdown() for name in maps)
    assert list(json.loads(json.dumps(found.as_dict()))["maps"]) == maps


@pytest.mark.parametrize("name", list_models())
def test_every_model_has_gradients(name: str) -> None:
    model, bag = make(name), make_bag(12)
    cells = torch.from_numpy(bag.grid())
    gradients = explain.gradient_times_input(
        model,
        torch.from_numpy(bag.features)[None],
        cells,
        contrast=Classification(classes=("a", "b")).contrasts[1],
    )
    assert gradients.shape == (12,)
    assert gradients.abs().sum() > 0


def test_progress_counts_every_prediction() -> None:
    steps: list[tuple[int, int]] = []
    measure(make("abmil"), make_bag(9), progress=lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(1, steps[0][1] + 1))


def test_the_bag_is_not_changed() -> None:
    bag = make_bag(15)
    before = bag.features.copy()
    measure(make("caprmil"), bag)
    np.testing.assert_array_equal(bag.features, before)


def test_an_explanation_of_another_bag_is_refused() -> None:
    model = make("mean")
    explanation = explain.explain(model, make_bag(4), target=Classification(classes=("a", "b")))
    with pytest.raises(ValueError, match="patches"):
        explain.faithfulness(model, make_bag(5), explanation)
    with pytest.raises(ValueError, match="NaN"):
        removal_orders(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        removal_counts(5, [0.5, 1.5])


# over slides


def fake(slide: str, *, patches: int = 50, **areas: float) -> Faithfulness:
    """A slide whose maps have these areas: removing the least relevant first changes nothing."""

    def curves(area: float) -> DeletionCurves:
        removed, flat = np.array([0.0, 1.0]), AnswerCurve(np.ones(2), np.ones(2))
        fall = np.array([1.0, 1 - 2 * area])
        return DeletionCurves(removed=removed, most=AnswerCurve(fall, fall), least=flat)

    return Faithfulness(
        slide=slide,
        model="ABMIL",
        fold="fold-0",
        target=Classification(classes=("normal", "tumour")),
        followed="tumour",
        method="exact",
        patches=patches,
        curves={name: curves(area) for name, area in {**areas, RANDOM: 0.0}.items()},
    )


def test_the_map_with_the_largest_area_is_recommended() -> None:
    rng = np.random.default_rng(0)
    slides = [
        fake(str(n), evidence=0.4 + noise, attention=0.1 + noise / 2, gradients=-noise)
        for n, noise in enumerate(rng.normal(0, 0.1, 30))
    ]
    summary = explain.summarise_faithfulness(slides)
    assert [area.map for area in summary.areas][:2] == ["evidence", "attention"]
    values = np.array([slide.curves["evidence"].area for slide in slides])
    error = 1.96 * values.std(ddof=1) / np.sqrt(30)
    low, high = summary.areas[0].interval
    assert (low, high) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.01)
    assert summary.verdict() == (
        "Use evidence: the prediction depends on the patches that it ranks high. "
        "Not significantly better than chance: gradients."
    )


def test_maps_without_a_significant_difference_may_be_as_good() -> None:
    slides = [fake(str(n), a=0.4 + n / 200, b=0.48 - n / 200) for n in range(20)]
    assert "may be as good" in explain.summarise_faithfulness(slides).verdict()


def test_a_map_that_is_not_above_chance_is_not_recommended() -> None:
    slides = [fake(str(n), wild=(2.0, -1.2)[n % 2], calm=0.3 + n / 100) for n in range(10)]
    summary = explain.summarise_faithfulness(slides)
    assert [area.map for area in summary.areas if area.above_chance] == ["calm"]
    assert summary.areas[0].map == "wild"
    assert summary.verdict() == (
        "Use calm: the prediction depends on the patches that it ranks high. "
        "Not significantly better than chance: wild."
    )


def test_one_slide_is_not_enough() -> None:
    summary = explain.summarise_faithfulness([fake("one", evidence=0.8)])
    assert "use none of them, or measure more slides" in summary.verdict()
    assert summary.rows()[0] == ["evidence", "0.800", "-", "0.80"]


def test_slides_of_one_patient_count_as_one() -> None:
    areas = np.linspace(0, 0.5, 20)
    slides = [fake(str(n), evidence=area) for n, area in enumerate(areas)]
    patients = {str(n): str(n // 10) for n in range(20)}
    alone, together = (
        explain.summarise_faithfulness(slides),
        explain.summarise_faithfulness(slides, patients),
    )
    assert (alone.patients, together.patients) == (20, 2)
    assert np.ptp(together.areas[0].interval) > np.ptp(alone.areas[0].interval)


def test_slides_of_one_patch_are_left_out() -> None:
    summary = explain.summarise_faithfulness(
        [fake("a", evidence=0.4), fake("b", evidence=0.1, patches=1)]
    )
    assert (summary.slides, summary.areas[0].mean) == (1, pytest.approx(0.4))
    with pytest.raises(RunError, match="no patch can be removed"):
        explain.summarise_faithfulness([fake("b", evidence=0.1, patches=1)])


def test_mean_curves_are_at_common_shares() -> None:
    model = make("abmil")
    slides = [measure(model, make_bag(n, seed=n)) for n in (2, 7, 40)]
    summary = explain.summarise_faithfulness(slides)
    curves = summary.curves["evidence"]
    assert curves.removed.tolist() == list(SHARES)
    half = np.mean(
        [
            np.interp(0.5, s.curves["evidence"].removed, s.curves["evidence"].most.contrast)
            for s in slides
        ]
    )
    assert curves.most.contrast[list(SHARES).index(0.5)] == pytest.approx(half)
    assert len(summary.draw().axes) == len(slides[0].draw().axes) == 2


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


def test_the_command_recommends_a_map(
    tiny_run: Run, tmp_path: Path, caprmil: Callable[..., str]
) -> None:
    out = tmp_path / "out"
    output = caprmil("faithfulness", tiny_run.folder, "--most", 4, "--out", out)
    assert "4 slides, each for its predicted class; drawn from 24" in output
    assert "chance" in output.split("└")[1] or "Use" in output.split("└")[1]
    assert {path.name for path in out.iterdir()} == {
        "faithfulness.csv", "faithfulness.json", "faithfulness.png", "slides.png",
    }  # fmt: skip
    written = json.loads((out / "faithfulness.json").read_text())
    tests = {slide: fold.name for fold in tiny_run.splits for slide in fold.test}
    folds = {name: slide["fold"] for name, slide in written["slides_by_name"].items()}
    assert folds == {name: tests[name] for name in folds}  # by models that have not seen them
    assert (written["slides"], len(folds)) == (4, 4)
    lines = (out / "faithfulness.csv").read_text().splitlines()
    assert lines[0] == "slide,fold,class,patches,map,area,area_in_logits"
    assert len(lines) == 1 + 4 * 7
    with pytest.raises(ValueError, match="already exists"):
        caprmil("faithfulness", tiny_run.folder, "--out", out)


def test_slides_can_be_named_or_chosen_by_their_predicted_class(
    tiny_run: Run,
    tmp_path: Path,
    caprmil: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("caprmil.figures.save", lambda figure, path: path)  # tested above
    name = tiny_run.predictions.slides[0]
    output = caprmil("faithfulness", tiny_run.folder, name, "--out", tmp_path / "one")
    assert "1 slide, each" in output
    run, chosen = tiny_run.folder, tmp_path / "chosen"
    caprmil("faithfulness", run, "--class", "tumour", "--most", 3, "--out", chosen)
    written = json.loads((chosen / "faithfulness.json").read_text())
    assert {slide["followed"] for slide in written["slides_by_name"].values()} == {"tumour"}
    with pytest.raises(ValueError, match="Known: normal, tumour"):
        caprmil("faithfulness", tiny_run.folder, "--class", "tumor", "--out", tmp_path / "x")


# the figure


def test_the_figure_has_two_lines_per_map_and_its_area() -> None:
    from caprmil import figures

    curve = figures.DeletionCurve([0, 0.5, 0.99], [0.9, 0.1, 0.1], [0.9, 0.9, 0.8], 0.5)
    panels = [
        figures.DeletionPanel(name, "Probability", {"evidence": curve, "random": curve}, (0, 1))
        for name in ("a", "b", "c", "d")
    ]
    figure = figures.deletion_curves(panels)
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in shown] == ["a", "b", "c", "d"]
    solid, dashed = shown[0].lines[:2]
    assert solid.get_xdata().tolist() == [0, 50, 99]
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert [text.get_text() for text in shown[0].get_legend().get_texts()] == [
        "evidence  0.50", "random  0.50",
    ]  # fmt: skip
