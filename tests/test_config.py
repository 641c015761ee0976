"""Settings: strict reading, and errors that name what is right."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from caprmil import config
from caprmil.errors import RecipeError, UnknownNameError, suggest


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


def test_changes_override_the_file(tmp_path: Path) -> None:
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
            r"study.toml: train has no setting called 'epoch'. Did you mean 'epochs'",
        ),
        ("[train]\nepochs = 3.5", "study.toml: train: epochs must be a whole number, not 3.5"),
        ("[train]\nepochs = true", "must be a whole number, not True"),
        ("[train]\nepochs = 0", "study.toml: train: epochs must be 1 or more, not 0"),
        ("[train]\nlr = 'fast'", "must be a number, not 'fast'"),
        ("[train]\nclip = 'x'", "must be a number, not 'x'"),
        ("[train]\nmode = 'worst'", "must be 'last' or 'best', not 'worst'"),
        ("quick = 1", "must be true or false, not 1"),
        ("train = 3", "must be a table of settings, not 3"),
        ("classes = 'x'", "must be a list, not 'x'"),
        ("classes = [1]", "must be text, not 1"),
        ("cohort", "is not a TOML file"),
    ],
)
def test_an_error_names_what_is_right(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        read(f"cohort = 'a.csv'\n{text}" if text != "cohort" else text, tmp_path)


def test_a_required_setting_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"study.toml has no 'cohort', which is required"):
        read("", tmp_path)


@pytest.mark.parametrize("change", ["epochs", "=3", "cohort.x=3"])
def test_a_malformed_change_is_an_error(change: str, tmp_path: Path) -> None:
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


# A field whose type is chosen by `kind`


@dataclass(frozen=True, kw_only=True)
class Classes:
    kind: ClassVar[str] = "classes"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Number:
    kind: ClassVar[str] = "number"
    loss: Literal["l1", "huber"] = "huber"
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale == 0:
            raise RecipeError("scale must not be 0.")


def find_target(kind: str) -> type:
    known = {each.kind: each for each in (Classes, Number)}
    if kind not in known:
        raise UnknownNameError("target", kind, known)
    return known[kind]


@dataclass(frozen=True, kw_only=True)
class Plan:
    target: Classes | Number = field(default=Classes(), metadata=config.by_kind(find_target))
    second: Classes | Number = field(default_factory=Number, metadata=config.by_kind(find_target))


def plan(text: str, *changes: str) -> Plan:
    return config.parse(tomllib.loads(text), into=Plan, name="plan.toml", changes=changes)


def test_the_kind_of_a_table_chooses_its_type() -> None:
    text = "[target]\nkind = 'number'\nloss = 'l1'\nscale = 2"
    assert plan(text).target == Number(loss="l1", scale=2.0)


def test_without_a_kind_the_default_decides() -> None:
    assert plan("") == Plan(target=Classes(), second=Number())
    found = plan("target.names = ['a', 'b']\nsecond.scale = 3")
    assert found == Plan(target=Classes(names=("a", "b")), second=Number(scale=3.0))


def test_a_change_can_choose_another_kind() -> None:
    found = plan("", "target.kind=number", "target.loss=l1")
    assert found.target == Number(loss="l1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kind = 'numbr'",
            r"^plan.toml: target: There is no target called 'numbr'. "
            r"Did you mean 'number'\? Known: classes, number.$",
        ),
        (
            "kind = 'number'\nlos = 'l1'",
            r"^plan.toml: target \(number\) has no setting called 'los'. "
            r"Did you mean 'loss'\? Known: loss, scale.$",
        ),
        ("name = ['a']", r"target \(classes\) has no setting called 'name'. Did you mean 'names'"),
        (
            "kind = 'number'\nloss = 'l2'",
            r"target \(number\): loss must be 'l1' or 'huber', not 'l2'",
        ),
        ("kind = 'number'\nscale = 0", r"^plan.toml: target \(number\): scale must not be 0.$"),
        ("kind = 3", "^plan.toml: target: kind must be text, not 3.$"),
        ("kind = ''", "no target called ''"),
    ],
)
def test_a_wrong_kind_or_key_names_the_nearest_right_one(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plan(f"[target]\n{text}")


def test_a_kind_needs_a_table() -> None:
    with pytest.raises(RecipeError, match="target must be a table of settings, not 'number'"):
        plan("target = 'number'")


def test_a_field_without_default_needs_a_kind() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Strict:
        target: Classes | Number = field(metadata=config.by_kind(find_target))

    with pytest.raises(RecipeError, match="recipe: target has no 'kind', which is required"):
        config.parse({"target": {}}, into=Strict)


@pytest.mark.parametrize("target", [Classes(names=("a",)), Number(scale=0.5), Number()])
def test_a_kind_survives_a_round_trip_and_is_written_first(target: Classes | Number) -> None:
    before = Plan(target=target)
    text = config.dump(before)
    assert f'[target]\nkind = "{target.kind}"\n' in text
    assert plan(text) == before
    assert config.digest(plan(text)) == config.digest(before)


def test_kinds_with_equal_settings_have_other_digests() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Labels(Classes):
        kind: ClassVar[str] = "labels"

    one, other = Plan(), Plan(target=Labels())
    assert config.digest(one) != config.digest(other)
    assert config.differences(one, other) == ["target.kind: classes -> labels"]


def test_differences_list_the_settings_of_both_kinds() -> None:
    assert config.differences(Plan(), Plan(target=Number())) == [
        "target.kind: classes -> number",
        "target.loss: not set -> huber",
        "target.names: [] -> not set",
    ]


def test_a_key_with_thousands_of_parts_is_refused_at_once(tmp_path: Path) -> None:
    key = ".".join(["a"] * 2000)
    for text in (".".join(["a"] * 50_000) + " = 1", f"{key}.b = 1\n{key}.c = 1\n[{key}]"):
        with pytest.raises(RecipeError, match="too many dots"):
            read(text, tmp_path)  # tomllib takes minutes, or as long for many such lines


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    assert suggest("age", []) == ""
    assert suggest("age", ["ages"]) == " Did you mean 'ages'? Known: ages."
