"""Faithfulness summary: the most faithful map of a run, from the areas of each map over slides."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.errors import BagError, RunError, count, plural
from caprmil.evaluation.paired_tests import draw_patients
from caprmil.explain.explanation import explain
from caprmil.explain.faithfulness import (
    RANDOM,
    SHARES,
    AnswerCurve,
    DeletionCurves,
    Faithfulness,
    faithfulness,
    panels,
)
from caprmil.explain.slide_answer import predict_slide
from caprmil.explain.slide_reference import SlideReference
from caprmil.features import bag_files
from caprmil.figures import deletion_curves
from caprmil.io.progress import Step
from caprmil.io.tables import markdown_table
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.run import Run
from caprmil.targets import Target
from caprmil.targets.metric import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOOTSTRAPS, LEVEL = 2000, 0.95
FEW = 10  # slides, below which intervals over slides are unreliable


class MapArea(NamedTuple):
    """The mean area of one map over slides. A random map has 0 on every slide."""

    map: str
    mean: float
    interval: Interval
    logits: float  # the mean area of the contrast of outputs

    @property
    def above_chance(self) -> bool:
        """Whether the interval lies above 0, the area of a random map."""
        return self.map != RANDOM and self.interval.low > 0


@dataclass(frozen=True, eq=False, kw_only=True)
class FaithfulnessSummary:
    """The faithfulness of maps over slides. Slides of one patch are left out."""

    slides: int
    patients: int
    areas: tuple[MapArea, ...]  # the most faithful first
    curves: Mapping[str, DeletionCurves]  # means over slides, at `SHARES`
    tied: tuple[str, ...]  # maps that do not differ significantly from the first above chance
    target: Target
    followed: str  # the contrast, or "the answer" where slides have several

    def as_dict(self) -> dict[str, Any]:
        return {
            "slides": self.slides,
            "patients": self.patients,
            "followed": self.followed,
            "areas": [self._area(area) for area in self.areas],
            "curves": {name: curves.as_dict(self.target) for name, curves in self.curves.items()},
            "verdict": self.verdict(),
        }

    def _area(self, area: MapArea) -> dict[str, Any]:
        found = area._asdict()
        return found if self.target.saturates else {**found, "logits": None}

    @property
    def header(self) -> list[str]:
        """The header of the table. Only where answers saturate, the area of outputs says more."""
        more = [f"area in {plural(self.target.output_name)}"] if self.target.saturates else []
        return ["map", "area", "95 % interval", *more]

    def rows(self) -> list[list[str]]:
        """Return the table as text."""
        rows = [
            [area.map, f"{area.mean:.3f}", _interval_text(area.interval), f"{area.logits:.2f}"]
            for area in self.areas
        ]
        return [row[: len(self.header)] for row in rows]

    def as_markdown(self) -> str:
        return markdown_table(self.header, self.rows(), [self.verdict()])

    def draw(self) -> "Figure":
        """Draw the mean curves of the answer, and of the contrast if the answer saturates."""
        title = f"Mean of {count(self.slides, 'slide')}"
        return deletion_curves(panels(title, self.target, self.followed, self.curves))

    def verdict(self) -> str:
        """Return in one or two sentences which map to use."""
        better = [area.map for area in self.areas if area.above_chance]
        if not better:
            return (
                "No map is significantly better than chance: use none of them, or measure more "
                "slides."
            )
        text = f"Use {better[0]}: the prediction depends on the patches that it ranks high"
        if equals := [name for name in better if name in self.tied]:
            text += f"; {_list(equals)} may be as good"
        if others := [a.map for a in self.areas if a.map not in (*better, RANDOM)]:
            text += f". Not significantly better than chance: {_list(others)}"
        verb = "is" if self.slides == 1 else "are"
        few = f" {count(self.slides, 'slide')} {verb} few: measure more."
        few = few if self.slides < FEW else ""
        return f"{text}.{few}"


def summarise_faithfulness(
    slides: Sequence[Faithfulness], patients: Mapping[str, str] | None = None, *, seed: int = 0
) -> FaithfulnessSummary:
    """Return the area of each map over slides, with bootstrap intervals over patients.

    Without `patients`, each slide is a patient.
    """
    counted = [slide for slide in slides if slide.patches > 1]
    if not counted:
        raise RunError("No slide has two patches or more, so no patch can be removed.")
    names = [name for name in counted[0].curves if all(name in s.curves for s in counted)]
    owners, weights = _draw([(patients or {}).get(s.slide, s.slide) for s in counted], seed)

    def interval(values: NDArray[np.float64]) -> Interval:
        if owners < 2:
            return Interval(float("nan"), float("nan"))
        means = weights @ values / weights.sum(axis=1)
        low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
        return Interval(low, high)

    by_map = {name: np.array([slide.curves[name].area for slide in counted]) for name in names}
    areas = [
        MapArea(
            map=name,
            mean=float(values.mean()),
            interval=interval(values),
            logits=float(np.mean([slide.curves[name].contrast_area for slide in counted])),
        )
        for name, values in by_map.items()
    ]
    areas.sort(key=lambda area: -area.mean)
    maps = [area.map for area in areas if area.map != RANDOM]
    first = next((area.map for area in areas if area.above_chance), maps[0])
    followed = {slide.followed for slide in counted}
    return FaithfulnessSummary(
        slides=len(counted),
        target=counted[0].target,
        followed=followed.pop() if len(followed) == 1 else "the answer",
        patients=owners,
        areas=tuple(areas),
        curves={name: _mean([slide.curves[name] for slide in counted]) for name in names},
        tied=tuple(
            name
            for name in maps
            if name != first and interval(by_map[first] - by_map[name]).low <= 0
        ),
    )


def measure_faithfulness(
    run: Run,
    slides: Iterable[SlideReference],
    *,
    only: int | None = None,
    force: bool = False,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
    failed: dict[str, BagError] | None = None,
) -> Iterator[Faithfulness]:
    """Yield the faithfulness of each slide, for the model that explains it.

    `only` keeps the slides for which that model predicts this contrast, e.g. this class. Slides
    whose bag cannot be used are added to `failed`; without it, they are an error.
    """
    models = {fold.name: run.model(fold.name).to(device) for fold in run.trained_folds()}
    for reference in slides:
        try:
            bag = bag_files.read(reference.bag)
            check_bag(run, reference.name, bag.info, force=force)
            answer = predict_slide(run, reference, bag, models=models, device=device)
        except BagError as problem:
            if failed is None:
                raise
            failed[reference.name] = problem
            continue
        fold = answer.nearest
        target = run.fold_target(fold)
        if only is not None and target.contrast_of(answer.by_fold[fold]) != only:
            continue
        model = run.for_slide(models[fold], reference.name).to(device)
        explanation = explain(
            model, bag, target=target, slide=reference.name, fold=fold, device=device
        )
        yield faithfulness(model, bag, explanation, device=device, progress=progress)


def _draw(owners: Sequence[str], seed: int) -> tuple[int, NDArray[np.float64]]:
    """Return the number of owners, and the weight of each slide in each bootstrap sample."""
    names, numbers = np.unique(list(owners), return_inverse=True)
    times = draw_patients(len(names), BOOTSTRAPS, seed)
    return len(names), times[:, numbers].astype(np.float64)


def _mean(curves: Sequence[DeletionCurves]) -> DeletionCurves:
    """Return the mean of curves over slides."""
    shared = [each.at(SHARES) for each in curves]

    def mean(curves: Iterable[AnswerCurve]) -> AnswerCurve:
        return AnswerCurve(*np.mean([np.stack(curve) for curve in curves], axis=0))

    return DeletionCurves(
        removed=shared[0].removed,
        most=mean(each.most for each in shared),
        least=mean(each.least for each in shared),
    )


def _interval_text(interval: Interval) -> str:
    return "-" if np.isnan(interval.low) else f"{interval.low:.3f} to {interval.high:.3f}"


def _list(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
