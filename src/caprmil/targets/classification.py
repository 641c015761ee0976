"""Classification: one of several classes per slide."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import RecipeError, shorten
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.tables import is_known, is_number
from caprmil.targets.calibration_method import CalibrationMethod
from caprmil.targets.classification_metrics import ace_floor, auc, check_probabilities
from caprmil.targets.conformal import ClassSets, Conformal
from caprmil.targets.metric import Metric
from caprmil.targets.probability_columns import probability_columns
from caprmil.targets.recalibration import LOG_LOSS, Recalibration, of_probabilities
from caprmil.targets.target import Answers, Contrast, Criterion, Label, Labels, Target
from caprmil.targets.temperature import Temperatures

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

FEW = 10  # different whole numbers that may be classes, however few slides there are
ITERATIONS = 10_000  # of the logistic regression: far more than it takes


@dataclass(frozen=True, kw_only=True)
class Classification(Target):
    """One of several classes per slide. The answer is the probability of each class."""

    classes: tuple[str, ...] = ()
    """Order of the classes. By default sorted, as numbers if all of them are."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight the loss of a bag by the rarity of its class."""

    kind: ClassVar[str] = "classification"
    has_classes: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    answer_axis: ClassVar[str] = "Probability of {}"
    answer_bounds: ClassVar[tuple[float, float] | None] = (0, 1)
    answer_name: ClassVar[str] = "probabilities"
    number_name: ClassVar[str] = "probability"
    contrast_name: ClassVar[str] = "class"
    saturates: ClassVar[bool] = True
    output_name: ClassVar[str] = "logit"
    lead_name: ClassVar[str] = "lead of the predicted class"
    turn_name: ClassVar[str] = "another class is predicted"
    display: ClassVar[str] = "classes"
    headline: ClassVar[str] = "auc"
    second: ClassVar[str] = "ace"
    missing: ClassVar[Label] = -1

    def __post_init__(self) -> None:
        if len(set(self.classes)) < len(self.classes):
            raise RecipeError(f"[target] classes names one twice: {', '.join(self.classes)}.")
        if self.class_weights not in ("none", "balanced"):
            raise RecipeError(
                f"class_weights cannot be {self.class_weights!r}. Known: balanced, none."
            )

    def __str__(self) -> str:
        return f"{len(self.classes)} classes"

    # Labels

    def read(
        self, cells: Mapping[str, str], column: str, found: Findings, *, required: bool
    ) -> tuple["Classification", dict[str, Label]]:
        words = {name: cell for name, cell in cells.items() if self.is_label(cell)}
        classes = self.classes or _in_order(set(words.values()))
        if required and not self.classes and _are_measurements(words.values()):
            found.problems.append(
                f"Column {column} has {len(classes)} different numbers, not classes: "
                f"{shorten(classes[:5])}, ... To predict the number, set [target] kind = "
                '"regression" (--set target.kind=regression). If they are classes, name them in '
                "[target] classes."
            )
            return self, {}
        report = found.problem if required else found.note
        blank = {name: cell for name, cell in cells.items() if name not in words}
        advice = f"Fill column {column}, or remove their rows."
        if spelt := sorted({cell for cell in blank.values() if cell}):
            advice += f" If {spelt[0]} is a class, name all classes in [target] classes."
        report("Slides without a label", tables.with_cells(blank), advice)
        numbers = {word: number for number, word in enumerate(classes)}
        odd = [f"{name} ({word})" for name, word in words.items() if word not in numbers]
        advice = f"[target] classes are {', '.join(classes)}."
        found.problem("Slides with a label that is not a class", odd, advice)
        if required and len(classes) < 2 and (classes or not blank):
            text = f"Column {column} has fewer than two classes: {shorten(classes) or 'none'}."
            found.problems.append(
                f"{text} Set [data] label (--label COLUMN) if the label is in another column."
            )
        spellings = defaultdict(list)
        for word in classes:
            spellings[float(word) if is_number(word) else word.casefold()].append(word)
        alike = [" and ".join(group) for group in spellings.values() if len(group) > 1]
        found.problem("Classes that differ only in spelling", alike, "Use one spelling.")
        if alike:
            return self, {}
        labels: dict[str, Label] = {
            name: numbers[word] for name, word in words.items() if word in numbers
        }
        return replace(self, classes=classes), labels

    @property
    def ready(self) -> bool:
        return len(self.classes) > 1

    @property
    def has_order(self) -> bool:
        return len(self.classes) == 2

    def example(self) -> "Classification":
        return self if self.ready else replace(self, classes=("a", "b"))

    def strata(self, labels: Mapping[str, Label]) -> tuple[dict[str, int], tuple[str, ...]]:
        return {name: int(label) for name, label in labels.items()}, self.classes

    def known(self, labels: Labels) -> NDArray[np.bool_]:
        return np.asarray(labels >= 0)

    def as_labels(self, labels: Iterable[Label | None]) -> Labels:
        return np.array([-1 if label is None else label for label in labels], dtype=np.int64)

    def check_labels(self, labels: Labels) -> None:
        if not set(labels.tolist()) <= set(range(-1, len(self.classes))):
            raise ValueError(f"Labels are class numbers, or -1 for none. {labels=}")

    def show_label(self, label: Label) -> str:
        return self.classes[int(label)] if label >= 0 else ""

    def is_label(self, cell: str) -> bool:
        return cell in self.classes or is_known(cell)

    def parse_label(self, cell: str) -> Label:
        name = cell if cell in self.classes else cell.removesuffix(".0")  # a column of floats
        if name not in self.classes:
            raise ValueError(f"label '{cell}' is none of the classes {', '.join(self.classes)}.")
        return self.classes.index(name)

    # Models

    @property
    def n_outputs(self) -> int:
        return len(self.classes)

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        from functools import partial

        import torch

        from caprmil.models.layers import weighted_cross_entropy

        if self.class_weights == "none":
            return weighted_cross_entropy
        counts = np.bincount([int(label) for label in labels], minlength=len(self.classes))
        weights = len(labels) / len(self.classes) / np.maximum(counts, 1)
        return partial(weighted_cross_entropy, weights=torch.from_numpy(weights))

    def answer(self, outputs: "Tensor") -> "Tensor":
        return outputs.softmax(dim=-1)

    # Predictions

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"prob_{name}" for name in self.classes)

    @property
    def titles(self) -> tuple[str, ...]:
        return self.classes

    def owns(self, column: str) -> bool:
        return column.startswith("prob_")

    @classmethod
    def from_table(
        cls, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Recognise prob_<class>, probability_<class>, p_<class> or <label column>_<class> (STAMP).

        For the labels 0 and 1, a single column probability, prob or score is enough.
        """
        found = probability_columns(table, label)
        if found is None:
            return None
        truth, columns = found
        numbers = [tables.numbers(table, column) for column in columns.values() if column]
        if len(numbers) == 1:  # the first of two classes may have no column
            numbers.insert(0, [1 - p for p in numbers[0]])
        target, answers = cls(classes=tuple(columns)), np.array(numbers).T
        target.check_answers(answers, list(table.index))
        used = [column for column in columns.values() if column]
        return target, (truth,) if truth else (), used, answers

    def check_answers(self, answers: Answers, names: Sequence[str] | None = None) -> None:
        if answers.ndim != 2 or answers.shape[1] != len(self.classes):
            raise ValueError(f"Give slides x classes. {answers.shape=}, {self.classes=}")
        check_probabilities(answers, names)

    def predicted(self, answers: Answers) -> list[str]:
        return [self.classes[code] for code in answers.argmax(axis=1)]

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        numbers = [float(value) for value in answer]
        return {
            "predicted": self.classes[int(answer.argmax())],
            "probabilities": dict(zip(self.classes, numbers, strict=True)),
        }

    def show(self, answer: NDArray[np.floating]) -> str:
        return f"{self.classes[int(answer.argmax())]} {answer.max():.4f}"

    def disagreement(self, answers: Answers) -> float:
        return float(answers[:, answers.mean(axis=0).argmax()].std(ddof=1))

    def reordered(self, other: Target, labels: Labels, answers: Answers) -> tuple[Labels, Answers]:
        assert isinstance(other, Classification)
        columns = [other.classes.index(name) for name in self.classes]
        codes = np.argsort(columns)  # the number here of each class of the other
        return codes[labels], answers[:, columns].astype(np.float64)

    # Scores

    def can_score(self, labels: Labels) -> bool:
        return len(set(labels.tolist())) > 1

    def notes(self, fold: str, labels: Labels, answers: Answers) -> Iterator[str]:
        if absent := [name for code, name in enumerate(self.classes) if code not in labels]:
            undefined = np.isnan(auc(labels, answers))
            left = "it has no AUC" if undefined else "its AUC is the mean of the others"
            yield f"Fold {fold} has no slide of {', '.join(absent)}: {left}."

    def comparison_notes(
        self, fold: str, labels: Labels, owners: NDArray[np.int64]
    ) -> Iterator[str]:
        owned = np.unique(np.stack([labels, owners]), axis=1)[0]
        patients = np.bincount(owned, minlength=len(self.classes))
        for code in np.flatnonzero(patients == 1).tolist():
            yield (
                f"{fold} has one patient with {self.classes[code]}: the variance of the AUC is "
                "not known there, and so it has no p."
            )

    def summary(
        self, folds: Sequence[Answers], pooled: Answers | None, seed: int
    ) -> dict[str, Any]:
        """Return the ACE that a perfectly calibrated model would read: on a fold, and pooled."""
        floors = [ace_floor(answers, seed=seed) for answers in folds]
        found = {
            "on a fold": tuple(np.mean(floors, axis=0).tolist()) if floors else None,
            "on all slides pooled": None if pooled is None else ace_floor(pooled, seed=seed),
        }
        notes = [
            f"A perfectly calibrated model with these probabilities would read an ACE of "
            f"{floor[0]:.3f} ± {floor[1]:.3f} {where}."
            for where, floor in found.items()
            if floor
        ]
        return {
            "ace_floor_on_a_fold": found["on a fold"],
            "ace_floor_pooled": found["on all slides pooled"],
            "notes": [
                *notes,
                "ACE and ECE have no interval: drawing slides again looks like miscalibration.",
            ],
        }

    def figures(self, folds: "Mapping[str, tuple[Labels, Answers]]") -> "dict[str, Figure]":
        from caprmil import figures

        if not any(self.can_score(labels) for labels, _ in folds.values()):
            return {}
        return {"roc.png": figures.roc_curves(folds, self.classes, name=self.class_name)}

    # Baselines

    def as_answers(self, labels: Labels) -> Answers:
        return np.eye(len(self.classes))[labels]

    def is_pure(self, labels: Iterable[Label]) -> bool:
        return len(set(labels)) == 1

    def linear_model(self, strength: float) -> Any:
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(C=strength, max_iter=ITERATIONS)

    def linear_answers(self, model: Any, features: NDArray[np.float64]) -> Answers:
        """Return probabilities: 0 for a class that was not in the training part."""
        answers = np.zeros((len(features), len(self.classes)))
        answers[:, model.classes_] = model.predict_proba(features)
        return answers

    def answer_loss(self, labels: Labels, answers: Answers) -> float:
        from sklearn.metrics import log_loss

        return float(log_loss(labels, answers, labels=range(len(self.classes))))

    # Guarantees

    risk_title: ClassVar[str] = "Error rate"

    @property
    def conformal(self) -> Conformal:
        return ClassSets(self.classes)

    def confidence(self, answers: Answers) -> NDArray[np.float64]:
        return np.asarray(answers.max(axis=1), dtype=np.float64)

    def losses(self, labels: Labels, answers: Answers) -> NDArray[np.float64]:
        return np.asarray(answers.argmax(axis=1) != labels, dtype=np.float64)

    # Calibration

    @property
    def calibration(self) -> CalibrationMethod:
        two = len(self.classes) == 2
        return Temperatures(self.classes[1] if two else f"the predicted {self.class_name}")

    # Other sites

    def recalibrate(self, labels: Labels, answers: Answers) -> Recalibration:
        return of_probabilities(labels, answers)

    @property
    def calibration_metrics(self) -> dict[str, Metric]:
        return {LOG_LOSS.name: LOG_LOSS}

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """Each class against the mean of the others."""

        def against_others(of: int) -> Any:
            def contrast(outputs: Any) -> Any:
                n = outputs.shape[-1]
                return (outputs[..., of] * n - outputs.sum(-1)) / (n - 1)

            return contrast

        def others(of: int) -> str:
            two = len(self.classes) == 2
            return self.classes[1 - of] if two else "the mean of the other classes"

        return tuple(
            Contrast(
                name=name,
                against=f"against {others(number)}",
                of=against_others(number),
                total=f"lead of {name} over {others(number)}",
            )
            for number, name in enumerate(self.classes)
        )

    def contrast_of(self, answer: NDArray[np.floating]) -> int:
        return int(answer.argmax())

    def turned(self, before: NDArray[np.floating], after: NDArray[np.floating]) -> bool:
        return bool(before.argmax() != after.argmax())


def _are_measurements(words: Collection[str]) -> bool:
    """Return whether labels are numbers that nearly all differ, or have decimals."""
    values = {float(word) for word in words if is_number(word)}
    if not values or not all(map(is_number, words)):
        return False
    has_decimals = any(not value.is_integer() for value in values)
    return len(values) > (2 if has_decimals else max(FEW, len(words) / 2))


def _in_order(words: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(sorted(words), key=float if all(map(is_number, words)) else str))
