"""Survival: the time until an event, which is not observed for every slide."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, RecipeError
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.tables import is_number
from caprmil.targets.calibration_method import CalibrationMethod
from caprmil.targets.kaplan_meier import cumulative_hazard
from caprmil.targets.metric import register_metric
from caprmil.targets.partial_likelihood import partial_likelihood, risk_sets
from caprmil.targets.recalibration import Recalibration, of_survival
from caprmil.targets.risk_groups import GROUPS, calibration_panels, group_curves
from caprmil.targets.survival_calibration import HazardFactors
from caprmil.targets.survival_columns import RISK, SURVIVAL, horizon_of
from caprmil.targets.survival_groups import group_answers
from caprmil.targets.survival_labels import check_whole, read_labels
from caprmil.targets.survival_metrics import SURVIVAL_METRICS
from caprmil.targets.target import Answers, Contrast, Criterion, Label, Labels, Target
from caprmil.targets.time_to_event import TimeToEvent, split_labels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

QUINTILES = (0.2, 0.4, 0.6, 0.8)
LARGEST = 50.0  # log hazard ratio: exp of more overflows


@dataclass(frozen=True, kw_only=True)
class Survival(TimeToEvent):
    """The time until an event, per slide. The answer is a risk, and the survival at horizons.

    The risk is a log hazard, relative to the median slide of the fold's training part: above 0 the
    slide is in the group of high risk, and its survival is predicted to be shorter.
    """

    loss: Literal["cox", "discrete"] = "cox"
    """cox: the partial likelihood of proportional hazards. discrete: a hazard for each interval."""
    risk_set: Literal["memory", "batch"] = "memory"
    """What a slide is compared with by Cox's loss. memory: all training slides, with the risks
    that they had when they were last seen. batch: the slides of its step, so it needs a
    train.batch_size of many slides."""
    intervals: int = 4
    """Of time, with equal numbers of events: the outputs of a model with the discrete loss."""
    horizons: tuple[float, ...] = ()
    """The times at which survival is predicted and scored, in the unit of the table. By default
    the quintiles of the times of events."""
    edges: tuple[float, ...] = ()
    """The ends of intervals. Set by `fit`, not in a recipe."""
    center: float = 0.0
    """The median risk of the training slides. Set after training, not in a recipe."""
    hazard: tuple[float, ...] = ()
    """The cumulative hazard of a slide of risk 0 until each horizon, likewise."""

    kind: ClassVar[str] = "survival"
    noun: ClassVar[str] = "survival"
    completes: ClassVar[bool] = True
    scores_patients: ClassVar[bool] = True
    answer_axis: ClassVar[str] = "Risk (log hazard ratio)"
    answer_name: ClassVar[str] = "predicted"
    number_name: ClassVar[str] = "risk"
    display: ClassVar[str] = "survival"
    turn_name: ClassVar[str] = "the slide is in the other risk group"
    headline: ClassVar[str] = "c_index"
    second: ClassVar[str] = "ibs"

    def __post_init__(self) -> None:
        choices = {"loss": ("cox", "discrete"), "risk_set": ("memory", "batch")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise RecipeError(
                    f"[target] {name} is {getattr(self, name)!r}, and must be "
                    f"{' or '.join(allowed)}."
                )
        if self.intervals < 2:
            raise RecipeError(f"[target] intervals must be 2 or more, not {self.intervals}.")
        rising = all(a < b for a, b in zip((0.0, *self.horizons), self.horizons, strict=False))
        if not rising or not np.isfinite(self.horizons).all():
            listed = ", ".join(f"{time:g}" for time in self.horizons)
            raise RecipeError(f"[target] horizons are times above 0, in order, not {listed}.")
        if self.hazard and len(self.hazard) != len(self.horizons):
            raise RecipeError("[target] hazard has another length than horizons.")
        if not np.isfinite([self.center, *self.hazard, *self.edges]).all():
            raise RecipeError("[target] center, hazard and edges must be finite.")

    # Labels

    def read(
        self, cells: Mapping[str, str], column: str, found: Findings, *, required: bool
    ) -> tuple["Survival", dict[str, Label]]:
        if self.edges or self.hazard or self.center:
            raise RecipeError(
                "[target] edges, center and hazard are those of a fold's training part, and cannot "
                "be set. Remove them."
            )
        labels = read_labels(cells, column, found, required=required)
        if required and labels:
            found.problems.extend(check_whole(list(labels.values()), column, self.horizons))
        target = self.with_horizons(list(labels.values())) if required else self
        if target.horizons != self.horizons:
            listed = ", ".join(f"{time:g}" for time in target.horizons)
            found.notes.append(
                f"Survival is predicted at {self.with_unit(listed)}. Set [target] horizons to "
                "choose."
            )
        return target, labels

    def with_horizons(self, labels: Sequence[Label]) -> "Survival":
        """Return the target with horizons: by default quintiles of the times of events."""
        times = np.array([time for time, event in labels if event])
        if self.horizons or not len(times):
            return self
        longest = max(time for time, _ in labels)
        rounded = [float(f"{time:.2g}") for time in np.quantile(times, QUINTILES)]
        chosen = tuple(sorted({time for time in rounded if 0 < time < longest}))
        return replace(self, horizons=chosen or (float(longest) or 1.0,))

    @property
    def ready(self) -> bool:
        return bool(self.horizons)

    def example(self) -> "Survival":
        return self if self.ready else replace(self, horizons=(1.0,))

    # Models

    @property
    def n_outputs(self) -> int:
        return 1 if self.loss == "cox" else self.intervals

    @property
    def one_device(self) -> str:
        if self.loss == "cox" and self.risk_set == "memory":
            return (
                "Cox's loss carries risks from step to step, which devices do not share. Train on "
                'one, or set target.loss = "discrete".'
            )
        return ""

    def fit(self, labels: Sequence[Label]) -> "Survival":
        times, events = split_labels(labels)
        if not events.any():
            raise CohortError("No training slide has the event: nothing can be learned from them.")
        hazard = cumulative_hazard(times, events, self.horizons)
        return replace(self, edges=self._edges(times[events]), hazard=tuple(hazard.tolist()))

    def _edges(self, times: NDArray[np.float64]) -> tuple[float, ...]:
        """Return the ends of intervals with equal numbers of events, as float32 has them."""
        if self.loss == "cox":
            return ()
        shares = np.arange(1, self.intervals + 1) / self.intervals
        edges = np.quantile(times, shares, method="higher").astype(np.float32)
        return tuple(edges.astype(np.float64).tolist())

    def complete(self, outputs: "Tensor", labels: Labels) -> "Survival":
        """Return the target with the median risk of training slides, and the baseline hazard."""
        times, events = split_labels(labels)
        risks = self._risk(outputs.double()).cpu().numpy()
        center = float(np.median(risks))
        hazard = self.hazard
        if self.loss == "cox":
            above = np.clip(risks - center, -LARGEST, LARGEST)
            hazard = tuple(cumulative_hazard(times, events, self.horizons, above).tolist())
        return replace(self, center=center, hazard=hazard)

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        from caprmil.targets.survival_losses import BatchCox, DiscreteLoss, MemoryCox

        if self.loss == "discrete":
            return DiscreteLoss(self.edges)
        return BatchCox() if self.risk_set == "batch" else MemoryCox(labels)

    def validation_loss(self, outputs: "Tensor", labels: "Tensor") -> "Tensor | None":
        from caprmil.targets.survival_losses import cox_loss

        return cox_loss(outputs[:, 0], labels) if self.loss == "cox" else None

    def _risk(self, outputs: Any) -> Any:
        """Return the log hazard (...) of outputs (..., C): for the discrete loss, their mean."""
        if self.loss == "cox":
            return outputs[..., 0]
        ends = self.edges or range(1, self.intervals + 1)
        used = [number for number, width in enumerate(np.diff((0.0, *ends))) if width > 0]
        return sum(outputs[..., number] for number in used) / len(used)

    def answer(self, outputs: "Tensor") -> "Tensor":
        import torch
        import torch.nn.functional as F

        risk = self._risk(outputs) - self.center
        if self.loss == "cox":
            hazard = outputs.new_tensor(self.hazard)
            survival = (-hazard * risk.clamp(-LARGEST, LARGEST).exp()[..., None]).exp()
        else:
            survival = (-F.softplus(outputs) @ self._passed(outputs).mT).exp()
        return torch.cat([risk[..., None], survival], dim=-1)

    def _passed(self, outputs: "Tensor") -> "Tensor":
        """Return the share of each interval that has passed at each horizon."""
        import torch

        from caprmil.targets.survival_losses import exposure

        horizons, edges = (torch.tensor(each).double() for each in (self.horizons, self.edges))
        return exposure(horizons, edges).to(outputs)

    # Predictions

    @property
    def columns(self) -> tuple[str, ...]:
        return ("risk", *(f"{SURVIVAL}{time:.10g}" for time in self.horizons))

    @property
    def titles(self) -> tuple[str, ...]:
        at = (self.with_unit(f"Survival at {time:.10g}") for time in self.horizons)
        return ("Risk (log hazard ratio)", *at)

    def owns(self, column: str) -> bool:
        return column == "risk" or horizon_of(column) is not None

    @classmethod
    def from_table(
        cls, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Recognise a column of risks, and columns survival_<time>; times and events by name."""
        risk = tables.find_column(table, RISK)
        if risk is None or not all(map(is_number, table[risk])):
            return None
        at = {name: time for name in map(str, table) if (time := horizon_of(name)) is not None}
        columns = sorted(at, key=lambda name: at[name])
        target = cls(horizons=tuple(at[name] for name in columns))
        answers = np.array([tables.numbers(table, name) for name in (risk, *columns)]).T
        target.check_answers(answers, list(table.index))
        truth: tuple[str, ...] = ()
        try:
            rest = [name for name in table.columns if name not in (risk, *columns)]
            truth = target.find_columns(rest)
            target = target.named(truth)
        except CohortError:
            if label is not None:
                raise
        return target, truth, [risk, *columns], answers

    def check_answers(self, answers: Answers, names: Sequence[str] | None = None) -> None:
        if answers.ndim != 2 or answers.shape[1] != 1 + len(self.horizons):
            raise ValueError(f"Answers are a risk and survivals. {answers.shape=}, {self.horizons}")
        if not len(answers):
            raise CohortError("There are no predictions to score.")
        probable = (answers[:, 1:] >= -1e-9) & (answers[:, 1:] <= 1 + 1e-9)
        right = np.isfinite(answers[:, 0]) & probable.all(axis=1)
        if not right.all():
            row = int(np.argmin(right))
            where = names[row] if names else f"Row {row}"
            shown = ", ".join(f"{value:g}" for value in answers[row])
            raise CohortError(f"{where}: {shown} is not a risk and probabilities of survival.")

    def predicted(self, answers: Answers) -> list[str]:
        return [GROUPS[int(risk > 0)] for risk in answers[:, 0]]

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        times = [f"{time:.10g}" for time in self.horizons]
        return {
            "predicted": self.predicted(answer[None])[0],
            "risk": float(answer[0]),
            "survival": dict(zip(times, map(float, answer[1:]), strict=True)),
        }

    def show(self, answer: NDArray[np.floating]) -> str:
        return f"{self.predicted(answer[None])[0]} {answer[0]:+.4f}"

    @property
    def has_order(self) -> bool:
        return True

    def heights(self, answers: Answers) -> NDArray[np.floating]:
        return answers[:, 0]

    def disagreement(self, answers: Answers) -> float:
        return float(answers[:, 0].std(ddof=1))

    def reordered(self, other: Target, labels: Labels, answers: Answers) -> tuple[Labels, Answers]:
        return labels, answers.astype(np.float64)

    # Scores

    def can_score(self, labels: Labels) -> bool:
        """Whether there is a pair whose order is known."""
        times, events = split_labels(labels)
        return bool(events.any() and times.max() > times[events].min()) if len(times) else False

    def notes(self, fold: str, labels: Labels, answers: Answers) -> Iterator[str]:
        times, events = split_labels(labels)
        if not events.any():
            yield f"Fold {fold} has no event in its test part: it has no scores."
        elif self.horizons and times.max() <= self.horizons[-1]:
            yield (
                f"Nobody in the test part of fold {fold} is followed beyond "
                f"{self.with_unit(f'{self.horizons[-1]:g}')}: it is not scored there."
            )

    def figures(self, folds: "Mapping[str, tuple[Labels, Answers]]") -> "dict[str, Figure]":
        from caprmil import figures

        labels, answers = (np.concatenate(part) for part in zip(*folds.values(), strict=True))
        curves, title = group_curves(labels, answers)
        drawn = {
            "kaplan_meier.png": figures.survival_curves(curves, xlabel=self.time_title, title=title)
        }
        if panels := calibration_panels(labels, answers, self.horizons, self.unit):
            drawn["calibration.png"] = figures.survival_calibration(panels)
        return drawn

    # Baselines

    def as_answers(self, labels: Labels) -> Answers:
        """Return the answer of each slide if it were a group of its own: see `group_answers`."""
        names = [str(number) for number in range(len(labels))]
        found = self.group_answers(labels, names)
        return np.stack([found(name) for name in names])

    def group_answers(self, labels: Labels, groups: Sequence[str | None]) -> Any:
        """Return the answer of a group by its name: the events in it against those expected.

        What is expected follows from the hazard of all. One event is added to both.
        """
        return group_answers(labels, groups, self.horizons)

    def linear_model(self, strength: float) -> Any:
        from caprmil.targets.linear_cox import LinearCox

        return LinearCox(strength, self.horizons)

    def linear_answers(self, model: Any, features: NDArray[np.float64]) -> Answers:
        return np.asarray(model.predict(features), dtype=np.float64)

    def answer_loss(self, labels: Labels, answers: Answers) -> float:
        times, events = split_labels(labels)
        if not events.any():
            return 0.0
        risks = answers[:, 0].astype(np.float64)
        return partial_likelihood(risks, risk_sets(times, events))[0] / int(events.sum())

    # Guarantees

    no_sets: ClassVar[str] = (
        ": whether a set holds the time of a censored slide is not known, so none can be calibrated"
    )

    # Calibration

    @property
    def calibration(self) -> CalibrationMethod:
        return HazardFactors(self)

    # Other sites

    def recalibrate(self, labels: Labels, answers: Answers) -> Recalibration:
        return of_survival(labels, answers, self.horizons)

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """The log hazard, which is the risk without its reference."""
        return (
            Contrast(
                name="a higher hazard",
                of=self._risk,
                negative="for a lower hazard",
                total="log hazard",
                ends=("lower hazard", "higher hazard"),
            ),
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        if self.loss == "cox":
            return ("log hazard",)
        ends = [f"until {self.with_unit(f'{edge:.4g}')}" for edge in self.edges]
        return tuple(ends) or tuple(f"interval {n + 1}" for n in range(self.intervals))

    def followed(self, answer: Any) -> Any:
        return answer[..., :1]

    def sign_of(self, answer: NDArray[np.floating]) -> int:
        """Return -1 for a low risk: patches for a lower hazard support it."""
        return 1 if answer[0] > 0 else -1

    def turned(self, before: NDArray[np.floating], after: NDArray[np.floating]) -> bool:
        """Return whether a slide is in the other risk group."""
        return bool((before[0] > 0) != (after[0] > 0))


for _metric in SURVIVAL_METRICS:
    register_metric("survival", _metric)
