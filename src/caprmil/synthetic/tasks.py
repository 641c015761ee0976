"""Five synthetic tasks that require different capabilities of a MIL model, with ground truth.

A patch is one of six tissues plus unit noise in every feature; slides differ in the shares of the
tissues. A task adds patches of other kinds: tissue shifted by `strength` along one direction per
kind. Odd bags are positive. docs/hard-tasks.md describes which models can solve each task.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]  # N E
Kinds = NDArray[np.int8]  # N, the kind of each patch
Generator = np.random.Generator

TISSUE, SIGNAL, PARTNER, OUTLIER = range(4)
TISSUES, VARIETY = 6, 0.5  # number of tissues, and the spread of their centres per feature


class World(NamedTuple):
    """What all bags of a task share: centres of the tissues, and orthogonal directions."""

    tissues: NDArray[np.float32]  # 6 E
    directions: NDArray[np.float32]  # E E, one per row


@lru_cache(maxsize=16)
def world(seed: int, width: int) -> World:
    """Return centres and directions of a seed."""
    rng = np.random.default_rng([seed, 0])
    directions = np.linalg.qr(rng.normal(size=(width, width)))[0]
    tissues = VARIETY * rng.normal(size=(TISSUES, width))
    return World(tissues.astype(np.float32), directions.astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Base class of the tasks: bags of tissue, to which a task adds its own patches."""

    patches: int = 1000
    width: int = 32
    strength: float = 6.0  # shift of added patches, in standard deviations of the noise
    seed: int = 0

    def bag(self, number: int) -> tuple[Features, int, Kinds]:
        """Return the features of a bag, its label, and the kind of each patch."""
        rng, label = np.random.default_rng([self.seed, 1, number]), number % 2
        tissues = world(self.seed, self.width).tissues
        shares = rng.dirichlet(np.full(TISSUES, 5.0))
        features = rng.standard_normal((self.patches, self.width), dtype=np.float32)
        features += tissues[rng.choice(TISSUES, self.patches, p=shares)]
        kinds = np.zeros(self.patches, dtype=np.int8)
        self.add_signal(features, kinds, label, rng)
        return features, label, kinds

    def add_signal(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        """Change features and kinds in place. Each task implements it."""
        raise NotImplementedError

    def oracle(self, features: Features) -> float:
        """Return the score of a bag by an oracle with known centres and directions."""
        raise NotImplementedError

    def shift(self, features: Features, kinds: Kinds, which: NDArray[np.intp], kind: int) -> None:
        """Turn patches of tissue into another kind, in place."""
        kinds[which] = kind
        features[which] += self.strength * world(self.seed, self.width).directions[kind]

    def odds(self, features: Features, kind: int) -> NDArray[np.float64]:
        """Return the likelihood ratio of this kind against tissue, per patch."""
        tissues, directions = world(self.seed, self.width)
        # ln N(x; c + su) - ln N(x; c) = s u(x - c) - s²/2, for each possible tissue c
        posterior = features @ tissues.T - (tissues**2).sum(axis=1) / 2
        posterior = np.exp(posterior - posterior.max(axis=1, keepdims=True), dtype=np.float64)
        along = (features @ directions[kind])[:, None] - tissues @ directions[kind]
        ratio = np.exp(self.strength * along - self.strength**2 / 2, dtype=np.float64)
        odds: NDArray[np.float64] = (posterior * ratio).sum(axis=1) / posterior.sum(axis=1)
        return odds

    def presence(self, features: Features, kind: int, amount: int) -> float:
        """Return the log-likelihood ratio of `amount` patches of a kind against none."""
        share = amount / self.patches
        return float(np.log1p(share * (self.odds(features, kind) - 1)).sum())


@dataclass(frozen=True, kw_only=True)
class RarePatches(Task):
    """A few patches of a kind that negative bags do not have, like a small metastasis.

    The mean of a bag depends more on the shares of the tissues than on these patches.
    """

    signal: int = 10

    def add_signal(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        if label:
            which = rng.permutation(self.patches)[: self.signal]
            self.shift(features, kinds, which, SIGNAL)

    def oracle(self, features: Features) -> float:
        return self.presence(features, SIGNAL, self.signal)


@dataclass(frozen=True, kw_only=True)
class CoOccurrence(Task):
    """Two kinds of patches. A bag is positive if it has both, so no single patch decides.

    All bags have the same number of added patches: negative bags of one kind, positive bags a share
    p of one kind and 1 - p of the other. A score that is a sum over patches, or a softmax-weighted
    mean, is monotone in p: positive bags lie between the two kinds of negative bags, at an AUC of
    0.5.
    """

    signal: int = 100
    share: tuple[float, float] = (0.2, 0.8)  # of the first kind in a positive bag

    def add_signal(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        share = rng.uniform(*self.share) if label else rng.integers(2)
        first = round(self.signal * share)
        which = rng.permutation(self.patches)[: self.signal]
        self.shift(features, kinds, which[:first], SIGNAL)
        self.shift(features, kinds, which[first:], PARTNER)

    def oracle(self, features: Features) -> float:
        amount = self.signal // 2
        return min(self.presence(features, kind, amount) for kind in (SIGNAL, PARTNER))


@dataclass(frozen=True, kw_only=True)
class Proportion(Task):
    """Two kinds of patches in every bag. A bag is positive if the first kind is more frequent.

    Presence is not informative, counts are: one score per patch and a mean are sufficient.
    """

    added: tuple[float, float] = (0.1, 0.4)  # share of both kinds together
    surplus: tuple[float, float] = (0.05, 0.3)  # of the more frequent kind, as a share of both

    def add_signal(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        added = round(self.patches * rng.uniform(*self.added))
        surplus = rng.uniform(*self.surplus) * (1 if label else -1)
        first = round(added * (1 + surplus) / 2)
        which = rng.permutation(self.patches)[:added]
        self.shift(features, kinds, which[:first], SIGNAL)
        self.shift(features, kinds, which[first:], PARTNER)

    def oracle(self, features: Features) -> float:
        """Return the expected surplus of the first kind, from the posterior of each patch."""
        share = sum(self.added) / 4  # of each kind, on average
        first, second = (share * self.odds(features, kind) for kind in (SIGNAL, PARTNER))
        return float(((first - second) / (1 - 2 * share + first + second)).mean())


@dataclass(frozen=True, kw_only=True)
class Distractors(RarePatches):
    """A rare signal, and outlier patches in bags of both classes: ink, folds, pen marks.

    The outliers of a slide are far off in one random direction. They dominate mean and maximum of
    every feature, also along the direction of the signal.
    """

    outliers: tuple[float, float] = (0.05, 0.2)  # share of outlier patches
    distance: tuple[float, float] = (12.0, 30.0)  # of outliers, in standard deviations

    def add_signal(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        super().add_signal(features, kinds, label, rng)
        tissue = rng.permutation(np.flatnonzero(kinds == TISSUE))
        which = tissue[: round(self.patches * rng.uniform(*self.outliers))]
        ink = rng.normal(size=self.width)
        distance = rng.uniform(*self.distance, size=(len(which), 1))
        kinds[which] = OUTLIER
        features[which] += (distance * ink / np.linalg.norm(ink)).astype(np.float32)

    def oracle(self, features: Features) -> float:
        plausible = np.linalg.norm(features, axis=1) < 2 * np.sqrt(self.width)
        return super().oracle(features[plausible])


@dataclass(frozen=True, kw_only=True)
class BatchEffect(RarePatches):
    """A rare signal relative to its slide: stain and scanner shift whole slides.

    The shifts are large and include the direction of the signal: the position of a patch is not
    informative, its distance from the other patches of the slide is.
    """

    signal: int = 50
    shifts: int = 4  # directions that slides are shifted along, including the signal's
    shift_scale: float = 3.0  # standard deviation along each, relative to the noise

    def add_signal(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        super().add_signal(features, kinds, label, rng)
        directions = world(self.seed, self.width).directions[SIGNAL : SIGNAL + self.shifts]
        amounts = rng.normal(scale=self.shift_scale, size=len(directions))
        features += (amounts @ directions).astype(np.float32)

    def oracle(self, features: Features) -> float:
        """Return the score after the median of the slide is subtracted."""
        centre = world(self.seed, self.width).tissues.mean(axis=0)
        return super().oracle(features - np.median(features, axis=0) + centre)


TASKS: dict[str, type[Task]] = {
    "rare": RarePatches,
    "co-occurrence": CoOccurrence,
    "proportion": Proportion,
    "distractors": Distractors,
    "batch-effect": BatchEffect,
}
