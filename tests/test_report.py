"""What a report promises: one file, nothing from outside, and the numbers of the explanation."""

import json
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix
from typer.testing import CliRunner

from caprmil import explain, report
from caprmil.cli import app
from caprmil.errors import CaprmilError
from caprmil.explain import Case
from caprmil.explain.browser import pack
from caprmil.features import bags
from caprmil.models import create
from caprmil.report import page, scores, slide, words, writing
from caprmil.report.evidence import Ledger
from caprmil.report.pictures import MOST
from caprmil.runs.run import Run
from caprmil.slides.qc import Record
from caprmil.synthetic import RareSignal, Section

NASTY = "</script><img src=x onerror=alert(1)>"
KINDS = {"encoder": "synthetic", "mpp": 1.0}
PLACED = {**KINDS, "patch_px": 224, "patch_level0": 224.0, "step": 224.0}


class Reader(HTMLParser):
    """All tags of a page with their attributes, and what stands in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
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
            self.words += f" {data}"

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def case_of(run: Run, bag: Path, pixels: Path | None = None) -> Case:
    return explain.examine(run, explain.find(run, bag, pixels=pixels), device="cpu")


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small slide with a bag of random features beside it."""
    folder = tmp_path_factory.mktemp("pixels")
    section = Section(seed=1, width=896, height=672, mpp=1.0, tumour=0.2)
    coords = 224 * np.stack(np.divmod(np.arange(12), 3), axis=1)
    features = RareSignal(width=64, patches=(12, 13)).bag(1)[0]
    bags.write(folder / "new.h5", features, coords, **PLACED, slide_mpp=1.0)
    return section.write(folder / "new.tiff")


@pytest.fixture(scope="module")
def seen(tiny_run: Run, pixels: Path) -> Case:
    """A new slide whose pixels are at hand."""
    return case_of(tiny_run, pixels.with_suffix(".h5"), pixels)


@pytest.fixture(scope="module")
def seen_page(tiny_run: Run, seen: Case) -> Reader:
    return Reader(report.slide_report(tiny_run, seen))


@pytest.fixture
def own(tiny_run: Run) -> Case:
    """A slide of the run: its bag alone."""
    return explain.examine(tiny_run, explain.find(tiny_run, "slide_003"), device="cpu")


@pytest.fixture
def copy(tiny_run: Run, tmp_path: Path) -> Run:
    """The finished run, to be written into."""
    return Run(shutil.copytree(tiny_run.folder, tmp_path / "copy"))


def caprmil(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# One file


def refuse_outside(text: str) -> None:
    read = Reader(text)
    names = {name for name, _ in read.tags}
    assert not names & {"link", "iframe", "object", "embed", "base", "form", "audio", "video"}
    for _, attributes in read.tags:
        assert not any(key.startswith("on") or key == "style" for key in attributes)
        for key in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(key) or ""
            assert value.startswith(("data:image/", "#", "slides/")) or not value
    assert not re.search(r"@import|url\(", text)
    assert "default-src 'none'" in str(read.all("meta")[1]["content"])


def test_a_slide_report_needs_nothing_from_outside(tiny_run: Run, seen: Case) -> None:
    refuse_outside(report.slide_report(tiny_run, seen))


def test_a_run_report_needs_nothing_from_outside(tiny_run: Run) -> None:
    refuse_outside(report.run_report(tiny_run, links={"slide_003": "slides/slide_003.html"}))


def test_only_our_own_script_may_run(seen_page: Reader) -> None:
    policy = str(seen_page.all("meta")[1]["content"])
    assert page._digest(seen_page.scripts[-1]) in policy
    assert "unsafe" not in policy
    assert len(seen_page.scripts) == 3


def test_a_page_is_small(tiny_run: Run, seen: Case) -> None:
    assert len(report.slide_report(tiny_run, seen)) < 1_000_000


# Names that would be code


def test_no_name_becomes_code(copy: Run, tmp_path: Path) -> None:
    for path in copy.folder.rglob("*"):
        if path.suffix in (".csv", ".json") and path.name != "config.json":
            path.write_text(path.read_text().replace("tumour", NASTY))
    bag = tmp_path / "<img src=x onerror=alert(1)>.h5"
    shutil.copy(copy.paths["slide_003"], bag)
    run = Run(copy.folder)
    case = case_of(run, bag)
    for text in (report.slide_report(run, case), report.run_report(run)):
        refuse_outside(text)
        read = Reader(text)
        assert len(read.scripts) == 3
        assert "<img src=x onerror=alert(1)>" in read.words
        assert all(str(image["src"]).startswith("data:") for image in read.all("img"))
    assert json.loads(Reader(report.slide_report(run, case)).scripts[0])["classes"][1] == NASTY


def test_text_is_escaped_unless_it_is_html() -> None:
    assert page.tag("p", "<b>", page.Html("<i>")) == "<p>&lt;b&gt;<i></p>"
    assert page.tag("a", href='"x"') == '<a href="&quot;x&quot;"></a>'
    assert page.text("\udcff&") == "?&amp;"
    assert "<" not in page.as_json({"name": NASTY})


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "ä ö", "", ".", "x" * 300, "CON?"])
def test_any_slide_has_a_file_name_of_its_own(name: str) -> None:
    safe = report.safe_name(name)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,115}\.html", safe)
    assert safe != report.safe_name(f"{name} ")
    assert report.safe_name("slide_003") == "slide_003.html"


# Numbers


def test_the_page_holds_the_numbers_of_the_explanation(seen: Case, seen_page: Reader) -> None:
    facts, data = json.loads(seen_page.scripts[0]), b64decode(seen_page.scripts[1])
    for said, layer in zip(facts["layers"], seen.explanation.layers(), strict=True):
        kind = np.uint8 if said["bytes"] else np.float32
        values = np.frombuffer(data, kind, count=facts["patches"], offset=said["start"])
        atol = 1 / 255 if said["bytes"] else 0
        np.testing.assert_allclose(values / (255 if said["bytes"] else 1), layer.values, atol=atol)


def ledger_in(read: Reader) -> list[float]:
    return [float(str(cell["data-value"])) for cell in read.all("td") if "data-value" in cell]


def test_the_ledger_adds_up_to_the_models_lead(seen: Case, seen_page: Reader) -> None:
    rest, plus, minus, lead = ledger_in(seen_page)
    logits = seen.explanation.logits.astype(float)
    of = int(seen.answer.probabilities.argmax())
    assert rest + plus + minus == pytest.approx(lead, abs=1e-12)
    assert lead == pytest.approx(logits[of] - logits[1 - of], abs=1e-5)
    towards = seen.explanation.towards(of).astype(float)
    assert plus == pytest.approx(towards[towards > 0].sum())
    assert minus == pytest.approx(towards[towards < 0].sum())


def test_half_of_the_evidence_is_counted_from_the_strongest_patch() -> None:
    ledger = Ledger(terms=np.array([1.0, 6, -3, 2, 3]), rest=0.5, lead=9.5)
    assert (ledger.half(), ledger.half(-1)) == (1, 1)
    assert ledger.top() == [1, 4, 3, 0]
    assert ledger.top(-1) == [2]
    assert (ledger.plus, ledger.minus, ledger.gap) == (12, -3, 0)
    assert Ledger(terms=-np.ones(3), rest=0.0, lead=-3.0).half() == 0


def test_the_probability_is_that_of_the_run(tiny_run: Run, seen: Case, seen_page: Reader) -> None:
    (said,) = (float(str(b["data-value"])) for b in seen_page.all("b") if b.get("id"))
    sure = seen.answer.calibrated if seen.answer.calibrated is not None else None
    told = tiny_run.predict({"new": seen.subject.bag}, device="cpu").probabilities[0]
    assert said == pytest.approx(told.max() if sure is None else sure.max(), rel=1e-6)


def test_what_is_not_calibrated_says_why(copy: Run, own: Case) -> None:
    raw = replace(own, answer=replace(own.answer, calibrated=None))
    fold = own.explanation.fold
    facts = {"temperatures": {fold: 1.0}, "notes": [f"{fold}: the reason, so T = 1."]}
    (copy.folder / "calibration.json").write_text(json.dumps(facts))
    assert f"Not calibrated. {fold}: the reason" in report.slide_report(copy, raw)
    (copy.folder / "calibration.json").unlink()
    assert "the run has no temperatures" in report.slide_report(copy, raw)


def test_a_slide_is_set_beside_all_others_by_label(tiny_run: Run, own: Case) -> None:
    read = Reader(report.slide_report(tiny_run, own))
    dots = [c for c in read.all("circle") if c.get("class") == "peer"]
    assert len(dots) == len(tiny_run.predictions) - 1
    assert "Of the other test slides," in read.words


def test_an_answer_of_models_that_knew_the_slide_is_marked(tiny_run: Run, own: Case) -> None:
    known = replace(own, answer=replace(own.answer, unseen=False))
    assert "has seen this slide in training" in report.slide_report(tiny_run, known)


@pytest.mark.parametrize(
    ("share", "said"),
    [(1.0, "> 99.9"), (0.9993, "99.9"), (0.5, "50"), (0.004, "0.4"), (0.0, "< 0.1")],
)
def test_nothing_is_ever_quite_sure(share: float, said: str) -> None:
    assert words.percent(share) == f"{said}\u00a0%"


def test_shares_may_be_all_or_nothing() -> None:
    said = [words.part(share) for share in (1.0, 0.1, 0.05, 1e-5, 0.0)]
    assert said == ["100\u00a0%", "10\u00a0%", "5.0\u00a0%", "< 0.1\u00a0%", "0\u00a0%"]


# Pictures


def test_each_patch_is_stored_once(seen_page: Reader) -> None:
    symbols = [str(symbol["id"]) for symbol in seen_page.all("symbol")]
    uses = {str(use["href"])[1:] for use in seen_page.all("use")}
    assert len(symbols) == len(set(symbols)) <= MOST
    assert uses <= set(symbols)
    assert len(seen_page.all("image")) == len(symbols)


def test_galleries_show_patches_as_they_are_on_the_slide(seen: Case, seen_page: Reader) -> None:
    from io import BytesIO

    from PIL import Image

    number = int(str(seen_page.all("symbol")[0]["id"])[1:])
    data = str(seen_page.all("image")[0]["href"]).partition(",")[2]
    shown = np.asarray(Image.open(BytesIO(b64decode(data))), dtype=float)
    opened = seen.slide()
    assert opened is not None
    with opened:
        where = seen.squares(opened)
        assert where is not None
        real = explain.cut(opened, where, number).astype(float)
    assert shown.shape == (224, 224, 3)
    assert np.abs(shown - real).mean() < 12


def test_a_bag_alone_gives_a_report_without_pictures(tiny_run: Run, own: Case) -> None:
    read = Reader(report.slide_report(tiny_run, own))
    assert not read.all("img")
    assert not read.all("image")
    assert "the slide's own file was not at hand" in read.words
    assert len([b for b in read.all("button") if b.get("class") == "patch"]) > 8


def test_a_bag_without_places_says_so(tiny_run: Run, tmp_path: Path) -> None:
    features = RareSignal(width=64, patches=(40, 80)).bag(7)[0]
    bag = bags.write(tmp_path / "placeless.h5", features, **KINDS)
    text = report.slide_report(tiny_run, case_of(tiny_run, bag))
    assert "has no coordinates: patches are shown row by row" in text


def test_places_in_micrometres_are_a_grid_without_the_slide(tiny_run: Run, tmp_path: Path) -> None:
    features = RareSignal(width=64, patches=(12, 13)).bag(7)[0]
    with h5py.File(tmp_path / "stamp.h5", "w") as file:
        file["feats"] = features
        file["coords"] = 256.0 * np.stack(np.divmod(np.arange(12), 3), axis=1)
        file.attrs.update({"unit": "um", "tile_size_um": 256.0, "tile_size_px": 256})
    case = case_of(tiny_run, tmp_path / "stamp.h5")
    facts = pack(case).facts
    assert (facts["placed"], facts["grid"]["columns"], facts["grid"]["rows"]) == (False, 4, 3)
    text = report.slide_report(tiny_run, case)
    assert "has places in micrometres" in text
    assert "patches are shown on their grid." in text


def test_a_slide_without_a_scale_has_pictures_and_no_micrometres(
    tiny_run: Run, tmp_path: Path
) -> None:
    features = RareSignal(width=64, patches=(12, 13)).bag(7)[0]
    coords = 224 * np.stack(np.divmod(np.arange(12), 3), axis=1)
    bag = bags.write(tmp_path / "plain.h5", features, coords, **PLACED)
    picture = tmp_path / "plain.png"
    Image.new("RGB", (896, 672), "white").save(picture)
    case = case_of(tiny_run, bag, picture)
    with case.slide() as opened:
        facts = pack(case, opened).facts
    assert (facts["pixels"], facts["mpp"]) == (True, None)
    assert "data:image/jpeg" in report.slide_report(tiny_run, case)


@pytest.mark.parametrize("empty", [True, False])
def test_a_damaged_slide_costs_pictures_and_no_report(
    tiny_run: Run, seen: Case, tmp_path: Path, empty: bool
) -> None:
    whole = Path(str(seen.subject.pixels)).read_bytes()
    (tmp_path / "new.tiff").write_bytes(b"no slide" if empty else whole[: len(whole) // 3])
    broken = replace(seen, subject=replace(seen.subject, pixels=tmp_path / "new.tiff"))
    assert "There are no pictures: " in report.slide_report(tiny_run, broken)


def test_quality_is_said_in_words(tiny_run: Run, own: Case) -> None:
    record = Record(slide="s", state="done", patches=9, tissue_mm2=1.5, flags="pen; faint")
    noted = replace(own, subject=replace(own.subject, record=record))
    read = Reader(report.slide_report(tiny_run, noted))
    assert "There is pen on the slide" in read.words
    assert "The stain is faint" in read.words
    assert "in 9 patches" in read.words


# Other models


def of_model(case: Case, name: str, **settings: object) -> Case:
    bag = bags.read(case.subject.bag)
    model = create(name, 64, len(case.explanation.classes), **settings)
    told = explain.explain(model, bag, classes=case.explanation.classes, fold="fold-0")
    return replace(case, explanation=told)


def test_a_model_without_tokens_has_no_token_section(tiny_run: Run, own: Case) -> None:
    text = report.slide_report(tiny_run, of_model(own, "abmil"))
    assert 'id="tokens"' not in text
    assert "exact, not an estimate" in text


def test_an_estimate_is_called_one(tiny_run: Run, own: Case) -> None:
    case = of_model(own, "transmil", dim=16)
    assert not case.explanation.exact
    read = Reader(report.slide_report(tiny_run, case))
    assert "estimates by integrated gradients" in read.words
    assert "is a probability of" not in read.words  # what misses the logit is none
    rest, plus, minus, lead = ledger_in(read)
    assert rest + plus + minus == pytest.approx(lead)


def test_a_random_model_says_what_its_evidence_is_of(tiny_run: Run, own: Case) -> None:
    case = of_model(own, "bayesmil")
    assert case.explanation.spread is not None
    read = Reader(report.slide_report(tiny_run, case))
    assert ("mean logit over its draws" in read.words) == case.explanation.exact
    assert "is a probability of" not in read.words


def test_of_many_classes_the_likeliest_are_shown(own: Case, tmp_path: Path) -> None:
    classes = tuple("abcdefg")
    bag = bags.read(own.subject.bag)
    told = explain.explain(create("mean", 64, 7), bag, classes=classes, fold="fold-0")
    answer = replace(
        own.answer,
        probabilities=told.probabilities,
        calibrated=None,
        by_fold={"fold-0": told.probabilities},
    )
    from caprmil.report import evidence
    from caprmil.report.pictures import Album

    case = replace(own, explanation=told, answer=answer)
    text = evidence.section(case, Album(case, None))
    assert len(Reader(text).all("details")) == 3
    assert "3 less likely classes: on the map alone" in text


def test_a_huge_bag_gives_a_file_that_opens(tiny_run: Run, tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(100_000, 64)).astype(np.float16)
    coords = 224 * np.stack(np.divmod(np.arange(100_000), 320), axis=1)
    bag = bags.write(tmp_path / "huge.h5", features, coords, **PLACED)
    text = report.slide_report(tiny_run, case_of(tiny_run, bag))
    assert len(text) < 5_000_000
    assert "Maps of single heads were left out" in text
    assert not any("head-" in n["key"] for n in json.loads(Reader(text).scripts[0])["layers"])


def test_lighter_numbers_are_the_same_numbers(own: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from caprmil.explain.browser import pack

    whole = pack(own)
    monkeypatch.setattr(slide, "MOST_BYTES", 10)
    less, heads = slide.light(whole)
    assert not heads
    assert len(less.data) < len(whole.data)
    before = {layer["key"]: layer for layer in whole.facts["layers"]}
    for layer in less.facts["layers"]:
        size = whole.facts["patches"] * (1 if layer["bytes"] else 4)
        start, was = layer["start"], before[layer["key"]]["start"]
        assert start % 4 == 0
        assert less.data[start : start + size] == whole.data[was : was + size]


# Runs


def test_a_run_report_lists_every_slide_and_score(tiny_run: Run) -> None:
    read = Reader(report.run_report(tiny_run))
    for name in tiny_run.predictions.slides:
        assert name in read.words
    for metric in tiny_run.scores["metrics"].values():
        assert f"{metric['mean_over_folds']:.3f}" in read.words
    assert {"fold-0", "fold-1", "fold-2"} <= set(read.words.split())
    assert "patch count" in read.words


def test_the_confusion_matrix_is_sklearns(tiny_run: Run) -> None:
    answers = tiny_run.predictions
    expected = confusion_matrix(np.asarray(answers.labels), answers.probabilities.argmax(axis=1))
    np.testing.assert_array_equal(scores.confused(answers), expected)
    cells = [c for c in Reader(report.run_report(tiny_run)).all("td") if "data-count" in c]
    assert [int(str(c["data-count"])) for c in cells] == expected.ravel().tolist()


@pytest.mark.parametrize("folds", [("a",) * 30 + ("b",) * 30, None])
def test_runs_of_many_classes_have_a_curve_for_each(folds: tuple[str, ...] | None) -> None:
    from caprmil.evaluation.predictions import Predictions
    from caprmil.report import curves

    rng = np.random.default_rng(0)
    table = Predictions(
        slides=tuple(f"s{n}" for n in range(60)),
        classes=("a", NASTY, "c"),
        probabilities=rng.dirichlet(np.ones(3), size=60),
        labels=rng.integers(3, size=60),
        folds=folds,
    )
    drawn = Reader(curves.roc(table))
    kinds = [str(line["class"]) for line in drawn.all("polyline")]
    assert len([kind for kind in kinds if "thickish" in kind]) == 2 * 3  # and their keys
    assert f"{NASTY} against the rest" in drawn.words
    dots = Reader(curves.reliability(table)).all("circle")
    assert len(dots) == 6  # ten slides a bin
    cells = Reader(scores.confusion(table)).all("td")
    assert sum(int(str(cell["data-count"])) for cell in cells) == 60


def test_mistakes_are_the_surest_first(tiny_run: Run) -> None:
    from caprmil.report import mistakes

    answers = tiny_run.predictions
    labels, p = np.asarray(answers.labels), answers.probabilities
    flipped = replace(answers, labels=1 - labels)
    rows = mistakes.worst(flipped, 100)
    assert set(rows) == set(np.flatnonzero(p.argmax(axis=1) != 1 - labels))
    assert sorted(rows, key=lambda n: p[n, 1 - labels[n]]) == rows
    for code, row in enumerate(mistakes.surest(answers)):
        assert labels[row] == code


def test_a_mistake_shows_its_slide_or_the_picture_of_it_or_says_why(
    copy: Run, pixels: Path, tmp_path: Path
) -> None:
    from PIL import Image

    from caprmil.report.mistakes import portrait

    copy.paths = {"new": str(pixels.with_suffix(".h5"))}
    assert "data:image/jpeg" in portrait(copy, "new", pixels.parent)
    copy.paths = {"new": str(tmp_path / "new.h5")}
    assert "No picture" in portrait(copy, "new")
    (tmp_path / "qc").mkdir()
    Image.new("RGB", (900, 600)).save(tmp_path / "qc" / "new.png")
    assert "with tissue and grid" in portrait(copy, "new")


def test_links_lead_to_reports_that_are_there(copy: Run) -> None:
    path, written, missing = report.write_run(copy, slides=2, device="cpu")
    assert path == copy.folder / "report" / "index.html"
    hrefs = {str(a["href"]) for a in Reader(path.read_text()).all("a")}
    assert {path.parent / href for href in hrefs} == set(written)
    assert all(target.exists() for target in written)
    assert missing == []


def test_a_run_whose_bags_are_gone_still_has_a_report(copy: Run) -> None:
    copy.paths = dict.fromkeys(copy.paths, "/nowhere/slide.h5")
    path, written, missing = report.write_run(copy, slides=1, device="cpu")
    assert (path.exists(), written) == (True, [])
    assert "is no longer at" in missing[0]


def test_a_slide_report_of_an_unfinished_run_has_no_cohort(copy: Run, own: Case) -> None:
    (copy.folder / "scores.json").unlink()
    run = Run(copy.folder)
    assert "no test slides to compare with" in report.slide_report(run, replace(own, label=None))
    with pytest.raises(CaprmilError, match="not finished"):
        report.run_report(run)


# Commands


def test_reports_in_the_run_are_made_anew(copy: Run) -> None:
    said = caprmil("report", copy.folder, "slide_003", "--device", "cpu")
    path = copy.folder / "report" / "slides" / "slide_003.html"
    assert f"Written to {path}" in said
    path.write_text("old")
    caprmil("report", copy.folder, "slide_003", "--device", "cpu")
    assert "slide_003" in path.read_text()


@pytest.mark.parametrize("what", [["slide_003"], []])
def test_a_users_file_is_never_overwritten(copy: Run, tmp_path: Path, what: list[str]) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    with pytest.raises(CaprmilError, match="already exists"):
        caprmil("report", copy.folder, *what, "--out", mine)
    assert mine.read_text() == "mine"


def test_several_reports_go_into_a_folder(tiny_run: Run, pixels: Path, tmp_path: Path) -> None:
    bag, out = pixels.with_suffix(".h5"), tmp_path / "out"
    caprmil("report", tiny_run.folder, "slide_003", bag, "--out", out, "--device", "cpu")
    assert {path.name for path in out.iterdir()} == {"slide_003.html", "new.html"}
    assert not (tiny_run.folder / "report").exists()


def test_pixels_can_be_given(tiny_run: Run, pixels: Path, tmp_path: Path) -> None:
    bag = shutil.copy(pixels.with_suffix(".h5"), tmp_path / "new.h5")
    words = ("--slide", pixels, "--out", tmp_path / "new.html", "--device", "cpu")
    caprmil("report", tiny_run.folder, bag, *words)
    assert "<symbol" in (tmp_path / "new.html").read_text()


def test_a_slide_file_is_encoded_into_the_runs_own_folder(
    copy: Run, pixels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def encode(run: Run, inputs: list[Path], out: Path, **options: object) -> tuple[dict, list]:
        asked.append((inputs, out))
        return {"new": pixels.with_suffix(".h5")}, []

    monkeypatch.setattr(writing, "bags_of", encode)
    caprmil("report", copy.folder, pixels, "--slide", pixels, "--device", "cpu")
    assert asked == [([pixels], copy.folder / "report" / "features")]
    assert (copy.folder / "report" / "slides" / "new.html").exists()


def test_a_slide_nobody_knows_is_refused_with_those_that_are(tiny_run: Run) -> None:
    with pytest.raises(CaprmilError, match=r"neither a slide of .* nor a bag file"):
        caprmil("report", tiny_run.folder, "slide_999")


def test_a_run_has_no_single_slide(tiny_run: Run, pixels: Path) -> None:
    with pytest.raises(CaprmilError, match="name the folder of its slides"):
        caprmil("report", tiny_run.folder, "--slide", pixels)


def test_a_run_has_no_single_fold(tiny_run: Run) -> None:
    with pytest.raises(CaprmilError, match="--fold goes with slides"):
        caprmil("report", tiny_run.folder, "--fold", "fold-0")
