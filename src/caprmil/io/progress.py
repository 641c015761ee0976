"""Progress bars on standard error, for work that takes more than a few seconds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

Step = Callable[[int, int], None]
"""Called with the amount of work done, and the total."""


class Bar(Protocol):
    """A callable that shows the amount of work done, the total, and a remark."""

    def __call__(self, done: float, total: float, remark: str = "") -> None: ...


@contextmanager
def bar(title: str, *, shown: bool = True, eta: bool = True) -> Iterator[Bar]:
    """Yield a progress bar; in a log file, one that prints a line per tenth of the work.

    `eta` shows the time left. Leave it out if the remark has it, as that of an extraction.
    """
    if not shown:
        yield lambda *_: None
    elif not sys.stderr.isatty():
        yield _lines(title)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [Remaining()] if eta else []
        columns.append(TextColumn("{task.fields[remark]}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(title, total=None, remark="")

            def step(done: float, total: float, remark: str = "") -> None:
                progress.update(task, completed=done, total=total, remark=remark)

            yield step


def _lines(title: str) -> Bar:
    printed = 0

    def step(done: float, total: float, remark: str = "") -> None:
        nonlocal printed
        tenth = int(10 * done / total)
        if tenth > printed:
            printed = tenth
            sys.stderr.write(f"{title}: {int(done)} of {total:g} {remark}".rstrip() + "\n")

    return step


class Pace:
    """The progress of an extraction: slides done, patches per second, time left."""

    def __init__(self, progress: Bar | None, *, total: int) -> None:
        self.progress, self.total = progress, total
        self.slides, self.patches = 0, 0.0
        self.parts: dict[str, tuple[float, float]] = {}
        self.start = monotonic()

    def count(self, slide: str, done: float, of: float) -> None:
        """Record how many patches of a slide are done, and their total."""
        self.parts[slide] = done, of
        self._show()

    def tick(self, slide: str, patches: int = 0) -> None:
        """Record that a slide is done."""
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
