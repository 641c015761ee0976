"""Models and runs on the hub, tested against a local stand-in of its HTTP interface."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from caprmil.errors import RunError
from caprmil.models import ABMIL, CAPRMIL, MILModel
from caprmil.runs.run import Run
from caprmil.training.cross_validation import cross_validate
from hub_stand_in import TOKEN, StandIn, serve, serve_hub, use_hub
from small_runs import KINDS, small_run

# huggingface_hub passes a file to its HTTP library in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    """A hub without repositories, and a user who is logged in."""
    server.repositories.clear()
    server.requests.clear()
    use_hub(server, monkeypatch, tmp_path / "cache", TOKEN)
    return server


@pytest.fixture(scope="module")
def pushed(server: StandIn, tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The files of the tiny run on the hub."""
    with pytest.MonkeyPatch.context() as patch:
        server.repositories.clear()
        use_hub(server, patch, tmp_path_factory.mktemp("hub"), TOKEN)
        tiny_run.push_to_hub("lab/tumour", licence="cc-by-nc-4.0")
        return server.repositories["lab/tumour"]


def front_matter(card: bytes) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return table


def test_a_pushed_model_is_loaded_with_equal_weights_and_metadata(hub: StandIn) -> None:
    model = CAPRMIL(24, 2, dim=16, heads=2, tokens=3).eval()
    model.metadata = {"encoder": "lite0", "mpp": 0.5, "target": {"kind": "classification"}}
    url = model.push_to_hub("lab/model")
    assert sorted(hub.repositories["lab/model"].files) == [
        *("README.md", "config.json", "model.safetensors")
    ]
    assert url.startswith(f"{hub.url}/lab/model/commit/")
    loaded = CAPRMIL.from_pretrained("lab/model")
    bag = torch.randn(1, 5, 24)
    torch.testing.assert_close(loaded(bag).logits, model(bag).logits, rtol=0, atol=0)
    assert loaded.metadata == model.metadata


def test_a_revision_is_a_branch_or_a_commit(hub: StandIn) -> None:
    first = CAPRMIL(8, 2, dim=8, heads=2).push_to_hub("lab/model").rpartition("/")[2]
    ABMIL(8, 2, dim=8, hidden=4).push_to_hub("lab/model")
    ABMIL(9, 2, dim=8, hidden=4).push_to_hub("lab/model", branch="wide")
    assert isinstance(MILModel.from_pretrained("lab/model"), ABMIL)
    assert isinstance(MILModel.from_pretrained("lab/model", revision=first), CAPRMIL)
    assert isinstance(MILModel.from_pretrained(f"lab/model@{first}"), CAPRMIL)
    assert MILModel.from_pretrained("lab/model", revision="wide").in_dim == 9
    with pytest.raises(RunError, match="lab/model on the hub has no revision second"):
        MILModel.from_pretrained("lab/model", revision="second")


def test_a_new_repository_is_private_and_read_with_a_token_only(
    hub: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = CAPRMIL(8, 2, dim=8, heads=2)
    model.push_to_hub("lab/private")
    model.push_to_hub("lab/public", private=False)
    use_hub(hub, monkeypatch, tmp_path / "other", None)
    assert MILModel.from_pretrained("lab/public").in_dim == 8
    with pytest.raises(RunError, match="no such repository on the hub, or it is private"):
        MILModel.from_pretrained("lab/private")
    assert MILModel.from_pretrained("lab/private", token=TOKEN).in_dim == 8
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)


def test_without_permission_to_write_a_push_is_one_error_that_says_how_to_log_in(
    hub: StandIn, tiny_run: Run, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    line = mistake("push", tiny_run.folder, "lab/tumour", "--fold", "fold-0")
    assert "lab/tumour cannot be written on the hub" in line
    assert "hf auth login" in line
    assert "hf_read" not in line
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "cannot be the name of a repository" in mistake("push", tiny_run.folder, "a/b/c")
    assert "fold-9" in mistake("push", tiny_run.folder, "lab/tumour", "--fold", "fold-9")
    assert not hub.repositories


def test_a_hub_that_cannot_be_reached_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: StandIn
) -> None:
    nowhere = StandIn()
    nowhere.url = "http://127.0.0.1:9"
    use_hub(nowhere, monkeypatch, tmp_path, TOKEN)
    with pytest.raises(RunError, match="lab/model cannot be written on the hub"):
        CAPRMIL(8, 2, dim=8, heads=2).push_to_hub("lab/model")


def test_an_edited_card_is_kept_and_one_of_ours_is_replaced(hub: StandIn) -> None:
    model = CAPRMIL(8, 2, dim=8, heads=2)
    model.push_to_hub("lab/model", card="# Mine\n")
    model.metadata = {"encoder": "lite0"}
    model.push_to_hub("lab/model")
    repository = hub.repositories["lab/model"]
    assert repository.files["README.md"] == b"# Mine\n"
    assert json.loads(repository.files["config.json"])["metadata"] == {"encoder": "lite0"}
    model.push_to_hub("lab/ours")
    model.metadata = {"encoder": "uni"}
    model.push_to_hub("lab/ours")
    card = hub.repositories["lab/ours"].files["README.md"]
    assert front_matter(card)["caprmil"]["features"][0]["encoder"] == "uni"


def test_the_model_of_a_run_says_its_target_encoder_and_scale(tiny_run: Run) -> None:
    config = json.loads((tiny_run.fold_folder("fold-0") / "model" / "config.json").read_text())
    metadata, fold = config["metadata"], tiny_run.splits[0]
    assert metadata["target"]["classes"] == ["normal", "tumour"]
    assert (metadata["encoder"], metadata["mpp"]) == (tiny_run.facts.encoder, tiny_run.facts.mpp)
    assert metadata["cohort"]["slides"] == len(tiny_run.paths)
    assert metadata["cohort"]["train"] == len(fold.train)
    assert tiny_run.model("fold-0").metadata == metadata


def test_a_pushed_run_predicts_as_the_run_does(pushed: Any, hub: StandIn, tiny_run: Run) -> None:
    hub.repositories["lab/tumour"] = pushed
    run = Run.from_pretrained("lab/tumour", revision="main")
    new = {"another": tiny_run.bag_paths()[0]}  # a name that neither has seen
    expected = tiny_run.predict(new, device="cpu").answers
    np.testing.assert_array_equal(run.predict(new, device="cpu").answers, expected)
    one = MILModel.from_pretrained("lab/tumour", subfolder="folds/fold-1/model")
    assert one.metadata["fold"] == "fold-1"
    with pytest.raises(RunError, match=r"config\.json is missing.*folds/NAME/model"):
        MILModel.from_pretrained("lab/tumour")


def test_a_pushed_run_names_no_slide_no_patient_and_no_path(pushed: Any, tiny_run: Run) -> None:
    text = b"\n".join([*map(str.encode, pushed.files), *pushed.files.values()])
    names = {*tiny_run.paths, *tiny_run.patients.values()}
    assert len(names) >= 24
    secret = [*names, str(tiny_run.folder.parent), str(Path(tiny_run.bag_paths()[0]).parent)]
    assert not [name for name in secret if name.encode() in text]
    tables = {Path(name).suffix for name in pushed.files}
    assert tables == {".json", ".toml", ".md", ".safetensors"}


def test_the_card_of_a_run_has_the_scores_of_the_run(pushed: Any, tiny_run: Run) -> None:
    table = front_matter(pushed.files["README.md"])
    assert (table["license"], table["library_name"]) == ("cc-by-nc-4.0", "caprmil")
    own, scores = table["caprmil"], tiny_run.scores["metrics"]
    auc = own["scores"]["auc"]
    assert auc["value"] == pytest.approx(scores["auc"]["all_slides_pooled"], abs=1e-4)
    assert auc["interval"] == pytest.approx(scores["auc"]["interval"], abs=1e-4)
    assert auc["std_over_folds"] == pytest.approx(scores["auc"]["std_over_folds"], abs=1e-4)
    assert own["target"]["classes"] == ["normal", "tumour"]
    assert own["cohort"]["slides"] == len(tiny_run.paths)
    assert own["recipe"] == tiny_run.facts.digest
    text = pushed.files["README.md"].decode()
    for part in ("## Intended use", "licence of the encoder", "heads = 2", "µm per pixel"):
        assert part in text


def test_the_card_of_one_fold_has_the_scores_of_its_own_test_part(
    hub: StandIn, tiny_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from caprmil import cli

    with pytest.raises(SystemExit) as end:
        cli.run(["push", str(tiny_run.folder), "lab/one", "--fold", "fold-1", "--public"])
    assert end.value.code == 0
    assert 'MILModel.from_pretrained("lab/one")' in capsys.readouterr().out
    assert not hub.repositories["lab/one"].private
    card = front_matter(hub.repositories["lab/one"].files["README.md"])["caprmil"]
    found = card["scores"]["auc"]["value"]
    assert found == pytest.approx(tiny_run.scores["folds"]["fold-1"]["auc"], abs=1e-4)
    assert MILModel.from_pretrained("lab/one").metadata["fold"] == "fold-1"


def test_the_card_is_printed_without_a_push(
    hub: StandIn, tiny_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    from caprmil import cli

    with pytest.raises(SystemExit):
        cli.run(["push", str(tiny_run.folder), "lab/tumour", "--card"])
    assert "# tumour" in capsys.readouterr().out
    assert not hub.requests


def test_prediction_with_a_run_of_the_hub_is_a_command(
    pushed: Any, hub: StandIn, tiny_run: Run, tmp_path: Path
) -> None:
    from caprmil import cli

    hub.repositories["lab/tumour"] = pushed
    bag, out = tiny_run.bag_paths()[0], tmp_path / "new.csv"
    words = ["predict", "hf://lab/tumour", str(bag), "--out", str(out), "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        cli.run(words)
    assert end.value.code == 0
    assert len(out.read_text().splitlines()) == 2


def test_hostile_files_of_the_hub_are_refused(hub: StandIn, tmp_path: Path) -> None:
    model = CAPRMIL(8, 2, dim=8, heads=2)
    model.push_to_hub("lab/model")
    repository = hub.repositories["lab/model"]
    config = json.loads(repository.files["config.json"])
    for changes, words in (
        ({"dim": 10**12}, "is damaged"),
        ({"dim": 4}, "cannot be loaded"),  # other shapes than in the file
        ({"metadata": ["a"]}, "metadata is not a table"),
        ({"model": "os.system"}, "no model"),
    ):
        repository.commit("main", {"config.json": json.dumps(config | changes).encode()})
        with pytest.raises((RunError, ValueError), match=words):
            MILModel.from_pretrained("lab/model")
    repository.commit("main", {"config.json": b'{"model": "' + b"a" * 2**24 + b'"}'})
    with pytest.raises(RunError, match="has more than"):
        MILModel.from_pretrained("lab/model")


def test_nothing_but_weights_and_settings_is_downloaded(
    hub: StandIn, tmp_path: Path, pushed: Any
) -> None:
    CAPRMIL(8, 2, dim=8, heads=2).push_to_hub("lab/model")
    hub.repositories["lab/model"].commit(
        "main", {"model.pkl": b"cos\nsystem\n(S'false'\ntR.", "mine.py": b"raise SystemExit"}
    )
    hub.requests.clear()
    MILModel.from_pretrained("lab/model")
    asked = {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path}
    assert asked == {"config.json", "model.safetensors"}


def test_the_hash_of_a_slide_file_is_not_pushed(tiny_run: Run) -> None:
    from caprmil.runs.hub_run import _shared_facts

    settings = 'version = 1\nslide_file = "0123456789abcdef"\nencoder = "lite0"\n'
    facts = {"settings": settings, "notes": ("a note",), "sources": ({"settings": settings},)}
    text = str(_shared_facts(facts, Path("run")))
    assert "0123456789abcdef" not in text
    assert text.count("lite0") == 2
    assert "a note" not in text


def test_training_starts_from_a_model_of_the_hub(
    pushed: Any, hub: StandIn, tiny_run: Run, tiny_recipe: Any, tmp_path: Path
) -> None:
    hub.repositories["lab/tumour"] = pushed
    tiny_run.push_to_hub("lab/one", fold="fold-2")
    recipe = replace(
        tiny_recipe,
        model=replace(tiny_recipe.model, start="lab/one@main"),
        train=replace(tiny_recipe.train, epochs=1, warmup_epochs=0),
        loggers={},
    )
    folder = tmp_path / "run"
    run = cross_validate(recipe, folder, device="cpu", progress=False, score=False)
    assert run.facts.start is not None
    assert run.facts.start.source == "lab/one@main"
    started = MILModel.from_pretrained(folder / "start").state_dict()
    for name, value in tiny_run.model("fold-2").state_dict().items():
        torch.testing.assert_close(started[name], value, rtol=0, atol=0)


@pytest.mark.slow  # a run of every kind
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_is_pushed_and_predicts_as_before(
    kind: str, hub: StandIn, tmp_path: Path
) -> None:
    run = small_run(kind, tmp_path)
    run.push_to_hub("lab/run")
    pulled = Run.from_pretrained("lab/run")
    known = next(iter(run.bags))
    files = run.bags[known]
    for each in (run, pulled):
        if kind == "covariates":
            cells = {"slide": ["new"], "marker": [1.5], "age": [60], "ward": ["a"]}
            each.add_covariates(pd.DataFrame(cells))
    expected, found = (each.predict({"new": files}, device="cpu") for each in (run, pulled))
    # A patient whose slides the run knows is answered by the folds that have not seen them.
    if kind != "patient":
        np.testing.assert_array_equal(found.answers, expected.answers)
    assert np.isfinite(found.answers).all()
    pushed = hub.repositories["lab/run"].files
    card = front_matter(pushed["README.md"])["caprmil"]
    headline = run.target.headline
    value = run.scores["metrics"][headline]["all_slides_pooled"]
    assert card["scores"][headline].get("value") == (value and pytest.approx(value, abs=1e-4))
    text = b"\n".join(pushed.values())
    names = {*run.paths, *run.patients.values()}
    assert not [name for name in names if len(name) > 3 and f'"{name}"'.encode() in text]


class HostileHub(BaseHTTPRequestHandler):
    """A hub that answers with nonsense."""

    answer: bytes
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.answer) + 9 * (self.answer == b"[")))
        self.end_headers()
        self.wfile.write(self.answer)
        self.close_connection = True


def info(**changes: object) -> bytes:
    siblings = [{"rfilename": name, "size": 2} for name in ("run.json", "recipe.toml")]
    return json.dumps({"id": "a/b", "sha": "a" * 40, "siblings": siblings, **changes}).encode()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html>", "the hub fails"),
        (b"[1, 2]", "the hub fails"),
        (b"[", "the hub fails"),  # and the connection is cut
        (info(sha=None), "does not say which commit"),
        (info(sha="../../x"), "does not say which commit"),
        (info(siblings=[{"rfilename": "folds/../../../x/fold.json"}]), "outside of its folder"),
        (info(siblings=[{"rfilename": "folds/..\\x/fold.json"}]), "outside of its folder"),
        (info(siblings=[{"rfilename": "run.json", "size": 10**15}]), "GB to download"),
    ],
)
def test_a_hub_that_answers_nonsense_is_one_error_and_nothing_is_written(
    answer: bytes, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handler = type("Handler", (HostileHub,), {"answer": answer})
    with serve(handler) as url:
        nonsense = StandIn()
        nonsense.url = url
        use_hub(nonsense, monkeypatch, tmp_path / "cache", None)
        with pytest.raises(RunError, match=words) as problem:
            Run.from_pretrained("a/b")
    assert "\n" not in str(problem.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cached_run_is_read_without_the_hub(
    pushed: Any, hub: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.repositories["lab/tumour"] = pushed
    first = Run.from_pretrained("lab/tumour").folder
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert Run.from_pretrained("lab/tumour").folder == first


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("recipe.toml", "model = 3"),
        ("recipe.toml", "data = [[1]]"),
        ("recipe.toml", "cohort = "),
        ("run.json", {"settings": "x = ["}),
        ("run.json", {"settings": "a = " + "[" * 9999}),
    ],
    ids=str,
)
def test_a_damaged_run_is_a_line_before_it_is_pushed(
    tiny_run: Run, tmp_path: Path, mistake: Any, name: str, content: Any
) -> None:
    folder = shutil.copytree(tiny_run.folder, tmp_path / "run")
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / name).read_text()) | content)
    (folder / name).write_text(content)
    assert f"{name} is " in mistake("push", folder, "lab/tumour")
