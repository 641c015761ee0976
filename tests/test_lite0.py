"""EfficientNet-Lite0: our implementation with the published weights."""

import threading
from copy import deepcopy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from caprmil import encoders
from caprmil.encoders import lite0
from caprmil.encoders.hub import read_weights

DAISY, PALACE = 985, 698  # of the thousand classes of ImageNet

# The largest features of `pattern`, from the network before fusion, in float64.
# fmt: off
REFERENCE = {
    71: 3.2334, 113: 3.8045, 226: 2.7832, 265: 1.8186, 353: 1.3078, 400: 1.3568,
    423: 1.7957, 468: 2.9111, 473: 2.0472, 616: 1.4632, 689: 3.2218, 747: 2.4629,
    755: 1.7813, 778: 1.8376, 782: 1.9200, 806: 1.2181, 829: 1.2369, 897: 4.1765,
    930: 2.6633, 989: 2.0119, 1006: 3.5546, 1042: 1.6970, 1157: 2.4933, 1260: 2.3418,
}
# fmt: on


@pytest.fixture(scope="module")
def network() -> lite0.Lite0:
    network = lite0.Lite0().eval()
    network.load_state_dict(read_weights(lite0.weights_file()))
    return network


def scaled(image: NDArray[np.uint8]) -> Tensor:
    return (torch.from_numpy(image).permute(2, 0, 1)[None].float() - 127) / 128


def pattern() -> NDArray[np.uint8]:
    x, y = np.meshgrid(np.arange(224), np.arange(224))
    return np.stack([x, y, (x * y) // 196], axis=-1).astype(np.uint8)


def photo(name: str) -> NDArray[np.uint8]:
    """Return the centre crop of a photo of scikit-learn, as in ImageNet evaluation."""
    image = Image.fromarray(load_sample_image(name))
    side = int(min(image.size) * 224 / 256)
    left, top = ((n - side) // 2 for n in image.size)
    cut = image.crop((left, top, left + side, top + side))
    return np.array(cut.resize((224, 224), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(("name", "expected"), [("flower.jpg", DAISY), ("china.jpg", PALACE)])
@torch.inference_mode()
def test_a_flower_and_a_palace_are_classified_correctly(
    network: lite0.Lite0, name: str, expected: int
) -> None:
    probabilities = network.classify(scaled(photo(name)))[0]
    assert probabilities.argmax() == expected
    assert probabilities[expected] > 0.3


@torch.inference_mode()
def test_the_normalisation_of_other_networks_lowers_the_probability(
    network: lite0.Lite0,
) -> None:
    image = torch.from_numpy(photo("flower.jpg")).permute(2, 0, 1)[None] / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
    other = network.classify((image - mean) / std)[0, DAISY]
    assert other < network.classify(scaled(photo("flower.jpg")))[0, DAISY] / 2


@torch.inference_mode()
def test_features_equal_the_reference_values(network: lite0.Lite0) -> None:
    features = network(scaled(pattern()))[0]
    np.testing.assert_allclose(features[list(REFERENCE)], [*REFERENCE.values()], atol=2e-4)


@torch.inference_mode()
def test_fused_layers_give_the_same_features(network: lite0.Lite0) -> None:
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    fused = lite0.fuse_batch_norm(deepcopy(network))
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fused.modules())
    np.testing.assert_allclose(fused(images), network(images), atol=1e-4, rtol=1e-4)


def naive_depthwise(x: NDArray[np.float64], kernel: NDArray[np.float64], stride: int) -> NDArray:
    """Apply one kernel per channel in loops, with the padding of TensorFlow."""
    channels, height, width = x.shape
    size = kernel.shape[-1]
    rows, columns = -(-height // stride), -(-width // stride)
    down = max((rows - 1) * stride + size - height, 0)
    across = max((columns - 1) * stride + size - width, 0)
    sides = ((0, 0), (down // 2, down - down // 2), (across // 2, across - across // 2))
    x, out = np.pad(x, sides), np.zeros((channels, rows, columns))
    for row in range(rows):
        for column in range(columns):
            window = x[:, row * stride : row * stride + size, column * stride :][:, :, :size]
            out[:, row, column] = (window * kernel[:, 0]).sum(axis=(1, 2))
    return out


@pytest.mark.parametrize("index", [0, 1, 3, 4])  # kernels of 3 and 5, with and without a stride
@pytest.mark.parametrize("shape", [(12, 12), (9, 13)])
@torch.inference_mode()
def test_a_block_equals_an_implementation_in_loops(
    network: lite0.Lite0, index: int, shape: tuple[int, int]
) -> None:
    block = network._blocks[index]
    state = {name: value.double().numpy() for name, value in block.state_dict().items()}
    x = np.random.default_rng(index).normal(size=({0: 32, 1: 16, 3: 24, 4: 40}[index], *shape))

    def norm(name: str, values: NDArray) -> NDArray:
        part = {key: state[f"{name}.{key}"][:, None, None] for key in ("weight", "bias")}
        mean, var = (state[f"{name}.running_{key}"][:, None, None] for key in ("mean", "var"))
        return (values - mean) / np.sqrt(var + 1e-3) * part["weight"] + part["bias"]

    wide = x
    if "_expand_conv.weight" in state:
        wide = np.einsum("oc,chw->ohw", state["_expand_conv.weight"][:, :, 0, 0], wide)
        wide = np.clip(norm("_bn0", wide), 0, 6)
    stride = 2 if index in (1, 3) else 1
    wide = np.clip(
        norm("_bn1", naive_depthwise(wide, state["_depthwise_conv.weight"], stride)), 0, 6
    )
    expected = norm(
        "_bn2", np.einsum("oc,chw->ohw", state["_project_conv.weight"][:, :, 0, 0], wide)
    )
    expected = expected + x if index == 4 else expected

    output = block(torch.from_numpy(x[None]).float())[0].numpy()

    np.testing.assert_allclose(output, expected, atol=1e-4 * np.abs(expected).max())


def test_chunks_in_several_threads_give_the_features_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = encoders.load("lite0", device="cpu")
    patches = np.random.default_rng(0).integers(0, 255, (9, 224, 224, 3), dtype=np.uint8)
    before, used = torch.get_num_threads(), set()
    forward = encoder._encode

    def recorded(images: torch.Tensor) -> torch.Tensor:
        used.add(threading.get_ident())
        return forward(images)

    monkeypatch.setattr(encoder, "_encode", recorded)
    try:
        torch.set_num_threads(1)
        one = encoder(patches)
        assert used == {threading.get_ident()}
        used.clear()
        torch.set_num_threads(3)
        several = encoder(patches)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert len(used - {threading.get_ident()}) > 1
    cosine = (one * several).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(several, axis=1)
    assert cosine.min() > 0.99999
    assert np.allclose(one, several, atol=1e-4)
