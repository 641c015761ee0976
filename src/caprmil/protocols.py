"""Protocols: the paper's four benchmarks, run as it ran them, beside its figures.

A protocol knows what its benchmark's table calls things, and its recipe says how it is split and
trained; a model's own recipe says the rest. The paper's figures are in `paper`.
"""

import csv
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from math import isnan
from pathlib import Path
from typing import Any

from caprmil import bags, comparison, config, cost, metrics, paper, tables
from caprmil.cohort import find_bags
from caprmil.errors import CohortError, RecipeError, UnknownName, some
from caprmil.files import write_text
from caprmil.folds import PARTS
from caprmil.runs import Run
from caprmil.training import Recipe, complete

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
        raise UnknownName("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]


def recipe_folder() -> Path:
    """Return where the recipes are: in the package, or in the clone that it was installed from."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"


def recipe(name: str, model: str, table: Path, features: Path, changes: Sequence[str]) -> Recipe:
    """Return the recipe of a protocol for a model: how to split, and that model's own training."""
    head, _, pool = model.partition("+")
    own = _read(head)
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
        known = sorted(set(paper.SCORES) | {"dsmil", "dtfd"})
        raise UnknownName("model with a recipe", name, known)
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
        slide = bags.slide_name(cells[columns["slide"]])
        label = words.get(cells[columns["label"]].lower().removesuffix(".0"), "")
        row = {"slide": slide, "label": label}
        if not label:
            strange.append(f"{slide} ({cells[columns['label']] or 'none'})")
        row["patient"] = cells.get(columns["patient"], "")
        row["patient"] = row["patient"] or (protocol.patient(slide) if protocol.patient else slide)
        row["split"] = PARTS.get(cells.get(columns["split"], "").lower(), "")
        if not row["split"] and protocol.part:
            row["split"] = protocol.part(slide)
        if not row["split"]:
            homeless.append(slide)
        rows.append(row | {k: v for k, v in cells.items() if k not in taken | row.keys()})
    if strange:
        raise CohortError(
            f"{labels}: labels that {protocol.title} does not have ({len(strange)}): "
            f"{some(strange)}. Its classes are {', '.join(protocol.classes)}."
        )
    if homeless and _read(name)["splits"]["kind"] == "fixed":
        raise CohortError(
            f"{labels}: nothing says whether these slides are of the official training or test "
            f"part ({len(homeless)}): {some(homeless)}. Add a column split: train, val or test."
        )
    return rows


def _column(table: tables.Table, words: Sequence[str], needed: str = "") -> str:
    found = tables.called(table.columns, words)
    if not found and needed:
        raise CohortError(
            f"{table.path}: no column is known to be the {needed}. Rename one to '{words[0]}'. "
            f"Columns: {', '.join(table.columns)}."
        )
    return found[0] if found else ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model and metric: the paper's figure and ours."""

    model: str
    metric: str
    parameters: int
    printed: paper.Figure | None  # in the paper
    ours: paper.Figure
    floor: float  # of the ACE: what a perfectly calibrated model would read; NaN for others

    @property
    def units(self) -> float:
        """The difference, in units of the paper's spread."""
        if self.printed is None:
            return float("nan")
        return (self.ours.mean - self.printed.mean) / self.printed.std


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A protocol that was run, with the table that compares it to the paper."""

    protocol: Protocol
    lines: Sequence[Line]
    notes: Sequence[str]

    def rows(self) -> list[Row]:
        """Return the table as text, a row for each model and metric."""
        return [
            {
                "model": line.model,
                "parameters": f"{line.parameters:,}",
                "metric": line.metric.upper() if line.metric != "kappa" else "kappa",
                "paper": _show(*line.printed) if line.printed else "-",
                "ours": _show(*line.ours),
                "diff / std": "-" if isnan(line.units) else f"{line.units:+.1f}",
                "floor": "-" if isnan(line.floor) else f"{line.floor:.3f}".replace("0.", "."),
            }
            for line in self.lines
        ]

    def as_markdown(self) -> str:
        rows = self.rows()
        table = tables.markdown(list(rows[0]), [list(row.values()) for row in rows], self.notes)
        return f"# {self.protocol.title}\n\n{table}"

    def as_latex(self) -> str:
        """Return a table for a paper; it needs the package booktabs."""
        rows = self.rows()
        body = [" & ".join(row.values()).replace("±", r"$\pm$") + r" \\" for row in rows]
        return "\n".join(
            [
                r"\begin{tabular}{lrlrrrr}",
                r"\toprule",
                " & ".join(rows[0]) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                *(f"% {note}" for note in self.notes),
                "",
            ]
        )

    def as_csv(self) -> str:
        """Return every number in full precision."""
        text = StringIO()
        table = csv.writer(text, lineterminator="\n")
        head = ["model", "parameters", "metric", "paper_mean", "paper_std"]
        table.writerow([*head, "mean", "std", "difference_in_paper_stds", "ace_floor"])
        for line in self.lines:
            printed = line.printed or ("", "")
            numbers = [*printed, *line.ours, line.units, line.floor]
            shown = ["" if isinstance(n, float) and isnan(n) else n for n in numbers]
            table.writerow([line.model, line.parameters, line.metric, *shown])
        return text.getvalue()

    def write(self, folder: Path) -> None:
        """Write table.md, table.csv and table.tex: they are made from the runs, so made anew."""
        write_text(folder / "table.md", self.as_markdown(), replace=True)
        write_text(folder / "table.csv", self.as_csv(), replace=True)
        write_text(folder / "table.tex", self.as_latex(), replace=True)


def _show(mean: float, std: float) -> str:
    shown = f"{mean:.3f}" if isnan(std) else f"{mean:.3f} ± {std:.3f}"
    return shown.replace("0.", ".")


def reproduce(
    name: str,
    labels: str | Path,
    features: str | Path,
    models: Sequence[str],
    out: str | Path,
    *,
    changes: Sequence[str] = (),
    device: str = "auto",
    progress: bool = True,
) -> Reproduction:
    """Run a protocol for these models, each in a folder of `out`, and compare with the paper.

    What is finished there is not trained again.
    """
    protocol, out, features = find(name), Path(out), Path(features)
    rows = prepare(name, labels)
    table = out / "cohort.csv"
    recipes = {model: recipe(name, model, table, features, changes) for model in models}
    for each in recipes.values():
        each.model.build(1024, len(protocol.classes))  # before anything is written or trained
    notes = _check_slides(protocol, rows, features, out, next(iter(recipes.values())))
    _write_cohort(table, rows)
    lines = []
    for model, each in recipes.items():
        run = complete(each, out / model, device=device, progress=progress)
        lines += _lines(name, protocol, model, run)
        notes += comparison.beside_shortcuts(model, run.predictions, run.shortcuts).warnings()
    if protocol.remark:
        notes.append(protocol.remark)
    notes.append(
        "diff / std: ours less the paper's, in units of the paper's spread. floor: the ACE that a "
        "perfectly calibrated model with these probabilities would read."
    )
    notes.append(
        "Mean and sample standard deviation over folds or seeds. Each model has its own recipe, "
        "none was searched for on this cohort."
    )
    notes += [f"Changed: {change}." for change in changes]
    result = Reproduction(protocol=protocol, lines=lines, notes=notes)
    result.write(out)
    return result


def _write_cohort(path: Path, rows: Sequence[Row]) -> None:
    text = StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    if path.exists() and path.read_text(encoding="utf-8") != text.getvalue():
        raise CohortError(f"{path} was made from another table. Choose another folder with --out.")
    if not path.exists():
        write_text(path, text.getvalue())


def _check_slides(
    protocol: Protocol, rows: Sequence[Row], features: Path, out: Path, recipe: Recipe
) -> list[str]:
    """Name the slides that have no bag, and say how the cohort differs from the paper's."""
    found = find_bags([features])
    absent = [row["slide"] for row in rows if row["slide"] not in found]
    notes = []
    if absent:
        path = out / "missing.txt"
        write_text(path, "\n".join(absent) + "\n", replace=True)
        text = f"{len(absent)} of {len(rows)} slides have no bag in {features}: {some(absent)}."
        if recipe.data.missing != "skip":
            raise CohortError(
                f"{text} All of them are in {path}. Extract their features, or leave them out "
                "with --set data.missing=skip."
            )
        notes.append(f"{text} They were left out.")
    used = len(rows) - len(absent)
    if used != protocol.slides:
        notes.append(f"{used} slides; the paper has {protocol.slides:,}.")
    return notes


def _lines(name: str, protocol: Protocol, model: str, run: Run) -> list[Line]:
    scores = run.predictions.fold_scores()
    parts = run.predictions.labelled().by_fold().values()
    floors = [metrics.ace_floor(part.probabilities)[0] for part in parts]
    parameters = cost.parameters(run.model(run.splits[0].name))
    lines = []
    for metric in protocol.metrics:
        mean, std, _ = metrics.mean_and_spread(fold[metric] for fold in scores.values())
        lines.append(
            Line(
                model=model,
                metric=metric,
                parameters=parameters,
                printed=paper.SCORES.get(model, {}).get((name, metric)),
                ours=paper.Figure(mean, std),
                floor=metrics.mean_and_spread(floors).mean if metric == "ace" else float("nan"),
            )
        )
    return lines


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
    return chosen
