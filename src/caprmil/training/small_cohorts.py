"""What to try on a small cohort, where the result of CAPRMIL depends on the seed."""

from caprmil.runs.run import Run
from caprmil.training.recipe import Recipe

FEW = 100  # labels of slides or patients; docs/small-cohort.md has 60


def propose_recipe(recipe: Recipe, run: Run) -> str | None:
    """Return which recipe was more reliable than the paper's on few slides, if that was used."""
    train = recipe.train
    plain = recipe.model.name == "caprmil" and not (train.probes or train.top_k)
    if not plain or len(run.labels) > FEW or not run.target.has_classes:
        return None
    return (
        f"{len(run.labels)} labels are few, so the scores depend on the seed. On 60 generated "
        "slides, the recipe rare had a higher AUC than caprmil in the worst of ten seeds, and a "
        "worse Brier score. To compare, train the recipe rare with the same table, features and "
        "other settings, and another --out."
    )
