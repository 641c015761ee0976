"""The shared layers: dropout, sums in half precision, and the weighted cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from caprmil.models.layers import Dropout, weighted_cross_entropy, weighted_sum


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    layer, values = Dropout(0.3).train(), torch.ones(1000, 1001, dtype=torch.float64)
    dropped = layer(values)
    assert (dropped == 0).double().mean().item() == pytest.approx(0.3, abs=0.003)
    assert dropped.mean().item() == pytest.approx(1, abs=0.005)
    assert len(dropped.unique()) == 2
    assert torch.equal(layer.eval()(values), values)


def test_dropout_passes_gradients_where_it_passed_values() -> None:
    values = torch.rand(9, 5, dtype=torch.float64) + 1
    values.requires_grad_()
    dropped = Dropout(0.5).train()(values)
    (gradient,) = torch.autograd.grad(dropped.sum(), values)
    torch.testing.assert_close(gradient, (dropped / values).detach())


def test_dropout_of_adjacent_values_is_independent() -> None:
    """Four values share a random number."""
    torch.manual_seed(0)
    dropped = Dropout(0.5).train()(torch.ones(100_000, 8)) == 0
    correlations = torch.corrcoef(dropped.T.float()) - torch.eye(8)
    assert correlations.abs().max() < 0.02


def test_a_dropout_rate_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to below 1"):
        Dropout(1.0)


def test_a_sum_over_many_patches_is_exact_in_half_precision() -> None:
    values = torch.full((1, 60_000, 1), 3.0, dtype=torch.float16)  # the sum exceeds float16
    with torch.autocast("cpu", torch.bfloat16):
        total = weighted_sum(torch.ones(1, 60_000, 1, dtype=torch.float16), values)
    assert total.item() == 180_000


def test_class_weights_do_not_cancel_in_a_batch_of_one() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 2])
    weights = torch.tensor([1.0, 0.5, 3.0])
    pairs = zip(logits, labels, strict=True)
    each = torch.stack([F.cross_entropy(row, label) for row, label in pairs])
    torch.testing.assert_close(weighted_cross_entropy(logits, labels), each.mean())
    expected = (each * torch.tensor([1.0, 3.0, 0.5, 3.0])).mean()
    torch.testing.assert_close(weighted_cross_entropy(logits, labels, weights), expected)
    alone = weighted_cross_entropy(logits[1:2], labels[1:2], weights)
    torch.testing.assert_close(alone, 3 * each[1])
