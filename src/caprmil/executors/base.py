"""Units of work, workers that do them, and the plainest crew: this process, one after the other.

A unit can be done again at no harm, and its result is stored whole or not at all: a slide to
encode, a fold to train, a point of a sweep. So whatever happens to who does it, the unit in work
is all that is lost.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from caprmil.executors import job_status as notes
from caprmil.io.progress import Bar


@dataclass(frozen=True)
class Unit:
    """A piece of work: its name, where notes on it are kept, and what a worker must know."""

    name: str
    note: Path
    task: Any = None


@dataclass(frozen=True)
class Done:
    """A unit that was done, and what its worker returned."""

    unit: Unit
    result: Any


@dataclass(frozen=True)
class Failed:
    """A unit that was given up."""

    unit: Unit
    reason: str
    attempts: int = 1
    error: Exception | None = None
    """The error itself, if it happened in this process."""


class Worker:
    """Does units of one kind, one after the other.

    It is made where it works and stays there, so it may hold what is slow to get: an encoder, bags.
    """

    ahead = False
    """Whether it helps to know the unit after the present one."""

    def work(self, unit: Unit, tell: Bar) -> Any:
        """Do a unit. A CaprmilError means that trying again would be of no use."""
        raise NotImplementedError

    def expect(self, unit: Unit) -> None:
        """Hear of the unit that comes after the present one, to get ready for it meanwhile."""

    def close(self) -> None:
        """Let go of what is held."""


Hire: TypeAlias = Callable[[], Worker]
Listen: TypeAlias = Callable[[Unit, float, float, str], None]
"""Hears how far a unit in work is: done, total, remark."""


class Crew(Protocol):
    """Who does units of work."""

    elsewhere: bool
    """Whether it works in other processes, which may have other devices than this one."""

    def do(self, units: Iterable[Unit], hire: Hire, listen: Listen) -> Iterator[Done | Failed]:
        """Yield what came of each unit, as soon as it is known.

        A unit is taken from `units` only when somebody is free for it, so what is yielded before
        may decide which comes next.
        """
        ...


class Here:
    """This process. What goes wrong is not tried again: it would go wrong again."""

    elsewhere = False

    def do(self, units: Iterable[Unit], hire: Hire, listen: Listen) -> Iterator[Done | Failed]:
        """Yield what came of each unit, in their order."""
        with closing(hire()) as worker:
            for unit, then in _with_next(units) if worker.ahead else ((u, None) for u in units):
                if then is not None:
                    worker.expect(then)
                outcome: Done | Failed
                try:
                    with notes.attended(unit.note, listen=partial(listen, unit)) as tell:
                        outcome = Done(unit, worker.work(unit, tell))
                except Exception as problem:
                    outcome = Failed(unit, notes.said(problem), error=problem)
                yield outcome


def _with_next(units: Iterable[Unit]) -> Iterator[tuple[Unit, Unit | None]]:
    before = None
    for unit in units:
        if before is not None:
            yield before, unit
        before = unit
    if before is not None:
        yield before, None
