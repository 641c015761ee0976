"""The report and the viewer of patients: slides side by side, and the share of each."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caprmil.explain import ExplainedSlide, explain_slide, locate_slide
from caprmil.explain.slide_shares import slide_shares
from caprmil.report import slide_report
from caprmil.report.run_page import run_report
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide
from caprmil.synthetic import Section
from caprmil.training.cross_validation import cross_validate
from caprmil.viewer import Library
from patient_cohort import patient_recipe, with_epochs, write_patients
from quick_scoring import quick_scoring
from viewer_tab import Open, open_tabs, serving

pytestmark = pytest.mark.slow

PATIENT = "p05"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    table = write_patients(tmp_path_factory.mktemp("study"), 12)
    folder = tmp_path_factory.mktemp("runs") / "run"
    with quick_scoring():
        recipe = with_epochs(patient_recipe(table), 2)
        return cross_validate(recipe, folder, device="cpu", progress=False)


@pytest.fixture(scope="module")
def pixels(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The slides of a patient, but one."""
    folder = tmp_path_factory.mktemp("slides")
    for number, slide in enumerate(run.slides[PATIENT]):
        if number != 1:
            Section(seed=number, width=1600, height=1600).write(folder / f"{slide}.tiff")
    return folder


@pytest.fixture(scope="module")
def explained(run: Run, pixels: Path) -> ExplainedSlide:
    return explain_slide(run, locate_slide(run, PATIENT, pixels=pixels))


def test_the_row_has_the_pixels_of_each_slide_at_its_patches(
    run: Run, explained: ExplainedSlide, pixels: Path
) -> None:
    row = explained.open_slide()
    assert row is not None
    boxes = explained.patch_boxes(row)
    slide_of = explained.explanation.slide_of
    assert boxes is not None
    assert slide_of is not None
    with row:
        for number, name in enumerate(run.slides[PATIENT]):
            place = explained.explanation.info.slides[number]
            rows = np.flatnonzero(slide_of == number)[:3]
            for corner in boxes.corners[rows]:
                found = row.read(*corner.tolist(), boxes.side, 64)
                if number == 1:
                    assert (found == 255).all()  # its file is missing
                    continue
                with Slide(pixels / f"{name}.tiff", mpp=1.0) as slide:
                    expected = slide.read(*place.own(corner[None])[0].tolist(), boxes.side, 64)
                np.testing.assert_array_equal(found, expected)


def test_the_thumbnail_of_the_row_is_what_is_read(explained: ExplainedSlide) -> None:
    row = explained.open_slide()
    assert row is not None
    with row:
        small = row.thumbnail(row.mpp * 8)
        whole = row.read(0, 0, 8 * 200, 200)
    height = min(200, len(small.image))
    part = small.image[:height, :200].astype(float)
    assert np.abs(part - whole[:height, :200]).mean() < 8
    assert part.std() > 5


def test_the_report_of_a_patient_lists_its_slides_with_their_shares(
    run: Run, explained: ExplainedSlide
) -> None:
    text = slide_report(run, explained)
    assert "Patient report" in text
    assert "Slides of the patient" in text
    shares = slide_shares(explained.explanation)
    of = explained.explanation.predicted
    listed = re.findall(r'<th scope="row">(p05_\d)</th><td>(\d+)</td><td data-value="(\S+)"', text)
    assert [(name, int(n)) for name, n, _ in listed] == [(s.name, s.patches) for s in shares]
    np.testing.assert_allclose(
        [float(value) for *_, value in listed], [share.evidence[of] for share in shares]
    )
    assert "Compared with the test patients of this run" in text


def test_the_report_of_a_run_is_of_patients(run: Run) -> None:
    text = run_report(run)
    assert "12 patients, 3 folds" in text
    assert "All patients" in text
    assert "test patients that are kept" in text
    assert not re.findall(r"(?:the|other|all) test slides|Share of slides|Test slides", text)


def test_the_viewer_describes_the_slides_of_a_patient(run: Run, pixels: Path) -> None:
    library = Library(run, pixels=pixels, device="cpu")
    (key,) = [key for key, entry in library.entries.items() if entry.name == PATIENT]
    facts = library.explained(key).facts
    assert [slide["name"] for slide in facts["slides"]] == list(run.slides[PATIENT])
    boxes = np.array([slide["box"] for slide in facts["slides"]])
    assert (boxes[1:, 0] > boxes[:-1, 0] + boxes[:-1, 2]).all()  # side by side
    assert facts["pixels"]
    assert library.tile(key, 0, 0, 0) is not None
    assert library.thumbnail(key)
    half = np.arange(facts["patches"]) % 2 == 0
    assert library.predict_without(key, half)["left"] == facts["patches"] - half.sum()


@pytest.fixture
def open_tab(chromium: Any, run: Run, pixels: Path, tmp_path: Path) -> Iterator[Open]:
    shots = Path(os.environ.get("CAPRMIL_SCREENSHOTS", tmp_path))
    with (
        serving(Library(run, pixels=pixels, device="cpu")) as address,
        open_tabs(chromium, address, shots) as make,
    ):
        yield make


def test_the_viewer_shows_slides_side_by_side_with_their_shares(open_tab: Open, run: Run) -> None:
    tab = open_tab().go()
    assert "12 patients" in tab.text("count")
    tab.page.click(f"#list button[title={PATIENT}]")
    tab.settle()
    names = tab.page.locator(".patient-slides b").all_inner_texts()
    assert names == list(run.slides[PATIENT])
    assert "attention" in tab.text("prediction")
    tab.pixels("patient-desktop")
    before = tab.page.evaluate("location.hash")
    tab.page.click(".patient-slides li:last-child button")
    tab.settle()
    assert tab.page.evaluate("location.hash") != before  # the view has moved to the slide
    tab.pixels("patient-slide")


def test_the_viewer_of_patients_works_on_a_phone(open_tab: Open) -> None:
    tab = open_tab(390, 844, has_touch=True, is_mobile=True).go()
    tab.page.click('[data-tab="prediction"]')
    tab.settle()
    assert tab.page.is_visible(".patient-slides button")
    tab.pixels("patient-phone")
