"""A cohort: slides, patients and labels, where their bags are, and its folds."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import pandas as pd

from caprmil.cohort import folds
from caprmil.cohort.cohort_bags import check_same_kind, inspect_bags, join_infos
from caprmil.cohort.covariates import Covariates, read_covariates
from caprmil.cohort.folds import Fold, Listing, Split, SplitConfig
from caprmil.cohort.patient_units import (
    join_labels,
    join_listings,
    join_rows,
    note_lost_slides,
    propose_patients,
    slides_of_patients,
)
from caprmil.cohort.patients import are_labels, check_patients, not_patients, read_patients
from caprmil.cohort.slide_vectors import check_vectors, read_vectors
from caprmil.config import LATER
from caprmil.errors import CohortError, RecipeError, shorten, suggest
from caprmil.features import bags
from caprmil.features.bag_files import BagFiles, SlideBags
from caprmil.features.bags import BagInfo
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.paths import as_path, join_path
from caprmil.io.progress import Step
from caprmil.io.tables import Row, TableLike, is_known, table_name
from caprmil.slides.names import slide_name
from caprmil.targets import Classification, Target
from caprmil.targets.target import Label


@dataclass(frozen=True, kw_only=True)
class CohortConfig:
    """How a table is read: the [data] table of a recipe."""

    slide: str | None = None
    """Column of the slide, where its name is not recognised; patient and label likewise."""
    patient: str | None = None
    label: str | None = None
    site: str | None = None
    """Column of the institution, for the baseline `site`, where its name is not recognised."""
    covariates: tuple[str, ...] | None = None
    """Columns that a model reads besides the patches, e.g. ["age", "sex"]: docs/covariates.md."""
    categorical: tuple[str, ...] | None = None
    """The covariates with numbers that are names of categories, e.g. ["ward"]."""
    vectors: str | None = None
    """A table or folder with a vector of each slide, e.g. of TITAN: docs/covariates.md."""
    missing: Literal["error", "skip"] = "error"
    """What to do about slides without a bag."""
    mixed_patients: bool = False
    """Accept patients with two labels, where the label belongs to the slide (BRACS)."""
    scan: bool = True
    """Read every bag once before training, to find broken ones before hours of training."""
    unit: Literal["slide", "patient"] = field(default="slide", metadata=LATER)
    """What is predicted, split and scored: single slides, or patients with all their slides."""
    combine: Literal["bag", "mean", "max"] = field(default="bag", metadata=LATER)
    """With unit = "patient": all slides are one bag, or each is answered alone, and the answer of
    the patient is the mean of their answers, or the highest one."""

    def __post_init__(self) -> None:
        allowed = {"missing": ("error", "skip"), "unit": ("slide", "patient")}
        for name, values in (allowed | {"combine": ("bag", "mean", "max")}).items():
            if getattr(self, name) not in values:
                known = f"{', '.join(values[:-1])} or {values[-1]}"
                raise RecipeError(f"[data] {name} is {getattr(self, name)!r}, and must be {known}.")
        if self.unit == "slide" and self.combine != "bag":
            raise RecipeError(
                f'[data] combine = "{self.combine}" is for patients: set unit = "patient".'
            )
        if self.unit == "patient" and self.mixed_patients:
            raise RecipeError(
                "[data] mixed_patients = true says that a label belongs to a slide, so unit cannot "
                'be "patient". Leave one of them out.'
            )
        if self.categorical and not self.covariates:
            raise RecipeError("[data] categorical names covariates, and there are none.")
        if self.unit == "patient" and self.reads_covariates:
            raise RecipeError(
                '[data] covariates and vectors are of single slides. Set unit = "slide", or leave '
                "them out."
            )

    @property
    def reads_covariates(self) -> bool:
        """Whether a model reads anything besides the patches."""
        return bool(self.covariates or self.vectors)

    @property
    def joins(self) -> bool:
        """Whether all slides of a patient are one bag."""
        return self.unit == "patient" and self.combine == "bag"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One slide of a cohort, or one patient with all slides."""

    name: str
    patient: str
    label: Label | None  # None only in a cohort that was loaded without splits
    path: BagFiles
    row: Row  # the other columns: site, age, fold_0, ...


class CohortSlide(NamedTuple):
    """One slide, whatever the unit is."""

    name: str
    patient: str
    path: Path
    patches: int


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Slides or patients in the order of their table, each with a bag, and what bags share."""

    target: Target
    """What is predicted, with what it found in the labels: e.g. the classes."""
    entries: tuple[Entry, ...]
    bags: dict[str, BagInfo]
    notes: tuple[str, ...] = ()
    site: str | None = None
    """The column of the site, if [data] site names it."""
    covariates: Covariates | None = None
    """What a model reads besides the patches, if [data] covariates names it."""
    combine: Literal["mean", "max"] | None = None
    """How the answers of a patient's slides become one; None: an entry has its own answer."""

    @property
    def joins(self) -> bool:
        """Whether an entry is a patient, whose slides are one bag."""
        return any(isinstance(entry.path, SlideBags) for entry in self.entries)

    @property
    def slides(self) -> list[CohortSlide]:
        """All slides, in the order of the entries."""
        found = []
        for name, patient, files in ((e.name, e.patient, e.path) for e in self.entries):
            if isinstance(files, SlideBags):
                parts = zip(files.slides, files.paths, self.bags[name].slides, strict=True)
                found += [CohortSlide(s, patient, p, part.info.n_patches) for s, p, part in parts]
            else:
                found.append(CohortSlide(name, patient, files, self.bags[name].n_patches))
        return found

    @cached_property
    def patients(self) -> dict[str, str]:
        """The patient of each entry."""
        return {entry.name: entry.patient for entry in self.entries}

    @cached_property
    def labels(self) -> dict[str, Label]:
        """The label of each entry that has one: for a classification, the number of its class."""
        return {entry.name: entry.label for entry in self.entries if entry.label is not None}

    @property
    def in_dim(self) -> int:
        """The width of all bags."""
        return next(iter(self.bags.values())).width

    def first_known(self, field: str) -> Any:
        """Return a field of the first bag that has it, e.g. its encoder."""
        return next((v for bag in self.bags.values() if (v := getattr(bag, field))), None)

    @property
    def mpp(self) -> float | None:
        """The median of the microns per pixel of all bags that have them."""
        known = [bag.mpp for bag in self.bags.values() if bag.mpp]
        return median(known) if known else None

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    def subset(self, names: Iterable[str]) -> list[Entry]:
        """Return the entries of these names, in this order."""
        return [self[name] for name in names]


def load_cohort(
    table: TableLike,
    features: str | Path | None,
    config: CohortConfig | None = None,
    splits: SplitConfig | None = None,
    *,
    target: Target | None = None,
    progress: Step | None = None,
) -> tuple[Cohort, list[Fold]]:
    """Read a table, find and check its bags, and make its folds.

    All problems are collected and raised as one `CohortError`; notes are in `Cohort.notes`.
    Without `splits` (prediction, an external cohort) there are no folds, slides may lack a label,
    and one class is enough. `target` is by default a classification.
    """
    config, target, found = config or CohortConfig(), target or Classification(), Findings()
    required, name = splits is not None, table_name(table)
    folder = Path() if isinstance(table, pd.DataFrame) else as_path(table).parent
    frame = tables.read_table(table, pad=True)
    columns, own = _find_columns(list(frame.columns), config, target, found, required=required)
    listed = _by_slide(tables.rows(frame), columns, found)
    paths = _locate(listed, columns, folder, features, config, found)
    skip = config.missing == "skip" and paths
    rows = {slide: row for slide, row in listed.items() if slide in paths or not skip}

    patients = read_patients(rows, columns.get("patient"), found)
    if config.unit == "patient":
        _check_unit(columns.get("patient"), listed, rows, found)
    labels: dict[str, Label] = {}
    if own:
        target = target.named(own)
        cells = {
            slide: target.join_cells([row.get(c, "") for c in own]) for slide, row in rows.items()
        }
        target, labels = target.read(cells, " and ".join(own), found, required=required)
    elif not required:
        found.notes.append("No label column: there is nothing to score against.")
    if not config.mixed_patients:
        check_patients(patients, labels, target, found, unit=config.unit)
    covariates = _read_covariates(
        config, rows, columns, own, patients, folder, found, required=required
    )
    if config.combine == "max" and target.ready and not target.has_order:
        found.problems.append(
            f'[data] combine = "max" needs two classes or one number, and this is {target}. Set '
            'combine = "mean" or "bag".'
        )
    infos = inspect_bags(paths, found, progress, scan=config.scan)
    check_same_kind(infos, found)
    units = slides_of_patients(patients) if config.joins else {slide: (slide,) for slide in rows}
    owners = dict(zip(units, units, strict=True)) if config.joins else patients
    slide_labels, labels = labels, join_labels(units, labels, target) if config.joins else labels
    made: list[Fold] = []
    if splits is not None:
        usable = {unit: owners[unit] for unit in units if unit in owners and unit in labels}
        joined = patients if config.joins else {}
        fixed = _read_fixed(listed, usable, joined, folder, splits, found)
        shared = splits.allow_shared_patients
        if not shared and are_labels(patients, slide_labels, target):  # there is nothing to split
            found.problems.append(not_patients(columns["patient"], patients))
        elif target.ready:
            strata, names = target.strata({unit: labels[unit] for unit in usable})
            groups = folds.Strata(strata, names, target.strata_title, target.merges_strata)
            made = folds.make(usable, groups, splits, found, fixed)
        if config.unit == "slide" and not config.mixed_patients:
            propose_patients(patients, labels, target, found)
    if found.problems:
        raise CohortError("\n- ".join([f"{name} cannot be used as it is.", *found.problems]))

    site = columns.pop("site", None)  # stays a column like any other
    roles = {*columns.values(), *own}
    rest = {s: {c: cell for c, cell in row.items() if c not in roles} for s, row in rows.items()}
    entries = tuple(
        Entry(
            name=unit,
            patient=owners[unit],
            label=labels.get(unit),
            path=SlideBags.of({s: paths[s] for s in own}) if config.joins else paths[own[0]],
            row=join_rows([rest[s] for s in own]) if config.joins else rest[own[0]],
        )
        for unit, own in units.items()
    )
    if config.joins:
        infos = {unit: join_infos(own, infos) for unit, own in units.items()}
    combine = config.combine if config.combine != "bag" else None
    cohort = Cohort(
        target=target,
        entries=entries,
        bags=infos,
        notes=tuple(found.notes),
        site=site,
        combine=combine,
        covariates=covariates,
    )
    return cohort, made


def find_bags(paths: Iterable[str | Path]) -> dict[str, Path]:
    """Return the bags among files and under folders, by the name of their slide."""
    files: dict[Path, Path] = {}  # a file that is given twice is one file
    for path in map(as_path, paths):
        if not path.exists():
            raise CohortError(f"There is no file or folder {path}.")
        if path.is_file() and path.suffix.lower() not in bags.SUFFIXES:
            raise CohortError(f"{path} is not a bag. A bag ends in {', '.join(bags.SUFFIXES)}.")
        own = [path] if path.is_file() else path.rglob("*")
        files.update((file.resolve(), file) for file in own)
    found = bags.group_by_slide(files.values())
    if doubled := _with_several_bags(found):
        raise CohortError(f"Slides with more than one bag: {shorten(doubled)}. Name one of each.")
    if not found:
        raise CohortError(f"No bag was found. A bag ends in {', '.join(bags.SUFFIXES)}.")
    return {name: own[0] for name, own in sorted(found.items())}


def _find_columns(
    header: list[str], config: CohortConfig, target: Target, found: Findings, *, required: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the column of each role that has one, and the columns of the label."""
    own = target.find_columns(header)
    given = {role: getattr(config, role) for role in ("slide", "patient", "label", "site")}
    columns = {role: column for role, column in given.items() if column is not None}
    for role, column in columns.items():
        if column not in header:
            raise CohortError(f"[data] {role}: no column is '{column}'.{suggest(column, header)}")
        if role != "site" and column == config.site:
            raise CohortError(
                f"[data] site: column '{column}' is the {role}. Name the one of the institution."
            )
    free = [name for name in header if name not in (*columns.values(), *own)]
    for role in ("slide", "patient", "path") if own else ("slide", "patient", "label", "path"):
        known = tables.matching_columns(free, tables.COLUMNS[role])
        if known and role not in columns:
            columns[role] = known[0]
            if role == "label":
                advice = f"It is taken from {known[0]}. Set [data] label to choose."
                found.note("Other columns that could be the label", known[1:], advice)
    everything = f"Columns: {', '.join(header)}."
    if "slide" not in columns:
        raise CohortError(f"No column is recognised as the slide. {everything} Set [data] slide.")
    if "label" not in columns and not own:
        taken = {*columns.values(), *(config.covariates or ())}
        left = [n for n in header if n not in taken and not folds.is_split(n)]
        if len(left) == 1:
            columns["label"] = left[0]
        elif required:
            text = f"No column is recognised as the label. {everything} Set [data] label."
            found.problems.append(text)
    label = columns.pop("label", None)
    return columns, own or ((label,) if label else ())


def _read_covariates(
    config: CohortConfig,
    rows: Mapping[str, Row],
    columns: Mapping[str, str],
    label: Iterable[str],
    patients: Mapping[str, str],
    folder: Path,
    found: Findings,
    *,
    required: bool,
) -> Covariates | None:
    """Return the covariates of the slides, if the settings name any."""
    if not config.reads_covariates:
        return None
    roles = {column: role for role, column in columns.items() if role != "site"}
    roles |= dict.fromkeys(label, "label")
    roles |= {name: "split" for row in [*rows.values()][:1] for name in row if folds.is_split(name)}
    names, categorical = config.covariates or (), config.categorical or ()
    covariates = read_covariates(names, categorical, rows, roles, found, required=required)
    if covariates is None or config.vectors is None:
        return covariates
    vectors = read_vectors(config.vectors, patients, folder=folder)
    check_vectors(vectors, patients, config.vectors, found)
    return replace(covariates, vectors=vectors)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def _by_slide(cells: list[Row], columns: Mapping[str, str], found: Findings) -> dict[str, Row]:
    """Return the row of each slide."""
    names = [slide_name(row[columns["slide"]]) for row in cells]
    nameless = [str(at) for at, name in enumerate(names, 1) if not is_known(name)]
    found.problem("Rows without a slide", nameless, "Fill or remove them.")
    twice = _repeated(filter(is_known, names))
    found.problem("Slides with more than one row", twice, "Leave one row of each.")
    return {name: row for name, row in zip(names, cells, strict=True) if is_known(name)}


def _with_several_bags(found: Mapping[str, list[Path]]) -> list[str]:
    several = {name: own for name, own in found.items() if len(own) > 1}
    return [f"{name} ({' and '.join(map(str, own))})" for name, own in several.items()]


def _locate(
    rows: Mapping[str, Row],
    columns: Mapping[str, str],
    folder: Path,
    features: str | Path | None,
    config: CohortConfig,
    found: Findings,
) -> dict[str, Path]:
    """Return the bag of each slide that has one: from its row, or by name in `features`."""
    folders = [folder] if features is None else [as_path(features), folder]
    if not folders[0].is_dir():
        found.problems.append(f"There is no folder {features} to look for bags in.")
        return {}
    by_slide = {} if features is None else bags.group_by_slide(folders[0].rglob("*"))
    chosen: dict[str, list[Path]] = {}
    missing: list[str] = []
    for name, row in rows.items():
        given, slide = row.get(columns.get("path", ""), ""), row[columns["slide"]]
        own = given or (slide if slide.lower().endswith(bags.SUFFIXES) else "")
        candidates = [join_path(folder, own) for folder in folders] if own else []
        there = [path for path in candidates if path.is_file()]
        chosen[name] = there[:1] or ([] if given else by_slide.get(name, []))
        if not chosen[name]:
            missing.append(f"{name} ({given})" if given else name)

    advice = "Choose a folder that has one of each, or add a path column."
    found.problem("Slides with more than one bag", _with_several_bags(chosen), advice)
    headline = "Slides without a bag" if features is None else f"Slides without a bag in {features}"
    if config.missing == "skip" and len(missing) < len(rows):
        found.note(headline, missing, "They were skipped.")
    else:
        advice = "Pass a folder of features" if features is None else "Extract their features"
        found.problem(headline, missing, f'{advice}, or set [data] missing = "skip".')
    return {name: own[0] for name, own in chosen.items() if own}


def _check_unit(
    column: str | None, listed: Mapping[str, Row], rows: Mapping[str, Row], found: Findings
) -> None:
    """Check that patients are named, and note which of them lost slides."""
    if column is None:
        found.problems.append(
            '[data] unit is "patient", and no column names the patient. Add a column patient, or '
            "set [data] patient."
        )
        return
    owners = {slide: row[column] for slide, row in listed.items() if is_known(row[column])}
    note_lost_slides(owners, rows, found)


def _read_fixed(
    listed: Mapping[str, Row],
    usable: Collection[str],
    patients: Mapping[str, str],
    folder: Path,
    config: SplitConfig,
    found: Findings,
) -> list[Split]:
    """Return the splits in `files` or the table, if kind is fixed.

    `patients` are those of slides that are split by patient.
    """
    listings = folds.from_columns(listed)
    if config.kind != "fixed":
        advice = 'Set [splits] kind = "fixed" to use them.'
        found.note("Columns with a split, not used", listings, advice)
        return []
    try:
        if config.files is not None:
            listings = _read_files(config.files, folder)
    except CohortError as problem:
        found.problems.append(str(problem))
        return []
    if not listings:
        found.problems.append(
            '[splits] kind is "fixed", but the table has no split. Add a column split (train, val, '
            "test) or columns fold_0, fold_1, ..., or set [splits] files."
        )
    if patients:
        listings = join_listings(listings, patients)
    return folds.read(listings, {*listed, *patients.values()}, usable, found)


def _read_files(files: str, folder: Path) -> dict[str, Listing]:
    """Return the slides in CLAM's split files, in order of their number."""
    path = as_path(files)
    path = path if path.exists() else join_path(folder, files)
    numbered = {
        int(match[1]): file
        for file in path.glob("*.csv")
        if (match := re.fullmatch(r"splits_(\d+)\.csv", file.name))
    }
    chosen = [path] if path.is_file() else [numbered[number] for number in sorted(numbered)]
    if not chosen:
        raise CohortError(f"[splits] files: there is no splits_0.csv, splits_1.csv, ... in {path}.")
    return {
        file.name: [
            (slide_name(cell), str(part))
            for part, cells in tables.read_table(file, pad=True).items()
            for cell in cells
            if cell
        ]
        for file in chosen
    }
