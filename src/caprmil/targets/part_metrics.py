"""Metrics of a part among several targets, and means over parts. Missing labels do not count."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from caprmil.targets.metric import Answers, Labels, Metric, Values, Weights
from caprmil.targets.part import Part


def of_part(metric: Metric, part: Part) -> Metric:
    """Return a metric of a part as one of all labels and answers, `name.metric`."""

    def function(labels: Labels, answers: Answers) -> float:
        own = part.known_of(labels, answers)
        return metric.function(*own) if len(own[0]) else float("nan")

    def counted(labels: Labels) -> NDArray[np.bool_]:
        return part.target.known(part.labels_of(labels))

    def weighted(labels: Labels, answers: Answers, weights: Weights) -> Values:
        own = part.known_of(labels, answers)
        if not len(own[0]):
            return np.full(len(weights), np.nan)
        return metric.draws(*own, weights[:, counted(labels)])

    def influence(labels: Labels, answers: Answers, owners: NDArray[np.int64]) -> Values:
        assert metric.influence is not None
        known, found = counted(labels), np.zeros(len(labels))
        found[known] = metric.influence(*part.known_of(labels, answers), owners[known])
        return found

    def floor(answers: Answers, seed: int) -> tuple[float, float]:
        assert metric.floor is not None
        return metric.floor(part.answers_of(answers), seed)

    return replace(
        metric,
        name=f"{part.name}.{metric.name}",
        title=f"{part.name}: {metric.title}",
        function=function,
        applies=lambda _: True,
        weighted=weighted,
        influence=influence if metric.influence else None,
        floor=floor if metric.floor else None,
        counted=counted,
    )


def mean_of(
    name: str, title: str, metrics: Sequence[Metric], *, chance: float | None = None
) -> Metric:
    """Return the mean of metrics of parts, over those that have a value."""
    return weighted_mean(name, title, dict.fromkeys(metrics, (1.0, 0.0)), chance=chance)


def weighted_mean(
    name: str,
    title: str,
    metrics: Mapping[Metric, tuple[float, float]],
    *,
    chance: float | None = None,
) -> Metric:
    """Return the mean of `factor * metric + shift`, over the metrics that have a value."""

    def function(labels: Labels, answers: Answers) -> float:
        found = [a * m.function(labels, answers) + b for m, (a, b) in metrics.items()]
        return float(_mean(np.array(found)[:, None])[0])

    def weighted(labels: Labels, answers: Answers, weights: Weights) -> Values:
        rows = [a * m.draws(labels, answers, weights) + b for m, (a, b) in metrics.items()]
        return _mean(np.array(rows))

    def influence(labels: Labels, answers: Answers, owners: NDArray[np.int64]) -> Values:
        found = []
        for metric, (factor, _) in metrics.items():
            assert metric.influence is not None
            if not np.isnan(metric.function(labels, answers)):
                found.append(factor * metric.influence(labels, answers, owners))
        return np.asarray(np.mean(found, axis=0))

    return Metric(
        name=name,
        title=title,
        function=function,
        chance=chance,
        weighted=weighted,
        influence=influence if all(metric.influence for metric in metrics) else None,
    )


def _mean(rows: NDArray[np.float64]) -> Values:
    """Return the mean over rows, without NaN; NaN where all are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmean(rows, axis=0))
