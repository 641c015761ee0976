"""Loading an encoder: a row of the table, a network of timm, or a callable."""

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
from caprmil.models.products import use_linear

Network = Callable[[Tensor], Any]


def load(
    encoder: str | Network | Encoder = DEFAULT,
    *,
    weights: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    precision: str = "auto",
    trust_remote_code: bool = False,
    card: Card | None = None,
) -> Encoder:
    """Return an encoder by a name of the table, `timm:NAME`, `package.module:callable`, or object.

    `weights` is a folder with the files of the hub, or one file; without it they are downloaded.
    `card` describes the input of a callable, or replaces a row of the table. A callable may also
    have an attribute `card`. `device` is cpu, cuda, cuda:1, mps or auto.
    """
    options: dict[str, Any] = {"device": device, "precision": precision}
    if isinstance(encoder, Encoder):
        return encoder
    if isinstance(encoder, str) and (":" not in encoder or encoder.startswith("timm:")):
        source = None if weights is None else Path(weights)
        loaded = _load_card(card or find(encoder), source, trust_remote_code, options)
        if "@" in loaded.name:
            _check_input(loaded)
        return loaded
    if isinstance(encoder, str) and "@" in encoder:
        raise EncoderError(f"{encoder.split('@')[0]} sets its input itself: leave out --input-px.")
    if weights is not None:
        raise EncoderError("weights are for encoders of the table. A callable has its own.")
    network = _import(encoder) if isinstance(encoder, str) else encoder
    # Bags store the name, by which `caprmil predict` loads the encoder again.
    name = encoder if isinstance(encoder, str) else _name(network)
    card = card or getattr(network, "card", None) or Card(name=name)
    return _load_callable(network, card, options)


def _load_card(card: Card, weights: Path | None, trust: bool, options: dict[str, Any]) -> Encoder:
    if card.loader == "lite0":
        return _load_lite0(card, weights, options)
    if card.loader == "callable":
        raise ValueError(f"{card.name} is the card of a callable. Pass the callable itself.")
    if card.remote_code and not trust:
        raise EncoderError(
            f"{card.name} needs Python code from the hub, which would run with your permissions. "
            f"Read it at {url(card)}, and allow it with --trust-remote-code."
        )
    uses_timm = card.loader in ("timm", "keep")
    # Check that the package is installed before gigabytes are downloaded.
    (networks.import_timm if uses_timm else networks.import_transformers)(card.name)
    source = hub.locate(card, weights)
    state = hub.drop_unused(hub.read_weights(source.file), card)
    digest = fingerprint(state, card)
    if uses_timm:
        network = networks.load_timm(card, state)
    else:
        del state  # transformers reads the file itself
        network = networks.load_transformers(card, source.folder, trust_remote_code=trust)
    use_linear(network)
    return Encoder(network, card, fingerprint=digest, revision=source.revision, **options)


def _load_lite0(card: Card, weights: Path | None, options: dict[str, Any]) -> Encoder:
    file = lite0.weights_file() if weights is None else hub.locate(card, weights).file
    state = hub.read_weights(file)
    network = lite0.Lite0()
    hub.load_weights(network, state, card)
    digest = fingerprint(state, card)
    fused = lite0.fuse_batch_norm(network.eval()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Encoder(fused, card, fingerprint=digest, parallel=True, **options)


def _check_input(encoder: Encoder) -> None:
    """Raise EncoderError if a network does not read the size of input that the user chose."""
    side = encoder.card.input_px or encoder.patch_px
    try:
        encoder(probe_patches(side))
    except CaprmilError:
        raise
    except Exception as problem:  # each library has its own
        reason = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
        raise EncoderError(
            f"{encoder.name.split('@')[0]} does not read an input of {side} px ({reason}). Choose "
            "a multiple of its token size, e.g. 224 or 448, or leave out --input-px."
        ) from problem


def _import(text: str) -> Network:
    """Return the callable written as `package.module:name`. A class is instantiated."""
    module, _, name = text.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise EncoderError(
            f"'{text}' cannot be imported: {problem}. Write it as package.module:callable."
        ) from problem
    found = found() if isinstance(found, type) else found
    if not callable(found):
        raise EncoderError(f"'{text}' is a {type(found)}, which is not callable.")
    return found


def _name(network: Network) -> str:
    return str(getattr(network, "__qualname__", type(network).__qualname__))


def _load_callable(network: Network, card: Card, options: dict[str, Any]) -> Encoder:
    """Return an encoder from a callable that maps (B, 3, H, W) to (B, width)."""
    if not isinstance(card, Card):
        raise EncoderError(
            f"The card of {_name(network)} is a {type(card)}, not a caprmil.encoders.Card."
        )
    probe = probe_patches(card.input_px or card.patch_px or 224)
    trial = Encoder(network, replace(card, width=card.width or 1), fingerprint="", **options)
    try:
        output = trial.forward(probe)
    except CaprmilError:
        raise
    except Exception as problem:  # user code may raise anything
        raise EncoderError(
            f"{card.name} fails on patches of shape {tuple(probe.shape)} ({type(problem).__name__}:"
            f" {problem}). It is called with a float tensor (B, 3, H, W)."
        ) from problem
    state = network.state_dict() if isinstance(network, nn.Module) else {}
    identity: tuple[str, ...] = ()
    if not state:  # without weights: the qualified name and the output on fixed patches
        name = f"{network.__module__}.{_name(network)}"
        identity = (name, summarise_output(output.ravel()))
    digest = fingerprint(state, card, *identity)
    width = card.width or output.shape[1]
    return Encoder(network, replace(card, width=width), fingerprint=digest, **options)
