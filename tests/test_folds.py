"""Folds: patients stay together, every class is in every part, and seeds are reproducible."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caprmil.cohort import folds
from caprmil.cohort.folds import Fold, Split, SplitConfig, Strata
from caprmil.errors import RecipeError
from caprmil.io.findings import Findings

Study = tuple[dict[str, str], dict[str, int]]  # the patient and the label of each slide


@st.composite
def studies(draw: st.DrawFn) -> Study:
    """Two or three classes of 6 to 30 patients, each with one to four slides."""
    patients, labels = {}, {}
    for label in range(draw(st.integers(2, 3))):
        for number, slides in enumerate(draw(st.lists(st.integers(1, 4), min_size=6, max_size=30))):
            for slide in range(slides):
                patients[f"{label}-{number}-{slide}"] = f"{label}-{number}"
                labels[f"{label}-{number}-{slide}"] = label
    return patients, labels


def study(*sizes: int, slides: int = 2) -> Study:
    """One class for each of the sizes, which are numbers of patients."""
    keys = [(c, p, s) for c, size in enumerate(sizes) for p in range(size) for s in range(slides)]
    return {f"{c}-{p}-{s}": f"{c}-{p}" for c, p, s in keys}, {f"{c}-{p}-{s}": c for c, p, s in keys}


def make(cohort: Study, *fixed: Split, **settings: Any) -> list[Fold]:
    found = Findings()
    patients, labels = cohort
    strata = Strata(labels, tuple("abc"[: 1 + max(labels.values())]))
    made = folds.make(patients, strata, SplitConfig(**settings), found, fixed)
    assert found.problems == []
    return made


def parts(fold: Fold) -> list[tuple[str, ...]]:
    return [fold.train, fold.validation, fold.test]


KINDS = st.sampled_from(["kfold", "random"])
no_deadline = settings(deadline=None, max_examples=50)


@no_deadline
@given(studies(), KINDS, st.integers(2, 6), st.integers(0, 99))
def test_folds_never_split_a_patient(cohort: Study, kind: str, k: int, seed: int) -> None:
    for fold in make(cohort, kind=kind, folds=k, seed=seed, repeats=2):
        patients = [{cohort[0][slide] for slide in part} for part in parts(fold)]
        assert sum(map(len, patients)) == len(set.union(*patients)) == len(set(cohort[0].values()))
        assert sorted(sum(parts(fold), ())) == sorted(cohort[0])


@no_deadline
@given(studies(), KINDS, st.integers(2, 6), st.sampled_from([0.01, 0.2, 0.9]))
def test_every_class_is_in_every_part(cohort: Study, kind: str, k: int, share: float) -> None:
    for fold in make(cohort, kind=kind, folds=k, validation=share, test=share):
        for part in parts(fold):
            assert {cohort[1][slide] for slide in part} == set(cohort[1].values())


@no_deadline
@given(studies(), st.integers(2, 6))
def test_test_parts_of_a_kfold_partition_the_cohort(cohort: Study, k: int) -> None:
    tests = [slide for fold in make(cohort, folds=k) for slide in fold.test]
    assert sorted(tests) == sorted(cohort[0])


@no_deadline
@given(studies(), st.integers(2, 6))
def test_test_parts_of_a_kfold_are_even_in_every_class(cohort: Study, k: int) -> None:
    counts = [Counter(p[0] for p in {cohort[0][s] for s in f.test}) for f in make(cohort, folds=k)]
    for label in map(str, set(cohort[1].values())):
        sizes = [count[label] for count in counts]
        assert max(sizes) - min(sizes) <= 1


@no_deadline
@given(studies(), st.floats(0.2, 0.4), st.floats(0.2, 0.4))
def test_shares_are_kept_to_half_a_patient_of_a_class(
    cohort: Study, test: float, validation: float
) -> None:
    (fold,) = make(cohort, kind="random", folds=1, test=test, validation=validation)
    train, held, tested = (Counter(p[0] for p in {cohort[0][s] for s in x}) for x in parts(fold))
    for label, size in (train + held + tested).items():
        assert abs(tested[label] - test * size) <= 0.5 + 1e-9
        assert abs(held[label] - validation * (size - tested[label])) <= 0.5 + 1e-9


@no_deadline
@given(studies(), KINDS, st.randoms())
def test_row_order_does_not_change_the_folds(cohort: Study, kind: str, random: Any) -> None:
    rows = list(cohort[0].items())
    random.shuffle(rows)
    assert make((dict(rows), cohort[1]), kind=kind) == make(cohort, kind=kind)


def test_a_seed_makes_the_same_folds_in_every_release() -> None:
    fold = make(study(4, 4, slides=1), folds=4, seed=2025)[1]
    assert fold.train == ("0-0-0", "0-2-0", "1-0-0", "1-1-0")
    assert (fold.validation, fold.test) == (("0-3-0", "1-3-0"), ("0-1-0", "1-2-0"))


def test_another_seed_makes_other_folds() -> None:
    assert make(study(9, 9), seed=1)[0].test != make(study(9, 9), seed=2)[0].test


def test_repeats_start_with_the_next_seed() -> None:
    again = make(study(9, 9), repeats=2)[5:]
    assert [f.test for f in again] == [f.test for f in make(study(9, 9), seed=2026)]
    assert [f.name for f in again[:2]] == ["repeat-1-fold-0", "repeat-1-fold-1"]


def test_every_fold_has_its_own_seed() -> None:
    seeds = [fold.seed for fold in make(study(9, 9), repeats=2, seed=7)]
    assert seeds == list(range(7, 17))


def test_random_draws_differ_from_each_other() -> None:
    assert len({fold.test for fold in make(study(9, 9), kind="random", folds=4)}) == 4


def test_panda_is_80_to_5_to_15() -> None:
    (fold, *rest) = make(
        study(400, 600, slides=1), kind="random", test=0.15, validation=0.05 / 0.85
    )
    assert [len(part) for part in parts(fold)] == [800, 50, 150]
    assert len(rest) == 4


def test_camelyon16_is_ten_validation_draws_and_one_test_set() -> None:
    patients, labels = study(159 + 80, 111 + 49, slides=1)
    number = {slide: int(slide.split("-")[1]) for slide in patients}
    official = {s for s in patients if number[s] >= (159 if labels[s] == 0 else 111)}
    split = Split(source="split", train=tuple(patients.keys() - official), test=tuple(official))
    made = make((patients, labels), split, kind="fixed", repeats=10)
    assert [(len(f.train), len(f.validation), len(f.test)) for f in made] == [(216, 54, 129)] * 10
    assert len({fold.validation for fold in made}) == 10
    assert len({fold.test for fold in made}) == 1


def test_a_fixed_split_with_a_validation_part_is_not_changed() -> None:
    patients, labels = study(3, 3, slides=1)
    split = Split(
        source="split",
        train=("0-0-0", "1-0-0"),
        validation=("0-1-0", "1-1-0"),
        test=("0-2-0", "1-2-0"),
    )
    made = make((patients, labels), split, kind="fixed", repeats=5)
    assert {(f.train, f.validation, f.test) for f in made} == {
        (split.train, split.validation, split.test)
    }
    assert len({fold.seed for fold in made}) == 5


def test_a_validation_share_of_0_gives_no_validation_part() -> None:
    assert all(fold.validation == () for fold in make(study(5, 5), validation=0))


def test_a_patient_of_two_classes_counts_as_the_more_frequent_then_the_rarer() -> None:
    patients = {"a": "p", "b": "p", "c": "p", "d": "q", "e": "q", "f": "r", "g": "s"}
    labels = {"a": 0, "b": 0, "c": 1, "d": 0, "e": 1, "f": 0, "g": 1}
    found = folds._stratify(patients, patients, labels, need=2)
    assert found == {"p": 0, "q": 1, "r": 0, "s": 1}


@pytest.mark.parametrize("kind", ["kfold", "random"])
@pytest.mark.parametrize("slides", [(1, 1), (1, 3), (3, 1)])
def test_patients_who_nearly_all_have_both_labels_can_be_split(
    kind: str, slides: tuple[int, int]
) -> None:
    patients, labels = {"only": "patient-only"}, {"only": 0}
    for number in range(20):
        for label, times in enumerate(slides):
            for at in range(times):
                patients[f"{number:02}-{label}-{at}"] = f"patient-{number:02}"
                labels[f"{number:02}-{label}-{at}"] = label
    made = make((patients, labels), kind=kind, repeats=2)
    assert len(made) == 10
    for fold in made:
        owners = [{patients[slide] for slide in part} for part in parts(fold)]
        assert sum(map(len, owners)) == len(set.union(*owners)) == 21  # no patient is split
        assert all({labels[slide] for slide in part} == {0, 1} for part in parts(fold))


def test_a_class_gets_patients_through_another_class_that_lacks_them() -> None:
    """Of classes a, b and c, c only has patients of b, and b gets others from a."""
    patients, labels = {}, {}
    kinds = ["a"] * 3 + ["aab"] * 6 + ["bbc"] * 3
    for number, kind in enumerate(kinds):
        for at, letter in enumerate(kind):
            patients[f"{number:02}-{at}"] = f"p{number:02}"
            labels[f"{number:02}-{at}"] = "abc".index(letter)
    for fold in make((patients, labels), folds=3):
        assert all({labels[slide] for slide in part} == {0, 1, 2} for part in parts(fold))


@pytest.mark.parametrize(
    ("kind", "need"),
    [
        ({"folds": 5}, 5),
        ({"folds": 3}, 3),
        ({"folds": 2}, 4),
        ({"folds": 2, "validation": 0}, 2),
        ({"kind": "random"}, 3),
        ({"kind": "random", "validation": 0}, 2),
    ],
)
def test_small_classes_are_refused_with_the_number_needed(kind: dict[str, Any], need: int) -> None:
    make(study(9, need), **kind)
    found = Findings()
    patients, labels = study(9, need - 1)
    assert folds.make(patients, Strata(labels, ("a", "b")), SplitConfig(**kind), found) == []
    assert f"b: {need - 1}." in found.problems[0]
    assert f"needs {need} patients" in found.problems[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"folds": 1},
        {"kind": "random", "folds": 0},
        {"kind": "k-fold"},
        {"validation": 1.0},
        {"validation": -0.1},
        {"test": 0.0},
        {"repeats": 0},
        {"seed": -1},
        {"files": "splits"},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=list(wrong)[-1]):
        SplitConfig(**wrong)
