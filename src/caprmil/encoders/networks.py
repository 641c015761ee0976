"""Networks of timm and transformers, built by the settings of a card, with its pooling at the end.

Both packages are the extra `encoders`, and are imported here and nowhere else.
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

_operators: list[Any] = []  # what import_torchvision defines must stay alive


def import_torchvision() -> ModuleType:
    """Import torchvision, also where it was built for CUDA and torch was not.

    There its compiled part does not load, and its import fails for want of two operators. Nobody
    here calls them, so it is enough that they are declared.
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
    """Import timm, or say how to get it."""
    _require(wanted_by, "timm", "torchvision")
    import_torchvision()
    return importlib.import_module("timm")


def import_transformers(wanted_by: str) -> ModuleType:
    """Import transformers, or say how to get it. It can do without torchvision."""
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
    """A vision transformer of timm, and which of its tokens are the features."""

    def __init__(self, trunk: nn.Module, pooled: str) -> None:
        super().__init__()
        self.trunk, self.pooled = trunk, pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return the class token, or it and the mean of the patches beside it."""
        tokens: Tensor = self.trunk.forward_features(x)  # type: ignore[operator]
        return pool(tokens, self.pooled, before=self.trunk.num_prefix_tokens)  # type: ignore[arg-type]


class LastStagePooling(nn.Module):
    """A network that gives maps, and the mean over the last of them."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each channel."""
        maps: list[Tensor] = self.trunk(x)
        return maps[-1].mean(dim=(2, 3))


class Keep(nn.Module):
    """KEEP's half that sees: a vision transformer and a projection, brought to length one."""

    def __init__(self, visual: nn.Module, width: int) -> None:
        super().__init__()
        self.visual = visual
        seen: int = visual.num_features  # type: ignore[assignment]
        self.visual_head = nn.Sequential(nn.Linear(seen, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection."""
        return F.normalize(self.visual_head(self.visual(x)), dim=-1)


class HiddenStatePooling(nn.Module):
    """A model of transformers, and which of its answers are the features."""

    def __init__(self, model: nn.Module, pooled: str) -> None:
        super().__init__()
        self.model, self.pooled = model, pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return the class token, it and the mean of the patches, or the projection."""
        answer = self.model(x)
        if self.pooled == "projection":
            projection: Tensor = answer.image_embeds
            return projection
        return pool(answer.last_hidden_state, self.pooled, before=1)


def pool(tokens: Tensor, pooled: str, *, before: int) -> Tensor:
    """Make one vector of tokens (B, T, D); the class token and registers stand `before`."""
    if pooled == "cls":
        return tokens[:, 0]
    if pooled == "cls+mean":
        return torch.cat([tokens[:, 0], tokens[:, before:].mean(dim=1)], dim=-1)
    raise ValueError(f"{pooled=} is not known.")


def build_timm(card: Card, device: str = "cpu") -> nn.Module:
    """Build the network of a card, without its weights. On `meta` it costs nothing."""
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
    """Put the card's pooling behind a network of timm."""
    if card.settings.get("features_only"):
        return LastStagePooling(trunk)
    return TokenPooling(trunk, card.pooled) if card.pooled in ("cls", "cls+mean") else trunk


def load_timm(card: Card, state: Mapping[str, Tensor]) -> nn.Module:
    """Build the network of a card around its weights."""
    trunk = build_timm(card, "meta")
    hub.load_weights(trunk, state, card)
    if any(tensor.is_meta for tensor in (*trunk.parameters(), *trunk.buffers())):
        trunk = build_timm(card)  # it has constants that are in no file
        hub.load_weights(trunk, state, card)
    return with_pooling(card, trunk.float())


def build_transformers(card: Card, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the model of a card by its settings, without weights."""
    transformers = import_transformers(card.name)
    kind = getattr(transformers, card.architecture)
    settings = {**card.settings, **(changes or {})}
    extra = {"add_pooling_layer": False} if settings.pop("add_pooling_layer", None) is False else {}
    return HiddenStatePooling(kind(kind.config_class(**settings), **extra), card.pooled)


def load_transformers(card: Card, folder: Path, *, trust_remote_code: bool) -> nn.Module:
    """Load the model of a folder, as transformers does, but all of its weights or none."""
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
        other=sorted(str(found) for found in loaded["mismatched_keys"]),
    )
    if card.loader == "titan":
        conch: nn.Module = model.return_conch()[0]
        return conch.float()
    return HiddenStatePooling(model.float(), card.pooled)


def timm_card(name: str) -> Card:
    """Make a card for any network that timm knows, with timm's own transform and pooling."""
    timm = import_timm(f"timm:{name}")
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=5, cutoff=0.3)
        raise UnknownNameError("network in timm", name, near)
    with torch.device("meta"):
        network = timm.create_model(name, pretrained=False, num_classes=0).eval()
        known, seen = network.pretrained_cfg, timm.data.resolve_model_data_config(network)
        side = seen["input_size"][-1]
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
        resize_px=max(side, int(side / seen["crop_pct"])),
        interpolation="bicubic" if seen["interpolation"] == "bicubic" else "bilinear",
        mean=tuple(seen["mean"]),
        std=tuple(seen["std"]),
        patch_px=side,
        licence=known.get("license") or "not known",
    )
