"""Progress in a log file: a line for every tenth of the work, and no control characters."""

import pytest

from caprmil.io.progress import bar


def test_a_log_file_gets_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("Training") as step:
        for done in range(1, 101):
            step(done, 100, "fold-0")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "Training: 10 of 100 fold-0"


def test_nothing_is_said_when_nothing_shall_be(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("Training", shown=False) as step:
        step(1, 1)
    assert capsys.readouterr().err == ""
