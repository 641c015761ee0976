"""Encoding on the CPU: ways to run the included encoder, and a ViT of UNI's shape.

    python benchmarks/encoding.py

Processor time of one thread, on random patches; the ways alternate. ONNX Runtime and the ViT are
measured where onnxruntime and timm are installed. The weights of the ViT are random.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from caprmil import encoders
from caprmil.encoders import networks
from caprmil.encoders.lite0 import SameConv
from caprmil.models.products import linear, only_torch, use_linear

Run = Callable[[], Tensor]
SIDE = 224
VIT, VIT_WIDTH, VIT_TOKENS = "vit_large_patch16_224", 1024, 197  # of UNI


def rates(ways: Mapping[str, Run], patches: int, rounds: int) -> dict[str, float]:
    """Return the patches per second of processor time: the median over rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            start = process_time()
            run()
            seconds[name].append(process_time() - start)
    return {name: patches / median(found[1:]) for name, found in seconds.items()}


def in_chunks(network: Callable[[Tensor], Tensor], images: Tensor, chunk: int) -> Run:
    def run() -> Tensor:
        with torch.inference_mode():
            return torch.cat([network(part) for part in torch.split(images, chunk)])

    return run


def lite0_ways(images: Tensor, folder: Path) -> dict[str, Run]:
    """Return ways to run the included encoder; the first one is the reference."""
    network: Any = encoders.load(encoders.DEFAULT, device="cpu")._network
    fused = SameConv.fuses

    def separate(part: Tensor) -> Tensor:
        SameConv.fuses = lambda *_: False  # type: ignore[method-assign]
        try:
            return network(part)
        finally:
            SameConv.fuses = fused  # type: ignore[method-assign]

    def half(part: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return network(part).float()

    ways = {
        "ReLU6 by itself": in_chunks(separate, images, 4),
        "ReLU6 in the convolution": in_chunks(network, images, 4),
        "the same, 16 patches at a time": in_chunks(network, images, 16),
        "bfloat16": in_chunks(half, images, 4),
    }
    if find_spec("onnxruntime") and find_spec("onnx"):
        ways["ONNX Runtime"] = in_chunks(in_onnxruntime(network, folder), images, 4)
    return ways


def in_onnxruntime(network: nn.Module, folder: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    path = folder / "network.onnx"
    with torch.inference_mode():
        torch.onnx.export(
            network,
            (torch.zeros(4, 3, SIDE, SIDE),),
            path,
            dynamo=False,
            input_names=["x"],
            dynamic_axes={"x": {0: "n"}},
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda part: torch.from_numpy(session.run(None, {"x": part.numpy()})[0])


def vit_ways(images: Tensor) -> dict[str, Run]:
    """Return a ViT with torch's products, with ours, and our products alone."""
    timm = networks.import_timm("The ViT")
    network = timm.create_model(VIT, pretrained=False, num_classes=0).eval()
    use_linear(network)
    weights = [module.weight for module in network.modules() if isinstance(module, nn.Linear)]
    rows = torch.randn(VIT_TOKENS, 4 * VIT_WIDTH)

    def plain(part: Tensor) -> Tensor:
        with only_torch():
            return network(part)

    def products(part: Tensor) -> Tensor:
        for weight in weights:  # attention and the convolution are 5 % of the work, and left out
            linear(rows[:, : weight.shape[1]].repeat(len(part), 1), weight, None)
        return part

    return {
        "torch's products": in_chunks(plain, images, 4),
        "ours": in_chunks(network, images, 4),
        "the linear layers alone": in_chunks(products, images, 4),
    }


def show(title: str, ways: Mapping[str, Run], patches: int, rounds: int) -> None:
    found, reference = rates(ways, patches, rounds), next(iter(ways.values()))()
    first = next(iter(found.values()))
    print(f"\n| {title} | patches per second | times the first | cosine similarity, lowest |")
    print("| --- | --: | --: | --: |")
    for name, run in ways.items():
        output = run()
        same = output.shape == reference.shape
        near = torch.cosine_similarity(output, reference).min().item() if same else np.nan
        print(f"| {name} | {found[name]:.1f} | {found[name] / first:.2f} | {near:.5f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--patches", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    images = torch.randn(args.patches, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory(prefix="caprmil-") as folder:
        show("included encoder", lite0_ways(images, Path(folder)), args.patches, args.rounds)
    if find_spec("timm"):
        few = images[: max(4, args.patches // 4)]
        show("ViT-L of UNI's shape", vit_ways(few), len(few), args.rounds)


if __name__ == "__main__":
    main()
