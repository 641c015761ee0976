"""What the figures promise: they show the numbers given, need no display, and overwrite nothing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.metrics import roc_auc_score, roc_curve

from caprmil import figures
from caprmil.errors import CaprmilError, CohortError

Slides = tuple[np.ndarray, np.ndarray]


def draw(n: int, classes: int, seed: int) -> Slides:
    rng = np.random.default_rng(seed)
    probabilities = rng.multinomial(50, rng.dirichlet([0.5] * classes, n)) / 50  # with ties
    ladder = probabilities.cumsum(axis=1)[:, :-1]
    return (rng.random((n, 1)) >= ladder).sum(axis=1), probabilities


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


def legend(figure: Figure, place: int = 0) -> list[str]:
    found = figure.axes[place].get_legend()
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
    marks = figure.axes[1].lines[-1]
    np.testing.assert_allclose(points(marks), [[2, 0.55], [4, 1.0]])
    assert "weights kept" in legend(figure)


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


def test_a_fold_is_drawn_as_scikit_learn_draws_it() -> None:
    labels, probabilities = draw(80, 2, seed=0)
    line = figures.roc_curves({"0": (labels, probabilities)}, ("normal", "tumour")).axes[0].lines[1]
    false, true, _ = roc_curve(labels, probabilities[:, 1], drop_intermediate=False)
    np.testing.assert_allclose(points(line), np.stack([false, true], axis=1))


def test_two_classes_show_folds_their_mean_and_its_spread(tmp_path: Path) -> None:
    folds = {str(k): draw(60, 2, seed=k) for k in range(4)}
    figure = figures.roc_curves(folds, ("normal", "tumour"))
    areas = [roc_auc_score(labels, p[:, 1]) for labels, p in folds.values()]
    assert len(figure.axes[0].lines) == 1 + 4 + 1  # chance, folds, mean
    expected = f"mean of 4 folds\nAUC {np.mean(areas):.3f} ± {np.std(areas, ddof=1):.3f}"
    assert legend(figure) == ["± 1 std", expected]
    assert titles(figure) == ["tumour against normal"]
    assert picture(figure, tmp_path)


def test_more_classes_are_pooled_and_drawn_one_by_one(tmp_path: Path) -> None:
    folds = {str(k): draw(60, 3, seed=k) for k in range(2)}
    figure = figures.roc_curves(folds, ("a", "b", "c"))
    labels = np.concatenate([fold[0] for fold in folds.values()])
    probabilities = np.concatenate([fold[1] for fold in folds.values()])
    areas = [roc_auc_score(labels == c, probabilities[:, c]) for c in range(3)]
    assert legend(figure) == [f"{c} ({a:.3f})" for c, a in zip("abc", areas, strict=True)]
    assert picture(figure, tmp_path)


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
    figure = figures.model_bars(scores)
    assert titles(figure) == ["AUC", "ACE (lower is better)"]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == [" chance", "0.950 ± 0.071", "0.700"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["caprmil", "mean"]
    assert figure.axes[1].get_xlim()[0] == 0
    assert picture(figure, tmp_path)


def test_saving_overwrites_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figure.svg"
    figure = figures.model_bars({"a": {"auc": [0.5]}}, metrics=["auc"])
    figures.save(figure, path)
    with pytest.raises(CaprmilError, match="there already"):
        figures.save(figure, path)
    figures.save(figure, path, replace=True)
    assert [found.name for found in path.parent.iterdir()] == ["figure.svg"]


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    figure = figures.model_bars({"a": {"auc": [0.5]}}, metrics=["auc"])
    with pytest.raises(ValueError, match="nonsense"):
        figures.save(figure, tmp_path / "figure.nonsense")
    assert list(tmp_path.iterdir()) == []


def test_figures_load_without_matplotlib_and_draw_without_pyplot() -> None:
    program = (
        "import sys; from caprmil import figures; assert 'matplotlib' not in sys.modules;"
        "figures.model_bars({'a': {'auc': [0.5]}}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
