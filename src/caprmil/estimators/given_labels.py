"""Labels and weights as they are given to estimators."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets

from caprmil.errors import CohortError, RecipeError, shorten
from caprmil.features.batches import Sample


def as_weights(
    samples: Sequence[Sample], weights: Iterable[float], batch_size: int
) -> dict[str, float]:
    """Return the weight of each bag, relative to the mean of those that are not 0."""
    try:
        numbers = np.asarray(list(weights), dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise CohortError(f"sample_weight must be numbers ({problem}).") from problem
    if numbers.shape != (len(samples),):
        raise CohortError(
            f"sample_weight has shape {numbers.shape}, and there are {len(samples)} bags. Give one "
            "number per bag."
        )
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.any()):
        raise CohortError("sample_weight must be numbers of 0 or more, and not all of them 0.")
    if batch_size > 1:
        raise RecipeError(
            f"sample_weight weighs the loss of single bags, and batch_size is {batch_size}. Set "
            "batch_size=1."
        )
    relative = numbers / numbers[numbers > 0].mean()
    return {sample.slide: weight for sample, weight in zip(samples, relative.tolist(), strict=True)}


def as_survival(labels: Any) -> NDArray[np.float64]:
    """Return labels as (n, 2): time, and 1 for an event or 0 for a censored bag."""
    array = np.asarray(labels)
    try:
        if array.dtype.names is not None and len(array.dtype.names) == 2:  # scikit-survival's
            event, time = sorted(array.dtype.names, key=lambda name: array[name].dtype.kind != "b")
            array = np.stack([array[time], array[event]], axis=1)
        rows = array.astype(np.float64)
    except (TypeError, ValueError) as problem:
        raise CohortError(f"Labels must be numbers: a time and an event ({problem}).") from problem
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise CohortError(
            f"Labels must be (bags, 2), a time and an event each, not of shape {array.shape}."
        )
    if not (np.isfinite(rows).all() and (rows[:, 0] >= 0).all()):
        raise CohortError("Times must be numbers of 0 or more. Remove bags without one.")
    if not set(rows[:, 1]) <= {0.0, 1.0}:
        raise CohortError("Events must be 0 or 1, in the second column, after the times.")
    if not rows[:, 1].any():
        raise CohortError("No bag has the event: nothing can be learned from them.")
    return rows


def as_classes(labels: Iterable[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the classes, sorted, and the number of each label's class among them."""
    column = np.asarray(labels if hasattr(labels, "__array__") else list(labels))
    if column.ndim != 1:
        raise CohortError(f"Labels must be one per bag, not of shape {column.shape}.")
    try:
        classes, numbers = np.unique(column, return_inverse=True)
    except TypeError as problem:
        raise CohortError(
            f"Labels must be of one type that can be sorted ({problem}). Pass text or numbers."
        ) from problem
    if len(classes) < 2:
        raise CohortError(
            f"All labels are {classes.tolist()}. A classifier needs bags of at least two classes."
        )
    check_classification_targets(column)
    return classes, numbers


def in_grade_order(
    classes: NDArray[Any], numbers: NDArray[np.int64], grades: Sequence[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the grades, from low to high, and the number of each label's grade among them."""
    ordered = list(grades)
    if len(set(ordered)) < len(ordered):
        raise RecipeError(f"grades names one twice: {shorten(map(str, ordered))}.")
    if odd := [str(each) for each in classes.tolist() if each not in ordered]:
        raise CohortError(
            f"These labels are not among the grades: {shorten(odd)}. Name all grades, from low to "
            "high."
        )
    places = np.array([ordered.index(each) for each in classes.tolist()], dtype=np.int64)
    return np.asarray(ordered), places[numbers]
