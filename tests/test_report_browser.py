"""Reports in a real browser, opened from a file with the network off."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caprmil import explain, report
from caprmil.features import bags
from caprmil.runs.run import Run
from caprmil.synthetic import RareSignal, Section

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("There is no chromium here: apt install chromium.", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api")

INK = "() => document.getElementById('layer-canvas').toDataURL()"
SHOWN = "() => document.getElementById('scene').style.transform"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic"]
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def files(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report with pixels, one of a bag alone, one without places, and one of the run."""
    folder = tmp_path_factory.mktemp("pages")
    features = RareSignal(width=64, patches=(30, 31)).bag(1)[0]
    coords = 128 * np.stack(np.divmod(np.arange(30), 5), axis=1)
    said = {"encoder": "synthetic", "mpp": 1.0}
    size = {"patch_px": 128, "patch_level0": 128.0, "step": 128.0, "slide_mpp": 1.0}
    bags.write(folder / "seen.h5", features, coords, **said, **size)
    bags.write(folder / "placeless.h5", features, **said)
    slide = Section(width=768, height=640, mpp=1.0, tumour=0.2).write(folder / "seen.tiff")
    found = {}
    for name, pixels in (("seen", slide), ("placeless", None), ("slide_003", None)):
        what = name if name in tiny_run.paths else folder / f"{name}.h5"
        subject = explain.find(tiny_run, what, pixels=pixels)
        case = explain.examine(tiny_run, subject, device="cpu")
        found[name] = folder / f"{name}.html"
        found[name].write_text(report.slide_report(tiny_run, case))
    found["run"] = folder / "index.html"
    found["run"].write_text(report.run_report(tiny_run))
    return found


@pytest.fixture
def visit(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    """Open a report by name. At the end, nothing was fetched and nothing went wrong."""
    context = browser.new_context(
        offline=True, viewport={"width": 1200, "height": 900}, reduced_motion="reduce"
    )
    trouble: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))

    def watch(request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            trouble.append(f"asked for {request.url}")

    page.on("request", watch)

    def go(name: str) -> Any:
        page.goto(files[name].as_uri())
        return page

    yield go
    context.close()
    assert trouble == []


@pytest.mark.parametrize("name", ["seen", "slide_003", "placeless", "run"])
def test_a_report_opens_without_a_word_in_the_console(visit: Any, name: str) -> None:
    page = visit(name)
    assert page.locator("h1").is_visible()
    wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0


@pytest.mark.parametrize("name", ["seen", "slide_003", "run"])
def test_nothing_is_wider_than_a_phone(visit: Any, name: str) -> None:
    page = visit(name)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360


def test_every_layer_paints_another_picture(visit: Any) -> None:
    page = visit("seen")
    pictures = set()
    for key in ("evidence-0", "evidence-1", "attention", "token-0", "entropy", "head-1-token-2"):
        page.select_option("#layer", key)
        pictures.add(page.evaluate(INK))
    assert len(pictures) == 6
    page.select_option("#layer", "")
    assert not page.locator("#layer-canvas").is_visible()


def test_evidence_can_be_seen_beside_the_mean_patch(visit: Any) -> None:
    page = visit("seen")
    page.select_option("#layer", "evidence-1")
    page.uncheck("#relative")
    before = page.evaluate(INK)
    page.check("#relative")
    assert page.evaluate(INK) != before
    page.select_option("#layer", "attention")
    assert not page.locator("#relative").is_visible()


def test_a_patch_of_a_gallery_shows_its_place(visit: Any) -> None:
    page = visit("seen")
    button = page.locator("#evidence .patch").first
    number = int(button.get_attribute("data-patch"))
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    place = page.evaluate("() => { const s = spot.style; return [s.left, s.top, s.width]; }")
    column, row = divmod(number, 5)
    expected = [100 * column / 6, 100 * row / 5, 100 / 6]
    assert [float(value.rstrip("%")) for value in place] == pytest.approx(expected, abs=0.01)
    assert page.locator("#spot").is_visible()
    assert page.locator("#readout h3").inner_text() == f"Patch {number}"


def test_pointing_at_a_patch_tells_its_numbers(visit: Any) -> None:
    page = visit("seen")
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 6, box["y"] + box["height"] * 1.5 / 5)
    assert page.locator("#readout h3").inner_text() == "Patch 11"
    assert "Attention" in page.locator("#readout").inner_text()


def test_wheel_buttons_keys_and_drag_move_the_map(visit: Any) -> None:
    page = visit("seen")
    start = page.evaluate(SHOWN)
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.wheel(0, -400)
    page.wait_for_function(f"({SHOWN})() !== '{start}'")
    near = page.evaluate(SHOWN)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 70, steps=4)
    page.mouse.up()
    assert page.evaluate(SHOWN) != near
    page.locator("#stage").press("0")
    assert page.evaluate(SHOWN) == start
    page.click("#nearer")
    assert "scale(1.6)" in page.evaluate(SHOWN)
    page.click("#whole")
    assert page.evaluate(SHOWN) == start


def test_the_page_scrolls_on_where_the_map_cannot_go_farther(visit: Any) -> None:
    page = visit("seen")
    page.locator("#stage").scroll_into_view_if_needed()
    box = page.locator("#stage").bounding_box()
    before = page.evaluate("() => scrollY")
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.wheel(0, 300)
    page.wait_for_function(f"() => scrollY > {before}")


def test_a_head_has_patches_and_shares_of_its_own(visit: Any) -> None:
    page = visit("seen")
    shares = page.locator(".usage").all_inner_texts()
    patches = page.locator(".token .patch").count()
    page.select_option("#head", "1")
    assert page.locator(".usage").all_inner_texts() != shares
    assert 0 < page.locator(".token .patch").count() < patches
    page.select_option("#head", "")
    assert page.locator(".usage").all_inner_texts() == shares
    assert page.locator(".token .patch").count() == patches


def test_slides_are_sorted_and_filtered(visit: Any, tiny_run: Run) -> None:
    page = visit("run")
    rows = page.locator("#slides tbody tr:visible")
    assert rows.count() == len(tiny_run.predictions)
    page.click("#slides th:nth-child(4) button")
    values = [float(v) for v in page.locator("#slides td:nth-child(4)").all_inner_texts()]
    assert values == sorted(values)
    page.click("#slides th:nth-child(4) button")
    values = [float(v) for v in page.locator("#slides td:nth-child(4)").all_inner_texts()]
    assert values == sorted(values, reverse=True)
    page.fill("#search", "slide_003")
    assert rows.count() == 1
    assert "1 of 24" in page.locator("#counted").inner_text()


def test_without_scripts_all_but_the_layers_is_there(browser: Any, files: dict[str, Path]) -> None:
    context = browser.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    page.goto(files["seen"].as_uri())
    assert page.locator("#thumbnail").count() == 1
    assert page.locator("#evidence .patch use").count() > 0
    assert "need JavaScript" in page.content()
    context.close()


def test_a_foreign_script_does_not_run(browser: Any, files: dict[str, Path]) -> None:
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(files["run"].as_uri())
    page.evaluate(
        """() => { const s = document.createElement('script'); s.textContent = 'window.hit = 1';
        document.addEventListener('securitypolicyviolation', () => { window.refused = 1; });
        document.body.append(s); }"""
    )
    page.wait_for_function("() => window.refused === 1")
    assert page.evaluate("() => window.hit") is None
    context.close()
