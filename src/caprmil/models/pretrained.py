"""Saved models: `config.json` and `model.safetensors`, as on the Hugging Face hub."""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import nn

from caprmil.errors import CaprmilError, RecipeError, RunError, one_line
from caprmil.io.atomic import atomic_write, write_text
from caprmil.io.json_files import as_json, parse_json
from caprmil.io.leftovers import temporary_folder
from caprmil.io.model_hub import CARD, CONFIG, WEIGHTS, download, upload
from caprmil.models.base import MILModel
from caprmil.models.model_card import model_card
from caprmil.models.registry import MODELS, UNLISTED, create

METADATA = "metadata"  # of config.json: what a model was trained on; everything else is settings
SMALLEST = 2**16  # a setting may be this large for any file
LARGEST_CONFIG = 2**24  # bytes
OLD_FORMAT = (
    "The model in {folder} was saved by an older caprmil, under other names of settings and "
    "weights. Use the version that saved it, or train it again."
)


def save(model: MILModel, folder: str | PathLike[str]) -> None:
    """Write a model into a folder, atomically, and replace a model that is already there."""
    metadata = {METADATA: model.metadata} if model.metadata else {}
    config = as_json(describe(model) | metadata)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with atomic_write(Path(folder) / WEIGHTS, replace=True) as path:
        path.write_bytes(to_bytes(weights, metadata={"format": "pt"}))  # a full disk: OSError
    write_text(Path(folder) / CONFIG, config, replace=True)


def describe(model: MILModel) -> dict[str, Any]:
    """Return the name and settings of a model, for JSON."""
    known = {**UNLISTED, **MODELS}
    names = [name for name, kind in known.items() if kind is type(model)]
    if not names:
        raise RecipeError(
            f"{type(model).__name__} is not registered and could not be loaded again. Register it "
            f"first: caprmil.models.register_model('name')({type(model).__name__})."
        )
    settings = {key: _plain(value) for key, value in model.settings.items()}
    return {"model": names[0], "in_dim": model.in_dim, "n_outputs": model.n_outputs, **settings}


def _plain(value: Any) -> Any:
    if isinstance(value, MILModel):
        settings = describe(value)
        del settings["in_dim"], settings["n_outputs"]
        return {"name": settings.pop("model"), **settings}
    return {"object": type(value).__name__} if isinstance(value, nn.Module) else value


def push(
    model: MILModel,
    repository: str,
    *,
    private: bool,
    token: str | bool | None,
    branch: str | None,
    commit_message: str,
    card: str | None,
) -> str:
    """Upload a model with its card to a repository of the hub, and return the URL of the commit."""
    with temporary_folder() as temporary:
        folder = Path(temporary) / "model"
        save(model, folder)
        name = describe(model)["model"]
        write_text(folder / CARD, card or model_card(name, model.metadata, in_dim=model.in_dim))
        options: dict[str, Any] = {"private": private, "token": token, "branch": branch}
        return upload(folder, repository, message=commit_message, **options)


def load(
    source: str | PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str = "",
    **changes: Any,
) -> MILModel:
    """Return the model in a folder, or in a repository of the hub, with its weights."""
    folder = Path(source) / subfolder
    if not Path(source).is_dir():
        files = [(Path(subfolder) / name).as_posix() for name in (CONFIG, WEIGHTS)]
        folder = download(str(source), files, revision=revision, token=token) / subfolder
    try:
        config, metadata = _read_config(folder / CONFIG)
        config |= changes
        if "n_classes" in config:
            raise RunError(OLD_FORMAT.format(folder=folder))
        _check_sizes(folder / WEIGHTS, config)
        model = create(config.pop("model"), **config)
        model.metadata = metadata
        model.load_state_dict(load_file(folder / WEIGHTS))
        if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
            raise RunError(f"The model in {folder} is damaged: a weight is not finite.")
    except FileNotFoundError as problem:
        name = Path(problem.filename or WEIGHTS).name
        raise RunError(
            f"{folder} has no model: {name} is missing. The models of a run are in its folders "
            "folds/NAME/model."
        ) from None
    except CaprmilError:
        raise
    except (MemoryError, ImportError):
        raise
    except Exception as problem:  # a wrong setting raises errors of any type
        reason = one_line(problem, 300) or type(problem).__name__
        raise RunError(f"The model in {folder} cannot be loaded: {reason}") from problem
    return model.eval()


def _read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a model, and its metadata."""
    if path.stat().st_size > LARGEST_CONFIG:
        raise RunError(f"{path} is damaged: it has more than {LARGEST_CONFIG:,} bytes.")
    config = parse_json(path.read_bytes())
    metadata = config.pop(METADATA, {})
    if not isinstance(metadata, dict):
        raise RunError(f"{path} is damaged: its {METADATA} is not a table.")
    return config, metadata


def _check_sizes(weights: Path, config: Mapping[str, Any]) -> None:
    """Raise if a model of these settings has more numbers than the file.

    It is made without memory first: a few digits more would ask for any amount of it.
    """
    size, settings = weights.stat().st_size, dict(config)
    for name, value in _integers(settings):
        if value > max(size, SMALLEST):
            raise RunError(f"{weights.parent / CONFIG} is damaged: {name} is {value}.")
    try:
        with torch.device("meta"):
            model = create(settings.pop("model"), **settings)
    except (NotImplementedError, RuntimeError):  # a model of another package may need values
        return
    asked = sum(tensor.nbytes for tensor in model.state_dict().values())
    if asked > size:
        raise RunError(
            f"{weights.parent / CONFIG} is damaged: a model of these settings has {asked:,} bytes, "
            f"and {WEIGHTS} has {size:,}."
        )


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield each whole number in nested settings, with its name."""
    if isinstance(value, int):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _integers(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner, name)
