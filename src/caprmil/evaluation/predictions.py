"""Predictions: a table of class probabilities per slide, its CSV, and the summary of its scores.

Our columns are slide, patient, fold, label, predicted, prob_<class> for each class, then extras.
`Predictions.read` also takes the tables that other programs write.
"""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, suggest
from caprmil.evaluation import metrics
from caprmil.evaluation.metrics import Interval
from caprmil.io import tables
from caprmil.io.atomic import atomic_write
from caprmil.io.tables import Table

# What the columns of predictions alone may be called; `tables` knows the others.
PREDICTED = ("predicted", "pred", "prediction", "y_pred", "y_hat")
SCORE = ("probability", "prob", "score")
PREFIXES = ("prob_", "probability_", "p_")

OWN_COLUMNS = ("slide", "patient", "fold", "label", "predicted")


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """What models said about slides: place n of every field is the same slide."""

    slides: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: NDArray[np.floating]
    labels: NDArray[np.integer] | None = None
    """Class numbers; -1 for a slide without a label."""
    patients: tuple[str, ...] | None = None
    folds: tuple[str, ...] | None = None
    """The fold whose model answered. A slide may be answered once in each."""
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further columns, kept in order."""

    def __post_init__(self) -> None:
        n, shape = len(self.slides), self.probabilities.shape
        if shape != (n, len(self.classes)):
            raise ValueError(f"Give slides x classes. {shape=}, {n=}, {self.classes=}")
        metrics.check_probabilities(self.probabilities, self.slides)
        object.__setattr__(self, "probabilities", self.probabilities.astype(np.float64))
        for name, cells in self._columns().items():
            if len(cells) != n:
                raise ValueError(f"There are {n} slides, but {name} has {len(cells)=}.")
        if self.labels is not None:
            codes, known = self.labels, range(-1, len(self.classes))
            if codes.shape != (n,) or not set(codes.tolist()) <= set(known):
                raise ValueError(f"Labels are class numbers, or -1 for none. {n=}, {codes=}")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"Two classes have one name. {self.classes=}")
        if clash := [name for name in self.extra if _is_ours(name)]:
            raise ValueError(f"Extra columns cannot be called like ours. {clash=}")
        answers = zip(self.slides, self.folds or [None] * n, strict=True)
        (slide, fold), times = Counter(answers).most_common(1)[0]
        if times > 1:
            of_fold = "" if fold is None else f" of fold '{fold}'"
            raise CohortError(
                f"Slide '{slide}'{of_fold} has {times} rows. Keep one, or give each its fold."
            )

    def __len__(self) -> int:
        return len(self.slides)

    @classmethod
    def read(
        cls, path: Path | str, *, label: str | None = None, allow_unlabelled: bool = False
    ) -> "Predictions":
        """Read a CSV of predictions, ours or another program's.

        `label` names the column with the truth, where its name does not say so. A table without
        any labels can be read; one that lacks some, only with `allow_unlabelled`. Probabilities
        are prob_<class>, probability_<class>, p_<class>, <label column>_<class> (STAMP), or, for
        the labels 0 and 1, a single column probability, prob or score.
        """
        table = tables.read(path)
        patient, fold = (_find(table, tables.COLUMNS[role]) for role in ("patient", "fold"))
        slide = _find(table, tables.COLUMNS["slide"]) or patient  # STAMP has a row per patient
        if slide is None:
            raise _lacks(table, "a column slide or patient")
        _refuse_training_rows(table)
        truth, columns = _truth_and_classes(table, label)
        used = {slide, patient, fold, truth, _find(table, PREDICTED), *columns.values()}
        rest = {name: cells for name, cells in table.columns.items() if name not in used}
        fields: dict[str, Any] = {
            "slides": table.names(slide),
            "classes": tuple(columns),
            "probabilities": _read_probabilities(table, columns),
            "labels": _read_labels(table, truth, tuple(columns), allow_blank=allow_unlabelled),
            "patients": _names_if_any(table, patient),
            "folds": _names_if_any(table, fold),
            "extra": {f"original_{n}" if _is_ours(n) else n: cells for n, cells in rest.items()},
        }
        try:
            return cls(**fields)
        except CohortError as problem:
            raise CohortError(f"{path}: {problem}") from None

    def write(self, path: Path | str) -> Path:
        """Write a CSV that reads back to the same numbers. The file must be new."""
        with (
            atomic_write(path) as passing,
            passing.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*OWN_COLUMNS, *(f"prob_{c}" for c in self.classes), *self.extra])
            writer.writerows(self._rows())
        return Path(path)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        nothing = ("",) * len(self)
        words = (*self.classes, "")  # the last is what -1 becomes
        labels = nothing if self.labels is None else tuple(words[code] for code in self.labels)
        predicted = tuple(words[code] for code in self.probabilities.argmax(axis=1))
        numbers = [tuple(repr(float(p)) for p in column) for column in self.probabilities.T]
        known = (self.slides, self.patients or nothing, self.folds or nothing, labels, predicted)
        return zip(*known, *numbers, *self.extra.values(), strict=True)

    def take(self, rows: Iterable[int]) -> "Predictions":
        """Return the table of these rows, in this order."""
        rows = list(rows)
        columns = {n: tuple(cells[row] for row in rows) for n, cells in self._columns().items()}
        labels = None if self.labels is None else self.labels[rows]
        return _assemble(columns, self.classes, self.probabilities[rows], labels)

    @staticmethod
    def concatenate(parts: Sequence["Predictions"]) -> "Predictions":
        """Put tables of the same classes and columns below each other."""
        tables = [part._columns() for part in parts]
        for part, table in zip(parts, tables, strict=True):
            if (part.classes, list(table)) != (parts[0].classes, list(tables[0])):
                raise CohortError(
                    "Tables of different classes or columns cannot be joined: "
                    f"{', '.join((*tables[0], *parts[0].classes))} is not "
                    f"{', '.join((*table, *part.classes))}."
                )
        columns = {n: tuple(chain.from_iterable(t[n] for t in tables)) for n in tables[0]}
        labels = [np.full(len(p), -1) if p.labels is None else p.labels for p in parts]
        none = all(part.labels is None for part in parts)
        probabilities = np.concatenate([part.probabilities for part in parts])
        return _assemble(
            columns, parts[0].classes, probabilities, None if none else np.concatenate(labels)
        )

    def _columns(self) -> dict[str, tuple[str, ...]]:
        """Return the columns of text that this table has, by their names in the file."""
        known = {"slide": self.slides, "patient": self.patients, "fold": self.folds}
        return {n: cells for n, cells in {**known, **self.extra}.items() if cells is not None}

    def labelled(self) -> "Predictions":
        """Return the rows that have a label; raise if none has."""
        rows = np.flatnonzero(self.labels >= 0) if self.labels is not None else np.arange(0)
        if not len(rows):
            raise CohortError("No slide has a label to score. Add or name a label column.")
        return self if len(rows) == len(self) else self.take(rows.tolist())

    def by_fold(self) -> dict[str, "Predictions"]:
        """Return the table of each fold, in order of appearance; nothing if there are no folds."""
        rows: dict[str, list[int]] = {}
        for row, fold in enumerate(self.folds or ()):
            rows.setdefault(fold, []).append(row)
        return {fold: self.take(members) for fold, members in rows.items()}

    def scores(self) -> dict[str, float]:
        """Return every metric on all slides with a label, the folds pooled."""
        return metrics.score(*_truth(self.labelled()))

    def fold_scores(self) -> dict[str, dict[str, float]]:
        """Return every metric on each fold that has labels."""
        folds = self.labelled().by_fold()
        return {fold: metrics.score(*_truth(part)) for fold, part in folds.items()}

    def intervals(
        self,
        *,
        names: Iterable[str] | None = None,
        draws: int = 1000,
        level: float = 0.95,
        seed: int = 0,
    ) -> dict[str, Interval]:
        """Return bootstrap intervals of the pooled scores, by patient if known, else by slide."""
        part = self.labelled()
        units = part.patients or part.slides
        settings: dict[str, Any] = {"draws": draws, "level": level, "seed": seed}
        return metrics.bootstrap(*_truth(part), units, metrics=names, **settings)


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """One metric, seen in two ways that need not agree: fold by fold, and all slides at once."""

    mean_over_folds: float
    std_over_folds: float
    folds_counted: int
    all_slides_pooled: float
    interval: Interval | None
    """Of the pooled value. None for calibration errors, where a bootstrap misleads."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of a table of predictions, with what one needs to judge them."""

    slides: int
    patients: int | None
    metrics: Mapping[str, MetricSummary]
    folds: Mapping[str, Mapping[str, float]]
    interval_level: float
    ace_floor_on_a_fold: tuple[float, float] | None
    """Mean and std of the ACE that a perfectly calibrated model would read on a fold."""
    ace_floor_pooled: tuple[float, float] | None
    """The same on all slides pooled. None where a slide is in several folds."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it: in full precision, None for NaN."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def as_rows(self) -> list[dict[str, str]]:
        """Return one row per metric, rounded, ready to print."""
        unit = "slide" if self.patients is None else "patient"
        rows = []
        for name, metric in self.metrics.items():
            row = {"metric": name}
            if self.folds:
                row["mean over folds"] = _show(metric.mean_over_folds)
                row["std over folds"] = _show(metric.std_over_folds)
                row["folds counted"] = str(metric.folds_counted)
            row["all slides pooled"] = _show(metric.all_slides_pooled)
            low, high = metric.interval or (math.nan, math.nan)
            between = "-" if math.isnan(low) else f"{_show(low)} to {_show(high)}"
            row[f"{100 * self.interval_level:g} % interval by {unit}"] = between
            rows.append(row)
        return rows

    def as_markdown(self) -> str:
        """Return the table, with what was scored above it and remarks below."""
        rows = self.as_rows()
        counts = {"slides": self.slides, "patients": self.patients, "folds": len(self.folds)}
        sizes = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        table = tables.markdown(list(rows[0]), [list(row.values()) for row in rows], self.notes)
        return f"{sizes}.\n\n{table}"


def summary(
    predictions: Predictions, *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> Summary:
    """Score a table: over folds and pooled, with intervals by patient and the floor of the ACE."""
    part = predictions.labelled()
    slides, by_fold, folds = len(set(part.slides)), part.fold_scores(), part.by_fold()
    pooled = part.scores()
    sampled = [name for name in pooled if name not in metrics.CALIBRATION_ERRORS]
    intervals = part.intervals(names=sampled, draws=draws, level=level, seed=seed)
    table = {}
    for name, value in pooled.items():
        mean, std, counted = metrics.mean_and_spread(scores[name] for scores in by_fold.values())
        table[name] = MetricSummary(
            mean_over_folds=mean,
            std_over_folds=std,
            folds_counted=counted,
            all_slides_pooled=value,
            interval=intervals.get(name),
        )
    floors = [metrics.ace_floor(fold.probabilities, seed=seed) for fold in folds.values()]
    fold_floor = tuple(np.mean(floors, axis=0).tolist()) if floors else None
    # The answers on one slide share its label: labels drawn for each apart would say nothing.
    once = slides == len(part)
    pooled_floor = metrics.ace_floor(part.probabilities, seed=seed) if once else None
    return Summary(
        slides=slides,
        patients=len(set(part.patients)) if part.patients else None,
        metrics=table,
        folds=by_fold,
        interval_level=level,
        ace_floor_on_a_fold=fold_floor,
        ace_floor_pooled=pooled_floor,
        notes=tuple(_notes(predictions, part, fold_floor, pooled_floor)),
    )


def _notes(
    whole: Predictions,
    part: Predictions,
    fold_floor: tuple[float, ...] | None,
    pooled_floor: tuple[float, ...] | None,
) -> Iterator[str]:
    """Say what a reader of the numbers should know about them."""
    for floor, where in ((fold_floor, "on a fold"), (pooled_floor, "on all slides pooled")):
        if floor:
            yield (
                f"A perfectly calibrated model with these probabilities would read an ACE of "
                f"{_show(floor[0])} ± {_show(floor[1])} {where}."
            )
    yield "ACE and ECE have no interval: drawing slides again looks like miscalibration."
    if len(part) < len(whole):
        yield f"{len(whole) - len(part)} of {len(whole)} rows have no label and are not scored."
    if len(set(part.slides)) < len(part):
        yield f"Slides are in several folds: pooled scores are over {len(part)} answers."
    for fold, members in part.by_fold().items():
        labels, probabilities = _truth(members)
        if absent := [name for code, name in enumerate(part.classes) if code not in labels]:
            left = (
                "it has no AUC"
                if math.isnan(metrics.auc(labels, probabilities))
                else ("its AUC is the mean of the others")
            )
            yield f"Fold {fold} has no slide of {', '.join(absent)}: {left}."


def _find(table: Table, words: Iterable[str]) -> str | None:
    return next(iter(tables.called(table.columns, words)), None)


def _lacks(table: Table, what: str) -> CohortError:
    return CohortError(f"{table.path} needs {what}. Its columns are {', '.join(table.columns)}.")


def _truth_and_classes(table: Table, label: str | None) -> tuple[str | None, dict[str, str]]:
    """Return the column of labels, if any, and the column of each class's probability."""
    if label is not None and label not in table.columns:
        raise CohortError(f"{table.path} has no column '{label}'.{suggest(label, table.columns)}")
    # Beside probabilities, `class` may as well be the predicted one.
    truth = label or _find(table, (word for word in tables.COLUMNS["label"] if word != "class"))
    for prefix in PREFIXES:
        if len(columns := _starting_with(table, prefix)) > 1:
            return truth, columns
    # STAMP: the column of the truth has any name, and <its name>_<class> are the probabilities.
    for name in [truth] if truth else table.columns:
        columns = _starting_with(table, f"{name}_")
        if len(columns) > 1 and not columns.keys().isdisjoint(table.columns[name]):
            return name, columns
    if score := _find(table, SCORE):
        return truth, {"0": "", "1": score}
    raise _lacks(
        table,
        "a column prob_<class> for each class, or for the labels 0 and 1 a column probability",
    )


def _starting_with(table: Table, prefix: str) -> dict[str, str]:
    size = len(prefix)
    same = (n for n in table.columns if n[:size].lower() == prefix.lower() and n[size:])
    return {name[size:]: name for name in same}


def _refuse_training_rows(table: Table) -> None:
    """Refuse answers on slides that a model was trained on: they would flatter every score."""
    column = _find(table, ("split",))
    words = set() if column is None else {word.lower() for word in table.columns[column]}
    if known := sorted(words & {"train", "training", "val", "valid", "validation"}):
        raise CohortError(
            f"{table.path} has rows of {' and '.join(known)} in column {column}. Keep test."
        )


def _names_if_any(table: Table, column: str | None) -> tuple[str, ...] | None:
    return table.names(column) if column and any(table.columns[column]) else None


def _read_probabilities(table: Table, columns: Mapping[str, str]) -> NDArray[np.float64]:
    """Return the probabilities; of two classes the first may have no column of its own."""
    last = [table.numbers(column) for column in columns.values() if column]
    numbers = np.array([[1 - p for p in last[0]], *last] if len(last) == 1 else last).T
    metrics.check_probabilities(numbers, table.places)
    return numbers


def _read_labels(
    table: Table, column: str | None, classes: tuple[str, ...], *, allow_blank: bool
) -> NDArray[np.int64] | None:
    """Return labels as class numbers; None if there are none at all."""
    if column is None or not any(table.columns[column]):
        return None
    codes = []
    for cell, place in table.placed(column):
        name = cell.removesuffix(".0")  # numbers that went through a column of floats
        if not cell and not allow_blank:
            raise CohortError(f"{place}: the label is missing. Add it, or remove the row.")
        if cell and cell not in classes and name not in classes:
            known = ", ".join(classes)
            raise CohortError(f"{place}: label '{cell}' is none of the classes {known}.")
        codes.append(-1 if not cell else classes.index(cell if cell in classes else name))
    return np.array(codes)


def _assemble(
    columns: Mapping[str, tuple[str, ...]],
    classes: tuple[str, ...],
    probabilities: NDArray[np.floating],
    labels: NDArray[np.integer] | None,
) -> Predictions:
    """Build a table from its columns by their names in the file."""
    return Predictions(
        slides=columns["slide"],
        classes=classes,
        probabilities=probabilities,
        labels=labels,
        patients=columns.get("patient"),
        folds=columns.get("fold"),
        extra={name: cells for name, cells in columns.items() if not _is_ours(name)},
    )


def _truth(part: Predictions) -> tuple[NDArray[np.integer], NDArray[np.floating]]:
    """Return labels and probabilities of a table in which every slide has a label."""
    return np.asarray(part.labels), part.probabilities


def _is_ours(name: str) -> bool:
    return name in OWN_COLUMNS or name.startswith("prob_")


def _show(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _plain(value: Any) -> Any:
    """Return the value with lists for tuples, and None for NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
