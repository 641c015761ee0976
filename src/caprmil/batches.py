"""Batches: bags become tensors, several at a time, and stay in memory as far as there is room."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from caprmil import bags
from caprmil.bags import Bag
from caprmil.errors import BagError


class Sample(NamedTuple):
    """A slide to learn from or to answer: where its bag is, and its class if that is known."""

    slide: str
    bag: Path | Bag
    label: int = -1


class Batch(NamedTuple):
    """Several bags, padded to the longest. A batch of one has no padding, and no mask."""

    slides: tuple[str, ...]
    features: Tensor  # B N E, in the precision of the files
    mask: Tensor | None  # B N
    grid: Tensor | None  # B N 2, where all bags have coordinates
    labels: Tensor  # B


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


def load(
    samples: Sequence[Sample],
    *,
    cache: Cache | None = None,
    batch_size: int = 1,
    sampler: EpochSampler | None = None,
    workers: int = 0,
) -> DataLoader[tuple[Sample, Bag]]:
    """Return batches of the samples: in their own order, or in the sampler's.

    With workers nothing is kept: each would fill a cache of its own, as large as this one.
    """
    return DataLoader(
        BagDataset(samples, Cache(0) if workers or cache is None else cache),
        batch_size=batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
    )


def collate(items: Sequence[tuple[Sample, Bag]]) -> Batch:
    """Put bags side by side, padded with zeros where they are shorter than the longest."""
    samples, found = zip(*items, strict=True)
    features = _pad([torch.from_numpy(bag.features) for bag in found])
    lengths = torch.tensor([len(bag.features) for bag in found])
    grids = [bag.grid() for bag in found]
    whole = len(items) == 1
    return Batch(
        slides=tuple(sample.slide for sample in samples),
        features=features,
        mask=None if whole else torch.arange(features.shape[1]) < lengths[:, None],
        grid=_pad([torch.from_numpy(g) for g in grids]) if _all_known(grids) else None,
        labels=torch.tensor([sample.label for sample in samples]),
    )


def _all_known(grids: Sequence[object]) -> bool:
    return all(grid is not None for grid in grids)


def _pad(parts: list[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else pad_sequence(parts, batch_first=True)
