"""Folds that keep patients together: a partition, random draws, or a fixed split from a table.

Patients are drawn stratum by stratum, with numpy alone: scikit-learn's splitters may leave a small
class out of a part. Here every class is in every part, or the cohort is refused.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from caprmil.errors import RecipeError
from caprmil.io.findings import Findings

PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}

FEWEST = 3  # patients of a stratum of a fixed split that may be merged

Listing = list[tuple[str, str]]  # a slide, and the word for its part


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How a cohort is divided: the [splits] table of a recipe."""

    kind: Literal["kfold", "random", "fixed"] = "kfold"
    """kfold: test parts that partition the cohort. random: test parts that may overlap.
    fixed: the table's column `split`, or its columns `fold_0`, `fold_1`, ..., or `files`."""
    folds: int = 5
    """Parts of a kfold, or number of random draws. A fixed split brings its own number."""
    validation: float = 0.2
    """Share of the training part, by patient. 0 makes no validation part."""
    test: float = 0.2
    """Share of the cohort, by patient, of a random draw."""
    repeats: int = 1
    """Repeat all folds with the seeds seed + 1, seed + 2, ... A fixed split keeps its test part."""
    seed: int = 2025
    """Of the folds, of the weights at the start, and of the order of training."""
    files: str | None = None
    """A folder with CLAM's splits_0.csv, splits_1.csv, ..., or one such file."""
    allow_shared_patients: bool = False
    """Accept a fixed split whose test part shares patients with the rest: scores are too high."""

    def __post_init__(self) -> None:
        fewest = 2 if self.kind == "kfold" else 1
        rules = {
            "kind": (self.kind in ("kfold", "random", "fixed"), "kfold, random or fixed"),
            "folds": (self.folds >= fewest, f"{fewest} or more for kind = '{self.kind}'"),
            "validation": (0 <= self.validation < 1, "from 0 to less than 1"),
            "test": (0 < self.test < 1, "between 0 and 1"),
            "repeats": (self.repeats >= 1, "1 or more"),
            "seed": (self.seed >= 0, "0 or more"),
            "files": (self.files is None or self.kind == "fixed", "left out unless kind = 'fixed'"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise RecipeError(
                    f"[splits] {name} is {getattr(self, name)!r}, and must be {allowed}."
                )


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The slides of each part by name, in order of name, and the seed to train with."""

    name: str
    seed: int
    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]

    def saw(self, slide: str) -> bool:
        """Return whether the model of this fold was trained or validated on a slide."""
        return slide in self.train or slide in self.validation


@dataclass(frozen=True, kw_only=True)
class Split:
    """A division before it is a fold: the validation part may still have to be drawn."""

    source: str  # the column or file that has it
    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    test: tuple[str, ...]


class Strata(NamedTuple):
    """The stratum of each slide, which folds keep in balance: its class, or a range of values."""

    of: Mapping[str, int]
    names: tuple[str, ...]
    title: str = "Classes"
    may_merge: bool = False
    """Whether one with too few patients is added to its neighbour, and may be missing in a part."""


def is_split(column: str) -> bool:
    """Return whether a column of a table names the part that a slide is in."""
    return re.fullmatch(r"split|fold_\d+", column.lower()) is not None


def from_columns(rows: Mapping[str, Mapping[str, str]]) -> dict[str, Listing]:
    """Return the parts of slides in the columns `split`, or else `fold_0`, `fold_1`, ..."""
    columns = [column for column in next(iter(rows.values()), {}) if is_split(column)]
    named = [column for column in columns if column.lower() == "split"]
    numbered = sorted(set(columns) - set(named), key=lambda column: int(column[5:]))
    return {
        column: [(name, row[column]) for name, row in rows.items() if row[column]]
        for column in named or numbered
    }


def read(
    listings: Mapping[str, Listing],
    known: Collection[str],
    usable: Collection[str],
    found: Findings,
) -> list[Split]:
    """Turn lists of slides into splits of the usable ones."""
    listed = [(source, *pair) for source, listing in listings.items() for pair in listing]
    found.problem(
        "Slides of a split that are not in the table",
        [f"{slide} ({source})" for source, slide, _ in listed if slide not in known],
        "Add them to the table, or take them out of the split.",
    )
    found.problem(
        "Parts of a split other than train, val and test",
        sorted({f"{word} ({source})" for source, _, word in listed if word.lower() not in PARTS}),
        "Rename them, or leave the cell empty.",
    )
    splits = []
    for source, listing in listings.items():
        parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
        for slide, word in listing:
            if slide in usable and word.lower() in PARTS:
                parts[PARTS[word.lower()]].append(slide)
        splits.append(Split(source=source, **{part: tuple(own) for part, own in parts.items()}))
    return splits


def make(
    patients: Mapping[str, str],
    strata: Strata,
    config: SplitConfig,
    found: Findings,
    fixed: Sequence[Split] = (),
) -> list[Fold]:
    """Return the folds of the slides in `patients`; none if a problem was added to `found`."""
    patients = dict(sorted(patients.items()))  # the order of the table must not matter
    before = len(found.problems)
    of_patients: dict[str, int] = {}
    if config.kind == "fixed":
        strata = _merge_small(strata, patients, FEWEST) if strata.may_merge else strata
        _check_fixed(fixed, patients, strata, config, found)
    else:
        need = _patients_needed(config)
        if strata.may_merge:
            strata = _merge_small(strata, patients, need)
        of_patients = _stratify(patients, patients, strata.of, need)
        _check_sizes(of_patients, strata, config, found)
    if len(found.problems) > before:
        return []

    folds: list[Fold] = []
    for repeat in range(config.repeats):
        splits = (
            fixed if config.kind == "fixed" else _draw_tests(patients, of_patients, config, repeat)
        )
        for index, split in enumerate(splits):
            train, validation = set(split.train), set(split.validation)
            if not validation and config.validation:
                own = _stratify(train, patients, strata.of, 2)
                drawn = _draw(own, config.validation, _generator(config, repeat, index, 1))
                validation = {slide for slide in train if patients[slide] in drawn}
                train -= validation
            fold = Fold(
                name=f"repeat-{repeat}-fold-{index}" if config.repeats > 1 else f"fold-{index}",
                seed=config.seed + len(folds),
                train=tuple(sorted(train)),
                validation=tuple(sorted(validation)),
                test=tuple(sorted(set(split.test))),
            )
            folds.append(fold)
    return folds


def _generator(config: SplitConfig, repeat: int, index: int, purpose: int) -> np.random.Generator:
    """Return the generator of one draw, so that no draw depends on how many came before."""
    return np.random.default_rng([config.seed + repeat, index, purpose])


def _stratify(
    slides: Iterable[str], patients: Mapping[str, str], strata: Mapping[str, int], need: int
) -> dict[str, int]:
    """Return the stratum in which each patient is drawn, one that the patient has slides of.

    It is the most frequent one; of two as frequent, the rarer in the cohort. If nearly every
    patient has slides of several strata, one of them could then be left without patients: as many
    as it lacks of the `need` are drawn in it instead, those with the largest share of it first.
    """
    rarity = Counter(strata.values())
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for slide in slides:
        counts[patients[slide]][strata[slide]] += 1
    found = {
        patient: min(own, key=lambda stratum: (-own[stratum], rarity[stratum], stratum))
        for patient, own in sorted(counts.items())
    }
    sizes = Counter(found.values())
    holders: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for patient, own in counts.items():
        for stratum, slides_of_it in own.items():
            holders[stratum].append((-slides_of_it / own.total(), patient))

    def add_patient(stratum: int, tried: set[int]) -> bool:
        """Move a patient to a stratum, from one that can spare it or is given another for it."""
        tried.add(stratum)
        for _, patient in sorted(holders[stratum]):
            donor = found[patient]
            if donor not in tried and (sizes[donor] > need or add_patient(donor, tried)):
                found[patient] = stratum
                sizes[donor] -= 1
                sizes[stratum] += 1
                return True
        return False

    for stratum in sorted(holders):
        while sizes[stratum] < need and add_patient(stratum, set()):
            pass
    return found


def _merge_small(strata: Strata, patients: Mapping[str, str], need: int) -> Strata:
    """Return strata that all have the patients they need: each that has not joins a neighbour."""
    of, names = dict(strata.of), list(strata.names)
    while len(names) > 1:
        sizes = Counter(_stratify(of, patients, of, 0).values())
        least = min(range(len(names)), key=lambda code: sizes[code])
        if sizes[least] >= need:
            break
        beside = [code for code in (least - 1, least + 1) if 0 <= code < len(names)]
        into = min(beside, key=lambda code: sizes[code])
        first, second = sorted((least, into))
        names[first] = f"{names[first]} or {names.pop(second)}"
        of = {
            slide: first if code == second else code - (code > second) for slide, code in of.items()
        }
    return strata._replace(of=of, names=tuple(names))


def _members(strata: Mapping[str, int]) -> list[list[str]]:
    """Return the patients of each stratum."""
    groups: dict[int, list[str]] = defaultdict(list)
    for patient, stratum in strata.items():
        groups[stratum].append(patient)
    return [groups[stratum] for stratum in sorted(groups)]


def _deal(strata: Mapping[str, int], parts: int, rng: np.random.Generator) -> list[set[str]]:
    """Deal patients in turn, stratum after stratum: sizes of parts differ by one at most."""
    dealt = [patient for group in _members(strata) for patient in rng.permutation(group).tolist()]
    return [set(dealt[part::parts]) for part in range(parts)]


def _draw(
    strata: Mapping[str, int], share: float, rng: np.random.Generator, *, spare: int = 1
) -> set[str]:
    """Draw a share of the patients of each stratum: at least one, and never the last `spare`."""
    drawn: set[str] = set()
    for group in _members(strata):
        size = max(1, min(int(share * len(group) + 0.5), len(group) - spare))
        drawn.update(rng.permutation(group)[:size].tolist())
    return drawn


def _draw_tests(
    patients: Mapping[str, str], strata: Mapping[str, int], config: SplitConfig, repeat: int
) -> Iterator[Split]:
    """Yield the train and test parts of one repeat, from the stratum of each patient."""
    if config.kind == "kfold":
        tests = _deal(strata, config.folds, _generator(config, repeat, 0, 0))
    else:
        spare = 2 if config.validation else 1
        rngs = [_generator(config, repeat, index, 0) for index in range(config.folds)]
        tests = [_draw(strata, config.test, rng, spare=spare) for rng in rngs]
    for test in tests:
        yield Split(
            source=config.kind,
            train=tuple(slide for slide, patient in patients.items() if patient not in test),
            test=tuple(slide for slide, patient in patients.items() if patient in test),
        )


def _patients_needed(config: SplitConfig) -> int:
    """Return how many patients a stratum needs, so that every part has one."""
    beside_test, k = 2 if config.validation else 1, config.folds
    if config.kind == "random":
        return 1 + beside_test
    return next(n for n in count(k) if n - -(-n // k) >= beside_test)


def _check_sizes(
    of_patients: Mapping[str, int], strata: Strata, config: SplitConfig, found: Findings
) -> None:
    """Check that every stratum has a patient for every part."""
    need, purpose, remedy = _patients_needed(config), "A random draw", "Add patients"
    if config.kind == "kfold":
        purpose = f"folds = {config.folds}"
        remedy = "Lower [splits] folds" if config.folds > 3 else remedy
    sizes = Counter(of_patients.values())
    found.problem(
        f"{strata.title} with too few patients",
        [f"{name}: {sizes[at]}" for at, name in enumerate(strata.names) if sizes[at] < need],
        f"{purpose} with validation = {config.validation:g} needs {need} patients of each, "
        f"so that every part has one. {remedy}, or leave them out of the table.",
    )


def _check_fixed(
    splits: Sequence[Split],
    patients: Mapping[str, str],
    strata: Strata,
    config: SplitConfig,
    found: Findings,
) -> None:
    """Check fixed splits for leaks and gaps; one finding for all splits that have it."""
    gathered: dict[tuple[bool, str, str], list[str]] = defaultdict(list)
    for split in splits:
        for harmful, headline, advice, concerned in _examine(split, patients, strata, config):
            names = [f"{name} ({split.source})" for name in sorted(concerned)]
            gathered[harmful, headline, advice] += names
    for (harmful, headline, advice), names in gathered.items():
        (found.problem if harmful else found.note)(headline, names, advice)


def _examine(
    split: Split,
    patients: Mapping[str, str],
    strata: Strata,
    config: SplitConfig,
) -> Iterator[tuple[bool, str, str, set[str]]]:
    """Yield what is wrong with a split: harmful or not, headline, advice, names."""
    train, validation, test = set(split.train), set(split.validation), set(split.test)

    def owners(slides: set[str]) -> set[str]:
        return {patients[slide] for slide in slides}

    def absent(slides: set[str]) -> set[str]:
        present = {strata.names[strata.of[slide]] for slide in slides}
        return set(strata.names) - present if slides else set()

    twice = (train & validation) | (train & test) | (validation & test)
    yield True, "Slides in two parts of a split", "Leave each in one part.", twice

    empty = {part for part in ("train", "test") if not getattr(split, part)}
    yield True, "Empty parts", "Train and test need slides of the table.", empty

    shared = owners(test) & owners(train | validation)
    advice = (
        "Move them to one part, or set allow_shared_patients = true and do not trust the scores."
    )
    yield not config.allow_shared_patients, "Patients in test and in another part", advice, shared

    shared = owners(train) & owners(validation)
    advice = "The chosen epoch may be one that has memorised them."
    yield False, "Patients in train and validation", advice, shared

    unused = set(patients) - train - validation - test
    yield False, "Slides in no part of a split", "They are not used there.", unused
    if strata.may_merge:
        return

    advice = "Add slides, or leave them out of the table."
    yield True, f"{strata.title} missing from train", advice, absent(train)

    gaps = absent(validation) | absent(test)
    advice = "Scores that need all of them are undefined there."
    yield False, f"{strata.title} missing from validation or test", advice, gaps

    sizes = Counter(_stratify(train, patients, strata.of, 2).values())
    to_draw = not validation and config.validation > 0
    lonely = {strata.names[at] for at, size in sizes.items() if size == 1 and to_draw}
    advice = "Add patients, name the validation part, or set [splits] validation = 0."
    yield (
        True,
        f"{strata.title} with one patient in train, none left for validation",
        advice,
        lonely,
    )
