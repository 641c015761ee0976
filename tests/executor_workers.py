"""Workers and helpers for the tests of executors. A process with a worker imports little else."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caprmil.errors import CaprmilError, SlideError
from caprmil.executors import Task, Worker
from caprmil.io.progress import Bar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caprmil.features.extract import Extraction

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # otherwise the workers wait for all other tests
}


def count_starts(folder: Path, name: str) -> int:
    """Return how often a task was started."""
    return (folder / "started.txt").read_text().split().count(name)


class PayloadWorker(Worker):
    """Does what the payload of a task specifies, and logs the start of every task."""

    def run(self, task: Task, report: Bar) -> str:
        folder = task.status_file.parents[1]
        with (folder / "started.txt").open("a") as log:
            log.write(f"{task.name}\n")
        report(1, 2, "half")
        if task.payload == "refuse":
            raise SlideError("This slide is broken.")
        if task.payload == "bug":
            raise TypeError("an unexpected error")
        first = count_starts(folder, task.name) == 1
        if task.payload == "die" or (task.payload == "die once" and first):
            os.kill(os.getpid(), signal.SIGKILL)
        return task.name.upper()


class ListsPrefetched(PayloadWorker):
    """Returns the names of all tasks that it has prefetched so far."""

    prefetches = True

    def __init__(self) -> None:
        self.names: list[str] = []

    def prefetch(self, task: Task) -> None:
        self.names.append(task.name)

    def run(self, task: Task, report: Bar) -> str:
        return ",".join(self.names)


class Prefetching(PayloadWorker):
    """A `PayloadWorker` that prefetches."""

    prefetches = True


class Sleeping(Prefetching):
    """Sleeps for the seconds in the payload."""

    def run(self, task: Task, report: Bar) -> str:
        time.sleep(float(task.payload or 0))
        return super().run(task, report)


class ReturnsLock(Worker):
    """Returns a result that cannot be pickled."""

    def run(self, task: Task, report: Bar) -> object:
        import threading

        return threading.Lock()


class ListsGpus(Worker):
    """Returns the GPUs that it was given."""

    def run(self, task: Task, report: Bar) -> str:
        import ray

        return f"gpu {','.join(map(str, ray.get_gpu_ids()))}"


class CannotStart(Worker):
    """Cannot be created."""

    def __init__(self) -> None:
        raise CaprmilError("There is no encoder here.")


class Logged(Worker):
    """Slows another worker down, and logs begin and end of each task with process and node."""

    def __init__(self, kind: type[Worker], log: Path, pause: float, *details: Any) -> None:
        self.worker, self.log, self.pause = kind(*details), log, pause

    def write(self, word: str, task: Task) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        with self.log.open("a") as log:
            log.write(f"{word} {task.name} {os.getpid()} {node}\n")

    def run(self, task: Task, report: Bar) -> Any:
        self.write("begin", task)

        def slowly(done: float, total: float, remark: str = "") -> None:
            time.sleep(self.pause)
            report(done, total, remark)

        result = self.worker.run(task, slowly)
        self.write("end", task)
        return result


class MeanColour:
    """A stand-in for an encoder: the mean colour of a patch."""

    name, width, fingerprint, mpp, patch_px = "colour", 3, "abc123", 2.0, 64

    def __call__(self, pixels: "NDArray[np.uint8]") -> "NDArray[np.float32]":
        return pixels.mean((1, 2)).astype("float32")


def make_extraction(out: Path, kind: "type[Extraction] | None" = None) -> "Extraction":
    from caprmil.features.extract import Extraction
    from caprmil.features.settings import ExtractionConfig
    from caprmil.slides.patches import PatchConfig

    settings = ExtractionConfig(patches=PatchConfig(px=64, mpp=2.0))
    encoder: Any = MeanColour()
    return (kind or Extraction)(out=out, encoder=encoder, config=settings, batch=8)


def equal_bags(one: Path, two: Path, slides: Iterable[str]) -> bool:
    import numpy as np

    from caprmil.features import bags

    pairs = [(bags.read(one / f"{name}.h5"), bags.read(two / f"{name}.h5")) for name in slides]
    return all(
        np.array_equal(a.features, b.features)
        and np.array_equal(np.asarray(a.coords), np.asarray(b.coords))
        for a, b in pairs
    )


def run_contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a training, without logs, and without pictures, which contain the time.

    A command or an explanation measures maps.json later, and timing.json has measured times.
    """
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and "log" not in f.parts]
    files = [f for f in files if f.name not in ("maps.json", "timing.json")]
    return {
        str(file.relative_to(folder)): b"" if file.suffix == ".png" else file.read_bytes()
        for file in files
    }
