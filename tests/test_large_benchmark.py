"""The benchmark of large bags: its bags, its measurements and its table."""

from pathlib import Path

import numpy as np
import pytest

import large
from caprmil.features import bags


def test_a_bag_has_its_size_and_its_chunks_differ(tmp_path: Path) -> None:
    large.write(tmp_path / "a.h5", large.ROWS + 10)
    features = bags.read(tmp_path / "a.h5").features
    assert features.shape == (large.ROWS + 10, large.WIDTH)
    assert not np.array_equal(features[:10], features[large.ROWS :])


@pytest.mark.parametrize("work", large.WORKS)
def test_seconds_and_memory_are_measured(tmp_path: Path, work: str) -> None:
    large.write(tmp_path / "a.h5", 300)
    found = large.measure_here(tmp_path / "a.h5", "caprmil", work)
    assert found["seconds"] > 0
    assert 0.01 < found["before"] < 20


@pytest.mark.slow
def test_the_page_has_the_command_and_a_row_per_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "MODELS", ("caprmil",))  # each measurement is a process
    large.main(["--quick", "--out", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert "python benchmarks/large.py --quick" in text
    assert text.count("| 2,000 |") == len(large.MODELS) * len(large.WORKS)
