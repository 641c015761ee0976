"""The folder of a run in training: checked, opened or resumed, and locked."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from caprmil import config
from caprmil.cohort.cohort import Cohort
from caprmil.cohort.folds import Fold
from caprmil.errors import RunError
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.io.leftovers import clear_leftovers, final_name
from caprmil.io.paths import RemotePath
from caprmil.runs.facts import FACTS, FORMAT, Facts
from caprmil.runs.remote import LOCK
from caprmil.runs.run import RECIPE, Run, target_table
from caprmil.runs.scores import SCORES
from caprmil.runs.slide_covariates import COVARIATES, covariates_text, write_vectors
from caprmil.runs.splits import SPLITS
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


def check_folder(out: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds anything but an unfinished run of this recipe."""
    advice = "Choose another folder for the new run."
    if not out.exists():
        return
    ours = (LOCK, "cohort.csv")
    is_new = out.is_dir() and all(path.name in ours or final_name(path) for path in out.iterdir())
    if not is_new and not (out / RECIPE).exists():
        raise RunError(f"{out} exists and is not a run. {advice}")
    if not isinstance(out, RemotePath):
        clear_leftovers(out)  # a process may have been killed at any file
    if is_new:
        return
    if (out / SCORES).exists():
        raise RunError(f"{out} holds a finished run. {advice}")
    before = config.load(out / RECIPE, into=Recipe)
    if changed := config.differences(before, recipe):
        raise RunError(f"{out} holds a run of another recipe ({'; '.join(changed)}). {advice}")


def open_run(out: Path, recipe: Recipe, cohort: Cohort, folds: Sequence[Fold]) -> Run:
    """Write what is known before training, or check that nothing of it has changed."""
    target = cohort.target
    slides = cohort.slides
    splits = {
        "patients": {slide.name: slide.patient for slide in slides},
        "labels": {name: target.show_label(label) for name, label in cohort.labels.items()},
        "patches": {slide.name: slide.patches for slide in slides},
        "paths": {slide.name: str(slide.path) for slide in slides},
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
    )
    texts = {
        RECIPE: config.dump(recipe),
        SPLITS: as_json(splits),
        FACTS: as_json(asdict(facts)),
    }
    if cohort.covariates is not None:
        texts[COVARIATES] = covariates_text(cohort.covariates)
        write_vectors(out, cohort.covariates)
    for name, text in texts.items():
        path = out / name
        if not path.exists():
            write_text(path, text)
        elif path.read_bytes() != text.encode("utf-8"):
            raise RunError(
                f"{path} is not what this recipe gives now: the cohort, its bags or the "
                "installed versions have changed since the run started. Start a new run in another "
                "folder."
            )
    return Run(out)
