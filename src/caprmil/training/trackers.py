"""Trackers: each fold is a run of Weights & Biases or MLflow, named, and grouped by our run.

A fold's run has the recipe as its parameters, the numbers of each epoch, and the scores of its test
part. Its id is kept in the folder of the fold, so that a fold that is resumed continues its run.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from caprmil import config
from caprmil.errors import CaprmilError, CohortError, RunError, one_line
from caprmil.evaluation.predictions import Predictions
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json, read_json
from caprmil.training.recipe import Recipe

IDS = "trackers.json"  # in the folder of a fold
PROJECT = "caprmil"
WANDB, MLFLOW = "WandbLogger", "MLFlowLogger"
PACKAGES = ("wandb", "mlflow", "requests", "urllib3", "comet_ml", "neptune")
"""Errors of these, raised while a fold is trained, are those of a tracker."""
_PASSWORD = re.compile(r"://[^/@\s]+@")  # and a name, in an address


@dataclass(frozen=True, kw_only=True)
class TrackedFold:
    """A fold whose training is tracked: its run, its name and its folder."""

    run: Path
    name: str
    folder: Path

    @property
    def title(self) -> str:
        return f"{self.run.resolve().name}/{self.name}"

    @property
    def ids(self) -> dict[str, Any]:
        """The id of the fold's run by tracker, if it has one."""
        path = self.folder / IDS
        return read_json(path, advice="Remove it.") if path.exists() else {}

    def defaults(self, tracker: str) -> dict[str, Any]:
        """Return the settings of a tracker that a recipe does not have to name."""
        group, known = self.run.resolve().name, self.ids.get(tracker)
        if tracker == WANDB:
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            own = {"project": project, "group": group, "name": self.title, "job_type": "fold"}
            return {**own, "save_dir": str(self.run), **({"id": known} if known else {})}
        if tracker == MLFLOW:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            tags = {"caprmil.run": group, "caprmil.fold": self.name}
            names: dict[str, Any] = {"experiment_name": experiment, "run_name": self.title}
            store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.run / 'mlflow.db'}"
            names |= {"tags": tags, "tracking_uri": store}
            return names | ({"run_id": known} if known else {})
        return {}

    def keep_id(self, tracker: str, value: Any) -> None:
        """Keep the id of the fold's run."""
        ids = self.ids
        if isinstance(value, str) and ids.get(tracker) != value:
            write_text(self.folder / IDS, as_json(ids | {tracker: value}), replace=True)


def uses_own_store(kind: type[Logger], settings: Mapping[str, Any]) -> bool:
    """Return whether MLflow has no server, so that its store is in the folder of the run."""
    given = settings.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
    return kind.__name__ == MLFLOW and not given


def is_tracker(logger: Logger) -> bool:
    """Return whether a logger is more than files beside history.csv."""
    return not isinstance(logger, (CSVLogger, TensorBoardLogger))


def check_trackers(loggers: Sequence[Logger]) -> None:
    """Raise if a tracker cannot be reached, before anything is trained."""
    for logger in filter(is_tracker, loggers):
        client = getattr(logger, "_mlflow_client", None)
        if client is None:
            continue  # W&B is asked when a fold starts
        with _quick_answers(), _one_line_errors(logger, every=True):
            client.search_experiments(max_results=1)


@contextmanager
def tracked(loggers: Sequence[Logger], recipe: Recipe, fold: TrackedFold) -> Iterator[None]:
    """Start the run of a fold with its parameters, and end it, also if training fails."""
    trackers = [logger for logger in loggers if is_tracker(logger)]
    _check_no_other_run(trackers)
    parameters = {**_flat(config.as_table(recipe)), "run": fold.run.resolve().name}
    parameters |= {"fold": fold.name}
    state = "failed"
    try:
        for logger in trackers:
            with _one_line_errors(logger, every=True):
                _ = logger.experiment  # type: ignore[attr-defined]
                logger.log_hyperparams(parameters)
                fold.keep_id(type(logger).__name__, logger.version)
        with _one_line_errors(*trackers):
            yield
        state = "success"
    finally:
        for logger in trackers:
            with suppress(Exception):  # the fold is trained, or has failed with an error of its own
                logger.finalize(state)
                finish = getattr(logger.experiment, "finish", None)  # type: ignore[attr-defined]
                if finish is not None:  # W&B
                    finish(exit_code=int(state != "success"))


def log_scores(loggers: Sequence[Logger], tested: Predictions) -> None:
    """Log the scores of a fold's test part, as test/NAME, if it has labels."""
    trackers = [logger for logger in loggers if is_tracker(logger)]
    if not trackers:
        return
    with suppress(CohortError):
        scores = tested.labelled().scores()
        known = {f"test/{name}": value for name, value in scores.items() if isfinite(value)}
        for logger in trackers:
            logger.log_metrics(known)


def _check_no_other_run(trackers: Sequence[Logger]) -> None:
    """Raise if a W&B run is active: Lightning would write the fold into it."""
    if not any(type(logger).__name__ == WANDB for logger in trackers):
        return
    import wandb

    if wandb.run is not None:
        raise RunError(
            "A W&B run is active in this process, and each fold is a run of its own. Finish it "
            "first: wandb.finish()"
        )


@contextmanager
def _quick_answers() -> Iterator[None]:
    """Let MLflow give up after seconds instead of minutes, unless the user says how long."""
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    own = {name: value for name, value in limits.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


@contextmanager
def _one_line_errors(*trackers: Logger, every: bool = False) -> Iterator[None]:
    """Turn errors of trackers into one of ours; with `every`, all errors are theirs."""
    try:
        yield
    except (CaprmilError, MemoryError):
        raise
    except Exception as problem:
        package = type(problem).__module__.partition(".")[0]
        if not trackers or not (every or package in PACKAGES):
            raise
        names = ", ".join(type(logger).__name__ for logger in trackers)
        uri = getattr(trackers[0], "_tracking_uri", None)
        where = f" at {uri}" if isinstance(uri, str) else ""
        reason = (one_line(problem, 200) or type(problem).__name__).rstrip(".")
        raise RunError(
            _PASSWORD.sub("://", f"{names} does not work{where}: {reason}. ")
            + "Check its settings and the network, or leave it out of [loggers]; the same command "
            "resumes."
        ) from problem


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their names with dots, without loggers."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if not prefix and name == "loggers":  # an address may have a password
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
