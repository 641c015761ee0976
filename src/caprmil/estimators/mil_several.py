"""The estimator of several targets at once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from caprmil.errors import CohortError
from caprmil.estimators.mil_estimator import MILEstimator
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.models import MILModel
from caprmil.targets import Several, Target
from caprmil.targets.composite import Composite
from caprmil.targets.target import Answers
from caprmil.targets.target_table import parse_target
from caprmil.training.given_bags import Bags, as_samples

if TYPE_CHECKING:
    import pandas as pd


class MILSeveral(MILEstimator):
    """Predicts several targets of bags with one model: classes, grades, numbers, labels, survival.

    >>> tasks = {"grade": "ordinal", "size": {"kind": "regression", "label": "size in mm"}}
    >>> model = MILSeveral(tasks, epochs=10).fit(bags, table)
    >>> model.predict(bags), model.predict_table(bags), model.score(bags, table)

    `tasks` names the targets: a kind, or a table of settings as in [target.tasks.NAME] of a recipe,
    with `kind`, `label` (the column, by default that of the name) and `weight`. `weighting` is that
    of [target]. Labels are a DataFrame with a row per bag; an empty cell or NaN is a missing label,
    which does not count for its target. The other settings are those of `MILClassifier`.

    Fitted: `label_columns_`, the columns of labels that were read, and what `MILClassifier` has,
    without `classes_`.
    """

    def __init__(
        self,
        tasks: Mapping[str, Any] | None = None,
        model: str | MILModel = "caprmil",
        *,
        weighting: Literal["fixed", "uncertainty"] = "fixed",
        settings: dict[str, Any] | None = None,
        epochs: int = 30,
        lr: float = 2e-4,
        weight_decay: float = 1e-5,
        warmup_epochs: int = 6,
        batch_size: int = 1,
        clip: float = 0.0,
        validation: float = 0.0,
        patience: int = 20,
        seed: int = 0,
        device: str = "auto",
        fusion: dict[str, Any] | None = None,
        categorical: Sequence[str] = (),
    ) -> None:
        self.tasks = tasks
        self.model = model
        self.weighting = weighting
        self.settings = settings
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device
        self.fusion = fusion
        self.categorical = categorical

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn asks of an estimator: it has several targets."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = False
        return tags

    def fit(
        self, X: Bags, y: "pd.DataFrame", sample_weight: Iterable[float] | None = None
    ) -> "MILSeveral":
        """Train a new model on these bags, with a row of labels for each."""
        samples, frame = as_samples(X), _as_text(y)
        columns = self._target().find_columns(list(frame.columns))
        found = Findings()
        target, labels = _read(self._target().named(columns), frame, columns, found, required=True)
        if found.problems:
            raise CohortError("\n- ".join(["These labels cannot be used.", *found.problems]))
        self._fit(X, samples, target.as_labels(labels), target, sample_weight)
        self.label_columns_, self._read_target = columns, target
        self._numeric = {c for c in columns if c in y.columns and y[c].dtype.kind in "biuf"}
        return self

    def predict(self, X: Bags) -> "pd.DataFrame":
        """Return the prediction of each target, with a column for each column of labels.

        It is the likeliest class or grade, the value, 1 or 0 of a label. A target whose label has
        several columns, as survival, has one column with its name: the risk.
        """
        import pandas as pd

        answers = self._answers(X)
        found = dict(_predictions(cast(Composite, self.target_), answers))
        shown = {name: self._as_given(name, column) for name, column in found.items()}
        return pd.DataFrame(shown)

    def predict_table(self, X: Bags) -> "pd.DataFrame":
        """Return all numbers of the answers: probabilities, values, ends of intervals, risks.

        The columns are those of predictions.csv: the name of a target, a dot, and its column.
        """
        import pandas as pd

        return pd.DataFrame(self._answers(X), columns=list(self.target_.columns))

    def score(self, X: Bags, y: "pd.DataFrame") -> float:
        """Return the skill score, the mean over targets: 0 by chance, 1 if all are perfect."""
        answers, found = self._answers(X), Findings()
        _, labels = _read(
            self._read_target, _as_text(y), self.label_columns_, found, required=False
        )
        if found.problems:
            raise CohortError("\n- ".join(["These labels cannot be scored.", *found.problems]))
        return self.target_.headline_metric.function(self.target_.as_labels(labels), answers)

    def _target(self) -> Several:
        if not self.tasks:
            raise CohortError('tasks names no target. Pass e.g. {"grade": "classification", ...}.')
        tasks = {
            name: {"kind": task} if isinstance(task, str) else task
            for name, task in self.tasks.items()
        }
        table = {"kind": "several", "tasks": tasks, "weighting": self.weighting}
        return cast(Several, parse_target(table))

    def _as_given(self, name: str, column: list[str] | Answers) -> Any:
        """Return predictions as numbers, if the labels were numbers, and else as text."""
        if isinstance(column, list) and name in self._numeric:
            numbers = np.array([float(cell) for cell in column])
            whole = (numbers == np.rint(numbers)).all()
            return numbers.astype(np.int64) if whole else numbers
        return column


def _as_text(labels: Any) -> "pd.DataFrame":
    """Return a table of labels as text."""
    import pandas as pd

    if not isinstance(labels, pd.DataFrame):
        raise CohortError(
            "Labels must be a DataFrame with the columns of all targets, not "
            f"{type(labels).__name__}."
        )
    return tables.read_table(labels)


def _read(
    target: Target,
    frame: "pd.DataFrame",
    columns: tuple[str, ...],
    found: Findings,
    *,
    required: bool,
) -> tuple[Target, list[Any]]:
    """Return the target with what it learns from the labels, and the label of each row."""
    rows = tables.rows(frame)
    cells = {
        f"row {number}": target.join_cells([row.get(name, "") for name in columns])
        for number, row in enumerate(rows)
    }
    read, labels = target.read(cells, " and ".join(columns), found, required=required)
    return read, [labels.get(name) for name in cells]


def _predictions(target: Composite, answers: Answers) -> Iterator[tuple[str, list[str] | Answers]]:
    """Yield the prediction of each part by the column of its label."""
    for name, part in target.parts.items():
        own, columns = part.answers_of(answers), target.columns_of(name)
        if isinstance(part.target, Composite):
            yield from _predictions(part.target, own)
        elif len(columns) > 1:
            yield name, own[:, 0]
        else:
            yield columns[0], part.target.predicted(own)
