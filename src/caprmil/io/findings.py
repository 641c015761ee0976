"""Findings of a check: problems that stop it, and notes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from caprmil.errors import shorten


@dataclass
class Findings:
    """Problems that a user must correct, and notes that are only worth knowing."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, headline: str, names: Iterable[str], advice: str) -> None:
        """Add a problem with the names it concerns, if there are any."""
        if names := list(names):
            self.problems.append(f"{headline} ({len(names)}): {shorten(names)}. {advice}")

    def note(self, headline: str, names: Iterable[str], advice: str) -> None:
        """Add a note with the names it concerns, if there are any."""
        if names := list(names):
            self.notes.append(f"{headline} ({len(names)}): {shorten(names)}. {advice}")
