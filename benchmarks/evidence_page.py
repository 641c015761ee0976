"""What came of the benchmark of maps: its results, and the page about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import COLOURS, GREY, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASS = "tumour"
RANDOM, TOKEN = "random", "best token (told the truth)"
MAPS = (
    *("evidence, exact", "perturbation", "integrated gradients", "gradients"),
    *("attention", "class attention", "patch scores", TOKEN, RANDOM),
)
NO_RIVALS = (TOKEN, RANDOM)
LEARNED = 0.8  # of the AUC over slides; a map of a model below it says nothing

MARKS = {
    "found": "AUC of patches: at least half tumour against less than half",
    "clear": "AUC of clear patches: at least half tumour against none at all",
    "area": "Area between the flipping curves of tumour (1 is the most there can be, chance is 0)",
}


class Job(NamedTuple):
    """One model, cross-validated from one seed."""

    model: str
    seed: int


@dataclass(frozen=True)
class Result:
    """How a model did on slides that it had not seen, and each of its maps on those with tumour."""

    model: str
    seed: int
    settings: str  # the digest of plan and models
    slide_aucs: list[float]  # fold by fold
    slides: list[str]
    maps: dict[str, dict[str, list[float]]]  # by map and mark (see MARKS), slide by slide
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.model, self.seed)


def by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each model, its seeds together."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.model, []).append(result)
    return found


def values(seeds: Sequence[Result], name: str, mark: str) -> NDArray[np.float64]:
    """Return a mark of a map, slide by slide, of all seeds."""
    return np.concatenate([seed.maps.get(name, {}).get(mark, []) for seed in seeds])


def present(results: Sequence[Result], mark: str) -> list[str]:
    """Return the maps that some model has such a mark of."""
    return [name for name in MAPS if len(values(results, name, mark))]


def table(results: Sequence[Result], mark: str) -> str:
    """Return the mean of a mark over slides, of each model and map, as a Markdown table."""
    maps, models = present(results, mark), by_model(results)
    rows = [["", "slides (worst fold)", *maps], ["---", *["--:"] * (len(maps) + 1)]]
    for model, seeds in models.items():
        scores = [auc for seed in seeds for auc in seed.slide_aucs]
        cells = {n: v.mean() for n in maps if len(v := values(seeds, n, mark))}
        best = max((round(cells[n], 2) for n in cells if n not in NO_RIVALS), default=np.nan)
        shown = [_cell(cells.get(n), best=None if n in NO_RIVALS else best) for n in maps]
        rows.append([model, f"{np.mean(scores):.2f} ({min(scores):.2f})", *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: float | None, best: float | None) -> str:
    if value is None:
        return ""
    text = f"{round(value, 2) + 0.0:.2f}"  # + 0.0: there is no minus zero
    return f"**{text}**" if best is not None and round(value, 2) == best else text


def told(results: Sequence[Result]) -> list[str]:
    """Say in plain words what the tables hold."""
    lines, models = [], by_model(results)
    failed = [
        f"{result.model} in {low} of {len(result.slide_aucs)} folds"
        for result in results
        if (low := sum(auc < LEARNED for auc in result.slide_aucs))
    ]
    worst = min(min(result.slide_aucs) for result in results)
    lines.append(
        f"Not learned (an AUC over slides below {LEARNED}): {', '.join(failed)}. Their maps count "
        "all the same."
        if failed
        else f"Every model has learned in every fold: the worst AUC over slides is {worst:.2f}."
    )
    for mark, title in (("found", "finds the tumour best"), ("area", "is the most faithful")):
        wins: dict[str, list[str]] = {}
        for model, seeds in models.items():
            rivals = [name for name in present(seeds, mark) if name not in NO_RIVALS]
            means = {name: round(values(seeds, name, mark).mean(), 2) for name in rivals}
            for name in rivals:
                if means[name] == max(means.values()):
                    wins.setdefault(name, []).append(model)
        ranked = sorted(wins.items(), key=lambda item: -len(item[1]))
        words = "; ".join(f"{name} ({', '.join(of)})" for name, of in ranked)
        lines.append(f"Which map {title}, equals named twice: {words}.")
    for name in ("evidence, exact", "attention", "gradients"):
        means = {m: v.mean() for m, s in models.items() if len(v := values(s, name, "found"))}
        if means:
            (worse, least), *_, (better, most) = sorted(means.items(), key=lambda item: item[1]) * 2
            lines.append(
                f"{name.capitalize()}: from {least:.2f} ({worse}) to {most:.2f} ({better})."
            )
    return lines


def report(
    results: Sequence[Result], *, settings: Mapping[str, Any], command: str, image: str
) -> str:
    """Return what stands between the markers of the page."""
    recipe = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    slides, seeds = len(set(results[0].slides)), len({result.seed for result in results})
    minutes = sum(result.seconds for result in results) / 60
    tables = "\n\n".join(f"### {title}\n\n{table(results, mark)}" for mark, title in MARKS.items())
    words = "\n".join(f"- {line}" for line in told(results))
    return f"""```bash
{command}
```

```python
{recipe}
```

Means over {slides} slides with tumour, each explained by the one model of its run that had not seen
it; {seeds} seed{"" if seeds == 1 else "s"}. In bold the best of a row, chance and the token apart.
It took {minutes:.0f} minutes of one core, without what was there already of slides, features, runs.

![Every map against the truth, and its faithfulness]({image})

{words}

{tables}
"""


def picture(results: Sequence[Result]) -> "Figure":
    """Draw a row for each model and a dot for each map: against the truth, and its faithfulness."""
    models = by_model(results)
    maps = present(results, "found")
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(maps)}
    colours[TOKEN] = GREY
    figure = new_figure(10, 1.6 + 0.42 * len(models))
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"found": ("Tumour found", "AUC of patches"), "area": ("Faithfulness", "Area")}
    for axes, (mark, (title, across)) in zip(panels, titles.items(), strict=True):
        tidy(axes, title=title, across=across)
        axes.axvline(0.5 if mark == "found" else 0, color=GREY, lw=1, ls=(0, (4, 4)))
        for row, seeds in enumerate(models.values()):
            for place, name in enumerate(maps):
                found = values(seeds, name, mark)
                if len(found) and name != RANDOM:
                    up = row + 0.08 * (place - (len(maps) - 2) / 2)
                    low = np.quantile(found, 0.1)
                    shape = "D" if name == TOKEN else "o"
                    axes.plot([low, found.mean()], [up, up], color=colours[name], lw=1, alpha=0.45)
                    axes.plot(
                        found.mean(), up, shape, color=colours[name], ms=5, mec="white", mew=0.5,
                    )  # fmt: skip
        axes.set(ylim=(len(models) - 0.4, -0.6))
        axes.set_yticks(range(len(models)), labels=list(models))
    _legend(figure, [name for name in maps if name != RANDOM], colours)
    return figure


def _legend(figure: "Figure", names: Sequence[str], colours: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=colours[name], marker="D" if name == TOKEN else "o", ls="", ms=6)
        for name in names
    ]
    figure.legend(
        marks, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9,
        title="dot: mean over slides; line: down to the slide that nine of ten do better than",
        title_fontsize=8,
    )  # fmt: skip
