"""Pictures of a slide inside a page: a thumbnail, and patches that are stored once each."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from io import BytesIO
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from PIL import Image

from caprmil.explain import ExplainedSlide, PatchBoxes, read_patch
from caprmil.io.progress import Step
from caprmil.report.html_page import data_url, render
from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide

THUMBNAIL_PX = 1600  # of the longer side
PATCH_PX = 224
MAX_PICTURES = 160  # patches with a picture: about two megabytes
MAX_READ = (
    4096  # pixels on a side that are read for a square; a larger one is cut out of the thumbnail
)


class GalleryPatch(NamedTuple):
    """A patch of a gallery, with a number under it and a remark on that number."""

    row: int
    has_picture: bool
    number: str
    remark: str


class Picture(NamedTuple):
    """A picture that is part of the page."""

    url: str
    alt: str
    width: int
    height: int


class PatchPictures:
    """The pictures of a slide report. Without a slide there are none, only numbers of patches."""

    def __init__(self, explained: ExplainedSlide, slide: Slide | None) -> None:
        self.slide = slide
        self.boxes: PatchBoxes | None = explained.patch_boxes(slide) if slide is not None else None
        self.rows: list[int] = []

    @property
    def available(self) -> bool:
        """Whether the slide is open and the positions of patches on it are known."""
        return self.slide is not None and self.boxes is not None

    def include(self, lists: Sequence[Sequence[int]], most: int) -> int:
        """Include the first patches of each list: `most`, or fewer if there are too many.

        Returns how many of each list are included.
        """
        if not self.available:
            return most
        for k in range(most, 0, -1):
            wanted = {row for rows in lists for row in rows[:k]}.union(self.rows)
            if len(wanted) <= MAX_PICTURES:
                self.rows = sorted(wanted)
                return k
        return 0

    def thumbnail(self) -> Picture | None:
        """Return the whole slide as a picture."""
        if not self.available:
            return None
        return as_picture(self._small, "Thumbnail of the whole slide")

    @cached_property
    def _small(self) -> Pixels:
        if self.slide is None:
            raise ValueError("A picture needs the slide.")
        return thumbnail(self.slide, THUMBNAIL_PX)

    def square(self, x: float, y: float, side: float, px: int = PATCH_PX) -> Picture | None:
        """Return a square of the slide, in level-0 pixels, as a picture of `px` on a side."""
        if self.slide is None or not self.available:
            return None
        levels = [level.downsample for level in self.slide.levels]
        fine = [downsample for downsample in levels if downsample <= 1.02 * side / px]
        if side / max(fine, default=1.0) <= MAX_READ:
            return as_picture(self.slide.read(x, y, side, px), "")
        scale = self._small.shape[1] / self.slide.size[0]
        box = (x * scale, y * scale, (x + side) * scale, (y + side) * scale)
        cut = Image.fromarray(self._small).transform(
            (px, px), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR, fillcolor="white"
        )
        return as_picture(np.asarray(cut), "")

    def symbols(self, progress: Step | None = None) -> Markup:
        """Return all included patches, once each, as SVG symbols that galleries refer to."""
        urls = {}
        for done, row in enumerate(self.rows, 1):
            if self.slide is None or self.boxes is None:
                break
            urls[row] = data_url(as_jpeg(read_patch(self.slide, self.boxes, row, PATCH_PX)))
            if progress:
                progress(done, len(self.rows))
        return render("patch_symbols.html", urls=urls, px=PATCH_PX)

    def gallery(
        self, patches: Iterable[int], captions: Iterable[tuple[str, str]]
    ) -> list[GalleryPatch]:
        """Return the patches of a gallery, each with its caption: a number and a remark."""
        return [
            GalleryPatch(row, row in self.rows, number, remark)
            for row, (number, remark) in zip(patches, captions, strict=True)
        ]


def thumbnail(slide: Slide, longest: int) -> Pixels:
    """Return the whole slide with this many pixels on its longer side."""
    return slide.thumbnail(slide.mpp * max(max(slide.size) / longest, 1.0)).image


def as_jpeg(image: Pixels, quality: int = 80) -> bytes:
    """Return pixels as a JPEG file."""
    stream = BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(
        stream, "JPEG", quality=quality, optimize=True
    )
    return stream.getvalue()


def as_picture(image: Pixels, alt: str) -> Picture:
    """Return pixels as a picture that is part of the page."""
    height, width = image.shape[:2]
    return Picture(data_url(as_jpeg(image)), alt, width, height)
