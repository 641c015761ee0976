"""Encoders of transformers: small models with random weights, in the file layout of the hub."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file

from caprmil.encoders import CARDS, Card, load
from caprmil.encoders.networks import build_transformers, import_transformers
from caprmil.errors import EncoderError

transformers = import_transformers("this test")

OF_TRANSFORMERS = [
    name for name, card in CARDS.items() if card.loader == "transformers" and not card.remote_code
]
# Millions of parameters: ViT-B and ViT-L by their papers, Midnight and PLIP by their pages.
MILLIONS = {"phikon": 85.8, "phikon-v2": 303, "midnight": 1136, "plip": 87.8}
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
SMALL_PLIP = {**SMALL, "intermediate_size": 96, "projection_dim": 20, "patch_size": 32}


def write(folder: Path, card: Card, changes: dict[str, Any]) -> Any:
    """Save a model with random weights as transformers does, and return it."""
    torch.manual_seed(0)
    model = build_transformers(card, {"image_size": 224, **changes}).model.eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def patches(side: int = 256) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)


def transformed(card: Card, images: NDArray[np.uint8]) -> torch.Tensor:
    """Return patches after an image processor of transformers that uses Pillow."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    resample = Image.Resampling[card.interpolation.upper()]
    processor = ViTImageProcessorPil(
        size={"height": 224, "width": 224},
        resample=resample,
        image_mean=list(card.mean),
        image_std=list(card.std),
    )
    return processor([Image.fromarray(p) for p in images], return_tensors="pt").pixel_values


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_every_row_can_be_built_with_its_width(name: str) -> None:
    card = CARDS[name]
    with torch.device("meta"), torch.inference_mode():
        network = build_transformers(card, {"image_size": 224}).eval()
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, card.width)
    if name in MILLIONS:
        size = sum(parameter.numel() for parameter in network.parameters()) / 1e6
        assert size == pytest.approx(MILLIONS[name], rel=0.003)


@pytest.mark.parametrize("name", ["phikon", "phikon-v2", "midnight", "midnight-cls"])
@pytest.mark.parametrize("side", [224, 256])
def test_features_equal_those_of_transformers(name: str, side: int, tmp_path: Path) -> None:
    card = replace(CARDS[name], width=96 if name == "midnight" else 48)
    model = write(tmp_path, card, SMALL)
    with torch.inference_mode():
        tokens = model(transformed(card, patches(side))).last_hidden_state
        expected = tokens[:, 0]
        if name == "midnight":
            expected = torch.cat([expected, tokens[:, 1:].mean(dim=1)], dim=1)

    features = load("any", card=card, weights=tmp_path)(patches(side))

    np.testing.assert_allclose(features, expected, atol=1e-5, rtol=1e-4)


def test_plip_uses_the_vision_tower_of_a_clip_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    texts = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 2}
    config = transformers.CLIPConfig(vision_config=SMALL_PLIP, text_config=texts, projection_dim=20)
    whole = transformers.CLIPModel(config).eval()
    whole.save_pretrained(tmp_path)
    card = replace(CARDS["plip"], width=20)
    with torch.inference_mode():
        hidden = whole.vision_model(transformed(card, patches())).pooler_output
        expected = whole.visual_projection(hidden)

    features = load("any", card=card, weights=tmp_path)(patches())

    np.testing.assert_allclose(features, expected, atol=1e-5, rtol=1e-4)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    card = replace(CARDS["phikon"], width=48)
    write(tmp_path, card, SMALL)
    state = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in state if "layernorm" in name and name.endswith("weight"))
    state["extra.weight"] = state.pop(lost)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EncoderError, match=r"do not fit phikon.*missing.*extra\.weight"):
        load("any", card=card, weights=tmp_path)


def test_a_single_file_is_not_enough(tmp_path: Path) -> None:
    card = replace(CARDS["phikon"], width=48)
    write(tmp_path, card, SMALL)
    with pytest.raises(EncoderError, match=r"from a folder with a config\.json"):
        load("any", card=card, weights=tmp_path / "model.safetensors")


def test_an_unused_pooler_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    card = replace(CARDS["phikon"], width=48)
    write(tmp_path, card, SMALL)
    before = load("any", card=card, weights=tmp_path).fingerprint
    state = load_file(tmp_path / "model.safetensors")
    state["pooler.dense.weight"] = torch.ones(48, 48)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load("any", card=card, weights=tmp_path).fingerprint == before


def test_a_model_is_read_from_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = replace(CARDS["phikon-v2"], width=48)
    commit = card.revision
    assert commit is not None
    write(tmp_path / "models--owkin--phikon-v2" / "snapshots" / commit, card, SMALL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    encoder = load("any", card=card)
    assert encoder.revision == commit
    assert encoder(patches()).shape == (2, 48)


# Remote code: a replacement for the modelling file on the hub.

CODE = """
import os, pathlib
pathlib.Path(os.environ["CODE_RAN"]).touch()
import torch
from types import SimpleNamespace
from transformers import PretrainedConfig, PreTrainedModel

class RemoteConfig(PretrainedConfig):
    model_type = "remote"

class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig
    def __init__(self, config):
        super().__init__(config)
        self.mix = torch.nn.Linear(3, 1024)
        self.post_init()
    def forward(self, x):
        return SimpleNamespace(last_hidden_state=self.mix(x.mean(dim=(2, 3)))[:, None])
    def return_conch(self):
        pool = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        return torch.nn.Sequential(*pool, self.mix), None
"""


@pytest.mark.parametrize("name", ["hibou-l", "conch-v1.5"])
def test_remote_code_runs_only_if_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE_RAN", str(tmp_path / "ran"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = tmp_path / name.replace(".", "_").replace("-", "_")
    folder.mkdir()
    (folder / "modeling_remote.py").write_text(CODE)
    kinds = {
        "AutoConfig": "modeling_remote.RemoteConfig",
        "AutoModel": "modeling_remote.RemoteModel",
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "remote", "auto_map": kinds}))
    state = {"mix.weight": torch.ones(1024, 3), "mix.bias": torch.zeros(1024)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    card = replace(CARDS[name], width=1024)

    with pytest.raises(EncoderError, match="--trust-remote-code"):
        load("any", card=card, weights=folder)
    assert not (tmp_path / "ran").exists()

    encoder = load("any", card=card, weights=folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert encoder(patches()).shape == (2, 1024)
