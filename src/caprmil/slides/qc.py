"""Quality control: what was found on each slide, as a table and as pictures to look at."""

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from caprmil.io.atomic import atomic_write, write_text
from caprmil.slides.patches import Patches
from caprmil.slides.slide import Thumbnail

OUTLINE, GRID, PEN = (0, 158, 115), (0, 114, 178), (213, 94, 0)
_LEAST, _LONGEST = 800, 1600  # side of a picture, in pixels


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of a slide: a row of qc.csv."""

    slide: str
    state: Literal["done", "no tissue", "failed"]
    patches: int = 0
    tissue_mm2: float = 0.0
    tissue_share: float = 0.0
    flags: str = ""
    reason: str = ""
    width: int = 0
    height: int = 0
    mpp: float = 0.0
    reader: str = ""
    seconds: float = 0.0
    path: str = ""
    digest: str = ""  # of all settings that shaped it

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        write_text(folder / f"{self.slide}.json", text, replace=True)

    @classmethod
    def read(cls, folder: Path, slide: str) -> "Record | None":
        """Return what was noted of a slide, if anything was that can be understood."""
        try:
            return cls(**json.loads((folder / f"{slide}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def write_table(folder: Path, path: Path) -> None:
    """Write qc.csv from the records in a folder, suspicious slides first."""
    found = (Record.read(folder, file.stem) for file in sorted(folder.glob("*.json")))
    text = StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(Record)], lineterminator="\n")
    table.writeheader()
    for record in worst_first(record for record in found if record is not None):
        row = asdict(record)
        table.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    write_text(path, text.getvalue(), replace=True)


def worst_first(records: Iterable[Record]) -> list[Record]:
    """Return failed slides first, then empty ones, then flagged ones, each by name."""

    def rank(record: Record) -> int:
        return 2 + (not record.flags) if record.state == "done" else record.state == "no tissue"

    return sorted(records, key=lambda record: (rank(record), record.slide))


def overlay(
    thumbnail: Thumbnail, mask: NDArray[np.bool_], pen: NDArray[np.bool_], patches: Patches
) -> Image.Image:
    """Return the slide with the outline of its tissue, what was taken for pen, and the grid."""
    height, width = mask.shape
    longest = max(height, width)
    zoom = min(_LONGEST / longest, max(1.0, min(3.0, _LEAST / longest)))
    size = (max(1, round(width * zoom)), max(1, round(height * zoom)))
    canvas = Image.fromarray(thumbnail.image).resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(canvas)
    for x, y in (patches.coords * zoom / thumbnail.scale).tolist():
        side = patches.side * zoom / thumbnail.scale
        draw.rectangle((x, y, x + side, y + side), outline=GRID)
    pixels = np.array(canvas)
    pixels[_edge(pen, size)] = PEN
    pixels[_edge(mask, size)] = OUTLINE
    return Image.fromarray(pixels)


def _edge(mask: NDArray[np.bool_], size: tuple[int, int]) -> NDArray[np.bool_]:
    drawn = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    edge: NDArray[np.bool_] = drawn & ~ndimage.binary_erosion(drawn, iterations=2, border_value=1)
    return edge


def add_caption(image: Image.Image, text: str) -> Image.Image:
    """Return the picture with a line of text under it."""
    font = ImageFont.load_default(size=16)
    wide = max(image.width, int(font.getlength(text)) + 16)
    whole = Image.new("RGB", (wide, image.height + 28), "white")
    whole.paste(image, (0, 0))
    ImageDraw.Draw(whole).text((8, image.height + 4), text, fill="black", font=font)
    return whole


def save_image(image: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all, over an older one of the same slide."""
    with atomic_write(path, replace=True) as passing:
        image.save(passing)
