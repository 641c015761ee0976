"""Whole-slide images: metadata, scale, and the pixels of any square.

OpenSlide reads scanner formats, libvips reads plain images. Tiled TIFF (including Aperio) is read
by libvips where its pixels match OpenSlide's, because it is several times faster. Every slide is
read in a process of its own, see `isolated_file`: a crash of these libraries costs one slide.
"""

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import csr_array

from caprmil.errors import SlideError
from caprmil.io.notebook import html_picture, show_html
from caprmil.io.paths import RemotePath, as_path, check_utf8, download_all, scratch_folder
from caprmil.slides.isolated_file import open_slide_file
from caprmil.slides.names import SLIDE_SUFFIXES, slide_name
from caprmil.slides.readers import Pixels, ReadError
from caprmil.slides.scale import COARSEST_MPP, FINEST_MPP

_BLOCK = 1024  # side of the blocks that a thumbnail is read in, in pixels of its level
_MAX_THUMBNAIL = 2**27  # pixels; a glass slide of 26 x 76 mm at 8 um/px has 2**25


@dataclass(frozen=True, kw_only=True)
class Level:
    """One image of a pyramid. `downsample` is the width of its pixels in level-0 pixels."""

    size: tuple[int, int]
    downsample: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Thumbnail:
    """A small image of a whole slide. A pixel is the mean of a square of `scale` level-0 pixels."""

    image: Pixels
    scale: float
    mpp: float


class Slide:
    """An open slide. It may be read from several threads.

    Coordinates are level-0 pixels, top left, x and y. Pixels outside the slide are white. A remote
    slide is copied to a local scratch folder until it is closed.
    """

    _scratch: Path | None = None

    def __init__(self, path: str | Path, *, mpp: float | None = None, fast: bool = True) -> None:
        self.path = as_path(path)
        if not self.path.exists():
            raise SlideError(f"There is no slide {self.path}. Check its name and folder.")
        file = self.path
        if self.path.is_dir() and not isinstance(self.path, RemotePath):
            self.path = _first_dicom_file(self.path)
        self.name = slide_name_of(self.path)
        self._given = None if mpp is None else _check_mpp(mpp, f"The scale given for {self.path}")
        if not isinstance(self.path, RemotePath):
            self._open(file, fast=fast)
            return
        self._scratch = scratch_folder()
        try:
            self._open(_fetch(self.path, self._scratch), fast=fast)
        except SlideError as problem:  # name the remote file, not its local copy
            message = str(problem).replace(str(self._scratch), str(self.path.parent))
            raise SlideError(message) from problem
        finally:
            if not hasattr(self, "levels"):
                self._remove_scratch()

    def _open(self, file: Path, *, fast: bool) -> None:
        self._file = open_slide_file(file, fast=fast)
        metadata = self._file.metadata
        self.vendor, self.properties = metadata.vendor, metadata.properties
        self.fast = metadata.fast  # whether libvips reads the pixels
        self.levels = _levels(metadata.sizes)

    def __repr__(self) -> str:
        width, height = self.size
        return f"Slide({str(self.path)!r}: {self.vendor}, {width} x {height})"

    def _repr_html_(self) -> str:
        """Show the slide in a notebook: a thumbnail with the outline of the tissue, and its scale.

        The thumbnail is read and the tissue detected once.
        """
        width, height = self.size
        mpp = self._given or self.reported_mpp
        facts = [
            ("size", f"{width:,} x {height:,} px"),
            ("scale", f"{mpp:g} µm per pixel" if mpp else "not known: pass mpp"),
            ("format", self.vendor),
            *self._preview[0],
        ]
        return show_html(f"Slide {self.name}", facts, self._preview[1])

    @cached_property
    def _preview(self) -> tuple[list[tuple[str, object]], str]:
        """What is known of the tissue, and the thumbnail with its outline, as HTML."""
        from caprmil.slides import qc, tissue

        try:
            if not (self._given or self.reported_mpp):  # tissue is detected at a scale
                plain = self._reduced(max(max(self.size) / 1500, 1.0))
                return [], html_picture(plain, f"Slide {self.name}")
            small = self.thumbnail(max(tissue.DEFAULT.mpp, max(self.size) * self.mpp / 1500))
            found = tissue.find(small.image, small.mpp)
        except (SlideError, ReadError, OSError, ValueError) as problem:  # e.g. it is closed
            return [("thumbnail", f"cannot be read ({problem})")], ""
        flags = ", ".join(found.flags) or None
        image = np.asarray(qc.overlay(small, found.mask, found.pen))
        facts: list[tuple[str, object]] = [
            ("tissue", f"{found.area_mm2:.3g} mm²"),
            ("remarks", flags),
        ]
        picture = html_picture(image, f"Slide {self.name} with the outline of its tissue")
        return facts, picture

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and remove its local copy if there is one."""
        self._file.close()
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that pixels are read from."""
        return (self.path,)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height at level 0."""
        return self.levels[0].size

    @property
    def objective_power(self) -> float | None:
        """The magnification in the file's metadata. It does not define a scale."""
        with suppress(KeyError, ValueError):
            return float(self.properties["openslide.objective-power"])
        return None

    @cached_property
    def mpp(self) -> float:
        """Microns per pixel at level 0: the given value, or else that of the file's metadata."""
        return self._given if self._given is not None else self._read_mpp()

    @cached_property
    def reported_mpp(self) -> float | None:
        """Microns per pixel in the file's metadata, or None if missing or implausible."""
        with suppress(SlideError):
            return self._read_mpp()
        return None

    def _read_mpp(self) -> float:
        remedy = "Pass --slide-mpp."
        values = [self.properties.get(f"openslide.mpp-{axis}") for axis in "xy"]
        try:
            x, y = (float(value) for value in values if value)
        except ValueError:
            power = self.objective_power
            hint = f" (its magnification of {power:g}x is not a scale)" if power else ""
            raise SlideError(f"{self.path} has no scale{hint}. {remedy}") from None
        if not max(x, y) <= 1.05 * min(x, y):
            raise SlideError(
                f"{self.path} has pixels of {x:g} x {y:g} um. Only square pixels are supported. "
                f"{remedy}"
            )
        return _check_mpp((x * y) ** 0.5, f"The scale of {self.path}", remedy)

    def read(self, x: float, y: float, side: float, px: int) -> Pixels:
        """Return the square of `side` level-0 pixels at (x, y) as px x px pixels.

        If a level has the requested scale, within half a pixel over the square, its pixels are
        returned unchanged. Otherwise the square is resampled from the next finer level, or from
        one that is up to 2 % coarser.
        """
        number = self._level_for(side / px)
        downsample = self.levels[number].downsample
        left, top, width = x / downsample, y / downsample, side / downsample
        if abs(width - px) < 0.5:
            return self.block(number, round(left), round(top), px, px)
        x0, y0 = floor(left), floor(top)
        wide, high = (ceil(start + width - 1e-6) - floor(start) for start in (left, top))
        block = self.block(number, x0, y0, wide, high)
        box = (left - x0, top - y0, min(left - x0 + width, wide), min(top - y0 + width, high))
        return np.array(Image.fromarray(block).resize((px, px), Image.Resampling.BILINEAR, box=box))

    def block(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Return pixels of a level unchanged; x and y are in pixels of the level."""
        wide, high = self.levels[level].size
        x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, wide), min(y + height, high)
        complete = (x0, y0, x1 - x0, y1 - y0) == (x, y, width, height)
        inside = None
        if x1 > x0 and y1 > y0:
            try:
                inside = self._file.fetch(level, x0, y0, x1 - x0, y1 - y0)
            except ReadError as problem:
                raise SlideError(
                    f"{self.path} cannot be read at level {level}, ({x0}, {y0}) ({problem}). "
                    "It is damaged or truncated. Copy it again."
                ) from problem
        if complete and inside is not None:
            return inside
        block = np.full((height, width, 3), 255, dtype=np.uint8)
        if inside is not None:
            block[y0 - y : y1 - y, x0 - x : x1 - x] = inside
        return block

    def thumbnail(self, mpp: float) -> Thumbnail:
        """Return the whole slide at `mpp`, or at its own scale if that is coarser.

        It is read in blocks, so memory is bounded even for a slide with a single level.
        """
        scale = max(mpp / self.mpp, 1.0)
        width, height = (ceil(side / scale) for side in self.size)
        if width * height > _MAX_THUMBNAIL:
            raise SlideError(
                f"{self.path} would be {self.size[0] * self.mpp / 1000:.0f} x "
                f"{self.size[1] * self.mpp / 1000:.0f} mm large, too large for a thumbnail at "
                f"{scale * self.mpp:g} um/px. Check its scale, or choose a coarser tissue.mpp."
            )
        return Thumbnail(image=self._reduced(scale), scale=scale, mpp=scale * self.mpp)

    def _reduced(self, scale: float) -> Pixels:
        """Return the whole slide, with one pixel for `scale` x `scale` pixels of level 0."""
        number = self._level_for(scale)
        shrink = scale / self.levels[number].downsample
        width, height = (ceil(side / scale) for side in self.size)
        image = np.empty((height, width, 3), dtype=np.uint8)
        step = max(1, int(_BLOCK / shrink))
        for top in range(0, height, step):
            for left in range(0, width, step):
                part = image[top : top + step, left : left + step]
                part[:] = self._shrunk(number, left, top, part.shape[1], part.shape[0], shrink)
        return image

    def _shrunk(
        self, level: int, left: int, top: int, width: int, height: int, shrink: float
    ) -> Pixels:
        """Return a block of a thumbnail, whose pixels are means of `shrink` pixels of a level."""
        across = np.arange(left, left + width + 1) * shrink
        down = np.arange(top, top + height + 1) * shrink
        x, y = floor(across[0]), floor(down[0])
        block = self.block(level, x, y, ceil(across[-1]) - x, ceil(down[-1]) - y)
        rows = _mean_rows(block, down - y).swapaxes(0, 1)
        return np.rint(_mean_rows(rows, across - x).swapaxes(0, 1)).astype(np.uint8)

    def _level_for(self, downsample: float) -> int:
        """Return the coarsest level that is at least as fine as requested, within 2 %.

        A slide of nominally 0.25 um/px may report 0.2527. Without the tolerance, four times the
        pixels would be read.
        """
        fine = [n for n, level in enumerate(self.levels) if level.downsample <= 1.02 * downsample]
        return max(fine, key=lambda n: self.levels[n].downsample, default=0)


def find_slides(
    paths: Iterable[str | Path], *, exclude: str | Path | None = None
) -> dict[str, Path]:
    """Return slides by name: the given files, and the slides in the given folders.

    A folder of DICOM files is one slide with the name of the folder. Files in the folder `exclude`
    are skipped.
    """
    found: dict[str, Path] = {}
    excluded = None if exclude is None else as_path(exclude).resolve()
    for path in map(as_path, paths):
        if not path.exists():
            raise SlideError(f"There is no slide or folder {path}. Check its name.")
        if path.suffix.lower() == ".dcm":
            path = path.absolute().parent
        files = _in_folder(path) if path.is_dir() else [path]
        files = [file for file in files if excluded not in file.resolve().parents]
        if not files:
            raise SlideError(
                f"There are no slides in {path}. Known suffixes: {', '.join(SLIDE_SUFFIXES)}."
            )
        for file in files:
            check_utf8(file)
            name = slide_name_of(file)
            if found.setdefault(name, file) != file:
                raise SlideError(
                    f"{found[name]} and {file} are both called '{name}'. Rename one of them, or "
                    "encode them into different folders."
                )
    return found


def slide_name_of(path: Path) -> str:
    """Return the name of a slide by its path; DICOM files have the name of their folder."""
    path = path.absolute()
    return path.parent.name if path.suffix.lower() == ".dcm" else slide_name(path.name)


def _in_folder(folder: Path) -> list[Path]:
    """Return the slides in a folder, without hidden files and images that `encode` wrote."""

    def is_slide(path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        of_encode = path.parent.name == "qc" and any(
            (path.parent.parent / name).exists() for name in (".locks", "qc.csv")
        )
        return not (hidden or of_encode) and path.is_file()

    images = (path for path in folder.rglob("*") if path.suffix.lower() in SLIDE_SUFFIXES)
    files = sorted(filter(is_slide, images))
    dicom = sorted({file.parent for file in files if file.suffix.lower() == ".dcm"})
    return [file for file in files if file.suffix.lower() != ".dcm"] + dicom


def _fetch(path: RemotePath, scratch: Path) -> Path:
    """Copy all files of a slide to a local folder, and return the file or folder to open."""
    folder = path.parent if path.suffix.lower() == ".dcm" else path
    if folder is path and path.is_file():
        mirax = path.with_suffix("")  # MIRAX has its pixels in a folder of the same name
        files = [path, *(mirax.rglob("*") if path.suffix.lower() == ".mrxs" else ())]
        download_all(files, path.parent, scratch)
        return scratch / path.name
    download_all(list(folder.glob("*.dcm")), folder, scratch / folder.name)
    _first_dicom_file(scratch / folder.name)
    return scratch / folder.name


def _first_dicom_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.dcm"))
    if not files:
        raise SlideError(f"{folder} is a folder without DICOM files. Pass a slide.")
    return files[0]


def _levels(sizes: Sequence[tuple[int, int]]) -> tuple[Level, ...]:
    return tuple(Level(size=size, downsample=exact_downsample(sizes[0], size)) for size in sizes)


def exact_downsample(full: tuple[int, int], part: tuple[int, int]) -> float:
    """Return the width of a level's pixels in level-0 pixels.

    Level sizes are rounded, so their quotient is not exact: 20001 / 10000 and 20001 / 10001 are
    both 2, rounded down and up. The quotient is returned only where no integer explains both
    sides.
    """
    quotient = (full[0] / part[0] * full[1] / part[1]) ** 0.5
    for integer in (2.0 ** round(np.log2(quotient)), float(round(quotient))):
        if integer and all(abs(a / integer - b) < 1 for a, b in zip(full, part, strict=True)):
            return integer
    return quotient


def _mean_rows(rows: NDArray[Any], edges: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the mean of the rows between neighbouring edges, which may cut through rows.

    Pillow's box filter cannot do this.
    """
    index = np.arange(len(rows))
    inside = np.minimum(edges[1:, None], index + 1) - np.maximum(edges[:-1, None], index)
    weights = csr_array(inside.clip(0, 1) / np.diff(edges)[:, None], dtype=np.float32)
    means = weights @ rows.reshape(len(rows), -1)
    return means.reshape(-1, *rows.shape[1:])


def _check_mpp(mpp: float, source: str, remedy: str = "") -> float:
    if not FINEST_MPP <= mpp <= COARSEST_MPP:
        raise SlideError(
            f"{source} is {mpp:g} um/px, which is implausible; {FINEST_MPP:g} to "
            f"{COARSEST_MPP:g} um/px are allowed. {remedy}".rstrip()
        )
    return mpp
