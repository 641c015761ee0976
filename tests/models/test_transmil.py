"""TransMIL against its paper: the forward pass, patch by patch, and the class token's attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_nystrom import plain_attention
from torch import Tensor

from caprmil.experiments import cost
from caprmil.models import TransMIL
from caprmil.models.transmil import positive_part


def small(*, mask_padding: bool = False) -> TransMIL:
    torch.manual_seed(0)
    model = TransMIL(24, 3, dim=16, heads=4, landmarks=8, mask_padding=mask_padding)
    for layer in (model.first_layer.attend, model.second_layer.attend):
        for part in (layer.query, layer.key):
            part.weight.data *= 3  # makes the attention uneven
    return model.double().eval()


def random_bag(n: int) -> Tensor:
    return torch.randn(1, n, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def plain_forward(model: TransMIL, bag: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of one bag, and the raw attention of its class token."""
    patches = F.relu(model.project(bag))
    n, side = len(bag), math.ceil(math.sqrt(len(bag)))
    index = [*range(n), *range(side * side - n)]
    sequence = torch.cat([model.class_token, patches[index]])
    sequence = (
        sequence + plain_attention(model.first_layer.attend, model.first_layer.norm(sequence))[0]
    )
    image = sequence[1:].reshape(side, side, -1).permute(2, 0, 1)
    convolved = [
        F.conv2d(image, conv.weight, conv.bias, padding=margin, groups=len(image))
        for conv, margin in zip(model.position_encoding.scales, (3, 2, 1), strict=True)
    ]
    image = image + sum(convolved)
    sequence = torch.cat([sequence[:1], image.permute(1, 2, 0).flatten(0, 1)])
    attended, matrix = plain_attention(model.second_layer.attend, model.second_layer.norm(sequence))
    logits = model.classify(model.norm(sequence + attended)[0])
    attention = torch.zeros(n, dtype=bag.dtype)
    for patch, weight in zip(index, matrix.mean(dim=0)[0, 1:], strict=True):
        attention[patch] += weight
    return logits, attention


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 9, 12, 30, 49])
@pytest.mark.parametrize("mask_padding", [False, True])
def test_the_output_is_that_of_the_plain_form(n: int, mask_padding: bool) -> None:
    model, bag = small(mask_padding=mask_padding), random_bag(n)
    logits, attention = plain_forward(model, bag[0])
    output, raw = model(bag), model.class_token_attention(bag)
    torch.testing.assert_close(output.logits[0], logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(raw[0], attention.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.attention, positive_part(raw))


def test_gradients_are_those_of_the_plain_form() -> None:
    model, bag = small(), random_bag(12)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(plain_forward(model, bag[0])[0][0], parameters)
    measured = torch.autograd.grad(model(bag).logits[0, 0], parameters)
    torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n_outputs", "parameters"), [(2, 2_672_146), (3, 2_672_659)])
def test_the_number_of_parameters_is_that_of_the_paper(n_outputs: int, parameters: int) -> None:
    assert cost.parameters(TransMIL(1024, n_outputs)) == parameters


def test_a_thousand_patches_take_12_gflop() -> None:
    measured = cost.flops(TransMIL(1024, 2), n_patches=1000)
    assert measured / 1e9 == pytest.approx(12.2, abs=0.05)


def test_the_attention_of_a_repeated_patch_is_the_sum_of_both_weights() -> None:
    model, bag = small(), random_bag(7)
    whole = torch.cat([bag, bag[:, :2]], dim=1)  # the same sequence of nine, without repetition
    torch.testing.assert_close(model(bag).logits, model(whole).logits)
    raw = model.class_token_attention(whole)
    both = torch.cat([raw[:, :2] + raw[:, 7:], raw[:, 2:7]], dim=1)
    torch.testing.assert_close(model.class_token_attention(bag), both)


def test_with_a_grid_the_order_of_patches_does_not_matter() -> None:
    model, bag, order = small(), random_bag(12), torch.randperm(12)
    grid = torch.stack([torch.arange(12) % 4, torch.arange(12) // 4], dim=-1)
    output, permuted = model(bag), model(bag[:, order], grid=grid[None, order])
    torch.testing.assert_close(permuted.logits, output.logits)
    torch.testing.assert_close(permuted.attention, output.attention[:, order])
    raw = model.class_token_attention(bag[:, order], grid[order])
    torch.testing.assert_close(raw, model.class_token_attention(bag)[:, order])


def test_without_a_grid_the_order_of_patches_matters() -> None:
    model, bag = small(), random_bag(12)
    assert model.order_matters
    assert not torch.allclose(model(bag.flip(1)).logits, model(bag).logits)


def test_attention_is_the_normalised_positive_part() -> None:
    weights = torch.tensor([[3.0, -2.0, 1.0, 0.0], [-1.0, -2.0, 0.0, -3.0]])
    expected = torch.tensor([[0.75, 0.0, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(positive_part(weights), expected)


def test_raw_attention_may_be_negative() -> None:
    raw = small().class_token_attention(random_bag(49))
    assert (raw < 0).any()
    assert small()(random_bag(49)).attention[raw < 0].eq(0).all()


def test_raw_attention_accepts_features_in_any_precision() -> None:
    assert small().class_token_attention(random_bag(5).half()).dtype == torch.float64
