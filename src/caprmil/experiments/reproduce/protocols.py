"""Protocols: the labels, splits and metrics of each benchmark, and each model's recipe for it."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from caprmil.cohort.folds import PARTS
from caprmil.cohort.patients import are_labels, not_patients
from caprmil.errors import CohortError, RecipeError, UnknownNameError, shorten
from caprmil.experiments import paper
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.slides.names import slide_name
from caprmil.targets import Classification
from caprmil.training.recipe import Recipe
from caprmil.training.recipe_files import list_recipes, parse_recipe

Row = dict[str, str]


def _part_by_name(slide: str) -> str:
    """Return the part of CAMELYON16 that a slide belongs to, from its official name."""
    return {"test": "test", "normal": "train", "tumor": "train"}.get(
        slide.lower().split("_")[0], ""
    )


def _patient_by_barcode(slide: str) -> str:
    """Return the patient of a TCGA slide: the first three groups of its barcode."""
    found = re.match(r"TCGA-\w\w-\w{4}", slide, re.IGNORECASE)
    return found.group().upper() if found else ""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One benchmark: the names in its table, and the metric that the paper reports."""

    title: str
    slides: int  # in the paper
    mpp: float  # of the paper's patches
    classes: Mapping[str, Sequence[str]]  # each class, with other spellings
    label: Sequence[str] = ()  # names of the label column, in addition to the usual ones
    metric: str = "auc"
    part: Callable[[str], str] | None = None  # from the slide name, if no column has it
    patient: Callable[[str], str] | None = None  # from the slide name, too
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Changes to a model's recipe for this benchmark."""
    remark: str = ""

    @property
    def metrics(self) -> tuple[str, str]:
        """The metrics of the paper's table."""
        return self.metric, "ace"


OVERLAP = (
    "The paper's figures are not verified: in the split files released with it, most test slides "
    "of one fold are training slides of the others. Ours are scored on unseen slides only."
)
REHEARSAL = ("train.epochs=3", "train.warmup_epochs=1")
"""A rehearsal checks that a protocol runs, so a few epochs are enough."""

PROTOCOLS = {
    "camelyon16": Protocol(
        title="CAMELYON16",
        slides=399,
        mpp=1.0,
        classes={"normal": ("negative", "0"), "tumour": ("tumor", "positive", "1")},
        part=_part_by_name,
        patient=str,  # every slide is of another patient
        settings={"mean": ("train.lr=1e-3",), "bayesmil": ("model.prior=detection",)},
    ),
    "tcga-nsclc": Protocol(
        title="TCGA-NSCLC",
        slides=1006,
        mpp=1.0,
        classes={"LUSC": ("TCGA-LUSC", "0"), "LUAD": ("TCGA-LUAD", "1")},
        label=("subtype", "cohort", "project", "oncotree_code"),
        patient=_patient_by_barcode,
        settings={"bayesmil": ("model.prior=subtyping",)},
        remark=OVERLAP,
    ),
    "panda": Protocol(
        title="PANDA",
        slides=10609,
        mpp=0.5,
        classes={str(grade): (f"ISUP {grade}",) for grade in range(6)},
        label=("isup_grade", "isup"),
        metric="kappa",
        settings={"bayesmil": ("model.prior=subtyping",)},
        remark=OVERLAP,
    ),
    "bracs": Protocol(
        title="BRACS",
        slides=547,
        mpp=0.5,
        classes={
            "atypical": ("AT", "Group_AT", "FEA", "ADH", "Type_FEA", "Type_ADH", "0"),
            "benign": ("BT", "Group_BT", "N", "PB", "UDH", "Type_N", "Type_PB", "Type_UDH", "1"),
            "malignant": ("MT", "Group_MT", "DCIS", "IC", "Type_DCIS", "Type_IC", "2"),
        },
        label=("wsi_label", "group", "lesion"),
        settings={"bayesmil": ("model.prior=subtyping",)},
    ),
}


def find_protocol(name: str) -> Protocol:
    """Return the protocol of that name."""
    if name not in PROTOCOLS:
        raise UnknownNameError("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def protocol_recipe(
    name: str, model: str, table: Path, features: Path, changes: Sequence[str]
) -> Recipe:
    """Return the recipe of a protocol for a model: the protocol's splits, the model's training."""
    head, _, pool = model.partition("+")
    own = _read(head)
    if "model" not in own:  # the recipe of a protocol
        raise UnknownNameError("model with a recipe", model, all_models())
    if pool:
        own["model"] |= {"name": model}
        own["model"].pop("pool", None)
    settings = _read(name)
    settings |= {"cohort": str(table), "features": str(features), "model": own["model"]}
    settings["train"] = own.get("train", {}) | settings["train"]
    changes = [*find_protocol(name).settings.get(model, ()), *changes]
    return parse_recipe(settings, name=f"{name}.toml", changes=changes)


def _read(name: str) -> dict[str, Any]:
    recipes = list_recipes()
    if name not in recipes:
        raise UnknownNameError("model with a recipe", name, all_models())
    return tomllib.loads(recipes[name].read_text(encoding="utf-8"))


def read_labels(name: str, labels: str | Path, found: Findings | None = None) -> list[Row]:
    """Return the rows of a benchmark's table with the columns slide, patient, label and split.

    Other columns are kept: a site may be among them. A column of patients that only repeats the
    label is replaced by what the benchmark knows of its patients, with a note in `found`.
    """
    protocol, table = find_protocol(name), tables.read_table(labels, pad=True)
    columns = {
        "slide": _column(table, labels, (*tables.COLUMNS["slide"], "wsi_filename"), "slide"),
        "label": _column(table, labels, (*protocol.label, *tables.COLUMNS["label"]), "label"),
        "patient": _column(table, labels, tables.COLUMNS["patient"]),
        "split": _column(table, labels, ("split", "set", "part")),
    }
    used = {column for column in columns.values() if column}
    words = {
        spelling.lower(): known
        for known, others in protocol.classes.items()
        for spelling in (known, *others)
    }
    rows, unknown_labels, without_part = [], [], []
    for cells in tables.rows(table):
        slide = slide_name(cells[columns["slide"]])
        label = words.get(cells[columns["label"]].lower().removesuffix(".0"), "")
        row = {"slide": slide, "label": label}
        if not label:
            unknown_labels.append(f"{slide} ({cells[columns['label']] or 'none'})")
        row["patient"] = cells.get(columns["patient"], "")
        row["patient"] = row["patient"] or (protocol.patient(slide) if protocol.patient else slide)
        part = cells.get(columns["split"], "")
        row["split"] = PARTS.get(part.lower(), "")
        if not tables.is_known(part) and protocol.part:
            row["split"] = protocol.part(slide)
        if not row["split"]:
            without_part.append(slide)
        rows.append(row | {k: v for k, v in cells.items() if k not in used | row.keys()})
    if unknown_labels:
        raise CohortError(
            f"{labels}: labels that {protocol.title} does not have ({len(unknown_labels)}): "
            f"{shorten(unknown_labels)}. Its classes are {', '.join(protocol.classes)}."
        )
    if without_part and _read(name)["splits"]["kind"] == "fixed":
        raise CohortError(
            f"{labels}: slides of neither the official training nor the test part "
            f"({len(without_part)}): {shorten(without_part)}. Add a column "
            "split: train, val or test."
        )
    _replace_labels_as_patients(protocol, rows, columns["patient"], labels, found or Findings())
    if not any(row["split"] for row in rows):
        for row in rows:
            del row["split"]
    return rows


def _replace_labels_as_patients(
    protocol: Protocol, rows: Sequence[Row], column: str, table: str | Path, found: Findings
) -> None:
    """Replace patients that are only the labels by those in the names of the slides, or raise."""
    target = Classification(classes=tuple(protocol.classes))
    patients = {row["slide"]: row["patient"] for row in rows}
    classes = {row["slide"]: target.parse_label(row["label"]) for row in rows}
    if not column or not are_labels(patients, classes, target):
        return
    if protocol.patient is None:
        raise CohortError(f"{table}: {not_patients(column, patients)}")
    for row in rows:
        row["patient"] = protocol.patient(row["slide"])
    each = "every slide counts as its own patient"
    taken = each if protocol.patient is str else "the patient is taken from the name of the slide"
    found.notes.append(
        f"Column {column} has one value for all slides of a class "
        f"({shorten(sorted(set(patients.values())))}), so it does not name patients: {taken}."
    )


def _column(table: pd.DataFrame, name: str | Path, words: Sequence[str], needed: str = "") -> str:
    found = tables.matching_columns(table.columns, words)
    if not found and needed:
        raise CohortError(
            f"{name}: no column has a known name for the {needed}. Rename one to "
            f"'{words[0]}'. Columns: {', '.join(table.columns)}."
        )
    return found[0] if found else ""


def all_models() -> list[str]:
    """Return the models of the paper's tables, and the two others that users expect."""
    return [*paper.SCORES, "dsmil", "dtfd"]


def choose_models(models: str) -> list[str]:
    """Return the models of a comma-separated list, or all of them."""
    chosen = (
        all_models() if models == "all" else [m.strip() for m in models.split(",") if m.strip()]
    )
    if not chosen:
        raise RecipeError("Name a model, several with commas between them, or all.")
    return list(dict.fromkeys(chosen))
