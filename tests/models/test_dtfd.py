"""DTFD-MIL against its paper: sizes, pseudo-bags, what is distilled, and who learns from what."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caprmil.experiments import cost
from caprmil.models import DTFDMIL
from caprmil.models.layers import weighted_cross_entropy

WAYS = ["afs", "maxs", "maxmins"]


def test_size_is_the_releases() -> None:
    assert cost.parameters(DTFDMIL(1024, 2)) == 789_254


def test_a_thousand_patches_cost_what_the_equations_say() -> None:
    assert cost.flops(DTFDMIL(1024, 2), n_patches=1000) / 1e9 == pytest.approx(1.314, rel=5e-3)


@pytest.mark.parametrize("n", [1, 3, 4, 10, 103])
def test_pseudo_bags_share_the_patches_evenly(n: int) -> None:
    members = DTFDMIL(24, 2).split(torch.randn(n, 24))
    assert members.sum(dim=0).eq(1).all()
    sizes = members.sum(dim=1)
    assert len(sizes) == min(4, n)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("distil", WAYS)
def test_the_same_bag_gives_the_same_bits(distil: str) -> None:
    model, bag = DTFDMIL(24, 3, distil=distil).eval(), torch.randn(1, 50, 24)
    first = model(bag)
    torch.manual_seed(77)  # nobody else's generator has a say
    second = model(bag)
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.attention, second.attention)


def test_the_split_goes_by_what_patches_hold() -> None:
    model, patches, order = DTFDMIL(24, 2).eval(), torch.randn(50, 24), torch.randperm(50)
    assert torch.equal(model.split(patches[order]), model.split(patches)[:, order])
    assert not torch.equal(model.split(patches), DTFDMIL(24, 2, seed=1).eval().split(patches))


def test_training_draws_another_split_each_time() -> None:
    model, patches = DTFDMIL(24, 2), torch.randn(50, 24)
    splits = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        splits.append(model.split(patches))
    assert torch.equal(splits[0], splits[1])
    assert not torch.equal(splits[0], splits[2])


def tier_one(model: DTFDMIL, bag: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Members, attention and logits of each pseudo-bag, one after the other."""
    answers = []
    for group in model.split(bag):
        patches = F.relu(model.project(bag[group]))[None]
        embedding, attention = model.first.pool(patches, torch.ones(patches.shape[:2]).bool())
        answers.append((group.nonzero()[:, 0], attention[0], model.first.classify(embedding[0])))
    return answers


def test_tier_one_learns_from_its_pseudo_bags_and_hears_class_weights() -> None:
    model, bags, labels = DTFDMIL(24, 3).eval(), torch.randn(2, 11, 24), torch.tensor([2, 0])
    expected = [
        torch.stack([F.cross_entropy(logits, label) for *_, logits in tier_one(model, bag)]).mean()
        for bag, label in zip(bags, labels, strict=True)
    ]
    output = model(bags)
    torch.testing.assert_close(model.loss(output, labels)["tier_one"], sum(expected) / 2)
    weights = torch.tensor([1.0, 1.0, 3.0])
    model.set_criterion(partial(weighted_cross_entropy, weights=weights))
    weighed = (3 * expected[0] + expected[1]) / 2
    torch.testing.assert_close(model.loss(output, labels)["tier_one"], weighed)


@pytest.mark.parametrize("distil", WAYS)
def test_each_tier_learns_from_its_own_loss(distil: str) -> None:
    model = DTFDMIL(24, 2, distil=distil)
    terms = model.loss(model(torch.randn(1, 11, 24)), torch.tensor([1]))
    terms["bag"].backward()
    taught = {name for name, p in model.named_parameters() if p.grad is not None}
    assert taught == {f"second.{name}" for name, _ in model.second.named_parameters()}
    model.zero_grad()
    terms["tier_one"].backward()
    assert all(parameter.grad is None for parameter in model.second.parameters())


@pytest.mark.parametrize("distil", WAYS)
def test_logits_are_sums_over_patches(distil: str) -> None:
    model = DTFDMIL(24, 3, distil=distil).double().eval()
    bags = torch.randn(2, 23, 24, dtype=torch.float64)
    output, patches = model(bags), F.relu(model.project(bags))
    each = output.attention[:, None] * (model.second.classify.weight @ patches.mT)
    expected = each.sum(dim=-1) + model.second.classify.bias
    torch.testing.assert_close(output.logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_outputs", [2, 3])
@pytest.mark.parametrize("distil", ["maxs", "maxmins"])
def test_only_the_ends_of_each_pseudo_bag_are_distilled(distil: str, n_outputs: int) -> None:
    torch.manual_seed(0)
    model = DTFDMIL(24, n_outputs, distil=distil, distilled=8).eval()
    bag, expected = torch.randn(23, 24), set()
    answers = tier_one(model, bag)
    mean = torch.stack([logits.log_softmax(dim=0) for *_, logits in answers]).mean(dim=0)
    wanted = 1 if n_outputs == 2 else int(mean.argmax())
    for members, attention, _ in answers:
        patches = F.relu(model.project(bag[members])) * attention[:, None]
        merit = (patches @ model.first.classify.weight.T).softmax(dim=1)[:, wanted]
        ranked = members[merit.argsort()].tolist()
        expected |= {*ranked[-2:], *(ranked[:2] if distil == "maxmins" else [])}
    assert set(model(bag[None]).attention[0].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("distil", WAYS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_small_bags_have_fewer_pseudo_bags(distil: str, n: int) -> None:
    model = DTFDMIL(24, 2, distil=distil, distilled=16)
    output = model(torch.randn(1, n, 24))
    torch.testing.assert_close(output.attention.sum(), torch.tensor(1.0))
    assert sum(model.loss(output, torch.tensor([0])).values()).isfinite()


def test_a_patch_at_both_ends_of_its_pseudo_bag_is_distilled_once() -> None:
    model, bag = DTFDMIL(24, 2, distil="maxmins").eval(), torch.randn(1, 5, 24)  # 2, 1, 1, 1
    patches = F.relu(model.project(bag))
    embedding, _ = model.second.pool(patches, torch.ones(1, 5, dtype=torch.bool))
    torch.testing.assert_close(model(bag).logits, model.second.classify(embedding))


def test_scores_are_tier_ones_answers_to_bags_of_one_patch() -> None:
    model, bag = DTFDMIL(24, 3).eval(), torch.randn(6, 24)
    for patch, scores in zip(bag, model(bag[None]).scores[0], strict=True):
        ((_, _, alone),) = tier_one(model, patch[None])
        torch.testing.assert_close(scores, alone.softmax(dim=0))


@pytest.mark.parametrize("settings", [{"distil": "mean"}, {"groups": 0}, {"distilled": 0}])
def test_senseless_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        DTFDMIL(24, 2, **settings)
