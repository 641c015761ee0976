"""Time of a model with products of oneDNN, against torch's own (MKL).

    python benchmarks/onednn.py

Processor time of one thread; both sides alternate. On a CPU where MKL is as fast, caprmil uses
torch's products, and both columns are the same.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time

import torch

from caprmil.models import create
from caprmil.models.products import only_torch

MODELS = ("caprmil", "mean", "abmil", "transmil")


def steps(name: str, patches: int, width: int) -> dict[str, Callable[[], None]]:
    """Return a prediction and a training step of a model on one bag."""
    torch.manual_seed(0)
    model, bag, label = create(name, width, 2), torch.randn(1, patches, width), torch.tensor([1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def predict() -> None:
        with torch.no_grad():
            model.eval()(bag)

    def train() -> None:
        optimizer.zero_grad()
        loss = torch.stack(list(model.loss(model.train()(bag), label).values())).sum()
        torch.autograd.backward(loss)
        optimizer.step()

    return {"inference": predict, "training step": train}


def measure(step: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Return the milliseconds with torch's products, and with ours: medians over rounds."""
    torchs, ours = list[float](), list[float]()
    for _ in range(rounds + 1):
        start = process_time()
        with only_torch():
            step()
        middle = process_time()
        step()
        torchs.append(middle - start)
        ours.append(process_time() - middle)
    return 1000 * median(torchs[1:]), 1000 * median(ours[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=MODELS, help="default: %(default)s")
    parser.add_argument("--patches", nargs="+", type=int, default=[1_000, 10_000])
    parser.add_argument("--width", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| model | patches | | torch's products, ms | ours, ms | times as fast |")
    print("| --- | --: | --- | --: | --: | --: |")
    for name in args.models:
        for patches in args.patches:
            for what, step in steps(name, patches, args.width).items():
                own, other = measure(step, args.rounds)
                print(
                    f"| {name} | {patches:,} | {what} | {own:.1f} | {other:.1f} "
                    f"| {own / other:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
