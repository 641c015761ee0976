"""The tours on pages of docs run as printed, from the first block to the last."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caprmil import cli
from quick_scoring import quick_scoring

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "written"),
    [
        ("ordinal.md", ["runs/grades/scores.md", "compared/comparison.md", "explained", "new.csv"]),
        ("survival.md", ["runs/survival/scores.md", "new.csv", "explained", "report/index.html"]),
        ("external.md", ["validation/index.html", "validation/shift.csv"]),
        ("sources.md", ["runs/sources/scores.md", "explained/sources.csv", "new.csv"]),
        (
            "regression.md",
            [
                *("runs/interval/scores.md", "compared/comparison.md", "explained", "slide.html"),
                *("report/index.html", "predicted.csv", "validation/index.html"),
            ],
        ),
        ("guarantees.md", ["runs/grades/guarantees.json", "sets.csv", "intervals.csv"]),
    ],
)
def test_the_tour_of_a_page_runs(
    page: str, written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with quick_scoring():
        for language, block in BLOCK.findall((DOCS / page).read_text()):
            if language == "python":
                exec(compile(block, page, "exec"), names)
                continue
            for line in block.splitlines():
                result = CliRunner().invoke(cli.app, line.split()[1:])
                assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"
    assert [name for name in written if not Path(name).exists()] == []
