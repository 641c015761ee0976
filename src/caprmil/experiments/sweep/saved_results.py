"""The results of a sweep, read again from its files."""

from math import nan
from pathlib import Path

from caprmil import config
from caprmil.errors import RunError
from caprmil.experiments.sweep import PLAN, STEM
from caprmil.experiments.sweep.axes import Point
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.sweep.results import PARTS, PointResult, SweepResults, paper_ablation
from caprmil.io import tables


def read_results(folder: Path) -> SweepResults:
    """Return the results of the points that are in sweep.csv. No model is loaded."""
    plan, path = config.load(folder / PLAN, into=Plan), folder / f"{STEM}.csv"
    if not path.exists():
        return SweepResults(plan=plan, points=[], failures={})
    rows: dict[str, list[tables.Row]] = {}
    try:
        for row in tables.rows(tables.read_table(path)):
            rows.setdefault(row["point"], []).append(row)
        points = [_point(plan, own) for own in rows.values()]
    except (KeyError, ValueError) as problem:
        raise RunError(
            f"{path} is not the table of this sweep ({type(problem).__name__}: {problem}). Repeat "
            "the sweep: finished points are not trained again, and the table is written anew."
        ) from problem
    return SweepResults(plan=plan, points=points, failures={})


def _point(plan: Plan, rows: list[tables.Row]) -> PointResult:
    first, titles = rows[0], plan.space.titles
    changes = {key: first[title] for key, title in titles.items()}
    point = Point(name=first["point"], changes=changes)
    scores: dict[str, dict[str, dict[str, float]]] = {part: {} for part in PARTS}
    for row in rows:
        for part in PARTS:
            own = {
                name.removeprefix(f"{part}_"): float(cell) if tables.is_known(cell) else nan
                for name, cell in row.items()
                if name.startswith(f"{part}_")
            }
            if any(value == value for value in own.values()):
                scores[part][row["fold"]] = own
    return PointResult(
        point=point,
        parameters=int(first["parameters"]),
        seconds=float(first["seconds"]),
        scores=scores,
        published=paper_ablation(plan.recipe_at(point).try_model()),
    )
