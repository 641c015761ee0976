"""The patches of a slide on their first two principal components."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class PrincipalPlane:
    """Patch vectors on their first two principal components, and the variance of each."""

    points: NDArray[np.float32]  # (N, 2)
    variance: tuple[float, float]  # as shares of the total


def principal_plane(patches: Float[Tensor, "N D"]) -> PrincipalPlane:
    """Return patches on their first two principal components, the longest side positive."""
    patches = patches.double()
    if not bool(patches.isfinite().all()):
        return PrincipalPlane(
            points=np.full((len(patches), 2), np.nan, np.float32), variance=(0, 0)
        )
    centred = patches - patches.mean(dim=0)
    values, vectors = torch.linalg.eigh(centred.mT @ centred)
    values, vectors = values.clamp(min=0).flip(0)[:2], vectors.flip(1)[:, :2]
    points = centred @ vectors
    signs = points.gather(0, points.abs().argmax(dim=0, keepdim=True)).sign()
    shares = values / centred.square().sum().clamp(min=1e-30)
    first, second = (float(share) for share in (*shares, *shares.new_zeros(2))[:2])
    return PrincipalPlane(
        points=(points * signs).detach().float().cpu().numpy(), variance=(first, second)
    )
