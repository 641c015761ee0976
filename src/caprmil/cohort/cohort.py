"""A cohort: slides, patients and labels, where their bags are, and its folds."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from caprmil.cohort import folds
from caprmil.cohort.cohort_bags import check_same_kind, inspect_bags, join_infos
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.covariates import Covariates, read_covariates
from caprmil.cohort.fixed_splits import read_fixed
from caprmil.cohort.folds import Fold, SplitConfig
from caprmil.cohort.located_bags import locate_bags
from caprmil.cohort.patient_covariates import join_cells, join_vectors, of_slides
from caprmil.cohort.patient_units import (
    join_labels,
    join_rows,
    note_lost_slides,
    propose_patients,
    slides_of_patients,
)
from caprmil.cohort.patients import (
    are_labels,
    check_patients,
    not_patients,
    patient_column,
    presumed_patients,
    read_patients,
)
from caprmil.cohort.peer_tables import folder_of, read_cohort_table
from caprmil.cohort.slide_vectors import check_vectors, read_vectors
from caprmil.cohort.sources import (
    Folders,
    JoinRule,
    Source,
    folders_of,
    join_sources,
    name_sources,
)
from caprmil.cohort.table_columns import find_columns
from caprmil.cohort.unreadable_bags import leave_out_unreadable
from caprmil.errors import BagError, CohortError, count
from caprmil.features.bag_files import BagFiles, SlideBags
from caprmil.features.bags import BagInfo
from caprmil.features.source_bags import Join, SlideFiles
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.notebook import first_rows, show_html
from caprmil.io.paths import as_path
from caprmil.io.progress import Step
from caprmil.io.tables import Row, TableLike, is_known, table_name
from caprmil.slides.names import slide_name
from caprmil.targets import Classification, Target
from caprmil.targets.target import Label

if TYPE_CHECKING:
    import pandas as pd


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
    path: SlideFiles
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
    combine: Literal["mean", "max", "learned"] | None = None
    """How the answers of a patient's slides become one; None: an entry has its own answer."""
    label: str | None = None
    """The column of the label, if there is one and the target does not name it."""
    sources: tuple[Source, ...] = ()
    """The sources of the bags, if there are several."""
    join: Join | None = None
    """How the sources were joined."""

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
                patches: Counter[str] = Counter()
                for part in self.bags[name].slides:
                    patches[part.slide] += part.info.n_patches
                own = zip(files.slides, files.paths, strict=True)
                found += [CohortSlide(slide, patient, p, patches[slide]) for slide, p in own]
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

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each source, if the patches of several are one bag."""
        return next(iter(self.bags.values())).widths

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

    def __repr__(self) -> str:
        patients = count(len({*self.patients.values()}), "patient")
        sizes = patients if self.joins else f"{count(len(self.slides), 'slide')}, {patients}"
        return f"Cohort({sizes}, {self.target.kind}: {self._label_text()})"

    def _repr_html_(self) -> str:
        """Show the cohort in a notebook: its sizes, labels, encoder and scale."""
        facts = [
            ("slides", len(self.slides)),
            ("patients", len({*self.patients.values()})),
            ("target", self.target.kind),
            ("labels", self._label_text()),
            ("encoder", self.first_known("encoder") or "not known"),
            ("scale", f"{self.mpp:g} µm per pixel" if self.mpp else "not known"),
            ("features", f"{self.in_dim} per patch"),
            ("patches", f"{sum(bag.n_patches for bag in self.bags.values()):,}"),
            *(("note", note) for note in self.notes),
        ]
        return show_html("Cohort", facts, first_rows(self.to_frame()))

    def to_frame(self) -> "pd.DataFrame":
        """Return a row per slide or patient: name, patient, label, patches, and other columns."""
        import pandas as pd  # here: it takes longer to load than a table to print

        rows = []
        for entry in self.entries:
            label = None if entry.label is None else self.target.show_label(entry.label)
            known: dict[str, Any] = {"slide": entry.name, "patient": entry.patient, "label": label}
            known["patches"] = self.bags[entry.name].n_patches
            rows.append(known | {k: v for k, v in entry.row.items() if k not in known})
        return pd.DataFrame(rows)

    def _label_text(self) -> str:
        """Return how many entries have each label, or their number."""
        found = Counter(self.target.show_label(label) for label in self.labels.values())
        if not self.target.has_classes:
            return f"{sum(found.values())} values"
        return ", ".join(f"{number} {label}" for label, number in sorted(found.items()))

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    def subset(self, names: Iterable[str]) -> list[Entry]:
        """Return the entries of these names, in this order."""
        return [self[name] for name in names]


def load_cohort(
    table: TableLike,
    features: Folders | None,
    config: CohortConfig | None = None,
    splits: SplitConfig | None = None,
    *,
    target: Target | None = None,
    join: JoinRule = "auto",
    progress: Step | None = None,
    inspect: bool = True,
    unreadable: dict[str, BagError] | None = None,
) -> tuple[Cohort, list[Fold]]:
    """Read a table, find and check its bags, and make its folds.

    All problems are collected and raised as one `CohortError`; notes are in `Cohort.notes`.
    Without `splits` (prediction, an external cohort) there are no folds, slides may lack a label,
    and one class is enough. `target` is by default a classification. `features` is a folder, or
    one for each of several sources, which are joined by the rule `join`. Without `inspect` no bag
    is opened, and the cohort knows nothing of their content. Slides whose bags cannot be opened are
    added to `unreadable` and left out, with their patient if it is one bag.
    """
    import pandas as pd

    config, target, found = config or CohortConfig(), target or Classification(), Findings()
    required, name = splits is not None, table_name(table)
    folder = Path() if isinstance(table, pd.DataFrame) else folder_of(as_path(table))
    frame = read_cohort_table(
        table,
        found,
        slide_table=config.slide_table,
        slide=config.slide,
        patient=config.patient,
    )
    columns, own = find_columns(list(frame.columns), config, target, found, required=required)
    listed = _by_slide(tables.rows(frame), columns, found)
    if patient_column(listed, columns, chosen=config.patient is not None, found=found) is None:
        columns.pop("patient", None)
    folders = folders_of(features)
    located = [
        locate_bags(listed, columns, folder, each, config, found, required=required)
        for each in folders
    ]
    if unreadable is not None:
        column = columns.get("patient") if config.joins else None
        listed, located = leave_out_unreadable(listed, located, column, unreadable)
    paths: dict[str, Path] = {s: p for s, p in located[0].items() if all(s in o for o in located)}
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
    mixed: set[str] = set()
    if not config.mixed_patients:
        mixed = check_patients(patients, labels, target, found, unit=config.unit)
    covariates = _read_covariates(
        config, rows, columns, own, patients, folder, found, required=required
    )
    if config.combine == "max" and target.ready and not target.has_order:
        found.problems.append(
            '[data] combine = "max" needs an order in which one slide is the highest: two classes, '
            f"grades, labels or a number. {target.without_order}. "
            'Set combine = "mean", "learned" or "bag".'
        )
    files: Mapping[str, SlideFiles] = paths
    several = None
    if len(folders) == 1:
        infos = inspect_bags(paths, found, progress, scan=config.scan) if inspect else {}
        check_same_kind(infos, found)
    else:
        names = name_sources([each for each in folders if each is not None])
        reading: dict[str, Any] = {"scan": config.scan, "inspect": inspect}
        several = join_sources(names, located, join, found, progress, **reading)
        files, infos = several.files, several.bags
    units = slides_of_patients(patients) if config.joins else {slide: (slide,) for slide in rows}
    owners = dict(zip(units, units, strict=True)) if config.joins else patients
    slide_labels, labels = labels, join_labels(units, labels, target) if config.joins else labels
    made: list[Fold] = []
    if splits is not None:
        usable = presumed_patients([unit for unit in units if unit in labels], owners, mixed)
        together = patients if config.joins else {}
        fixed = read_fixed(listed, usable, together, folder, splits, found)
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
            path=SlideBags.of({s: files[s] for s in own}) if config.joins else files[own[0]],
            row=join_rows([rest[s] for s in own]) if config.joins else rest[own[0]],
        )
        for unit, own in units.items()
    )
    if config.joins and inspect:
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
        label=own[0] if len(own) == 1 and not target.find_columns(own) else None,
        sources=() if several is None else several.sources,
        join=None if several is None else several.join,
    )
    return cohort, made


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
    """Return the covariates by slide, or by patient if its slides are one bag, if there are any."""
    if not config.reads_covariates:
        return None
    roles = {column: role for role, column in columns.items() if role != "site"}
    roles |= dict.fromkeys(label, "label")
    roles |= {name: "split" for row in [*rows.values()][:1] for name in row if folds.is_split(name)}
    names, categorical = config.covariates or (), config.categorical or ()
    slides = slides_of_patients(patients) if config.unit == "patient" else {}
    if slides:
        rows = join_cells(rows, slides, names, found)
    covariates = read_covariates(names, categorical, rows, roles, found, required=required)
    if covariates is None:
        return None
    if slides and not config.joins:
        covariates = of_slides(covariates, slides)
    if config.vectors is None:
        return covariates
    vectors = read_vectors(config.vectors, patients, folder=folder)
    check_vectors(vectors, patients, config.vectors, found)
    return replace(
        covariates, vectors=join_vectors(vectors, slides, found) if config.joins else vectors
    )


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


def _check_unit(
    column: str | None, listed: Mapping[str, Row], rows: Mapping[str, Row], found: Findings
) -> None:
    """Check that patients are named, and note which of them lost slides."""
    if column is None:
        found.problems.append(
            '[data] unit is "patient", and no column names the patient. Add a column patient, or '
            "set [data] patient (--set data.patient=COLUMN)."
        )
        return
    owners = {slide: row[column] for slide, row in listed.items() if is_known(row[column])}
    note_lost_slides(owners, rows, found)
