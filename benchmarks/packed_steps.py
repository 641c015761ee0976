"""Compare training steps on small bags: one bag, packed bags, one large bag, plain form, limit.

python benchmarks/packed_steps.py --patches 500 --bags 16
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import process_time

import torch
from torch import Tensor

from caprmil.models import CAPRMIL, MILModel, create
from plain import PlainCAPRMIL
from speed_variants import Limit


def make_step(
    model: MILModel, features: Tensor, sizes: tuple[int, ...] | None
) -> Callable[[], None]:
    """Return a training step with the fused AdamW of `caprmil train`."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    labels = torch.arange(len(sizes or (0,))) % 2

    def step() -> None:
        output = model(features, sizes=sizes) if sizes else model(features)
        loss = torch.stack(list(model.loss(output, labels).values())).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def measure(
    patches: int, bags: int, width: int, rounds: int, model: str = "caprmil"
) -> dict[str, float]:
    """Return the milliseconds of processor time per bag; the forms alternate.

    The limit and the plain form are those of CAPRMIL, whichever model is packed.
    """
    torch.manual_seed(0)
    one, many = torch.randn(1, patches, width), torch.randn(1, patches * bags, width)
    plain, sizes = create("caprmil", width, 2), (patches,) * bags
    assert isinstance(plain, CAPRMIL)
    steps: dict[str, tuple[Callable[[], object], int]] = {
        "the limit": (partial(Limit(width).train, many), bags),
        "the plain form, one bag": (make_step(PlainCAPRMIL(plain), one, None), 1),
        "one bag": (make_step(create(model, width, 2), one.half(), None), 1),
        f"{bags} packed": (make_step(create(model, width, 2), many.half(), sizes), bags),
        "one bag of their size": (make_step(create(model, width, 2), many.half(), None), bags),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        # The order alternates, so that no form always runs after the same one.
        for name, (step, count) in list(steps.items())[:: -1 if number % 2 else 1]:
            start = process_time()
            step()
            seconds[name].append((process_time() - start) / count)
    return {name: 1000 * median(found[1:]) for name, found in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the milliseconds of each form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, value in {"patches": 500, "bags": 16, "width": 1024, "rounds": 25}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", default="caprmil")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure(args.patches, args.bags, args.width, args.rounds, args.model)
    limit, plain = found["the limit"], found["the plain form, one bag"]
    for name, time in found.items():
        print(
            f"{name:24s} {time:8.2f} ms per {args.patches} patches, {time / limit:.2f} times the "
            f"limit, {plain / time:.2f} times the slides per second of the plain form"
        )


if __name__ == "__main__":
    main()
