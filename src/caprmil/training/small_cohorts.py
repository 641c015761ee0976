"""What to try on a small cohort, where the result of CAPRMIL depends on the seed."""

from caprmil.runs.run import Run
from caprmil.training.recipe import Recipe

FEW = 100  # slides; docs/small-cohort.md has 60


def propose_recipe(recipe: Recipe, run: Run) -> str | None:
    """Return which recipe was more reliable than the paper's on few slides, if that was used."""
    train = recipe.train
    plain = recipe.model.name == "caprmil" and not (train.probes or train.top_k)
    if not plain or len(run.labels) > FEW or not run.target.has_classes:
        return None
    return (
        f"{len(run.labels)} slides are few, so the scores depend on the seed. On 60 generated "
        "slides, the recipe rare had a higher AUC than this one in the worst of the seeds "
        f"(docs/small-cohort.md). To compare: caprmil train rare --set cohort={recipe.cohort} "
        f"--set features={recipe.features}, with another --out."
    )
