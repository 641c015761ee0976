"""Multilabel: loss and metrics against PyTorch and scikit-learn, missing labels, balanced folds."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from caprmil import MILMultilabelClassifier, config
from caprmil.cohort import folds
from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.folds import SplitConfig, Strata
from caprmil.errors import CohortError, RecipeError
from caprmil.evaluation.predictions import Predictions
from caprmil.io.findings import Findings
from caprmil.runs.run import Run
from caprmil.synthetic import PlantedShares
from caprmil.targets import Multilabel
from caprmil.targets.delong import auc_influence
from caprmil.targets.metric import bootstrap
from caprmil.targets.named_cells import join_cells, split_cells
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from quick_scoring import quick_scoring

TARGET = Multilabel(labels=("EGFR", "KRAS", "ALK"))
REFERENCES = {
    "auc": roc_auc_score,
    "average_precision": average_precision_score,
    "balanced_accuracy": lambda labels, p: balanced_accuracy_score(labels, p > 0.5),
}


def truth(n: int, seed: int, missing: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which some are missing, and probabilities with ties that follow them in part."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, 3)) < [0.5, 0.3, 0.2]).astype(np.float64)
    answers = np.round((labels + rng.random((n, 3))) / 2, 1)
    labels[rng.random((n, 3)) < missing] = -1
    return labels, answers


def reference(name: str, labels: np.ndarray, answers: np.ndarray) -> float:
    """A metric of one label by scikit-learn, on the slides that have it."""
    known = labels >= 0
    if len(set(labels[known])) < 2 and (name != "average_precision" or not (labels == 1).any()):
        return np.nan if name != "balanced_accuracy" or not known.any() else -1
    return float(REFERENCES[name](labels[known], answers[known]))


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=20, deadline=None)
@given(n=st.integers(4, 60), seed=st.integers(0, 10**6))
def test_a_metric_of_a_label_is_that_of_scikit_learn_on_the_slides_that_have_it(
    name: str, n: int, seed: int
) -> None:
    labels, answers = truth(n, seed)
    expected = [reference(name, own, p) for own, p in zip(labels.T, answers.T, strict=True)]
    for label, value in zip(TARGET.labels, expected, strict=True):
        found = TARGET.metrics[f"{label}.{name}"].function(labels, answers)
        if value != -1:
            assert found == pytest.approx(value, abs=1e-12, nan_ok=True)
    if -1 not in expected and not np.isnan(expected).all():
        mean = TARGET.metrics[name].function(labels, answers)
        assert mean == pytest.approx(np.nanmean(expected), abs=1e-12)


def test_every_metric_has_a_reference() -> None:
    each = {f"{label}.{name}" for label in TARGET.labels for name in REFERENCES}
    assert set(TARGET.metrics) == each | set(REFERENCES)


@pytest.mark.parametrize("name", [*REFERENCES, "KRAS.auc", "ALK.average_precision"])
def test_many_draws_at_once_are_scored_like_repeated_slides(name: str) -> None:
    labels, answers = truth(25, 3)
    weights = np.random.default_rng(0).integers(0, 3, size=(12, 25)).astype(np.float64)
    metric = TARGET.metrics[name]
    rows = [np.repeat(np.arange(25), own.astype(int)) for own in weights]
    expected = [metric.function(labels[own], answers[own]) for own in rows]
    np.testing.assert_allclose(metric.draws(labels, answers, weights), expected, atol=1e-12)


def test_the_influence_on_the_mean_auc_is_the_mean_of_those_on_the_labels() -> None:
    labels, answers = truth(40, 1)
    owners = np.arange(40) // 2
    expected = np.zeros((3, 40))
    for row, own, p in zip(expected, labels.T, answers.T, strict=True):
        known = own >= 0
        both = np.stack([1 - p[known], p[known]], axis=1)
        row[known] = auc_influence(own[known].astype(int), both, owners[known])
    metric = TARGET.metrics["auc"]
    assert metric.influence is not None
    found = metric.influence(labels, answers, owners)
    np.testing.assert_allclose(found, expected.mean(axis=0), atol=1e-12)


def test_an_interval_is_that_of_a_naive_bootstrap() -> None:
    labels, answers = truth(30, 5)
    patients = [f"p{n % 12}" for n in range(30)]
    metric = TARGET.metrics["average_precision"]
    (found,) = bootstrap(labels, answers, patients, [metric], draws=50, seed=7).values()
    rng, unique = np.random.default_rng(7), sorted(set(patients))
    values = []
    for _ in range(50):
        drawn = [unique[n] for n in rng.integers(len(unique), size=len(unique))]
        rows = [row for patient in drawn for row in range(30) if patients[row] == patient]
        own = [reference("average_precision", labels[rows, n], answers[rows, n]) for n in range(3)]
        values.append(np.nanmean(own))
    assert tuple(found) == pytest.approx(np.nanquantile(values, [0.025, 0.975]), abs=1e-9)


@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_the_loss_is_the_cross_entropy_of_known_labels(weights: Any) -> None:
    labels = torch.tensor([[1, 0, -1], [-1, 1, 1], [0, -1, 1.0], [0, 0, 0]])
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = Multilabel(labels=TARGET.labels, positive_weights=weights)
    loss = target.criterion([tuple(row) for row in labels.tolist()])(outputs, labels)
    # By hand: negatives for each positive of a label, in the known labels above.
    balanced = (2.0, 2.0, 0.5)
    expected = 0.0
    for row, own in zip(outputs.detach(), labels, strict=True):
        for number, (logit, label) in enumerate(zip(row, own, strict=True)):
            if label >= 0:
                weight = balanced[number] if weights == "balanced" and label == 1 else 1.0
                expected += weight * F.binary_cross_entropy_with_logits(logit, label) / 12
    assert loss.item() == pytest.approx(float(expected), abs=1e-6)
    loss.backward()
    assert (outputs.grad == 0).equal(labels < 0)


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        *(("1", 1), ("1.0", 1), ("Mut", 1), ("YES", 1), ("positive", 1), ("+", 1), ("True", 1)),
        *(("0", 0), ("0.0", 0), ("WT", 0), ("wild-type", 0), ("no", 0), ("Negative", 0), ("-", 0)),
    ],
)
def test_the_usual_words_for_positive_and_negative_are_read(cell: str, label: int) -> None:
    text = TARGET.join_cells([cell, "", "NA"])
    assert TARGET.parse_label(text) == (label, -1, -1)
    assert TARGET.show_label((label, -1, -1)) == f"EGFR={label}"


def test_labels_are_read_from_their_columns_and_what_is_wrong_is_named() -> None:
    rows = {
        "a": ["mut", "0", ""],
        "b": ["wt", "maybe", ""],
        "c": ["", "NA", ""],
        "d": ["1", "1", ""],
    }
    cells = {slide: TARGET.join_cells(own) for slide, own in rows.items()}
    found = Findings()
    _, labels = TARGET.read(cells, "EGFR and KRAS and ALK", found, required=True)
    assert labels["a"] == (1, 0, -1)
    text = " ".join(found.problems)
    assert "b (maybe)" in text
    assert "No slide has a label of ALK" in text
    assert "Slides without any label (1): c" in text
    assert "3 of 4 slides have a label of EGFR" in " ".join(found.notes)


def test_a_label_that_is_the_same_everywhere_is_a_problem() -> None:
    found = Findings()
    cells = {slide: TARGET.join_cells(["1", own, own]) for slide, own in (("a", "0"), ("b", "1"))}
    TARGET.read(cells, "", found, required=True)
    assert found.problems == [
        "EGFR: Column EGFR is positive on every slide. Leave it out of [target] labels."
    ]


@pytest.mark.parametrize(
    ("labels", "message"),
    [((), "names no column"), (("a", "a"), "names one twice: a"), (("fold",), "called fold")],
)
def test_settings_that_cannot_be_used_are_refused(labels: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Multilabel(labels=labels)


def test_columns_that_are_all_missing_are_an_error_with_those_that_are_there() -> None:
    with pytest.raises(CohortError, match=r"no column is called EGFR or KRAS or ALK.*slide, grade"):
        TARGET.find_columns(["slide", "grade"])


def test_slides_of_a_patient_agree_if_no_label_differs() -> None:
    assert TARGET.agree([(1, -1, 0), (1, 0, -1), (-1, 0, 0)])
    assert not TARGET.agree([(1, -1, 0), (0, -1, 0)])
    assert TARGET.merge([(1, -1, -1), (1, 0, -1)]) == (1, 0, -1)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1).filter(lambda name: "=" not in name), st.text()))
def test_cells_survive_being_one_text(cells: dict[str, str]) -> None:
    assert split_cells(join_cells(cells), cells) == cells


def test_folds_keep_rare_labels_in_balance() -> None:
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.05])
    labels = (rng.random((200, 3)) < shares).astype(float)
    slides = {f"s{n:03d}": tuple(own) for n, own in enumerate(labels.tolist())}
    strata, names = TARGET.strata(slides)
    patients = {slide: slide for slide in slides}
    found = Findings()
    groups = Strata(strata, names, "Combinations", True)
    made = folds.make(patients, groups, SplitConfig(folds=5), found)
    assert not found.problems
    counts = np.array([np.sum([slides[s] for s in fold.test], axis=0) for fold in made])
    spread = counts.max(axis=0) - counts.min(axis=0)
    assert spread[2] <= 1  # the rare label
    assert (spread <= 3).all()
    # A draw that ignores the labels is worse, on average over draws.
    chance = [
        np.ptp(rng.permutation(labels).reshape(5, 40, 3).sum(axis=1), axis=0) for _ in range(50)
    ]
    assert (spread < np.mean(chance, axis=0)).all()


def test_strata_with_too_few_patients_are_merged_not_refused() -> None:
    labels = {f"s{n}": (float(n % 2), float(n == 3), -1.0) for n in range(12)}
    strata, names = TARGET.strata(labels)
    found = Findings()
    patients = {slide: slide for slide in labels}
    made = folds.make(patients, Strata(strata, names, "", True), SplitConfig(folds=4), found)
    assert not found.problems
    assert Counter(slide for fold in made for slide in fold.test) == dict.fromkeys(labels, 1)


def test_a_table_of_predictions_is_recognised_and_read_again(tmp_path: Path) -> None:
    labels, answers = truth(12, 2)
    slides = tuple(f"s{n}" for n in range(12))
    table = Predictions(slides=slides, target=TARGET, answers=answers, labels=labels)
    read = Predictions.read(table.write(tmp_path / "found.csv"), allow_unlabelled=True)
    assert read.target == TARGET
    np.testing.assert_array_equal(read.answers, answers)
    np.testing.assert_array_equal(read.labels, labels)
    frame = table.to_frame()
    assert list(frame)[-3:] == ["EGFR.positive", "KRAS.positive", "ALK.positive"]
    names = np.array(TARGET.labels)
    assert frame["predicted"][0] == (", ".join(names[answers[0] > 0.5]) or "none")


def test_a_recipe_is_the_same_after_it_is_written() -> None:
    table = {"cohort": "a.csv", "target": {"kind": "multilabel", "labels": ["EGFR"]}}
    change = 'target.labels=["EGFR", "ER status"]'
    recipe = config.parse(table, into=Recipe, changes=[change])
    assert recipe.target == Multilabel(labels=("EGFR", "ER status"))
    again = config.parse(config.read_toml(config.dump(recipe)), into=Recipe)
    assert again == recipe
    with pytest.raises(RecipeError, match="labels"):
        config.parse({"cohort": "a.csv", "target": {"kind": "multilabel"}}, into=Recipe)


def planted(folder: Path, **changes: Any) -> Run:
    """Train on generated slides whose labels are planted."""
    table = PlantedShares(slides=90, graded=0, **changes).write(folder)
    recipe = Recipe(
        cohort=str(table),
        features=str(folder / "features"),
        target=Multilabel(labels=TARGET.labels, positive_weights="balanced"),
        model=ModelConfig(settings={"dim": 16, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=3),
        train=TrainConfig(epochs=12, warmup_epochs=1, lr=3e-3, batch_size=4),
        loggers={},
    )
    with quick_scoring():
        return cross_validate(recipe, folder / "run", device="cpu", progress=False)


@pytest.mark.slow
def test_planted_labels_are_found_and_permuted_ones_are_chance(tmp_path: Path) -> None:
    scores = planted(tmp_path / "planted").predictions.scores()
    assert scores["auc"] > 0.9
    assert min(scores[f"{label}.auc"] for label in TARGET.labels) > 0.8
    chance = planted(tmp_path / "permuted", permuted=True).predictions
    # Three labels of 90 slides: the standard error of their mean AUC is about 0.045.
    assert abs(chance.scores()["auc"] - 0.5) < 0.15


MARGIN = 0.05  # of the mean AUC, below the oracle
WEAK = PlantedShares(
    slides=400,
    width=8,
    label_strength=1.2,
    labels={"EGFR": 0.5, "KRAS": 0.3, "ALK": 0.3},
    missing=0.0,
    seed=6,
)
"""The signal of a label is so weak that the oracle makes mistakes."""


@pytest.fixture(scope="module")
def weak() -> tuple[list[np.ndarray], pd.DataFrame, np.ndarray]:
    """Bags, their labels, and the scores of an oracle."""
    rows = WEAK.rows()
    bags = [WEAK.bag(row)[0] for row in rows]
    labels = pd.DataFrame(rows)[list(WEAK.labels)].astype(float)
    return bags, labels, np.stack([WEAK.oracle(bag) for bag in bags])


def labeller(**changes: Any) -> MILMultilabelClassifier:
    options: dict[str, Any] = {"epochs": 12, "lr": 1e-2, "warmup_epochs": 0, "batch_size": 8}
    return MILMultilabelClassifier(
        "mean", **options | {"device": "cpu", "settings": {"dim": 16}} | changes
    )


def mean_auc(labels: pd.DataFrame, scores: np.ndarray) -> float:
    return float(
        np.mean([roc_auc_score(labels[n], p) for n, p in zip(labels, scores.T, strict=True)])
    )


def test_weak_labels_are_found_nearly_as_well_as_by_the_oracle(
    weak: tuple[list[np.ndarray], pd.DataFrame, np.ndarray],
) -> None:
    bags, labels, oracle = weak
    best = mean_auc(labels[200:], oracle[200:])
    assert 0.8 < best < 0.99
    found = labeller().fit(bags[:200], labels[:200]).predict_proba(bags[200:])
    assert mean_auc(labels[200:], found) > best - MARGIN


def test_permuted_weak_labels_are_chance(
    weak: tuple[list[np.ndarray], pd.DataFrame, np.ndarray],
) -> None:
    bags, labels, _ = weak
    mixed = labels.sample(frac=1, random_state=0).reset_index(drop=True)
    found = labeller(epochs=4).fit(bags[:200], mixed[:200]).predict_proba(bags[200:])
    # Three standard errors of the mean of three AUCs of 200 slides.
    assert abs(mean_auc(mixed[200:], found) - 0.5) < 0.08


def test_a_cohort_tells_how_many_slides_have_each_label(tmp_path: Path) -> None:
    table = PlantedShares(slides=30, width=8, patches=4).write(tmp_path)
    cohort, made = load_cohort(
        table, tmp_path / "features", None, SplitConfig(folds=2), target=TARGET
    )
    rows = PlantedShares(slides=30, width=8, patches=4).table()
    expected = sum(bool(row["KRAS"]) for row in rows)
    assert any(f"{expected} of 30 slides have a label of KRAS" in note for note in cohort.notes)
    assert len(made) == 2


def test_the_estimator_learns_labels_of_which_some_are_missing() -> None:
    rng = np.random.default_rng(0)
    labels = pd.DataFrame(rng.integers(0, 2, size=(40, 2)), columns=["A", "B"]).astype(float)
    bags = [rng.normal(size=(10, 6)) + 2 * np.r_[own, np.zeros(4)] for own in labels.to_numpy()]
    known = labels.mask(rng.random(labels.shape) < 0.2).dropna(how="all")
    options: dict[str, Any] = {"epochs": 8, "lr": 1e-2, "validation": 0.2, "device": "cpu"}
    model = MILMultilabelClassifier("mean", **options).fit([bags[n] for n in known.index], known)
    assert model.labels_ == ("A", "B")
    found = model.predict_proba(bags)
    assert all(roc_auc_score(labels[n], p) > 0.9 for n, p in zip("AB", found.T, strict=True))
    np.testing.assert_array_equal(model.predict(bags), found > 0.5)
    for wrong, message in ((labels["A"], "table"), (labels + 1, "1, 0, or NaN")):
        with pytest.raises(CohortError, match=message):
            model.fit(bags, wrong)
