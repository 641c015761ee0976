"""Several targets: the sum of losses, learned weights, scores and baselines of each, comparison."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.special import softmax
from small_cohorts import CELLS, SETTINGS, write_cohort
from typer.testing import CliRunner

from caprmil import config
from caprmil.cli import app
from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CohortError, RecipeError, UnknownNameError
from caprmil.evaluation.baselines import predict_baselines
from caprmil.evaluation.calibration import calibrate
from caprmil.evaluation.predictions import Predictions
from caprmil.evaluation.score_summary import summary
from caprmil.experiments.sweep.plan import Plan
from caprmil.explain import explain_slide, locate_slide
from caprmil.io.json_files import as_json
from caprmil.models import create
from caprmil.report.slide_page import slide_report
from caprmil.runs.history import read_history
from caprmil.runs.run import Run
from caprmil.synthetic import PlantedShares
from caprmil.targets import (
    TARGETS,
    Classification,
    Regression,
    Several,
    Survival,
    Task,
    find_target,
)
from caprmil.targets.part_losses import PartLosses
from caprmil.training import checkpoints
from caprmil.training.cross_validation import cross_validate
from caprmil.training.module import MILModule, TrainConfig
from caprmil.training.recipe import ModelConfig, Recipe
from quick_scoring import quick_scoring

TARGET = Several(
    tasks={
        "grade": Task(settings={"classes": ["low", "high"]}, weight=2.0),
        "burden": Task(kind="regression", weight=0.5, settings={"loss": "l2"}),
        "genes": Task(kind="multilabel", settings={"labels": ["EGFR", "KRAS"]}),
    }
)
NAN = float("nan")
LABELS = [(1, 40.0, 1, -1), (0, NAN, 0, 1), (-1, 10.0, -1, -1), (1, 30.0, -1, 0)]


def losses_of(target: Several) -> PartLosses:
    found = target.fit(LABELS).criterion(LABELS)
    assert isinstance(found, PartLosses)
    return found


def test_the_loss_is_the_weighted_sum_and_a_missing_label_adds_nothing() -> None:
    outputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor(LABELS)
    loss = losses_of(TARGET)(outputs, labels)
    known = [40.0, 10.0, 30.0]
    standard = (torch.tensor([40.0, 10.0, 30.0]) - np.mean(known)) / np.std(known)
    grade = F.cross_entropy(outputs[[0, 1, 3], :2], torch.tensor([1, 0, 1]), reduction="sum") / 4
    burden = ((outputs[[0, 2, 3], 2] - standard) ** 2).sum() / 4
    cells = [(0, 3, 1), (1, 3, 0), (1, 4, 1), (3, 4, 0)]  # slide, output, label
    genes = sum(
        F.binary_cross_entropy_with_logits(outputs[row, column], torch.tensor(float(label)))
        for row, column, label in cells
    )
    expected = 2 * grade + 0.5 * burden + genes / 8
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    assert outputs.grad is not None
    assert not outputs.grad[2, :2].any()
    assert not outputs.grad[1, 2]


def test_a_batch_is_the_mean_of_its_bags_so_that_devices_and_batch_sizes_agree() -> None:
    losses = losses_of(TARGET)
    outputs, labels = torch.randn(4, 5, dtype=torch.float64), torch.tensor(LABELS)
    single = [losses(outputs[n : n + 1], labels[n : n + 1]) for n in range(4)]
    assert losses(outputs, labels).item() == pytest.approx(torch.stack(single).mean().item())
    assert losses.validation_loss(outputs, labels).item() == pytest.approx(
        torch.stack(single).mean().item()
    )


def test_survival_is_scored_once_per_patient_and_the_others_slide_by_slide() -> None:
    rng = np.random.default_rng(2)
    times = np.stack([rng.exponential(10, size=30), rng.random(30) < 0.7], axis=1)
    risks, sizes = rng.normal(size=(60, 1)), rng.normal(size=(60, 2))
    target = Several(tasks={"death": Task(kind="survival"), "size": Task(kind="regression")})
    table = Predictions(
        slides=tuple(f"s{n}" for n in range(60)),
        target=target,
        answers=np.c_[risks, sizes[:, :1]],
        labels=np.c_[np.repeat(times, 2, axis=0), sizes[:, 1]],
        patients=tuple(f"p{n // 2}" for n in range(60)),
        folds=("a",) * 60,
    )
    found = summary(table, draws=20)
    alone = Survival().headline_metric.function(times, risks.reshape(-1, 2).mean(axis=1)[:, None])
    assert found.metrics["death.c_index"].all_slides_pooled == pytest.approx(alone)
    assert found.metrics["death.c_index"].mean_over_folds == pytest.approx(alone)
    each = summary(table.part("size"), draws=20).metrics["mae"]
    assert found.metrics["size.mae"].all_slides_pooled == pytest.approx(each.all_slides_pooled)
    assert "death: each patient is scored once" in " ".join(found.notes)


def test_learned_weights_reach_the_best_variance_of_constant_losses() -> None:
    losses = losses_of(replace(TARGET, weighting="uncertainty"))
    outputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor(LABELS)
    assert losses.log_variances is not None
    optimizer = torch.optim.LBFGS(losses.parameters(), max_iter=200, tolerance_grad=1e-9)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = losses(outputs, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    # Each loss alone, over the slides that have its label.
    for number, name in enumerate(TARGET.order):
        part = losses.parts[name]
        own = part.values_of(labels)
        known = torch.from_numpy(part.target.known(own.numpy()))
        alone = losses.criteria[name](outputs[known][:, part.outputs], own[known])
        variance = losses.log_variances[number].exp().item()
        assert variance == pytest.approx(2 * alone.item(), rel=1e-3)


def test_learned_weights_reach_the_optimiser_without_weight_decay_and_leave_the_model() -> None:
    target = replace(TARGET, weighting="uncertainty")
    model = create("mean", 8, target.n_outputs)
    names = set(model.state_dict())
    model.set_criterion(losses_of(target))
    (optimizer,), _ = MILModule(model, target, TrainConfig(), 0).configure_optimizers()
    weights = dict(model.named_parameters())["criterion.log_variances"]
    (group,) = [g for g in optimizer.param_groups if any(p is weights for p in g["params"])]
    assert group["weight_decay"] == 0
    model.set_criterion(torch.nn.functional.cross_entropy)
    assert set(model.state_dict()) == names


def small_recipe(folder: Path, **changes: Any) -> Recipe:
    table = write_cohort(folder, CELLS["several"])
    return Recipe(
        cohort=str(table),
        features=str(folder / "features"),
        target=Several(**SETTINGS["several"] | changes),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=3, warmup_epochs=0, lr=1e-2),
        loggers={},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = small_recipe(tmp_path_factory.mktemp("several"))
    with quick_scoring():
        return cross_validate(
            recipe, Path(recipe.cohort).parent / "run", device="cpu", progress=False
        )


def test_an_interrupted_training_ends_with_the_same_learned_weights(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = checkpoints.write_history, iter(range(1, 100))

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return write(*args, **options)

    recipe = small_recipe(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "progress": False, "score": False}
    monkeypatch.setattr(checkpoints, "write_history", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cross_validate(recipe, tmp_path / "run", **options)
    monkeypatch.undo()
    resumed = cross_validate(recipe, tmp_path / "run", **options)
    for fold in ("fold-0", "fold-1"):
        found, expected = (
            read_history(each.fold_folder(fold) / "history.csv") for each in (resumed, run)
        )
        assert found == expected
        assert len(set(expected["weight_grade"])) == 3  # they are learned


def test_the_scores_of_a_target_are_those_of_its_part_of_the_table_alone(run: Run) -> None:
    scores = run.predictions.scores()
    for name, target in run.target.parts.items():
        alone = run.predictions.part(name).scores()
        for metric in target.target.metrics:
            assert scores[f"{name}.{metric}"] == pytest.approx(alone[metric], nan_ok=True)
    skills = [2 * scores["grade.auc"] - 1, scores["size.r2"], 2 * scores["genes.auc"] - 1]
    assert scores["skill"] == pytest.approx(np.mean(skills))


@pytest.mark.parametrize("name", ["skill", "size.mae", "genes.average_precision"])
def test_many_draws_at_once_are_scored_like_repeated_slides(run: Run, name: str) -> None:
    labels, answers = run.predictions.truth
    weights = np.random.default_rng(0).integers(0, 3, size=(8, len(labels))).astype(float)
    metric = run.target.metric(name)
    rows = [np.repeat(np.arange(len(labels)), own.astype(int)) for own in weights]
    expected = [metric.function(labels[own], answers[own]) for own in rows]
    np.testing.assert_allclose(metric.draws(labels, answers, weights), expected, atol=1e-9)


def test_the_table_of_predictions_has_prefixed_columns_and_is_recognised(
    run: Run, tmp_path: Path
) -> None:
    frame = pd.read_csv(run.folder / "predictions.csv")
    assert list(frame) == [
        *("slide", "patient", "fold", "grade.label", "size.label", "genes.EGFR", "genes.KRAS"),
        *("predicted", "grade.prob_high", "grade.prob_low", "size.predicted"),
        *("genes.EGFR.positive", "genes.KRAS.positive"),
    ]
    found = Predictions.read(run.folder / "predictions.csv", allow_unlabelled=True)
    assert {name: p.target.kind for name, p in found.target.parts.items()} == {
        "grade": "classification",
        "size": "regression",
        "genes": "multilabel",
    }
    np.testing.assert_array_equal(found.labels, run.predictions.labels)
    assert found.scores() == pytest.approx(run.predictions.scores(), nan_ok=True)


def test_classes_among_several_targets_are_calibrated_as_they_are_alone(run: Run) -> None:
    kept = json.loads((run.folder / "calibration.json").read_text())
    assert list(kept["targets"]) == ["grade"]  # a number and labels have no temperature
    validation = {fold: table.part("grade").labelled() for fold, table in run.validation.items()}
    alone = calibrate(run.predictions.part("grade"), validation)
    assert kept["targets"]["grade"] == json.loads(as_json(alone.as_dict()))
    assert (run.folder / "grade-reliability.png").exists()
    assert alone.as_markdown() in (run.folder / "scores.md").read_text()


def test_a_slide_report_shows_the_calibrated_probability_of_each_target(
    run: Run, tmp_path: Path
) -> None:
    folder = shutil.copytree(run.folder, tmp_path / "run")
    temperatures = {fold.name: 2.0 + number for number, fold in enumerate(run.splits)}
    kept = {"targets": {"grade": {"temperatures": temperatures}}}
    (folder / "calibration.json").write_text(json.dumps(kept))
    changed = Run(folder)
    explained = explain_slide(changed, locate_slide(changed, "slide_001"), device="cpu")
    grade = run.target.parts["grade"]
    logs = {f: np.log(own[grade.answers]) for f, own in explained.answer.by_fold.items()}
    expected = np.mean([softmax(own / temperatures[f]) for f, own in logs.items()], axis=0)
    text = slide_report(changed, explained)
    assert "calibrated probability" in text
    best = int(explained.answer.mean[grade.answers].argmax())
    (shown,) = re.findall(r'<b data-value="([\d.e-]+)">', text)
    assert float(shown) == pytest.approx(expected[best])
    assert changed.calibrate(explained.answer.by_fold) is None  # not all targets have temperatures


def test_baselines_of_a_target_are_those_of_the_slides_that_have_its_label(run: Run) -> None:
    table = pd.read_csv(Path(run.folder).parent / "labels.csv", dtype=str, keep_default_na=False)
    known = table[table["grade"] != ""]
    cohort, _ = load_cohort(
        known.rename(columns={"grade": "label"}), Path(run.folder).parent / "features", None
    )
    folds = [
        replace(
            fold,
            train=tuple(s for s in fold.train if s in cohort.labels),
            validation=tuple(s for s in fold.validation if s in cohort.labels),
            test=tuple(s for s in fold.test if s in cohort.labels),
        )
        for fold in run.splits
    ]
    for name, alone in predict_baselines(cohort, folds).items():
        found = run.baselines[name].part("grade").labelled()
        own = dict(zip(found.slides, found.answers, strict=True))
        expected = dict(zip(alone.slides, alone.answers, strict=True))
        assert own.keys() == expected.keys()
        for slide, answer in expected.items():
            np.testing.assert_allclose(own[slide], answer, atol=1e-9)


def test_an_external_cohort_may_have_the_labels_of_some_targets(run: Run, tmp_path: Path) -> None:
    folder = Path(run.folder).parent
    table = pd.read_csv(folder / "labels.csv", dtype=str)[["slide", "size in mm"]].head(8)
    for slide in table["slide"]:
        source = folder / "features" / f"{slide}.h5"
        (tmp_path / f"new_{slide}.h5").write_bytes(source.read_bytes())
    table["slide"] = "new_" + table["slide"]
    found = run.evaluate(table, tmp_path, device="cpu")
    shown = summary(found, draws=5)
    assert shown.metrics["size.mae"].all_slides_pooled > 0
    assert np.isnan(shown.metrics["grade.auc"].all_slides_pooled)


def test_every_setting_of_a_target_can_be_changed_and_is_in_the_digest() -> None:
    text = """
cohort = "labels.csv"
[target]
kind = "several"
[target.tasks.grade]
class_weights = "balanced"
[target.tasks.size]
kind = "regression"
label = "size in mm"
"""
    table = config.read_toml(text)
    recipe = config.parse(table, into=Recipe)
    changed = config.parse(table, into=Recipe, changes=["target.tasks.size.weight=3"])
    assert isinstance(recipe.target, Several)
    assert recipe.target.targets == {
        "grade": Classification(class_weights="balanced"),
        "size": Regression(),
    }
    assert changed.target.tasks["size"].weight == 3  # type: ignore[attr-defined]
    assert config.differences(recipe, changed) == ["target.tasks.size.weight: 1.0 -> 3.0"]
    again = config.parse(config.read_toml(config.dump(recipe)), into=Recipe)
    assert again == recipe
    turned = dict(
        table, target={"kind": "several", "tasks": dict(reversed(table["target"]["tasks"].items()))}
    )
    digests = {config.digest(each) for each in (recipe, changed, config.parse(turned, into=Recipe))}
    assert len(digests) == 3


def test_a_sweep_takes_a_setting_of_a_target_and_chooses_by_its_metric() -> None:
    recipe = Recipe(cohort="labels.csv", target=replace(TARGET, weighting="uncertainty"))
    axes = {"target.tasks.burden.weight": "0.5,1"}
    plan = Plan(recipe=recipe, axes=axes, metric="burden.mae")
    assert not plan.higher_is_better
    changed = [plan.recipe_at(point).target for point in plan.space.grid()]
    assert [each.tasks["burden"].weight for each in changed] == [0.5, 1]  # type: ignore[attr-defined]
    assert Plan(recipe=recipe, axes=axes).metric == "skill"
    with pytest.raises(UnknownNameError, match=r"grade\.auc"):
        Plan(recipe=recipe, axes=axes, metric="grade.auk")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"tasks": {"a": {}}}, "two tables"),
        ({"tasks": {"a": {}, "b": {"kind": "nonsense"}}}, "no target called 'nonsense'"),
        ({"tasks": {"a": {}, "b.c": {}}}, "cannot be called 'b.c'"),
        ({"tasks": {"a": {}, "b": {"weight": -1}}}, "weight must be above 0"),
        ({"tasks": {"a": {}, "b": {"clases": ["x"]}}}, "Did you mean"),
        ({"tasks": {"a": {}, "b": {"kind": "several", "tasks": {}}}}, "cannot be several"),
        ({"tasks": {"a": {}, "b": {}}, "weighting": "magic"}, "weighting"),
        ({"tasks": {"a": {}, "b": {}}, "order": ["a"]}, "order must name"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(target: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        config.parse({"cohort": "a.csv", "target": {"kind": "several", **target}}, into=Recipe)
    assert "\n" not in str(raised.value)


def test_a_column_that_is_missing_is_named_with_the_setting(tmp_path: Path) -> None:
    table = write_cohort(tmp_path, CELLS["several"])
    target = Several(tasks={"grade": Task(), "stage": Task(label="pT")})
    with pytest.raises(CohortError, match=r"No slide has a label of stage \(column pT\)") as raised:
        load_cohort(table, tmp_path / "features", None, SplitConfig(folds=2), target=target)
    assert "[target.tasks.stage]" in str(raised.value)


def test_slides_of_a_patient_may_lack_different_labels_but_not_contradict(tmp_path: Path) -> None:
    table = pd.read_csv(write_cohort(tmp_path, CELLS["several"]), dtype=str, keep_default_na=False)
    table.loc[8, "patient"] = table.loc[0, "patient"]  # the same share of patches, so the same
    table.loc[8, "grade"] = ""
    target = Several(**SETTINGS["several"])
    load_cohort(table, tmp_path / "features", None, SplitConfig(folds=2), target=target)
    table.loc[8, "grade"] = "high"
    with pytest.raises(CohortError, match="Patients with more than one label"):
        load_cohort(table, tmp_path / "features", None, SplitConfig(folds=2), target=target)


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind != "several"])
def test_any_registered_kind_can_be_one_of_several(kind: str, tmp_path: Path) -> None:
    cell, settings = CELLS[kind], SETTINGS.get(kind, {})

    def cells(share: float) -> dict[str, str]:
        own = cell(share)
        own = {"first": own} if isinstance(own, str) else dict(own)
        if share == 0.1:
            own = dict.fromkeys(own, "")  # missing
        return own | {"second": "many" if share > 0.5 else "few"}

    table = write_cohort(tmp_path, cells)
    own = Task(kind=kind, settings=config.as_table(find_target(kind)(**settings)))
    recipe = Recipe(
        cohort=str(table),
        features=str(tmp_path / "features"),
        target=Several(tasks={"first": own, "second": Task()}, weighting="uncertainty"),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=1, warmup_epochs=0, lr=1e-2, batch_size=4),
        loggers={},
    )
    run = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False, score=False)
    tables = [run.read_predictions(run.fold_folder(f.name) / "test.csv") for f in run.splits]
    table = Predictions.concatenate(tables)
    assert table.part("first").target.kind == kind
    assert np.isfinite(table.answers).all()
    assert np.isfinite(table.scores()["skill"])


def test_a_run_is_compared_with_one_of_a_single_target_by_what_they_share(
    run: Run, tmp_path: Path
) -> None:
    part = run.predictions.part("size").labelled()
    other = replace(part, answers=part.answers + 1)
    other.write(tmp_path / "size_alone.csv")
    result = CliRunner().invoke(app, ["compare", str(run.folder), str(tmp_path / "size_alone.csv")])
    assert result.exit_code == 0, result.output
    assert "mae" in result.output
    assert f"{len(part)} slides" in result.output
    text = ["compare", str(run.folder), str(tmp_path / "size_alone.csv"), "--target"]
    named = CliRunner().invoke(app, [*text, "size"])
    assert named.output == result.output
    wrong = CliRunner().invoke(app, [*text, "sise"])
    assert isinstance(wrong.exception, UnknownNameError)
    assert "Did you mean 'size'" in str(wrong.exception)


def helped(folder: Path, tasks: dict[str, Task] | None, *, seed: int) -> Run:
    """Train on slides of which few have a grade: with the burden as a second target, or alone."""
    table = PlantedShares(seed=seed, graded=16, strength=1.0, width=64, patches=30).write(folder)
    rows = pd.read_csv(table, dtype=str, keep_default_na=False)
    if tasks is None:
        rows = rows[rows["grade"] != ""].drop(columns="burden").rename(columns={"grade": "label"})
    recipe = Recipe(
        cohort="labels.csv",
        features=str(folder / "features"),
        target=Several(tasks=tasks) if tasks else Classification(),
        model=ModelConfig(settings={"dim": 16, "heads": 2, "tokens": 2}),
        splits=SplitConfig(kind="fixed"),
        train=TrainConfig(epochs=15, warmup_epochs=1, lr=2e-3, batch_size=4),
        loggers={},
    )
    out = folder / ("shared" if tasks else "alone")
    with quick_scoring():
        return cross_validate(recipe, out, table=rows, device="cpu", progress=False)


@pytest.mark.slow
def test_a_target_with_many_labels_helps_one_with_few(tmp_path: Path) -> None:
    tasks = {"grade": Task(), "burden": Task(kind="regression")}
    gains = []
    for seed in range(2):
        shared = helped(tmp_path / str(seed), tasks, seed=seed).predictions.part("grade")
        alone = helped(tmp_path / str(seed), None, seed=seed).predictions
        assert set(shared.labelled().slides) == set(alone.slides)
        gains.append(shared.scores()["auc"] - alone.scores()["auc"])
    assert min(gains) > 0
    assert np.mean(gains) > 0.05
