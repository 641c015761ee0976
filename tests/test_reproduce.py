"""The paper's protocols on generated cohorts: their splits, labels, recipes and tables."""

import csv
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.folds import Fold
from caprmil.errors import CohortError, RecipeError, UnknownNameError
from caprmil.experiments import paper, reproduce
from caprmil.experiments.reproduce import PROTOCOLS, Reproduction, reproduction
from caprmil.io.findings import Findings
from caprmil.runs.run import Run
from caprmil.synthetic import BenchmarkCohort
from caprmil.training.recipe import Recipe
from quick_scoring import quick_scoring

pytestmark = pytest.mark.slow

MODELS = {"camelyon16": "caprmil+gated", "tcga-nsclc": "mean", "panda": "clam", "bracs": "bayesmil"}
"""The model that is trained by each protocol here."""
QUICK = ("train.epochs=1", "train.warmup_epochs=0", "splits.repeats=1", "splits.folds=2")


@pytest.fixture(scope="module")
def cohorts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The table of a generated cohort for each protocol, next to its bags in `features`."""
    folder = tmp_path_factory.mktemp("cohorts")
    return {name: BenchmarkCohort(protocol=name).write(folder / name) for name in PROTOCOLS}


def run_protocol(name: str, table: Path, out: Path, *changes: str) -> Reproduction:
    return reproduce.reproduce(
        name,
        table,
        table.parent / "features",
        [MODELS[name]],
        out,
        changes=[*QUICK, *changes],
        device="cpu",
        progress=False,
    )


@pytest.fixture(scope="module")
def outputs(
    cohorts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Reproduction]]:
    """The folder and the result of every protocol, trained with one small model each."""
    folder = tmp_path_factory.mktemp("reproductions")
    with quick_scoring():
        return {
            name: (folder / name, run_protocol(name, table, folder / name))
            for name, table in cohorts.items()
        }


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_every_protocol_gives_a_table_next_to_the_paper(
    name: str, outputs: dict[str, tuple[Path, Reproduction]]
) -> None:
    out, result = outputs[name]
    model, metric = MODELS[name], "kappa" if name == "panda" else "auc"
    assert [(score.model, score.metric) for score in result.scores] == [
        (model, metric),
        (model, "ace"),
    ]
    published = [paper.SCORES[model][name, score.metric] for score in result.scores]
    assert [score.published for score in result.scores] == published
    rows = list(csv.DictReader(StringIO((out / "table.csv").read_text())))
    for row, figure in zip(rows, published, strict=True):
        gap = float(row["mean"]) - float(row["paper_mean"])
        assert float(row["difference_in_paper_stds"]) == pytest.approx(gap / figure.std)
    assert (out / "table.tex").read_text().count(r"\\") == 4
    assert PROTOCOLS[name].title in (out / "table.md").read_text()


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_every_table_says_that_features_are_generated(
    name: str, outputs: dict[str, tuple[Path, Reproduction]]
) -> None:
    out, _ = outputs[name]
    for file in ("table.md", "table.tex", f"{MODELS[name]}/scores.md"):
        assert "Features: generated, not of slides; 64 wide." in (out / file).read_text(), file
    rows = csv.DictReader(StringIO((out / "table.csv").read_text()))
    assert {(row["encoder"], row["width"], row["generated"]) for row in rows} == {
        ("synthetic", "64", "true")
    }


def test_every_table_has_the_encoder_the_width_and_the_scale(
    outputs: dict[str, tuple[Path, Reproduction]],
) -> None:
    result = outputs["panda"][1]
    facts = replace(result.facts, encoder="virchow_2", in_dim=2560, mpp=0.51, patch_px=224)
    real = replace(result, facts=facts)
    ours = "Features: virchow_2, 2,560 wide, patches of 224 px at 0.51 um/px."
    theirs = "The paper's: UNI, 1,024 wide, patches of 224 px at 0.5 um/px."
    assert f"{ours} {theirs}" in real.as_markdown()
    assert f"{ours} {theirs}".replace("_", r"\_") in real.as_latex()
    row = next(csv.DictReader(StringIO(real.as_csv())))
    shown = [row[column] for column in ("encoder", "width", "mpp", "generated")]
    assert shown == ["virchow_2", "2560", "0.51", "false"]
    unknown = replace(result, facts=replace(facts, encoder=None, mpp=None))
    assert "an encoder that the bags do not name" in unknown.as_markdown()


def test_a_model_is_trained_with_its_own_settings(
    outputs: dict[str, tuple[Path, Reproduction]],
) -> None:
    def settings(name: str) -> dict[str, object]:
        return Run(outputs[name][0] / MODELS[name]).model("fold-0").settings

    assert settings("camelyon16")["pool"] == "gated"
    assert settings("panda")["branches"] == "auto"
    assert settings("bracs").items() >= {"spatial": True, "prior": "subtyping"}.items()


def test_a_finished_protocol_is_not_trained_again(
    cohorts: dict[str, Path], outputs: dict[str, tuple[Path, Reproduction]]
) -> None:
    out, result = outputs["tcga-nsclc"]
    before = (out / "mean/scores.json").stat().st_mtime_ns
    again = run_protocol("tcga-nsclc", cohorts["tcga-nsclc"], out)
    assert (out / "mean/scores.json").stat().st_mtime_ns == before
    assert [score.ours for score in again.scores] == [score.ours for score in result.scores]


def test_another_table_in_the_same_folder_is_refused(
    cohorts: dict[str, Path], outputs: dict[str, tuple[Path, Reproduction]], tmp_path: Path
) -> None:
    data = shutil.copytree(cohorts["bracs"].parent, tmp_path / "data")
    lines = (data / "labels.csv").read_text().splitlines()
    (data / "labels.csv").write_text("\n".join(lines[:-1]))
    with pytest.raises(CohortError, match="made from another table"):
        run_protocol("bracs", data / "labels.csv", outputs["bracs"][0])


# Splits


def split(name: str, table: Path, folder: Path) -> tuple[list[Fold], dict[str, str]]:
    """Return the folds that a protocol is trained on, and the patient of each slide."""
    labels = reproduce.read_labels(name, table)
    with (folder / "cohort.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(labels[0]))
        writer.writeheader()
        writer.writerows(labels)
    features = table.parent / "features"
    recipe = reproduce.protocol_recipe(name, "mean", folder / "cohort.csv", features, ())
    cohort, folds = load_cohort(
        recipe.cohort, recipe.features, recipe.data, recipe.splits, target=recipe.target
    )
    return folds, cohort.patients


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_the_splits_are_those_of_the_protocol(
    name: str, cohorts: dict[str, Path], tmp_path: Path
) -> None:
    folds, patients = split(name, cohorts[name], tmp_path)
    tests = [set(fold.test) for fold in folds]
    if name == "camelyon16":
        assert len(folds) == 10
        assert all(slide.startswith("test_") for test in tests for slide in test)
        assert len({fold.validation for fold in folds}) == 10
    if name == "tcga-nsclc":
        assert len(folds) == 4
        assert sum(map(len, tests)) == len(set.union(*tests)) == len(patients)
    if name == "panda":
        assert len(folds) == 5
        shares = [len(part) / len(patients) for part in (folds[0].train, folds[0].validation)]
        assert shares[0] == pytest.approx(0.8, abs=0.06)
        assert shares[1] == pytest.approx(0.05, abs=0.04)
    if name == "bracs":
        assert len(folds) == 5
        assert len({(fold.train, fold.validation, fold.test) for fold in folds}) == 1
        assert len({fold.seed for fold in folds}) == 5
    for fold in folds:
        seen = {patients[slide] for slide in (*fold.train, *fold.validation)}
        assert seen.isdisjoint(patients[slide] for slide in fold.test)


# Labels


def test_missing_slides_are_listed_or_left_out(
    cohorts: dict[str, Path],
    outputs: dict[str, tuple[Path, Reproduction]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = shutil.copytree(cohorts["tcga-nsclc"].parent, tmp_path / "data")
    slides = sorted(path.stem for path in (data / "features").glob("*.h5"))[:2]
    for slide in slides:
        (data / f"features/{slide}.h5").unlink()
    run = Run(outputs["tcga-nsclc"][0] / "mean")
    trained: list[Path] = []

    def complete_all(recipes: dict[Path, Recipe], **_: object) -> dict[Path, Run]:
        trained.extend(recipes)
        return dict.fromkeys(recipes, run)

    monkeypatch.setattr(reproduction, "complete_all", complete_all)
    out = tmp_path / "out"
    with pytest.raises(CohortError, match=rf"2 of 40 slides have no bag.*{', '.join(slides)}"):
        run_protocol("tcga-nsclc", data / "labels.csv", out)
    assert (out / "missing.txt").read_text() == "\n".join(slides) + "\n"
    assert trained == []
    result = run_protocol("tcga-nsclc", data / "labels.csv", out, "data.missing=skip")
    assert any(slides[0] in note and "left out" in note for note in result.notes)
    assert "38 slides; the paper has 1,006." in result.notes
    assert trained == [out / "mean"]


def test_the_official_names_of_classes_are_known(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    lesions = ["N", "PB", "UDH", "FEA", "ADH", "DCIS", "IC", "Group_BT", "2"]
    rows = [f"BRACS_{n},{lesion},{n},Training" for n, lesion in enumerate(lesions)]
    table.write_text("\n".join(["WSI Filename,WSI label,Patient Id,Set", *rows]))
    found = [(row["label"], row["split"]) for row in reproduce.read_labels("bracs", table)]
    groups = ["benign"] * 3 + ["atypical"] * 2 + ["malignant"] * 2 + ["benign", "malignant"]
    assert found == [(group, "train") for group in groups]


def test_patients_of_tcga_are_read_from_the_barcode(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label\nTCGA-05-4244-01Z-00-DX1.d4ff32cd,LUAD\n")
    (row,) = reproduce.read_labels("tcga-nsclc", table)
    assert row["patient"] == "TCGA-05-4244"


def dummy_patients(name: str, table: Path, folder: Path) -> Path:
    """The table of a benchmark with a column case_id that has one value for each class."""
    words = {label: n for n, label in enumerate(PROTOCOLS[name].classes)}
    rows = reproduce.read_labels(name, table)
    lines = ["slide_id,case_id,label,split"]
    for row in rows:
        patient = f"patient_{words[row['label']]}"
        lines.append(f"{row['slide']},{patient},{row['label']},{row.get('split', '')}")
    (folder / "dummy.csv").write_text("\n".join(lines) + "\n")
    return folder / "dummy.csv"


def test_a_case_id_that_is_the_label_is_not_the_patient_of_camelyon16(
    cohorts: dict[str, Path], tmp_path: Path
) -> None:
    table, found = dummy_patients("camelyon16", cohorts["camelyon16"], tmp_path), Findings()
    rows = reproduce.read_labels("camelyon16", table, found)
    assert all(row["patient"] == row["slide"] for row in rows)
    (note,) = found.notes
    assert "Column case_id has one value for all slides of a class (patient_0, patient_1)" in note
    assert "every slide counts as its own patient" in note
    with (tmp_path / "cohort.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    features = cohorts["camelyon16"].parent / "features"
    recipe = reproduce.protocol_recipe("camelyon16", "mean", tmp_path / "cohort.csv", features, ())
    _, folds = load_cohort(
        recipe.cohort, recipe.features, recipe.data, recipe.splits, target=recipe.target
    )
    assert len(folds) == 10


def test_a_case_id_that_is_the_label_has_advice_that_helps_elsewhere(
    cohorts: dict[str, Path], tmp_path: Path
) -> None:
    (row, *_) = reproduce.read_labels(
        "tcga-nsclc", dummy_patients("tcga-nsclc", cohorts["tcga-nsclc"], tmp_path)
    )
    assert row["patient"] == row["slide"][:12]
    table = dummy_patients("panda", cohorts["panda"], tmp_path)
    advice = r"case_id does not name patients.*If every slide is of another.*remove column case_id"
    with pytest.raises(CohortError, match=advice):
        reproduce.read_labels("panda", table)
    lines = [line.split(",") for line in table.read_text().splitlines()]
    table.write_text("\n".join(",".join([a, *rest]) for a, _, *rest in lines))
    assert all(row["patient"] == row["slide"] for row in reproduce.read_labels("panda", table))


def test_a_label_of_another_benchmark_is_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label\nnormal_001,normal\ntumor_001,benign\n")
    with pytest.raises(CohortError, match=r"tumor_001 \(benign\).*classes are normal, tumour"):
        reproduce.read_labels("camelyon16", table)


def test_a_slide_of_no_official_part_is_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label\nnormal_001,normal\nmystery,tumor\n")
    with pytest.raises(CohortError, match=r"\(1\): mystery. Add a column split"):
        reproduce.read_labels("camelyon16", table)
    table.write_text("slide,label,split\nnormal_001,normal,left out\ntumor_001,tumor,\n")
    with pytest.raises(CohortError, match=r"\(1\): normal_001. Add a column split"):
        reproduce.read_labels("camelyon16", table)


# Recipes


def test_an_unknown_protocol_or_model_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="camelyon16"):
        reproduce.find_protocol("camelyon17")
    with pytest.raises(UnknownNameError, match="abmil"):
        reproduce.protocol_recipe("panda", "abmill", tmp_path, tmp_path, ())
    with pytest.raises(UnknownNameError, match="no model with a recipe called 'bracs'"):
        reproduce.protocol_recipe("panda", "bracs", tmp_path, tmp_path, ())


def test_models_are_chosen_once_each() -> None:
    assert reproduce.choose_models(" mean,clam, mean ,") == ["mean", "clam"]
    assert reproduce.choose_models("all") == reproduce.all_models()
    with pytest.raises(RecipeError, match="Name a model"):
        reproduce.choose_models(" , ")


@pytest.mark.parametrize("model", reproduce.all_models())
@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_every_model_has_a_recipe_for_every_protocol(name: str, model: str) -> None:
    recipe = reproduce.protocol_recipe(name, model, Path("t.csv"), Path("f"), ())
    assert recipe.target.classes == tuple(PROTOCOLS[name].classes)
    assert recipe.model.build(32, recipe.target)
    assert (recipe.train.sampling, recipe.train.clip, recipe.train.weights) == (
        "balanced",
        1.0,
        "last",
    )


def test_the_recipe_of_dgrmil_is_one_setting_of_its_authors() -> None:
    recipe = reproduce.protocol_recipe("panda", "dgrmil", Path("t.csv"), Path("f"), ())
    model, train = recipe.model.settings, recipe.train
    last = {"vectors": 6, "dropout": 0.15, "patch_dropout": 0.1, "warmup_epochs": 10}
    assert last.items() <= model.items()
    assert (model["diversity_weight"], model["triplet_weight"]) == (0.1, 0.1)
    assert (train.epochs, train.patience, train.warmup_epochs) == (30, 20, 10)
    rates = (train.lr, train.weight_decay, train.warmup_lr, train.min_lr)
    assert rates == (1e-4, 1e-4, 1e-5, 1e-5)


def test_the_papers_numbers_are_complete() -> None:
    assert all(set(row) == set(paper.COLUMNS) for row in paper.SCORES.values())
    assert paper.SCORES["caprmil"]["camelyon16", "auc"] == (0.975, 0.006)
    assert paper.SCORES["sgpmil"]["bracs", "ace"] == (0.142, 0.032)
    assert {"caprmil", *paper.GIGAFLOPS} <= set(paper.MILLIONS) == set(paper.SCORES)
