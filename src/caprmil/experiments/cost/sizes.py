"""What can be counted: parameters, and floating-point operations at a bag size."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from caprmil.models import MILModel


class Bag(NamedTuple):
    """A bag of random patches on a square, for models that ask where a patch lies."""

    features: Tensor
    grid: Tensor


def random_bag(model: MILModel, n_patches: int, seed: int = 0) -> Bag:
    """Return a bag that the model can read, on its device."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, n_patches, model.in_dim, generator=generator)
    side = max(1, round(n_patches**0.5))
    cells = torch.arange(n_patches)
    grid = torch.stack([cells % side, cells // side], dim=-1)[None]
    return Bag(features.to(device), grid.to(device))


def parameters(model: MILModel) -> int:
    """Count the trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def flops(model: MILModel, n_patches: int = 1000) -> int:
    """Count the operations of one evaluation pass, two for a multiplication with an addition.

    Matrix products only, as torch's own counter has it. It does not see into the fused attention
    of the CPU, so attention is worked out in its plain form here.
    """
    was_training = model.training
    bag = random_bag(model, n_patches)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model.eval()(bag.features, grid=bag.grid)
    model.train(was_training)
    return int(counter.get_total_flops())
