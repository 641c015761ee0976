"""Evaluation in chunks: the output of the plain form, in float64, with and without kept patches."""

import pytest
import torch
from fast_forms import POOLS, TOKENS, check, make_model, plain

from caprmil.errors import BagError
from caprmil.models import CAPRMIL
from caprmil.models.pooling import GrowingTensor


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("pool", POOLS)
def test_chunks_give_the_output_of_the_plain_form(pool: str, depth: int, tokens: str) -> None:
    model = make_model(pool=pool, depth=depth, tokens=TOKENS[tokens]).eval()
    bag = torch.randn(1, 2500, 24, dtype=torch.float64)  # three chunks
    with torch.no_grad():
        expected = plain(model, bag)
        check(model(bag), expected)
        check(model.stream(lambda: bag.split(700, dim=1), keep=True), expected)
    streamed = model.stream(lambda: bag.split(700, dim=1))
    torch.testing.assert_close(streamed.logits, expected.logits)
    torch.testing.assert_close(streamed.attention, expected.attention)
    assert streamed.assignments == ()


@pytest.mark.parametrize("pool", ["abmil", "dsmil", "clam"])
def test_a_model_after_the_context_stack_is_streamed(pool: str) -> None:
    model = make_model(pool=pool, depth=2).eval()
    bag = torch.randn(1, 50, 24, dtype=torch.float64)
    for keep in (True, False):
        streamed = model.stream(lambda: bag.split(20, dim=1), keep=keep)
        torch.testing.assert_close(streamed.logits, plain(model, bag).logits)
        assert len(streamed.assignments) == (2 if keep else 0)


def test_patches_in_context_are_those_of_the_plain_form() -> None:
    model = make_model(depth=2).eval()
    bag = torch.randn(1, 20, 24, dtype=torch.float64)
    expected, _ = model.context(bag, torch.ones(1, 20, dtype=torch.bool))
    torch.testing.assert_close(model.in_context(bag), expected.detach())


def test_the_features_are_not_changed() -> None:
    """GELU is in place in evaluation, but not on the input of a model."""
    model, bag = make_model(depth=2).eval(), torch.randn(1, 20, 24, dtype=torch.float64)
    before = bag.clone()
    with torch.no_grad():
        model(bag)
    assert torch.equal(bag, before)


def test_streaming_an_empty_bag_is_an_error() -> None:
    with pytest.raises(BagError, match="no patches"):
        CAPRMIL(24, 2).eval().stream(list)


def test_streaming_in_training_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        CAPRMIL(24, 2).stream(lambda: [torch.randn(1, 5, 24)])


@pytest.mark.parametrize("width", [(), (3,)])
def test_a_growing_tensor_has_the_rows_of_all_chunks(width: tuple[int, ...]) -> None:
    rows, grown = torch.randn(23, *width), GrowingTensor()
    for chunk in rows.split(5):
        grown.append(chunk)
    assert torch.equal(grown.value(), rows)
