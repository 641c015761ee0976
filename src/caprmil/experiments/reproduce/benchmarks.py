"""Benchmarks: what the table of each calls things, how it is split, each model's recipe for it."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caprmil import config
from caprmil.cohort.folds import PARTS
from caprmil.errors import CohortError, RecipeError, UnknownNameError, shorten
from caprmil.experiments import paper
from caprmil.io import tables
from caprmil.slides.names import slide_name
from caprmil.training.recipe import Recipe

Row = dict[str, str]


def _by_name(slide: str) -> str:
    """Return the part of CAMELYON16 that a slide is in, by its official name."""
    return {"test": "test", "normal": "train", "tumor": "train"}.get(
        slide.lower().split("_")[0], ""
    )


def _barcode(slide: str) -> str:
    """Return the patient of a TCGA slide, the first three groups of its barcode."""
    found = re.match(r"TCGA-\w\w-\w{4}", slide, re.IGNORECASE)
    return found.group().upper() if found else ""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One benchmark: what its table may call things, and how the paper scores it."""

    title: str
    slides: int  # in the paper
    classes: Mapping[str, Sequence[str]]  # each class, and what else it may be called
    label: Sequence[str] = ()  # columns of the label, besides the usual ones
    metric: str = "auc"
    part: Callable[[str], str] | None = None  # of a slide, by its name, where no column says it
    patient: Callable[[str], str] | None = None  # likewise
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What a model's own recipe does not say for this benchmark alone."""
    remark: str = ""

    @property
    def metrics(self) -> tuple[str, str]:
        return self.metric, "ace"


OVERLAP = (
    "The paper's figures are not verified: in the split files that were released for it, most test "
    "slides of one fold are training slides of the others. Ours are scored on unseen slides only."
)
REHEARSAL = ("train.epochs=3", "train.warmup_epochs=1")
"""A stand-in is learnt at once; what is rehearsed is the way."""

PROTOCOLS = {
    "camelyon16": Protocol(
        title="CAMELYON16",
        slides=399,
        classes={"normal": ("negative", "0"), "tumour": ("tumor", "positive", "1")},
        part=_by_name,
        settings={"mean": ("train.lr=1e-3",), "bayesmil": ("model.prior=detection",)},
    ),
    "tcga-nsclc": Protocol(
        title="TCGA-NSCLC",
        slides=1006,
        classes={"LUSC": ("TCGA-LUSC", "0"), "LUAD": ("TCGA-LUAD", "1")},
        label=("subtype", "cohort", "project", "oncotree_code"),
        patient=_barcode,
        settings={"bayesmil": ("model.prior=subtyping",)},
        remark=OVERLAP,
    ),
    "panda": Protocol(
        title="PANDA",
        slides=10609,
        classes={str(grade): (f"ISUP {grade}",) for grade in range(6)},
        label=("isup_grade", "isup"),
        metric="kappa",
        settings={"bayesmil": ("model.prior=subtyping",)},
        remark=OVERLAP,
    ),
    "bracs": Protocol(
        title="BRACS",
        slides=547,
        classes={
            "atypical": ("AT", "Group_AT", "FEA", "ADH", "Type_FEA", "Type_ADH", "0"),
            "benign": ("BT", "Group_BT", "N", "PB", "UDH", "Type_N", "Type_PB", "Type_UDH", "1"),
            "malignant": ("MT", "Group_MT", "DCIS", "IC", "Type_DCIS", "Type_IC", "2"),
        },
        label=("wsi_label", "group", "lesion"),
        settings={"bayesmil": ("model.prior=subtyping",)},
    ),
}


def find(name: str) -> Protocol:
    """Return the protocol of that name."""
    if name not in PROTOCOLS:
        raise UnknownNameError("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def recipe_folder() -> Path:
    """Return where the recipes are: in the package, or in the clone that it was installed from."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def recipe(name: str, model: str, table: Path, features: Path, changes: Sequence[str]) -> Recipe:
    """Return the recipe of a protocol for a model: how to split, and that model's own training."""
    head, _, pool = model.partition("+")
    own = _read(head)
    if "model" not in own:  # a protocol's recipe
        raise UnknownNameError("model with a recipe", model, all_models())
    if pool:
        own["model"] |= {"name": model}
        own["model"].pop("pool", None)
    whole = _read(name)
    whole |= {"cohort": str(table), "features": str(features), "model": own["model"]}
    whole["train"] = own.get("train", {}) | whole["train"]
    changes = [*find(name).settings.get(model, ()), *changes]
    return config.parse(whole, into=Recipe, name=f"{name}.toml", changes=changes)


def _read(name: str) -> dict[str, Any]:
    path = recipe_folder() / f"{name}.toml"
    if not path.is_file():
        raise UnknownNameError("model with a recipe", name, all_models())
    return tomllib.loads(path.read_text(encoding="utf-8"))


def prepare(name: str, labels: str | Path) -> list[Row]:
    """Read a benchmark's table, whatever its columns are called, into slide, patient, label, split.

    Other columns stay: a site may be among them.
    """
    protocol, table = find(name), tables.read(labels, pad=True)
    columns = {
        "slide": _column(table, (*tables.COLUMNS["slide"], "wsi_filename"), "slide"),
        "label": _column(table, (*protocol.label, *tables.COLUMNS["label"]), "label"),
        "patient": _column(table, tables.COLUMNS["patient"]),
        "split": _column(table, ("split", "set", "part")),
    }
    taken = {column for column in columns.values() if column}
    words = {
        spelling.lower(): known
        for known, others in protocol.classes.items()
        for spelling in (known, *others)
    }
    rows, strange, homeless = [], [], []
    for cells in table.rows():
        slide = slide_name(cells[columns["slide"]])
        label = words.get(cells[columns["label"]].lower().removesuffix(".0"), "")
        row = {"slide": slide, "label": label}
        if not label:
            strange.append(f"{slide} ({cells[columns['label']] or 'none'})")
        row["patient"] = cells.get(columns["patient"], "")
        row["patient"] = row["patient"] or (protocol.patient(slide) if protocol.patient else slide)
        told = cells.get(columns["split"], "")
        row["split"] = PARTS.get(told.lower(), "")
        if not tables.is_known(told) and protocol.part:
            row["split"] = protocol.part(slide)
        if not row["split"]:
            homeless.append(slide)
        rows.append(row | {k: v for k, v in cells.items() if k not in taken | row.keys()})
    if strange:
        raise CohortError(
            f"{labels}: labels that {protocol.title} does not have ({len(strange)}): "
            f"{shorten(strange)}. Its classes are {', '.join(protocol.classes)}."
        )
    if homeless and _read(name)["splits"]["kind"] == "fixed":
        raise CohortError(
            f"{labels}: nothing says whether these slides are of the official training or test "
            f"part ({len(homeless)}): {shorten(homeless)}. Add a column split: train, val or test."
        )
    if not any(row["split"] for row in rows):
        for row in rows:
            del row["split"]
    return rows


def _column(table: tables.Table, words: Sequence[str], needed: str = "") -> str:
    found = tables.called(table.columns, words)
    if not found and needed:
        raise CohortError(
            f"{table.path}: no column is known to be the {needed}. Rename one to '{words[0]}'. "
            f"Columns: {', '.join(table.columns)}."
        )
    return found[0] if found else ""


def all_models() -> list[str]:
    """Return the models of the paper's tables, and the two that users expect beside them."""
    return [*paper.SCORES, "dsmil", "dtfd"]


def choose(models: str) -> list[str]:
    """Return the models of a list with commas, or all of them."""
    chosen = (
        all_models() if models == "all" else [m.strip() for m in models.split(",") if m.strip()]
    )
    if not chosen:
        raise RecipeError("Name a model, several with commas between, or all.")
    return list(dict.fromkeys(chosen))
