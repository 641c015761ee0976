"""The table of encoders, the included encoder, callables, weights and errors."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import errors
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from caprmil import encoders
from caprmil.encoders import CARDS, Card, Encoder, find, load, loading
from caprmil.encoders.encoder import (
    fingerprint,
    pick_precision,
    probe_patches,
    resize_patches,
    summarise_output,
)
from caprmil.encoders.hub import read_weights
from caprmil.encoders.lite0 import weights_file
from caprmil.errors import CaprmilError, EncoderError, RunError, UnknownNameError

PAGE = Path(__file__).parents[1] / "docs" / "encoders.md"


@pytest.fixture(scope="module")
def lite0() -> Encoder:
    return load("lite0")


def noise(n: int, side: int = 224, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


class Colours(nn.Module):
    """A minimal encoder: a linear map of the mean colour."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.mix = nn.Linear(3, width)
        nn.init.constant_(self.mix.weight, 0.5)
        nn.init.zeros_(self.mix.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def mean_colour(x: Tensor) -> Tensor:
    return x.mean(dim=(2, 3))


# The table


@pytest.mark.parametrize("name", CARDS)
def test_every_row_is_complete(name: str) -> None:
    card = CARDS[name]
    assert card.name == name
    assert None not in (card.width, card.input_px, card.mpp, card.patch_px)
    assert card.architecture
    assert card.licence != "not known"
    assert (card.hub is None) == (card.loader == "lite0")
    assert all(0 < value < 1 for value in (*card.mean, *card.std))
    assert card.revision is None or len(card.revision) == 40  # the hub needs the full hash


def test_names_and_aliases_are_unique() -> None:
    names = [name for card in CARDS.values() for name in (card.name, *card.aliases)]
    bare = ["".join(letter for letter in name.lower() if letter.isalnum()) for name in names]
    assert len(bare) == len(set(bare))


@pytest.mark.parametrize(
    ("requested", "name"),
    [
        ("uni", "uni"),
        ("UNI_v1", "uni"),
        ("uni_v2", "uni2-h"),
        ("UNI2-h", "uni2-h"),
        ("conch_v15", "conch-v1.5"),
        ("hoptimus0", "h-optimus-0"),
        ("phikon_v2", "phikon-v2"),
        ("Virchow2", "virchow2"),
        ("midnight12k", "midnight"),
        ("kaiko_vitl14", "kaiko-vitl14"),
    ],
)
def test_encoders_are_found_by_the_names_of_other_tools(requested: str, name: str) -> None:
    assert find(requested).name == name


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(
        UnknownNameError, match=r"no encoder called 'phikn'\. Did you mean 'phikon'"
    ):
        find("phikn")


def test_each_pooling_has_its_own_name_and_width() -> None:
    for name in ("virchow", "virchow2", "h0-mini", "midnight"):
        both, alone = CARDS[name], CARDS[f"{name}-cls"]
        assert (both.pooled, alone.pooled) == ("cls+mean", "cls")
        assert both.width == 2 * (alone.width or 0)
        assert both.hub == alone.hub


def test_the_documentation_has_the_current_table() -> None:
    assert encoders.as_markdown() in PAGE.read_text(encoding="utf-8")


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, caprmil.encoders as e; e.find('uni'); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_a_crop_larger_than_the_image_is_refused() -> None:
    with pytest.raises(ValueError, match="resize_px"):
        Card(name="mine", input_px=256, resize_px=224)


# The included encoder


def test_lite0_returns_one_vector_per_patch(lite0: Encoder) -> None:
    features = lite0(noise(11))
    assert features.shape == (11, 1280)
    assert features.dtype == np.float32
    assert (lite0.name, lite0.width, lite0.mpp, lite0.patch_px) == ("lite0", 1280, 1.0, 224)


def test_features_do_not_depend_on_the_batch(lite0: Encoder) -> None:
    patches = noise(17)
    np.testing.assert_allclose(lite0(patches)[15:], lite0(patches[15:]), atol=1e-4)


def test_an_empty_batch_has_no_features(lite0: Encoder) -> None:
    assert lite0(noise(0)).shape == (0, 1280)


def test_read_only_patches_are_accepted(lite0: Encoder) -> None:
    patches = noise(1)
    patches.flags.writeable = False
    assert lite0(patches).shape == (1, 1280)


@pytest.mark.parametrize("wrong", [np.zeros((2, 8, 8, 4), np.uint8), np.zeros((2, 8, 8, 3))])
def test_arrays_that_are_not_patches_are_refused(lite0: Encoder, wrong: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"is not uint8 of \(B, h, w, 3\)"):
        lite0(wrong)


def test_half_precision_is_for_cuda_only(caplog: pytest.LogCaptureFixture) -> None:
    assert load("lite0", precision="bf16").precision == "fp32"
    assert "lite0 runs in fp32: bf16 is supported on CUDA devices only." in caplog.text


@pytest.mark.parametrize(
    ("device", "requested", "given"),
    [
        ("cpu", "auto", "fp32"),
        ("cuda", "auto", "bf16"),
        ("cuda", "fp16", "fp16"),
        ("mps", "auto", "fp32"),
    ],
)
def test_the_precision_of_the_card_is_used_on_cuda(device: str, requested: str, given: str) -> None:
    assert pick_precision(CARDS["uni2-h"], torch.device(device), requested) == given


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named(lite0: Encoder) -> None:
    with pytest.raises(RunError, match=r"There is no device 'cuda:1' here .*Use auto or cpu"):
        load("lite0", device="cuda:1")
    assert load(mean_colour, device="auto").device.type == "cpu"


# The size of a patch


def test_a_patch_of_the_right_size_is_not_copied() -> None:
    patches = noise(2)
    assert np.shares_memory(resize_patches(patches, CARDS["uni"]), patches)


@pytest.mark.parametrize(("name", "most"), [("uni", 1.01), ("virchow2", 25)])
@pytest.mark.parametrize("side", [256, 512, 100])
def test_resizing_is_close_to_torch(name: str, most: float, side: int) -> None:
    """Pillow resizes. Torch, which some tools use, rounds differently.

    Bicubic interpolation overshoots at hard edges. Pillow clips between its two passes and torch at
    the end, so single pixels of noise differ.
    """
    card, patches = CARDS[name], np.concatenate([probe_patches(side), noise(2, side)])
    pixels = torch.from_numpy(patches).permute(0, 3, 1, 2).float()
    other = F.interpolate(pixels, (224, 224), mode=card.interpolation, antialias=True)
    other = other.clamp(0, 255).permute(0, 2, 3, 1).numpy()
    difference = np.abs(resize_patches(patches, card).astype(float) - other)
    assert difference.max() <= most
    assert difference.mean() < 0.4


def test_a_crop_is_centred() -> None:
    card, patches = CARDS["gigapath"], noise(1, side=256)
    np.testing.assert_array_equal(resize_patches(patches, card), patches[:, 16:240, 16:240])


def test_a_rectangular_patch_is_scaled_by_its_shorter_side() -> None:
    patches = noise(1, side=448)[:, :, :300]
    assert resize_patches(patches, CARDS["uni"]).shape == (1, 224, 224, 3)


# The fingerprint


def test_the_fingerprint_of_lite0_is_stable(lite0: Encoder) -> None:
    """It is the same on every machine. If it changes, existing features become incompatible."""
    assert lite0.fingerprint[:16] == "4acdd68936fbfa23"


def test_the_fingerprint_is_of_the_weights_before_fusion(lite0: Encoder) -> None:
    assert lite0.fingerprint == fingerprint(read_weights(weights_file()), CARDS["lite0"])


@pytest.mark.parametrize(
    "change",
    [
        {"pooled": "max"},
        {"input_px": 225},
        {"resize_px": 256},
        {"interpolation": "bilinear"},
        {"mean": (0.5, 0.5, 0.5)},
        {"std": (0.5, 0.5, 0.5)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_transform_changes_the_fingerprint(change: dict[str, Any]) -> None:
    weights, card = {"a": torch.ones(3)}, CARDS["lite0"]
    assert fingerprint(weights, replace(card, **change)) != fingerprint(weights, card)


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.ones(2, 3)},
        {"a": torch.ones(3, 2)},
        {"a": torch.ones(2, 3).half()},
        {"a": torch.tensor([[1.0, 1, 1], [1, 1, 1.0000001]])},
    ],
    ids=["name", "shape", "type", "value"],
)
def test_other_weights_change_the_fingerprint(other: dict[str, Tensor]) -> None:
    card = CARDS["lite0"]
    assert fingerprint(other, card) != fingerprint({"a": torch.ones(2, 3)}, card)


def test_order_name_and_scale_do_not_change_the_fingerprint() -> None:
    card, one, two = CARDS["lite0"], torch.ones(2), torch.zeros(3, 2)
    same = replace(card, name="other", mpp=0.5, precision="bf16", licence="mine")
    strided = torch.zeros(2, 3).T
    assert fingerprint({"a": one, "b": two}, card) == fingerprint({"b": strided, "a": one}, same)


# Callables


def test_a_module_is_an_encoder() -> None:
    encoder = load(Colours())
    white = np.full((2, 64, 64, 3), 255, dtype=np.uint8)
    mean, std = np.array(encoder.card.mean), np.array(encoder.card.std)
    np.testing.assert_allclose(encoder(white)[0, 0], 0.5 * ((1 - mean) / std).sum(), rtol=1e-5)
    assert (encoder.name, encoder.width, encoder.mpp) == ("Colours", 5, None)


def test_a_function_is_an_encoder() -> None:
    encoder = load(mean_colour, card=Card(name="mine", input_px=32, mpp=0.25, patch_px=64))
    assert encoder(noise(3, side=64)).shape == (3, 3)
    assert (encoder.name, encoder.mpp, encoder.patch_px) == ("mine", 0.25, 32)


def test_a_callable_may_have_a_card() -> None:
    module = Colours()
    module.card = Card(name="carried", mean=(0.5, 0.5, 0.5))  # type: ignore[assignment]
    assert load(module).name == "carried"


def test_a_callable_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_encoders.py").write_text(
        "def dark(x):\n    return x.amin(dim=(2, 3))\n\n"
        "class Light:\n    def __call__(self, x):\n        return x.amax(dim=(2, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load("own_encoders:dark").width == load("own_encoders:Light").width == 3
    with pytest.raises(EncoderError, match=r"package\.module:callable"):
        load("own_encoders:missing")
    with pytest.raises(EncoderError, match=r"package\.module:callable"):
        load("no_such_module:dark")


def test_an_encoder_is_returned_unchanged(lite0: Encoder) -> None:
    assert load(lite0) is lite0


def test_the_fingerprint_of_a_module_depends_on_its_weights() -> None:
    module = Colours()
    before = load(module).fingerprint
    assert load(Colours()).fingerprint == before
    with torch.no_grad():
        module.mix.bias[0] = 1e-6
    assert load(module).fingerprint != before


def test_the_fingerprint_of_a_function_depends_on_name_and_output() -> None:
    scale = 1.0

    def changing(x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3)) * torch.tensor([1.0, scale, 1.0], device=x.device)

    before = load(changing).fingerprint
    assert load(changing).fingerprint == before
    assert load(mean_colour).fingerprint != before
    scale = 3.0
    assert load(changing).fingerprint != before


def test_the_output_summary_ignores_rounding_errors() -> None:
    output = np.random.default_rng(0).normal(size=1024).astype(np.float32)
    assert summarise_output(output) == summarise_output(output * np.float32(1 + 3e-7))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x, r"returned shape \(2, 3, 224, 224\) for 2 patches"),
        (lambda x: x.mean(), r"returned shape \(\) for 2 patches"),
        (lambda x: {"features": x}, "returned <class 'dict'> for 2 patches"),
    ],
)
def test_a_callable_must_return_one_vector_per_patch(
    wrong: Callable[[Tensor], Any], message: str
) -> None:
    with pytest.raises(EncoderError, match=message):
        load(wrong)


def test_a_callable_must_return_the_width_of_its_card() -> None:
    encoder = load(mean_colour, card=Card(name="mine", width=7))
    with pytest.raises(EncoderError, match="mine returned 3 features, but its card says 7"):
        encoder(noise(1))


def test_infinite_features_are_refused() -> None:
    encoder = load(lambda x: x.mean(dim=(2, 3)).log())
    with pytest.raises(
        EncoderError, match="returned NaN or infinity for 2 of 3 patches, first in row 1"
    ):
        encoder(np.stack([noise(1)[0] // 2 + 128, noise(1)[0] * 0, noise(1)[0] * 0]))


def test_a_callable_takes_no_weights(tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="A callable has its own"):
        load(Colours(), weights=tmp_path)


# Weights from a folder. lite0 needs neither timm nor a network connection.


def packed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in state.items()}


def test_weights_are_read_from_a_file_or_folder(tmp_path: Path, lite0: Encoder) -> None:
    save_file(packed(read_weights(weights_file())), tmp_path / "model.safetensors")
    assert load("lite0", weights=tmp_path).fingerprint == lite0.fingerprint
    assert load("lite0", weights=weights_file()).fingerprint == lite0.fingerprint


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    state = read_weights(weights_file())
    state["_conv_stem.weight"] = torch.zeros(32, 3, 5, 5)
    state["extra.weight"] = state.pop("_bn0.bias")
    save_file(packed(state), tmp_path / "model.safetensors")
    with pytest.raises(EncoderError) as problem:
        load("lite0", weights=tmp_path)
    assert "1 are missing (_bn0.bias)" in str(problem.value)
    assert "1 are unexpected (extra.weight)" in str(problem.value)
    assert "_conv_stem.weight is (32, 3, 5, 5), not (32, 3, 3, 3)" in str(problem.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    message = "has no model.safetensors or pytorch_model.bin, the weights of lite0"
    with pytest.raises(EncoderError, match=message):
        load("lite0", weights=tmp_path)
    with pytest.raises(EncoderError, match="is not a folder with"):
        load("lite0", weights=tmp_path / "nowhere")


class Trap:
    """Unpickling it would create a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    torch.save({"a": Trap(tmp_path / "sprung")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(EncoderError, match="contains more than tensors and could run code"):
        load("lite0", weights=tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_broken_weight_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(EncoderError, match=r"model\.safetensors cannot be read as weights"):
        load("lite0", weights=tmp_path)
    torch.save([torch.ones(2)], tmp_path / "list.bin")
    with pytest.raises(EncoderError, match="not a dictionary of tensors"):
        load("lite0", weights=tmp_path / "list.bin")


# Errors when an encoder cannot be loaded


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in packages else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize(
    ("name", "package"),
    [("uni", "timm"), ("keep", "timm"), ("phikon", "transformers"), ("timm:resnet18", "timm")],
)
def test_a_missing_package_is_named_with_the_command_to_install_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "timm", "transformers", "torchvision")
    with pytest.raises(EncoderError) as problem:
        load(name)
    assert str(problem.value) == (
        f"{name} needs {package}, which is not installed. "
        "Install it with: pip install 'caprmil[encoders]'"
    )


@pytest.mark.parametrize("name", ["hibou-l", "conch-v1.5"])
def test_remote_code_runs_only_if_allowed(name: str) -> None:
    with pytest.raises(EncoderError, match=r"needs Python code from the hub.*--trust-remote-code"):
        load(name)


def refusal(kind: type[Exception], status: int) -> Exception:
    """Return an error of the hub, independent of its HTTP library."""
    problem = kind.__new__(kind, "refused")
    problem.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return problem


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            refusal(errors.GatedRepoError, 403),
            "no access to the weights of uni. Request it at "
            "https://huggingface.co/MahmoodLab/UNI and log in with: hf auth login",
        ),
        (
            refusal(errors.HfHubHTTPError, 401),
            "no access to the weights of uni",
        ),
        (
            refusal(errors.RepositoryNotFoundError, 404),
            "The hub has no MahmoodLab/UNI",
        ),
        (
            refusal(errors.RevisionNotFoundError, 404),
            "MahmoodLab/UNI has no commit 77ffbca1",
        ),
        (
            errors.LocalEntryNotFoundError("offline"),
            "cannot be reached, and the local cache does not have the weights of uni",
        ),
        (
            errors.EntryNotFoundError("no such file"),
            "MahmoodLab/UNI has no model.safetensors or pytorch_model.bin",
        ),
        (ConnectionError("reset"), "Downloading the weights of uni failed (reset). Try again"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_hub_have_a_remedy(
    problem: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caprmil.encoders import hub

    def refuse(*_: Any, **__: Any) -> str:
        raise problem

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(EncoderError) as raised:
        hub.locate(CARDS["uni"], None)
    assert message in str(raised.value)
    assert "--weights FOLDER" in str(raised.value)


def test_the_pinned_commit_and_safetensors_are_requested_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caprmil.encoders import hub

    requested = []
    commit = CARDS["uni"].revision or ""

    def download(repository: str, name: str, revision: str | None, **_: bool) -> str:
        requested.append((repository, name, revision))
        if name == "model.safetensors":
            raise errors.EntryNotFoundError("not there")
        return str(tmp_path / "snapshots" / commit / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    source = hub.locate(CARDS["uni"], None)
    files = ("model.safetensors", "pytorch_model.bin")
    assert requested == [("MahmoodLab/UNI", name, commit) for name in files]
    assert (source.file.name, source.revision) == ("pytorch_model.bin", commit)


def test_the_error_of_a_failing_callable_is_one_line() -> None:
    with pytest.raises(EncoderError, match=r"fails on patches of shape .*float tensor"):
        load("os:getcwd")


# Another size of the input


def test_the_size_of_the_input_is_part_of_the_name_and_of_the_fingerprint() -> None:
    card = find("mahmood-uni@448")
    assert (card.name, card.input_px, card.resize_px) == ("uni@448", 448, None)
    assert card.native_px == 448
    assert card.settings["dynamic_img_size"]
    assert card.fingerprint_fields() != find("uni").fingerprint_fields()
    assert find(card.name) == card
    small, usual = load("lite0@64"), load("lite0")
    assert small.name == "lite0@64"
    assert small.fingerprint != usual.fingerprint
    assert small(probe_patches(250)).shape == (2, usual.width)


@pytest.mark.parametrize("name", ["uni@8", "uni@99999", "nothing@224"])
def test_an_impossible_input_or_encoder_is_an_error(name: str) -> None:
    with pytest.raises(CaprmilError, match=r"16 to 4096 px|nothing"):
        find(name)


def test_a_network_that_does_not_read_the_size_of_the_input_is_an_error_that_says_so() -> None:
    def strict(images: Tensor) -> Tensor:
        assert images.shape[-1] == 224, "Input height (448) doesn't match model (224)."
        return images.mean(dim=(2, 3))

    card = Card(name="strict@448", width=3, input_px=448)
    with pytest.raises(EncoderError, match=r"strict does not read an input of 448 px \(Input h"):
        loading._check_input(Encoder(strict, card, fingerprint=""))
    with pytest.raises(EncoderError, match="sets its input itself: leave out --input-px"):
        load("own.package:encoder@448")
