"""Batches: bags as tensors, packed or padded, with a cache and prefetching."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from caprmil.errors import BagError
from caprmil.features import bag_files
from caprmil.features.bag_files import BagFiles
from caprmil.features.bags import Bag
from caprmil.models.packing import mask_from_sizes, pad_packed


class Sample(NamedTuple):
    """A slide or patient for training or inference: its bag, and its label if known."""

    slide: str
    bag: BagFiles | Bag
    label: Any = -1  # a number, or a tuple of numbers
    covariates: NDArray[np.float32] | None = None  # as a model reads them


class Batch(NamedTuple):
    """Several bags: packed (concatenated) or padded to the longest.

    A batch of one bag has neither sizes nor a mask.
    """

    slides: tuple[str, ...]
    features: Tensor  # B N E, in the stored precision; packed: 1 N E
    mask: Tensor | None  # B N
    grid: Tensor | None  # B N 2, if all bags have coordinates
    labels: Tensor  # B, or B L if a label is several numbers
    sizes: tuple[int, ...] | None = None  # of packed bags
    covariates: Tensor | None = None  # B K, if the slides have some

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of a model."""
        inputs = {
            "features": self.features,
            "mask": self.mask,
            "grid": self.grid,
            "sizes": self.sizes,
        }
        return inputs if self.covariates is None else {**inputs, "covariates": self.covariates}

    def drop_patches(self, most: float) -> "Batch":
        """Leave out random patches: a random share of each bag, between 0 and `most`."""
        if self.mask is not None:
            lengths = self.mask.sum(dim=1).tolist()
            kept = torch.nn.utils.rnn.pad_sequence(
                [random_rows(n, most) for n in lengths], batch_first=True
            )
            return self._replace(mask=self.mask & kept.to(self.mask.device))
        parts = [random_rows(n, most) for n in self.sizes or (self.features.shape[1],)]
        rows = torch.cat(parts).to(self.features.device)
        return self._replace(
            features=self.features[:, rows],
            grid=None if self.grid is None else self.grid[:, rows],
            sizes=self.sizes and tuple(int(part.sum()) for part in parts),
        )


def random_rows(n: int, most: float) -> Tensor:
    """Return which of n patches stay if a random share of them, up to `most`, is left out."""
    kept = torch.rand(n) >= most * torch.rand(())
    kept[torch.randint(n, ())] = True  # at least one
    return kept


class Cache:
    """A cache of bags up to a memory limit. Other bags are read from disk each time.

    Bags are not evicted: with random order, an evicting cache would rarely have the next bag.
    """

    def __init__(self, gigabytes: float) -> None:
        self.free_bytes = gigabytes * 1e9
        self.kept: dict[BagFiles, Bag] = {}

    def read(self, files: BagFiles) -> Bag:
        """Return the bag of a file, or of the files of a patient, from memory if it is cached."""
        if files in self.kept:
            return self.kept[files]
        bag = bag_files.read(files)
        if bag.features.nbytes <= self.free_bytes:
            self.free_bytes -= bag.features.nbytes
            self.kept[files] = bag
        return bag


class BagDataset(Dataset[tuple[Sample, Bag]]):
    """Samples and their bags."""

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
    """A data loader that prefetches one batch in a thread.

    Reading files and most of NumPy release the GIL. Worker processes, if any, prefetch
    themselves.
    """

    waited = 0.0  # seconds of the current epoch spent waiting for batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.waited = 0.0
        batches = super().__iter__()  # not in the thread: it draws a random number
        return self._prefetch(batches) if len(self) and not self.num_workers else batches

    def _prefetch(self, batches: Iterator[Any]) -> Iterator[Batch]:
        with ThreadPoolExecutor(1, "prefetch") as thread:
            pending = thread.submit(next, batches)
            for remaining in reversed(range(len(self))):
                start = perf_counter()
                batch = pending.result()
                self.waited += perf_counter() - start
                if not remaining:
                    break
                pending = thread.submit(next, batches)
                yield batch
        yield batch  # the last, after the thread has ended


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
    """Return a loader of the samples: in order, in the sampler's order, or in batches of `steps`.

    With workers the cache is not used: each process would fill its own.
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
    """Return bags as one batch: concatenated, or padded with zeros."""
    samples, bag_list = zip(*items, strict=True)
    sizes = tuple(len(bag.features) for bag in bag_list)
    grids = [grid for grid in (bag.grid() for bag in bag_list) if grid is not None]
    covariates = [s.covariates for s in samples if s.covariates is not None]
    single = len(items) == 1

    def join(parts: Sequence[NDArray[Any]]) -> Tensor:
        rows = torch.from_numpy(parts[0] if single else np.concatenate(parts))[None]
        return pad_packed(rows, sizes) if padded and not single else rows

    return Batch(
        slides=tuple(sample.slide for sample in samples),
        features=join([bag.features for bag in bag_list]),
        mask=mask_from_sizes(sizes, torch.device("cpu")) if padded and not single else None,
        grid=join(grids) if len(grids) == len(items) else None,
        labels=torch.tensor([sample.label for sample in samples]),
        sizes=None if padded or single else sizes,
        covariates=torch.from_numpy(np.stack(covariates)) if covariates else None,
    )
