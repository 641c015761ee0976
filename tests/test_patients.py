"""Patients as the unit of prediction: cohorts, folds, training, predictions and evidence."""

import csv
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from caprmil import config
from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import Fold, SplitConfig
from caprmil.errors import CohortError, RecipeError, RunError
from caprmil.evaluation import score_summary
from caprmil.evaluation.comparison import compare
from caprmil.evaluation.guarantees import thresholds
from caprmil.evaluation.patient_answers import combine_slides
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import explain_slide, locate_slide
from caprmil.explain.explanation_folder import write_explanation
from caprmil.explain.slide_shares import slide_explanations, slide_shares
from caprmil.features import bags
from caprmil.features.bag_files import SlideBags
from caprmil.features.batches import Sample
from caprmil.io.json_files import read_json
from caprmil.runs.conformal_sets import summary, unlike_training
from caprmil.runs.inference import predict_samples
from caprmil.runs.patient_inputs import group_bags
from caprmil.runs.run import Run
from caprmil.targets import Classification, Task, find_target
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import Recipe
from patient_cohort import patient_recipe, with_epochs, write_bag, write_patients
from quick_scoring import quick_scoring

SPLITS = SplitConfig(folds=3, validation=0.25)


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    with quick_scoring():
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_patients(tmp_path_factory.mktemp("patients"))


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of patients whose slides are one bag."""
    folder = tmp_path_factory.mktemp("run") / "run"
    return cross_validate(patient_recipe(table), folder, device="cpu", progress=False)


@pytest.fixture(scope="module")
def combined(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of patients whose slides are answered alone; the highest answer counts."""
    folder = tmp_path_factory.mktemp("combined") / "run"
    recipe = with_epochs(patient_recipe(table, combine="max"), 2)
    return cross_validate(recipe, folder, device="cpu", progress=False)


def load(table: Path, **data: object) -> tuple[Cohort, list[Fold]]:
    settings = CohortConfig(**{"unit": "patient", **data})  # type: ignore[arg-type]
    return load_cohort(table, table.parent / "features", settings, SPLITS)


def slides_of(table: Path) -> dict[str, list[str]]:
    frame = pd.read_csv(table)
    return {p: own["slide"].tolist() for p, own in frame.groupby("patient", sort=False)}


def change(table: Path, folder: Path, edit: Callable[[pd.DataFrame], pd.DataFrame]) -> Path:
    """Write the table with a change, next to a link to its bags."""
    path = folder / "labels.csv"
    edit(pd.read_csv(table)).to_csv(path, index=False)
    (folder / "features").symlink_to(table.parent / "features")
    return path


# Cohorts and folds


def test_an_entry_is_a_patient_with_all_slides_in_the_order_of_the_table(table: Path) -> None:
    cohort, _ = load(table)
    assert {e.name: list(e.path.slides) for e in cohort.entries} == slides_of(table)  # type: ignore[union-attr]
    for entry in cohort.entries:
        assert entry.patient == entry.name
        own = [bags.inspect(table.parent / "features" / f"{s}.h5") for s in entry.path.slides]  # type: ignore[union-attr]
        assert cohort.bags[entry.name].n_patches == sum(info.n_patches for info in own)


def test_folds_divide_patients_as_they_do_when_slides_are_the_unit(table: Path) -> None:
    _, by_patient = load(table)
    _, by_slide = load(table, unit="slide")
    _, alone = load(table, combine="mean")
    assert alone == by_slide
    owner = {s: p for p, own in slides_of(table).items() for s in own}
    for patients, slides in zip(by_patient, by_slide, strict=True):
        for part in ("train", "validation", "test"):
            assert set(getattr(patients, part)) == {owner[s] for s in getattr(slides, part)}


def test_patients_with_two_labels_are_refused(table: Path, tmp_path: Path) -> None:
    def mix(frame: pd.DataFrame) -> pd.DataFrame:
        frame.loc[frame["slide"] == "p02_1", "label"] = "tumour"
        return frame

    with pytest.raises(CohortError, match=r"more than one label \(1\): p02 \(normal, tumour\)"):
        load(change(table, tmp_path, mix))
    with pytest.raises(RecipeError, match="mixed_patients"):
        CohortConfig(unit="patient", mixed_patients=True)


def test_a_table_without_a_column_of_patients_is_refused(table: Path, tmp_path: Path) -> None:
    with pytest.raises(CohortError, match="no column names the patient"):
        load(change(table, tmp_path, lambda frame: frame.drop(columns=["patient", "site"])))


def test_settings_of_patients_are_checked() -> None:
    with pytest.raises(RecipeError, match='set unit = "patient"'):
        CohortConfig(combine="mean")
    with pytest.raises(RecipeError, match="bag, mean, max or learned"):
        CohortConfig(unit="patient", combine="median")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="slide or patient"):
        CohortConfig(unit="block")  # type: ignore[arg-type]


def test_the_highest_answer_needs_two_classes(table: Path, tmp_path: Path) -> None:
    def three(frame: pd.DataFrame) -> pd.DataFrame:
        number = frame["patient"].str[1:].astype(int)
        frame["label"] = (number % 3).map({0: "a", 1: "b", 2: "c"})
        return frame

    with pytest.raises(CohortError, match=r"two classes, grades, .* 3 classes have no order"):
        load(change(table, tmp_path, three), combine="max")


def test_of_grades_and_of_intervals_the_slide_with_the_highest_decides() -> None:
    rng = np.random.default_rng(0)
    grades = rng.dirichlet(np.ones(4), size=5)
    expected = [sum(k * p for k, p in enumerate(row)) for row in grades.tolist()]
    chosen = grades[expected.index(max(expected))]
    ordinal = find_target("ordinal")(classes=("0", "1", "2", "3"))
    np.testing.assert_array_equal(ordinal.combine(grades, "max"), chosen)

    values = np.array([[3.0, 2.0, 9.0], [5.0, 4.0, 6.0], [4.0, 1.0, 20.0]])
    intervals = find_target("regression")(uncertainty="quantile")
    np.testing.assert_array_equal(intervals.combine(values, "max"), [5, 4, 6])

    tasks = {
        "grade": Task(kind="ordinal", settings={"classes": ["0", "1", "2", "3"]}),
        "size": Task(kind="regression", settings={"uncertainty": "quantile"}),
    }
    both = find_target("several")(tasks=tasks)
    answers = np.concatenate([grades[:3], values], axis=1)
    each = [ordinal.combine(grades[:3], "max"), intervals.combine(values, "max")]
    np.testing.assert_array_equal(both.combine(answers, "max"), np.concatenate(each))

    three = Task(settings={"classes": ["a", "b", "c"]})
    mixed = find_target("several")(tasks={**tasks, "type": three})
    assert not mixed.has_order
    assert mixed.without_order == "type: 3 classes have no order"


def test_patients_that_lost_slides_are_noted(table: Path, tmp_path: Path) -> None:
    shutil.copytree(table.parent, tmp_path / "study")
    own = tmp_path / "study" / "labels.csv"
    lost = slides_of(table)["p05"]
    (own.parent / "features" / f"{lost[0]}.h5").unlink()
    (own.parent / "features" / "p00_0.h5").unlink()  # the only slide of this patient
    with pytest.raises(CohortError, match="Slides without a bag"):
        load(own)
    cohort, _ = load(own, missing="skip")
    assert f"Patients that lost slides (1): p05 (1 of {len(lost)})." in " ".join(cohort.notes)
    assert "Patients without any bag (1): p00 (1 slide)." in " ".join(cohort.notes)
    assert list(cohort["p05"].path.slides) == lost[1:]  # type: ignore[union-attr]
    assert "p00" not in cohort.labels


def test_patients_with_several_slides_and_one_label_are_proposed(table: Path) -> None:
    several = sum(len(own) > 1 for own in slides_of(table).values())
    cohort, _ = load(table, unit="slide")
    (note,) = [note for note in cohort.notes if "unit" in note]
    assert note.startswith(f"{several} of 24 patients have several slides and one label")
    assert not any("unit =" in note for note in load(table)[0].notes)
    assert not any("unit =" in note for note in load(table, combine="mean")[0].notes)


def test_recipes_without_the_setting_keep_their_digest() -> None:
    written = config.dump(Recipe(cohort="labels.csv"))
    assert "unit" not in written
    assert "combine" not in written
    recipe = Recipe(cohort="labels.csv", data=CohortConfig(unit="patient"))
    assert 'unit = "patient"' in config.dump(recipe)


def test_a_fixed_split_lists_slides_or_patients(table: Path, tmp_path: Path) -> None:
    def split(frame: pd.DataFrame) -> pd.DataFrame:
        number = frame["patient"].str[1:].astype(int)
        frame["split"] = np.where(number < 16, "train", "test")
        return frame

    path = change(table, tmp_path, split)
    settings = CohortConfig(unit="patient")
    fixed = SplitConfig(kind="fixed", validation=0)
    _, (fold,) = load_cohort(path, path.parent / "features", settings, fixed)
    assert fold.test == tuple(f"p{n:02d}" for n in range(16, 24))

    frame = pd.read_csv(path)
    frame.loc[frame["slide"] == "p02_1", "split"] = "test"
    frame.to_csv(path, index=False)
    with pytest.raises(CohortError, match="in two parts of a split"):
        load_cohort(path, path.parent / "features", settings, fixed)


# Runs


def test_a_patient_with_the_signal_in_one_slide_is_learnt(run: Run) -> None:
    table = run.predictions
    assert table.unit == "patient"
    assert sorted(table.slides) == [f"p{n:02d}" for n in range(24)]
    truth = [int(name[1:]) % 2 for name in table.slides]
    assert table.labels is not None
    assert table.labels.tolist() == truth
    assert roc_auc_score(truth, table.answers[:, 1]) > 0.9
    assert run.scores["unit"] == "patient"
    assert run.scores["patients"] == 24


@pytest.mark.slow
def test_permuted_labels_of_patients_give_chance(table: Path, tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(24)

    def permute(frame: pd.DataFrame) -> pd.DataFrame:
        number = order[frame["patient"].str[1:].astype(int)]
        frame["label"] = np.where(number % 2, "tumour", "normal")
        return frame

    recipe = patient_recipe(change(table, tmp_path, permute))
    recipe = replace(recipe, splits=replace(recipe.splits, repeats=3))
    found = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False).predictions
    mean = {
        name: found.answers[[n for n, s in enumerate(found.slides) if s == name], 1].mean()
        for name in set(found.slides)
    }
    truth = [int(order[int(name[1:])]) % 2 for name in mean]
    assert 0.2 < roc_auc_score(truth, list(mean.values())) < 0.8


def test_the_table_of_predictions_has_a_row_and_no_slide_for_each_patient(run: Run) -> None:
    frame = pd.read_csv(run.folder / "predictions.csv")
    assert frame.columns[:3].tolist() == ["patient", "fold", "label"]
    assert len(frame) == 24
    again = Predictions.read(run.folder / "predictions.csv")
    assert again.unit == "patient"
    text = score_summary.summary(again, draws=20).as_markdown()
    assert text.startswith("24 patients, 3 folds.")
    assert "all patients pooled" in text
    splits = read_json(run.folder / "splits.json")
    assert splits["unit"] == "patient"
    assert splits["patients"]["p05_0"] == "p05"
    assert splits["labels"]["p05"] == "tumour"


def test_baselines_are_of_patients(run: Run, table: Path) -> None:
    assert set(run.baselines) == {"patch count", "site", "mean feature"}
    for name, found in run.baselines.items():
        assert found.slides == run.predictions.slides, name
    text = (run.folder / "scores.md").read_text()
    assert "24 patients, mean over 3 folds." in text
    assert "24 slides" not in text
    assert str(table) in run.recipe.text


def test_a_resumed_run_of_patients_is_the_same(table: Path, tmp_path: Path) -> None:
    recipe = with_epochs(patient_recipe(table), 1)
    whole = cross_validate(recipe, tmp_path / "a", device="cpu", progress=False)
    part = cross_validate(recipe, tmp_path / "b", device="cpu", progress=False, score=False)
    shutil.rmtree(part.fold_folder("fold-1"))
    again = cross_validate(recipe, tmp_path / "b", device="cpu", progress=False)
    np.testing.assert_array_equal(again.predictions.answers, whole.predictions.answers)


def test_answers_of_slides_are_combined_as_a_naive_loop_does() -> None:
    rng = np.random.default_rng(0)
    chances = rng.random(9)
    answers = np.stack([1 - chances, chances], axis=1)
    names = ["a", "a", "b", "c", "a", "b", "c", "c", "d"]
    table = Predictions(
        slides=tuple(f"s{n}" for n in range(9)),
        target=Classification(classes=("no", "yes")),
        answers=answers,
        labels=np.array([0, 0, 1, 0, 0, 1, 0, 0, 1]),
        patients=tuple(names),
    )
    for how, one in (("mean", np.mean), ("max", np.max)):
        found = combine_slides(table, how)  # type: ignore[arg-type]
        assert (found.slides, found.unit) == (("a", "b", "c", "d"), "patient")
        for row, patient in enumerate(found.slides):
            own = [chance for name, chance in zip(names, chances, strict=True) if name == patient]
            assert found.answers[row, 1] == pytest.approx(one(own))
    assert combine_slides(table, None) is table


def test_a_combined_run_answers_patients_with_the_highest_of_their_slides(combined: Run) -> None:
    assert combined.predictions.unit == "patient"
    assert len(combined.predictions) == 24
    fold = combined.splits[0]
    assert set(fold.test) <= set(combined.paths)  # its folds list slides
    trained = combined.trained(fold.name)
    own = predict_samples(trained, [Sample(s, Path(combined.paths[s])) for s in fold.test])
    highest: dict[str, float] = {}
    for slide, answer in zip(fold.test, own[:, 1].tolist(), strict=True):
        patient = slide[:3]
        highest[patient] = max(highest.get(patient, 0.0), answer)
    found = Predictions.read(combined.fold_folder(fold.name) / "test.csv")
    assert dict(zip(found.slides, found.answers[:, 1].tolist(), strict=True)) == highest
    for name, baseline in combined.baselines.items():
        assert baseline.slides == combined.predictions.slides, name


def test_a_strange_slide_of_a_patient_is_warned_of_where_answers_are_combined(
    combined: Run, tmp_path: Path
) -> None:
    new = write_patients(tmp_path, patients=3, seed=1, prefix="q")
    files = {path.stem: path for path in sorted((new.parent / "features").glob("*.h5"))}
    owners = {name: name.partition("_")[0] for name in files}
    alone = {name: unlike_training(combined, name, path) for name, path in files.items()}
    strange = next(name for name in files if owners[name] == "q02")
    bag = bags.read(files[strange])
    write_bag(tmp_path / "x.h5", bag.features + 50, bag.coords)
    found = combined.predict(files | {strange: tmp_path / "x.h5"}, patients=owners, device="cpu")
    shares = dict(zip(found.slides, map(float, found.extra["unlike_training"]), strict=True))
    for patient in ("q00", "q01"):
        own = [alone[name] or 0.0 for name in files if owners[name] == patient]
        assert shares[patient] == pytest.approx(max(own), abs=1e-4)
    assert shares["q02"] == 1
    (text,) = summary(combined, found, None)
    assert "with a slide unlike the training slides" in text
    assert "q02" in text


def test_the_set_of_a_patient_is_built_from_its_answer_by_the_model_of_each_fold(
    combined: Run,
) -> None:
    owners = {s: patient for s, patient in combined.patients.items() if patient in ("p05", "p07")}
    own = {name: [s for s in owners if owners[s] == name] for name in ("p05", "p07")}
    files = {slide: combined.slide_bags[slide] for slide in owners}
    assert all(len(slides) > 1 for slides in own.values())
    for coverage in (0.5, 0.7):
        found = combined.predict(files, patients=owners, device="cpu", coverage=coverage)
        limits = thresholds(combined.validation, coverage)
        assert found.slides == ("p05", "p07")
        for row, patient in enumerate(found.slides):
            (fold,) = combined.unseen_folds(own[patient][0])
            alone = [
                combined.predict(
                    {s: files[s]}, patients={s: patient}, fold=fold.name, device="cpu"
                ).answers[0]
                for s in own[patient]
            ]
            highest = max(alone, key=lambda answer: answer[1])
            inside = 1 - highest <= limits[fold.name]
            expected = " | ".join(np.array(combined.target.titles)[inside])
            assert found.extra["set"][row] == expected
            assert found.extra["models"][row] == "1"
        assert "for a new patient" in next(summary(combined, found, coverage))


def test_runs_of_both_kinds_are_compared_patient_by_patient(run: Run, combined: Run) -> None:
    tables = {"bag": run.predictions, "max": combined.predictions}
    found = compare(tables, draws=20)
    assert found.size() == "24 patients, mean over 3 folds."


# Predictions of other patients


def test_bags_are_grouped_by_the_run_a_table_or_a_name(run: Run, table: Path) -> None:
    folder = table.parent / "features"
    p05, p07 = (slides_of(table)[p] for p in ("p05", "p07"))
    known = {slide: folder / f"{slide}.h5" for slide in [*p07, *p05]}
    grouped, _ = group_bags(run, known)
    assert {name: list(files.slides) for name, files in grouped.items()} == {  # type: ignore[union-attr]
        "p05": p05,
        "p07": p07,
    }
    new = {f"new_{n}": path for n, path in enumerate(known.values())}
    with pytest.raises(CohortError, match="patient of these slides is not known: new_0"):
        group_bags(run, new)
    one, _ = group_bags(run, new, patient="x")
    assert one == {"x": SlideBags.of(new)}
    listed = pd.DataFrame({"slide": [*new], "patient": ["x", *["y"] * (len(new) - 1)]})
    two, _ = group_bags(run, new, table=listed)
    assert [len(files.slides) for files in two.values()] == [1, len(new) - 1]  # type: ignore[union-attr]
    with pytest.raises(CohortError, match="further slides of these patients: new_2"):
        group_bags(run, {"new_1": new["new_1"]}, table=listed)
    alone, _ = group_bags(run, {"new_0": new["new_0"]}, table=listed)
    assert alone == {"x": SlideBags.of({"new_0": new["new_0"]})}
    with pytest.raises(CohortError, match="lists none of these slides: other"):
        group_bags(run, {"other": new["new_0"]}, table=listed)


def test_patients_are_predicted_as_in_cross_validation(run: Run) -> None:
    found = run.predict({name: run.bags[name] for name in run.bags})
    expected = dict(zip(run.predictions.slides, run.predictions.answers.tolist(), strict=True))
    assert found.unit == "patient"
    assert dict(zip(found.slides, found.answers.tolist(), strict=True)) == expected


def test_a_slide_of_a_training_patient_is_known_to_its_models(run: Run, table: Path) -> None:
    (slide, *_) = slides_of(table)["p05"]
    files = SlideBags.of({slide: table.parent / "features" / f"{slide}.h5"})
    assert run.predict({"someone": files}).extra["models"] == ("1",)


def test_another_cohort_is_scored_by_patient(run: Run, tmp_path: Path) -> None:
    other = write_patients(tmp_path / "other", 8, seed=3, prefix="q")
    found = run.evaluate(other, other.parent / "features")
    assert (found.unit, len(found)) == ("patient", 24)  # eight patients by three models
    assert score_summary.summary(found, draws=20).as_dict()["patients"] == 8


def test_patients_of_the_training_are_not_another_cohort(
    run: Run, table: Path, tmp_path: Path
) -> None:
    renamed = change(table, tmp_path, lambda frame: frame.assign(patient="x" + frame["patient"]))
    with pytest.raises(RunError, match="were trained on"):
        run.evaluate(renamed, table.parent / "features")


# Evidence


def test_the_evidence_of_slides_adds_up_to_the_logit(run: Run) -> None:
    patient = "p05"
    explained = explain_slide(run, locate_slide(run, patient), regions=False)
    explanation = explained.explanation
    assert explanation.exact
    shares = slide_shares(explanation)
    assert [share.name for share in shares] == list(run.slides[patient])
    total = explanation.rest + sum(share.terms for share in shares)
    np.testing.assert_allclose(total, explanation.logits, atol=1e-5)
    assert sum(share.attention for share in shares) == pytest.approx(1, abs=1e-5)
    contrast = explanation.target.contrasts[1]
    parts = sum(share.evidence[1] for share in shares) + float(contrast.of(explanation.rest))
    assert parts == pytest.approx(float(contrast.of(explanation.logits)), abs=1e-5)


def test_the_explanation_of_a_slide_has_its_own_coordinates_and_the_sum_of_the_patient(
    run: Run,
) -> None:
    explanation = explain_slide(run, locate_slide(run, "p05"), regions=False).explanation
    for own in slide_explanations(explanation):
        np.testing.assert_array_equal(own.coords, bags.read(run.paths[own.slide]).coords)
        assert own.gap < 1e-4
        assert len(own) == bags.inspect(run.paths[own.slide]).n_patches


def test_one_slide_of_a_patient_is_explained_alone_only_where_it_was_answered_alone(
    run: Run, combined: Run, table: Path
) -> None:
    with pytest.raises(RunError, match=r"p05_0 is a slide of p05"):
        locate_slide(run, "p05_0")
    assert [slide.name for slide in locate_slide(combined, "p05").slides] == slides_of(table)["p05"]
    assert locate_slide(combined, "p05_0").name == "p05_0"


def test_a_folder_of_bags_is_a_new_patient(run: Run, table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "someone"
    folder.mkdir()
    for slide in slides_of(table)["p05"]:
        shutil.copy(table.parent / "features" / f"{slide}.h5", folder / f"new_{slide}.h5")
    found = locate_slide(run, folder)
    assert found.name == "someone"
    assert [each.name for each in found.slides] == [f"new_{s}" for s in slides_of(table)["p05"]]
    answer = explain_slide(run, found, regions=False).answer
    assert len(answer.by_fold) == 3  # no model knows these files


def test_the_files_of_an_explanation_are_slide_by_slide(run: Run, tmp_path: Path) -> None:
    explained = explain_slide(run, locate_slide(run, "p05"))
    write_explanation(tmp_path, explained, run)
    with (tmp_path / "slides.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == list(run.slides["p05"])
    record = read_json(tmp_path / "explanation.json")
    assert [each["slide"] for each in record["slides"]] == list(run.slides["p05"])
    for row in rows:
        folder = tmp_path / "slides" / row["slide"]
        patches = pd.read_csv(folder / "patches.csv")
        own = bags.read(run.paths[row["slide"]])
        np.testing.assert_array_equal(patches[["x", "y"]], own.coords)
        assert patches["evidence-1"].sum() == pytest.approx(float(row["evidence-1"]), abs=1e-4)
        assert patches["attention"].sum() == pytest.approx(float(row["attention"]), abs=1e-5)
        assert (folder / "patches.geojson").exists()
        assert (folder / "scores.h5").exists()
