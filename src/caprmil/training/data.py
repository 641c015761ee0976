"""Samplers: the order of bags in an epoch, and how a step is divided among devices."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """A random order that depends on seed and epoch alone, so that a run can be resumed.

    With strata, bags are drawn with replacement, each stratum as often as the others.
    """

    def __init__(self, n: int, *, seed: int, strata: Sequence[int] | None = None) -> None:
        self.n, self.seed, self.epoch = n, seed, 0
        self.shares = None
        if strata is not None:
            codes = np.array(strata)
            self.shares = 1 / np.bincount(codes)[codes] / len(set(codes.tolist()))

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
    """The bags of each step that one of several devices takes: every bag on one of them.

    In the last step there may be fewer bags than devices. A device without a bag takes one of
    another device, as all must take the step together, and weights it with 0.
    """

    def __init__(
        self, sampler: EpochSampler, batch_size: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.sampler, self.batch_size = sampler, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for first in range(0, len(order), self.batch_size):
            step = order[first : first + self.batch_size]
            yield step[self.rank :: self.world_size] or step[:1]

    def own(self, step: int) -> int:
        """Return how many bags of a step are counted here."""
        return len(range(self.rank, self._all(step), self.world_size))

    def weight(self, step: int) -> float:
        """Return the weight of the mean over the own bags.

        The mean over all devices is then the mean over all bags of the step.
        """
        return self.world_size * self.own(step) / self._all(step)

    def _all(self, step: int) -> int:
        return min(self.batch_size, len(self.sampler) - step * self.batch_size)
