"""What a model of a run was trained on: saved with it in config.json, and shown in its card."""

from typing import Any

from caprmil.encoders.table import find
from caprmil.errors import UnknownNameError
from caprmil.runs.facts import Facts, SourceFacts
from caprmil.runs.run import Run
from caprmil.targets import Target
from caprmil.targets.target_table import target_table

FEATURES = ("encoder", "fingerprint", "mpp", "patch_px", "scale_rule")


def model_metadata(run: Run, target: Target, fold: str | None = None) -> dict[str, Any]:
    """Return the metadata of the model of a fold, or of all of a run. It names no slide."""
    facts = run.facts
    sources = [{"name": each.name, **_features(each)} for each in facts.sources]
    return {
        "target": target_table(target),
        **({"label": facts.label} if facts.label else {}),
        **({"sources": sources, "join": facts.join} if sources else _features(facts)),
        **({"covariates": [*run.covariate_names]} if run.covariate_names else {}),
        "cohort": _cohort(run, fold),
        "fold": fold,
        "digest": facts.digest,
        "trained_with": facts.version,
    }


def _features(facts: Facts | SourceFacts) -> dict[str, Any]:
    """Return encoder and scale of features, and what the table of encoders says about it."""
    found = {name: getattr(facts, name) for name in FEATURES} | {"in_dim": facts.in_dim}
    name = facts.encoder or ""
    if ":" in name:  # code of somebody, or a network of timm, which may not be installed
        return found
    try:
        card = find(name)
    except UnknownNameError:
        return found
    return {**found, "encoder_licence": card.licence, "encoder_hub": card.hub}


def _cohort(run: Run, fold: str | None) -> dict[str, Any]:
    sizes: dict[str, Any] = {"slides": len(run.paths)}
    known = {run.patients[slide] for slide in run.paths if slide in run.patients}
    if known != {*run.paths}:
        sizes["patients"] = len(known)
    for each in run.splits:
        if each.name == fold:
            parts = {"train": each.train, "validation": each.validation, "test": each.test}
            sizes |= {"unit": run.unit} | {name: len(part) for name, part in parts.items()}
    return sizes
