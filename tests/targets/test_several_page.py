"""The tour of docs/several.md: its Python, its recipes and its commands, in order."""

import re
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.runs.run import Run
from quick_scoring import quick_scoring

PAGE = Path(__file__).parents[2] / "docs" / "several.md"


@pytest.mark.slow
def test_the_tour_of_several_targets_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    output = ""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for language, text in blocks:
        if language == "python":
            exec(compile(text, PAGE.name, "exec"), names)
        elif language == "toml":
            Path(text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "console":
            for line in text.splitlines():
                with quick_scoring():
                    result = CliRunner().invoke(app, line.split()[1:])
                assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"
                output = result.output
    assert (tmp_path / "report" / "index.html").exists()
    shared = Run("runs/shared").predictions.part("grade").labelled()
    alone = Run("runs/alone").predictions
    assert sorted(shared.slides) == sorted(alone.slides)
    # What the page says of its comparison is what the command prints.
    for table in (shared, alone):
        assert f"{table.scores()['auc']:.3f}" in output
    assert pd.read_csv("planted/graded.csv")["grade"].notna().all()
