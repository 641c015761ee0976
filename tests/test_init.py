"""The command init, and the recipe that has every setting."""

import csv
import inspect
import re
from contextlib import chdir
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from caprmil import config
from caprmil.cli import app
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CaprmilError
from caprmil.features import bags
from caprmil.io.tables import read_table
from caprmil.models import CAPRMIL
from caprmil.targets import Classification
from caprmil.training.early_checks import check_early
from caprmil.training.full_recipe import full_recipe
from caprmil.training.recipe import FusionConfig, Recipe, SourcesConfig
from caprmil.training.recipe_files import list_recipes, read_recipe
from caprmil.training.train_config import TrainConfig


def init(*words: str) -> str:
    return CliRunner().invoke(app, ["init", *words], catch_exceptions=False).output


def test_a_folder_of_slides_becomes_a_table_and_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    for name in ("b.svs", "a.tiff", "c.ndpi"):
        (tmp_path / "slides" / name).touch()
    with chdir(tmp_path):
        output = init("slides", "--out", "study")
        rows = list(csv.reader(Path("study/labels.csv").read_text().splitlines()))
        recipe = read_recipe("study/recipe.toml")
    assert rows[0] == ["slide", "patient", "label"]
    assert rows[1:] == [["a", "", ""], ["b", "", ""], ["c", "", ""]]
    assert config.differences(read_recipe("caprmil"), recipe) == [
        "cohort: labels.csv -> study/labels.csv"
    ]
    assert "caprmil encode slides --out features" in output


def test_a_filled_in_table_of_features_can_be_trained(tmp_path: Path) -> None:
    for number in range(12):
        name = f'bag "{number}", of a' if number == 3 else f"bag {number}"
        bags.write(tmp_path / "f" / f"{name}.h5", np.ones((3, 4), dtype=np.float32))
    with chdir(tmp_path):
        assert "encode" not in init("f", "--model", "abmil")
        text = Path("labels.csv").read_text()
        rows = list(csv.reader(text.splitlines()))[1:]
        labels = [["slide", "label"], *([row[0], "ab"[n % 2]] for n, row in enumerate(rows))]
        with Path("labels.csv").open("w", newline="") as file:
            csv.writer(file).writerows(labels)
        recipe = read_recipe("recipe.toml")
        check_early(recipe, Path("run"))
    assert (recipe.features, recipe.model.name) == ("f", "abmil")


@pytest.mark.parametrize("out", ["study", ".", "../study"])
def test_a_recipe_of_init_works_from_any_folder(tmp_path: Path, out: str) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for number in range(4):
        bags.write(home / "f" / f"s{number}.h5", np.ones((3, 4), dtype=np.float32))
    elsewhere.mkdir()
    with chdir(home):
        init("f", "--out", out)
    study = (home / out).resolve()
    for folder in (home, study, elsewhere):
        with chdir(folder):
            found = read_recipe(study / "recipe.toml")
            assert isinstance(found.features, str)
            assert Path(found.cohort).resolve() == study / "labels.csv"
            assert Path(found.features).resolve() == home / "f"


def test_the_table_in_the_working_directory_is_the_one_that_a_recipe_means(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "study"):
        folder.mkdir(exist_ok=True)
        (folder / "labels.csv").touch()
    recipe = tmp_path / "study" / "recipe.toml"
    recipe.write_text('cohort = "labels.csv"\nfeatures = ["a", "b"]\n')
    with chdir(tmp_path):
        assert read_recipe(recipe).cohort == "labels.csv"
        Path("labels.csv").unlink()
        assert read_recipe(recipe).features == tuple(str(recipe.parent / each) for each in "ab")
        assert read_recipe(recipe, changes=["cohort=other.csv"]).features == ("a", "b")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    bags.write(tmp_path / "a.h5", np.ones((3, 4), dtype=np.float32))
    (tmp_path / "recipe.toml").write_text("mine")
    with pytest.raises(CaprmilError, match=r"recipe.toml already exists"):
        init(str(tmp_path), "--out", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "recipe.toml"]
    assert (tmp_path / "recipe.toml").read_text() == "mine"


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_slides_says_what_was_looked_for(tmp_path: Path, made: bool) -> None:
    folder = tmp_path if made else tmp_path / "missing"
    expected = r"neither features \(.h5.*nor slides \(.svs" if made else "There is no folder"
    with pytest.raises(CaprmilError, match=expected):
        init(str(folder), "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_a_written_recipe_is_that_of_its_name_with_all_settings(tmp_path: Path, name: str) -> None:
    text = full_recipe(name)
    (tmp_path / "recipe.toml").write_text(text)
    recipe = read_recipe(tmp_path / "recipe.toml")
    known = read_recipe(name)
    assert config.differences(replace(known, model=recipe.model), recipe) == []
    assert recipe.try_model().settings == known.try_model().settings
    for kind, table in ((SplitConfig, "splits"), (TrainConfig, "train"), (CohortConfig, "data")):
        part = re.search(rf"(?ms)^\[{table}\](.*?)^(# )?\[", text)
        assert part is not None
        written = set(re.findall(r"(?m)^(?:# )?(\w+) = ", part[1]))
        assert written == {field.name for field in fields(kind)}


def test_the_papers_recipe_has_every_setting() -> None:
    text = list_recipes()["caprmil"].read_text()
    written: dict[str, set[str]] = {}
    for line in text.splitlines():
        if table := re.match(r"(?:# )?\[(\w+)", line):
            own = written.setdefault(table[1], set())
        elif (key := re.match(r"(?:# )?(\w+) = ", line)) and written:
            own.add(key[1])
    kinds = {"data": CohortConfig, "splits": SplitConfig, "train": TrainConfig}
    kinds |= {"target": Classification, "fusion": FusionConfig, "sources": SourcesConfig}
    settings = {name: {field.name for field in fields(kind)} for name, kind in kinds.items()}
    parameters = inspect.signature(CAPRMIL).parameters.values()
    settings["model"] = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | {"name", "start"}
    settings["target"].add("kind")
    assert {name: written[name] for name in settings} == settings
    paths = {"cohort", "features"}
    assert {*settings, *paths, "loggers"} == {field.name for field in fields(Recipe)}


def test_names_with_line_breaks_and_del_give_a_table_and_a_recipe_that_are_read(
    tmp_path: Path,
) -> None:
    names = ["a\rb", "c\nd", "e"]
    for name in names:
        bags.write(tmp_path / "f" / f"{name}.h5", np.ones((3, 4), dtype=np.float32))
    out = tmp_path / "st\x7fudy"
    init(str(tmp_path / "f"), "--out", str(out))
    assert sorted(read_table(out / "labels.csv")["slide"]) == names
    assert read_recipe(str(out / "recipe.toml")).cohort == str(out / "labels.csv")
