"""What the covariates of a slide add to each output of a model: exact terms beside the patches.

With FiLM a covariate also scales what the patches add. This belongs to both: it is a part of the
evidence of the patches, and each covariate has its exact share in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.models import FusedModel, MILModel
from caprmil.models.base import Output
from caprmil.targets import Contrast


@dataclass(frozen=True, eq=False, kw_only=True)
class CovariateTerm:
    """What one covariate adds to each output; nothing if it is that of the average slide."""

    name: str
    shown: str  # its value on the slide, e.g. 63
    term: NDArray[np.float64]  # (C,)
    scaling: NDArray[np.float64] | None = None  # (C,), FiLM: a part of the evidence of the patches

    @property
    def title(self) -> str:
        return f"{self.name}: {self.shown}" if self.shown else self.name

    def of(self, contrast: Contrast) -> float:
        """Return what it adds to a contrast."""
        return float(contrast.of(torch.from_numpy(self.term)))

    def scaling_of(self, contrast: Contrast) -> float | None:
        """Return by how much it changes what the patches add to a contrast, if it does."""
        if self.scaling is None:
            return None
        return float(contrast.of(torch.from_numpy(self.scaling)))


@torch.no_grad()
def covariate_terms(model: MILModel, output: Output) -> tuple[CovariateTerm, ...]:
    """Return the terms of the covariates in a model of one slide, in the order of the recipe.

    `output` is that of the model for the slide.
    """
    if not isinstance(model, FusedModel) or model.fixed is None:
        return ()
    fixed, scalings = model.fixed, list[NDArray[np.float64] | None]([None] * len(model.names))
    if fixed.scales is not None:
        scaled = fixed.scales @ output.embedding[0].to(fixed.scales)
        scalings = list(scaled.cpu().numpy())
    terms = fixed.terms.cpu().numpy()
    return tuple(
        CovariateTerm(name=name, shown=shown, term=term, scaling=scaling)
        for name, shown, term, scaling in zip(
            model.names, fixed.shown, terms, scalings, strict=True
        )
    )


def shares(patches: float, covariates: list[float]) -> tuple[float, list[float]]:
    """Return the share of the patches and of each covariate in the sum of the sizes of all terms.

    `patches` is the sum over all patches, which is one term.
    """
    total = abs(patches) + sum(map(abs, covariates)) or 1.0
    return abs(patches) / total, [abs(term) / total for term in covariates]
