"""What the benchmark of feeding promises: every side in one run, headed by its command."""

import pytest

import feeding


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("feeding") / "feeding.md"
    feeding.main(["--quick", "--out", str(out)])
    return out.read_text()


def rows(page: str, begin: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith(f"| {begin}")]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]


def test_the_tables_are_headed_by_the_command_that_made_them(page: str) -> None:
    assert "```bash\npython benchmarks/feeding.py --quick\n```\n" in page


def test_waiting_is_a_part_of_the_epoch(page: str) -> None:
    found = [*rows(page, "page cache"), *rows(page, "disk")]
    assert len(found) == 4
    assert all(0 <= float(row[2]) <= float(row[1]) for row in found)


def test_packed_and_padded_bags_stand_beside_one_a_step(page: str) -> None:
    (one,), (padded,) = rows(page, "one bag"), rows(page, "3 padded")
    assert (one[1], one[3], one[5], padded[1]) == ("6", "1.00", "1.00", "2")
    assert [row[1] for row in (*rows(page, "2 packed"), *rows(page, "3 packed"))] == ["3", "2"]
