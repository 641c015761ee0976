"""Thinking over: the MLP of a context block while it learns, in pieces that fit a cache.

Autograd keeps both sides of GELU, each four times as wide as a patch, and goes over them from end
to end. Here one side is kept, and a piece goes all the way before the next one comes. The gradients
are the same.

If all that is wanted of a bag is its mean, the second layer is not for every patch. With m a row of
dropout's factors and g a hidden row, sum(m * (W g + b)) is W * sum(m g^T), summed over its columns,
plus b * sum(m). The sum of products is kept, and is the gradient of W when the way back begins: a
third of the second layer's work is gone, and so is what it would bring for each patch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from caprmil.models.base import CHUNK as PIECE
from caprmil.models.base import Embedding, Patches
from caprmil.models.packing import Sizes

if TYPE_CHECKING:
    from caprmil.models.caprmil import ContextBlock

Rows = Float[Tensor, "n _"]


def in_pieces(block: "ContextBlock", rows: Float[Tensor, "B N _"]) -> bool:
    """Tell whether a block learns from a bag in pieces: on a CPU, in its own precision."""
    return (
        block.training
        and torch.is_grad_enabled()
        and len(rows) == 1
        and rows.device.type == "cpu"
        and block.norm_think.weight.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def think(block: "ContextBlock", patches: Patches) -> Patches:
    """Return patches with what the MLP makes of them."""
    if not in_pieces(block, patches):
        return patches + block.dropout(block.think(block.norm_think(patches)))
    stay = block.dropout.draw(patches)[0]
    out = Thoughts.apply(  # type: ignore[no-untyped-call]
        patches.squeeze(0), stay, block.dropout.scale, block.norm_think.eps, *weights(block)
    )
    return out.unsqueeze(0)


def think_of_mean(
    block: "ContextBlock", patches: Float[Tensor, "1 N D"], sizes: Sizes
) -> Float[Tensor, "B D"]:
    """Return the mean of each packed bag, with what the MLP makes of its patches."""
    stay = block.dropout.draw(patches)[0]
    return MeanThoughts.apply(  # type: ignore[no-untyped-call]
        patches.squeeze(0), stay, block.dropout.scale, block.norm_think.eps, sizes, *weights(block)
    )


def weights(block: "ContextBlock") -> tuple[Tensor, ...]:
    norm = block.norm_think
    first, _, second = cast("tuple[nn.Linear, nn.GELU, nn.Linear]", block.think)
    return norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias


class Half:
    """The first half of the MLP, norm, linear layer and GELU: there, and back again."""

    def __init__(
        self,
        patches: Rows,
        hidden: Rows,
        eps: float,
        scale: Tensor,
        shift: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> None:
        self.patches, self.hidden, self.eps = patches, hidden, eps  # hidden: before GELU
        self.scale, self.shift, self.weight, self.bias = scale, shift, weight, bias

    def there(self, piece: slice) -> Rows:
        """Return what the second half sees of a piece."""
        normed = F.layer_norm(
            self.patches[piece], self.scale.shape, self.scale, self.shift, self.eps
        )
        torch.addmm(self.bias, normed, self.weight.mT, out=self.hidden[piece])
        return self.again(piece)

    def again(self, piece: slice) -> Rows:
        return F.gelu(self.hidden[piece])

    def turn(self) -> None:
        """Begin the way back: no gradients are known yet."""
        parameters = (self.scale, self.shift, self.weight, self.bias)
        self.slopes = [torch.zeros_like(each) for each in parameters]

    def back(self, piece: slice, slope: Rows) -> Rows:
        """Return the gradient of a piece, from that of what the second half saw; add to others."""
        patches, shape = self.patches[piece], list(self.scale.shape)
        normed, mean, rate = torch.native_layer_norm(
            patches, shape, self.scale, self.shift, self.eps
        )
        slope = torch.ops.aten.gelu_backward(slope, self.hidden[piece])
        scale, shift, weight, bias = self.slopes
        bias += slope.sum(dim=0)
        add_product(weight, slope.mT, normed)
        found, by_scale, by_shift = torch.ops.aten.native_layer_norm_backward(
            slope @ self.weight, patches, shape, mean, rate, self.scale, self.shift, [True] * 3
        )
        scale += by_scale
        shift += by_shift
        return found


class Thoughts(torch.autograd.Function):
    """Patches with what the MLP makes of them."""

    @staticmethod
    def forward(
        ctx: Any,
        patches: Rows,
        stay: Bool[Tensor, "n _"],
        growth: float,
        eps: float,
        *parameters: Tensor,
    ) -> Rows:
        *first, weight, bias = parameters
        hidden, out = patches.new_empty(len(patches), weight.shape[1]), torch.empty_like(patches)
        half = Half(patches, hidden, eps, *first)
        for piece in pieces(len(patches)):
            thought = torch.addmm(bias, half.there(piece), weight.mT)
            torch.addcmul(patches[piece], thought, stay[piece], value=growth, out=out[piece])
        ctx.growth, ctx.eps = growth, eps
        ctx.save_for_backward(stay, weight, patches, hidden, *first)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Rows) -> tuple[Tensor | None, ...]:
        stay, weight, patches, hidden, *first = ctx.saved_tensors
        half = Half(patches, hidden, ctx.eps, *first)
        half.turn()
        by_patches, by_weight = torch.empty_like(slope), torch.zeros_like(weight)
        by_bias = slope.new_zeros(len(weight))
        for piece in pieces(len(slope)):
            thought = (slope[piece] * stay[piece]).mul_(ctx.growth)
            by_bias += thought.sum(dim=0)
            add_product(by_weight, thought.mT, half.again(piece))
            back = half.back(piece, thought @ weight)
            torch.add(slope[piece], back, out=by_patches[piece])
        return by_patches, None, None, None, *half.slopes, by_weight, by_bias


class MeanThoughts(torch.autograd.Function):
    """The mean of each of some packed bags, of patches with what the MLP makes of them."""

    @staticmethod
    def forward(
        ctx: Any,
        patches: Rows,
        stay: Bool[Tensor, "n _"],
        growth: float,
        eps: float,
        sizes: Sizes,
        *parameters: Tensor,
    ) -> Embedding:
        *first, weight, bias = parameters
        hidden = patches.new_empty(len(patches), weight.shape[1])
        half, means = Half(patches, hidden, eps, *first), list[Tensor]()
        products, factors = list[Tensor](), list[Tensor]()
        for bag in bags(sizes):
            product = torch.zeros_like(weight)
            for piece in pieces(bag.stop, bag.start):
                add_product(product, stay[piece].to(weight.dtype).mT, half.there(piece))
            n = bag.stop - bag.start
            products.append(product.mul_(growth / n))
            factors.append(stay[bag].sum(dim=0, dtype=weight.dtype).mul_(growth / n))
            mean = patches[bag].mean(dim=0) + (weight * product).sum(dim=1)
            means.append(mean + bias * factors[-1])
        ctx.growth, ctx.eps, ctx.sizes = growth, eps, sizes
        known = (torch.stack(products), torch.stack(factors))
        ctx.save_for_backward(stay, weight, *known, patches, hidden, *first)
        return torch.stack(means)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Embedding) -> tuple[Tensor | None, ...]:
        stay, weight, products, factors, patches, hidden, *first = ctx.saved_tensors
        half = Half(patches, hidden, ctx.eps, *first)
        half.turn()
        by_patches = torch.empty_like(patches)
        for bag, own in zip(bags(ctx.sizes), slope, strict=True):
            n = bag.stop - bag.start
            back = weight * (own * (ctx.growth / n)).unsqueeze(-1)
            for piece in pieces(bag.stop, bag.start):
                found = half.back(piece, stay[piece].to(weight.dtype) @ back)
                torch.add(found, own / n, out=by_patches[piece])
        by_weight = torch.einsum("bd,bdf->df", slope, products)
        by_bias = (slope * factors).sum(dim=0)
        return by_patches, None, None, None, None, *half.slopes, by_weight, by_bias


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    torch.addmm(total, one, other, out=total)  # which torch counts as work; `addmm_` it does not


def bags(sizes: Sizes) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


def pieces(stop: int, start: int = 0) -> Iterator[slice]:
    for begin in range(start, stop, PIECE):
        yield slice(begin, min(begin + PIECE, stop))
