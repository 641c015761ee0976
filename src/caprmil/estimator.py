"""Estimators: models with scikit-learn's interface, for bags in memory or in files."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from caprmil.errors import BagError, CohortError, RecipeError, shorten
from caprmil.features import bags as bag_files
from caprmil.features.bag_files import inspect
from caprmil.features.bags import Bag
from caprmil.features.batches import Sample
from caprmil.io.leftovers import temporary_folder
from caprmil.models import MILModel, create
from caprmil.models.device import pick_device
from caprmil.runs.inference import TrainedModel, complete_target, predict_samples
from caprmil.targets import (
    Classification,
    Multilabel,
    Ordinal,
    Regression,
    Survival,
    Target,
)
from caprmil.training.module import TrainConfig, fit

BagLike: TypeAlias = NDArray[Any] | Tensor | Bag | str | PathLike[str]
"""An array (patches, features), a tensor of that shape, a bag, or the path of a bag's file."""


class MILEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of the estimators: a model by name, and the settings of its training."""

    model: str | MILModel
    settings: dict[str, Any] | None
    epochs: int
    lr: float
    weight_decay: float
    warmup_epochs: int
    batch_size: int
    clip: float
    validation: float
    patience: int
    seed: int
    device: str

    def _fit(self, samples: Sequence[Sample], labels: NDArray[Any], target: Target) -> None:
        """Train a new model on bags with labels."""
        if len(samples) != len(labels):
            raise CohortError(
                f"There are {len(samples)} bags but {len(labels)} labels. Give one label per bag."
            )
        settings = self._train_settings()
        width = common_width(samples)
        labelled = [
            sample._replace(label=label)
            for sample, label in zip(samples, labels.tolist(), strict=True)
        ]
        train, held_out = self._split(labelled, target)
        target = target.fit([sample.label for sample in train])
        with own_randomness(self.device) as device, temporary_folder() as folder:
            torch.manual_seed(self.seed)
            model = self._new_model(width, target.n_outputs)
            history = fit(
                model,
                train,
                held_out,
                target=target,
                folder=Path(folder),
                settings=settings,
                seed=self.seed,
                device=self.device,
            )
            trained = complete_target(TrainedModel(model, target), train, device=device)
            model.cpu()
        self.n_features_in_, self.target_ = width, trained.target
        self.model_, self.history_ = model, history

    def _answers(self, bags: Sequence[BagLike]) -> NDArray[np.float64]:
        """Return the answers of the fitted model, one row per bag."""
        check_is_fitted(self, "model_")
        samples = as_samples(bags)
        common_width(samples, self.n_features_in_)
        with own_randomness(self.device) as device:  # a DataLoader draws a seed in any case
            trained = TrainedModel(self.model_, self.target_)
            answers = predict_samples(trained, samples, device=device)
        self.model_.cpu()
        return answers

    def _train_settings(self) -> TrainConfig:
        return TrainConfig(
            epochs=self.epochs,
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup_epochs=min(self.warmup_epochs, self.epochs // 2),
            batch_size=self.batch_size,
            clip=self.clip,
            patience=self.patience,
        )

    def _new_model(self, width: int, n_outputs: int) -> MILModel:
        if isinstance(self.model, str):
            return create(self.model, width, n_outputs, **deepcopy(self.settings or {}))
        if self.settings:
            raise RecipeError(
                "settings are for a model that is given by its name. This one is already built."
            )
        if (self.model.in_dim, self.model.n_outputs) != (width, n_outputs):
            raise BagError(
                f"The model was made for {self.model.in_dim} features and {self.model.n_outputs} "
                f"outputs; these bags have {width} and {n_outputs}."
            )
        return deepcopy(self.model)

    def _split(self, samples: list[Sample], target: Target) -> tuple[list[Sample], list[Sample]]:
        """Return the bags to train on and those held out, each with its share of every stratum."""
        if not 0 <= self.validation < 1:
            raise RecipeError(
                f"validation is a share of the bags, from 0 to below 1, not {self.validation}."
            )
        if not self.validation:
            return samples, []
        strata, _ = target.strata({sample.slide: sample.label for sample in samples})
        try:
            train, held_out = train_test_split(
                samples,
                test_size=self.validation,
                stratify=list(strata.values()),
                random_state=self.seed,
            )
        except ValueError as problem:
            raise CohortError(
                f"A share of {self.validation} of {len(samples)} bags cannot be held out with "
                f"every class on both sides ({problem}) Change validation, or set it to 0."
            ) from problem
        return train, held_out


class MILClassifier(ClassifierMixin, MILEstimator):  # type: ignore[misc]
    """Classifies bags, as scikit-learn's classifiers classify rows.

    >>> classifier = MILClassifier("caprmil", epochs=10).fit(bags, labels)
    >>> cross_val_score(MILClassifier("abmil"), bags, labels, cv=5)

    `model` is a name for `caprmil.models.create`, with its `settings`; or a model, of which a copy
    is trained, starting from its weights. The other settings are those of TrainConfig. The warm-up
    takes at most half of the epochs. `validation` is the share of the bags that is held out, by
    class, for early stopping and the best epoch; 0 trains on all of them. `grades` are the classes
    from low to high, if they have an order that the model is to use: an ordinal target.

    Fitted: `classes_`, `n_features_in_`, `model_`, and `history_`, one row of numbers per epoch.
    """

    def __init__(
        self,
        model: str | MILModel = "caprmil",
        *,
        settings: dict[str, Any] | None = None,
        epochs: int = 30,
        lr: float = 2e-4,
        weight_decay: float = 1e-5,
        warmup_epochs: int = 6,
        batch_size: int = 1,
        class_weights: Literal["none", "balanced"] = "none",
        grades: Sequence[Any] | None = None,
        clip: float = 0.0,
        validation: float = 0.0,
        patience: int = 20,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.model = model
        self.settings = settings
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size
        self.class_weights = class_weights
        self.grades = grades
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device

    def fit(self, bags: Sequence[BagLike], labels: Iterable[Any]) -> "MILClassifier":
        """Train a new model on these bags, with one label per bag."""
        samples = as_samples(bags)
        classes, numbers = as_classes(labels)
        if self.grades is not None:
            classes, numbers = in_grade_order(classes, numbers, self.grades)
        kind = Classification if self.grades is None else Ordinal
        names = tuple(map(str, range(len(classes))))
        self._fit(samples, numbers, kind(classes=names, class_weights=self.class_weights))
        self.classes_ = classes
        return self

    def predict_proba(self, bags: Sequence[BagLike]) -> NDArray[np.float64]:
        """Return the probability of each class of `classes_`, one row per bag."""
        return self._answers(bags)

    def predict(self, bags: Sequence[BagLike]) -> NDArray[Any]:
        """Return the most probable class of each bag, as it was passed to `fit`."""
        chosen = self.predict_proba(bags).argmax(axis=1)
        predicted: NDArray[Any] = self.classes_[chosen]
        return predicted


class MILRegressor(RegressorMixin, MILEstimator):  # type: ignore[misc]
    """Predicts a number per bag, as scikit-learn's regressors do for rows.

    >>> regressor = MILRegressor("caprmil", epochs=10).fit(bags, values)

    The settings are those of `MILClassifier`; `loss`, `uncertainty` and `level` are
    those of the regression target.
    """

    def __init__(
        self,
        model: str | MILModel = "caprmil",
        *,
        settings: dict[str, Any] | None = None,
        epochs: int = 30,
        lr: float = 2e-4,
        weight_decay: float = 1e-5,
        warmup_epochs: int = 6,
        batch_size: int = 1,
        loss: Literal["l1", "l2", "huber"] = "huber",
        uncertainty: Literal["none", "gaussian", "quantile"] = "none",
        level: float = 0.9,
        clip: float = 0.0,
        validation: float = 0.0,
        patience: int = 20,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.model = model
        self.settings = settings
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size
        self.loss = loss
        self.uncertainty = uncertainty
        self.level = level
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device

    def fit(self, bags: Sequence[BagLike], labels: Iterable[Any]) -> "MILRegressor":
        """Train a new model on these bags, with one number per bag."""
        samples = as_samples(bags)
        try:
            numbers = np.asarray(list(labels), dtype=np.float64)
        except (TypeError, ValueError) as problem:
            raise CohortError(f"Labels must be numbers ({problem}).") from problem
        if numbers.ndim != 1 or not np.isfinite(numbers).all():
            raise CohortError("Labels must be one finite number per bag.")
        target = Regression(loss=self.loss, uncertainty=self.uncertainty, level=self.level)
        self._fit(samples, numbers, target)
        return self

    def predict(self, bags: Sequence[BagLike]) -> NDArray[np.float64]:
        """Return the predicted number of each bag."""
        return self._answers(bags)[:, 0]

    def predict_interval(self, bags: Sequence[BagLike]) -> NDArray[np.float64]:
        """Return the ends of the interval of each bag. It needs an uncertainty."""
        if self.uncertainty == "none":
            raise RecipeError('There are no intervals. Pass uncertainty="gaussian" or "quantile".')
        return self._answers(bags)[:, 1:]


class MILMultilabelClassifier(ClassifierMixin, MILEstimator):  # type: ignore[misc]
    """Predicts several labels of bags, each of which is positive or negative by itself.

    >>> classifier = MILMultilabelClassifier("caprmil", epochs=10).fit(bags, table)

    Labels are a table of bags x labels with 1, 0, or NaN where one is missing. The settings are
    those of `MILClassifier`; `positive_weights` is that of the multilabel target.

    Fitted: `labels_`, the names of the columns, and what `MILClassifier` has, without `classes_`.
    """

    def __init__(
        self,
        model: str | MILModel = "caprmil",
        *,
        settings: dict[str, Any] | None = None,
        epochs: int = 30,
        lr: float = 2e-4,
        weight_decay: float = 1e-5,
        warmup_epochs: int = 6,
        batch_size: int = 1,
        positive_weights: Literal["none", "balanced"] = "none",
        clip: float = 0.0,
        validation: float = 0.0,
        patience: int = 20,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.model = model
        self.settings = settings
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size
        self.positive_weights = positive_weights
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device

    def fit(self, bags: Sequence[BagLike], labels: Any) -> "MILMultilabelClassifier":
        """Train a new model on these bags, with a row of labels for each."""
        samples = as_samples(bags)
        try:
            numbers = np.asarray(labels, dtype=np.float64)
        except (TypeError, ValueError) as problem:
            raise CohortError(f"Labels must be 1, 0 or NaN ({problem}).") from problem
        if numbers.ndim != 2 or not numbers.shape[1]:
            raise CohortError(
                f"Labels must be a table of bags x labels, not of shape {numbers.shape}."
            )
        if not np.isin(numbers[~np.isnan(numbers)], (0, 1)).all():
            raise CohortError("Labels must be 1, 0, or NaN where one is missing.")
        if len(empty := np.flatnonzero(np.isnan(numbers).all(axis=1))):
            raise CohortError(f"Bag {empty[0]} has no label. Leave it out.")
        names = tuple(map(str, getattr(labels, "columns", range(numbers.shape[1]))))
        target = Multilabel(labels=names, positive_weights=self.positive_weights)
        self._fit(samples, np.where(np.isnan(numbers), -1, numbers), target)
        self.labels_ = names
        return self

    def predict_proba(self, bags: Sequence[BagLike]) -> NDArray[np.float64]:
        """Return the probability of each label, one row per bag."""
        return self._answers(bags)

    def predict(self, bags: Sequence[BagLike]) -> NDArray[np.int64]:
        """Return 1 for each label with a probability above 0.5, one row per bag."""
        return (self.predict_proba(bags) > 0.5).astype(np.int64)


class MILSurvival(MILEstimator):
    """Predicts the risk of an event per bag, as scikit-survival's models do for rows.

    >>> model = MILSurvival("caprmil", epochs=10).fit(bags, np.stack([times, events], axis=1))
    >>> model.predict(bags), model.predict_survival(bags), model.score(bags, labels)

    Labels are (n, 2), time and event, or a structured array of scikit-survival. The settings are
    those of `MILClassifier`; the others are those of the survival target.

    Fitted, besides those of `MILClassifier`: `horizons_`, the times of `predict_survival`.
    """

    def __init__(
        self,
        model: str | MILModel = "caprmil",
        *,
        settings: dict[str, Any] | None = None,
        epochs: int = 30,
        lr: float = 2e-4,
        weight_decay: float = 1e-5,
        warmup_epochs: int = 6,
        batch_size: int = 1,
        loss: Literal["cox", "discrete"] = "cox",
        risk_set: Literal["memory", "batch"] = "memory",
        intervals: int = 4,
        horizons: Sequence[float] = (),
        clip: float = 0.0,
        validation: float = 0.0,
        patience: int = 20,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.model = model
        self.settings = settings
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size
        self.loss = loss
        self.risk_set = risk_set
        self.intervals = intervals
        self.horizons = horizons
        self.clip = clip
        self.validation = validation
        self.patience = patience
        self.seed = seed
        self.device = device

    def fit(self, bags: Sequence[BagLike], labels: Any) -> "MILSurvival":
        """Train a new model on these bags, with a time and an event per bag."""
        samples, rows = as_samples(bags), as_survival(labels)
        target = Survival(
            loss=self.loss,
            risk_set=self.risk_set,
            intervals=self.intervals,
            horizons=tuple(map(float, self.horizons)),
        ).with_horizons(rows.tolist())
        self._fit(samples, rows, target)
        self.horizons_ = np.array(target.horizons)
        return self

    def predict(self, bags: Sequence[BagLike]) -> NDArray[np.float64]:
        """Return the risk of each bag: a log hazard, relative to the median bag of the training."""
        return self._answers(bags)[:, 0]

    def predict_survival(self, bags: Sequence[BagLike]) -> NDArray[np.float64]:
        """Return the probability of no event until each of `horizons_`, one row per bag."""
        return self._answers(bags)[:, 1:]

    def score(self, bags: Sequence[BagLike], labels: Any) -> float:
        """Return Harrell's C-index of the risks."""
        rows, answers = as_survival(labels), self._answers(bags)
        return self.target_.headline_metric.function(rows, answers)


def as_survival(labels: Any) -> NDArray[np.float64]:
    """Return labels as (n, 2): time, and 1 for an event or 0 for a censored bag."""
    array = np.asarray(labels)
    try:
        if array.dtype.names is not None and len(array.dtype.names) == 2:  # scikit-survival's
            event, time = sorted(array.dtype.names, key=lambda name: array[name].dtype.kind != "b")
            array = np.stack([array[time], array[event]], axis=1)
        rows = array.astype(np.float64)
    except (TypeError, ValueError) as problem:
        raise CohortError(f"Labels must be numbers: a time and an event ({problem}).") from problem
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise CohortError(
            f"Labels must be (bags, 2), a time and an event each, not of shape {array.shape}."
        )
    if not (np.isfinite(rows).all() and (rows[:, 0] >= 0).all()):
        raise CohortError("Times must be numbers of 0 or more. Remove bags without one.")
    if not set(rows[:, 1]) <= {0.0, 1.0}:
        raise CohortError("Events must be 0 or 1, in the second column, after the times.")
    if not rows[:, 1].any():
        raise CohortError("No bag has the event: nothing can be learned from them.")
    return rows


def as_samples(bags: Sequence[BagLike]) -> list[Sample]:
    """Check bags of any kind and name them by their number. Files are read later."""
    if isinstance(bags, str | PathLike | Bag):
        raise BagError("This is one bag. Pass a list of bags, also for a single bag.")
    if getattr(bags, "ndim", None) == 2:
        raise BagError(
            f"Bags are a list of (patches, features) arrays, not one array of shape "
            f"{tuple(bags.shape)}. Pass [array] if it is a single bag."  # type: ignore[attr-defined]
        )
    samples = [Sample(f"bag {number}", as_bag(bag, number)) for number, bag in enumerate(bags)]
    if not samples:
        raise BagError("There are no bags. Pass at least one.")
    return samples


def as_bag(bag: BagLike, number: int) -> Path | Bag:
    """Return a bag that is checked, or the path of its file."""
    if isinstance(bag, str | PathLike):
        return Path(bag)
    if isinstance(bag, Bag):
        return bag
    try:
        array = bag.detach().cpu().float().numpy() if isinstance(bag, Tensor) else np.asarray(bag)
        if array.dtype.kind in "biu":  # counts and flags are features too
            array = array.astype(np.float32)
        if array.ndim != 2:
            raise BagError(f"It has shape {array.shape}. A bag is (patches, features).")
        return bag_files.from_arrays(array)
    except BagError as problem:
        raise BagError(f"Bag {number} cannot be used. {problem}") from problem


def common_width(samples: Sequence[Sample], fitted: int | None = None) -> int:
    """Return the number of features per patch: the same in all bags, and as in `fit`."""
    widths = [
        sample.bag.info.width if isinstance(sample.bag, Bag) else inspect(sample.bag).width
        for sample in samples
    ]
    expected = fitted or widths[0]
    for sample, width in zip(samples, widths, strict=True):
        if width != expected:
            others = "the model was fitted on" if fitted else "the bags before it have"
            raise BagError(
                f"{sample.slide.capitalize()} has patches of {width} features; {others} "
                f"{expected}. Use the features of one encoder for all bags."
            )
    return expected


def as_classes(labels: Iterable[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the classes, sorted, and the number of each label's class among them."""
    column = np.asarray(labels if hasattr(labels, "__array__") else list(labels))
    if column.ndim != 1:
        raise CohortError(f"Labels must be one per bag, not of shape {column.shape}.")
    try:
        classes, numbers = np.unique(column, return_inverse=True)
    except TypeError as problem:
        raise CohortError(
            f"Labels must be of one type that can be sorted ({problem}). Pass text or numbers."
        ) from problem
    if len(classes) < 2:
        raise CohortError(
            f"All labels are {classes.tolist()}. A classifier needs bags of at least two classes."
        )
    check_classification_targets(column)
    return classes, numbers


def in_grade_order(
    classes: NDArray[Any], numbers: NDArray[np.int64], grades: Sequence[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the grades, from low to high, and the number of each label's grade among them."""
    ordered = list(grades)
    if len(set(ordered)) < len(ordered):
        raise RecipeError(f"grades names one twice: {shorten(map(str, ordered))}.")
    if odd := [str(each) for each in classes.tolist() if each not in ordered]:
        raise CohortError(
            f"These labels are not among the grades: {shorten(odd)}. Name all grades, from low to "
            "high."
        )
    places = np.array([ordered.index(each) for each in classes.tolist()], dtype=np.int64)
    return np.asarray(ordered), places[numbers]


@contextmanager
def own_randomness(device: str) -> Iterator[torch.device]:
    """Yield the device, and restore torch's random state at the end."""
    chosen = pick_device(device)
    # After CUDA is initialised, a seed is set on every GPU, whichever is used.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(gpus)):
        yield chosen
