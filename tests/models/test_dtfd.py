"""DTFD-MIL against its paper: sizes, pseudo-bags, distilled patches, and the loss of each tier."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caprmil.experiments import cost
from caprmil.models import DTFDMIL
from caprmil.models.layers import weighted_cross_entropy

METHODS = ["afs", "maxs", "maxmins"]


def test_the_number_of_parameters_is_that_of_the_release() -> None:
    assert cost.parameters(DTFDMIL(1024, 2)) == 789_254


def test_a_thousand_patches_take_the_operations_of_the_equations() -> None:
    assert cost.flops(DTFDMIL(1024, 2), n_patches=1000) / 1e9 == pytest.approx(1.314, rel=5e-3)


@pytest.mark.parametrize("n", [1, 3, 4, 10, 103])
def test_patches_are_divided_evenly_among_pseudo_bags(n: int) -> None:
    members = DTFDMIL(24, 2).split(torch.randn(n, 24))
    assert members.sum(dim=0).eq(1).all()
    sizes = members.sum(dim=1)
    assert len(sizes) == min(4, n)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("distil", METHODS)
def test_repeated_evaluations_are_bit_identical(distil: str) -> None:
    model, bag = DTFDMIL(24, 3, distil=distil).eval(), torch.randn(1, 50, 24)
    first = model(bag)
    torch.manual_seed(77)  # the global generator has no effect
    second = model(bag)
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.attention, second.attention)


def test_the_split_depends_on_the_features_not_on_the_order_of_patches() -> None:
    model, patches, order = DTFDMIL(24, 2).eval(), torch.randn(50, 24), torch.randperm(50)
    assert torch.equal(model.split(patches[order]), model.split(patches)[:, order])
    assert not torch.equal(model.split(patches), DTFDMIL(24, 2, seed=1).eval().split(patches))


def test_training_draws_a_new_split_each_time() -> None:
    model, patches = DTFDMIL(24, 2), torch.randn(50, 24)
    splits = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        splits.append(model.split(patches))
    assert torch.equal(splits[0], splits[1])
    assert not torch.equal(splits[0], splits[2])


def tier_one(model: DTFDMIL, bag: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the members, attention and logits of each pseudo-bag."""
    pseudo_bags = []
    for group in model.split(bag):
        patches = F.relu(model.project(bag[group]))[None]
        embedding, attention = model.first.pool(patches, torch.ones(patches.shape[:2]).bool())
        pseudo_bags.append(
            (group.nonzero()[:, 0], attention[0], model.first.classify(embedding[0]))
        )
    return pseudo_bags


def test_the_loss_of_tier_one_is_that_of_its_pseudo_bags_with_class_weights() -> None:
    model, bags, labels = DTFDMIL(24, 3).eval(), torch.randn(2, 11, 24), torch.tensor([2, 0])
    expected = [
        torch.stack([F.cross_entropy(logits, label) for *_, logits in tier_one(model, bag)]).mean()
        for bag, label in zip(bags, labels, strict=True)
    ]
    output = model(bags)
    torch.testing.assert_close(model.loss(output, labels)["tier_one"], sum(expected) / 2)
    weights = torch.tensor([1.0, 1.0, 3.0])
    model.set_criterion(partial(weighted_cross_entropy, weights=weights))
    weighted = (3 * expected[0] + expected[1]) / 2
    torch.testing.assert_close(model.loss(output, labels)["tier_one"], weighted)


@pytest.mark.parametrize("distil", METHODS)
def test_each_tier_has_gradients_of_its_own_loss_only(distil: str) -> None:
    model = DTFDMIL(24, 2, distil=distil)
    terms = model.loss(model(torch.randn(1, 11, 24)), torch.tensor([1]))
    terms["bag"].backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {f"second.{name}" for name, _ in model.second.named_parameters()}
    model.zero_grad()
    terms["tier_one"].backward()
    assert all(parameter.grad is None for parameter in model.second.parameters())


@pytest.mark.parametrize("distil", METHODS)
def test_logits_are_sums_over_patches(distil: str) -> None:
    model = DTFDMIL(24, 3, distil=distil).double().eval()
    bags = torch.randn(2, 23, 24, dtype=torch.float64)
    output, patches = model(bags), F.relu(model.project(bags))
    each = output.attention[:, None] * (model.second.classify.weight @ patches.mT)
    expected = each.sum(dim=-1) + model.second.classify.bias
    torch.testing.assert_close(output.logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_outputs", [2, 3])
@pytest.mark.parametrize("distil", ["maxs", "maxmins"])
def test_only_the_highest_and_lowest_patches_of_a_pseudo_bag_are_distilled(
    distil: str, n_outputs: int
) -> None:
    torch.manual_seed(0)
    model = DTFDMIL(24, n_outputs, distil=distil, distilled=8).eval()
    bag, expected = torch.randn(23, 24), set()
    pseudo_bags = tier_one(model, bag)
    mean = torch.stack([logits.log_softmax(dim=0) for *_, logits in pseudo_bags]).mean(dim=0)
    target = 1 if n_outputs == 2 else int(mean.argmax())
    for members, attention, _ in pseudo_bags:
        patches = F.relu(model.project(bag[members])) * attention[:, None]
        probability = (patches @ model.first.classify.weight.T).softmax(dim=1)[:, target]
        ranked = members[probability.argsort()].tolist()
        expected |= {*ranked[-2:], *(ranked[:2] if distil == "maxmins" else [])}
    assert set(model(bag[None]).attention[0].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("distil", METHODS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_small_bags_have_fewer_pseudo_bags(distil: str, n: int) -> None:
    model = DTFDMIL(24, 2, distil=distil, distilled=16)
    output = model(torch.randn(1, n, 24))
    torch.testing.assert_close(output.attention.sum(), torch.tensor(1.0))
    assert sum(model.loss(output, torch.tensor([0])).values()).isfinite()


def test_a_patch_that_is_highest_and_lowest_is_distilled_once() -> None:
    # The pseudo-bags have 2, 1, 1 and 1 patches.
    model, bag = DTFDMIL(24, 2, distil="maxmins").eval(), torch.randn(1, 5, 24)
    patches = F.relu(model.project(bag))
    embedding, _ = model.second.pool(patches, torch.ones(1, 5, dtype=torch.bool))
    torch.testing.assert_close(model(bag).logits, model.second.classify(embedding))


def test_scores_are_tier_one_probabilities_of_bags_of_one_patch() -> None:
    model, bag = DTFDMIL(24, 3).eval(), torch.randn(6, 24)
    for patch, scores in zip(bag, model(bag[None]).scores[0], strict=True):
        ((_, _, alone),) = tier_one(model, patch[None])
        torch.testing.assert_close(scores, alone.softmax(dim=0))


@pytest.mark.parametrize("settings", [{"distil": "mean"}, {"groups": 0}, {"distilled": 0}])
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        DTFDMIL(24, 2, **settings)
