"""Slides: open one, know how large its pixels are, and read squares of it.

OpenSlide reads what scanners write, libvips plain images. Tiled TIFF (Aperio's too) is read by
libvips wherever it gives the pixels that OpenSlide gives: several times as many a second.
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
import openslide
import pyvips
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import csr_array

from caprmil.errors import SlideError
from caprmil.io.paths import RemotePath, as_path, download_all, scratch_folder
from caprmil.slides.names import SLIDE_SUFFIXES, slide_name
from caprmil.slides.readers import (
    OpenSlideReader,
    Pixels,
    Reader,
    VipsReader,
    fast_reader,
    first_line,
    plain_image,
)

FINEST_MPP, COARSEST_MPP = 0.05, 20.0
"""Microns per pixel beyond these are a slip of a unit, not a microscope."""

_BLOCK = 1024  # side of what is read at once for a thumbnail, in pixels of its level


@dataclass(frozen=True, kw_only=True)
class Level:
    """One image of a pyramid. `downsample` is how many level-0 pixels one of its pixels is wide."""

    size: tuple[int, int]
    downsample: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Thumbnail:
    """A whole slide, small. Each pixel is the mean of a square of `scale` level-0 pixels."""

    image: Pixels
    scale: float
    mpp: float


class Slide:
    """A slide that is open for reading, from several threads if you like.

    Coordinates are level-0 pixels, top left, x and y. What lies outside the slide is white. One
    that is elsewhere is fetched to local scratch, until it is closed.
    """

    _scratch: Path | None = None

    def __init__(self, path: str | Path, *, mpp: float | None = None, fast: bool = True) -> None:
        self.path = as_path(path)
        if not self.path.exists():
            raise SlideError(f"There is no slide {self.path}. Check its name and folder.")
        if self.path.is_dir() and not isinstance(self.path, RemotePath):
            self.path = _in_dicom_folder(self.path)
        self.name = slide_name_of(self.path)
        self._given = None if mpp is None else _sane(mpp, f"The scale given for {self.path}")
        if not isinstance(self.path, RemotePath):
            self._open(self.path, fast=fast)
            return
        self._scratch = scratch_folder()
        try:
            self._open(_fetched(self.path, self._scratch), fast=fast)
        except SlideError as problem:  # which says where the copy is, and that is nobody's place
            told = str(problem).replace(str(self._scratch), str(self.path.parent))
            raise SlideError(told) from problem
        finally:
            if not hasattr(self, "levels"):
                self._sweep()

    def _open(self, file: Path, *, fast: bool) -> None:
        self._slide: openslide.OpenSlide | None = None
        self._reader: Reader
        if openslide.OpenSlide.detect_format(file) is None:
            image = plain_image(file)
            sizes = [(image.width, image.height)]
            self._reader = VipsReader([image])
            self.vendor, self.properties = "image", _properties(image)
        else:
            self._slide = _opened(file)
            sizes = list(self._slide.level_dimensions)
            self.properties = dict(self._slide.properties)
            self.vendor = self.properties.get("openslide.vendor", "unknown")
            quick = fast_reader(self._slide, file) if fast else None
            self._reader = quick or OpenSlideReader(self._slide)
        self.levels = _levels(sizes)

    def __repr__(self) -> str:
        width, height = self.size
        return f"Slide({str(self.path)!r}: {self.vendor}, {width} x {height})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        self._sweep()

    def _sweep(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def size(self) -> tuple[int, int]:
        return self.levels[0].size

    @property
    def fast(self) -> bool:
        """Whether libvips reads the pixels."""
        return isinstance(self._reader, VipsReader)

    @property
    def objective_power(self) -> float | None:
        """The magnification that the file names, a nickname and no scale."""
        with suppress(KeyError, ValueError):
            return float(self.properties[openslide.PROPERTY_NAME_OBJECTIVE_POWER])
        return None

    @cached_property
    def mpp(self) -> float:
        """Microns per pixel at level 0: as given, or else as the file says."""
        return self._given if self._given is not None else self._read_mpp()

    @cached_property
    def reported_mpp(self) -> float | None:
        """What the file says of its scale, if that can be one."""
        with suppress(SlideError):
            return self._read_mpp()
        return None

    def _read_mpp(self) -> float:
        remedy = "Pass --slide-mpp, or add an mpp column to the table."
        said = [self.properties.get(f"openslide.mpp-{axis}") for axis in "xy"]
        try:
            x, y = (float(value) for value in said if value)
        except ValueError:
            power = (
                f" (it names {self.objective_power:g}x, which is no scale)"
                if self.objective_power
                else ""
            )
            raise SlideError(
                f"{self.path} does not say how large a pixel is{power}. {remedy}"
            ) from None
        if not max(x, y) <= 1.05 * min(x, y):
            raise SlideError(
                f"{self.path} says that its pixels are {x:g} um wide and {y:g} um high. Only "
                f"square ones are read. {remedy}"
            )
        return _sane((x * y) ** 0.5, str(self.path), remedy)

    def read(self, x: float, y: float, side: float, px: int) -> Pixels:
        """Return the square of `side` level-0 pixels at (x, y), as px x px pixels.

        Where a level has the wanted scale, to half a pixel over the square, its pixels come as
        they are. Elsewhere the next finer level (or one two per cent coarser) is resampled, over
        the square alone.
        """
        number = self._level_for(side / px)
        ratio = self.levels[number].downsample
        left, top, width = x / ratio, y / ratio, side / ratio
        if abs(width - px) < 0.5:
            return self.block(number, round(left), round(top), px, px)
        x0, y0 = floor(left), floor(top)
        wide, high = (ceil(start + width - 1e-6) - floor(start) for start in (left, top))
        block = self.block(number, x0, y0, wide, high)
        box = (left - x0, top - y0, min(left - x0 + width, wide), min(top - y0 + width, high))
        return np.array(Image.fromarray(block).resize((px, px), Image.Resampling.BILINEAR, box=box))

    def block(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """Return pixels of a level as they are; x and y in its own pixels."""
        wide, high = self.levels[level].size
        x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, wide), min(y + height, high)
        whole = (x0, y0, x1 - x0, y1 - y0) == (x, y, width, height)
        inside = None
        if x1 > x0 and y1 > y0:
            try:
                inside = self._reader.fetch(level, x0, y0, x1 - x0, y1 - y0)
            except (openslide.OpenSlideError, pyvips.Error) as problem:
                raise SlideError(
                    f"{self.path} cannot be read at level {level}, ({x0}, {y0}) ("
                    f"{first_line(problem)}). It is damaged or cut short. Copy it again."
                ) from problem
        if whole and inside is not None:
            return inside
        block = np.full((height, width, 3), 255, dtype=np.uint8)
        if inside is not None:
            block[y0 - y : y1 - y, x0 - x : x1 - x] = inside
        return block

    def thumbnail(self, mpp: float) -> Thumbnail:
        """Return the whole slide at that scale, or at its own where that is coarser.

        It is read in blocks, so that a slide of one level needs no more memory than another.
        """
        scale = max(mpp / self.mpp, 1.0)
        number = self._level_for(scale)
        shrink = scale / self.levels[number].downsample
        width, height = (ceil(side / scale) for side in self.size)
        image = np.empty((height, width, 3), dtype=np.uint8)
        each = max(1, int(_BLOCK / shrink))
        for top in range(0, height, each):
            for left in range(0, width, each):
                part = image[top : top + each, left : left + each]
                part[:] = self._shrunk(number, left, top, part.shape[1], part.shape[0], shrink)
        return Thumbnail(image=image, scale=scale, mpp=scale * self.mpp)

    def _shrunk(
        self, level: int, left: int, top: int, width: int, height: int, shrink: float
    ) -> Pixels:
        across = np.arange(left, left + width + 1) * shrink
        down = np.arange(top, top + height + 1) * shrink
        x, y = floor(across[0]), floor(down[0])
        block = self.block(level, x, y, ceil(across[-1]) - x, ceil(down[-1]) - y)
        rows = _means(block, down - y).swapaxes(0, 1)
        return np.rint(_means(rows, across - x).swapaxes(0, 1)).astype(np.uint8)

    def _level_for(self, ratio: float) -> int:
        """Return the coarsest level that is as fine as wanted, to two per cent.

        Scanners mean 0.25 um/px and say 0.2527: to read four times the pixels for that is no gain.
        """
        fine = [n for n, level in enumerate(self.levels) if level.downsample <= 1.02 * ratio]
        return max(fine, key=lambda n: self.levels[n].downsample, default=0)


def find_slides(
    paths: Iterable[str | Path], *, exclude: str | Path | None = None
) -> dict[str, Path]:
    """Return slides by name: the files given, and those in the folders given.

    A folder of DICOM files is one slide, called as the folder. Pictures that lie in the folder
    `exclude` are none.
    """
    found: dict[str, Path] = {}
    barred = None if exclude is None else as_path(exclude).resolve()
    for path in map(as_path, paths):
        if not path.exists():
            raise SlideError(f"There is no slide or folder {path}. Check its name.")
        if path.suffix.lower() == ".dcm":
            path = path.absolute().parent
        own = _in_folder(path) if path.is_dir() else [path]
        own = [file for file in own if barred not in file.resolve().parents]
        if not own:
            raise SlideError(f"There are no slides in {path}. Known: {', '.join(SLIDE_SUFFIXES)}.")
        for file in own:
            name = slide_name_of(file)
            if found.setdefault(name, file) != file:
                raise SlideError(
                    f"{found[name]} and {file} are both called '{name}'. Give one of them another "
                    "name, or encode them into different folders."
                )
    return found


def slide_name_of(path: Path) -> str:
    """Return the name of the slide in a file; DICOM files are called as their folder."""
    path = path.absolute()
    return path.parent.name if path.suffix.lower() == ".dcm" else slide_name(path.name)


def _in_folder(folder: Path) -> list[Path]:
    def is_slide(path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        of_ours = path.parent.name == "qc" and any(
            (path.parent.parent / name).exists() for name in (".locks", "qc.csv")
        )
        return not (hidden or of_ours) and path.is_file()

    files = sorted(
        p for p in folder.rglob("*") if p.suffix.lower() in SLIDE_SUFFIXES and is_slide(p)
    )
    dicom = sorted({file.parent for file in files if file.suffix.lower() == ".dcm"})
    return [file for file in files if file.suffix.lower() != ".dcm"] + dicom


def _fetched(path: RemotePath, scratch: Path) -> Path:
    """Copy a slide to local scratch with all that belongs to it, and return what to open."""
    folder = path.parent if path.suffix.lower() == ".dcm" else path
    if folder is path and path.is_file():
        beside = path.with_suffix("")  # where MIRAX has its pixels
        files = [path, *(beside.rglob("*") if path.suffix.lower() == ".mrxs" else ())]
        download_all(files, path.parent, scratch)
        return scratch / path.name
    download_all(list(folder.glob("*.dcm")), folder, scratch / folder.name)
    return _in_dicom_folder(scratch / folder.name)


def _in_dicom_folder(folder: Path) -> Path:
    """Return a file of the one slide that a folder of DICOM files holds."""
    files = sorted(folder.glob("*.dcm"))
    if not files:
        raise SlideError(f"{folder} is a folder without DICOM files. Pass a slide.")
    uids = set()
    for file in files:
        with _opened(file) as slide:
            uids.add(slide.properties.get("dicom.SeriesInstanceUID"))
    if len(uids) > 1:
        raise SlideError(
            f"{folder} holds {len(uids)} DICOM series. Give each slide a folder of its own."
        )
    return files[0]


def _opened(path: Path) -> openslide.OpenSlide:
    try:
        return openslide.OpenSlide(path)
    except openslide.OpenSlideError as problem:
        raise SlideError(
            f"{path} cannot be opened ({first_line(problem)}). It is damaged, cut short, or a "
            "part of it is missing. Copy it again."
        ) from problem


def _levels(sizes: Sequence[tuple[int, int]]) -> tuple[Level, ...]:
    return tuple(Level(size=size, downsample=exact_downsample(sizes[0], size)) for size in sizes)


def exact_downsample(full: tuple[int, int], part: tuple[int, int]) -> float:
    """Return how many level-0 pixels a pixel of a level is wide.

    Sizes are whole, ratios need not look it: 20001 / 10000 and 20001 / 10001 are both 2, rounded
    down and up. Only where no whole number explains both sides is the quotient the ratio.
    """
    rough = (full[0] / part[0] * full[1] / part[1]) ** 0.5
    for whole in (2.0 ** round(np.log2(rough)), float(round(rough))):
        if all(abs(a / whole - b) < 1 for a, b in zip(full, part, strict=True)):
            return whole
    return rough


def _properties(image: Any) -> dict[str, str]:
    """Return the scale of a plain image if its resolution can be one of a microscope."""
    scales = {"x": 1000 / image.xres, "y": 1000 / image.yres}  # libvips counts in pixels per mm
    if not all(FINEST_MPP <= scale <= COARSEST_MPP for scale in scales.values()):
        return {}  # 72 dots per inch are for printers
    return {f"openslide.mpp-{axis}": str(scale) for axis, scale in scales.items()}


def _means(rows: NDArray[Any], edges: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the mean row between edges, which may cut through rows; Pillow's box filter cannot."""
    place = np.arange(len(rows))
    inside = np.minimum(edges[1:, None], place + 1) - np.maximum(edges[:-1, None], place)
    weights = csr_array(inside.clip(0, 1) / np.diff(edges)[:, None], dtype=np.float32)
    means = weights @ rows.reshape(len(rows), -1)
    return means.reshape(-1, *rows.shape[1:])


def _sane(mpp: float, of: str, remedy: str = "") -> float:
    if not FINEST_MPP <= mpp <= COARSEST_MPP:
        raise SlideError(
            f"{of} says {mpp:g} um/px, which no microscope has; {FINEST_MPP:g} to "
            f"{COARSEST_MPP:g} can be. {remedy}".rstrip()
        )
    return mpp
