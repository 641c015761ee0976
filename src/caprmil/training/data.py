"""Samplers: the order of bags in an epoch, and how a step is divided among devices."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from caprmil.features.batches import Sample


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
