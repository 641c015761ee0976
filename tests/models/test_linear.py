"""Linear layers that oneDNN computes have the outputs and gradients of torch's own."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from caprmil.models import create
from caprmil.models import linear as module
from caprmil.models.linear import Linear, linear, only_torch, product


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN on every CPU that has it, and for small products too."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("This build of torch has no oneDNN.")
    monkeypatch.setattr(module, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(module, "SMALL", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of all products that oneDNN computes."""
    found: list[torch.Size] = []
    own = module._product

    def counted(rows: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        found.append(rows.shape)
        return own(rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_product", counted)
    return found


@pytest.mark.parametrize(("n", "width", "out"), [(1, 5, 2), (40, 7, 30), (40, 30, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_in_float64(
    n: int, width: int, out: int, bias: bool, calls: list[torch.Size]
) -> None:
    torch.manual_seed(0)
    rows, layer = torch.randn(2, n, width, requires_grad=True), Linear(width, out, bias=bias)
    exact = nn.Linear(width, out, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    wanted = rows.detach().double().requires_grad_()
    for layers, values in ((layer, rows), (exact, wanted)):
        layers(values).square().sum().backward()
    assert calls
    torch.testing.assert_close(layer(rows), exact(wanted).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows.grad, wanted.grad.float(), rtol=1e-4, atol=1e-5)
    for own, other in zip(layer.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad.float(), rtol=1e-4, atol=1e-4)


def test_gradients_can_be_differentiated_again() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    found = []
    for form in (linear, F.linear):
        (first,) = torch.autograd.grad(form(rows, weight).pow(3).sum(), rows, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(*found)


def test_a_product_is_that_of_torch(calls: list[torch.Size]) -> None:
    first, second = torch.randn(9, 6), torch.randn(6, 4)
    torch.testing.assert_close(product(first, second), first @ second)
    torch.testing.assert_close(product(second.mT, first.mT), (first @ second).mT)
    assert calls == [first.shape, second.mT.shape]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype: torch.dtype, calls: list[torch.Size]) -> None:
    rows, weight = torch.randn(9, 6).to(dtype), torch.randn(4, 6).to(dtype)
    assert torch.equal(linear(rows, weight), F.linear(rows, weight))
    assert calls == []


@pytest.mark.filterwarnings("ignore")  # torch calls TorchScript deprecated
def test_onednn_can_be_switched_off_and_is_not_part_of_recorded_graphs(
    calls: list[torch.Size],
) -> None:
    layer, rows = Linear(6, 4), torch.randn(9, 6)
    with torch.autocast("cpu", torch.bfloat16):
        layer(rows)
    traced = torch.jit.trace(layer, rows, check_trace=False)
    with only_torch():
        layer(rows)
    assert calls == []
    assert "mkldnn" not in str(traced.inlined_graph)


@pytest.mark.parametrize("name", ["caprmil", "caprmil+gated", "abmil", "transmil", "sgpmil"])
def test_a_model_has_the_same_loss_and_gradients(name: str, calls: list[torch.Size]) -> None:
    torch.manual_seed(0)
    model, bag = create(name, 24, 2).eval(), torch.randn(1, 40, 24)
    found = []
    for context in (nullcontext(), only_torch()):
        model.zero_grad()
        with context:
            loss = sum(model.loss(model(bag), torch.tensor([1])).values())
            loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
        assert calls
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
