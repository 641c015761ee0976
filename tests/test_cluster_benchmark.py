"""The benchmark of Ray runs, and compares times within a round."""

from pathlib import Path
from typing import Self

import pytest

import cluster
from caprmil.executors import LocalExecutor
from cluster import Sizes, ratio, section


def test_times_are_compared_within_a_round() -> None:
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0], ".1f") == "2.0 [1.0 to 3.0]"


def test_the_table_has_a_row_per_workload() -> None:
    sides = {"plain": [10.0, 12.0, 11.0], "one": [11.0, 13.2, 12.1], "two": [5.5, 6.6, 6.05]}
    text = section(Sizes(), {"slides": sides, "folds": sides}, 5.0, 2.0)
    assert (
        text.count("| 11.0 s | 12.1 s | 6.0 s | 1.10 [1.10 to 1.10] | 2.00 [2.00 to 2.00] |") == 2
    )


class InThisProcess(LocalExecutor):
    """In place of Ray, whose workers take a minute to start."""

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_the_benchmark_runs_and_writes_its_table_to_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(cluster, "RayExecutor", InThisProcess)
    monkeypatch.setattr("sys.argv", ["cluster.py", "--quick", "--page", str(page)])
    cluster.main()
    assert "| 2 slides encoded |" in page.read_text()
    assert "| 2 folds trained |" in page.read_text()
