"""The training and the answers that all estimators share."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted

from caprmil.cohort.covariates import Column, column_table
from caprmil.cohort.given_covariates import given_covariates
from caprmil.errors import BagError, CohortError, RecipeError
from caprmil.estimators.given_labels import as_weights
from caprmil.features.batches import Sample
from caprmil.io.leftovers import temporary_folder
from caprmil.models import MILModel, create
from caprmil.models.device import pick_device
from caprmil.runs.inference import TrainedModel, complete_target, predict_samples
from caprmil.targets import (
    Target,
)
from caprmil.training.given_bags import (
    Bags,
    as_samples,
    common_width,
    covariates_of,
    with_covariates,
)
from caprmil.training.module import fit
from caprmil.training.train_config import TrainConfig


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
    fusion: dict[str, Any] | None
    categorical: Sequence[str]

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn asks of an estimator: it reads bags, not rows."""
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.target_tags.required = True
        return tags

    def _fit(
        self,
        bags: Bags,
        samples: Sequence[Sample],
        labels: NDArray[Any],
        target: Target,
        sample_weight: Iterable[float] | None = None,
    ) -> None:
        """Train a new model on bags, as samples, with labels."""
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
        weights = None
        if sample_weight is not None:
            weights = as_weights(samples, sample_weight, self.batch_size)
            labelled = [sample for sample in labelled if weights[sample.slide] > 0]
        train, held_out = self._split(labelled, target)
        target = target.fit([sample.label for sample in train])
        columns = self._read_covariates(bags, train)
        train, held_out = (with_covariates(part, bags, columns) for part in (train, held_out))
        with own_randomness(self.device) as device, temporary_folder() as folder:
            torch.manual_seed(self.seed)
            model = self._new_model(width, target.n_outputs, columns)
            history = fit(
                model,
                train,
                held_out,
                target=target,
                folder=Path(folder),
                settings=settings,
                seed=self.seed,
                device=self.device,
                weights=weights,
            )
            trained = complete_target(TrainedModel(model, target), train, device=device)
            model.cpu()
        self.n_features_in_, self.target_ = width, trained.target
        self.model_, self.history_, self.columns_ = model, history, columns

    def _answers(self, bags: Bags) -> NDArray[np.float64]:
        """Return the answers of the fitted model, one row per bag."""
        check_is_fitted(self, "model_")
        samples = as_samples(bags)
        common_width(samples, self.n_features_in_)
        samples = with_covariates(samples, bags, self.columns_)
        with own_randomness(self.device) as device:  # a DataLoader draws a seed in any case
            trained = TrainedModel(self.model_, self.target_)
            answers = predict_samples(trained, samples, device=device)
        self.model_.cpu()
        return answers

    def _read_covariates(self, bags: Bags, train: Sequence[Sample]) -> tuple[Column, ...]:
        """Return the covariates of the bags, if they have some, by those to train on."""
        values = covariates_of(bags)
        if values is None:
            if self.fusion is not None or self.categorical:
                raise RecipeError(
                    "fusion and categorical are about covariates, and there are none. Pass pairs "
                    'of a bag and its covariates: (bag, {"age": 63}).'
                )
            return ()
        found = given_covariates(values, tuple(self.categorical))
        return found.fit([sample.slide for sample in train])

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

    def _new_model(self, width: int, n_outputs: int, columns: Sequence[Column]) -> MILModel:
        image = self._new_image_model(width, n_outputs)
        if not columns:
            return image
        settings: dict[str, Any] = {**(self.fusion or {}), "image": image}
        tables = [column_table(column) for column in columns]
        return create("fused", width, n_outputs, columns=tables, **settings)

    def _new_image_model(self, width: int, n_outputs: int) -> MILModel:
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


@contextmanager
def own_randomness(device: str) -> Iterator[torch.device]:
    """Yield the device, and restore torch's random state at the end."""
    chosen = pick_device(device)
    # After CUDA is initialised, a seed is set on every GPU, whichever is used.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(gpus)):
        yield chosen
