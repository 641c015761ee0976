"""Recipes: strict, and every mistake is told what would have been right."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from caprmil import config
from caprmil.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Train:
    epochs: int = 30
    lr: float = 2e-4
    mode: Literal["last", "best"] = "best"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise RecipeError(f"epochs must be 1 or more, not {self.epochs}.")


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = "caprmil"
    params: dict[str, Any] = field(default_factory=dict, metadata=config.REST)


@dataclass(frozen=True, kw_only=True)
class Study:
    cohort: str
    classes: tuple[str, ...] = ()
    quick: bool = False
    model: Model = Model()
    train: Train = Train()


def read(text: str, tmp_path: Path, *changes: str) -> Study:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return config.load(path, into=Study, changes=changes)


def test_a_recipe_becomes_settings(tmp_path: Path) -> None:
    study = read('cohort = "a.csv"\nclasses = ["x", "y"]\n[model]\ntokens = 4', tmp_path)
    assert study == Study(cohort="a.csv", classes=("x", "y"), model=Model(params={"tokens": 4}))


def test_changes_are_made_before_reading(tmp_path: Path) -> None:
    changes = [
        "train.epochs=5",
        "model.pool=gated",
        "train.lr=1",
        "quick=true",
        'model.name="abmil"',
    ]
    study = read('cohort = "a.csv"', tmp_path, *changes)
    assert study.train == Train(epochs=5, lr=1.0)
    assert study.model == Model(name="abmil", params={"pool": "gated"})
    assert study.quick


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\nepoch = 3",
            r"no setting in study.toml: train called 'epoch'. Did you mean 'epochs'",
        ),
        ("[train]\nepochs = 3.5", "study.toml: train: epochs must be a whole number, not 3.5"),
        ("[train]\nepochs = true", "must be a whole number, not True"),
        ("[train]\nepochs = 0", "study.toml: train: epochs must be 1 or more, not 0"),
        ("[train]\nlr = 'fast'", "must be a number, not 'fast'"),
        ("[train]\nclip = 'x'", "must be a number, not 'x'"),
        ("[train]\nmode = 'worst'", "must be 'last' or 'best', not 'worst'"),
        ("quick = 1", "must be true or false, not 1"),
        ("train = 3", "is a table of settings, not 3"),
        ("classes = 'x'", "must be a list, not 'x'"),
        ("classes = [1]", "must be text, not 1"),
        ("cohort", "is not a TOML file"),
    ],
)
def test_a_mistake_is_told_what_would_be_right(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        read(f"cohort = 'a.csv'\n{text}" if text != "cohort" else text, tmp_path)


def test_what_must_be_said_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"study.toml must say 'cohort'"):
        read("", tmp_path)


@pytest.mark.parametrize("change", ["epochs", "=3", "cohort.x=3"])
def test_a_change_that_changes_nothing_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        read('cohort = "a.csv"', tmp_path, change)


def test_a_missing_recipe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="There is no recipe"):
        config.load(tmp_path / "none.toml", into=Study)


def test_settings_survive_a_round_trip(tmp_path: Path) -> None:
    study = Study(
        cohort="a.csv",
        classes=("x",),
        model=Model(params={"tokens": 4, "pool": {"name": "abmil", "dim": 8}}),
        train=Train(lr=1e-7, clip=1.0),
    )
    assert read(config.dump(study), tmp_path) == study


def test_equal_settings_have_equal_digests_and_others_do_not() -> None:
    one, same, other = Study(cohort="a"), Study(cohort="a"), Study(cohort="a", quick=True)
    assert config.digest(one) == config.digest(same) != config.digest(other)
    assert config.differences(one, other) == ["quick: False -> True"]
