"""`caprmil explain` writes a folder of figures and tables, or prints one clear error."""

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import h5py
import pytest
import pyvips
from typer.testing import CliRunner

from caprmil import figures
from caprmil.cli import app
from caprmil.cohort.folds import SplitConfig
from caprmil.encoders import load
from caprmil.errors import BagError, CaprmilError, RunError, SlideError, UnknownNameError
from caprmil.explain import explanation_folder
from caprmil.features import bags
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.runs.run import Run
from caprmil.slides.slide import find_slides
from caprmil.synthetic import Section
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from small_models import small_model

pytestmark = pytest.mark.slow

SIDE = 700  # pixels of a slide
TABLES = {"explanation.json", "patches.csv", "scores.h5"}
FIGURES = {"relevance.png", "relevance.pdf"}
TOKEN_FIGURES = {"tokens.png", "tokens.pdf", "heads.png", "context.png"}


def caprmil(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw at a low resolution. The content of figures is tested in test_figures.py."""
    monkeypatch.setattr(explanation_folder, "SCREEN", 40)
    monkeypatch.setattr(explanation_folder, "PRINT", 40)


@pytest.fixture
def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save empty files as figures, where figures are not tested."""
    monkeypatch.setattr(figures, "settle", lambda figure: None)
    monkeypatch.setattr(figures, "save", lambda figure, path, dpi: path.touch())


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight small slides, encoded and trained on: folders slides, features and run."""
    home = tmp_path_factory.mktemp("study")
    lines = ["slide,label"]
    for number in range(8):
        section = Section(seed=number, width=SIDE, height=SIDE, mpp=1.0, tumour=0.3 * (number % 2))
        section.write(home / "slides" / f"s{number}.tiff")
        lines.append(f"s{number},{['normal', 'tumour'][number % 2]}")
    (home / "labels.csv").write_text("\n".join(lines) + "\n")
    encoder = load("lite0")
    job = Extraction(out=home / "features", encoder=encoder, config=configure(encoder.card))
    job.run(find_slides([home / "slides"]))
    recipe = Recipe(
        cohort=str(home / "labels.csv"),
        features=str(home / "features"),
        model=ModelConfig(settings={"dim": 16, "heads": 2, "tokens": 3}),
        splits=SplitConfig(folds=2, validation=0.34),
        train=TrainConfig(epochs=2, warmup_epochs=1),
    )
    cross_validate(recipe, home / "run", device="cpu", progress=False)
    return home


def test_a_slide_of_the_run_is_explained_with_its_pixels(study: Path, tmp_path: Path) -> None:
    run = shutil.copytree(study / "run", tmp_path / "run")
    output = caprmil("explain", run, "s1", "--parquet")
    made = run / "explain" / "s1"
    geojson = {"patches.geojson", "regions.geojson"}
    assert names(made) == TABLES | FIGURES | TOKEN_FIGURES | geojson | {"patches.parquet"}
    assert "Regions, removed as a whole: probability of" in output
    assert "label: tumour" in output
    assert "= logit" in output
    assert "token 3" in output
    assert (
        "Evidence is what each patch contributes to the logit, after context; an exact sum"
        in output
    )
    assert "caprmil report" in output
    record = json.loads((made / "explanation.json").read_text())
    for name, logit in record["explained"]["logits"].items():
        total = record["explained"]["evidence"][name] + record["explained"]["rest"][name]
        assert total == pytest.approx(logit, abs=1e-5)
    assert record["answer"]["unseen"]
    regions = json.loads((made / "regions.geojson").read_text())["features"]
    assert len(regions) == len(record["regions"]["found"]) > 0
    for region, feature in zip(record["regions"]["found"], regions, strict=True):
        effect = record["regions"]["with_all_patches"] - region["without"]
        assert region["effect"] == pytest.approx(effect)
        area = feature["properties"]["measurements"]["Area mm^2"]
        assert region["area_mm2"] == pytest.approx(area, rel=1e-4)
    with (made / "patches.csv").open(newline="") as stream:
        numbers = Counter(row["region"] for row in csv.DictReader(stream))
    assert {n["region"]: n["patches"] for n in record["regions"]["found"]} == {
        int(number): n for number, n in numbers.items() if number
    }
    with pytest.raises(CaprmilError, match="already exists"):
        caprmil("explain", run, "s1")


@pytest.mark.usefixtures("without_drawing")
def test_a_new_slide_is_encoded_once_and_its_bag_kept(study: Path, tmp_path: Path) -> None:
    slide = shutil.copy(study / "slides" / "s3.tiff", tmp_path / "new.tiff")
    caprmil("explain", study / "run", slide, "--out", tmp_path / "out", "--head", 0, "--top", 3)
    bag = tmp_path / "out" / "features" / "new.h5"
    record = json.loads((tmp_path / "out" / "explanation.json").read_text())
    assert record["provenance"]["bag"] == str(bag)
    assert record["tokens"]["head_drawn"] == "mean"
    caprmil(
        "explain", study / "run", bag, "--out", tmp_path / "again"
    )  # finds the slide file by its record
    assert TOKEN_FIGURES | {"patches.geojson"} <= names(tmp_path / "again")
    assert "features" not in names(tmp_path / "again")


@pytest.mark.usefixtures("without_drawing")
def test_the_file_of_a_known_slide_is_not_encoded_again(study: Path, tmp_path: Path) -> None:
    caprmil("explain", study / "run", study / "slides" / "s2.tiff", "--out", tmp_path / "out")
    assert "features" not in names(tmp_path / "out")


@pytest.mark.usefixtures("without_drawing")
def test_a_bag_without_coordinates_has_all_files_except_geojson(
    tiny_run: Run, tmp_path: Path
) -> None:
    old = bags.read(tiny_run.bag_paths()[0])
    path = bags.write(tmp_path / "bare.h5", old.features)
    output = caprmil("explain", tiny_run.folder, path, "--out", tmp_path / "out")
    assert names(tmp_path / "out") == TABLES | FIGURES | TOKEN_FIGURES
    assert "Without patches.geojson" in output
    assert "the slide file was not found" in output


@pytest.mark.usefixtures("without_drawing")
def test_a_model_without_tokens_has_no_token_figures(study: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(study / "run", tmp_path / "run"))
    for fold in run.done:  # explained, and not trained, as another model
        folder = run.fold_folder(fold.name) / "model"
        shutil.rmtree(folder)
        small_model("transmil", run.facts.in_dim, 2).save_pretrained(folder)
    output = caprmil("explain", tmp_path / "run", "s0", "--out", tmp_path / "a")
    geojson = {"patches.geojson", "regions.geojson"}
    assert names(tmp_path / "a") == TABLES | FIGURES | geojson
    assert "TransMIL has none" in output
    assert "by integrated gradients" in output
    caprmil("explain", tmp_path / "run", "s0", "--out", tmp_path / "b", "--method", "perturbation")
    with h5py.File(tmp_path / "b" / "scores.h5") as file:
        assert file.attrs["method"] == "perturbation"
    with pytest.raises(RunError, match="not a sum over patches"):
        caprmil("explain", tmp_path / "run", "s0", "--out", tmp_path / "c", "--method", "exact")
    assert names(tmp_path) == {"run", "a", "b"}  # no incomplete folder is left


def test_a_slide_without_a_scale_is_explained(study: Path, tmp_path: Path) -> None:
    """Coordinates are pixels: only the scale bar needs microns."""
    old = bags.read(study / "features" / "s1.h5")
    path = bags.write(tmp_path / "s1.h5", old.features, old.coords, patch_level0=224.0, step=224.0)
    image = pyvips.Image.new_from_file(str(study / "slides" / "s1.tiff"))
    image.copy(xres=1, yres=1).write_to_file(str(tmp_path / "s1.png"))
    options = ("--slide", tmp_path / "s1.png", "--force", "--out", tmp_path / "out")
    output = caprmil("explain", study / "run", path, *options)
    assert "not found" not in output


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("unknown",), RunError, "neither a slide"),
        (("s1", "--method", "magic"), UnknownNameError, "Known: exact, gradients, perturbation"),
        (("s1", "--head", 9), UnknownNameError, "no head called '9'"),
        (("s1", "--fold", "fold-9"), UnknownNameError, "fold-9"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_no_files(
    study: Path, tmp_path: Path, arguments: tuple[object, ...], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        caprmil("explain", study / "run", *arguments, "--out", tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir() if (tmp_path / "new").exists() else []) == []


def test_another_slide_of_the_same_name_is_refused(study: Path, tmp_path: Path) -> None:
    Section(seed=1, width=500, height=600, mpp=1.0).write(tmp_path / "s1.tiff")
    with pytest.raises(SlideError, match=f"was encoded from {SIDE} x {SIDE}"):
        caprmil("explain", study / "run", "s1", "--slide", tmp_path, "--out", tmp_path / "out")


def test_a_bag_of_another_width_is_refused(study: Path, tmp_path: Path) -> None:
    path = bags.write(tmp_path / "thin.h5", [[1.0, 2.0]])
    with pytest.raises(BagError, match="2 features"):
        caprmil("explain", study / "run", path, "--out", tmp_path / "out")
