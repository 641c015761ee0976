"""Report and viewer of several labels and of several targets in a real browser, without errors."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_cohorts import CELLS, SETTINGS, write_cohort

from caprmil import explain, report
from caprmil.cohort.folds import SplitConfig
from caprmil.runs.run import Run
from caprmil.targets import find_target
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from caprmil.viewer import Library
from caprmil.viewer.library import identify
from quick_scoring import quick_scoring
from viewer_tab import Open, open_tabs, serving

pytestmark = pytest.mark.slow

HTML = re.compile("NaN|undefined|null|\\[object")


@pytest.fixture(scope="module", params=["multilabel", "several"])
def run(
    request: pytest.FixtureRequest, chromium: Any, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A finished run of a kind. Without a browser it is not trained."""
    kind = request.param
    table = write_cohort(tmp_path_factory.mktemp(kind), CELLS[kind])
    recipe = Recipe(
        cohort=str(table),
        features=str(table.parent / "features"),
        target=find_target(kind)(**SETTINGS[kind]),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=2, warmup_epochs=0, lr=1e-2),
        loggers={},
    )
    with quick_scoring():
        return cross_validate(recipe, table.parent / "run", device="cpu", progress=False)


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("CAPRMIL_SCREENSHOTS", tmp_path_factory.mktemp("shots")))


@pytest.fixture(scope="module")
def open_tab(chromium: Any, run: Run, shots: Path) -> Iterator[Open]:
    with (
        serving(Library(run, device="cpu")) as address,
        open_tabs(chromium, address, shots) as make,
    ):
        yield make


def shown(tab: Any) -> list[str]:
    return list(tab.page.locator("#list b").all_text_contents())


def test_the_list_is_sorted_and_filtered_by_label_and_by_target(open_tab: Open, run: Run) -> None:
    tab = open_tab().go()
    slides, answers = run.predictions.slides, run.predictions.answers
    if run.target.kind == "multilabel":
        order, column, sign = "label:most", 1, -1
        wanted, marked = "positive:most", {s for s in slides if "most=1" in run.labels[s]}
    else:
        order, column, sign = "size:lowest", 2, 1
        labels, codes = run.predictions.labels, answers[:, :2].argmax(axis=1)
        assert labels is not None
        wanted = "grade:mistakes"
        rows = np.flatnonzero((labels[:, 0] >= 0) & (labels[:, 0] != codes))
        marked = {slides[row] for row in rows}
    tab.page.select_option("#sort", order)
    values = dict(zip(slides, answers[:, column], strict=True))
    assert shown(tab) == sorted(shown(tab), key=lambda name: sign * values[name])
    assert len(shown(tab)) == 16
    tab.page.select_option("#filter", wanted)
    assert set(shown(tab)) == marked
    assert not HTML.search(tab.page.inner_text("body"))


def test_a_removed_region_changes_the_prediction_of_each(open_tab: Open, run: Run) -> None:
    tab = open_tab().go(f"#s={identify('slide_003')}")
    before = tab.text("prediction")
    names = run.target.names if run.target.kind == "multilabel" else list(run.target.parts)
    assert all(name in before for name in names)
    tab.pixels(f"{run.target.kind}-desktop")
    tab.press("l")
    tab.draw((0, 0), (440, 0), (440, 440), (0, 440))
    tab.page.click("#remove")
    tab.wait_for_prediction("4 patches removed, 16 left")
    tab.wait_for_prediction("→")
    assert not HTML.search(tab.text("prediction"))
    tab.page.click("#prediction button:has-text('Reset')")
    assert tab.text("prediction") == before


def test_the_viewer_calibrates_each_target_as_its_report_does(open_tab: Open, run: Run) -> None:
    if run.target.kind == "multilabel":
        pytest.skip("Several labels of one target are not calibrated.")
    key, place = identify("slide_003"), run.target.parts["grade"].answers
    answer = Library(run, device="cpu").explained(key).facts["answer"]
    folds = {fold.name: np.array(answer["mean"][place]) for fold in run.unseen_folds("slide_003")}
    expected = run.part("grade").calibrate(folds)
    assert expected is not None
    np.testing.assert_allclose(answer["calibrated"][place], expected)
    others = [value for n, value in enumerate(answer["calibrated"]) if n not in range(10)[place]]
    assert set(others) == {None}
    text = open_tab().go(f"#s={key}").text("prediction")
    assert [line for line in text.splitlines() if "calibrated" in line] == ["grade, calibrated"]


def test_the_viewer_fits_a_phone(open_tab: Open, run: Run) -> None:
    tab = open_tab(390, 844, has_touch=True, is_mobile=True, color_scheme="dark").go()
    for name in ("slides", "prediction", "patches"):
        tab.page.tap(f"#tabs [data-tab={name}]")
        assert tab.page.is_visible(f"#{name}")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
        tab.pixels(f"{run.target.kind}-phone-{name}")


def test_reports_open_offline_and_fit_a_phone(
    chromium: Any, run: Run, shots: Path, tmp_path: Path
) -> None:
    reference = explain.locate_slide(run, "slide_003")
    explained = explain.explain_slide(run, reference, device="cpu")
    (tmp_path / "slide.html").write_text(report.slide_report(run, explained))
    (tmp_path / "run.html").write_text(report.run_report(run))
    problems: list[str] = []
    for width in (390, 1280):
        context = chromium.new_context(offline=True, viewport={"width": width, "height": 844})
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        for name in ("slide", "run"):
            page.goto((tmp_path / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
            ids = [each for each in ids if page.locator(f"svg [id='{each}']").count() == 0]
            assert len(set(ids)) == len(ids)
            page.screenshot(path=shots / f"{run.target.kind}-{name}-{width}.png", full_page=True)
        context.close()
    assert problems == []
