"""Warm start: training starts from a saved model, which the run copies and reports."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from caprmil.errors import CaprmilError, RecipeError
from caprmil.models import ABMIL, CAPRMIL, MILModel, create
from caprmil.runs.run import Run
from caprmil.targets import Classification, Regression
from caprmil.training.cross_validation import cross_validate
from caprmil.training.early_checks import check_early
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from caprmil.training.warm_start import start_from

CLASSES = Classification(classes=("normal", "tumour"))
SMALL = {"dim": 16, "heads": 2}


def starting(recipe: Recipe, source: object, **changes: Any) -> Recipe:
    """Return a recipe whose training changes hardly anything."""
    train = TrainConfig(
        epochs=1, warmup_epochs=0, lr=1e-9, warmup_lr=1e-9, min_lr=1e-10, weight_decay=0.0
    )
    model = ModelConfig(start=str(source), settings=SMALL)
    return replace(recipe, model=model, train=train, loggers={}, **changes)


def test_every_fold_starts_from_the_weights_and_the_run_says_so(
    tiny_run: Run, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    source = tiny_run.fold_folder("fold-1") / "model"
    start = MILModel.from_pretrained(source).state_dict()
    run = cross_validate(
        starting(tiny_recipe, source), tmp_path / "run", device="cpu", progress=False
    )
    for fold in run.splits:
        for name, value in run.model(fold.name).state_dict().items():
            torch.testing.assert_close(value, start[name], rtol=0, atol=1e-6)
    facts = run.facts.start
    assert facts is not None
    assert (facts.source, facts.copied, facts.anew) == (str(source), len(start), ())
    # Fold 1 has seen two of three test parts.
    assert any("has seen" in note and "too high" in note for note in run.facts.notes)
    from caprmil.report.details_section import run_origin

    assert dict(run_origin(run))["Training starts from"].startswith(str(source))


def test_a_run_is_resumed_from_its_copy_of_the_start(
    tiny_run: Run, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    source = tmp_path / "start"
    shutil.copytree(tiny_run.fold_folder("fold-0") / "model", source)
    recipe = starting(tiny_recipe, source)
    run = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False, score=False)
    expected = (run.fold_folder("fold-2") / "test.csv").read_bytes()
    shutil.rmtree(run.fold_folder("fold-2"))
    shutil.rmtree(source)
    again = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False, score=False)
    assert (again.fold_folder("fold-2") / "test.csv").read_bytes() == expected
    assert again.facts.start == run.facts.start


def test_the_last_layer_starts_anew_for_another_target() -> None:
    start = CAPRMIL(8, 2, **SMALL)
    start.metadata = {"target": {"kind": "classification", "classes": ["normal", "tumour"]}}
    for n_outputs, target in (
        (3, Classification(classes=("a", "b", "c"))),
        (2, Classification(classes=("alive", "dead"))),
        (1, Regression()),
    ):
        model = CAPRMIL(8, n_outputs, **SMALL)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        copied, anew = start_from(model, start, target)
        after = model.state_dict()
        assert anew == ["classify.weight", "classify.bias"]
        assert {*copied, *anew} == {*after}
        assert all(torch.equal(after[name], start.state_dict()[name]) for name in copied)
        assert all(torch.equal(after[name], before[name]) for name in anew)
    assert start_from(CAPRMIL(8, 2, **SMALL), start, CLASSES)[1] == []


@pytest.mark.parametrize("name", ["abmil", "transmil", "dsmil", "clam", "mean"])
def test_every_model_starts_from_its_own_kind(name: str) -> None:
    torch.manual_seed(0)
    start, model = create(name, 8, 2), create(name, 8, 3)
    copied, anew = start_from(model, start, Classification(classes=("a", "b", "c")))
    assert len(copied) > 0
    assert len(anew) > 0


def test_a_model_with_covariates_starts_the_model_of_the_patches() -> None:
    start = CAPRMIL(8, 2, **SMALL)
    columns = [{"name": "age", "kind": "number", "mean": 60.0, "std": 10.0, "width": 1}]
    model = create("fused", 8, 2, columns=columns, image=CAPRMIL(8, 2, **SMALL))
    start_from(model, start, CLASSES)
    own = model.image.state_dict()
    assert all(torch.equal(own[name], value) for name, value in start.state_dict().items())


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (ABMIL(8, 2), "start is a ABMIL, and the recipe trains a CAPRMIL"),
        (CAPRMIL(9, 2, **SMALL), "reads 9 features per patch, and these bags have 8"),
        (CAPRMIL(8, 2, dim=32, heads=2), r"does not fit.*dim = 32"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(start: MILModel, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        start_from(CAPRMIL(8, 2, **SMALL), start, CLASSES)


def test_a_start_of_another_encoder_is_refused_before_anything_is_written(
    tiny_run: Run, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    source = tmp_path / "start"
    shutil.copytree(tiny_run.fold_folder("fold-0") / "model", source)
    config = json.loads((source / "config.json").read_text())
    config["metadata"]["encoder"] = "another"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"another encoder \(another\) than .* \(synthetic\)"):
        cross_validate(starting(tiny_recipe, source), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_start_that_is_a_run_or_nothing_says_what_to_pass(
    tiny_run: Run, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(CaprmilError, match="folds/NAME/model"):
        cross_validate(starting(tiny_recipe, tiny_run.folder), tmp_path / "run", progress=False)
    with pytest.raises(RecipeError, match="leave start out"):
        replace(tiny_recipe, model=ModelConfig(start="x"), train=TrainConfig(probes=4))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("runs/gone/folds/fold-0/model", "there is no folder runs/gone/folds/fold-0/model. Pass"),
        ("nobody/nothing", "There is no folder nobody/nothing, and HF_HUB_OFFLINE is set. If it"),
        (".", r". has no model: config.json is missing. The models of a run"),
    ],
)
def test_a_missing_start_is_one_line_before_bags_are_checked(
    tiny_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    expected: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = starting(tiny_recipe, source, features="no features")
    for check in (check_early, partial(cross_validate, progress=False)):
        with pytest.raises(RecipeError) as caught:
            check(recipe, tmp_path / "run")
        assert str(caught.value).startswith(f"[model] start: {expected}")
        assert len(str(caught.value)) < 200


def test_a_copy_of_a_start_without_a_run_is_not_taken_for_another_one(
    tiny_run: Run, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    out, source = tmp_path / "run", tiny_run.fold_folder("fold-0") / "model"
    shutil.copytree(tiny_run.fold_folder("fold-1") / "model", out / "start")  # and then killed
    run = cross_validate(
        starting(tiny_recipe, source), out, device="cpu", progress=False, score=False
    )
    expected = MILModel.from_pretrained(source).state_dict()
    for name, value in run.model("fold-2").state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
