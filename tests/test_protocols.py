"""The paper's protocols, on stand-ins of their shape: the right splits, labels and tables."""

import csv
import shutil
from io import StringIO
from pathlib import Path

import pytest

from caprmil.errors import CohortError, RecipeError, UnknownNameError
from caprmil.experiments import paper
from caprmil.experiments import reproduce as protocols
from caprmil.experiments.reproduce import PROTOCOLS, Reproduction
from caprmil.runs.run import Run
from caprmil.synthetic import BenchmarkCohort

QUICK = ("train.epochs=2", "train.warmup_epochs=0", "model.dim=16")


@pytest.fixture(scope="module", params=sorted(PROTOCOLS))
def study(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Reproduction]:
    """A protocol that was run on its stand-in with two models."""
    folder = tmp_path_factory.mktemp(request.param)
    table = BenchmarkCohort(protocol=request.param).write(folder / "data")
    result = protocols.reproduce(
        request.param,
        table,
        table.parent / "features",
        ["caprmil+gated", "mean"],
        folder / "out",
        changes=QUICK,
        device="cpu",
        progress=False,
    )
    return request.param, folder / "out", result


def test_every_protocol_gives_a_table_beside_the_paper(
    study: tuple[str, Path, Reproduction],
) -> None:
    name, out, result = study
    metric = "kappa" if name == "panda" else "auc"
    assert [(line.model, line.metric) for line in result.lines] == [
        *(("caprmil+gated", metric), ("caprmil+gated", "ace")),
        *(("mean", metric), ("mean", "ace")),
    ]
    assert all(line.printed == paper.SCORES[line.model][name, line.metric] for line in result.lines)
    rows = list(csv.DictReader(StringIO((out / "table.csv").read_text())))
    for row, line in zip(rows, result.lines, strict=True):
        gap = float(row["mean"]) - float(row["paper_mean"])
        assert float(row["difference_in_paper_stds"]) == pytest.approx(gap / line.printed.std)
    assert (out / "table.tex").read_text().count(r"\\") == 5
    assert PROTOCOLS[name].title in (out / "table.md").read_text()


def test_the_splits_are_the_protocols(study: tuple[str, Path, Reproduction]) -> None:
    name, out, _ = study
    run = Run(out / "mean")
    folds, slides = run.splits, len(run.patients)
    tests = [set(fold.test) for fold in folds]
    if name == "camelyon16":
        assert len(folds) == 10
        assert all(slide.startswith("test_") for test in tests for slide in test)
        assert len({fold.validation for fold in folds}) == 10
    if name == "tcga-nsclc":
        assert len(folds) == 4
        assert sum(map(len, tests)) == len(set.union(*tests)) == slides
    if name == "panda":
        assert len(folds) == 5
        shares = [len(part) / slides for part in (folds[0].train, folds[0].validation)]
        assert shares[0] == pytest.approx(0.8, abs=0.06)
        assert shares[1] == pytest.approx(0.05, abs=0.04)
    if name == "bracs":
        assert len(folds) == 5
        assert len({(fold.train, fold.validation, fold.test) for fold in folds}) == 1
        assert len({fold.seed for fold in folds}) == 5
    for fold in folds:
        known = {run.patients[slide] for slide in (*fold.train, *fold.validation)}
        assert known.isdisjoint(run.patients[slide] for slide in fold.test)


def test_a_finished_protocol_is_not_trained_again(study: tuple[str, Path, Reproduction]) -> None:
    name, out, result = study
    before = (out / "mean/scores.json").stat().st_mtime_ns
    labels = out.parent / "data/labels.csv"
    again = protocols.reproduce(
        name,
        labels,
        labels.parent / "features",
        ["mean"],
        out,
        changes=QUICK,
        device="cpu",
        progress=False,
    )
    assert (out / "mean/scores.json").stat().st_mtime_ns == before
    assert [line.ours for line in again.lines] == [line.ours for line in result.lines[2:]]


def test_missing_slides_are_named_and_nothing_is_trained(tmp_path: Path) -> None:
    table = BenchmarkCohort(protocol="camelyon16").write(tmp_path / "data")
    for name in ("normal_002", "test_003"):
        (tmp_path / f"data/features/{name}.h5").unlink()
    where = (table, tmp_path / "data/features", ["mean"], tmp_path / "out")
    with pytest.raises(CohortError, match=r"2 of 36 slides have no bag.*normal_002, test_003"):
        protocols.reproduce("camelyon16", *where)
    assert (tmp_path / "out/missing.txt").read_text() == "normal_002\ntest_003\n"
    assert not (tmp_path / "out/mean").exists()

    changes = [*QUICK, "data.missing=skip", "splits.repeats=1"]
    result = protocols.reproduce("camelyon16", *where, changes=changes, progress=False)
    assert any("normal_002" in note and "left out" in note for note in result.notes)
    assert "34 slides; the paper has 399." in result.notes


def test_the_official_names_of_classes_are_understood(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    lesions = ["N", "PB", "UDH", "FEA", "ADH", "DCIS", "IC", "Group_BT", "2"]
    rows = [f"BRACS_{n},{lesion},{n},Training" for n, lesion in enumerate(lesions)]
    table.write_text("\n".join(["WSI Filename,WSI label,Patient Id,Set", *rows]))
    found = [(row["label"], row["split"]) for row in protocols.read_labels("bracs", table)]
    groups = ["benign"] * 3 + ["atypical"] * 2 + ["malignant"] * 2 + ["benign", "malignant"]
    assert found == [(group, "train") for group in groups]


def test_patients_of_tcga_are_read_from_the_barcode(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label\nTCGA-05-4244-01Z-00-DX1.d4ff32cd,LUAD\n")
    (row,) = protocols.read_labels("tcga-nsclc", table)
    assert row["patient"] == "TCGA-05-4244"


def test_a_label_of_another_benchmark_is_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label\nnormal_001,normal\ntumor_001,benign\n")
    with pytest.raises(CohortError, match=r"tumor_001 \(benign\).*classes are normal, tumour"):
        protocols.read_labels("camelyon16", table)


def test_a_slide_of_no_official_part_is_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("slide,label\nnormal_001,normal\nmystery,tumor\n")
    with pytest.raises(CohortError, match=r"\(1\): mystery. Add a column split"):
        protocols.read_labels("camelyon16", table)
    table.write_text("slide,label,split\nnormal_001,normal,left out\ntumor_001,tumor,\n")
    with pytest.raises(CohortError, match=r"\(1\): normal_001. Add a column split"):
        protocols.read_labels("camelyon16", table)


def test_an_unknown_protocol_or_model_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="camelyon16"):
        protocols.find_protocol("camelyon17")
    with pytest.raises(UnknownNameError, match="abmil"):
        protocols.protocol_recipe("panda", "abmill", tmp_path, tmp_path, ())
    with pytest.raises(UnknownNameError, match="no model with a recipe called 'bracs'"):
        protocols.protocol_recipe("panda", "bracs", tmp_path, tmp_path, ())


def test_models_are_chosen_once_each() -> None:
    assert protocols.choose_models(" mean,clam, mean ,") == ["mean", "clam"]
    assert protocols.choose_models("all") == protocols.all_models()
    with pytest.raises(RecipeError, match="Name a model"):
        protocols.choose_models(" , ")


@pytest.mark.parametrize("model", ["clam", "bayesmil"])
def test_baselines_go_through_a_protocol_by_their_own_recipes(model: str, tmp_path: Path) -> None:
    table = BenchmarkCohort(protocol="bracs").write(tmp_path / "data")
    changes = ["train.epochs=1", "splits.repeats=1"]
    result = protocols.reproduce(
        "bracs",
        table,
        table.parent / "features",
        [model],
        tmp_path / "out",
        changes=changes,
        device="cpu",
        progress=False,
    )
    assert [line.printed for line in result.lines] == [
        paper.SCORES[model]["bracs", metric] for metric in ("auc", "ace")
    ]
    settings = Run(tmp_path / "out" / model).model("fold-0").settings
    expected = {"clam": ("branches", "auto"), "bayesmil": ("spatial", True)}[model]
    assert expected in settings.items()


def test_another_table_in_the_same_folder_is_refused(
    study: tuple[str, Path, Reproduction], tmp_path: Path
) -> None:
    name, out, _ = study
    data = tmp_path / "data"
    shutil.copytree(out.parent / "data", data)
    lines = (data / "labels.csv").read_text().splitlines()
    (data / "labels.csv").write_text("\n".join(lines[:-1]))
    with pytest.raises(CohortError, match="made from another table"):
        protocols.reproduce(name, data / "labels.csv", data / "features", ["mean"], out)


@pytest.mark.parametrize("model", protocols.all_models())
@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_every_model_has_a_recipe_for_every_protocol(name: str, model: str) -> None:
    recipe = protocols.protocol_recipe(name, model, Path("t.csv"), Path("f"), ())
    assert recipe.model.build(32, len(PROTOCOLS[name].classes))
    assert (recipe.train.sampling, recipe.train.clip, recipe.train.weights) == (
        "balanced",
        1.0,
        "last",
    )


def test_the_papers_numbers_are_complete() -> None:
    assert all(set(row) == set(paper.COLUMNS) for row in paper.SCORES.values())
    assert paper.SCORES["caprmil"]["camelyon16", "auc"] == (0.975, 0.006)
    assert paper.SCORES["sgpmil"]["bracs", "ace"] == (0.142, 0.032)
    assert {"caprmil", *paper.GIGAFLOPS} <= set(paper.MILLIONS) == set(paper.SCORES)
