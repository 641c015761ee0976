"""Several targets of one model: a shared context, and a few outputs for each of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from caprmil import config
from caprmil.errors import CohortError, RecipeError, UnknownNameError, shorten
from caprmil.targets.composite import Composite
from caprmil.targets.metric import Metric, registered_metrics
from caprmil.targets.part_metrics import weighted_mean
from caprmil.targets.target import Answers, Criterion, Label, Target

if TYPE_CHECKING:
    import pandas as pd

NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of several targets: a table [target.tasks.NAME], with the settings of its kind."""

    kind: str = "classification"
    label: str | None = None
    """The column of its label. By default, that of its name. Not for a kind that names several."""
    weight: float = 1.0
    """Of its loss in the sum."""
    settings: dict[str, Any] = field(default_factory=dict, metadata=config.REST)

    def __post_init__(self) -> None:
        if not isfinite(self.weight) or self.weight <= 0:
            raise RecipeError(f"weight must be above 0, not {self.weight:g}.")
        # All settings, so that equal tasks have equal digests.
        object.__setattr__(self, "settings", config.as_table(self.target))

    @cached_property
    def target(self) -> Target:
        """The target itself."""
        from caprmil.targets.kinds import find_target

        try:
            kind = find_target(self.kind)
        except UnknownNameError as problem:
            raise RecipeError(str(problem)) from None
        if kind is Several:
            raise RecipeError("A task cannot be several targets. Name each as a task.")
        return config.parse(self.settings, into=kind, name=self.kind)

    def of(self, target: Target) -> "Task":
        """Return the task with another target."""
        return replace(self, kind=target.kind, settings=config.as_table(target))


@dataclass(frozen=True, kw_only=True)
class Several(Composite):
    """Several targets of any kinds, which share a model up to its last layer.

    A slide may lack the labels of some of them. The first one is explained first.
    """

    tasks: dict[str, Task]
    """The targets by name."""
    weighting: Literal["fixed", "uncertainty"] = "fixed"
    """Of the losses. fixed: their sum, each times its `weight`. uncertainty: it is learned too."""
    order: tuple[str, ...] = ()
    """The names in the order in which they are shown. By default, that of the recipe."""

    kind: ClassVar[str] = "several"
    noun: ClassVar[str] = "several targets"
    has_tasks: ClassVar[bool] = True
    answer_axis: ClassVar[str] = "Prediction, {}"
    saturates: ClassVar[bool] = True
    display: ClassVar[str] = "several"
    headline: ClassVar[str] = "skill"
    second: ClassVar[str] = "skill"
    lead_name: ClassVar[str] = "answer for the first target"
    turn_name: ClassVar[str] = "the prediction of the first target turns"

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.order or tuple(self.tasks))
        if len(self.tasks) < 2:
            raise RecipeError(
                '[target] kind = "several" needs two tables [target.tasks.NAME] or more. For a '
                "single target, set its own kind."
            )
        if sorted(self.order) != sorted(self.tasks):
            raise RecipeError(f"[target] order must name each of {', '.join(self.tasks)} once.")
        for name in self.tasks:
            if not NAME.fullmatch(name):
                raise RecipeError(
                    f"A task cannot be called '{name}': use letters, digits, - and _. Its column "
                    "can have any name: set label."
                )
        if self.weighting not in ("fixed", "uncertainty"):
            raise RecipeError(f"weighting is {self.weighting!r}, and must be fixed or uncertainty.")

    def __str__(self) -> str:
        return f"{len(self.tasks)} targets"

    @cached_property
    def targets(self) -> dict[str, Target]:
        return {name: self.tasks[name].target for name in self.order}

    def with_targets(self, targets: dict[str, Target]) -> Self:
        tasks = {name: task.of(targets[name]) for name, task in self.tasks.items()}
        return replace(self, tasks=tasks)

    def setting_of(self, name: str) -> str:
        return f"[target.tasks.{name}]"

    # Labels

    def find_columns(self, header: Sequence[str]) -> tuple[str, ...]:
        columns: list[str] = []
        for name, target in self.targets.items():
            given = self.tasks[name].label
            try:
                own = target.find_columns(header)
            except CohortError:  # an external cohort may lack them; `read` reports it otherwise
                own = target.label_names
            if own and given:
                raise RecipeError(
                    f"{self.setting_of(name)} label: the kind {target.kind} names its columns "
                    "itself. Remove it."
                )
            columns += own or (given or name,)
        if not set(columns) & set(header):
            raise CohortError(
                f"No column is called {' or '.join(columns)}. Columns: {shorten(header)}. Set "
                f"label in {self.setting_of(self.order[0])}, and in the others."
            )
        return tuple(columns)

    def columns_of(self, name: str) -> tuple[str, ...]:
        own = self.targets[name].label_names
        return (self.tasks[name].label or name,) if len(own) == 1 else own

    # Models

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        from caprmil.targets.part_losses import PartLosses

        known = self.own_labels(labels)
        return PartLosses(
            self.parts,
            {name: target.criterion(known[name]) for name, target in self.targets.items()},
            {name: task.weight for name, task in self.tasks.items()},
            learned=self.weighting == "uncertainty",
        )

    # Predictions

    @classmethod
    def from_table(
        cls, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Recognise columns with the names of targets before a dot: grade.prob_high, age.predicted.

        What comes after it is what the table of each target alone has.
        """
        from caprmil.targets.kinds import TARGETS

        groups: dict[str, dict[str, str]] = {}
        for column in map(str, table.columns):
            name, dot, rest = column.partition(".")
            if dot and rest and NAME.fullmatch(name):
                groups.setdefault(name, {})[column] = rest
        kinds = [kind for kind in TARGETS.values() if kind is not cls]
        kinds.sort(key=lambda kind: not kind.has_parts)
        tasks: dict[str, Task] = {}
        for name, columns in groups.items():
            own = table[list(columns)].rename(columns=columns)
            found = next(filter(None, (kind.from_table(own, None) for kind in kinds)), None)
            if found is not None:
                tasks[name] = Task(kind=found[0].kind, settings=config.as_table(found[0]))
        if len(tasks) < 2 or all(task.target.has_parts for task in tasks.values()):
            return None
        return cls(tasks=tasks).read_table(table, label)

    # Scores

    @property
    def metrics(self) -> dict[str, Metric]:
        """The skill score, the mean over targets; then the metrics of each target.

        The skill of a target is its first metric on the scale from chance (0) to perfect (1).
        """
        found = self.part_metrics
        scales = {
            found[name][target.headline]: _skill(target.headline_metric)
            for name, target in self.targets.items()
        }
        skill = weighted_mean("skill", "Skill score", scales, chance=0.0)
        each = [metric for own in found.values() for metric in own.values()]
        return {"skill": skill} | {m.name: m for m in each} | registered_metrics(self)

    # Evidence: the first target is explained first.

    def contrast_of(self, answer: NDArray[np.floating]) -> int:
        first = self.parts[self.order[0]]
        return first.target.contrast_of(answer[first.answers])

    def sign_of(self, answer: NDArray[np.floating]) -> int:
        first = self.parts[self.order[0]]
        return first.target.sign_of(answer[first.answers])

    def turned(self, before: NDArray[np.floating], after: NDArray[np.floating]) -> bool:
        first = self.parts[self.order[0]]
        return first.target.turned(before[first.answers], after[first.answers])


def _skill(metric: Metric) -> tuple[float, float]:
    """Return factor and shift from a metric to its skill score."""
    if not metric.higher_is_better:
        return -1.0, 0.0  # there is no best value to scale by
    chance = metric.chance or 0.0
    return 1 / (1 - chance), -chance / (1 - chance)
