"""An explained slide: the answer of a run to a slide, and the explanation by one of its models."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caprmil.explain.attribution import Method
from caprmil.explain.combination import Combination
from caprmil.explain.explanation import Explanation, can_stream, explain
from caprmil.explain.map_ranking import MapRanking, map_ranking
from caprmil.explain.marked_regions import RegionEffects, region_effects
from caprmil.explain.patch_boxes import PatchBoxes, patch_boxes
from caprmil.explain.region_outlines import area_mm2, outline
from caprmil.explain.removal import RemovalEffect, removal_effect
from caprmil.explain.slide_answer import Answer, predict_slide
from caprmil.explain.slide_reference import SlideReference, open_pixels
from caprmil.features import bag_files
from caprmil.features.bag_files import SlideBags
from caprmil.features.bags import Bag, Stream
from caprmil.io.progress import Step
from caprmil.models import MILModel, average_slide
from caprmil.models.device import pick_device
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.conformal_sets import unlike_training
from caprmil.runs.inference import is_large
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, kw_only=True)
class ExplainedSlide:
    """A slide or patient, the answer of a run to it, and the explanation by one model."""

    reference: SlideReference
    label: str | None  # the true class or value, if the run has it
    answer: Answer
    explanation: Explanation
    ranking: MapRanking | None = None  # the faithfulness of the maps of the run
    effect: RemovalEffect | None = None  # of the first map on this slide
    regions: RegionEffects | None = None  # that the map marks, if they were measured
    unlike: float | None = None  # share of held-out slides that are more like the training slides
    combination: Combination | None = None  # of a patient whose slides were answered alone

    def __repr__(self) -> str:
        label = "" if self.label is None else f", labelled {self.label}"
        shown = self.explanation.target.show(self.answer.mean)
        return f"ExplainedSlide({self.name!r}: {shown}{label}; {self.explanation!r})"

    def _repr_html_(self) -> str:
        """Show the slide in a notebook: the answer, and the first map over it beside attention."""
        from caprmil.explain.explanation_figures import show_explained_slide

        return show_explained_slide(self)

    def to_frame(self) -> "pd.DataFrame":
        """Return a row per patch, with the columns of patches.csv: docs/explain.md."""
        return self.explanation.to_frame()

    def faithfulness_text(self) -> str:
        """Return how faithful the first map is, on this slide and on this run, in sentences."""
        parts = [] if self.effect is None else [self.effect.in_words()]
        if self.ranking is not None:
            parts.append(self.ranking.in_words(self.explanation.first))
        else:
            parts.append("Its faithfulness on this run is unknown: there are no validation slides.")
        return " ".join(parts)

    @property
    def name(self) -> str:
        return self.reference.name

    def open_slide(self) -> Slide | None:
        """Open the slide, if its file was found. The caller closes it."""
        return open_pixels(self.reference, self.explanation.info)

    def mpp(self, slide: Slide | None) -> float | None:
        """Return the microns per pixel at level 0, if they are known from the bag or the slide.

        A picture of sources of different scales has none.
        """
        if not self.explanation.info.one_scale:
            return None
        return self.explanation.info.slide_mpp or (
            slide.reported_mpp if slide is not None else None
        )

    def patch_boxes(self, slide: Slide | None = None) -> PatchBoxes | None:
        """Return where the patches are, if that is known from the bag and the slide's scale."""
        return patch_boxes(self.explanation.info, self.explanation.coords, self.mpp(slide))

    def region_areas(self, slide: Slide | None = None) -> dict[int, float]:
        """Return the area of each region in mm2 by its number; nothing if the scale is unknown."""
        boxes, mpps = self.patch_boxes(slide), self._mpp_of_parts(slide)
        if self.regions is None or boxes is None or None in mpps:
            return {}
        part = self.explanation.slide_of if len(mpps) > 1 else None
        return {
            region.number: area_mm2(
                outline(boxes, region.rows), mpps[0 if part is None else part[region.rows[0]]] or 0
            )
            for region in self.regions.regions
        }

    def _mpp_of_parts(self, slide: Slide | None) -> list[float | None]:
        """Return the microns per pixel of the picture, or those of each source in it."""
        info = self.explanation.info
        if info.one_scale:
            return [self.mpp(slide)]
        known = info.slide_mpp or (slide.reported_mpp if slide is not None else None)
        mpps = [place.info.slide_mpp or known for place in info.slides]
        return [mpp and mpp / place.scale for mpp, place in zip(mpps, info.slides, strict=True)]


def explain_slide(
    run: Run,
    reference: SlideReference,
    *,
    fold: str | None = None,
    method: Method | None = None,
    first: str | None = None,
    maps: Sequence[str] = (),
    ranking: MapRanking | None = None,
    regions: bool = True,
    force: bool = False,
    device: str = "auto",
    progress: Step | None = None,
) -> ExplainedSlide:
    """Predict a slide with a run, and explain the prediction.

    With several models, the explanation is that of the model nearest to their mean. The first map
    is the given one, or the most faithful one of the run by its `ranking`, which is measured and
    stored if it is neither given nor known. Without `regions` the effect of regions is not
    measured. `force` accepts a bag of another encoder or scale. A patient whose slides the run
    answers alone is explained by all of them.
    """
    if run.combine is not None and isinstance(reference.bag, SlideBags):
        from caprmil.explain.explained_patient import explain_patient  # it explains each slide

        return explain_patient(
            run,
            reference,
            how=run.combine,
            fold=fold,
            method=method,
            first=first,
            maps=maps,
            ranking=ranking,
            force=force,
            device=device,
            progress=progress,
        )
    used = pick_device(device)
    info = bag_files.inspect(reference.bag)
    check_bag(run, reference.name, info, force=force)
    ranking = ranking or map_ranking(run, device=used)
    if first is None and ranking is not None:
        first = ranking.first
    exact = method in (None, "exact")
    with ExitStack() as stack:
        bag: Bag | Stream
        if exact and is_large(info) and can_stream(_any_model(run, fold)):
            bag = stack.enter_context(bag_files.streaming(reference.bag))
        else:
            bag = bag_files.read(reference.bag)
        unlike = unlike_training(run, reference.name, bag)
        answer = predict_slide(run, reference, bag, fold=fold, device=used)
        model = run.for_slide(run.model(answer.nearest), reference.name).to(used)
        explanation = explain(
            model,
            bag,
            target=run.fold_target(answer.nearest),
            slide=reference.name,
            fold=answer.nearest,
            method=method,
            first=first,
            maps=maps,
            device=used,
            progress=progress,
        )
        effect = removal_effect(model, bag, explanation, device=used)
        found = None
        if regions:
            found = region_effects(model, bag, explanation, device=used, progress=progress)
    return ExplainedSlide(
        reference=reference,
        label=label_of(run, reference.name),
        answer=answer,
        explanation=explanation,
        ranking=ranking,
        effect=effect,
        regions=found,
        unlike=unlike,
    )


def _any_model(run: Run, fold: str | None) -> MILModel:
    return average_slide(run.model(run.trained_folds(fold)[0].name))


def label_of(run: Run, slide: str) -> str | None:
    """Return the label of a slide as text, if it is a test slide of the run."""
    if not run.finished:
        return None
    name = run.owner(slide) if run.combine else slide
    if run.predictions.labels is None or name not in run.predictions.slides:
        return None
    label = run.predictions.labels[run.predictions.slides.index(name)]
    return run.target.show_label(label.tolist()) or None
