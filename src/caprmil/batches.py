"""Batches: bags become tensors, several at a time, and stay in memory as far as there is room."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from caprmil import bags
from caprmil.bags import Bag
from caprmil.errors import BagError
from caprmil.models.packing import mask_of, unpack


class Sample(NamedTuple):
    """A slide to learn from or to answer: where its bag is, and its class if that is known."""

    slide: str
    bag: Path | Bag
    label: int = -1


class Batch(NamedTuple):
    """Several bags: packed, one behind the other as if they were one, or padded to the longest.

    A batch of one bag is neither: it has no sizes and no mask.
    """

    slides: tuple[str, ...]
    features: Tensor  # B N E, in the precision of the files; of packed bags, 1 N E
    mask: Tensor | None  # B N
    grid: Tensor | None  # B N 2, where all bags have coordinates
    labels: Tensor  # B
    sizes: tuple[int, ...] | None = None  # of packed bags

    @property
    def inputs(self) -> dict[str, Any]:
        """What a model is called with."""
        return {
            "features": self.features,
            "mask": self.mask,
            "grid": self.grid,
            "sizes": self.sizes,
        }


class Cache:
    """Keeps bags in memory up to a limit, and reads the others again each time.

    What is kept stays: with a random order a cache that evicts would hardly ever have the next.
    """

    def __init__(self, gigabytes: float) -> None:
        self.room = gigabytes * 1e9
        self.kept: dict[Path, Bag] = {}

    def read(self, path: Path) -> Bag:
        """Return the bag of a file."""
        if path in self.kept:
            return self.kept[path]
        bag = bags.read(path)
        if bag.features.nbytes <= self.room:
            self.room -= bag.features.nbytes
            self.kept[path] = bag
        return bag


class BagDataset(Dataset[tuple[Sample, Bag]]):
    """Samples with their bags."""

    def __init__(self, samples: Sequence[Sample], cache: Cache) -> None:
        self.samples, self.cache = samples, cache

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Sample, Bag]:
        sample = self.samples[index]
        if isinstance(sample.bag, Bag):
            return sample, sample.bag
        try:
            return sample, self.cache.read(sample.bag)
        except BagError as problem:
            problem.add_note(f"while reading slide {sample.slide}")
            raise


class EpochSampler(Sampler[int]):
    """A random order that depends on seed and epoch alone, so that a resumed run goes on as it was.

    With `balanced`, bags are drawn with replacement, each class as often as the others.
    """

    def __init__(self, samples: Sequence[Sample], *, seed: int, balanced: bool) -> None:
        self.seed, self.epoch = seed, 0
        labels = np.array([sample.label for sample in samples])
        sizes = np.bincount(labels)[labels]
        self.shares = 1 / sizes / len(set(labels.tolist())) if balanced else None
        self.n = len(samples)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng([self.seed, self.epoch])
        balanced = self.shares is not None
        order = rng.choice(self.n, self.n, replace=balanced, p=self.shares)
        return iter(order.tolist())


class Steps(Sampler[list[int]]):
    """The bags of each step that fall to one of several devices: every bag to one of them.

    In the last step there may be fewer bags than devices. Who has none takes one of another's, as
    all must take the step together, and weighs it with 0.
    """

    def __init__(
        self, sampler: EpochSampler, batch_size: int, *, rank: int = 0, world: int = 1
    ) -> None:
        self.sampler, self.batch_size = sampler, batch_size
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for first in range(0, len(order), self.batch_size):
            step = order[first : first + self.batch_size]
            yield step[self.rank :: self.world] or step[:1]

    def own(self, step: int) -> int:
        """Return how many bags of a step are counted here."""
        return len(range(self.rank, self._all(step), self.world))

    def weight(self, step: int) -> float:
        """Return what to weigh the mean of the own bags with.

        The mean over all devices is then that over all bags of the step, however they fell.
        """
        return self.world * self.own(step) / self._all(step)

    def _all(self, step: int) -> int:
        return min(self.batch_size, len(self.sampler) - step * self.batch_size)


class Loader(DataLoader[tuple[Sample, Bag]]):
    """Reads the next batch in a thread while this one is learnt from, and no further ahead.

    Files and most of NumPy leave the interpreter free meanwhile. Workers, if there are any, read
    ahead themselves.
    """

    waited = 0.0  # seconds in this epoch so far in which a batch was not ready when it was wanted

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.waited = 0.0
        batches = super().__iter__()  # here, and not in the thread: it draws a number
        return self._ahead(batches) if len(self) and not self.num_workers else batches

    def _ahead(self, batches: Iterator[Any]) -> Iterator[Batch]:
        with ThreadPoolExecutor(1, "reading ahead") as thread:
            coming = thread.submit(next, batches)
            for left in reversed(range(len(self))):
                began = perf_counter()
                batch = coming.result()
                self.waited += perf_counter() - began
                if not left:
                    break
                coming = thread.submit(next, batches)
                yield batch
        yield batch  # the last, when there is no thread any more


def load(
    samples: Sequence[Sample],
    *,
    cache: Cache | None = None,
    batch_size: int = 1,
    sampler: EpochSampler | None = None,
    steps: Steps | None = None,
    workers: int = 0,
    padded: bool = False,
) -> Loader:
    """Return batches of the samples: in their own order, in the sampler's, or as the steps say.

    With workers nothing is kept: each would fill a cache of its own, as large as this one.
    """
    return Loader(
        BagDataset(samples, Cache(0) if workers or cache is None else cache),
        batch_size=batch_size if steps is None else 1,
        sampler=sampler,
        batch_sampler=steps,
        num_workers=workers,
        collate_fn=partial(collate, padded=padded),
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
    )


def collate(items: Sequence[tuple[Sample, Bag]], *, padded: bool = False) -> Batch:
    """Put bags behind each other or, padded with zeros, side by side."""
    samples, found = zip(*items, strict=True)
    sizes = tuple(len(bag.features) for bag in found)
    grids = [grid for grid in (bag.grid() for bag in found) if grid is not None]
    alone = len(items) == 1

    def lay(parts: Sequence[NDArray[Any]]) -> Tensor:
        rows = torch.from_numpy(parts[0] if alone else np.concatenate(parts))[None]
        return unpack(rows, sizes) if padded and not alone else rows

    return Batch(
        slides=tuple(sample.slide for sample in samples),
        features=lay([bag.features for bag in found]),
        mask=mask_of(sizes, torch.device("cpu")) if padded and not alone else None,
        grid=lay(grids) if len(grids) == len(items) else None,
        labels=torch.tensor([sample.label for sample in samples]),
        sizes=None if padded or alone else sizes,
    )
