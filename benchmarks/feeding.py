"""Measure data loading: the waiting time of training steps, and the gain of packing small bags.

    python benchmarks/feeding.py

It generates bags in a temporary folder and trains on them as `caprmil train` does. The variants
alternate, and the median over the rounds is reported.
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
from caprmil.runs.history import Row
from caprmil.targets import Classification
from caprmil.training.module import fit
from caprmil.training.train_config import TrainConfig
from record import Page


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurement."""

    width: int = 1024  # features per patch
    large: tuple[int, int] = (16, 10_000)  # bags, and patches in each
    small: tuple[int, int] = (64, 450)  # bags, and the median number of patches
    models: tuple[str, ...] = ("caprmil", "abmil")
    packed: tuple[int, ...] = (8, 16, 32)  # bags per step
    rounds: int = 5


QUICK = Sizes(width=8, large=(2, 300), small=(6, 20), models=("mean",), packed=(2, 3), rounds=1)


class Epoch(NamedTuple):
    """Seconds of one epoch."""

    cpu: float
    wall: float
    waited: float


class WaitingTime(DummyLogger):
    """A Lightning logger that keeps the waiting time of an epoch."""

    waited = 0.0

    def log_metrics(self, metrics: Row, **_: Any) -> None:  # type: ignore[override]
        self.waited = metrics["seconds_waiting"]


def train(
    samples: Sequence[Sample],
    model: str,
    width: int,
    before: Callable[[], None],
    **settings: Any,
) -> Epoch:
    """Train for two epochs and return the second. `before` is called before it, not measured."""
    torch.manual_seed(0)
    logger, start, epochs = WaitingTime(), (0.0, 0.0), list[Epoch]()

    def end_epoch(_: Row) -> None:
        nonlocal start
        cpu, wall = process_time() - start[0], perf_counter() - start[1]
        epochs.append(Epoch(cpu, wall, logger.waited))
        before()
        start = process_time(), perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        fit(
            create(model, width, 2),
            samples,
            folder=Path(folder),
            settings=TrainConfig(epochs=2, warmup_epochs=0, **settings),
            cache=Cache(settings.get("cache_gb", 4.0)),
            device="cpu",
            loggers=[logger],
            on_epoch=end_epoch,
            target=Classification(classes=("a", "b")),
        )
    return epochs[-1]


def read_on_demand(loader: Loader, found: Iterator[Any]) -> Iterator[Any]:
    """Yield batches without prefetching, with the waiting time measured."""
    for _ in range(len(loader)):
        start = perf_counter()
        batch = next(found)
        loader.waited += perf_counter() - start
        yield batch


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Drop files from the page cache, if the system supports it."""
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


def alternate(variants: Mapping[str, Callable[[], Epoch]], rounds: int) -> dict[str, Epoch]:
    """Return the median epoch of each variant, measured in alternating order."""
    found: dict[str, list[Epoch]] = {name: [] for name in variants}
    for round_number in range(rounds):
        for name in variants if round_number % 2 == 0 else reversed(list(variants)):
            found[name].append(variants[name]())
    return {name: Epoch(*map(median, zip(*epochs, strict=True))) for name, epochs in found.items()}


def markdown(rows: Sequence[Sequence[object]]) -> str:
    head, *body = [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"| {row} |" for row in (head, " | ".join(["---"] * len(rows[0])), *body))


def waiting_table(folder: Path, sizes: Sizes) -> str:
    """Return the table of waiting times, without a cache: every epoch reads every bag."""
    rng, (count, n) = np.random.default_rng(0), sizes.large
    coords = np.stack(np.divmod(np.arange(n), 100), axis=1) * 448
    paths = [
        bags.write(
            folder / f"{number}.h5",
            rng.standard_normal((n, sizes.width), dtype=np.float32),
            coords,
            step=448.0,
        )
        for number in range(count)
    ]
    samples = [Sample(path.stem, path, number % 2) for number, path in enumerate(paths)]

    def run(*, prefetch: bool, cold: bool) -> Epoch:
        before = partial(drop_page_cache, paths if cold else [])
        with (
            threads(1),
            patch.object(Loader, "_prefetch", Loader._prefetch if prefetch else read_on_demand),
        ):
            return train(samples, sizes.models[0], sizes.width, before, cache_gb=0.0)

    variants = {
        f"{source}, {mode}": partial(run, prefetch=prefetch, cold=cold)
        for source, cold in (("page cache", False), ("disk", True))
        for mode, prefetch in (("on demand", False), ("prefetched", True))
    }
    rows: list[Sequence[object]] = [
        ["", "s per epoch", "s waiting", "share waiting", "CPU s per epoch"]
    ]
    for name, epoch in alternate(variants, sizes.rounds).items():
        share = f"{epoch.waited / epoch.wall:.1%}"
        rows.append([name, f"{epoch.wall:.2f}", f"{epoch.waited:.3f}", share, f"{epoch.cpu:.2f}"])
    return markdown(rows)


def small_bags(sizes: Sizes) -> list[Sample]:
    """Return bags in memory with the number of patches of biopsies."""
    rng, (count, median_size) = np.random.default_rng(0), sizes.small
    lengths = np.clip(rng.lognormal(np.log(median_size), 0.5, count), 1, 4 * median_size).astype(
        int
    )
    return [
        Sample(
            f"{number}",
            bags.from_arrays(rng.standard_normal((n, sizes.width)).astype("f2")),
            number % 2,
        )
        for number, n in enumerate(lengths)
    ]


def pad(items: Any, **_: Any) -> Batch:
    """Return a padded batch, where `fit` would pack."""
    return collate(items, padded=True)


def packing_table(samples: Sequence[Sample], model: str, sizes: Sizes) -> str:
    def run(batch_size: int, *, padded: bool) -> Epoch:
        with patch.object(batches, "collate", pad if padded else collate):
            return train(samples, model, sizes.width, lambda: None, batch_size=batch_size)

    variants = {"one bag per step": (1, partial(run, 1, padded=False))}
    variants |= {f"{b} packed": (b, partial(run, b, padded=False)) for b in sizes.packed}
    typical = sizes.packed[len(sizes.packed) // 2]
    variants[f"{typical} padded"] = typical, partial(run, typical, padded=True)
    functions = {name: function for name, (_, function) in variants.items()}
    with threads(1):
        one = alternate(functions, sizes.rounds)
    with threads(2):
        two = alternate(functions, sizes.rounds)
    count, (first, *_) = len(samples), variants
    rows: list[Sequence[object]] = [
        [
            *(model, "steps per epoch", "slides per CPU s, one thread", "ratio"),
            *("slides per s, two threads", "ratio"),
        ]
    ]
    for name, (batch_size, _) in variants.items():
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

torch {torch.__version__}, {os.cpu_count()} cores. Medians over {sizes.rounds} alternating
round(s); each is the second epoch of a training with Lightning.

### From disk

{sizes.models[0]} on {sizes.large[0]} bags of {sizes.large[1]:,} patches of {sizes.width:,} features
in float16, one bag per step, one thread, no cache.
"""
    yield waiting_table(folder, sizes)
    samples = small_bags(sizes)
    lengths = [len(s.bag.features) for s in samples if isinstance(s.bag, bags.Bag)]
    yield f"""
### Small bags

{len(lengths)} bags of {min(lengths):,} to {max(lengths):,} patches, {np.mean(lengths):,.0f} on
average, in memory. Packed or padded bags give fewer steps per epoch: the table compares speed, not
accuracy.
"""
    for model in sizes.models:
        yield packing_table(samples, model, sizes) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print each table when it is complete, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
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
