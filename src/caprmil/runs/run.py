"""A run: the folder of a cross-validation, with its recipe, weights, predictions and scores.

run.json          versions, seed, target, encoder and scale of the bags, digest of the recipe
recipe.toml       every setting, resolved
splits.json       the slides in each part of each fold
covariates.csv    the covariates of each slide, if the models read any; vectors.npz, its vector
folds/NAME/       model/ (config.json, model.safetensors), fold.json, history.csv, timing.json,
                  test.csv, ...
predictions.csv   every test slide (or patient), predicted by models that have not seen it
guarantees.json, novelty.safetensors: see runs/conformal_sets.py
baselines/        the same slides, predicted without a model: patch_count.csv, mean_feature.csv, ...
calibration.json  the temperature of each fold, and errors before and after
scores.json, scores.md, curves.png, roc.png, reliability.png
"""

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from caprmil import config
from caprmil.cohort.cohort import CohortConfig, load_cohort
from caprmil.cohort.covariates import VECTOR, SlideCovariates
from caprmil.cohort.folds import Fold
from caprmil.cohort.slide_vectors import read_vectors
from caprmil.encoders.card import same_encoder
from caprmil.errors import (
    BagError,
    CaprmilError,
    RecipeError,
    RunError,
    UnknownNameError,
    count,
    shorten,
)
from caprmil.evaluation.calibration import soften
from caprmil.evaluation.novelty import FILE as NOVELTY
from caprmil.evaluation.novelty import Reference
from caprmil.evaluation.patient_answers import combine_slides
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bag_files
from caprmil.features.bag_files import BagFiles, SlideBags
from caprmil.features.bags import BagInfo
from caprmil.features.batches import Cache, Sample
from caprmil.io.paths import RemotePath, as_path, scratch_folder
from caprmil.io.progress import Step
from caprmil.io.tables import TableLike, read_table, table_name
from caprmil.models import MILModel
from caprmil.models.device import pick_device
from caprmil.runs.facts import ADVICE, FACTS, read_facts, read_fold_facts
from caprmil.runs.inference import TrainedModel, predict_each, predict_file, report_failed
from caprmil.runs.remote import FOLD, download_fold, finished_folds
from caprmil.runs.scores import SCORES, read_calibration, read_scores
from caprmil.runs.slide_covariates import (
    check_known,
    covariates_of_table,
    encoded,
    model_of_slide,
    read_slide_covariates,
)
from caprmil.runs.splits import SPLITS, read_splits
from caprmil.slides.scale import same_scale
from caprmil.targets import Target, find_target

RECIPE, PREDICTIONS = "recipe.toml", "predictions.csv"
BASELINES, RELIABILITY = "baselines", "reliability.png"


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
        self.patients, self.labels, self.paths = splits.patients, splits.labels, splits.paths
        self.splits = list(splits.folds)
        self.unit, self.combine = splits.unit, splits.combine
        self.slides = splits.slides
        for label in self.labels.values():
            self._parse_label(label)

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
        state = "" if self.finished else ", unfinished"
        folds = count(len(self.splits), "fold")
        return f"Run({str(self.folder)!r}: {self.facts.model}, {folds}{state})"

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
            return {slide: as_path(path) for slide, path in self.paths.items()}
        return {
            patient: SlideBags.of({slide: as_path(self.paths[slide]) for slide in own})
            for patient, own in self.slides.items()
        }

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

        For what shows predictions. It has no scores, baselines or temperatures of its own.
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
        view.__dict__["temperatures"] = {}
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
        return Reference.read(path, self.facts.in_dim) if path.exists() else None

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
    def temperatures(self) -> dict[str, float]:
        """The calibration temperature of each calibrated fold. A temperature of 1 means none."""
        return read_calibration(self.folder).used

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

    def for_slide(self, model: MILModel, slide: str) -> MILModel:
        """Return a model with the covariates of a slide, if it reads any."""
        return model_of_slide(model, slide, self.covariates)

    @cached_property
    def covariates(self) -> dict[str, SlideCovariates]:
        """The covariates of each slide, as far as they are known; empty if the models read none."""
        return read_slide_covariates(self.folder) if self.covariate_names else {}

    @property
    def covariate_names(self) -> tuple[str, ...]:
        """The columns that the models read besides the patches."""
        names = self._recipe_data().get("covariates", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._damaged_recipe("covariates is not a list of columns")
        return (*names, *([VECTOR] if self._recipe_data().get("vectors") else []))

    def add_covariates(
        self, table: TableLike | None = None, vectors: TableLike | None = None
    ) -> None:
        """Add the covariates of further slides: a table with a column for the slide, and vectors.

        `vectors` is a table with a row per slide, or a folder.
        """
        names = tuple(name for name in self.covariate_names if name != VECTOR)
        for source, read in ((table, names), (vectors, VECTOR in self.covariate_names)):
            if source is not None and not read:
                raise RunError(f"The models of {self.folder} do not read {table_name(source)}.")
        own = {} if vectors is None else read_vectors(vectors, None)
        if table is not None:
            found = covariates_of_table(table, names, self.columns.get("slide"))
            self.covariates.update(found)
        elif not names:
            self.covariates.update({name: SlideCovariates(name, {}) for name in own})
        for name in own.keys() & self.covariates.keys():
            self.covariates[name] = self.covariates[name]._replace(vector=own[name])

    def check_bag(self, slide: str, info: BagInfo, *, force: bool = False) -> None:
        """Refuse a bag that differs from those the models were trained on.

        `force` accepts another encoder or scale, never another width.
        """
        for part in info.slides:
            self.check_bag(part.name, part.info, force=force)
        facts = self.facts
        width, encoder, scale = info.width, info.encoder, info.mpp
        if width != facts.in_dim:
            differs, advice = f"{width} features, not {facts.in_dim}", ""
        elif encoder and facts.encoder and not same_encoder(encoder, facts.encoder):
            differs, advice = f"encoder {encoder}, not {facts.encoder}", ", or pass --force"
        elif info.fingerprint and facts.fingerprint and info.fingerprint != facts.fingerprint:
            differs = f"other weights or another transform of encoder {encoder}, not those"
            advice = ", or pass --force"
        elif scale and facts.mpp and not same_scale(scale, facts.mpp):
            differs, advice = f"{scale:g} um/px, not {facts.mpp:g}", ", or pass --force"
        else:
            return
        if not (force and advice):
            raise BagError(
                f"{slide} is of {differs} as the models of {self.folder} were trained on. "
                f"Extract its features in the same way{advice}."
            )

    def _check_bags(self, paths: Mapping[str, BagFiles], *, force: bool) -> None:
        """Refuse bags that differ, all of them in one error. Damaged ones fail one by one later."""
        problems = []
        for slide, path in paths.items():
            try:
                info = bag_files.inspect(path)
            except BagError:
                continue
            try:
                self.check_bag(slide, info, force=force)
            except BagError as problem:
                problems.append(str(problem))
        if problems:
            raise BagError(shorten(problems, separator="\n- "))

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
        share of held-out slides that are more like the training slides. With a coverage there are
        also columns for the set that holds the label with this probability.
        A bag that is damaged, or has no finite answer, does not cost the others: its slide is added
        to `failed`, or logged.
        """
        from caprmil.runs import conformal_sets

        chosen = self.trained_folds(fold)
        self._check_bags(paths, force=force)
        if names := list(self.covariate_names):
            check_known(names, list(paths), self.covariates)
        torch_device = pick_device(device)
        trained = {each.name: self.trained(each.name) for each in chosen}
        for each in trained.values():
            each.model.to(torch_device)
        rows: dict[str, NDArray[np.float64]] = {}
        by_fold: dict[str, dict[str, NDArray[np.float64]]] = {}
        extra: dict[str, list[str]] = {"models": [], "spread": []}
        problems: dict[str, BagError] = {}
        for number, (slide, path) in enumerate(paths.items(), 1):
            unseen = [each.name for each in chosen if not self._saw(each, slide, path)]
            names = unseen or list(trained)
            try:
                models = [trained[name] for name in names]
                own = [m._replace(model=self.for_slide(m.model, slide)) for m in models]
                answers = predict_file(own, path, torch_device)
            except BagError as problem:
                problems[slide] = problem
                continue
            rows[slide] = answers.mean(axis=0)
            by_fold[slide] = dict(zip(names, answers, strict=True))
            spread = self.target.disagreement(answers) if len(names) > 1 else None
            extra["models"].append(f"{len(names)}{'' if unseen else ' (all saw it in training)'}")
            extra["spread"].append("" if spread is None else f"{spread:.4f}")
            if progress:
                progress(number, len(paths))
        report_failed(problems, failed, len(paths))
        columns = {name: tuple(cells) for name, cells in extra.items()}
        if self.novelty is not None:
            unlike = conformal_sets.novelty_column(self, {slide: paths[slide] for slide in rows})
            columns[conformal_sets.UNLIKE_COLUMN] = unlike
        if coverage is not None:
            columns |= conformal_sets.set_columns(self, by_fold, coverage)
        found = Predictions(
            slides=tuple(rows),
            target=self.target,
            answers=np.stack(list(rows.values())),
            extra=columns,
            unit=self.unit,
        )
        return combine_slides(
            found, self.combine, {slide: slide for slide in rows} | dict(patients or {})
        )

    def _saw(self, fold: Fold, name: str, files: BagFiles) -> bool:
        """Return whether the model of a fold knows a bag, or one of the slides in it."""
        parts = files.slides if isinstance(files, SlideBags) else ()
        return any(fold.saw(self.unit_of(each)) for each in (name, *parts))

    def evaluate(
        self,
        table: TableLike,
        features: str | Path | None = None,
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
        an answer are left out, and added to `failed`, or logged.
        """
        frame = read_table(table)
        columns: dict[str, Any] = {
            role: name for role, name in self.columns.items() if name in frame.columns
        }
        if label is not None:
            columns["label"] = label
        read = tuple(name for name in self.covariate_names if name != VECTOR)
        columns |= {"covariates": read or None, "vectors": vectors and str(vectors)}
        if VECTOR in self.covariate_names and vectors is None:
            raise RunError(f"The models of {self.folder} read a vector of each slide: --vectors.")
        unit: dict[str, Any] = {"mixed_patients": True}
        if self.predicts == "patient":
            unit = {"unit": "patient", "combine": self.combine or "bag"}
        settings = CohortConfig(**columns, **unit, scan=False)
        cohort, _ = load_cohort(table, features, settings, target=self.target)
        slides = {slide.name: slide.patient for slide in cohort.slides}
        self.check_unseen(slides if cohort.joins else cohort.patients)
        for slide, info in cohort.bags.items():
            self.check_bag(slide, info, force=force)
        samples = [Sample(e.name, e.path) for e in cohort.entries]
        covariates = cohort.covariates
        cache, chosen, problems = Cache(4.0), pick_device(device), dict[str, BagError]()
        by_fold = {}
        for number, fold in enumerate(self.trained_folds(), 1):
            trained = self.trained(fold.name)
            samples = [sample for sample in samples if sample.slide not in problems]
            if covariates is not None:
                samples = [
                    s._replace(covariates=encoded(trained.model, covariates.of(s.slide)))
                    for s in samples
                ]
            by_fold[fold.name] = predict_each(
                trained, samples, problems, cache=cache, device=chosen
            )
            if progress:
                progress(number, len(self.done))
        report_failed(problems, failed, len(cohort))
        kept = [entry for entry in cohort.entries if entry.name not in problems]
        tables = [
            Predictions(
                slides=tuple(entry.name for entry in kept),
                target=self.target,
                answers=np.stack([answers[entry.name] for entry in kept]),
                labels=self.target.as_labels(entry.label for entry in kept),
                patients=tuple(entry.patient for entry in kept),
                folds=(fold,) * len(kept),
                unit=self.unit,
            )
            for fold, answers in by_fold.items()
        ]
        return combine_slides(Predictions.concatenate(tables), self.combine)

    @property
    def columns(self) -> dict[str, str]:
        """The columns of slide, patient and label, as far as the recipe of the run names them."""
        data = self._recipe_data()
        roles = ("slide", "patient", "label")
        found: dict[str, str] = {role: data[role] for role in roles if role in data}
        if not all(isinstance(name, str) for name in found.values()):
            raise self._damaged_recipe("the name of a column is not text")
        return found

    def _recipe_data(self) -> dict[str, Any]:
        """Return the table [data] of the recipe."""
        try:
            data = config.read_toml(self.recipe_text).get("data", {})
        except (ValueError, RecursionError) as problem:
            raise self._damaged_recipe(_reason(problem)) from problem
        if not isinstance(data, dict):
            raise self._damaged_recipe("data is not a table")
        return data

    @property
    def recipe_text(self) -> str:
        """The recipe of the run, as TOML."""
        try:
            return (self.folder / RECIPE).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise self._damaged_recipe(_reason(problem)) from problem

    def _damaged_recipe(self, reason: str) -> RunError:
        path = self.folder / RECIPE
        return RunError(f"{path} is missing or damaged ({reason}). Restore it from a copy.")

    def bag_paths(self) -> list[Path]:
        """Return the run's own bags, as far as they still exist."""
        found = [path for path in map(as_path, self.paths.values()) if path.exists()]
        if not found:
            raise RunError(f"The bags of {self.folder} no longer exist. Pass some.")
        return found

    def check_unseen(self, patients: Mapping[str, str]) -> None:
        """Refuse to score slides or patients that a model was trained or validated on."""
        units = {unit for fold in self.splits for unit in (*fold.train, *fold.validation)}
        seen = {slide for unit in units for slide in self.slides[unit]}
        owners = {self.patients[slide] for slide in seen}
        known = [name for name, patient in patients.items() if name in seen or patient in owners]
        if known:
            raise RunError(
                f"The models of {self.folder} were trained on {len(known)} of these slides, or on "
                f"their patients: {shorten(known)}. Leave them out. For the scores on test slides: "
                f"caprmil evaluate {self.folder}"
            )


def parse_target(table: Mapping[str, Any]) -> Target:
    """Return the target of a table with its kind and settings."""
    if not isinstance(table, Mapping) or "kind" not in table:
        raise RecipeError(f"target must be a table with a kind, not {table!r}")
    settings = {name: value for name, value in table.items() if name != "kind"}
    return config.parse(settings, into=find_target(str(table["kind"])), name="target")


def target_table(target: Target) -> dict[str, Any]:
    """Return a target as the table that `parse_target` reads."""
    return {"kind": target.kind, **config.as_table(target)}


def _reason(problem: Exception) -> str:
    """Return a problem in a few words, with its type unless it is an error of ours."""
    kind = "" if isinstance(problem, CaprmilError) else f"{type(problem).__name__}: "
    return f"{kind}{problem}".rstrip(".")
