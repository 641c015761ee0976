"""Measure the cost of Ray on one machine, and the gain of a second worker.

    OMP_NUM_THREADS=1 python benchmarks/cluster.py --page docs/cluster.md

200 small synthetic slides are encoded with lite0, and a run of 10 folds is trained: in a plain
loop, with one Ray worker, and with two. The three alternate, and the table has the medians. The
start of Ray, and that of its workers, are measured apart.
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import pyvips

from caprmil import encoders
from caprmil.cohort.folds import SplitConfig
from caprmil.executors import Executor, LocalExecutor, RayExecutor, Task, Worker
from caprmil.executors.job_status import status_path
from caprmil.features import bags
from caprmil.features.extract import Extraction
from caprmil.features.settings import ExtractionConfig
from caprmil.io.progress import Bar
from caprmil.slides.patches import PatchConfig
from caprmil.slides.slide import find_slides
from caprmil.synthetic import RareSignal
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from caprmil.training.train_config import TrainConfig
from record import Page

Workload = Callable[[Executor, Path], bytes]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The size of the benchmark."""

    slides: int = 200
    folds: int = 10
    epochs: int = 6
    patches: tuple[int, int] = (1000, 2000)
    rounds: int = 3
    bags: int = 60  # that the folds are made of


QUICK = Sizes(slides=2, folds=2, epochs=1, patches=(10, 20), rounds=1, bags=16)


class Idle(Worker):
    """Does nothing. What remains is the time to start a worker."""

    def run(self, task: Task, report: Bar) -> None:  # noqa: ARG002
        import torch  # noqa: F401  what every worker needs


def make_slides(folder: Path, count: int) -> None:
    """Write small slides: glass with a purple block, of about 30 patches each."""
    for number in range(count):
        rng = np.random.default_rng(number)
        image = np.full((1400, 1600, 3), 240.0, np.float32) + rng.normal(0, 1.5, (1400, 1600, 1))
        image[150:1250, 200:1400] = (180, 100, 160)
        image[150:1250, 200:1400] += rng.normal(0, 25, (1100, 1200, 3))
        options = {"tile": True, "pyramid": True, "compression": "jpeg", "xres": 1000, "yres": 1000}
        whole = pyvips.Image.new_from_array(image.clip(0, 255).astype(np.uint8))
        whole.copy(xres=1, yres=1).tiffsave(str(folder / f"s{number:03d}.tiff"), **options)


def encode(slides: dict[str, Path], executor: Executor, out: Path) -> bytes:
    """Encode all slides, and return the features."""
    load = partial(encoders.load, "lite0", device="cpu")
    job = Extraction(
        out=out, encoder=load(), config=ExtractionConfig(patches=PatchConfig(px=224, mpp=1.0)),
        mpp=1.0, load_encoder=load,
    )  # fmt: skip
    job.run(slides, executor=executor)
    return b"".join(bags.read(out / f"{name}.h5").features.tobytes() for name in slides)


def train(recipe: Recipe, executor: Executor, out: Path) -> bytes:
    """Train all folds, and return the predictions."""
    run = cross_validate(recipe, out, device="cpu", progress=False, executor=executor)
    return (run.folder / "predictions.csv").read_bytes()


Seconds = dict[str, list[float]]  # of each executor, by round


def measure(
    workload: Workload, executors: dict[str, Executor], folder: Path, rounds: int
) -> Seconds:
    """Return the seconds of each executor. All must have the same results."""
    seconds: Seconds = {name: [] for name in executors}
    results = set()
    for number in range(rounds):
        order = list(executors) if number % 2 else list(reversed(executors))
        for name in order:
            began = perf_counter()
            results.add(workload(executors[name], folder / f"{number} {name}"))
            seconds[name].append(perf_counter() - began)
            print(f"round {number + 1}: {name}, {seconds[name][-1]:.1f} s", file=sys.stderr)
    if len(results) > 1:
        raise SystemExit("The results differ, so their times cannot be compared.")
    return seconds


def time_start(executor: RayExecutor, folder: Path) -> float:
    """Return the seconds until a worker has started and finished an empty task."""
    folder.mkdir(exist_ok=True)
    began = perf_counter()
    list(executor.run([Task("idle", status_path(folder, "idle"))], Idle, lambda *_: None))
    return perf_counter() - began


def ratio(one: list[float], other: list[float], form: str) -> str:
    """Return the median and the range of the ratio of two lists of times."""
    shares = sorted(a / b for a, b in zip(one, other, strict=True))
    return f"{median(shares):{form}} [{shares[0]:{form}} to {shares[-1]:{form}}]"


def section(sizes: Sizes, found: dict[str, Seconds], init: float, start: float) -> str:
    head = ["workload", "plain loop", "Ray, 1 worker", "Ray, 2 workers"]
    head += ["1 worker / plain loop", "1 worker / 2 workers"]
    rows = [f"| {' | '.join(head)} |", f"| --- {'| --: ' * 5}|"]
    for title, side in found.items():
        plain, one, two = side.values()
        cells = [f"{median(seconds):.1f} s" for seconds in (plain, one, two)]
        cells += [ratio(one, plain, ".2f"), ratio(one, two, ".2f")]
        rows.append(f"| {title} | {' | '.join(cells)} |")
    about = (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, one "
        f"thread per worker. Medians of {sizes.rounds} rounds, in turn; ratios within a round; "
        f"results are bit-identical. Times with Ray include the start of the workers (one worker: "
        f"{start:.1f} s), but not the start of Ray itself ({init:.1f} s, once per command)."
    )
    return "\n".join(rows) + f"\n\n{about}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="a page with markers, for the table")
    parser.add_argument("--quick", action="store_true", help="Only check that it runs.")
    given = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit("Set OMP_NUM_THREADS=1: two workers need a core each.")
    sizes = QUICK if given.quick else Sizes()
    page = Page(given.page, "benchmarks/cluster.py", "What Ray costs") if given.page else None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "slides").mkdir()
        make_slides(folder / "slides", sizes.slides)
        slides = find_slides([folder / "slides"])
        study = RareSignal(
            slides=sizes.bags, width=256, patches=sizes.patches, signal=0.1, stain=0.5
        )
        recipe = Recipe(
            cohort=str(study.write(folder / "cohort")),
            features=str(folder / "cohort" / "features"),
            splits=SplitConfig(folds=sizes.folds, validation=0.2),
            train=TrainConfig(
                epochs=sizes.epochs, warmup_epochs=min(1, sizes.epochs - 1), patience=sizes.epochs
            ),
            loggers={},
        )
        began = perf_counter()
        with RayExecutor(max_workers=1) as one:
            init = perf_counter() - began
            start = time_start(one, folder / "idle")
            executors: dict[str, Executor] = {
                "plain": LocalExecutor(),
                "one": one,
                "two": RayExecutor(max_workers=2),
            }
            workloads: dict[str, Workload] = {
                f"{sizes.slides} slides encoded": partial(encode, slides),
                f"{sizes.folds} folds trained": partial(train, recipe),
            }
            found = {
                title: measure(workload, executors, folder / title, sizes.rounds)
                for title, workload in workloads.items()
            }
    text = section(sizes, found, init, start)
    print(text)
    if page:
        page.write(text)


if __name__ == "__main__":
    main()
