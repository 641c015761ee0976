"""Report and viewer of a survival run in a real browser, without an error in the console."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caprmil import explain, report
from caprmil.cohort.folds import SplitConfig
from caprmil.runs.run import Run
from caprmil.synthetic import SurvivalBags
from caprmil.targets import Survival
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
    folder = tmp_path_factory.mktemp("cohort")
    table = SurvivalBags(slides=24, patches=20, width=8).write(folder)
    recipe = Recipe(
        cohort=str(table),
        features=str(folder / "features"),
        target=Survival(horizons=(6.0, 12.0, 24.0)),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0),
        train=TrainConfig(epochs=4, warmup_epochs=0, lr=1e-2),
        loggers={},
    )
    with quick_scoring():
        return cross_validate(recipe, folder / "run", device="cpu", progress=False)


@pytest.fixture(scope="module")
def open_tab(chromium: Any, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    shots = Path(os.environ.get("CAPRMIL_SCREENSHOTS", tmp_path_factory.mktemp("shots")))
    with (
        serving(Library(run, device="cpu")) as address,
        open_tabs(chromium, address, shots) as make,
    ):
        yield make


def test_the_list_is_sorted_and_filtered_by_risk_time_and_event(open_tab: Open, run: Run) -> None:
    tab = open_tab().go()
    table = run.predictions
    assert table.labels is not None
    risks = dict(zip(table.slides, table.answers[:, 0], strict=True))
    times = dict(zip(table.slides, table.labels[:, 0], strict=True))
    for order, key, sign in (
        *(("highest", risks, -1), ("lowest", risks, 1)),
        *(("shortest", times, 1), ("longest", times, -1)),
    ):
        tab.page.select_option("#sort", order)
        shown = tab.page.locator("#list b").all_text_contents()
        assert shown == sorted(shown, key=lambda name: sign * key[name])
        assert len(shown) == 24
    tab.page.select_option("#filter", "high-risk")
    shown = tab.page.locator("#list b").all_text_contents()
    assert set(shown) == {name for name, risk in risks.items() if risk > 0}
    tab.page.select_option("#filter", "group:event")
    shown = tab.page.locator("#list b").all_text_contents()
    events = dict(zip(table.slides, table.labels[:, 1], strict=True))
    assert set(shown) == {name for name, event in events.items() if event}


def test_the_survival_of_a_slide_is_shown_and_changes_without_a_region(
    open_tab: Open, run: Run
) -> None:
    tab = open_tab().go(f"#s={identify('slide_003')}")
    tab.pixels("survival")
    before = tab.text("prediction")
    row = run.predictions.slides.index("slide_003")
    answer = run.predictions.answers[row]
    assert before.startswith(run.target.predicted(answer[None])[0])
    assert np.asarray(run.predictions.labels).shape == (24, 2)
    assert ("event at" in before) == bool(np.asarray(run.predictions.labels)[row, 1])
    assert "12 months" in before
    assert "log hazard" in tab.text("description")
    tab.press("l")
    tab.draw((0, 0), (440, 0), (440, 440), (0, 440))
    tab.page.click("#remove")
    tab.wait_for_prediction("4 patches removed, 16 left")
    assert tab.page.locator("#prediction .fill").count() >= 3


def test_the_viewer_fits_a_phone(open_tab: Open) -> None:
    tab = open_tab(390, 844, has_touch=True, is_mobile=True).go(f"#s={identify('slide_003')}")
    for name in ("slides", "prediction", "patches"):
        tab.page.tap(f"#tabs [data-tab={name}]")
        assert tab.page.is_visible(f"#{name}")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
        if name == "prediction":
            tab.pixels("survival-phone")


def test_reports_open_offline_and_fit_a_phone(chromium: Any, run: Run, tmp_path: Path) -> None:
    reference = explain.locate_slide(run, "slide_003")
    explained = explain.explain_slide(run, reference, device="cpu")
    (tmp_path / "slide.html").write_text(report.slide_report(run, explained))
    (tmp_path / "run.html").write_text(report.run_report(run))
    context = chromium.new_context(offline=True, viewport={"width": 390, "height": 844})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    shots = os.environ.get("CAPRMIL_SCREENSHOTS")
    for name in ("slide", "run"):
        page.goto((tmp_path / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        if name == "slide":
            shown = float(page.get_attribute("#value", "data-value"))
            assert shown == pytest.approx(explained.answer.mean[0])
        if shots:
            page.screenshot(path=Path(shots) / f"survival-{name}-phone.png", full_page=True)
            page.set_viewport_size({"width": 1280, "height": 900})
            page.screenshot(path=Path(shots) / f"survival-{name}.png", full_page=True)
            page.set_viewport_size({"width": 390, "height": 844})
    assert "Number at risk" in page.inner_text("body")
    page.check("#marked")
    rows = page.locator("#slides tbody tr:visible").count()
    assert rows == int((run.predictions.answers[:, 0] > 0).sum())
    context.close()
    assert problems == []
