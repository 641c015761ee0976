"""Figures show the numbers they are given, need no display, and overwrite no file."""

import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from sklearn.metrics import roc_auc_score, roc_curve

from caprmil import figures
from caprmil.errors import CaprmilError, CohortError
from caprmil.targets import Regression, find_metric

pytestmark = pytest.mark.slow

AUC, ACE = find_metric("auc"), find_metric("ace")
Slides = tuple[np.ndarray, np.ndarray]


def draw(n: int, classes: int, seed: int) -> Slides:
    rng = np.random.default_rng(seed)
    probabilities = rng.multinomial(50, rng.dirichlet([0.5] * classes, n)) / 50  # with ties
    cumulative = probabilities.cumsum(axis=1)[:, :-1]
    return (rng.random((n, 1)) >= cumulative).sum(axis=1), probabilities


def history(epochs: int, **change: Any) -> dict[str, Any]:
    falling = np.linspace(1, 0.1, epochs).tolist()
    return {
        "train_loss": falling,
        "val_loss": falling,
        "val_auc": falling[::-1],
        "lr": [2e-4] * epochs,
    } | change


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def legend(figure: Figure, number: int = 0) -> list[str]:
    found = figure.axes[number].get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


def points(line: Line2D) -> list[list[float]]:
    return [[float(x), float(y)] for x, y in np.asarray(line.get_xydata())]


def picture(figure: Figure, tmp_path: Path) -> bytes:
    return figures.save(figure, tmp_path / "figure.png", dpi=50).read_bytes()


def test_learning_curves_show_every_fold_once(tmp_path: Path) -> None:
    figure = figures.learning_curves({"0": history(5), "1": history(8)})
    assert titles(figure) == ["Loss", "Validation AUC", "Learning rate"]
    assert [len(axes.lines) for axes in figure.axes] == [4, 2, 2]
    assert legend(figure) == ["training", "validation"]
    assert picture(figure, tmp_path).startswith(b"\x89PNG")


def test_the_epoch_whose_weights_were_kept_is_marked() -> None:
    figure = figures.learning_curves({"0": history(5), "1": history(5)}, kept={"0": 2, "1": 4})
    marks = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    np.testing.assert_allclose([points(mark)[0] for mark in marks], [[2, 0.55], [4, 1.0]])
    assert legend(figure, 1) == ["validation", "weights kept"]


def test_epochs_are_taken_from_their_column() -> None:
    figure = figures.learning_curves({"0": history(3, epoch=[10, 20, 30])}, kept={"0": 20})
    assert [epoch for epoch, _ in points(figure.axes[0].lines[0])] == [10, 20, 30]
    assert [epoch for epoch, _ in points(figure.axes[1].lines[-1])] == [20]


def test_epochs_without_a_value_are_skipped() -> None:
    figure = figures.learning_curves({"0": {"val_auc": [0.5, float("nan"), 0.7]}})
    assert titles(figure) == ["Validation AUC"]
    assert points(figure.axes[0].lines[0]) == [[0, 0.5], [2, 0.7]]


def test_a_history_of_other_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="some of train_loss, val_loss, val_auc, lr"):
        figures.learning_curves({"0": {"speed": [1.0]}})


def test_the_roc_of_a_fold_agrees_with_scikit_learn() -> None:
    labels, probabilities = draw(80, 2, seed=0)
    line = figures.roc_curves({"0": (labels, probabilities)}, ("normal", "tumour")).axes[0].lines[1]
    false, true, _ = roc_curve(labels, probabilities[:, 1], drop_intermediate=False)
    np.testing.assert_allclose(points(line), np.stack([false, true], axis=1))


def test_two_classes_show_folds_their_mean_and_its_spread(tmp_path: Path) -> None:
    folds = {str(k): draw(60, 2, seed=k) for k in range(4)}
    figure = figures.roc_curves(folds, ("normal", "tumour"))
    aucs = [roc_auc_score(labels, p[:, 1]) for labels, p in folds.values()]
    assert len(figure.axes[0].lines) == 1 + 4 + 1  # chance, folds, mean
    expected = f"mean of 4 folds\nAUC {np.mean(aucs):.3f} ± {np.std(aucs, ddof=1):.3f}"
    assert legend(figure) == ["± 1 std", expected]
    assert titles(figure) == ["tumour against normal"]
    assert picture(figure, tmp_path)


def test_each_of_several_classes_has_a_line_of_pooled_folds(tmp_path: Path) -> None:
    folds = {str(k): draw(60, 3, seed=k) for k in range(2)}
    figure = figures.roc_curves(folds, ("a", "b", "c"))
    labels = np.concatenate([fold[0] for fold in folds.values()])
    probabilities = np.concatenate([fold[1] for fold in folds.values()])
    aucs = [roc_auc_score(labels == c, probabilities[:, c]) for c in range(3)]
    assert legend(figure) == [f"{c} ({a:.3f})" for c, a in zip("abc", aucs, strict=True)]
    assert picture(figure, tmp_path)


def test_the_legend_of_grades_says_grade() -> None:
    figure = figures.roc_curves({"0": draw(60, 3, seed=0)}, ("1", "2", "3"), name="grade")
    assert titles(figure) == ["Each grade against the rest, folds pooled"]
    found = figure.axes[0].get_legend()
    assert found is not None
    assert found.get_title().get_text() == "grade (AUC)"


def test_a_fold_of_one_class_is_left_out_of_the_mean() -> None:
    alone = (np.zeros(4, int), np.full((4, 2), 0.5))
    figure = figures.roc_curves({"0": draw(60, 2, seed=0), "1": alone}, ("n", "y"))
    assert len(figure.axes[0].lines) == 3
    with pytest.raises(CohortError, match="two classes"):
        figures.roc_curves({"1": alone}, ("n", "y"))


def test_models_are_shown_with_folds_mean_and_chance(tmp_path: Path) -> None:
    scores = {
        "caprmil": {"auc": [0.9, 1.0], "ace": [0.02, 0.04]},
        "mean": {"auc": [0.7, float("nan")]},
    }
    figure = figures.model_bars(scores, metrics=[AUC, ACE])
    assert titles(figure) == ["AUC", "ACE (lower is better)"]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == [" chance", "0.950 ± 0.071", "0.700"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["caprmil", "mean"]
    assert figure.axes[1].get_xlim()[0] == 0
    assert picture(figure, tmp_path)


def trials(*names: str, values: int = 3, **change: Any) -> list[figures.Trial]:
    """Return the grid of `values` values of each setting. The second trial is the chosen one."""
    choices = list(product(*([str(2**n) for n in range(values)] for _ in names)))
    rng = np.random.default_rng(0)
    return [
        figures.Trial(
            settings=dict(zip(names, choice, strict=True)),
            folds={"auc": rng.random(4), "ace": rng.random(4)} | change,
            chosen=number == 1,
        )
        for number, choice in enumerate(choices)
    ]


def test_an_ablation_shows_folds_their_mean_and_the_chosen_trial(tmp_path: Path) -> None:
    given = trials("tokens")
    figure = figures.ablation_panels(given, metrics=[AUC, ACE], about="test part")
    assert titles(figure) == ["AUC", "ACE (lower is better)"]
    means, first, second, ring, _ = figure.axes[0].lines
    expected = [np.mean(trial.folds["auc"]) for trial in given]
    assert points(means) == [[n, pytest.approx(mean)] for n, mean in enumerate(expected)]
    dots = [[y for _, y in points(line)] for line in (first, second, ring)]
    assert dots == [list(given[0].folds["auc"]), list(given[1].folds["auc"]), [expected[1]]]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["1", "2", "4"]
    assert figure.axes[1].get_ylim()[0] == 0
    assert picture(figure, tmp_path)


def test_a_second_setting_has_rows_of_panels_with_the_other_means_in_grey(tmp_path: Path) -> None:
    figure = figures.ablation_panels(trials("tokens", "heads"), metrics=[AUC, ACE])
    assert len(figure.axes) == 3 * 2
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == [f"heads = {n}" for n in (1, 2, 4)]
    assert len(figure.axes[0].lines) == 2 + 1 + 3  # other means, the mean, folds
    assert picture(figure, tmp_path)


def test_numbers_are_sorted_and_words_keep_their_order() -> None:
    for values, shown in ((["16", "2", "4"], ["2", "4", "16"]), (["b", "a"], ["b", "a"])):
        given = [figures.Trial(settings={"x": v}, folds={"auc": [0.5]}) for v in values]
        axes = figures.ablation_panels(given, metrics=[AUC]).axes[0]
        assert [tick.get_text() for tick in axes.get_xticklabels()] == shown


def test_three_settings_are_too_many_for_panels() -> None:
    with pytest.raises(ValueError, match="one or two settings"):
        figures.ablation_panels(trials("a", "b", "c"), metrics=[AUC])


def test_a_search_has_a_panel_for_each_setting_that_varies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = [
        figures.Trial(
            settings={"lr": f"{10 ** rng.uniform(-5, -2):.3g}", "pool": "ab"[n % 2], "dim": "8"},
            folds={"auc": rng.random(3)},
            chosen=n == 4,
        )
        for n in range(12)
    ]
    figure = figures.search_panels(given, metric=AUC)
    rates, pools = figure.axes
    assert (rates.get_xlabel(), rates.get_xscale()) == ("lr", "log")
    assert (pools.get_xlabel(), pools.get_xscale()) == ("pool", "linear")
    dots = [points(line)[0] for line in rates.lines[1::2]]
    expected = [[float(t.settings["lr"]), np.mean(t.folds["auc"])] for t in given]
    np.testing.assert_allclose(dots, expected)
    assert picture(figure, tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        trials("tokens", values=1),
        trials("tokens", auc=[0.5], ace=[0.1]),
        trials("tokens", auc=[float("nan"), 0.5], ace=[float("nan")]),
        trials("tokens", auc=[], ace=[]),
        trials("tokens", "heads", values=1),
        trials("tokens", "heads", auc=[0.5, 0.5], ace=[0.0, 0.0])[:-1],
    ],
    ids=["one value", "one fold", "NaN", "no folds", "one point", "all alike, one missing"],
)
def test_few_values_are_drawn(given: list[figures.Trial], tmp_path: Path) -> None:
    assert picture(figures.ablation_panels(given, metrics=[AUC, ACE]), tmp_path / "a")
    assert picture(figures.search_panels(given, metric=AUC), tmp_path / "b")


def test_remarks_are_broken_into_lines() -> None:
    narrow, wide = (
        figures.ablation_panels(trials("a"), metrics=metrics, about="test part of each fold")
        for metrics in ([AUC], [AUC, ACE])
    )
    assert narrow.get_supxlabel().count("\n") == 1
    assert wide.get_supxlabel().count("\n") == 0


def bubble(name: str, x: float, y: float, parameters: int = 10**6, **rest: Any) -> Any:
    return figures.Bubble(name=name, x=x, y=y, parameters=parameters, **rest)


def test_bubbles_have_a_position_an_area_and_a_name(tmp_path: Path) -> None:
    models = [bubble("mean", 4, 2, 10**5), bubble("caprmil", 8, 6), bubble("dgrmil", 90, 420)]
    figure = figures.bubbles(models, xlabel="memory", ylabel="time")
    (axes,) = figure.axes
    drawn = {tuple(points(line)[0]): float(line.get_markersize()) for line in axes.lines}
    assert drawn[4, 2] ** 2 * 10 == pytest.approx(drawn[8, 6] ** 2)
    assert [text.get_text() for text in axes.texts] == ["mean", "caprmil", "dgrmil"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert legend(figure) == ["0.1 M", "0.3 M", "1 M"]
    assert picture(figure, tmp_path)


def test_names_do_not_cover_each_other() -> None:
    rng = np.random.default_rng(0)
    models = [bubble(f"model {n}", *rng.normal(5, 0.3, 2), 10**5) for n in range(9)]
    figure = figures.bubbles(models, xlabel="x", ylabel="y")
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(
    "models",
    [
        [bubble("alone", 3, 0.9, 3000)],
        [bubble("tiny", 3, 0.9, 12), bubble("tinier", 3, 0.9, 1)],
        [bubble("same", 3, 0.9), bubble("position", 3, 0.9, spread=0.0)],
        [bubble("nothing", 0, 0), bubble("much", 1e6, 1e-6, 10**9)],
        [bubble("unknown", 3, float("nan")), bubble("known", 4, 0.9, spread=0.1)],
        [bubble("unknown", float("nan"), 0.9)],
    ],
    ids=["one", "tiny", "equal", "zero", "NaN", "only NaN"],
)
def test_extreme_bubbles_are_drawn(models: list[Any], tmp_path: Path) -> None:
    assert picture(figures.bubbles(models, xlabel="x", ylabel="y"), tmp_path)


def side(*bins: figures.Bin, ace: float = 0.1) -> figures.Reliability:
    scores = np.repeat([b.forecast for b in bins], [b.slides for b in bins])
    return figures.Reliability(bins=bins, scores=scores, ace=ace)


def test_reliability_shows_bins_their_intervals_and_the_slides(tmp_path: Path) -> None:
    before = side(figures.Bin(0.1, 0.3, 0.2, 0.5, 7), figures.Bin(0.92, 0.6, 0.4, 0.8, 5))
    figure = figures.reliability(before, side(before.bins[0], ace=0.02), event="tumour")
    assert titles(figure)[:2] == ["Before   ACE 0.100", "After temperature scaling   ACE 0.020"]
    assert points(figure.axes[0].lines[-1]) == [[0.1, 0.3], [0.92, 0.6]]  # the line of the bins
    (bars,) = figure.axes[0].collections
    assert [part.tolist() for part in bars.get_segments()] == [
        [[0.1, pytest.approx(0.2)], [0.1, pytest.approx(0.5)]],
        [[0.92, pytest.approx(0.4)], [0.92, pytest.approx(0.8)]],
    ]
    assert sum(bar.get_height() for bar in figure.axes[2].patches) == 12
    assert picture(figure, tmp_path)


@pytest.mark.parametrize("forecast", [0.0, 0.5, 1.0])
def test_one_bin_of_one_slide_is_drawn(forecast: float, tmp_path: Path) -> None:
    alone = side(figures.Bin(forecast, 1.0, 0.2, 1.0 - 1e-16, 1), ace=float("nan"))
    assert picture(figures.reliability(alone, alone, event="x"), tmp_path)


def test_the_roc_of_a_thousand_classes_is_their_mean() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(3000) % 1000
    scores = rng.dirichlet(np.ones(1000), size=3000)
    figure = figures.roc_curves({"fold-0": (labels, scores)}, [f"c{n}" for n in range(1000)])
    (axes,) = figure.axes
    assert len(axes.lines) == 2  # chance and the mean
    assert "mean of 1,000 classes" in axes.get_legend().get_texts()[1].get_text()


def test_reliability_of_uncalibrated_predictions_shows_each_fold() -> None:
    pooled = side(figures.Bin(0.1, 0.3, 0.2, 0.5, 7), figures.Bin(0.92, 0.6, 0.4, 0.8, 5))
    folds = {"fold-0": side(pooled.bins[0]), "fold-1": pooled}
    figure = figures.reliability(pooled, event="tumour", folds=folds)
    assert len(figure.axes) == 2
    assert [points(line) for line in figure.axes[0].lines[:2]] == [
        [[0.1, 0.3]],
        [[0.1, 0.3], [0.92, 0.6]],
    ]


def test_the_svg_of_a_figure_fits_into_a_page_that_forbids_inline_styles() -> None:
    folds = {f"fold-{k}": draw(60, 2, seed=k) for k in range(3)}
    text = figures.as_svg(figures.roc_curves(folds, ("$5", "<$6>")), alt="ROC & more")
    page = ElementTree.fromstring(text)
    assert page.attrib["aria-label"] == "ROC & more"
    assert "width" not in page.attrib
    elements = list(page.iter())
    assert not any("style" in e.attrib or e.tag.endswith("}style") for e in elements)
    words = [e.text for e in elements if e.tag.endswith("}text")]
    assert {"<$6> against $5", "True positive rate", "± 1 std"} <= set(words)
    hints = [e.text for e in elements if e.tag.endswith("}title")]
    aucs = [roc_auc_score(labels, p[:, 1]) for labels, p in folds.values()]
    expected = [f"{name}: AUC {area:.3f}" for name, area in zip(folds, aucs, strict=True)]
    assert hints[:4] == ["chance, AUC 0.5", *expected]
    assert len(text) < 30_000


def test_the_svg_takes_text_and_axes_in_the_colour_of_the_page() -> None:
    text = figures.as_svg(figures.learning_curves({"0": history(5)}, kept={"0": 2}), alt="")
    painted = set(re.findall(r'(?:fill|stroke)="([^"]+)"', text))
    assert painted == {"none", "currentColor", "var(--figure-blue, #0072B2)", "#d55e00"}


def test_two_svgs_in_one_page_share_no_id() -> None:
    texts = [figures.as_svg(figures.learning_curves({"0": history(n)}), alt=str(n)) for n in (5, 6)]
    ids = [re.findall(r' id="([^"]+)"', text) for text in texts]
    for text, own in zip(texts, ids, strict=True):
        assert len(set(own)) == len(own)
        assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) == set(own)
    assert not set(ids[0]) & set(ids[1])


def test_panels_of_learning_curves_can_be_chosen() -> None:
    figure = figures.learning_curves({"0": history(5)}, panels=("Loss",))
    assert titles(figure) == ["Loss"]


def test_saving_overwrites_only_with_replace(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figure.svg"
    figure = figures.model_bars({"a": {"auc": [0.5]}}, metrics=[AUC])
    figures.save(figure, path)
    with pytest.raises(CaprmilError, match="already exists"):
        figures.save(figure, path)
    figures.save(figure, path, replace=True)
    assert [found.name for found in path.parent.iterdir()] == ["figure.svg"]


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    figure = figures.model_bars({"a": {"auc": [0.5]}}, metrics=[AUC])
    with pytest.raises(ValueError, match="nonsense"):
        figures.save(figure, tmp_path / "figure.nonsense")
    assert list(tmp_path.iterdir()) == []


def test_figures_load_without_matplotlib_and_draw_without_pyplot() -> None:
    program = (
        "import sys; from caprmil import figures; assert 'matplotlib' not in sys.modules;"
        "from caprmil.targets import Regression, find_metric;"
        "figures.model_bars({'a': {'auc': [0.5]}}, metrics=[find_metric('auc')]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def soft(heads: int, patches: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(0).dirichlet([0.3] * tokens, (heads, patches))


def on_slide(columns: int = 6, rows: int = 4, side: int = 10) -> figures.Canvas:
    cells = np.stack(np.meshgrid(range(columns), range(rows)), axis=-1).reshape(-1, 2)
    image = np.full((side * rows + 40, side * columns + 40, 3), 200, dtype=np.uint8)
    return figures.Canvas.on_slide(cells * 80.0 + 160, 80.0, image, 8.0, mpp=4.0)


def pictures_of(rows: Sequence[int]) -> figures.Gallery:
    patches = [np.full((16, 16, 3), row, dtype=np.uint8) for row in rows]
    return figures.Gallery(rows=rows, patches=patches, captions=["x"] * len(rows))


def test_a_grid_is_painted_cell_by_cell_and_shared_cells_have_the_mean() -> None:
    cells = np.array([[5, 2], [6, 2], [6, 2], [7, 3]])
    canvas = figures.Canvas.on_grid(cells)
    expected = [[1, 3, np.nan], [np.nan, np.nan, 7]]
    np.testing.assert_array_equal(canvas.paint(np.array([1, 2, 4, 7])), expected)


def test_extreme_coordinates_need_little_memory() -> None:
    cells = np.array([[0, 0], [99_999, 10], [3, 99_999]])
    canvas = figures.Canvas.on_grid(cells)
    assert max(canvas.shape) <= 2000
    painted = canvas.paint(np.array([1.0, 2.0, 3.0]))
    assert sorted(painted[~np.isnan(painted)]) == [1, 2, 3]


def test_patches_are_painted_at_their_position_on_the_slide() -> None:
    """Compared with a loop over patches, with overlapping grids."""
    rng = np.random.default_rng(0)
    corners, values = rng.integers(0, 900, (40, 2)).astype(float), rng.normal(size=40)
    image = np.zeros((100, 100, 3), dtype=np.uint8)
    canvas = figures.Canvas.on_slide(corners, 100.0, image, 10.0)
    total, count = np.zeros((2, 100, 100))
    for (x, y), value in zip(np.rint(corners / 10).astype(int), values, strict=True):
        right, bottom = np.rint((corners[values == value][0] + 100) / 10).astype(int)
        total[y:bottom, x:right] += value
        count[y:bottom, x:right] += 1
    expected = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    assert canvas.shape == (100, 100)
    np.testing.assert_allclose(canvas.paint(values), expected, atol=1e-12)


def test_a_canvas_is_cropped_to_its_patches() -> None:
    image = np.arange(300 * 400 * 3, dtype=np.uint32).astype(np.uint8).reshape(300, 400, 3)
    canvas = figures.Canvas.on_slide(np.array([[1000.0, 2000.0]]), 100.0, image, 10.0)
    assert canvas.shape == (30, 30)  # the patch, and as much around it
    np.testing.assert_array_equal(canvas.image, image[190:220, 90:120])
    painted = canvas.paint(np.array([5.0]))
    assert (np.nansum(painted), painted[10, 10], painted[19, 19]) == (500, 5, 5)


def test_patches_outside_the_slide_are_not_painted() -> None:
    image = np.zeros((10, 10, 3), dtype=np.uint8)
    corners = np.array([[0.0, 0.0], [500.0, 20.0]])
    painted = figures.Canvas.on_slide(corners, 10.0, image, 10.0).paint(np.array([1.0, 2.0]))
    assert np.nansum(painted) == 1
    lost = figures.Canvas.on_slide(corners + 900, 10.0, image, 10.0)
    assert np.isnan(lost.paint(np.array([1.0, 2.0]))).all()


def test_a_coarser_canvas_keeps_every_patch() -> None:
    canvas = figures.Canvas.on_slide(
        np.arange(50.0)[:, None] * [2, 2], 1.0, np.zeros((100, 100, 3), dtype=np.uint8), 1.0, mpp=1
    )
    small = canvas.coarser(10)
    assert (small.shape, small.mpp) == ((10, 10), 10)
    assert np.isfinite(np.diag(small.paint(np.ones(50)))).all()


@pytest.mark.parametrize("tokens", [1, 5])
def test_each_token_has_a_map_and_a_gallery(tokens: int, tmp_path: Path) -> None:
    galleries = [pictures_of(range(8)) for _ in range(tokens)]
    shares = soft(3, 24, tokens)
    figure = figures.token_maps(shares, on_slide(), head=1, galleries=galleries, title="a $ b")
    names = [title for title in titles(figure) if title]
    usage = shares[1].mean(axis=0)
    assert names == [f"Token {n + 1}   {share:.1%}" for n, share in enumerate(usage)]
    assert len(figure.axes) == 2 * tokens + 1  # maps, galleries, the scale
    assert picture(figure, tmp_path)


def test_a_token_map_shows_the_weights_of_its_head(tmp_path: Path) -> None:
    shares, canvas = soft(2, 24, 3), on_slide()
    for head, expected in ((0, shares[0]), (None, shares.mean(axis=0))):
        axes = figures.token_maps(shares, canvas, head=head).axes[2]
        painted = canvas.paint(expected[:, 2])
        inside = ~np.isnan(painted)
        colours = matplotlib.colormaps["viridis"](painted[inside], bytes=True)[:, :3]
        np.testing.assert_array_equal(axes.images[0].get_array()[inside], colours)


@pytest.mark.parametrize(("columns", "rows"), [(20, 2), (2, 20), (1, 1)])
def test_slides_of_any_shape_are_drawn(columns: int, rows: int, tmp_path: Path) -> None:
    canvas, n = on_slide(columns, rows, 4), columns * rows
    shares, values = soft(2, n, 4), np.random.default_rng(0).normal(size=n)
    plane = figures.Plane(np.zeros((n, 2)), (1.0, 0.0))
    for number, figure in enumerate(
        (
            figures.token_maps(shares, canvas, title="x"),
            figures.head_maps(shares, canvas),
            figures.relevance_maps(values, np.full(n, 1 / n), canvas, contrast="tumour"),
            figures.context_planes(plane, plane, shares[0].argmax(axis=1), canvas),
        )
    ):
        assert picture(figure, tmp_path / str(number))


def test_each_head_has_a_row_with_the_usage_of_its_tokens(tmp_path: Path) -> None:
    figure = figures.head_maps(soft(3, 24, 2), on_slide())
    assert [axes.get_ylabel() for axes in figure.axes[::3][:3]] == ["Head 1", "Head 2", "Head 3"]
    widths = [[bar.get_width() for bar in axes.patches] for axes in figure.axes[2:9:3]]
    np.testing.assert_allclose(widths, soft(3, 24, 2).mean(axis=1))


def test_the_colour_scale_of_evidence_is_symmetric(tmp_path: Path) -> None:
    values, attention = np.linspace(-1, 3, 24), np.linspace(0.5, 1.5, 24) / 24
    sides = {"top_for": pictures_of([23, 22]), "top_against": pictures_of([0, 1])}
    figure = figures.relevance_maps(values, attention, on_slide(), contrast="tumour", **sides)
    assert titles(figure)[:3] == ["Slide", "Evidence for tumour", "Attention"]
    scales = [axes.get_ylim() for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert -scales[0][0] == scales[0][1] > 2.5
    assert scales[1] == (0, 2)  # uniform attention is in the middle
    assert {"Most for tumour", "Most against tumour"} <= set(titles(figure))
    assert picture(figure, tmp_path)


def test_constant_attention_is_replaced_by_evidence_above_the_mean() -> None:
    values = np.linspace(1, 3, 24)
    figure = figures.relevance_maps(values, np.full(24, 1 / 24), on_slide(), contrast="tumour")
    assert titles(figure)[2] == "Evidence for tumour above the mean"
    scales = [axes.get_ylim() for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert scales[1][1] <= 1 < scales[0][1]


def test_the_title_of_a_gallery_says_that_no_patch_has_the_sign() -> None:
    sides = {"top_for": pictures_of([23]), "top_against": pictures_of([0])}
    options = {"contrast": "tumour", **sides}
    for sign, start in ((1, "Least for tumour"), (-1, "Least against tumour")):
        values = sign * np.linspace(1, 2, 24)
        figure = figures.relevance_maps(values, np.full(24, 1 / 24), on_slide(), **options)
        assert any(title.startswith(start) for title in titles(figure))


def test_evidence_of_a_value_is_for_a_higher_or_a_lower_one() -> None:
    (contrast,) = Regression().contrasts
    options = {"contrast": contrast.name, "negative": contrast.negative, "ends": contrast.ends}
    figure = figures.relevance_maps(np.linspace(-1, 2, 24), np.ones(24), on_slide(), **options)
    texts = " ".join(text.get_text() for text in figure.findobj(Text))
    assert all(words in texts for words in ("higher or lower", "for a lower value"))
    assert "against" not in texts


def test_zero_evidence_is_drawn(tmp_path: Path) -> None:
    canvas = figures.Canvas.on_grid(np.array([[0, 0], [1, 0]]))
    figure = figures.relevance_maps(np.zeros(2), np.array([0.5, 0.5]), canvas, contrast="x")
    assert picture(figure, tmp_path)


def test_points_of_context_are_an_image_in_a_pdf(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), 20_000
    plane = figures.Plane(rng.normal(size=(n, 2)), (0.4, 0.25))
    figure = figures.context_planes(plane, plane, rng.integers(0, 3, n))
    assert "40% of variance" in figure.axes[0].get_xlabel()
    assert figures.save(figure, tmp_path / "figure.pdf").stat().st_size < 500_000


def test_titles_and_captions_are_as_wide_as_their_figure_at_most() -> None:
    rng = np.random.default_rng(0)
    canvas = figures.Canvas.on_grid(np.stack([np.arange(20) % 5, np.arange(20) // 5], axis=1))
    sentence = "Removing the 10 % of patches that it marks most lowers the predicted value. "
    figure = figures.relevance_maps(
        rng.normal(size=20),
        np.full(20, 0.05),
        canvas,
        contrast="grade: high",
        title="slide_003   " + "grade high 0.6558; size 29.47; " * 4,
        remarks=[sentence * 3],
    )
    figure.canvas.draw()
    for text in figure.texts:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
