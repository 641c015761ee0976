"""Measure where a user waits: whole commands, in processor time, by phase.

    python benchmarks/journey.py
    python benchmarks/journey.py --only train-small --small 200 500 --epochs 1
    python benchmarks/journey.py --only predict-bag explain view --run runs/first

It generates bags and a slide in a temporary folder and runs `caprmil` on them, each command in a
new process with one thread. `import torch` is measured before each, as the unit of starting.
"""

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import sleep
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np

from caprmil.features import bags
from caprmil.runs.run import Run
from caprmil.synthetic import Section
from phases import PHASES
from record import Page

RECORDER = Path(__file__).with_name("phases.py")
TRAINING = ("forward", "backward", "optimiser")
AROUND = ("scoring", "figures")
TITLES = {
    "demo": "`demo`",
    "train-large": "`train`, large bags",
    "train-small": "`train`, small bags",
    "encode": "`encode` of a slide",
    "predict-bag": "`predict` of a bag",
    "predict-slide": "`predict` of a slide",
    "explain": "`explain` of a bag",
    "report": "`report` of a run",
    "view": "`view` to the first slide",
}
OF_SECONDS = ("predict-bag", "predict-slide", "explain", "encode", "view", "report")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurement."""

    large: tuple[int, int] = (200, 5_000)  # bags, and patches in each
    small: tuple[int, int] = (2_000, 500)
    width: int = 1024  # features per patch
    slide: int = 6_000  # pixels of a side
    epochs: int = 3
    folds: int = 2
    rounds: int = 5  # of commands that take seconds
    threads: int = 1  # of the commands


class Measured(NamedTuple):
    """A command: its phases in seconds of processor time, and seconds on the clock."""

    phases: dict[str, float]
    wall: float
    torch: float  # processor seconds of `import torch`, just before

    @property
    def cpu(self) -> float:
        return sum(self.phases.values())

    def share(self, *names: str) -> float:
        return sum(self.phases[name] for name in names) / self.cpu


def environment(threads: int = 1) -> dict[str, str]:
    """Return the environment of the commands. With one thread, phases can be told apart."""
    number = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, **number, "PYTHONUNBUFFERED": "1"}


def import_torch() -> float:
    """Return the processor seconds of a process that imports torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(
    *words: object,
    threads: int = 1,
    during: Callable[["subprocess.Popen[str]"], None] | None = None,
) -> Measured:
    """Run a command and return where its time went; `during` is called while it runs."""
    unit = import_torch()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "phases.json"
        command = [sys.executable, str(RECORDER), str(result), *map(str, words)]
        with subprocess.Popen(
            command,
            env=environment(threads),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                if during is not None:
                    during(process)
            except BaseException:
                process.kill()
                raise
            printed = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{printed}")
        found = json.loads(result.read_text(encoding="utf-8"))
    return Measured(found["phases"], found["wall"], unit)


def middle(found: Sequence[Measured]) -> Measured:
    """Return the median of each number."""
    phases = {name: median(one.phases[name] for one in found) for name in PHASES}
    return Measured(phases, median(m.wall for m in found), median(m.torch for m in found))


def write_bags(folder: Path, count: int, patches: int, width: int) -> None:
    """Write bags of two classes, and their table."""
    rng, rows = np.random.default_rng(0), np.arange(patches)
    side = int(np.ceil(np.sqrt(patches)))
    coords = np.stack([rows % side, rows // side], axis=1) * 256
    (folder / "features").mkdir(parents=True)
    names = [f"slide_{number:05d}" for number in range(count)]
    for number, name in enumerate(names):
        features = rng.standard_normal((patches, width), dtype=np.float32)
        features[: max(1, patches // 20)] += 0.5 * (number % 2)
        path = folder / "features" / f"{name}.h5"
        bags.write(path, features, coords, encoder="synthetic", mpp=1.0, step=256, patch_px=256)
    lines = [f"{name},{'ab'[number % 2]}\n" for number, name in enumerate(names)]
    (folder / "labels.csv").write_text("slide,label\n" + "".join(lines), encoding="utf-8")


def open_first_slide(process: "subprocess.Popen[str]") -> None:
    """Ask a viewer for what the page asks for until it shows the first slide, and stop it."""
    address = None
    while address is None:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            return  # it ended: `measure` reports its exit code
        address = re.search(r"Open (\S+)", line)
    home = address[1]
    page = get(home).decode()
    for name in re.findall(r'(?:src|href)="(static/[^"]+)"', page):
        get(home + name)
    get(home + "api/run")
    first = json.loads(get(home + "api/slides"))["slides"][0]["id"]
    get(f"{home}api/slides/{first}")
    get(f"{home}api/slides/{first}/numbers")
    process.send_signal(signal.SIGINT)


def get(address: str) -> bytes:
    """Return what a server answers, as soon as it listens."""
    for _ in range(400):
        try:
            with urlopen(address) as reply:
                return bytes(reply.read())
        except ConnectionError:
            sleep(0.05)
    raise RuntimeError(f"{address} does not answer.")


class Journeys:
    """The commands. They share a demo, unless a run is given, and its first bag."""

    def __init__(self, folder: Path, sizes: Sizes, run: Path | None) -> None:
        self.folder, self.sizes, self.run, self.calls = folder, sizes, run, 0

    def measure(self, name: str) -> Measured:
        """Return the median of a journey over its rounds."""
        rounds = self.sizes.rounds if name in OF_SECONDS else 1
        function = getattr(self, name.replace("-", "_"))
        return middle([function() for _ in range(rounds)])

    def _measure(
        self, *words: object, during: Callable[["subprocess.Popen[str]"], None] | None = None
    ) -> Measured:
        return measure(*words, threads=self.sizes.threads, during=during)

    def new(self) -> Path:
        """Return a path that does not exist."""
        self.calls += 1
        return self.folder / f"out-{self.calls}"

    def demo(self) -> Measured:
        out = self.new()
        found = self._measure("demo", "--out", out)
        self.run = self.run or out / "caprmil"
        return found

    def train_large(self) -> Measured:
        return self._train("large", *self.sizes.large)

    def train_small(self) -> Measured:
        return self._train("small", *self.sizes.small, "--set", "train.batch_size=16")

    def _train(self, name: str, count: int, patches: int, *more: object) -> Measured:
        folder, sizes = self.folder / name, self.sizes
        write_bags(folder, count, patches, sizes.width)
        size = ("--epochs", sizes.epochs, "--folds", sizes.folds, *more)
        table, features = folder / "labels.csv", folder / "features"
        return self._measure("train", table, "--features", features, "--out", self.new(), *size)

    def encode(self) -> Measured:
        return self._measure("encode", self.slide(), "--out", self.new())

    def predict_bag(self) -> Measured:
        return self._measure("predict", self.trained(), self.bag())

    def predict_slide(self) -> Measured:
        return self._measure("predict", self.trained(), self.slide())

    def explain(self) -> Measured:
        return self._measure("explain", self.trained(), self.bag(), "--out", self.new())

    def report(self) -> Measured:
        return self._measure("report", self.trained(), "--out", self.new().with_suffix(".html"))

    def view(self) -> Measured:
        return self._measure("view", self.trained(), "--no-open", during=open_first_slide)

    def trained(self) -> Path:
        """Return the run that predicts."""
        if self.run is None:
            self.demo()
        assert self.run is not None
        return self.run

    def bag(self) -> Path:
        return Path(next(iter(Run(self.trained()).paths.values())))

    def slide(self) -> Path:
        """Return a slide that is generated."""
        path, side = self.folder / "slide.tiff", self.sizes.slide
        if not path.exists():
            Section(width=side, height=side, tumour=0.05).write(path)
        return path


def tables(found: dict[str, Measured], sizes: Sizes, command: str) -> Iterator[str]:
    """Yield the parts of the page."""
    large, small = (f"{count:,} bags of {n:,} patches" for count, n in (sizes.large, sizes.small))
    yield f"""```bash
{command}
```

Processor time with {sizes.threads} thread(s); large bags are {large}, small bags {small}, 16 a
step, both of {sizes.width:,} features, with {sizes.folds} folds of {sizes.epochs} epochs.
The slide has {sizes.slide:,} x {sizes.slide:,} pixels.
Commands that take seconds are medians of {sizes.rounds}.
The last column is in units of `import torch`, measured beside each.
"""
    rows: list[Sequence[str]] = [
        ("", "CPU s", "seconds", "training steps", "scoring and figures", "times torch")
    ]
    for name, one in found.items():
        shares = [
            f"{one.share(*part):.0%}" if one.phases["forward"] else "-"
            for part in (TRAINING, AROUND)
        ]
        ratio = f"{one.cpu / one.torch:.2f}"
        rows.append((TITLES[name], f"{one.cpu:.2f}", f"{one.wall:.1f}", *shares, ratio))
    yield markdown(rows)
    yield "\nThe same time by phase, in seconds; below 0.005 it is left out.\n"
    shown = [name for name in PHASES if any(one.phases[name] >= 0.005 for one in found.values())]
    rows = [("", *(TITLES[name] for name in found))]
    for phase in shown:
        cells = (one.phases[phase] for one in found.values())
        rows.append((phase, *(f"{cell:.2f}" if cell >= 0.005 else "" for cell in cells)))
    yield markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    lines.insert(1, f"| --- |{' ---: |' * (len(rows[0]) - 1)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print each journey when it is complete, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES), metavar="NAME")
    parser.add_argument("--run", type=Path, help="predict with this run; default: that of the demo")
    for name in ("large", "small"):
        size = getattr(Sizes, name)
        parser.add_argument(f"--{name}", type=int, nargs=2, default=size, metavar="N")
    for name in ("width", "slide", "epochs", "folds", "rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    parser.add_argument("--page", action="store_true", help="write the page also of a part")
    args = vars(parser.parse_args(arguments))
    out, only, run, whole = (args.pop(name) for name in ("out", "only", "run", "page"))
    sizes = replace(Sizes(**args), large=tuple(args["large"]), small=tuple(args["small"]))
    page = Page(out, "benchmarks/journey.py", "Performance")
    given = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python benchmarks/journey.py", *given])
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        journeys = Journeys(Path(folder), sizes, run)
        for name in only:
            found[name] = one = journeys.measure(name)
            print(f"{name}: {one.cpu:.2f} CPU s, {one.wall:.1f} s", flush=True)
    text = "\n".join(tables(found, sizes, command))
    print(text)
    if whole or set(only) == set(TITLES):
        page.write(text)
    else:  # the rows of the page that were not measured would be lost
        print(f"{out} is as it was: this was a part. `--page` writes it.")


if __name__ == "__main__":
    main()
