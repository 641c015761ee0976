"""Networks of timm and transformers, built from the settings of a card, with its pooling.

Both packages are in the extra `encoders`, and are imported only here.
"""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caprmil.encoders import hub
from caprmil.encoders.card import Card
from caprmil.errors import EncoderError, UnknownNameError

_operators: list[Any] = []  # keeps the definitions of import_torchvision alive


def import_torchvision() -> ModuleType:
    """Return torchvision, also if it was built for CUDA and torch was not.

    In that case its compiled part does not load, and its import fails because two operators are
    missing. They are not used here, so it is enough to declare them.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as problem:
        if "torchvision::nms" not in str(problem):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _operators.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _operators[-1].define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return importlib.import_module("torchvision")


def import_timm(wanted_by: str) -> ModuleType:
    """Return timm, or raise EncoderError with the command to install it."""
    _require(wanted_by, "timm", "torchvision")
    import_torchvision()
    return importlib.import_module("timm")


def import_transformers(wanted_by: str) -> ModuleType:
    """Return transformers, or raise EncoderError with the command to install it."""
    _require(wanted_by, "transformers")
    if importlib.util.find_spec("torchvision"):
        import_torchvision()
    return importlib.import_module("transformers")


def _require(wanted_by: str, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise EncoderError(
                f"{wanted_by} needs {package}, which is not installed. "
                "Install it with: pip install 'caprmil[encoders]'"
            )


class TokenPooling(nn.Module):
    """A vision transformer of timm with token pooling."""

    def __init__(self, trunk: nn.Module, pooled: str) -> None:
        super().__init__()
        self.trunk, self.pooled = trunk, pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return the class token, or its concatenation with the mean patch token."""
        tokens: Tensor = self.trunk.forward_features(x)  # type: ignore[operator]
        return pool(tokens, self.pooled, prefix=self.trunk.num_prefix_tokens)  # type: ignore[arg-type]


class LastStagePooling(nn.Module):
    """A network that returns feature maps, with the spatial mean of the last."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        """Return the spatial mean of each channel."""
        maps: list[Tensor] = self.trunk(x)
        return maps[-1].mean(dim=(2, 3))


class Keep(nn.Module):
    """The vision tower of KEEP: a vision transformer and a projection to unit length."""

    def __init__(self, visual: nn.Module, width: int) -> None:
        super().__init__()
        self.visual = visual
        features: int = visual.num_features  # type: ignore[assignment]
        self.visual_head = nn.Sequential(
            nn.Linear(features, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised projection."""
        return F.normalize(self.visual_head(self.visual(x)), dim=-1)


class HiddenStatePooling(nn.Module):
    """A model of transformers, with token pooling or its projection."""

    def __init__(self, model: nn.Module, pooled: str) -> None:
        super().__init__()
        self.model, self.pooled = model, pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return the class token, class and mean patch token, or the projection."""
        output = self.model(x)
        if self.pooled == "projection":
            projection: Tensor = output.image_embeds
            return projection
        return pool(output.last_hidden_state, self.pooled, prefix=1)


def pool(tokens: Tensor, pooled: str, *, prefix: int) -> Tensor:
    """Return one vector per row of tokens (B, T, D) with `prefix` class and register tokens."""
    if pooled == "cls":
        return tokens[:, 0]
    if pooled == "cls+mean":
        return torch.cat([tokens[:, 0], tokens[:, prefix:].mean(dim=1)], dim=-1)
    raise ValueError(f"{pooled=} is not cls or cls+mean.")


def build_timm(card: Card, device: str = "cpu") -> nn.Module:
    """Return the network of a card without weights. On `meta` it needs no memory."""
    timm = import_timm(card.name)
    settings = {name: _layer(timm, value) for name, value in card.settings.items()}
    if not settings.get("features_only"):
        settings["num_classes"] = 0
    with torch.device(device):
        trunk: nn.Module = timm.create_model(card.architecture, pretrained=False, **settings)
        return Keep(trunk, card.width or 768) if card.loader == "keep" else trunk


def _layer(timm: ModuleType, value: Any) -> Any:
    layers: dict[Any, Any] = {"SwiGLUPacked": timm.layers.SwiGLUPacked, "SiLU": nn.SiLU}
    return layers.get(value, value) if isinstance(value, str) else value


def with_pooling(card: Card, trunk: nn.Module) -> nn.Module:
    """Return a network of timm with the card's pooling."""
    if card.settings.get("features_only"):
        return LastStagePooling(trunk)
    return TokenPooling(trunk, card.pooled) if card.pooled in ("cls", "cls+mean") else trunk


def load_timm(card: Card, state: Mapping[str, Tensor]) -> nn.Module:
    """Return the network of a card with its weights."""
    trunk = build_timm(card, "meta")
    hub.load_weights(trunk, state, card)
    if any(tensor.is_meta for tensor in (*trunk.parameters(), *trunk.buffers())):
        trunk = build_timm(card)  # for buffers that are not in the file
        hub.load_weights(trunk, state, card)
    return with_pooling(card, trunk.float())


def build_transformers(card: Card, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """Return the model of a card from its settings, without weights."""
    transformers = import_transformers(card.name)
    kind = getattr(transformers, card.architecture)
    settings = {**card.settings, **(changes or {})}
    extra = {"add_pooling_layer": False} if settings.pop("add_pooling_layer", None) is False else {}
    return HiddenStatePooling(kind(kind.config_class(**settings), **extra), card.pooled)


def load_transformers(card: Card, folder: Path, *, trust_remote_code: bool) -> nn.Module:
    """Return the model of a folder, loaded by transformers, but strictly."""
    transformers = import_transformers(card.name)
    kind = getattr(transformers, card.architecture)
    pooler = {"add_pooling_layer": False} if "add_pooling_layer" in card.settings else {}
    trusted = {"trust_remote_code": True} if card.remote_code and trust_remote_code else {}
    try:
        model, loaded = kind.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **pooler, **trusted
        )
    except (OSError, ValueError, RuntimeError, KeyError) as problem:
        raise EncoderError(f"{card.name} cannot be loaded from {folder}: {problem}") from problem
    hub.check_names(
        card,
        missing=sorted(loaded["missing_keys"]),
        unknown=[n for n in sorted(loaded["unexpected_keys"]) if not n.startswith(card.unused)],
        mismatched=sorted(str(found) for found in loaded["mismatched_keys"]),
    )
    if card.loader == "titan":
        conch: nn.Module = model.return_conch()[0]
        return conch.float()
    return HiddenStatePooling(model.float(), card.pooled)


def timm_card(name: str) -> Card:
    """Return a card for a network of timm, with timm's transform and pooling."""
    timm = import_timm(f"timm:{name}")
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=5, cutoff=0.3)
        raise UnknownNameError("network in timm", name, near)
    with torch.device("meta"):
        network = timm.create_model(name, pretrained=False, num_classes=0).eval()
        known, data = network.pretrained_cfg, timm.data.resolve_model_data_config(network)
        side = data["input_size"][-1]
        width = network(torch.empty(2, 3, side, side)).shape[-1]
    head = known.get("classifier") or ()
    return Card(
        name=f"timm:{name}",
        hub=known.get("hf_hub_id"),
        loader="timm",
        architecture=name,
        unused=tuple(f"{part}." for part in ([head] if isinstance(head, str) else head)),
        width=width,
        pooled="as timm has it",
        input_px=side,
        resize_px=max(side, int(side / data["crop_pct"])),
        interpolation="bicubic" if data["interpolation"] == "bicubic" else "bilinear",
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        patch_px=side,
        licence=known.get("license") or "not known",
    )
