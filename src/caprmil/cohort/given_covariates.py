"""Covariates that are given as values in Python, not as columns of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from caprmil.cohort.covariates import Covariates, read_covariates
from caprmil.errors import CohortError
from caprmil.io.findings import Findings


def given_covariates(
    values: Mapping[str, Mapping[str, Any]],
    categorical: Sequence[str] = (),
    *,
    names: Sequence[str] | None = None,
) -> Covariates:
    """Return the covariates of bags, from the values of each by name. None and NaN are missing.

    With `names`, these must be their names, and the values may be any: the statistics are known.
    """
    expected = tuple(next(iter(values.values())) if names is None else names)
    for bag, own in values.items():
        if {*own} != {*expected}:
            others = "the model was fitted on" if names is not None else "the first bag has"
            raise CohortError(
                f"{bag.capitalize()} has the covariates {', '.join(map(str, own)) or 'none'}; "
                f"{others} {', '.join(expected)}. Give every bag the same, None where unknown."
            )
    rows = {
        bag: {name: "" if pd.isna(own[name]) else str(own[name]) for name in expected}
        for bag, own in values.items()
    }
    found = Findings()
    read = read_covariates(expected, categorical, rows, {}, found, required=names is None)
    if read is None or found.problems:
        text = "\n- ".join(["The covariates cannot be used as they are.", *found.problems])
        raise CohortError(text.replace("[data] ", ""))
    return read
