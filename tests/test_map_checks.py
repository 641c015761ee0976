"""Checks of maps hold for the maps of the package, and fail for broken ones."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.explain import map_checks
from caprmil.explain.attribution import gradient_times_input, leave_one_out
from caprmil.explain.map_checks import (
    CLAIMS,
    COMPLETE_EVIDENCE,
    COMPLETE_GRADIENTS,
    COPIES,
    OTHER_WEIGHTS,
    SUM_TO_ZERO,
    WITHOUT_EFFECT,
    MapOnBag,
    check_map,
    check_maps,
    map_function,
    sampled,
    shuffled,
    slide_to_check,
    without_effect,
)
from caprmil.explain.map_kinds import COMPUTED
from caprmil.features import bags
from caprmil.models import MILModel
from caprmil.runs.inference import TrainedModel
from caprmil.runs.run import Run
from caprmil.targets import Classification, Regression
from small_models import small_model

pytestmark = pytest.mark.slow

CLASSES = Classification(classes=("a", "b"))
CONTRAST = CLASSES.contrasts[1]


def bag(n: int = 60, width: int = 12) -> bags.Bag:
    return bags.from_arrays(np.random.default_rng(0).normal(size=(n, width)).astype(np.float32))


def on_bag(compute: Any, model: MILModel | None = None) -> MapOnBag:
    features = torch.from_numpy(bag().features)[None]
    return MapOnBag(compute, model or small_model("caprmil", 12, 2), features, None, CONTRAST)


def failed(compute: Any, claims: str = "influence", model: MILModel | None = None) -> set[str]:
    """Return the names of the checks that fail for a map that claims to be another one."""
    found = check_map(claims, on_bag(compute, model), CLAIMS[claims])
    return {finding.check for finding in found if not finding.holds}


def influence(model: MILModel, features: Any, grid: Any) -> Any:
    return map_function("influence", CONTRAST, 1)(model, features, grid)


def constant(model: MILModel, features: Any, grid: Any) -> Any:
    return np.ones(features.shape[1])


def input_norm(model: MILModel, features: Any, grid: Any) -> Any:
    return features[0].norm(dim=-1).double().numpy()


@pytest.mark.parametrize(
    ("name", "target"),
    [("abmil", CLASSES), ("caprmil", Regression(mean=1.0, std=2.0)), ("clam", CLASSES)],
)
def test_the_maps_of_the_package_have_the_properties_they_claim(name: str, target: Any) -> None:
    findings = check_maps(TrainedModel(small_model(name, 12, target.n_outputs), target), bag())
    assert len(findings) == 9
    assert [f for f in findings if not f.holds or f.measured is None] == []


def test_the_maps_of_a_trained_run_have_the_properties_they_claim(tiny_run: Run) -> None:
    fold, _, path = slide_to_check(tiny_run)
    findings = check_maps(tiny_run.trained(fold), bags.read(path))
    assert {f.map for f in findings} == {*COMPUTED, "evidence"}
    assert [f for f in findings if not f.holds or f.measured is None] == []


def test_maps_that_ignore_the_weights_fail() -> None:
    for broken in (constant, input_norm):
        found = failed(broken)
        assert {OTHER_WEIGHTS.name, COPIES.name, WITHOUT_EFFECT.name} <= found
        assert SUM_TO_ZERO.name in found
    attention = map_function("attention", CONTRAST, 1)
    assert OTHER_WEIGHTS.name in failed(attention, model=small_model("mean", 12, 2))


def test_an_influence_that_does_not_sum_to_zero_fails() -> None:
    broken = failed(lambda *parts: influence(*parts) + 0.01)
    assert SUM_TO_ZERO.name in broken
    assert OTHER_WEIGHTS.name not in broken


def test_an_influence_that_copies_of_patches_do_not_divide_fails() -> None:
    def per_share(model: MILModel, features: Any, grid: Any) -> Any:
        return features.shape[1] * influence(model, features, grid)

    assert failed(per_share) == {COPIES.name}


def test_evidence_that_does_not_sum_to_the_output_fails() -> None:
    evidence = map_function("evidence", CONTRAST, 1)
    assert failed(evidence, "evidence") == set()
    assert failed(lambda *p: 1.1 * evidence(*p), "evidence") == {COMPLETE_EVIDENCE.name}


def test_gradients_that_do_not_sum_to_the_change_fail() -> None:
    def gradients(model: MILModel, features: Any, grid: Any) -> Any:
        found = gradient_times_input(model, features, grid, contrast=CONTRAST)
        return found.detach().double().numpy()

    assert failed(gradients, "integrated gradients") == {COMPLETE_GRADIENTS.name}


def test_a_map_with_nan_fails() -> None:
    assert len(failed(lambda *parts: np.nan * influence(*parts))) >= 2


def test_patches_without_effect_are_those_of_a_loop_over_removals() -> None:
    found = on_bag(influence)
    effects = CONTRAST.of(leave_one_out(found.model, found.features).terms).abs().numpy()
    sizes = np.abs(found.values)[np.argsort(effects)]  # of all 60 patches, an eighth is 7
    assert without_effect(found) == pytest.approx(sizes[:7].mean() / sizes[-7:].mean())


@pytest.mark.parametrize("name", ["transmil", "dtfd", "bayesmil", "sgpmil"])
def test_the_check_of_copies_is_not_made_for_models_that_depend_on_more_than_shares(
    name: str,
) -> None:
    (finding,) = check_map("influence", on_bag(influence, small_model(name, 12, 2)), [COPIES])
    assert finding.measured is None
    assert finding.holds


@pytest.mark.parametrize("name", ["transmil", "dgrmil"])
def test_the_influence_on_a_sequence_model_is_not_the_effect_of_a_removal(name: str) -> None:
    """Without a patch, the positions of all later patches change."""
    found = on_bag(influence, small_model(name, 12, 2))
    assert not check_map("influence", found, [WITHOUT_EFFECT])[0].holds


def test_shuffled_weights_have_the_same_values_in_other_positions() -> None:
    model = small_model("caprmil", 12, 2)
    other = shuffled(model, 0)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.flatten().sort().values, two.flatten().sort().values)
    weights = next(model.parameters()), next(other.parameters())
    assert not torch.equal(*weights)


def test_a_large_slide_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_checks, "PATCHES", 20)
    assert len(sampled(bag()).features) == 20
    assert sampled(bag(15)).info.n_patches == 15


def test_the_command_checks_maps_and_fails_with_a_broken_one(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    words = ["check", str(run.folder), "--most", "1"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "influences sum to zero" in result.output
    assert "a validation slide" in result.output

    def norms(model: MILModel, features: Any, grid: Any, directions: Any) -> Any:
        return features[0].norm(dim=-1)[:, None]

    monkeypatch.setitem(COMPUTED, "sampled influence", norms)  # type: ignore[arg-type]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 1
    assert result.output.count(" NO ") == 1
