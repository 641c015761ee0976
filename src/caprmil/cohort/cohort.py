"""A cohort: the slides, patients and labels of a study, where their bags lie, and its folds."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from caprmil.cohort import folds
from caprmil.cohort.folds import Findings, Fold, Listing, Split, SplitConfig
from caprmil.encoders.card import same_encoder
from caprmil.errors import BagError, CohortError, RecipeError, shorten, suggest
from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.io import tables
from caprmil.io.paths import as_path, join_path
from caprmil.io.progress import Step
from caprmil.io.tables import Row, is_known, is_number
from caprmil.slides.names import slide_name
from caprmil.slides.scale import same_scale

__all__ = ["Cohort", "CohortConfig", "Entry", "Fold", "SplitConfig", "find_bags", "load_cohort"]


@dataclass(frozen=True, kw_only=True)
class CohortConfig:
    """How a table is read: the [data] table of a recipe."""

    slide: str | None = None
    """Column of the slide, where its name is not recognised; patient and label likewise."""
    patient: str | None = None
    label: str | None = None
    classes: tuple[str, ...] = ()
    """Order of the classes. By default sorted, as numbers if all of them are."""
    missing: Literal["error", "skip"] = "error"
    """What to do about slides without a bag."""
    mixed_patients: bool = False
    """Accept patients with two labels, where the label belongs to the slide (BRACS)."""
    scan: bool = True
    """Read every bag once before training, to find the broken ones before the long night."""

    def __post_init__(self) -> None:
        if self.missing not in ("error", "skip"):
            raise RecipeError(f"[data] missing is {self.missing!r}, and must be error or skip.")
        if len(set(self.classes)) < len(self.classes):
            raise RecipeError(f"[data] classes names one twice: {', '.join(self.classes)}.")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One slide of a cohort."""

    name: str
    patient: str
    label: int | None  # None only in a cohort that was loaded without splits
    path: Path
    row: Row  # the other columns: site, age, fold_0, ...


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Slides in the order of their table, each with a bag, and what their bags have in common."""

    table: Path
    classes: tuple[str, ...]
    entries: tuple[Entry, ...]
    bags: dict[str, BagInfo]
    notes: tuple[str, ...] = ()

    @property
    def patients(self) -> dict[str, str]:
        """The patient of each slide."""
        return {entry.name: entry.patient for entry in self.entries}

    @property
    def labels(self) -> dict[str, int]:
        """The class of each slide that has one, as an index into `classes`."""
        return {entry.name: entry.label for entry in self.entries if entry.label is not None}

    @property
    def in_dim(self) -> int:
        """The width of all bags."""
        return next(iter(self.bags.values())).width

    def said(self, field: str) -> Any:
        """Return what the first bag says that says anything, e.g. its encoder."""
        return next((v for bag in self.bags.values() if (v := getattr(bag, field))), None)

    @property
    def mpp(self) -> float | None:
        """The microns per pixel in the middle of all bags that know theirs."""
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
    table: str | Path,
    features: str | Path | None,
    config: CohortConfig | None = None,
    splits: SplitConfig | None = None,
    *,
    progress: Step | None = None,
) -> tuple[Cohort, list[Fold]]:
    """Read a table, find and check its bags, and make its folds.

    Everything that is wrong is gathered and raised as one `CohortError`; what is only worth
    knowing is left in `Cohort.notes`. Without `splits` (prediction, a cohort from elsewhere)
    there are no folds, slides may lack a label, and one class will do.
    """
    table, config, found = as_path(table), config or CohortConfig(), Findings()
    read = tables.read(table, pad=True)
    columns = _find_columns(list(read.columns), config, found, required=splits is not None)
    listed = _by_slide(read.rows(), columns, found)
    paths = _locate(listed, columns, table, features, config, found)
    skip = config.missing == "skip" and paths
    rows = {name: row for name, row in listed.items() if name in paths or not skip}

    patients = _read_patients(rows, columns, found)
    classes, labels = _read_labels(rows, columns, config, found, required=splits is not None)
    if not config.mixed_patients:
        _check_patients(patients, labels, classes, found)
    infos = _survey(paths, config, found, progress)
    _compare(infos, found)
    made: list[Fold] = []
    if splits is not None:
        usable = {name: patients[name] for name in rows if name in patients and name in labels}
        fixed = _read_fixed(listed, usable, table, splits, found)
        if len(classes) > 1:
            made = folds.make(usable, labels, classes, splits, found, fixed)
    if found.problems:
        raise CohortError("\n- ".join([f"{table} cannot be used as it stands.", *found.problems]))

    roles = set(columns.values())
    entries = tuple(
        Entry(
            name=name,
            patient=patients[name],
            label=labels.get(name),
            path=paths[name],
            row={column: cell for column, cell in row.items() if column not in roles},
        )
        for name, row in rows.items()
    )
    notes = tuple(found.notes)
    return Cohort(table=table, classes=classes, entries=entries, bags=infos, notes=notes), made


def find_bags(paths: Iterable[str | Path]) -> dict[str, Path]:
    """Return the bags among files and under folders, by the name of their slide."""
    files: dict[Path, Path] = {}  # a file that is given twice is one file
    for path in map(as_path, paths):
        if not path.exists():
            raise CohortError(f"There is no file or folder {path}.")
        if path.is_file() and path.suffix.lower() not in bags.SUFFIXES:
            raise CohortError(f"{path} is no bag. A bag ends in {', '.join(bags.SUFFIXES)}.")
        own = [path] if path.is_file() else path.rglob("*")
        files.update((file.resolve(), file) for file in own)
    shelf = bags.group_by_slide(files.values())
    if twins := _twins(shelf):
        raise CohortError(f"Slides with more than one bag: {shorten(twins)}. Name one of each.")
    if not shelf:
        raise CohortError(f"No bag was found. A bag ends in {', '.join(bags.SUFFIXES)}.")
    return {name: own[0] for name, own in sorted(shelf.items())}


def _find_columns(
    header: list[str], config: CohortConfig, found: Findings, *, required: bool
) -> dict[str, str]:
    """Return the column of each role that has one."""
    told = {"slide": config.slide, "patient": config.patient, "label": config.label}
    columns = {role: column for role, column in told.items() if column is not None}
    for role, column in columns.items():
        if column not in header:
            raise CohortError(f"[data] {role}: no column is '{column}'.{suggest(column, header)}")
    free = [name for name in header if name not in columns.values()]
    for role in ("slide", "patient", "label", "path"):
        known = tables.called(free, tables.COLUMNS[role])
        if known and role not in columns:
            columns[role] = known[0]
            if role == "label":
                advice = f"It is taken from {known[0]}. Set [data] label to choose."
                found.note("Other columns that could be the label", known[1:], advice)
    everything = f"Columns: {', '.join(header)}."
    if "slide" not in columns:
        raise CohortError(f"No column is known to be the slide. {everything} Set [data] slide.")
    if "label" not in columns:
        left = [n for n in header if n not in columns.values() and not folds.is_split(n)]
        if len(left) == 1:
            columns["label"] = left[0]
        elif required:
            text = f"No column is known to be the label. {everything} Set [data] label."
            found.problems.append(text)
    return columns


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


def _twins(shelf: Mapping[str, list[Path]]) -> list[str]:
    several = {name: own for name, own in shelf.items() if len(own) > 1}
    return [f"{name} ({' and '.join(map(str, own))})" for name, own in several.items()]


def _locate(
    rows: Mapping[str, Row],
    columns: Mapping[str, str],
    table: Path,
    features: str | Path | None,
    config: CohortConfig,
    found: Findings,
) -> dict[str, Path]:
    """Return the bag of each slide that has one: where its row says, or by name in `features`."""
    places = [table.parent] if features is None else [as_path(features), table.parent]
    if not places[0].is_dir():
        found.problems.append(f"There is no folder {features} to look for bags in.")
        return {}
    shelf = {} if features is None else bags.group_by_slide(places[0].rglob("*"))
    chosen: dict[str, list[Path]] = {}
    missing: list[str] = []
    for name, row in rows.items():
        told, slide = row.get(columns.get("path", ""), ""), row[columns["slide"]]
        own = told or (slide if slide.lower().endswith(bags.SUFFIXES) else "")
        told_at = [join_path(place, own) for place in places] if own else []
        here = [path for path in told_at if path.is_file()]
        chosen[name] = here[:1] or ([] if told else shelf.get(name, []))
        if not chosen[name]:
            missing.append(f"{name} ({told})" if told else name)

    advice = "Choose a folder that has one of each, or add a path column."
    found.problem("Slides with more than one bag", _twins(chosen), advice)
    headline = "Slides without a bag" if features is None else f"Slides without a bag in {features}"
    if config.missing == "skip" and len(missing) < len(rows):
        found.note(headline, missing, "They were skipped.")
    else:
        advice = "Pass a folder of features" if features is None else "Extract their features"
        found.problem(headline, missing, f'{advice}, or set [data] missing = "skip".')
    return {name: own[0] for name, own in chosen.items() if own}


def _read_patients(
    rows: Mapping[str, Row], columns: Mapping[str, str], found: Findings
) -> dict[str, str]:
    """Return the patient of each slide that has one."""
    if "patient" not in columns:
        found.notes.append("No patient column: every slide counts as its own patient.")
        return {name: name for name in rows}
    patients = {name: row[columns["patient"]] for name, row in rows.items()}
    nobody = [name for name, patient in patients.items() if not is_known(patient)]
    advice = f"Fill column {columns['patient']}, or remove their rows."
    found.problem("Slides without a patient", nobody, advice)
    return {name: patient for name, patient in patients.items() if is_known(patient)}


def _read_labels(
    rows: Mapping[str, Row],
    columns: Mapping[str, str],
    config: CohortConfig,
    found: Findings,
    *,
    required: bool,
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the classes, and the class of each slide that has one."""
    column = columns.get("label")
    if column is None:
        if not required:
            found.notes.append("No label column: there is nothing to score against.")
        return config.classes, {}
    cells = {name: row[column] for name, row in rows.items()}
    words = {name: cell for name, cell in cells.items() if cell in config.classes or is_known(cell)}
    classes = config.classes or _in_order(set(words.values()))

    tell = found.problem if required else found.note
    blank = [name for name in rows if name not in words]
    tell("Slides without a label", blank, f"Fill column {column}, or remove their rows.")
    odd = [f"{name} ({word})" for name, word in words.items() if word not in classes]
    advice = f"[data] classes are {', '.join(classes)}."
    found.problem("Slides with a label that is no class", odd, advice)
    if required and len(classes) < 2:
        text = f"Column {column} has fewer than two classes: {shorten(classes) or 'none'}."
        found.problems.append(f"{text} Set [data] label if the label is in another column.")
    spellings = defaultdict(list)
    for word in classes:
        spellings[float(word) if is_number(word) else word.casefold()].append(word)
    alike = [" and ".join(group) for group in spellings.values() if len(group) > 1]
    found.problem("Classes that differ in spelling alone", alike, "Use one spelling.")
    return classes, {name: classes.index(word) for name, word in words.items() if word in classes}


def _in_order(words: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(sorted(words), key=float if all(map(is_number, words)) else str))


def _check_patients(
    patients: Mapping[str, str],
    labels: Mapping[str, int],
    classes: tuple[str, ...],
    found: Findings,
) -> None:
    """Ask for one label per patient."""
    seen: dict[str, set[int]] = defaultdict(set)
    for name in patients.keys() & labels.keys():
        seen[patients[name]].add(labels[name])
    mixed = {who: [classes[label] for label in sorted(own)] for who, own in sorted(seen.items())}
    found.problem(
        "Patients with more than one label",
        [f"{who} ({', '.join(own)})" for who, own in mixed.items() if len(own) > 1],
        "Correct them, or set [data] mixed_patients = true if the label belongs to the slide.",
    )


def _survey(
    paths: Mapping[str, Path], config: CohortConfig, found: Findings, progress: Step | None
) -> dict[str, BagInfo]:
    """Return what each bag says of itself; with `scan`, only after all of it was read.

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


def _compare(infos: Mapping[str, BagInfo], found: Findings) -> None:
    """Ask that all bags have one width, one encoder and one scale."""

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
        advice = f"They are taken to be of {next(iter(encoders))}, as the others."
        found.note("Bags that do not name their encoder", nameless, advice)


def _read_fixed(
    listed: Mapping[str, Row],
    usable: Collection[str],
    table: Path,
    config: SplitConfig,
    found: Findings,
) -> list[Split]:
    """Return the splits in `files` or the table, if they are asked for."""
    listings = folds.from_columns(listed)
    if config.kind != "fixed":
        advice = 'Set [splits] kind = "fixed" to use them.'
        found.note("Columns with a split, not used", listings, advice)
        return []
    try:
        if config.files is not None:
            listings = _read_files(config.files, table)
    except CohortError as problem:
        found.problems.append(str(problem))
        return []
    if not listings:
        found.problems.append(
            '[splits] kind is "fixed", but the table has no split. Add a column split (train, val, '
            "test) or columns fold_0, fold_1, ..., or set [splits] files."
        )
    return folds.read(listings, listed, usable, found)


def _read_files(files: str, table: Path) -> dict[str, Listing]:
    """Return what CLAM's split files list, in order of their number."""
    place = as_path(files)
    place = place if place.exists() else join_path(table.parent, files)
    numbered = {
        int(match[1]): file
        for file in place.glob("*.csv")
        if (match := re.fullmatch(r"splits_(\d+)\.csv", file.name))
    }
    chosen = [place] if place.is_file() else [numbered[number] for number in sorted(numbered)]
    if not chosen:
        raise CohortError(
            f"[splits] files: there is no splits_0.csv, splits_1.csv, ... in {place}."
        )
    return {
        file.name: [
            (slide_name(cell), part)
            for part, cells in tables.read(file, pad=True).columns.items()
            for cell in cells
            if cell
        ]
        for file in chosen
    }
