"""One slide before it is encoded: open, with its tissue and the grid of its patches."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from caprmil.features.settings import ExtractionConfig
from caprmil.io.atomic import write_text
from caprmil.slides import patches, qc, regions, tissue
from caprmil.slides.patches import Patches
from caprmil.slides.qc import Record
from caprmil.slides.slide import Slide, Thumbnail
from caprmil.slides.tissue import Tissue

WHOLE_SIDE = 800  # longer side of the thumbnail of a picture that is encoded as a whole, in pixels


@dataclass(eq=False, kw_only=True)
class PreparedSlide:
    """An open slide, with its tissue and the grid of its patches."""

    slide: Slide
    thumbnail: Thumbnail
    tissue: Tissue
    patches: Patches
    seconds: float

    def describe(self, record: Record) -> Record:
        """Return the record with what was found on the slide."""
        slide = self.slide
        return replace(
            record,
            state="done" if len(self.patches) else "no tissue",
            patches=len(self.patches),
            tissue_mm2=self.tissue.area_mm2,
            tissue_share=float(self.tissue.mask.mean()),
            flags="; ".join([*self.tissue.flags, *_scale_flags(slide)]),
            width=slide.size[0],
            height=slide.size[1],
            mpp=slide.mpp,
            reader=f"{slide.vendor}, {'libvips' if slide.fast else 'OpenSlide'}",
        )

    def draw(self, record: Record, folder: Path) -> None:
        """Write a picture of the slide, and the outline of its tissue for QuPath."""
        mask, scale = self.tissue.mask, self.thumbnail.scale
        image = qc.overlay(self.thumbnail, mask, self.tissue.pen, self.patches)
        text = (
            f"{record.slide}: {record.patches:,} patches of {self.patches.side * record.mpp:.0f} "
            f"um, {record.tissue_mm2:.1f} mm2 of tissue"
        )
        text += f"; {record.flags}" if record.flags else ""
        qc.save_image(qc.add_caption(image, text), folder / f"{record.slide}.png")
        outline = json.dumps(regions.as_geojson(mask, (scale, scale)))
        write_text(folder / f"{record.slide}.geojson", outline, replace=True)


def prepare_slide(
    path: Path,
    config: ExtractionConfig,
    *,
    mpp: float | None = None,
    find_regions: Callable[[], Path | None] = lambda: None,
) -> PreparedSlide:
    """Open a slide, find its tissue, and place the grid of patches.

    `find_regions` returns the GeoJSON file of the slide, and may raise an error.
    """
    start = monotonic()
    slide = Slide(path, mpp=mpp)
    try:
        if config.whole:  # a small picture is shown larger than tissue needs it
            finest = slide.mpp * max(slide.size) / WHOLE_SIDE
            thumbnail = slide.thumbnail(min(config.tissue.mpp, finest))
            found = tissue.everywhere(thumbnail.image, thumbnail.mpp)
        else:
            thumbnail = slide.thumbnail(config.tissue.mpp)
            found = tissue.find(thumbnail.image, thumbnail.mpp, config.tissue)
        if file := find_regions():
            found = _apply_regions(file, found, thumbnail.scale, config)
        lay = patches.cover if config.whole else patches.lay_grid
        grid = lay(slide, found.mask, thumbnail.scale, config.patches)
    except BaseException:
        slide.close()
        raise
    seconds = monotonic() - start
    return PreparedSlide(
        slide=slide, thumbnail=thumbnail, tissue=found, patches=grid, seconds=seconds
    )


def _apply_regions(file: Path, found: Tissue, scale: float, config: ExtractionConfig) -> Tissue:
    """Return the tissue inside the regions, or all of the regions if the settings say so."""
    drawn = regions.read_regions(file, classes=config.region_classes or None)
    mask = drawn.to_mask(found.mask.shape, (1 / scale, 1 / scale))
    if config.regions == "and tissue":
        mask &= found.mask
    flags = tuple(flag for flag in found.flags if flag != "no tissue")
    return replace(found, mask=mask, flags=flags if mask.any() else (*flags, "no tissue"))


def _scale_flags(slide: Slide) -> list[str]:
    """Return a flag if the scale that the user gave differs from the one in the file."""
    reported = slide.reported_mpp
    if reported is None or max(reported, slide.mpp) <= 1.05 * min(reported, slide.mpp):
        return []
    return [f"scale given as {slide.mpp:g} um/px, the file says {reported:g}"]
