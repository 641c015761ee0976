"""The Ray actor that runs a worker, and what it checks before the worker starts."""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from caprmil.errors import CaprmilError
from caprmil.executors.executor import Task, WorkerFactory
from caprmil.executors.job_status import describe_error, heartbeat, process_name

# `ray start` passes these on. With them Lightning would take a worker for a part of a larger group.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


@dataclass(frozen=True)
class Requirements:
    """What a worker must have in common with the driver: folder, modules, threads, versions."""

    folder: str
    modules: tuple[str, ...]
    threads: int
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of_driver(cls, threads: int) -> "Requirements":
        return cls(str(Path.cwd()), tuple(sys.path), threads, _versions())


class RemoteWorker:
    """An actor: a process of the cluster with one worker."""

    def start(self, factory: bytes, required: Requirements) -> bool:
        """Create the worker, and return whether it prefetches.

        Raise an error if its results could differ from those of the driver.
        """
        import ray.cloudpickle

        if not Path(required.folder).is_dir():
            raise CaprmilError(
                f"{process_name()} does not see the folder {required.folder}. All nodes of the "
                "cluster need it under this name: use a shared folder."
            )
        os.chdir(required.folder)  # paths are relative to the working directory of the driver
        sys.path += [entry for entry in required.modules if entry not in sys.path]
        if (installed := _versions()) != required.versions:
            raise CaprmilError(
                f"{process_name()} has {_format(installed)}, but the driver has "
                f"{_format(required.versions)}. Install the same versions on all nodes."
            )
        os.environ["OMP_NUM_THREADS"] = str(required.threads)  # before torch is imported
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        make_worker: WorkerFactory = ray.cloudpickle.loads(factory)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(required.threads)
        self.worker = make_worker()
        return self.worker.prefetches

    def run(self, task: Task, attempt: int, following: Task | None) -> tuple[str, Any]:
        """Return "succeeded" and the result; or "refused" or "failed" and the reason."""
        try:
            if following is not None:
                self.worker.prefetch(following)
            with heartbeat(task.status_file, attempt=attempt) as report:
                return "succeeded", self.worker.run(task, report)
        except CaprmilError as error:
            return "refused", describe_error(error)
        except Exception as error:
            return "failed", describe_error(error)

    def close(self) -> None:
        self.worker.close()


def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, version(name)) for name in ("caprmil", "torch", "numpy"))


def _format(versions: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(" ".join(pair) for pair in versions)
