"""Every model at a small width, for tests of what is done with a model."""

from typing import Any

import torch

from caprmil.models import MILModel, create

NYSTROM = {"dim": 16, "heads": 2, "landmarks": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "caprmil": {"dim": 16, "heads": 2, "tokens": 3},
    "mean": {"dim": 16},
    "abmil": {"dim": 16, "hidden": 8},
    "clam": {"dim": 16, "hidden": 8},
    "dsmil": {"hidden": 8},
    "dtfd": {"dim": 16, "hidden": 8},
    "transmil": NYSTROM,
    "dgrmil": NYSTROM,
    "bayesmil": {"dim": 16, "hidden": 8, "draws": 4},
    "sgpmil": {"dims": (16, 8), "gp_dim": 8, "inducing": 8, "draws": 4},
}


def small_model(
    name: str, in_dim: int, n_outputs: int, *, seed: int = 0, **settings: Any
) -> MILModel:
    """Return an untrained model in evaluation mode. A model without settings here keeps its own."""
    torch.manual_seed(seed)
    settings = SETTINGS.get(name.partition("+")[0], {}) | settings
    return create(name, in_dim, n_outputs, **settings).eval()
