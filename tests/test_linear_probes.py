"""Linear probes find planted directions, and a model that starts from them has tokens for them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from caprmil.features import bags
from caprmil.features.batches import Sample
from caprmil.models import CAPRMIL, create
from caprmil.synthetic.tasks import SIGNAL, TASKS, TISSUE, world
from caprmil.training import linear_probes
from caprmil.training.linear_probes import (
    ProbedBag,
    distinct,
    fit_probes,
    init_from_probes,
)

WIDTH, PATCHES, BAGS = 16, 300, 40


def make(task: str, seed: int = 0) -> list[Sample]:
    made = TASKS[task](patches=PATCHES, width=WIDTH, seed=seed)
    found = [made.bag(number) for number in range(BAGS)]
    return [Sample(f"bag{n}", bags.from_arrays(f), label) for n, (f, label, _) in enumerate(found)]


def small_model(**settings: object) -> CAPRMIL:
    torch.manual_seed(0)
    return CAPRMIL(WIDTH, 2, dim=32, heads=4, tokens=4, temperature=0.15, **settings)  # type: ignore[arg-type]


def start(model: CAPRMIL, samples: list[Sample], cache_gb: float = 1.0) -> None:
    init_from_probes(model, samples, count=2, k=10, seed=3, cache_gb=cache_gb)


def planted(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(world(seed, WIDTH).directions[SIGNAL])


@pytest.mark.parametrize("task", ["rare", "distractors", "batch-effect"])
def test_a_unit_of_the_input_layer_points_in_the_planted_direction(task: str) -> None:
    model = small_model()
    before = model.input_layer.weight.detach().clone()
    start(model, make(task))
    row = model.input_layer.weight.detach()[0]
    assert float(row @ planted() / row.norm()) > 0.85
    changed = (model.input_layer.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [0, 8]  # the first channel of two heads


def test_a_token_collects_the_planted_patches_before_any_training() -> None:
    made = TASKS["rare"](patches=PATCHES, width=WIDTH)
    features, _, kinds = made.bag(BAGS + 1)  # a bag that the probes have not seen
    shares = []
    for probed in (False, True):
        model = small_model(init="centred").eval()
        if probed:
            start(model, make("rare"))
        with torch.no_grad():
            output = model(torch.from_numpy(features)[None])
        assigned = output.assignments[0][0]  # H N M
        inside = assigned[:, torch.from_numpy(kinds != TISSUE)].sum(dim=1) / assigned.sum(dim=1)
        shares.append(float(inside.max()))
    assert shares[0] < 0.2
    assert shares[1] > 0.8


def test_units_have_the_spread_of_the_others_and_a_mean_of_zero() -> None:
    model, samples = small_model(), make("rare")
    start(model, samples)
    features = np.concatenate([sample.bag.features for sample in samples])  # type: ignore[union-attr]
    values = model.input_layer(torch.from_numpy(features)).detach()
    others = [unit for unit in range(32) if unit not in (0, 8)]
    assert values[:, [0, 8]].mean(dim=0).abs().max() < 0.05
    assert float(values[:, 0].std() / values[:, others].std(dim=0).mean()) == pytest.approx(
        1, abs=0.1
    )


def test_the_top_patches_of_a_probe_are_those_of_a_naive_loop() -> None:
    torch.manual_seed(1)
    features, scale, probe = torch.randn(30, 5), torch.rand(5) + 0.5, torch.randn(5)
    features[7] = 50.0  # an outlier is pulled in to a usual distance
    scored = []
    for patch in features:
        centred = (patch - features.mean(dim=0)) * scale
        centred = centred * min(1.0, 1.5 * math.sqrt(5) / float(centred.norm()))
        scored.append((float(centred @ probe), centred))
    best = sorted(scored, key=lambda each: -each[0])[:4]
    expected = torch.stack([patch for _, patch in best]).mean(dim=0)
    found = ProbedBag.of(features, scale).top_patches(probe[:, None], 4)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


def test_features_that_never_change_are_left_out() -> None:
    samples = make("rare")
    for sample in samples:
        sample.bag.features[:, 3] = 7.0  # type: ignore[union-attr]
    model = small_model()
    start(model, samples)
    assert float(model.input_layer.weight[0, 3].detach()) == 0
    assert torch.isfinite(model.input_layer.weight).all()


def test_three_classes_have_a_probe_each() -> None:
    torch.manual_seed(0)
    directions = torch.eye(WIDTH)[:3]
    features, labels = [], [n % 3 for n in range(45)]
    for label in labels:
        bag = torch.randn(100, WIDTH)
        bag[:5] += 7 * directions[label]
        features.append(bag)
    found, classes = fit_probes(
        [ProbedBag.of(bag, torch.ones(WIDTH)) for bag in features], labels, 3, k=5, seed=0
    )
    own = {c: found[classes.index(c)] for c in range(3)}
    assert all(float(own[c] @ directions[c]) > 0.8 for c in range(3))


def test_similar_directions_count_once() -> None:
    rows = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), dim=1)
    assert distinct(rows) == [0, 2]


def test_bags_are_read_up_to_the_memory_for_bags(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def count_bags(found: Any, *args: Any, **options: Any) -> Any:
        used.append(len(found))
        return fit_probes(found, *args, **options)

    monkeypatch.setattr(linear_probes, "fit_probes", count_bags)
    monkeypatch.setattr(linear_probes, "STEPS", 1)
    one = PATCHES * WIDTH * 4 / 1e9
    for gigabytes in (8.5 * one, 0.1 * one, 1.0):
        start(small_model(), make("rare"), cache_gb=gigabytes)
    assert used == [8, 1, BAGS]


def test_abmil_starts_from_probes_too() -> None:
    model = create("abmil", WIDTH, 2, dim=32, hidden=8)
    init_from_probes(model, make("rare"), count=2, k=10, seed=3, cache_gb=1.0)
    assert model.input_layer is not None
    row = model.input_layer.weight.detach()[0]
    assert float(row @ planted() / row.norm()) > 0.85
