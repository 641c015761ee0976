"""Damaged runs: every number that is read again is checked, and each fault is one line."""

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.distributions import CategoricalDistribution
from safetensors.torch import load_file, save_file

from caprmil import cli
from caprmil.encoders.hub import read_weights
from caprmil.errors import (
    OUT_OF_MEMORY,
    CaprmilError,
    EncoderError,
    ExportError,
    RecipeError,
    RunError,
    SlideError,
)
from caprmil.executors.job_status import JobStatus
from caprmil.experiments.status import read_status
from caprmil.experiments.sweep.axes import Point
from caprmil.experiments.sweep.pruning import Pruned
from caprmil.experiments.sweep.runner import read_seconds
from caprmil.experiments.sweep.search import read_log
from caprmil.explain.map_ranking import map_ranking
from caprmil.export import read_metadata
from caprmil.io.json_files import parse_json
from caprmil.runs.facts import read_fold_facts
from caprmil.runs.history import HISTORY, read_history
from caprmil.runs.run import Run
from caprmil.runs.timing import read_timing
from caprmil.slides.qc import Record
from caprmil.slides.regions import read_regions
from caprmil.targets.target_table import parse_target
from caprmil.viewer import Library
from caprmil.viewer.app import create
from viewer_requests import FIRST, call

FOLD = "folds/fold-0"
ODD_FIELDS = ('"path": "\\ud800"', '"mpp": NaN', '"tissue_mm2": ' + "9" * 400, '"width": 0.5')


@pytest.fixture(scope="module")
def one_copy(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run."""
    ignore = shutil.ignore_patterns("log", "*.png")
    folder = tmp_path_factory.mktemp("damaged") / "run"
    return Path(shutil.copytree(tiny_run.folder, folder, ignore=ignore))


@pytest.fixture
def copy(one_copy: Path) -> Iterator[Path]:
    """The copy, to be damaged; it is mended after the test."""
    files = {path: path.read_bytes() for path in one_copy.rglob("*") if path.is_file()}
    yield one_copy
    for path, content in files.items():
        path.write_bytes(content)
    assert {path for path in one_copy.rglob("*") if path.is_file()} == files.keys()


def read_all(folder: Path) -> None:
    """Read every number of a run."""
    run = Run(folder)
    map_ranking(run)
    _ = run.scores, run.predictions, run.baselines, run.validation, run.temperatures, run.columns
    own = run.fold_folder("fold-0")
    read_history(own / HISTORY), read_timing(own), read_fold_facts(own)
    run.read_predictions(own / "test.csv")
    run.trained("fold-0")


def change(path: Path, keys: str, value: Any) -> None:
    """Set a value in a JSON file; keys are separated by dots."""
    content = part = json.loads(path.read_text())
    *before, last = [int(key) if key.isdigit() else key for key in keys.split(".")]
    for key in before:
        part = part[key]
    part[last] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("weight", ["classify.weight", "context.project.1.weight"])
def test_finite_weights_that_overflow_are_a_line_in_explain_and_viewer(
    copy: Path, mistake: Callable[..., str], tmp_path: Path, weight: str
) -> None:
    for path in copy.glob("folds/*/model/model.safetensors"):
        weights = load_file(path)
        weights[weight] = torch.full_like(weights[weight], 3e38)
        save_file(weights, path, metadata={"format": "pt"})
    out = tmp_path / "explained"
    line = mistake("explain", copy, "slide_000", "--out", out, "--device", "cpu")
    assert "slide_000 has no" in line
    app = create(Library(Run(copy), device="cpu"))
    for what in ("", "/numbers", "/regions", "/patches/0.jpg"):
        reply = call(app, f"/api/slides/{FIRST}{what}")
        assert reply.status == 409
        assert "slide_000 has no" in reply.json["reason"]


def test_a_sound_run_is_read(copy: Path) -> None:
    read_all(copy)


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("run.json", "in_dim", -64),
        ("run.json", "in_dim", 10**30),
        ("run.json", "mpp", float("nan")),
        ("run.json", "mpp", 0),
        ("run.json", "seed", None),
        ("run.json", "notes", 3),
        ("run.json", "versions", {"torch": 2}),
        ("splits.json", "folds", []),
        ("splits.json", "folds.0.name", "../../elsewhere"),
        ("splits.json", "folds.0.name", ".."),
        ("splits.json", "folds.1.name", "fold-0"),
        ("splits.json", "folds.0.seed", -1),
        ("splits.json", "folds.0.test.0", "unknown"),
        ("splits.json", "folds.0.train", "slide_000"),
        ("splits.json", "patients", {}),
        ("splits.json", "labels.slide_000", "purple"),
        ("splits.json", "paths.slide_000", "a\0b"),
        (f"{FOLD}/fold.json", "kept_epoch", -1),
        (f"{FOLD}/fold.json", "kept_epoch", 99),
        (f"{FOLD}/fold.json", "epochs", "3"),
        (f"{FOLD}/fold.json", "target.classes", ["normal", "other"]),
        (f"{FOLD}/timing.json", "test.seconds", -1),
        (f"{FOLD}/timing.json", "epochs.0.seconds", "long"),
        (f"{FOLD}/timing.json", "epochs", {}),
        (f"{FOLD}/model/config.json", "in_dim", 10**12),
        (f"{FOLD}/model/config.json", "mlp_ratio", float("inf")),
        ("scores.json", "metrics.auc.all_slides_pooled", "good"),
        ("scores.json", "metrics.auc.mean_over_folds", float("inf")),
        ("scores.json", "metrics.auc.interval", [0.5]),
        ("scores.json", "metrics", {}),
        ("scores.json", "folds.fold-0", {}),
        ("scores.json", "interval_level", 95),
        ("scores.json", "notes", [3]),
        ("scores.json", "calibration.temperatures.fold-0", -1),
        ("scores.json", "baselines.differences.0.low", "low"),
        ("calibration.json", "temperatures.fold-0", 0),
        ("calibration.json", "temperatures.fold-0", 1e-320),
        ("calibration.json", "temperatures.fold-0", 1e300),
        ("calibration.json", "temperatures.fold-0", True),
        ("maps.json", "slides", -2),
        ("maps.json", "areas", {"influence": [0.1]}),
        ("maps.json", "areas", {"influence": [0.1, "x", 0.2]}),
        ("maps.json", "first", "none"),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_is_an_error_with_its_file(
    copy: Path, name: str, keys: str, value: Any
) -> None:
    change(copy / name, keys, value)
    with pytest.raises(CaprmilError) as problem:
        read_all(copy)
    assert str(Path(name).parent) in str(problem.value)
    assert Path(name).stem in str(problem.value) or "model" in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (f"{FOLD}/history.csv", "0.", "x."),
        (f"{FOLD}/history.csv", "\n0,", "\ninf,"),
        (f"{FOLD}/history.csv", "\n0,", "\n,"),
        (f"{FOLD}/test.csv", ",fold-0,", ",fold-9,"),
        (f"{FOLD}/validation.csv", "prob_tumour", "prob_other"),
        ("predictions.csv", "0.", "7."),
        ("predictions.csv", "0.", "nan"),
        ("predictions.csv", ",0.", ',"0.'),  # the quote takes all further lines into the cell
        ("predictions.csv", "slide_", "other_"),
        ("baselines/patch_count.csv", "prob_", ""),
    ],
    ids=str,
)
def test_a_damaged_table_of_a_run_is_an_error_with_its_file(
    copy: Path, name: str, old: str, new: str
) -> None:
    text = (copy / name).read_text()
    assert old in text
    (copy / name).write_text(text.replace(old, new, 1))
    with pytest.raises(CaprmilError, match=Path(name).name) as problem:
        read_all(copy)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("settings", [{"std": 0.0}, {"std": -1.0}, {"mean": float("nan")}])
def test_a_normalisation_that_cannot_be_is_an_error(settings: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="cannot be used"):
        parse_target({"kind": "regression", **settings})


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe{", b"null", b"[" * 100_000, None])
@pytest.mark.parametrize(
    "name",
    ["run.json", "splits.json", "scores.json", "predictions.csv", f"{FOLD}/fold.json"],
)
def test_a_damaged_file_is_a_line(copy: Path, name: str, content: bytes | None) -> None:
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    with pytest.raises(CaprmilError) as problem:
        read_all(copy)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("pattern", "content", "target"),
    [
        ("scores.json", b"[]", "/api/run"),
        ("scores.json", b'{"metrics": 3}', "/api/run"),
        ("calibration.json", b"{", f"/api/slides/{FIRST}"),
        ("calibration.json", b'{"temperatures": {"fold-0": -1}}', f"/api/slides/{FIRST}"),
        ("maps.json", b"null", f"/api/slides/{FIRST}"),
        ("folds/*/fold.json", b"", f"/api/slides/{FIRST}"),
        ("folds/*/model/config.json", b"[]", f"/api/slides/{FIRST}"),
        ("folds/*/model/model.safetensors", b"\0" * 99, f"/api/slides/{FIRST}"),
    ],
)
def test_the_viewer_answers_with_a_sentence_if_a_run_is_damaged_while_it_is_shown(
    copy: Path, pattern: str, content: bytes, target: str
) -> None:
    app = create(Library(Run(copy), device="cpu"))
    for path in copy.glob(pattern):
        path.write_bytes(content)
    reply = call(app, target)
    assert reply.status == 409
    assert Path(pattern).parts[0].removesuffix(".json") in reply.json["reason"]


@pytest.mark.parametrize(
    "change",
    [
        {"in_dim": -1},
        {"in_dim": "64"},
        {"mpp": float("nan")},
        {"mpp": 0},
        {"outputs": 3},
        {"target": {"kind": "regression", "std": 0.0}},
        {"target": {"kind": "unknown"}},
    ],
    ids=str,
)
def test_metadata_of_an_exported_file_that_cannot_be_is_an_error(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    metadata = {"caprmil": "0.3", "in_dim": 64, "outputs": ["probabilities"], "mpp": 0.5}
    for name, content in (("sound.ts", metadata), ("damaged.ts", metadata | change)):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("model/extra/caprmil.json", json.dumps(content))
    assert read_metadata(tmp_path / "sound.ts") == metadata
    with pytest.raises(ExportError, match=r"damaged\.ts is damaged"):
        read_metadata(tmp_path / "damaged.ts")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[[", b"x = " + b"9" * 5000, None])
def test_a_damaged_recipe_of_a_run_is_a_line(
    copy: Path, tiny_cohort: Path, mistake: Callable[..., str], content: bytes | None
) -> None:
    (copy / "recipe.toml").unlink()
    if content is not None:
        (copy / "recipe.toml").write_bytes(content)
    line = mistake("evaluate", copy, "--cohort", tiny_cohort)
    assert "recipe.toml is missing or damaged" in line


def test_a_recipe_in_a_wrong_encoding_is_a_line_before_a_report_is_made(
    copy: Path, mistake: Callable[..., str]
) -> None:
    (copy / "recipe.toml").write_bytes("# Übung".encode("utf-16"))
    assert "recipe.toml is missing or damaged" in mistake("report", copy)
    assert not (copy / "report").exists()


def test_the_status_of_a_damaged_run_is_a_line(copy: Path, mistake: Callable[..., str]) -> None:
    (copy / "splits.json").write_text('{"folds": 3}')
    assert "splits.json is damaged" in mistake("status", copy)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[" * 10**5, '{"state": "running", "last_heartbeat": "now"}', '{"state": 3}'),
        *(f'{{"slide": "a", "state": "done", {each}}}' for each in ODD_FIELDS),
    ],
)
def test_a_damaged_status_or_record_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert JobStatus.read(tmp_path / "a.json") is None
    assert Record.read(tmp_path, "a") is None


@pytest.mark.parametrize("text", ["", "[", "[]", '{"a": "long"}', '{"a": -1}', '{"a": NaN}'])
def test_damaged_files_of_a_sweep_are_a_line(tmp_path: Path, text: str) -> None:
    point = Point(name="a", changes={"model.tokens": "2"})
    for name in ("seconds.json", "pruned.json", "trials.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=r"seconds\.json is damaged .* Remove it"):
        read_seconds(tmp_path / "seconds.json")
    with pytest.raises(RunError, match=r"pruned\.json is damaged .* Remove it"):
        Pruned.read(tmp_path, point)
    if text != "[]":  # no proposals
        with pytest.raises(RunError, match=r"trials\.json is damaged"):
            read_log(tmp_path / "trials.json", {"model.tokens": CategoricalDistribution(["2"])})


def test_the_status_of_a_sweep_with_a_damaged_plan_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RunError, match=r"sweep\.toml is damaged"):
        read_status(tmp_path)


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e999", "9" * 30, '"\\ud800"', "[" * 9**5])
def test_json_of_a_run_has_no_numbers_or_text_that_json_cannot_hold(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text.encode())


@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000, "1e999", "NaN"])
def test_a_region_with_a_number_that_is_no_coordinate_is_an_error(
    tmp_path: Path, number: str
) -> None:
    ring = f"[[0,0],[{number},0],[9,9],[0,0]]"
    (tmp_path / "r.geojson").write_text(f'{{"type":"Polygon","coordinates":[{ring}]}}')
    with pytest.raises(SlideError, match=r"r\.geojson is not"):
        read_regions(tmp_path / "r.geojson")


@pytest.mark.parametrize("at", range(0, 120, 5))
def test_damaged_legacy_weights_are_an_error_of_one_line(tmp_path: Path, at: int) -> None:
    import torch

    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data[: len(data) - at])
    with pytest.raises(EncoderError) as problem:
        read_weights(path)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("can't start new thread"),
        ImportError("libx.so: failed to map segment from shared object"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=repr,
)
def test_missing_memory_is_a_line(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., str], problem: Exception
) -> None:
    def fail() -> None:
        raise problem

    monkeypatch.setattr("caprmil.doctor.examine", fail)
    assert mistake("doctor") == f"error: {OUT_OF_MEMORY}"


def test_an_error_that_has_nothing_to_do_with_memory_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("caprmil.doctor.examine", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(["doctor"])


def test_weights_that_ask_for_too_much_memory_are_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("torch.load", load)
    with pytest.raises(EncoderError, match="cannot be read as weights: MemoryError"):
        read_weights(tmp_path / "model.pth")
