"""The viewer in a real browser: zoom, maps, lasso and links, without an error in the console."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caprmil.features import bags
from caprmil.runs.run import Run
from caprmil.viewer import Library
from caprmil.viewer.library import identify
from long_lists import repeat_slides
from viewer_requests import BARE, FIRST, SECOND
from viewer_tab import Open, open_tabs, serving

pytestmark = pytest.mark.slow

NO_COORDINATES = "no_coordinates"
WITHOUT_LABEL = """() => [...document.querySelectorAll("button, input, select")].filter((node) =>
  !(node.ariaLabel || node.textContent.trim() || node.labels?.length)).map((node) => node.outerHTML)
"""


@pytest.fixture(scope="module")
def server(tiny_run: Run, pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The viewer of the tiny run, with an extra bag that has no coordinates."""
    folder = tmp_path_factory.mktemp("extra")
    features = bags.read(tiny_run.paths["slide_003"]).features
    bags.write(folder / f"{NO_COORDINATES}.h5", features, encoder="synthetic", mpp=1.0)
    library = Library(tiny_run, pixels=pixels, extra=[folder], device="cpu")
    with serving(library) as address:
        yield address


@pytest.fixture
def open_tab(chromium: Any, server: str, tmp_path: Path) -> Iterator[Open]:
    """Opens pages. At the end, none of them may have an error."""
    shots = Path(os.environ.get("CAPRMIL_SCREENSHOTS", tmp_path))
    with open_tabs(chromium, server, shots) as make:
        yield make


def test_the_page_shows_the_slide_and_its_map(open_tab: Open) -> None:
    tab = open_tab().go()
    assert tab.text("run-name") == "run"
    assert "right" in tab.text("prediction") or "wrong" in tab.text("prediction")
    assert "a random map has 0" in tab.text("description")
    assert tab.page.is_visible("#scale")
    with_map = tab.pixels("1-desktop")
    tab.press("o")
    without = tab.pixels("2-slide")
    middle = np.s_[200:500, 200:500]
    assert without[middle].std() > 5  # tissue, not background
    assert np.abs(with_map - without)[middle].mean() > 5
    assert tab.page.evaluate(WITHOUT_LABEL) == []
    assert {url.split("/")[2] for url in tab.requests} == {
        tab.base.split("/")[2]
    }  # no other server


def test_maps_are_switched_without_requests(open_tab: Open) -> None:
    tab = open_tab().go()
    before = len(tab.requests)
    titles, pictures = set(), []
    for key in ("t", "t", "h", "h", "]", "]", "[", "a", "e", "e"):
        tab.press(key)
        titles.add(tab.text("legend-title"))
        pictures.append(tab.state["m"])
    assert {"Token 1, all heads", "Token 2, all heads", "Head 1, token 2", "Attention"} <= titles
    assert {"head-1-token-1", "evidence-0", "evidence-1"} <= set(pictures)
    tab.page.click("#groups button:has-text('Tokens')")
    tab.page.select_option("#head-choice", "1")
    tab.page.click("#choices button:has-text('entropy')")
    assert tab.state["m"] == "entropy"
    tab.settle()
    assert tab.requests[before:] == []


def test_a_map_is_aligned_with_its_patches_at_every_zoom(open_tab: Open) -> None:
    tab = open_tab().go()
    n = int(re.findall(r"(\d+) patches", tab.text("slide-name"))[0])
    rows = math.ceil(n / math.ceil(math.sqrt(n)))  # the generated bag is a square, row by row
    for zoom in (0.31, 1, 3.7):
        tab.page.evaluate(f"location.hash = '#s={FIRST}&v=112,{224 * rows},{zoom}'")
        tab.settle()
        with_map = tab.pixels(f"3-zoom-{zoom}")
        tab.press("o")
        changed = np.abs(with_map - tab.pixels("3-bare")).sum(axis=-1) > 0
        tab.press("o")
        middle, across = changed.shape[0] // 2, changed.shape[1] // 2
        assert changed[
            middle - 3, across
        ]  # the centre of the window is the lower edge of the last patch
        assert not changed[middle + 3, across]
    assert any("/tiles/2/" in url for url in tab.requests)
    assert tab.zoom == pytest.approx(3.7)
    tab.press("0")
    tab.settle()
    assert tab.zoom < 0.4


def test_a_click_on_a_patch_shows_its_numbers_and_similar_patches(open_tab: Open) -> None:
    tab = open_tab().go()
    tab.page.mouse.click(*tab.at(224 * 2.5, 224 * 3.5))
    tab.page.wait_for_selector("#patch h2")
    row = int(tab.state["p"])
    assert tab.text("patch").startswith(f"Patch {row}")
    assert "At 448, 672 px, 224 µm wide" in tab.text("patch")
    assert tab.page.locator("#patch .token-weights tbody tr").count() == 2  # heads
    assert tab.page.locator("#patch .thumbnails button").count() == 8
    tab.settle()
    tab.pixels("4-patch")
    tab.page.locator("#patch .thumbnails button").first.click()
    assert int(tab.state["p"]) != row
    tab.page.locator("#patch .token-weights button").first.click()
    assert tab.state["m"] == "head-0-token-0"
    tab.settle()
    tab.press("Escape")
    assert "p" not in tab.state


def test_a_click_on_a_top_patch_moves_to_it(open_tab: Open) -> None:
    tab = open_tab().go()
    button = tab.page.locator("#gallery .thumbnails button").first
    row = button.get_attribute("data-row")
    button.click()
    tab.settle()
    assert tab.state["p"] == row
    assert tab.zoom > 0.9  # 224 pixels of the slide are 220 on the screen
    tab.settle()


def test_a_lasso_changes_the_prediction_and_can_be_undone(open_tab: Open) -> None:
    tab = open_tab().go(f"#s={SECOND}")
    before = tab.text("prediction")
    region = ((0, 0), (1400, 0), (1400, 1400), (0, 1400))
    tab.press("l")
    tab.draw(*region)
    assert re.fullmatch(r"\d+ patches", tab.text("region-text"))
    tab.pixels("5-lasso")
    tab.page.click("#remove")
    tab.page.wait_for_selector("#prediction .region")
    tab.wait_for_prediction("→")
    after = tab.text("prediction")
    assert "36 patches removed" in after
    assert after != before
    tab.pixels("6-out")
    tab.press("l")
    tab.draw((1344, 0), (2016, 0), (2016, 450), (1344, 450))
    tab.page.click("#keep-only")
    assert "36 patches removed" not in tab.text("prediction")
    tab.press("u")
    tab.wait_for_prediction("36 patches removed")
    tab.page.click("#prediction button:has-text('Reset')")
    assert tab.text("prediction") == before
    tab.page.go_back()
    tab.wait_for_prediction("36 patches removed")


def test_a_region_is_shown_with_its_effect_and_removed(open_tab: Open) -> None:
    tab = open_tab().go(f"#s={SECOND}")
    tab.page.wait_for_selector(".regions button")
    without = tab.pixels("7-regions")
    button = tab.page.locator(".regions button").first
    effect = button.locator("b").inner_text()
    patches = re.search(r"[\d,]+ patch(es)?", button.locator("small").inner_text())
    button.click()
    tab.settle()
    assert button.get_attribute("aria-pressed") == "true"
    assert patches is not None
    assert tab.text("region-text") == f"Region 1, {patches[0]}: {effect}"
    assert np.abs(tab.pixels("8-region") - without).mean() > 0.5
    tab.page.click("#remove")
    tab.wait_for_prediction(f"{patches[0]} removed")
    tab.wait_for_prediction("→")
    assert effect.split(" → ")[1] in tab.text("prediction")
    assert button.get_attribute("aria-pressed") == "false"


def test_regions_can_be_chosen_on_a_phone(open_tab: Open) -> None:
    tab = open_tab(360, 740, has_touch=True).go(f"#s={SECOND}")
    tab.page.tap("#tabs [data-tab=patches]")
    tab.page.locator(".regions button").first.tap()
    tab.settle()
    for name in ("remove", "keep-only", "cancel"):
        box = tab.page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    tab.pixels("9-phone-region")
    tab.page.tap("#cancel")
    assert not tab.page.is_visible("#region")


def test_a_slide_without_coordinates_has_a_reason_in_place_of_regions(open_tab: Open) -> None:
    tab = open_tab().go(f"#s={identify(NO_COORDINATES)}")
    assert "the bag has no coordinates" in tab.text("region-list")


def test_a_token_is_switched_off_and_the_prediction_changes(open_tab: Open) -> None:
    tab = open_tab().go(f"#s={SECOND}")
    before = tab.text("prediction")
    tab.press("x")  # there is no token in the map of evidence
    assert "x" not in tab.state
    tab.press("t", "h")
    tab.page.check("#token-off")
    tab.wait_for_prediction("head 1, token 1")
    tab.settle()
    assert tab.state["x"] == "0.0.0"
    assert tab.text("prediction") != before
    assert tab.page.locator("#choices .chips .off").count() == 1
    tab.press("t", "x")
    tab.wait_for_prediction("2 tokens")
    tab.settle()
    tab.pixels("5-token-off")
    other = open_tab().go("#" + tab.page.url.partition("#")[2])
    other.wait_for_prediction("2 tokens")
    other.settle()
    assert other.text("prediction") == tab.text("prediction")
    assert other.page.is_checked("#token-off")
    tab.press("u")
    tab.wait_for_prediction("1 token")
    assert not tab.page.is_checked("#token-off")
    tab.page.click("#prediction button:has-text('Reset')")
    assert tab.text("prediction") == before
    tab.page.select_option("#head-choice", "all")
    tab.press("x")
    tab.settle()
    assert tab.state["x"] == "0.0.1,0.1.1"  # of all heads
    tab.page.go_back()
    tab.settle()
    assert "x" not in tab.state


def test_a_link_restores_the_view(open_tab: Open) -> None:
    tab = open_tab().go(f"#s={SECOND}")
    tab.press("l")
    tab.draw((0, 0), (900, 0), (900, 900), (0, 900))
    tab.page.click("#remove")
    tab.wait_for_prediction("→")
    tab.press("t", "h", "+")
    tab.page.fill("#opacity", "80")
    tab.settle()
    tab.page.mouse.click(*tab.at(1100, 1100))
    tab.settle()
    other = open_tab().go("#" + tab.page.url.partition("#")[2])
    other.wait_for_prediction("→")
    other.settle()
    assert other.state == tab.state
    for part in ("legend-title", "slide-name"):
        assert other.text(part) == tab.text(part)
    assert other.page.input_value("#opacity") == "80"
    assert "Patch" in other.text("patch")
    assert np.abs(other.pixels("7-link") - tab.pixels("7-own")).mean() < 2


def test_back_and_forward_go_from_slide_to_slide(open_tab: Open) -> None:
    tab = open_tab().go()
    for key, slide in (("j", SECOND), ("ArrowDown", BARE)):
        tab.press(key)
        tab.wait_for_slide(slide)
    tab.press("k")
    tab.wait_for_slide(SECOND)
    tab.page.go_back()
    tab.wait_for_slide(BARE)
    tab.settle()
    assert tab.text("slide-name").startswith("slide_002")
    assert FIRST not in tab.page.url


def test_the_list_is_searched_filtered_and_sorted(open_tab: Open, tiny_run: Run) -> None:
    tab = open_tab().go()
    table = tiny_run.predictions
    assert table.labels is not None
    wrong = int((table.answers.argmax(axis=1) != table.labels).sum())
    tab.page.select_option("#filter", "mistakes")
    assert tab.page.locator("#list li").count() == wrong
    assert tab.page.locator("#list .verdict.right").count() == 0
    tab.page.select_option("#filter", "group:tumour")
    assert tab.page.locator("#list li").count() == int((table.labels == 1).sum())
    tab.page.select_option("#filter", "all")
    tab.page.select_option("#sort", "uncertain")
    first = tab.page.locator("#list b").first.text_content()
    assert first == table.slides[int(table.answers.max(axis=1).argmin())]
    tab.page.fill("#search", "slide_01")
    assert tab.page.locator("#list li").count() == 10
    tab.page.fill("#search", "no such slide")
    assert "No slide" in tab.text("count")
    tab.settle()


@pytest.mark.parametrize(
    ("name", "text"), [("slide_002", "was not found"), (NO_COORDINATES, "has no coordinates")]
)
def test_a_bag_without_pixels_or_coordinates_is_shown_as_a_grid(
    open_tab: Open, name: str, text: str
) -> None:
    tab = open_tab().go(f"#s={identify(name)}")
    assert text in tab.text("notice")
    assert tab.page.locator("#gallery .swatch").count() > 0
    picture = tab.pixels(f"8-bare-{name}")
    assert len(np.unique(picture[100:-100, 100:-100].reshape(-1, 3), axis=0)) > 20
    tab.page.mouse.click(*tab.at(*[0.5 if name == NO_COORDINATES else 100] * 2))
    assert tab.text("patch").startswith("Patch 0")


def test_a_model_without_tokens_shows_no_empty_texts(open_tab: Open) -> None:
    tab = open_tab()

    def without_tokens(route: Any) -> None:
        facts = route.fetch().json()
        layers = [layer for layer in facts["layers"] if layer["key"].startswith(("ev", "ab", "at"))]
        route.fulfill(json={**facts, "tokens": None, "layers": layers})

    tab.page.route(f"**/api/slides/{FIRST}", without_tokens)
    tab.go()
    tab.page.mouse.click(*tab.at(560, 560))
    tab.page.wait_for_selector("#patch h2")
    tab.press("t", "h", "]", "[")
    assert not re.search("null|undefined|NaN", tab.text("patch") + tab.text("prediction"))
    assert tab.page.locator("#groups button").all_inner_texts() == ["Evidence", "Attention"]
    tab.settle()


def test_rows_are_packed_into_an_address_and_unpacked(open_tab: Open) -> None:
    tab = open_tab().go()
    wrong = tab.page.evaluate(
        """async () => {
          const { packRows, unpackRows, ranges } = await import("./static/url_state.js");
          const same = (a, b) => a.length === b.length && a.every((row, n) => row === b[n]);
          const wrong = [];
          for (let n = 1; n < 400; n += 7) {
            for (const share of [0, 0.02, 0.5, 0.98, 1]) {
              const rows = Uint8Array.from({ length: n }, () => (Math.random() < share ? 1 : 0));
              const again = new Uint8Array(n);
              for (const [first, end] of ranges(rows)) again.fill(1, first, end);
              if (!same(unpackRows(packRows(rows), n), rows) || !same(again, rows)) wrong.push(n);
            }
          }
          for (const text of ["", "!", "////", "_____w", "AAAA", "é"]) {
            if (unpackRows(text, 9).some((row) => row > 1)) wrong.push(text);
          }
          return wrong;
        }"""
    )
    assert wrong == []


def test_help_lists_the_keys_and_escape_closes_it(open_tab: Open) -> None:
    tab = open_tab().go()
    tab.press("?")
    assert tab.page.is_visible("#keys")
    assert "lasso a region" in tab.text("keys-list")
    tab.press("Escape")
    assert not tab.page.is_visible("#keys")
    tab.press("l", "Escape")
    assert tab.page.get_attribute("#lasso", "aria-pressed") == "false"
    tab.press("/")
    tab.page.keyboard.type("jk")
    assert tab.page.input_value("#search") == "jk"  # typed text is not a shortcut


def test_on_a_phone_panels_are_drawers(open_tab: Open) -> None:
    tab = open_tab(390, 844, has_touch=True, is_mobile=True, color_scheme="dark").go()
    for name in ("slides", "map", "prediction", "patches"):
        tab.page.tap(f"#tabs [data-tab={name}]")
        assert tab.page.is_visible(f"#{name}")
        tab.pixels(f"9-phone-{name}")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
    tab.page.tap("#tabs [data-tab=patches]")
    assert not tab.page.is_visible("#patches")
    tab.page.touchscreen.tap(*tab.at(560, 560))
    tab.page.wait_for_selector("#patch h2")
    assert tab.page.is_visible("#patches")
    tab.settle()


def test_a_stopped_viewer_is_reported(open_tab: Open) -> None:
    tab = open_tab().go()
    tab.page.route("**/api/**", lambda route: route.abort())
    tab.press("j")
    tab.page.wait_for_selector("body[data-state=failed]")
    assert "still running" in tab.text("notice")
    tab.errors.clear()


def test_a_long_list_has_only_the_rows_near_those_in_view(open_tab: Open) -> None:
    tab = open_tab()
    repeat_slides(tab.page, 1000)
    tab.go()
    rows = tab.page.locator("#list li")
    assert tab.text("count") == "1,000 slides"
    assert rows.count() < 100
    height = tab.page.evaluate("document.querySelector('#list').scrollHeight")
    assert height == pytest.approx(1000 * rows.first.bounding_box()["height"], rel=0.01)
    tab.page.evaluate("document.querySelector('#list').scrollTop = 1e9")
    last = tab.page.locator("#list li:last-child b")
    last.get_by_text("slide_00999").wait_for()
    assert rows.count() < 100
    assert rows.last.get_attribute("aria-posinset") == rows.last.get_attribute("aria-setsize")
    tab.press("j")  # the open slide is the first one, far above
    tab.wait_for_slide(SECOND)
    tab.page.locator("#list [aria-current]").wait_for()
    assert tab.page.locator("#list [aria-current]").get_attribute("title") == "slide_00001"
    tab.page.fill("#search", "slide_0099")
    assert tab.page.locator("#list b").all_inner_texts() == [
        f"slide_{n:05d}" for n in range(990, 1000)
    ]


def test_slides_are_found_by_their_patient(open_tab: Open, tiny_run: Run) -> None:
    tab = open_tab().go()
    patient = tiny_run.patients["slide_003"]
    tab.page.fill("#search", patient)
    expected = [slide for slide, own in tiny_run.patients.items() if own == patient]
    assert sorted(tab.page.locator("#list b").all_inner_texts()) == sorted(expected)


def test_the_list_is_one_stop_of_the_tab_key_and_arrows_move_in_it(open_tab: Open) -> None:
    tab = open_tab().go()
    focused = "() => document.activeElement.closest('#list li')?.dataset.id ?? null"
    first = tab.page.evaluate("() => document.querySelector('#list li').dataset.id")
    tab.page.focus("#sort")
    tab.press("Tab")
    assert tab.page.evaluate(focused) == first
    tab.press("ArrowDown")
    tab.wait(f"() => document.activeElement.closest('#list li')?.dataset.id !== '{first}'")
    second = tab.page.evaluate(focused)
    assert second is not None
    assert (
        tab.page.evaluate(
            "() => document.querySelector('#list [aria-current]').parentElement.dataset.id"
        )
        == second
    )
    tab.settle()
    tab.press("Tab")
    assert tab.page.evaluate(focused) is None
    tab.press("Shift+Tab")
    assert tab.page.evaluate(focused) == second
    assert tab.page.locator("#list button[tabindex='0']").count() == 1
