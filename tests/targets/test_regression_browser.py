"""Report and viewer of a regression run in a real browser, without an error in the console."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_cohorts import CELLS, write_cohort

from caprmil import explain, report
from caprmil.cohort.folds import SplitConfig
from caprmil.runs.run import Run
from caprmil.targets import Regression
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from caprmil.viewer import Library
from caprmil.viewer.library import identify
from quick_scoring import quick_scoring
from viewer_tab import Open, open_tabs, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run. Without a browser it is not trained."""
    table = write_cohort(tmp_path_factory.mktemp("cohort"), CELLS["regression"])
    recipe = Recipe(
        cohort=str(table),
        features=str(table.parent / "features"),
        target=Regression(),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=2, warmup_epochs=0, lr=1e-2),
        loggers={},
    )
    with quick_scoring():
        return cross_validate(recipe, table.parent / "run", device="cpu", progress=False)


@pytest.fixture(scope="module")
def open_tab(chromium: Any, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    shots = Path(os.environ.get("CAPRMIL_SCREENSHOTS", tmp_path_factory.mktemp("shots")))
    with (
        serving(Library(run, device="cpu")) as address,
        open_tabs(chromium, address, shots) as make,
    ):
        yield make


def errors_of(run: Run) -> dict[str, float]:
    labels, answers = run.predictions.truth
    return dict(zip(run.predictions.slides, answers[:, 0] - labels, strict=True))


def test_the_list_is_sorted_and_filtered_by_value_and_error(open_tab: Open, run: Run) -> None:
    tab = open_tab().go()
    values = dict(zip(run.predictions.slides, run.predictions.answers[:, 0], strict=True))
    sizes = {name: abs(error) for name, error in errors_of(run).items()}
    for order, key, sign in (
        *(("highest", values, -1), ("lowest", values, 1)),
        *(("errors", sizes, -1), ("right", sizes, 1)),
    ):
        tab.page.select_option("#sort", order)
        shown = tab.page.locator("#list b").all_text_contents()
        assert shown == sorted(shown, key=lambda name: sign * key[name])
        assert len(shown) == 16
    tab.page.select_option("#filter", "errors")
    largest = sorted(sizes, key=lambda name: -sizes[name])[:2]
    assert set(tab.page.locator("#list b").all_text_contents()) == set(largest)
    tab.page.select_option("#filter", "group:lowest quarter")
    shown = tab.page.locator("#list b").all_text_contents()
    assert {float(run.labels[name]) for name in shown} == {10.0, 14.0}
    assert not re.search("NaN|undefined|null", tab.page.inner_text("body"))


def test_a_removed_region_changes_the_value(open_tab: Open, run: Run) -> None:
    tab = open_tab().go(f"#s={identify('slide_003')}")
    before = tab.text("prediction")
    value = float(run.predictions.answers[run.predictions.slides.index("slide_003"), 0])
    assert before.startswith(f"{value:.1f}")
    assert "The true value is 26.0" in before
    assert "difference from the mean of the training labels" in tab.text("description")
    assert tab.text("gallery").startswith("Most for a higher value")
    for side in tab.page.locator("#gallery .thumbnails").all():
        values = map(float, side.locator("button > :last-child").all_text_contents())
        assert len({value > 0 for value in values}) == 1
    tab.press("l")
    tab.draw((0, 0), (440, 0), (440, 440), (0, 440))
    tab.page.click("#remove")
    tab.wait_for_prediction("4 patches removed, 16 left")
    tab.wait_for_prediction("→")
    assert tab.page.locator("#prediction .before-mark").count() == 1
    tab.page.click("#prediction button:has-text('Reset')")
    assert tab.text("prediction") == before


def test_the_viewer_fits_a_phone(open_tab: Open) -> None:
    tab = open_tab(390, 844, has_touch=True, is_mobile=True, color_scheme="dark").go()
    for name in ("slides", "prediction", "patches"):
        tab.page.tap(f"#tabs [data-tab={name}]")
        assert tab.page.is_visible(f"#{name}")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
    tab.pixels("regression-phone")


def test_reports_open_offline_and_fit_a_phone(chromium: Any, run: Run, tmp_path: Path) -> None:
    reference = explain.locate_slide(run, "slide_003")
    explained = explain.explain_slide(run, reference, device="cpu")
    (tmp_path / "slide.html").write_text(report.slide_report(run, explained))
    (tmp_path / "run.html").write_text(report.run_report(run))
    context = chromium.new_context(offline=True, viewport={"width": 360, "height": 740})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "slide.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    shown = float(page.get_attribute("#value", "data-value"))
    assert shown == pytest.approx(explained.answer.mean[0])
    page.uncheck("#above-mean")
    assert page.inner_text("#legend-title") == "lower · higher"
    page.goto((tmp_path / "run.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("#slides th:nth-child(4) button")
    names = page.locator("#slides tbody th").all_inner_texts()
    assert names == sorted(names, key=lambda name: errors_of(run)[name])
    page.check("#marked")
    sizes = np.abs(list(errors_of(run).values()))
    rows = page.locator("#slides tbody tr:visible").count()
    assert rows == (sizes > np.quantile(sizes, 0.9)).sum()
    context.close()
    assert problems == []
