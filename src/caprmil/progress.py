"""Progress: a bar for work that takes more than a few seconds, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Step = Callable[[int, int], None]
"""Called with how much is done and how much there is."""


class Bar(Protocol):
    """What `bar` yields: a step that may also carry a remark."""

    def __call__(self, done: float, total: float, remark: str = "") -> None: ...


@contextmanager
def bar(title: str, *, shown: bool = True) -> Iterator[Bar]:
    """Show a bar in a terminal; in a log file, a line for every tenth of the work."""
    if not shown:
        yield lambda *_: None
    elif not sys.stderr.isatty():
        yield _lines(title)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
        remarks = TextColumn("{task.fields[remark]}")
        with Progress(*columns, remarks, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(title, total=None, remark="")

            def step(done: float, total: float, remark: str = "") -> None:
                progress.update(task, completed=done, total=total, remark=remark)

            yield step


def _lines(title: str) -> Bar:
    told = 0

    def step(done: float, total: float, remark: str = "") -> None:
        nonlocal told
        tenth = int(10 * done / total)
        if tenth > told:
            told = tenth
            sys.stderr.write(f"{title}: {done:.3g} of {total:g} {remark}".rstrip() + "\n")

    return step
