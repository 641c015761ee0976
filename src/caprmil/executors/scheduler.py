"""The tasks and workers of one job on Ray: which worker runs which task, and what is retried.

Workers are Ray actors, which are not restarted. A worker that is lost is replaced by a new one, and
its task goes to any free worker.

Ray's own retries (`max_restarts`, `max_task_retries`) do not fit, as measured with Ray 2.60. A
retried call waits for its own actor to restart. If its node is lost and the others are full, Ray
uses up the retries while it waits: the task fails after one attempt, although other workers are
free for it. The driver does not notice a retry, so it cannot record the attempt and the reason. Ray
tasks without actors do not fit either. A worker keeps an encoder and the next slide in memory, and
Ray ends the process of a task with a GPU after each task.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

from caprmil.errors import CaprmilError
from caprmil.executors.executor import Failed, OnProgress, Succeeded, Task
from caprmil.executors.job_status import JobStatus, describe_error

ATTEMPTS = 3
POLL_SECONDS = 1.0  # between two checks of nodes and progress

_log = logging.getLogger("caprmil")


class TaskQueue:
    """The tasks that no worker has yet. New ones are taken only when a worker is free."""

    def __init__(self, tasks: Iterator[Task], count: int) -> None:
        self.tasks, self.count, self.left = tasks, count, count
        self.retries: deque[Task] = deque()
        self.exhausted = False

    def take(self) -> Task | None:
        """Return a task to retry or a new one, or None if there is none."""
        if self.retries:
            return self.retries.popleft()
        task = next(self.tasks, None)
        self.left, self.exhausted = self.left - 1, task is None
        return task


class Scheduler:
    """Runs tasks on workers that `start_worker` starts, as many as there is `capacity` for.

    `start_worker` returns an actor, and the future of its start.
    """

    def __init__(
        self,
        ray: Any,
        queue: TaskQueue,
        start_worker: Callable[[], tuple[Any, Any]],
        capacity: Callable[[], int],
    ) -> None:
        self.ray, self.queue = ray, queue
        self.start_worker, self.capacity = start_worker, capacity
        self.workers: set[Any] = set()
        self.starting: dict[Any, Any] = {}  # future: worker
        self.running: dict[Any, tuple[Any, Task]] = {}  # future: worker and task
        self.idle: deque[Any] = deque()
        self.prefetches = False
        self.prefetched: dict[Any, Task] = {}  # worker: the task that it prefetches
        self.attempts: Counter[str] = Counter()
        self.lost_before_start: Counter[str] = Counter()
        self.any_started = False
        self.failed_starts, self.start_error = 0, ""  # since the last worker that started
        self.waits_for_nodes = False

    def outcomes(self, on_progress: OnProgress) -> Iterator[Succeeded | Failed]:
        """Yield the outcome of each task as soon as it is known."""
        capacity, polled = self.capacity(), monotonic()
        while self._assign_tasks():
            self._start_workers(capacity)
            for future in self._wait():
                if future in self.starting:
                    self._finish_start(future)
                elif outcome := self._finish_task(future):
                    yield outcome
            if monotonic() - polled > POLL_SECONDS:
                capacity, polled = self.capacity(), monotonic()
                self._report_progress(on_progress)
        if closing := [worker.close.remote() for worker in self.idle]:
            self.ray.wait(closing, num_returns=len(closing), timeout=10)

    def stop(self) -> None:
        """Stop all workers, and remove the status of the tasks that they were running."""
        with suppress(self.ray.exceptions.RayError):
            for worker in self.workers:
                self.ray.kill(worker)
        for _, task in self.running.values():
            task.status_file.unlink(missing_ok=True)

    def _assign_tasks(self) -> bool:
        """Give tasks to the idle workers, and return whether there is anything left to wait for."""
        while self.idle and (task := self._next_task(self.idle[0])):
            worker = self.idle.popleft()
            self.attempts[task.name] += 1
            following = None
            if self.prefetches and self.queue.left >= len(self.workers):
                # Not for the last tasks: another worker may be free for them earlier.
                following = self.queue.take()
            if following is not None:
                self.prefetched[worker] = following
            future = worker.run.remote(task, self.attempts[task.name], following)
            self.running[future] = worker, task
        return bool(self.running or self.queue.retries) or not self.queue.exhausted

    def _next_task(self, worker: Any) -> Task | None:
        """Return the task that the worker has prefetched, else a new one, else that of another."""
        if task := self.prefetched.pop(worker, None) or self.queue.take():
            return task
        return self.prefetched.popitem()[1] if self.prefetched else None

    def _start_workers(self, capacity: int) -> None:
        """Start as many workers as there are tasks and capacity for; raise if none can start."""
        if self.failed_starts >= ATTEMPTS * max(1, capacity):
            if not self.workers:
                raise CaprmilError(f"No worker can start. {self.start_error}")
            return
        tasks = self.queue.count
        if self.queue.exhausted:
            tasks = len(self.running) + len(self.queue.retries) + len(self.prefetched)
        for _ in range(min(capacity, tasks) - len(self.workers)):
            worker, future = self.start_worker()
            self.workers.add(worker)
            self.starting[future] = worker

    def _wait(self) -> list[Any]:
        """Return the futures that are ready; wait a moment if there are none."""
        if futures := [*self.starting, *self.running]:
            self.waits_for_nodes = False
            ready: list[Any] = self.ray.wait(futures, num_returns=1, timeout=POLL_SECONDS)[0]
            return ready
        if not self.waits_for_nodes:
            _log.warning("No node is left for a worker. Waiting for one to join.")
        self.waits_for_nodes = True
        sleep(POLL_SECONDS)
        return []

    def _finish_start(self, future: Any) -> None:
        """Add a worker that has started. If the first one cannot start, raise its error."""
        worker = self.starting.pop(future)
        try:
            self.prefetches = self.ray.get(future)
        except self.ray.exceptions.RayTaskError as error:
            self._discard(worker)
            self.failed_starts += 1
            self.start_error = describe_error(error.cause or error)
            if not self.any_started:
                raise CaprmilError(f"No worker can start. {self.start_error}") from None
            _log.warning("A worker cannot start. %s", self.start_error)
        except self.ray.exceptions.RayError as error:
            self._discard(worker)
            self.failed_starts += 1
            self.start_error = (
                f"Workers die ({_cause(error)}). Check the memory of the nodes and Ray's logs."
            )
        else:
            self.failed_starts, self.any_started = 0, True
            self.idle.append(worker)

    def _finish_task(self, future: Any) -> Succeeded | Failed | None:
        """Return the outcome of a task, or None if it is retried."""
        worker, task = self.running.pop(future)
        lost = False
        try:
            state, result = self.ray.get(future)
            self.idle.append(worker)
        except self.ray.exceptions.RayTaskError as error:  # e.g. a result that cannot be pickled
            state, result = "failed", describe_error(error.cause or error)
            self.idle.append(worker)
        except self.ray.exceptions.RayError as error:
            self._discard(worker)
            lost, state, result = True, "failed", f"Its worker was lost: {_cause(error)}."
        if state == "succeeded":
            return Succeeded(task, result)
        attempt = self.attempts[task.name]
        status = JobStatus.read(task.status_file)
        started = status is not None and status.attempt == attempt
        if lost and not started and self.lost_before_start[task.name] < ATTEMPTS:
            self.lost_before_start[task.name] += 1  # this does not count as an attempt
            self.attempts[task.name] -= 1
            self.queue.retries.append(task)
            return None
        status = replace(
            status or JobStatus(state="failed"), state="failed", attempt=attempt, reason=result
        )
        if state == "refused" or attempt == ATTEMPTS:
            status.write(task.status_file)
            return Failed(task, result, attempts=attempt)
        replace(status, state="waiting").write(task.status_file)
        _log.warning("%s failed and is retried: %s", task.name, result)
        self.queue.retries.append(task)
        return None

    def _discard(self, worker: Any) -> None:
        """Remove a worker. The task that it has prefetched goes to another one."""
        self.workers.discard(worker)
        if task := self.prefetched.pop(worker, None):
            self.queue.retries.append(task)
        self.ray.kill(worker)  # it may be alive, and only out of reach

    def _report_progress(self, on_progress: OnProgress) -> None:
        for _, task in self.running.values():
            status = JobStatus.read(task.status_file)
            if status and status.state == "running" and status.total:
                on_progress(task, status.done, status.total, status.message)


def _cause(error: Exception) -> str:
    """Return the line of Ray's long message that has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if "because" in line), lines[0])
    return cause.partition(". ")[0].rstrip(".")
