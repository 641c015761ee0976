"""Removal of a token equals the plain form with that token set to zero."""

from typing import Any

import pytest
import torch
from fast_forms import POOLS, TOKENS, make_model, plain
from torch import Tensor, nn

from caprmil.models import CAPRMIL, create

MODELS_AFTER_CONTEXT = ("abmil", "clam", "dsmil")


def naive(model: CAPRMIL, bag: Tensor, removed: Tensor) -> Tensor:
    """Return the logits of the plain form, with removed tokens set to zero after self-attention."""
    originals = [block.attend.attend_tokens for block in model.context.blocks]
    for number, block in enumerate(model.context.blocks):

        def attend_without(
            tokens: Tensor, attend: Any = originals[number], zeroed: Any = removed[number]
        ) -> Any:
            return attend(tokens).masked_fill(zeroed[None, :, :, None], 0.0)

        block.attend.attend_tokens = attend_without  # type: ignore[method-assign]
    with torch.no_grad():
        logits = plain(model, bag).logits
    for block, original in zip(model.context.blocks, originals, strict=True):
        block.attend.attend_tokens = original  # type: ignore[method-assign]
    return logits


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("pool", [*POOLS, *MODELS_AFTER_CONTEXT])
@pytest.mark.parametrize("depth", [1, 3])
def test_every_token_is_removed_as_in_a_naive_loop(depth: int, pool: str, keep: bool) -> None:
    model, bag = make_model(pool=pool, depth=depth).eval(), torch.randn(1, 30, 24).double()
    chunks = torch.split(bag, 11, dim=1)
    removal = model.token_removal(lambda: chunks, keep=keep)
    torch.testing.assert_close(removal.output().logits, plain(model, bag).logits)
    assert model.token_shape == (depth, 2, 3)
    for block in range(depth):
        for head in range(2):
            for token in range(3):
                removed = torch.zeros(depth, 2, 3, dtype=torch.bool)
                removed[block, head, token] = True
                found = removal.without_token(block, head, token)
                torch.testing.assert_close(found.logits, naive(model, bag, removed))


@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens_of_several_blocks_are_removed_together(tokens: str) -> None:
    model = make_model(pool="gated", depth=3, tokens=TOKENS[tokens]).eval()
    bag = torch.randn(1, 30, 24).double()
    removal = model.token_removal(lambda: [bag], keep=True)
    torch.manual_seed(1)
    for _ in range(5):
        removed = torch.rand(3, 2, TOKENS[tokens]) < 0.3
        torch.testing.assert_close(removal.without(removed).logits, naive(model, bag, removed))


def test_a_pool_that_needs_the_whole_bag_gets_the_bag_and_its_grid() -> None:
    pool = {"name": "bayesmil", "dim": 8, "hidden": 4, "spatial": True}
    model, bag = make_model(pool=pool).eval(), torch.randn(1, 30, 24).double()
    grid = torch.randint(5, (30, 2))
    removal = model.token_removal(lambda: [bag], grid=grid, keep=True)
    with torch.no_grad():
        expected = model(bag, grid=grid[None])
    torch.testing.assert_close(removal.output().logits, expected.logits)


def test_assignments_are_those_of_the_output() -> None:
    model, bag = make_model(depth=2).eval(), torch.randn(1, 30, 24).double()
    expected = plain(model, bag).assignments
    for keep in (True, False):
        removal = model.token_removal(lambda: torch.split(bag, 11, dim=1), keep=keep)
        for block in range(2):
            found = torch.cat(list(removal.assignments(block))).permute(1, 0, 2)
            assert not found.requires_grad
            torch.testing.assert_close(found[None], expected[block])


def test_a_model_without_tokens_has_no_token_shape_and_removal_is_an_error() -> None:
    assert create("caprmil", 8, 2, depth=0).token_shape is None
    model: Any = create("abmil", 8, 2).eval()
    assert model.token_shape is None
    with pytest.raises(NotImplementedError, match="ABMIL has no tokens"):
        model.token_removal(lambda: [torch.zeros(1, 3, 8)])
    assert isinstance(model, nn.Module)
