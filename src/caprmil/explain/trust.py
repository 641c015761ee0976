"""Trust: which map of a run to believe, from the faithfulness of each over many slides."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.errors import RunError
from caprmil.evaluation.bootstrap import draw_patients
from caprmil.evaluation.metrics import Interval
from caprmil.explain.case import Subject, ask_run
from caprmil.explain.explanation import explain
from caprmil.explain.faithfulness import (
    RANDOM,
    SHARES,
    Curves,
    Faithfulness,
    Track,
    faithfulness,
    panels,
)
from caprmil.features import bags
from caprmil.figures import flipping
from caprmil.io.progress import Step
from caprmil.io.tables import markdown
from caprmil.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOOTSTRAPS, LEVEL = 2000, 0.95
FEW = 10  # slides, below which an interval over them says little


class Area(NamedTuple):
    """The mean area of one map over slides. Chance has 0 on every slide, so this is the lead."""

    map: str
    mean: float
    interval: Interval
    logits: float  # the mean area of the lead in logits

    @property
    def shown(self) -> bool:
        """Whether it is shown to be better than chance."""
        return self.map != RANDOM and self.interval.low > 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Trust:
    """The faithfulness of maps over slides. Slides of one patch count nowhere: nothing can go."""

    slides: int
    patients: int
    areas: tuple[Area, ...]  # the most faithful first
    curves: Mapping[str, Curves]  # means over slides, on common shares
    tied: tuple[str, ...]  # with the first that is shown: the difference to them may be chance
    followed: str  # a class, or "the answer" where slides have several

    def as_dict(self) -> dict[str, Any]:
        return {
            "slides": self.slides,
            "patients": self.patients,
            "followed": self.followed,
            "areas": [area._asdict() for area in self.areas],
            "curves": {name: curves.as_dict() for name, curves in self.curves.items()},
            "verdict": self.verdict(),
        }

    header = ("map", "area", "95 % interval", "area in logits")

    def rows(self) -> list[list[str]]:
        """Return the table as text."""
        return [
            [area.map, f"{area.mean:.3f}", _between(area.interval), f"{area.logits:.2f}"]
            for area in self.areas
        ]

    def as_markdown(self) -> str:
        return markdown(self.header, self.rows(), [self.verdict()])

    def draw(self) -> "Figure":
        """Draw the mean curves of probability and of the lead."""
        title = f"Mean of {self.slides} slide{'' if self.slides == 1 else 's'}"
        return flipping(panels(title, self.followed, self.curves))

    def verdict(self) -> str:
        """Say in plain words which map to trust."""
        better = [area.map for area in self.areas if area.shown]
        if not better:
            return (
                "No map is shown to do better than chance here: trust none of them, or look at "
                "more slides."
            )
        text = f"Trust {better[0]}: the answer rests on the patches that it names"
        if equals := [name for name in better if name in self.tied]:
            text += f"; {_list(equals)} may be as good"
        if worse := [a.map for a in self.areas if a.map not in (*better, RANDOM)]:
            text += f". Not shown to be better than chance: {_list(worse)}"
        few = f" {self.slides} slides are few: look at more." if self.slides < FEW else ""
        return f"{text}.{few}"


def trust(
    slides: Sequence[Faithfulness], patients: Mapping[str, str] | None = None, *, seed: int = 0
) -> Trust:
    """Judge each map over slides. Intervals are bootstrapped over patients, or else over slides."""
    counted = [slide for slide in slides if slide.patches > 1]
    if not counted:
        raise RunError("There is no slide of two patches or more: nothing can be taken out.")
    names = [name for name in counted[0].curves if all(name in s.curves for s in counted)]
    owners, weights = _draw([(patients or {}).get(s.slide, s.slide) for s in counted], seed)

    def interval(values: NDArray[np.float64]) -> Interval:
        if owners < 2:
            return Interval(float("nan"), float("nan"))
        means = weights @ values / weights.sum(axis=1)
        low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
        return Interval(low, high)

    found = {name: np.array([slide.curves[name].area for slide in counted]) for name in names}
    areas = [
        Area(
            map=name,
            mean=float(values.mean()),
            interval=interval(values),
            logits=float(np.mean([slide.curves[name].lead_area for slide in counted])),
        )
        for name, values in found.items()
    ]
    areas.sort(key=lambda area: -area.mean)
    maps = [area.map for area in areas if area.map != RANDOM]
    first = next((area.map for area in areas if area.shown), maps[0])
    classes = {slide.followed for slide in counted}
    return Trust(
        slides=len(counted),
        followed=classes.pop() if len(classes) == 1 else "the answer",
        patients=owners,
        areas=tuple(areas),
        curves={name: _mean([slide.curves[name] for slide in counted]) for name in names},
        tied=tuple(
            name for name in maps if name != first and interval(found[first] - found[name]).low <= 0
        ),
    )


def unseen_slides(run: Run) -> list[str]:
    """Return the slides of a run that some model of it has not seen in training."""
    parts = [{*fold.train, *fold.validation} for fold in run.answering()]
    return [slide for slide in run.paths if any(slide not in seen for seen in parts)]


def follow(
    run: Run,
    subjects: Iterable[Subject],
    *,
    only: int | None = None,
    force: bool = False,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
) -> Iterator[Faithfulness]:
    """Yield the faithfulness of slides, each by the model that explains it best.

    `only`: slides that are answered with this class alone.
    """
    models = {fold.name: run.model(fold.name).to(device) for fold in run.answering()}
    for subject in subjects:
        bag = bags.read(subject.bag)
        run.check_bag(subject.name, bag.info, force=force)
        answered = ask_run(run, subject, bag, models=models, device=device)
        fold = answered.nearest
        if only is not None and answered.by_fold[fold].argmax() != only:
            continue
        model = models[fold]
        told = explain(
            model, bag, classes=run.classes, slide=subject.name, fold=fold, device=device
        )
        yield faithfulness(model, bag, told, device=device, progress=progress)


def _draw(owners: Sequence[str], seed: int) -> tuple[int, NDArray[np.float64]]:
    """Return how many owners there are, and how often each draw of them holds each slide."""
    names, place = np.unique(list(owners), return_inverse=True)
    times = draw_patients(len(names), BOOTSTRAPS, seed)
    return len(names), times[:, place].astype(np.float64)


def _mean(curves: Sequence[Curves]) -> Curves:
    """Return the mean of curves over slides."""
    shared = [each.at(SHARES) for each in curves]

    def mean(tracks: Iterable[Track]) -> Track:
        return Track(*np.mean([np.stack(track) for track in tracks], axis=0))

    return Curves(
        removed=shared[0].removed,
        most=mean(each.most for each in shared),
        least=mean(each.least for each in shared),
    )


def _between(interval: Interval) -> str:
    return "-" if np.isnan(interval.low) else f"{interval.low:.3f} to {interval.high:.3f}"


def _list(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
