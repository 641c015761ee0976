"""The mean after an MLP, computed from sums: values and gradients equal the MLP on every patch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fast_forms import check, gradients, make_model, plain, without_dropout
from torch import Tensor, nn

from caprmil.experiments.cost import LiveTensors
from caprmil.models import CAPRMIL, mean_mlp, recompute
from caprmil.models.context import MLP, ContextBlock
from caprmil.models.mean_mlp import MeanAfterMLP, means_after_mlp
from caprmil.models.packing import mask_from_sizes, pad_packed
from plain import PlainCAPRMIL


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_mlp, "CHUNK", 7)


@pytest.fixture
def block() -> ContextBlock:
    torch.manual_seed(0)
    layer = ContextBlock(
        12, heads=3, tokens=2, mlp_ratio=2, dropout=0.3, learn_temperature=True
    ).double()
    nn.init.normal_(layer.norm_mlp.weight)
    nn.init.normal_(layer.norm_mlp.bias)
    return layer


def sums_and_reference(
    block: ContextBlock, patches: Tensor, sizes: tuple[int, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the means and their gradients: from sums, and from the MLP on every patch."""

    def on_every_patch() -> Tensor:
        return torch.stack([bag.mean(dim=0) for bag in block.add_mlp(patches)[0].split(sizes)])

    forms: list[Callable[[], Tensor]] = [
        lambda: means_after_mlp(block, patches, sizes),
        on_every_patch,
    ]
    leaves = [patches, *block.norm_mlp.parameters(), *block.mlp.parameters()]
    found = []
    for form in forms:
        torch.manual_seed(1)  # the same dropout
        means = form()
        loss = (means * torch.linspace(-1, 1, means.numel()).double().view(means.shape)).sum()
        found.append([means, *torch.autograd.grad(loss, leaves)])
    return found[0], found[1]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("sizes", [(30,), (1,), (7,), (9, 1, 20)])
def test_means_and_gradients_are_those_of_the_mlp_on_every_patch(
    block: ContextBlock, sizes: tuple[int, ...], dropout: float
) -> None:
    block.dropout.p = dropout
    patches = torch.randn(1, sum(sizes), 12).double().requires_grad_()
    torch.testing.assert_close(*sums_and_reference(block, patches, sizes))


def test_without_a_block_the_value_is_the_mean() -> None:
    mean, rows = MeanAfterMLP(None), torch.randn(30, 12)
    for chunk in rows.split(20):
        mean.add(chunk)
    torch.testing.assert_close(mean.value(), rows.mean(dim=0))


def test_frozen_parameters_have_no_gradient(block: ContextBlock) -> None:
    patches = torch.randn(1, 20, 12).double().requires_grad_()
    block.mlp.up.weight.requires_grad_(False)
    means_after_mlp(block, patches, (20,)).sum().backward()
    assert block.mlp.up.weight.grad is None
    assert block.mlp.down.weight.grad is not None


class GatedMLP(MLP):
    """A variant: the hidden layer is multiplied by a gate."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        self.gate = nn.Linear(dim, hidden)

    def hidden(self, patches: Tensor) -> Tensor:
        return F.gelu(self.up(patches)) * self.gate(patches)


def mlp_by_hand(mlp: GatedMLP, row: Tensor) -> Tensor:
    up, gate = (layer.weight @ row + layer.bias for layer in (mlp.up, mlp.gate))
    return mlp.down.weight @ (F.gelu(up) * gate) + mlp.down.bias


@pytest.mark.parametrize("pool", ["mean", "gated"])
def test_a_variant_of_the_mlp_needs_one_class(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All forms use it: padded, packed, single, streamed, recomputed."""
    monkeypatch.setattr("caprmil.models.context.MLP", GatedMLP)
    monkeypatch.setattr(recompute, "CHUNK", 11)
    model = without_dropout(make_model(depth=2, pool=pool))
    packed, sizes = torch.randn(1, 50, 24).double(), (30, 20)
    padded, mask = pad_packed(packed, sizes), mask_from_sizes(sizes, packed.device)
    block, row = model.context.blocks[1], torch.randn(16).double()
    torch.testing.assert_close(block.mlp(row), mlp_by_hand(block.mlp, row))

    check(model(packed, sizes=sizes), plain(model, padded, mask))
    bag = packed[:, :30]
    expected = plain(model, bag)
    expected_gradients = gradients(model, expected)
    assert expected_gradients["context.blocks.1.mlp.gate.weight"].any()
    for memory in ("whole", "keep", "stream"):
        model.save_memory(memory)
        found = model(bag)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(gradients(model, found), expected_gradients)
    model.eval()
    with torch.no_grad():
        check(model(bag), expected)
    streamed = model.stream(lambda: bag.split(11, dim=1))
    torch.testing.assert_close(streamed.logits, expected.logits)


def test_a_training_step_needs_less_than_half_of_the_memory_of_the_equations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mean_mlp, "CHUNK", 200)  # a tenth of the bag, as with 10,000 patches
    bag, equations = torch.randn(1, 2000, 64), PlainCAPRMIL(CAPRMIL(64, 2))
    peaks = []
    for model in (CAPRMIL(64, 2), equations):
        with LiveTensors(exclude=[*model.parameters(), bag]) as live:
            model(bag).logits.square().sum().backward()
        peaks.append(live.peak)
    assert peaks[0] < 0.5 * peaks[1]


def test_only_training_on_a_cpu_in_full_precision_computes_the_mean_from_sums() -> None:
    model, bag = CAPRMIL(24, 2, dim=16, heads=2), torch.randn(1, 5, 24)
    assert model.trains_mean(bag)
    with torch.no_grad():
        assert not model.trains_mean(bag)
    with torch.autocast("cpu", torch.bfloat16):
        assert not model.trains_mean(bag)
    assert not model.trains_mean(bag.bfloat16())
    assert not model.eval().trains_mean(bag)
    assert not CAPRMIL(24, 2, depth=0).trains_mean(bag)
    assert not CAPRMIL(24, 2, pool="gated").trains_mean(bag)
