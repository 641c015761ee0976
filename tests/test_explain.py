"""Explanations sum to the logits, keep the order of the bag, and name their method."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from caprmil.errors import RunError, SlideError
from caprmil.explain import (
    Explanation,
    attribute,
    explain,
    explain_slide,
    locate_slide,
    patch_boxes,
    predict_slide,
    top_patches,
)
from caprmil.explain.attribution import Method, integrated_gradients, leave_one_out
from caprmil.explain.explanation_figures import most_informative_head
from caprmil.explain.principal_plane import principal_plane
from caprmil.features import bags
from caprmil.models import MILModel, list_models
from caprmil.runs.run import Run
from caprmil.targets import Classification
from small_models import small_model

CLASSES = ("a", "b", "c")
TARGET = Classification(classes=CLASSES)


def small(name: str = "caprmil", **settings: object) -> MILModel:
    return small_model(name, 12, len(CLASSES), seed=1, **settings)


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
    explanation = explain(small(pool=pool), bag_of(30), target=TARGET)
    assert (explanation.method, explanation.exact) == ("exact", True)
    assert explanation.gap < 1e-5
    np.testing.assert_allclose(
        explanation.evidence.sum(axis=0) + explanation.rest, explanation.logits, atol=1e-5
    )


@pytest.mark.parametrize("keepable", [0, 400_000])
@pytest.mark.parametrize(
    "name", ["mean", "abmil", "caprmil", "caprmil+attention", "caprmil+gated", "caprmil+abmil"]
)
def test_a_bag_that_is_read_in_chunks_is_explained_like_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, keepable: int
) -> None:
    monkeypatch.setattr("caprmil.runs.inference.KEEPABLE", keepable)
    model, bag = small(name), bag_of(40)
    path = bags.write(tmp_path / "a.h5", bag.features, bag.coords, step=100.0)
    bag = bags.read(path)  # float16 on disk
    whole = explain(model, bag, target=TARGET)
    with bags.streaming(path, rows=7) as stream:
        found = explain(model, stream, target=TARGET)
    for field in ("logits", "answer", "evidence", "rest", "attention", "coords", "cells"):
        np.testing.assert_allclose(getattr(found, field), getattr(whole, field), atol=1e-6)
    assert found.gap < 1e-5
    assert found.before is None
    assert (found.assignments is None) == (whole.assignments is None or not keepable)
    if found.assignments is not None:
        np.testing.assert_allclose(found.assignments, whole.assignments, atol=1e-6)


@pytest.mark.parametrize(("name", "method"), [("clam", None), ("caprmil", "perturbation")])
def test_a_method_that_needs_the_whole_bag_refuses_chunks(
    tmp_path: Path, name: str, method: Method | None
) -> None:
    path = bags.write(tmp_path / "a.h5", bag_of(40).features)
    with bags.streaming(path) as stream, pytest.raises(RunError, match="Read it into memory"):
        explain(small(name), stream, target=TARGET, method=method)


def test_a_large_bag_of_a_run_is_explained_in_chunks(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = tiny_run.predictions.slides[0]
    whole = explain_slide(tiny_run, locate_slide(tiny_run, slide))
    monkeypatch.setattr("caprmil.runs.inference.LARGE", 0)
    monkeypatch.setattr(bags, "read", None)  # it must not be called
    found = explain_slide(tiny_run, locate_slide(tiny_run, slide))
    np.testing.assert_allclose(found.explanation.evidence, whole.explanation.evidence, atol=1e-6)
    np.testing.assert_allclose(found.answer.mean, whole.answer.mean, atol=1e-6)


def test_evidence_for_a_class_is_relative_to_the_mean_of_the_others() -> None:
    explanation = explain(small(), bag_of(9), target=TARGET)
    a, b, c = explanation.evidence.T
    np.testing.assert_allclose(explanation.evidence_for(1), b - (a + c) / 2, rtol=1e-4, atol=1e-6)


def test_integrated_gradients_approach_the_logits_with_more_steps() -> None:
    model, features = small("transmil"), tensor(bag_of(6))
    gaps = []
    for steps in (2, 8, 32):
        found = integrated_gradients(model, features, steps=steps)
        logits = model(features).logits[0]
        gaps.append((found.terms.sum(dim=0) + found.rest - logits).abs().max().item())
    assert gaps[2] < gaps[0]
    assert gaps[2] < 5e-3


def test_integrated_gradients_are_the_sum_of_gradients_along_the_path() -> None:
    model, features = small(), tensor(bag_of(6))
    start = features.mean(dim=1, keepdim=True)
    expected = torch.zeros(6, 3)
    places, weights = np.polynomial.legendre.leggauss(4)
    for place, weight in zip((places + 1) / 2, weights / 2, strict=True):
        here = (start + float(place) * (features - start)).requires_grad_()
        for number in range(3):
            model(here).logits[0, number].backward()
            assert here.grad is not None
            gradient, here.grad = here.grad, None
            expected[:, number] += float(weight) * (gradient * (features - start)).sum(dim=-1)[0]
    torch.testing.assert_close(integrated_gradients(model, features, steps=4).terms, expected)


def test_perturbation_leaves_out_one_patch_at_a_time() -> None:
    model, bag = small("transmil"), bag_of(7)
    explanation = explain(model, bag, target=TARGET, method="perturbation")
    for patch in range(7):
        fewer = np.delete(bag.features, patch, axis=0)
        cells = np.delete(bag.grid(), patch, axis=0)  # type: ignore[arg-type]
        options = {"grid": torch.from_numpy(cells)[None]}
        without = model(torch.from_numpy(fewer)[None], **options).logits[0].detach()
        np.testing.assert_allclose(
            explanation.evidence[patch], explanation.logits - without.numpy(), atol=1e-5
        )


def test_a_bag_of_one_patch_has_no_terms_by_perturbation() -> None:
    found = leave_one_out(small(), tensor(bag_of(1)))
    assert found.terms.eq(0).all()


def test_the_evidence_of_a_model_that_is_not_a_sum_is_called_an_estimate() -> None:
    model, features = small("transmil"), tensor(bag_of(5))
    assert attribute(model, features)[1] == "integrated gradients"
    assert attribute(model, features, method="perturbation")[1] == "perturbation"
    with pytest.raises(RunError, match="not a sum over patches"):
        attribute(model, features, method="exact")


def test_progress_counts_patches() -> None:
    seen: list[tuple[int, int]] = []
    options = {"method": "perturbation", "progress": lambda *at: seen.append(at)}
    attribute(small(), tensor(bag_of(4)), **options)  # type: ignore[arg-type]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_principal_planes_agree_with_scikit_learn() -> None:
    patches = torch.randn(40, 9, generator=torch.manual_seed(0)) * torch.arange(1, 10)
    found, reference = principal_plane(patches), PCA(2).fit(patches.numpy())
    expected = reference.transform(patches.numpy())
    np.testing.assert_allclose(np.abs(found.points), np.abs(expected), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.variance, reference.explained_variance_ratio_, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_patches_have_a_principal_plane(n: int) -> None:
    found = principal_plane(torch.randn(n, 5))
    assert found.points.shape == (n, 2)
    assert found.variance[1] == pytest.approx(0, abs=1e-6)


def test_the_assignments_of_a_patch_sum_to_one() -> None:
    explanation = explain(small(depth=2), bag_of(20), target=TARGET)
    assert explanation.usage.shape == (2, 2, 3)
    np.testing.assert_allclose(explanation.usage.sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(sum(explanation.token(n) for n in range(3)), 1, rtol=1e-5)


def assigned(shares: np.ndarray) -> Explanation:
    explanation = explain(small(), bag_of(len(shares)), target=TARGET)
    return replace(explanation, assignments=shares[None, None].astype(np.float32))


def test_entropy_is_zero_for_one_token_and_one_for_a_uniform_assignment() -> None:
    explanation = assigned(np.array([[1, 0, 0], [1 / 3] * 3, [0.5, 0.5, 0]]))
    expected = [0, 1, np.log(2) / np.log(3)]
    np.testing.assert_allclose(explanation.uncertainty[0, 0], expected, atol=1e-6)
    assert assigned(np.ones((2, 1))).uncertainty.tolist() == [[[0, 0]]]


def test_the_most_informative_head_separates_patches() -> None:
    uniform, one = np.full((6, 2), 0.5), np.tile([1.0, 0.0], (6, 1))
    separating = np.repeat(np.eye(2), 3, axis=0)
    assert most_informative_head(np.stack([uniform, separating, one])) == 1


def test_top_patches_are_the_highest_and_ties_keep_their_order() -> None:
    values = np.random.default_rng(0).integers(0, 9, 50).astype(np.float32)
    expected = sorted(range(50), key=lambda row: (-values[row], row))[:8]
    assert top_patches(values).tolist() == expected
    assert top_patches(values[:3]).tolist() == sorted(range(3), key=lambda row: -values[row])


@pytest.mark.parametrize("name", list_models())
def test_layers_have_unique_keys_and_one_number_per_patch(name: str) -> None:
    layers = list(explain(small(name), bag_of(11), target=TARGET).layers())
    keys = [layer.key for layer in layers]
    assert keys[:3] == [f"sampled-influence-{number}" for number in range(3)]
    assert keys[3:6] == ["evidence-0", "evidence-1", "evidence-2"]
    assert keys[6:10] == ["above-0", "above-1", "above-2", "attention"]
    assert len(set(keys)) == len(keys)
    assert {layer.values.shape for layer in layers} == {(11,)}


def test_rows_follow_the_order_of_patches() -> None:
    bag, order = bag_of(15), np.random.default_rng(3).permutation(15)
    other = bags.from_arrays(bag.features[order], bag.coords[order])  # type: ignore[index]
    one, two = (explain(small(), each, target=TARGET) for each in (bag, other))
    np.testing.assert_allclose(two.evidence, one.evidence[order], atol=1e-6)
    np.testing.assert_array_equal(two.cells, one.cells[order])


def test_patches_without_coordinates_are_arranged_in_a_square() -> None:
    explanation = explain(small(), bag_of(7, step=None), target=TARGET)
    assert explanation.coords is None
    assert explanation.cells.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1], [0, 2]]
    assert patch_boxes(explanation.info, explanation.coords, 0.5) is None


def test_boxes_are_in_pixels_when_the_coordinates_are_in_microns() -> None:
    coords = np.array([[0.0, 112.0]])
    info = bags.from_arrays(np.ones((1, 3)), coords, unit="um", step=112.0).info
    assert patch_boxes(info, coords, None) is None
    found = patch_boxes(info, coords, 0.5)
    assert found is not None
    assert (found.corners.tolist(), found.side) == ([[0, 224]], 224)


def test_patches_of_several_grids_keep_their_coordinates() -> None:
    """CLAM has a grid for each contour: two patches can be in one cell, and none is lost."""
    coords = np.array([[0, 0], [256, 0], [100, 30], [356, 30]])
    bag = bags.from_arrays(np.eye(4, 12), coords, step=256.0, patch_level0=256.0)
    explanation = explain(small(), bag, target=TARGET)
    assert explanation.gap < 1e-5
    found = patch_boxes(explanation.info, explanation.coords, None)
    assert found is not None
    np.testing.assert_array_equal(found.corners, coords)


def test_a_slide_of_the_cohort_is_predicted_by_models_that_have_not_seen_it(tiny_run: Run) -> None:
    name = tiny_run.splits[1].test[0]
    reference = locate_slide(tiny_run, name)
    answer = predict_slide(tiny_run, reference, bags.read(reference.bag))
    expected = tiny_run.predict({name: reference.bag}, device="cpu").answers[0]
    assert (list(answer.by_fold), answer.unseen) == ([tiny_run.splits[1].name], True)
    np.testing.assert_array_equal(answer.mean, expected)


def test_a_new_bag_is_predicted_by_all_models_and_explained_by_the_nearest(
    tiny_run: Run, tmp_path: Path
) -> None:
    old = bags.read(locate_slide(tiny_run, tiny_run.splits[0].test[0]).bag)
    path = bags.write(tmp_path / "new.h5", old.features, old.coords, step=old.info.step)
    explained = explain_slide(tiny_run, locate_slide(tiny_run, path), device="cpu")
    expected = tiny_run.predict({"new": path}, device="cpu").answers[0]
    np.testing.assert_allclose(explained.answer.mean, expected)
    distances = {f: abs(p - expected).max() for f, p in explained.answer.by_fold.items()}
    assert explained.explanation.fold == min(distances, key=lambda fold: distances[fold])
    assert (explained.name, explained.label, len(distances)) == ("new", None, 3)


def test_a_test_slide_has_its_label(tiny_run: Run) -> None:
    name = tiny_run.predictions.slides[0]
    assert tiny_run.predictions.labels is not None
    expected = tiny_run.target.names[int(tiny_run.predictions.labels[0])]
    assert explain_slide(tiny_run, locate_slide(tiny_run, name), device="cpu").label == expected


def test_an_unknown_slide_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="neither a slide"):
        locate_slide(tiny_run, "unknown")
    name = tiny_run.predictions.slides[0]
    other = tmp_path / "another.png"
    other.touch()
    with pytest.raises(SlideError, match="is not the slide"):
        locate_slide(tiny_run, name, pixels=other)
