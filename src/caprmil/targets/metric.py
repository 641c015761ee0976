"""A metric: one record with its function, title, direction and chance level.

`labels` (n,) and `answers` (n, A) are what the target says they are: class numbers and
probabilities for a classification, numbers and one column for a regression. A metric without a
meaning on its input (the AUC of one class) is NaN.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import UnknownNameError

if TYPE_CHECKING:
    from caprmil.targets.target import Target

Labels: TypeAlias = NDArray[Any]
Answers: TypeAlias = NDArray[np.floating]
Weights: TypeAlias = NDArray[np.float64]  # draws x slides
Values: TypeAlias = NDArray[np.float64]

WEIGHTS = 1_000_000  # of slides in draws, at a time


class Spread(NamedTuple):
    """Mean and sample standard deviation, and how many values counted (the others were NaN)."""

    mean: float
    std: float
    counted: int


class Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A score of predictions. Everything that differs between metrics is a field of it."""

    name: str
    title: str
    function: Callable[[Labels, Answers], float]
    higher_is_better: bool = True
    chance: float | None = None
    """The value of predictions that know nothing, where it is the same for every cohort."""
    applies: "Callable[[Target], bool]" = lambda _: True
    biased: bool = False
    """Whether the metric reads too high on few slides, and higher in a bootstrap: draws are centred
    on the value where two models are compared, and it has no interval unless it is `centred`."""
    centred: bool = False
    """Whether a biased metric has an interval all the same, of draws that are centred on the value.
    It does not correct the value, which reads too high on few slides."""
    printed: bool = True
    """Whether `caprmil compare` prints the metric. Its files have every metric."""
    weighted: Callable[[Labels, Answers, Weights], Values] | None = None
    """The metric of many draws at once, each a row of weights on the slides. Without it, draws are
    scored one by one."""
    influence: Callable[[Labels, Answers, NDArray[np.int64]], Values] | None = None
    """How far each slide moves the metric, given the patient of each: its sum of squares over
    patients is the variance. A metric that has it is tested without a bootstrap."""
    floor: Callable[[Answers, int], tuple[float, float]] | None = None
    """Mean and spread that perfect predictions with these answers would read, from a seed."""
    variants: "Callable[[Target], Iterable[Metric]] | None" = None
    """The metrics that a target has instead of this one, where they depend on its settings: e.g.
    one for each horizon. They are computed with the target at hand."""
    counted: Callable[[Labels], NDArray[np.bool_]] | None = None
    """Which slides the metric counts, by their labels. By default all."""

    @property
    def has_interval(self) -> bool:
        """Whether the metric has an interval of its own."""
        return self.centred or not self.biased

    def around(self, value: float, drawn: Values) -> Values:
        """Return the draws of the metric for an interval: a centred one is moved to the value."""
        known = drawn[~np.isnan(drawn)]
        if not self.centred or not len(known) or np.isnan(value):
            return drawn
        return np.asarray(drawn - known.mean() + value)

    @property
    def long_title(self) -> str:
        """The title, with the direction if lower is better."""
        return self.title if self.higher_is_better else f"{self.title} (lower is better)"

    def draws(self, labels: Labels, answers: Answers, weights: Weights) -> Values:
        """Return the metric of each draw of slides."""
        if self.weighted is not None:
            return self.weighted(labels, answers, weights)
        return draw_by_draw(self.function, labels, answers, weights)


def draw_by_draw(
    function: Callable[[Labels, Answers], float],
    labels: Labels,
    answers: Answers,
    weights: Weights,
) -> Values:
    """Return a metric of each draw, on slides that are repeated as often as it holds them."""
    values = np.full(len(weights), np.nan)
    for draw, times in enumerate(weights.astype(np.int64)):
        if times.any():
            rows = np.repeat(np.arange(len(labels)), times)
            values[draw] = function(labels[rows], answers[rows])
    return values


METRICS: dict[str, dict[str, Metric]] = {}
"""Every metric, by kind of target and by name."""


def register_metric(kind: str, metric: Metric) -> Metric:
    """Add a metric for a kind of target. Scores, comparisons, figures and reports then have it."""
    METRICS.setdefault(kind, {})[metric.name] = metric
    return metric


def registered_metrics(target: "Target") -> dict[str, Metric]:
    """Return the registered metrics that apply to a target.

    A target has the metrics of its own kind, and those of the targets that it is derived from.
    """
    kinds = [vars(base)["kind"] for base in reversed(type(target).__mro__) if "kind" in vars(base)]
    known = {name: m for kind in kinds for name, m in METRICS.get(kind, {}).items()}
    return {
        each.name: each
        for m in known.values()
        if m.applies(target)
        for each in ([m] if m.variants is None else m.variants(target))
    }


def metrics_of(target: "Target", names: Iterable[str] | None = None) -> dict[str, Metric]:
    """Return the metrics of these names, or all that apply to a target."""
    found = target.metrics
    if names is None:
        return found
    names = list(names)
    for name in names:
        if name not in found:
            raise UnknownNameError(f"metric of {target}", name, found)
    return {name: found[name] for name in names}


def find_metric(name: str) -> Metric:
    """Return a metric by its name, whichever target it belongs to."""
    for metrics in METRICS.values():
        if name in metrics:
            return metrics[name]
    raise UnknownNameError(
        "metric", name, {name for metrics in METRICS.values() for name in metrics}
    )


def mean_and_spread(values: Iterable[float]) -> Spread:
    """Return mean, sample standard deviation and number of the values that are not NaN.

    The spread of a single value is NaN, not 0.
    """
    array = np.array(list(values), dtype=np.float64)
    array = array[~np.isnan(array)]
    mean = float(array.mean()) if len(array) else float("nan")
    std = float(array.std(ddof=1)) if len(array) > 1 else float("nan")
    return Spread(mean, std, len(array))


def bootstrap(
    labels: Labels,
    answers: Answers,
    patients: Sequence[str],
    metrics: Iterable[Metric],
    *,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return the percentile interval of each metric when patients are drawn with replacement.

    A patient brings all slides. Draws on which a metric is NaN do not count for it; with a single
    patient the interval is NaN. A draw repeats slides, which looks like miscalibration: intervals
    of biased metrics are too high, and may miss the value itself.
    """
    if len(patients) != len(labels):
        raise ValueError(f"Give one patient for each label. {len(patients)=}, {len(labels)=}")
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"{level=} must be between 0 and 1, and {draws=} at least 1.")
    metrics = list(metrics)
    unique, owner = np.unique(np.asarray(patients), return_inverse=True)
    values = np.full((len(metrics), draws), np.nan)
    rng = np.random.default_rng(seed)
    block = max(1, WEIGHTS // len(labels))
    for start in range(0, draws if len(unique) > 1 else 0, block):
        size = min(block, draws - start)
        drawn = [rng.integers(len(unique), size=len(unique)) for _ in range(size)]
        times = np.stack([np.bincount(each, minlength=len(unique)) for each in drawn])
        weights = times[:, owner].astype(np.float64)
        for row, metric in zip(values, metrics, strict=True):
            row[start : start + size] = metric.draws(labels, answers, weights)
    ends = [(1 - level) / 2, (1 + level) / 2]
    found = {}
    for metric, row in zip(metrics, values, strict=True):
        value = metric.function(labels, answers) if metric.centred else float("nan")
        found[metric.name] = _interval(metric.around(value, row), ends, positive=metric.centred)
    return found


def ratio(above: Values, below: Values | NDArray[np.int64]) -> Values:
    """Return the quotient; NaN over 0."""
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below != 0)


def _interval(values: Values, ends: list[float], *, positive: bool = False) -> Interval:
    """Return the percentiles of the draws that have a value; of an error they are not negative."""
    values = values[~np.isnan(values)]
    if not len(values):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(np.maximum(values, 0) if positive else values, ends)
    return Interval(float(low), float(high))
