"""Bags and covariates that are given in Python, as samples."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from caprmil.cohort.covariates import Column, encode
from caprmil.cohort.given_covariates import given_covariates
from caprmil.errors import BagError, CohortError
from caprmil.features import bags as bag_files
from caprmil.features.bag_files import inspect
from caprmil.features.bags import Bag
from caprmil.features.batches import Sample

BagLike: TypeAlias = NDArray[Any] | Tensor | Bag | str | PathLike[str]
"""An array (patches, features), a tensor of that shape, a bag, or the path of a bag's file."""
Bags: TypeAlias = Sequence[BagLike | tuple[BagLike, Mapping[str, Any]]]
"""Bags, or pairs of a bag and its covariates by name: numbers, texts, or None where unknown."""


def as_samples(bags: Bags) -> list[Sample]:
    """Check bags of any kind and name them by their number. Files are read later."""
    if isinstance(bags, str | PathLike | Bag):
        raise BagError("This is one bag. Pass a list of bags, also for a single bag.")
    if getattr(bags, "ndim", None) == 2:
        raise BagError(
            f"Bags are a list of (patches, features) arrays, not one array of shape "
            f"{tuple(bags.shape)}. Pass [array] if it is a single bag."  # type: ignore[attr-defined]
        )
    given: Sequence[Any] = bags
    alone = [each[0] if _is_pair(each) else each for each in given]
    samples = [Sample(f"bag {number}", as_bag(bag, number)) for number, bag in enumerate(alone)]
    if not samples:
        raise BagError("There are no bags. Pass at least one.")
    return samples


def _is_pair(bag: Any) -> bool:
    """Return whether this is a bag with covariates."""
    return isinstance(bag, tuple) and len(bag) == 2 and isinstance(bag[1], Mapping | pd.Series)


def covariates_of(bags: Bags) -> dict[str, dict[str, Any]] | None:
    """Return the covariates of bags by the names of `as_samples`; None if no bag has some."""
    pairs: list[Any] = [bag for bag in bags if _is_pair(bag)]
    if not pairs:
        return None
    if len(pairs) < len(bags):
        raise CohortError(
            f"Only {len(pairs)} of {len(bags)} bags have covariates. Pass pairs for all of them, "
            "with None for values that are not known."
        )
    return {f"bag {number}": dict(values) for number, (_, values) in enumerate(pairs)}


def with_covariates(
    samples: Sequence[Sample], bags: Bags, columns: Sequence[Column]
) -> list[Sample]:
    """Return samples of bags with their covariates, if the model reads some."""
    values = covariates_of(bags)
    if not columns:
        if values is not None:
            raise CohortError(
                "The model was fitted without covariates. Pass bags, not pairs of a bag and its "
                "covariates."
            )
        return list(samples)
    names = [column.name for column in columns]
    if values is None:
        raise CohortError(
            f"The model reads covariates ({', '.join(names)}). Pass pairs of a bag and its "
            f'covariates: (bag, {{"{names[0]}": ...}}).'
        )
    known = given_covariates(values, names=names)
    return [
        sample._replace(covariates=encode(columns, known.of(sample.slide))) for sample in samples
    ]


def as_bag(bag: BagLike, number: int) -> Path | Bag:
    """Return a bag that is checked, or the path of its file."""
    if isinstance(bag, str | PathLike):
        return Path(bag)
    if isinstance(bag, Bag):
        return bag
    try:
        array = bag.detach().cpu().float().numpy() if isinstance(bag, Tensor) else np.asarray(bag)
        if array.dtype.kind in "biu":  # counts and flags are features too
            array = array.astype(np.float32)
        if array.ndim != 2:
            raise BagError(f"It has shape {array.shape}. A bag is (patches, features).")
        return bag_files.from_arrays(array)
    except BagError as problem:
        raise BagError(f"Bag {number} cannot be used. {problem}") from problem


def common_width(samples: Sequence[Sample], fitted: int | None = None) -> int:
    """Return the number of features per patch: the same in all bags, and as in `fit`."""
    widths = [
        sample.bag.info.width if isinstance(sample.bag, Bag) else inspect(sample.bag).width
        for sample in samples
    ]
    expected = fitted or widths[0]
    for sample, width in zip(samples, widths, strict=True):
        if width != expected:
            others = "the model was fitted on" if fitted else "the bags before it have"
            raise BagError(
                f"{sample.slide.capitalize()} has patches of {width} features; {others} "
                f"{expected}. Use the features of one encoder for all bags."
            )
    return expected
