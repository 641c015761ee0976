"""Progress: a bar for work that takes more than a few seconds, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
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


class Pace:
    """How far one is: slides done, patches a second, time left."""

    def __init__(self, progress: Bar | None, *, total: int) -> None:
        self.progress, self.total = progress, total
        self.slides, self.patches = 0, 0.0
        self.parts: dict[str, tuple[float, float]] = {}
        self.start = monotonic()

    def count(self, slide: str, done: float, of: float) -> None:
        """Note how many patches of a slide in work are done, and of how many."""
        self.parts[slide] = done, of
        self._show()

    def tick(self, slide: str, patches: int = 0) -> None:
        """Note that a slide is done."""
        self.parts.pop(slide, None)
        self.slides, self.patches = self.slides + 1, self.patches + patches
        self._show()

    def _show(self) -> None:
        if self.progress is None or not self.total:
            return
        done = self.slides + sum(min(part / of, 0.99) for part, of in self.parts.values())
        patches = self.patches + sum(part for part, _ in self.parts.values())
        passed = monotonic() - self.start
        left = passed / max(done, 1e-6) * (self.total - done)
        time = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        rate = f"{patches / max(passed, 1e-6):.0f} patches/s, " if patches else ""
        self.progress(done, self.total, f"slides, {rate}{time} left")
