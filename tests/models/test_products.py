"""Linear layers by oneDNN: values and gradients are those of torch in float64, up to rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caprmil.models import CAPRMIL, products
from caprmil.models.layers import weighted_sum
from caprmil.models.products import Linear, linear, sum_of_products

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN"
)
SIZES = (32, 100, 447, 1024, 2047, 5000)


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take oneDNN on every processor, and list the rows that it got."""
    rows, before = list[int](), products._onednn

    def counted(values: Tensor, *others: Tensor) -> Tensor:
        rows.append(len(values))
        return before(values, *others)

    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_onednn", counted)
    return rows


def test_a_weight_of_another_type_is_an_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        linear(torch.randn(64, 64), torch.randn(64, 64).double(), None)


def with_gradients(found: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found.dtype)
    return [found, *torch.autograd.grad((found * weights).sum(), leaves)]


def in_float64(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=3e-6 * scale)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("widths", [(128, 40), (40, 128)])
def test_a_linear_layer_has_the_values_and_gradients_of_torch(
    n: int, widths: tuple[int, int], by_onednn: list[int]
) -> None:
    torch.manual_seed(0)
    shapes = ((1, n, widths[0]), (widths[1], widths[0]), (widths[1],))
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    exact = in_float64(leaves)
    values, weight, bias = leaves
    check(
        with_gradients(linear(values, weight, bias), leaves),
        with_gradients(F.linear(*exact), exact),
    )
    assert by_onednn
    with torch.no_grad():
        torch.testing.assert_close(linear(values, weight, bias), F.linear(values, weight, bias))


@pytest.mark.parametrize("n", SIZES)
def test_a_weighted_sum_has_the_values_and_gradients_of_torch(n: int, by_onednn: list[int]) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(n, width).requires_grad_() for width in (32, 128)]
    exact = in_float64(leaves)
    for form in (sum_of_products, weighted_sum):
        check(with_gradients(form(*leaves), leaves), with_gradients(exact[0].mT @ exact[1], exact))
    assert by_onednn


def test_up_to_2048_rows_there_are_64_numbers_of_rows(by_onednn: list[int]) -> None:
    """oneDNN compiles a kernel for each, which takes as long as 300 rows."""
    weight = torch.randn(32, 32)
    for n in range(32, 2049):
        linear(torch.randn(n, 32), weight, None)
    assert set(by_onednn) == set(range(32, 2049, 32))


@pytest.mark.parametrize(
    "case", ["float64", "bfloat16", "few rows", "narrow", "strided", "autocast"]
)
def test_other_products_are_those_of_torch(case: str, by_onednn: list[int]) -> None:
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
    values, layer = torch.randn(100, 64, dtype=dtype), Linear(64, 64, dtype=dtype)
    if case == "few rows":
        values = values[:31]
    elif case == "narrow":
        layer = Linear(64, 2)
    elif case == "strided":
        values = torch.randn(64, 100).mT
    with torch.autocast("cpu", enabled=case == "autocast"):
        assert torch.equal(layer(values), F.linear(values, layer.weight, layer.bias))
    assert by_onednn == []


def test_frozen_parameters_have_no_gradient() -> None:
    layer, values = Linear(64, 64), torch.randn(100, 64, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer(values).sum().backward()
    assert layer.weight.grad is None
    assert values.grad is not None
    assert layer.bias.grad is not None


@pytest.mark.parametrize("sizes", [(700,), (300, 90, 310)])
def test_training_has_the_gradients_of_layers_of_torch(
    sizes: tuple[int, ...], by_onednn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, bags = CAPRMIL(64, 2, dim=64, heads=8), torch.randn(1, 700, 64)

    def gradients(faster: bool) -> list[Tensor]:
        monkeypatch.setattr(products, "onednn_is_faster", lambda: faster)
        model.zero_grad()
        torch.manual_seed(1)  # the same dropout
        model(bags, sizes=sizes).logits.square().sum().backward()
        return [each.grad.double() for each in model.parameters() if each.grad is not None]

    plain = gradients(faster=False)
    assert by_onednn == []
    check(gradients(faster=True), plain)
    assert by_onednn


def test_a_layer_is_saved_like_one_of_torch() -> None:
    layer = nn.Linear(64, 32)
    layer.load_state_dict(Linear(64, 32).state_dict())
