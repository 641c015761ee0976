"""Vectors of slides as a further input: from a folder or a table, stored in the run."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import h5py
import numpy as np
import pandas as pd
import pytest

from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.covariates import Covariates, encode
from caprmil.cohort.folds import SplitConfig
from caprmil.cohort.slide_vectors import read_vectors
from caprmil.errors import BagError, CohortError, RunError
from caprmil.explain import explain_slide, locate_slide
from caprmil.models import FusedModel
from caprmil.runs.run import Run
from caprmil.runs.slide_covariates import write_vectors
from caprmil.synthetic import TwoModalities
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import FusionConfig, ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from quick_scoring import quick_scoring

pytestmark = pytest.mark.slow

STUDY = TwoModalities(slides=40, patches=(6, 12))
WIDTH = 6


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    with quick_scoring():
        yield


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Vectors of noise, whose third number is the marker."""
    values = np.random.default_rng(0).normal(size=(STUDY.slides, WIDTH)).astype(np.float32)
    values[:, 2] = 5 + 3 * STUDY.causes()[1]
    return values


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray) -> Path:
    """The cohort, and the vectors of all slides but one as files and as tables."""
    home = tmp_path_factory.mktemp("cohort")
    STUDY.write(home)
    (home / "titan").mkdir()
    for number, vector in enumerate(vectors[:-1]):
        with h5py.File(home / "titan" / f"slide_{number:03d}.h5", "w") as file:
            file["features"] = vector if number % 2 else vector[None]
    names = [f"g{number}" for number in range(WIDTH)]
    frame = pd.DataFrame(vectors[:-1], columns=names)
    for role in ("slide", "patient"):
        keys = [f"{role}_{number:03d}" for number in range(len(frame))]
        frame.assign(**{role: keys}).to_csv(home / f"by_{role}.csv", index=False)
    return home


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    """A run that reads the vectors only, each modality beside it, with late fusion."""
    recipe = Recipe(
        cohort=str(home / "labels.csv"),
        features=str(home / "features"),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        data=CohortConfig(label="label", vectors=str(home / "titan")),
        fusion=FusionConfig(how="late", dim=8),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=4, warmup_epochs=1, lr=3e-3),
        loggers={},
    )
    return cross_validate(recipe, home / "run", device="cpu", progress=False, modalities=True)


@pytest.mark.parametrize("source", ["titan", "by_slide.csv", "by_patient.csv"])
def test_vectors_are_read_from_folders_and_tables(
    source: str, home: Path, vectors: np.ndarray
) -> None:
    settings = CohortConfig(label="label", vectors=source, scan=False)
    table, features = home / "labels.csv", home / "features"
    cohort, _ = load_cohort(table, features, settings, SplitConfig(folds=2))
    assert cohort.covariates is not None
    slides = list(cohort.patients)
    columns = cohort.covariates.fit(slides[:20])
    found = np.stack([encode(columns, cohort.covariates.of(slide)) for slide in slides])
    mean, std = vectors[:20].mean(axis=0), vectors[:20].std(axis=0)
    np.testing.assert_allclose(found[:-1], (vectors[:-1] - mean) / std, atol=1e-4)
    assert not found[-1].any()  # no training slide is without a vector: there is no indicator
    assert any("Slides without a vector" in note for note in cohort.notes)


def test_a_missing_vector_has_an_indicator(home: Path) -> None:
    settings = CohortConfig(label="label", vectors="titan", scan=False)
    cohort, _ = load_cohort(home / "labels.csv", home / "features", settings, SplitConfig(folds=2))
    assert cohort.covariates is not None
    slides = list(cohort.patients)
    columns = cohort.covariates.fit(slides)
    found = np.stack([encode(columns, cohort.covariates.of(slide)) for slide in slides])
    assert found.shape == (len(slides), WIDTH + 1)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-5)
    assert found[-1, -1] > 0.9


def test_vectors_that_cannot_be_used_are_named(home: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(home / "by_slide.csv")
    patients = {"slide_000": "patient_000"}
    with pytest.raises(CohortError, match="no column for the slide"):
        read_vectors(frame.drop(columns="slide"), patients)
    with pytest.raises(CohortError, match="several rows of slide_000"):
        read_vectors(pd.concat([frame, frame[:1]]), patients)
    with pytest.raises(CohortError, match="no numbers beside slide"):
        read_vectors(frame[["slide"]], patients)
    with pytest.raises(CohortError, match="not a number"):
        read_vectors(frame.assign(g0="x"), patients)
    shutil.copy(home / "features" / "slide_000.h5", tmp_path / "slide_000.h5")
    with pytest.raises(BagError, match="no vector of a slide"):
        read_vectors(tmp_path, patients)
    settings = CohortConfig(label="label", vectors=str(tmp_path / "empty"), scan=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CohortError, match="no vector of any"):
        load_cohort(home / "labels.csv", home / "features", settings, SplitConfig(folds=2))


def test_a_run_keeps_its_vectors_and_explains_with_them(run: Run, home: Path) -> None:
    again = Run(run.folder)
    fold = again.splits[0]
    slide = next(name for name in fold.test if name != f"slide_{STUDY.slides - 1:03d}")
    case = explain_slide(again, locate_slide(again, slide), device="cpu", regions=False)
    found = case.explanation
    (term,) = found.covariates
    assert term.title == "vector: 6 numbers"
    total = found.evidence.astype(np.float64).sum(axis=0) + term.term + found.bias
    np.testing.assert_allclose(total, found.logits, atol=1e-5)
    assert {row["second"] for row in run.scores["modalities"]["differences"]} == {
        *("image only", "covariates only")
    }

    bag = home / "new.h5"
    shutil.copy(run.paths[slide], bag)
    with pytest.raises(RunError, match="--vectors"):
        again.predict({"new": bag}, device="cpu")
    (home / "new").mkdir()
    shutil.copy(home / "titan" / f"{slide}.h5", home / "new" / "new.h5")
    again.add_covariates(vectors=home / "new")
    new = again.predict({"new": bag}, fold=fold.name, device="cpu")
    known = again.predict({slide: Path(run.paths[slide])}, fold=fold.name, device="cpu")
    np.testing.assert_allclose(new.answers, known.answers, atol=1e-6)
    again.covariates["new"] = again.covariates["new"]._replace(vector=np.ones(3, np.float32))
    with pytest.raises(CohortError, match="3 numbers"):
        again.predict({"new": bag}, device="cpu")


def test_a_run_is_not_resumed_with_other_vectors(tmp_path: Path) -> None:
    cells = {name: {"slide": name} for name in ("a", "b")}
    vectors = {name: np.ones(3, dtype=np.float32) for name in cells}
    one = Covariates(names=(), cells=cells, vectors=vectors)
    write_vectors(tmp_path, one)
    write_vectors(tmp_path, one)
    other = vectors | {"b": np.full(3, 2, dtype=np.float32)}
    for changed in (other, {"a": vectors["a"]}):
        with pytest.raises(RunError, match="other vectors"):
            write_vectors(tmp_path, replace(one, vectors=changed))


def test_a_vector_that_is_not_a_row_of_numbers_is_a_line(tmp_path: Path) -> None:
    values: list[Any] = [np.float32(3), np.ones((1, 4), np.complex64), np.zeros((0, 4))]
    values += [np.array([["a", "b"]]), np.full((1, 4), 1e300), np.array(["2020"], "M8[Y]")]
    for value in values:
        np.save(tmp_path / "slide_000.npy", value)
        with pytest.raises(BagError, match=r"slide_000\.npy has no vector of a slide") as problem:
            read_vectors(tmp_path, {"slide_000": "patient_000"})
        assert "\n" not in str(problem.value)


def damaged_archive(path: Path, how: str) -> None:
    """Damage the file of the vectors of a run."""
    with np.load(path) as archive:
        slides, vectors = archive["slides"], archive["vectors"]
    declared: Any = {"descr": "<f4", "fortran_order": False, "shape": (len(slides), 10**8)}
    match how:
        case "bytes":
            path.write_bytes(b"PK\3\4 damaged")
        case "method" | "encrypted":  # of packing, which Python does not know
            data, flag = bytearray(path.read_bytes()), how == "encrypted"
            for mark, at in ((b"PK\3\4", 6 if flag else 8), (b"PK\1\2", 8 if flag else 10)):
                start = -1
                while (start := data.find(mark, start + 1)) >= 0:
                    data[start + at] = data[start + at] | 1 if flag else 99
            path.write_bytes(data)
        case "declared":
            names, header = BytesIO(), BytesIO()
            np.save(names, slides)
            np.lib.format.write_array_header_1_0(header, declared)
            with ZipFile(path, "w") as archive:
                archive.writestr("slides.npy", names.getvalue())
                archive.writestr("vectors.npy", header.getvalue() + bytes(64))
        case "text":
            np.savez(path, slides=slides, vectors=vectors.astype("U4"))
        case "objects":
            np.savez(path, slides=slides, vectors=np.array([object()] * len(slides)))
        case "names":
            np.savez(path, slides=np.stack([slides, slides], axis=1), vectors=vectors)
        case "twice":
            np.savez(path, slides=np.repeat(slides[:1], len(slides)), vectors=vectors)
        case "large":
            np.savez(path, slides=slides, vectors=np.full(vectors.shape, 1e300))


@pytest.mark.parametrize(
    "how",
    ["bytes", "method", "encrypted", "declared", "text", "objects", "names", "twice", "large"],
)
def test_damaged_vectors_of_a_run_are_an_error(run: Run, tmp_path: Path, how: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.folder, copy)
    damaged_archive(copy / "vectors.npz", how)
    with pytest.raises(RunError, match=r"vectors\.npz is damaged"):
        _ = Run(copy).covariates


def test_an_external_cohort_needs_vectors_of_its_own(run: Run, home: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(home / "labels.csv", dtype=str)[:4]
    frame["slide"], frame["patient"] = "new_" + frame["slide"], "new_" + frame["patient"]
    for folder in ("features", "titan"):
        (tmp_path / folder).mkdir()
        for slide in frame["slide"]:
            old = home / folder / f"{slide.removeprefix('new_')}.h5"
            shutil.copy(old, tmp_path / folder / f"{slide}.h5")
    with pytest.raises(RunError, match="--vectors"):
        run.evaluate(frame, tmp_path / "features", device="cpu")
    titan = tmp_path / "titan"
    scored = run.evaluate(frame, tmp_path / "features", vectors=titan, device="cpu")
    assert len(scored) == 4 * len(run.splits)


def test_a_recipe_with_vectors_differs_from_one_without(run: Run) -> None:
    data = CohortConfig(label="label", vectors="titan")
    assert data.reads_covariates
    assert not replace(data, vectors=None).reads_covariates
    assert 'vectors = "' in run.recipe.text


def test_columns_of_a_table_and_vectors_are_two_modalities(home: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        cohort=str(home / "labels.csv"),
        features=str(home / "features"),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        data=CohortConfig(
            label="label", covariates=("marker", "ward"), vectors=str(home / "titan")
        ),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=2, warmup_epochs=1, lr=3e-3),
        loggers={},
    )
    options: dict[str, Any] = {"device": "cpu", "progress": False, "modalities": True}
    run = cross_validate(recipe, tmp_path / "run", **options)
    found = run.scores["modalities"]["differences"]
    alone = ["image only", "columns only", "vectors only"]
    assert [d["second"] for d in found if d["first"] == "everything"] == alone
    for name, read in (("columns", {"marker", "ward"}), ("vectors", {"vector"})):
        beside = Run(run.folder / name)
        assert {*beside.covariate_names} == read
        model = beside.model(beside.splits[0].name)
        assert isinstance(model, FusedModel)
        assert {*model.names} == read
    assert "The other modalities change the auc" in (run.folder / "scores.md").read_text()
