"""What a model costs: parameters, and floating-point operations at a bag size."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from caprmil.models import MILModel


def parameters(model: MILModel) -> int:
    """Count the trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def flops(model: MILModel, n_patches: int = 1000) -> int:
    """Count the operations of one evaluation pass, two for a multiplication with an addition.

    Matrix products only, as torch's own counter has it.
    """
    was_training = model.training
    device = next(model.parameters()).device
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model.eval()(torch.zeros(1, n_patches, model.in_dim, device=device))
    model.train(was_training)
    return int(counter.get_total_flops())
