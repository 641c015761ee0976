"""The hard benchmark of bags: a page and a figure, and a run that can be resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

import bags
from caprmil.models import list_models


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = bags.Recipe(train_bags=8, test_bags=8, epochs=2)
    monkeypatch.setattr(bags, "Recipe", lambda: recipe)
    monkeypatch.setattr(bags, "SIZES", {20: ("rare", "proportion"), 40: ("rare",)})


def run(folder: Path, **changes: Any) -> str:
    options = {"models": "mean", "sizes": "20,40", "seeds": 2, "processes": 1}
    arguments = ["--out", str(folder / "page.md")]
    for name, value in (options | changes).items():
        arguments += [f"--{name}", str(value)]
    bags.main(arguments)
    return (folder / "page.md").read_text()


def test_the_page_has_tables_the_command_the_recipe_and_a_figure(tmp_path: Path) -> None:
    page = run(tmp_path)
    assert "python benchmarks/bags.py --models mean --seeds 2\n" in page
    assert "train_bags = 8\n" in page
    assert "![AUC of every model on every task](page.png)" in page
    assert "mean over 2 seeds" in page
    assert "one seed" in page
    assert "| (oracle) |" in page
    assert (tmp_path / "page.png").stat().st_size > 5000


def test_a_run_that_was_stopped_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path)
    record = tmp_path / "page.jsonl"
    lines = record.read_text().splitlines()
    assert len(lines) == 10  # two seeds of two tasks, one of the larger bags; mean and oracle
    record.write_text("\n".join(lines[:4]) + "\n")
    assert run(tmp_path).split("### ")[1:] == first.split("### ")[1:]
    assert "4 of 10 are already in" in capsys.readouterr().out


def test_results_have_the_digest_of_their_settings(tmp_path: Path) -> None:
    run(tmp_path, sizes="40")
    kept = json.loads((tmp_path / "page.jsonl").read_text().splitlines()[0])["settings"]
    assert kept == bags.fingerprint(bags.Recipe())
    assert kept != bags.fingerprint(type(bags.Recipe())(epochs=3))


def test_an_unknown_name_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, models="abmill")
    assert "Did you mean 'abmil'" in capsys.readouterr().err


def test_every_model_is_in_the_benchmark() -> None:
    assert set(list_models()) <= set(bags.MODELS)
