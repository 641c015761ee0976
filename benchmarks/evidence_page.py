"""Results of the benchmark of maps, and the page that shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caprmil.figures.style import COLOURS, GREY, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASS = "tumour"
RANDOM, TOKEN = "random", "best token (by the truth)"
MAPS = (
    *("sampled influence", "influence"),
    *("evidence", "perturbation", "integrated gradients", "gradients"),
    *("attention", "class attention", "patch scores", TOKEN, RANDOM),
)
REFERENCES = (TOKEN, RANDOM)  # not compared with the other maps
LEARNT = 0.8  # AUC over slides below which the maps of a model have no meaning

SCORES = {
    "found": "AUC of patches: at least half tumour against less than half",
    "clear": "AUC of clear patches: at least half tumour against none at all",
    "area": "Area between the deletion curves of tumour (the maximum is 1, chance is 0)",
}


class Job(NamedTuple):
    """One model, cross-validated from one seed."""

    model: str
    seed: int


@dataclass(frozen=True)
class Result:
    """The scores of a model on test slides, and of each of its maps on those with tumour."""

    model: str
    seed: int
    settings: str  # the digest of plan and models
    slide_aucs: list[float]  # by fold
    slides: list[str]
    maps: dict[str, dict[str, list[float]]]  # by map and score (see SCORES), one value per slide
    seconds: float

    @property
    def job(self) -> Job:
        return Job(self.model, self.seed)


def by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each model, of all seeds."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.model, []).append(result)
    return found


def values(seeds: Sequence[Result], name: str, score: str) -> NDArray[np.float64]:
    """Return a score of a map for each slide, of all seeds."""
    return np.concatenate([seed.maps.get(name, {}).get(score, []) for seed in seeds])


def present(results: Sequence[Result], score: str) -> list[str]:
    """Return the maps for which at least one model has the score."""
    return [name for name in MAPS if len(values(results, name, score))]


def table(results: Sequence[Result], score: str) -> str:
    """Return the mean of a score over slides, for each model and map, as a Markdown table."""
    maps, models = present(results, score), by_model(results)
    rows = [["", "slides (worst fold)", *maps], ["---", *["--:"] * (len(maps) + 1)]]
    for model, seeds in models.items():
        aucs = [auc for seed in seeds for auc in seed.slide_aucs]
        cells = {n: v.mean() for n in maps if len(v := values(seeds, n, score))}
        best = max((round(cells[n], 2) for n in cells if n not in REFERENCES), default=np.nan)
        shown = [_cell(cells.get(n), best=None if n in REFERENCES else best) for n in maps]
        rows.append([model, f"{np.mean(aucs):.2f} ({min(aucs):.2f})", *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cost_table(results: Sequence[Result]) -> str:
    """Return the CPU time of each map, as a multiple of a prediction of the same model."""
    maps = present(results, "cost")
    rows = [["", *maps], ["---", *["--:"] * len(maps)]]
    for model, seeds in by_model(results).items():
        costs = {name: values(seeds, name, "cost") for name in maps}
        rows.append([model, *(f"{np.median(c):.1f}" if len(c) else "" for c in costs.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: float | None, best: float | None) -> str:
    if value is None:
        return ""
    text = f"{round(value, 2) + 0.0:.2f}"  # + 0.0: no minus zero
    return f"**{text}**" if best is not None and round(value, 2) == best else text


def summary(results: Sequence[Result]) -> list[str]:
    """Return the main results as sentences."""
    lines, models = [], by_model(results)
    failed = [
        f"{result.model} in {low} of {len(result.slide_aucs)} folds"
        for result in results
        if (low := sum(auc < LEARNT for auc in result.slide_aucs))
    ]
    worst = min(min(result.slide_aucs) for result in results)
    lines.append(
        f"Not learnt (an AUC over slides below {LEARNT}): {', '.join(failed)}. Their maps are "
        "included."
        if failed
        else f"Every model has learnt in every fold: the worst AUC over slides is {worst:.2f}."
    )
    titles = {"found": "The map that finds the tumour best", "area": "The most faithful map"}
    for score, title in titles.items():
        wins: dict[str, list[str]] = {}
        for model, seeds in models.items():
            maps = [name for name in present(seeds, score) if name not in REFERENCES]
            means = {name: round(values(seeds, name, score).mean(), 2) for name in maps}
            for name in maps:
                if means[name] == max(means.values()):
                    wins.setdefault(name, []).append(model)
        ranked = sorted(wins.items(), key=lambda item: -len(item[1]))
        text = "; ".join(f"{name} ({', '.join(of)})" for name, of in ranked)
        lines.append(f"{title}, with ties: {text}.")
    for name in ("evidence", "attention", "gradients"):
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
    """Return the generated part of the page."""
    recipe = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    slides, seeds = len(set(results[0].slides)), len({result.seed for result in results})
    minutes = sum(result.seconds for result in results) / 60
    tables = "\n\n".join(
        f"### {title}\n\n{table(results, score)}" for score, title in SCORES.items()
    )
    lines = "\n".join(f"- {line}" for line in summary(results))
    return f"""```bash
{command}
```

```python
{recipe}
```

Means over {slides} slides with tumour, each explained by the one model of its run that had not seen
it; {seeds} seed{"" if seeds == 1 else "s"}. Bold: the best map of a row,
except the random one and the token.
It took {minutes:.0f} minutes on one core, without slides, features and runs that existed already.

![Every map compared with the truth, and its faithfulness]({image})

{lines}

{tables}

### Cost: CPU time as a multiple of one prediction, median over slides

{cost_table(results)}
"""


def picture(results: Sequence[Result]) -> "Figure":
    """Draw a row for each model and a dot for each map: AUC for tumour, and faithfulness."""
    models = by_model(results)
    maps = present(results, "found")
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(maps)}
    shapes = {name: "os"[n // len(COLOURS) % 2] for n, name in enumerate(maps)}
    colours[TOKEN], shapes[TOKEN] = GREY, "D"
    figure = new_figure(10, 1.6 + 0.42 * len(models))
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"found": ("Tumour found", "AUC of patches"), "area": ("Faithfulness", "Area")}
    for axes, (score, (title, label)) in zip(panels, titles.items(), strict=True):
        tidy(axes, title=title, xlabel=label)
        axes.axvline(0.5 if score == "found" else 0, color=GREY, lw=1, ls=(0, (4, 4)))
        for row, seeds in enumerate(models.values()):
            for number, name in enumerate(maps):
                found = values(seeds, name, score)
                if len(found) and name != RANDOM:
                    up = row + 0.08 * (number - (len(maps) - 2) / 2)
                    low = np.quantile(found, 0.1)
                    axes.plot([low, found.mean()], [up, up], color=colours[name], lw=1, alpha=0.45)
                    style = {"color": colours[name], "ms": 5, "mec": "white", "mew": 0.5}
                    axes.plot(found.mean(), up, shapes[name], **style)
        axes.set(ylim=(len(models) - 0.4, -0.6))
        axes.set_yticks(range(len(models)), labels=list(models))
    _legend(figure, [name for name in maps if name != RANDOM], colours, shapes)
    return figure


def _legend(
    figure: "Figure", names: Sequence[str], colours: Mapping[str, str], shapes: Mapping[str, str]
) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=colours[name], marker=shapes[name], ls="", ms=6) for name in names
    ]
    figure.legend(
        marks, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9,
        title="dot: mean over slides; line: down to the 10th percentile",
        title_fontsize=8,
    )  # fmt: skip
