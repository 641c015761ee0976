"""Measure how bags reach a model: what a step waits for, and what packing small bags brings.

    python benchmarks/feeding.py

It makes its own bags in a temporary folder and trains on them as `caprmil train` does. The sides
take turns, and what counts is the median over the rounds.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from caprmil.features import bags, batches
from caprmil.features.batches import Batch, Cache, Loader, Sample, collate
from caprmil.models import create
from caprmil.training.module import Row, TrainConfig, fit
from record import Page

WIDTH = 1024


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    large: tuple[int, int] = (16, 10_000)  # bags, and patches in each
    small: tuple[int, int] = (64, 450)  # bags, and patches in the middle one of them
    models: tuple[str, ...] = ("caprmil", "abmil")
    packed: tuple[int, ...] = (8, 16, 32)  # bags in a step
    rounds: int = 5


QUICK = Sizes(large=(2, 300), small=(6, 20), models=("caprmil",), packed=(2, 3), rounds=1)


class Epoch(NamedTuple):
    """Seconds of one epoch."""

    cpu: float
    wall: float
    waited: float


class Listener(DummyLogger):
    """Hears what Lightning's loggers hear: how long the steps of an epoch waited."""

    waited = 0.0

    def log_metrics(self, metrics: Row, **_: Any) -> None:  # type: ignore[override]
        self.waited = metrics["seconds_waiting"]


def train(
    samples: Sequence[Sample], model: str, before: Callable[[], None], **settings: Any
) -> Epoch:
    """Train for two epochs and return the second. `before` is called before it, and not counted."""
    torch.manual_seed(0)
    listener, began, epochs = Listener(), (0.0, 0.0), list[Epoch]()

    def listen(_: Row) -> None:
        nonlocal began
        cpu, wall = process_time() - began[0], perf_counter() - began[1]
        epochs.append(Epoch(cpu, wall, listener.waited))
        before()
        began = process_time(), perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        fit(
            create(model, WIDTH, 2),
            samples,
            folder=Path(folder),
            settings=TrainConfig(epochs=2, warmup_epochs=0, **settings),
            cache=Cache(settings.get("cache_gb", 4.0)),
            device="cpu",
            loggers=[listener],
            listen=listen,
        )
    return epochs[-1]


def read_when_wanted(loader: Loader, found: Iterator[Any]) -> Iterator[Any]:
    """Do without the thread, and count the seconds all the same."""
    for _ in range(len(loader)):
        began = perf_counter()
        batch = next(found)
        loader.waited += perf_counter() - began
        yield batch


def forget(paths: Sequence[Path]) -> None:
    """Take files out of the page cache, where the system lets one."""
    for path in paths:
        if hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def take_turns(sides: Mapping[str, Callable[[], Epoch]], rounds: int) -> dict[str, Epoch]:
    """Return the median epoch of each side."""
    found: dict[str, list[Epoch]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in sides if turn % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name]())
    return {name: Epoch(*map(median, zip(*own, strict=True))) for name, own in found.items()}


def markdown(rows: Sequence[Sequence[object]]) -> str:
    head, *body = [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"| {row} |" for row in (head, " | ".join(["---"] * len(rows[0])), *body))


def waiting_table(folder: Path, sizes: Sizes) -> str:
    """Nothing is kept in memory: every epoch reads every bag."""
    rng, (count, n) = np.random.default_rng(0), sizes.large
    places = np.stack(np.divmod(np.arange(n), 100), axis=1) * 448
    paths = [
        bags.write(
            folder / f"{number}.h5",
            rng.standard_normal((n, WIDTH), dtype=np.float32),
            places,
            step=448.0,
        )
        for number in range(count)
    ]
    samples = [Sample(path.stem, path, number % 2) for number, path in enumerate(paths)]

    def side(*, ahead: bool, cold: bool) -> Epoch:
        before = partial(forget, paths if cold else [])
        with (
            threads(1),
            patch.object(Loader, "_ahead", Loader._ahead if ahead else read_when_wanted),
        ):
            return train(samples, "caprmil", before, cache_gb=0.0)

    sides = {
        f"{place}, {when}": partial(side, ahead=ahead, cold=cold)
        for place, cold in (("page cache", False), ("disk", True))
        for when, ahead in (("read when wanted", False), ("read ahead", True))
    }
    rows: list[Sequence[object]] = [
        ["", "s an epoch", "s of them waiting", "share waiting", "CPU s an epoch"]
    ]
    for name, epoch in take_turns(sides, sizes.rounds).items():
        share = f"{epoch.waited / epoch.wall:.1%}"
        rows.append([name, f"{epoch.wall:.2f}", f"{epoch.waited:.3f}", share, f"{epoch.cpu:.2f}"])
    return markdown(rows)


def small_bags(sizes: Sizes) -> list[Sample]:
    """Return bags in memory of about as many patches as biopsies have."""
    rng, (count, middle) = np.random.default_rng(0), sizes.small
    lengths = np.clip(rng.lognormal(np.log(middle), 0.5, count), 1, 4 * middle).astype(int)
    return [
        Sample(
            f"{number}", bags.from_arrays(rng.standard_normal((n, WIDTH)).astype("f2")), number % 2
        )
        for number, n in enumerate(lengths)
    ]


def pad(items: Any, **_: Any) -> Batch:
    """Pad where `fit` would pack."""
    return collate(items, padded=True)


def packing_table(samples: Sequence[Sample], model: str, sizes: Sizes) -> str:
    def side(batch_size: int, *, padded: bool) -> Epoch:
        with patch.object(batches, "collate", pad if padded else collate):
            return train(samples, model, lambda: None, batch_size=batch_size)

    sides = {"one bag a step": (1, partial(side, 1, padded=False))}
    sides |= {f"{b} packed": (b, partial(side, b, padded=False)) for b in sizes.packed}
    some = sizes.packed[len(sizes.packed) // 2]
    sides[f"{some} padded"] = some, partial(side, some, padded=True)
    ways = {name: way for name, (_, way) in sides.items()}
    with threads(1):
        one = take_turns(ways, sizes.rounds)
    with threads(2):
        two = take_turns(ways, sizes.rounds)
    count, (first, *_) = len(samples), sides
    rows: list[Sequence[object]] = [
        [
            *(model, "steps an epoch", "slides per CPU s, one thread", "times"),
            *("slides per s, two threads", "times"),
        ]
    ]
    for name, (batch_size, _) in sides.items():
        rows.append(
            [
                name,
                -(-count // batch_size),
                f"{count / one[name].cpu:.1f}",
                f"{one[first].cpu / one[name].cpu:.2f}",
                f"{count / two[name].wall:.1f}",
                f"{two[first].wall / two[name].wall:.2f}",
            ]
        )
    return markdown(rows)


def report(folder: Path, sizes: Sizes, command: str) -> Iterator[str]:
    """Yield the parts of the page as they are measured."""
    yield f"""```bash
{command}
```

torch {torch.__version__}, {os.cpu_count()} cores. Medians over {sizes.rounds} round(s) in which
the sides took turns; each is the second epoch of a training, with all that Lightning does.

### From disk

CAPRMIL on {sizes.large[0]} bags of {sizes.large[1]:,} patches of {WIDTH:,} features in float16, one
bag a step, one thread, nothing kept in memory.
"""
    yield waiting_table(folder, sizes)
    samples = small_bags(sizes)
    lengths = [len(s.bag.features) for s in samples if isinstance(s.bag, bags.Bag)]
    yield f"""
### Small bags

{len(lengths)} bags of {min(lengths):,} to {max(lengths):,} patches, {np.mean(lengths):,.0f} in the
mean, in memory. Packed or padded bags make fewer steps of an epoch: what is compared is the work,
not what is learnt by it.
"""
    for model in sizes.models:
        yield packing_table(samples, model, sizes) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print each table as it is made, and put all on the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--quick", action="store_true", help="see that it runs; measures nothing")
    args = parser.parse_args(arguments)
    command = "python benchmarks/feeding.py" + " --quick" * args.quick
    page = Page(args.out, "benchmarks/feeding.py", "Feeding")
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for part in report(Path(folder), QUICK if args.quick else Sizes(), command):
            print(part, flush=True)
            parts.append(part)
    page.write("\n".join(parts))


if __name__ == "__main__":
    main()
