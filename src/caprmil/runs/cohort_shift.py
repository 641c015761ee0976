"""How an external cohort differs from the slides of a run: features, sizes, covariates, labels."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.covariates import VECTOR
from caprmil.evaluation.novelty import kept_slides
from caprmil.evaluation.shift import (
    FEWEST,
    MOST,
    Quantity,
    Shift,
    Sides,
    measure,
    of_features,
    of_numbers,
    of_shares,
)
from caprmil.io.tables import is_known, is_number
from caprmil.runs.facts import Facts
from caprmil.runs.run import Run
from caprmil.targets import Target
from caprmil.targets.target import Label

Means = Mapping[str, NDArray[np.float32]]


def measure_shifts(
    run: Run, cohort: Cohort, means: Means
) -> tuple[tuple[Shift, ...], tuple[str, ...]]:
    """Return how a cohort differs from the slides of a run, and notes."""
    reference, notes = run.novelty, list[str]()
    training = kept_slides(run.slides)
    if reference is None or len(reference.means) != len(training):
        reference = None
        notes.append(f"{run.folder} keeps no mean features: features are not compared.")
    rng = np.random.default_rng(0)
    rows = np.sort(rng.permutation(len(training))[:MOST])
    training = [training[row] for row in rows]
    external = [cohort.entries[row] for row in np.sort(rng.permutation(len(cohort))[:MOST])]
    external = [entry for entry in external if entry.name in means]
    sides = Sides(
        training=tuple(run.owner(name) for name in training),
        external=tuple(entry.patient for entry in external),
    )
    if not sides.enough:
        return (), (*notes, f"Shifts are not measured: that takes {FEWEST} patients on each side.")
    names = [entry.name for entry in external]
    found: list[Quantity] = []
    if reference is not None:
        outside = np.stack([means[name] for name in names])
        for name, own in _sources(run.facts).items():
            found += of_features(name, reference.means[rows][:, own], outside[:, own], sides)
    found += _vectors(run, cohort, training, names, sides)
    found += _sizes(run, cohort, training, names)
    found += _covariates(run, cohort, training, names)
    found += _labels(
        run.target,
        [run.target.parse_label(text) if (text := run.labels.get(n)) else None for n in training],
        [entry.label for entry in external],
    )
    return measure(found, sides), tuple(notes)


def _sources(facts: Facts) -> dict[str, slice]:
    """Return the columns of a mean feature that are of each source, by a title."""
    if not facts.sources:
        return {"Features" if facts.encoder is None else f"Features ({facts.encoder})": slice(None)}
    found, start = {}, 0
    for source in facts.sources:
        found[f"Features of {source.name}"] = slice(start, start + source.in_dim)
        start += source.in_dim
    return found


def _vectors(
    run: Run, cohort: Cohort, training: Sequence[str], external: Sequence[str], sides: Sides
) -> Iterator[Quantity]:
    """Yield the quantities of the vectors of slides, if the models read them."""
    if cohort.covariates is None or VECTOR not in run.covariate_names:
        return
    known = [own.vector if (own := run.covariates.get(name)) else None for name in training]
    new = [cohort.covariates.of(name).vector for name in external]
    inside, outside = ([vector for vector in side if vector is not None] for side in (known, new))
    if len(inside) == len(training) and len(outside) == len(external):
        yield from of_features("Slide vectors", np.stack(inside), np.stack(outside), sides)


def _sizes(
    run: Run, cohort: Cohort, training: Sequence[str], external: Sequence[str]
) -> Iterator[Quantity]:
    """Yield the number of patches, and their area if the scale is known."""
    inside = np.array([sum(run.patches.get(s, 0) for s in run.slides[name]) for name in training])
    infos = [cohort.bags[name] for name in external]
    outside = np.array([info.n_patches for info in infos])
    if not inside.all():  # a run that was made before sizes were stored
        return
    unit = "patient" if cohort.joins else "slide"
    yield of_numbers(f"Patches per {unit}", inside, outside)
    facts = run.facts
    if facts.sources:  # whose patches may lie on each other
        return
    if facts.mpp and facts.patch_px and all(info.mpp and info.patch_px for info in infos):
        own = np.array([(info.mpp or 0) * (info.patch_px or 0) / 1000 for info in infos]) ** 2
        area = (facts.mpp * facts.patch_px / 1000) ** 2
        yield of_numbers("Tissue area (mm²)", area * inside, own * outside)


def _covariates(
    run: Run, cohort: Cohort, training: Sequence[str], external: Sequence[str]
) -> Iterator[Quantity]:
    """Yield each column that the models read besides the patches."""
    if cohort.covariates is None or not all(name in run.covariates for name in training):
        return
    inside = [run.covariates[name] for name in training]
    outside = [cohort.covariates.of(name) for name in external]
    for column in run.covariate_names:
        if column == VECTOR:
            continue
        one, other = ([each.cells[column] for each in side] for side in (inside, outside))
        known = [cell for cell in (*one, *other) if is_known(cell)]
        if not all(any(map(is_known, side)) for side in (one, other)):
            continue
        if all(map(is_number, known)):
            yield of_numbers(column, _numbers(one), _numbers(other))
        else:
            groups = sorted(set(known))
            codes = {name: at for at, name in enumerate(groups)}
            inner, outer = (np.array([codes.get(c, -1) for c in side]) for side in (one, other))
            yield of_shares(column, inner, outer, groups)


def _numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    return np.array([float(cell) if is_known(cell) else np.nan for cell in cells])


def _labels(
    target: Target,
    training: Sequence[Label | None],
    external: Sequence[Label | None],
    name: str = "Labels",
) -> Iterator[Quantity]:
    """Yield the shares of the strata of labels, and the distribution of those that are numbers."""
    if target.parts:
        for part in target.parts.values():
            one, other = (
                [None if label is None else part.label_of(label) for label in side]
                for side in (training, external)
            )
            yield from _labels(part.target, one, other, f"Labels of {part.name}")
        return
    both = {str(at): label for at, label in enumerate([*training, *external]) if label is not None}
    n = len(training)
    if not any(int(at) < n for at in both) or not any(int(at) >= n for at in both):
        return
    strata, groups = target.strata(both)
    codes = np.array([strata.get(str(at), -1) for at in range(n + len(external))])
    yield of_shares(name, codes[:n], codes[n:], groups)
    numbers = target.as_labels([*training, *external])
    if np.issubdtype(numbers.dtype, np.floating):
        values = numbers if numbers.ndim == 1 else numbers[:, 0]
        what = "as numbers" if numbers.ndim == 1 else target.label_names[0].replace("_", " in ")
        title = f"{name}, {what}"
        yield of_numbers(title, values[:n], values[n:])
