"""Executors: run the tasks of a long job in this process or on the workers of a Ray cluster."""

from caprmil.executors.executor import Executor, Failed, Succeeded, Task, Worker
from caprmil.executors.job_status import JobStatus, read_statuses
from caprmil.executors.local import LocalExecutor
from caprmil.executors.ray import RayExecutor

__all__ = [
    "Executor",
    "Failed",
    "JobStatus",
    "LocalExecutor",
    "RayExecutor",
    "Succeeded",
    "Task",
    "Worker",
    "read_statuses",
]
