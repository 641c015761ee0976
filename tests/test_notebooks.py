"""The notebooks of the site run from the first cell to the last, in an empty folder."""

import ast
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from caprmil import cli
from caprmil.cohort.cohort import Cohort
from caprmil.evaluation.predictions import Predictions
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide
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
    names: dict[str, Any] = {}
    # That of slides shows figures, which quick_scoring does not draw.
    with nullcontext() if path.stem == "slide-to-report" else quick_scoring():
        for cell in cells(path):
            if cell["source"].startswith("%%sh\n"):
                for line in cell["source"].splitlines()[1:]:
                    run_line(line)
            else:
                shown = kinds(last_value(cell["source"], path.name, names))
                assert stored_kinds(cell) == shown, f"make notebooks\n{cell['source']}"


def last_value(source: str, name: str, names: dict[str, Any]) -> object:
    """Execute a cell, and return what its last line is, as a notebook shows it."""
    lines = ast.parse(source, name).body
    last = lines.pop() if lines and isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), name, "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), names)


def kinds(value: object) -> set[str]:
    """Return the kinds of output that a notebook stores of a value."""
    methods = {"_repr_html_": "text/html", "_repr_png_": "image/png", "savefig": "image/png"}
    found = {kind for method, kind in methods.items() if hasattr(type(value), method)}
    return set() if value is None else {"text/plain", *found}


def stored_kinds(cell: dict[str, Any]) -> set[str]:
    """Return the kinds of output that the last line of a cell was stored with."""
    results = [out["data"] for out in cell["outputs"] if out["output_type"] == "execute_result"]
    return {kind for data in results for kind in data}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_in_a_notebook_are_stored_as_they_show_themselves_now(path: Path) -> None:
    """A stale output is found without running the notebook: those of objects of ours are known."""
    ours = [cls for cls in (Run, Cohort, Predictions, Slide) if hasattr(cls, "_repr_html_")]
    assert ours
    for cell in cells(path):
        for output in cell["outputs"]:
            data = output.get("data", {})
            plain = "".join(data.get("text/plain", ""))
            if any(plain.startswith(f"{cls.__name__}(") for cls in ours):
                assert "text/html" in data, f"make notebooks\n{cell['source']}"
            text = "".join(output.get("text", ""))
            assert "predicted by Run(" not in text
            assert "\x1b[" not in text  # a colour of the terminal


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
