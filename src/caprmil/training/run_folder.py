"""The folder of a run in training: checked, opened or resumed, and locked."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from caprmil import config
from caprmil.cohort.cohort import Cohort
from caprmil.cohort.folds import Fold
from caprmil.cohort.sources import Source
from caprmil.errors import RunError
from caprmil.features.bag_files import paths_of
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json, read_json
from caprmil.runs.facts import FACTS, FORMAT, RECIPE, Facts, SourceFacts, StartFacts
from caprmil.runs.run import Run
from caprmil.runs.slide_covariates import COVARIATES, covariates_text, write_vectors
from caprmil.runs.splits import SPLITS
from caprmil.targets.target_table import target_table
from caprmil.training.recipe import Recipe


@contextmanager
def lock_run(out: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold a run for this process: a second one in the same folder would mix their folds."""
    (out / "folds").mkdir(exist_ok=True)
    try:
        with FileLock(out / "folds" / ".lock", timeout=wait):
            yield
    except Timeout:
        raise RunError(f"Another process is training in {out}. Wait for it, or stop it.") from None


def open_run(
    out: Path,
    recipe: Recipe,
    cohort: Cohort,
    folds: Sequence[Fold],
    *,
    start: StartFacts | None = None,
) -> Run:
    """Write what is known before training, or check that nothing of it has changed.

    The recipe is the first file: a folder that holds only some of the others is not a run.
    """
    target = cohort.target
    slides = cohort.slides
    splits = {
        "patients": {slide.name: slide.patient for slide in slides},
        "labels": {name: target.show_label(label) for name, label in cohort.labels.items()},
        "patches": {slide.name: slide.patches for slide in slides},
        "paths": {slide.name: str(paths_of(slide.path)[0].absolute()) for slide in slides},
        **_source_paths(cohort),
        "folds": [asdict(fold) for fold in folds],
        **({"unit": "patient"} if cohort.joins else {}),
        **({"combine": cohort.combine} if cohort.combine else {}),
    }
    facts = Facts(
        format=FORMAT,
        version=version("caprmil"),
        digest=config.digest(recipe),
        model=recipe.model.name,
        target=target_table(target),
        in_dim=cohort.in_dim,
        encoder=cohort.first_known("encoder"),
        mpp=cohort.mpp,
        seed=recipe.splits.seed,
        weights=recipe.train.weights,
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "lightning", "numpy")},
        },
        notes=cohort.notes,
        fingerprint=cohort.first_known("fingerprint"),
        patch_px=cohort.first_known("patch_px"),
        scale_rule=cohort.first_known("scale_rule"),
        settings=cohort.first_known("settings"),
        label=cohort.label,
        sources=tuple(_source_facts(source) for source in cohort.sources),
        join=cohort.join,
        start=start,
    )
    texts = {
        RECIPE: config.dump(recipe),
        SPLITS: as_json(splits),
        FACTS: as_json(facts.as_table()),
    }
    if cohort.covariates is not None:
        texts[COVARIATES] = covariates_text(
            cohort.covariates, "patient" if cohort.joins else "slide"
        )
    for name, text in texts.items():
        path = out / name
        if not path.exists():
            write_text(path, text)
        elif not _same(path, text):
            raise RunError(
                f"{path} is not what this recipe gives now: the cohort, its bags or the "
                "installed versions have changed since the run started. Start a new run in another "
                "folder."
            )
    if cohort.covariates is not None:
        write_vectors(out, cohort.covariates)
    return Run(out)


def _same(path: Path, text: str) -> bool:
    """Return whether a file of a run has this content. Bags may be at another place by now."""
    before = path.read_bytes()
    if path.name != SPLITS or before == text.encode("utf-8"):
        return before == text.encode("utf-8")
    return _without_paths(read_json(path)) == _without_paths(json.loads(text))


def _without_paths(splits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of splits.json with the names of slides only."""
    sources = {name: sorted(own) for name, own in splits.get("sources", {}).items()}
    return {**splits, "paths": sorted(splits.get("paths", {})), "sources": sources}


def _source_paths(cohort: Cohort) -> dict[str, dict[str, dict[str, str]]]:
    """Return the bag of each slide by source, if there are several; `paths` has the first's."""
    if not cohort.sources:
        return {}
    paths = {slide.name: paths_of(slide.path) for slide in cohort.slides}
    return {
        "sources": {
            source.name: {slide: str(own[number].absolute()) for slide, own in paths.items()}
            for number, source in enumerate(cohort.sources)
        }
    }


def _source_facts(source: Source) -> SourceFacts:
    names = ("encoder", "mpp", "fingerprint", "patch_px", "scale_rule", "settings")
    known = {name: source.first_known(name) for name in names}
    return SourceFacts(name=source.name, in_dim=source.first_known("width"), **known)
