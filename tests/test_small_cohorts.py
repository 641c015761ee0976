"""On few slides, training with the paper's recipe proposes one that was more reliable."""

from dataclasses import replace

import pytest

from caprmil.runs.run import Run
from caprmil.training import small_cohorts
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.recipe_files import read_recipe
from caprmil.training.small_cohorts import propose_recipe


def test_a_recipe_is_proposed_to_the_plain_model_on_few_slides_only(
    tiny_run: Run, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = propose_recipe(tiny_recipe, tiny_run)
    assert found is not None
    assert found.startswith("24 labels are few")
    for other in (
        replace(tiny_recipe, model=ModelConfig(name="abmil")),
        replace(tiny_recipe, train=replace(tiny_recipe.train, probes=4)),
    ):
        assert propose_recipe(other, tiny_run) is None
    monkeypatch.setattr(small_cohorts, "FEW", 23)
    assert propose_recipe(tiny_recipe, tiny_run) is None


def test_what_is_proposed_is_a_recipe_that_differs(tiny_run: Run, tiny_recipe: Recipe) -> None:
    text = propose_recipe(tiny_recipe, tiny_run)
    assert text is not None
    assert "the recipe rare" in text
    assert propose_recipe(read_recipe("rare"), tiny_run) is None
