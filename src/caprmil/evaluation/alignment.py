"""Alignment: the folds, slides and patients on which tables of predictions are compared."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, count, shorten
from caprmil.evaluation.predictions import Predictions
from caprmil.targets import Target

WHOLE = "all slides"  # the one fold of a table without folds


class Part(NamedTuple):
    """The answers of one model on one fold: entry n of each field is the same slide."""

    labels: NDArray[Any]
    answers: NDArray[np.floating]
    owners: NDArray[np.int64]  # numbers of patients in `Alignment.patients`


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What several tables have in common, with the answers of each on it."""

    target: Target
    patients: tuple[str, ...]
    slides: int
    folds: tuple[str, ...]
    answers: Mapping[str, tuple[Part, ...]]
    """For each table its answers, fold by fold in the order of `folds`."""
    notes: tuple[str, ...]
    unit: str = "slide"
    """What a row of the tables is: slide or patient."""


def align(tables: Mapping[str, Predictions]) -> Alignment:
    """Align tables on the slides they share, or name the slides that prevent it.

    Folds are matched by name, else by their slides. If neither is possible, but the slides are the
    same, the folds of each table are pooled, and a note says so.
    """
    known = {name: _labelled(name, table) for name, table in tables.items()}
    first = next(iter(known))
    target = _shared_target(known)
    for name in known:
        _check_truth(first, known[first], name, known[name])
    owner, notes = _owners(known)
    patients = tuple(sorted(set(owner.values())))
    number = {patient: at for at, patient in enumerate(patients)}
    folds, parts, more = _match(known)
    if others := sorted({table.target.kind for table in known.values()} - {target.kind}):
        named = " and ".join(others)
        notes.append(f"The metrics are those of {target.kind}, also for the tables of {named}.")
    answers = {
        name: tuple(
            Part(
                *target.reordered(part.target, *part.truth),
                np.array([number[owner[slide]] for slide in part.slides]),
            )
            for part in own
        )
        for name, own in parts.items()
    }
    slides = len({slide for part in parts[first] for slide in part.slides})
    return Alignment(
        target=target,
        patients=patients,
        slides=slides,
        folds=folds,
        answers=answers,
        notes=(*notes, *more),
        unit=known[first].unit,
    )


def _labelled(name: str, table: Predictions) -> Predictions:
    try:
        return table.scored()
    except CohortError as problem:
        problem.add_note(f"in {name}")
        raise


def _shared_target(tables: Mapping[str, Predictions]) -> Target:
    """Return the target by which all tables are compared; raise if there is none."""
    (first, one), *others = tables.items()
    target = one.target
    for name, table in others:
        shared = target.shared(table.target)
        if shared is None:
            raise CohortError(
                f"{first} has the answers {', '.join(target.columns)}, and {name} has "
                f"{', '.join(table.target.columns)}. Only predictions of the same target can be "
                "compared."
            )
        target = shared
    return target


def _truth(table: Predictions) -> dict[str, str]:
    shown = [table.target.show_label(label) for label in np.asarray(table.labels).tolist()]
    return dict(zip(table.slides, shown, strict=True))


def _check_truth(first: str, one: Predictions, name: str, other: Predictions) -> None:
    """Refuse tables with other labels for the same slides."""
    here, there = _truth(one), _truth(other)
    if differ := [slide for slide in here if there.get(slide, here[slide]) != here[slide]]:
        raise CohortError(
            f"{first} and {name} have other labels for {count(len(differ), 'slide')}: "
            f"{shorten(differ)}. Compare tables that were made from the same labels."
        )


def _owners(tables: Mapping[str, Predictions]) -> tuple[dict[str, str], list[str]]:
    """Return the patient of each slide, from any table; else every slide is its own patient."""
    owner: dict[str, str] = {}
    for name, table in tables.items():
        named = dict(zip(table.slides, table.patients or (), strict=False))
        if differ := [slide for slide in named if owner.get(slide, named[slide]) != named[slide]]:
            raise CohortError(
                f"{name} has other patients for {count(len(differ), 'slide')}: {shorten(differ)}. "
                "Compare tables that name the patients alike."
            )
        owner |= named
    notes = [] if owner else ["No patients are named: every slide counts as its own patient."]
    return {slide: slide for table in tables.values() for slide in table.slides} | owner, notes


def _match(
    tables: Mapping[str, Predictions],
) -> tuple[tuple[str, ...], dict[str, list[Predictions]], list[str]]:
    """Return the folds that all share, the part of each table in each, and notes."""
    folded = {name: table.by_fold() or {WHOLE: table} for name, table in tables.items()}
    first, *others = folded.values()
    shared = [fold for fold in first if all(fold in own for own in others)]
    if shared and all(_slides(own[f]) == _slides(first[f]) for own in others for f in shared):
        parts = {name: [own[fold] for fold in shared] for name, own in folded.items()}
        return tuple(shared), parts, list(_left_out(folded, shared))

    in_order = {name: sorted(own.items(), key=_by_slides) for name, own in folded.items()}
    names, contents = next(iter(in_order.values())), [_contents(own) for own in in_order.values()]
    if all(own == contents[0] for own in contents):
        parts = {name: [part for _, part in own] for name, own in in_order.items()}
        return tuple(fold for fold, _ in names), parts, []

    _check_slides(tables)
    note = (
        "The folds of these tables are not the same ones, though their slides are: all folds are "
        "pooled, so that differences in scale between the models of different folds count too."
    )
    return (WHOLE,), {name: [table] for name, table in tables.items()}, [note]


def _slides(part: Predictions) -> frozenset[str]:
    return frozenset(part.slides)


def _by_slides(fold: tuple[str, Predictions]) -> list[str]:
    return sorted(fold[1].slides)


def _contents(folds: Sequence[tuple[str, Predictions]]) -> list[frozenset[str]]:
    return [_slides(part) for _, part in folds]


def _left_out(folded: Mapping[str, Mapping[str, Predictions]], shared: list[str]) -> Iterator[str]:
    for name, own in folded.items():
        if rest := [fold for fold in own if fold not in shared]:
            yield f"Only folds that all share are compared: {shorten(rest)} of {name} is left out."


def _check_slides(tables: Mapping[str, Predictions]) -> None:
    """Refuse tables of different slides."""
    (first, one), *others = tables.items()
    for name, other in others:
        if apart := sorted(_slides(one) ^ _slides(other)):
            advice = "Train both on the same cohort and splits."
            if one.unit != other.unit:
                advice = (
                    f"{first} predicts {one.unit}s, and {name} predicts {other.unit}s: give both "
                    "the same [data] unit."
                )
            raise CohortError(
                f"{first} and {name} were not tested on the same {one.unit}s; only one of them has "
                f"these {len(apart)}: {shorten(apart)}. {advice}"
            )
