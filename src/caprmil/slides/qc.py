"""Quality control: a record of each encoded slide, as a table and as images."""

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

from caprmil import config
from caprmil.io.atomic import atomic_write, write_text
from caprmil.io.json_files import parse_json
from caprmil.slides.patches import Patches
from caprmil.slides.slide import Thumbnail

OUTLINE, GRID, PEN = (0, 158, 115), (0, 114, 178), (213, 94, 0)
_MIN_SIDE, _MAX_SIDE = 800, 1600  # longer side of an image, in pixels


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of encoding a slide: a row of qc.csv."""

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
    digest: str = ""  # of the settings that it was made with

    def write(self, folder: Path) -> None:
        """Write the record to FOLDER/SLIDE.json."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        write_text(folder / f"{self.slide}.json", text, replace=True)

    @classmethod
    def read(cls, folder: Path, slide: str) -> "Record | None":
        """Return the record of a slide, or None if there is none that can be parsed."""
        try:
            return config.parse(parse_json((folder / f"{slide}.json").read_bytes()), into=cls)
        except (OSError, ValueError, TypeError):
            return None


def write_table(folder: Path, path: Path) -> None:
    """Write qc.csv from the records in a folder, failed and flagged slides first."""
    records = (Record.read(folder, file.stem) for file in sorted(folder.glob("*.json")))
    text = StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(Record)], lineterminator="\n")
    table.writeheader()
    for record in worst_first(record for record in records if record is not None):
        row = asdict(record)
        table.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    write_text(path, text.getvalue(), replace=True)


def worst_first(records: Iterable[Record]) -> list[Record]:
    """Return records sorted: failed, no tissue, flagged, others; each group by name."""

    def rank(record: Record) -> int:
        return 2 + (not record.flags) if record.state == "done" else record.state == "no tissue"

    return sorted(records, key=lambda record: (rank(record), record.slide))


def overlay(
    thumbnail: Thumbnail,
    mask: NDArray[np.bool_],
    pen: NDArray[np.bool_],
    patches: Patches | None = None,
) -> Image.Image:
    """Return the thumbnail with the tissue outline, the detected pen marks and the patch grid."""
    height, width = mask.shape
    longest = max(height, width)
    zoom = min(_MAX_SIDE / longest, max(1.0, min(3.0, _MIN_SIDE / longest)))
    size = (max(1, round(width * zoom)), max(1, round(height * zoom)))
    canvas = Image.fromarray(thumbnail.image).resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(canvas)
    corners = [] if patches is None else (patches.coords * zoom / thumbnail.scale).tolist()
    for x, y in corners:
        side = patches.side * zoom / thumbnail.scale if patches else 0
        draw.rectangle((x, y, x + side, y + side), outline=GRID)
    pixels = np.array(canvas)
    pixels[_edge(pen, size)] = PEN
    pixels[_edge(mask, size)] = OUTLINE
    return Image.fromarray(pixels)


def _edge(mask: NDArray[np.bool_], size: tuple[int, int]) -> NDArray[np.bool_]:
    resized = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    edge: NDArray[np.bool_] = resized & ~ndimage.binary_erosion(
        resized, iterations=2, border_value=1
    )
    return edge


def add_caption(image: Image.Image, text: str) -> Image.Image:
    """Return the image with a line of text below it."""
    font = ImageFont.load_default(size=16)
    width = max(image.width, int(font.getlength(text)) + 16)
    canvas = Image.new("RGB", (width, image.height + 28), "white")
    canvas.paste(image, (0, 0))
    ImageDraw.Draw(canvas).text((8, image.height + 4), text, fill="black", font=font)
    return canvas


def save_image(image: Image.Image, path: Path) -> None:
    """Write an image atomically. An existing file is replaced."""
    with atomic_write(path, replace=True) as temporary:
        image.save(temporary)
