"""Pictures of a slide inside a page: a thumbnail, and patches that are stored once each."""

from collections.abc import Iterable, Sequence
from io import BytesIO

import numpy as np
from PIL import Image

from caprmil.explain import Case, Squares, cut
from caprmil.io.progress import Step
from caprmil.report.page import EMPTY, Html, data_url, tag
from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide

LONGEST = 1600  # pixels of a thumbnail
PATCH = 224  # pixels of a patch
MOST = 160  # patches with a picture: some two megabytes


class Album:
    """The pictures of a case. Without a slide it is empty, and galleries show places alone."""

    def __init__(self, case: Case, slide: Slide | None) -> None:
        self.slide = slide
        self.where: Squares | None = case.squares(slide) if slide is not None else None
        self.rows: list[int] = []

    @property
    def open(self) -> bool:
        return self.slide is not None and self.where is not None

    def choose(self, lists: Sequence[Sequence[int]], most: int) -> int:
        """Take the first `most` patches of each list, or fewer so that all fit; say how many."""
        if not self.open:
            return most
        for k in range(most, 0, -1):
            wanted = {row for rows in lists for row in rows[:k]}
            if len(wanted.union(self.rows)) <= MOST:
                self.rows = sorted(wanted.union(self.rows))
                return k
        return 0

    def thumbnail(self) -> Html:
        """Return the whole slide as a picture."""
        if self.slide is None or not self.open:
            return EMPTY
        image = thumbnail(self.slide, LONGEST)
        height, width = image.shape[:2]
        url, alt = data_url(jpeg(image)), "The whole slide, small"
        return tag("img", id="thumbnail", src=url, alt=alt, width=width, height=height)

    def sprite(self, progress: Step | None = None) -> Html:
        """Return all chosen patches once, as symbols that galleries point to."""
        symbols = []
        for done, row in enumerate(self.rows, 1):
            if self.slide is None or self.where is None:
                break
            url = data_url(jpeg(cut(self.slide, self.where, row, PATCH)))
            image = tag("image", href=url, width=PATCH, height=PATCH)
            symbols.append(tag("symbol", image, id=f"p{row}", viewBox=f"0 0 {PATCH} {PATCH}"))
            if progress:
                progress(done, len(self.rows))
        return tag("svg", *symbols, class_="sprite", width=0, height=0, aria_hidden="true")

    def gallery(self, patches: Iterable[int], captions: Iterable[Sequence[str]]) -> Html:
        """Return patches as buttons: each shows its place on the map."""
        buttons = []
        for row, (large, small) in zip(patches, captions, strict=True):
            said = f"Patch {row}: {large} {small}. Show its place."
            buttons.append(
                tag(
                    "button",
                    self._picture(row),
                    tag("span", tag("b", large), " ", tag("small", small), class_="caption"),
                    type="button",
                    class_="patch",
                    data_patch=row,
                    aria_label=said,
                )
            )
        return tag("div", *buttons, class_="gallery")

    def _picture(self, row: int) -> Html:
        if row not in self.rows:
            return tag("span", f"Patch {row}", class_="no-picture")
        return tag(
            "svg", tag("use", href=f"#p{row}"), viewBox=f"0 0 {PATCH} {PATCH}", aria_hidden="true"
        )


def thumbnail(slide: Slide, longest: int) -> Pixels:
    """Return the whole slide, so many pixels long."""
    return slide.thumbnail(slide.mpp * max(max(slide.size) / longest, 1.0)).image


def jpeg(image: Pixels, quality: int = 80) -> bytes:
    stream = BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(
        stream, "JPEG", quality=quality, optimize=True
    )
    return stream.getvalue()


def picture(image: Pixels, alt: str) -> Html:
    """Return a picture that is part of the page."""
    height, width = image.shape[:2]
    return tag("img", src=data_url(jpeg(image)), alt=alt, width=width, height=height)
