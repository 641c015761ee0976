"""Five tasks that ask different things of a MIL model, as bags with a known secret.

A patch is one of six tissues plus noise of one unit in every feature; slides differ in how much
they have of each tissue. A task plants patches of other kinds: tissue shifted by `strength` along
a direction of their own. Odd bags are positive. What each kind of model can express is told in
docs/bags.md.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]  # N E
Kinds = NDArray[np.int8]  # N, the truth of each patch
Generator = np.random.Generator

TISSUE, SIGNAL, PARTNER, LOUD = range(4)
TISSUES, VARIETY = 6, 0.5  # how many there are, and how far apart they lie in each feature


class World(NamedTuple):
    """What all bags of a task share: the centres of the tissues, and orthogonal directions."""

    tissues: NDArray[np.float32]  # 6 E
    directions: NDArray[np.float32]  # E E, a row each


@lru_cache(maxsize=16)
def world(seed: int, width: int) -> World:
    """Return the world of a seed."""
    rng = np.random.default_rng([seed, 0])
    directions = np.linalg.qr(rng.normal(size=(width, width)))[0]
    tissues = VARIETY * rng.normal(size=(TISSUES, width))
    return World(tissues.astype(np.float32), directions.astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Base of the tasks: tissue, in which each plants what decides and perhaps what disturbs."""

    patches: int = 1000
    width: int = 32
    strength: float = 6.0  # how far a planted patch stands out, in units of the noise
    seed: int = 0

    def bag(self, number: int) -> tuple[Features, int, Kinds]:
        """Return the features of a bag, its label, and the kind of each patch."""
        rng, label = np.random.default_rng([self.seed, 1, number]), number % 2
        tissues = world(self.seed, self.width).tissues
        shares = rng.dirichlet(np.full(TISSUES, 5.0))
        features = rng.standard_normal((self.patches, self.width), dtype=np.float32)
        features += tissues[rng.choice(TISSUES, self.patches, p=shares)]
        kinds = np.zeros(self.patches, dtype=np.int8)
        self.plant(features, kinds, label, rng)
        return features, label, kinds

    def plant(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        """Change features and kinds in place. This is the method that a new task writes."""
        raise NotImplementedError

    def oracle(self, features: Features) -> float:
        """Return how positive a bag looks to one who knows the world, but sees features alone."""
        raise NotImplementedError

    def shift(self, features: Features, kinds: Kinds, which: NDArray[np.intp], kind: int) -> None:
        """Turn some patches of tissue into those of another kind."""
        kinds[which] = kind
        features[which] += self.strength * world(self.seed, self.width).directions[kind]

    def odds(self, features: Features, kind: int) -> NDArray[np.float64]:
        """Return how many times likelier each patch is as this kind than as tissue."""
        tissues, directions = world(self.seed, self.width)
        # ln N(x; c + su) - ln N(x; c) = s u(x - c) - s²/2, for each tissue c it may have been
        near = features @ tissues.T - (tissues**2).sum(axis=1) / 2
        near = np.exp(near - near.max(axis=1, keepdims=True), dtype=np.float64)
        along = (features @ directions[kind])[:, None] - tissues @ directions[kind]
        ratio = np.exp(self.strength * along - self.strength**2 / 2, dtype=np.float64)
        odds: NDArray[np.float64] = (near * ratio).sum(axis=1) / near.sum(axis=1)
        return odds

    def presence(self, features: Features, kind: int, amount: int) -> float:
        """Return the log-likelihood ratio of so many patches of a kind against none."""
        share = amount / self.patches
        return float(np.log1p(share * (self.odds(features, kind) - 1)).sum())


@dataclass(frozen=True, kw_only=True)
class RarePatches(Task):
    """A few patches of a kind that negative bags do not have, as in a small metastasis.

    The share of each tissue moves the mean of a bag more than the few do.
    """

    signal: int = 10

    def plant(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        if label:
            which = rng.permutation(self.patches)[: self.signal]
            self.shift(features, kinds, which, SIGNAL)

    def oracle(self, features: Features) -> float:
        return self.presence(features, SIGNAL, self.signal)


@dataclass(frozen=True, kw_only=True)
class CoOccurrence(Task):
    """Two kinds of patches, and positive are the bags that have both. No patch decides.

    All bags have the same number of planted patches: negatives of one kind, either, positives a
    share p of one and 1 - p of the other. A score that is a sum over patches, or a softmax-weighted
    mean of them, is monotone in p: mixed bags lie between the two pure ones, at an AUC of 0.5.
    """

    signal: int = 100
    share: tuple[float, float] = (0.2, 0.8)  # of the first kind in a positive bag

    def plant(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
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
    """Two kinds of patches in every bag, and positive are those with more of the first.

    What is present says nothing, the count does: one score a patch and a plain mean suffice.
    """

    planted: tuple[float, float] = (0.1, 0.4)  # share of both kinds together
    surplus: tuple[float, float] = (0.05, 0.3)  # of the more frequent kind, as a share of both

    def plant(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        planted = round(self.patches * rng.uniform(*self.planted))
        surplus = rng.uniform(*self.surplus) * (1 if label else -1)
        first = round(planted * (1 + surplus) / 2)
        which = rng.permutation(self.patches)[:planted]
        self.shift(features, kinds, which[:first], SIGNAL)
        self.shift(features, kinds, which[first:], PARTNER)

    def oracle(self, features: Features) -> float:
        """Return the expected surplus: of each patch, how surely it is of which kind."""
        share = sum(self.planted) / 4  # of each kind, on average
        first, second = (share * self.odds(features, kind) for kind in (SIGNAL, PARTNER))
        return float(((first - second) / (1 - 2 * share + first + second)).mean())


@dataclass(frozen=True, kw_only=True)
class Distractors(RarePatches):
    """A rare signal, and loud patches in bags of both classes: ink, folds, pen marks.

    Those of a slide lie far out in one direction, each slide in its own. They rule the mean and
    the maximum of every feature, and reach along the signal's direction as far as the signal does.
    """

    loud: tuple[float, float] = (0.05, 0.2)  # share of loud patches
    loudness: tuple[float, float] = (12.0, 30.0)  # how far out, in units of the noise

    def plant(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        super().plant(features, kinds, label, rng)
        tissue = rng.permutation(np.flatnonzero(kinds == TISSUE))
        which = tissue[: round(self.patches * rng.uniform(*self.loud))]
        ink = rng.normal(size=self.width)
        far = rng.uniform(*self.loudness, size=(len(which), 1))
        kinds[which] = LOUD
        features[which] += (far * ink / np.linalg.norm(ink)).astype(np.float32)

    def oracle(self, features: Features) -> float:
        quiet = np.linalg.norm(features, axis=1) < 2 * np.sqrt(self.width)
        return super().oracle(features[quiet])


@dataclass(frozen=True, kw_only=True)
class BatchEffect(RarePatches):
    """A rare signal that stands out from its slide alone: stain and scanner shift whole slides.

    The shifts cover the signal's direction, and are wide: where a patch lies says nothing, how far
    it lies from the other patches of its slide says all.
    """

    signal: int = 50
    shifts: int = 4  # directions that slides are shifted along, the signal's among them
    width_of_shift: float = 3.0  # standard deviation along each, in units of the noise

    def plant(self, features: Features, kinds: Kinds, label: int, rng: Generator) -> None:
        super().plant(features, kinds, label, rng)
        directions = world(self.seed, self.width).directions[SIGNAL : SIGNAL + self.shifts]
        amounts = rng.normal(scale=self.width_of_shift, size=len(directions))
        features += (amounts @ directions).astype(np.float32)

    def oracle(self, features: Features) -> float:
        """Judge the slide from its own middle."""
        middle = world(self.seed, self.width).tissues.mean(axis=0)
        return super().oracle(features - np.median(features, axis=0) + middle)


TASKS: dict[str, type[Task]] = {
    "rare": RarePatches,
    "co-occurrence": CoOccurrence,
    "proportion": Proportion,
    "distractors": Distractors,
    "batch-effect": BatchEffect,
}
