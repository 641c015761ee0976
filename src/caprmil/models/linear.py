"""Linear layers of float32 on the CPU, computed by oneDNN where that is faster than MKL.

torch computes products of float32 with MKL, which does not use AVX-512 on CPUs of AMD. oneDNN, with
which torch computes convolutions, does: the products of a slide take less than half the time
(docs/performance.md). Both round in another order, and nothing else differs.
`torch.backends.mkldnn.enabled = False` switches oneDNN off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = 2**21
"""Multiplications of a product; smaller ones are faster with MKL, which is called in less time."""


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_linear(network: nn.Module) -> None:
    """Let `linear` compute the linear layers of a network, in place."""
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows @ weight.T + bias`, as `torch.nn.functional.linear` does."""
    small = rows.numel() * len(weight) < SMALL
    if small or not (mkl_is_slow() and onednn_computes(rows, weight)):
        return F.linear(rows, weight, bias)
    flat = rows.flatten(0, -2)
    if torch.is_grad_enabled():
        output = _Linear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    else:
        output = _product(flat, weight, bias)
    return output.unflatten(0, rows.shape[:-1]) if rows.ndim != 2 else output


def product(first: Tensor, second: Tensor) -> Tensor:
    """Return the matrix product `first @ second`."""
    return linear(first, second.mT)


@contextmanager
def only_torch() -> Iterator[None]:
    """Leave all linear layers to torch's own products.

    `torch.backends.mkldnn.flags` would warn of TF32 on CPUs.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@lru_cache
def mkl_is_slow() -> bool:
    """Tell whether this CPU has AVX-512 that MKL does not use."""
    info = Path("/proc/cpuinfo")
    amd = info.is_file() and "AuthenticAMD" in info.read_text(errors="replace")
    return amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def onednn_computes(*tensors: Tensor) -> bool:
    """Tell whether oneDNN may compute with these: not where a graph is recorded for elsewhere."""
    return (
        all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch._C._get_mkldnn_enabled()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # these operators are torch's own
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch.is_autocast_enabled("cpu")
    )


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """A linear layer whose gradients are products of oneDNN, and can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad
        for_rows = product(gradient, weight) if wants_rows else None
        for_weight = None
        if wants_weight:  # the form with fewer rows is faster
            if len(weight) < weight.shape[1]:
                for_weight = product(gradient.mT, rows)
            else:
                for_weight = product(rows.mT, gradient).mT
        return for_rows, for_weight, gradient.sum(dim=0) if wants_bias else None
