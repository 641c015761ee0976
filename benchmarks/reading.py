"""Measure the speed of reading patches and stored features, against OpenSlide and h5py.

    python benchmarks/reading.py --out reading.md

It generates a slide and bags in a temporary folder. The readers alternate, and the median over the
rounds is reported. Files are in the page cache, so the disk is not measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from os import cpu_count
from pathlib import Path
from statistics import median
from subprocess import run
from time import perf_counter, process_time
from typing import Any, NamedTuple

import h5py
import numpy as np
import openslide
import pyvips
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from caprmil.features import bags
from caprmil.io.atomic import write_text
from caprmil.slides.isolated_file import process_ids
from caprmil.slides.readers import Pixels
from caprmil.slides.slide import Slide

PX = 224
OPENSLIDE_CACHE = 256 * 2**20  # bytes; the default is smaller than two rows of tiles


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurement."""

    repeats: tuple[int, int] = (8, 6)  # of the texture, in x and y
    texture: int = 2048  # side in pixels
    patches: int = 700  # per round
    rounds: int = 7
    memory: tuple[int, ...] = (1_000, 10_000, 100_000)  # patches
    bag: tuple[int, int] = (10_000, 1024)


QUICK = Sizes(repeats=(2, 1), texture=1024, patches=9, rounds=1, memory=(10, 100), bag=(300, 32))


class Cost(NamedTuple):
    """Seconds of one round, or their median."""

    cpu: float
    wall: float


def timed(action: Callable[[], object]) -> Cost:
    cpu, wall = cpu_seconds(), perf_counter()
    action()
    return Cost(cpu_seconds() - cpu, perf_counter() - wall)


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of the processes that read open slides."""
    total = process_time()
    for pid in process_ids():
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError, IndexError):  # it has ended meanwhile
                total += int(stat.read_text().split()[0]) / 1e9
    return total


def median_cost(costs: Sequence[Cost]) -> Cost:
    return Cost(median(cost.cpu for cost in costs), median(cost.wall for cost in costs))


def markdown(rows: Sequence[Sequence[object]]) -> str:
    head, *body = [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"| {row} |" for row in (head, " | ".join(["---"] * len(rows[0])), *body))


def make_slide(path: Path, sizes: Sizes) -> None:
    """Write a pyramid of 256 px JPEG tiles at 0.25 um/px that resembles tissue."""
    rng = np.random.default_rng(0)
    side = sizes.texture
    blobs, nuclei, grain = (
        gaussian_filter(rng.normal(size=(side, side)).astype(np.float32), sigma, mode="wrap")
        for sigma in (40, 6, 1)
    )
    eosin = 0.25 + 0.15 * np.tanh(blobs / blobs.std())
    haematoxylin = 0.5 * (nuclei > 1.2 * nuclei.std()) + 0.06 * grain / grain.std()
    density = np.multiply.outer(eosin, (0.1, 1.0, 0.3))
    density += np.multiply.outer(haematoxylin, (0.65, 0.7, 0.3))
    texture = (245 * np.exp(-density)).clip(0, 255).astype(np.uint8)
    image = pyvips.Image.new_from_array(texture).replicate(*sizes.repeats)
    image.copy(xres=4000, yres=4000).tiffsave(
        str(path), compression="jpeg", Q=85, tile=True, tile_width=256, tile_height=256,
        pyramid=True, bigtiff=True,
    )  # fmt: skip


class Square(NamedTuple):
    """One patch, in level-0 pixels."""

    x: int
    y: int
    side: float


def grid(size: tuple[int, int], side: float, count: int) -> Iterator[Square]:
    """Yield up to `count` squares in row-major order."""
    across, down = int(size[0] // side), int(size[1] // side)
    for n in range(min(count, across * down)):
        yield Square(round(n % across * side), round(n // across * side), side)


def read_caprmil(slide: Slide, square: Square) -> Pixels:
    return slide.read(*square, PX)


def read_openslide(slide: openslide.OpenSlide, level: int, square: Square) -> Pixels:
    """Return a patch as usually read with OpenSlide: an RGB region, resized if necessary."""
    width = square.side / slide.level_downsamples[level]
    region = slide.read_region((square.x, square.y), level, (ceil(width), ceil(width)))
    image = region.convert("RGB")
    if image.width != PX:
        image = image.resize((PX, PX), Image.Resampling.BILINEAR, box=(0, 0, width, width))
    return np.array(image)


@dataclass(frozen=True)
class Case:
    """One row of the table: what is read, and from which level."""

    title: str
    side: float
    level: int
    shuffled: bool = False
    fast: bool = True


CASES = (
    Case("level 0, row order", PX, 0),
    Case("level 1, row order", 2 * PX, 1),
    Case("level 2, row order", 4 * PX, 2),
    Case("0.2527 to 0.5 um/px (level 1), row order", PX * 0.5 / 0.2527, 1),
    Case("0.263 to 0.5 um/px (level 0), row order", PX * 0.5 / 0.263, 0),
    Case("level 0, random order", PX, 0, shuffled=True),
    Case("level 0, row order, OpenSlide reader", PX, 0, fast=False),
)


def squares_of(case: Case, size: tuple[int, int], count: int) -> list[Square]:
    if not case.shuffled:
        return list(grid(size, case.side, count))
    squares = list(grid(size, case.side, sys.maxsize))
    return [squares[n] for n in np.random.default_rng(0).permutation(len(squares))[:count]]


def compare(path: Path, case: Case, sizes: Sizes) -> list[object]:
    """Return one row of the table. Both readers open the slide again in every round."""
    costs: tuple[list[Cost], list[Cost]] = ([], [])
    squares: list[Square] = []
    off: list[tuple[int, float]] = []
    for round_number in range(sizes.rounds):
        with Slide(path, fast=case.fast) as slide, openslide.OpenSlide(path) as other:
            other.set_cache(openslide.OpenSlideCache(OPENSLIDE_CACHE))
            squares = squares_of(case, slide.size, sizes.patches)
            readers = (partial(read_caprmil, slide), partial(read_openslide, other, case.level))
            for number in (0, 1) if round_number % 2 == 0 else (1, 0):
                costs[number].append(timed(partial(read_all, readers[number], squares)))
            if round_number == 0:
                off = [difference(*(read(square) for read in readers)) for square in squares]
    count, (ours, theirs) = len(squares), map(median_cost, costs)
    return [
        case.title,
        *(f"{count / seconds:,.0f}" for seconds in (ours.cpu, theirs.cpu)),
        f"{theirs.cpu / ours.cpu:.1f}",
        *(f"{count / seconds:,.0f}" for seconds in (ours.wall, theirs.wall)),
        f"{theirs.wall / ours.wall:.1f}",
        max(largest for largest, _ in off),
        f"{sum(mean for _, mean in off) / count:.2f}",
    ]


def read_all(read: Callable[[Square], Pixels], squares: Sequence[Square]) -> None:
    for square in squares:
        read(square)


def difference(one: Pixels, other: Pixels) -> tuple[int, float]:
    off = np.abs(one.astype(np.int16) - other)
    return int(off.max()), float(off.mean())


def patches_table(path: Path, sizes: Sizes) -> str:
    head = ["", "caprmil, per CPU s", "OpenSlide", "ratio", "caprmil, per s", "OpenSlide", "ratio"]
    rows = [compare(path, case, sizes) for case in CASES]
    return markdown([[*head, "largest difference", "mean difference"], *rows])


def opening_table(path: Path, sizes: Sizes) -> str:
    methods: dict[str, Callable[[], Any]] = {
        "caprmil": lambda: Slide(path),
        "caprmil, OpenSlide reader": lambda: Slide(path, fast=False),
        "OpenSlide": lambda: openslide.OpenSlide(path),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in methods}
    for _ in range(sizes.rounds):
        for name, method in methods.items():
            opened: list[Any] = []  # closed after the measurement: its process is part of it
            costs[name].append(timed(lambda opened=opened, method=method: opened.append(method())))  # type: ignore[misc]
            opened[0].close()
    rows = [[name, f"{1e3 * median_cost(own).cpu:.1f}"] for name, own in costs.items()]
    return markdown([["", "CPU ms"], *rows])


def peak_mib() -> float:
    """Return the peak resident memory of this process and of those that read open slides."""
    total = 0.0
    for pid in ("self", *process_ids()):
        with suppress(OSError, KeyError):  # it has ended meanwhile
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0])
    return total / 1024


def memory_of(path: Path, count: int, side: int) -> tuple[float, float]:
    """Read patches in row-major order; return the peak before and after, in MiB."""
    with Slide(path) as slide:
        before = peak_mib()
        for square in grid(slide.size, side, count):
            slide.read(*square, side)
        return before, peak_mib()  # while the process of the slide exists


def memory_table(path: Path, sizes: Sizes) -> str:
    """Return the table; each row is a separate process, and the last covers the whole slide."""
    largest = max(sizes.memory)
    with Slide(path) as slide:
        width, height = slide.size
    side = int((width * height / largest) ** 0.5)
    while (width // side) * (height // side) < largest:
        side -= 1
    rows: list[Sequence[object]] = [["patches", "MiB with the slide open", "peak MiB"]]
    for count in sizes.memory:
        command = [sys.executable, __file__, "--memory-of", str(path), str(count), str(side)]
        peaks = json.loads(run(command, check=True, capture_output=True, text=True).stdout)
        rows.append([f"{count:,}", *(f"{peak:.0f}" for peak in peaks)])
    return (
        f"Patches of {side} px in row order, each row measured in a new process. Its memory, that "
        f"of the slide's process and of their server are added.\n\n{markdown(rows)}"
    )


def write_as_trident(path: Path, features: NDArray[Any], coords: NDArray[Any]) -> None:
    """Write a file like TRIDENT's: one chunk per row, and attributes on the coordinates."""
    width = features.shape[1]
    with h5py.File(path, "x") as file:
        store = file.create_dataset(
            "features", data=features, chunks=(1, width), maxshape=(None, width)
        )
        store.attrs.update({"name": path.stem, "encoder": "uni_v1"})
        stored = file.create_dataset("coords", data=coords, chunks=(1, 2), maxshape=(None, 2))
        stored.attrs.update(
            {
                "patch_size": 224,
                "patch_size_level0": 448,
                "level0_magnification": 40,
                "target_magnification": 20,
                "overlap": 0,
            }
        )


def read_h5py(path: Path) -> object:
    """Return all features with plain h5py."""
    with h5py.File(path) as file:
        return file["features"][:]


def store_table(folder: Path, sizes: Sizes) -> str:
    rng = np.random.default_rng(0)
    features = rng.normal(size=sizes.bag).astype(np.float32)
    coords = np.stack(np.divmod(np.arange(len(features)), 100)[::-1], axis=1) * 448
    ours = "caprmil: float16, contiguous"
    files = {ours: folder / "ours.h5"}
    bags.write(files[ours], features, coords, step=448.0)
    for kind in ("float16", "float32"):
        files[f"TRIDENT: {kind}, one chunk per row"] = folder / f"{kind}.h5"
        write_as_trident(folder / f"{kind}.h5", features.astype(kind), coords)
    ways = {"h5py": read_h5py, "bags.read": bags.read}
    costs: dict[tuple[str, str], list[Cost]] = {(f, way): [] for f in files for way in ways}
    for round_number in range(1 + 3 * sizes.rounds):
        for file, way in costs:
            cost = timed(partial(ways[way], files[file]))
            if round_number:  # the first round fills the page cache
                costs[file, way].append(cost)
    rows: list[Sequence[object]] = [
        ["", "MiB", "h5py `[:]`, CPU ms", "relative", "`bags.read`, CPU ms", "relative"]
    ]
    for file, path in files.items():
        row = [file, f"{path.stat().st_size / 2**20:.1f}"]
        for way in ways:
            cpu = median_cost(costs[file, way]).cpu
            row += [f"{1e3 * cpu:.1f}", f"{cpu / median_cost(costs[ours, way]).cpu:.1f}"]
        rows.append(row)
    return markdown(rows)


def report(folder: Path, sizes: Sizes, command: str) -> str:
    path = folder / "slide.tif"
    make_slide(path, sizes)
    with Slide(path) as slide:
        width, height = slide.size
    versions = f"OpenSlide {openslide.__library_version__}, libvips " + ".".join(
        str(pyvips.version(n)) for n in range(3)
    )
    return f"""```bash
{command}
```

{versions}, h5py {h5py.__version__}, Python {sys.version.split()[0]}, {cpu_count()} cores, one
thread. Medians over {sizes.rounds} alternating round(s).

### Patches

{PX} px patches of a slide of {width:,} x {height:,} px with JPEG tiles of 256 px, {sizes.patches}
per round, each read separately. OpenSlide is `read_region`, converted to RGB, with Pillow's resize
where the scale differs, and a cache of {OPENSLIDE_CACHE // 2**20} MiB.

{patches_table(path, sizes)}

Opening the slide, not included above:

{opening_table(path, sizes)}

### Memory

{memory_table(path, sizes)}

### Storage

{sizes.bag[0]:,} patches of {sizes.bag[1]:,} features. `bags.read` also checks every value and
reads the coordinates. Medians over {3 * sizes.rounds} rounds.

{store_table(folder, sizes)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write them to --out.

    With --memory-of it is a child process that measures memory.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="a Markdown file for the tables")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
    args = parser.parse_args(arguments)
    if args.memory_of:
        path, count, side = args.memory_of
        print(json.dumps(memory_of(Path(path), int(count), int(side))))
        return
    command = "python benchmarks/reading.py" + " --quick" * args.quick
    with tempfile.TemporaryDirectory() as folder:
        made = report(Path(folder), QUICK if args.quick else Sizes(), command)
    print(made)
    if args.out:
        write_text(args.out, made, replace=True)


if __name__ == "__main__":
    main()
