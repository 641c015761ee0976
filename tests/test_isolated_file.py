"""Slides are read in processes of their own: a crash of a library costs one slide."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import pyvips
from PIL import Image

from caprmil.errors import SlideError
from caprmil.slides import isolated_file
from caprmil.slides.isolated_file import IsolatedFile
from caprmil.slides.readers import ReadError, SlideFile
from caprmil.slides.slide import Slide
from caprmil.synthetic import Section
from image_bombs import BOMBS

pytestmark = pytest.mark.skipif(not isolated_file.ISOLATED, reason="only on Linux")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Section(seed=0, width=1024, height=768).write(tmp_path_factory.mktemp("s") / "sound.tif")


def processes() -> set[int]:
    """Return the processes of open slides."""
    return set(isolated_file.process_ids()[1:])


def within(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.01)


def gone(pid: int) -> bool:
    return any(not Path(f"/proc/{pid}").exists() for _ in within(5))


def test_pixels_and_metadata_are_those_of_the_file_in_this_process(sound: Path) -> None:
    for fast in (True, False):
        here, other = SlideFile(sound, fast=fast), IsolatedFile(sound, fast=fast)
        assert other.metadata == here.metadata
        for level, (width, height) in enumerate(here.metadata.sizes):
            area = (level, width // 3, height // 3, width // 2, height // 2)
            np.testing.assert_array_equal(other.fetch(*area), here.fetch(*area))


def test_a_library_that_aborts_costs_one_slide(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_file, "check_header", lambda path: None)
    (tmp_path / "bomb.tif").write_bytes(BOMBS["tile.tif"])
    with Slide(sound) as slide:
        before = slide.block(0, 0, 0, 64, 64)
        with pytest.raises(SlideError, match=r"bomb\.tif .* crashed: .*Copy it again"):
            Slide(tmp_path / "bomb.tif").block(0, 0, 0, 8, 8)
        np.testing.assert_array_equal(slide.block(0, 0, 0, 64, 64), before)


def test_a_crash_while_pixels_are_read_is_an_error_of_this_slide(sound: Path) -> None:
    with Slide(sound) as other:
        before = processes()
        with Slide(sound) as slide:
            slide.block(0, 0, 0, 64, 64)
            (pid,) = processes() - before
            os.kill(pid, signal.SIGSEGV)
            time.sleep(0.5)  # a signal takes a moment
            for _ in range(2):
                with pytest.raises(SlideError, match=r"sound\.tif cannot be read .* crashed"):
                    slide.block(0, 0, 0, 64, 64)
        assert other.block(0, 0, 0, 64, 64).shape == (64, 64, 3)


def test_slides_can_be_opened_after_the_server_was_killed(sound: Path) -> None:
    with Slide(sound) as slide:
        slide.block(0, 0, 0, 8, 8)
        server = isolated_file._server.process
        assert server is not None
        server.kill()
        server.wait()
        with pytest.raises(SlideError, match="crashed"):
            assert [slide.block(0, 0, 0, 8, 8) for _ in within(5)]
    with Slide(sound) as slide:
        assert slide.block(0, 0, 0, 8, 8).shape == (8, 8, 3)


def test_the_process_of_a_slide_ends_when_it_is_closed_or_forgotten(sound: Path) -> None:
    before = processes()
    slide = Slide(sound)
    (pid,) = processes() - before
    slide.close()
    assert gone(pid)
    with pytest.raises(SlideError, match="it is closed"):
        slide.block(0, 0, 0, 8, 8)
    forgotten = Slide(sound)
    (pid,) = processes() - before
    del forgotten
    assert gone(pid)


def test_threads_share_a_slide(sound: Path) -> None:
    with Slide(sound) as slide, ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(lambda n: slide.block(0, 16 * n, 0, 64, 64), range(32)))
        for n, block in enumerate(blocks):
            np.testing.assert_array_equal(block, slide.block(0, 16 * n, 0, 64, 64))


OPEN_AND_WAIT = """
import sys, time
from pathlib import Path
from caprmil.slides import isolated_file
from caprmil.slides.slide import Slide
slide = Slide(sys.argv[1])
print(isolated_file._server.process.pid, flush=True)
time.sleep(60)
"""


def test_nothing_is_left_of_a_killed_process(sound: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_WAIT, str(sound)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    server = int(process.stdout.readline())
    (child,) = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    process.kill()
    process.communicate()
    assert gone(server)
    assert gone(int(child))


def test_a_fork_of_this_process_reads_slides_with_a_server_of_its_own(sound: Path) -> None:
    with Slide(sound) as slide:
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            code = 1
            try:
                with Slide(sound) as another:
                    code = 0 if another.block(0, 0, 0, 8, 8).shape == (8, 8, 3) else 2
                isolated_file._server.stop()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert slide.block(0, 0, 0, 8, 8).shape == (8, 8, 3)


# libvips' error buffer


def leave_message() -> None:
    """Put a message into libvips' error buffer, as an operation on another image would."""
    pyvips.vips_lib.vips_foreign_find_load(b"/nowhere/another-image.svs")
    assert pyvips.vips_lib.vips_error_buffer()[0] != b"\0"


@pytest.fixture(params=["png", "jpg", "tif"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / f"image.{request.param}")
    return tmp_path / f"image.{request.param}"


def test_a_message_of_another_image_is_not_charged_to_a_sound_one(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_message()
    file, expected = SlideFile(image), np.asarray(Image.open(image).convert("RGB"))
    leave_message()
    np.testing.assert_array_equal(file.fetch(0, 0, 0, 300, 100), expected[:100])
    fetch, calls = pyvips.Region.fetch, []

    def fetch_beside_another(*where: int) -> object:
        calls.append(where)
        if len(calls) == 1:  # an operation of another thread
            leave_message()
        return fetch(*where)

    monkeypatch.setattr(pyvips.Region, "fetch", fetch_beside_another)
    np.testing.assert_array_equal(file.fetch(0, 0, 100, 300, 100), expected[100:])
    assert len(calls) == 2


def test_messages_in_this_process_are_not_those_of_a_slide(image: Path) -> None:
    with Slide(image) as slide:
        leave_message()
        assert slide.block(0, 0, 0, 300, 200).shape == (200, 300, 3)


def test_a_process_that_does_not_answer_is_an_error(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = processes()
    slide = IsolatedFile(sound)
    (own,) = processes() - before
    monkeypatch.setattr(isolated_file, "TIMEOUT", 0.3)
    os.kill(own, signal.SIGSTOP)
    try:
        with pytest.raises(ReadError, match="no answer within 0 seconds"):
            slide.fetch(0, 0, 0, 8, 8)
    finally:
        os.kill(own, signal.SIGKILL)
