"""Ablations and searches: metrics over the settings of a model, with their spread over folds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from caprmil.figures.style import (
    BLUE,
    VERMILLION,
    Metric,
    Values,
    caption,
    log_scale,
    new_figure,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAINT = "#CFCFCF"
MAX_NAMES = 8  # values that are named at their own ticks
LOG_SPAN = 20  # an axis that spans this factor is logarithmic
MAX_LETTERS = 45  # below a panel


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One choice of settings, and the value of each metric in each fold."""

    settings: Mapping[str, str]
    folds: Mapping[str, Values]
    chosen: bool = False


def ablation_panels(
    trials: Sequence[Trial], *, metrics: Sequence[Metric], about: str = ""
) -> "Figure":
    """Draw metrics over one setting, with a row of panels for each value of a second setting.

    A dot is a fold, the line their mean, the band one sample standard deviation. The means of the
    other rows are grey. A ring marks the chosen trial.
    """
    names = list(trials[0].settings)
    if len(names) not in (1, 2):
        raise ValueError(f"Panels are for one or two settings: {names=}")
    ticks = _values(trials, names[0])
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.settings[names[-1]] if len(names) == 2 else "", []).append(trial)
    height = 2.9 if len(groups) == 1 else 1.75
    figure = new_figure(0.7 + 3.7 * len(metrics), 1.0 + height * len(groups))
    grid = figure.subplots(len(groups), len(metrics), sharex=True, sharey="col", squeeze=False)
    for number, (value, members) in enumerate(groups.items()):
        row, last = grid[number], number == len(groups) - 1
        for axes, metric in zip(row, metrics, strict=True):
            title = "" if number else metric.long_title
            tidy(axes, title=title, xlabel=names[0] if last else "")
            for others in groups.values():
                if others is not members:
                    _mean_line(axes, others, ticks, metric.name, color=FAINT, lw=1)
            _spread(axes, members, ticks, metric.name)
        if len(names) == 2:
            row[0].set_ylabel(f"{names[1]} = {value}", fontsize=10)
    for axes in grid.flat:
        _name_ticks(axes, ticks)
    for axes, metric in zip(grid[0], metrics, strict=True):
        if not metric.higher_is_better:  # an error starts at 0
            axes.set_ylim(bottom=0)
    meaning = ("dot: one fold", "line: mean", "band: ± 1 std")
    ring = "ring: chosen on validation" if any(trial.chosen for trial in trials) else ""
    caption(figure, about, *meaning, ring)
    return figure


def search_panels(trials: Sequence[Trial], *, metric: Metric, about: str = "") -> "Figure":
    """Draw a metric over each setting of a search: a dot and its spread for each trial."""
    names = [name for name in trials[0].settings if len(_values(trials, name)) > 1]
    names = names or list(trials[0].settings)
    columns = 2 if len(names) == 4 else min(len(names), 3)
    lines = -(-len(names) // columns)
    figure = new_figure(0.7 + 3.3 * columns, 0.8 + 2.8 * lines)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        tidy(axes, xlabel=name)
        positions = _positions(axes, trials, name)
        for x, trial in zip(positions, trials, strict=True):
            mean, spread = _mean_and_spread(trial, metric.name)
            colour, front = (VERMILLION, 4) if trial.chosen else (BLUE, 3)
            style: dict[str, Any] = {"color": colour, "mec": "white", "mew": 0.6, "ms": 6.5}
            bar = (mean - spread, mean + spread)
            axes.plot((x, x), bar, color=colour, lw=1, alpha=0.35, zorder=front - 2)
            axes.plot(x, mean, "o", zorder=front, **style)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel(metric.long_title, fontsize=10)
    best = "orange: the chosen trial" if any(trial.chosen for trial in trials) else ""
    caption(figure, about, "dot: mean of the folds", "bar: ± 1 std", best)
    return figure


def _values(trials: Sequence[Trial], name: str) -> list[str]:
    """Return the values of a setting: numbers sorted, words in order of appearance."""
    values = list(dict.fromkeys(trial.settings[name] for trial in trials))
    return sorted(values, key=float) if all(map(_is_number, values)) else values


def _positions(axes: "Axes", trials: Sequence[Trial], name: str) -> list[float]:
    """Return the position of each trial: by value if there are many values, else by name."""
    values = _values(trials, name)
    if len(values) <= MAX_NAMES or not all(map(_is_number, values)):
        _name_ticks(axes, values)
        axes.set_xlim(-0.5, len(values) - 0.5)  # room for the names at both ends
        spread = 0.15 if len(values) < len(trials) else 0.0  # or equal values would overlap
        shifts = np.linspace(-spread, spread, len(trials))
        return [
            values.index(trial.settings[name]) + shift
            for trial, shift in zip(trials, shifts.tolist(), strict=True)
        ]
    numbers = [float(trial.settings[name]) for trial in trials]
    span = max(numbers) / min(numbers) if min(numbers) > 0 else 1
    if span >= LOG_SPAN:
        log_scale(axes, "x", (1.0, 2.0, 5.0) if span < 10 * LOG_SPAN else (1.0,))
    return numbers


def _name_ticks(axes: "Axes", names: list[str]) -> None:
    """Write names at the ticks, rotated if they are long."""
    long = sum(len(name) + 2 for name in names) > MAX_LETTERS
    style: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), labels=names, **(style if long else {}))


def _spread(axes: "Axes", trials: Sequence[Trial], ticks: list[str], metric: str) -> None:
    """Draw folds, mean and band of one row."""
    ordered = _in_order(trials, ticks)
    positions = [ticks.index(_first(trial)) for trial in ordered]
    means, stds = zip(*(_mean_and_spread(trial, metric) for trial in ordered), strict=True)
    low, high = np.subtract(means, stds), np.add(means, stds)
    axes.fill_between(positions, low, high, color=BLUE, alpha=0.13, lw=0)
    _mean_line(axes, trials, ticks, metric, color=BLUE, lw=2)
    for x, trial, mean in zip(positions, ordered, means, strict=True):
        values = np.asarray(trial.folds[metric], dtype=float)
        shifted = (
            x + np.linspace(-0.07, 0.07, len(values)) if len(values) > 1 else [x] * len(values)
        )
        axes.plot(shifted, values, "o", color=BLUE, ms=3.5, mec="white", mew=0.4, alpha=0.8)
        if trial.chosen:
            axes.plot(x, mean, "o", mfc="none", mec=VERMILLION, mew=2, ms=12, zorder=5)


def _mean_line(
    axes: "Axes", trials: Sequence[Trial], ticks: list[str], metric: str, **style: Any
) -> None:
    ordered = _in_order(trials, ticks)
    means = [_mean_and_spread(trial, metric)[0] for trial in ordered]
    axes.plot([ticks.index(_first(trial)) for trial in ordered], means, **style)


def _in_order(trials: Sequence[Trial], ticks: list[str]) -> list[Trial]:
    return sorted(trials, key=lambda trial: ticks.index(_first(trial)))


def _first(trial: Trial) -> str:
    return next(iter(trial.settings.values()))


def _mean_and_spread(trial: Trial, metric: str) -> tuple[float, float]:
    values = np.asarray(trial.folds[metric], dtype=float)
    values = values[~np.isnan(values)]
    mean = float(values.mean()) if len(values) else float("nan")
    return mean, float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
