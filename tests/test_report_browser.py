"""Reports in a real browser, opened from a file with the network off."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caprmil import explain, report
from caprmil.experiments.gathered_runs import gather
from caprmil.features import bags
from caprmil.report.paper_page import write_paper
from caprmil.runs.run import Run
from caprmil.synthetic import RareSignal, Section
from long_lists import repeat_rows

pytestmark = pytest.mark.slow

LAYER = "() => document.getElementById('layer-canvas').toDataURL()"
TRANSFORM = "() => document.getElementById('scene').style.transform"


@pytest.fixture(scope="module")
def files(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a slide, of a bag without a slide, of one without coordinates, and of the run."""
    folder = tmp_path_factory.mktemp("pages")
    features = RareSignal(width=64, patches=(30, 31)).bag(1)[0]
    coords = 128 * np.stack(np.divmod(np.arange(30), 5), axis=1)
    info = {"encoder": "synthetic", "mpp": 1.0}
    size = {"patch_px": 128, "patch_level0": 128.0, "step": 128.0, "slide_mpp": 1.0}
    bags.write(folder / "slide.h5", features, coords, **info, **size)
    bags.write(folder / "no_coordinates.h5", features, **info)
    slide = Section(width=768, height=640, mpp=1.0, tumour=0.2).write(folder / "slide.tiff")
    found = {}
    for name, pixels in (("slide", slide), ("no_coordinates", None), ("slide_003", None)):
        what = name if name in tiny_run.paths else folder / f"{name}.h5"
        reference = explain.locate_slide(tiny_run, what, pixels=pixels)
        explained = explain.explain_slide(tiny_run, reference, device="cpu")
        found[name] = folder / f"{name}.html"
        found[name].write_text(report.slide_report(tiny_run, explained))
    found["run"] = folder / "index.html"
    found["run"].write_text(report.run_report(tiny_run))
    atlas = explain.make_atlas(tiny_run, most=6)
    pictures, example = explain.AtlasPictures(), explain.example_slide(tiny_run, atlas)
    (folder / "atlas").mkdir()
    report.write_atlas(folder / "atlas", tiny_run, atlas, pictures, example)
    found["atlas"] = folder / "atlas" / "index.html"
    shutil.copytree(tiny_run.folder, folder / "camelyon16" / "caprmil")
    (folder / "camelyon16" / "protocol.json").write_text('{"protocol": "camelyon16"}')
    write_paper(gather([folder / "camelyon16"]), folder / "paper")
    found["paper"] = folder / "paper" / "index.html"
    return found


@pytest.fixture
def visit(chromium: Any, files: dict[str, Path]) -> Iterator[Any]:
    """Open a report by name. At the end, nothing was requested and the console is empty."""
    context = chromium.new_context(
        offline=True, viewport={"width": 1200, "height": 900}, reduced_motion="reduce"
    )
    problems: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))

    def watch(request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            problems.append(f"requested {request.url}")

    page.on("request", watch)

    def go(name: str) -> Any:
        page.goto(files[name].as_uri())
        return page

    yield go
    context.close()
    assert problems == []


@pytest.mark.parametrize("name", ["slide", "slide_003", "no_coordinates", "run", "atlas", "paper"])
def test_a_report_opens_with_an_empty_console(visit: Any, name: str) -> None:
    page = visit(name)
    assert page.locator("h1").is_visible()
    wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0


@pytest.mark.parametrize("name", ["slide", "slide_003", "run", "atlas", "paper"])
def test_a_report_is_not_wider_than_a_phone(visit: Any, name: str) -> None:
    page = visit(name)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360


def test_the_tokens_of_an_atlas_and_its_table_are_sorted(visit: Any) -> None:
    page = visit("atlas")
    for order, sign in (("usage", -1), ("number", 1), ("contrast", -1), ("effect", -1)):
        page.select_option("#order", order)
        cards = f"cards => cards.map(card => Number(card.dataset.{order}))"
        values = page.locator("#cards > article").evaluate_all(cards)
        assert values == sorted(values, key=lambda value: sign * value)
        assert len(set(values)) > 1
    page.click("#numbers-table th button:text-is('Effect')")
    values = page.locator("#numbers-table tbody tr").evaluate_all(
        "rows => rows.map(row => Number(row.cells[4].dataset.value))"
    )
    assert values == sorted(values)


def test_every_layer_looks_different(visit: Any) -> None:
    page = visit("slide")
    pictures = set()
    for key in ("evidence-0", "evidence-1", "attention", "token-0", "entropy", "head-1-token-2"):
        page.select_option("#layer", key)
        pictures.add(page.evaluate(LAYER))
    assert len(pictures) == 6
    page.select_option("#layer", "")
    assert not page.locator("#layer-canvas").is_visible()


def test_evidence_can_be_shown_relative_to_the_mean(visit: Any) -> None:
    page = visit("slide")
    page.select_option("#layer", "evidence-1")
    page.uncheck("#above-mean")
    before = page.evaluate(LAYER)
    page.check("#above-mean")
    assert page.evaluate(LAYER) != before
    page.select_option("#layer", "attention")
    assert not page.locator("#above-mean").is_visible()


def test_a_patch_of_a_gallery_shows_its_position(visit: Any) -> None:
    page = visit("slide")
    button = page.locator("#evidence .patch").first
    number = int(button.get_attribute("data-patch"))
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    position = page.evaluate("() => { const s = marker.style; return [s.left, s.top, s.width]; }")
    column, row = divmod(number, 5)
    expected = [100 * column / 6, 100 * row / 5, 100 / 6]
    assert [float(value.rstrip("%")) for value in position] == pytest.approx(expected, abs=0.01)
    assert page.locator("#marker").is_visible()
    assert page.locator("#readout h3").inner_text() == f"Patch {number}"


@pytest.mark.parametrize("name", ["slide", "slide_003"])
def test_a_region_is_outlined_on_the_map(visit: Any, name: str) -> None:
    page = visit(name)
    outline, button = page.locator("#region-outline"), page.locator(".region").first
    assert not outline.is_visible()
    button.click()
    assert outline.is_visible()
    assert button.get_attribute("aria-pressed") == "true"
    drawn = page.evaluate(
        """() => { const box = document.querySelector("#region-outline .line").getBBox();
        return [box.x, box.y, box.width, box.height]; }"""
    )
    facts = page.evaluate("() => JSON.parse(document.getElementById('facts').textContent)")
    assert drawn == pytest.approx(facts["regions"]["found"][0]["box"])
    button.click()
    assert not outline.is_visible()
    assert button.get_attribute("aria-pressed") == "false"


def test_pointing_at_a_patch_shows_its_numbers(visit: Any) -> None:
    page = visit("slide")
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 6, box["y"] + box["height"] * 1.5 / 5)
    assert page.locator("#readout h3").inner_text() == "Patch 11"
    assert "Attention" in page.locator("#readout").inner_text()


def test_wheel_buttons_keys_and_dragging_move_the_map(visit: Any) -> None:
    page = visit("slide")
    start = page.evaluate(TRANSFORM)
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.wheel(0, -400)
    page.wait_for_function(f"({TRANSFORM})() !== '{start}'")
    zoomed = page.evaluate(TRANSFORM)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 70, steps=4)
    page.mouse.up()
    assert page.evaluate(TRANSFORM) != zoomed
    page.locator("#stage").press("0")
    assert page.evaluate(TRANSFORM) == start
    page.click("#zoom-in")
    assert "scale(1.6)" in page.evaluate(TRANSFORM)
    page.click("#zoom-reset")
    assert page.evaluate(TRANSFORM) == start


def test_the_wheel_scrolls_the_page_if_the_map_cannot_zoom_out(visit: Any) -> None:
    page = visit("slide")
    page.locator("#stage").scroll_into_view_if_needed()
    box = page.locator("#stage").bounding_box()
    before = page.evaluate("() => scrollY")
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.wheel(0, 300)
    page.wait_for_function(f"() => scrollY > {before}")


def test_a_single_head_has_its_own_patches_and_usage(visit: Any) -> None:
    page = visit("slide")
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
    assert "1 of 24" in page.locator("#shown").inner_text()
    patient = tiny_run.patients["slide_003"]
    page.fill("#search", patient)
    assert rows.count() == list(tiny_run.patients.values()).count(patient)


def test_a_long_table_shows_its_first_rows_until_all_are_wanted(
    chromium: Any, files: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "long.html"
    path.write_text(repeat_rows(files["run"].read_text(), 1200))
    page = chromium.new_page()
    page.goto(path.as_uri())
    rows = page.locator("#slides tbody tr")
    assert rows.count() == 500
    page.click("#slides th:first-child button")
    page.click("#slides th:first-child button")
    assert rows.first.locator("th").inner_text() == "slide_01199"
    page.fill("#search", "slide_0000")
    assert rows.count() == 10
    page.fill("#search", "")
    page.click("text=Show all 1,200")
    assert rows.count() == 1200
    page.close()


def test_without_scripts_only_the_layers_are_missing(chromium: Any, files: dict[str, Path]) -> None:
    context = chromium.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    page.goto(files["slide"].as_uri())
    assert page.locator("#thumbnail").count() == 1
    assert page.locator("#evidence .patch use").count() > 0
    assert "need JavaScript" in page.content()
    context.close()


def test_an_injected_script_does_not_run(chromium: Any, files: dict[str, Path]) -> None:
    context = chromium.new_context(offline=True)
    page = context.new_page()
    page.goto(files["run"].as_uri())
    page.evaluate(
        """() => { const s = document.createElement('script'); s.textContent = 'window.hit = 1';
        document.addEventListener('securitypolicyviolation', () => { window.blocked = 1; });
        document.body.append(s); }"""
    )
    page.wait_for_function("() => window.blocked === 1")
    assert page.evaluate("() => window.hit") is None
    context.close()
