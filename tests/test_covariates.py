"""Covariates: read and checked, encoded by training slides only, through every command."""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from typer.testing import CliRunner

from caprmil import config
from caprmil.cli import app
from caprmil.cohort.cohort import Cohort, Entry, load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.covariates import (
    Column,
    Covariates,
    column_table,
    encode,
    parse_columns,
)
from caprmil.cohort.folds import Fold, SplitConfig
from caprmil.errors import BagError, CohortError, ExportError, RecipeError, RunError
from caprmil.evaluation import baselines
from caprmil.explain import explain_slide, locate_slide
from caprmil.explain.browser import pack
from caprmil.export import FORMATS, model_export, read_metadata
from caprmil.features.bags import read as read_bag
from caprmil.models import FusedModel
from caprmil.report.evidence_section import EvidenceSum
from caprmil.runs.cohort_shift import measure_shifts
from caprmil.runs.conformal_sets import mean_feature
from caprmil.runs.external_cohort import answer_cohort, read_external
from caprmil.runs.run import Run
from caprmil.synthetic import TwoModalities
from caprmil.targets import Regression, Several, Survival, Task, find_target
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import FusionConfig, ModelConfig, Recipe
from caprmil.training.recipe_files import read_recipe
from caprmil.training.train_config import TrainConfig
from quick_scoring import quick_scoring

READ = ("marker", "age", "ward")


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    with quick_scoring():
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cohort whose label depends on the patches and on `marker`; age and ward say nothing."""
    return TwoModalities(slides=72, patches=(6, 12)).write(tmp_path_factory.mktemp("cohort"))


@pytest.fixture(scope="module")
def recipe(table: Path) -> Recipe:
    return Recipe(
        cohort=str(table),
        features=str(table.parent / "features"),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        data=CohortConfig(label="label", covariates=READ),
        splits=SplitConfig(folds=2, validation=0.25),
        fusion=FusionConfig(dim=8),
        train=TrainConfig(epochs=8, warmup_epochs=1, lr=3e-2, batch_size=6),
        loggers={},
    )


@pytest.fixture(scope="module")
def run(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with covariates, and each modality alone beside it."""
    out = tmp_path_factory.mktemp("run") / "run"
    return cross_validate(recipe, out, device="cpu", progress=False, modalities=True)


def load(table: Path | pd.DataFrame, features: Path, **data: object) -> Cohort:
    settings = CohortConfig(label="label", scan=False, **data)  # type: ignore[arg-type]
    return load_cohort(table, features, settings, SplitConfig(folds=2))[0]


def known(cohort: Cohort) -> Covariates:
    assert cohort.covariates is not None
    return cohort.covariates


# A linear model of the covariates alone


def test_the_baseline_is_a_logistic_regression_of_the_covariates_on_the_same_folds(
    run: Run, table: Path
) -> None:
    assert set(run.baselines) >= {"covariates", "mean feature", "patch count"}
    frame = pd.read_csv(table).set_index("slide")
    truth = frame["label"] == run.target.titles[1]
    for fold in run.splits:
        parts = {name: getattr(fold, name) for name in ("train", "validation", "test")}
        numbers = frame.loc[list(fold.train), ["marker", "age"]]
        scaled = (frame[["marker", "age"]] - numbers.mean()) / numbers.std(ddof=0)
        x = np.c_[scaled.fillna(0), frame["age"].isna(), pd.get_dummies(frame["ward"])].astype(
            float
        )
        rows = {name: x[frame.index.get_indexer(list(own))] for name, own in parts.items()}
        y = {name: truth[list(own)].to_numpy() for name, own in parts.items()}

        def fit(strength: float, *parts: str, rows: Any = rows, y: Any = y) -> Any:
            own = np.concatenate([rows[part] for part in parts])
            model = make_pipeline(StandardScaler(), LogisticRegression(C=strength))
            return model.fit(own, np.concatenate([y[part] for part in parts]))

        def loss(strength: float, rows: Any = rows, y: Any = y, fit: Any = fit) -> float:
            found = fit(strength, "train").predict_proba(rows["validation"])[:, 1]
            return float(log_loss(y["validation"], found, labels=[False, True]))

        best = min((1e-4, 1e-3, 1e-2, 1e-1, 1.0), key=loss)
        expected = fit(best, "train", "validation").predict_proba(rows["test"])
        found = run.baselines["covariates"].by_fold()[fold.name]
        places = [found.slides.index(slide) for slide in fold.test]
        np.testing.assert_allclose(found.answers[places], expected, atol=2e-3)


@pytest.mark.parametrize("kind", ["regression", "survival", "several"])
def test_a_linear_model_of_covariates_predicts_numbers_times_and_several_targets(kind: str) -> None:
    rng = np.random.default_rng(0)
    marker = rng.normal(size=120)
    size = 3 * marker + 0.1 * rng.normal(size=120)
    task = Several(tasks={"size": Task(kind="regression"), "age": Task(kind="regression")})
    target, labels = {
        "regression": (Regression(), size.tolist()),
        "survival": (Survival(horizons=(1.0,)), [(float(np.exp(-m)), 1.0) for m in marker]),
        "several": (task, [(s if n % 3 else float("nan"), -s) for n, s in enumerate(size)]),
    }[kind]
    names = [f"s{n}" for n in range(120)]
    cohort = Cohort(
        target=target,
        entries=tuple(
            Entry(name=name, patient=name, label=label, path=Path(name), row={})
            for name, label in zip(names, labels, strict=True)
        ),
        bags={},
        covariates=Covariates(
            names=("marker",),
            cells={name: {"marker": str(m)} for name, m in zip(names, marker, strict=True)},
        ),
    )
    parts = (tuple(names[:60]), tuple(names[60:90]), tuple(names[90:]))
    fold = Fold(name="fold-0", seed=0, train=parts[0], validation=parts[1], test=parts[2])
    predict = partial(baselines._by_covariates, known(cohort))
    found = baselines._by_part(predict, cohort, fold)
    assert spearmanr(found[:, 0], marker[90:]).statistic > 0.99
    if kind == "several":
        assert spearmanr(found[:, 1], marker[90:]).statistic < -0.99


# The columns of a table


def test_columns_are_encoded_as_scikit_learn_does_up_to_the_centre(table: Path) -> None:
    cohort = load(table, table.parent / "features", covariates=("marker", "ward"))
    slides, frame = list(cohort.patients), pd.read_csv(table)
    train, covariates = slides[:20], known(cohort)
    columns = covariates.fit(train)
    found = np.stack([encode(columns, covariates.of(slide)) for slide in slides])

    encoder = ColumnTransformer(
        [("numbers", StandardScaler(), ["marker"]), ("names", OneHotEncoder(), ["ward"])],
        sparse_threshold=0,
    ).fit(frame[:20])
    expected = encoder.transform(frame)
    expected = expected - expected[:20].mean(axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_average_training_slide_is_zero_and_missing_cells_have_an_indicator(
    table: Path,
) -> None:
    covariates = known(load(table, table.parent / "features", covariates=("age",)))
    slides = list(covariates.cells)
    (column,) = columns = covariates.fit(slides)
    found = np.stack([encode(columns, covariates.of(slide)) for slide in slides])
    missing = np.array([covariates.cells[slide]["age"] == "" for slide in slides])
    assert column.width == 2
    assert 0 < missing.mean() < 0.2
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-6)
    assert (found[missing, 0] == 0).all()
    np.testing.assert_allclose(found[:, 1], missing - missing.mean(), atol=1e-6)


def test_a_number_that_is_the_same_in_training_is_not_divided_by_rounding() -> None:
    """The standard deviation of 0.1, 0.1 and 0.1 is not 0 but 1.4e-17."""
    cells = {name: {"dose": "0.2" if name == "d" else "0.1"} for name in "abcd"}
    covariates = Covariates(names=("dose",), cells=cells)
    columns = covariates.fit("abc")
    assert encode(columns, covariates.of("d")) == pytest.approx([0.1])


def test_statistics_never_see_a_slide_that_is_not_trained_on(table: Path) -> None:
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)
    other = frame.copy()
    other.loc[30:, "marker"], other.loc[30:, "ward"] = "1e6", "Z"
    fitted = []
    for each in (frame, other):
        cohort = load(each, table.parent / "features", covariates=READ)
        fitted.append(known(cohort).fit(list(cohort.patients)[:30]))
    assert fitted[0] == fitted[1]


def test_columns_are_restored_from_json(table: Path) -> None:
    columns = known(load(table, table.parent / "features", covariates=READ)).fit(
        [f"slide_{number:03d}" for number in range(20)]
    )
    text = json.dumps([column_table(column) for column in columns])
    assert parse_columns(json.loads(text)) == columns
    with pytest.raises(RecipeError, match="no known kind"):
        parse_columns([{"kind": "colour", "width": 1}])
    with pytest.raises(RecipeError, match="another width"):
        parse_columns([{**column_table(columns[0]), "width": 7}])


def test_an_unknown_category_counts_as_the_average_slide(table: Path) -> None:
    covariates = known(load(table, table.parent / "features", covariates=("ward",)))
    columns: tuple[Column, ...] = covariates.fit(list(covariates.cells))
    own = covariates.of("slide_000")
    new = own._replace(cells={"ward": "Z"})
    assert not encode(columns, new).any()
    assert columns[0].show(new) == "Z, which training slides do not have"


def test_numbers_may_be_read_as_categories(table: Path) -> None:
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)
    frame["code"] = [("1", "1.0", "2", "10")[number % 4] for number in range(len(frame))]
    cohort = load(frame, table.parent / "features", covariates=("code",), categorical=("code",))
    (column,) = known(cohort).fit(list(cohort.patients))
    assert column.kind == "category"
    assert column.width == 3


def same(_: int) -> str:
    return "7"


def different(number: int) -> str:
    return f"name {number}"


def empty(_: int) -> str:
    return ""


def mixed(number: int) -> str:
    return "unsure" if number == 4 else str(number)


@pytest.mark.parametrize(
    ("names", "cells", "words"),
    [
        (("label",), None, "column 'label' is the label"),
        (("slide",), None, "column 'slide' is the slide"),
        (("patient",), None, "column 'patient' is the patient"),
        (("fold_0",), same, "column 'fold_0' is the split"),
        (("agee",), None, "no column is 'agee'. Did you mean 'age'?"),
        (("age", "age"), None, "'age' is named 2 times"),
        (("more",), same, "column 'more' is '7' for all slides"),
        (("more",), different, "differs for every slide, like a name"),
        (("more",), empty, "column 'more' has no values"),
        (("more",), mixed, "1 other cell: unsure (slide_004)"),
    ],
)
def test_a_column_that_cannot_be_a_covariate_is_named(
    table: Path, names: tuple[str, ...], cells: Callable[[int], str] | None, words: str
) -> None:
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)
    if cells is not None:
        frame[names[0]] = [cells(number) for number in range(len(frame))]
    with pytest.raises(CohortError) as error:
        load(frame, table.parent / "features", covariates=names)
    assert words in str(error.value)


def test_settings_of_covariates_without_covariates_are_refused(recipe: Recipe) -> None:
    without = CohortConfig(label="label")
    with pytest.raises(RecipeError, match="there are none"):
        replace(recipe, data=without)
    categorical = CohortConfig(label="label", covariates=("age",), categorical=("ward",))
    with pytest.raises(CohortError, match="'ward' is not a covariate"):
        load_cohort(recipe.cohort, recipe.features, categorical, recipe.splits)
    with pytest.raises(RecipeError, match="categorical"):
        CohortConfig(label="label", categorical=("ward",))
    compiled = replace(recipe, train=replace(recipe.train, compile=True))
    with pytest.raises(RecipeError, match="not compiled"):
        compiled.try_model()


def test_a_recipe_without_covariates_has_the_digest_that_it_had(tiny_recipe: Recipe) -> None:
    table = config.as_table(tiny_recipe)
    assert "fusion" not in table
    assert not {"covariates", "categorical"} & table["data"].keys()


# A run


@pytest.mark.slow
def test_both_modalities_beat_each_alone(run: Run) -> None:
    found = run.scores["modalities"]["differences"]
    scores = {row["second"]: (row["first_mean"], row["second_mean"]) for row in found[:2]}
    assert scores.keys() == {"image only", "covariates only"}
    assert all(both > alone for both, alone in scores.values())
    text = (run.folder / "scores.md").read_text()
    assert "What each modality adds" in text
    assert "image only | covariates only" in text


@pytest.mark.slow
def test_the_folds_of_each_modality_are_those_of_the_run(run: Run) -> None:
    for name in ("image", "covariates"):
        beside = Run(run.folder / name)
        assert beside.splits == run.splits
        assert len(beside.done) == len(run.splits)
    assert not isinstance(Run(run.folder / "image").model("fold-0"), FusedModel)


@pytest.mark.slow
def test_a_fold_stores_the_statistics_of_its_training_part(run: Run) -> None:
    frame = pd.read_csv(run.folder / "covariates.csv").set_index("slide")
    for fold in run.splits:
        path = run.fold_folder(fold.name) / "model" / "config.json"
        marker, age, ward = json.loads(path.read_text())["columns"]
        own = frame.loc[list(fold.train)]
        assert marker["mean"] == pytest.approx(own["marker"].mean())
        assert marker["std"] == pytest.approx(own["marker"].std(ddof=0))
        assert age["missing"] == pytest.approx(own["age"].isna().mean())
        assert ward["shares"] == pytest.approx(own["ward"].value_counts(normalize=True).to_dict())


@pytest.mark.slow
def test_predict_and_evaluate_give_the_answers_of_cross_validation(
    run: Run, table: Path, tmp_path: Path
) -> None:
    tested = run.predictions
    fold = run.splits[0]
    paths = {slide: Path(run.paths[slide]) for slide in fold.test}
    own = [row for row, slide in enumerate(tested.slides) if slide in paths]
    found = run.predict(paths, fold=fold.name, device="cpu")
    order = [found.slides.index(tested.slides[row]) for row in own]
    np.testing.assert_allclose(found.answers[order], tested.answers[own], atol=1e-5)

    # As another cohort: the same bags under other names.
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)
    frame = frame[frame["slide"].isin(fold.test)]
    for slide in frame["slide"]:
        (tmp_path / "new").mkdir(exist_ok=True)
        shutil.copy(run.paths[slide], tmp_path / "new" / f"new_{slide}.h5")
    frame["slide"], frame["patient"] = "new_" + frame["slide"], "new_" + frame["patient"]
    scored = run.evaluate(frame, tmp_path / "new", device="cpu")
    assert scored.folds is not None
    answers = {
        slide: answer
        for slide, answer, name in zip(scored.slides, scored.answers, scored.folds, strict=True)
        if name == fold.name
    }
    for row in own:
        np.testing.assert_allclose(
            answers[f"new_{tested.slides[row]}"], tested.answers[row], atol=1e-5
        )
    with pytest.raises(CohortError, match="no column is 'marker'"):
        run.evaluate(frame.drop(columns="marker"), tmp_path / "new", device="cpu")


def test_a_covariate_that_another_cohort_lacks_is_not_compared(
    run: Run, table: Path, tmp_path: Path
) -> None:
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)[:6]
    for slide in frame["slide"]:
        (tmp_path / "new").mkdir(exist_ok=True)
        shutil.copy(run.paths[slide], tmp_path / "new" / f"new_{slide}.h5")
    frame["slide"], frame["patient"] = "new_" + frame["slide"], "new_" + frame["patient"]
    cohort = read_external(run, frame.assign(age=""), tmp_path / "new")
    means = {entry.name: mean_feature(entry.path) for entry in cohort.entries}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a median of nothing
        names = {shift.name for shift in measure_shifts(run, cohort, means)[0]}
    assert {"marker", "ward"} <= names
    assert "age" not in names


def test_rows_of_a_slide_that_differ_are_not_one_of_them(run: Run, table: Path) -> None:
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)[:3]
    run = Run(run.folder)
    run.add_covariates(pd.concat([frame, frame[:1]]))
    with pytest.raises(CohortError, match="rows of slide_000 with different covariates"):
        run.add_covariates(pd.concat([frame, frame[:1].assign(age="99")]))


def test_damaged_covariates_of_a_run_are_an_error(run: Run, tmp_path: Path) -> None:
    frame = pd.read_csv(run.folder / "covariates.csv", dtype=str, keep_default_na=False)
    for name, damaged in {
        "no column age": frame.drop(columns="age"),
        "two rows of one slide": pd.concat([frame, frame[:1]]),
    }.items():
        copy = tmp_path / name
        shutil.copytree(run.folder, copy)
        (copy / "covariates.csv").write_text(damaged.to_csv(index=False))
        with pytest.raises(RunError, match=rf"covariates\.csv is damaged .*{name}"):
            _ = Run(copy).covariates


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"std": 0.0}, "standard deviation"),
        ({"std": -1.0}, "standard deviation"),
        ({"std": 1e300}, "standard deviation"),
        ({"mean": 1e300}, "mean beyond"),
        ({"missing": -0.5, "width": 2}, "missing for a share"),
        ({"missing": 7.0, "width": 2}, "missing for a share"),
    ],
)
def test_statistics_that_no_slides_can_have_are_an_error(
    changes: dict[str, float], words: str
) -> None:
    column = {"kind": "number", "width": 1, "name": "x", "mean": 0.0, "std": 1.0, **changes}
    with pytest.raises(RecipeError, match=words):
        parse_columns([column])
    many = {key + "s": [value] for key, value in column.items() if key in ("mean", "std")}
    own = {"name": "vector", "kind": "vector", "missing": column.get("missing", 0.0)}
    with pytest.raises(RecipeError, match=words):
        parse_columns([{**own, **many, "width": column["width"]}])


@pytest.mark.parametrize("shares", [(0.5, 0.6), (-0.5, 1.5), (2.0, -1.0), (0.1, 0.1)])
def test_shares_of_categories_that_do_not_add_up_are_an_error(shares: tuple[float, float]) -> None:
    table = {"kind": "category", "width": 2, "name": "x"}
    with pytest.raises(RecipeError, match="do not add up to 1"):
        parse_columns([{**table, "shares": dict(zip("ab", shares, strict=True))}])


def test_an_extreme_covariate_is_named_and_costs_only_its_slide(
    run: Run, table: Path, tmp_path: Path
) -> None:
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)[:4]
    paths = {f"new_{name}": Path(run.paths[name]) for name in frame["slide"]}
    (tmp_path / "features").mkdir()
    for name, path in paths.items():
        shutil.copy(path, tmp_path / "features" / f"{name}.h5")
    frame = frame.assign(slide=list(paths), patient=list(paths))
    frame.loc[0, "age"] = "1e300"
    again, failed = Run(run.folder), dict[str, BagError]()
    again.add_covariates(frame)
    found = again.predict(paths, device="cpu", failed=failed)
    assert [*failed] == [frame["slide"][0]]
    assert "age (1e300)" in str(failed[frame["slide"][0]])
    assert found.slides == tuple(frame["slide"][1:])

    failed.clear()
    cohort = read_external(again, frame, [str(tmp_path / "features")])
    answers = answer_cohort(again, cohort, device="cpu", failed=failed)
    assert [*failed] == [frame["slide"][0]]
    assert set(answers.slides) == {*frame["slide"][1:]}
    assert np.isfinite(answers.answers).all()


def test_a_number_that_no_model_can_read_is_named_before_training(table: Path) -> None:
    frame = pd.read_csv(table, dtype=str, keep_default_na=False)
    frame.loc[3, "age"] = "1e300"
    with pytest.raises(
        CohortError, match=r"column 'age' has numbers beyond 1e\+30: 1e300 \(slide_003"
    ):
        load(frame, table.parent / "features", covariates=("age",))


@pytest.mark.slow
def test_slides_without_covariates_need_a_table(run: Run, table: Path, tmp_path: Path) -> None:
    bag = tmp_path / "new.h5"
    shutil.copy(run.paths["slide_000"], bag)
    command = ["predict", str(run.folder), str(bag), "--device", "cpu"]
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code != 0
    assert isinstance(failed.exception, RunError)
    assert "marker, age, ward" in str(failed.exception)
    assert "--table" in str(failed.exception)

    frame = pd.read_csv(table, dtype=str, keep_default_na=False)[:1]
    frame["slide"] = "new"
    frame.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "out.csv"
    more = ["--table", str(tmp_path / "new.csv"), "--out", str(out), "--fold", "fold-0"]
    assert CliRunner().invoke(app, [*command, *more]).exit_code == 0
    known = run.predict({"slide_000": Path(run.paths["slide_000"])}, fold="fold-0", device="cpu")
    assert pd.read_csv(out)[known.target.columns[0]][0] == pytest.approx(
        known.answers[0, 0], abs=1e-4
    )

    frame.drop(columns="age").to_csv(tmp_path / "less.csv", index=False)
    with pytest.raises(CohortError, match="no column 'age'"):
        Run(run.folder).add_covariates(tmp_path / "less.csv")
    with pytest.raises(RunError, match="do not read"):
        Run(run.folder / "image").add_covariates(tmp_path / "new.csv")


@pytest.mark.slow
def test_patches_covariates_and_bias_add_up_to_the_output(run: Run) -> None:
    slide = run.splits[0].test[0]
    case = explain_slide(run, locate_slide(run, slide), device="cpu", regions=False)
    found = case.explanation
    total = found.evidence.astype(np.float64).sum(axis=0) + found.bias
    total += sum(each.term for each in found.covariates)
    np.testing.assert_allclose(total, found.logits, atol=1e-5)
    assert [each.name for each in found.covariates] == list(READ)
    assert found.exact

    # By hand, from the weights: what marker adds is its weight times its standardised value.
    model = run.model(found.fold)
    assert isinstance(model, FusedModel)
    column = model.settings["columns"][0]
    value = (float(run.covariates[slide].cells["marker"]) - column["mean"]) / column["std"]
    weight = (model.classify.weight @ model.project.weight)[:, 0].detach().double().numpy()
    np.testing.assert_allclose(found.covariates[0].term, weight * value, rtol=1e-5)
    assert np.allclose(case.answer.by_fold[found.fold], found.answer)

    summed = EvidenceSum.of(found, 0)
    assert summed.sum == pytest.approx(summed.total, abs=1e-4)
    assert "marker" in summed.modalities()


@pytest.mark.slow
def test_every_door_opens_a_run_with_covariates(run: Run, tmp_path: Path) -> None:
    slide, folder = run.splits[0].test[0], str(run.folder)
    for command in (
        ["explain", folder, slide, "--out", str(tmp_path / "explained")],
        ["report", folder, slide, "--out", str(tmp_path / "slide.html")],
        ["report", folder, "--out", str(tmp_path / "run.html"), "--slides", "1"],
        ["check", folder, "--most", "2"],
        ["status", folder],
        ["faithfulness", folder, "--most", "2", "--out", str(tmp_path / "faithful")],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code in (0, 1), (command, done.output, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit), command
    record = json.loads((tmp_path / "explained" / "explanation.json").read_text())["explained"]
    name = next(iter(record["logits"]))
    adds = sum(each["adds"][name] for each in record["covariates"])
    total = record["evidence"][name] + record["bias"][name] + adds
    assert total == pytest.approx(record["logits"][name], abs=1e-4)
    assert "What each modality adds" in (tmp_path / "run.html").read_text()
    page = (tmp_path / "slide.html").read_text()
    assert "marker: " in page
    assert "the patches together have" in page


@pytest.mark.slow
def test_a_run_with_film_is_predicted_and_explained_with_scales_and_shifts(
    recipe: Recipe, tmp_path: Path
) -> None:
    film = replace(
        recipe,
        fusion=FusionConfig(how="film", dim=8),
        train=replace(recipe.train, epochs=4),
    )
    run = cross_validate(film, tmp_path / "run", device="cpu", progress=False)
    slide, fold = run.splits[0].test[0], run.splits[0].name
    found = run.predict({slide: Path(run.paths[slide])}, fold=fold, device="cpu")
    row = run.predictions.slides.index(slide)
    np.testing.assert_allclose(found.answers[0], run.predictions.answers[row], atol=1e-5)

    command = ["explain", str(run.folder), slide, "--out", str(tmp_path / "explained")]
    done = CliRunner().invoke(app, [*command, "--fold", fold])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "The covariates also scale the evidence of the patches: marker" in done.output
    record = json.loads((tmp_path / "explained" / "explanation.json").read_text())["explained"]
    name = next(iter(record["logits"]))
    adds = sum(each["adds"][name] for each in record["covariates"])
    total = record["evidence"][name] + record["bias"][name] + adds
    assert total == pytest.approx(record["logits"][name], abs=1e-4)
    # Without all that the covariates do, the logit is that of the average slide.
    average = run.model(fold).of_average_slide()
    bag = torch.from_numpy(read_bag(Path(run.paths[slide])).features)[None]
    scales = sum(each["scales_patches"][name] for each in record["covariates"])
    assert abs(scales) > 1e-3
    without = average(bag).logits.detach().numpy()[0, list(record["logits"]).index(name)]
    assert record["logits"][name] - adds - scales == pytest.approx(without, abs=1e-4)

    case = explain_slide(run, locate_slide(run, slide), fold=fold, device="cpu", regions=False)
    text = EvidenceSum.of(case.explanation, 0).modalities()
    assert "neither has a share" in text
    modalities = pack(case).facts["modalities"]
    assert modalities["patches"]["shares"] is None
    assert len(modalities["covariates"][0]["scales"]) == len(case.explanation.names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch calls TorchScript deprecated
def test_an_exported_file_reads_the_covariates_as_the_page_on_exports_encodes_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_export, "SIZES", (1, 17))
    page = (Path(__file__).parents[1] / "docs" / "export.md").read_text()
    (code,) = re.findall(r"^```python\n(def encode.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"numpy": np}
    exec(compile(code, "export.md", "exec"), names)

    path = tmp_path / "model.ts"
    command = ["export", str(run.folder), "--to", "torchscript", "--out", str(path)]
    done = CliRunner().invoke(app, [*command, "--fold", "fold-0"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "program(features, covariates)" in done.output
    metadata = read_metadata(path)
    assert metadata["inputs"] == ["features", "covariates"]
    assert [column["name"] for column in metadata["covariates"]] == list(READ)
    program = FORMATS["torchscript"].open(path)
    slides = run.splits[0].test
    assert any(not run.covariates[slide].cells["age"] for slide in slides)
    found = run.predict({s: Path(run.paths[s]) for s in slides}, fold="fold-0", device="cpu")
    for slide, expected in zip(found.slides, found.answers, strict=True):
        numbers = names["encode"](metadata["covariates"], run.covariates[slide].cells)
        answer, *_ = program(read_bag(Path(run.paths[slide])).features.astype(np.float32), numbers)
        np.testing.assert_allclose(answer, expected, atol=1e-5)

    failed = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "all.ts"), "--ensemble"])
    assert isinstance(failed.exception, ExportError)
    assert "each fold standardises" in str(failed.exception)


@pytest.mark.slow
def test_noise_adds_nothing_and_permuted_labels_give_chance(recipe: Recipe, tmp_path: Path) -> None:
    study = TwoModalities(slides=96, patches=(6, 12), seed=3)
    table = study.write(tmp_path / "cohort")
    settings = replace(
        recipe,
        cohort=str(table),
        features=str(table.parent / "features"),
        data=CohortConfig(label="label", covariates=("age", "ward")),
    )
    options = {"device": "cpu", "progress": False}
    noise = cross_validate(settings, tmp_path / "noise", **options, modalities=True)
    (of_noise, *_) = noise.scores["modalities"]["differences"]
    assert of_noise["second"] == "image only"
    assert of_noise["difference"] < 0.05
    assert of_noise["second_mean"] > 0.7

    frame = pd.read_csv(table, dtype=str, keep_default_na=False)
    frame["label"] = np.random.default_rng(0).permutation(frame["label"])
    permuted = replace(settings, data=replace(settings.data, covariates=READ))
    frame.to_csv(tmp_path / "permuted.csv", index=False)
    run = cross_validate(
        replace(permuted, cohort=str(tmp_path / "permuted.csv")), tmp_path / "chance", **options
    )
    assert 0.3 < run.scores["metrics"]["auc"]["mean_over_folds"] < 0.7  # of a model that reads both


@pytest.mark.slow
def test_survival_reads_covariates(table: Path, recipe: Recipe, tmp_path: Path) -> None:
    image, marker, _ = TwoModalities(slides=72, patches=(6, 12)).causes()
    frame = pd.read_csv(table, dtype=str, keep_default_na=False).drop(columns="label")
    frame["months"] = (20 * np.exp(-image - marker)).round(3)
    frame["event"] = [int(number % 5 > 0) for number in range(len(frame))]
    frame.to_csv(tmp_path / "survival.csv", index=False)
    settings = replace(
        recipe,
        cohort=str(tmp_path / "survival.csv"),
        target=find_target("survival")(),
        data=CohortConfig(covariates=READ),
        train=replace(recipe.train, epochs=6, batch_size=9),
    )
    run = cross_validate(settings, tmp_path / "run", device="cpu", progress=False)
    assert run.scores["metrics"]["c_index"]["mean_over_folds"] > 0.6
    slide = run.splits[0].test[0]
    case = explain_slide(run, locate_slide(run, slide), device="cpu", regions=False)
    found = case.explanation
    total = found.evidence.astype(np.float64).sum(axis=0) + found.bias
    total += sum(each.term for each in found.covariates)
    np.testing.assert_allclose(total, found.logits, atol=1e-5)
    again = run.predict({slide: Path(run.paths[slide])}, fold="fold-0", device="cpu")
    row = run.predictions.slides.index(slide)
    np.testing.assert_allclose(again.answers[0], run.predictions.answers[row], atol=1e-4)


@pytest.mark.slow
def test_the_tour_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "covariates.md").read_text()
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "covariates.md", "exec"), {})
    (commands,) = re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for line in commands.splitlines():
        done = CliRunner().invoke(app, line.split()[1:])
        assert done.exit_code == 0, (line, done.output, done.exception)
    assert "What each modality adds" in (tmp_path / "runs/covariates/scores.md").read_text()


@pytest.mark.slow
def test_a_sweep_says_how_to_find_what_each_modality_adds(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(config.dump(recipe))
    out = tmp_path / "sweep"
    axes = ["--set", "model.tokens=1,2", "--set", "train.epochs=1"]
    words = ["sweep", tmp_path / "recipe.toml", "--out", out, *axes, "--device", "cpu"]
    with quick_scoring():
        done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "A sweep trains no model of a single modality" in shown
    (told,) = re.findall(r"caprmil train (points/\S+/recipe\.toml) --out NEW", shown)
    assert read_recipe(out / told).model.settings["tokens"] in (1, 2)
    assert not list(out.glob("points/*/covariates"))
