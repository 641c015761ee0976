"""Influence: the derivative of each logit by the count of a patch, in the bag or added to it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caprmil.models import MILModel
from caprmil.models.influence import by_counts
from small_models import small_model

SUMMED: dict[str, tuple[str, dict[str, Any]]] = {
    "mean": ("mean", {}),
    "abmil": ("abmil", {}),
    "caprmil": ("caprmil", {}),
    "caprmil, three blocks": ("caprmil", {"depth": 3}),
    "caprmil, no block": ("caprmil", {"depth": 0}),
    "caprmil+gated": ("caprmil", {"pool": "gated", "depth": 2}),
}
SAMPLES = torch.tensor([[0, 5, 11], [7, 2, 3]])


@pytest.fixture(params=SUMMED)
def model(request: pytest.FixtureRequest) -> MILModel:
    """A model whose logits depend on sums over patches only, in float64."""
    name, settings = SUMMED[request.param]
    return small_model(name, in_dim=24, n_outputs=3, **settings).double()


@pytest.fixture
def bag() -> Tensor:
    return torch.randn(1, 40, 24, dtype=torch.float64)


def test_influence_by_sums_equals_influence_by_backward_passes(
    model: MILModel, bag: Tensor
) -> None:
    assert model.summed_parts() is not None
    torch.testing.assert_close(model.influence(bag), by_counts(model, bag, None, None, None))
    torch.testing.assert_close(
        model.influence(bag, samples=SAMPLES),
        by_counts(model, bag, None, SAMPLES, None),
        rtol=1e-3,
        atol=1e-5,  # there, other patches have a count of a millionth
    )


def test_influence_in_chunks_is_that_of_the_whole_bag(model: MILModel, bag: Tensor) -> None:
    def chunks() -> tuple[Tensor, ...]:
        return torch.split(bag, 7, dim=1)

    torch.testing.assert_close(model.stream_influence(chunks), model.influence(bag))
    torch.testing.assert_close(
        model.stream_influence(chunks, samples=SAMPLES), model.influence(bag, samples=SAMPLES)
    )


def test_influence_in_a_large_bag_is_the_effect_of_a_removal(model: MILModel) -> None:
    bag = torch.randn(1, 400, 24, dtype=torch.float64)
    influence = model.influence(bag)
    with torch.no_grad():
        for patch in (0, 123):
            others = torch.arange(400) != patch
            removed = (model(bag).logits - model(bag[:, others]).logits)[0]
            torch.testing.assert_close(influence[patch], removed, rtol=0.05, atol=1e-5)


def test_influences_sum_to_zero(model: MILModel, bag: Tensor) -> None:
    influence = model.influence(bag)
    assert influence.sum(dim=0).abs().max() < 1e-5 * influence.abs().sum()


def test_equal_patches_have_equal_influence(model: MILModel, bag: Tensor) -> None:
    twice = torch.cat([bag, bag[:, :1]], dim=1)
    influence = model.influence(twice)
    torch.testing.assert_close(influence[0], influence[-1])


def test_the_influence_on_attention_pooling_has_a_closed_form(bag: Tensor) -> None:
    model = small_model("abmil", in_dim=24, n_outputs=3).double()
    attention = model(bag).attention[0]
    values = F.linear(model.patches(bag)[0], model.classify.weight)
    expected = attention[:, None] * (values - attention @ values)
    torch.testing.assert_close(model.influence(bag), expected)


def test_equal_patches_have_no_influence_on_a_mean(bag: Tensor) -> None:
    model = small_model("caprmil", in_dim=24, n_outputs=3, depth=0).double()
    equal = bag[:, :1].expand(-1, 5, -1)
    assert model.influence(equal).abs().max() < 1e-12


def test_influence_in_training_mode_is_an_error(model: MILModel, bag: Tensor) -> None:
    with pytest.raises(ValueError, match="Influence is for evaluation"):
        model.train().influence(bag)


def test_influence_on_a_model_without_patch_weights_is_an_error(bag: Tensor) -> None:
    class Plain(type(small_model("mean", in_dim=24, n_outputs=2))):  # type: ignore[misc]
        weighs_patches = False

        def summed_parts(self) -> None:
            return None

    with pytest.raises(NotImplementedError, match="cannot weigh patches"):
        Plain(24, 2).eval().influence(bag.float())


def test_influence_on_a_direction_is_the_influence_on_logits_along_it(bag: Tensor) -> None:
    directions = torch.tensor([[1.0, -1.0, 0.0]]).double()
    for name in ("caprmil", "clam"):
        model = small_model(name, in_dim=24, n_outputs=3).double()
        for samples in (None, SAMPLES):
            found = model.influence(bag, samples=samples, directions=directions)
            on_logits = model.influence(bag, samples=samples)
            torch.testing.assert_close(found[:, 0], on_logits[:, 0] - on_logits[:, 1])
