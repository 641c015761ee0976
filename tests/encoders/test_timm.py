"""Encoders of timm: small networks with random weights, in the file layout of the hub."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from caprmil.encoders import CARDS, Card, load
from caprmil.encoders.encoder import resize_patches
from caprmil.encoders.networks import build_timm, import_timm, with_pooling
from caprmil.errors import EncoderError, UnknownNameError

timm = import_timm("this test")
from timm.data import create_transform  # noqa: E402

OF_TIMM = [name for name, card in CARDS.items() if card.loader in ("timm", "keep")]

# Millions of parameters, from the models' pages and papers.
MILLIONS = {
    "uni": 303.4,
    "uni2-h": 681.4,
    "virchow": 631.2,
    "virchow2": 631.2,
    "gigapath": 1134.95,
    "h-optimus-0": 1134.8,
    "h0-mini": 85.7,
    "kaiko-vitl14": 304.4,
    "gpfm": 303.2,
}
SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


def small(name: str, **changes: Any) -> Card:
    """Return the card of an encoder, with fewer and narrower layers."""
    card = CARDS[name]
    wide = 2 if card.pooled == "cls+mean" else 1
    settings = {**card.settings, **SMALL, **changes}
    return replace(card, settings=settings, width=wide * SMALL["embed_dim"])


def write(folder: Path, card: Card, *, pickled: bool = False) -> nn.Module:
    """Write a network with random weights in the file layout of the hub, and return it."""
    torch.manual_seed(0)
    network = build_timm(card).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    folder.mkdir(parents=True, exist_ok=True)
    state = network.state_dict()
    if pickled:
        torch.save(state, folder / (card.file or "pytorch_model.bin"))
    else:
        save_file(state, folder / "model.safetensors")
    config = {"architecture": card.architecture, "num_classes": 0, "pretrained_cfg": {}}
    (folder / "config.json").write_text(json.dumps(config))
    return network


def patches(n: int = 2, side: int = 256) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def transformed(card: Card, images: NDArray[np.uint8]) -> torch.Tensor:
    """Return patches after timm's transform."""
    assert card.input_px is not None
    transform = create_transform(
        input_size=(3, card.input_px, card.input_px),
        interpolation=card.interpolation,
        mean=card.mean,
        std=card.std,
        crop_pct=card.input_px / (card.resize_px or card.input_px),
    )
    return torch.stack([transform(Image.fromarray(image)) for image in images])


@pytest.mark.parametrize("name", OF_TIMM)
def test_every_row_can_be_built_with_its_width(name: str) -> None:
    card = CARDS[name]
    assert card.input_px is not None
    trunk = build_timm(card, "meta")
    network = with_pooling(card, trunk).eval()
    with torch.device("meta"), torch.inference_mode():
        features = network(torch.empty(2, 3, card.input_px, card.input_px))
    assert features.shape == (2, card.width)
    if name in MILLIONS:
        size = sum(parameter.numel() for parameter in trunk.parameters()) / 1e6
        assert size == pytest.approx(MILLIONS[name], abs=0.05)


@pytest.mark.parametrize("name", ["uni", "virchow2", "gigapath", "lunit-vits8", "resnet50"])
@pytest.mark.parametrize("shape", [(224, 224), (256, 256), (512, 512), (100, 100), (300, 261)])
def test_pixels_equal_those_of_timms_transform(name: str, shape: tuple[int, int]) -> None:
    card, images = CARDS[name], patches(1, 512)[:, : shape[0], : shape[1]]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (card.mean, card.std))
    resized = torch.from_numpy(resize_patches(images, card)).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(
        (resized - mean) / std, transformed(card, images), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("name", ["uni", "gigapath", "virchow", "kaiko-vitl14", "lunit-vits8"])
@pytest.mark.parametrize("side", [224, 256])
def test_features_equal_those_of_timm(name: str, side: int, tmp_path: Path) -> None:
    card = small(name)
    network = write(tmp_path, card)
    images = patches(side=side)
    with torch.inference_mode():
        tokens = network.forward_features(transformed(card, images))  # type: ignore[operator]
        expected = tokens[:, 0]
        if card.pooled == "cls+mean":
            expected = torch.cat([expected, tokens[:, 1:].mean(1)], dim=1)

    features = load("any", card=card, weights=tmp_path)(images)

    np.testing.assert_allclose(features, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "registers"), [("virchow2", 4), ("h0-mini", 4)])
def test_register_tokens_are_not_in_the_mean(name: str, registers: int, tmp_path: Path) -> None:
    card = small(name)
    network = write(tmp_path, card)
    images = patches(side=224)
    with torch.inference_mode():
        tokens = network.forward_features(transformed(card, images))  # type: ignore[operator]
    assert tokens.shape[1] == 1 + registers + 16 * 16
    expected = torch.cat([tokens[:, 0], tokens[:, 1 + registers :].mean(dim=1)], dim=1)

    features = load("any", card=card, weights=tmp_path)(images)

    np.testing.assert_allclose(features, expected, atol=1e-5, rtol=1e-5)


def test_keep_projects_and_normalises(tmp_path: Path) -> None:
    card = replace(small("keep"), width=32)
    network = write(tmp_path, card)
    state = {**network.state_dict(), "text.a": torch.ones(2), "logit_scale": torch.ones(())}
    save_file(state, tmp_path / "model.safetensors")
    with torch.inference_mode():
        hidden = network.visual(transformed(card, patches()))  # type: ignore[operator]
        expected = network.visual_head(hidden)  # type: ignore[operator]

    features = load("any", card=card, weights=tmp_path)(patches())

    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(features, expected / expected.norm(dim=1, keepdim=True), atol=1e-5)


def test_the_third_stage_of_resnet50_is_averaged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = timm.create_model("resnet50", pretrained=False).eval()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    card = CARDS["resnet50"]
    with torch.inference_mode():
        x = whole.maxpool(whole.act1(whole.bn1(whole.conv1(transformed(card, patches(1))))))
        expected = whole.layer3(whole.layer2(whole.layer1(x))).mean(dim=(2, 3))

    features = load("resnet50", weights=tmp_path)(patches(1))

    assert features.shape == (1, 1024)
    np.testing.assert_allclose(features, expected, atol=1e-4, rtol=1e-4)


def test_the_fingerprint_does_not_depend_on_the_file_format(tmp_path: Path) -> None:
    card = small("uni")
    write(tmp_path / "safe", card)
    write(tmp_path / "pickled", card, pickled=True)
    safe, pickled = (
        load("any", card=card, weights=tmp_path / kind).fingerprint for kind in ("safe", "pickled")
    )
    assert safe == pickled


def test_a_weight_file_with_another_name_is_found(tmp_path: Path) -> None:
    card = small("gpfm")
    write(tmp_path, card, pickled=True)
    assert (tmp_path / "GPFM.pth").exists()
    assert load("any", card=card, weights=tmp_path)(patches()).shape == (2, 48)


def test_weights_of_another_encoder_are_refused(tmp_path: Path) -> None:
    write(tmp_path, small("uni"))
    with pytest.raises(EncoderError, match=r"do not fit virchow2.*reg_token") as problem:
        load("any", card=small("virchow2"), weights=tmp_path)
    assert "pos_embed is (1, 197, 48), not (1, 261, 48)" in str(problem.value)


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    card = small("uni")
    state = {name: tensor.half() for name, tensor in write(tmp_path, card).state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert load("any", card=card, weights=tmp_path)(patches()).dtype == np.float32


def test_weights_are_read_from_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has the layout of huggingface_hub, which reads it offline."""
    card = small("uni")
    commit = card.revision
    assert commit is not None
    repository = tmp_path / "models--MahmoodLab--UNI"
    write(repository / "snapshots" / commit, card, pickled=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    encoder = load("any", card=card)

    assert encoder.revision == commit
    assert encoder(patches()).shape == (2, 48)
    with pytest.raises(EncoderError, match="cannot be reached, and the local cache does not have"):
        load("virchow2")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "mobilenetv3_small_050"])
def test_any_network_of_timm_is_an_encoder(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = timm.create_model(name, pretrained=False).eval()  # with a classifier, as on the hub
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    config = timm.data.resolve_model_data_config(whole)
    transform = create_transform(**config)
    images = patches(2, 300)
    with torch.inference_mode():
        batch = torch.stack([transform(Image.fromarray(image)) for image in images])
        expected = whole.forward_head(whole.forward_features(batch), pre_logits=True)

    encoder = load(f"timm:{name}", weights=tmp_path)

    np.testing.assert_allclose(encoder(images), expected, atol=1e-5, rtol=1e-4)
    assert encoder.name == f"timm:{name}"
    assert encoder.card.hub is not None
    assert encoder.card.hub.startswith(f"timm/{name}.")


def test_an_unknown_network_of_timm_gets_suggestions() -> None:
    with pytest.raises(UnknownNameError, match=r"no network in timm called 'resnet_18'.*resnet18"):
        load("timm:resnet_18")
