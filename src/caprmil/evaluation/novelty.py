"""Novelty: how unlike the training slides a slide is, by its mean feature.

The distance to the nearest training slides is compared with that of held-out slides, which the
models had not seen either: in a run, those of the test part of each fold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caprmil.cohort.folds import Fold
from caprmil.errors import RunError

FILE = "novelty.safetensors"
NEIGHBOURS = 5
MOST = 2000  # slides that are kept
UNLIKE = 0.99  # of held-out slides are more like the training slides

Features = NDArray[np.float32]
Distances = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reference:
    """The mean features of training slides, and the distances of held-out slides to them."""

    means: Features  # (n, E)
    scale: Features  # (E,), the standard deviation of each feature over slides
    held_out: Distances  # sorted

    def distance(self, features: Features) -> float:
        """Return the mean distance of a slide to its nearest training slides."""
        return float(nearest(features[None], self.means, self.scale)[0])

    def share_below(self, features: Features) -> float:
        """Return the share of held-out slides that are closer to the training slides."""
        return float(np.searchsorted(self.held_out, self.distance(features)) / len(self.held_out))

    def write(self, path: Path) -> None:
        """Write a safetensors file. It must be new."""
        from safetensors.numpy import save

        from caprmil.io.atomic import atomic_write

        arrays: dict[str, NDArray[Any]] = {"means": self.means, "scale": self.scale}
        arrays["held_out"] = self.held_out
        with atomic_write(path) as temporary:
            temporary.write_bytes(save(arrays))

    @classmethod
    def read(cls, path: Path, width: int) -> "Reference":
        """Read the file of a run whose features have this width."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            found = load(path.read_bytes())
            arrays = [found[name] for name in ("means", "scale", "held_out")]
            shapes = [(len(arrays[0]), width), (width,), (len(arrays[2]),)]
            if [array.shape for array in arrays] != shapes or not all(map(len, arrays)):
                raise ValueError("its arrays do not fit the run")
            kinds = {array.dtype.kind for array in arrays}
            if kinds != {"f"} or not all(np.isfinite(array).all() for array in arrays):
                raise ValueError("it has values that are not numbers")
            far = arrays[2]
            if arrays[1].min() <= 0 or far.min() < 0 or (np.diff(far) < 0).any():
                raise ValueError("it has numbers that cannot be used")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as problem:
            raise RunError(
                f"{path} is damaged ({str(problem).rstrip('.')}). Restore it from a copy, or "
                "remove it: slides are then not compared with the training slides."
            ) from None
        return cls(*arrays)


def make_reference(means: Mapping[str, Features], folds: Sequence[Fold]) -> Reference | None:
    """Return the reference of a run, from the mean feature of each slide.

    None if no fold has slides to test.
    """
    kept = kept_slides(means)
    chosen = set(kept)
    matrix = np.stack([means[name] for name in kept]).astype(np.float32)
    scale = standard_deviations(matrix).astype(np.float32)
    held_out = []
    for fold in folds:
        train = [name for name in fold.train if name in chosen]
        test = [name for name in fold.test if name in chosen]
        if train and test:
            known, new = (np.stack([means[name] for name in part]) for part in (train, test))
            held_out.append(nearest(new, known, scale))
    if not held_out:
        return None
    return Reference(matrix, scale, np.sort(np.concatenate(held_out)))


def kept_slides(names: Iterable[str]) -> list[str]:
    """Return the slides of a run whose mean features are kept, in their order."""
    names = sorted(names)
    if len(names) <= MOST:
        return names
    return sorted(np.random.default_rng(0).choice(names, MOST, replace=False).tolist())


def standard_deviations(slides: NDArray[Any]) -> NDArray[Any]:
    """Return the standard deviation of each feature over slides; of a constant one, a small one."""
    scale = slides.std(axis=0)
    return np.maximum(scale, max(float(scale.max()) * 1e-3, 1e-6))


def nearest(slides: Features, known: Features, scale: Features) -> Distances:
    """Return the mean distance of each slide to the nearest of others, in units of `scale`."""
    new, old = (part.astype(np.float64) / scale for part in (slides, known))
    apart = _distances(new, old) / np.sqrt(slides.shape[1])
    count = min(NEIGHBOURS, len(old))
    return np.asarray(np.partition(apart, count - 1, axis=1)[:, :count].mean(axis=1))


def _distances(new: Distances, old: Distances) -> Distances:
    """Return the distance of each row to each row of others."""
    if len(new) == 1:  # loading SciPy takes longer
        return np.linalg.norm(old - new, axis=1)[None]
    from scipy.spatial.distance import cdist

    return np.asarray(cdist(new, old))
