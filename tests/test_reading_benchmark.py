"""What the benchmark of reading promises: it says how it was run, and compares like with like."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reading() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reading", ROOT / "benchmarks" / "reading.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reading"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


@pytest.fixture(scope="module")
def page(reading: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("reading") / "reading.md"
    reading.main(["--quick", "--out", str(out)])
    return out.read_text()


def test_the_tables_are_headed_by_the_command_that_made_them(page: str) -> None:
    assert page.startswith("```bash\npython benchmarks/reading.py --quick\n```\n")
    assert "slide.tif" not in page  # nor any other place of this machine


def test_both_sides_read_the_same_pixels(page: str, reading: ModuleType) -> None:
    for case in reading.CASES:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {case.title} |")]
        largest, mean = map(float, cells(line)[-2:])
        # Resampled from level 1, the two sides may begin half a pixel apart.
        most, usual = (50, 2) if "(level 1)" in line else (0, 0)
        assert largest <= most
        assert mean <= usual


def test_memory_and_store_are_measured(page: str) -> None:
    peaks = [cells(line) for line in page.splitlines() if line.startswith(("| 10 |", "| 100 |"))]
    assert [row[0] for row in peaks] == ["10", "100"]
    assert all(20 < float(row[1]) <= float(row[2]) < 2000 for row in peaks)
    assert sum("a chunk a row" in line for line in page.splitlines()) == 2


def test_a_square_of_the_grid_follows_the_other_row_by_row(reading: ModuleType) -> None:
    assert list(reading.grid((1000, 700), 300, 5)) == [
        (0, 0, 300), (300, 0, 300), (600, 0, 300), (0, 300, 300), (300, 300, 300),
    ]  # fmt: skip
    assert len(list(reading.grid((1000, 700), 300, 100))) == 6
