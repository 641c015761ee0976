"""Chosen patches: those in a region of a slide, or those that a map marks most.

A region is a GeoJSON file with polygons, as QuPath writes it, or x,y,width,height. Both are in
level-0 pixels, and a patch is inside if its centre is. top:N and top:5% are the patches that the
first map marks most.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import BagError, CaprmilError
from caprmil.explain.explanation import Explanation
from caprmil.explain.map_kinds import KINDS
from caprmil.explain.patch_boxes import open_slide, patch_boxes, why_no_boxes
from caprmil.explain.slide_reference import SlideReference
from caprmil.features.bags import Bag
from caprmil.io.paths import as_path
from caprmil.slides.regions import Regions, read_regions

Mask: TypeAlias = NDArray[np.bool_]

NUMBER = r"-?\d+(?:\.\d+)?"
RECTANGLE = re.compile(rf"\s*{NUMBER}\s*(?:,\s*{NUMBER}\s*){{3}}")
TOP = re.compile(r"top:(\d+(?:\.\d+)?)(\s?%)?")
FORMS = "a GeoJSON file, x,y,width,height in level-0 pixels, top:N or top:5%"


@dataclass(frozen=True, kw_only=True)
class MarkedMost:
    """The patches that the first map of a slide marks most: a number, or a share of all."""

    number: int = 0
    share: float = 0.0

    def count(self, n: int) -> int:
        """Return how many of n patches these are, at least one."""
        return min(self.number or max(round(self.share * n), 1), n)


Region: TypeAlias = Regions | MarkedMost


class NoPatchError(BagError):
    """A region without a patch."""


def parse_region(text: str) -> Region:
    """Return the region that a user names: a file, a rectangle, or the patches marked most."""
    if found := TOP.fullmatch(text.strip()):
        number, is_share = float(found[1]), found[2] is not None
        if not 0 < number <= (100 if is_share else np.inf) or not (is_share or number % 1 == 0):
            raise CaprmilError(f"{text} is no number of patches. Allowed: {FORMS}.")
        return MarkedMost(share=number / 100) if is_share else MarkedMost(number=int(number))
    if RECTANGLE.fullmatch(text):
        x, y, width, height = map(float, text.split(","))
        if width <= 0 or height <= 0:
            raise CaprmilError(f"The region {text} is empty: width and height are positive.")
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
        return Regions(polygons=((np.array(corners),),), classes=("",))
    if text.strip().startswith("top:") or not as_path(text).exists():
        raise CaprmilError(f"{text} is not a region, and no such file exists. Allowed: {FORMS}.")
    return read_regions(text)


def patches_inside(regions: Regions, reference: SlideReference, bag: Bag) -> Mask:
    """Return which patches of a slide have their centre inside of a region."""
    if bag.info.slides and not any(place.slide for place in bag.info.slides):
        return _of_sources(regions, reference, bag)
    if bag.info.slides:
        raise BagError(
            f"{reference.name} has {len(bag.info.slides)} slides, and a region is of one. Use "
            "top:N or top:5%."
        )
    mpp = bag.info.slide_mpp
    if mpp is None and bag.info.unit == "um" and reference.pixels is not None:
        with open_slide(reference.pixels, bag.info) as slide:
            mpp = slide.reported_mpp
    boxes = patch_boxes(bag.info, bag.coords, mpp)
    if boxes is None:
        raise BagError(
            f"The bag of {reference.name} {why_no_boxes(bag.info, bag.coords)}, so it is not known "
            "which patches are in the region. Use top:N or top:5%, or encode the slide again."
        )
    inside = regions.contains(boxes.corners + boxes.side / 2)
    if not inside.any():
        (left, top), (right, bottom) = boxes.corners.min(axis=0), boxes.corners.max(axis=0)
        raise NoPatchError(
            f"No patch of {reference.name} has its centre in the region. Patches are between x = "
            f"{left:.0f} and {right + boxes.side:.0f}, y = {top:.0f} and {bottom + boxes.side:.0f} "
            "(level-0 pixels)."
        )
    return inside


def _of_sources(regions: Regions, reference: SlideReference, bag: Bag) -> Mask:
    """Return which patches of the sources of a slide have their centre inside of a region."""
    inside = np.zeros(len(bag.features), dtype=np.bool_)
    empty = None
    for number, place in enumerate(bag.info.slides):
        rows = np.flatnonzero(bag.slide_of == number)
        coords = None if bag.coords is None else place.own(bag.coords[rows])
        own = Bag(features=bag.features[rows], coords=coords, info=place.info)
        try:
            inside[rows] = patches_inside(regions, reference, own)
        except NoPatchError as problem:  # of this source
            empty = problem
    if empty is not None and not inside.any():
        raise empty
    return inside


def patches_marked_most(marked: MarkedMost, explanation: Explanation) -> Mask:
    """Return the patches that the first map of an explanation marks most for the prediction."""
    rows = support_order(explanation)[: marked.count(len(explanation))]
    mask = np.zeros(len(explanation), dtype=np.bool_)
    mask[rows] = True
    return mask


def support_order(explanation: Explanation) -> NDArray[np.int64]:
    """Return the patches from the most to the least in support of the prediction, by its first map.

    For a value below the mean label these are the patches for a lower value. Ties are in a random
    order.
    """
    values = explanation.values(explanation.first, explanation.predicted)
    if KINDS[explanation.first].signed:
        values = explanation.target.sign_of(explanation.answer) * values
    ties = np.random.default_rng(0).permutation(len(values))
    return np.lexsort((ties, -values))
