"""An executor that runs all tasks in this process."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial

from caprmil.executors.executor import Failed, OnProgress, Succeeded, Task, WorkerFactory
from caprmil.executors.job_status import describe_error, heartbeat


class LocalExecutor:
    """Runs tasks in this process, in order. A task that fails is not retried."""

    remote = False

    def run(
        self, tasks: Iterable[Task], make_worker: WorkerFactory, on_progress: OnProgress
    ) -> Iterator[Succeeded | Failed]:
        """Yield the outcome of each task, in order."""
        with closing(make_worker()) as worker:
            pairs = _with_next(tasks) if worker.prefetches else ((task, None) for task in tasks)
            for task, following in pairs:
                if following is not None:
                    worker.prefetch(following)
                outcome: Succeeded | Failed
                try:
                    progress = partial(on_progress, task)
                    with heartbeat(task.status_file, on_progress=progress) as report:
                        outcome = Succeeded(task, worker.run(task, report))
                except Exception as error:
                    outcome = Failed(task, describe_error(error), error=error)
                yield outcome


def _with_next(tasks: Iterable[Task]) -> Iterator[tuple[Task, Task | None]]:
    previous = None
    for task in tasks:
        if previous is not None:
            yield previous, task
        previous = task
    if previous is not None:
        yield previous, None
