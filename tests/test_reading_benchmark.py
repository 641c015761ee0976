"""The benchmark of reading runs on tiny input and compares the same pixels."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reading() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reading", ROOT / "benchmarks" / "reading.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reading"] = module  # needed by dataclasses
    spec.loader.exec_module(module)
    return module


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


@pytest.fixture(scope="module")
def page(reading: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("reading") / "reading.md"
    reading.main(["--quick", "--out", str(out)])
    return out.read_text()


def test_the_page_starts_with_its_command(page: str) -> None:
    assert page.startswith("```bash\npython benchmarks/reading.py --quick\n```\n")
    assert "slide.tif" not in page  # no paths of this machine


def test_both_readers_return_the_same_pixels(page: str, reading: ModuleType) -> None:
    for case in reading.CASES:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {case.title} |")]
        largest, mean = map(float, cells(line)[-2:])
        # Resampled from level 1, the two readers may start half a pixel apart.
        max_allowed, mean_allowed = (50, 2) if "(level 1)" in line else (0, 0)
        assert largest <= max_allowed
        assert mean <= mean_allowed


def test_memory_and_storage_are_measured(page: str) -> None:
    peaks = [cells(line) for line in page.splitlines() if line.startswith(("| 10 |", "| 100 |"))]
    assert [row[0] for row in peaks] == ["10", "100"]
    assert all(20 < float(row[1]) <= float(row[2]) < 2000 for row in peaks)
    assert sum("one chunk per row" in line for line in page.splitlines()) == 2


def test_the_squares_of_the_grid_are_in_row_major_order(reading: ModuleType) -> None:
    assert list(reading.grid((1000, 700), 300, 5)) == [
        (0, 0, 300), (300, 0, 300), (600, 0, 300), (0, 300, 300), (300, 300, 300),
    ]  # fmt: skip
    assert len(list(reading.grid((1000, 700), 300, 100))) == 6
