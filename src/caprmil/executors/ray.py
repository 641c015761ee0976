"""A crew on Ray: a cluster of its own on this machine, or one that is there already.

Workers are few and stay: one on each share of the cores, or of a GPU. A worker that dies is
replaced, and its unit is tried again, three times in all.

On a CPU the answer does not depend on who does a unit, to the last bit, if all compute with the
same number of threads. It does depend on that number: with two threads instead of one, sums of
lite0 and of CAPRMIL are added up in another order, and the last digits differ (measured; ABMIL's
did not). So a worker has as many threads as this process would have, and as many cores.
OMP_NUM_THREADS=1 gives a worker to each core, and the numbers of a plain run with
OMP_NUM_THREADS=1. Nodes with other processors may round otherwise, whatever is done here.
"""

import logging
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from caprmil.errors import CaprmilError
from caprmil.executors import job_status as notes
from caprmil.executors.base import Done, Failed, Hire, Listen, Unit

LOCAL = "local"
TRIES = 3
LOOK = 1.0  # seconds between two looks at how far the workers are
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

_log = logging.getLogger("caprmil")


@dataclass(frozen=True)
class Terms:
    """What a worker must agree to before it starts."""

    folder: str
    modules: tuple[str, ...]
    threads: int
    versions: tuple[tuple[str, str], ...]


class Post:
    """A process of the cluster, with a worker in it."""

    def start(self, hire: bytes, terms: Terms) -> bool:
        """Hire the worker, and tell whether it wants to hear of the unit after the present one.

        Raise if it could not do its work here, or would do it otherwise.
        """
        import ray.cloudpickle

        if not Path(terms.folder).is_dir():
            raise CaprmilError(
                f"{notes.here()} does not see the folder {terms.folder}. All nodes of the cluster "
                "need it under this name: use a shared folder."
            )
        os.chdir(terms.folder)  # paths are as seen from the working directory
        sys.path += [entry for entry in terms.modules if entry not in sys.path]
        if (has := _versions()) != terms.versions:
            raise CaprmilError(
                f"{notes.here()} has {_listed(has)}, but this process {_listed(terms.versions)}. "
                "Results of both would be mixed: install the same on all nodes."
            )
        os.environ["OMP_NUM_THREADS"] = str(terms.threads)  # before it imports torch
        for name in RANKS:  # of `ray start`; Lightning would take this process for a follower
            os.environ.pop(name, None)
        hired: Hire = ray.cloudpickle.loads(hire)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(terms.threads)
        self.worker = hired()
        return self.worker.ahead

    def work(self, unit: Unit, attempt: int, then: Unit | None) -> tuple[str, Any]:
        """Do a unit, and return the result, or whether it refused or failed, and why."""
        try:
            if then is not None:
                self.worker.expect(then)
            with notes.attended(unit.note, attempt=attempt) as tell:
                return "done", self.worker.work(unit, tell)
        except CaprmilError as problem:
            return "refused", notes.said(problem)
        except Exception as problem:
            return "failed", notes.said(problem)

    def close(self) -> None:
        self.worker.close()


class Shift:
    """Who is there, who does what, and what is still to do."""

    def __init__(self, units: Iterator[Unit], most: int) -> None:
        self.units, self.most, self.left, self.exhausted = units, most, most, False
        self.again: deque[Unit] = deque()
        self.ahead = False
        self.coming: dict[Any, Unit] = {}  # post: what it gets ready for, beside its work
        self.attempts: Counter[str] = Counter()
        self.unbegun: Counter[str] = Counter()  # how often a worker was lost before it began
        self.posts: set[Any] = set()
        self.idle: deque[Any] = deque()
        self.starting: dict[Any, Any] = {}  # promise: post
        self.working: dict[Any, tuple[Any, Unit]] = {}  # promise: post and unit
        self.stillborn, self.why = 0, ""  # workers that could not start, since one last did
        self.proven = False  # whether any worker has ever started
        self.waiting = False  # for nodes

    def next(self, post: Any) -> Unit | None:
        """Return the next unit for a worker: what it is ready for, or another before it idles."""
        if unit := self.coming.pop(post, None) or self.fresh():
            return unit
        return self.coming.popitem()[1] if self.coming else None

    def fresh(self) -> Unit | None:
        """Return a unit to try again, or a new one."""
        if self.again:
            return self.again.popleft()
        unit = next(self.units, None)
        self.left, self.exhausted = self.left - 1, unit is None
        return unit

    def after(self) -> Unit | None:
        """Return what a worker may get ready for: nothing in the end, when others may be free."""
        return self.fresh() if self.ahead and self.left >= len(self.posts) else None

    def wanted(self) -> int:
        """Return how many workers there is work for, as far as this is known."""
        open_ = len(self.working) + len(self.again) + len(self.coming)
        return open_ if self.exhausted else self.most

    @property
    def promises(self) -> list[Any]:
        return [*self.starting, *self.working]


class OnRay:
    """The workers of a Ray cluster. With `address` "local", one of its own on this machine.

    `gpus` is the share of a GPU that a worker has, and `readers` the cores beside it; 0 is for work
    on CPUs. Unless they are `needed`, a cluster without GPUs will do too. `workers` is how many
    there are at most; by default as many as the cluster has room for, now and later.
    """

    elsewhere = True

    def __init__(
        self,
        address: str = LOCAL,
        *,
        gpus: float = 0.0,
        readers: int = 1,
        needed: bool = True,
        workers: int | None = None,
    ) -> None:
        self.address, self.gpus, self.readers = address, gpus, readers
        self.needed, self.workers = needed, workers
        self.ours = False
        self.ray = import_ray()

    def __enter__(self) -> "OnRay":
        """Connect; a cluster of one's own is started."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told of it
        if self.ray.is_initialized():
            return self
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == LOCAL:
            options["include_dashboard"] = False
        try:
            _knock(self.address)
            self.ray.init(address=self.address, **options)
        except (RuntimeError, ValueError, OSError, self.ray.exceptions.RayError) as problem:
            reason = str(problem).partition("\n")[0]
            raise CaprmilError(
                f"There is no Ray cluster to be had at {self.address} ({reason}). Start one with "
                "`ray start --head`, or use --ray alone for this machine. If it asks for a token, "
                "set RAY_AUTH_MODE=token: docs/cluster.md"
            ) from problem
        self.ours = True
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect; a cluster of one's own is stopped."""
        if self.ours:
            self.ray.shutdown()
            self.ours = False

    def do(self, units: Iterable[Unit], hire: Hire, listen: Listen) -> Iterator[Done | Failed]:
        """Yield what came of each unit, as it is done. Leaving early stops those in work."""
        most = len(units) if isinstance(units, Sized) else sys.maxsize
        if not most:
            return
        if not self.needed and not self.ray.cluster_resources().get("GPU"):
            self.gpus = 0.0
        if not self.room():
            what, remedy = f"{self.cpus()} cores", "Set OMP_NUM_THREADS to fewer."
            if self.gpus:
                what += f" and {self.gpus:g} GPU"
                remedy = "Ask for fewer, or --device cpu, or see to it that nodes with GPUs join."
            raise CaprmilError(f"No node of the cluster has {what} for a worker. {remedy}")
        shift = Shift(iter(units), most)
        make = self.ray.remote(num_cpus=self.cpus(), num_gpus=self.gpus, max_restarts=0)(Post)
        job = self.ray.put(self.ray.cloudpickle.dumps(hire))
        terms = Terms(str(Path.cwd()), tuple(sys.path), self.cpus(), _versions())
        room, looked = self.room(), monotonic()
        try:
            while self._assign(shift):
                hiring = shift.stillborn < TRIES * max(1, room)
                if not hiring and not shift.posts:
                    raise CaprmilError(f"No worker can start. {shift.why}")
                for _ in range(min(room, shift.wanted()) - len(shift.posts) if hiring else 0):
                    post = make.remote()
                    shift.posts.add(post)
                    shift.starting[post.start.remote(job, terms)] = post
                for promise in self._wait(shift):
                    if outcome := self._hear(shift, promise):
                        yield outcome
                if monotonic() - looked > LOOK:
                    room, looked = self.room(), monotonic()
                    _look(shift, listen)
            if closing := [post.close.remote() for post in shift.idle]:
                self.ray.wait(closing, num_returns=len(closing), timeout=10)
        finally:
            self._dismiss(shift)

    def cpus(self) -> int:
        """Return the cores of a worker: the threads of this process, or those beside a GPU."""
        if self.gpus:
            return self.readers
        if "torch" in sys.modules:
            import torch

            return torch.get_num_threads()
        return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)

    def room(self) -> int:
        """Return for how many workers there is room on the nodes that are alive."""
        total = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                fits = int(has.get("CPU", 0) / self.cpus())
                total += min(fits, self._shares(has.get("GPU", 0))) if self.gpus else fits
        return total if self.workers is None else min(total, self.workers)

    def _shares(self, gpus: float) -> int:
        """Return for how many workers a node has GPUs. A share of one is not of two."""
        if self.gpus < 1:
            return int(gpus) * int(1 / self.gpus)  # not //: a whole has ten tenths
        return int(gpus / self.gpus)

    def _assign(self, shift: Shift) -> bool:
        """Give units to who is free; tell whether there is anything left to wait for."""
        while shift.idle and (unit := shift.next(shift.idle[0])):
            post = shift.idle.popleft()
            shift.attempts[unit.name] += 1
            if then := shift.after():
                shift.coming[post] = then
            promise = post.work.remote(unit, shift.attempts[unit.name], then)
            shift.working[promise] = post, unit
        return bool(shift.working or shift.again) or not shift.exhausted

    def _wait(self, shift: Shift) -> list[Any]:
        """Return the promises that are kept by now; wait a moment if there are none."""
        if promises := shift.promises:
            shift.waiting = False
            return self.ray.wait(promises, num_returns=1, timeout=LOOK)[0]
        if not shift.waiting:
            _log.warning("No node is left for a worker. Waiting for one to join.")
        shift.waiting = True
        sleep(LOOK)
        return []

    def _hear(self, shift: Shift, promise: Any) -> Done | Failed | None:
        """Take what a worker has to say, or that it is gone."""
        if promise in shift.starting:
            self._welcome(shift, shift.starting.pop(promise), promise)
            return None
        post, unit = shift.working.pop(promise)
        lost = False
        try:
            how, result = self.ray.get(promise)
            shift.idle.append(post)
        except self.ray.exceptions.RayTaskError as problem:  # e.g. a result that cannot be sent
            how, result = "failed", notes.said(problem.cause or problem)
            shift.idle.append(post)
        except self.ray.exceptions.RayError as problem:
            self._lose(shift, post)
            lost, how, result = True, "failed", f"Its worker was lost: {_cause(problem)}."
        if how == "done":
            return Done(unit, result)
        attempt = shift.attempts[unit.name]
        before = notes.read(unit.note)
        begun = before is not None and before.attempt == attempt
        if lost and not begun and shift.unbegun[unit.name] < TRIES:  # this was no try
            shift.unbegun[unit.name] += 1
            shift.attempts[unit.name] -= 1
            shift.again.append(unit)
            return None
        before = before or notes.Note(state="failed")
        if how == "refused" or attempt == TRIES:
            replace(before, state="failed", attempt=attempt, reason=result).write(unit.note)
            return Failed(unit, result, attempts=attempt)
        replace(before, state="waiting", attempt=attempt, reason=result).write(unit.note)
        _log.warning("%s failed and is tried again: %s", unit.name, result)
        shift.again.append(unit)
        return None

    def _welcome(self, shift: Shift, post: Any, promise: Any) -> None:
        """Let a worker begin that has started. If one cannot, others may; the first must."""
        try:
            shift.ahead = self.ray.get(promise)
        except self.ray.exceptions.RayTaskError as problem:
            self._lose(shift, post)
            shift.stillborn, shift.why = shift.stillborn + 1, notes.said(problem.cause or problem)
            if not shift.proven:
                raise CaprmilError(f"No worker can start. {shift.why}") from None
            _log.warning("A worker cannot start. %s", shift.why)
        except self.ray.exceptions.RayError as problem:
            self._lose(shift, post)
            shift.stillborn += 1
            shift.why = (
                f"They die ({_cause(problem)}): look at the memory of nodes, and Ray's logs."
            )
        else:
            shift.stillborn, shift.proven = 0, True
            shift.idle.append(post)

    def _lose(self, shift: Shift, post: Any) -> None:
        """Forget a worker; it is replaced where there is room."""
        shift.posts.discard(post)
        if unit := shift.coming.pop(post, None):
            shift.again.append(unit)
        self.ray.kill(post)  # it may only have been out of reach

    def _dismiss(self, shift: Shift) -> None:
        """Stop all workers. What they had in work is not done, and nothing else is said of it."""
        with suppress(self.ray.exceptions.RayError):
            for post in shift.posts:
                self.ray.kill(post)
        for _, unit in shift.working.values():
            unit.note.unlink(missing_ok=True)


def _look(shift: Shift, listen: Listen) -> None:
    """Pass on how far the units in work are, as their notes say."""
    for _, unit in shift.working.values():
        if (note := notes.read(unit.note)) and note.state == "running" and note.total:
            listen(unit, note.done, note.total, note.remark)


def _knock(address: str) -> None:
    """Raise at once if nobody listens at an address: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=10).close()


def import_ray() -> Any:
    """Return Ray, or say how to get it."""
    try:
        import ray
        import ray.cloudpickle
        import ray.exceptions
    except ImportError:
        raise CaprmilError('--ray needs Ray: pip install "caprmil[cluster]".') from None
    return ray


def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, version(name)) for name in ("caprmil", "torch", "numpy"))


def _listed(versions: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(" ".join(pair) for pair in versions)


def _cause(problem: Exception) -> str:
    """Return the one line of Ray's long message that says what happened."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    telling = next((line for line in lines if "because" in line), lines[0])
    return telling.partition(". ")[0].rstrip(".")
