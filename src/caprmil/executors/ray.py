"""An executor on Ray: on this machine, or on a running cluster.

There are few workers, and each runs many tasks: one worker per share of the cores, or of a GPU.

On a CPU the results are bit-identical to those of one process, if all processes have the same
number of threads. With another number the sums of lite0 and CAPRMIL have another order, and the
last digits differ (measured; those of ABMIL did not). So a worker has as many threads as this
process would have, and as many cores. With OMP_NUM_THREADS=1 there is a worker per core, with the
numbers of a plain run with OMP_NUM_THREADS=1. Nodes with other processors may round differently.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sized
from threading import current_thread, main_thread
from typing import Any

from caprmil.errors import CaprmilError
from caprmil.executors.executor import Failed, OnProgress, Succeeded, Task, WorkerFactory
from caprmil.executors.ray_worker import RemoteWorker, Requirements
from caprmil.executors.scheduler import Scheduler, TaskQueue

LOCAL = "local"


class RayExecutor:
    """Runs tasks on a Ray cluster. With `address` "local" it starts one on this machine.

    `gpus` is the share of a GPU per worker, 0 for work on CPUs. A worker with a GPU has
    `reader_threads` cores. If GPUs are not required, a cluster without any is used too. There are
    `max_workers` workers, or as many as the cluster has room for, also when nodes join later.
    """

    remote = True

    def __init__(
        self,
        address: str = LOCAL,
        *,
        gpus: float = 0.0,
        reader_threads: int = 1,
        require_gpus: bool = True,
        max_workers: int | None = None,
    ) -> None:
        self.address, self.gpus, self.reader_threads = address, gpus, reader_threads
        self.require_gpus, self.max_workers = require_gpus, max_workers
        self.connected = False
        self.ray = import_ray()

    def __enter__(self) -> "RayExecutor":
        """Connect to the cluster, or start one on this machine."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage data is sent
        if self.ray.is_initialized():
            return self
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == LOCAL:
            options["include_dashboard"] = False
        try:
            _check_address(self.address)
            self._on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray sets its own
            self.ray.init(address=self.address, **options)
        except Exception as error:  # Ray raises many types, also a bare Exception
            reason = str(error).partition("\n")[0]
            if self.address == LOCAL:
                raise CaprmilError(f"Cannot start Ray on this machine ({reason}).") from error
            raise CaprmilError(
                f"Cannot connect to a Ray cluster at {self.address} ({reason}). Start one with "
                "`ray start --head`, or use --ray alone for this machine. If it needs a token, "
                "set RAY_AUTH_MODE=token."
            ) from error
        self.connected = True
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect, and stop a cluster that was started here."""
        if self.connected:
            self.ray.shutdown()
            self.connected = False
            if current_thread() is main_thread():
                signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(
        self, tasks: Iterable[Task], make_worker: WorkerFactory, on_progress: OnProgress
    ) -> Iterator[Succeeded | Failed]:
        """Yield the outcome of each task as soon as it is known.

        A task is tried up to three times, unless it raises a CaprmilError. If the iterator is
        closed, the running tasks are stopped.
        """
        count = len(tasks) if isinstance(tasks, Sized) else sys.maxsize
        if not count:
            return
        if not self.require_gpus and not self.ray.cluster_resources().get("GPU"):
            self.gpus = 0.0
        self._check_capacity()
        resources: dict[str, Any] = {"num_cpus": self.cores(), "num_gpus": self.gpus}
        actor = self.ray.remote(**resources, max_restarts=0)(RemoteWorker)
        factory = self.ray.put(self.ray.cloudpickle.dumps(make_worker))
        required = Requirements.of_driver(threads=self.cores())

        def start_worker() -> tuple[Any, Any]:
            worker = actor.remote()
            return worker, worker.start.remote(factory, required)

        queue = TaskQueue(iter(tasks), count)
        scheduler = Scheduler(self.ray, queue, start_worker, self.capacity)
        try:
            yield from scheduler.outcomes(on_progress)
        finally:
            scheduler.stop()

    def cores(self) -> int:
        """Return the cores per worker: those for a GPU, or the threads of this process."""
        if self.gpus:
            return self.reader_threads
        if "torch" in sys.modules:
            import torch

            return torch.get_num_threads()
        return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)

    def capacity(self) -> int:
        """Return the number of workers that fit on the nodes that are alive."""
        total = 0
        for node in self.ray.nodes():
            if node["Alive"]:
                resources = node["Resources"]
                fits = int(resources.get("CPU", 0) / self.cores())
                if self.gpus:
                    fits = min(fits, self._workers_on(resources.get("GPU", 0)))
                total += fits
        return total if self.max_workers is None else min(total, self.max_workers)

    def _workers_on(self, gpus: float) -> int:
        """Return the number of workers for the GPUs of a node. A share lies on one GPU."""
        if self.gpus < 1:
            return int(gpus) * int(1 / self.gpus)  # not //: 1 // 0.1 is 9
        return int(gpus / self.gpus)

    def _check_capacity(self) -> None:
        """Raise an error if no worker fits on any node."""
        if self.capacity():
            return
        need, advice = f"{self.cores()} cores", "Set OMP_NUM_THREADS to fewer."
        if self.gpus:
            need += f" and {self.gpus:g} GPU"
            advice = "Use fewer, or --device cpu, or add nodes with GPUs."
        raise CaprmilError(f"No node of the cluster has {need} for a worker. {advice}")


def _check_address(address: str) -> None:
    """Raise an error at once if no server is at an address: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=10).close()


def import_ray() -> Any:
    """Return the module `ray`, or raise an error that says how to install it."""
    try:
        import ray
        import ray.cloudpickle
        import ray.exceptions
    except ImportError:
        raise CaprmilError('--ray needs Ray: pip install "caprmil[cluster]".') from None
    return ray
