"""The benchmark on the classic sets: the right data, fair folds, and a page."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import classic
from caprmil.config import digest
from caprmil.errors import BagError, UnknownNameError
from record import Page, Record

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("CAPRMIL_DATA", ROOT.parent / "shared" / "data")) / "classic-mil"


def write_set(folder: Path, *, width: int = 3, bags: int = 20, two_labels: bool = False) -> Path:
    """Write a set of two instances per bag, whose first feature separates the labels."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(bags):
        for instance in range(2):
            label = (number + (instance if two_labels else 0)) % 2
            rows.append([label, number, 4 * label, *rng.normal(size=width - 1)])
    np.savetxt(folder / "tiny.csv.gz", rows, delimiter=",")
    return folder


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(classic.SETS, "tiny", classic.Shape("Tiny", 20, 10, 40, 3))
    monkeypatch.setattr(classic, "Recipe", lambda: RECIPE)


RECIPE = classic.Recipe(epochs=2, lr=1e-2, warmup_epochs=1)


def run(folder: Path, **changes: Any) -> str:
    options = {"sets": "tiny", "models": "mean", "processes": 1, "out": folder / "page.md"}
    arguments = [str(folder)]
    for name, value in (options | changes).items():
        arguments += [f"--{name}", str(value)]
    classic.main(arguments)
    return (folder / "page.md").read_text()


def test_a_set_is_read_bag_by_bag(tmp_path: Path) -> None:
    bags, labels = classic.read(write_set(tmp_path), "tiny")
    assert [bag.shape for bag in bags] == [(2, 3)] * 20
    assert labels.tolist() == [0, 1] * 10


def test_a_copy_with_the_instance_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BagError, match="4 features and should have 3: such copies contain the label"
    ):
        classic.read(write_set(tmp_path, width=4), "tiny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 5}, "5 features and should have 3"),
        ({"bags": 18}, r"18 bags \(9 positive\) of 36"),
        ({"two_labels": True}, "bag 0 has more than one label"),
    ],
)
def test_another_version_of_a_set_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BagError, match=message):
        classic.read(write_set(tmp_path, **changes), "tiny")


def test_missing_and_unknown_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(BagError, match=r"musk1\.csv\.gz"):
        classic.read(tmp_path, "musk1")
    with pytest.raises(UnknownNameError, match="Did you mean 'elephant'"):
        classic.read(tmp_path, "elefant")


def test_only_the_training_part_sets_the_scale() -> None:
    train = [np.array([[0.0, 5.0], [2.0, 5.0]], dtype=np.float32)]
    test = [np.array([[100.0, 6.0]], dtype=np.float32)]
    (scaled,), (unseen,) = classic.standardise(train, test)
    assert scaled.tolist() == [[-1, 0], [1, 0]]
    assert unseen.tolist() == [[99, 1]]  # a constant feature is only shifted


def test_every_bag_is_tested_once_per_repeat_and_repeats_differ() -> None:
    labels = np.array([0, 1] * 20)
    once, again = classic.splits(labels, 0), classic.splits(labels, 1)
    assert sorted(np.concatenate([test for _, test in once])) == list(range(40))
    assert not all(np.array_equal(a[1], b[1]) for a, b in zip(once, again, strict=True))


def test_the_page_has_our_figures_the_command_and_the_recipe(tmp_path: Path) -> None:
    page = run(write_set(tmp_path))
    assert "| **mean**, ours | 1.000 ± 0.000 |" in page
    assert "python benchmarks/classic.py data/classic-mil --sets tiny --models mean\n" in page
    assert "epochs = 2\nlr = 0.01\n" in page
    assert str(tmp_path) not in page


def test_published_figures_are_next_to_ours_with_their_source() -> None:
    accuracy = classic.table([], "accuracy", ["musk1", "ucsb-breast"], ["caprmil"])
    assert "| | MUSK1 | UCSB breast |" in accuracy.replace("|  |", "| |")
    assert "| Attention (Ilse et al. 2018) | .892 | – |" in accuracy
    assert "MILES" in classic.table([], "auc", ["tiger"], [])


def test_a_run_that_was_stopped_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(write_set(tmp_path))
    record = tmp_path / "page.jsonl"
    lines = record.read_text().splitlines()
    record.write_text("\n".join(lines[:2]) + '\n{"set": "ti')  # the third was cut short
    run(tmp_path)
    assert "2 of 5 are already in" in capsys.readouterr().out
    again = [json.loads(line) for line in record.read_text().splitlines()[3:]]
    assert [fold["fold"] for fold in again] == [2, 3, 4]
    assert [fold["train_loss"] for fold in again] == [
        json.loads(x)["train_loss"] for x in lines[2:]
    ]


def test_a_fold_of_another_recipe_does_not_count(tmp_path: Path) -> None:
    run(write_set(tmp_path))
    path = tmp_path / "page.jsonl"
    assert len(Record(path, classic.Result, digest(RECIPE)).kept()) == 5
    assert Record(path, classic.Result, digest(type(RECIPE)(epochs=3))).kept() == []


def test_text_outside_the_markers_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin = "<!-- begin: made by benchmarks/classic.py -->"
    page.write_text(f"# Ours\n\nBefore.\n\n{begin}\nOld table.\n{Page.end}\n\nAfter.\n")
    found = run(write_set(tmp_path))
    assert found.startswith("# Ours\n\nBefore.\n\n")
    assert found.endswith(f"{Page.end}\n\nAfter.\n")
    assert "Old table." not in found


def test_a_page_without_markers_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("Mine.\n")
    with pytest.raises(SystemExit):
        run(write_set(tmp_path))
    assert (tmp_path / "page.md").read_text() == "Mine.\n"


@pytest.mark.skipif(not DATA.is_dir(), reason="the classic sets are not next to the repository")
@pytest.mark.parametrize("name", ["musk1", "musk2", "elephant", "fox", "tiger", "ucsb-breast"])
def test_the_real_sets_have_their_known_shape(name: str) -> None:
    bags, labels = classic.read(DATA, name)
    shape = classic.SETS[name]
    assert (len(bags), labels.sum()) == (shape.bags, shape.positive)
    assert {bag.shape[1] for bag in bags} == {shape.width}
    assert sum(len(bag) for bag in bags) == shape.instances
    assert all(np.isfinite(bag).all() for bag in bags)
