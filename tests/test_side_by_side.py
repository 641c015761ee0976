"""Two slides, or two runs on a slide, side by side in a browser."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from axe_playwright_python.base import AXE_SCRIPT

from caprmil.runs.run import Run
from caprmil.viewer import Library
from viewer_requests import FIRST, SECOND
from viewer_tab import READY, Open, Tab, open_tabs, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def open_tab(
    chromium: Any,
    library: Library,
    tiny_run: Run,
    pixels: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Open]:
    folder = tmp_path_factory.mktemp("runs") / "second"
    shutil.copytree(tiny_run.folder, folder)
    shots = Path(os.environ.get("CAPRMIL_SCREENSHOTS", folder.parent))
    with (
        serving(library, Library(Run(folder), pixels=pixels, device="cpu")) as address,
        open_tabs(chromium, address, shots) as make,
    ):
        yield make


def view(tab: Tab, side: str) -> tuple[float, float, float]:
    """Return the view of a pane in the address: x, y and zoom."""
    own = parse_qs(tab.page.url.partition("#")[2])[side][0]
    x, y, zoom = parse_qs(own)["v"][0].split(",")
    return float(x), float(y), float(zoom)


def panes(tab: Tab) -> tuple[Any, Any]:
    tab.page.wait_for_selector("#right")
    left, right = tab.page.frame_locator("#left"), tab.page.frame_locator("#right")
    for pane in (left, right):
        pane.locator(READY).wait_for()
    tab.settle()
    return left, right


def test_two_runs_move_together_on_the_same_slides(open_tab: Open) -> None:
    tab = open_tab().go(f"#s={FIRST}")
    tab.page.click("#compare")
    left, right = panes(tab)
    assert left.locator("#run-name").inner_text() == "run"
    assert right.locator("#run-name").inner_text() == "second"
    start = view(tab, "left")
    left.locator("#zoom-in").click()
    tab.settle()
    assert view(tab, "left") == pytest.approx(view(tab, "right"), rel=1e-3)
    assert view(tab, "right")[2] > 1.5 * start[2]
    right.locator("#stage").hover(position={"x": 150, "y": 200})
    tab.page.mouse.wheel(0, -200)  # the right pane leads now
    tab.settle()
    assert view(tab, "left") == pytest.approx(view(tab, "right"), rel=1e-3)
    tab.page.screenshot(path=tab.shots / "side-by-side.png")
    left.locator("#zoom-in").focus()
    tab.press("j")
    right.locator("#slide-name:has-text('slide_001')").wait_for()
    left, right = panes(tab)
    assert SECOND in parse_qs(tab.page.url.partition("#")[2])["right"][0]
    tab.page.evaluate(AXE_SCRIPT)
    found = tab.page.evaluate("async () => (await axe.run()).violations")
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_the_address_restores_both_panes_and_different_slides_move_alike(open_tab: Open) -> None:
    sides = (f"s%3D{FIRST}%26v%3D1000,900,0.2", f"s%3D{SECOND}%26v%3D800,900,0.4")
    tab = open_tab()
    tab.page.goto(f"{tab.base}compare#left={sides[0]}&right={sides[1]}")
    left, _ = panes(tab)
    assert view(tab, "left") == pytest.approx((1000, 900, 0.2))
    assert view(tab, "right") == pytest.approx((800, 900, 0.4))
    left.locator("#zoom-in").click()
    tab.settle()
    assert view(tab, "left")[2] == pytest.approx(0.32, rel=1e-3)
    assert view(tab, "right")[2] == pytest.approx(0.64, rel=1e-3)
    tab.page.reload()
    left, _ = panes(tab)
    assert view(tab, "right")[2] == pytest.approx(0.64, rel=1e-3)
    tab.page.uncheck("#linked")
    left.locator("#zoom-out").click()
    tab.settle()
    assert view(tab, "left")[2] == pytest.approx(0.2, rel=1e-3)
    assert view(tab, "right")[2] == pytest.approx(0.64, rel=1e-3)
    assert "linked=0" in tab.page.url


def test_on_a_phone_one_pane_is_above_the_other(open_tab: Open) -> None:
    tab = open_tab(390, 844)
    tab.page.goto(f"{tab.base}compare#left=s%3D{FIRST}&right=s%3D{SECOND}")
    panes(tab)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
    tops = [tab.page.locator(each).bounding_box()["y"] for each in ("#left", "#right")]
    assert tops[1] > tops[0] + 300
    tab.page.screenshot(path=tab.shots / "side-by-side-phone.png")
