"""The viewer: the right pixels and numbers of a run, computed once, and nothing is written."""

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from caprmil.errors import CaprmilError, RunError
from caprmil.explain import outputs_without
from caprmil.features import bags
from caprmil.models import CAPRMIL
from caprmil.runs.run import Run
from caprmil.slides.slide import Slide
from caprmil.viewer import Library, create
from caprmil.viewer import library as library_module
from caprmil.viewer.app import STATIC, removed_rows
from caprmil.viewer.cache import SizedCache
from caprmil.viewer.library import identify
from caprmil.viewer.security import AccessMiddleware
from caprmil.viewer.server import PORT, listen, url
from caprmil.viewer.tiles import TILE
from viewer_requests import BARE, FIRST, SECOND, call, predict, rounded_down, texture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def app(library: Library) -> AccessMiddleware:
    return create(library)


# The page


def test_the_effect_of_a_region_is_the_prediction_of_the_explained_model_without_it(
    app: AccessMiddleware, library: Library
) -> None:
    reply = call(app, f"/api/slides/{BARE}/regions")
    assert reply.status == 200
    found = reply.json["found"]
    assert found
    facts = call(app, f"/api/slides/{BARE}").json
    assert reply.json["answer"] == pytest.approx(facts["model"]["answer"])
    for region in found:
        own = predict(app, BARE, {"without": region["rows"]}).json
        assert own["removed"] == region["patches"]
        assert region["answer"] == pytest.approx(own["model"]["answer"], rel=1e-4)
    assert call(app, f"/api/slides/{BARE}/regions").body == reply.body
    assert library.regions(BARE) is library.regions(BARE)


def test_the_page_and_all_its_files_are_served(app: AccessMiddleware) -> None:
    page = call(app, "/")
    assert page.headers["content-type"].startswith("text/html")
    expected = re.findall(rb'(?:src|href)="(static/[^"]+)"', page.body)
    assert len(expected) == 4
    for name in [*(name.decode() for name in expected), *(f"static/{name}" for name in STATIC)]:
        assert call(app, f"/{name}").status == 200


def test_every_imported_script_is_served() -> None:
    folder = files("caprmil.viewer") / "static"
    scripts = [path for path in folder.iterdir() if path.name.endswith(".js")]
    named = {name for path in scripts for name in re.findall(r'from "\./(.+?)"', path.read_text())}
    assert named <= set(STATIC)
    assert {path.name for path in scripts} <= set(STATIC)


def test_nothing_is_loaded_from_other_servers_and_nothing_is_inline(app: AccessMiddleware) -> None:
    for name in [n for n in STATIC if "openseadragon" not in n]:
        text = call(app, f"/static/{name}").body.decode()
        assert not re.search(r"https?://(?!www\.w3\.org)", text), name
        assert not re.search(r"innerHTML|eval\(|\.style\s*=|new Function", text), name
    page = call(app, "/").body.decode()
    assert not re.search(r"\sstyle=|\son\w+=|<script>|<style", page)
    assert not re.search(r'(src|href)="(?!static/|data:image/svg)', page)


def test_openseadragon_has_its_licence() -> None:
    vendor = files("caprmil.viewer") / "static" / "vendor"
    assert "openseadragon 6.1.1" in (vendor / "openseadragon.min.js").read_text()[:80]
    assert "Redistribution and use" in (vendor / "LICENSE").read_text()


# The list


def test_the_list_shows_the_predictions_of_the_run(app: AccessMiddleware, tiny_run: Run) -> None:
    rows = {row["name"]: row for row in call(app, "/api/slides").json["slides"]}
    table = tiny_run.predictions
    assert list(rows) == list(tiny_run.paths)
    assert table.labels is not None
    for slide, label, mean in zip(table.slides, table.labels, table.answers, strict=True):
        row = rows[slide]
        assert row["id"] == identify(slide)
        assert row["answer"] == mean.tolist()
        assert row["label"] == row["group"] == tiny_run.target.names[label]
        assert row["predicted"] == tiny_run.target.names[mean.argmax()]
        assert row["pixels"] == (slide in ("slide_000", "slide_001"))


def test_the_run_is_described(app: AccessMiddleware, tiny_run: Run) -> None:
    facts = call(app, "/api/run").json
    assert (facts["model"], facts["target"]["titles"]) == ("caprmil", ["normal", "tumour"])
    assert facts["target"]["display"] == "classes"
    auc = tiny_run.scores["metrics"]["auc"]["all_slides_pooled"]
    assert facts["score"] == f"AUC {auc:.3f}"


def test_an_unfinished_run_can_be_shown(tiny_run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_run.folder, tmp_path / "copy"))
    (folder / "scores.json").unlink()
    app = create(Library(Run(folder), device="cpu"))
    assert call(app, "/api/run").json["finished"] is False
    assert call(app, "/api/slides").json["slides"][0]["predicted"] is None
    assert call(app, f"/api/slides/{FIRST}").json["label"] is None


# Explanations


def test_the_numbers_are_those_of_the_explanation(app: AccessMiddleware) -> None:
    facts = call(app, f"/api/slides/{FIRST}").json
    data = call(app, f"/api/slides/{FIRST}/numbers").body
    n, layer = facts["patches"], next(x for x in facts["layers"] if x["key"] == "evidence-0")
    evidence = np.frombuffer(data, "<f4", n, layer["start"]).astype(float)
    logits, rest = np.array(facts["model"]["logits"]), np.array(facts["model"]["rest"])
    assert facts["model"]["exact"]
    assert evidence.sum() == pytest.approx((logits - rest)[0] - (logits - rest)[1], abs=1e-4)
    assert facts["tiles"]["top"] == 2
    assert facts["size"] == [2016, 2016]


def test_numbers_are_compressed_if_accepted_and_sent_once(app: AccessMiddleware) -> None:
    target = f"/api/slides/{FIRST}/numbers"
    plain = call(app, target)
    assert plain.headers["vary"] == "Accept-Encoding"
    small = call(app, target, "GET", b"", ("accept-encoding", "br, gzip;q=0.8"))
    assert gzip.decompress(small.body) == plain.body
    assert small.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    refusing = call(app, target, "GET", b"", ("accept-encoding", "gzip;q=0"))
    assert refusing.body == plain.body
    known = call(app, target, "GET", b"", ("if-none-match", plain.headers["etag"]))
    assert (known.status, known.body) == (304, b"")


@pytest.mark.parametrize("key", [FIRST, BARE])
def test_a_prediction_without_a_region_is_that_of_a_bag_without_it(
    app: AccessMiddleware, tiny_run: Run, tmp_path: Path, key: str
) -> None:
    name = {FIRST: "slide_000", BARE: "slide_002"}[key]
    bag = bags.read(tiny_run.paths[name])
    left = np.r_[0, 5:20, 31 : len(bag.features)]
    path = bags.write(
        tmp_path / f"{name}.h5", bag.features[left], bag.coords[left], encoder="synthetic", mpp=1.0
    )
    reply = predict(app, key, {"without": [[1, 5], [20, 31]]}).json
    expected = tiny_run.predict({name: path}, device="cpu").answers[0]
    np.testing.assert_allclose(reply["answer"]["mean"], expected, atol=1e-6)
    assert (reply["left"], reply["removed"]) == (len(left), 15)
    fold = call(app, f"/api/slides/{key}").json["model"]["fold"]
    own = tiny_run.predict({name: path}, fold=fold, device="cpu").answers[0]
    np.testing.assert_allclose(reply["model"]["answer"], own, atol=1e-6)
    logits = np.array(reply["model"]["logits"])
    shares = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(shares, own, atol=1e-6)


def test_a_prediction_without_tokens_is_that_of_a_model_whose_tokens_are_zero(
    app: AccessMiddleware, tiny_run: Run
) -> None:
    bag = bags.read(tiny_run.paths["slide_000"])
    facts = call(app, f"/api/slides/{FIRST}").json
    model = tiny_run.model(facts["model"]["fold"]).eval()
    assert isinstance(model, CAPRMIL)
    attention = model.context.blocks[-1].attend
    attend_tokens = attention.attend_tokens

    def attend_without(tokens: torch.Tensor) -> torch.Tensor:
        after = attend_tokens(tokens)
        after[:, 1, 2] = 0
        after[:, 0, 3] = 0
        return after

    attention.attend_tokens = attend_without  # type: ignore[method-assign]
    rows = np.r_[0, 5 : len(bag.features)]
    with torch.no_grad():
        features = torch.from_numpy(bag.features[rows])[None]
        expected = model.forward_bags(*model.validate(features, None), None).logits[0]
    body = {"without": [[1, 5]], "tokens": [[0, 1, 2], [0, 0, 3]]}
    reply = predict(app, FIRST, body).json
    np.testing.assert_allclose(reply["model"]["logits"], expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(reply["answer"]["mean"], expected.softmax(dim=0), atol=1e-5)
    assert reply["removed"] == 4


def test_tokens_of_other_models_are_matched_before_they_are_removed(tiny_run: Run) -> None:
    """A copy of a model with its heads and tokens in another order gives the same output."""
    bag, fold = bags.read(tiny_run.paths["slide_000"]), tiny_run.splits[0].name
    model, other = (tiny_run.model(fold).eval() for _ in range(2))
    assert isinstance(other, CAPRMIL)
    attention = other.context.blocks[0].attend
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        attention.cluster.weight.copy_(attention.cluster.weight[order])
        attention.cluster.bias.copy_(attention.cluster.bias[order])
    removed = np.zeros((1, 2, 4), dtype=bool)
    removed[0, 0, 1] = removed[0, 1, 3] = True
    outputs = outputs_without({"a": model, "b": other}, bag, removed, reference="a")
    torch.testing.assert_close(outputs["a"].logits, outputs["b"].logits)


@pytest.mark.parametrize(
    "tokens", [3, "x", {}, [3], [[0, 0]], [[0, 0, 4]], [[1, 0, 0]], [[0, -1, 0]], [[0, 0, True]]]
)
def test_unusable_tokens_are_refused(app: AccessMiddleware, tokens: object) -> None:
    reply = predict(app, FIRST, {"without": [], "tokens": tokens})
    assert reply.status == 400
    assert "[block, head, token]" in reply.json["reason"]


def test_a_prediction_with_nothing_removed_does_not_change(app: AccessMiddleware) -> None:
    facts = call(app, f"/api/slides/{FIRST}").json
    reply = predict(app, FIRST, {"without": []}).json
    np.testing.assert_allclose(reply["answer"]["mean"], facts["answer"]["mean"], atol=1e-7)
    for name in ("logits", "totals"):
        np.testing.assert_allclose(reply["model"][name], facts["model"][name], atol=1e-4)


@given(st.lists(st.tuples(st.integers(0, 29), st.integers(1, 30)), max_size=8))
def test_ranges_may_overlap(drawn: list[tuple[int, int]]) -> None:
    spans = [(first, min(first + length, 30)) for first, length in drawn]
    expected = np.zeros(31, dtype=bool)
    for first, end in spans:
        expected[first:end] = True
    rows = removed_rows({"without": [list(span) for span in spans]}, 31)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(
    "body",
    [
        *(None, 3, "x", [], {}, {"without": None}, {"without": 3}, {"without": {}}),
        *({"without": [3]}, {"without": [[3]]}, {"without": [[1, 2, 3]]}, {"without": ["ab"]}),
        *({"without": [[2, 1]]}, {"without": [[1, 1]]}, {"without": [[-1, 3]]}),
        *({"without": [[0, 10**30]]}, {"without": [[0.0, 3.0]]}, {"without": [[True, 3]]}),
        *({"without": [[0, float("nan")]]}, {"without": [["0", "3"]]}, {"without": [[None, 3]]}),
    ],
)
def test_an_invalid_region_is_refused(app: AccessMiddleware, body: object) -> None:
    reply = predict(app, FIRST, body)
    assert reply.status == 400
    assert reply.json["reason"]


def test_removing_all_patches_is_refused(app: AccessMiddleware) -> None:
    n = call(app, f"/api/slides/{FIRST}").json["patches"]
    reply = predict(app, FIRST, {"without": [[0, n]]})
    assert (reply.status, "Keep at least one" in reply.json["reason"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"without": []}', "text/plain", 415),
        (b'{"without": []}', "", 415),
        (b'{"without": []}', "application/json; charset=utf-8", 200),
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"\xff\xfe\x00", "application/json", 400),
        (b"[" * 200_000, "application/json", 400),
        (b'{"without": [[0, ' + b"9" * 9000 + b"]]}", "application/json", 400),
        (b'{"without": [' + b"[0, 1], " * 200_000 + b"[0, 1]]}", "application/json", 413),
    ],
)
def test_content_that_is_not_json_is_refused(
    app: AccessMiddleware, body: bytes, kind: str, status: int
) -> None:
    headers = (("content-type", kind),)
    assert call(app, f"/api/slides/{FIRST}/predict", "POST", body, *headers).status == status


def test_a_request_with_a_huge_content_length_is_refused_unread(app: AccessMiddleware) -> None:
    for length, status in (("99999999999", 413), ("-1", 400), ("1e9", 400), ("9" * 40, 400)):
        headers = (("content-type", "application/json"), ("content-length", length))
        assert call(app, f"/api/slides/{FIRST}/predict", "POST", b"{}", *headers).status == status


# Pixels


def test_tiles_patches_and_galleries_are_served(app: AccessMiddleware, pixels: Path) -> None:
    one = f"/api/slides/{FIRST}"
    with Slide(pixels / "slide_000.tiff") as slide:
        first = call(app, f"{one}/tiles/2/1_0.jpg?v=1")
        expected = slide.read(TILE, 0, TILE, TILE)
        assert np.abs(first.pixels.astype(float) - expected).mean() < 4
        assert "immutable" in first.headers["cache-control"]
        # Patch 10 of the generated bag lies where its row and column say.
        bag_side = int(np.ceil(np.sqrt(call(app, one).json["patches"])))
        x, y = 224 * (10 % bag_side), 224 * (10 // bag_side)
        patch = call(app, f"{one}/patches/10.jpg?px=112")
        assert np.abs(patch.pixels.astype(float) - slide.read(x, y, 224, 112)).mean() < 4
    facts = call(app, one).json
    sheet = call(app, f"{one}/gallery.jpg").pixels
    px, place = facts["gallery"]["px"], facts["gallery"]["rows"].index(facts["layers"][0]["top"][0])
    top, left = (px * n for n in divmod(place, facts["gallery"]["columns"]))
    alone = call(app, f"{one}/patches/{facts['layers'][0]['top'][0]}.jpg?px={px}").pixels
    assert np.abs(sheet[top : top + px, left : left + px].astype(float) - alone).mean() < 5
    assert max(call(app, f"{one}/thumbnail.jpg").pixels.shape) == 160
    assert "cache-control" in patch.headers


@pytest.mark.parametrize(
    "address", ["3/0_0", "0/1_0", "2/4_0", "2/0_4", "99/0_0", "999999999/0_0", "2/999999999_0"]
)
def test_there_is_no_tile_outside_of_a_slide(app: AccessMiddleware, address: str) -> None:
    assert call(app, f"/api/slides/{FIRST}/tiles/{address}.jpg").status == 404


# Missing files


def test_a_slide_without_a_slide_file_still_has_its_numbers(app: AccessMiddleware) -> None:
    facts = call(app, f"/api/slides/{BARE}").json
    assert facts["tiles"] is None
    assert "--slides" in facts["problem"]
    for rest in ("tiles/0/0_0.jpg", "patches/0.jpg", "gallery.jpg", "thumbnail.jpg"):
        reply = call(app, f"/api/slides/{BARE}/{rest}")
        assert (reply.status, "was not found" in reply.json["reason"]) == (410, True)


def test_a_missing_or_damaged_slide_is_reported(tiny_run: Run, tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / f"slide_00{number}.tiff"
        rounded_down(path, texture(2016, 2016))
    app = create(Library(tiny_run, pixels=tmp_path, device="cpu"))
    (tmp_path / "slide_000.tiff").unlink()
    (tmp_path / "slide_001.tiff").write_bytes(b"II*\0 no slide at all")
    for key, status, text in ((FIRST, 410, "no longer at"), (SECOND, 409, "damaged")):
        reply = call(app, f"/api/slides/{key}/tiles/0/0_0.jpg")
        assert (reply.status, text in reply.json["reason"]) == (status, True)
        assert text in call(app, f"/api/slides/{key}").json["problem"]


def test_a_missing_bag_is_listed_and_reported(tiny_run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_run.folder, tmp_path / "copy"))
    splits = json.loads((folder / "splits.json").read_text())
    splits["paths"]["slide_000"] = str(tmp_path / "gone.h5")
    (folder / "splits.json").write_text(json.dumps(splits))
    app = create(Library(Run(folder), device="cpu"))
    assert "no longer at" in call(app, "/api/slides").json["slides"][0]["problem"]
    for rest in ("", "/numbers", "/thumbnail.jpg"):
        assert call(app, f"/api/slides/{FIRST}{rest}").status == 410
    moved = bags.write(tmp_path / "slide_000.h5", np.ones((5, 64)), encoder="synthetic", mpp=1.0)
    found = create(Library(Run(folder), extra=[moved], device="cpu"))
    facts = call(found, f"/api/slides/{FIRST}").json
    assert (facts["placed"], facts["patches"], facts["label"]) == (False, 5, "normal")


def test_another_slide_of_the_same_name_is_not_shown(tiny_run: Run, tmp_path: Path) -> None:
    info = {"encoder": "synthetic", "mpp": 1.0, "patch_level0": 64.0, "step": 64.0}
    coords = np.arange(5)[:, None] * [64, 0]
    new = bags.write(tmp_path / "new.h5", np.ones((5, 64)), coords, **info, slide_size=(320, 64))
    Image.new("RGB", (640, 64)).save(tmp_path / "new.png")
    app = create(Library(tiny_run, pixels=tmp_path, extra=[new], device="cpu"))
    facts = call(app, f"/api/slides/{identify('new')}").json
    assert (facts["placed"], facts["pixels"], facts["tiles"]) == (True, False, None)
    assert "is 640 x 64 pixels, but its bag was encoded from 320 x 64" in facts["problem"]
    assert call(app, f"/api/slides/{identify('new')}/tiles/0/0_0.jpg").status == 409


def test_extra_bags_are_shown_after_those_of_the_run(tiny_run: Run, tmp_path: Path) -> None:
    other = bags.write(tmp_path / "new.h5", np.ones((5, 64)), encoder="synthetic", mpp=1.0)
    wrong = bags.write(tmp_path / "wide.h5", np.ones((5, 32)), encoder="synthetic", mpp=1.0)
    app = create(Library(tiny_run, extra=[other, wrong], device="cpu"))
    rows = call(app, "/api/slides").json["slides"]
    assert len(rows) == len(tiny_run.paths) + 2
    assert call(app, f"/api/slides/{identify('new')}").json["answer"]["unseen"]
    refused = call(app, f"/api/slides/{identify('wide')}")
    assert (refused.status, "32 features" in refused.json["reason"]) == (409, True)


def test_a_run_without_models_or_bags_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_run.folder, tmp_path / "copy"))
    splits = json.loads((folder / "splits.json").read_text())
    splits["paths"] = {name: f"/nowhere/{name}.h5" for name in splits["paths"]}
    (folder / "splits.json").write_text(json.dumps(splits))
    with pytest.raises(RunError, match="no longer where they were"):
        Library(Run(folder), device="cpu")
    shutil.rmtree(folder / "folds")
    with pytest.raises(RunError, match="no trained model yet"):
        Library(Run(folder), device="cpu")


# Cache


def test_a_value_is_computed_once_for_several_threads() -> None:
    cache, made = SizedCache(100), []

    def make() -> str:
        made.append(1)
        time.sleep(0.1)
        return "it"

    with ThreadPoolExecutor(8) as pool:
        got = [job.result() for job in [pool.submit(cache.get, "key", make, len) for _ in range(8)]]
    assert (got, len(made)) == (["it"] * 8, 1)


def test_a_slide_is_explained_once_for_two_requests(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    explain_slide = library_module.explain_slide
    monkeypatch.setattr(
        library_module,
        "explain_slide",
        lambda *a, **k: (calls.append(a), time.sleep(0.2), explain_slide(*a, **k))[2],
    )
    app = create(Library(tiny_run, device="cpu"))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: call(app, f"/api/slides/{BARE}").status, range(2)))
    assert (both, len(calls)) == ([200, 200], 1)


def test_the_cache_drops_the_least_recently_used_value() -> None:
    cache = SizedCache(10)
    for key in ("a", "b"):
        cache.get(key, lambda: "1234", len)
    cache.get("a", lambda: pytest.fail("it is cached"), len)
    cache.get("c", lambda: "1234", len)
    assert (len(cache), cache.used_bytes) == (2, 8)
    assert cache.get("b", lambda: "new", len) == "new"
    assert cache.get("huge", lambda: "x" * 99, len) == "x" * 99  # it is larger than the cache


def test_an_error_is_not_cached() -> None:
    cache = SizedCache(10)
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: 1 / 0, lambda _: 1)
    assert cache.get("key", lambda: 5, lambda _: 1) == 5


def test_nothing_is_written(
    tiny_run: Run, pixels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [tiny_run.folder, pixels, Path(tiny_run.paths["slide_000"]).parent, tmp_path]

    def state() -> dict[Path, int]:
        found = (path for folder in folders for path in [folder, *folder.rglob("*")])
        return {path: path.stat().st_mtime_ns for path in found}

    before = state()
    app = create(Library(tiny_run, pixels=pixels, device="cpu"))
    for rest in ("", "/numbers", "/tiles/0/0_0.jpg", "/patches/0.jpg", "/gallery.jpg"):
        assert call(app, f"/api/slides/{FIRST}{rest}").status == 200
    assert predict(app, FIRST, {"without": [[0, 3]]}).status == 200
    assert state() == before


# Server


def test_the_next_free_port_is_used_unless_one_is_given() -> None:
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        ports = [sock.getsockname()[1] for sock in (first, second)]
        assert PORT <= ports[0] < ports[1]
        with pytest.raises(RunError, match=rf"Port {ports[0]} .* Pass another with --port"):
            listen("127.0.0.1", ports[0])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CaprmilError, match=r"--host|--port"):
        listen("192.0.2.1", 8765)


def test_the_address_can_be_opened() -> None:
    assert url("127.0.0.1", 8765, None) == "http://127.0.0.1:8765/"
    assert url("::1", 8765, None) == "http://[::1]:8765/"
    assert url("10.0.0.4", 80, "abc") == "http://10.0.0.4:80/?token=abc"
    assert url("0.0.0.0", 80, "abc") == f"http://{socket.gethostname()}:80/?token=abc"


def test_the_command_prints_an_address_and_stops_at_ctrl_c(tiny_run: Run) -> None:
    command = [sys.executable, "-m", "caprmil", "view", str(tiny_run.folder), "--no-open"]
    settings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert match, line
        assert "Ctrl-C" in line
        with urlopen(match[0] + "api/run", timeout=60) as reply:
            assert json.load(reply)["model"] == "caprmil"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().strip() == "Stopped."
        assert process.wait(timeout=60) == 0
