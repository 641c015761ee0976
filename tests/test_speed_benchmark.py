"""The benchmark of speed: its page, its stored results and its targets."""

import json
from pathlib import Path

import pytest

import speed
import speed_targets
import speed_variants

pytestmark = pytest.mark.slow

ONLY = ["--only", "caprmil", "memory", "disk", "abmil", "packed", "profile"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speed") / "performance.md"
    speed.main(["--quick", "--cpu-only", *ONLY, "--page", "--out", str(out)])
    return out


def test_the_page_has_every_variant_and_every_target(page: Path) -> None:
    text = page.read_text()
    named = [getattr(speed_variants, name) for name in ("LIMIT", "PLAIN", "STREAMED", "STREAM")]
    for variant in (*named, "caprmil", "abmil"):
        assert f"| {variant} |" in text
    for part in ("products", "GELU", "LayerNorm", "dropout"):
        assert f"| {part} |" in text
    assert text.count("not measured") >= 1  # the targets have other sizes
    assert str(page.parent) not in text
    for name in ("performance-time.png", "performance-memory.png"):
        assert f"({name})" in text
        assert (page.parent / name).stat().st_size > 1000


def test_stored_results_are_not_measured_again(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(job: speed.Job, settings: speed.Settings) -> None:
        raise AssertionError(job)

    monkeypatch.setattr(speed, "measure", measure)
    speed.main(["--quick", "--cpu-only", *ONLY, "--out", str(page)])
    speed.main(["--quick", "--cpu-only", "--only", "page", "--out", str(page)])


def test_a_part_is_stored_and_does_not_replace_the_page(page: Path, tmp_path: Path) -> None:
    out = tmp_path / page.name
    out.write_text(page.read_text())
    arguments = ["--quick", "--cpu-only", "--sizes", "100", "--only", "caprmil", "--out", str(out)]
    speed.main(arguments)
    assert out.read_text() == page.read_text()
    speed.main([*arguments, "--page"])
    assert out.with_suffix(".jsonl").read_text().count("\n") == 2  # inference and training
    assert "| limit |" in out.read_text()
    assert "| abmil |" not in out.read_text()


def test_small_bags_are_measured_packed_and_one_by_one(page: Path) -> None:
    rows = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["group"] == "packed"]
    packed, one_by_one = speed_variants.PACKED, speed_variants.ONE_BY_ONE
    assert set(row["figures"]) == {speed_variants.LIMIT, packed, one_by_one}
    measured = [line for line in page.read_text().splitlines() if "slides per second" in line]
    assert len(measured) == 1
    assert "(8,000)" in measured[0]
    assert f"| {packed} |" not in page.read_text()  # its size is not that of the tables


def test_every_variant_trains_with_the_optimiser_of_training() -> None:
    for name in (speed_variants.PLAIN, "caprmil", speed_variants.PACKED):
        optimizer = speed_variants.VARIANTS[name](8).optimizer
        assert all(group["fused"] for group in optimizer.param_groups)


def test_every_row_has_the_digest_of_its_code(page: Path) -> None:
    rows = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    assert {row["code"] for row in rows} == {speed.code_digest()}
    row = next(row for row in rows if (row["group"], row["work"]) == ("caprmil", "infer"))
    assert {"cpu", "wall", "peak", "rounds"} <= set(row["figures"]["caprmil"])


def test_every_group_has_known_variants_and_every_variant_is_in_a_group() -> None:
    grouped = {name for group in speed_variants.GROUPS.values() for name in group.variants}
    assert grouped == set(speed_variants.VARIANTS)


def ratio(middle: float, spread: float = 0.0) -> speed_targets.Ratio:
    return speed_targets.Ratio(middle, middle - spread, middle + spread)


def test_a_target_has_a_lower_or_an_upper_bound() -> None:
    figures = {"10,000": ratio(1.9), "50,000": ratio(1.7), "200,000": None}
    assert speed_targets.Target("", 1.8, True, figures).row()[1:] == [
        "1.90 (10,000), 1.70 (50,000)", "met, **not met**",
    ]  # fmt: skip
    assert speed_targets.Target("", 1.8, False, {"": ratio(1.7)}).row()[-1] == "met"
    assert speed_targets.Target("", 1.8, True, {"": ratio(1.7)}).row()[-1] == "**not met**"
    assert speed_targets.Target("", 1.8, True, {"": None}).row()[1:] == ["not measured", "-"]


def test_a_bound_between_the_quartiles_is_within_the_noise() -> None:
    row = speed_targets.Target("", 1.8, True, {"": ratio(1.9, 0.2)}).row()
    assert row[1:] == ["1.90 [1.70 to 2.10] ()", "within the noise"]


def test_times_are_compared_round_by_round() -> None:
    measured = {"a": {"cpu": 2.0, "peak": 6.0}, "b": {"cpu": 1.0, "peak": 3.0}}
    rounds = {"a": [2.0, 20.0, 4.0], "b": [1.0, 10.0, 1.0]}
    found = speed_targets.Figures([speed.Result("g", 5, "infer", "", "", measured, rounds, 0.0)])
    assert found.ratio("cpu", "a", "b", 5, "infer", "g") == (2.0, 2.0, 3.0)
    assert found.ratio("peak", "a", "b", 5, "infer", "g") == (2.0, 2.0, 2.0)
    assert found.ratio("cpu", "a", "c", 5, "infer", "g") is None


def test_an_operation_belongs_to_the_part_of_its_parents() -> None:
    assert speed.part_of(["aten::linear", "aten::addmm", "aten::copy_"]) == "products"
    assert speed.part_of(["_DropBackward", "aten::mul"]) == "dropout"
    assert speed.part_of(["aten::gelu"]) == "GELU"
    assert speed.part_of(["aten::ge"]) == "dropout"
    assert speed.part_of(["aten::add"]) == "adding and multiplying"
    assert speed.part_of(["unknown"]) == "rest"
