"""The loggers of a recipe, which record a training in addition to history.csv.

A recipe may come from a stranger. So it names Lightning's own loggers only, and they write in the
folder of the run. A logger of another package is imported only if the user has allowed its name.
"""

import importlib
import inspect
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from caprmil.errors import CaprmilError, RecipeError
from caprmil.training.trackers import TrackedFold, uses_own_store

OWN = tuple(name for name in lightning_loggers.__all__ if name != "Logger")
FOLDERS = ("save_dir", "dir", "root_dir", "log_dir", "offline_directory")
"""Settings of loggers that name a folder. It is in that of the run."""


def make_loggers(
    settings: Mapping[str, Any],
    folder: Path,
    *,
    allowed: Collection[str] = (),
    fold: TrackedFold | None = None,
) -> list[Logger]:
    """Return the loggers of these names: Lightning's own, or package.module.Class if allowed.

    `fold` names the run of a tracker, for what the settings do not say. Without it only what exists
    before a run is asked: not the store of MLflow in a run.
    """
    made = []
    for name, keywords in settings.items():
        kind = _find_logger(name, allowed)
        if not isinstance(keywords, Mapping):
            raise RecipeError(f"loggers: {name} takes a table of settings, not {keywords!r}.")
        for key, value in keywords.items():
            _check_inside(f"{name}: {key}", value)
        defaults = fold.defaults(kind.__name__) if fold is not None else {}
        base = fold.run if fold is not None and defaults else folder
        inside = {k: str(base / str(v)) for k, v in keywords.items() if k in FOLDERS}
        ours = {"save_dir": str(folder)} if "save_dir" in inspect.signature(kind).parameters else {}
        if issubclass(kind, (CSVLogger, TensorBoardLogger)):  # for others these are not folders
            ours |= {"name": "", "version": "log"}
        given = dict(keywords)
        if isinstance(own := given.get("tags"), Mapping):
            given["tags"] = {**defaults.get("tags", {}), **own}
        arguments = ours | defaults | given | inside
        try:
            inspect.signature(kind).bind(**arguments)
            if fold is not None or not uses_own_store(kind, given):
                made.append(kind(**arguments))
        except CaprmilError:
            raise
        except Exception as problem:  # each logger raises errors of its own
            raise RecipeError(f"loggers: {name} cannot be made: {problem}") from problem
    return made


def _find_logger(name: str, allowed: Collection[str]) -> type[Logger]:
    own = name.removeprefix(f"{lightning_loggers.__name__}.")
    if own in OWN:
        kind: type[Logger] = getattr(lightning_loggers, own)
        return kind
    module, _, word = name.rpartition(".")
    known = ", ".join(OWN)
    if not module:
        raise RecipeError(f"loggers: there is no logger '{name}'. Lightning has: {known}.")
    if name not in allowed:
        raise RecipeError(
            f"loggers: {name} is not one of Lightning's ({known}), and would run code of {module}. "
            f"If you trust it, allow it: --allow-logger {name}"
        )
    try:
        found = getattr(importlib.import_module(module), word)
    except (ImportError, AttributeError) as problem:
        raise RecipeError(f"loggers: {name} cannot be imported: {problem}.") from problem
    if not (isinstance(found, type) and issubclass(found, Logger)):
        raise RecipeError(f"loggers: {name} is not a logger of Lightning.")
    return found


def _check_inside(where: str, value: Any) -> None:
    """Refuse a text that is a path out of the run's folder, also in a list or a table."""
    if isinstance(value, Mapping):
        for inner in value.values():
            _check_inside(where, inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_inside(where, inner)
    elif isinstance(value, str) and _leaves(value):
        raise RecipeError(
            f"loggers: {where} is {value!r}, and loggers write in the folder of the run. Give a "
            "path below it, or leave it out."
        )


def _leaves(text: str) -> bool:
    """Return whether a text is a path or URL outside of the current folder, http(s) excepted."""
    if scheme := re.match(r"(file):|([a-z][a-z0-9+.-]+):[/.\\]", text.strip(), re.IGNORECASE):
        return (scheme[1] or scheme[2]).lower() not in ("http", "https")
    paths = PurePosixPath(text), PureWindowsPath(text)
    absolute = any(path.is_absolute() or path.drive for path in paths)
    expands = text.startswith("~") or "$" in text  # as some loggers do
    return absolute or expands or any(".." in path.parts for path in paths)
