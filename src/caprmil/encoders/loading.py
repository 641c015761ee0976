"""Loading an encoder: one of the table, one of timm, or any callable of your own."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from caprmil.encoders import hub, lite0, networks
from caprmil.encoders.card import Card
from caprmil.encoders.encoder import Encoder, fingerprint, probe_patches, summarise_output
from caprmil.encoders.table import DEFAULT, find, url
from caprmil.errors import CaprmilError, EncoderError

Callee = Callable[[Tensor], Any]


def load(
    encoder: str | Callee | Encoder = DEFAULT,
    *,
    weights: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    precision: str = "auto",
    trust_remote_code: bool = False,
    card: Card | None = None,
) -> Encoder:
    """Load an encoder: a name of the table, `timm:NAME`, `package.module:callable`, or the object.

    `weights` is a folder with the files of the hub, or one file; without it the hub is asked.
    `card` says of a callable what it wants to see, or stands in place of a row of the table. A
    callable may carry one itself, as its `card`. `device` is cpu, cuda, cuda:1, mps or auto.
    """
    how: dict[str, Any] = {"device": device, "precision": precision}
    if isinstance(encoder, Encoder):
        return encoder
    if isinstance(encoder, str) and (":" not in encoder or encoder.startswith("timm:")):
        place = None if weights is None else Path(weights)
        return _load_card(card or find(encoder), place, trust_remote_code, how)
    if weights is not None:
        raise EncoderError("weights are for encoders of the table. A callable brings its own.")
    called = _import(encoder) if isinstance(encoder, str) else encoder
    name = encoder if isinstance(encoder, str) else _name(called)  # by which it is found again
    return _load_callable(called, card or getattr(called, "card", None) or Card(name=name), how)


def _load_card(card: Card, weights: Path | None, trust: bool, how: dict[str, Any]) -> Encoder:
    if card.loader == "lite0":
        return _load_lite0(card, weights, how)
    if card.loader == "callable":
        raise ValueError(f"{card.name} is the card of a callable. Pass the callable itself.")
    if card.remote_code and not trust:
        raise EncoderError(
            f"{card.name} comes with Python code of its own, which would run here with your "
            f"rights. Read it at {url(card)}, and allow it with --trust-remote-code."
        )
    of_timm = card.loader in ("timm", "keep")
    # Said before gigabytes are downloaded.
    (networks.import_timm if of_timm else networks.import_transformers)(card.name)
    source = hub.locate(card, weights)
    state = hub.drop_unused(hub.read_weights(source.file), card)
    mark = fingerprint(state, card)
    if of_timm:
        network = networks.load_timm(card, state)
    else:
        del state  # transformers reads the file by itself
        network = networks.load_transformers(card, source.folder, trust_remote_code=trust)
    return Encoder(network, card, fingerprint=mark, revision=source.revision, **how)


def _load_lite0(card: Card, weights: Path | None, how: dict[str, Any]) -> Encoder:
    state = (
        lite0.read_weights()
        if weights is None
        else hub.read_weights(hub.locate(card, weights).file)
    )
    network = lite0.Lite0()
    hub.load_weights(network, state, card)
    mark = fingerprint(state, card)
    folded = lite0.fuse_batch_norm(network.eval()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Encoder(folded, card, fingerprint=mark, **how)


def _import(text: str) -> Callee:
    """Import what is written as `package.module:name`. A class is called for an object first."""
    module, _, name = text.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise EncoderError(
            f"'{text}' cannot be imported: {problem}. Write it as package.module:callable."
        ) from problem
    found = found() if isinstance(found, type) else found
    if not callable(found):
        raise EncoderError(f"'{text}' is of {type(found)}, and cannot be called with patches.")
    return found


def _name(called: Callee) -> str:
    return str(getattr(called, "__qualname__", type(called).__qualname__))


def _load_callable(called: Callee, card: Card, how: dict[str, Any]) -> Encoder:
    """Make an encoder of anything that turns (B, 3, H, W) into (B, width)."""
    if not isinstance(card, Card):
        raise EncoderError(
            f"The card of {_name(called)} is of {type(card)}, not a caprmil.encoders.Card."
        )
    probe = probe_patches(card.input_px or card.patch_px or 224)
    trial = Encoder(called, replace(card, width=card.width or 1), fingerprint="", **how)
    try:
        answer = trial.forward(probe)
    except CaprmilError:
        raise
    except Exception as problem:  # whatever somebody's code raises
        raise EncoderError(
            f"{card.name} fails on patches of shape {tuple(probe.shape)} ({type(problem).__name__}:"
            f" {problem}). It is called with a float tensor (B, 3, H, W)."
        ) from problem
    state = called.state_dict() if isinstance(called, nn.Module) else {}
    more = (
        () if state else (f"{called.__module__}.{_name(called)}", summarise_output(answer.ravel()))
    )
    mark = fingerprint(state, card, *more)
    width = card.width or answer.shape[1]
    return Encoder(called, replace(card, width=width), fingerprint=mark, **how)
