"""Multilabel: several labels per slide, each of which is positive or negative by itself."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, RecipeError
from caprmil.io.findings import Findings
from caprmil.io.tables import is_number
from caprmil.targets.calibration_method import CalibrationMethod
from caprmil.targets.composite import Composite
from caprmil.targets.conformal import Conformal, LabelSets
from caprmil.targets.label_metrics import LABEL_METRICS
from caprmil.targets.metric import Metric, register_metric, registered_metrics
from caprmil.targets.part_metrics import mean_of
from caprmil.targets.recalibration import LABEL_LOG_LOSS, Recalibration, both, of_label
from caprmil.targets.target import Answers, Contrast, Criterion, Label, Labels, Target
from caprmil.targets.temperature import LabelTemperatures

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

POSITIVE = ("1", "yes", "y", "true", "positive", "pos", "+", "present", "mut", "mutated", "mutant")
NEGATIVE = ("0", "no", "n", "false", "negative", "neg", "-", "absent", "wt", "wildtype")
PROBABILITY = "positive"  # <label>.positive is the column of its probability


@dataclass(frozen=True, kw_only=True)
class BinaryLabel(Target):
    """One label, positive or negative. The answer is the probability that it is positive.

    A part of a multilabel target, with one output. It is not a target of its own: that is a
    classification.
    """

    kind: ClassVar[str] = "label"
    answer_name: ClassVar[str] = "probability"
    number_name: ClassVar[str] = "probability"
    output_name: ClassVar[str] = "logit"
    headline: ClassVar[str] = "auc"
    second: ClassVar[str] = "average_precision"
    display: ClassVar[str] = "labels"
    saturates: ClassVar[bool] = True
    missing: ClassVar[Label] = -1
    n_outputs = 1
    columns = (PROBABILITY,)

    def read(
        self, cells: Mapping[str, str], column: str, found: Findings, *, required: bool
    ) -> tuple["BinaryLabel", dict[str, Label]]:
        labels, odd = dict[str, Label](), []
        for name, cell in cells.items():
            try:
                labels[name] = self.parse_label(cell)
            except ValueError:
                odd.append(f"{name} ({cell})")
        advice = f"Use one of {', '.join(POSITIVE)}, or of {', '.join(NEGATIVE)}."
        found.problem(f"Cells of {column} that are not positive or negative", odd, advice)
        if required and len(set(labels.values())) == 1:
            side = "positive" if 1 in labels.values() else "negative"
            found.problems.append(
                f"Column {column} is {side} on every slide. Leave it out of [target] labels."
            )
        return self, labels

    def strata(self, labels: Mapping[str, Label]) -> tuple[dict[str, int], tuple[str, ...]]:
        return {name: int(label) for name, label in labels.items()}, ("negative", "positive")

    def known(self, labels: Labels) -> NDArray[np.bool_]:
        return np.asarray(labels >= 0)

    def as_labels(self, labels: Iterable[Label | None]) -> Labels:
        return np.array([-1 if label is None else label for label in labels], dtype=np.int64)

    def check_labels(self, labels: Labels) -> None:
        if not set(labels.tolist()) <= {-1, 0, 1}:
            raise ValueError(f"Labels are 1, 0, or -1 for none. {labels=}")

    def show_label(self, label: Label) -> str:
        return str(int(label)) if label >= 0 else ""

    def parse_label(self, cell: str) -> Label:
        word = cell.casefold().replace("-", "").replace(" ", "") or cell  # wild-type
        word = f"{float(cell):g}" if is_number(cell) else word
        if word not in (*POSITIVE, *NEGATIVE):
            raise ValueError(
                f"'{cell}' is neither positive (1, yes, mut) nor negative (0, no, wt)."
            )
        return int(word in POSITIVE)

    def answer(self, outputs: "Tensor") -> "Tensor":
        return outputs.sigmoid()

    def check_answers(self, answers: Answers, names: Sequence[str] | None = None) -> None:
        fits = ((answers >= 0) & (answers <= 1)).all(axis=1)  # not NaN
        if not fits.all():
            row = int(np.argmin(fits))
            where = names[row] if names else f"Row {row}"
            raise CohortError(f"{where}: {answers[row, 0]:g} is not a probability, from 0 to 1.")

    def predicted(self, answers: Answers) -> list[str]:
        return [str(int(p > 0.5)) for p in answers[:, 0]]

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        return {"predicted": int(answer[0] > 0.5), "probability": float(answer[0])}

    def show(self, answer: NDArray[np.floating]) -> str:
        return f"{answer[0]:.4f}"

    def disagreement(self, answers: Answers) -> float:
        return float(answers[:, 0].std(ddof=1))

    def reordered(self, other: Target, labels: Labels, answers: Answers) -> tuple[Labels, Answers]:
        return labels, answers.astype(np.float64)

    def can_score(self, labels: Labels) -> bool:
        return len(set(labels.tolist())) > 1

    def notes(self, fold: str, labels: Labels, answers: Answers) -> Iterator[str]:
        if not self.can_score(labels):
            yield f"fold {fold} has no {'negative' if labels[0] else 'positive'} slide, so no AUC."

    def figures(self, folds: "Mapping[str, tuple[Labels, Answers]]") -> "dict[str, Figure]":
        return {}

    def as_answers(self, labels: Labels) -> Answers:
        return np.asarray(labels, dtype=np.float64)[:, None]

    def linear_model(self, strength: float) -> Any:
        from sklearn.linear_model import LogisticRegression

        from caprmil.targets.classification import ITERATIONS

        return LogisticRegression(C=strength, max_iter=ITERATIONS)

    def linear_answers(self, model: Any, features: NDArray[np.float64]) -> Answers:
        return np.asarray(model.predict_proba(features), dtype=np.float64)[:, 1:]

    def answer_loss(self, labels: Labels, answers: Answers) -> float:
        from sklearn.metrics import log_loss

        return float(log_loss(labels, answers[:, 0], labels=[0, 1]))

    risk_title: ClassVar[str] = "Error rate"

    @property
    def conformal(self) -> Conformal:
        return LabelSets()

    def confidence(self, answers: Answers) -> NDArray[np.float64]:
        return np.asarray(both(answers).max(axis=1), dtype=np.float64)

    def losses(self, labels: Labels, answers: Answers) -> NDArray[np.float64]:
        return np.asarray((answers[:, 0] > 0.5) != labels, dtype=np.float64)

    @property
    def calibration(self) -> CalibrationMethod:
        return LabelTemperatures("a positive label")

    def recalibrate(self, labels: Labels, answers: Answers) -> Recalibration:
        return of_label(labels, answers)

    @property
    def calibration_metrics(self) -> dict[str, Metric]:
        return {LABEL_LOG_LOSS.name: LABEL_LOG_LOSS}

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        return (Contrast(name="positive", of=partial(_output, 0), total="logit"),)

    def turned(self, before: NDArray[np.floating], after: NDArray[np.floating]) -> bool:
        return bool((before[0] > 0.5) != (after[0] > 0.5))


@dataclass(frozen=True, kw_only=True)
class Multilabel(Composite):
    """Several labels per slide. The answer is a probability for each of them.

    A label may be missing on some slides, which then do not count for it.
    """

    labels: tuple[str, ...]
    """The columns of the cohort, each with 1 or 0, yes or no, mut or wt, or an empty cell."""
    positive_weights: Literal["none", "balanced"] = "none"
    """balanced: weight the positive slides of a label by how many negative ones there are for
    each."""

    kind: ClassVar[str] = "multilabel"
    noun: ClassVar[str] = "several labels"
    answer_axis: ClassVar[str] = "Probability of {}"
    answer_bounds: ClassVar[tuple[float, float] | None] = (0, 1)
    answer_name: ClassVar[str] = "probabilities"
    number_name: ClassVar[str] = "probability"
    contrast_name: ClassVar[str] = "label"
    saturates: ClassVar[bool] = True
    output_name: ClassVar[str] = "logit"
    lead_name: ClassVar[str] = "logit of the likeliest label"
    turn_name: ClassVar[str] = "the likeliest label crosses a probability of 50 %"
    display: ClassVar[str] = "labels"
    headline: ClassVar[str] = "auc"
    second: ClassVar[str] = "average_precision"

    def __post_init__(self) -> None:
        if not self.labels:
            raise RecipeError("[target] labels names no column. Name those with the labels.")
        if twice := {name for name in self.labels if self.labels.count(name) > 1}:
            raise RecipeError(f"[target] labels names one twice: {', '.join(sorted(twice))}.")
        if taken := {"slide", "patient", "fold", "predicted"} & set(self.labels):
            raise RecipeError(
                f"[target] labels cannot be called {', '.join(sorted(taken))}. Rename the column."
            )
        if self.positive_weights not in ("none", "balanced"):
            raise RecipeError(
                f"positive_weights cannot be {self.positive_weights!r}. Known: balanced, none."
            )

    def __str__(self) -> str:
        return f"{len(self.labels)} labels"

    @property
    def targets(self) -> dict[str, Target]:
        return {name: BinaryLabel() for name in self.labels}

    def with_targets(self, targets: dict[str, Target]) -> Self:
        return self

    def cells_of(self, name: str) -> tuple[str, ...]:
        return (name,)

    def setting_of(self, name: str) -> str:
        return "[target]"

    def find_columns(self, header: Sequence[str]) -> tuple[str, ...]:
        if not set(self.labels) & set(header):
            raise CohortError(
                f"[target] labels: no column is called {' or '.join(self.labels)}. Columns: "
                f"{', '.join(header)}."
            )
        return self.labels

    # Models

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        import torch

        from caprmil.models.layers import masked_binary_cross_entropy

        if self.positive_weights == "none":
            return masked_binary_cross_entropy
        array = self.as_labels(labels)
        positive, negative = (array == 1).sum(axis=0), (array == 0).sum(axis=0)
        weights = torch.from_numpy(np.maximum(negative, 1) / np.maximum(positive, 1))
        return partial(masked_binary_cross_entropy, positive_weights=weights)

    def answer(self, outputs: "Tensor") -> "Tensor":
        return outputs.sigmoid()

    # Predictions

    @property
    def titles(self) -> tuple[str, ...]:
        return self.labels

    @classmethod
    def from_table(
        cls, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Recognise a column <label>.positive with the probability of each label."""
        ending = f".{PROBABILITY}"
        columns = [name for name in table.columns if str(name).endswith(ending)]
        if not columns:
            return None
        target = cls(labels=tuple(name.removesuffix(ending) for name in columns))
        return target.read_table(table, label)

    def predicted(self, answers: Answers) -> list[str]:
        names = np.array(self.labels, dtype=object)
        return [", ".join(names[row > 0.5]) or "none" for row in answers]

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        numbers = map(float, answer)
        return {
            "predicted": self.predicted(answer[None])[0],
            "probabilities": dict(zip(self.labels, numbers, strict=True)),
        }

    def show(self, answer: NDArray[np.floating]) -> str:
        order = np.argsort(-answer, kind="stable")[:3]
        likeliest = ", ".join(f"{self.labels[n]} {answer[n]:.4f}" for n in order)
        return likeliest + (", ..." if len(self.labels) > len(order) else "")

    # Scores

    @property
    def metrics(self) -> dict[str, Metric]:
        """The mean of each metric over labels, then those of each label."""
        by_label = self.part_metrics
        means = {
            name: mean_of(name, f"Mean {metric.title}", [own[name] for own in by_label.values()])
            for name, metric in BinaryLabel().metrics.items()
        }
        means["auc"] = replace(means["auc"], chance=0.5)
        each = [metric for own in by_label.values() for metric in own.values()]
        return means | {metric.name: metric for metric in each} | registered_metrics(self)

    def figures(self, folds: "Mapping[str, tuple[Labels, Answers]]") -> "dict[str, Figure]":
        from caprmil import figures

        curves = {}
        for name, part in self.parts.items():
            own = [part.known_of(*truth) for truth in folds.values()]
            labels = np.concatenate([truth[0] for truth in own])
            if part.target.can_score(labels):
                answers = np.concatenate([truth[1] for truth in own])
                curves[name] = (labels, np.concatenate([1 - answers, answers], axis=1))
        if not curves:
            return {}
        return {"roc.png": figures.roc_curves(curves, ("negative", "positive"))}

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """The logit of each label."""
        return tuple(
            Contrast(name=name, of=partial(_output, number), total=f"logit of {name}")
            for number, name in enumerate(self.labels)
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.labels

    def followed(self, answer: Any) -> Any:
        return answer

    def contrast_of(self, answer: NDArray[np.floating]) -> int:
        return int(answer.argmax())

    def sign_of(self, answer: NDArray[np.floating]) -> int:
        return 1 if answer.max() > 0.5 else -1

    def turned(self, before: NDArray[np.floating], after: NDArray[np.floating]) -> bool:
        """Return whether the likeliest label crosses 0.5: the one that evidence is shown for."""
        first = self.contrast_of(before)
        return bool((before[first] > 0.5) != (after[first] > 0.5))


def _output(number: int, outputs: Any) -> Any:
    return outputs[..., number]


for _metric in LABEL_METRICS:
    register_metric("label", _metric)
