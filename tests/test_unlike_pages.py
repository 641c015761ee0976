"""The warning of a slide that is unlike the training slides: in the report, and in the viewer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caprmil.explain import explain_slide, locate_slide
from caprmil.features import bags
from caprmil.report import slide_report
from caprmil.runs.run import Run
from caprmil.viewer import Library
from viewer_tab import Open, open_tabs, serving

pytestmark = pytest.mark.slow

WARNING = "This slide is unlike the training slides"


@pytest.fixture(scope="module")
def folder(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a slide as it was, and one whose features are far from all others."""
    found = tmp_path_factory.mktemp("new")
    bag = bags.read(tiny_run.paths["slide_003"])
    known = {"encoder": bag.info.encoder, "mpp": bag.info.mpp, "patch_px": bag.info.patch_px}
    for name, shift in (("usual", 0), ("strange", 30)):
        features = bag.features + np.float32(shift)
        bags.write(found / f"{name}.h5", features, bag.coords, dtype="float32", **known)
    return found


def test_the_report_of_a_strange_slide_warns_of_it(tiny_run: Run, folder: Path) -> None:
    pages = {}
    for name in ("usual", "strange"):
        reference = locate_slide(tiny_run, folder / f"{name}.h5")
        explained = explain_slide(tiny_run, reference, regions=False, device="cpu")
        pages[name] = slide_report(tiny_run, explained)
    assert f"Caution: {WARNING}" in pages["strange"]
    assert "than 100 % of the held-out slides" in pages["strange"].replace("\u00a0", " ")
    assert WARNING not in pages["usual"]


@pytest.fixture
def open_tab(chromium: Any, tiny_run: Run, folder: Path, tmp_path: Path) -> Iterator[Open]:
    library = Library(tiny_run, extra=[folder], device="cpu")
    with serving(library) as address, open_tabs(chromium, address, tmp_path) as make:
        yield make


def test_the_viewer_warns_of_a_strange_slide_where_its_answer_is(open_tab: Open) -> None:
    tab = open_tab().go()
    for name, warned in (("strange", True), ("usual", False)):
        tab.page.click(f"#list button[title={name}]")
        tab.settle()
        assert tab.page.is_visible("#prediction #caution") == warned
        if warned:
            assert WARNING in tab.text("caution")
