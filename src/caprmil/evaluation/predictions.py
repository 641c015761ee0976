"""Predictions: a table of answers per slide, its CSV, and the summary of its scores.

The columns are slide, patient, fold, label (or those that the target names), predicted, those of
the target (prob_<class> for each class), then extra ones. A table of patients has no column slide.
`Predictions.read` also takes the tables that other programs write.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from caprmil.errors import CohortError, UnknownNameError, count, one_line, suggest
from caprmil.io import tables
from caprmil.io.atomic import atomic_write
from caprmil.io.tables import TableLike, find_column, table_name
from caprmil.targets import TARGETS, Target
from caprmil.targets.metric import Interval, bootstrap, mean_and_spread

PREDICTED = ("predicted", "pred", "prediction", "y_pred", "y_hat")
OWN_COLUMNS = ("slide", "patient", "fold", "predicted")


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """The answers of models for slides: entry n of every field is the same slide.

    Where patients are predicted, `unit` is patient, and `slides` and `patients` are their names.
    """

    slides: tuple[str, ...]
    target: Target
    answers: NDArray[np.floating]
    """A row per slide: for a classification, the probability of each class."""
    labels: NDArray[Any] | None = None
    """As the target has them; `target.missing` for a slide without a label."""
    patients: tuple[str, ...] | None = None
    folds: tuple[str, ...] | None = None
    """The fold whose model answered. A slide may have one answer per fold."""
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further columns, kept in order."""
    unit: Literal["slide", "patient"] = "slide"
    """What a row is."""

    def __post_init__(self) -> None:
        n = len(self.slides)
        if len(self.answers) != n:
            raise ValueError(f"Give one answer per slide. {self.answers.shape=}, {n=}")
        self.target.check_answers(self.answers, self.slides)
        object.__setattr__(self, "answers", self.answers.astype(np.float64))
        for name, cells in self._columns().items():
            if len(cells) != n:
                raise ValueError(f"There are {n} slides, but {name} has {len(cells)=}.")
        if self.labels is not None and len(self.labels) != n:
            raise ValueError(f"Give one label per slide. {self.labels.shape=}, {n=}")
        if self.labels is not None:
            self.target.check_labels(self.labels)
        if clash := [name for name in self.extra if self._is_own(name)]:
            raise ValueError(f"Extra columns cannot have the names of ours. {clash=}")
        answers = zip(self.slides, self.folds or [None] * n, strict=True)
        (slide, fold), times = Counter(answers).most_common(1)[0]
        if times > 1:
            of_fold = "" if fold is None else f" of fold '{fold}'"
            raise CohortError(
                f"{self.unit.capitalize()} '{slide}'{of_fold} has {times} rows. Keep one, or give "
                "each its fold."
            )

    def __len__(self) -> int:
        return len(self.slides)

    @classmethod
    def read(
        cls,
        source: TableLike,
        *,
        label: str | None = None,
        allow_unlabelled: bool = False,
        target: Target | None = None,
    ) -> "Predictions":
        """Read a table of predictions, ours or another program's: a file or a DataFrame.

        `label` names the column with the truth, where its name is not recognised. A table without
        any labels can be read; one that lacks some, only with `allow_unlabelled`. Each target
        says which columns it recognises; the first that does is taken, or `target`.
        """
        table, name = tables.read_table(source), table_name(source)
        if label is not None and label not in table.columns:
            raise CohortError(f"{name} has no column '{label}'.{suggest(label, table.columns)}")
        patient, fold = (find_column(table, tables.COLUMNS[role]) for role in ("patient", "fold"))
        slide = find_column(table, tables.COLUMNS["slide"])
        unit: Literal["slide", "patient"] = "patient" if slide is None else "slide"
        slide = slide or patient
        if slide is None:
            raise _lacks(table, name, "a column slide or patient")
        _check_no_training_rows(table, name)
        found, truth, columns, answers = _recognise(table, name, label, target)
        used = {slide, patient, fold, *truth, find_column(table, PREDICTED), *columns}
        rest = {column: tuple(table[column]) for column in table.columns if column not in used}

        def is_own(column: str) -> bool:
            return column in (*OWN_COLUMNS, *found.label_names) or found.owns(column)

        labels = _read_labels(table, truth, found, allow_blank=allow_unlabelled)
        try:
            return cls(
                slides=tables.names(table, slide),
                target=found,
                answers=answers,
                labels=labels,
                patients=_names_if_any(table, patient),
                folds=_names_if_any(table, fold),
                extra={f"original_{n}" if is_own(n) else n: cells for n, cells in rest.items()},
                unit=unit,
            )
        except CohortError as problem:
            raise CohortError(f"{name}: {problem}") from None

    def to_frame(self) -> pd.DataFrame:
        """Return the table as a DataFrame, with the columns of its CSV."""
        nothing = ("",) * len(self)
        labels = dict.fromkeys(self.target.label_names, nothing)
        if self.labels is not None:
            cells = [self.target.split_label(label) for label in self.labels.tolist()]
            labels = dict(zip(labels, zip(*cells, strict=True), strict=True))
        names = {"slide": self.slides, "patient": self.patients or nothing}
        known: dict[str, Any] = {
            **(names if self.unit == "slide" else {"patient": self.slides}),
            "fold": self.folds or nothing,
            **labels,
            "predicted": self.target.predicted(self.answers),
        }
        known |= dict(zip(self.target.columns, self.answers.T, strict=True))
        return pd.DataFrame(known | dict(self.extra))

    def write(self, path: str | PathLike[str]) -> Path:
        """Write a CSV that reads back to the same numbers. The file must be new."""
        with atomic_write(path) as file:
            self.to_frame().to_csv(file, index=False, lineterminator="\n", encoding="utf-8")
        return Path(path)

    def take(self, rows: Iterable[int]) -> "Predictions":
        """Return the table of these rows, in this order."""
        rows = list(rows)
        columns = {n: tuple(cells[row] for row in rows) for n, cells in self._columns().items()}
        labels = None if self.labels is None else self.labels[rows]
        return self._with(columns, self.answers[rows], labels)

    def part(self, name: str) -> "Predictions":
        """Return the answers for one of several targets, with its labels, on all slides."""
        if name not in self.target.parts:
            raise UnknownNameError("target", name, self.target.parts)
        part = self.target.parts[name]
        labels = None if self.labels is None else part.labels_of(self.labels)
        return Predictions(
            slides=self.slides,
            target=part.target,
            answers=part.answers_of(self.answers),
            labels=labels,
            patients=self.patients,
            folds=self.folds,
        )

    @staticmethod
    def concatenate(parts: Sequence["Predictions"]) -> "Predictions":
        """Put tables of the same target and columns below each other."""
        first, all_columns = parts[0], [part._columns() for part in parts]
        for part, columns in zip(parts, all_columns, strict=True):
            if (part.target, list(columns)) != (first.target, list(all_columns[0])):
                raise CohortError(
                    "Tables of different classes or columns cannot be joined: "
                    f"{', '.join((*all_columns[0], *first.target.columns))} is not "
                    f"{', '.join((*columns, *part.target.columns))}."
                )
        columns = {n: tuple(chain.from_iterable(c[n] for c in all_columns)) for n in all_columns[0]}
        labels = [
            part.target.as_labels([None] * len(part)) if part.labels is None else part.labels
            for part in parts
        ]
        none = all(part.labels is None for part in parts)
        answers = np.concatenate([part.answers for part in parts])
        return first._with(columns, answers, None if none else np.concatenate(labels))

    def _with(
        self,
        columns: Mapping[str, tuple[str, ...]],
        answers: NDArray[np.floating],
        labels: NDArray[Any] | None,
    ) -> "Predictions":
        """Return a table of the same target from its columns of text."""
        return Predictions(
            slides=columns["slide"],
            target=self.target,
            answers=answers,
            labels=labels,
            patients=columns.get("patient"),
            folds=columns.get("fold"),
            extra={name: cells for name, cells in columns.items() if not self._is_own(name)},
            unit=self.unit,
        )

    def _is_own(self, name: str) -> bool:
        return name in (*OWN_COLUMNS, *self.target.label_names) or self.target.owns(name)

    def _columns(self) -> dict[str, tuple[str, ...]]:
        """Return the columns of text that this table has, by their names in the file."""
        known = {"slide": self.slides, "patient": self.patients, "fold": self.folds}
        return {n: cells for n, cells in {**known, **self.extra}.items() if cells is not None}

    def labelled(self) -> "Predictions":
        """Return the rows that have a label; raise if none has."""
        rows = np.arange(0)
        if self.labels is not None:
            rows = np.flatnonzero(self.target.known(self.labels))
        if not len(rows):
            raise CohortError(f"No {self.unit} has a label to score. Add or name a label column.")
        return self if len(rows) == len(self) else self.take(rows.tolist())

    def scored(self) -> "Predictions":
        """Return the rows that are scored: those with a label.

        If the target scores patients, the answers for the slides of a patient are averaged, in each
        fold and for each label.
        """
        part = self.labelled()
        if not part.target.scores_patients or part.patients is None:
            return part
        folds = part.folds or ("",) * len(part)
        rows: dict[tuple[str, ...], list[int]] = {}
        for row, (patient, fold) in enumerate(zip(part.patients, folds, strict=True)):
            label = part.target.show_label(np.asarray(part.labels)[row].tolist())
            rows.setdefault((patient, fold, label), []).append(row)
        if len(rows) == len(part):
            return part
        first = part.take(min(own, key=lambda row: part.slides[row]) for own in rows.values())
        return replace(
            first, answers=np.stack([part.answers[own].mean(0) for own in rows.values()])
        )

    @property
    def truth(self) -> tuple[NDArray[Any], NDArray[np.floating]]:
        """Labels and answers of a table in which every slide has a label."""
        return np.asarray(self.labels), self.answers

    def by_fold(self) -> dict[str, "Predictions"]:
        """Return the table of each fold, in order of appearance; empty if there are no folds."""
        rows: dict[str, list[int]] = {}
        for row, fold in enumerate(self.folds or ()):
            rows.setdefault(fold, []).append(row)
        return {fold: self.take(members) for fold, members in rows.items()}

    def scores(self) -> dict[str, float]:
        """Return every metric on all slides with a label, the folds pooled."""
        return self.target.score(*self.scored().truth)

    def fold_scores(self) -> dict[str, dict[str, float]]:
        """Return every metric on each fold that has labels."""
        folds = self.scored().by_fold()
        return {fold: self.target.score(*part.truth) for fold, part in folds.items()}

    def intervals(
        self,
        *,
        names: Iterable[str] | None = None,
        draws: int = 1000,
        level: float = 0.95,
        seed: int = 0,
    ) -> dict[str, Interval]:
        """Return bootstrap intervals of the pooled scores, by patient if known, else by slide."""
        part = self.scored()
        metrics = [self.target.metric(name) for name in names or self.target.metrics]
        settings: dict[str, Any] = {"draws": draws, "level": level, "seed": seed}
        return bootstrap(*part.truth, part.patients or part.slides, metrics, **settings)


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """One metric in two forms that need not agree: fold by fold, and all slides pooled."""

    mean_over_folds: float
    std_over_folds: float
    folds_counted: int
    all_slides_pooled: float
    interval: Interval | None
    """Of the pooled value. None for biased metrics, where a bootstrap misleads."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The scores of a table of predictions, with what is needed to judge them."""

    slides: int
    patients: int | None
    metrics: Mapping[str, MetricSummary]
    folds: Mapping[str, Mapping[str, float]]
    interval_level: float
    more: Mapping[str, Any]
    """What the target adds: for a classification, the floor of the ACE."""
    notes: tuple[str, ...]
    unit: Literal["slide", "patient"] = "slide"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it: in full precision, None for NaN."""
        metrics = {name: vars(metric) for name, metric in self.metrics.items()}
        return {
            **({"slides": self.slides} if self.unit == "slide" else {"unit": self.unit}),
            "patients": self.patients,
            "metrics": _plain(metrics),
            "folds": _plain(self.folds),
            "interval_level": self.interval_level,
            **_plain(self.more),
            "notes": list(self.notes),
        }

    def as_rows(self) -> list[dict[str, str]]:
        """Return one row per metric, rounded, ready to print."""
        unit = self.unit if self.patients is None else "patient"
        rows = []
        for name, metric in self.metrics.items():
            row = {"metric": name}
            if self.folds:
                row["mean over folds"] = _show(metric.mean_over_folds)
                row["std over folds"] = _show(metric.std_over_folds)
                row["folds counted"] = str(metric.folds_counted)
            row[f"all {self.unit}s pooled"] = _show(metric.all_slides_pooled)
            low, high = metric.interval or (math.nan, math.nan)
            between = "-" if math.isnan(low) else f"{_show(low)} to {_show(high)}"
            row[f"{100 * self.interval_level:g} % interval by {unit}"] = between
            rows.append(row)
        return rows

    def as_markdown(self) -> str:
        """Return the table, with what was scored above it and notes below."""
        rows = self.as_rows()
        numbers = {"slide": self.slides, "patient": self.patients, "fold": len(self.folds)}
        if self.unit == "patient":
            numbers |= {"slide": None, "patient": self.slides}
        sizes = ", ".join(count(n, what) for what, n in numbers.items() if n)
        cells = [list(row.values()) for row in rows]
        return f"{sizes}.\n\n{tables.markdown_table(list(rows[0]), cells, self.notes)}"


def summary(
    predictions: Predictions, *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> Summary:
    """Score a table: over folds and pooled, with intervals by patient."""
    part, scored = predictions.labelled(), predictions.scored()
    target, slides = part.target, len(set(part.slides))
    by_fold, folds, pooled = part.fold_scores(), part.by_fold(), part.scores()
    sampled = [name for name in pooled if not target.metric(name).biased]
    intervals = part.intervals(names=sampled, draws=draws, level=level, seed=seed)
    table = {}
    for name, value in pooled.items():
        mean, std, counted = mean_and_spread(scores[name] for scores in by_fold.values())
        table[name] = MetricSummary(
            mean_over_folds=mean,
            std_over_folds=std,
            folds_counted=counted,
            all_slides_pooled=value,
            interval=intervals.get(name),
        )
    once = slides == len(part)  # several answers on a slide share its label
    more = target.summary(
        [fold.answers for fold in folds.values()], part.answers if once else None, seed
    )
    return Summary(
        slides=slides,
        patients=len(set(part.patients)) if part.patients else None,
        metrics=table,
        folds=by_fold,
        interval_level=level,
        more={name: value for name, value in more.items() if name != "notes"},
        notes=(*more.get("notes", ()), *_notes(predictions, part, scored)),
        unit=part.unit,
    )


def _notes(whole: Predictions, part: Predictions, scored: Predictions) -> Iterator[str]:
    """Yield what a reader of the scores should know about them."""
    if len(part) < len(whole):
        yield f"{len(whole) - len(part)} of {len(whole)} rows have no label and are not scored."
    if len(set(part.slides)) < len(part):
        units = f"{part.unit.capitalize()}s"
        yield f"{units} are in several folds: pooled scores are over {len(part)} answers."
    if len(scored) < len(part):
        yield "Each patient is scored once, with the mean of the answers for the patient's slides."
    for fold, members in scored.by_fold().items():
        yield from part.target.notes(fold, *members.truth)


def _recognise(
    table: pd.DataFrame, name: str, label: str | None, target: Target | None
) -> tuple[Target, tuple[str, ...], list[str], NDArray[np.floating]]:
    """Return the target of a table, with its columns and answers.

    Those of several answers have names that no single target has, and come first.
    """
    if target is not None:
        readers = [target.read_table]
    else:
        readers = [kind.from_table for kind in sorted(TARGETS.values(), key=_is_single)]
    for read in readers:
        if found := read(table, label):
            return found
    raise _lacks(
        table,
        name,
        "a column prob_<class> for each class, or for the labels 0 and 1 a column probability; or, "
        "for numbers, a column predicted",
    )


def _is_single(kind: type[Target]) -> bool:
    return not kind.has_parts


def _lacks(table: pd.DataFrame, name: str, what: str) -> CohortError:
    columns = one_line(", ".join(table.columns), 1000)
    return CohortError(f"{name} needs {what}. Its columns are {columns}.")


def _check_no_training_rows(table: pd.DataFrame, name: str) -> None:
    """Refuse answers on slides that a model was trained on: they would flatter every score."""
    column = find_column(table, ("split",))
    words = set() if column is None else {word.lower() for word in table[column]}
    if known := sorted(words & {"train", "training", "val", "valid", "validation"}):
        raise CohortError(
            f"{name} has rows of {' and '.join(known)} in column {column}. Keep only test."
        )


def _names_if_any(table: pd.DataFrame, column: str | None) -> tuple[str, ...] | None:
    return tables.names(table, column) if column and any(table[column]) else None


def _read_labels(
    table: pd.DataFrame, columns: Sequence[str], target: Target, *, allow_blank: bool
) -> NDArray[Any] | None:
    """Return the labels; None if there are none at all."""
    if not columns:
        return None
    rows = zip(*(table[column] for column in columns), strict=True)
    cells = dict(zip(table.index, map(target.join_cells, rows), strict=True))
    known = {cell for cell in set(cells.values()) if target.is_label(cell)}
    if not known:
        return None
    labels = []
    for position, cell in cells.items():
        if cell not in known and not allow_blank:
            missing = f"the label is missing ({cell})" if cell else "the label is missing"
            raise CohortError(f"{position}: {missing}. Add it, or remove the row.")
        try:
            labels.append(target.parse_label(cell) if cell in known else None)
        except ValueError as problem:
            raise CohortError(f"{position}: {one_line(problem, 300)}") from None
    return target.as_labels(labels)


def _show(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _plain(value: Any) -> Any:
    """Return the value with lists for tuples, and None for NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
