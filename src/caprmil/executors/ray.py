"""An executor on Ray: a cluster of its own on this machine, or one that is there already.

Workers are few and stay: one on each share of the cores, or of a GPU. A worker that dies is
replaced, and its task is tried again, three times in all.

On a CPU the answer does not depend on who does a task, to the last bit, if all compute with the
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
from caprmil.executors.base import Failed, OnProgress, Succeeded, Task, WorkerFactory
from caprmil.executors.job_status import JobStatus, describe_error, heartbeat, process_name

LOCAL = "local"
ATTEMPTS = 3
POLL_SECONDS = 1.0  # seconds between two looks at how far the workers are
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

_log = logging.getLogger("caprmil")


@dataclass(frozen=True)
class Requirements:
    """What a worker must agree to before it starts."""

    folder: str
    modules: tuple[str, ...]
    threads: int
    versions: tuple[tuple[str, str], ...]


class RemoteWorker:
    """A process of the cluster, with a worker in it."""

    def start(self, make_worker: bytes, requirements: Requirements) -> bool:
        """Create the worker, and return whether it prefetches.

        Raise if it could not do its work here, or would do it otherwise.
        """
        import ray.cloudpickle

        if not Path(requirements.folder).is_dir():
            raise CaprmilError(
                f"{process_name()} does not see the folder {requirements.folder}. All nodes of the "
                "cluster need it under this name: use a shared folder."
            )
        os.chdir(requirements.folder)  # paths are as seen from the working directory
        sys.path += [entry for entry in requirements.modules if entry not in sys.path]
        if (has := _versions()) != requirements.versions:
            raise CaprmilError(
                f"{process_name()} has {_format(has)}, but this process has "
                f"{_format(requirements.versions)}. Results of both would be mixed: install the "
                "same on all nodes."
            )
        os.environ["OMP_NUM_THREADS"] = str(requirements.threads)  # before it imports torch
        for name in RANKS:  # of `ray start`; Lightning would take this process for a worker process
            os.environ.pop(name, None)
        factory: WorkerFactory = ray.cloudpickle.loads(make_worker)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(requirements.threads)
        self.worker = factory()
        return self.worker.prefetches

    def run(self, task: Task, attempt: int, following: Task | None) -> tuple[str, Any]:
        """Do a task, and return the result, or whether it refused or failed, and why."""
        try:
            if following is not None:
                self.worker.prefetch(following)
            with heartbeat(task.status_file, attempt=attempt) as report:
                return "done", self.worker.run(task, report)
        except CaprmilError as problem:
            return "refused", describe_error(problem)
        except Exception as problem:
            return "failed", describe_error(problem)

    def close(self) -> None:
        self.worker.close()


class Schedule:
    """Who is there, who does what, and what is still to do."""

    def __init__(self, tasks: Iterator[Task], most: int) -> None:
        self.tasks, self.most, self.left, self.exhausted = tasks, most, most, False
        self.again: deque[Task] = deque()
        self.prefetches = False
        self.prefetched: dict[Any, Task] = {}  # worker: what it gets ready for, beside its work
        self.attempts: Counter[str] = Counter()
        self.not_begun: Counter[str] = Counter()  # how often a worker was lost before it began
        self.workers: set[Any] = set()
        self.idle: deque[Any] = deque()
        self.starting: dict[Any, Any] = {}  # future: worker
        self.working: dict[Any, tuple[Any, Task]] = {}  # future: worker and task
        self.failed_starts, self.why = 0, ""  # workers that could not start, since one last did
        self.any_started = False  # whether any worker has ever started
        self.waiting = False  # for nodes

    def next(self, worker: Any) -> Task | None:
        """Return the next task for a worker: what it is ready for, or another before it idles."""
        if task := self.prefetched.pop(worker, None) or self.fresh():
            return task
        return self.prefetched.popitem()[1] if self.prefetched else None

    def fresh(self) -> Task | None:
        """Return a task to try again, or a new one."""
        if self.again:
            return self.again.popleft()
        task = next(self.tasks, None)
        self.left, self.exhausted = self.left - 1, task is None
        return task

    def after(self) -> Task | None:
        """Return what a worker may get ready for: nothing in the end, when others may be free."""
        return self.fresh() if self.prefetches and self.left >= len(self.workers) else None

    def wanted(self) -> int:
        """Return how many workers there is work for, as far as this is known."""
        open_ = len(self.working) + len(self.again) + len(self.prefetched)
        return open_ if self.exhausted else self.most

    @property
    def futures(self) -> list[Any]:
        return [*self.starting, *self.working]


class RayExecutor:
    """The workers of a Ray cluster. With `address` "local", one of its own on this machine.

    `gpus` is the share of a GPU that a worker has, and `readers` the cores beside it; 0 is for work
    on CPUs. Unless they are `needed`, a cluster without GPUs will do too. `workers` is how many
    there are at most; by default as many as the cluster has room for, now and later.
    """

    remote = True

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

    def __enter__(self) -> "RayExecutor":
        """Connect; a cluster of one's own is started."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told of it
        if self.ray.is_initialized():
            return self
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == LOCAL:
            options["include_dashboard"] = False
        try:
            _check_address(self.address)
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

    def run(
        self, tasks: Iterable[Task], make_worker: WorkerFactory, on_progress: OnProgress
    ) -> Iterator[Succeeded | Failed]:
        """Yield what came of each task, as it is done. Leaving early stops those in work."""
        most = len(tasks) if isinstance(tasks, Sized) else sys.maxsize
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
        schedule = Schedule(iter(tasks), most)
        make = self.ray.remote(num_cpus=self.cpus(), num_gpus=self.gpus, max_restarts=0)(
            RemoteWorker
        )
        job = self.ray.put(self.ray.cloudpickle.dumps(make_worker))
        requirements = Requirements(str(Path.cwd()), tuple(sys.path), self.cpus(), _versions())
        room, looked = self.room(), monotonic()
        try:
            while self._assign(schedule):
                starting = schedule.failed_starts < ATTEMPTS * max(1, room)
                if not starting and not schedule.workers:
                    raise CaprmilError(f"No worker can start. {schedule.why}")
                for _ in range(
                    min(room, schedule.wanted()) - len(schedule.workers) if starting else 0
                ):
                    worker = make.remote()
                    schedule.workers.add(worker)
                    schedule.starting[worker.start.remote(job, requirements)] = worker
                for future in self._wait(schedule):
                    if outcome := self._receive(schedule, future):
                        yield outcome
                if monotonic() - looked > POLL_SECONDS:
                    room, looked = self.room(), monotonic()
                    _report_progress(schedule, on_progress)
            if closing := [worker.close.remote() for worker in schedule.idle]:
                self.ray.wait(closing, num_returns=len(closing), timeout=10)
        finally:
            self._stop(schedule)

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

    def _assign(self, schedule: Schedule) -> bool:
        """Give tasks to who is free; report whether there is anything left to wait for."""
        while schedule.idle and (task := schedule.next(schedule.idle[0])):
            worker = schedule.idle.popleft()
            schedule.attempts[task.name] += 1
            if following := schedule.after():
                schedule.prefetched[worker] = following
            future = worker.run.remote(task, schedule.attempts[task.name], following)
            schedule.working[future] = worker, task
        return bool(schedule.working or schedule.again) or not schedule.exhausted

    def _wait(self, schedule: Schedule) -> list[Any]:
        """Return the futures that are kept by now; wait a moment if there are none."""
        if futures := schedule.futures:
            schedule.waiting = False
            return self.ray.wait(futures, num_returns=1, timeout=POLL_SECONDS)[0]
        if not schedule.waiting:
            _log.warning("No node is left for a worker. Waiting for one to join.")
        schedule.waiting = True
        sleep(POLL_SECONDS)
        return []

    def _receive(self, schedule: Schedule, future: Any) -> Succeeded | Failed | None:
        """Take what a worker has to say, or that it is gone."""
        if future in schedule.starting:
            self._started(schedule, schedule.starting.pop(future), future)
            return None
        worker, task = schedule.working.pop(future)
        lost = False
        try:
            how, result = self.ray.get(future)
            schedule.idle.append(worker)
        except self.ray.exceptions.RayTaskError as problem:  # e.g. a result that cannot be sent
            how, result = "failed", describe_error(problem.cause or problem)
            schedule.idle.append(worker)
        except self.ray.exceptions.RayError as problem:
            self._discard(schedule, worker)
            lost, how, result = True, "failed", f"Its worker was lost: {_cause(problem)}."
        if how == "done":
            return Succeeded(task, result)
        attempt = schedule.attempts[task.name]
        before = JobStatus.read(task.status_file)
        begun = before is not None and before.attempt == attempt
        if lost and not begun and schedule.not_begun[task.name] < ATTEMPTS:  # this was no try
            schedule.not_begun[task.name] += 1
            schedule.attempts[task.name] -= 1
            schedule.again.append(task)
            return None
        before = before or JobStatus(state="failed")
        if how == "refused" or attempt == ATTEMPTS:
            replace(before, state="failed", attempt=attempt, reason=result).write(task.status_file)
            return Failed(task, result, attempts=attempt)
        replace(before, state="waiting", attempt=attempt, reason=result).write(task.status_file)
        _log.warning("%s failed and is tried again: %s", task.name, result)
        schedule.again.append(task)
        return None

    def _started(self, schedule: Schedule, worker: Any, future: Any) -> None:
        """Let a worker begin that has started. If one cannot, others may; the first must."""
        try:
            schedule.prefetches = self.ray.get(future)
        except self.ray.exceptions.RayTaskError as problem:
            self._discard(schedule, worker)
            schedule.failed_starts, schedule.why = (
                schedule.failed_starts + 1,
                describe_error(problem.cause or problem),
            )
            if not schedule.any_started:
                raise CaprmilError(f"No worker can start. {schedule.why}") from None
            _log.warning("A worker cannot start. %s", schedule.why)
        except self.ray.exceptions.RayError as problem:
            self._discard(schedule, worker)
            schedule.failed_starts += 1
            schedule.why = (
                f"They die ({_cause(problem)}): look at the memory of nodes, and Ray's logs."
            )
        else:
            schedule.failed_starts, schedule.any_started = 0, True
            schedule.idle.append(worker)

    def _discard(self, schedule: Schedule, worker: Any) -> None:
        """Forget a worker; it is replaced where there is room."""
        schedule.workers.discard(worker)
        if task := schedule.prefetched.pop(worker, None):
            schedule.again.append(task)
        self.ray.kill(worker)  # it may only have been out of reach

    def _stop(self, schedule: Schedule) -> None:
        """Stop all workers. What they had in work is not done, and nothing else is said of it."""
        with suppress(self.ray.exceptions.RayError):
            for worker in schedule.workers:
                self.ray.kill(worker)
        for _, task in schedule.working.values():
            task.status_file.unlink(missing_ok=True)


def _report_progress(schedule: Schedule, on_progress: OnProgress) -> None:
    """Pass on how far the tasks in work are, as their notes say."""
    for _, task in schedule.working.values():
        if (note := JobStatus.read(task.status_file)) and note.state == "running" and note.total:
            on_progress(task, note.done, note.total, note.message)


def _check_address(address: str) -> None:
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


def _format(versions: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(" ".join(pair) for pair in versions)


def _cause(problem: Exception) -> str:
    """Return the one line of Ray's long message that says what happened."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    telling = next((line for line in lines if "because" in line), lines[0])
    return telling.partition(". ")[0].rstrip(".")
