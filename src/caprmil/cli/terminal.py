"""The terminal: text that its encoding cannot show is written in other characters."""

import codecs
import sys
from io import TextIOWrapper

PLAIN = {"±": "+/-", "×": "x", "–": "-", "—": "-", "…": "...", "·": "-", "µ": "u", "→": "->"}


def accept_any_text() -> None:
    """Let standard output and error show any text, in ASCII too: no command fails by printing."""
    codecs.register_error("caprmil-plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="caprmil-plain")


def _plain(problem: UnicodeError) -> tuple[str, int]:
    assert isinstance(problem, UnicodeEncodeError)
    text = problem.object[problem.start : problem.end]
    return "".join(PLAIN.get(c, ascii(c)[1:-1]) for c in text), problem.end
