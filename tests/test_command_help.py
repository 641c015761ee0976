"""The help of the command line: its order, its width, its colours and its speed."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from caprmil import cli
from caprmil.cli.command_help import GROUPS

WORK = ("patch", "encode", "train", "evaluate", "compare", "explain", "report", "predict", "export")


def printed(*words: str, columns: int = 80, color: bool = False) -> str:
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": str(columns)}, color=color)
    assert result.exit_code == 0
    return result.output


def commands() -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    return dict(group.commands)  # type: ignore[arg-type]


def test_commands_are_listed_in_the_order_of_the_work() -> None:
    lines = [line.split() for line in printed("--help").splitlines() if line.startswith("  ")]
    listed = [words[0] for words in lines if words[0] in commands()]
    assert sorted(listed) == sorted(commands())
    assert [name for name in listed if name in WORK] == list(WORK)
    assert listed == [name for names in GROUPS.values() for name in names]


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_no_summary_is_cut(columns: int) -> None:
    text = " ".join(printed("--help", columns=columns).split())
    for name, command in commands().items():
        assert f"{name} {str(command.help).splitlines()[0]}" in text


def test_every_command_has_two_examples_of_itself() -> None:
    for name in commands():
        examples = printed(name, "-h").split("Examples:\n")[1].split("\n\n")[0].splitlines()
        assert len(examples) >= 2, name
        assert all(line.split()[:2] == ["caprmil", name] for line in examples), name


def test_the_short_option_prints_the_same_help() -> None:
    assert printed("-h") == printed("--help")
    assert printed("train", "-h") == printed("train", "--help")


def test_a_terminal_gets_colours_and_a_pipe_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in printed("train", "-h")
    assert "\x1b[" in printed("train", "-h", color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in printed("train", "-h", color=True)


def test_a_shell_completes_commands_and_options() -> None:
    def completed(words: str, at: int) -> list[str]:
        asked = {"_CAPRMIL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        return CliRunner().invoke(cli.app, [], prog_name="caprmil", env=asked).output.split()

    assert completed("caprmil rep", 1) == ["reproduce", "report"]
    assert completed("caprmil train --fea", 2) == ["--features"]


def test_help_and_version_load_no_torch_and_take_less_than_300_ms() -> None:
    """Processor time: other processes on the machine do not count."""
    code = """
import contextlib, io, sys, time
from caprmil.cli import run
for words in [["--version"], ["-h"], *([name, "--help"] for name in sys.argv[1:])]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run(words)
    if words == ["-h"]:
        print(time.process_time())
print({"torch", "lightning", "pandas", "pydantic"} & set(sys.modules))
"""
    command = [sys.executable, "-c", code, *commands()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.splitlines()
    assert loaded == "set()"
    assert float(seconds) < 0.3
