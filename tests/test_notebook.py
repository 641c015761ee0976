"""How objects show themselves: in a notebook as HTML, in a terminal in one line."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import caprmil
from caprmil.cohort.cohort import load_cohort
from caprmil.features import bags
from caprmil.io.notebook import show_html
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide
from caprmil.training.recipe import Recipe


class Parser(HTMLParser):
    """Collects the text of a page, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def text_of(html: str) -> str:
    return " ".join(Parser(html).words)


def pictures(html: str) -> list[Image.Image]:
    found = re.findall(r"data:image/png;base64,([^\"]+)", html)
    return [Image.open(BytesIO(base64.b64decode(each))) for each in found]


def test_a_slide_shows_its_thumbnail_with_the_outline_of_its_tissue(pixels: Path) -> None:
    with Slide(pixels / "slide_000.tiff") as slide:
        html = slide._repr_html_()
        plain = slide.thumbnail(8.0).image
    text = text_of(html)
    assert "2,016 x 2,016 px" in text
    assert "mm²" in text
    (picture,) = pictures(html)
    assert abs(picture.width / picture.height - plain.shape[1] / plain.shape[0]) < 0.05
    colours = {tuple(each) for each in np.asarray(picture.convert("RGB")).reshape(-1, 3)}
    from caprmil.slides import qc

    assert tuple(qc.OUTLINE) in colours
    assert slide._repr_html_() == html  # also when it is closed


def test_a_picture_without_a_scale_shows_its_thumbnail(tmp_path: Path) -> None:
    Image.new("RGB", (3000, 1500), "purple").save(tmp_path / "crop.png")
    with Slide(tmp_path / "crop.png") as slide:
        html = slide._repr_html_()
    assert "not known: pass mpp" in text_of(html)
    (picture,) = pictures(html)
    assert abs(picture.width / picture.height - 2) < 0.05


def test_a_closed_slide_shows_what_is_known(pixels: Path) -> None:
    slide = Slide(pixels / "slide_000.tiff")
    slide.close()
    text = text_of(slide._repr_html_())
    assert "2,016 x 2,016 px" in text
    assert "cannot be read" in text


def test_a_bag_shows_where_its_patches_are() -> None:
    cells = np.array([[0, 0], [3, 0], [3, 4]])
    options = {"encoder": "<b>uni</b>", "mpp": 0.5, "patch_px": 256, "patch_level0": 256.0}
    features = np.ones((3, 7), np.float32)
    bag = bags.from_arrays(features, cells * 256, unit="px", step=256.0, **options)
    assert repr(bag) == "Bag(3 patches x 7 features, <b>uni</b> at 0.5 µm per pixel)"
    html = bag._repr_html_()
    assert "<b>uni" not in html
    assert "0.5 µm per pixel" in text_of(html)
    (picture,) = pictures(html)
    marked = np.argwhere((np.asarray(picture) != 235).any(axis=2))[:, ::-1]
    np.testing.assert_array_equal(sorted(marked.tolist()), sorted(cells.tolist()))
    without = bags.from_arrays(features)
    assert not pictures(without._repr_html_())
    assert repr(without) == "Bag(3 patches x 7 features)"


def test_predictions_show_scores_and_first_rows(tiny_run: Run) -> None:
    table = tiny_run.predictions
    assert repr(table) == "Predictions(24 slides, classification, 3 folds)"
    text = text_of(table._repr_html_())
    assert f"{table.scores()['auc']:.3f}" in text
    assert table.slides[0] in text
    assert "and 14 more rows" in text
    alone = replace(table, labels=None, folds=None)
    assert repr(alone) == "Predictions(24 slides, classification, no labels)"
    assert "score" not in text_of(alone._repr_html_())


def test_a_cohort_shows_its_labels_and_is_a_frame(tiny_recipe: Recipe) -> None:
    r = tiny_recipe
    cohort, _ = load_cohort(r.cohort, r.features, r.data, r.splits, target=r.target)
    assert repr(cohort) == ("Cohort(24 slides, 24 patients, classification: 12 normal, 12 tumour)")
    frame = cohort.to_frame()
    assert frame["label"].value_counts().to_dict() == {"normal": 12, "tumour": 12}
    table = pd.read_csv(r.cohort, dtype=str)
    merged = frame.merge(table, on="slide")
    assert (merged["label_x"] == merged["label_y"]).all()
    text = text_of(cohort._repr_html_())
    assert "12 normal, 12 tumour" in text
    assert "synthetic" in text


def test_a_run_shows_its_scores_and_has_them_as_a_frame(tiny_run: Run) -> None:
    frame = tiny_run.score_table().set_index("metric")
    scores = tiny_run.scores["metrics"]
    assert [*frame.index] == [*scores]
    assert frame.loc["auc", "all together"] == scores["auc"]["all_slides_pooled"]
    assert frame.loc["brier", "low"] == scores["brier"]["interval"][0]
    text = text_of(tiny_run._repr_html_())
    assert f"{scores['brier']['all_slides_pooled']:.4g}" in text
    assert "3 of 3 trained" in text


def test_a_run_and_a_slide_are_explained_in_one_call(tiny_run: Run, pixels: Path) -> None:
    explained = caprmil.explain(tiny_run, "slide_000", pixels=pixels, device="cpu")
    assert isinstance(explained, caprmil.ExplainedSlide)
    assert explained.explanation.slide == "slide_000"
    frame = explained.to_frame()
    assert len(frame) == len(explained.explanation)
    terms = frame[["term-0", "term-1"]].sum().to_numpy() + explained.explanation.rest
    np.testing.assert_allclose(terms, explained.explanation.logits, atol=1e-4)
    html = explained._repr_html_()
    assert "labelled" in repr(explained)
    assert len(pictures(html)) == 1
    assert explained.explanation.fold in text_of(html)
    by_path = caprmil.explain(tiny_run.folder, "slide_000", device="cpu")
    np.testing.assert_array_equal(by_path.explanation.evidence, explained.explanation.evidence)


def test_an_explanation_shows_its_map_without_a_slide(tiny_run: Run) -> None:
    explanation = caprmil.explain(tiny_run, "slide_003", device="cpu").explanation
    shown = explanation.target.show(explanation.answer)
    assert repr(explanation).startswith(
        f"Explanation('slide_003': {shown} by CAPRMIL + mean, fold-"
    )
    html = explanation._repr_html_()
    assert len(pictures(html)) == 1
    assert "Explanation of slide_003" in text_of(html)


def test_the_package_explain_is_still_a_package() -> None:
    from caprmil import explain

    assert explain is caprmil.explain
    assert explain.explain_run.__doc__ == explain.__call__.__doc__
    import caprmil.explain.explanation as module

    assert module.Explanation is caprmil.Explanation


def test_text_is_escaped() -> None:
    html = show_html("<script>", [("<i>", "<script>alert(1)</script>"), ("nothing", None)])
    assert "<script>" not in html
    assert "nothing" not in html


@pytest.mark.parametrize("name", ["Run", "Slide", "Bag", "Predictions", "Explanation", "Cohort"])
def test_every_public_object_shows_itself(name: str) -> None:
    kind = getattr(caprmil, name)
    assert "_repr_html_" in vars(kind)
    assert "__repr__" in vars(kind)
