"""A cohort: slides, patients and labels, where their bags are, and its folds."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

import pandas as pd

from caprmil.cohort import folds
from caprmil.cohort.folds import Fold, Listing, Split, SplitConfig
from caprmil.cohort.patients import are_labels, check_patients, not_patients, read_patients
from caprmil.encoders.card import same_encoder
from caprmil.errors import BagError, CohortError, RecipeError, shorten, suggest
from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.paths import as_path, join_path
from caprmil.io.progress import Step
from caprmil.io.tables import Row, TableLike, is_known, table_name
from caprmil.slides.names import slide_name
from caprmil.slides.scale import same_scale
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
    missing: Literal["error", "skip"] = "error"
    """What to do about slides without a bag."""
    mixed_patients: bool = False
    """Accept patients with two labels, where the label belongs to the slide (BRACS)."""
    scan: bool = True
    """Read every bag once before training, to find broken ones before hours of training."""

    def __post_init__(self) -> None:
        if self.missing not in ("error", "skip"):
            raise RecipeError(f"[data] missing is {self.missing!r}, and must be error or skip.")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One slide of a cohort."""

    name: str
    patient: str
    label: Label | None  # None only in a cohort that was loaded without splits
    path: Path
    row: Row  # the other columns: site, age, fold_0, ...


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Slides in the order of their table, each with a bag, and what their bags have in common."""

    target: Target
    """What is predicted, with what it found in the labels: e.g. the classes."""
    entries: tuple[Entry, ...]
    bags: dict[str, BagInfo]
    notes: tuple[str, ...] = ()
    site: str | None = None
    """The column of the site, if [data] site names it."""

    @cached_property
    def patients(self) -> dict[str, str]:
        """The patient of each slide."""
        return {entry.name: entry.patient for entry in self.entries}

    @cached_property
    def labels(self) -> dict[str, Label]:
        """The label of each slide that has one: for a classification, the number of its class."""
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
        """Return the entries of these slides, in this order."""
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
    labels: dict[str, Label] = {}
    if own:
        target = target.named(own)
        cells = {slide: target.join_cells([row[c] for c in own]) for slide, row in rows.items()}
        target, labels = target.read(cells, " and ".join(own), found, required=required)
    elif not required:
        found.notes.append("No label column: there is nothing to score against.")
    if not config.mixed_patients:
        check_patients(patients, labels, target, found)
    infos = _inspect(paths, config, found, progress)
    _check_same_kind(infos, found)
    made: list[Fold] = []
    if splits is not None:
        usable = {slide: patients[slide] for slide in rows if slide in patients and slide in labels}
        fixed = _read_fixed(listed, usable, folder, splits, found)
        shared = splits.allow_shared_patients
        if not shared and are_labels(patients, labels, target):  # there is nothing to split
            found.problems.append(not_patients(columns["patient"], patients))
        elif target.ready:
            strata, names = target.strata({slide: labels[slide] for slide in usable})
            groups = folds.Strata(of=strata, names=names, title=target.strata_title)
            made = folds.make(usable, groups, splits, found, fixed)
    if found.problems:
        raise CohortError("\n- ".join([f"{name} cannot be used as it is.", *found.problems]))

    site = columns.pop("site", None)  # stays a column like any other
    roles = {*columns.values(), *own}
    entries = tuple(
        Entry(
            name=slide,
            patient=patients[slide],
            label=labels.get(slide),
            path=paths[slide],
            row={column: cell for column, cell in row.items() if column not in roles},
        )
        for slide, row in rows.items()
    )
    notes = tuple(found.notes)
    return Cohort(target=target, entries=entries, bags=infos, notes=notes, site=site), made


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
        left = [n for n in header if n not in columns.values() and not folds.is_split(n)]
        if len(left) == 1:
            columns["label"] = left[0]
        elif required:
            text = f"No column is recognised as the label. {everything} Set [data] label."
            found.problems.append(text)
    label = columns.pop("label", None)
    return columns, own or ((label,) if label else ())


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


def _inspect(
    paths: Mapping[str, Path], config: CohortConfig, found: Findings, progress: Step | None
) -> dict[str, BagInfo]:
    """Return the metadata of each bag; with `scan`, after all of it was read.

    One after the other: h5py reads one file at a time, and so does our reader of .pt files.
    """
    infos: dict[str, BagInfo] = {}
    broken: list[str] = []
    for done, (name, path) in enumerate(paths.items(), 1):
        try:
            infos[name] = bags.read(path).info if config.scan else bags.inspect(path)
        except BagError as problem:
            broken.append(str(problem))
        if progress is not None:
            progress(done, len(paths))
    if broken:
        each = shorten(broken, separator="\n    ")
        found.problems.append(f"Bags that cannot be used ({len(broken)}):\n    {each}")
    return infos


def _check_same_kind(infos: Mapping[str, BagInfo], found: Findings) -> None:
    """Check that all bags have one width, one encoder and one scale."""

    def group(field: str) -> dict[Any, list[str]]:
        groups: dict[Any, list[str]] = defaultdict(list)
        for name, info in infos.items():
            groups[getattr(info, field)].append(name)
        return groups

    widths, encoders, scales = group("width"), group("encoder"), group("mpp")
    weights = group("fingerprint")
    nameless = encoders.pop(None, [])
    scales.pop(None, [])
    weights.pop(None, [])
    if encoders and all(same_encoder(name, next(iter(encoders))) for name in encoders):
        encoders = dict([next(iter(encoders.items()))])
    if scales and same_scale(min(scales), max(scales)):
        scales = {}
    kinds = {
        "width": widths,
        "encoder": encoders,
        "the encoder's weights or transform": {} if len(encoders) > 1 else weights,
        "microns per pixel": scales,
    }
    for what, groups in kinds.items():
        apart = [f"{value} ({shorten(own)})" for value, own in groups.items() if len(groups) > 1]
        found.problem(f"Bags that differ in {what}", apart, "Extract all in the same way.")
    if len(encoders) == 1:
        advice = f"They are assumed to be of {next(iter(encoders))}, like the others."
        found.note("Bags that do not name their encoder", nameless, advice)


def _read_fixed(
    listed: Mapping[str, Row],
    usable: Collection[str],
    folder: Path,
    config: SplitConfig,
    found: Findings,
) -> list[Split]:
    """Return the splits in `files` or the table, if kind is fixed."""
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
    return folds.read(listings, listed, usable, found)


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
