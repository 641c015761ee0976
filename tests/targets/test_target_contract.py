"""The contract of targets: every registered one is trained, predicted, explained and shown."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from small_cohorts import CELLS, SETTINGS, write_cohort
from typer.testing import CliRunner

from caprmil import explain, export, report
from caprmil.cli import app
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CohortError, RunError, plural
from caprmil.evaluation.comparison import compare
from caprmil.export import model_export
from caprmil.features import bags
from caprmil.report.external_page import FILES, external_page, write_external
from caprmil.report.parts_registry import PARTS
from caprmil.report.run_page import run_report
from caprmil.runs.external import validate_external
from caprmil.runs.run import Run
from caprmil.targets import TARGETS, Target, find_target
from caprmil.training import checkpoints
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig
from caprmil.viewer import Library, create
from caprmil.viewer.library import DISPLAYS, identify
from quick_scoring import quick_scoring
from viewer_requests import call, predict

EXPORT = r"^export (?:async )?(?:function|const) (\w+)"


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_scoring():
        yield


DEFAULT = ("classification", "regression", "survival")
SMALL = {"dim": 8, "heads": 2, "tokens": 2}
MODELS = {
    "caprmil": ModelConfig(settings=SMALL),
    "caprmil+gated": ModelConfig(settings={**SMALL, "pool": "gated"}),
    "abmil": ModelConfig(name="abmil", settings={"dim": 8, "hidden": 4}),
    "mean": ModelConfig(name="mean", settings={"dim": 8}),
}


def pairs() -> Iterator[Any]:
    """Yield every kind of target with every model; in the default suite, three with CAPRMIL."""
    for kind, model in product(TARGETS, MODELS):
        default = kind in DEFAULT and model == "caprmil"
        yield pytest.param(
            (kind, model), id=f"{kind}-{model}", marks=() if default else pytest.mark.slow
        )


@pytest.fixture(scope="module", params=pairs())
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A small cohort for a target, and a tiny model."""
    kind, model = request.param
    assert kind in CELLS, f"Add the labels of {kind} to CELLS in small_cohorts.py."
    table = write_cohort(tmp_path_factory.mktemp(kind), CELLS[kind])
    return Recipe(
        cohort=str(table),
        features=str(table.parent / "features"),
        target=find_target(kind)(**SETTINGS.get(kind, {})),
        model=MODELS[model],
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=2, warmup_epochs=0, lr=1e-2),
        loggers={},
    )


@pytest.fixture(scope="module")
def run(recipe: Recipe) -> Run:
    """The trained run of a target, which all tests share."""
    return cross_validate(recipe, Path(recipe.cohort).parent / "run", device="cpu", progress=False)


@pytest.fixture(scope="module")
def paths(run: Run) -> dict[str, Path]:
    return {name: Path(path) for name, path in run.paths.items()}


def caprmil(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def leaves(target: Target) -> Iterator[Target]:
    """Yield the target, or the parts that it is made of."""
    for part in target.parts.values():
        yield from leaves(part.target)
    if not target.parts:
        yield target


def contrasts(run: Run, fold: str, outputs: Any) -> list[float]:
    return [float(c.of(np.asarray(outputs, dtype=float))) for c in run.fold_target(fold).contrasts]


def test_training_predicts_every_slide_once(run: Run) -> None:
    assert run.finished
    assert sorted(run.predictions.slides) == sorted(run.paths)
    assert run.predictions.target.kind == run.target.kind
    assert list(run.scores["metrics"]) == list(run.target.metrics)
    assert set(run.baselines) == {"patch count", "mean feature"}


def test_another_cohort_is_scored_and_recalibrated(run: Run, tmp_path: Path) -> None:
    table = write_cohort(tmp_path, CELLS[run.target.kind], slides=24, seed=1, prefix="new_")
    found = validate_external(
        run, table, table.parent / "features", recalibrate_on=8, draws=20, device="cpu"
    )
    for each in found.scores:
        inside = run.scores["metrics"][each.metric]["mean_over_folds"]
        assert each.internal.value == pytest.approx(inside, nan_ok=inside is None)
        metric, parts = run.target.metric(each.metric), found.predictions.by_fold().values()
        outside = np.array([metric.function(*part.scored().truth) for part in parts])
        known = outside[~np.isnan(outside)]
        assert each.external.value == pytest.approx(
            known.mean() if len(known) else np.nan, nan_ok=True
        )
    assert {shift.name for shift in found.shifts} >= {
        "Features (synthetic): mean",
        "Patches per slide",
    }
    assert any(shift.name.startswith("Labels") for shift in found.shifts)
    assert found.recalibrated is not None
    assert found.recalibrated.scored == 16
    written = write_external(found, tmp_path / "out")
    assert {path.name for path in written} == set(FILES)
    text = (tmp_path / "out" / "index.html").read_text()
    assert all(title in text for title in ("What was found", "Scores", "How the cohorts differ"))
    drawn = [*leaves(run.target)]
    assert text.count('aria-label="Predicted against observed"') == len(drawn)
    alone = replace(found, recalibrated=None)
    assert external_page(alone).count('aria-label="Predicted against observed"') == len(drawn)
    facts = json.loads((tmp_path / "out" / "external.json").read_text())
    assert [each["metric"] for each in facts["scores"]] == list(run.target.metrics)


def test_calibration_is_measured_before_and_after(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    (folder / "calibration.json").unlink(missing_ok=True)
    output = caprmil("calibrate", folder)
    assert "before" in output
    assert "after" in output
    kept = json.loads((folder / "calibration.json").read_text())
    for own in kept["targets"].values() if run.target.parts else [kept]:
        assert own["before"].keys() == own["after"].keys()
    assert Run(folder).calibration is not None  # it reads back


def test_sets_are_predicted_for_each_target_that_has_them(run: Run, tmp_path: Path) -> None:
    leaves = run.predictions.leaves()
    having = {name: own for name, own in leaves.items() if own.target.kind != "survival"}
    words = ["predict", run.folder, *run.bag_paths()[:3], "--device", "cpu", "--coverage", "0.6"]
    if not having:
        with pytest.raises(CohortError, match="censored slide is not known"):
            caprmil(*words)
        return
    caprmil(*words, "--out", tmp_path / "sets.csv")
    found = run.read_predictions(tmp_path / "sets.csv")
    for name, own in having.items():
        prefix = f"{name}." if name else ""
        assert set(found.extra[f"{prefix}abstain"]) <= {"yes", "no"}
        ends = ("interval_low", "interval_high")
        for column in ends if own.target.kind == "regression" else ("set",):
            assert len(found.extra[f"{prefix}{column}"]) == 3
    page = run_report(run)
    assert page.count("rediction sets of 90") == len(having)
    sure = [own for own in having.values() if own.target.confidence(own.answers) is not None]
    assert page.count("are left to a pathologist") == len(sure)


def test_an_interrupted_run_ends_with_the_same_numbers(
    run: Run, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = checkpoints.write_history, iter(range(1, 100))

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == 4:  # in the middle of the second fold
            raise KeyboardInterrupt
        return write(*args, **options)

    options: dict[str, Any] = {"device": "cpu", "progress": False, "score": False}
    monkeypatch.setattr(checkpoints, "write_history", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cross_validate(recipe, tmp_path / "run", **options)
    assert [fold.name for fold in Run(tmp_path / "run").done] == ["fold-0"]
    monkeypatch.undo()
    resumed = cross_validate(recipe, tmp_path / "run", **options)
    for name in ("fold-0/test.csv", "fold-1/test.csv", "fold-1/model/model.safetensors"):
        found, expected = (folder / "folds" / name for folder in (resumed.folder, run.folder))
        assert found.read_bytes() == expected.read_bytes()


def test_a_test_slide_is_predicted_as_in_the_run(run: Run, paths: dict[str, Path]) -> None:
    expected = run.predictions
    found = run.predict({name: paths[name] for name in expected.slides}, device="cpu")
    np.testing.assert_allclose(found.answers, expected.answers, atol=1e-5)


def test_a_run_is_evaluated_on_another_cohort(run: Run, tmp_path: Path) -> None:
    table = write_cohort(tmp_path, CELLS[run.target.kind], slides=8, seed=1)
    text = table.read_text().replace("slide_", "new_").replace("patient_", "other_")
    table.write_text(text)
    for path in list((tmp_path / "features").iterdir()):
        path.rename(path.with_name(path.name.replace("slide_", "new_")))
    options = ("--features", tmp_path / "features", "--out", tmp_path / "found.csv")
    output = caprmil("evaluate", run.folder, "--cohort", table, *options)
    found = run.read_predictions(tmp_path / "found.csv")
    each = [scores[run.target.headline] for scores in found.fold_scores().values()]
    assert f"{np.nanmean(each):.3f}" in output
    own = found.by_fold()["fold-0"]
    bag_paths = {name: tmp_path / "features" / f"{name}.h5" for name in own.slides}
    alone = run.predict(bag_paths, fold="fold-0", device="cpu")
    np.testing.assert_allclose(own.answers, alone.answers, atol=1e-6)


def test_a_run_is_compared_with_another_table(run: Run) -> None:
    other = run.baselines["mean feature"]
    found = compare({"one": run.predictions, "other": other}, draws=20)
    assert {d.metric for d in found.differences} == set(run.target.metrics)
    (headline,) = (d for d in found.differences if d.metric == run.target.headline)
    folds = [table.fold_scores() for table in (run.predictions, other)]
    means = [np.nanmean([scores[headline.metric] for scores in own.values()]) for own in folds]
    assert headline.difference == pytest.approx(means[0] - means[1])
    table = run.folder / "baselines" / "mean_feature.csv"
    output = caprmil("compare", run.folder, table)
    for name, metric in run.target.metrics.items():
        assert bool(re.search(rf"\b{name}\b", output)) == metric.printed


def test_the_evidence_adds_up_to_the_contrast_of_the_outputs(run: Run) -> None:
    explained = explain.explain_slide(run, explain.locate_slide(run, "slide_003"), device="cpu")
    found = explained.explanation
    assert found.exact
    rest, total = (contrasts(run, found.fold, part) for part in (found.rest, found.logits))
    for number in range(len(total)):
        terms = found.evidence_for(number).astype(float).sum()
        assert terms + rest[number] == pytest.approx(total[number], abs=1e-4)
    answer = run.predictions.answers[run.predictions.slides.index("slide_003")]
    np.testing.assert_allclose(explained.answer.mean, answer, atol=1e-5)


def test_a_prediction_turns_if_it_becomes_that_of_an_opposite_slide_not_if_it_changes_little(
    run: Run,
) -> None:
    """The slides of the small cohort have the lowest and the highest labels."""
    ends = [run.target.parse_label(run.labels[f"slide_{n:03d}"]) for n in (0, 7)]
    answers, target = run.target.as_answers(run.target.as_labels(ends)), run.target.fit(ends)
    assert target.turned(answers[0], answers[1])
    assert target.turned(answers[1], answers[0])
    assert not target.turned(answers[0], 0.8 * answers[0] + 0.2 * answers[1])
    assert target.sign_of(answers[1]) == 1


def test_only_the_output_of_a_target_with_classes_mentions_classes_and_probabilities(
    run: Run, tmp_path: Path
) -> None:
    output = caprmil("explain", run.folder, "slide_003", "--out", tmp_path / "explained")
    output += caprmil("faithfulness", run.folder, "--most", 2, "--out", tmp_path / "measured")
    words = ("--implant", "top:5", "--into", "slide_004", "--out", tmp_path / "implanted")
    output += caprmil("explain", run.folder, "slide_003", *words)
    files = [*tmp_path.glob("explained/*.json"), *tmp_path.glob("measured/*.[cj]s*")]
    files += tmp_path.glob("implanted/*.json")
    output += "".join(path.read_text() for path in files)
    with h5py.File(tmp_path / "explained" / "scores.h5") as scores:
        output += " ".join([*scores, *scores.attrs])
    assert len(files) == 4
    assert bool(re.search(r"\bclass(es)?\b", output)) == run.target.has_classes
    names = {part.target.answer_name for part in run.target.parts.values()}
    assert ("probabilit" in output) == ("probabilities" in {run.target.answer_name, *names})
    assert plural(run.target.contrast_name) in output


def test_slides_are_chosen_by_class_only_with_classes(run: Run) -> None:
    if not run.target.has_classes:
        with pytest.raises(RunError, match="Omit --class"):
            caprmil("faithfulness", run.folder, "--class", run.target.names[0])


def test_the_run_and_its_slides_are_reported(run: Run, tmp_path: Path) -> None:
    path, slides, missing = report.write_run_report(
        run, out=tmp_path / "report", slides=1, device="cpu"
    )
    text = path.read_text()
    assert missing == []
    assert slides
    for metric in run.target.metrics.values():
        assert metric.title in text
    for slide in run.paths:
        assert slide in text
    contrast = run.target.contrasts[0]
    words = re.sub(r"\s+", " ", slides[0].read_text())
    assert any(f"Evidence for {c.name}" in words for c in run.target.contrasts), contrast
    assert not re.search(r"\b(nan|None|undefined)\b", re.sub(r"<script.*", "", words))


def test_the_viewer_lists_and_shows_the_slides(run: Run) -> None:
    viewer = create(Library(run, device="cpu"))
    facts = call(viewer, "/api/run").json
    assert {name: facts["target"][name] for name in ("kind", "display", "titles")} == {
        "kind": run.target.kind,
        "display": run.target.display,
        "titles": list(run.predictions.target.titles),
    }
    rows = {row["name"]: row for row in call(viewer, "/api/slides").json["slides"]}
    for slide, answer in zip(run.predictions.slides, run.predictions.answers, strict=True):
        assert rows[slide]["answer"] == answer.tolist()
        assert rows[slide]["label"] == run.labels[slide]
        assert rows[slide]["predicted"] == run.target.predicted(answer[None])[0]
        assert rows[slide]["group"]
    slide = call(viewer, f"/api/slides/{identify('slide_003')}").json
    assert len(slide["contrasts"]) == len(run.target.contrasts)
    expected = contrasts(run, slide["model"]["fold"], slide["model"]["logits"])
    assert slide["model"]["totals"] == pytest.approx(expected, abs=1e-6)


def test_the_viewer_predicts_a_slide_without_a_region(run: Run, tmp_path: Path) -> None:
    viewer = create(Library(run, device="cpu"))
    found = predict(viewer, identify("slide_003"), {"without": [[0, 6]]}).json
    bag = bags.read(run.paths["slide_003"])
    smaller = bags.write(
        tmp_path / "slide_003.h5", bag.features[6:], bag.coords[6:], encoder="synthetic", mpp=1.0
    )
    expected = run.predict({"slide_003": smaller}, device="cpu").answers[0]
    np.testing.assert_allclose(found["answer"]["mean"], expected, atol=1e-5)
    assert found["removed"] == 6


@pytest.mark.filterwarnings("ignore")  # torch calls TorchScript deprecated
def test_an_exported_model_predicts_as_the_run(
    run: Run, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_export, "SIZES", (1, 17))
    (written,) = export.export_run(run, "torchscript", tmp_path / "model.ts", fold="fold-0")
    answer, *_ = export.FORMATS["torchscript"].open(written.path)(
        bags.read(paths["slide_003"]).features.astype(np.float32)
    )
    expected = run.predict({"slide_003": paths["slide_003"]}, fold="fold-0", device="cpu")
    np.testing.assert_allclose(answer, expected.answers[0], rtol=1e-5, atol=1e-5)


def test_a_run_of_an_unknown_display_is_refused_with_the_known_ones(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(run.target), "display", "hologram")
    with pytest.raises(Exception, match=r"'hologram' is not among classes, .*value"):
        report.run_report(run)
    with pytest.raises(Exception, match=r"'hologram' is not among classes, .*value"):
        Library(run, device="cpu")


def test_report_and_viewer_have_parts_for_every_target() -> None:
    script = (files("caprmil.viewer") / "static" / "parts.js").read_text()
    (names,) = re.findall(r"const PARTS = \{(.+?)\}", script)
    assert {name.strip() for name in names.split(",")} == set(DISPLAYS) == set(PARTS)
    assert {target.display for target in TARGETS.values()} <= set(PARTS)
    several = (files("caprmil.viewer") / "static" / "several_parts.js").read_text()
    (loaded,) = re.findall(r"const FILES = \{(.+?)\}", several, re.DOTALL)
    assert set(re.findall(r"(\w+):", loaded)) == set(PARTS) - {"several"}


def test_all_parts_of_the_viewer_have_the_same_exports() -> None:
    folder = files("caprmil.viewer") / "static"
    comment = (folder / "parts.js").read_text().partition("\nimport")[0]
    expected = set(re.findall(r"^//   (\w+)", comment, re.MULTILINE)) | {"orders"}
    for name in (
        *("class_parts.js", "grade_parts.js", "label_parts.js", "several_parts.js"),
        *("survival_parts.js", "value_parts.js"),
    ):
        text = (folder / name).read_text()
        assert set(re.findall(EXPORT, text, re.MULTILINE)) == expected
