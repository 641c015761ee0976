"""The campaign: kills, damaged files, bombs, pickles, hostile requests and hubs, full disks.

    python tests/torture                    all of it, some 18 minutes on two quiet cores
    python tests/torture --quick            the most telling minute
    python tests/torture --part kills       one part
    python tests/torture --repeat NAME      one case, with its whole traceback; its files are kept

It prints a table of what was tried and what failed, lists the failures with the command that
repeats each, and exits with 1 if there are any.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import bombs
import children
import damaged_files
import full_disk
import hostile_hub
import hostile_requests
import kills
import pickles
from children import Case, Result, run_cases
from corpus import Corpus, make_corpus, warm_up
from long_commands import COMMANDS

PARTS = {
    "kills": kills,
    "files": damaged_files,
    "bombs": bombs,
    "pickles": pickles,
    "requests": hostile_requests,
    "hub": hostile_hub,
    "disk": full_disk,
}
TITLES = {
    "kills": "kill points",
    "files": "damaged files",
    "bombs": "bombs",
    "pickles": "crafted pickles",
    "requests": "hostile requests",
    "hub": "hostile downloads",
    "disk": "full disks",
}
MINUTES = 18.0  # of all of it on two quiet cores, from the processor time of some cases
QUICK = 0.01  # of the whole campaign
QUICK_COMMANDS = {"kills": ("encode", "convert-clam", "train"), "disk": ("encode", "convert-clam")}
SHOWN = 3  # failures of the same kind


def main(words: Sequence[str] | None = None) -> int:
    options = _parse(words)
    begin = time.monotonic()
    warm_up()
    if options.folder:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=options.folder))
    try:
        corpus = make_corpus(folder / "corpus", kinds=not options.quick)
        _say(f"The corpus is made ({time.monotonic() - begin:.0f} s).")
        if options.repeat:
            return _repeat(corpus, folder, options.repeat)
        return _campaign(corpus, folder, options)
    finally:
        full_disk.unmount_all(folder)
        if not options.repeat:
            shutil.rmtree(folder, ignore_errors=True)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="how long, roughly; default: 18")
    parser.add_argument("--cases", type=int, help="damaged files; the other parts in proportion")
    parser.add_argument("--quick", action="store_true", help="the most telling minute")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--repeat", metavar="NAME", help="one case by its name")
    parser.add_argument("--folder", help="where the files go; default: the temporary folder")
    return parser.parse_args(words)


def _campaign(corpus: Corpus, folder: Path, options: argparse.Namespace) -> int:
    scale = 1.0
    if options.quick:
        scale = QUICK
    elif options.cases:
        scale = options.cases / damaged_files.FILES
    elif options.minutes:
        scale = options.minutes / MINUTES
    table, any_failed = Table(), False
    for part in options.part or PARTS:
        begin = time.monotonic()
        cases, failures = list(_cases(part, corpus, folder / part, scale)), []
        for result in run_cases(cases, folder / part, jobs=options.jobs):
            table.add(result)
            failures += [result] if result.failure else []
        tried, failed, _ = table.rows[part, ""]
        minutes = (time.monotonic() - begin) / 60
        _say(f"{TITLES[part]}: {tried:,} tried, {failed} failed ({minutes:.1f} min)")
        _show_failures(failures)
        any_failed |= bool(failures)
    table.show()
    return int(any_failed)


class Table:
    """What was tried and what failed, in all parts and in the kinds of each."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[float]] = {}

    def add(self, result: Result) -> None:
        part, kind = result.case.name.split("/")[:2]
        for name in ("",) if part == "pickles" else ("", kind):  # its kinds are many
            row = self.rows.setdefault((part, name), [0, 0, 0.0])
            for at, number in enumerate(
                (result.case.attempts, bool(result.failure), result.seconds)
            ):
                row[at] += number

    def show(self) -> None:
        _say(f"\n{'':20}{'tried':>8}{'failed':>8}{'CPU s':>8}")
        for (part, kind), (tried, failed, seconds) in self.rows.items():
            name = f"  {kind}" if kind else TITLES[part]
            _say(f"{name:20}{tried:8,}{failed:8,}{seconds:8.0f}")


def _cases(part: str, corpus: Corpus, folder: Path, scale: float) -> Iterator[Case]:
    folder.mkdir(parents=True, exist_ok=True)
    if part in QUICK_COMMANDS and scale <= QUICK:
        yield from PARTS[part].cases(corpus, folder, scale, QUICK_COMMANDS[part])
    else:
        yield from PARTS[part].cases(corpus, folder, scale)


def _repeat(corpus: Corpus, folder: Path, name: str) -> int:
    """Repeat one case, and show everything of its failure."""
    part, what, *where = name.split("/")
    if part == "kills":  # the points differ with the length of the campaign
        command = next(each for each in COMMANDS if each.name == what)
        found = [kills.kill_point(corpus, kills.measure(command, corpus), where[0])]
    else:
        only = ((what,),) if part == "disk" else ()
        (folder / part).mkdir()
        found = [c for c in PARTS[part].cases(corpus, folder / part, 1.0, *only) if c.name == name]
    if not found:
        _say(f"There is no case {name}.")
        return 2
    children.KEEP = True
    result = next(run_cases(found[:1], folder / "case", jobs=1, repeat=False))
    _say(result.failure or "It does not fail.")
    _say(f"Its files are in {folder / 'case'}, the corpus in {folder / 'corpus'}.")
    return int(bool(result.failure))


def _show_failures(failures: Sequence[Result]) -> None:
    """Print the failures, a few of each kind."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for failure in failures:
        groups[_signature(failure)].append(failure)
    for group in groups.values():
        for result in group[:SHOWN]:
            _say(f"\nFAILED {result.case.name}")
            _say("    " + result.failure.strip().replace("\n", "\n    "))
            if result.before:
                _say(f"    Only after others in one process: {', '.join(result.before[-3:])}")
            _say(f"    python tests/torture --repeat '{result.case.name}'")
        if len(group) > SHOWN:
            names = ", ".join(result.case.name for result in group[SHOWN : SHOWN + 5])
            _say(f"\n... and {len(group) - SHOWN} more of this kind: {names}")


def _signature(result: Result) -> str:
    """Return the part and the kind of a failure, without what differs from case to case."""
    lines = result.failure.strip().splitlines() or [""]
    text = f"{lines[0]} {lines[-1]}" if lines[0] == "a traceback" else lines[0]
    kind = "/".join(result.case.name.split("/")[:2])
    return kind + re.sub(r"'[^']*'|\"[^\"]*\"|[\d.]+|/\S+", "#", text)[:120]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
