"""Progress: a bar for work that takes more than a few seconds, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[int, int], None]
"""Called with how much is done and how much there is."""


@contextmanager
def bar(title: str, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar; what is yielded is called with done, total and, if there is any, a remark."""
    if not shown:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    remark = TextColumn("{task.fields[remark]}")
    with Progress(*columns, remark, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, remark="")

        def step(done: float, total: float, remark: str = "") -> None:
            progress.update(task, completed=done, total=total, remark=remark)

        yield step
