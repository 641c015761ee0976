"""Results of a sweep: the scores of every point and fold, on the validation and the test parts."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from math import isnan, nan
from typing import TYPE_CHECKING, Any, TypeAlias

from caprmil import figures
from caprmil.errors import count
from caprmil.experiments import cost, paper
from caprmil.experiments.sweep import STEM
from caprmil.experiments.sweep.axes import Point
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.sweep.pruning import Pruned
from caprmil.io import tables
from caprmil.models import CAPRMIL, MILModel
from caprmil.runs.run import Run
from caprmil.targets.metric import Metric, Spread, mean_and_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("validation", "test")

Scores: TypeAlias = Mapping[str, Mapping[str, float]]  # by fold and metric


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """A trained point: every metric of every fold, on both parts."""

    point: Point
    parameters: int
    seconds: float
    scores: Mapping[str, Scores]
    """By part, fold and metric. A fold without a validation part is not in that part."""
    published: paper.Ablation | None = None
    """The paper's ablation of the same model, on CAMELYON16."""

    @staticmethod
    def from_run(run: Run, point: Point, *, seconds: float) -> "PointResult":
        """Return the result of a finished run."""
        scores: dict[str, dict[str, dict[str, float]]] = {part: {} for part in PARTS}
        for fold in run.splits:
            for part in PARTS:
                path = run.fold_folder(fold.name) / f"{part}.csv"
                if path.exists():
                    scores[part][fold.name] = run.read_predictions(path).scores()
        model = run.model(run.splits[0].name)
        return PointResult(
            point=point,
            parameters=cost.parameters(model),
            seconds=seconds,
            scores=scores,
            published=paper_ablation(model),
        )

    def folds(self, part: str, metric: str) -> list[float]:
        """Return a metric of each fold."""
        return [scores.get(metric, nan) for scores in self.scores[part].values()]

    def mean(self, part: str, metric: str) -> Spread:
        """Return the mean and spread of a metric over folds."""
        return mean_and_spread(self.folds(part, metric))


def paper_ablation(model: MILModel) -> paper.Ablation | None:
    """Return the row of the paper's ablation table with this model, if there is one."""
    settings = model.settings
    common = {"dim": 128, "depth": 1, "pool": "mean"}
    if not isinstance(model, CAPRMIL) or not common.items() <= settings.items():
        return None
    varied = (settings["tokens"], settings["heads"], settings["mlp_ratio"])
    return next((row for row in paper.ABLATIONS if row[:3] == varied), None)


@dataclass(frozen=True, kw_only=True)
class SweepResults:
    """The results of a plan so far."""

    plan: Plan
    points: Sequence[PointResult]
    failures: Mapping[str, str]
    """Why a point could not be trained, by name."""
    pruned: Sequence[Pruned] = ()
    """Points that were pruned. They are in the table, but have no scores."""
    stem: str = STEM
    """The name of the tables and of the figure, without its ending."""

    @property
    def files(self) -> dict[str, str]:
        """The names of the tables and of the figure, by ending."""
        return {ending: f"{self.stem}.{ending}" for ending in ("csv", "md", "png")}

    def in_order_of(self, plan: Plan) -> "SweepResults":
        """Return the results with the axes in the order of a plan, under a name of their own."""

        def moved(point: Point) -> Point:
            return replace(point, changes={key: point.changes[key] for key in plan.axes})

        order = [point.changes for point in plan.space.grid()] if plan.search == "grid" else []

        points = [replace(each, point=moved(each.point)) for each in self.points]
        return replace(
            self,
            plan=plan,
            points=sorted(points, key=lambda each: order.index(each.point.changes))
            if order
            else points,
            pruned=[replace(each, point=moved(each.point)) for each in self.pruned],
            stem=re.sub(r"[^\w.+-]", "_", "-".join([STEM, *plan.space.titles.values()])),
        )

    def rank(self, value: float) -> float:
        """Return a score by which points are sorted: higher is better, and NaN is worst."""
        if isnan(value):
            return -float("inf")
        return value if self.plan.higher_is_better else -value

    @property
    def best(self) -> PointResult | None:
        """The best point on the validation parts; None if there are none."""
        metric = self.plan.metric
        scored = [each for each in self.points if each.mean("validation", metric).counted]
        return max(
            scored, key=lambda each: self.rank(each.mean("validation", metric).mean), default=None
        )

    def chosen_by_fold(self) -> Spread:
        """Return the test score if each fold chooses the point by its own validation part.

        The validation slides of one fold are test slides of another. So one choice for all folds
        has seen test slides; a choice per fold has not.
        """

        def score(each: PointResult, part: str, fold: str) -> float:
            return each.scores[part].get(fold, {}).get(self.plan.metric, nan)

        def choose(fold: str) -> float:
            scores = [score(each, "validation", fold) for each in self.points]
            best = max(range(len(scores)), key=lambda number: self.rank(scores[number]))
            return nan if isnan(scores[best]) else score(self.points[best], "test", fold)

        folds = dict.fromkeys(fold for each in self.points for fold in each.scores["validation"])
        return mean_and_spread(map(choose, folds))

    def shown_metrics(self) -> list[Metric]:
        """Return the metrics in tables and figures: the plan's and the target's first two."""
        target = self.plan.recipe.target
        names = dict.fromkeys([self.plan.metric, target.headline, target.second])
        return [self.plan.find_metric(name) for name in names]

    def _title(self, metric: str) -> str:
        return self.plan.find_metric(metric).title

    def rows(self) -> list[dict[str, str]]:
        """Return the cells of each point: a grid in order, a search with the best point first."""
        results, metric, titles = list(self.points), self.plan.metric, self.plan.space.titles
        if self.plan.search != "grid":
            results.sort(key=lambda each: -self.rank(each.mean("validation", metric).mean))
        compared = any(each.published for each in results)
        best, rows = self.best, []
        for each in results:
            row = {titles[key]: text for key, text in each.point.changes.items()}
            row["parameters"] = f"{each.parameters:,}"
            row[f"validation {self._title(metric)}"] = show(each.mean("validation", metric))
            row |= {
                f"test {m.title}": show(each.mean("test", m.name)) for m in self.shown_metrics()
            }
            if compared:
                row["paper's AUC"] = show(each.published.auc) if each.published else "-"
                row["paper's ACE"] = show(each.published.ace) if each.published else "-"
            row["seconds"] = f"{each.seconds:.0f}"
            if each is best:
                row = {name: f"**{text}**" for name, text in row.items()}
            rows.append(row)
        for pruned in self.pruned if rows else ():
            row = {titles[key]: text for key, text in pruned.point.changes.items()}
            row[f"validation {self._title(metric)}"] = (
                f"pruned: {pruned.fold}, epoch {pruned.epoch}"
            )
            rows.append(dict.fromkeys(rows[0], "-") | row)
        return rows

    def notes(self) -> list[str]:
        """Return the notes below the table."""
        notes = ["Mean ± sample standard deviation over folds."]
        metric = self._title(self.plan.metric)
        if self.points and self.best is None:
            notes.append("There is no validation part, so no point was chosen.")
        elif self.best is not None:
            notes += [
                f"Bold is the best {metric} on the validation parts: {self.best.point.name}. The "
                "test parts were not used for this choice.",
                f"If each fold chooses by its own validation part, the test {metric} is "
                f"{show(self.chosen_by_fold())}. This is the unbiased score of the choice.",
            ]
            if self.plan.recipe_at(self.best.point).is_multimodal:
                recipe = f"points/{self.best.point.name}/recipe.toml"
                notes.append(
                    "A sweep trains no model of a single modality. What each adds at the best "
                    f"point: caprmil train {recipe} --out NEW, in the folder of the sweep."
                )
        if any(each.published for each in self.points):
            notes.append(
                "The paper's columns are its ablation table, on CAMELYON16 and with its encoder. "
                "They can be compared on that cohort only."
            )
        notes += [f"Pruned: {each.point.name} {each}." for each in self.pruned]
        return notes + [f"Failed: {name}: {why}" for name, why in self.failures.items()]

    def as_markdown(self) -> str:
        """Return the table, with the axes above it and notes below."""
        axes = ", ".join(f"{key} = {text}" for key, text in self.plan.axes.items())
        title = f"{self.plan.search.capitalize()} over {axes}; {count(len(self.points), 'point')}."
        if not (rows := self.rows()):
            return "\n\n".join([title, *self.notes()]) + "\n"
        cells = [list(row.values()) for row in rows]
        table = tables.markdown_table(list(rows[0]), cells, self.notes())
        return f"{title}\n\n{table}"

    def as_csv(self) -> str:
        """Return a row for each point and fold, in full precision."""
        text, titles = StringIO(), self.plan.space.titles
        scored = [fold for each in self.points for fold in each.scores["test"].values()]
        metrics = dict.fromkeys(name for fold in scored for name in fold)
        names = [f"{part}_{metric}" for part in PARTS for metric in metrics]
        head = ["point", *titles.values(), "fold", "parameters", "seconds"]
        table = csv.DictWriter(text, [*head, *names], restval="", lineterminator="\n")
        table.writeheader()
        for each in self.points:
            axes = {titles[key]: value for key, value in each.point.changes.items()}
            for fold in each.scores["test"]:
                row: dict[str, Any] = {"point": each.point.name, **axes, "fold": fold}
                row |= {"parameters": each.parameters, "seconds": round(each.seconds, 1)}
                for part in PARTS:
                    scores = each.scores[part].get(fold, {})
                    row |= {f"{part}_{name}": value for name, value in scores.items()}
                table.writerow(row)
        return text.getvalue()

    def figure(self) -> "Figure":
        """Return the paper's ablation panels for a grid of up to two axes, or a panel per axis."""
        titles, best = self.plan.space.titles, self.best
        panels = self.plan.search == "grid" and len(titles) <= 2
        part = "test" if panels or best is None else "validation"
        trials = [
            figures.Trial(
                settings={titles[key]: text for key, text in each.point.changes.items()},
                folds={m.name: each.folds(part, m.name) for m in self.shown_metrics()},
                chosen=each is best,
            )
            for each in self.points
        ]
        about = f"{part} part of each fold"
        if panels:
            return figures.ablation_panels(trials, metrics=self.shown_metrics(), about=about)
        return figures.search_panels(
            trials, metric=self.plan.find_metric(self.plan.metric), about=about
        )


def show(figure: Spread | paper.Figure) -> str:
    """Return mean ± spread as text, without what is NaN."""
    if isnan(figure.mean):
        return "-"
    return f"{figure.mean:.3f}" + ("" if isnan(figure.std) else f" ± {figure.std:.3f}")
