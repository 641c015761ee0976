"""Predictions: a table of answers per slide, its CSV, and the summary of its scores.

The columns are slide, patient, fold, label (or those that the target names), predicted, those of
the target (prob_<class> for each class), then extra ones. A table of patients has no column slide.
`Predictions.read` also takes the tables that other programs write.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, UnknownNameError, count, one_line, suggest
from caprmil.evaluation.patient_scores import once_per_patient, patient_parts
from caprmil.io import tables
from caprmil.io.atomic import atomic_write
from caprmil.io.notebook import first_rows, html_table, show_html
from caprmil.io.tables import TableLike, find_column, table_name
from caprmil.targets import TARGETS, Target
from caprmil.targets.metric import Interval, bootstrap

if TYPE_CHECKING:
    import pandas as pd

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

    def __repr__(self) -> str:
        folds = f", {count(len(set(self.folds)), 'fold')}" if self.folds else ""
        labels = "" if self.labels is not None else ", no labels"
        return f"Predictions({count(len(self), self.unit)}, {self.target.kind}{folds}{labels})"

    def _repr_html_(self) -> str:
        """Show the table in a notebook: its scores, if there are labels, and its first rows."""
        parts = []
        with suppress(CohortError):  # no labels
            scores = self.labelled().scores()
            titles = {name: self.target.metric(name).long_title for name in scores}
            rows = [[titles[name], f"{value:.3f}"] for name, value in scores.items()]
            parts.append(html_table(["all together", "score"], rows))
        return show_html(repr(self), (), *parts, first_rows(self.to_frame()))

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

    def to_frame(self) -> "pd.DataFrame":
        """Return the table as a DataFrame, with the columns of its CSV."""
        import pandas as pd  # here: it takes longer to load than a table to print

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
            unit=self.unit,
        )

    def leaves(self) -> "dict[str, Predictions]":
        """Return the table of each target that is not made of others: "" is the only one.

        A label among several targets is called `target.label`.
        """
        found: dict[str, Predictions] = {} if self.target.parts else {"": self}
        for name in self.target.parts:
            for inner, table in self.part(name).leaves().items():
                found[f"{name}.{inner}" if inner else name] = table
        return found

    @property
    def has_labels(self) -> bool:
        """Whether a row has a label."""
        return self.labels is not None and bool(self.target.known(self.labels).any())

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
        fold and for each label. Of several targets, only for those that score patients.
        """
        part = self.labelled()
        if part.patients is not None and patient_parts(part.target):
            of = list(zip(part.patients, part.folds or part.patients, strict=True))
            labels, answers = once_per_patient(part.target, *part.truth, part.slides, of)
            return replace(part, labels=labels, answers=answers).labelled()
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


def _recognise(
    table: "pd.DataFrame", name: str, label: str | None, target: Target | None
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


def _lacks(table: "pd.DataFrame", name: str, what: str) -> CohortError:
    columns = one_line(", ".join(table.columns), 1000)
    return CohortError(f"{name} needs {what}. Its columns are {columns}.")


def _check_no_training_rows(table: "pd.DataFrame", name: str) -> None:
    """Refuse answers on slides that a model was trained on: they would flatter every score."""
    column = find_column(table, ("split",))
    words = set() if column is None else {word.lower() for word in table[column]}
    if known := sorted(words & {"train", "training", "val", "valid", "validation"}):
        raise CohortError(
            f"{name} has rows of {' and '.join(known)} in column {column}. Keep only test."
        )


def _names_if_any(table: "pd.DataFrame", column: str | None) -> tuple[str, ...] | None:
    return tables.names(table, column) if column and any(table[column]) else None


def _read_labels(
    table: "pd.DataFrame", columns: Sequence[str], target: Target, *, allow_blank: bool
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
