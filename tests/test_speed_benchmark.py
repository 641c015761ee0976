"""What the benchmark of speed promises: all sides on one page, and rows that need no second run."""

import json
from pathlib import Path

import pytest

import sides
import speed
import speed_page

ONLY = ["--only", "caprmil", "memory", "disk", "abmil", "profile"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speed") / "performance.md"
    speed.main(["--quick", "--cpu-only", *ONLY, "--out", str(out)])
    return out


def test_the_page_has_every_side_and_every_target(page: Path) -> None:
    text = page.read_text()
    for side in (sides.LIMIT, sides.PLAIN, sides.STREAMED, sides.STREAM, "caprmil", "abmil"):
        assert f"| {side} |" in text
    for part in ("products", "GELU", "LayerNorm", "dropout"):
        assert f"| {part} |" in text
    assert text.count("not measured") >= 1  # the sizes of the targets are not these
    assert str(page.parent) not in text
    for name in ("performance-time.png", "performance-memory.png"):
        assert f"({name})" in text
        assert (page.parent / name).stat().st_size > 1000


def test_what_is_kept_is_not_measured_again(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(job: speed.Job, settings: speed.Settings) -> None:
        raise AssertionError(job)

    monkeypatch.setattr(speed, "measure", measure)
    speed.main(["--quick", "--cpu-only", *ONLY, "--out", str(page)])
    speed.main(["--quick", "--cpu-only", "--only", "page", "--out", str(page)])


def test_every_row_says_what_it_was_measured_with(page: Path) -> None:
    rows = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    assert {row["code"] for row in rows} == {speed.code_digest()}
    looked = next(row for row in rows if (row["group"], row["work"]) == ("caprmil", "look"))
    assert {"cpu", "wall", "peak", "rounds"} <= set(looked["sides"]["caprmil"])


def test_every_group_is_of_known_sides_and_every_side_is_in_a_group() -> None:
    grouped = {side for group in sides.GROUPS.values() for side in group.sides}
    assert grouped == set(sides.SIDES)


def ratio(middle: float, spread: float = 0.0) -> speed_page.Ratio:
    return speed_page.Ratio(middle, middle - spread, middle + spread)


def test_a_target_is_met_on_its_own_side_of_the_bound() -> None:
    figures = {"10,000": ratio(1.9), "50,000": ratio(1.7), "200,000": None}
    assert speed_page.Target("", 1.8, True, figures).row()[1:] == [
        "1.90 (10,000), 1.70 (50,000)", "met, **not met**",
    ]  # fmt: skip
    assert speed_page.Target("", 1.8, False, {"": ratio(1.7)}).row()[-1] == "met"
    assert speed_page.Target("", 1.8, True, {"": ratio(1.7)}).row()[-1] == "**not met**"
    assert speed_page.Target("", 1.8, True, {"": None}).row()[1:] == ["not measured", "-"]


def test_a_bound_within_the_noise_is_neither_met_nor_missed() -> None:
    row = speed_page.Target("", 1.8, True, {"": ratio(1.9, 0.2)}).row()
    assert row[1:] == ["1.90 [1.70 to 2.10] ()", "within the noise"]


def test_times_are_compared_round_by_round() -> None:
    sides_of = {"a": {"cpu": 2.0, "peak": 6.0}, "b": {"cpu": 1.0, "peak": 3.0}}
    turns = {"a": [2.0, 20.0, 4.0], "b": [1.0, 10.0, 1.0]}
    found = speed_page.Figures([speed.Result("g", 5, "look", "", "", sides_of, turns, 0.0)])
    assert found.ratio("cpu", "a", "b", 5, "look", "g") == (2.0, 2.0, 3.0)
    assert found.ratio("peak", "a", "b", 5, "look", "g") == (2.0, 2.0, 2.0)
    assert found.ratio("cpu", "a", "c", 5, "look", "g") is None


def test_an_operation_belongs_to_the_part_around_it() -> None:
    assert speed.part_of(["aten::linear", "aten::addmm", "aten::copy_"]) == "products"
    assert speed.part_of(["_DropBackward", "aten::mul"]) == "dropout"
    assert speed.part_of(["aten::gelu"]) == "GELU"
    assert speed.part_of(["aten::ge"]) == "dropout"
    assert speed.part_of(["aten::add"]) == "adding and multiplying"
    assert speed.part_of(["somebody's own"]) == "rest"
