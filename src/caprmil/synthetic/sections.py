"""Synthetic slides: sections that resemble H&E at low magnification, with ground truth."""

import csv
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from caprmil.errors import SlideError, UnknownNameError
from caprmil.io.atomic import atomic_write, check_new, write_text
from caprmil.io.leftovers import temporary_name
from caprmil.io.progress import Step
from caprmil.synthetic.anatomy import KINDS, TRUTH_UM, Anatomy, lay_out
from caprmil.synthetic.cohort_folder import claim_folder
from caprmil.synthetic.rendering import ARTEFACTS, Box, Pixels, Renderer
from caprmil.synthetic.textures import textures

VENDORS = ("generic", "aperio")
TIFF = {
    "compression": "jpeg",
    "Q": 82,
    "tile": True,
    "tile_width": 256,
    "tile_height": 256,
    "pyramid": True,
    "resunit": "cm",
}
BLOCK = 256  # side of a rendered block in pixels
PALETTE = bytes.fromhex(
    "ffffff ecaabe fadc96 5a50aa 50a078 aa1e3c"
)  # of the truth image, one colour per kind


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A section as pixels, and the kinds of tissue on a grid of TRUTH_UM."""

    image: Pixels  # (height, width, 3)
    kinds: Pixels  # index into KINDS

    @property
    def tissue(self) -> NDArray[np.bool_]:
        """Mask of tissue of any kind, on the truth grid."""
        return self.kinds > 0

    @property
    def tumour(self) -> NDArray[np.bool_]:
        """Mask of tumour, on the truth grid."""
        return self.kinds == KINDS.index("tumour")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One slide: stroma with fat, lymphocytes, glands and, optionally, tumour.

    Tissue is laid out in micrometres: twice the pixels at half the mpp show the same cells.
    Outline, stain, artefacts and other tissues do not depend on the share of tumour.
    """

    seed: int = 0
    width: int = 4480  # level-0 pixels
    height: int = 3584
    mpp: float = 1.0  # micrometres per level-0 pixel
    tumour: float = 0.0  # share of the tissue
    artefacts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in set(self.artefacts) - set(ARTEFACTS):
            raise UnknownNameError("artefact", name, ARTEFACTS)
        if not 0 <= self.tumour <= 0.5:
            raise ValueError(f"The share of tumour must be between 0 and 0.5, not {self.tumour=}.")
        if min(self.width, self.height) * self.mpp < 500:
            raise ValueError(f"A section must be at least 500 um wide and high, unlike {self}.")

    def truth(self) -> Pixels:
        """Return the kinds of tissue on a grid of TRUTH_UM, without rendering."""
        return self._anatomy().kinds

    def render(self) -> Rendered:
        """Return the whole section in memory."""
        anatomy = self._anatomy()
        return Rendered(image=np.concatenate(list(self._bands(anatomy))), kinds=anatomy.kinds)

    def write(self, path: str | Path, *, vendor: Literal["generic", "aperio"] = "generic") -> Path:
        """Write a pyramidal TIFF of JPEG tiles, in bounded memory."""
        import pyvips

        if vendor not in VENDORS:
            raise UnknownNameError("vendor", vendor, VENDORS)
        with atomic_write(path) as temporary, self._raw_image(temporary) as raw:
            image = pyvips.Image.rawload(
                str(raw), self.width, self.height, 3, interpretation="srgb", access="sequential"
            ).copy(xres=1000 / self.mpp, yres=1000 / self.mpp)
            if vendor == "aperio":
                image.set_type(pyvips.GValue.gstr_type, "image-description", self._aperio())
            try:
                image.tiffsave(str(temporary), bigtiff=self.width * self.height > 2**30, **TIFF)
            except pyvips.Error as problem:
                raise SlideError(f"{path} cannot be written: {problem.detail.strip()}") from problem
        return Path(path)

    @contextmanager
    def _raw_image(self, beside: Path) -> Iterator[Path]:
        """Yield a temporary file with the pixels, in the folder of another one."""
        raw = beside.with_name(temporary_name(f"{beside.name}.raw"))
        try:
            with raw.open("wb") as file:
                for band in self._bands(self._anatomy()):
                    file.write(band.data)
            yield raw
        finally:
            raw.unlink(missing_ok=True)

    def _aperio(self) -> str:
        size = f"{self.width}x{self.height}"
        header = (
            f"{size} [0,0 {size}] (256x256) JPEG/RGB Q={TIFF['Q']}|AppMag = {10 / self.mpp:.0f}"
        )
        return f"Aperio Image Library v12.0.0\r\n{header}|MPP = {self.mpp:.4f}"

    def _anatomy(self) -> Anatomy:
        rows, columns = (int(np.ceil(n * self.mpp / TRUTH_UM)) for n in (self.height, self.width))
        return lay_out((rows, columns), tumour=self.tumour, seed=self.seed)

    def _bands(self, anatomy: Anatomy) -> Iterator[Pixels]:
        renderer = Renderer(anatomy, mpp=self.mpp, seed=self.seed, artefacts=self.artefacts)
        for y in range(0, self.height, BLOCK):
            band = np.empty((min(BLOCK, self.height - y), self.width, 3), dtype=np.uint8)
            for x in range(0, self.width, BLOCK):
                block = band[:, x : x + BLOCK]
                block[...] = renderer.block(Box(x, y, block.shape[1], block.shape[0]))
            yield band


@dataclass(frozen=True, kw_only=True)
class SlideCohort:
    """Slides of one patient each. Every other slide has nests of tumour.

    The label is independent of lymphocytes, glands, fat, stain, artefacts and tissue area.
    """

    slides: int = 60
    width: int = 4480
    height: int = 3584
    mpp: float = 1.0
    tumour: float = 0.08  # share of tumour in the tissue of a positive slide
    spoilt: float = 0.0  # share of slides with an artefact
    seed: int = 0

    label_column: ClassVar[str] = "label"

    def share_of(self, number: int) -> float:
        """Return the share of tumour in the tissue of a slide."""
        return self.tumour if number % 2 else 0.0

    def label_of(self, number: int) -> str:
        """Return the label of a slide, as the table has it."""
        return "tumour" if number % 2 else "normal"

    def section(self, number: int) -> Section:
        """Return a slide by its number, from 0."""
        rng = np.random.default_rng([self.seed, number])
        artefact = str(rng.choice(ARTEFACTS))
        return Section(
            seed=int(rng.integers(2**32)),
            width=self.width,
            height=self.height,
            mpp=self.mpp,
            tumour=self.share_of(number),
            artefacts=(artefact,) if rng.random() < self.spoilt else (),
        )

    def write(
        self, folder: str | Path, *, progress: Step | None = None, workers: int | None = None
    ) -> Path:
        """Write slides, truth and table of the cohort into a folder; return the table's path.

        Existing slides of the same cohort are kept.
        """
        folder = Path(folder)
        claim_folder(folder, self)
        labels = folder / "labels.csv"
        table = self._table()
        if labels.exists() and labels.read_text(encoding="utf-8") != table:
            check_new(labels)  # raises before slides are written
        textures(self.mpp)  # fill the cache before threads start
        with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
            jobs = [pool.submit(self._write_one, folder, n) for n in range(self.slides)]
            try:
                for done, job in enumerate(as_completed(jobs), start=1):
                    job.result()
                    if progress:
                        progress(done, self.slides)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return labels if labels.exists() else write_text(labels, table)

    def _write_one(self, folder: Path, number: int) -> None:
        section = self.section(number)
        slide = folder / "slides" / f"slide_{number:03d}.tiff"
        truth = folder / "truth" / f"slide_{number:03d}.png"
        if not truth.exists():
            image = Image.fromarray(section.truth())
            image.putpalette(PALETTE)
            with atomic_write(truth) as temporary:
                image.save(temporary)
        if not slide.exists():
            section.write(slide)

    def _table(self) -> str:
        text = StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["slide", "patient", self.label_column])
        for n in range(self.slides):
            table.writerow([f"slide_{n:03d}", f"patient_{n:03d}", self.label_of(n)])
        return text.getvalue()
