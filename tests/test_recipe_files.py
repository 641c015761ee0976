"""Recipes by name, options that are settings, and mistakes that are answered before torch loads."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from caprmil import config
from caprmil.cli import app
from caprmil.errors import CaprmilError, RecipeError, UnknownNameError
from caprmil.features import bags
from caprmil.models import base, list_models
from caprmil.targets.kinds import TARGETS
from caprmil.training.early_checks import check_early
from caprmil.training.recipe import Recipe
from caprmil.training.recipe_files import list_recipes, model_recipes, parse_recipe, read_recipe
from caprmil.training.train_config import TrainConfig


def mistake(*words: object) -> str:
    """Run a command that fails, and return its error."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, CaprmilError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with twelve bags and their labels."""
    home = tmp_path_factory.mktemp("cohort")
    lines = ["slide,patient,label"]
    for number in range(12):
        bags.write(
            home / "features" / f"s{number}.h5",
            np.full((5, 4), number, dtype=np.float32),
            encoder="e",
            mpp=1.0,
        )
        lines.append(f"s{number},p{number},{'ab'[number % 2]}")
    (home / "labels.csv").write_text("\n".join(lines))
    return home


def test_a_recipe_of_the_package_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"caprmil", "abmil", "rare", "panda"} <= set(list_recipes())
    for name, path in list_recipes().items():
        assert read_recipe(name) == read_recipe(path)


def test_a_name_that_is_nothing_proposes_the_nearest_recipe(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"called 'abmli'\. Did you mean 'abmil'"):
        read_recipe("abmli")
    with pytest.raises(RecipeError, match=f"{tmp_path} is a folder.*caprmil init {tmp_path}"):
        read_recipe(tmp_path)


def test_a_model_for_a_table_brings_its_recipe() -> None:
    own = read_recipe("clam")
    assert read_recipe("t.csv", model="clam", features="f") == config.parse(
        {**config.as_table(own), "cohort": "t.csv", "features": "f"}, into=Recipe
    )
    assert read_recipe("t.csv", model="clam").features is None


def test_a_model_for_a_recipe_replaces_the_model_alone() -> None:
    changed = read_recipe("caprmil", model="abmil")
    assert (changed.model.name, changed.model.settings) == ("abmil", {})
    assert changed.train == read_recipe("caprmil").train
    assert read_recipe("t.csv", model="caprmil+abmil").model.name == "caprmil+abmil"
    assert read_recipe("rare", model="caprmil") == read_recipe("rare")


@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        ("epochs=5", "'train.epochs'"),
        ("epoch=5", "'train.epochs'"),
        ("train.epoch=5", "'epochs'"),
        ("folds=3", "'splits.folds'"),
        ("tokens=8", "'model.tokens'"),
        ("label=grade", "'data.label'"),
        ("kind=regression", "'target.kind' or 'splits.kind'"),
    ],
)
def test_the_nearest_setting_is_proposed(change: str, nearest: str) -> None:
    with pytest.raises(RecipeError, match=f"Did you mean {nearest}"):
        read_recipe("t.csv", changes=[change])


def test_the_warm_up_fits_into_fewer_epochs(caplog: pytest.LogCaptureFixture) -> None:
    assert read_recipe("t.csv", changes=["train.epochs=5"]).train.warmup_epochs == 2
    assert "the warm-up of 6 epochs does not fit into 5: it has 2" in caplog.text
    assert read_recipe("caprmil", changes=["train.epochs=1"]).train.warmup_epochs == 0
    assert read_recipe("t.csv", changes=["train.epochs=7"]).train.warmup_epochs == 6


def test_a_warm_up_that_was_chosen_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('cohort = "t.csv"\n[train]\nepochs = 5\nwarmup_epochs = 6\n')
    for source, changes in [
        (file, []),
        ("t.csv", ["train.epochs=5", "train.warmup_epochs=6"]),
        ("caprmil", ["train.warmup_epochs=40"]),
    ]:
        with pytest.raises(RecipeError, match="warmup_epochs must be less than epochs"):
            read_recipe(source, changes=changes)


def test_frequent_settings_are_options(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recipe] = []

    def train(recipe: Recipe, *_: Any, **__: Any) -> None:
        seen.append(recipe)
        raise CaprmilError("seen")

    monkeypatch.setattr("caprmil.training.cross_validation.cross_validate", train)
    words = ["train", cohort / "labels.csv", "--features", cohort / "features", "--out"]
    settings = {"model": "mean", "epochs": 3, "folds": 2, "lr": 1e-3, "seed": 7, "label": "label"}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    assert mistake(*words, tmp_path / "run", *options, "--set", "train.clip=1.0") == "seen"
    recipe = seen[0]
    assert (recipe.model.name, recipe.data.label) == ("mean", "label")
    assert (recipe.splits.folds, recipe.splits.seed) == (2, 7)
    assert (recipe.train.epochs, recipe.train.lr, recipe.train.clip) == (3, 1e-3, 1.0)
    twice = mistake(*words, tmp_path / "run", "--epochs", 3, "--set", "train.epochs=4")
    assert twice == "--epochs and --set train.epochs are one setting. Leave out one."


def test_a_mistake_is_answered_before_torch_is_loaded(cohort: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    code = """
import sys
from caprmil.cli import run
for line in sys.argv[1:]:
    try:
        run(line.split("|"))
    except SystemExit as end:
        assert end.code == 2
    loaded = {"torch", "lightning", "scipy.stats", "scipy.optimize"} & set(sys.modules)
    assert not loaded, (line, loaded)
"""
    table, out = f"train|{cohort / 'labels.csv'}", f"|--out|{tmp_path / 'run'}"
    features = f"|--features|{cohort / 'features'}"
    lines = [
        f"train|nothing.csv{out}",
        f"train|nothing.toml{out}",
        f"{table}{out}|--features|nowhere",
        f"{table}{out}{features}|--set|epochs=5",
        f"{table}{out}{features}|--epochs|0",
        f"{table}{out}{features}|--folds|20",
        f"{table}{out}{features}|--label|grade",
        f"{table}{out}{features}|--model|abmli",
        f"{table}{features}|--out|{tmp_path / 'mine'}",
    ]
    command = [sys.executable, "-c", code, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(lines)
    assert not (tmp_path / "run").exists()


def test_a_table_may_be_an_excel_file(cohort: Path, tmp_path: Path) -> None:
    pd.read_csv(cohort / "labels.csv").to_excel(tmp_path / "labels.xlsx", index=False)
    recipe = read_recipe(tmp_path / "labels.xlsx", features=cohort / "features")
    check_early(recipe, tmp_path / "run")


def test_every_model_has_a_recipe_of_its_name() -> None:
    assert sorted(model_recipes()) == list_models()


def test_the_kinds_of_memory_are_those_of_the_models() -> None:
    assert TrainConfig.__annotations__["memory"] == base.Memory


def test_the_page_of_targets_has_recipes_and_the_first_metric_of_every_kind() -> None:
    page = (Path(__file__).parents[1] / "docs" / "targets.md").read_text(encoding="utf-8")
    tables = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    kinds = {}
    for table in tables:
        target = parse_recipe({"cohort": "labels.csv", **table}).target
        kinds[target.kind] = target.headline
    own = {kind for kind, each in TARGETS.items() if each.__module__.startswith("caprmil.")}
    assert kinds.keys() == own
    for kind, headline in kinds.items():
        assert re.search(rf"^\| `{kind}` \|.*`{headline}`", page, re.MULTILINE)
