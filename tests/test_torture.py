"""The most telling minute of the campaign that `make torture` runs in some 18 minutes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = (
    "kill points",
    "damaged files",
    "bombs",
    "crafted pickles",
    "hostile requests",
    "hostile downloads",
    "full disks",
)


@pytest.mark.slow
def test_nothing_is_lost_run_or_guessed_in_a_minute_of_torture() -> None:
    command = [sys.executable, str(Path(__file__).parent / "torture"), "--quick", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in PARTS:  # each was tried, and nothing failed
        found = re.search(rf"^{part} +([\d,]+) +0 ", done.stdout, re.MULTILINE)
        assert found, done.stdout
        assert int(found[1].replace(",", "")) > 0


CONTROLS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import children
from children import BrokenPromiseError, Case, run_cases
from pathlib import Path

children.MOST_MEMORY = 2**26

def broken(_):
    raise BrokenPromiseError("something is lost")

cases = {
    "sound": lambda _: None,
    "traceback": lambda _: {}["x"],
    "broken": broken,
    "abort": lambda _: os.abort(),
    "hang": lambda _: time.sleep(60),
    "spin": lambda _: any(iter(int, 1)),
    "memory": lambda _: len(b"x" * (2**26 + 2**24)),
    "sound again": lambda _: None,
}
cases = [Case(name, run, 0.2) for name, run in cases.items()]
for result in run_cases(cases, Path(sys.argv[2]), jobs=1):
    print(result.case.name, "|", " ".join(result.failure.split()))
"""


def test_the_campaign_finds_tracebacks_crashes_hangs_and_memory(tmp_path: Path) -> None:
    folder = Path(__file__).parent / "torture"
    command = [sys.executable, "-c", CONTROLS, str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = dict(line.split(" | ") for line in done.stdout.replace(" |\n", " | \n").splitlines())
    assert found["sound"] == found["sound again"] == ""
    expected = {"traceback": "KeyError: 'x'", "broken": "something is lost", "abort": "SIGABRT"}
    expected |= {"hang": "hangs", "spin": "hangs", "memory": "GB of memory"}
    for name, text in expected.items():
        assert text in found[name]
