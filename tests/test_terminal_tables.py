"""Scores on a terminal: tables that fit it; and one estimate of the time left."""

import re
import sys
from io import StringIO

import pytest
from rich.console import Console

from caprmil.cli.markdown_text import draw_markdown, show_markdown
from caprmil.cli.slide_commands import encoders
from caprmil.encoders import CARDS
from caprmil.io.progress import Pace, bar
from caprmil.io.tables import markdown_table

HEADER = ("metric", "mean over folds", "std over folds", "folds counted", "pooled", "95 % interval")
ROWS = [
    (name, f"0.{n}50", f"0.0{n}9", "5", f"0.{n}25", f"0.{n}91 to 0.{n}99")
    for n, name in enumerate(["auc", "accuracy", "balanced_accuracy", "ece", ""], 1)
]
TEXT = "# Scores\n\n24 slides.\n\n" + markdown_table(HEADER, ROWS, ["A note. " * 30])


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def drawn(width: int) -> str:
    console = Console(width=width, file=StringIO(), markup=False)
    draw_markdown(TEXT, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [64, 80, 120])
def test_a_table_fits_the_terminal_with_all_its_numbers(width: int) -> None:
    text = drawn(width)
    assert max(map(len, text.splitlines())) <= width
    assert "|" not in text
    for row in ROWS:
        assert row[0] in text
        for number in re.findall(r"\d\.\d+", " ".join(row)):
            assert number in text


def test_what_is_the_same_in_every_row_of_a_wide_table_is_above_it() -> None:
    assert "In every row: folds counted: 5." in drawn(80)
    assert "In every row" not in drawn(200)
    assert drawn(200).count("folds counted") == 1


def test_a_pipe_gets_the_markdown_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_markdown(TEXT)
    assert capsys.readouterr().out == TEXT + "\n"
    monkeypatch.setattr(sys, "stdout", Terminal())
    show_markdown(TEXT)
    assert "0.350" in sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "| --- |" not in sys.stdout.getvalue()  # type: ignore[attr-defined]


def test_what_is_no_table_is_printed_as_it_is() -> None:
    console = Console(width=80, file=StringIO(), markup=False)
    draw_markdown("| a [b] | c |\n| --- |\n", console)
    assert "| a [b] | c |" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("eta", "times"), [(False, 0), (True, 1)])
def test_a_terminal_shows_one_time_left(
    eta: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    with bar("Encoding", eta=eta) as step:
        Pace(step, total=4).tick("s", patches=9)
    last = sys.stderr.getvalue().split("Encoding")[-1]  # type: ignore[attr-defined]
    assert "patches/s" in last
    assert last.count(" left") == 1
    assert len(re.findall(r"\d:\d\d:\d\d|-:--:--", last)) == times


def test_no_licence_or_source_of_an_encoder_is_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", output := Terminal())
    encoders()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    cells: list[list[str]] = []
    for row in rows:
        if row[0].strip():
            cells.append([""] * len(row))
        cells[-1] = [a + b.replace(" ", "") for a, b in zip(cells[-1], row, strict=True)]
    assert [row[0] for row in cells] == list(CARDS)
    for row, card in zip(cells, CARDS.values(), strict=True):
        gate = ",gated" if card.gated else ""
        assert row[-2] == card.licence.replace(" ", "") + gate
        assert row[-1] == (card.hub or "in the package").replace(" ", "")
