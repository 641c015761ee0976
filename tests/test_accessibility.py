"""Pages are checked by axe-core: no serious or critical violation, on a desktop or a phone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from axe_playwright_python.base import AXE_SCRIPT

from caprmil import explain, report
from caprmil.experiments.gathered_runs import gather
from caprmil.report.external_page import write_external
from caprmil.report.paper_page import write_paper
from caprmil.runs.external import validate_external
from caprmil.runs.run import Run
from caprmil.viewer import Library
from quick_scoring import quick_scoring
from small_runs import small_run
from targets.small_cohorts import CELLS, write_cohort
from viewer_tab import Tab, open_tabs, serving

pytestmark = pytest.mark.slow

SCREENS = ((1280, "light"), (390, "dark"))
SERIOUS = ("serious", "critical")
CHECK = """async () => (await axe.run({resultTypes: ["violations"]})).violations.flatMap(
  ({id, impact, nodes}) => nodes.map(({target, html, any}) =>
    [impact, id, target.join(" "), html.slice(0, 120), any[0]?.message]))"""

KINDS = (
    *("classification", "ordinal", "regression", "survival", "multilabel", "several"),
    *("patient", "covariates", "sources"),
)

SITE = Path(__file__).parents[1] / "public"
SITE_PAGES = ("index", "start", "commands", "settings", "python", "pathologists", "hard-tasks")
SITE_PAGES += ("notebooks/features-to-model",)
READY_SITE = """() => document.readyState === "complete" &&
  [...document.querySelectorAll(".md-typeset__scrollwrap")].every(
    (box) => box.scrollWidth <= box.clientWidth || box.tabIndex === 0)"""

Check: TypeAlias = Callable[[Any], list[Any]]


@pytest.fixture(scope="module")
def violations() -> Check:
    """Return the serious violations of a page."""

    def check(page: Any) -> list[Any]:
        page.evaluate(AXE_SCRIPT)
        found = page.evaluate(CHECK)
        return [each for each in found if each[0] in SERIOUS]

    return check


@pytest.fixture(scope="module")
def runs(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of each kind. Without a browser they are not trained."""
    with quick_scoring():
        return {kind: small_run(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def reports(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of each sort."""
    folder = tmp_path_factory.mktemp("pages")
    with quick_scoring():
        for kind, run in runs.items():
            slide = explain.locate_slide(run, list(run.bags)[3])
            explained = explain.explain_slide(run, slide, device="cpu")
            (folder / f"{kind}_slide.html").write_text(report.slide_report(run, explained))
            (folder / f"{kind}_run.html").write_text(report.run_report(run))
        run = runs["classification"]
        outside = write_cohort(folder / "outside", CELLS["classification"], prefix="other_", seed=1)
        options: dict[str, Any] = {"recalibrate_on": 6, "draws": 20, "device": "cpu"}
        found = validate_external(run, outside, outside.parent / "features", **options)
        write_external(found, folder / "external")
    atlas = explain.make_atlas(run, most=6)
    example = explain.example_slide(run, atlas)
    (folder / "atlas").mkdir()
    report.write_atlas(folder / "atlas", run, atlas, explain.AtlasPictures(), example)
    protocol = folder / "camelyon16"
    protocol.mkdir()
    (protocol / "protocol.json").write_text('{"protocol": "camelyon16"}')
    (protocol / "caprmil").symlink_to(run.folder)
    write_paper(gather([protocol]), folder / "paper")
    return folder


def test_reports_have_no_serious_violation(chromium: Any, reports: Path, violations: Check) -> None:
    pages = sorted(reports.rglob("*.html"))
    assert len(pages) >= 2 * len(KINDS) + 3
    found = {}
    for width, scheme in SCREENS:
        size = {"width": width, "height": 900}
        with chromium.new_context(viewport=size, color_scheme=scheme) as context:
            page = context.new_page()
            for path in pages:
                page.goto(path.as_uri())
                found[path.name, width] = violations(page)
    assert {page: each for page, each in found.items() if each} == {}


def states(tab: Tab) -> Iterator[str]:
    """Show the viewer in each of its states."""
    yield "slide"
    for key, name in (("t", "token"), ("e", "evidence"), ("?", "help")):
        tab.press(key)
        yield name
    tab.press("Escape")
    tab.page.locator("#gallery button").first.click()
    yield "patch"


@pytest.mark.parametrize("kind", KINDS)
def test_the_viewer_has_no_serious_violation(
    chromium: Any, runs: dict[str, Run], violations: Check, tmp_path: Path, kind: str
) -> None:
    with (
        serving(Library(runs[kind], device="cpu")) as address,
        open_tabs(chromium, address, tmp_path) as make,
    ):
        found = {}
        # The page is the same for all targets, but for the parts that show an answer.
        is_first = kind == KINDS[0]
        for scheme in ("light", "dark") if is_first else ("light",):
            tab = make(color_scheme=scheme).go()
            for state in states(tab) if is_first else ("slide",):
                found[scheme, state] = violations(tab.page)
        phone = make(390, 844, color_scheme="dark", has_touch=True, is_mobile=True).go()
        for panel in ("slides", "map", "prediction", "patches") if is_first else ("prediction",):
            phone.page.tap(f"#tabs [data-tab={panel}]")
            found["phone", panel] = violations(phone.page)
    assert {state: each for state, each in found.items() if each} == {}


def test_reports_are_as_wide_as_their_paper(chromium: Any, reports: Path) -> None:
    wide = {}
    for path in sorted(reports.rglob("*.html")):
        millimetres = (297 if path.parent.name == "paper" else 210) - 2 * 13  # A4, its margins
        page = chromium.new_page(viewport={"width": int(millimetres / 25.4 * 96), "height": 900})
        page.emulate_media(media="print")
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > page.viewport_size["width"]:
            wide[path.name, path.parent.name] = width
        page.close()
    assert wide == {}


@pytest.mark.parametrize("name", SITE_PAGES)
def test_the_documentation_site_has_no_serious_violation(
    chromium: Any, violations: Check, name: str
) -> None:
    path = SITE / f"{name}.html"
    if not path.is_file():
        pytest.skip("The site is not built: make docs.")
    found = {}
    for width, scheme in SCREENS:
        size = {"width": width, "height": 900}
        with chromium.new_context(viewport=size, color_scheme=scheme) as context:
            page = context.new_page()
            page.goto(path.as_uri())
            page.wait_for_function(READY_SITE)
            found[width] = violations(page)
    assert {width: each for width, each in found.items() if each} == {}
