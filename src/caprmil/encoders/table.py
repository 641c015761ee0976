"""The table of patch encoders, one card per row. It is plain data: torch and timm are not imported.

A row states what the model's own page states: weights, architecture, input, and which outputs are
the features. The features are part of the name: `virchow2` and `virchow2-cls` are different
vectors of one network.
"""

import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from caprmil.encoders.card import Card, same_encoder
from caprmil.errors import UnknownNameError

CLIP: dict[str, Any] = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
H_OPTIMUS: dict[str, Any] = {
    "mean": (0.707223, 0.578729, 0.703617),
    "std": (0.211883, 0.230117, 0.177517),
}
HIBOU: dict[str, Any] = {"mean": (0.7068, 0.5755, 0.722), "std": (0.195, 0.2316, 0.1816)}
TENSORFLOW: dict[str, Any] = {
    "mean": (127 / 255, 127 / 255, 127 / 255),
    "std": (128 / 255, 128 / 255, 128 / 255),
}

UNI_LIKE = {"img_size": 224, "init_values": 1e-5, "dynamic_img_size": True}
SWIGLU = {"mlp_layer": "SwiGLUPacked", "act_layer": "SiLU"}
VIRCHOW = {"img_size": 224, "init_values": 1e-5, "mlp_ratio": 5.3375, "dynamic_img_size": True}
DINOV2_G = {
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 24,
    "patch_size": 14,
    "use_swiglu_ffn": True,
}

_AT_20X: dict[str, Any] = {"input_px": 224, "mpp": 0.5, "patch_px": 224}
_TIMM: dict[str, Any] = {**_AT_20X, "loader": "timm", "pooled": "cls"}
_VIRCHOW: dict[str, Any] = {
    **_TIMM,
    "architecture": "vit_huge_patch14_224",
    "interpolation": "bicubic",
    "precision": "fp16",
    "gated": True,
}
_VIRCHOW_1 = {
    **_VIRCHOW,
    "hub": "paige-ai/Virchow",
    "settings": {**VIRCHOW, **SWIGLU},
    "licence": "Apache-2.0",
}
_VIRCHOW_2 = {
    **_VIRCHOW,
    "hub": "paige-ai/Virchow2",
    "settings": {**VIRCHOW, **SWIGLU, "reg_tokens": 4},
    "licence": "CC-BY-NC-ND-4.0",
}
_OPTIMUS: dict[str, Any] = {
    **_TIMM,
    **H_OPTIMUS,
    "architecture": "vit_giant_patch14_reg4_dinov2",
    "settings": {"img_size": 224, "init_values": 1e-5},
    "width": 1536,
    "interpolation": "bicubic",
    "precision": "fp16",
    "gated": True,
}
_H0_MINI: dict[str, Any] = {
    **_OPTIMUS,
    "hub": "bioptimus/H0-mini",
    "architecture": "vit_base_patch14_reg4_dinov2",
    "settings": {"img_size": 224, "init_values": 1e-5, "mlp_ratio": 5.33334, **SWIGLU},
    "licence": "CC-BY-NC-ND-4.0",
}
_MIDNIGHT: dict[str, Any] = {
    **_AT_20X,
    **HALF,
    "hub": "kaiko-ai/midnight",
    "loader": "transformers",
    "architecture": "Dinov2Model",
    "settings": DINOV2_G,
    "precision": "fp16",
    "licence": "MIT",
}
_KAIKO: dict[str, Any] = {
    **_TIMM,
    **HALF,
    "settings": {"dynamic_img_size": True},
    "patch_px": 256,
    "licence": "kaiko non-commercial",
}
_KAIKO_HUB = "1aurent/{}.kaiko_ai_towards_large_pathology_fms"

_ROWS = (
    Card(
        name="lite0",
        loader="lite0",
        architecture="EfficientNet-Lite0",
        width=1280,
        pooled="mean",
        input_px=224,
        interpolation="bicubic",
        **TENSORFLOW,
        mpp=1.0,
        patch_px=224,
        licence="Apache-2.0",
    ),
    Card(
        name="resnet50",
        hub="timm/resnet50.tv_in1k",
        loader="timm",
        architecture="resnet50",
        settings={"features_only": True, "out_indices": (3,)},
        unused=("layer4.", "fc."),
        width=1024,
        pooled="mean of the third stage",
        input_px=224,
        resize_px=256,
        mpp=0.5,
        patch_px=256,
        licence="BSD-3-Clause",
        aliases=("resnet50_trunc", "resnet50-imagenet"),
    ),
    Card(
        name="uni",
        hub="MahmoodLab/UNI",
        revision="77ffbca1ee1cdcee6e87f6deebd2db8a5888c721",
        **{**_TIMM, "patch_px": 256},
        architecture="vit_large_patch16_224",
        settings=UNI_LIKE,
        width=1024,
        precision="fp16",
        licence="CC-BY-NC-ND-4.0",
        gated=True,
        aliases=("uni_v1", "mahmood-uni"),
    ),
    Card(
        name="uni2-h",
        hub="MahmoodLab/UNI2-h",
        **{**_TIMM, "patch_px": 256},
        architecture="vit_giant_patch14_224",
        settings={
            **UNI_LIKE,
            **SWIGLU,
            "patch_size": 14,
            "depth": 24,
            "num_heads": 24,
            "embed_dim": 1536,
            "mlp_ratio": 2.66667 * 2,
            "no_embed_class": True,
            "reg_tokens": 8,
        },
        width=1536,
        precision="bf16",
        licence="CC-BY-NC-ND-4.0",
        gated=True,
        aliases=("uni_v2", "uni2", "mahmood-uni2"),
    ),
    Card(
        name="conch-v1.5",
        hub="MahmoodLab/TITAN",
        loader="titan",
        architecture="AutoModel",
        width=768,
        pooled="as its own code has it",
        input_px=448,
        mpp=0.5,
        patch_px=512,
        precision="fp16",
        licence="CC-BY-NC-ND-4.0",
        gated=True,
        remote_code=True,
        aliases=("conch1_5", "mahmood-conch1_5"),
    ),
    Card(
        name="virchow",
        **_VIRCHOW_1 | {"pooled": "cls+mean"},
        width=2560,
        aliases=("virchow-full",),
    ),
    Card(name="virchow-cls", **_VIRCHOW_1, width=1280),
    Card(name="virchow2", **_VIRCHOW_2 | {"pooled": "cls+mean"}, width=2560),
    Card(name="virchow2-cls", **_VIRCHOW_2, width=1280),
    Card(
        name="gigapath",
        hub="prov-gigapath/prov-gigapath",
        **{**_TIMM, "patch_px": 256},
        architecture="vit_giant_patch14_dinov2",
        settings={
            "img_size": 224,
            "patch_size": 16,
            "embed_dim": 1536,
            "depth": 40,
            "num_heads": 24,
            "init_values": 1e-5,
            "mlp_ratio": 5.33334,
        },
        width=1536,
        resize_px=256,
        interpolation="bicubic",
        precision="fp16",
        licence="Apache-2.0, research only",
        gated=True,
        aliases=("prov-gigapath",),
    ),
    Card(
        name="h-optimus-0",
        hub="bioptimus/H-optimus-0",
        revision="2bcd5e4a3e3ff026df800e3b3eb72ad2311742fd",
        **_OPTIMUS,
        licence="Apache-2.0",
        aliases=("hoptimus",),
    ),
    Card(
        name="h-optimus-1",
        hub="bioptimus/H-optimus-1",
        **_OPTIMUS,
        licence="CC-BY-NC-ND-4.0",
    ),
    Card(name="h0-mini", **_H0_MINI | {"pooled": "cls+mean", "width": 1536}),
    Card(name="h0-mini-cls", **_H0_MINI | {"width": 768}),
    Card(
        name="phikon",
        hub="owkin/phikon",
        **_AT_20X,
        loader="transformers",
        architecture="ViTModel",
        settings={"add_pooling_layer": False},
        unused=("pooler.",),
        width=768,
        pooled="cls",
        licence="Owkin non-commercial",
    ),
    Card(
        name="phikon-v2",
        hub="owkin/phikon-v2",
        revision="419e8285b80eac3b60beca0d9b91942d48ad7b8e",
        **_AT_20X,
        loader="transformers",
        architecture="Dinov2Model",
        settings={
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 16,
        },
        width=1024,
        pooled="cls",
        interpolation="bicubic",
        licence="Owkin non-commercial",
    ),
    Card(name="midnight", **_MIDNIGHT, pooled="cls+mean", width=3072, aliases=("midnight12k",)),
    Card(name="midnight-cls", **_MIDNIGHT, pooled="cls", width=1536),
    Card(
        name="hibou-l",
        hub="histai/hibou-L",
        **_AT_20X,
        **HIBOU,
        loader="transformers",
        architecture="AutoModel",
        width=1024,
        pooled="cls",
        interpolation="bicubic",
        licence="Apache-2.0",
        gated=True,
        remote_code=True,
    ),
    Card(
        name="kaiko-vits16",
        hub=_KAIKO_HUB.format("vit_small_patch16_224"),
        **_KAIKO,
        architecture="vit_small_patch16_224",
        width=384,
    ),
    Card(
        name="kaiko-vits8",
        hub=_KAIKO_HUB.format("vit_small_patch8_224"),
        **_KAIKO,
        architecture="vit_small_patch8_224",
        width=384,
    ),
    Card(
        name="kaiko-vitb16",
        hub=_KAIKO_HUB.format("vit_base_patch16_224"),
        revision="797c524a94c7fdae8ea33064d0ac6966ed8956bb",
        **_KAIKO,
        architecture="vit_base_patch16_224",
        width=768,
    ),
    Card(
        name="kaiko-vitb8",
        hub=_KAIKO_HUB.format("vit_base_patch8_224"),
        **_KAIKO,
        architecture="vit_base_patch8_224",
        width=768,
    ),
    Card(
        name="kaiko-vitl14",
        hub=_KAIKO_HUB.format("vit_large_patch14_reg4_224"),
        revision="d86df45eccdb957aa7869bab7d11f8e158dcbda2",
        **_KAIKO | {"settings": {"img_size": 518, "dynamic_img_size": True}},
        architecture="vit_large_patch14_reg4_dinov2",
        width=1024,
    ),
    Card(
        name="lunit-vits8",
        hub="1aurent/vit_small_patch8_224.lunit_dino",
        revision="c23bc01cfbe022bc1f2a8a9306125a07818e4eb4",
        **_TIMM,
        architecture="vit_small_patch8_224",
        width=384,
        resize_px=248,
        interpolation="bicubic",
        licence="Lunit non-commercial",
    ),
    Card(
        name="gpfm",
        hub="majiabo/GPFM",
        **_TIMM,
        architecture="vit_large_patch14_dinov2",
        settings=UNI_LIKE,
        file="GPFM.pth",
        width=1024,
        interpolation="bicubic",
        precision="fp16",
        licence="CC-BY-NC-ND-4.0",
    ),
    Card(
        name="mstar",
        hub="Wangyh/mSTAR",
        **_TIMM,
        architecture="vit_large_patch16_224",
        settings=UNI_LIKE,
        width=1024,
        licence="CC-BY-NC-ND-4.0",
        gated=True,
    ),
    Card(
        name="keep",
        hub="Astaxanthin/KEEP",
        **{**_AT_20X, "patch_px": 256},
        loader="keep",
        architecture="vit_large_patch16_224",
        settings=UNI_LIKE,
        unused=("text.", "logit_scale"),
        width=768,
        pooled="projection of cls, of length one",
        interpolation="bicubic",
        precision="fp16",
        licence="MIT",
    ),
    Card(
        name="plip",
        hub="vinid/plip",
        **_AT_20X,
        **CLIP,
        loader="transformers",
        architecture="CLIPVisionModelWithProjection",
        settings={"patch_size": 32},
        unused=(
            "text_model.",
            "text_projection.",
            "logit_scale",
            "vision_model.embeddings.position_ids",
        ),
        width=512,
        pooled="projection",
        interpolation="bicubic",
        licence="not stated",
    ),
)

CARDS: dict[str, Card] = {card.name: card for card in _ROWS}
DEFAULT = "lite0"


def find(name: str) -> Card:
    """Return the card of an encoder by its name or an alias, ignoring case and punctuation.

    `timm:NAME` is any network of timm, with timm's transform; timm must be installed. `NAME@448`
    is the encoder NAME with an input of 448 pixels.
    """
    if sized := re.fullmatch(r"(.+)@(\d{1,6})", name):
        return find(sized[1]).with_input(int(sized[2]))
    if name.startswith("timm:"):
        from caprmil.encoders.networks import timm_card

        return timm_card(name.removeprefix("timm:"))
    for card in CARDS.values():
        if any(same_encoder(name, known) for known in (card.name, *card.aliases)):
            return card
    raise UnknownNameError("encoder", name, CARDS)


@lru_cache
def name_of_width(name: str, width: int) -> str:
    """Return the name of an encoder whose vectors have a width.

    Tools use one name for different vectors of a network: STAMP's `virchow2` is the class token
    alone, which is `virchow2-cls` here. Other names are returned as they are.
    """
    with suppress(UnknownNameError):
        card = CARDS.get(name) or find(name if ":" not in name else "")
        same = [each for each in CARDS.values() if each.hub and each.hub == card.hub]
        if card.width != width and len(known := [e for e in same if e.width == width]) == 1:
            return known[0].name
    return name


def as_markdown() -> str:
    """Return the table in Markdown, as in `docs/encoders.md`."""
    lines = [
        "| name | weights | features | width | input | patch | precision | licence |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for card in CARDS.values():
        weights = "in the package" if card.hub is None else f"[{card.hub}]({url(card)})"
        terms = [*["access on request"] * card.gated, *["runs remote code"] * card.remote_code]
        licence = ", ".join((card.licence, *terms))
        crop = f"{card.resize_px} → " if card.resize_px else ""
        lines.append(
            f"| `{card.name}` | {weights} | {card.pooled} | {card.width} "
            f"| {crop}{card.input_px} px, {card.interpolation} "
            f"| {card.patch_px} px at {card.mpp:g} µm | {card.precision} | {licence} |"
        )
    return "\n".join(lines) + "\n"


def url(card: Card) -> str:
    """Return the URL of an encoder's page on the hub."""
    return f"https://huggingface.co/{card.hub}"


def origin(card: Card) -> str:
    """Return a description of the files that hold the weights of an encoder."""
    return (
        f"the files of {url(card)}" if card.hub else "the file that was installed with the package"
    )
