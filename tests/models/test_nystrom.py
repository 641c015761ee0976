"""Nystrom attention against its paper, with every landmark and the whole matrix written out."""

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

# Of 8 landmarks: some or no runs of padding alone, some or no padding in the run after them.
LENGTHS = [1, 5, 7, 8, 9, 16, 17, 23, 24, 40]


def plain_attention(layer: NystromAttention, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """What each row of one sequence hears, and A1 Z A3 of each head, step by step."""
    n, run = len(sequence), math.ceil(len(sequence) / layer.landmarks)
    padding = run * layer.landmarks - n
    padded = torch.cat([sequence.new_zeros(padding, sequence.shape[1]), sequence])
    maps = (layer.query, layer.key, layer.value)
    query, key, value = (
        torch.stack((padded @ part.weight.T).chunk(layer.heads, dim=1)) for part in maps
    )
    query = query / math.sqrt(query.shape[-1])
    runs = [range(start, start + run) for start in range(0, len(padded), run)]
    listened = key
    if layer.mask_padding:
        runs = [[row for row in rows if row >= padding] for rows in runs if rows[-1] >= padding]
        listened, value = key[:, padding:], value[:, padding:]
    landmark_query = torch.stack([query[:, list(rows)].mean(dim=1) for rows in runs], dim=1)
    landmark_key = torch.stack([key[:, list(rows)].mean(dim=1) for rows in runs], dim=1)
    a1 = (query[:, padding:] @ landmark_key.mT).softmax(dim=-1)
    a2 = (landmark_query @ landmark_key.mT).softmax(dim=-1)
    a3 = (landmark_query @ listened.mT).softmax(dim=-1)
    matrix = a1 @ plain_inverse(a2) @ a3
    heard = matrix @ value + plain_blend(layer.conv.weight, value)[:, -n:]
    return layer.out(torch.cat(list(heard), dim=1)), matrix[..., -n:]


def plain_inverse(a2: Tensor) -> Tensor:
    """Six rounds from a start that all heads share."""
    z = a2.mT / (a2.abs().sum(dim=-2).max() * a2.abs().sum(dim=-1).max())
    one = torch.eye(a2.shape[-1], dtype=a2.dtype)
    for _ in range(6):
        z = z @ (13 * one - a2 @ z @ (15 * one - a2 @ z @ (7 * one - a2 @ z))) / 4
    return z


def plain_blend(weight: Tensor, value: Tensor) -> Tensor:
    """A depthwise convolution of 33 taps, tap by tap."""
    blended, rows = torch.zeros_like(value), value.shape[1]
    for tap in range(33):
        for row in range(max(0, 16 - tap), min(rows, rows + 16 - tap)):
            blended[:, row] += weight[:, 0, tap] * value[:, row + tap - 16]
    return blended


def attention(**settings: Any) -> NystromAttention:
    torch.manual_seed(0)
    layer = NystromAttention(12, heads=3, landmarks=8, **settings).double().eval()
    for part in (layer.query, layer.key):
        part.weight.data *= 4  # so that weights are far from even
    return layer


def some(n: int) -> Tensor:
    return torch.randn(1, n, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mask_padding", [False, True])
def test_rows_hear_what_the_plain_form_says(n: int, mask_padding: bool) -> None:
    layer, sequence = attention(mask_padding=mask_padding), some(n)
    expected, _ = plain_attention(layer, sequence[0])
    torch.testing.assert_close(layer(sequence)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("mask_padding", [False, True])
def test_looking_shows_rows_of_the_plain_matrix(n: int, mask_padding: bool) -> None:
    layer, sequence, rows = attention(mask_padding=mask_padding), some(n), slice(n // 2, n // 2 + 3)
    heard, matrix = plain_attention(layer, sequence[0])
    some_heard, weights = layer.attend_rows(sequence, rows)
    torch.testing.assert_close(weights[0], matrix[:, rows].detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(some_heard[0], heard[rows], rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_plain_form() -> None:
    layer, sequence = attention(), some(21)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(plain_attention(layer, sequence[0])[0].sum(), parameters)
    measured = torch.autograd.grad(layer(sequence).sum(), parameters)
    torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-9)


def test_weights_carry_no_gradient_and_what_is_heard_does() -> None:
    heard, weights = attention().attend_rows(some(9), slice(0, 1))
    assert heard.requires_grad
    assert not weights.requires_grad


def test_padding_is_heard_unless_it_is_masked() -> None:
    published, masked = attention(), attention(mask_padding=True)
    assert not torch.allclose(published(some(9)), masked(some(9)))
    torch.testing.assert_close(published(some(24)), masked(some(24)))


def test_neighbours_in_a_batch_change_nothing() -> None:
    layer, quiet, loud = attention(), some(21), 9 * some(21).flip(1)
    together = layer(torch.cat([quiet, loud]))
    torch.testing.assert_close(together, torch.cat([layer(quiet), layer(loud)]))


def test_equal_landmarks_count_as_many_in_the_inverse() -> None:
    torch.manual_seed(0)
    scores, of = 2 * torch.randn(2, 3, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 2])
    large = scores[:, of][:, :, of].softmax(dim=-1)
    small = torch.cat([large[:, 2:, :3].sum(dim=-1, keepdim=True), large[:, 2:, 3:]], dim=-1)
    counts = torch.tensor([3, 1, 1], dtype=torch.float64)
    inverse, true = pseudo_inverse(small[None], counts, 40)[0], torch.linalg.pinv(large)[:, 2:]
    torch.testing.assert_close(inverse[..., 0], true[..., :3].sum(dim=-1))
    torch.testing.assert_close(inverse[..., 1:], true[..., 3:])


def test_half_precision_spares_the_inverse() -> None:
    layer, sequence = attention().float(), some(40).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(sequence)
    torch.testing.assert_close(half.float(), layer(sequence), rtol=0.05, atol=0.05)


def test_dropout_silences_what_is_heard() -> None:
    layer = attention(dropout=0.5).train()
    assert 0.4 < layer(some(40)).eq(0).double().mean() < 0.6


def test_a_layer_adds_what_is_heard_and_has_the_papers_size() -> None:
    layer, sequence = NystromLayer(12, heads=3, landmarks=8).double(), some(21)
    heard, matrix = plain_attention(layer.attend, layer.norm(sequence)[0])
    rows, weights = layer.attend_rows(sequence, slice(2, 4))
    torch.testing.assert_close(layer(sequence)[0], sequence[0] + heard)
    torch.testing.assert_close(rows[0], (sequence[0] + heard)[2:4])
    torch.testing.assert_close(weights[0], matrix[:, 2:4].detach())
    assert sum(p.numel() for p in NystromLayer(512).parameters()) == 1_050_376


def test_reading_goes_row_by_row_and_finds_its_way_back() -> None:
    grid = torch.tensor([[2, 1], [9, 0], [1, 1], [3, 0]])  # column, row
    patches = torch.arange(4.0).reshape(1, 4, 1)
    ordered, back = sort_by_grid(patches, grid)
    assert ordered.flatten().tolist() == [3, 1, 2, 0]
    assert torch.equal(ordered[:, back], patches)
    assert sort_by_grid(patches, None)[0] is patches


@pytest.mark.parametrize("settings", [{"heads": 5}, {"heads": 0}, {"landmarks": 0}, {"kernel": 4}])
def test_senseless_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        NystromAttention(16, **settings)
