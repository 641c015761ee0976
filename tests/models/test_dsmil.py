"""DSMIL against its paper: sizes, the equations of both streams, and their losses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caprmil.experiments import cost
from caprmil.models import DSMIL


@pytest.mark.parametrize(
    ("settings", "parameters"), [({}, 153_860), ({"value_map": True}, 1_203_460)]
)
def test_the_number_of_parameters_is_that_of_the_release(
    settings: dict[str, Any], parameters: int
) -> None:
    assert cost.parameters(DSMIL(1024, 2, **settings)) == parameters


def test_a_thousand_patches_take_the_operations_of_the_equations() -> None:
    assert cost.flops(DSMIL(1024, 2), n_patches=1000) / 1e9 == pytest.approx(0.304, rel=2e-3)


def test_weights_start_orthogonal_and_biases_at_zero() -> None:
    for layer in DSMIL(24, 3, value_map=True).modules():
        if isinstance(layer, nn.Linear):
            assert layer.bias.eq(0).all()
            rows, columns = layer.weight.shape
            short = layer.weight if rows <= columns else layer.weight.T
            torch.testing.assert_close(short @ short.T, torch.eye(len(short)))


def plain_bag_stream(model: DSMIL, bag: Tensor) -> Tensor:
    """Return the logits of the bag stream by the equations, class by class and patch by patch."""
    queries, logits = model.query(bag), model.classify.bias.clone()
    for c, patch_logits in enumerate(model.instance_classifier(bag).T):
        critical = queries[patch_logits.argmax()]
        similarity = torch.stack([query @ critical / len(query) ** 0.5 for query in queries])
        weights = similarity.exp() / similarity.exp().sum()
        pooled = sum(w * v for w, v in zip(weights, model.value(bag), strict=True))
        kernel = model.classify.weight[:, c * len(pooled) : (c + 1) * len(pooled)]
        logits = logits + kernel @ pooled
    return logits


@pytest.mark.parametrize("value_map", [False, True])
def test_the_bag_stream_is_the_equations_of_the_paper(value_map: bool) -> None:
    torch.manual_seed(0)
    model = DSMIL(24, 3, value_map=value_map).double().eval()
    bags = torch.randn(2, 9, 24, dtype=torch.float64)
    logits = model(bags, mask=torch.arange(9) < torch.tensor([[5], [9]])).logits
    torch.testing.assert_close(logits[0], plain_bag_stream(model, bags[0, :5]))
    torch.testing.assert_close(logits[1], plain_bag_stream(model, bags[1]))


def test_padding_is_never_critical() -> None:
    model, bag = DSMIL(24, 2), -torch.rand(1, 9, 24)
    nn.init.ones_(model.instance_classifier.weight)  # the logits of patches are below padding's
    padded = model(bag, mask=torch.arange(9)[None] < 5)
    torch.testing.assert_close(padded.logits[0], plain_bag_stream(model, bag[0, :5]))


@pytest.mark.parametrize("value_map", [False, True])
def test_logits_are_sums_over_patches(value_map: bool) -> None:
    model = DSMIL(24, 3, value_map=value_map).double().eval()
    bags = torch.randn(2, 9, 24, dtype=torch.float64)
    output = model(bags)
    kernels = model.classify.weight.unflatten(1, (3, 24))
    values = torch.einsum("cke,bne->bckn", kernels, model.value(bags))
    each = (output.class_attention[:, None] * values).sum(dim=2)  # per class and patch
    expected = model.classify.bias + each.sum(dim=-1)
    torch.testing.assert_close(output.logits, expected, rtol=1e-12, atol=1e-12)


def test_each_class_has_its_own_attention() -> None:
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    output = DSMIL(24, 3)(torch.randn(2, 9, 24), mask=mask)
    assert output.class_attention is not None
    torch.testing.assert_close(output.class_attention.sum(dim=-1), torch.ones(2, 3))
    torch.testing.assert_close(output.class_attention.mean(dim=1), output.attention)
    assert output.class_attention[0, :, 5:].eq(0).all()


def test_scores_are_the_probabilities_of_the_instance_stream() -> None:
    model, bag = DSMIL(24, 3), torch.randn(1, 9, 24)
    torch.testing.assert_close(model(bag).scores, model.instance_classifier(bag).softmax(dim=-1))
    padded = model(bag, mask=torch.arange(9)[None] < 5)
    assert padded.scores[0, 5:].eq(0).all()


def test_each_stream_contributes_half_of_the_loss() -> None:
    model, bags, labels = DSMIL(24, 3, both_streams=True), torch.randn(2, 9, 24), torch.arange(2)
    terms = model.loss(model(bags), labels)
    alone = DSMIL(24, 3)
    alone.load_state_dict(model.state_dict())
    best = model.instance_classifier(bags).amax(dim=1)
    torch.testing.assert_close(terms["bag"], F.cross_entropy(alone(bags).logits, labels) / 2)
    torch.testing.assert_close(terms["max"], F.cross_entropy(best, labels) / 2)


def test_the_output_of_both_streams_is_the_mean_of_their_probabilities() -> None:
    torch.manual_seed(0)
    model, bag = DSMIL(24, 3, both_streams=True).double().eval(), torch.randn(9, 24).double()
    streams = plain_bag_stream(model, bag), model.instance_classifier(bag).amax(dim=0)
    expected = sum(stream.exp() / stream.exp().sum() for stream in streams) / 2
    of_mean_logits = (sum(streams) / 2).softmax(dim=0)  # type: ignore[arg-type]
    assert (expected - of_mean_logits).abs().max() > 1e-3
    torch.testing.assert_close(model(bag[None]).logits[0].softmax(dim=0), expected)
    chunked = model.stream(lambda: bag[None].split(4, dim=1)).logits[0]
    torch.testing.assert_close(chunked.softmax(dim=0), expected)


def test_both_streams_have_influence_but_no_exact_evidence() -> None:
    torch.manual_seed(0)
    model, bag = DSMIL(24, 3, both_streams=True).double().eval(), torch.randn(1, 9, 24).double()
    assert model.evidence(bag) is None
    found, counts, step = model.influence(bag), torch.ones(9).double(), 1e-6
    for patch in range(9):
        more = counts + step * F.one_hot(torch.tensor(patch), 9)
        change = model.forward_weighted(bag, more).logits - model(bag).logits
        torch.testing.assert_close(found[patch], change[0] / step, rtol=1e-4, atol=1e-6)


def test_gradients_pass_through_the_query_of_the_critical_patch() -> None:
    torch.manual_seed(0)
    model, bag = DSMIL(6, 2, hidden=4).double(), torch.randn(1, 4, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda features: model(features).logits, bag)


def test_the_first_of_equal_patches_is_critical_also_in_chunks() -> None:
    model, bag = DSMIL(24, 2).eval(), torch.randn(1, 6, 24)
    nn.init.zeros_(model.instance_classifier.weight)  # all patches have equal logits
    chunked = model.stream(lambda: bag.split(4, dim=1)).logits
    torch.testing.assert_close(chunked, model(bag).logits)
    torch.testing.assert_close(chunked[0], plain_bag_stream(model, bag[0]))


def test_dropout_without_a_value_map_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout=0.2, value_map=False"):
        DSMIL(24, 2, dropout=0.2)
    assert DSMIL(24, 2, dropout=0.2, value_map=True)
