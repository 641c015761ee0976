"""Thinking over in pieces: the same answers and gradients as autograd's own."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caprmil.experiments.cost import LiveTensors
from caprmil.models import thinking
from caprmil.models.caprmil import CAPRMIL, ContextBlock
from plain import PlainCAPRMIL


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking, "PIECE", 7)


@pytest.fixture
def block() -> ContextBlock:
    torch.manual_seed(0)
    made = ContextBlock(
        12, heads=3, tokens=2, mlp_ratio=2, dropout=0.3, learn_temperature=True
    ).double()
    torch.nn.init.normal_(made.norm_think.weight)
    torch.nn.init.normal_(made.norm_think.bias)
    return made


def by_autograd(block: ContextBlock, patches: Tensor) -> Tensor:
    return patches + block.dropout(block.think(block.norm_think(patches)))


def slopes(block: ContextBlock, patches: Tensor, result: Tensor) -> Iterator[Tensor]:
    """The gradients of some function of a result, by the patches and by every weight of the MLP."""
    block.zero_grad()
    patches.grad = None
    (result * torch.linspace(-1, 1, result.numel()).double().view(result.shape)).sum().backward()
    for leaf in (patches, *thinking.weights(block)):
        assert leaf.grad is not None
        yield leaf.grad.clone()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("n", [1, 7, 30])
def test_patches_and_gradients_are_autograds(block: ContextBlock, n: int, dropout: float) -> None:
    block.dropout.p = dropout
    patches = torch.randn(1, n, 12).double().requires_grad_()
    torch.manual_seed(1)
    wanted = by_autograd(block, patches)
    torch.manual_seed(1)  # the same entries fall out
    found = thinking.think(block, patches)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close([*slopes(block, patches, found)], [*slopes(block, patches, wanted)])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("sizes", [(30,), (1,), (9, 1, 20)])
def test_means_and_their_gradients_are_autograds(
    block: ContextBlock, sizes: tuple[int, ...], dropout: float
) -> None:
    block.dropout.p = dropout
    patches = torch.randn(1, sum(sizes), 12).double().requires_grad_()
    torch.manual_seed(1)
    whole = by_autograd(block, patches)[0]
    wanted = torch.stack([bag.mean(dim=0) for bag in whole.split(sizes)])
    torch.manual_seed(1)
    found = thinking.think_of_mean(block, patches, sizes)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close([*slopes(block, patches, found)], [*slopes(block, patches, wanted)])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pool", ["mean", "gated"])
def test_a_model_learns_the_same_as_from_a_padded_batch(pool: str, depth: int) -> None:
    """A batch of two bags is left to autograd; a bag alone goes in pieces."""
    torch.manual_seed(0)
    model = CAPRMIL(6, 2, dim=12, heads=3, tokens=2, depth=depth, dropout=0, pool=pool).double()
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    bag = torch.randn(1, 20, 6).double()
    twice = model(torch.cat([bag, bag])).logits
    once = model(bag).logits
    torch.testing.assert_close(once.expand(2, -1), twice)
    wanted = torch.autograd.grad(twice.square().sum() / 2, list(model.parameters()))
    torch.testing.assert_close(
        torch.autograd.grad(once.square().sum(), list(model.parameters())), wanted
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_packed_bags_teach_what_padded_ones_do(depth: int) -> None:
    torch.manual_seed(0)
    model = CAPRMIL(6, 2, dim=12, heads=3, tokens=2, depth=depth, dropout=0).double()
    sizes = (9, 1, 20)
    packed = torch.randn(1, 30, 6).double()
    mask = torch.arange(20) < torch.tensor(sizes)[:, None]
    padded = torch.zeros(3, 20, 6).double().masked_scatter(mask[..., None], packed)
    one, other = model(packed, sizes=sizes), model(padded, mask=mask)
    torch.testing.assert_close(one.logits, other.logits)
    torch.testing.assert_close(one.attention, other.attention)
    for own, wanted in zip(one.assignments, other.assignments, strict=True):
        torch.testing.assert_close(own, wanted)
    slopes = (
        torch.autograd.grad(o.logits.square().sum(), model.parameters()) for o in (one, other)
    )
    torch.testing.assert_close(*slopes)


def test_a_graph_that_is_retained_gives_its_gradients_again(block: ContextBlock) -> None:
    patches = torch.randn(1, 20, 12).double().requires_grad_()
    for result in (thinking.think(block, patches), thinking.think_of_mean(block, patches, (20,))):
        loss = result.square().sum()
        inputs = (patches, *thinking.weights(block))
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, inputs), first)


def test_what_is_frozen_gets_no_gradient(block: ContextBlock) -> None:
    patches = torch.randn(1, 20, 12).double().requires_grad_()
    block.think[0].weight.requires_grad_(False)
    thinking.think_of_mean(block, patches, (20,)).sum().backward()
    assert block.think[0].weight.grad is None
    assert block.think[2].weight.grad is not None


def test_a_step_takes_less_than_half_of_the_memory_of_the_equations() -> None:
    bag, plain = torch.randn(1, 3000, 64), PlainCAPRMIL(CAPRMIL(64, 2))
    peaks = []
    for model in (CAPRMIL(64, 2), plain):
        with LiveTensors(exclude=[*model.parameters(), bag]) as live:
            model(bag).logits.square().sum().backward()
        peaks.append(live.peak)
    assert peaks[0] < 0.5 * peaks[1]


def test_in_other_precisions_and_without_learning_autograd_does_it(block: ContextBlock) -> None:
    patches = torch.randn(1, 5, 12)
    assert thinking.in_pieces(block, patches)
    with torch.no_grad():
        assert not thinking.in_pieces(block, patches)
    with torch.autocast("cpu", torch.bfloat16):
        assert not thinking.in_pieces(block, patches)
    assert not thinking.in_pieces(block, torch.randn(2, 5, 12))
    assert not thinking.in_pieces(block.eval(), patches)
    assert not thinking.in_pieces(block.train().bfloat16(), patches)


def test_patches_in_context_are_to_be_had_where_gradients_are_on() -> None:
    model = CAPRMIL(6, 2, dim=12, heads=3, tokens=2).eval()
    bag = torch.randn(1, 20, 6)
    wanted, _ = model.context(bag, torch.ones(1, 20, dtype=torch.bool))
    torch.testing.assert_close(model.in_context(bag), wanted.detach())
