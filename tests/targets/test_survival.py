"""Survival: labels and errors, the sign of risk from end to end, the known truth, patients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from sksurv.linear_model import CoxPHSurvivalAnalysis
from sksurv.util import Surv

from caprmil import MILSurvival
from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import CohortError, RecipeError, RunError
from caprmil.evaluation.predictions import Predictions
from caprmil.evaluation.score_summary import summary
from caprmil.explain import explain_slide, locate_slide
from caprmil.io.findings import Findings
from caprmil.models import create
from caprmil.runs.run import Run
from caprmil.synthetic import SurvivalBags
from caprmil.targets import Survival
from caprmil.targets.survival_columns import find_survival_columns
from caprmil.training.cross_validation import cross_validate
from caprmil.training.distributed import ProcessGroup
from caprmil.training.module import TrainConfig, check_distributed
from caprmil.training.recipe import ModelConfig, Recipe
from quick_scoring import quick_scoring

# Labels


@pytest.mark.parametrize(
    ("header", "expected", "unit"),
    [
        (["slide", "time", "event"], ("time", "event"), ""),
        (["slide", "OS.time", "OS", "DSS"], ("OS.time", "OS"), ""),  # TCGA's clinical table
        (["slide", "OS_MONTHS", "OS_STATUS"], ("OS_MONTHS", "OS_STATUS"), "months"),  # cBioPortal
        (["slide", "OS_days", "OS_event"], ("OS_days", "OS_event"), "days"),  # Patho-Bench
        (["case_id", "survival_months", "censorship"], ("survival_months", "censorship"), "months"),
        (["slide", "survival_months_dss", "censorship_dss"], None, "months"),
        (["slide", "Follow-up (years)", "Vital status"], None, "years"),
        (["slide", "futime", "fustat"], ("futime", "fustat"), ""),
    ],
)
def test_columns_of_time_and_event_are_recognised(
    header: list[str], expected: tuple[str, str] | None, unit: str
) -> None:
    found = find_survival_columns(header)
    assert tuple(found) == (expected or tuple(header[1:3]))
    assert found.unit == unit
    assert found.says_censored == ("censorship" in header[2])


def test_columns_that_are_missing_or_several_are_named() -> None:
    with pytest.raises(CohortError, match=r"as the event.*Columns: slide, time"):
        find_survival_columns(["slide", "time"])
    with pytest.raises(CohortError, match="OS_days and OS_event; PFS_days and PFS_event"):
        find_survival_columns(["OS_days", "OS_event", "PFS_days", "PFS_event"])
    chosen = find_survival_columns(["OS_days", "OS_event", "PFS_days", "PFS_event"], "PFS_days")
    assert tuple(chosen) == ("PFS_days", "PFS_event")
    with pytest.raises(CohortError, match=r"no column is 'OS_day'.*OS_days"):
        find_survival_columns(["OS_days", "OS_event"], "OS_day")


def read(**cells: tuple[str, str]) -> tuple[dict[str, Any], str]:
    target, found = Survival(), Findings()
    joined = {name: target.join_cells(pair) for name, pair in cells.items()}
    _, labels = target.read(joined, "time and event", found, required=True)
    return labels, " ".join(found.problems)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("1", "Dead", "TRUE", "event", "yes", "1:DECEASED", "deceased"), 1.0),
        (("0", "alive", "False", "Censored", "no", "0:LIVING", "Living"), 0.0),
    ],
)
def test_common_words_for_an_event_are_understood(words: tuple[str, ...], expected: float) -> None:
    labels, problems = read(**{f"s{n}": (str(n + 1), word) for n, word in enumerate(words)})
    assert [event for _, event in labels.values()] == [expected] * len(words)
    assert ("No slide has the event" in problems) == (not expected)


def test_labels_that_cannot_be_used_are_named() -> None:
    _, problems = read(
        a=("12", "1"), b=("-3", "1"), c=("soon", "0"), d=("5", "perhaps"), e=("", ""), f=("7", "NA")
    )
    assert "negative time (1): b (-3)" in problems
    assert "time that is not a number (1): c (soon)" in problems
    assert "event that is not known (1): d (perhaps)" in problems
    assert "dead or alive" in problems
    assert "without a time or event (2): e, f (7, NA)" in problems
    assert "same time, 4" in read(a=("4", "1"), b=("4", "0"))[1]


def test_a_column_of_censoring_says_the_opposite() -> None:
    target = Survival().named(["survival_months", "censorship"])
    assert target.parse_label(target.join_cells(("5", "1"))) == (5.0, 0.0)
    assert target.parse_label(target.join_cells(("5", "0"))) == (5.0, 1.0)
    assert target.parse_label(target.join_cells(("5", "censored"))) == (5.0, 0.0)


def test_horizons_are_the_quintiles_of_events_or_those_of_the_recipe() -> None:
    cells = {f"s{n}": f"{n}, {'event' if n <= 50 else 'censored'}" for n in range(1, 101)}
    target, _ = Survival().read(cells, "time", Findings(), required=True)
    assert target.horizons == (11.0, 21.0, 30.0, 40.0)
    found = Findings()
    Survival(horizons=(12.0, 240.0)).read(cells, "time", found, required=True)
    assert "followed beyond 240; the longest time is 100" in " ".join(found.problems)
    with pytest.raises(RecipeError, match="in order"):
        Survival(horizons=(24.0, 12.0))


@pytest.mark.parametrize("setting", [{"center": 1.0}, {"edges": (1.0, 2.0)}])
def test_what_a_fold_learns_cannot_be_set(setting: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="cannot be set"):
        replace(Survival(), **setting).read({"a": "1, 1"}, "time", Findings(), required=True)


def test_settings_that_do_not_exist_are_named() -> None:
    with pytest.raises(RecipeError, match="loss is 'hinge', and must be cox or discrete"):
        Survival(loss="hinge")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="intervals must be 2 or more"):
        Survival(intervals=1)


def test_folds_have_the_same_share_of_events(tmp_path: Path) -> None:
    table = SurvivalBags(slides=40, patches=4, width=4).write(tmp_path)
    options = {"target": Survival(), "splits": SplitConfig(folds=4)}
    cohort, folds = load_cohort(table, tmp_path / "features", **options)
    events = [sum(cohort.labels[slide][1] for slide in fold.test) for fold in folds]
    assert max(events) - min(events) <= 1


def test_no_event_in_the_training_part_is_an_error() -> None:
    with pytest.raises(CohortError, match="No training slide has the event"):
        Survival(horizons=(1.0,)).fit([(1.0, 0.0), (2.0, 0.0)])


def test_a_memory_of_risks_is_for_one_device() -> None:
    group = ProcessGroup("cpu")
    group.world_size = 2
    model = create("mean", 4, 1)
    with pytest.raises(RunError, match=r"which devices do not share.*target\.loss"):
        check_distributed(model, Survival(), TrainConfig(), group)
    check_distributed(model, Survival(loss="discrete"), TrainConfig(), group)


# Answers


@pytest.mark.parametrize("loss", ["cox", "discrete"])
def test_a_higher_output_is_a_higher_risk_a_shorter_survival_and_evidence_for_a_higher_hazard(
    loss: Any,
) -> None:
    labels = [(float(n), float(n % 2)) for n in range(1, 21)]
    target = Survival(loss=loss, horizons=(4.0, 9.0, 15.0)).fit(labels)
    outputs = torch.linspace(-2, 2, 20).double()[:, None].expand(20, target.n_outputs)
    target = target.complete(outputs, target.as_labels(labels))
    answers = target.answer(outputs).numpy()
    assert (np.diff(answers[:, 0]) > 0).all()
    assert (np.diff(answers[:, 1:], axis=0) < 0).all()  # over slides
    assert (np.diff(answers[:, 1:], axis=1) < 0).all()  # over time
    assert np.median(answers[:, 0]) == pytest.approx(0)
    (contrast,) = target.contrasts
    assert contrast.positive == "for a higher hazard"
    assert (np.diff(contrast.of(outputs.numpy())) > 0).all()
    assert target.predicted(answers)[::19] == ["low risk", "high risk"]
    assert [target.sign_of(answer) for answer in answers[::19]] == [-1, 1]


def test_the_survival_of_coxs_loss_is_that_of_breslow_in_scikit_survival() -> None:
    rng = np.random.default_rng(0)
    risks, times = rng.normal(size=60), rng.exponential(10, size=60)
    events = rng.random(60) < 0.6
    labels = np.stack([times, events], axis=1)
    model = CoxPHSurvivalAnalysis(alpha=0).fit(risks[:, None], Surv.from_arrays(events, times))
    outputs = risks * model.coef_[0]
    target = Survival(horizons=(2.0, 6.0, 11.0)).fit(labels.tolist())
    tensor = torch.tensor(outputs)[:, None]
    found = target.complete(tensor, labels).answer(tensor).numpy()[:, 1:]
    curves = model.predict_survival_function(risks[:, None])
    expected = [[curve(time) for time in target.horizons] for curve in curves]
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_discrete_loss_predicts_the_share_without_the_event() -> None:
    rng = np.random.default_rng(1)
    died, left = rng.exponential(10, size=4000), rng.uniform(0, 40, size=4000)
    labels = np.stack([np.minimum(died, left), died <= left], axis=1)
    target = Survival(loss="discrete", horizons=(3.0, 7.0, 15.0)).fit(labels.tolist())
    outputs = torch.zeros(1, target.n_outputs, dtype=torch.float64, requires_grad=True)
    criterion, truth = target.criterion(labels.tolist()), torch.tensor(labels)
    optimiser = torch.optim.LBFGS([outputs], max_iter=100)

    def step() -> Any:
        optimiser.zero_grad()
        loss = criterion(outputs.expand(len(truth), -1), truth)
        loss.backward()
        return loss.detach()

    optimiser.step(step)
    found = target.answer(outputs.detach())[0, 1:].numpy()
    expected = np.exp(-np.array(target.horizons) / 10)
    np.testing.assert_allclose(found, expected, atol=0.03)  # the last interval is wide


def test_a_patient_is_scored_once_with_the_mean_of_the_slides() -> None:
    rng = np.random.default_rng(2)
    labels = np.stack([rng.exponential(10, size=30), rng.random(30) < 0.7], axis=1)
    risks = rng.normal(size=(30, 2))
    both = np.repeat(labels, 2, axis=0)
    table = Predictions(
        slides=tuple(f"s{n}" for n in range(60)),
        target=Survival(),
        answers=risks.reshape(-1, 1),
        labels=both,
        patients=tuple(f"p{n // 2}" for n in range(60)),
        folds=("a",) * 60,
    )
    function = Survival().headline_metric.function
    expected = function(labels, risks.mean(axis=1, keepdims=True))
    found = summary(table, draws=20)
    assert found.metrics["c_index"].all_slides_pooled == pytest.approx(expected)
    assert found.metrics["c_index"].mean_over_folds == pytest.approx(expected)
    assert expected != function(both, risks.reshape(-1, 1))
    assert "Each patient is scored once" in " ".join(found.notes)


def test_the_slide_of_the_highest_risk_may_answer_for_a_patient() -> None:
    target, answers = Survival(horizons=(5.0,)), np.array([[0.2, 0.6], [1.5, 0.1], [-1, 0.9]])
    assert target.has_order
    np.testing.assert_array_equal(target.combine(answers, "max"), [1.5, 0.1])
    np.testing.assert_allclose(target.combine(answers, "mean"), answers.mean(axis=0))


def test_tables_of_other_programs_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"PATIENT": ["a", "b"], "pred_score": [0.5, -1], "OS_months": [3, 9], "OS_status": [1, 0]}
    )
    found = Predictions.read(frame)
    assert isinstance(found.target, Survival)
    assert found.target.unit == "months"
    np.testing.assert_array_equal(found.labels, [[3, 1], [9, 0]])
    assert found.scores() == {"c_index": 1.0, "uno_c_index": 1.0}
    again = Predictions.read(found.write(tmp_path / "found.csv"))
    columns = list(again.to_frame().columns)
    first = columns.index("time_months")
    assert columns[first : first + 3] == ["time_months", "event", "predicted"]
    np.testing.assert_array_equal(again.labels, found.labels)
    assert again.target == found.target


def test_the_site_answers_with_its_events_against_those_expected() -> None:
    labels = Survival(horizons=(5.0,)).as_labels([(2, 1), (4, 1), (6, 0), (8, 1)])
    # Expected: 1/4 for the first, then 1/3 and 1/1 more for those who are still at risk.
    expected = np.cumsum([1 / 4, 1 / 3, 0, 1])
    answer_of = Survival(horizons=(5.0,)).group_answers(labels, ["x", "x", "y", None])
    risk = np.log((2 + 1) / (expected[:2].sum() + 1))
    np.testing.assert_allclose(
        answer_of("x"), [risk, np.exp(-(1 / 4 + 1 / 3) * np.exp(risk))], atol=1e-12
    )
    assert answer_of("new")[0] == answer_of(None)[0] == 0


# The known truth


def made(slides: int, seed: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Bags, labels, and the best possible risks."""
    cohort = SurvivalBags(slides=slides, patches=30, width=8, seed=seed)
    found = [cohort.bag(number) for number in range(slides)]
    labels = np.array([(bag.months, bag.event) for bag in found], dtype=np.float64)
    risks = np.array([cohort.oracle(int(bag.planted.sum())) for bag in found])
    return [bag.features for bag in found], labels, risks


def estimator(**settings: Any) -> MILSurvival:
    small = {"dim": 8, "heads": 2, "tokens": 2}
    options = {"epochs": 6, "lr": 4e-3, "settings": small, "device": "cpu"}
    return MILSurvival(**options | settings)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cox", "discrete"])
def test_a_model_is_nearly_as_good_as_the_oracle_and_permuted_labels_give_chance(
    loss: str,
) -> None:
    bags, labels, oracle = made(320, 3)
    c_index = Survival().headline_metric.function
    best = c_index(labels[120:], oracle[120:, None])
    model = estimator(loss=loss).fit(bags[:120], labels[:120])
    assert best > 0.7
    assert model.score(bags[120:], labels[120:]) > best - 0.04
    survival = model.predict_survival(bags[120:])
    ends = np.argsort(oracle[120:])[[0, -1]]
    assert (survival[ends[0]] > survival[ends[1]]).all()
    permuted = np.random.default_rng(0).permutation(labels)
    chance = estimator(loss=loss).fit(bags[:120], permuted[:120]).score(bags[120:], permuted[120:])
    assert abs(chance - 0.5) < 0.08


@pytest.fixture(scope="module", params=["cox", "discrete"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A cross-validation of slides whose hazard rises with the planted patches."""
    folder = tmp_path_factory.mktemp(request.param)
    table = SurvivalBags(slides=48, patches=16, width=8, seed=5).write(folder / "cohort")
    recipe = Recipe(
        cohort=str(table),
        features=str(table.parent / "features"),
        target=Survival(loss=request.param, horizons=(6.0, 18.0, 30.0)),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0),
        train=TrainConfig(epochs=8, warmup_epochs=0, lr=1e-2),
        loggers={},
    )
    with quick_scoring():
        return cross_validate(recipe, folder / "run", device="cpu", progress=False)


@pytest.mark.slow
def test_the_sign_of_risk_is_right_from_end_to_end(run: Run) -> None:
    """More of the harmful signal: higher risk, shorter survival, evidence for a higher hazard."""
    table = run.predictions
    cohort = SurvivalBags(slides=48, patches=16, width=8, seed=5)
    planted = np.array([cohort.bag(int(slide[-3:])).planted.mean() for slide in table.slides])
    for fold in run.splits:
        rows = [row for row, name in enumerate(table.folds or ()) if name == fold.name]
        risk, *survival = table.answers[rows].T
        assert spearmanr(planted[rows], risk).statistic > 0.7
        assert all(spearmanr(planted[rows], at).statistic < -0.7 for at in survival)
    assert run.scores["metrics"]["c_index"]["all_slides_pooled"] > 0.6
    high = np.array(table.target.predicted(table.answers)) == "high risk"
    assert planted[high].mean() > planted[~high].mean() + 0.1
    rows = np.array([row for row, name in enumerate(table.folds or ()) if name == "fold-0"])
    evidence = []
    for row in (rows[planted[rows].argmin()], rows[planted[rows].argmax()]):
        found = explain_slide(run, locate_slide(run, table.slides[row]), device="cpu").explanation
        assert found.target.contrasts[0].positive == "for a higher hazard"
        evidence.append(found.evidence_for(0).sum())
    assert evidence[0] < evidence[1]


@pytest.mark.slow
def test_the_cut_off_of_a_fold_is_the_median_risk_of_its_training_slides(run: Run) -> None:
    fold = run.splits[0]
    trained = run.trained(fold.name)
    found = run.predict({name: Path(run.paths[name]) for name in fold.train}, fold=fold.name)
    assert np.median(found.answers[:, 0]) == pytest.approx(0, abs=1e-5)
    assert isinstance(trained.target, Survival)
    assert run.fold_target(run.splits[1].name) != trained.target


@pytest.mark.slow
def test_baselines_and_files_are_there(run: Run) -> None:
    assert {"patch count", "site", "mean feature"} <= set(run.baselines)
    assert run.baselines["mean feature"].scores()["c_index"] > 0.6
    names = {path.name for path in run.folder.iterdir()}
    assert {"kaplan_meier.png", "calibration.png", "scores.md"} <= names


# Estimator


def test_an_estimator_takes_structured_labels_and_two_columns() -> None:
    bags, labels, _ = made(16, 1)
    small = {"epochs": 1, "model": "mean", "settings": {"dim": 4}}
    one = estimator(**small).fit(bags, labels)
    other = estimator(**small).fit(bags, Surv.from_arrays(labels[:, 1] > 0, labels[:, 0]))
    np.testing.assert_array_equal(one.predict(bags), other.predict(bags))
    assert one.predict_survival(bags).shape == (16, len(one.horizons_))
    assert one.score(bags, labels) == one.target_.metrics["c_index"].function(
        labels, one.predict(bags)[:, None]
    )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.ones(16), r"must be \(bags, 2\)"),
        (np.ones((16, 2)) * [-1, 1], "0 or more"),
        (np.ones((16, 2)) * [1, 3], "Events must be 0 or 1"),
        (np.ones((16, 2)) * [1, 0], "No bag has the event"),
        ([["soon", "1"]] * 16, "must be numbers"),
    ],
)
def test_labels_of_an_estimator_are_checked(labels: Any, message: str) -> None:
    bags, _, _ = made(16, 1)
    with pytest.raises(CohortError, match=message):
        estimator().fit(bags, labels)
