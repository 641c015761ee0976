"""The files of an atlas: a page, a figure and tables, in one new folder."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from caprmil import figures
from caprmil.explain.atlas_pictures import AtlasPictures, ExampleSlide
from caprmil.explain.atlas_tables import atlas_csv, atlas_record
from caprmil.explain.patient_means import Estimates
from caprmil.explain.token_atlas import TokenAtlas
from caprmil.figures import Gallery, Points, TokenPanel
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.report.atlas_page import atlas_page
from caprmil.report.html_page import data_url
from caprmil.report.patch_pictures import Picture
from caprmil.runs.run import Run
from caprmil.slides.readers import Pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200
PAGE_PX = 1600  # width of the figure on the page
INDEX, TABLE, FIGURE, RECORD = "index.html", "atlas.csv", "atlas.png", "atlas.json"


def write_atlas(
    folder: Path, run: Run, atlas: TokenAtlas, pictures: AtlasPictures, example: ExampleSlide
) -> list[str]:
    """Write the atlas into an existing folder, and return the names of the files."""
    figures.save(draw_atlas(atlas, pictures, example), folder / FIGURE, dpi=DPI)
    write_text(folder / TABLE, atlas_csv(atlas))
    write_text(folder / RECORD, as_json(atlas_record(atlas, run, pictures)))
    write_text(folder / INDEX, atlas_page(run, atlas, pictures, _picture(folder / FIGURE)))
    return [INDEX, TABLE, FIGURE, RECORD]


def draw_atlas(atlas: TokenAtlas, pictures: AtlasPictures, example: ExampleSlide) -> "Figure":
    """Draw the tokens of one head on one slide, with typical patches, and numbers of all heads."""
    head, (_, heads, per_head) = atlas.head_to_draw, atlas.shape
    own = [token for token in atlas.last if token.head == head]
    galleries = []
    if pictures.patches:
        for token in own:
            found = [(patch, pictures.of(patch)) for patch in token.patches]
            shown = [(patch, picture) for patch, picture in found if picture is not None]
            galleries.append(
                Gallery(
                    rows=[patch.row for patch, _ in shown],
                    patches=_same_size([picture for _, picture in shown]),
                    captions=[f"{patch.weight:.2f}" for patch, _ in shown],
                )
            )
    lead = atlas.target.lead_name
    return figures.token_atlas(
        example.assignments[:, head],
        example.canvas,
        galleries=galleries,
        panels=[
            TokenPanel(
                "Usage of each token, by head",
                "share of patches",
                _points(atlas, [token.usage for token in atlas.last]),
            ),
            TokenPanel(
                f"Effect of each token: fall of the {lead} without its message",
                "effect",
                _points(atlas, [token.effect for token in atlas.last]),
            ),
        ],
        names=[f"{token.head + 1}.{token.token + 1}" for token in atlas.last],
        per_head=per_head,
        title=f"{example.name}   {atlas.model}, {atlas.reference}   head {head + 1} of {heads}",
        remarks=[
            "percentage: a token's share of the patches of this slide",
            f"patches: the most typical ones of {len(atlas.slides)} slides, with their weight"
            if galleries
            else "",
            "points and lines: means over slides, 95 % intervals over patients",
        ],
    )


def _points(atlas: TokenAtlas, estimates: list[Estimates]) -> dict[str, Points]:
    """Return the points of each group or, if there is one group only, of all slides."""
    if len(atlas.groups) > 1:
        series = {name: [e.groups[n] for e in estimates] for n, name in enumerate(atlas.groups)}
    else:
        series = {"all slides": [each.overall for each in estimates]}
    return {
        name: Points(
            [each.mean for each in own],
            [each.interval.low for each in own],
            [each.interval.high for each in own],
        )
        for name, own in series.items()
    }


def _same_size(patches: list[Pixels]) -> list[Pixels]:
    """Return patches of slides with different scales at one size."""
    side = max((len(patch) for patch in patches), default=1)
    return [
        patch
        if len(patch) == side
        else np.asarray(Image.fromarray(patch).resize((side, side), Image.Resampling.BICUBIC))
        for patch in patches
    ]


def _picture(path: Path) -> Picture:
    """Return the figure as a part of the page, smaller than the file."""
    with Image.open(path) as image:
        small = image.convert("RGB")
        small.thumbnail((PAGE_PX, 10 * PAGE_PX))
        stream = BytesIO()
        small.save(stream, "WEBP", quality=86)
        alt = "Maps of tokens with typical patches, and usage and effect of all tokens"
        return Picture(data_url(stream.getvalue(), "image/webp"), alt, *small.size)
