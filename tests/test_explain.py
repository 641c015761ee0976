"""What explanations promise: they add up, they keep the order of the bag, and they say how."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from caprmil.errors import RunError, SlideError
from caprmil.explain import (
    Explanation,
    ask_run,
    attribute,
    examine,
    explain,
    find,
    squares,
    top_patches,
)
from caprmil.explain.attribution import Method, integrate, take_out
from caprmil.explain.explanation import view
from caprmil.explain.pictures import most_telling
from caprmil.features import bags
from caprmil.models import MILModel, create, list_models
from caprmil.runs.run import Run

CLASSES = ("a", "b", "c")


def small(name: str = "caprmil", **settings: object) -> MILModel:
    torch.manual_seed(1)
    settings = {"dim": 16, "heads": 2, "tokens": 3} | settings if "caprmil" in name else settings
    return create(name, 12, len(CLASSES), **settings).eval()


def bag_of(n: int, *, step: int | None = 100, seed: int = 0) -> bags.Bag:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 12)).astype(np.float32)
    cells = rng.permutation(49)[:n]
    coords = None if step is None else np.stack([cells % 7, cells // 7], axis=1) * step
    return bags.from_arrays(features, coords)


def tensor(bag: bags.Bag) -> torch.Tensor:
    return torch.from_numpy(bag.features)[None]


@pytest.mark.parametrize("pool", ["mean", "attention", "gated"])
def test_evidence_and_rest_are_the_logit(pool: str) -> None:
    told = explain(small(pool=pool), bag_of(30), classes=CLASSES)
    assert (told.method, told.exact) == ("exact", True)
    assert told.gap < 1e-5
    np.testing.assert_allclose(told.evidence.sum(axis=0) + told.rest, told.logits, atol=1e-5)


@pytest.mark.parametrize("keepable", [0, 400_000])
@pytest.mark.parametrize(
    "name", ["mean", "abmil", "caprmil", "caprmil+attention", "caprmil+gated", "caprmil+abmil"]
)
def test_a_bag_that_is_read_in_pieces_is_explained_like_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, keepable: int
) -> None:
    monkeypatch.setattr("caprmil.runs.inference.KEEPABLE", keepable)
    model, bag = small(name), bag_of(40)
    path = bags.write(tmp_path / "a.h5", bag.features, bag.coords, step=100.0)
    bag = bags.read(path)  # float16 on disk
    whole = explain(model, bag, classes=CLASSES)
    with bags.streaming(path, rows=7) as stream:
        found = explain(model, stream, classes=CLASSES)
    for field in ("logits", "probabilities", "evidence", "rest", "attention", "coords", "cells"):
        np.testing.assert_allclose(getattr(found, field), getattr(whole, field), atol=1e-6)
    assert found.gap < 1e-5
    assert found.before is None
    assert (found.assignments is None) == (whole.assignments is None or not keepable)
    if found.assignments is not None:
        np.testing.assert_allclose(found.assignments, whole.assignments, atol=1e-6)


@pytest.mark.parametrize(("name", "method"), [("clam", None), ("caprmil", "perturbation")])
def test_what_needs_all_of_a_bag_is_not_explained_in_pieces(
    tmp_path: Path, name: str, method: Method | None
) -> None:
    path = bags.write(tmp_path / "a.h5", bag_of(40).features)
    with bags.streaming(path) as stream, pytest.raises(RunError, match="Read it whole"):
        explain(small(name), stream, classes=CLASSES, method=method)


def test_a_large_bag_of_a_run_is_explained_without_reading_it_whole(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = tiny_run.predictions.slides[0]
    whole = examine(tiny_run, find(tiny_run, slide))
    monkeypatch.setattr("caprmil.runs.inference.LARGE", 0)
    monkeypatch.setattr(bags, "read", None)  # nobody calls it
    found = examine(tiny_run, find(tiny_run, slide))
    np.testing.assert_allclose(found.explanation.evidence, whole.explanation.evidence, atol=1e-6)
    np.testing.assert_allclose(found.answer.probabilities, whole.answer.probabilities, atol=1e-6)


def test_a_lead_is_over_the_mean_of_the_others() -> None:
    told = explain(small(), bag_of(9), classes=CLASSES)
    a, b, c = told.evidence.T
    np.testing.assert_allclose(told.towards(1), b - (a + c) / 2, rtol=1e-4, atol=1e-6)


def test_integrated_gradients_complete_as_steps_grow() -> None:
    model, features = small("transmil"), tensor(bag_of(10))
    gaps = []
    for steps in (2, 8, 64):
        found = integrate(model, features, steps=steps)
        logits = model(features).logits[0]
        gaps.append((found.terms.sum(dim=0) + found.rest - logits).abs().max().item())
    assert gaps[2] < gaps[0]
    assert gaps[2] < 5e-3


def test_integrated_gradients_are_a_sum_along_the_way() -> None:
    model, features = small(), tensor(bag_of(6))
    start = features.mean(dim=1, keepdim=True)
    expected = torch.zeros(6, 3)
    for step in range(4):
        here = (start + (step + 0.5) / 4 * (features - start)).requires_grad_()
        for number in range(3):
            model(here).logits[0, number].backward()
            assert here.grad is not None
            slope, here.grad = here.grad, None
            expected[:, number] += (slope * (features - start)).sum(dim=-1)[0] / 4
    torch.testing.assert_close(integrate(model, features, steps=4).terms, expected)


def test_perturbation_takes_out_one_patch_at_a_time() -> None:
    model, bag = small("transmil"), bag_of(7)
    told = explain(model, bag, classes=CLASSES, method="perturbation")
    for patch in range(7):
        fewer = np.delete(bag.features, patch, axis=0)
        cells = np.delete(bag.grid(), patch, axis=0)  # type: ignore[arg-type]
        options = {"grid": torch.from_numpy(cells)[None]}
        without = model(torch.from_numpy(fewer)[None], **options).logits[0].detach()
        np.testing.assert_allclose(told.evidence[patch], told.logits - without.numpy(), atol=1e-5)


def test_one_patch_alone_is_taken_out_for_nothing() -> None:
    found = take_out(small(), tensor(bag_of(1)))
    assert found.terms.eq(0).all()


def test_what_is_no_sum_is_estimated_and_said() -> None:
    model, features = small("transmil"), tensor(bag_of(5))
    assert attribute(model, features)[1] == "integrated gradients"
    assert attribute(model, features, method="perturbation")[1] == "perturbation"
    with pytest.raises(RunError, match="no sum over patches"):
        attribute(model, features, method="exact")


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    options = {"method": "perturbation", "progress": lambda *at: seen.append(at)}
    attribute(small(), tensor(bag_of(4)), **options)  # type: ignore[arg-type]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_views_are_principal_components() -> None:
    patches = torch.randn(40, 9, generator=torch.manual_seed(0)) * torch.arange(1, 10)
    found, reference = view(patches), PCA(2).fit(patches.numpy())
    expected = reference.transform(patches.numpy())
    np.testing.assert_allclose(np.abs(found.points), np.abs(expected), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.variance, reference.explained_variance_ratio_, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 2])
def test_few_patches_have_a_view_as_well(n: int) -> None:
    found = view(torch.randn(n, 5))
    assert found.points.shape == (n, 2)
    assert found.variance[1] == pytest.approx(0, abs=1e-6)


def test_tokens_share_all_of_every_patch() -> None:
    told = explain(small(depth=2), bag_of(20), classes=CLASSES)
    assert told.usage.shape == (2, 2, 3)
    np.testing.assert_allclose(told.usage.sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(sum(told.token(n) for n in range(3)), 1, rtol=1e-5)


def assigned(shares: np.ndarray) -> Explanation:
    told = explain(small(), bag_of(len(shares)), classes=CLASSES)
    return replace(told, assignments=shares[None, None].astype(np.float32))


def test_a_patch_is_decided_at_one_token_and_undecided_at_all() -> None:
    told = assigned(np.array([[1, 0, 0], [1 / 3] * 3, [0.5, 0.5, 0]]))
    expected = [0, 1, np.log(2) / np.log(3)]
    np.testing.assert_allclose(told.uncertainty[0, 0], expected, atol=1e-6)
    assert assigned(np.ones((2, 1))).uncertainty.tolist() == [[[0, 0]]]


def test_the_most_telling_head_sorts_patches() -> None:
    even, one = np.full((6, 2), 0.5), np.tile([1.0, 0.0], (6, 1))
    sorts = np.repeat(np.eye(2), 3, axis=0)
    assert most_telling(np.stack([even, sorts, one])) == 1


def test_top_patches_are_the_highest_and_of_equals_the_first() -> None:
    values = np.random.default_rng(0).integers(0, 9, 50).astype(np.float32)
    expected = sorted(range(50), key=lambda row: (-values[row], row))[:8]
    assert top_patches(values).tolist() == expected
    assert top_patches(values[:3]).tolist() == sorted(range(3), key=lambda row: -values[row])


@pytest.mark.parametrize("name", list_models())
def test_layers_have_names_of_their_own_and_a_number_a_patch(name: str) -> None:
    layers = list(explain(small(name), bag_of(11), classes=CLASSES).layers())
    keys = [layer.key for layer in layers]
    assert keys[:3] == ["evidence-0", "evidence-1", "evidence-2"]
    assert keys[3:7] == ["above-0", "above-1", "above-2", "attention"]
    assert len(set(keys)) == len(keys)
    assert {layer.values.shape for layer in layers} == {(11,)}


def test_order_of_patches_is_order_of_rows() -> None:
    bag, order = bag_of(15), np.random.default_rng(3).permutation(15)
    other = bags.from_arrays(bag.features[order], bag.coords[order])  # type: ignore[index]
    one, two = (explain(small(), each, classes=CLASSES) for each in (bag, other))
    np.testing.assert_allclose(two.evidence, one.evidence[order], atol=1e-6)
    np.testing.assert_array_equal(two.cells, one.cells[order])


def test_patches_without_a_place_stand_in_a_square() -> None:
    told = explain(small(), bag_of(7, step=None), classes=CLASSES)
    assert told.coords is None
    assert told.cells.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1], [0, 2]]
    assert squares(told.info, told.coords, 0.5) is None


def test_squares_are_pixels_also_where_a_bag_counts_in_microns() -> None:
    coords = np.array([[0.0, 112.0]])
    info = bags.from_arrays(np.ones((1, 3)), coords, unit="um", step=112.0).info
    assert squares(info, coords, None) is None
    found = squares(info, coords, 0.5)
    assert found is not None
    assert (found.corners.tolist(), found.side) == ([[0, 224]], 224)


def test_contours_with_grids_of_their_own_keep_their_places() -> None:
    """As CLAM lays them: two patches can share a cell, and none is lost."""
    coords = np.array([[0, 0], [256, 0], [100, 30], [356, 30]])
    bag = bags.from_arrays(np.eye(4, 12), coords, step=256.0, patch_level0=256.0)
    told = explain(small(), bag, classes=CLASSES)
    assert told.gap < 1e-5
    found = squares(told.info, told.coords, None)
    assert found is not None
    np.testing.assert_array_equal(found.corners, coords)


def test_a_slide_of_the_cohort_is_answered_by_models_that_have_not_seen_it(tiny_run: Run) -> None:
    name = tiny_run.splits[1].test[0]
    subject = find(tiny_run, name)
    answer = ask_run(tiny_run, subject, bags.read(subject.bag))
    expected = tiny_run.predict({name: subject.bag}, device="cpu").probabilities[0]
    assert (list(answer.by_fold), answer.unseen) == ([tiny_run.splits[1].name], True)
    np.testing.assert_array_equal(answer.probabilities, expected)


def test_a_new_bag_is_answered_by_all_and_explained_by_the_nearest(
    tiny_run: Run, tmp_path: Path
) -> None:
    old = bags.read(find(tiny_run, tiny_run.splits[0].test[0]).bag)
    path = bags.write(tmp_path / "new.h5", old.features, old.coords, step=old.info.step)
    case = examine(tiny_run, find(tiny_run, path), device="cpu")
    expected = tiny_run.predict({"new": path}, device="cpu").probabilities[0]
    np.testing.assert_allclose(case.answer.probabilities, expected)
    away = {f: abs(p - expected).max() for f, p in case.answer.by_fold.items()}
    assert case.explanation.fold == min(away, key=lambda fold: away[fold])
    assert (case.name, case.label, len(away)) == ("new", None, 3)


def test_a_case_knows_the_label_of_its_slide(tiny_run: Run) -> None:
    name = tiny_run.predictions.slides[0]
    assert tiny_run.predictions.labels is not None
    expected = tiny_run.classes[int(tiny_run.predictions.labels[0])]
    assert examine(tiny_run, find(tiny_run, name), device="cpu").label == expected


def test_what_is_no_slide_of_a_run_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="neither a slide"):
        find(tiny_run, "nobody")
    name = tiny_run.predictions.slides[0]
    other = tmp_path / "another.png"
    other.touch()
    with pytest.raises(SlideError, match="is not the slide"):
        find(tiny_run, name, pixels=other)
