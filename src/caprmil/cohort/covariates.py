"""Covariates: what else is known of a slide, as columns of a table or as one vector.

They are encoded as numbers that are 0 for the average training slide. A numeric column is
standardised, and has an indicator if cells are empty. A categorical column has a number for each
category. All statistics are those of the training part of a fold, and are saved with its model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil import config
from caprmil.errors import BagError, CohortError, RecipeError, count, shorten, suggest
from caprmil.io.findings import Findings
from caprmil.io.tables import Row, is_known, is_number

Numbers: TypeAlias = NDArray[np.float32]
VECTOR = "vector"  # the name of a slide's vector among its covariates
MISSING = "missing"
MOSTLY = 0.5  # share of numbers above which other cells of a column are taken for mistakes
LARGEST = 1e30  # a number beyond has no square in single precision
FARTHEST = 1e9  # standard deviations from the mean of training: no model can read it
ROUNDING = 1e-6  # of shares that are read back from a model


class SlideCovariates(NamedTuple):
    """What is known of one slide: cells by column, and its vector if there is one."""

    slide: str  # or the patient, if its slides are one bag
    cells: Row
    vector: Numbers | None = None


@dataclass(frozen=True, kw_only=True)
class NumberColumn:
    """A numeric column, with its statistics over the training slides."""

    kind: ClassVar[str] = "number"
    name: str
    mean: float
    std: float
    missing: float = 0.0  # the share of training slides without a value

    def __post_init__(self) -> None:
        check_statistics(self.name, [self.mean], [self.std], self.missing)

    @property
    def width(self) -> int:
        return 2 if self.missing else 1

    def encode(self, known: SlideCovariates) -> list[float]:
        cell = known.cells[self.name]
        value = 0.0
        if is_known(cell):
            value = (_number(cell, self.name, known.slide) - self.mean) / self.std
        return [value, float(not is_known(cell)) - self.missing][: self.width]

    def show(self, known: SlideCovariates) -> str:
        cell = known.cells[self.name]
        return cell if is_known(cell) else MISSING


@dataclass(frozen=True, kw_only=True)
class CategoryColumn:
    """A categorical column, with the share of each category among the training slides.

    Empty cells are a category if training slides have them. A slide of a category that they do not
    have counts as the average slide.
    """

    kind: ClassVar[str] = "category"
    name: str
    shares: dict[str, float]

    def __post_init__(self) -> None:
        shares = self.shares.values()
        if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > ROUNDING:
            raise RecipeError(
                f"the covariate {self.name} has shares of categories that do not add up to 1"
            )

    @property
    def width(self) -> int:
        return len(self.shares)

    def encode(self, known: SlideCovariates) -> list[float]:
        own = category_of(known.cells[self.name])
        if own not in self.shares:
            return [0.0] * self.width
        return [float(each == own) - share for each, share in self.shares.items()]

    def show(self, known: SlideCovariates) -> str:
        own = category_of(known.cells[self.name])
        if not own:
            return MISSING
        return own if own in self.shares else f"{own}, which training slides do not have"


@dataclass(frozen=True, kw_only=True)
class VectorColumn:
    """A vector, with the mean and standard deviation of each number over the training slides."""

    kind: ClassVar[str] = "vector"
    name: str
    means: tuple[float, ...]
    stds: tuple[float, ...]
    missing: float = 0.0

    def __post_init__(self) -> None:
        check_statistics(self.name, self.means, self.stds, self.missing)

    @property
    def width(self) -> int:
        return len(self.means) + (self.missing > 0)

    def encode(self, known: SlideCovariates) -> list[float]:
        vector = known.vector
        if vector is not None and len(vector) != len(self.means):
            raise CohortError(
                f"The vector of {known.slide} has {len(vector)} numbers, and those of training had "
                f"{len(self.means)}. Make it in the same way."
            )
        zeros = np.zeros(len(self.means))
        values = zeros if vector is None else (vector - np.array(self.means)) / np.array(self.stds)
        return [*values.tolist(), float(vector is None) - self.missing][: self.width]

    def show(self, known: SlideCovariates) -> str:
        return MISSING if known.vector is None else count(len(known.vector), "number")


def check_statistics(
    name: str, means: Sequence[float], stds: Sequence[float], missing: float
) -> None:
    """Raise if no training slides can have these statistics."""
    if len(means) != len(stds):
        raise RecipeError(f"the covariate {name} lacks a mean or a standard deviation")
    if not all(0 < std <= LARGEST for std in stds):
        raise RecipeError(f"the covariate {name} has a standard deviation that is not positive")
    if not all(abs(mean) <= LARGEST for mean in means):
        raise RecipeError(f"the covariate {name} has a mean beyond {LARGEST:g}")
    if not 0 <= missing <= 1:
        raise RecipeError(f"the covariate {name} is missing for a share of slides that is not one")


Column: TypeAlias = NumberColumn | CategoryColumn | VectorColumn
KINDS: dict[str, type[Column]] = {
    each.kind: each for each in (NumberColumn, CategoryColumn, VectorColumn)
}


@dataclass(frozen=True, kw_only=True)
class Covariates:
    """The covariates of the slides of a cohort."""

    names: tuple[str, ...]  # of the columns
    categorical: frozenset[str] = frozenset()
    cells: Mapping[str, Row]  # by slide
    vectors: Mapping[str, Numbers] | None = None

    def of(self, slide: str) -> SlideCovariates:
        """Return the covariates of a slide."""
        vector = None if self.vectors is None else self.vectors.get(slide)
        return SlideCovariates(slide, self.cells[slide], vector)

    def fit(self, slides: Sequence[str]) -> tuple[Column, ...]:
        """Return the columns with their statistics over these slides: those of a training part."""
        found: list[Column] = []
        for name in self.names:
            cells = [self.cells[slide][name] for slide in slides]
            made = _fit_categories if name in self.categorical else _fit_numbers
            found.append(made(name, cells, slides))
        if self.vectors is not None:
            found.append(_fit_vectors([self.vectors.get(slide) for slide in slides], self.vectors))
        return tuple(found)


def encode(columns: Sequence[Column], known: SlideCovariates) -> Numbers:
    """Return the covariates of a slide as numbers; all are 0 for the average training slide."""
    numbers: list[float] = []
    for column in columns:
        own = column.encode(known)
        if not all(abs(number) <= FARTHEST for number in own):
            cell = "" if column.kind == VECTOR else f" ({column.show(known)})"
            raise BagError(
                f"{known.slide} has no answer: its {column.name}{cell} is more than {FARTHEST:g} "
                "standard deviations from the mean of the training slides. Correct it. If no slide "
                "has an answer, the model is damaged."
            )
        numbers += own
    return np.array(numbers, dtype=np.float32)


def column_table(column: Column) -> dict[str, Any]:
    """Return a column as a table for JSON, with its width."""
    return {"kind": column.kind, "width": column.width, **config.as_table(column)}


def parse_columns(tables: Iterable[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns of a saved model."""
    found: list[Column] = []
    for table in tables:
        settings = {name: value for name, value in table.items() if name not in ("kind", "width")}
        kind = KINDS.get(str(table.get("kind")))
        if kind is None:
            raise RecipeError(f"a covariate is of no known kind: {table.get('kind')!r}")
        column = config.parse(settings, into=kind, name="covariates")
        if column.width != table.get("width"):
            raise RecipeError(f"the covariate {column.name} has another width")
        found.append(column)
    return tuple(found)


def read_covariates(
    names: Sequence[str],
    categorical: Sequence[str],
    rows: Mapping[str, Row],
    roles: Mapping[str, str],
    found: Findings,
    *,
    required: bool = True,
) -> Covariates | None:
    """Return the columns of the rows that are called that, and check them.

    `roles` says what other columns are, e.g. the label. Unless `required`, columns may have any
    values: the statistics are those of a model. None after a problem.
    """
    header = list(next(iter(rows.values()), {}))
    before = len(found.problems)
    for name in categorical:
        if name not in names:
            advice = suggest(name, names)
            found.problems.append(f"[data] categorical: '{name}' is not a covariate.{advice}")
    for name, times in Counter(names).items():
        if times > 1:
            found.problems.append(f"[data] covariates: '{name}' is named {times} times.")
        elif name in roles:
            found.problems.append(
                f"[data] covariates: column '{name}' is the {roles[name]}. Leave it out: a model "
                "must not read it."
            )
        elif name not in header:
            free = [each for each in header if each not in roles]
            advice = suggest(name, free)
            found.problems.append(f"[data] covariates: no column is '{name}'.{advice}")
    if len(found.problems) > before:
        return None
    cells = {slide: {name: row[name] for name in names} for slide, row in rows.items()}
    chosen = set(categorical)
    for name in names if required else ():
        if _iscategory_of(name, name in chosen, {s: own[name] for s, own in cells.items()}, found):
            chosen.add(name)
    return Covariates(names=tuple(names), categorical=frozenset(chosen), cells=cells)


def _iscategory_of(name: str, chosen: bool, cells: Mapping[str, str], found: Findings) -> bool:
    """Return whether a column is categorical; add what is wrong with it."""
    known = {slide: cell for slide, cell in cells.items() if is_known(cell)}
    values, prefix = set(known.values()), f"[data] covariates: column '{name}'"
    others = {slide: cell for slide, cell in known.items() if not _is_finite(cell)}
    category = chosen or bool(others)
    large = [f"{cell} ({s})" for s, cell in known.items() if not category and _is_large(cell)]
    if not known:
        found.problems.append(f"{prefix} has no values. Leave it out.")
    elif large:
        found.problems.append(
            f"{prefix} has numbers beyond {LARGEST:g}: {shorten(large)}. Correct or empty the "
            "cells."
        )
    elif len(values) == 1 and len(known) == len(cells):
        found.problems.append(f"{prefix} is '{next(iter(values))}' for all slides. Leave it out.")
    elif not chosen and others and len(others) < MOSTLY * len(known):
        shown = shorten(f"{cell} ({slide})" for slide, cell in others.items())
        found.problems.append(
            f"{prefix} has numbers and {count(len(others), 'other cell')}: {shown}. Leave unknown "
            f'cells empty, or read it as categories: [data] categorical = ["{name}"].'
        )
    elif category and len(values) == len(known) > 2:
        found.problems.append(
            f"{prefix} is not a number, and differs for every slide, like a name. Leave it out."
        )
    return category


def _fit_numbers(name: str, cells: Sequence[str], slides: Sequence[str]) -> NumberColumn:
    known = [
        _number(cell, name, slide)
        for slide, cell in zip(slides, cells, strict=True)
        if is_known(cell)
    ]
    values = np.array(known or [0.0])
    return NumberColumn(
        name=name,
        mean=float(values.mean()),
        std=(float(values.std()) if np.ptp(values) > 0 else 0.0) or 1.0,  # of equal ones, 1e-17
        missing=1 - len(known) / len(cells),
    )


def _fit_categories(name: str, cells: Sequence[str], _: Sequence[str]) -> CategoryColumn:
    counts = Counter(map(category_of, cells))
    return CategoryColumn(name=name, shares={c: counts[c] / len(cells) for c in sorted(counts)})


def _fit_vectors(
    vectors: Sequence[Numbers | None], everything: Mapping[str, Numbers]
) -> VectorColumn:
    known = [vector for vector in vectors if vector is not None]
    width = len(next(iter(everything.values())))
    values = np.stack(known).astype(np.float64) if known else np.zeros((1, width))
    stds = values.std(axis=0)
    return VectorColumn(
        name=VECTOR,
        means=tuple(values.mean(axis=0).tolist()),
        stds=tuple(np.where(stds > 0, stds, 1.0).tolist()),
        missing=1 - len(known) / len(vectors),
    )


def category_of(cell: str) -> str:
    """Return the category of a cell. Whole numbers are written in several ways."""
    if not is_known(cell):
        return ""
    return f"{float(cell):.17g}" if _is_finite(cell) else cell


def _is_finite(cell: str) -> bool:
    return is_number(cell) and isfinite(float(cell))


def _is_large(cell: str) -> bool:
    return abs(float(cell)) > LARGEST


def _number(cell: str, name: str, slide: str) -> float:
    if not _is_finite(cell):
        raise CohortError(f"{slide}: {name} is '{cell}', not a number. Correct or empty the cell.")
    return float(cell)
