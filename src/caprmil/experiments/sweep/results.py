"""Results: the scores of every point, fold by fold, on validation and on test."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from caprmil import figures
from caprmil.evaluation.predictions import Predictions
from caprmil.experiments import cost, paper
from caprmil.experiments.sweep.plan import Plan, Point
from caprmil.experiments.sweep.pruning import Pruned
from caprmil.io import tables
from caprmil.models import CAPRMIL, MILModel
from caprmil.runs.run import Run
from caprmil.targets import find_metric
from caprmil.targets.metric import Spread, mean_and_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("validation", "test")

Scores = Mapping[str, Mapping[str, float]]  # by fold and metric


@dataclass(frozen=True, kw_only=True)
class Result:
    """A point that was trained: every metric of every fold, on both parts."""

    point: Point
    parameters: int
    seconds: float
    scores: Mapping[str, Scores]
    """By part, fold and metric. A fold without a validation part is not in that part."""
    published: paper.Ablation | None = None
    """The paper's row of the same model, on CAMELYON16."""

    @staticmethod
    def of(run: Run, point: Point, *, seconds: float) -> "Result":
        """Read a finished run."""
        scores: dict[str, dict[str, dict[str, float]]] = {part: {} for part in PARTS}
        for fold in run.splits:
            for part in PARTS:
                path = run.fold_folder(fold.name) / f"{part}.csv"
                if path.exists():
                    scores[part][fold.name] = Predictions.read(path).scores()
        model = run.model(run.splits[0].name)
        return Result(
            point=point,
            parameters=cost.parameters(model),
            seconds=seconds,
            scores=scores,
            published=papers_row(model),
        )

    def folds(self, part: str, metric: str) -> list[float]:
        """Return a metric on each fold."""
        return [scores.get(metric, nan) for scores in self.scores[part].values()]

    def mean(self, part: str, metric: str) -> Spread:
        """Return mean and spread of a metric over folds."""
        return mean_and_spread(self.folds(part, metric))


def papers_row(model: MILModel) -> paper.Ablation | None:
    """Return the row of the paper's ablation table that this model is, if it is one."""
    said = model.settings
    common = {"dim": 128, "depth": 1, "pool": "mean"}
    if not isinstance(model, CAPRMIL) or not common.items() <= said.items():
        return None
    own = (said["tokens"], said["heads"], said["mlp_ratio"])
    return next((row for row in paper.ABLATIONS if row[:3] == own), None)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A plan, with what has come of it so far."""

    plan: Plan
    results: Sequence[Result]
    failures: Mapping[str, str]
    """Why a point could not be trained, by its name."""
    pruned: Sequence[Pruned] = ()
    """Points that were given up on the way. They are in the table, but are no results."""

    def better(self, value: float) -> float:
        """Return a score such that the larger is the better; NaN is worst."""
        if isnan(value):
            return -float("inf")
        return value if find_metric(self.plan.metric).higher_is_better else -value

    @property
    def best(self) -> Result | None:
        """The best on the validation parts; None if there are none."""
        metric = self.plan.metric
        scored = [each for each in self.results if each.mean("validation", metric).counted]
        return max(
            scored, key=lambda each: self.better(each.mean("validation", metric).mean), default=None
        )

    def chosen_by_fold(self) -> Spread:
        """Return the test score if each fold chooses the point by its own validation part.

        The validation slides of one fold are test slides of another: one choice for all folds has
        seen them. This one has not.
        """

        def score(each: Result, part: str, fold: str) -> float:
            return each.scores[part].get(fold, {}).get(self.plan.metric, nan)

        def choose(fold: str) -> float:
            worth = {n: score(e, "validation", fold) for n, e in enumerate(self.results)}
            best = max(worth, key=lambda number: self.better(worth[number]))
            return nan if isnan(worth[best]) else score(self.results[best], "test", fold)

        folds = dict.fromkeys(fold for each in self.results for fold in each.scores["validation"])
        return mean_and_spread(map(choose, folds))

    def shown(self) -> list[str]:
        """Return the metrics that tables and pictures show: that of the plan, AUC and ACE."""
        return list(dict.fromkeys([self.plan.metric, "auc", "ace"]))

    def rows(self) -> list[dict[str, str]]:
        """Return a row of text for each point: a search has its best on top, a grid its order."""
        results, metric, titles = list(self.results), self.plan.metric, self.plan.titles()
        if self.plan.search != "grid":
            results.sort(key=lambda each: -self.better(each.mean("validation", metric).mean))
        compared = any(each.published for each in results)
        best, rows = self.best, []
        for each in results:
            row = {titles[key]: text for key, text in each.point.changes.items()}
            row["parameters"] = f"{each.parameters:,}"
            row[f"validation {_short(metric)}"] = show(each.mean("validation", metric))
            row |= {f"test {_short(m)}": show(each.mean("test", m)) for m in self.shown()}
            if compared:
                row["paper's AUC"] = show(each.published.auc) if each.published else "-"
                row["paper's ACE"] = show(each.published.ace) if each.published else "-"
            row["seconds"] = f"{each.seconds:.0f}"
            if each is best:
                row = {name: f"**{text}**" for name, text in row.items()}
            rows.append(row)
        for one in self.pruned if rows else ():
            own = {titles[key]: text for key, text in one.point.changes.items()}
            own[f"validation {_short(metric)}"] = f"pruned: {one.fold}, epoch {one.epoch}"
            rows.append(dict.fromkeys(rows[0], "-") | own)
        return rows

    def notes(self) -> list[str]:
        """Say what a reader of the table must know."""
        notes = ["Mean ± sample standard deviation over folds."]
        metric = _short(self.plan.metric)
        if self.results and self.best is None:
            notes.append("There is no validation part, so nothing was chosen.")
        elif self.best is not None:
            notes += [
                f"Bold is the best {metric} on the validation parts: {self.best.point.name}. The "
                "test parts had no say in it.",
                f"If each fold chooses by its own validation part, the test {metric} is "
                f"{show(self.chosen_by_fold())}: this is what the choice is worth.",
            ]
        if any(each.published for each in self.results):
            notes.append(
                "The paper's columns are its ablation table, on CAMELYON16 and with its encoder: "
                "only on that cohort can they be compared."
            )
        notes += [f"Pruned: {each.point.name} {each}." for each in self.pruned]
        return notes + [f"Failed: {name}: {why}" for name, why in self.failures.items()]

    def as_markdown(self) -> str:
        """Return the table, with what varies above it and remarks below."""
        axes = ", ".join(f"{key} = {text}" for key, text in self.plan.axes.items())
        title = f"{self.plan.search.capitalize()} over {axes}; {len(self.results)} points."
        if not (rows := self.rows()):
            return "\n\n".join([title, *self.notes()]) + "\n"
        cells = [list(row.values()) for row in rows]
        table = tables.markdown_table(list(rows[0]), cells, self.notes())
        return f"{title}\n\n{table}"

    def as_csv(self) -> str:
        """Return a row for each point and fold, in full precision."""
        whole, titles = StringIO(), self.plan.titles()
        scored = [fold for each in self.results for fold in each.scores["test"].values()]
        metrics = {name: None for fold in scored for name in fold}
        names = [f"{part}_{metric}" for part in PARTS for metric in metrics]
        head = ["point", *titles.values(), "fold", "parameters", "seconds"]
        table = csv.DictWriter(whole, [*head, *names], restval="", lineterminator="\n")
        table.writeheader()
        for each in self.results:
            axes = {titles[key]: text for key, text in each.point.changes.items()}
            for fold in each.scores["test"]:
                row: dict[str, Any] = {"point": each.point.name, **axes, "fold": fold}
                row |= {"parameters": each.parameters, "seconds": round(each.seconds, 1)}
                for part in PARTS:
                    scores = each.scores[part].get(fold, {})
                    row |= {f"{part}_{name}": value for name, value in scores.items()}
                table.writerow(row)
        return whole.getvalue()

    def figure(self) -> "Figure":
        """Draw a grid of one or two axes as the paper does, on test; else every axis by itself."""
        titles, best = self.plan.titles(), self.best
        panels = self.plan.search == "grid" and len(titles) <= 2
        part = "test" if panels or best is None else "validation"
        trials = [
            figures.Trial(
                settings={titles[key]: text for key, text in each.point.changes.items()},
                folds={name: each.folds(part, name) for name in self.shown()},
                chosen=each is best,
            )
            for each in self.results
        ]
        about = f"{part} part of each fold"
        if panels:
            return figures.ablation_panels(trials, metrics=self.shown(), about=about)
        return figures.search_panels(trials, metric=self.plan.metric, about=about)


def show(figure: Spread | paper.Figure) -> str:
    """Return mean ± spread, as far as they are known."""
    if isnan(figure.mean):
        return "-"
    return f"{figure.mean:.3f}" + ("" if isnan(figure.std) else f" ± {figure.std:.3f}")


def _short(metric: str) -> str:
    """Return the name of a metric as a heading has it."""
    return find_metric(metric).title
