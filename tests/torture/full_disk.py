"""Full disks: every command that writes, with too little space at many moments.

It must end with exit code 2 and one line. What it leaves must be complete: every file is as after a
run that nothing disturbed, or is not there. With space again, the same command must end well.
"""

import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calls import check_error, last_lines
from children import BrokenPromiseError, Case
from corpus import Corpus
from kills import Reference, check_second_run, failed, measure
from long_commands import COMMANDS, contents, differences

SHARES = (0.0, 0.1, 0.3, 0.6, 0.9)  # of the space that a command needs
FILE_SIZES = (0, 700, 3000, 20_000)  # bytes that a file may have
SECONDS = 120.0
TEMPORARY = re.compile(r"(^|/)\.(caprmil-|[0-9a-f]{8}\.)")
WHOLE = (".h5", ".pt", ".safetensors", ".png", ".ts", ".geojson")
"""Files that say nothing about the progress of a command: complete, or not there."""


def cases(
    corpus: Corpus, folder: Path, scale: float, names: tuple[str, ...] = ()
) -> Iterator[Case]:
    """Yield the sizes for every command."""
    mounts = _can_mount(folder)
    for command in COMMANDS:
        if names and command.name not in names:
            continue
        try:
            reference = measure(command, corpus)
        except BrokenPromiseError as failure:
            yield failed(f"disk/{command.name}/undisturbed", failure)
            continue
        for share in _some(SHARES if mounts else (), scale):
            name = f"disk/{command.name}/space-{share:g}"
            run = _on_small_disk(corpus, reference, int(share * reference.size))
            yield Case(name, run, SECONDS, alone=True)
        for size in _some(FILE_SIZES, scale):
            name = f"disk/{command.name}/file-size-{size:g}"
            yield Case(name, _with_small_files(corpus, reference, size), SECONDS, alone=True)


def _some(values: tuple[float, ...], scale: float) -> tuple[float, ...]:
    """Return all values, or one for a short campaign."""
    return values if scale >= 0.3 else values[2:3]


def _on_small_disk(corpus: Corpus, reference: Reference, size: int) -> Callable[[Path], None]:
    """Return the case of a command on a disk with some bytes of free space."""
    command = reference.command

    def run(folder: Path) -> None:
        with _disk(folder / "disk") as disk:
            command.prepare(corpus, disk)
            used = os.statvfs(disk)
            taken = (used.f_blocks - used.f_bfree) * used.f_frsize
            _resize(disk, max(4096, taken + size))
            first = command.run_in_child(corpus, disk, preset=False)
            check_first_run(reference, disk, *first)
            _resize(disk, 2**30)
            check_second_run(reference, corpus, disk)

    return run


def _with_small_files(corpus: Corpus, reference: Reference, size: float) -> Callable[[Path], None]:
    """Return the case of a command whose files may have some bytes."""
    command = reference.command

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))

    def run(folder: Path) -> None:
        command.prepare(corpus, folder)
        first = command.run_in_child(corpus, folder, limit, preset=False)
        check_first_run(reference, folder, *first)
        check_second_run(reference, corpus, folder)

    return run


def check_first_run(reference: Reference, folder: Path, code: int, printed: str) -> None:
    """Check that a command failed in one line, and that what it left is complete."""
    found = contents(folder)
    if code == 0 and not differences(found, reference.contents):
        return  # there was enough space
    if code != 2 or "Traceback (most recent call last)" in printed:
        raise BrokenPromiseError(f"ends with {code}\n{last_lines(printed)}")
    check_error(printed)
    wrong = [name for name, content in found.items() if _half(name, content, reference.contents)]
    if wrong:
        raise BrokenPromiseError(
            f"left half-written: {', '.join(wrong[:5])}\n{last_lines(printed, 2)}"
        )


def _half(name: str, content: Any, expected: dict[str, Any]) -> bool:
    if TEMPORARY.search(name) or str(content).startswith("damaged"):
        return True
    hidden = any(part.startswith(".") for part in Path(name).parts)
    return name.endswith(WHOLE) and not hidden and content != expected.get(name)


@contextmanager
def _disk(folder: Path) -> Iterator[Path]:
    """Mount a file system in memory."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True, capture_output=True)
    try:
        yield folder
    finally:
        os.chdir("/")
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def unmount_all(folder: Path) -> None:
    """Unmount what a case that was killed has left below a folder."""
    for line in Path("/proc/mounts").read_text().splitlines():
        disk = line.split()[1]
        if Path(disk).is_relative_to(folder):
            subprocess.run(["umount", "-l", disk], check=False, capture_output=True)


def _resize(disk: Path, size: int) -> None:
    words = ["mount", "-o", f"remount,size={size}", str(disk)]
    subprocess.run(words, check=True, capture_output=True)


def _can_mount(folder: Path) -> bool:
    try:
        with _disk(folder / "try"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
