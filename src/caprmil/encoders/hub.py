"""Weights: found in a folder or on the hub, read without running what is in them, and fitted."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from caprmil.encoders.card import Card
from caprmil.encoders.table import origin, url
from caprmil.errors import EncoderError

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


class Source(NamedTuple):
    """Where the weights of an encoder are."""

    file: Path
    folder: Path
    revision: str | None  # the commit of the hub, where it came from there


def locate(card: Card, weights: Path | None) -> Source:
    """Return the weights of an encoder: those given, or those of the hub, downloaded if need be."""
    if weights is not None:
        return _local(card, weights)
    file = _download(card)
    commit = file.parent.name
    return Source(file, file.parent, commit if re.fullmatch("[0-9a-f]{40}", commit) else None)


def weight_files(card: Card) -> tuple[str, ...]:
    """Return what the file of weights may be called."""
    return (card.file,) if card.file else (SAFE, PICKLED)


def _local(card: Card, weights: Path) -> Source:
    if weights.is_file() and card.loader in ("transformers", "titan"):
        raise EncoderError(
            f"{card.name} is loaded from a folder with its config.json, not from {weights.name}. "
            f"Pass {weights.parent}."
        )
    if weights.is_file():
        return Source(weights, weights.parent, None)
    for name in weight_files(card):
        if (weights / name).is_file():
            return Source(weights / name, weights, None)
    what = "has neither" if weights.is_dir() else "is no folder with"
    raise EncoderError(
        f"{weights} {what} {' nor '.join(weight_files(card))}, the weights of {card.name}. "
        f"Pass a folder with {origin(card)}, or the file itself."
    )


def _download(card: Card) -> Path:
    """Download the weights, and what must lie beside them. What is in the cache is not fetched."""
    from huggingface_hub import snapshot_download

    if card.hub is None:
        raise EncoderError(f"The hub has no weights of {card.name}. Pass them: --weights FOLDER.")
    try:
        file, reached = _download_first(card.hub, weight_files(card), card.revision)
        if card.loader in ("transformers", "titan"):
            snapshot_download(
                card.hub,
                revision=card.revision,
                allow_patterns=["*.json", *["*.py"] * card.remote_code],
                local_files_only=not reached,
            )
    except Exception as problem:  # whatever its HTTP library raises
        raise _explain(card, problem) from problem
    return file


def _download_first(hub: str, files: tuple[str, ...], revision: str | None) -> tuple[Path, bool]:
    """Return the first of the files that is there, and whether the hub could be reached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    reached, problem = True, EntryNotFoundError("no file")
    for name in files:
        try:
            file = hf_hub_download(hub, name, revision=revision, local_files_only=not reached)
            return Path(file), reached
        except EntryNotFoundError as error:
            problem = error
            reached = reached and not isinstance(error, LocalEntryNotFoundError)
    raise problem


def _explain(card: Card, problem: Exception) -> EncoderError:
    """Turn what the hub said into what one can do about it."""
    from huggingface_hub import errors

    otherwise = f"or fetch {url(card)} elsewhere and pass its folder: --weights FOLDER."
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if (
        isinstance(problem, errors.GatedRepoError)
        or status == 403
        or (status == 401 and card.gated)
    ):
        said = (
            f"The hub does not let you have the weights of {card.name}. Ask for access at "
            f"{url(card)} and log in with: hf auth login;"
        )
    elif isinstance(problem, errors.RepositoryNotFoundError):
        said = f"The hub shows no {card.hub}. If it is private, log in with: hf auth login;"
    elif isinstance(problem, errors.RevisionNotFoundError):
        said = f"{card.hub} has no commit {card.revision}, which {card.name} is pinned to. Tell us,"
    elif isinstance(problem, errors.LocalEntryNotFoundError):
        said = (
            f"The hub cannot be reached, and its cache here does not hold the weights of "
            f"{card.name}. Try again with a network,"
        )
    elif isinstance(problem, errors.EntryNotFoundError):
        said = f"{card.hub} holds no {' nor '.join(weight_files(card))}. Tell us,"
    else:
        said = f"The hub did not give the weights of {card.name} ({problem}). Try again,"
    return EncoderError(f"{said} {otherwise}")


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read a file of weights. Of a pickle only tensors are taken; anything else is refused."""
    try:
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError) as problem:
        raise EncoderError(f"{file} cannot be read as weights: {problem}") from problem
    except pickle.UnpicklingError as problem:
        raise EncoderError(
            f"{file} holds more than tensors, and reading it could run code. It is not read. "
            "Take the model.safetensors of the same model."
        ) from problem
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise EncoderError(f"{file} is not a plain set of named tensors, and cannot be loaded.")
    return dict(state)


def load_weights(network: nn.Module, state: Mapping[str, Tensor], card: Card) -> None:
    """Put weights into a network, all of them or none. It takes the tensors, not copies."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    other = [name for name in wanted if name in given and given[name] != wanted[name]]
    check_names(
        card,
        missing=[name for name in wanted if name not in given],
        unknown=[name for name in given if name not in wanted],
        other=[f"{name} is {given[name]}, not {wanted[name]}" for name in other],
    )
    network.load_state_dict(state, assign=True)


def check_names(card: Card, *, missing: list[str], unknown: list[str], other: list[str]) -> None:
    """Raise if weights and network do not fit, and name the first that do not."""
    said = [
        f"{len(found)} {what} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        for what, found in (
            ("are missing", missing),
            ("are not known to it", unknown),
            ("have another shape", other),
        )
        if found
    ]
    if said:
        raise EncoderError(
            f"The weights are not those of {card.name}: of its tensors, {', '.join(said)}. "
            f"Take {origin(card)}."
        )


def drop_unused(state: Mapping[str, Tensor], card: Card) -> dict[str, Tensor]:
    """Return the weights without those that the features have no need of."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(card.unused)}
