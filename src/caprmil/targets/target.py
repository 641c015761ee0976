"""A target: what is predicted for a slide, and everything that depends on it.

A target reads and checks labels, and says how many outputs a model has, which loss it is trained
with, what the outputs mean, how predictions are scored, which baselines a model has to beat and
what evidence can be shown for. Nothing outside of `targets` branches on the kind of target.

A label is one number per slide (a class number, a value), or several (time and event). An answer
is one row of numbers per slide: the probability of each class, the predicted value.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caprmil.errors import CohortError, UnknownNameError
from caprmil.io.findings import Findings
from caprmil.io.tables import is_known
from caprmil.targets.calibration_method import CalibrationMethod
from caprmil.targets.conformal import Conformal
from caprmil.targets.metric import Metric, registered_metrics
from caprmil.targets.recalibration import Recalibration

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

    from caprmil.targets.part import Part

Label: TypeAlias = Any
"""A number, or a tuple of numbers: the target knows which."""
Labels: TypeAlias = NDArray[Any]
"""(n,), or (n, L) if a label is several numbers."""
Answers: TypeAlias = NDArray[np.floating]
Criterion: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """What evidence is shown for: one number that is a linear function of the outputs."""

    name: str
    """What the evidence is for, e.g. the class."""
    against: str = ""
    """What it is compared with, in words, e.g. the other class."""
    of: Callable[[Any], Any]
    """The contrast (...) of outputs (..., C): a tensor of a tensor, an array of an array."""
    negative: str = ""
    """What negative evidence is, in words. By default against the name."""
    total: str = ""
    """What all evidence adds up to, in words. By default the name."""
    ends: tuple[str, str] = ("against", "for")
    """What the low and the high end of a map of evidence are called."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "negative", self.negative or f"against {self.name}")
        object.__setattr__(self, "total", self.total or self.name)

    @property
    def positive(self) -> str:
        """What positive evidence is, in words."""
        return f"for {self.name}"


def weighted_mean(weights: NDArray[np.float64], answers: Answers) -> NDArray[np.float64]:
    """Return the sum of answers (rows) times weights, which sum to one but for rounding.

    A mean of probabilities is a probability: never above the highest answer.
    """
    total = (weights * answers).sum(axis=0)
    return np.asarray(total.clip(answers.min(axis=0), answers.max(axis=0)), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Base of all targets. The fields of a subclass are its settings in a recipe's [target]."""

    kind: ClassVar[str]
    noun: ClassVar[str] = ""
    """What a sentence calls the target: e.g. grades. See `in_words`."""
    completes: ClassVar[bool] = False
    """Whether the target needs the outputs of a trained model for its training slides."""
    scores_patients: ClassVar[bool] = False
    """Whether a patient is scored once, with the mean answer for the slides of the patient."""
    has_classes: ClassVar[bool] = False
    """Whether a model that needs classes (`MILModel.needs_classes`) can be trained on it."""
    calibrates: ClassVar[bool] = False
    """Whether reports show answers calibrated, by a temperature of each fold."""
    has_parts: ClassVar[bool] = False
    """Whether the target is made of others: see `parts`."""
    has_tasks: ClassVar[bool] = False
    """Whether each part could be a target of its own."""
    strata_title: ClassVar[str] = "Classes"
    """What the strata of folds are called in errors."""
    merges_strata: ClassVar[bool] = False
    """Whether strata with too few patients for the folds are merged, not an error."""
    answer_axis: ClassVar[str] = "Predicted value"
    """The title of an axis with the answer; {} is the name of the contrast."""
    answer_bounds: ClassVar[tuple[float, float] | None] = None
    """The smallest and the largest answer, if there are such."""
    answer_name: ClassVar[str]
    """What the numbers of an answer are, in one word: e.g. probabilities."""
    number_name: ClassVar[str] = "value"
    """What one number of an answer is, in one word: e.g. a probability."""
    class_name: ClassVar[str] = "class"
    """What one of several possible labels is called: e.g. a grade."""
    contrast_name: ClassVar[str] = "contrast"
    """What evidence is shown for, in one word: e.g. a class."""
    saturates: ClassVar[bool] = False
    """Whether answers saturate. If not, they change as the contrasts of outputs do."""
    output_name: ClassVar[str] = "output"
    """What an output of a model is called: e.g. a logit."""
    lead_name: ClassVar[str] = "predicted value"
    """What evidence for an answer adds up to, in words: e.g. the lead of the predicted class."""
    turn_name: ClassVar[str] = "the prediction turns"
    """When an answer has turned, in words, see `turned`: e.g. another class is predicted."""
    display: ClassVar[str]
    """The parts of report and viewer that show an answer: a name in `report.parts_registry` and in
    `viewer/static/parts.js`. A target may take those of another."""
    headline: ClassVar[str]
    """The metric that is shown first, compared with baselines and printed while training."""
    second: ClassVar[str]
    """The metric that is shown next to it in figures and tables of several models."""

    def __str__(self) -> str:
        return self.kind

    @property
    def in_words(self) -> str:
        """The target in a sentence: its noun, or its kind with an article."""
        return self.noun or f"a {self.kind}"

    @property
    def parts(self) -> "Mapping[str, Part]":
        """The targets that this one is made of, by name. None by default."""
        return {}

    @property
    def leaves(self) -> "tuple[Target, ...]":
        """The targets that this one is made of and that are not made of others; or itself."""
        inner = (leaf for part in self.parts.values() for leaf in part.target.leaves)
        return tuple(inner) if self.parts else (self,)

    # Labels

    @property
    def label_names(self) -> tuple[str, ...]:
        """The columns of a table of predictions that hold the label."""
        return ("label",)

    def find_columns(self, header: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of a cohort that hold the label, if the target names or knows them.

        () if it is one column, which [data] label names or whose name is recognised. Raise
        CohortError if a column is missing.
        """
        return ()

    def named(self, columns: Sequence[str]) -> Self:
        """Return the target with what the names of its label columns say: e.g. a unit."""
        return self

    def join_cells(self, cells: Sequence[str]) -> str:
        """Return a label as one text, from its cells in the columns of a table."""
        return cells[0]

    def split_label(self, label: Label) -> tuple[str, ...]:
        """Return the cells of a label in a table of predictions; empty ones if it is missing."""
        return (self.show_label(label),)

    def read(
        self, cells: Mapping[str, str], column: str, found: Findings, *, required: bool
    ) -> tuple[Self, dict[str, Label]]:
        """Return the target with what it learns from the labels, and the label of each slide.

        `cells` are those of the label column, by slide, or those of its columns as `join_cells`
        returns them. What is wrong is added to `found`.
        """
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether enough is known of the labels to train: e.g. two classes."""
        return True

    def example(self) -> Self:
        """Return a target that is ready, for checks before any label is read."""
        return self

    def strata(self, labels: Mapping[str, Label]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the stratum of each slide, and the names of strata. Folds keep them in balance."""
        raise NotImplementedError

    missing: ClassVar[Label]
    """The label of a slide without one, in an array."""

    def known(self, labels: Labels) -> NDArray[np.bool_]:
        """Return which labels are not missing."""
        raise NotImplementedError

    def as_labels(self, labels: Iterable[Label | None]) -> Labels:
        """Return labels as an array, with `missing` for None."""
        raise NotImplementedError

    def check_labels(self, labels: Labels) -> None:
        """Raise ValueError unless these are labels of this target, or missing."""
        raise NotImplementedError

    def show_label(self, label: Label) -> str:
        """Return a label as one text, which `parse_label` reads; "" if it is missing."""
        raise NotImplementedError

    def is_label(self, cell: str) -> bool:
        """Return whether a cell has a label: not if it is empty, or a word such as NA or None."""
        return is_known(cell)

    def parse_label(self, cell: str) -> Label:
        """Return the label of a text; raise ValueError with what is allowed."""
        raise NotImplementedError

    def agree(self, labels: Iterable[Label]) -> bool:
        """Return whether slides of one patient may have these labels: they are the same."""
        return len(set(labels)) <= 1

    def merge(self, labels: Sequence[Label]) -> Label:
        """Return the label of a patient, from those of the slides, which agree."""
        return labels[0]

    # Models

    @property
    def n_outputs(self) -> int:
        """How many outputs a model has."""
        raise NotImplementedError

    def fit(self, labels: Sequence[Label]) -> Self:
        """Return the target with what it needs of a fold's training labels: e.g. their scale."""
        return self

    def complete(self, outputs: "Tensor", labels: Labels) -> Self:
        """Return the target with what it needs of a trained model's outputs for training slides.

        It is called after training, and only if the target `completes`.
        """
        return self

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        """Return the training loss of outputs and labels, for these training labels.

        A loss that remembers something from step to step has `state_dict` and `load_state_dict`.
        """
        raise NotImplementedError

    @property
    def one_device(self) -> str:
        """Why training cannot be distributed, with what to do; "" if it can."""
        return ""

    def validation_loss(self, outputs: "Tensor", labels: "Tensor") -> "Tensor | None":
        """Return the loss of all validation slides together. None: it is the mean over slides."""
        return None

    @property
    def scale(self) -> float:
        """How large a unit of an answer is: deviations of answers are measured in it."""
        return 1.0

    @property
    def scales(self) -> NDArray[np.float64]:
        """The scale of each number of an answer."""
        return np.full(len(self.columns), self.scale)

    def answer(self, outputs: "Tensor") -> "Tensor":
        """Return the answers (B, A) of a model's outputs (B, C)."""
        raise NotImplementedError

    # Predictions

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of answers in a table of predictions."""
        raise NotImplementedError

    @property
    def titles(self) -> tuple[str, ...]:
        """Titles of the numbers of an answer, for readers."""
        return self.columns

    def owns(self, column: str) -> bool:
        """Return whether a column of that name would be read as an answer."""
        return column in self.columns

    @classmethod
    def from_table(
        cls, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Recognise a table of predictions: target, label columns, answer columns and answers.

        None is returned for the table of another target.
        """
        raise NotImplementedError

    def read_table(
        self, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        """Return what `from_table` does, for a table of this very target."""
        return self.from_table(table, label)

    def check_answers(self, answers: Answers, names: Sequence[str] | None = None) -> None:
        """Raise unless these are answers of this target. `names` say what a row is called."""
        raise NotImplementedError

    def predicted(self, answers: Answers) -> list[str]:
        """Return the one word or number that is predicted for each slide."""
        raise NotImplementedError

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        """Return one answer as JSON holds it: what is predicted, and the numbers behind it."""
        raise NotImplementedError

    def show(self, answer: NDArray[np.floating]) -> str:
        """Return one answer in a few words."""
        raise NotImplementedError

    @property
    def has_order(self) -> bool:
        """Whether one answer can be the highest: by one number, or the second of two classes."""
        return len(self.columns) == 1

    @property
    def without_order(self) -> str:
        """Why no answer is the highest, in words; "" if one is."""
        return "" if self.has_order else f"{self} have no order"

    def heights(self, answers: Answers) -> NDArray[np.floating]:
        """Return the number of each answer by which one is the highest, if the target has it."""
        return answers[:, -1]

    def slide_weights(self, answers: Answers, how: str) -> NDArray[np.float64]:
        """Return how much each slide of a patient (rows) counts for each number of the answer.

        Under mean all count alike; under max the slide with the highest answer decides.
        """
        if how == "mean":
            return np.full(answers.shape, 1 / len(answers))
        weights = np.zeros(answers.shape)
        weights[int(self.heights(answers).argmax())] = 1
        return weights

    def combine(self, answers: Answers, how: str) -> Answers:
        """Return the answer of a patient from those of the slides (rows): their mean, or max."""
        return weighted_mean(self.slide_weights(answers, how), answers)

    def disagreement(self, answers: Answers) -> float:
        """Return how far the answers of several models (rows) for one slide differ."""
        raise NotImplementedError

    def shared(self, other: "Target") -> "Target | None":
        """Return the target by which tables of this and of another are compared; None if by none.

        By default their answers have the same columns, and the more specific of them is taken.
        """
        if set(self.columns) != set(other.columns):
            return None
        return max(self, other, key=lambda each: len(type(each).__mro__))

    def reordered(
        self, other: "Target", labels: Labels, answers: Answers
    ) -> tuple[Labels, Answers]:
        """Return labels and answers of a table of `other` as this target has them."""
        raise NotImplementedError

    # Scores

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that apply."""
        return registered_metrics(self)

    @property
    def headline_metric(self) -> Metric:
        return self.metrics[self.headline]

    def metric(self, name: str) -> Metric:
        """Return a metric by its name."""
        if name not in self.metrics:
            raise UnknownNameError(f"metric of {self}", name, self.metrics)
        return self.metrics[name]

    def can_score(self, labels: Labels) -> bool:
        """Whether the headline metric has a value for these labels."""
        return len(labels) > 0

    def score(self, labels: Labels, answers: Answers) -> dict[str, float]:
        """Return every metric that applies, by name."""
        return {name: metric.function(labels, answers) for name, metric in self.metrics.items()}

    def notes(self, fold: str, labels: Labels, answers: Answers) -> Iterator[str]:
        """Yield what a reader of a fold's scores should know."""
        yield from ()

    def comparison_notes(
        self, fold: str, labels: Labels, owners: NDArray[np.int64]
    ) -> Iterator[str]:
        """Yield why the test of the headline metric has no result on a fold, if it has none."""
        yield from ()

    def summary(
        self, folds: "Sequence[Answers]", pooled: "Answers | None", seed: int
    ) -> dict[str, Any]:
        """Return what the summary of scores holds in addition to the metrics, and its "notes".

        `folds` are the answers of each fold; `pooled` all of them, or None where a slide is in
        several folds.
        """
        return {}

    def figures(self, folds: "Mapping[str, tuple[Labels, Answers]]") -> "dict[str, Figure]":
        """Return figures of the test slides, by file name."""
        raise NotImplementedError

    # Baselines

    def as_answers(self, labels: Labels) -> Answers:
        """Return the answers (n, A) that would be exactly right."""
        raise NotImplementedError

    def group_answers(
        self, labels: Labels, groups: Sequence[str | None]
    ) -> "Callable[[str | None], Answers]":
        """Return the answer for a slide of a group, by its name: that of all for a new group.

        Each group is smoothed by as many average slides as an answer has numbers.
        """
        right = self.as_answers(labels)
        overall, size = right.sum(axis=0) / len(right), right.shape[1]
        totals: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for group, answer in zip(groups, right, strict=True):
            if group is not None:
                totals[group] = totals.get(group, np.zeros(size)) + answer
                counts[group] = counts.get(group, 0) + 1

        def answer_of(group: str | None) -> Answers:
            total = totals.get(group, 0 * overall) if group is not None else 0 * overall
            seen = counts.get(group, 0) if group is not None else 0
            found: Answers = (total + size * overall) / (seen + size)
            return found

        return answer_of

    def is_pure(self, labels: Iterable[Label]) -> bool:
        """Return whether slides with these labels are all of one class. False without classes."""
        return False

    def linear_model(self, strength: float) -> Any:
        """Return a linear model of scikit-learn; less strength means a simpler model."""
        raise NotImplementedError

    def linear_answers(self, model: Any, features: NDArray[np.float64]) -> Answers:
        """Return the answers of a fitted linear model."""
        raise NotImplementedError

    def answer_loss(self, labels: Labels, answers: Answers) -> float:
        """Return the loss by which the strength of a linear model is chosen."""
        raise NotImplementedError

    # Guarantees

    @property
    def conformal(self) -> Conformal:
        """The sets or intervals that hold a label with a stated probability."""
        raise CohortError(
            f"There are no prediction sets for {self.in_words}{self.no_sets}. Omit --coverage; "
            "classifications, grades, labels and regressions have them."
        )

    no_sets: ClassVar[str] = ""
    """Why there are no sets, as the end of a sentence."""

    def confidence(self, answers: Answers) -> NDArray[np.float64] | None:
        """Return how certain each answer is: higher is surer. None if answers do not say."""
        return None

    def losses(self, labels: Labels, answers: Answers) -> NDArray[np.float64]:
        """Return how wrong each answer is, for the risk of those that are kept."""
        raise NotImplementedError

    risk_title: ClassVar[str] = "Error"
    """What the mean of `losses` is called."""

    # Calibration

    @property
    def calibration(self) -> CalibrationMethod | None:
        """How answers are corrected on validation slides, and how that is measured, if they are."""
        return None

    # Other sites

    def recalibrate(self, labels: Labels, answers: Answers) -> Recalibration:
        """Return the correction of answers that these slides of another site call for."""
        raise CohortError(
            f"There is no recalibration for {self.in_words}. Omit --recalibrate; classifications, "
            "grades, labels, regressions and survival have one."
        )

    @property
    def calibration_metrics(self) -> dict[str, Metric]:
        """The metrics by which recalibration is judged, besides those of scores."""
        return {}

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """What evidence can be asked for."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """What evidence can be shown for, by name: the name of each contrast."""
        return tuple(contrast.name for contrast in self.contrasts)

    @property
    def output_names(self) -> tuple[str, ...]:
        """What the outputs of a model are called. By default there is one for each contrast."""
        return self.names

    def followed(self, answer: Any) -> Any:
        """Return the number of an answer (..., A) that goes with each contrast, a tensor or array.

        E.g. the probability of the class. By default, an answer has one number for each contrast.
        """
        return answer

    def contrast_of(self, answer: NDArray[np.floating]) -> int:
        """Return the number of the contrast to show first: e.g. that of the likeliest class."""
        return 0

    def sign_of(self, answer: NDArray[np.floating]) -> int:
        """Return 1 if an answer is for its contrast, -1 if it is against it: e.g. a low value."""
        return 1

    def turned(self, before: NDArray[np.floating], after: NDArray[np.floating]) -> bool:
        """Return whether an answer is another one after a change of the slide."""
        raise NotImplementedError
