"""Run a caprmil command, and attribute its processor time to phases.

    python benchmarks/phases.py RESULT.json predict runs/first bag.h5

A timer of processor time interrupts the main thread. The time since the last interrupt is that of
the phase of the functions that run. An interrupt waits for the end of a call into C, which then has
all of its time. Other threads (reading ahead, requests of the viewer) and processes (readers of
slides) are counted as a whole.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from time import perf_counter, process_time, thread_time
from types import FrameType

STARTED = perf_counter()

INTERVAL = 0.002  # seconds of processor time
IMPORTS, THREADS, PROCESSES, REST = "imports", "other threads", "other processes", "rest"

# Part of the name of a file, name of a function or "" for any, phase. The first rules are looked
# for in the whole stack, the others from the innermost function on.
WHOLE = (
    ("importlib._bootstrap", "", IMPORTS),
    ("caprmil/cohort/cohort_bags.py", "", "checking bags"),
    ("caprmil/runs/run.py", "_check_bags", "checking bags"),
    ("caprmil/evaluation/baselines.py", "", "scoring"),
    ("caprmil/training/linear_probes.py", "", "initialisation"),
    ("caprmil/explain/", "", "explaining"),
    ("caprmil/report/", "", "reports"),
    ("caprmil/synthetic/", "", "generating"),
)
INNERMOST = (
    ("caprmil/features/bag_files.py", "", "reading"),
    ("caprmil/features/bags.py", "", "reading"),
    ("caprmil/features/batches.py", "", "reading"),
    ("caprmil/slides/", "", "reading"),
    ("caprmil/io/atomic.py", "", "writing"),
    ("caprmil/runs/history.py", "", "writing"),
    ("caprmil/training/checkpoints.py", "", "writing"),
    ("lightning/pytorch/trainer/connectors/checkpoint_connector.py", "", "writing"),
    ("caprmil/figures/", "", "figures"),
    ("caprmil/runs/scoring.py", "", "scoring"),
    ("caprmil/evaluation/", "", "scoring"),
    ("caprmil/training/module.py", "training_step", "forward"),
    ("caprmil/training/module.py", "validation_step", "validation"),
    ("caprmil/runs/inference.py", "", "prediction"),
    ("caprmil/encoders/", "", "encoding"),
    ("torch/autograd/", "backward", "backward"),
    ("torch/_tensor.py", "backward", "backward"),
    ("torch/optim/", "", "optimiser"),
    ("torch/nn/utils/clip_grad.py", "", "optimiser"),
    ("lightning/", "", "training loop"),
)
PHASES = (
    *(IMPORTS, "checking bags", "generating", "reading", "initialisation", "forward", "backward"),
    *("optimiser", "training loop", "validation", "prediction", "encoding", "scoring", "figures"),
    *("explaining", "reports", "writing", THREADS, PROCESSES, REST),
)


def phase_of(frame: FrameType | None) -> str:
    """Return the phase of a stack of functions."""
    stack = list(_stack(frame))
    for part, function, phase in WHOLE:
        if any(part in file and function in ("", name) for file, name in stack):
            return phase
    for file, name in stack:
        for part, function, phase in INNERMOST:
            if part in file and function in ("", name):
                return phase
    return REST


def _stack(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


class Sampler:
    """The seconds of processor time of each phase, as they are spent."""

    def __init__(self) -> None:
        import signal

        self.seconds: dict[str, float] = defaultdict(float)
        self.seconds[IMPORTS] = process_time()  # Python itself
        self.main, self.process = thread_time(), process_time()
        signal.signal(signal.SIGPROF, self.sample)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)

    def sample(self, _: int, frame: FrameType | None) -> None:
        """Add the time since the last sample."""
        main, process = thread_time(), process_time()
        own = main - self.main
        self.seconds[phase_of(frame)] += own
        self.seconds[THREADS] += max(process - self.process - own, 0)
        self.main, self.process = main, process

    def stop(self) -> dict[str, float]:
        """Return the seconds of all phases."""
        import resource
        import signal

        signal.setitimer(signal.ITIMER_PROF, 0)
        self.sample(0, None)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds[PROCESSES] = children.ru_utime + children.ru_stime
        return {phase: self.seconds[phase] for phase in PHASES}


def main() -> None:
    """Run a command and write its phases, also if it ends with an error or by Ctrl-C."""
    result, *words = sys.argv[1:]
    sampler = Sampler()
    try:
        from caprmil.cli import run

        run(words)
    finally:
        import json
        from pathlib import Path

        found = {"wall": perf_counter() - STARTED, "phases": sampler.stop()}
        Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
