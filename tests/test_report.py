"""Reports: one file, nothing from the network, and the numbers of the explanation."""

import json
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from jinja2 import UndefinedError
from markupsafe import Markup
from PIL import Image
from sklearn.metrics import confusion_matrix, roc_auc_score
from typer.testing import CliRunner

from caprmil import explain, report
from caprmil.cli import app
from caprmil.errors import CaprmilError
from caprmil.evaluation.predictions import Predictions
from caprmil.explain import ExplainedSlide, flips
from caprmil.explain.browser import pack
from caprmil.features import bags
from caprmil.models import create
from caprmil.report import (
    html_page,
    patch_pictures,
    report_files,
    run_page,
    slide_page,
    text_format,
)
from caprmil.report.class_parts import ClassParts, confusion, reliability, roc
from caprmil.report.evidence_section import EvidenceSum, evidence_section
from caprmil.report.mistake_section import slide_picture
from caprmil.report.patch_pictures import MAX_PICTURES, PatchPictures, Picture
from caprmil.report.report_inputs import RunInputs, SlideInputs
from caprmil.runs.run import Run
from caprmil.slides.qc import Record
from caprmil.synthetic import RareSignal, Section
from caprmil.targets import Classification

pytestmark = pytest.mark.slow

INJECTION = "</script><img src=x onerror=alert(1)>"
KINDS = {"encoder": "synthetic", "mpp": 1.0}
PLACED = {**KINDS, "patch_px": 224, "patch_level0": 224.0, "step": 224.0}


class Reader(HTMLParser):
    """All tags of a page with their attributes, its text, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += f" {data}"

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def explain_bag(run: Run, bag: Path, pixels: Path | None = None) -> ExplainedSlide:
    return explain.explain_slide(run, explain.locate_slide(run, bag, pixels=pixels), device="cpu")


@pytest.fixture(scope="module")
def slide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small slide with a bag of random features next to it."""
    folder = tmp_path_factory.mktemp("slide_file")
    section = Section(seed=1, width=896, height=672, mpp=1.0, tumour=0.2)
    coords = 224 * np.stack(np.divmod(np.arange(12), 3), axis=1)
    features = RareSignal(width=64, patches=(12, 13)).bag(1)[0]
    bags.write(folder / "new.h5", features, coords, **PLACED, slide_mpp=1.0)
    return section.write(folder / "new.tiff")


@pytest.fixture(scope="module")
def with_pixels(tiny_run: Run, slide_file: Path) -> ExplainedSlide:
    """A new slide with its slide file."""
    return explain_bag(tiny_run, slide_file.with_suffix(".h5"), slide_file)


@pytest.fixture(scope="module")
def page(tiny_run: Run, with_pixels: ExplainedSlide) -> Reader:
    return Reader(report.slide_report(tiny_run, with_pixels))


@pytest.fixture(scope="module")
def run_html(tiny_run: Run) -> str:
    return report.run_report(tiny_run, links={"slide_003": "slides/slide_003.html"})


@pytest.fixture(scope="module")
def bag_only(tiny_run: Run) -> ExplainedSlide:
    """A slide of the run, without a slide file."""
    return explain.explain_slide(
        tiny_run, explain.locate_slide(tiny_run, "slide_003"), device="cpu"
    )


@pytest.fixture
def copy(tiny_run: Run, tmp_path: Path) -> Run:
    """A copy of the finished run, to be changed."""
    return Run(shutil.copytree(tiny_run.folder, tmp_path / "copy"))


def caprmil(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# One file


def check_offline(text: str) -> None:
    read = Reader(text)
    names = {name for name, _ in read.tags}
    assert not names & {"link", "iframe", "object", "embed", "base", "form", "audio", "video"}
    for _, attributes in read.tags:
        assert not any(key.startswith("on") or key == "style" for key in attributes)
        for key in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(key) or ""
            assert value.startswith(("data:image/", "#", "slides/")) or not value
    assert not re.search(r"@import|url\((?!#f[0-9a-f]{8}-\d+\))", text)
    assert "default-src 'none'" in str(read.all("meta")[1]["content"])


def test_a_slide_report_loads_nothing_from_the_network(
    tiny_run: Run, with_pixels: ExplainedSlide
) -> None:
    check_offline(report.slide_report(tiny_run, with_pixels))


def test_a_run_report_loads_nothing_from_the_network(run_html: str) -> None:
    check_offline(run_html)


def test_only_our_own_script_may_run(page: Reader) -> None:
    policy = str(page.all("meta")[1]["content"])
    assert html_page.digest(page.scripts[-1]) in policy
    assert "unsafe" not in policy
    assert len(page.scripts) == 3


def test_a_section_is_added_by_one_line(
    tiny_run: Run, bag_only: ExplainedSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def section(inputs: SlideInputs | RunInputs) -> Markup:
        return Markup("<section>{} & more</section>").format(inputs.run.facts.model)

    monkeypatch.setattr(slide_page, "SECTIONS", (*slide_page.SECTIONS, section))
    monkeypatch.setattr(run_page, "SECTIONS", (section, run_page.headline_section))
    expected = "<section>caprmil & more</section>"
    assert expected in report.slide_report(tiny_run, bag_only)
    assert expected in report.run_report(tiny_run)


def test_a_page_is_small(tiny_run: Run, with_pixels: ExplainedSlide) -> None:
    assert len(report.slide_report(tiny_run, with_pixels)) < 1_000_000


# Escaping


def test_no_name_becomes_html_or_script(copy: Run, tmp_path: Path) -> None:
    for path in copy.folder.rglob("*"):
        if path.suffix in (".csv", ".json") and path.name != "config.json":
            path.write_text(path.read_text().replace("tumour", INJECTION))
    bag = tmp_path / "<img src=x onerror=alert(1)>.h5"
    shutil.copy(copy.paths["slide_003"], bag)
    run = Run(copy.folder)
    explained = explain_bag(run, bag)
    for text in (report.slide_report(run, explained), report.run_report(run)):
        check_offline(text)
        read = Reader(text)
        assert len(read.scripts) == 3
        assert "<img src=x onerror=alert(1)>" in read.text
        assert all(str(image["src"]).startswith("data:") for image in read.all("img"))
    assert (
        json.loads(Reader(report.slide_report(run, explained)).scripts[0])["contrasts"][1]["name"]
        == INJECTION
    )


def test_templates_escape_text_but_not_markup() -> None:
    template = html_page.environment().from_string('<a href="{{ a }}">{{ b }}</a>')
    html = template.render(a='"x"', b="<b>")
    assert html == '<a href="&#34;x&#34;">&lt;b&gt;</a>'
    assert template.render(a="", b=Markup("<b>")) == '<a href=""><b></a>'
    assert "<" not in html_page.as_json({"name": INJECTION})


def test_a_template_with_a_missing_value_fails() -> None:
    with pytest.raises(UndefinedError, match="'urls' is undefined"):
        html_page.render("patch_symbols.html", px=1)


def test_a_name_that_is_not_unicode_does_not_break_a_page(
    tiny_run: Run, bag_only: ExplainedSlide, tmp_path: Path
) -> None:
    reference = replace(bag_only.reference, name="\udcff&")
    text = report.slide_report(tiny_run, replace(bag_only, reference=reference))
    assert "<h1>?&amp;</h1>" in text
    (tmp_path / "page.html").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "ä ö", "", ".", "x" * 300, "CON?"])
def test_slides_never_share_a_file_name(name: str) -> None:
    safe = report.safe_name(name)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,115}\.html", safe)
    assert safe != report.safe_name(f"{name} ")
    assert report.safe_name("slide_003") == "slide_003.html"


# Numbers


def test_the_page_holds_the_numbers_of_the_explanation(
    with_pixels: ExplainedSlide, page: Reader
) -> None:
    facts, data = json.loads(page.scripts[0]), b64decode(page.scripts[1])
    for shown, layer in zip(facts["layers"], with_pixels.explanation.layers(), strict=True):
        kind = np.uint8 if shown["bytes"] else np.float32
        values = np.frombuffer(data, kind, count=facts["patches"], offset=shown["start"])
        atol = 1 / 255 if shown["bytes"] else 0
        np.testing.assert_allclose(values / (255 if shown["bytes"] else 1), layer.values, atol=atol)


def sum_in(read: Reader) -> list[float]:
    return [float(str(cell["data-value"])) for cell in read.all("td") if "data-value" in cell]


def test_the_evidence_adds_up_to_the_difference_of_the_logits(
    with_pixels: ExplainedSlide, page: Reader
) -> None:
    rest, positive_sum, negative_sum, difference = sum_in(page)
    logits = with_pixels.explanation.logits.astype(float)
    of = int(with_pixels.answer.mean.argmax())
    assert rest + positive_sum + negative_sum == pytest.approx(difference, abs=1e-12)
    assert difference == pytest.approx(logits[of] - logits[1 - of], abs=1e-5)
    evidence = with_pixels.explanation.evidence_for(of).astype(float)
    assert positive_sum == pytest.approx(evidence[evidence > 0].sum())
    assert negative_sum == pytest.approx(evidence[evidence < 0].sum())


def test_regions_are_listed_with_what_is_predicted_without_them(
    tiny_run: Run, with_pixels: ExplainedSlide, page: Reader
) -> None:
    effects = with_pixels.regions
    assert effects is not None
    numbers = [int(tag["data-region"] or 0) for tag in page.all("button") if "data-region" in tag]
    assert numbers == [region.number for region in effects.regions]
    model, bag = tiny_run.model(with_pixels.explanation.fold), bags.read(with_pixels.reference.bag)
    for region in effects.regions:
        left = np.setdiff1d(np.arange(12), region.rows)
        with torch.no_grad():
            logits = model(torch.from_numpy(bag.features[left])[None].float()).logits[0]
        before, after = effects.answer[effects.of], float(logits.softmax(dim=0)[effects.of])
        change = f"{text_format.percent(before)} → {text_format.percent(after)}"
        assert f"{change}  without region {region.number}" in page.text
        assert f"{0.05 * len(region.rows):.2g} mm²" in page.text  # 224 um on a side


def test_the_picture_of_a_region_is_cut_out_of_the_slide(
    with_pixels: ExplainedSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pixels(picture: Picture | None) -> np.ndarray:
        assert picture is not None
        data = b64decode(picture.url.partition(",")[2])
        return np.asarray(Image.open(BytesIO(data))).astype(float)

    with with_pixels.open_slide() as slide:  # type: ignore[union-attr]
        read = pixels(PatchPictures(with_pixels, slide).square(100, 50, 448))
        monkeypatch.setattr(patch_pictures, "MAX_READ", 100)
        cut = pixels(PatchPictures(with_pixels, slide).square(100, 50, 448))
        beyond = pixels(PatchPictures(with_pixels, slide).square(-400, -400, 448))
        expected = slide.read(100, 50, 448, 224).astype(float)
    assert np.abs(read - expected).mean() < 6  # a JPEG
    assert np.abs(cut - expected).mean() < 12
    assert beyond[:150, :150].min() > 245


def test_half_of_the_evidence_is_counted_from_the_strongest_patch() -> None:
    evidence = EvidenceSum(terms=np.array([1.0, 6, -3, 2, 3]), rest=0.5, total=9.5)
    assert (evidence.half(), evidence.half(-1)) == (1, 1)
    assert evidence.top() == [1, 4, 3, 0]
    assert evidence.top(-1) == [2]
    assert (evidence.positive, evidence.negative, evidence.gap) == (12, -3, 0)
    assert EvidenceSum(terms=-np.ones(3), rest=0.0, total=-3.0).half() == 0


def test_the_probability_is_that_of_the_run(
    tiny_run: Run, with_pixels: ExplainedSlide, page: Reader
) -> None:
    (shown,) = (float(str(b["data-value"])) for b in page.all("b") if b.get("id"))
    calibrated = with_pixels.answer.calibrated
    expected = tiny_run.predict({"new": with_pixels.reference.bag}, device="cpu").answers[0]
    assert shown == pytest.approx((expected if calibrated is None else calibrated).max(), rel=1e-6)


def test_the_report_says_why_a_probability_is_not_calibrated(
    copy: Run, bag_only: ExplainedSlide
) -> None:
    raw = replace(bag_only, answer=replace(bag_only.answer, calibrated=None))
    fold = bag_only.explanation.fold
    facts = {"temperatures": {fold: 1.0}, "notes": [f"{fold}: the reason, so T = 1."]}
    (copy.folder / "calibration.json").write_text(json.dumps(facts))
    assert f"Not calibrated. {fold}: the reason" in report.slide_report(copy, raw)
    (copy.folder / "calibration.json").unlink()
    assert "the run has no temperatures" in report.slide_report(copy, raw)


def test_a_slide_is_compared_with_all_other_test_slides_by_label(
    tiny_run: Run, bag_only: ExplainedSlide
) -> None:
    read = Reader(report.slide_report(tiny_run, bag_only))
    dots = [c for c in read.all("circle") if c.get("class") == "test-slide"]
    assert len(dots) == len(tiny_run.predictions) - 1
    assert "was predicted for these other test slides:" in read.text


def test_a_prediction_by_models_trained_on_the_slide_is_marked(
    tiny_run: Run, bag_only: ExplainedSlide
) -> None:
    known = replace(bag_only, answer=replace(bag_only.answer, unseen=False))
    assert "has seen this slide in training" in report.slide_report(tiny_run, known)


@pytest.mark.parametrize(
    ("probability", "text"),
    [(1.0, "> 99.9"), (0.9993, "99.9"), (0.5, "50"), (0.004, "0.4"), (0.0, "< 0.1")],
)
def test_a_probability_is_never_shown_as_certain(probability: float, text: str) -> None:
    assert text_format.percent(probability) == f"{text}\u00a0%"


def test_a_share_may_be_all_or_nothing() -> None:
    texts = [text_format.share(share) for share in (1.0, 0.1, 0.05, 1e-5, 0.0)]
    assert texts == ["100\u00a0%", "10\u00a0%", "5.0\u00a0%", "< 0.1\u00a0%", "0\u00a0%"]


# Pictures


def test_each_patch_is_stored_once(page: Reader) -> None:
    symbols = [str(symbol["id"]) for symbol in page.all("symbol")]
    uses = {str(use["href"])[1:] for use in page.all("use")}
    assert len(symbols) == len(set(symbols)) <= MAX_PICTURES
    assert uses <= set(symbols)
    regions = [image for image in page.all("image") if "x" in image]
    assert len(page.all("image")) == len(symbols) + len(regions)


def test_galleries_show_patches_as_they_are_on_the_slide(
    with_pixels: ExplainedSlide, page: Reader
) -> None:
    number = int(str(page.all("symbol")[0]["id"])[1:])
    images = [image for image in page.all("image") if "x" not in image]  # not of regions
    data = str(images[0]["href"]).partition(",")[2]
    shown = np.asarray(Image.open(BytesIO(b64decode(data))), dtype=float)
    opened = with_pixels.open_slide()
    assert opened is not None
    with opened:
        where = with_pixels.patch_boxes(opened)
        assert where is not None
        real = explain.read_patch(opened, where, number).astype(float)
    assert shown.shape == (224, 224, 3)
    assert np.abs(shown - real).mean() < 12


def test_a_bag_without_a_slide_gives_a_report_without_pictures(
    tiny_run: Run, bag_only: ExplainedSlide
) -> None:
    read = Reader(report.slide_report(tiny_run, bag_only))
    assert not read.all("img")
    assert not read.all("image")
    assert "the slide file was not found" in read.text
    assert len([b for b in read.all("button") if b.get("class") == "patch"]) > 8


def test_a_report_says_that_a_bag_has_no_coordinates(tiny_run: Run, tmp_path: Path) -> None:
    features = RareSignal(width=64, patches=(40, 80)).bag(7)[0]
    bag = bags.write(tmp_path / "placeless.h5", features, **KINDS)
    text = report.slide_report(tiny_run, explain_bag(tiny_run, bag))
    assert "has no coordinates: patches are shown row by row" in text


def test_coordinates_in_micrometres_are_shown_as_a_grid_without_the_slide(
    tiny_run: Run, tmp_path: Path
) -> None:
    features = RareSignal(width=64, patches=(12, 13)).bag(7)[0]
    with h5py.File(tmp_path / "stamp.h5", "w") as file:
        file["feats"] = features
        file["coords"] = 256.0 * np.stack(np.divmod(np.arange(12), 3), axis=1)
        file.attrs.update({"unit": "um", "tile_size_um": 256.0, "tile_size_px": 256})
    explained = explain_bag(tiny_run, tmp_path / "stamp.h5")
    facts = pack(explained).facts
    assert (facts["placed"], facts["grid"]["columns"], facts["grid"]["rows"]) == (False, 4, 3)
    text = report.slide_report(tiny_run, explained)
    assert "has coordinates in micrometres" in text
    assert "patches are shown on their grid." in text


def test_a_slide_without_a_scale_has_pictures_and_no_micrometres(
    tiny_run: Run, tmp_path: Path
) -> None:
    features = RareSignal(width=64, patches=(12, 13)).bag(7)[0]
    coords = 224 * np.stack(np.divmod(np.arange(12), 3), axis=1)
    bag = bags.write(tmp_path / "plain.h5", features, coords, **PLACED)
    picture = tmp_path / "plain.png"
    Image.new("RGB", (896, 672), "white").save(picture)
    explained = explain_bag(tiny_run, bag, picture)
    with explained.open_slide() as opened:
        facts = pack(explained, opened).facts
    assert (facts["pixels"], facts["mpp"]) == (True, None)
    assert "data:image/jpeg" in report.slide_report(tiny_run, explained)


@pytest.mark.parametrize("empty", [True, False])
def test_the_report_of_a_damaged_slide_has_no_pictures(
    tiny_run: Run, with_pixels: ExplainedSlide, tmp_path: Path, empty: bool
) -> None:
    whole = Path(str(with_pixels.reference.pixels)).read_bytes()
    (tmp_path / "new.tiff").write_bytes(b"no slide" if empty else whole[: len(whole) // 3])
    broken = replace(
        with_pixels, reference=replace(with_pixels.reference, pixels=tmp_path / "new.tiff")
    )
    assert "There are no pictures: " in report.slide_report(tiny_run, broken)


def test_quality_flags_are_shown_as_sentences(tiny_run: Run, bag_only: ExplainedSlide) -> None:
    record = Record(slide="s", state="done", patches=9, tissue_mm2=1.5, flags="pen; faint")
    recorded = replace(bag_only, reference=replace(bag_only.reference, record=record))
    read = Reader(report.slide_report(tiny_run, recorded))
    assert "There are pen marks on the slide" in read.text
    assert "The stain is faint" in read.text
    assert "in 9 patches" in read.text


# Other models


def of_model(explained: ExplainedSlide, name: str, **settings: object) -> ExplainedSlide:
    bag = bags.read(explained.reference.bag)
    model = create(name, 64, len(explained.explanation.names), **settings)
    explanation = explain.explain(model, bag, target=explained.explanation.target, fold="fold-0")
    return replace(explained, explanation=explanation)


def test_a_model_without_tokens_has_no_token_section(
    tiny_run: Run, bag_only: ExplainedSlide
) -> None:
    text = report.slide_report(tiny_run, of_model(bag_only, "abmil"))
    assert 'id="tokens"' not in text
    assert "They add up exactly." in text
    assert "This is not what the prediction depends on" in text


def test_estimated_evidence_is_called_an_estimate(tiny_run: Run, bag_only: ExplainedSlide) -> None:
    explained = of_model(bag_only, "transmil", dim=16)
    assert not explained.explanation.exact
    read = Reader(report.slide_report(tiny_run, explained))
    assert "estimates by integrated gradients" in read.text
    assert "corresponds to a probability" not in read.text  # it differs from the logit
    rest, positive, negative, total = sum_in(read)
    assert rest + positive + negative == pytest.approx(total)


def test_the_report_of_a_random_model_says_what_its_evidence_adds_up_to(
    tiny_run: Run, bag_only: ExplainedSlide
) -> None:
    explained = of_model(bag_only, "bayesmil")
    assert explained.explanation.spread is not None
    read = Reader(report.slide_report(tiny_run, explained))
    assert ("mean logit over its draws" in read.text) == explained.explanation.exact
    assert "corresponds to a probability" not in read.text


def test_evidence_is_shown_for_the_likeliest_of_many_classes(
    tiny_run: Run, bag_only: ExplainedSlide
) -> None:
    bag = bags.read(bag_only.reference.bag)
    explanation = explain.explain(
        create("mean", 64, 7), bag, target=Classification(classes=tuple("abcdefg")), fold="fold-0"
    )
    answer = replace(
        bag_only.answer,
        mean=explanation.answer,
        calibrated=None,
        by_fold={"fold-0": explanation.answer},
    )
    explained = replace(bag_only, explanation=explanation, answer=answer)
    inputs = SlideInputs(
        run=tiny_run,
        explained=explained,
        parts=ClassParts(tiny_run),
        pictures=PatchPictures(explained, None),
        numbers=pack(explained),
        has_heads=False,
        no_pictures="",
    )
    text = evidence_section(inputs)
    assert len(Reader(text).all("details")) == 3
    assert "3 less likely classes are shown on the map only" in text


def test_the_report_of_a_huge_bag_stays_small(tiny_run: Run, tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(100_000, 64)).astype(np.float16)
    coords = 224 * np.stack(np.divmod(np.arange(100_000), 320), axis=1)
    bag = bags.write(tmp_path / "huge.h5", features, coords, **PLACED)
    text = report.slide_report(tiny_run, explain_bag(tiny_run, bag))
    assert len(text) < 7_000_000
    assert "Maps of single heads are left out" in text
    assert not any("head-" in n["key"] for n in json.loads(Reader(text).scripts[0])["layers"])


def test_layers_without_heads_keep_their_numbers(
    bag_only: ExplainedSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack(bag_only)
    monkeypatch.setattr(slide_page, "MAX_BYTES", 10)
    less, has_heads = slide_page.limit_layers(whole)
    assert not has_heads
    assert len(less.data) < len(whole.data)
    before = {layer["key"]: layer for layer in whole.facts["layers"]}
    for layer in less.facts["layers"]:
        size = whole.facts["patches"] * (1 if layer["bytes"] else 4)
        start, was = layer["start"], before[layer["key"]]["start"]
        assert start % 4 == 0
        assert less.data[start : start + size] == whole.data[was : was + size]


# Runs


def test_a_run_report_lists_every_slide_and_score(tiny_run: Run, run_html: str) -> None:
    read = Reader(run_html)
    for name in tiny_run.predictions.slides:
        assert name in read.text
    for metric in tiny_run.scores["metrics"].values():
        assert f"{metric['mean_over_folds']:.3f}" in read.text
    assert {"fold-0", "fold-1", "fold-2"} <= set(read.text.split())
    assert "patch count" in read.text


def test_the_confusion_matrix_is_that_of_sklearn(tiny_run: Run, run_html: str) -> None:
    table = tiny_run.predictions
    expected = confusion_matrix(np.asarray(table.labels), table.answers.argmax(axis=1))
    np.testing.assert_array_equal(confusion(table), expected)
    cells = [c for c in Reader(run_html).all("td") if "data-count" in c]
    assert [int(str(c["data-count"])) for c in cells] == expected.ravel().tolist()


@pytest.mark.parametrize("folds", [("a",) * 30 + ("b",) * 30, None])
def test_a_run_of_many_classes_has_a_curve_for_each(
    tiny_run: Run, folds: tuple[str, ...] | None
) -> None:
    rng = np.random.default_rng(0)
    table = Predictions(
        slides=tuple(f"s{n}" for n in range(60)),
        target=Classification(classes=("a", INJECTION, "c")),
        answers=rng.dirichlet(np.ones(3), size=60),
        labels=rng.integers(3, size=60),
        folds=folds,
    )
    labels = np.asarray(table.labels)
    aucs = [roc_auc_score(labels == n, table.answers[:, n]) for n in range(3)]
    drawn = Reader(roc(table))
    for name, area in zip(table.target.names, aucs, strict=True):
        assert f"{name} ({area:.3f})" in drawn.text
    bins = re.findall(r"(\d+) slides, mean probability", Reader(reliability(table)).text)
    assert [int(n) for n in bins] == [10] * 6
    cells = Reader(ClassParts(tiny_run).results(table)).all("td")
    assert sum(int(str(cell["data-count"])) for cell in cells) == 60


def test_the_worst_mistakes_come_first(tiny_run: Run) -> None:
    parts, table = ClassParts(tiny_run), tiny_run.predictions
    labels, p = np.asarray(table.labels), table.answers
    rows = parts.worst(replace(table, labels=1 - labels), 100)
    assert set(rows) == set(np.flatnonzero(p.argmax(axis=1) != 1 - labels))
    assert sorted(rows, key=lambda n: p[n, 1 - labels[n]]) == rows
    for code, row in enumerate(parts.best(table)):
        assert labels[row] == code


def test_a_mistake_has_a_thumbnail_or_the_picture_from_quality_control(
    copy: Run, slide_file: Path, tmp_path: Path
) -> None:
    copy.paths = {"new": str(slide_file.with_suffix(".h5"))}
    picture = slide_picture(copy, "new", slide_file.parent)
    assert picture is not None
    assert picture.url.startswith("data:image/jpeg")
    copy.paths = {"new": str(tmp_path / "new.h5")}
    assert slide_picture(copy, "new") is None
    (tmp_path / "qc").mkdir()
    Image.new("RGB", (900, 600)).save(tmp_path / "qc" / "new.png")
    picture = slide_picture(copy, "new")
    assert picture is not None
    assert "with tissue and grid" in picture.alt


def test_links_lead_to_existing_reports(copy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "SLIDES", 2)
    path, written, missing = report.write_run_report(copy, slides=2, device="cpu")
    assert path == copy.folder / "report" / "index.html"
    hrefs = {str(a["href"]) for a in Reader(path.read_text()).all("a")}
    assert {path.parent / href for href in hrefs} == set(written)
    assert all(target.exists() for target in written)
    assert missing == []


def test_a_run_with_missing_bags_still_has_a_report(copy: Run) -> None:
    copy.paths = dict.fromkeys(copy.paths, "/nowhere/slide.h5")
    path, written, missing = report.write_run_report(copy, slides=1, device="cpu")
    assert (path.exists(), written) == (True, [])
    assert "is no longer at" in missing[0]


def test_a_slide_report_of_an_unfinished_run_has_no_test_slides(
    copy: Run, bag_only: ExplainedSlide
) -> None:
    (copy.folder / "scores.json").unlink()
    run = Run(copy.folder)
    assert "no test slides to compare with" in report.slide_report(
        run, replace(bag_only, label=None)
    )
    with pytest.raises(CaprmilError, match="not finished"):
        report.run_report(run)


# Commands


def test_reports_in_the_folder_of_the_run_are_replaced(copy: Run) -> None:
    output = caprmil("report", copy.folder, "slide_003", "--device", "cpu")
    path = copy.folder / "report" / "slides" / "slide_003.html"
    assert f"Written to {path}" in output
    path.write_text("old")
    caprmil("report", copy.folder, "slide_003", "--device", "cpu")
    assert "slide_003" in path.read_text()


@pytest.mark.parametrize("slides", [["slide_003"], []])
def test_a_named_file_is_never_overwritten(copy: Run, tmp_path: Path, slides: list[str]) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    with pytest.raises(CaprmilError, match="already exists"):
        caprmil("report", copy.folder, *slides, "--out", mine)
    assert mine.read_text() == "mine"


def test_several_reports_go_into_a_folder(tiny_run: Run, slide_file: Path, tmp_path: Path) -> None:
    bag, out = slide_file.with_suffix(".h5"), tmp_path / "out"
    caprmil("report", tiny_run.folder, "slide_003", bag, "--out", out, "--device", "cpu")
    assert {path.name for path in out.iterdir()} == {"slide_003.html", "new.html"}
    assert not (tiny_run.folder / "report").exists()


def test_a_slide_file_can_be_given(tiny_run: Run, slide_file: Path, tmp_path: Path) -> None:
    bag = shutil.copy(slide_file.with_suffix(".h5"), tmp_path / "new.h5")
    options = ("--slide", slide_file, "--out", tmp_path / "new.html", "--device", "cpu")
    caprmil("report", tiny_run.folder, bag, *options)
    assert "<symbol" in (tmp_path / "new.html").read_text()


def test_a_slide_file_is_encoded_into_the_folder_of_the_run(
    copy: Run, slide_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def encode(run: Run, inputs: list[Path], out: Path, **options: object) -> tuple[dict, list]:
        calls.append((inputs, out))
        return {"new": slide_file.with_suffix(".h5")}, []

    monkeypatch.setattr(report_files, "bags_of", encode)
    caprmil("report", copy.folder, slide_file, "--slide", slide_file, "--device", "cpu")
    assert calls == [([slide_file], copy.folder / "report" / "features")]
    assert (copy.folder / "report" / "slides" / "new.html").exists()


def test_an_unknown_slide_is_refused_with_a_list_of_known_ones(tiny_run: Run) -> None:
    with pytest.raises(CaprmilError, match=r"neither a slide of .* nor a bag file"):
        caprmil("report", tiny_run.folder, "slide_999")


def test_a_report_of_a_run_refuses_a_single_slide_file(tiny_run: Run, slide_file: Path) -> None:
    with pytest.raises(CaprmilError, match="name the folder of its slides"):
        caprmil("report", tiny_run.folder, "--slide", slide_file)


def test_a_report_of_a_run_refuses_a_single_fold(tiny_run: Run) -> None:
    with pytest.raises(CaprmilError, match="--fold is for reports of slides"):
        caprmil("report", tiny_run.folder, "--fold", "fold-0")
