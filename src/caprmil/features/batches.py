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

from caprmil.errors import BagError
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.models.packing import mask_from_sizes, pad_packed


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
    sampler: Sampler[int] | None = None,
    steps: Sampler[list[int]] | None = None,
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
        return pad_packed(rows, sizes) if padded and not alone else rows

    return Batch(
        slides=tuple(sample.slide for sample in samples),
        features=lay([bag.features for bag in found]),
        mask=mask_from_sizes(sizes, torch.device("cpu")) if padded and not alone else None,
        grid=lay(grids) if len(grids) == len(items) else None,
        labels=torch.tensor([sample.label for sample in samples]),
        sizes=None if padded or alone else sizes,
    )
