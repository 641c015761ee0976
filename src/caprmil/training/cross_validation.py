"""Training: a recipe and a cohort become a run, fold by fold."""

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from caprmil import config, figures
from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.folds import Fold
from caprmil.errors import CohortError, RunError, shorten
from caprmil.evaluation import (
    baselines as shortcuts,
)
from caprmil.evaluation import (
    calibration,
    comparison,
    predictions,
)
from caprmil.evaluation.differences import Comparison
from caprmil.evaluation.predictions import Predictions
from caprmil.executors import Executor, LocalExecutor, Succeeded, job_status
from caprmil.io.atomic import check_writable, write_text
from caprmil.io.json_files import as_json, read_json
from caprmil.io.paths import RemotePath, as_path, require_local
from caprmil.io.progress import Step, bar
from caprmil.models.compiling import find_compiler
from caprmil.models.device import pick_device
from caprmil.runs.remote import LOCK, remote_run
from caprmil.runs.run import (
    CALIBRATION,
    FACTS,
    PREDICTIONS,
    RECIPE,
    RELIABILITY,
    SCORES,
    SHORTCUTS,
    SPLITS,
    Facts,
    Run,
)
from caprmil.training.distributed import ProcessGroup
from caprmil.training.module import check_distributed
from caprmil.training.recipe import Recipe, make_loggers
from caprmil.training.study import Far, Folds, Study, Watch


def cross_validate(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    progress: bool = True,
    executor: Executor | None = None,
    watch: Watch | None = None,
) -> Run:
    """Train and score a model on every fold of a cohort. Each is scored on its own test part.

    `out` must be new, or hold a run of the same recipe that was interrupted: that one goes on,
    and ends with the numbers it would have had. Nothing in it is overwritten. One that is
    elsewhere is trained in a local mirror. `watch` hears every row of every fold, and may stop the
    training by an error.

    On several devices, a step's bags are shared out. A recipe with fewer is changed to one each.
    """
    out = as_path(out)
    options: dict[str, Any] = {"device": device, "progress": progress, "watch": watch}
    if executor is not None and executor.remote:  # devices are there, and not looked for here
        if devices * nodes > 1:
            raise RunError("Ray has a fold for each worker: leave out --devices and --nodes.")
        return _train_at(recipe, out, **options, executor=executor)
    with ProcessGroup(device, devices, nodes) as group:
        if not group.is_main:
            group.run_jobs()
            return Run(out)
        options |= {"group": group if group.world_size > 1 else None}
        return _train_at(adjust_batch_size(recipe, group), out, **options)


def adjust_batch_size(recipe: Recipe, group: ProcessGroup) -> Recipe:
    """Return the recipe with a bag for each device in a step, at least."""
    batch = max(recipe.train.batch_size, group.world_size)
    if batch > recipe.train.batch_size:
        logging.getLogger("caprmil").warning(
            "note: %d devices take a bag each: train.batch_size is %d, not %d.",
            *(group.world_size, batch, recipe.train.batch_size),
        )
    return replace(recipe, train=replace(recipe.train, batch_size=batch))


def cross_validate_all(
    recipes: Mapping[Path, Recipe],
    *,
    device: str = "auto",
    progress: bool = True,
    executor: Executor | None = None,
    group: ProcessGroup | None = None,
    watch: Watch | None = None,
    share: Callable[[], None] = lambda: None,
    wait: float = 0.0,
) -> dict[Path, Run]:
    """Train and score several recipes, each in its folder. An executor runs the folds of all.

    `share` is called when something of a run is whole. A process that holds one of the folders is
    waited for, for so many seconds.
    """
    executor = executor or LocalExecutor()
    for out, recipe in recipes.items():
        _check(out, recipe, group, device=None if executor.remote else device)
    studies = {out: _study(out, recipe, progress) for out, recipe in recipes.items()}
    with ExitStack() as held:
        for out in studies:
            held.enter_context(lock_run(out, wait=wait))
        share()
        options: dict[str, Any] = {"device": device, "progress": progress, "watch": watch}
        # Here each run is scored before the next begins; elsewhere nobody waits for that.
        groups = [studies] if executor.remote else [{out: each} for out, each in studies.items()]
        failures = []
        for part in groups:
            failures += _train(part, executor, group, share=share, **options)
            for study in part.values():
                if len(study.run.done) == len(study.folds):
                    _finish(study.run, study.cohort, progress)
    if failures:
        raise RunError(
            f"{len(failures)} of {sum(len(study.folds) for study in studies.values())} folds could "
            f"not be trained: {shorten(failures, separator='; ')} The others are there, and the "
            "same command tries these again."
        )
    return {out: Run(out) for out in studies}


def _check(out: Path, recipe: Recipe, group: ProcessGroup | None, *, device: str | None) -> None:
    """Find what is wrong before anything is written."""
    _check_folder(out, recipe)
    if device is not None:
        pick_device(device)
    if recipe.train.compile:
        find_compiler()
    check_writable(out)
    make_loggers(recipe.loggers, out)
    model = recipe.model.build(1024, 2)  # the sizes are not known yet, the settings are
    if group is not None:
        check_distributed(model, recipe.train, group)


def _study(out: Path, recipe: Recipe, progress: bool) -> Study:
    """Read the cohort of a recipe, and open its run."""
    with bar("Checking bags", shown=progress) as step:
        cohort, folds = load_cohort(
            recipe.cohort, recipe.features, recipe.data, recipe.splits, progress=step
        )
    recipe.model.build(cohort.in_dim, len(cohort.classes))
    for note in cohort.notes:
        logging.getLogger("caprmil").warning("note: %s", note)
    return Study(_open(out, recipe, cohort, folds), recipe, cohort, tuple(folds))


def _train(
    studies: Mapping[Path, Study],
    executor: Executor,
    group: ProcessGroup | None,
    *,
    device: str,
    progress: bool,
    watch: Watch | None,
    share: Callable[[], None],
) -> list[str]:
    """Train all folds that are not there yet, and return which failed, and why."""
    tasks, failures = [task for out, study in studies.items() for task in study.tasks(out)], []
    title = "Training " + ", ".join(study.recipe.model.name for study in studies.values())
    make_worker = partial(Folds, studies, device, watch, group)
    with bar(title, shown=progress) as step:
        far = Far(step, studies, tasks)
        for outcome in executor.run(tasks, make_worker, far.hear):
            if isinstance(outcome, Succeeded):
                far.tick(outcome.task)
                share()
            elif outcome.error is not None:
                raise outcome.error
            else:
                failures.append(f"{outcome.task.name} ({outcome.reason})")
    for study in studies.values():  # those of a process that was killed in just that moment
        study.tidy()
    return failures


def _train_at(recipe: Recipe, out: Path, **options: Any) -> Run:
    """Train in a folder, or in a local mirror of one elsewhere, which gets every finished fold."""
    if not isinstance(out, RemotePath):
        return cross_validate_all({out: recipe}, **options)[out]
    _check_folder(out, recipe)
    with remote_run(out, config.digest(recipe)) as copy:
        try:
            if not (copy.folder / SCORES).exists():  # else it was only not uploaded
                cross_validate_all({copy.folder: recipe}, **options, share=copy.try_upload)
        except RunError as problem:  # which names the mirror, and that is nobody's place
            raise RunError(str(problem).replace(str(copy.folder), str(out))) from problem
    return Run(out)


def complete(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str = "auto",
    progress: bool = True,
    watch: Watch | None = None,
    wait: float = 0.0,
) -> Run:
    """Return the finished run of a recipe in a folder; train what of it is not there yet."""
    out = require_local(out)
    options: dict[str, Any] = {"device": device, "progress": progress, "watch": watch}
    return complete_all({out: recipe}, **options, wait=wait)[out]


def complete_all(recipes: Mapping[Path, Recipe], **options: Any) -> dict[Path, Run]:
    """Return the finished runs of recipes; train what of them is not there yet.

    The options are those of `cross_validate_all`.
    """
    finished: dict[Path, Run] = {}
    for out, recipe in recipes.items():
        with suppress(RunError):
            run = Run(out)
            if run.finished and run.facts.digest == config.digest(recipe):
                finished[out] = run
    missing = {out: recipe for out, recipe in recipes.items() if out not in finished}
    trained = cross_validate_all(missing, **options) if missing else {}
    return {out: (finished | trained)[out] for out in recipes}


@contextmanager
def lock_run(out: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold a run for this process: a second one in the same folder would mix their folds."""
    (out / "folds").mkdir(exist_ok=True)
    try:
        with FileLock(out / "folds" / ".lock", timeout=wait):
            yield
    except Timeout:
        raise RunError(f"Another process is training in {out}. Wait for it, or stop it.") from None


def _check_folder(out: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds anything but an unfinished run of this recipe."""
    advice = "Choose another folder for the new run."
    if not out.exists() or (out.is_dir() and all(path.name == LOCK for path in out.iterdir())):
        return
    if not (out / RECIPE).exists():
        raise RunError(f"{out} exists and is not a run. {advice}")
    if (out / SCORES).exists():
        raise RunError(f"{out} holds a finished run. {advice}")
    before = config.load(out / RECIPE, into=Recipe)
    if changed := config.differences(before, recipe):
        raise RunError(f"{out} holds a run of another recipe ({'; '.join(changed)}). {advice}")


def _open(out: Path, recipe: Recipe, cohort: Cohort, folds: Sequence[Fold]) -> Run:
    """Write what a run knows before it starts, or see that nothing of it has changed."""
    splits = {
        "patients": cohort.patients,
        "labels": {name: cohort.classes[label] for name, label in cohort.labels.items()},
        "patches": {name: bag.n_patches for name, bag in cohort.bags.items()},
        "paths": {entry.name: str(entry.path) for entry in cohort.entries},
        "folds": [asdict(fold) for fold in folds],
    }
    facts = Facts(
        version=version("caprmil"),
        digest=config.digest(recipe),
        model=recipe.model.name,
        classes=cohort.classes,
        in_dim=cohort.in_dim,
        encoder=cohort.said("encoder"),
        mpp=cohort.mpp,
        seed=recipe.splits.seed,
        weights=recipe.train.weights,
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "lightning", "numpy")},
        },
        notes=cohort.notes,
        fingerprint=cohort.said("fingerprint"),
        patch_px=cohort.said("patch_px"),
        scale_rule=cohort.said("scale_rule"),
        settings=cohort.said("settings"),
    )
    texts = {
        RECIPE: config.dump(recipe),
        SPLITS: as_json(splits),
        FACTS: as_json(asdict(facts)),
    }
    for name, text in texts.items():
        path = out / name
        if not path.exists():
            write_text(path, text)
        elif path.read_text(encoding="utf-8") != text:
            raise RunError(
                f"{path} is not what this recipe gives now: the cohort, its bags or the "
                "installed versions have changed since the run began. Start a new one elsewhere."
            )
    return Run(out)


def _finish(run: Run, cohort: Cohort, progress: bool) -> None:
    """Put the folds together: predictions, what stands beside them and, last of all, the scores."""
    folders = {fold.name: run.fold_folder(fold.name) for fold in run.splits}
    tables = {name: Predictions.read(folder / "test.csv") for name, folder in folders.items()}
    everything = Predictions.concatenate(list(tables.values()))
    _write_again(everything, run.folder / PREDICTIONS)
    _draw(run, folders, tables)
    summary = predictions.summary(everything)
    with bar("Reading bags for shortcuts", shown=progress) as step:
        beside, remarks = _beside_shortcuts(run, cohort, everything, step)
    calibrated = calibration.calibrate(everything, run.validation)
    write_text(run.folder / CALIBRATION, as_json(calibrated.as_dict()), replace=True)
    figures.save(calibrated.draw(), run.folder / RELIABILITY, replace=True)
    sections = {
        "": summary.as_markdown(),
        "## Beside shortcuts\n\n": f"{remarks}\n\n{beside.as_markdown()}",
        "## Calibration\n\n": calibrated.as_markdown(),
    }
    text = "\n".join(title + section for title, section in sections.items())
    write_text(run.folder / "scores.md", text, replace=True)
    scores = summary.as_dict() | {
        "shortcuts": beside.as_dict(),
        "calibration": calibrated.as_dict(),
    }
    with suppress(OSError):
        (run.folder / job_status.FOLDER).rmdir()  # it is empty: nothing is in work any more
    write_text(run.folder / SCORES, as_json(scores))


def _write_again(table: Predictions, path: Path) -> None:
    """Write a table of a run without scores, which is unfinished: what is there is of no use."""
    path.unlink(missing_ok=True)
    table.write(path)


def _draw(run: Run, folders: Mapping[str, Path], tables: Mapping[str, Predictions]) -> None:
    histories = {name: read_history(folder / "history.csv") for name, folder in folders.items()}
    kept = {name: read_json(folder / "fold.json")["kept_epoch"] for name, folder in folders.items()}
    curves = figures.learning_curves(histories, kept=kept)
    figures.save(curves, run.folder / "curves.png", replace=True)
    truth = {name: (np.asarray(t.labels), t.probabilities) for name, t in tables.items()}
    with suppress(CohortError):  # no fold has slides of two classes: there is nothing to draw
        figures.save(figures.roc_curves(truth, run.classes), run.folder / "roc.png", replace=True)


def _beside_shortcuts(
    run: Run, cohort: Cohort, answers: Predictions, step: Step
) -> tuple[Comparison, str]:
    """Answer the same slides without a model, and say which of these answers it does not beat."""
    found = shortcuts.predict_baselines(cohort, run.splits, progress=step)
    for name, table in found.items():
        _write_again(table, run.folder / SHORTCUTS / f"{name.replace(' ', '_')}.csv")
    beside = comparison.compare_with_baselines("The model", answers, found)
    told = list(beside.warnings()) or ["The model beats every shortcut."]
    return beside, "\n\n".join([*told, shortcuts.find_sites(cohort).remark])


def read_history(path: Path) -> dict[str, list[float]]:
    """Return the columns of a history."""
    names, *rows = [line.split(",") for line in path.read_text().splitlines()]
    return {name: [float(row[at]) for row in rows] for at, name in enumerate(names)}
