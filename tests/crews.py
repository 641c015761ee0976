"""Workers for tests of crews. They live apart, so that a process that hires one imports little."""

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caprmil.errors import CaprmilError, SlideError
from caprmil.executors import Unit, Worker
from caprmil.io.progress import Bar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def count(folder: Path, name: str) -> int:
    """Return how often a unit was begun."""
    return (folder / "begun.txt").read_text().split().count(name)


class Diligent(Worker):
    """Does what a task says, and writes down every unit that it begins."""

    def work(self, unit: Unit, tell: Bar) -> str:
        folder = unit.note.parents[1]
        with (folder / "begun.txt").open("a") as log:
            log.write(f"{unit.name}\n")
        tell(1, 2, "half")
        if unit.task == "refuse":
            raise SlideError("This slide is broken.")
        if unit.task == "bug":
            raise TypeError("nobody thought of this")
        if unit.task == "die" or (unit.task == "die once" and count(folder, unit.name) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return unit.name.upper()


class Foresighted(Diligent):
    """Says what it was told to expect."""

    ahead = True

    def __init__(self) -> None:
        self.heard: list[str] = []

    def expect(self, unit: Unit) -> None:
        self.heard.append(unit.name)

    def work(self, unit: Unit, tell: Bar) -> str:
        return ",".join(self.heard)


class Mortal(Diligent):
    """Wants to hear what comes next, and may not live to see it."""

    ahead = True


class Slow(Mortal):
    """Takes its time where the task says so."""

    def work(self, unit: Unit, tell: Bar) -> str:
        time.sleep(float(unit.task or 0))
        return super().work(unit, tell)


class Secretive(Worker):
    """Is done, but cannot say what came of it."""

    def work(self, unit: Unit, tell: Bar) -> object:
        import threading

        return threading.Lock()


class Equipped(Worker):
    """Says which GPUs it has."""

    def work(self, unit: Unit, tell: Bar) -> str:
        import ray

        return f"gpu {','.join(map(str, ray.get_gpu_ids()))}"


class Blind(Worker):
    """Cannot be hired."""

    def __init__(self) -> None:
        raise CaprmilError("There is no encoder here.")


class Logged(Worker):
    """Has another worker do the work, slowly, and logs beginning and end with process and node."""

    def __init__(self, kind: type[Worker], log: Path, pause: float, *details: Any) -> None:
        self.worker, self.log, self.pause = kind(*details), log, pause

    def write(self, word: str, unit: Unit) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        with self.log.open("a") as log:
            log.write(f"{word} {unit.name} {os.getpid()} {node}\n")

    def work(self, unit: Unit, tell: Bar) -> Any:
        self.write("begin", unit)

        def slowly(done: float, total: float, remark: str = "") -> None:
            time.sleep(self.pause)
            tell(done, total, remark)

        result = self.worker.work(unit, slowly)
        self.write("end", unit)
        return result


class Colour:
    """A stand-in for an encoder: the mean colour of a patch."""

    name, width, fingerprint, mpp, patch_px = "colour", 3, "abc123", 2.0, 64

    def __call__(self, pixels: "NDArray[np.uint8]") -> "NDArray[np.float32]":
        return pixels.mean((1, 2)).astype("float32")
