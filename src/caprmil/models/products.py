"""Linear layers on a CPU by oneDNN, where it is faster than MKL, which torch takes by default.

MKL keeps its AVX-512 kernels for processors of Intel. On those of AMD with AVX-512, oneDNN, which
is part of torch too, takes less than half the time. Results are equal up to rounding.
"""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SMALLEST = 32  # inputs and outputs: a product with fewer of them is faster in MKL
# oneDNN compiles a kernel for each number of rows, and keeps 1,024 of them. Up to LARGE rows, only
# multiples of QUANTUM are given to it, and MKL has the others.
QUANTUM, LARGE = 32, 2048


class Linear(nn.Linear):
    """A linear layer, by oneDNN where that is faster."""

    def forward(self, values: Float[Tensor, "*rows A"]) -> Float[Tensor, "*rows O"]:
        return linear(values, self.weight, self.bias)


def use_linear(network: nn.Module) -> None:
    """Let `linear` compute the linear layers of a network, in place."""
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


@contextmanager
def only_torch() -> Iterator[None]:
    """Leave all products to torch. `torch.backends.mkldnn.flags` would warn of TF32 on CPUs."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def linear(
    values: Float[Tensor, "*rows A"], weight: Float[Tensor, "O A"], bias: Tensor | None
) -> Float[Tensor, "*rows O"]:
    """Return `F.linear`, by oneDNN where that is faster."""
    if values.dtype != weight.dtype or not _is_faster(values, weight.shape):
        return F.linear(values, weight, bias)
    rows = values.view(-1, values.shape[-1])
    layer: Any = _Linear.apply if torch.is_grad_enabled() else _linear
    found: Tensor = layer(rows, weight, bias)
    return found.view(*values.shape[:-1], -1)


def sizes_by_speed(rows: Float[Tensor, "n A"]) -> list[int]:
    """Return how many rows oneDNN and MKL get, to split them: saves copying wide outputs."""
    if not _is_faster(rows, (rows.shape[1],)):
        return [len(rows)]
    n = _rows_of_onednn(len(rows))
    return [len(rows)] if n in (0, len(rows)) else [n, len(rows) - n]


def sum_of_products(
    one: Float[Tensor, "*batch n A"], other: Float[Tensor, "*batch n O"]
) -> Float[Tensor, "*batch A O"]:
    """Return the sum over the rows of their outer products, by oneDNN where that is faster."""
    rows = one.ndim == other.ndim == 2 and other.is_contiguous() and one.dtype == other.dtype
    if not (rows and _is_faster(one, (one.shape[1], other.shape[1]))):
        return one.mT @ other
    if not torch.is_grad_enabled():
        return _sum_of_products(one, other)
    found: Tensor = _SumOfProducts.apply(one, other)  # type: ignore[no-untyped-call]
    return found


def onednn_computes(*tensors: Tensor) -> bool:
    """Return whether oneDNN may compute with these: not where a graph is recorded for elsewhere."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and all(each.device.type == "cpu" and each.dtype == torch.float32 for each in tensors)
        and has_onednn()
        and torch._C._get_mkldnn_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _is_faster(values: Tensor, shape: Sequence[int]) -> bool:
    """Return whether oneDNN is faster for a product of these values; `shape` is that without N."""
    return (
        onednn_computes(values)  # first: a graph that is recorded has no other condition
        and onednn_is_faster()
        and values.is_contiguous()
        and values.numel() >= QUANTUM * values.shape[-1]
        and min(shape) >= SMALLEST
    )


@cache
def has_onednn() -> bool:
    """Return whether torch has oneDNN, and its own operators of it that are called here."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    names = ("_linear_pointwise", "_convolution_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in names)


@cache
def has_avx() -> bool:
    """Return whether this is a CPU on whose kind the operators of oneDNN were tried."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


@cache
def onednn_is_faster() -> bool:
    """Return whether this machine has AVX-512 that MKL does not use."""
    return (
        has_onednn()
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in _processor()
    )


def _processor() -> str:
    """Return a text that names the maker of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return platform.processor()
    return next((line for line in lines if line.startswith("vendor_id")), "")


def _onednn(
    rows: Float[Tensor, "n A"], weight: Float[Tensor, "O A"], bias: Tensor | None = None
) -> Float[Tensor, "n O"]:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def _linear(
    rows: Float[Tensor, "n A"], weight: Float[Tensor, "O A"], bias: Tensor | None = None
) -> Float[Tensor, "n O"]:
    n = _rows_of_onednn(len(rows))
    if n == len(rows):
        return _onednn(rows, weight, bias)
    return torch.cat([_onednn(rows[:n], weight, bias), F.linear(rows[n:], weight, bias)])


def _sum_of_products(
    one: Float[Tensor, "n A"], other: Float[Tensor, "n O"]
) -> Float[Tensor, "A O"]:
    """Return the sum over the rows of their outer products."""
    if one.shape[1] > other.shape[1]:  # the other order is slower
        return _sum_of_products(other, one).mT
    n = _rows_of_onednn(len(one))
    found = _onednn(one[:n].mT, other[:n].mT)
    return found if n == len(one) else found.addmm_(one[n:].mT, other[n:])


def _rows_of_onednn(n: int) -> int:
    return n if n > LARGE else n - n % QUANTUM


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()
        return (
            _linear(gradient, weight.mT) if of_rows else None,
            _sum_of_products(gradient, rows) if of_weight else None,
            gradient.sum(dim=0) if of_bias else None,
        )


class _SumOfProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return _sum_of_products(one, other)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        one, other = ctx.saved_tensors
        of_one, of_other = ctx.needs_input_grad
        return (
            _linear(other, gradient) if of_one else None,
            _linear(one, gradient.mT) if of_other else None,
        )
