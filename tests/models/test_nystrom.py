"""Nystrom attention against its paper, with explicit landmarks and the full matrix."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from caprmil.models.nystrom import (
    NystromAttention,
    NystromLayer,
    pseudo_inverse,
    sort_by_grid,
)

# With 8 landmarks: with and without segments of padding only, and with and without a mixed segment.
LENGTHS = [1, 5, 7, 8, 9, 16, 17, 23, 24, 40]


def plain_attention(layer: NystromAttention, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attended rows of one sequence, and A1 Z A3 of each head, step by step."""
    n, length = len(sequence), math.ceil(len(sequence) / layer.landmarks)
    padding = length * layer.landmarks - n
    padded = torch.cat([sequence.new_zeros(padding, sequence.shape[1]), sequence])
    projections = (layer.query, layer.key, layer.value)
    query, key, value = (
        torch.stack((padded @ part.weight.T).chunk(layer.heads, dim=1)) for part in projections
    )
    query = query / math.sqrt(query.shape[-1])
    segments = [range(start, start + length) for start in range(0, len(padded), length)]
    attended_keys = key
    if layer.mask_padding:
        segments = [
            [row for row in rows if row >= padding] for rows in segments if rows[-1] >= padding
        ]
        attended_keys, value = key[:, padding:], value[:, padding:]
    landmark_query = torch.stack([query[:, list(rows)].mean(dim=1) for rows in segments], dim=1)
    landmark_key = torch.stack([key[:, list(rows)].mean(dim=1) for rows in segments], dim=1)
    a1 = (query[:, padding:] @ landmark_key.mT).softmax(dim=-1)
    a2 = (landmark_query @ landmark_key.mT).softmax(dim=-1)
    a3 = (landmark_query @ attended_keys.mT).softmax(dim=-1)
    matrix = a1 @ plain_inverse(a2) @ a3
    attended = matrix @ value + plain_convolution(layer.conv.weight, value)[:, -n:]
    return layer.out(torch.cat(list(attended), dim=1)), matrix[..., -n:]


def plain_inverse(a2: Tensor) -> Tensor:
    """Return the pseudo-inverse after six iterations from an initial value that all heads share."""
    z = a2.mT / (a2.abs().sum(dim=-2).max() * a2.abs().sum(dim=-1).max())
    one = torch.eye(a2.shape[-1], dtype=a2.dtype)
    for _ in range(6):
        z = z @ (13 * one - a2 @ z @ (15 * one - a2 @ z @ (7 * one - a2 @ z))) / 4
    return z


def plain_convolution(weight: Tensor, value: Tensor) -> Tensor:
    """Return a depthwise convolution with a kernel of 33, element by element."""
    convolved, rows = torch.zeros_like(value), value.shape[1]
    for tap in range(33):
        for row in range(max(0, 16 - tap), min(rows, rows + 16 - tap)):
            convolved[:, row] += weight[:, 0, tap] * value[:, row + tap - 16]
    return convolved


def attention(**settings: Any) -> NystromAttention:
    torch.manual_seed(0)
    layer = NystromAttention(12, heads=3, landmarks=8, **settings).double().eval()
    for part in (layer.query, layer.key):
        part.weight.data *= 4  # makes the attention uneven
    return layer


def random_sequence(n: int) -> Tensor:
    return torch.randn(1, n, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mask_padding", [False, True])
def test_attention_equals_the_plain_form(n: int, mask_padding: bool) -> None:
    layer, sequence = attention(mask_padding=mask_padding), random_sequence(n)
    expected, _ = plain_attention(layer, sequence[0])
    torch.testing.assert_close(layer(sequence)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mask_padding", [False, True])
def test_attended_rows_and_weights_are_those_of_the_full_matrix(n: int, mask_padding: bool) -> None:
    layer, sequence, rows = (
        attention(mask_padding=mask_padding),
        random_sequence(n),
        slice(n // 2, n // 2 + 3),
    )
    attended, matrix = plain_attention(layer, sequence[0])
    attended_part, weights = layer.attend_rows(sequence, rows)
    torch.testing.assert_close(weights[0], matrix[:, rows].detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(attended_part[0], attended[rows], rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_plain_form() -> None:
    layer, sequence = attention(), random_sequence(21)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(plain_attention(layer, sequence[0])[0].sum(), parameters)
    measured = torch.autograd.grad(layer(sequence).sum(), parameters)
    torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-9)


def test_attended_rows_have_a_gradient_and_weights_do_not() -> None:
    attended, weights = attention().attend_rows(random_sequence(9), slice(0, 1))
    assert attended.requires_grad
    assert not weights.requires_grad


def test_padding_is_attended_to_unless_it_is_masked() -> None:
    published, masked = attention(), attention(mask_padding=True)
    assert not torch.allclose(published(random_sequence(9)), masked(random_sequence(9)))
    torch.testing.assert_close(published(random_sequence(24)), masked(random_sequence(24)))


def test_other_bags_of_a_batch_do_not_change_the_output() -> None:
    layer, small, large = attention(), random_sequence(21), 9 * random_sequence(21).flip(1)
    together = layer(torch.cat([small, large]))
    torch.testing.assert_close(together, torch.cat([layer(small), layer(large)]))


def test_a_landmark_with_a_count_equals_repeated_landmarks_in_the_inverse() -> None:
    torch.manual_seed(0)
    scores, index = 2 * torch.randn(2, 3, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 2])
    large = scores[:, index][:, :, index].softmax(dim=-1)
    small = torch.cat([large[:, 2:, :3].sum(dim=-1, keepdim=True), large[:, 2:, 3:]], dim=-1)
    counts = torch.tensor([3, 1, 1], dtype=torch.float64)
    inverse, true = pseudo_inverse(small[None], counts, 40)[0], torch.linalg.pinv(large)[:, 2:]
    torch.testing.assert_close(inverse[..., 0], true[..., :3].sum(dim=-1))
    torch.testing.assert_close(inverse[..., 1:], true[..., 3:])


def test_the_inverse_is_computed_in_full_precision_under_autocast() -> None:
    layer, sequence = attention().float(), random_sequence(40).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(sequence)
    torch.testing.assert_close(half.float(), layer(sequence), rtol=0.05, atol=0.05)


def test_dropout_zeroes_attended_values() -> None:
    layer = attention(dropout=0.5).train()
    assert 0.4 < layer(random_sequence(40)).eq(0).double().mean() < 0.6


def test_a_layer_adds_a_residual_and_has_the_papers_number_of_parameters() -> None:
    layer, sequence = NystromLayer(12, heads=3, landmarks=8).double(), random_sequence(21)
    attended, matrix = plain_attention(layer.attend, layer.norm(sequence)[0])
    rows, weights = layer.attend_rows(sequence, slice(2, 4))
    torch.testing.assert_close(layer(sequence)[0], sequence[0] + attended)
    torch.testing.assert_close(rows[0], (sequence[0] + attended)[2:4])
    torch.testing.assert_close(weights[0], matrix[:, 2:4].detach())
    assert sum(p.numel() for p in NystromLayer(512).parameters()) == 1_050_376


def test_patches_are_sorted_row_by_row_and_the_inverse_order_restores_them() -> None:
    grid = torch.tensor([[2, 1], [9, 0], [1, 1], [3, 0]])  # column, row
    patches = torch.arange(4.0).reshape(1, 4, 1)
    ordered, inverse_order = sort_by_grid(patches, grid)
    assert ordered.flatten().tolist() == [3, 1, 2, 0]
    assert torch.equal(ordered[:, inverse_order], patches)
    assert sort_by_grid(patches, None)[0] is patches


@pytest.mark.parametrize("settings", [{"heads": 5}, {"heads": 0}, {"landmarks": 0}, {"kernel": 4}])
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        NystromAttention(16, **settings)
