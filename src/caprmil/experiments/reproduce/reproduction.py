"""A reproduction: a protocol run for some models, compared with the paper's figures."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from math import isnan, nan
from pathlib import Path

from caprmil.cohort.found_bags import find_bags
from caprmil.errors import CohortError, shorten
from caprmil.evaluation import comparison
from caprmil.executors import Executor
from caprmil.experiments import cost, paper
from caprmil.experiments.reproduce.protocols import (
    Protocol,
    Row,
    find_protocol,
    protocol_recipe,
    read_labels,
)
from caprmil.features.description import GENERATED, describe_features
from caprmil.io import tables
from caprmil.io.atomic import write_text
from caprmil.io.findings import Findings
from caprmil.io.json_files import as_json
from caprmil.io.leftovers import clear_leftovers
from caprmil.io.paths import as_path, require_local
from caprmil.runs.facts import Facts
from caprmil.runs.run import Run
from caprmil.targets.classification_metrics import ace_floor
from caprmil.targets.metric import mean_and_spread
from caprmil.training.cross_validation import complete_all
from caprmil.training.recipe import Recipe

PROTOCOL_FILE = "protocol.json"  # says which protocol a folder is of
NOTES = (
    "diff / std: ours less the paper's, in units of the paper's spread. floor: the ACE that a "
    "perfectly calibrated model with these probabilities would have.",
    "Mean and sample standard deviation over folds or seeds. Each model has its own recipe, "
    "none was searched for on this cohort.",
)


@dataclass(frozen=True, kw_only=True)
class ModelScore:
    """One metric of one model: the paper's figure and ours."""

    model: str
    metric: str
    parameters: int
    published: paper.Figure | None
    ours: paper.Figure
    ace_floor: float
    """The ACE of a perfectly calibrated model with these probabilities; NaN for other metrics."""

    @property
    def difference(self) -> float:
        """Ours less the paper's, in units of the paper's spread."""
        if self.published is None:
            return nan
        return (self.ours.mean - self.published.mean) / self.published.std


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The scores of a protocol, next to the paper's."""

    protocol: Protocol
    scores: Sequence[ModelScore]
    facts: Facts
    """Of one of the runs: all have the same features."""
    notes: Sequence[str]

    @property
    def features(self) -> str:
        """The encoder, width and scale of the features, next to the paper's."""
        facts, theirs = self.facts, describe_features("UNI", 1024, self.protocol.mpp, 224)
        ours = describe_features(facts.encoder, facts.in_dim, facts.mpp, facts.patch_px)
        if facts.encoder == GENERATED:
            return f"{ours} Scores on them mean nothing next to the paper's."
        return f"{ours} The paper's: {theirs.removeprefix('Features: ')}"

    def rows(self) -> list[Row]:
        """Return the cells of each model and metric, by column."""
        return [
            {
                "model": score.model,
                "parameters": f"{score.parameters:,}",
                "metric": score.metric.upper() if score.metric != "kappa" else "kappa",
                "paper": _show(*score.published) if score.published else "-",
                "ours": _show(*score.ours),
                "diff / std": "-" if isnan(score.difference) else f"{score.difference:+.1f}",
                "floor": "-" if isnan(score.ace_floor) else _show(score.ace_floor, nan),
            }
            for score in self.scores
        ]

    def as_markdown(self) -> str:
        rows = self.rows()
        cells = [list(row.values()) for row in rows]
        table = tables.markdown_table(list(rows[0]), cells, self.notes)
        return f"# {self.protocol.title}\n\n{self.features}\n\n{table}"

    def as_latex(self) -> str:
        """Return a LaTeX table; it needs the package booktabs."""
        rows = self.rows()
        body = [" & ".join(row.values()).replace("±", r"$\pm$") + r" \\" for row in rows]
        about = self.features.replace("_", r"\_")
        return "\n".join(
            [
                r"\begin{tabular}{lrlrrrr}",
                r"\toprule",
                " & ".join(rows[0]) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                rf"\multicolumn{{7}}{{p{{.9\linewidth}}}}{{{about}}} \\",
                r"\end{tabular}",
                *(f"% {note}" for note in self.notes),
                "",
            ]
        )

    def as_csv(self) -> str:
        """Return every number in full precision."""
        text = StringIO()
        table = csv.writer(text, lineterminator="\n")
        head = ["model", "parameters", "metric", "paper_mean", "paper_std", "mean", "std"]
        about = ["encoder", "width", "mpp", "generated"]
        table.writerow([*head, "difference_in_paper_stds", "ace_floor", *about])
        facts, generated = self.facts, self.facts.encoder == GENERATED
        features = [facts.encoder or "", facts.in_dim, facts.mpp or "", str(generated).lower()]
        for score in self.scores:
            published = score.published or ("", "")
            numbers = [*published, *score.ours, score.difference, score.ace_floor]
            shown = ["" if isinstance(n, float) and isnan(n) else n for n in numbers]
            table.writerow([score.model, score.parameters, score.metric, *shown, *features])
        return text.getvalue()

    def write(self, folder: Path) -> None:
        """Write table.md, table.csv and table.tex, in place of those of an earlier call."""
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
    executor: Executor | None = None,
) -> Reproduction:
    """Run a protocol for these models, each in a folder of `out`, and compare with the paper.

    Finished runs are not trained again. An executor runs the folds of all models.
    """
    protocol, out, features = find_protocol(name), require_local(out), as_path(features)
    found = Findings()
    rows = read_labels(name, labels, found)
    table = out / "cohort.csv"
    recipes = {model: protocol_recipe(name, model, table, features, changes) for model in models}
    for recipe in recipes.values():
        recipe.try_model()  # before anything is written or trained
    clear_leftovers(out)
    notes = [*found.notes]
    notes += _check_slides(protocol, rows, features, out, next(iter(recipes.values())))
    _write_cohort(table, rows)
    write_text(out / PROTOCOL_FILE, as_json({"protocol": name}), replace=True)
    runs = complete_all(
        {out / model: recipe for model, recipe in recipes.items()},
        device=device,
        progress=progress,
        executor=executor,
    )
    scores = []
    for model, run in zip(recipes, runs.values(), strict=True):
        scores += _scores(name, protocol, model, run)
        if run.baselines:
            compared = comparison.compare_with_baselines(model, run.predictions, run.baselines)
            notes += compared.warnings()
    notes += [protocol.remark] if protocol.remark else []
    notes += [*NOTES, *(f"Changed: {change}." for change in changes)]
    facts = next(iter(runs.values())).facts
    result = Reproduction(protocol=protocol, scores=scores, facts=facts, notes=notes)
    result.write(out)
    return result


def _write_cohort(path: Path, rows: Sequence[Row]) -> None:
    text = StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    if path.exists() and path.read_bytes() != text.getvalue().encode("utf-8"):
        raise CohortError(f"{path} was made from another table. Choose another folder with --out.")
    if not path.exists():
        write_text(path, text.getvalue())


def _check_slides(
    protocol: Protocol, rows: Sequence[Row], features: Path, out: Path, recipe: Recipe
) -> list[str]:
    """Return notes on missing bags and on the size of the cohort. Missing bags may be an error."""
    bags = find_bags([features])
    missing = [row["slide"] for row in rows if row["slide"] not in bags]
    notes = []
    if missing:
        path = out / "missing.txt"
        write_text(path, "\n".join(missing) + "\n", replace=True)
        text = (
            f"{len(missing)} of {len(rows)} slides have no bag in {features}: {shorten(missing)}."
        )
        if recipe.data.missing != "skip":
            raise CohortError(
                f"{text} All of them are in {path}. Extract their features, or leave them out "
                "with --set data.missing=skip."
            )
        notes.append(f"{text} They were left out.")
    used = len(rows) - len(missing)
    if used != protocol.slides:
        notes.append(f"{used} slides; the paper has {protocol.slides:,}.")
    return notes


def _scores(name: str, protocol: Protocol, model: str, run: Run) -> list[ModelScore]:
    folds = run.predictions.fold_scores()
    parts = run.predictions.labelled().by_fold().values()
    floors = [ace_floor(part.answers)[0] for part in parts]
    parameters = cost.parameters(run.model(run.splits[0].name))
    scores = []
    for metric in protocol.metrics:
        mean, std, _ = mean_and_spread(fold[metric] for fold in folds.values())
        scores.append(
            ModelScore(
                model=model,
                metric=metric,
                parameters=parameters,
                published=paper.SCORES.get(model, {}).get((name, metric)),
                ours=paper.Figure(mean, std),
                ace_floor=mean_and_spread(floors).mean if metric == "ace" else nan,
            )
        )
    return scores
