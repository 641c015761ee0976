"""The benchmark of data loading runs on tiny input and prints its tables."""

import pytest

import feeding

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("feeding") / "feeding.md"
    feeding.main(["--quick", "--out", str(out)])
    return out.read_text()


def rows(page: str, begin: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith(f"| {begin}")]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]


def test_the_page_starts_with_its_command(page: str) -> None:
    assert "```bash\npython benchmarks/feeding.py --quick\n```\n" in page


def test_the_waiting_time_is_part_of_the_epoch(page: str) -> None:
    found = [*rows(page, "page cache"), *rows(page, "disk")]
    assert len(found) == 4
    assert all(0 <= float(row[2]) <= float(row[1]) for row in found)


def test_packed_and_padded_bags_are_compared_with_single_bags(page: str) -> None:
    (one,), (padded,) = rows(page, "one bag"), rows(page, "3 padded")
    assert (one[1], one[3], one[5], padded[1]) == ("6", "1.00", "1.00", "2")
    assert [row[1] for row in (*rows(page, "2 packed"), *rows(page, "3 packed"))] == ["3", "2"]
