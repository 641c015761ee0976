"""A case: one slide, what a run answers to it, and why; with its pixels if they are at hand."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.cohort.cohort import find_bags
from caprmil.errors import RunError, SlideError, shorten
from caprmil.evaluation import calibration
from caprmil.explain.attribution import Method
from caprmil.explain.explanation import Explanation, can_stream, explain
from caprmil.features import bags, batches
from caprmil.features.bags import Bag, BagInfo, Stream
from caprmil.features.batches import Sample
from caprmil.io.json_files import read_json
from caprmil.io.paths import as_path
from caprmil.io.progress import Step
from caprmil.models import MILModel
from caprmil.models.device import pick_device
from caprmil.runs.inference import is_large, predict_batch, predict_stream
from caprmil.runs.run import CALIBRATION, Run
from caprmil.slides.qc import Record
from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide, find_slides


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A slide that a run is asked about."""

    name: str
    bag: Path
    pixels: Path | None = None  # the slide itself, if it is where it was
    record: Record | None = None  # what was noted when it was encoded


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """What a run says of a slide: the mean of the models that may be asked, as in `predict`."""

    probabilities: NDArray[np.float64]  # (C,)
    calibrated: NDArray[np.float64] | None  # the same after each fold's temperature, where known
    by_fold: Mapping[str, NDArray[np.float64]]
    unseen: bool  # whether these models had not seen the slide in training

    @property
    def nearest(self) -> str:
        """The fold whose model answers most like the mean: the one to explain it by."""
        return min(
            self.by_fold, key=lambda fold: abs(self.by_fold[fold] - self.probabilities).max()
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Squares:
    """Where patches lie on a slide, in level-0 pixels."""

    corners: NDArray[np.float64]  # (N, 2), top left, x and y
    side: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """A slide, the answer to it, and the explanation by one model."""

    subject: Subject
    label: str | None  # the truth, where the run knows it
    answer: Answer
    explanation: Explanation

    @property
    def name(self) -> str:
        return self.subject.name

    def slide(self) -> Slide | None:
        """Open the slide, if its file is there. Whoever opens it closes it."""
        path = self.subject.pixels
        return None if path is None else open_slide(path, self.explanation.info)

    def mpp(self, slide: Slide | None) -> float | None:
        """Return the microns per pixel at level 0, if the bag or the slide says them."""
        return self.explanation.info.slide_mpp or (
            slide.reported_mpp if slide is not None else None
        )

    def squares(self, slide: Slide | None = None) -> Squares | None:
        """Return where the patches lie, as far as the bag (and the slide's scale) tells."""
        return squares(self.explanation.info, self.explanation.coords, self.mpp(slide))


def open_slide(path: Path, info: BagInfo) -> Slide:
    """Open the slide of a bag, and no other one. It need not say its scale: see `Case.mpp`."""
    slide = Slide(path, mpp=info.slide_mpp)
    if info.slide_size is not None and slide.size != info.slide_size:
        slide.close()
        raise SlideError(
            f"{path} is {slide.size[0]} x {slide.size[1]} pixels, but its bag was encoded from "
            f"{info.slide_size[0]} x {info.slide_size[1]}. Pass the right one: --slide."
        )
    if info.slide_mpp is None and slide.reported_mpp is None:  # any scale serves to read pixels
        slide.close()
        slide = Slide(path, mpp=1.0)
    return slide


def squares(info: BagInfo, coords: NDArray[Any] | None, mpp: float | None) -> Squares | None:
    """Return where patches lie in level-0 pixels, or None where that cannot be known."""
    if coords is None:
        return None
    scale = 1.0
    if info.unit == "um":
        mpp = mpp or info.slide_mpp
        if mpp is None:
            return None
        scale = 1 / mpp
    side = info.patch_level0 or (info.step * scale if info.step else None)
    if side is None:
        return None
    return Squares(corners=coords.astype(np.float64) * scale, side=float(side))


def why_unplaced(info: BagInfo, coords: NDArray[Any] | None) -> str:
    """Say of a bag why it gives no `squares`."""
    if coords is None:
        return "has no coordinates"
    if info.unit == "um":
        return "has places in micrometres, and nobody says how large a pixel of the slide is"
    return "does not say how large patches are"


def cut(slide: Slide, where: Squares, row: int, px: int = 224) -> Pixels:
    """Return one patch of a slide, at full resolution or as large as it is wanted."""
    x, y = where.corners[row]
    return slide.read(float(x), float(y), where.side, px)


def find(run: Run, what: str | Path, *, pixels: Path | None = None) -> Subject:
    """Return the slide of a run by its name, or that of a bag file.

    `pixels` is the slide's file or a folder to look in. Without it, it is looked for where
    `caprmil encode` read it.
    """
    name, path = str(what), as_path(what)
    if name in run.paths:
        path = as_path(run.paths[name])
        if not path.exists():
            raise RunError(f"The bag of {name} is no longer at {path}. Pass the bag's file.")
    elif path.suffix.lower() in bags.SUFFIXES and path.exists():
        ((name, path),) = find_bags([path]).items()
    else:
        raise RunError(
            f"{what} is neither a slide of {run.folder} nor a bag file. "
            f"Its slides: {shorten(run.paths)}."
        )
    record = Record.read(path.parent / "qc", name)
    return Subject(name=name, bag=path, pixels=_pixels(name, record, pixels), record=record)


def _pixels(name: str, record: Record | None, given: Path | None) -> Path | None:
    if given is not None:
        found = find_slides([given])
        if name in found:
            return found[name]
        if given.is_dir():
            return None
        raise SlideError(f"{given} is not the slide {name}. Give it the bag's name.")
    noted = as_path(record.path) if record and record.path else None
    return noted if noted and noted.exists() else None


def ask_run(
    run: Run,
    subject: Subject,
    bag: Bag | Stream,
    *,
    fold: str | None = None,
    models: Mapping[str, MILModel] | None = None,
    device: torch.device | str = "cpu",
) -> Answer:
    """Answer a slide with the models that have not seen it, or with all if all have."""
    chosen = run.answering(fold)
    unseen = [f.name for f in chosen if subject.name not in {*f.train, *f.validation}]
    names = unseen or [f.name for f in chosen]
    place, loaded = torch.device(device), models or {}

    asked = {name: loaded.get(name) or run.model(name) for name in names}
    if isinstance(bag, Stream):
        by_fold = {name: predict_stream(model, bag, place)[0] for name, model in asked.items()}
    else:
        batch = batches.collate([(Sample(subject.name, bag), bag)])
        by_fold = {
            name: predict_batch(model.to(place), batch, place)[0] for name, model in asked.items()
        }
    return Answer(
        probabilities=np.mean(list(by_fold.values()), axis=0),
        calibrated=_calibrated(run, by_fold),
        by_fold=by_fold,
        unseen=bool(unseen),
    )


def temperatures(run: Run) -> dict[str, float]:
    """Return the temperature of each fold that has one; 1 stands for none."""
    path = run.folder / CALIBRATION
    if not path.exists():
        return {}
    found = read_json(path).get("temperatures", {})
    return {name: t for name, t in found.items() if t is not None and not math.isclose(t, 1.0)}


def _calibrated(run: Run, by_fold: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64] | None:
    known = temperatures(run)
    if not set(by_fold) <= set(known):
        return None
    soft = [calibration.soften(p[None], known[name])[0] for name, p in by_fold.items()]
    return np.asarray(np.mean(soft, axis=0))


def examine(
    run: Run,
    subject: Subject,
    *,
    fold: str | None = None,
    method: Method | None = None,
    force: bool = False,
    device: str = "auto",
    progress: Step | None = None,
) -> Case:
    """Answer a slide and explain the answer.

    Where several models answer, the one is explained whose answer lies nearest to their mean.
    """
    place = pick_device(device)
    info = bags.inspect(subject.bag)
    run.check_bag(subject.name, info, force=force)
    exact = method in (None, "exact")
    with ExitStack() as stack:
        bag: Bag | Stream
        if exact and is_large(info) and can_stream(run.model(run.answering(fold)[0].name)):
            bag = stack.enter_context(bags.streaming(subject.bag))
        else:
            bag = bags.read(subject.bag)
        answer = ask_run(run, subject, bag, fold=fold, device=place)
        told = explain(
            run.model(answer.nearest),
            bag,
            classes=run.classes,
            slide=subject.name,
            fold=answer.nearest,
            method=method,
            device=place,
            progress=progress,
        )
    return Case(subject=subject, label=label_of(run, subject.name), answer=answer, explanation=told)


def label_of(run: Run, slide: str) -> str | None:
    """Return the true class of a slide, if the run has tested it."""
    if not run.finished or run.predictions.labels is None or slide not in run.predictions.slides:
        return None
    code = int(run.predictions.labels[run.predictions.slides.index(slide)])
    return run.classes[code] if code >= 0 else None
