"""Matching of tokens by their assignments: between folds, and between the heads of one model.

Tokens of two models have no common order. Two tokens are alike if the same patches are assigned to
them, which the correlation of their assignments over patches measures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse.csgraph import connected_components

Assigned = NDArray[np.floating]  # (N, tokens): the tokens of all heads, head by head
Matrix = NDArray[np.float64]

CONSTANT = 1e-12  # variance of an assignment that is only rounding
REDUNDANT = 0.9  # correlation above which two tokens do the same


class Moments:
    """Sums over patches from which the correlations of two sets of tokens follow.

    Patches are added slide by slide and not kept.
    """

    def __init__(self) -> None:
        self.n = 0
        self.one = self.other = self.one_squared = self.other_squared = self.product = np.zeros(1)

    def add(self, one: Assigned, other: Assigned) -> None:
        """Add patches: their assignments to the tokens of both sets."""
        one, other = one.astype(np.float64), other.astype(np.float64)
        self.n += len(one)
        self.one = self.one + one.sum(axis=0)
        self.other = self.other + other.sum(axis=0)
        self.one_squared = self.one_squared + (one**2).sum(axis=0)
        self.other_squared = self.other_squared + (other**2).sum(axis=0)
        self.product = self.product + one.T @ other

    def correlation(self) -> Matrix:
        """Return the correlation of each token of one set with each of the other.

        A token to which all patches are assigned alike has a correlation of 0.
        """
        one, other = self.one / self.n, self.other / self.n
        variances = np.outer(
            self.one_squared / self.n - one**2, self.other_squared / self.n - other**2
        )
        covariance = self.product / self.n - np.outer(one, other)
        return np.divide(
            covariance,
            np.sqrt(variances.clip(min=0)),
            out=np.zeros_like(covariance),
            where=variances > CONSTANT**2,
        ).clip(-1, 1)


class Match(NamedTuple):
    """The token of another model that is matched to each token, and their correlation."""

    tokens: NDArray[np.int64]
    correlations: Matrix

    @property
    def mean(self) -> float:
        return float(self.correlations.mean())


def match_tokens(correlation: Matrix) -> Match:
    """Match tokens one to one so that the sum of their correlations is the highest."""
    rows, columns = linear_sum_assignment(correlation, maximize=True)
    return Match(columns.astype(np.int64), correlation[rows, columns])


def redundant_groups(
    correlation: Matrix, heads: Sequence[int], *, above: float = REDUNDANT
) -> tuple[tuple[int, ...], ...]:
    """Return groups of tokens of different heads whose assignments are correlated above a value.

    A token belongs to a group if it is correlated with any token of it. `heads` is the head of each
    token.
    """
    owner = np.asarray(heads)
    alike = (correlation > above) & (owner[:, None] != owner)
    _, labels = connected_components(alike, directed=False)
    groups = [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]
    return tuple(tuple(group.tolist()) for group in groups if len(group) > 1)


class PairStability(NamedTuple):
    """How well the tokens of two folds match, in one block."""

    one: str
    other: str
    block: int
    match: Match
    chance: float  # the mean correlation after matching, if the patches of one fold are permuted


@dataclass(frozen=True, eq=False, kw_only=True)
class Stability:
    """How well the tokens of all pairs of folds match, on slides that all models were run on."""

    folds: tuple[str, ...]
    slides: int
    patches: int
    pairs: tuple[PairStability, ...]

    def of_block(self, block: int) -> tuple[PairStability, ...]:
        return tuple(pair for pair in self.pairs if pair.block == block)

    def mean(self, block: int) -> float:
        """Return the mean correlation of matched tokens over all pairs; NaN for one fold."""
        found = [pair.match.mean for pair in self.of_block(block)]
        return float(np.mean(found)) if found else float("nan")

    def chance(self, block: int) -> float:
        """Return the same for permuted patches."""
        found = [pair.chance for pair in self.of_block(block)]
        return float(np.mean(found)) if found else float("nan")

    def matched(self, reference: str, fold: str, block: int) -> Match | None:
        """Return the tokens of a fold that match those of another; None if this is unknown."""
        for pair in self.of_block(block):
            if (pair.one, pair.other) == (reference, fold):
                return pair.match
            if (pair.one, pair.other) == (fold, reference):
                order = np.argsort(pair.match.tokens)
                return Match(order, pair.match.correlations[order])
        return None

    def correlations(self, reference: str, block: int) -> Matrix:
        """Return for each token of a fold its mean correlation with its match in the others."""
        others = [self.matched(reference, fold, block) for fold in self.folds if fold != reference]
        found = [match.correlations for match in others if match is not None]
        return np.mean(found, axis=0) if found else np.array([])


def measure_stability(
    slides: Iterable[Mapping[str, Sequence[Assigned]]], *, seed: int = 0
) -> Stability:
    """Match the tokens of all pairs of folds.

    A slide has the assignments by each fold's model, one array per block, for the same patches. For
    chance, patches are permuted within each slide: differences between slides stay.
    """
    rng = np.random.default_rng(seed)
    real: dict[tuple[str, str, int], Moments] = {}
    permuted: dict[tuple[str, str, int], Moments] = {}
    folds: tuple[str, ...] = ()
    n_slides = n_patches = 0
    for slide in slides:
        folds = tuple(slide)
        n = len(slide[folds[0]][0])
        order = rng.permutation(n)
        n_slides, n_patches = n_slides + 1, n_patches + n
        for one, other in combinations(folds, 2):
            for block, (own, its) in enumerate(zip(slide[one], slide[other], strict=True)):
                key = one, other, block
                real.setdefault(key, Moments()).add(own, its)
                permuted.setdefault(key, Moments()).add(own, its[order])
    return Stability(
        folds=folds,
        slides=n_slides,
        patches=n_patches,
        pairs=tuple(
            PairStability(
                *key,
                match=match_tokens(moments.correlation()),
                chance=match_tokens(permuted[key].correlation()).mean,
            )
            for key, moments in real.items()
        ),
    )
