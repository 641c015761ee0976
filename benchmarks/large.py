"""Measure seconds and resident memory of predictions and explanations of large bags from disk.

    python benchmarks/large.py

Each bag is written to a temporary folder, with 2 KiB per patch. A new process predicts or explains
it with one model, with the functions of `caprmil predict` and `caprmil explain`. The table has the
maximum of resident memory over two runs, and the median of the seconds. Resident memory is the peak
of the process, with Python and torch, whose share is in the last column.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from caprmil.explain.explanation import explain
from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.models import create
from caprmil.runs.inference import TrainedModel, predict_file
from caprmil.targets import Classification
from record import Page

WIDTH = 1024
SIZES = (300_000, 2_000_000)
QUICK = (2_000,)
MODELS = ("caprmil", "caprmil+gated")
WORKS = ("predict", "explain")
RUNS = 2
ROWS = 8192  # drawn once and written repeatedly, each time rolled by one column


def write(path: Path, n: int) -> None:
    """Write a bag in chunks."""
    block = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float16)
    info = BagInfo(path=path, kind="caprmil", n_patches=n, width=WIDTH, dtype="float16")
    with bags.writing(info, None) as put:
        for number, start in enumerate(range(0, n, ROWS)):
            put(np.roll(block, number % WIDTH, axis=1)[: n - start])


def measure_here(path: Path, name: str, work: str) -> dict[str, float]:
    """Predict or explain a bag in this process, and return seconds and memory."""
    torch.manual_seed(0)
    model = create(name, WIDTH, 2).eval()
    before, start = resident(), perf_counter()
    if work == "predict":
        target = Classification(classes=("no", "yes"))
        predict_file([TrainedModel(model, target)], path, torch.device("cpu"))
    else:
        with bags.streaming(path) as stream:
            explain(model, stream, target=Classification(classes=("no", "yes")))
    return {"seconds": perf_counter() - start, "before": before, "peak": resident()}


def resident() -> float:
    """Return the peak of this process's resident memory in GB.

    `getrusage` is not used on Linux: it starts with the peak of the parent process.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def measure_in_new_process(path: Path, name: str, work: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", str(path), name, work]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def measure(sizes: Sequence[int], models: Sequence[str], times: int) -> list[list[str]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in sizes:
            path = Path(folder) / f"{n}.h5"
            write(path, n)
            for name in models if n == max(sizes) else models[:1]:
                for work in WORKS:
                    runs = [measure_in_new_process(path, name, work) for _ in range(times)]
                    found = {key: max(run[key] for run in runs) for key in KEYS}
                    found["seconds"] = median(run["seconds"] for run in runs)
                    size = path.stat().st_size / 1e9
                    rows.append(
                        [
                            *(f"{n:,}", f"{size:.2f}", name, work),
                            *(f"{found[key]:.{digits}f}" for key, digits in KEYS.items()),
                        ]
                    )
                    print(*rows[-1], sep="  ", flush=True)
            path.unlink()
    return rows


KEYS = {"seconds": 1, "peak": 2, "before": 2}
HEAD = ["patches", "GB on disk", "model", "command", "seconds", "GB resident", "GB before"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the table to the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        path, name, work = args.one
        print(json.dumps(measure_here(Path(path), name, work)))
        return
    page = Page(args.out, "benchmarks/large.py", "Large bags")
    rows = measure(QUICK if args.quick else SIZES, MODELS, 1 if args.quick else RUNS)
    table = [HEAD, ["---:", "---:", "---", "---", "---:", "---:", "---:"], *rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    command = "python benchmarks/large.py" + " --quick" * args.quick
    page.write(f"```bash\n{command}\n```\n\n{lines}\n")


if __name__ == "__main__":
    main()
