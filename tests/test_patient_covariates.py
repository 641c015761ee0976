"""Covariates of patients: read once for each, from training to predictions and evidence."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.covariates import encode
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CohortError, RunError
from caprmil.explain import explain_slide, locate_slide
from caprmil.runs.patient_inputs import group_bags
from caprmil.runs.run import Run
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import FusionConfig, Recipe
from patient_cohort import patient_recipe, with_epochs, write_patients
from quick_scoring import quick_scoring

SPLITS = SplitConfig(folds=2, validation=0.25)


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    with quick_scoring():
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patients with an age that all of their slides have, and a ward."""
    return with_ages(write_patients(tmp_path_factory.mktemp("patients"), patients=12))


def with_ages(table: Path) -> Path:
    frame = pd.read_csv(table)
    number = frame["patient"].str[-2:].astype(int)
    frame["age"], frame["ward"] = 40 + 3 * number, number.map(lambda n: "AB"[n % 2])
    frame.to_csv(table, index=False)
    return table


def recipe_of(table: Path, combine: str) -> Recipe:
    recipe = patient_recipe(table, combine=combine, covariates=("age", "ward"))
    fusion = FusionConfig(how="film" if combine == "bag" else "concatenation", dim=8)
    return replace(with_epochs(recipe, 2), splits=SPLITS, fusion=fusion)


@pytest.fixture(scope="module", params=["bag", "mean"])
def run(
    request: pytest.FixtureRequest, table: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A run that reads covariates of patients, whose slides are one bag or answered alone."""
    folder = tmp_path_factory.mktemp("run") / "run"
    recipe = recipe_of(table, request.param)
    return cross_validate(recipe, folder, device="cpu", progress=False)


def load(frame: pd.DataFrame, table: Path, **data: object) -> Cohort:
    settings = CohortConfig(**{"unit": "patient", "scan": False, **data})  # type: ignore[arg-type]
    return load_cohort(frame, table.parent / "features", settings, SPLITS)[0]


@pytest.mark.parametrize("combine", ["bag", "mean"])
def test_covariates_that_differ_within_a_patient_are_named_with_their_values(
    combine: str, table: Path
) -> None:
    frame = pd.read_csv(table, dtype=str)
    frame.loc[frame["slide"] == "p02_1", "age"] = "61"
    with pytest.raises(CohortError) as error:
        load(frame, table, combine=combine, covariates=("age",))
    assert "different covariates (1): p02 (age: 46 and 61)" in str(error.value)


@pytest.mark.parametrize("combine", ["bag", "mean"])
def test_an_empty_cell_is_that_of_the_other_slides_of_the_patient(
    combine: str, table: Path
) -> None:
    frame = pd.read_csv(table, dtype=str)
    first, whole = frame.copy(), load(frame, table, combine=combine, covariates=("age", "ward"))
    first.loc[first["slide"] == "p02_0", ["age", "ward"]] = ""
    first.loc[first["slide"] == "p02_1", "age"] = "46.0"  # the same number
    found = load(first, table, combine=combine, covariates=("age", "ward"))
    assert found.covariates is not None
    assert whole.covariates is not None
    names = [entry.name for entry in found.entries]
    columns = whole.covariates.fit(names)
    assert found.covariates.fit(names) == columns
    for name in names:
        own, other = (encode(columns, each.covariates.of(name)) for each in (found, whole))
        np.testing.assert_array_equal(own, other)


def test_a_column_that_differs_for_every_patient_is_refused_as_a_name(table: Path) -> None:
    frame = pd.read_csv(table, dtype=str)
    frame["who"] = "name of " + frame["patient"]
    with pytest.raises(CohortError, match="'who' is not a number, and differs"):
        load(frame, table, covariates=("who",))


def test_a_vector_of_a_patient_is_one_for_all_of_its_slides(table: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(table, dtype=str)
    vectors = frame[["slide", "patient"]].assign(g0=np.arange(len(frame)), g1=1.0)
    vectors.to_csv(tmp_path / "slides.csv", index=False)
    own = vectors.drop(columns="slide").drop_duplicates("patient")
    own.to_csv(tmp_path / "patients.csv", index=False)
    with pytest.raises(CohortError, match="have different vectors"):
        load(frame, table, vectors=str(tmp_path / "slides.csv"))
    alone = load(frame, table, combine="mean", vectors=str(tmp_path / "slides.csv"))
    assert alone.covariates is not None
    assert len(alone.covariates.vectors or {}) == len(frame)
    joined = load(frame, table, vectors=str(tmp_path / "patients.csv"))
    assert joined.covariates is not None
    assert set(joined.covariates.vectors or {}) == set(frame["patient"])


@pytest.mark.slow
def test_patients_with_covariates_are_predicted_as_in_cross_validation(run: Run) -> None:
    tested, fold = run.predictions, run.splits[0]
    names = [name for name, own in run.patients.items() if {name, own} & {*fold.test}]
    grouped, patients = group_bags(run, {name: Path(run.paths[name]) for name in names})
    found = run.predict(grouped, patients=patients, fold=fold.name, device="cpu")
    assert found.unit == "patient"
    for name, answer in zip(found.slides, found.answers, strict=True):
        np.testing.assert_allclose(answer, tested.answers[tested.slides.index(name)], atol=1e-5)


@pytest.mark.slow
def test_new_patients_are_predicted_and_scored_with_a_table(run: Run, tmp_path: Path) -> None:
    new = with_ages(write_patients(tmp_path, patients=4, seed=1, prefix="q"))
    frame = pd.read_csv(new, dtype=str)
    bags = str(new.parent / "features")
    command = ["predict", str(run.folder), bags, "--device", "cpu", "--out"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "out.csv"), "--table", str(new)])
    assert done.exit_code == 0, (done.output, done.exception)
    predicted = pd.read_csv(tmp_path / "out.csv").set_index("patient")[run.target.columns[0]]
    assert sorted(predicted.index) == sorted(set(frame["patient"]))

    scored = run.evaluate(new, bags, device="cpu")
    assert scored.unit == "patient"
    assert scored.folds is not None
    for name, answer in predicted.items():
        own = [n for n, patient in enumerate(scored.slides) if patient == name]
        assert len(own) == 2  # one for each fold
        assert scored.answers[own].mean(axis=0)[0] == pytest.approx(answer, abs=1e-4)

    # Another age is another answer; two ages are an error.
    frame.loc[frame["patient"] == "q01", "age"] = "90"
    frame.to_csv(new, index=False)
    done = CliRunner().invoke(app, [*command, str(tmp_path / "old.csv"), "--table", str(new)])
    assert done.exit_code == 0, (done.output, done.exception)
    again = pd.read_csv(tmp_path / "old.csv").set_index("patient")[run.target.columns[0]]
    changed = again != predicted
    assert changed["q01"]
    assert changed.sum() == 1
    own = frame["slide"] == frame["slide"][frame["patient"] == "q02"].iloc[0]
    frame.loc[own, "age"] = "17"
    frame.to_csv(new, index=False)
    failed = CliRunner().invoke(app, [*command, str(tmp_path / "x.csv"), "--table", str(new)])
    assert "q02 (age: 17 and 46)" in str(failed.exception)

    alone = frame["slide"][frame["patient"] == "q01"].iloc[0]
    shutil.copy(new.parent / "features" / f"{alone}.h5", tmp_path / "alone.h5")
    with pytest.raises(RunError, match=f"Pass a table with the columns {run.unit}, age, ward"):
        run.predict({"alone": tmp_path / "alone.h5"}, patients={"alone": "q01"}, device="cpu")


@pytest.mark.slow
def test_the_evidence_and_the_covariates_of_a_patient_add_up(run: Run) -> None:
    fold = run.splits[0]
    name = fold.test[0]
    case = explain_slide(run, locate_slide(run, name), fold=fold.name, device="cpu", regions=False)
    found = case.explanation
    total = found.evidence.astype(np.float64).sum(axis=0) + found.bias
    total += sum(each.term for each in found.covariates)
    np.testing.assert_allclose(total, found.logits, atol=1e-5)
    assert [each.name for each in found.covariates] == ["age", "ward"]
    own = pd.read_csv(run.folder / "covariates.csv")
    assert own.columns[0] == run.unit
    assert found.covariates[0].shown == str(own.set_index(run.unit).loc[name, "age"])
