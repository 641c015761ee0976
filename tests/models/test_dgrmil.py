"""DGRMIL against its paper: the whole forward pass, the terms of its loss, and its centres."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_nystrom import plain_attention
from torch import Tensor

from caprmil.experiments import cost
from caprmil.models import DGRMIL

UNUSED = 131_072  # parameters of two matrices of the authors' code that are never used


def small(n_outputs: int = 3, **settings: Any) -> DGRMIL:
    torch.manual_seed(0)
    model = DGRMIL(24, n_outputs, dim=16, heads=4, landmarks=8, **settings)
    for part in (model.cross_attention.query, model.cross_attention.key):
        part.weight.data *= 3  # makes the attention uneven
    return model.double().eval()


def random_bag(n: int, bags: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(bags, n, 24, dtype=torch.float64, generator=generator)


def plain_project(model: DGRMIL, rows: Tensor) -> Tensor:
    first, second = model.projections
    return F.relu(second(F.relu(first(rows))))


def plain_forward(model: DGRMIL, bag: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of one bag, and the attention of the class token and the global vectors."""

    def in_context(rows: Tensor, layer: Any, norm: Any) -> Tensor:
        return norm(rows + plain_attention(layer.attend, layer.norm(rows))[0])

    patches = in_context(plain_project(model, bag), *model.patch_layer)
    vectors = plain_project(model, model.global_vectors[0])
    queries = in_context(torch.cat([model.class_token[0], vectors]), *model.global_layer)
    query = model.cross_attention.query(queries).chunk(4, dim=1)
    key = model.cross_attention.key(patches).chunk(4, dim=1)
    value = model.cross_attention.value(patches).chunk(4, dim=1)
    shares = [(q @ k.T / math.sqrt(4)).softmax(dim=1) for q, k in zip(query, key, strict=True)]
    attended = torch.cat([s @ v for s, v in zip(shares, value, strict=True)], dim=1)
    attended_rows = model.head(model.cross_attention.out(attended))
    return model.classify(attended_rows[0]), sum(shares) / 4


@pytest.mark.parametrize("n", [1, 5, 8, 9, 24, 30])
@pytest.mark.parametrize("vectors", [1, 5, 9])
def test_the_output_is_that_of_the_plain_form(n: int, vectors: int) -> None:
    model, bag = small(vectors=vectors), random_bag(n)
    logits, shares = plain_forward(model, bag[0])
    output = model(bag)
    torch.testing.assert_close(output.logits[0], logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.attention[0], shares[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.global_attention(bag)[0], shares[1:], rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_plain_form() -> None:
    model, bag = small(), random_bag(12)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(plain_forward(model, bag[0])[0][0], parameters)
    measured = torch.autograd.grad(model(bag).logits[0, 0], parameters)
    torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("vectors", "parameters"), [(3, 4_340_242), (5, 4_342_290), (6, 4_343_314)]
)
def test_the_number_of_parameters_is_the_papers_without_unused_ones(
    vectors: int, parameters: int
) -> None:
    assert cost.parameters(DGRMIL(1024, 2, vectors=vectors)) + UNUSED == parameters


def test_a_thousand_patches_take_11_gflop() -> None:
    measured = cost.flops(DGRMIL(1024, 2), n_patches=1000)
    assert measured / 1e9 == pytest.approx(11.25, abs=0.05)


def test_initial_values_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    model = DGRMIL(512, 2, dim=512, landmarks=8)
    for drawn in (model.global_vectors, model.class_token, model.centres):
        assert drawn.std().item() == pytest.approx(1, abs=0.1)
    for part, gain in [
        (model.cross_attention.query, 0.5**0.5),
        (model.cross_attention.key, 0.5**0.5),
        (model.cross_attention.out, 1),
    ]:
        widest = gain * math.sqrt(6 / (512 + 512))
        assert part.weight.abs().max().item() == pytest.approx(widest, rel=1e-3)
    assert not model.cross_attention.out.bias.any()


def test_with_a_grid_the_order_of_patches_does_not_matter() -> None:
    model, bag, order = small(), random_bag(12), torch.randperm(12)
    grid = torch.stack([torch.arange(12) % 4, torch.arange(12) // 4], dim=-1)
    output, permuted = model(bag), model(bag[:, order], grid=grid[None, order])
    torch.testing.assert_close(permuted.logits, output.logits)
    torch.testing.assert_close(permuted.attention, output.attention[:, order])
    maps = model.global_attention(bag[:, order], grid[order])
    torch.testing.assert_close(maps, model.global_attention(bag)[:, :, order])


def test_without_a_grid_the_order_of_patches_matters() -> None:
    model, bag = small(), random_bag(12)
    assert model.order_matters
    assert not torch.allclose(model(bag.flip(1)).logits, model(bag).logits)


# Loss


def plain_terms(model: DGRMIL) -> tuple[Tensor, Tensor]:
    """Return the diversity and triplet terms without their weights, vector by vector."""
    vectors = [v / v.norm() for v in plain_project(model, model.global_vectors[0])]
    gram = torch.stack([torch.stack([v @ w for w in vectors]) for v in vectors])
    negative, positive = model.centres
    margins = [1 + distance(v, positive) - distance(v, negative) for v in vectors]
    return -gram.det().log(), sum(max(margin, 0) for margin in margins) / len(margins)


def distance(one: Tensor, other: Tensor) -> Tensor:
    return 1 - (one @ other) / (one.norm() * other.norm())


def test_the_terms_of_the_loss_are_those_of_the_paper() -> None:
    model, labels = small(), torch.tensor([2, 0])
    model.centres[1] = 3 * plain_project(model, model.global_vectors[0])[0].detach()
    model.centres[0] = -model.centres[1]  # makes the margin of some vectors negative
    output = model(random_bag(9, bags=2))
    terms, (diversity, triplet) = model.loss(output, labels), plain_terms(model)
    torch.testing.assert_close(terms["diversity"].double(), 0.1 * diversity, rtol=1e-4, atol=0)
    torch.testing.assert_close(terms["triplet"].double(), 0.1 * triplet, rtol=1e-6, atol=0)
    bag = F.cross_entropy(output.logits, labels)
    torch.testing.assert_close(terms["bag"].double(), bag, rtol=1e-6, atol=0)


def test_the_weights_of_the_terms_are_settings() -> None:
    plain, changed = small(), small(diversity_weight=0.3, triplet_weight=0.0)
    terms, others = (m.loss(m(random_bag(9)), torch.tensor([1])) for m in (plain, changed))
    torch.testing.assert_close(others["diversity"], 3 * terms["diversity"])
    assert terms["triplet"] > others["triplet"] == 0


def test_the_first_epochs_have_only_the_bag_loss() -> None:
    model, counts = small(), []
    for epoch in (None, 0, 4, 5, 30):
        if epoch is not None:
            model.on_epoch_start(epoch, n_bags=7)
        terms = model.loss(model(random_bag(9)), torch.tensor([1]))
        counts.append((bool(terms["diversity"]), bool(terms["triplet"])))
    assert counts == [(True, True), (False, False), (False, False), (True, True), (True, True)]


def test_equal_global_vectors_have_a_high_but_finite_diversity_loss() -> None:
    model, apart = small(), small()
    model.global_vectors.data[:] = model.global_vectors.data[:, :1].clone()
    terms, others = (m.loss(m(random_bag(9)), torch.tensor([1])) for m in (model, apart))
    sum(terms.values()).backward()
    assert others["diversity"] + 1 < terms["diversity"] < torch.inf
    assert model.global_vectors.grad.isfinite().all()


def test_both_logits_of_two_classes_have_a_gradient() -> None:
    model = small(n_outputs=2)
    model.loss(model(random_bag(9)), torch.tensor([1]))["bag"].backward()
    assert (model.classify.bias.grad != 0).all()


# Centres


def test_a_bag_moves_the_centre_of_its_class_in_training() -> None:
    model, bags = small(patch_dropout=0.0).train(), random_bag(9, bags=3)
    negative, positive = model.centres.clone()
    first, second, third = (plain_project(model, bag).mean(dim=0).detach() for bag in bags)
    model.loss(model(bags), torch.tensor([2, 0, 1]))
    positive = 0.4 * (0.4 * positive + 0.6 * first) + 0.6 * third
    torch.testing.assert_close(
        model.centres, torch.stack([0.4 * negative + 0.6 * second, positive])
    )


def test_centres_move_from_the_first_epoch_and_not_in_evaluation() -> None:
    model, moved = small(), []
    model.on_epoch_start(0, n_bags=1)
    for training in (True, False):
        before = model.centres.clone()
        model.train(training).loss(model(random_bag(9)), torch.tensor([1]))
        moved.append(not torch.equal(model.centres, before))
    assert moved == [True, False]


def test_the_triplet_term_uses_the_updated_centre() -> None:
    model = small(patch_dropout=0.0).train()
    _, before = plain_terms(model)
    terms = model.loss(model(random_bag(9)), torch.tensor([1]))
    _, after = plain_terms(model)
    torch.testing.assert_close(terms["triplet"].double(), 0.1 * after, rtol=1e-6, atol=0)
    assert not torch.isclose(before, after)


# Patch dropout


def test_whole_patches_are_dropped_independently_at_each_layer() -> None:
    torch.manual_seed(0)
    kept = small(patch_dropout=0.1).draw_patches(20_000)[..., 0]
    dropped = kept == 0
    torch.testing.assert_close(kept[~dropped].unique(), torch.tensor([1 / 0.9]))
    torch.testing.assert_close(
        dropped.float().mean(dim=1), torch.full((2,), 0.1), atol=0.01, rtol=0
    )
    assert (dropped[0] & dropped[1]).float().mean() == pytest.approx(0.01, abs=0.004)


def test_the_mean_of_a_bag_includes_dropped_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, bag = small().train(), random_bag(3)
    kept = torch.tensor([[2.0, 0.0, 2.0], [2.0, 2.0, 0.0]])
    monkeypatch.setattr(model, "draw_patches", lambda n: kept.unsqueeze(-1))
    first, second = model.projections
    inner = F.relu(first(bag[0])) * kept[0].double().unsqueeze(-1)
    patches = F.relu(second(inner)) * kept[1].double().unsqueeze(-1)
    torch.testing.assert_close(model(bag).aux["centre"][0], patches.mean(dim=0).detach())


def test_at_least_one_patch_is_kept() -> None:
    torch.manual_seed(0)
    model = small(patch_dropout=0.9)
    for n in (1, 2, 5) * 50:
        scales = model.draw_patches(n).prod(dim=0)
        assert scales.max().item() == pytest.approx(100, rel=1e-4)


@pytest.mark.parametrize("settings", [{"vectors": 0}, {"patch_dropout": 1.0}, {"heads": 5}])
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
        DGRMIL(24, 2, **settings)
