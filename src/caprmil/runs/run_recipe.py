"""The recipe of a run, as far as a prediction needs it."""

from functools import cached_property
from pathlib import Path
from typing import Any

from caprmil import config
from caprmil.cohort.covariates import VECTOR
from caprmil.errors import CaprmilError, RunError
from caprmil.runs.facts import RECIPE


class RunRecipe:
    """The recipe in the folder of a run. It is read when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECIPE

    @cached_property
    def text(self) -> str:
        """The recipe as TOML."""
        try:
            return self.path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise self._damaged(_reason(problem)) from problem

    @cached_property
    def content(self) -> dict[str, Any]:
        """All settings, in tables."""
        try:
            return config.read_toml(self.text)
        except (ValueError, RecursionError) as problem:
            raise self._damaged(_reason(problem)) from problem

    def table(self, name: str) -> dict[str, Any]:
        """Return a table of settings; an empty one if the recipe does not have it."""
        found = self.content.get(name, {})
        if not isinstance(found, dict):
            raise self._damaged(f"{name} is not a table")
        return found

    @property
    def data(self) -> dict[str, Any]:
        """The table [data]."""
        return self.table("data")

    @property
    def columns(self) -> dict[str, str]:
        """The columns of slide, patient, label and site, as far as they are named."""
        roles = ("slide", "patient", "label", "site")
        found: dict[str, str] = {role: self.data[role] for role in roles if role in self.data}
        if not all(isinstance(name, str) for name in found.values()):
            raise self._damaged("the name of a column is not text")
        return found

    @property
    def covariates(self) -> tuple[str, ...]:
        """The columns that the models read besides the patches."""
        names = self.data.get("covariates", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._damaged("covariates is not a list of columns")
        return (*names, *([VECTOR] if self.data.get("vectors") else []))

    def _damaged(self, reason: str) -> RunError:
        return RunError(f"{self.path} is missing or damaged ({reason}). Restore it from a copy.")


def _reason(problem: Exception) -> str:
    """Return a problem in a few words, with its type unless it is an error of ours."""
    kind = "" if isinstance(problem, CaprmilError) else f"{type(problem).__name__}: "
    return f"{kind}{problem}".rstrip(".")
