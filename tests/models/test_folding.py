"""Folded attention and packed bags: the outputs and gradients of the plain form, in float64."""

import pytest
import torch
from fast_forms import POOLS, TOKENS, check, gradients, make_model, plain

from caprmil.models import ABMIL, folding
from caprmil.models.folding import FoldedAttention
from caprmil.models.packing import mask_from_sizes, pad_packed

SIZES = (9, 1, 20)


@pytest.mark.parametrize("tokens", TOKENS)
def test_folded_attention_equals_the_plain_form(tokens: str) -> None:
    attention = make_model(tokens=TOKENS[tokens]).eval().context.blocks[0].attend
    patches = torch.randn(1, 30, 16, dtype=torch.float64)
    context, assignments = attention(patches, torch.ones(1, 30, dtype=torch.bool))
    folded = FoldedAttention(attention)
    assigned = folded.assign(patches[0])
    (update,) = folded.update(folded.aggregate(patches[0], assigned))
    torch.testing.assert_close(assigned @ update, context[0])
    torch.testing.assert_close(folded.unfold(assigned), assignments)


def test_the_sums_of_chunks_add_up_to_those_of_the_bag() -> None:
    folded = FoldedAttention(make_model().context.blocks[0].attend)
    patches = torch.randn(30, 16, dtype=torch.float64)
    whole = folded.aggregate(patches, folded.assign(patches))
    one, other = (folded.aggregate(part, folded.assign(part)) for part in patches.split(20))
    torch.testing.assert_close((one + other).sums, whole.sums)
    torch.testing.assert_close((one + other).mass, whole.mass)


@pytest.mark.parametrize("learn_temperature", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("pool", [*POOLS, "abmil"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_one_bag_has_the_output_and_gradients_of_the_plain_form(
    depth: int, pool: str, dropout: float, learn_temperature: bool
) -> None:
    """This includes dropout: both forms draw the same random numbers."""
    settings = {"depth": depth, "dropout": dropout, "learn_temperature": learn_temperature}
    model, bag = make_model(pool=pool, **settings), torch.randn(1, 30, 24).double()
    outputs = []
    for forward in (model, lambda bag: plain(model, bag)):
        torch.manual_seed(1)
        output = forward(bag)
        outputs.append((output, gradients(model, output)))
    check(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1], outputs[1][1])


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("pool", [*POOLS, "abmil"])
@pytest.mark.parametrize("depth", [1, 2])
def test_packed_bags_have_the_output_and_gradients_of_padded_ones(
    depth: int, pool: str, tokens: str
) -> None:
    settings = {"pool": {"name": pool, "dropout": 0.0}} if pool != "mean" else {}
    model = make_model(depth=depth, tokens=TOKENS[tokens], dropout=0, **settings)
    packed = torch.randn(1, sum(SIZES), 24).double()
    padded, mask = pad_packed(packed, SIZES), mask_from_sizes(SIZES, packed.device)
    found, expected = model(packed, sizes=SIZES), plain(model, padded, mask)
    check(found, expected)
    torch.testing.assert_close(gradients(model, found), gradients(model, expected))


def test_gradients_of_features_are_those_of_the_plain_form() -> None:
    model = make_model(pool="gated").eval()
    bags = [torch.randn(1, 30, 24).double().requires_grad_() for _ in range(2)]
    bags[1].data.copy_(bags[0].data)
    for output, bag in ((model(bags[0]), bags[0]), (plain(model, bags[1]), bags[1])):
        output.logits[0, 1].backward()
        assert bag.grad is not None
    torch.testing.assert_close(bags[0].grad, bags[1].grad)


def test_a_model_after_the_context_stack_gets_the_grid() -> None:
    model = make_model(pool={"name": "bayesmil", "dim": 8, "hidden": 4, "spatial": True}).eval()
    bag, grid = torch.randn(1, 30, 24).double(), torch.randint(5, (1, 30, 2))
    expected = model.forward_bags(*model.validate(bag, None), grid)
    torch.testing.assert_close(model(bag, grid=grid).logits, expected.logits)
    assert isinstance(make_model(pool=ABMIL(16, 3)).pool, ABMIL)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_large_bag_in_parts_has_the_output_and_gradients_of_the_whole(
    depth: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts draw the same dropout, so that the size of a part does not matter."""
    model, bag = make_model(depth=depth, dropout=dropout), torch.randn(1, 30, 24).double()
    found = []
    for part in (30, 8):
        monkeypatch.setattr(folding, "PART", part)
        torch.manual_seed(1)
        output = model(bag)
        found.append((output, gradients(model, output)))
    (whole, of_whole), (in_parts, of_parts) = found
    check(in_parts, whole)
    torch.testing.assert_close(of_parts, of_whole)
