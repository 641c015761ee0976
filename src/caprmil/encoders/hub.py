"""Encoder weights: located in a folder or on the hub, read safely, and loaded strictly."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from caprmil.encoders.card import Card
from caprmil.encoders.table import origin, url
from caprmil.errors import EncoderError, one_line

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


class Source(NamedTuple):
    """The location of an encoder's weights."""

    file: Path
    folder: Path
    revision: str | None  # the commit of the hub, or None for local files


def locate(card: Card, weights: Path | None) -> Source:
    """Return the given weights of an encoder, or those of the hub, downloaded if necessary."""
    if weights is not None:
        return _local(card, weights)
    file = _download(card)
    commit = file.parent.name
    return Source(file, file.parent, commit if re.fullmatch("[0-9a-f]{40}", commit) else None)


def weight_files(card: Card) -> tuple[str, ...]:
    """Return the possible names of the weight file."""
    return (card.file,) if card.file else (SAFE, PICKLED)


def _local(card: Card, weights: Path) -> Source:
    if weights.is_file() and card.loader in ("transformers", "titan"):
        raise EncoderError(
            f"{card.name} is loaded from a folder with a config.json, not from {weights.name}. "
            f"Pass {weights.parent}."
        )
    if weights.is_file():
        return Source(weights, weights.parent, None)
    for name in weight_files(card):
        if (weights / name).is_file():
            return Source(weights / name, weights, None)
    what = "has no" if weights.is_dir() else "is not a folder with"
    raise EncoderError(
        f"{weights} {what} {' or '.join(weight_files(card))}, the weights of {card.name}. "
        f"Pass a folder with {origin(card)}, or the file itself."
    )


def _download(card: Card) -> Path:
    """Download the weights and their config files, unless they are in the cache."""
    from huggingface_hub import snapshot_download

    if card.hub is None:
        raise EncoderError(f"The hub has no weights of {card.name}. Pass --weights FOLDER.")
    try:
        file, reached = _download_first(card.hub, weight_files(card), card.revision)
        if card.loader in ("transformers", "titan"):
            snapshot_download(
                card.hub,
                revision=card.revision,
                allow_patterns=["*.json", *["*.py"] * card.remote_code],
                local_files_only=not reached,
            )
    except Exception as problem:  # the exceptions depend on its HTTP library
        raise _explain(card, problem) from problem
    return file


def _download_first(hub: str, files: tuple[str, ...], revision: str | None) -> tuple[Path, bool]:
    """Return the first of the files that exists, and whether the hub could be reached."""
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
    """Return an error with a remedy for an exception of the hub."""
    from huggingface_hub import errors

    alternative = f"or download {url(card)} on another machine and pass --weights FOLDER."
    status = getattr(getattr(problem, "response", None), "status_code", None)
    if (
        isinstance(problem, errors.GatedRepoError)
        or status == 403
        or (status == 401 and card.gated)
    ):
        message = (
            f"You have no access to the weights of {card.name}. Request it at "
            f"{url(card)} and log in with: hf auth login;"
        )
    elif isinstance(problem, errors.RepositoryNotFoundError):
        message = f"The hub has no {card.hub}. If it is private, log in with: hf auth login;"
    elif isinstance(problem, errors.RevisionNotFoundError):
        message = (
            f"{card.hub} has no commit {card.revision}, which {card.name} is pinned to. Report it,"
        )
    elif isinstance(problem, errors.LocalEntryNotFoundError):
        message = (
            f"The hub cannot be reached, and the local cache does not have the weights of "
            f"{card.name}. Try again with a network,"
        )
    elif isinstance(problem, errors.EntryNotFoundError):
        message = f"{card.hub} has no {' or '.join(weight_files(card))}. Report it,"
    else:
        message = f"Downloading the weights of {card.name} failed ({problem}). Try again,"
    return EncoderError(f"{message} {alternative}")


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the weights in a file. A pickle with anything but tensors is refused."""
    try:
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise EncoderError(
            f"{file} contains more than tensors and could run code, or is damaged, so it is not "
            "loaded. Use the model.safetensors of the same model."
        ) from problem
    except Exception as problem:  # a damaged pickle raises errors of any type
        reason = one_line(problem, 300) or type(problem).__name__
        raise EncoderError(f"{file} cannot be read as weights: {reason}") from problem
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise EncoderError(f"{file} is not a dictionary of tensors, and cannot be loaded.")
    if repeated := [n for n, v in state.items() if v.nbytes > v.untyped_storage().nbytes()]:
        raise EncoderError(
            f"{file} is damaged: {repeated[0]} repeats its numbers, and may take any memory. Use "
            "the model.safetensors of the same model."
        )
    return dict(state)


def load_weights(network: nn.Module, state: Mapping[str, Tensor], card: Card) -> None:
    """Load weights into a network strictly. The tensors are assigned, not copied."""
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    mismatched = [name for name in expected if name in given and given[name] != expected[name]]
    check_names(
        card,
        missing=[name for name in expected if name not in given],
        unknown=[name for name in given if name not in expected],
        mismatched=[f"{name} is {given[name]}, not {expected[name]}" for name in mismatched],
    )
    network.load_state_dict(state, assign=True)


def check_names(
    card: Card, *, missing: list[str], unknown: list[str], mismatched: list[str]
) -> None:
    """Raise EncoderError if weights and network differ, with the first names of each kind."""
    differences = [
        f"{len(found)} {what} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        for what, found in (
            ("are missing", missing),
            ("are unexpected", unknown),
            ("have a different shape", mismatched),
        )
        if found
    ]
    if differences:
        raise EncoderError(
            f"The weights do not fit {card.name}: of its tensors, {', '.join(differences)}. "
            f"Use {origin(card)}."
        )


def drop_unused(state: Mapping[str, Tensor], card: Card) -> dict[str, Tensor]:
    """Return the weights without those that the features do not need."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(card.unused)}
