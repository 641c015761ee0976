"""A run: the folder of a cross-validation, with its recipe, weights, predictions and scores.

run.json          versions, seed, target, encoder and scale of the bags, digest of the recipe
recipe.toml       every setting, resolved
splits.json       the slides in each part of each fold
covariates.csv    the covariates of each bag, if the models read any; vectors.npz, its vector
folds/NAME/       model/ (config.json, model.safetensors), fold.json, history.csv, timing.json,
                  test.csv, ...; combination.json, if the answers of slides are combined by it
predictions.csv   every test slide (or patient), predicted by models that have not seen it
guarantees.json, novelty.safetensors: see runs/conformal_sets.py
baselines/        the same slides, predicted without a model: patch_count.csv, mean_feature.csv, ...
calibration.json  the temperature of each fold, or another correction; errors before and after
scores.json, scores.md, curves.png, roc.png, reliability.png
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil import config
from caprmil.cohort.covariates import VECTOR, SlideCovariates
from caprmil.cohort.folds import Fold
from caprmil.cohort.slide_vectors import read_vectors
from caprmil.errors import (
    BagError,
    CaprmilError,
    RunError,
    UnknownNameError,
    count,
    shorten,
)
from caprmil.evaluation.learned_combination import LearnedCombination
from caprmil.evaluation.novelty import FILE as NOVELTY
from caprmil.evaluation.novelty import Reference
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bag_files
from caprmil.features.bag_files import BagFiles, SlideBags
from caprmil.features.source_bags import SlideFiles
from caprmil.io.moved_files import find_moved
from caprmil.io.notebook import first_rows, show_html
from caprmil.io.paths import RemotePath, as_path, scratch_folder
from caprmil.io.progress import Step
from caprmil.io.tables import TableLike, table_name
from caprmil.models import MILModel
from caprmil.runs.facts import (
    ADVICE,
    FACTS,
    read_facts,
    read_fold_facts,
)
from caprmil.runs.inference import TrainedModel
from caprmil.runs.remote import FOLD, download_fold, finished_folds
from caprmil.runs.run_recipe import RunRecipe
from caprmil.runs.scores import (
    SCORES,
    CalibrationFile,
    Temperatures,
    read_calibration,
    read_scores,
)
from caprmil.runs.slide_covariates import (
    covariates_of_table,
    model_of_slide,
    read_slide_covariates,
)
from caprmil.runs.source_inputs import find_slide_bags, source_bags
from caprmil.runs.splits import SPLITS, read_splits
from caprmil.targets import Target
from caprmil.targets.target_table import parse_target
from caprmil.targets.temperature import soften

if TYPE_CHECKING:
    import pandas as pd


PREDICTIONS = "predictions.csv"
BASELINES, RELIABILITY = "baselines", "reliability.png"


def reliability_file(target: str = "") -> str:
    """Return the file of the reliability diagram of a run, or of one of its several targets."""
    name = re.sub(r"[^\w.-]+", "_", target)  # a label may be called as no file can be
    return f"{name}-{RELIABILITY}" if target else RELIABILITY


COMBINATION, MEAN_OF_SLIDES = "combination.json", "mean_of_slides.csv"  # of a fold


class Run:
    """A run in a folder, finished or not."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path(folder)
        for name in (FACTS, SPLITS):
            if not (self.folder / name).is_file():
                raise RunError(f"{self.folder} is not a run: there is no {name} in it.")
        self.facts = read_facts(self.folder)
        self.target = self._parse_target(self.facts.target, FACTS)
        splits = read_splits(self.folder)
        self.patients, self.labels = splits.patients, splits.labels
        self.patches = splits.patches
        moved = find_moved(splits.paths, self.folder)
        self.paths = {slide: str(path) for slide, path in moved.items()}
        self.splits = list(splits.folds)
        self.unit, self.combine = splits.unit, splits.combine
        self.slides = splits.slides
        self.sources = {
            name: {slide: str(path) for slide, path in find_moved(own, self.folder).items()}
            for name, own in splits.sources.items()
        }
        if [*self.sources] != [source.name for source in self.facts.sources]:
            raise RunError(f"{self.folder / SPLITS} is damaged (other sources). {ADVICE}")
        for label in self.labels.values():
            self._parse_label(label)

    @classmethod
    def from_pretrained(
        cls, repository: str, *, revision: str | None = None, token: str | bool | None = None
    ) -> "Run":
        """Load a run that was pushed to the hub, OWNER/NAME. It predicts; it names no slides."""
        from caprmil.runs.hub_run import pull_run

        return pull_run(repository, revision=revision, token=token)

    def push_to_hub(
        self,
        repository: str,
        *,
        fold: str | None = None,
        private: bool = True,
        token: str | bool | None = None,
        branch: str | None = None,
        licence: str | None = None,
    ) -> str:
        """Upload the models with a card, or that of one fold, and return the URL of the commit.

        Slides and patients are not named, and a new repository is private by default.
        """
        from caprmil.runs.hub_run import push_run

        options: dict[str, Any] = {"private": private, "token": token, "branch": branch}
        return push_run(self, repository, fold=fold, licence=licence, **options)

    def _parse_target(self, table: Mapping[str, Any], name: str) -> Target:
        try:
            target = parse_target(table)
            if not target.ready:
                raise RunError("too little of the target is known")
        except CaprmilError as problem:
            reason = str(problem).rstrip(".")
            raise RunError(f"{self.folder / name} is damaged ({reason}). {ADVICE}") from None
        return target

    def _parse_label(self, label: str) -> None:
        try:
            if label:
                self.target.parse_label(label)
        except ValueError as problem:
            raise RunError(f"{self.folder / SPLITS} is damaged ({problem}) {ADVICE}") from None

    def __repr__(self) -> str:
        state = "" if self.finished else ", unfinished" if self.paths else ", of unnamed slides"
        folds = count(len(self.splits), "fold")
        return f"Run({str(self.folder)!r}: {self.facts.model}, {folds}{state})"

    def _repr_html_(self) -> str:
        """Show the run in a notebook: its model, features and scores."""
        facts = self.facts
        scale = f" at {facts.mpp:g} µm per pixel" if facts.mpp else ""
        known = [
            ("model", facts.model),
            ("target", self.target.kind),
            ("features", f"{facts.encoder or 'encoder not known'}{scale}"),
            ("slides", len(self.paths) or None),
            ("patients", len({*self.patients.values()}) or None),
            ("folds", f"{len(self.done)} of {len(self.splits)} trained"),
            ("folder", self.folder),
        ]
        if not self.finished:
            return show_html("Run, unfinished" if self.paths else "Run, of unnamed slides", known)
        return show_html("Run", known, first_rows(self.score_table(), most=40))

    def score_table(self) -> "pd.DataFrame":
        """Return a row per metric: over folds, all together, and the ends of its interval."""
        import pandas as pd  # here: it takes longer to load than a table to print

        rows = []
        for name, metric in self.scores["metrics"].items():
            low, high = metric["interval"] or (None, None)
            rows.append(
                {
                    "metric": name,
                    "mean over folds": metric["mean_over_folds"],
                    "std over folds": metric["std_over_folds"],
                    "all together": metric["all_slides_pooled"],
                    "low": low,
                    "high": high,
                }
            )
        return pd.DataFrame(rows).convert_dtypes()

    @property
    def finished(self) -> bool:
        """Whether all folds are trained and scored."""
        return (self.folder / SCORES).exists()

    @cached_property
    def bags(self) -> dict[str, BagFiles]:
        """The bag of each slide by name, or that of each patient, if its slides are one bag.

        A name in it is what folds list, and what can be explained.
        """
        if self.unit == "slide":
            return dict(self.slide_bags)
        return {
            patient: SlideBags.of({slide: self.slide_bags[slide] for slide in own})
            for patient, own in self.slides.items()
        }

    @property
    def names(self) -> set[str]:
        """What can be explained by its name: slides or patients, or both if slides are combined."""
        return {*self.bags} | ({*self.patients.values()} if self.combine else set())

    @cached_property
    def slide_bags(self) -> dict[str, SlideFiles]:
        """The bag of each slide by name: a file, or a file of each source."""
        if not self.sources:
            return {slide: as_path(path) for slide, path in self.paths.items()}
        return {
            slide: source_bags(self.facts, [as_path(own[slide]) for own in self.sources.values()])
            for slide in self.paths
        }

    def use_features(self, *folders: str | Path) -> None:
        """Read the bags of the run's slides from folders: they may have been moved there."""
        found = find_slide_bags(self.facts, folders)
        known = {slide: found[slide] for slide in self.paths if slide in found}
        if not known:
            raise RunError(
                f"{shorten(map(str, folders))} has bags of other slides "
                f"({shorten([*found][:5])}), none of those of "
                f"{self.folder} ({shorten([*self.paths][:5])}). Pass the folder with its bags."
            )
        own = {slide: bag_files.paths_of(files) for slide, files in known.items()}
        self.paths |= {slide: str(paths[0]) for slide, paths in own.items()}
        for number, source in enumerate(self.sources.values()):
            source |= {slide: str(paths[number]) for slide, paths in own.items()}
        for name in ("bags", "slide_bags"):
            self.__dict__.pop(name, None)

    def owner(self, name: str) -> str:
        """Return the patient of a slide or patient; the name itself if it is not of the run."""
        return self.patients.get(name, name)

    def unit_of(self, name: str) -> str:
        """Return what folds list for a slide: its patient, if slides of a patient are one bag."""
        return self.owner(name) if self.unit == "patient" and name not in self.slides else name

    @property
    def predicts(self) -> Literal["slide", "patient"]:
        """What predictions are of."""
        return "patient" if self.combine else self.unit

    @property
    def done(self) -> list[Fold]:
        """The folds that are trained."""
        if isinstance(self.folder, RemotePath):
            there = finished_folds(self.folder)
            return [fold for fold in self.splits if fold.name in there]
        return [fold for fold in self.splits if self.fold_folder(fold.name).is_dir()]

    def fold_folder(self, name: str) -> Path:
        """Return the folder of a fold. That of a remote run is copied when it is first used."""
        if isinstance(self.folder, RemotePath):
            if name not in self._copies:
                self._copies[name] = download_fold(self.folder, name, scratch_folder())
            return self._copies[name]
        return self.folder / "folds" / name

    @cached_property
    def _copies(self) -> dict[str, Path]:
        return {}

    @cached_property
    def predictions(self) -> Predictions:
        """Every test slide, predicted by models that have not seen it."""
        return self.read_predictions(self._finished(PREDICTIONS))

    def part(self, name: str) -> "Run":
        """Return the run as if it predicted only one of its several targets.

        For what shows predictions. It has no scores or baselines of its own.
        """
        part, view = self.target.parts[name], copy(self)
        texts = {
            slide: ""
            if (own := part.label_of(self.target.parse_label(text))) is None
            else part.target.show_label(own)
            for slide, text in self.labels.items()
            if text
        }
        view.target, view.labels = (
            part.target,
            {slide: cell for slide, cell in texts.items() if cell},
        )
        own = self.calibration.targets.get(name, Temperatures(temperatures={}))
        view.__dict__["calibration"] = CalibrationFile(**vars(own))
        view.__dict__.pop("temperatures", None)
        if self.finished:
            view.__dict__["predictions"] = self.predictions.part(name)
        return view

    @cached_property
    def scores(self) -> dict[str, Any]:
        """The scores over folds and pooled, as in scores.json."""
        self._finished(SCORES)
        return read_scores(self.folder, self.target.headline)

    @cached_property
    def baselines(self) -> dict[str, Predictions]:
        """The same slides, predicted without a model."""
        found = sorted(self._finished(BASELINES).glob("*.csv"))
        return {path.stem.replace("_", " "): self.read_predictions(path) for path in found}

    @property
    def all_tested(self) -> Predictions:
        """Every test slide, from the trained folds: also before the run is scored."""
        paths = [self.fold_folder(fold.name) / "test.csv" for fold in self.done]
        return Predictions.concatenate([self.read_predictions(path) for path in paths])

    @cached_property
    def novelty(self) -> Reference | None:
        """What slides are compared with to find those unlike the training slides, if known."""
        path = self.folder / NOVELTY
        return Reference.read(path, self.facts.mean_dim) if path.exists() else None

    @property
    def validation(self) -> dict[str, Predictions]:
        """The validation part of each fold that has one, predicted by the fold's model."""
        paths = {fold.name: self.fold_folder(fold.name) / "validation.csv" for fold in self.done}
        return {name: self.read_predictions(path) for name, path in paths.items() if path.exists()}

    def read_predictions(self, path: Path) -> Predictions:
        """Read a table of predictions that this run wrote."""
        if not path.is_file():
            raise RunError(f"{path} is missing. {ADVICE}")
        found = Predictions.read(path, target=self.target)
        if found.target.columns != self.target.columns:
            raise RunError(
                f"{path} is damaged (its columns are {shorten(found.target.columns)}, not "
                f"{shorten(self.target.columns)}). {ADVICE}"
            )
        names = {*self.patients.values()} if self.combine else self.slides
        unknown = [name for name in found.slides if name not in names]
        unknown += sorted({*(found.folds or ())} - {fold.name for fold in self.splits})
        if unknown and path.is_relative_to(self.folder):  # elsewhere it may be of another cohort
            raise RunError(f"{path} is damaged ({unknown[0]} is not in the run). {ADVICE}")
        return found

    @cached_property
    def calibration(self) -> CalibrationFile:
        """The temperatures of the run, and those of each of its several targets."""
        return read_calibration(self.folder)

    @cached_property
    def temperatures(self) -> dict[str, float]:
        """The calibration temperature of each calibrated fold. A temperature of 1 means none."""
        return self.calibration.used

    def calibrate(self, by_fold: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64] | None:
        """Return the mean of calibrated answers; None if a fold is not calibrated."""
        if not set(by_fold) <= set(self.temperatures):
            return None
        folds = [soften(p[None], self.temperatures[name])[0] for name, p in by_fold.items()]
        return np.asarray(np.mean(folds, axis=0))

    def _finished(self, name: str) -> Path:
        if not self.finished:
            missing = shorten(fold.name for fold in self.splits if fold not in self.done)
            raise RunError(
                f"{self.folder} is not finished; still to do: {missing or 'the scores'}. "
                "Give the same train command again to resume it."
            )
        return self.folder / name

    def trained_folds(self, name: str | None = None) -> list[Fold]:
        """Return the fold of that name, or all, as far as their models are there."""
        known = [fold.name for fold in self.done]
        if not known:
            raise RunError(
                f"{self.folder} has no trained model yet. "
                "Give the same train command again to resume it."
            )
        if name is not None and name not in known:
            raise UnknownNameError(f"fold in {self.folder}", name, known)
        return [fold for fold in self.done if name in (None, fold.name)]

    def unseen_folds(self, slide: str, fold: str | None = None) -> list[Fold]:
        """Return the trained folds whose model has not seen a slide in training or validation."""
        unit = self.unit_of(slide)
        return [each for each in self.trained_folds(fold) if not each.saw(unit)]

    def unseen_slides(self) -> list[str]:
        """Return the slides of the run that at least one model has not seen."""
        folds = self.trained_folds()
        return [name for name in self.bags if any(not fold.saw(name) for fold in folds)]

    def model(self, fold: str) -> MILModel:
        """Load the model of a fold."""
        self.trained_folds(fold)
        return MILModel.from_pretrained(self.fold_folder(fold) / "model")

    def fold_target(self, fold: str) -> Target:
        """Return the target of a fold's model, with what it needs of the training labels."""
        folder = self.fold_folder(fold)
        target = self._parse_target(read_fold_facts(folder).target, str(folder / FOLD))
        if (target.kind, target.columns) != (self.target.kind, self.target.columns):
            raise RunError(f"{folder / FOLD} is damaged (it is of another target). {ADVICE}")
        return target

    def trained(self, fold: str) -> TrainedModel:
        """Load the model of a fold with its target."""
        return TrainedModel(self.model(fold), self.fold_target(fold))

    def combinations(self, folds: Iterable[str]) -> dict[str, LearnedCombination]:
        """Return how the model of each fold combines the answers of slides, if that is learned."""
        if self.combine != "learned":
            return {}
        found = {}
        for name in folds:
            path = self.fold_folder(name) / COMBINATION
            found[name] = config.load_json(path, into=LearnedCombination, advice=ADVICE)
            if (*found[name].slopes,) != self.target.columns:
                raise RunError(f"{path} is damaged (it is of another target). {ADVICE}")
        return found

    def for_slide(self, model: MILModel, slide: str) -> MILModel:
        """Return a model with the covariates of a slide, if it reads any."""
        return model_of_slide(model, slide, self.covariates, self.unit)

    @cached_property
    def covariates(self) -> dict[str, SlideCovariates]:
        """The covariates of each bag, as far as they are known; empty if the models read none."""
        names = [name for name in self.covariate_names if name != VECTOR]
        if not self.covariate_names:
            return {}
        return read_slide_covariates(self.folder, self.unit, names)

    @property
    def covariate_names(self) -> tuple[str, ...]:
        """The columns that the models read besides the patches."""
        return self.recipe.covariates

    def add_covariates(
        self, table: TableLike | None = None, vectors: TableLike | None = None
    ) -> None:
        """Add the covariates of further slides: a table with a column for the slide, and vectors.

        `vectors` is a table with a row per slide, or a folder. If all slides of a patient are one
        bag, both are of patients.
        """
        names = tuple(name for name in self.covariate_names if name != VECTOR)
        for source, read in ((table, names), (vectors, VECTOR in self.covariate_names)):
            if source is not None and not read:
                raise RunError(f"The models of {self.folder} do not read {table_name(source)}.")
        own = {} if vectors is None else read_vectors(vectors, None, unit=self.unit)
        if table is not None:
            found = covariates_of_table(
                table, names, self.columns, unit=self.unit, predicts=self.predicts
            )
            self.covariates.update(found)
        elif not names:
            self.covariates.update({name: SlideCovariates(name, {}) for name in own})
        for name in own.keys() & self.covariates.keys():
            self.covariates[name] = self.covariates[name]._replace(vector=own[name])

    def predict(
        self,
        paths: Mapping[str, BagFiles],
        *,
        patients: Mapping[str, str] | None = None,
        fold: str | None = None,
        force: bool = False,
        device: str = "auto",
        coverage: float | None = None,
        progress: Step | None = None,
        failed: dict[str, BagError] | None = None,
    ) -> Predictions:
        """Predict bags with the mean of the folds' models, or with the model of one fold.

        `paths` are bags of slides, or of patients if the run joins their slides. `patients` are
        those of slides, if the run combines the answers of their slides. A slide of the training
        cohort is predicted only by models that have not seen it, if there are any. The column
        `models` is their number, `spread` the standard deviation over them, `unlike_training` the
        share of held-out slides that are more like the training slides; of a patient whose slides
        are combined, the highest. With a coverage there are also columns for the set that holds
        the label with this probability.
        A bag that is damaged, or has no finite answer, does not cost the others: its slide is added
        to `failed`, or logged.
        """
        from caprmil.runs.predict import predict_bags

        return predict_bags(
            self,
            paths,
            patients=patients or {},
            fold=fold,
            force=force,
            device=device,
            coverage=coverage,
            progress=progress,
            failed=failed,
        )

    def evaluate(
        self,
        table: TableLike,
        features: str | Path | Sequence[str | Path] | None = None,
        *,
        label: str | None = None,
        vectors: str | Path | None = None,
        force: bool = False,
        device: str = "auto",
        progress: Step | None = None,
        failed: dict[str, BagError] | None = None,
    ) -> Predictions:
        """Predict the slides of an external cohort with each fold's model, with their labels.

        Columns have the names that they have in the run, where the table has them. Slides without
        an answer are left out, and added to `failed`, or logged. If the run has several sources,
        `features` is a folder for each.
        """
        from caprmil.runs.external_cohort import answer_cohort, combine_answers, read_external

        reading: dict[str, Any] = {"label": label, "vectors": vectors, "force": force}
        cohort = read_external(self, table, features, **reading, failed=failed)
        found = answer_cohort(self, cohort, device=device, progress=progress, failed=failed)
        return combine_answers(self, found)[0]

    @cached_property
    def recipe(self) -> RunRecipe:
        """The recipe of the run, as far as a prediction needs it."""
        return RunRecipe(self.folder)

    @property
    def columns(self) -> dict[str, str]:
        """The columns of slide, patient, label and site, as far as they are known.

        They are those that the recipe names. The label's may also have been recognised.
        """
        label = self.facts.label
        return {**({} if label is None else {"label": label}), **self.recipe.columns}

    def bag_paths(self) -> list[SlideFiles]:
        """Return the bags of the run's slides, as far as they still exist."""
        found = [files for files in self.slide_bags.values() if files.exists()]
        if not found:
            raise RunError(
                f"The bags of {self.folder} are no longer where they were. Pass the folder that "
                "has them now."
            )
        return found
