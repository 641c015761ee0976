"""The notebooks of the site run from the first cell to the last, in an empty folder."""

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from caprmil import cli
from quick_scoring import quick_scoring

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [{**cell, "source": "".join(cell["source"])} for cell in code]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    # That of slides shows figures, which quick_scoring does not draw.
    with nullcontext() if path.stem == "slide-to-report" else quick_scoring():
        for cell in cells(path):
            if cell["source"].startswith("%%sh\n"):
                for line in cell["source"].splitlines()[1:]:
                    run_line(line)
            else:
                exec(compile(cell["source"], path.name, "exec"), names)


def run_line(line: str) -> None:
    """Run a line of a shell: a command of caprmil in this process, without the pipe behind it."""
    if not line.startswith("caprmil "):
        subprocess.run(line, shell=True, check=True, capture_output=True)
        return
    result = CliRunner().invoke(cli.app, line.partition(" | ")[0].split()[1:])
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_from_top_to_bottom_and_is_small(path: Path) -> None:
    assert [cell["execution_count"] for cell in cells(path)] == list(range(1, len(cells(path)) + 1))
    errors = [
        out for cell in cells(path) for out in cell["outputs"] if out["output_type"] == "error"
    ]
    assert errors == []
    assert path.stat().st_size < 250_000


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "comparing-models",
        "features-to-model",
        "slide-to-report",
    ]
