"""Measure time and memory of inference and training steps.

    python benchmarks/speed.py

Each job runs in a new process. Variants that are compared alternate, and the median over the rounds
is reported: of CPU time on one thread, which is stable on a shared machine, and of wall time on
two. Results are stored in a JSON lines file next to the page, so a stopped run can be resumed;
`--again` repeats stored measurements. `--only page` writes the page from the stored results.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from caprmil import models
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.experiments.cost import LiveTensors
from record import Page, Record
from speed_variants import GROUPS, PLAIN, VARIANTS, WHOLE, Unavailable, Variant

WORKS = ("infer", "train")
PROFILED = (WHOLE, PLAIN)  # variants whose time is divided into parts
PROFILE = "profile"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the measurement."""

    in_dim: int = 1024
    sizes: tuple[int, ...] = (1_000, 10_000, 50_000, 200_000)
    seconds: float = 4.0  # per job, about: as many rounds as fit, within these bounds
    rounds: tuple[int, int] = (3, 15)
    profiled: int = 10_000  # patches
    wall: bool = True

    @property
    def digest(self) -> str:
        table = {**asdict(self), "torch": torch.__version__, "sizes": None}
        return sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]


QUICK = Settings(in_dim=32, sizes=(100, 300), seconds=0.0, rounds=(1, 1), profiled=300)


class Job(NamedTuple):
    """A group of variants, a size of bags, and the work: inference or training."""

    group: str
    patches: int
    work: str


@dataclass(frozen=True)
class Result:
    """The result of a job: figures of each variant, by name."""

    group: str
    patches: int
    work: str
    settings: str  # digest of the settings
    code: str  # digest of the models' code
    figures: dict[str, dict[str, float]]
    rounds: dict[str, list[float]]  # CPU seconds of each variant, per round
    seconds: float  # of the job

    @property
    def job(self) -> Job:
        return Job(self.group, self.patches, self.work)


def code_digest() -> str:
    """Return a digest of the models' code, to detect rows of different versions on a page."""
    files = sorted(Path(models.__path__[0]).glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def plan(groups: Sequence[str], sizes: Sequence[int], settings: Settings) -> list[Job]:
    """Return the jobs, small bags first."""
    own = {group: GROUPS[group].only for group in groups if group != PROFILE}
    jobs = [
        Job(group, size, work)
        for size in sorted({*sizes, *(only for only in own.values() if only)})
        for group, only in own.items()
        if (size == only if only else size in sizes)
        for work in WORKS
        if size <= GROUPS[group].largest[work]
    ]
    if PROFILE in groups:
        jobs += [Job(PROFILE, settings.profiled, work) for work in WORKS]
    return jobs


@lru_cache(maxsize=1)
def bag(n: int, in_dim: int) -> Tensor:
    return torch.randn(1, n, in_dim, generator=torch.Generator().manual_seed(0))


def build_variants(names: Sequence[str], in_dim: int) -> dict[str, Variant]:
    """Return the variants that are available, and print those that are not."""
    built = {}
    for name in names:
        torch.manual_seed(0)
        try:
            built[name] = VARIANTS[name](in_dim)
        except Unavailable as reason:
            print_once(f"{name} is left out: {reason}.")
    return built


@lru_cache
def print_once(line: str) -> None:
    print(line)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Clock = Callable[[], float]


def alternate(
    works: Mapping[str, Callable[[], object]], clock: Clock, settings: Settings
) -> dict[str, list[float]]:
    """Return the times of each variant. A first round is not counted: it allocates memory."""
    start = perf_counter()
    for work in works.values():
        work()
    fewest, most = settings.rounds
    fitting = int(settings.seconds / max(perf_counter() - start, 1e-9))
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(min(max(fewest, fitting), most)):
        # The order alternates, so that no variant always runs after the same one.
        for name, work in list(works.items())[:: -1 if number % 2 else 1]:
            begin = clock()
            work()
            times[name].append(clock() - begin)
    return times


def peak(variant: Variant, work: str, features: Tensor) -> int:
    """Return the peak of bytes beyond the model and the bag."""
    with LiveTensors(exclude=[*variant.own(), features]) as live:
        getattr(variant, work)(features)
    return live.peak


def measure(job: Job, settings: Settings) -> Result:
    """Return the result of a job."""
    start = perf_counter()
    if job.group == PROFILE:
        found = {name: parts(name, job, settings) for name in PROFILED}
        rounds = dict[str, list[float]]()
    else:
        found, rounds = compare(job, settings)
    seconds = perf_counter() - start
    return Result(*job, settings.digest, code_digest(), found, rounds, seconds)


def compare(
    job: Job, settings: Settings
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Return seconds with quartiles and bytes of each variant, and the seconds of every round."""
    features = bag(job.patches, settings.in_dim)
    variants = build_variants(GROUPS[job.group].variants, settings.in_dim)
    works = {name: partial(getattr(each, job.work), features) for name, each in variants.items()}
    wall = {name: [np.nan] for name in works}
    with TemporaryDirectory() as folder:
        for variant in variants.values():
            variant.prepare(features, Path(folder))
        peaks = {name: peak(each, job.work, features) for name, each in variants.items()}
        with threads(1):
            cpu = alternate(works, process_time, settings)
        if settings.wall:
            with threads(2):
                wall = alternate(works, perf_counter, settings)
    found = {
        name: {
            "cpu": float(np.median(cpu[name])),
            "cpu_low": float(np.quantile(cpu[name], 0.25)),
            "cpu_high": float(np.quantile(cpu[name], 0.75)),
            "wall": float(np.median(wall[name])),
            "rounds": len(cpu[name]),
            "peak": peaks[name],
        }
        for name in variants
    }
    return found, cpu


PARTS: dict[str, tuple[str, ...]] = {
    "AdamW": ("Optimizer", "adam"),
    "GELU": ("gelu",),
    "dropout": ("drop", "bernoulli", "random_", "aten::ge"),
    "LayerNorm": ("layer_norm", "layernorm"),
    "attention among tokens": ("scaled_dot_product",),
    "softmax": ("softmax",),
    "products": ("linear", "matmul", "mm", "addbmm", "einsum", "ToCopyMatmul"),
    "sums over patches": ("aten::sum", "aten::mean", "SumBackward"),
    "adding and multiplying": ("aten::add", "aten::mul", "aten::div", "MulBackward", "DivBackward"),
    "copies": ("copy", "contiguous", "clone", "cat", "aten::to", "reshape", "fill", "zero"),
}
"""Parts, and what the names of their operations contain. The first match counts."""


def part_of(names: Sequence[str]) -> str:
    """Return the part of an operation, from the names of its parents, the outermost first."""
    for part, words in PARTS.items():
        if any(word.lower() in name.lower() for name in names for word in words):
            return part
    return "rest"


def parts(name: str, job: Job, settings: Settings) -> dict[str, float]:
    """Return the seconds of each part, on one thread, a mean over some rounds.

    This is almost CPU time: the profiler has a wall clock, but counts only within operations.
    """
    (variant,) = build_variants([name], settings.in_dim).values()
    features = bag(job.patches, settings.in_dim)
    work = partial(getattr(variant, job.work), features)
    rounds, sums = settings.rounds[0] + 2, dict[str, float]()
    with threads(1):
        work()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(rounds):
                work()
    for event in profiled.events() or []:
        names, parent = [], event
        while parent is not None:
            names.append(parent.name)
            parent = parent.cpu_parent
        part = part_of(names[::-1])
        sums[part] = sums.get(part, 0.0) + event.self_cpu_time_total / 1e6 / rounds
    return sums


def remove_results(record: Record[Result], jobs: Sequence[Job]) -> None:
    """Remove stored results of these jobs from the file, so that they are measured again."""
    if record.path.exists():
        kept = [result for result in record.kept() if result.job not in set(jobs)]
        record.path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in kept))


def chosen(given: Sequence[str] | None, known: Sequence[str], kind: str) -> list[str]:
    for name in given or ():
        if name not in known:
            raise UnknownNameError(kind, name, known)
    return [name for name in known if not given or name in given]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and write the page and its plots if all of it was measured."""
    import speed_page

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--only", nargs="*", help=f"groups: {', '.join(GROUPS)}, {PROFILE}; page")
    parser.add_argument("--models", nargs="*", help="variants: the groups that contain one of them")
    parser.add_argument("--sizes", nargs="*", type=int, help="patches in a bag")
    parser.add_argument("--page", action="store_true", help="write the page also of a part")
    parser.add_argument("--again", action="store_true", help="measure stored results again")
    parser.add_argument("--cpu-only", action="store_true", help="no wall times: for busy machines")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
    args = parser.parse_args(arguments)
    settings = replace(QUICK if args.quick else Settings(), wall=not args.cpu_only)
    groups = chosen(args.only, [*GROUPS, PROFILE, "page"], "group")
    names = chosen(args.models, list(VARIANTS), "variant")
    groups = [
        group
        for group in groups
        if (group in GROUPS and set(GROUPS[group].variants) & set(names))
        or (group == PROFILE and not args.models)
    ]
    sizes = args.sizes or settings.sizes
    page = Page(args.out, "benchmarks/speed.py", "Performance")
    record = Record(args.out.with_suffix(".jsonl"), Result, settings.digest)
    jobs = plan(groups, sizes, settings)
    if args.again:
        remove_results(record, jobs)
    run = partial(measure, settings=settings)
    for result in record.complete(jobs, run, processes=1 if args.quick else None):
        print(summary(result), flush=True)
    part = args.models or args.sizes or (args.only and args.only != ["page"])
    if part and not args.page:  # the rows of the page that were not measured would be lost
        print(f"{args.out} is as it was: this was a part. `--page` writes what {record.path} has.")
        return
    command = "python benchmarks/speed.py" + " --quick" * args.quick
    page.write(speed_page.report(record.kept(), settings, args.out, command))
    print(f"Written to {args.out}.")


def summary(result: Result) -> str:
    """Return a job's result as one line."""
    line = f"{result.patches:>7,} {result.work:<5} {result.group}:"
    if result.group == PROFILE:
        return line + f" {result.seconds:.0f} s"
    figures = (
        f" {name} {1e3 * each['cpu']:.1f} ms ({1e3 * each['wall']:.1f}), "
        f"{each['peak'] / 2**20:.0f} MiB;"
        for name, each in result.figures.items()
    )
    return line + "".join(figures)[:-1] + f" [{result.seconds:.0f} s]"


if __name__ == "__main__":
    try:
        main()
    except CaprmilError as problem:
        raise SystemExit(f"error: {problem}") from None
