"""What the covariates of a slide add to each output of a model: exact terms beside the patches."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.models import MILModel, SlideModel
from caprmil.targets import Contrast


@dataclass(frozen=True, eq=False, kw_only=True)
class CovariateTerm:
    """What one covariate adds to each output; nothing if it is that of the average slide."""

    name: str
    shown: str  # its value on the slide, e.g. 63
    term: NDArray[np.float64]  # (C,)

    @property
    def title(self) -> str:
        return f"{self.name}: {self.shown}" if self.shown else self.name

    def of(self, contrast: Contrast) -> float:
        """Return what it adds to a contrast."""
        return float(contrast.of(torch.from_numpy(self.term)))


def covariate_terms(model: MILModel) -> tuple[CovariateTerm, ...]:
    """Return the terms of the covariates in a model of one slide, in the order of the recipe."""
    if not isinstance(model, SlideModel):
        return ()
    return tuple(
        CovariateTerm(name=name, shown=shown, term=np.array(term))
        for name, (shown, term) in model.covariate_terms.items()
    )


def shares(patches: float, covariates: list[float]) -> tuple[float, list[float]]:
    """Return the share of the patches and of each covariate in the sum of the sizes of all terms.

    `patches` is the sum over all patches, which is one term.
    """
    total = abs(patches) + sum(map(abs, covariates)) or 1.0
    return abs(patches) / total, [abs(term) / total for term in covariates]
