"""Progress in a log file: one line per tenth of the work, and no control characters."""

import pytest

from caprmil.io.progress import bar


def test_a_log_file_gets_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("Training") as step:
        for done in range(1, 101):
            step(done, 100, "fold-0")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "Training: 10 of 100 fold-0"


def test_a_bar_that_is_not_shown_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("Training", shown=False) as step:
        step(1, 1)
    assert capsys.readouterr().err == ""
