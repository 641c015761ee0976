"""Sweeps: every point once, the best chosen on the validation parts, nothing trained twice."""

import csv
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import log10, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from scipy.stats import chisquare, kstest
from sklearn.metrics import roc_auc_score

from caprmil import config
from caprmil.errors import CaprmilError, CohortError, RecipeError, RunError, UnknownNameError
from caprmil.evaluation.predictions import Predictions
from caprmil.executors import LocalExecutor, Task
from caprmil.experiments import paper
from caprmil.experiments.sweep.axes import Point, Range, Values, read_axis
from caprmil.experiments.sweep.plan import Plan, read_plan
from caprmil.experiments.sweep.results import PointResult, SweepResults, paper_ablation
from caprmil.experiments.sweep.runner import run_sweep
from caprmil.experiments.sweep.search import propose_points
from caprmil.io.leftovers import temporary_name
from caprmil.models import create
from caprmil.runs.run import Run
from caprmil.training import cross_validation as training
from caprmil.training.recipe import Recipe
from quick_scoring import quick_scoring

pytestmark = pytest.mark.slow


def plan(*changes: str, **options: Any) -> Plan:
    return read_plan("slides.csv", changes, **options)


def points(plan: Plan, trials: int | None = None) -> list[Point]:
    return list(propose_points(plan, trials, {}))


def rows(folder: Path, *, without: Sequence[str] = ("seconds",)) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return [
            {name: cell for name, cell in row.items() if name not in without}
            for row in csv.DictReader(file)
        ]


# Plans


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("2,4,8", Values(("2", "4", "8"))),
        (" 2, 4 ,2", Values(("2", "4"))),
        ("mean,gated", Values(("mean", "gated"))),
        ("[1,2],[3]", Values(("[1,2]", "[3]"))),
        ("{a=1,b=2},{}", Values(("{a=1,b=2}", "{}"))),
        ("\"a,b\",'c,[d'", Values(('"a,b"', "'c,[d'"))),
        ("1e-5..1e-3", Range(1e-5, 1e-3, integer=False)),
        ("2..16", Range(2, 16, integer=True)),
        ("-0.5...5", Range(-0.5, 0.5, integer=False)),
    ],
)
def test_an_axis_is_a_list_or_a_range(text: str, axis: Values | Range) -> None:
    assert read_axis("key", text) == axis


@pytest.mark.parametrize("value", ["5", "[1,2]", '"a,b"', "a..b", "{x=1,y=2}"])
def test_one_value_is_a_change_and_not_an_axis(value: str) -> None:
    found = plan(f"model.x={value}", "model.tokens=2,4")
    assert list(found.axes) == ["model.tokens"]
    expected = config.parse({"cohort": "c"}, into=Recipe, changes=[f"model.x={value}"])
    assert found.recipe.model.settings == expected.model.settings


def test_a_grid_has_every_point_in_order() -> None:
    grid = points(plan("model.tokens=2,4,8", "train.lr=1e-4,1e-3"))
    expected = [f"tokens={t},lr={lr}" for t, lr in product((2, 4, 8), ("1e-4", "1e-3"))]
    assert [point.name for point in grid] == expected
    assert grid[1].changes == {"model.tokens": "2", "train.lr": "1e-3"}


def test_a_point_changes_its_settings_and_nothing_else() -> None:
    one = plan("train.epochs=7", "model.pool=mean,gated", "train.lr=1e-4,1e-3")
    last = points(one)[3]
    changed = config.differences(one.recipe, one.recipe_at(last))
    assert changed == ["model.pool: not set -> gated", "train.lr: 0.0002 -> 0.001"]
    assert one.recipe_at(last).train.epochs == 7


def test_a_sweep_of_another_model_starts_from_its_recipe() -> None:
    found = read_plan("t.csv", ["model.hidden=256,384", "train.epochs=3"], model="clam")
    assert (found.recipe.model.name, found.recipe.train.min_lr) == ("clam", 1e-5)
    short = read_plan("t.csv", ["train.epochs=3,9"])  # the warm-up fits into each point
    warmups = [short.recipe_at(point).train.warmup_epochs for point in points(short)]
    assert warmups == [1, 6]


def test_two_keys_with_the_same_last_part_are_written_in_full() -> None:
    (first, *_) = points(plan("splits.seed=1,2", "train.seed=3,4", "model.tokens=2,4"))
    assert first.name == "splits.seed=1,train.seed=3,tokens=2"


def test_points_have_different_names_that_are_valid_for_folders() -> None:
    odd = ["a", '"a"', "'a'", "a b", "a_b", "a/b", "../a", "x" * 300, "x" * 301, "[1,2]", "[1_2]"]
    names = {point.name.lower() for point in points(plan(f"data.label={','.join(odd)}"))}
    assert len(names) == len(odd)
    assert all(Path(name).name == name and len(name) < 150 for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.epochs=50"], "No setting varies"),
        (["train.lr=1e-5..1e-3"], "is a range, and a grid needs values"),
        (["model.tokens=2,,4"], "no value between two commas"),
        (["model.tokens=8..2"], "from the lower to the higher end"),
        (["model.tokens=2,4", "model.tokens=8"], "model.tokens is given twice"),
        (["model.tokens=2", "model.tokens=4"], "model.tokens is given twice"),
    ],
)
def test_an_invalid_plan_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plan(*changes)


def test_an_unknown_metric_is_refused_with_a_hint() -> None:
    with pytest.raises(UnknownNameError, match=r"'auk'.*'auc'"):
        plan("model.tokens=2,4", metric="auk")


def test_the_metric_is_one_of_the_target() -> None:
    values = plan("model.tokens=2,4", "target.kind=regression")
    assert (values.metric, values.higher_is_better) == ("r2", True)
    classes = plan("model.tokens=2,4")
    assert (classes.metric, classes.higher_is_better) == ("auc", True)
    assert not replace(classes, metric="ace").higher_is_better
    shown = found(result("1"), metric="brier").shown_metrics()
    assert [metric.name for metric in shown] == ["brier", "auc", "ace"]
    shown = SweepResults(plan=values, points=[], failures={}).shown_metrics()
    assert [metric.name for metric in shown] == ["r2", "mae"]
    with pytest.raises(UnknownNameError, match="metric of a regression called 'auc'"):
        plan("model.tokens=2,4", "target.kind=regression", metric="auc")


def test_a_grid_above_the_limit_needs_a_number_of_trials() -> None:
    many = ",".join(map(str, range(2000)))
    large = plan(f"train.epochs={many}", f"splits.seed={many}")
    with pytest.raises(RecipeError, match=r"4,000,000 points\. Pass --trials"):
        points(large)
    few = points(large, 30)
    assert len({point.name for point in few}) == 30
    assert few[:10] == points(large, 10)


def test_a_part_of_a_grid_is_drawn_from_it() -> None:
    grid = plan("model.tokens=2,4,8", "model.heads=1,2", "model.depth=1,2")
    part = points(grid, 11)
    assert len({point.name for point in part}) == 11
    assert all(point in points(grid) for point in part)
    assert points(grid, 99) == points(grid, 12) == points(grid)
    assert points(grid, 7) == part[:7] != points(replace(grid, seed=1), 7)


# Random search


def test_more_trials_begin_with_those_of_fewer() -> None:
    search = plan("train.lr=1e-5..1e-3", "model.tokens=2,4,8", search="random")
    assert points(search, 12)[:5] == points(search, 5)
    assert len({point.name for point in points(search)}) == 20
    assert points(search, 5) != points(replace(search, seed=1), 5)


def test_a_space_of_four_points_has_four_trials() -> None:
    search = plan("model.heads=1,2", "model.tokens=1..2", search="random")
    assert len(points(search, 50)) == 4


def test_a_range_with_two_names_has_two_points() -> None:
    assert len(points(plan("train.lr=0.1..0.1001", search="random"), 5)) == 2


def draws(text: str, n: int = 800) -> list[str]:
    """Return the first draw of many searches."""
    search = plan(f"model.x={text}", search="random")
    return [points(replace(search, seed=seed), 1)[0].changes["model.x"] for seed in range(n)]


def test_wide_ranges_are_drawn_evenly_on_a_logarithmic_scale() -> None:
    wide, narrow = (np.array(draws(text), float) for text in ("1e-5..1e-2", "0.1..0.6"))
    assert kstest(np.log10(wide), "uniform", (-5, 3)).pvalue > 0.01
    assert kstest(narrow, "uniform", (0.1, 0.5)).pvalue > 0.01


def test_integers_stay_integers_and_are_drawn_evenly_to_the_ends() -> None:
    found = draws("3..7")
    assert set(found) == {"3", "4", "5", "6", "7"}
    assert chisquare(np.bincount(np.array(found, int))[3:]).pvalue > 0.01


# Results


def result(name: str, **parts: Sequence[float]) -> PointResult:
    """Return a point with an AUC on each fold of its parts, and an ACE of the same value."""
    scores: Mapping[str, Any] = {
        part: {f"fold-{k}": {"auc": v, "ace": v} for k, v in enumerate(parts.get(part, ()))}
        for part in ("validation", "test")
    }
    point = Point(name=name, changes={"model.tokens": name})
    return PointResult(point=point, parameters=1, seconds=1.0, scores=scores)


def found(*results: PointResult, metric: str = "auc", search: Any = "grid") -> SweepResults:
    names = ",".join(each.point.name for each in results)
    own = plan(f"model.tokens={names},0", metric=metric, search=search)
    return SweepResults(plan=own, points=results, failures={})


def some_results(seed: int, n: int = 6) -> list[PointResult]:
    rng = np.random.default_rng(seed)
    return [result(f"{k}", validation=rng.random(4), test=rng.random(4)) for k in range(n)]


@pytest.mark.parametrize("metric", ["auc", "ace"])
def test_the_best_is_chosen_on_the_validation_parts(metric: str) -> None:
    results = some_results(0)
    means = [np.mean([f[metric] for f in r.scores["validation"].values()]) for r in results]
    number = np.argmin(means) if metric == "ace" else np.argmax(means)
    best = found(*results, metric=metric).best
    assert best is results[number]
    tests = [each.scores["test"] for each in results]
    permuted = [
        replace(each, scores={**each.scores, "test": test})
        for each, test in zip(results, tests[::-1], strict=True)
    ]
    again = found(*permuted, metric=metric).best
    assert again is not None
    assert again.point == best.point


@pytest.mark.parametrize("metric", ["auc", "ace"])
def test_the_score_of_the_choice_is_that_of_a_choice_within_each_fold(metric: str) -> None:
    results, scores = some_results(1), []
    for fold in [f"fold-{k}" for k in range(4)]:
        own = [each.scores["validation"][fold][metric] for each in results]
        number = own.index(min(own) if metric == "ace" else max(own))
        scores.append(results[number].scores["test"][fold][metric])
    chosen = found(*results, metric=metric).chosen_by_fold()
    assert (chosen.mean, chosen.counted) == (pytest.approx(np.mean(scores)), 4)


def test_a_score_of_nan_is_never_the_best() -> None:
    one = result("1", validation=[nan, nan], test=[0.9, 0.9])
    two = result("2", validation=[0.2, nan], test=[0.4, 0.6])
    both = found(one, two)
    assert both.best is two
    assert both.chosen_by_fold()[::2] == (0.4, 1)  # the second fold cannot choose


def test_without_validation_no_point_is_chosen() -> None:
    both = found(result("1", test=[0.5]), result("2", test=[0.7]))
    assert both.best is None
    assert "no point was chosen" in both.as_markdown()
    assert "**" not in both.as_markdown()


def test_a_grid_keeps_its_order_and_a_search_has_its_best_on_top() -> None:
    results = [result(f"{k}", validation=[v], test=[0.5]) for k, v in enumerate((0.2, 0.9, 0.5))]
    order = {
        search: [row["tokens"] for row in found(*results, search=search).rows()]
        for search in ("grid", "random")
    }
    assert order == {"grid": ["0", "**1**", "2"], "random": ["**1**", "2", "0"]}


@pytest.mark.filterwarnings("ignore:12 heads do not divide")
@pytest.mark.parametrize("row", paper.ABLATIONS, ids=lambda row: "-".join(map(str, row[:3])))
def test_the_papers_ablations_are_recognised(row: paper.Ablation) -> None:
    settings = dict(zip(("tokens", "heads", "mlp_ratio"), row[:3], strict=True))
    assert paper_ablation(create("caprmil", 1024, 2, **settings)) == row


@pytest.mark.parametrize(
    ("name", "settings"),
    [("caprmil", {"dim": 64}), ("caprmil", {"tokens": 3}), ("caprmil+gated", {}), ("mean", {})],
)
def test_other_models_are_not_the_papers_ablations(name: str, settings: dict[str, Any]) -> None:
    assert paper_ablation(create(name, 32, 2, **settings)) is None


def test_the_papers_figures_are_shown_for_its_ablations_only() -> None:
    four = replace(result("4", validation=[0.9], test=[0.9]), published=paper.ABLATIONS[1])
    first, second = found(result("3", validation=[0.5], test=[0.5]), four).rows()
    assert first["paper's AUC"] == "-"
    assert second["paper's AUC"] == "**0.975 ± 0.006**"


# Sweeping without training


Trained = list[str]


@pytest.fixture
def trained(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The names of the points in the order of training, which only copies a run.

    Scores are better the closer lr is to 1e-4, and points with 13 tokens fail.
    """
    names: Trained = []

    def complete(recipe: Recipe, out: Path, **_: object) -> Run:
        if not (out / "scores.json").exists():
            names.append(out.name)
            if recipe.model.settings["tokens"] == 13:
                raise RecipeError("13 tokens are too many.")
            shutil.copytree(tiny_run.folder, out)
            for path in out.glob("folds/*/validation.csv"):
                lower_scores(path, 1 / (1 + abs(log10(recipe.train.lr) + 4)))
        return Run(out)

    monkeypatch.setattr(training, "complete", complete)
    return names


def lower_scores(path: Path, skill: float) -> None:
    table = Predictions.read(path)
    path.unlink()
    truth = np.eye(2)[np.asarray(table.labels)]
    replace(table, answers=skill * truth + (1 - skill) / 2).write(path)


@pytest.fixture
def search(tiny_recipe: Recipe) -> Callable[..., Plan]:
    def search(kind: Any = "bayes", **axes: str) -> Plan:
        own = {"train.lr": "1e-6..1e-2", "model.tokens": "2,4,8"} | axes
        return Plan(recipe=tiny_recipe, axes=own, search=kind, metric="brier")

    return search


def test_a_bayesian_search_that_was_stopped_resumes_with_the_same_points(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    run_sweep(search(), tmp_path / "once", trials=6)
    once, trained[:] = list(trained), []
    run_sweep(search(), tmp_path / "twice", trials=3)
    assert trained == once[:3]
    run_sweep(search(), tmp_path / "twice", trials=6)
    assert trained == once
    assert rows(tmp_path / "twice") == rows(tmp_path / "once")


def test_a_bayesian_search_finds_the_best_region(search: Callable[..., Plan]) -> None:
    distances = []
    for seed in range(8):  # a single search may succeed by chance
        scores: dict[str, float] = {}
        for number, point in enumerate(propose_points(replace(search(), seed=seed), 25, scores)):
            scores[point.name] = abs(log10(float(point.changes["train.lr"])) + 4)
            distances += [scores[point.name]] if number >= 10 else []  # the first ten are random
    chance = 1.0  # the mean distance from the middle of a range of four decades
    assert np.mean(distances) < chance - 3 * np.sqrt(1 / 3 / len(distances))


def test_a_sweep_that_was_interrupted_trains_only_what_is_missing(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    def stop(number: int, *_: object) -> None:
        if number == 3:
            raise KeyboardInterrupt

    own = search("random")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(own, tmp_path / "out", trials=5, on_point=stop)
    assert len(rows(tmp_path / "out")) == 2 * 3
    run_sweep(own, tmp_path / "out", trials=5)
    assert trained == [point.name for point in points(own, 5)]


@pytest.mark.parametrize("kind", ["grid", "random", "bayes"])
def test_swapped_axes_are_the_same_sweep(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path, kind: str
) -> None:
    own, out = search(kind, **{"train.lr": "1e-4,1e-3,1e-2"}), tmp_path / "out"
    run_sweep(own, out, trials=None if kind == "grid" else 4)
    once, files = list(trained), {path: path.read_bytes() for path in out.glob("sweep.*")}
    assert {path.name for path in files} == {"sweep.toml", "sweep.csv", "sweep.md", "sweep.png"}
    swapped = replace(own, axes=dict(reversed(own.axes.items())))
    results = run_sweep(swapped, out, trials=None if kind == "grid" else 4)
    assert trained == once
    assert {path.name for path in (out / "points").iterdir()} == set(once)
    for path, content in files.items():
        assert path.read_bytes() == content or path.suffix in (".csv", ".md")  # seconds grow
    assert set(results.files.values()) == {f"sweep-tokens-lr.{end}" for end in ("csv", "md", "png")}
    assert all((out / name).exists() for name in results.files.values())
    changes = [each.point.changes for each in results.points]
    assert all(list(own) == ["model.tokens", "train.lr"] for own in changes)
    if kind == "grid":
        expected = list(product(("2", "4", "8"), ("1e-4", "1e-3", "1e-2")))
        assert [tuple(own.values()) for own in changes] == expected
        assert "| tokens | lr |" in (out / "sweep-tokens-lr.md").read_text()
        assert "| lr | tokens |" in (out / "sweep.md").read_text()
    assert len(rows(out)) == 3 * len(once)


def test_a_point_that_fails_is_reported_and_the_others_are_trained(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    own = search("grid", **{"train.lr": "1e-4", "model.tokens": "2,13,4"})
    calls: list[object] = []
    done = run_sweep(own, tmp_path / "out", on_point=lambda *args: calls.append(args))
    name = "lr=1e-4,tokens=13"
    assert done.failures == {name: "13 tokens are too many."}
    assert [each.point.changes["model.tokens"] for each in done.points] == ["2", "4"]
    assert f"- Failed: {name}: 13 tokens are too many." in (tmp_path / "out/sweep.md").read_text()
    assert len(calls) == 2 * 3
    run_sweep(own, tmp_path / "out")
    assert trained.count(name) == 2  # the cause may be fixed by now


def test_a_bayesian_search_continues_after_a_failure(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    own = search(**{"train.lr": "1e-4,1e-3", "model.tokens": "2,13"})
    done = run_sweep(own, tmp_path / "out", trials=8)
    assert {r.point.changes["model.tokens"] for r in done.points} == {"2"}
    assert len(done.failures) > 0
    assert len(trained) == len(set(trained)) == len(done.points) + len(done.failures)


class TwoAtOnce(LocalExecutor):
    """Takes two tasks before it yields the outcome of the first, as two workers would."""

    remote = True

    def run(self, tasks: Iterable[Task], *rest: Any) -> Iterator[Any]:
        remaining = iter(tasks)
        while pair := list(islice(remaining, 2)):
            for task in pair[::-1]:
                (outcome,) = super().run([pickle.loads(pickle.dumps(task))], *rest)
                yield outcome


def test_a_bayesian_search_with_parallel_workers_keeps_its_proposals(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    parallel = run_sweep(search(), tmp_path / "out", trials=4, executor=TwoAtOnce())
    names = [each.point.name for each in parallel.points]
    assert sorted(names) == sorted(trained)
    assert names != trained  # in the order of proposals
    resumed = run_sweep(search(), tmp_path / "out", trials=6)
    assert [each.point.name for each in resumed.points][:4] == names
    assert len(trained) == 6


def test_a_grid_with_parallel_workers_has_the_same_table(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    grid = search("grid", **{"train.lr": "1e-4,1e-3"})
    run_sweep(grid, tmp_path / "plain")
    run_sweep(grid, tmp_path / "parallel", executor=TwoAtOnce())
    assert rows(tmp_path / "parallel") == rows(tmp_path / "plain")


def test_another_plan_in_the_same_folder_is_refused(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    run_sweep(search("random"), tmp_path / "out", trials=1)
    for other, message in (
        (search("random", **{"model.tokens": "2,4"}), "axes.model.tokens: 2,4,8 -> 2,4"),
        (replace(search("random"), metric="auc"), "metric: brier -> auc"),
    ):
        with pytest.raises(RunError, match=rf"holds another sweep \({message}\)"):
            run_sweep(other, tmp_path / "out")
    assert len(trained) == 1


def test_a_folder_of_something_else_is_not_changed(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="exists and is not a sweep"):
        run_sweep(search(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_sweep_that_was_killed_at_its_first_file_starts_again(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 999_999_999)
        name = temporary_name("sweep.toml")
    (tmp_path / name).touch()
    run_sweep(search("random"), tmp_path, trials=1)
    assert not (tmp_path / name).exists()
    assert (tmp_path / "sweep.csv").exists()


def test_two_processes_do_not_sweep_in_one_folder(
    trained: Trained, search: Callable[..., Plan], tmp_path: Path
) -> None:
    run_sweep(search("random"), tmp_path / "out", trials=1)
    with FileLock(tmp_path / "out/.lock"), pytest.raises(RunError, match="Another process"):
        run_sweep(search("random"), tmp_path / "out", trials=2)


def test_what_is_wrong_with_all_points_is_reported_before_anything_is_written(
    trained: Trained, search: Callable[..., Plan], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    own = search("random")
    misspelt = {"model.tokns": "2,4"}
    unvalidated = replace(tiny_recipe, splits=replace(tiny_recipe.splits, validation=0))
    for wrong, kind, message in (
        (replace(own, axes=own.axes | misspelt), CaprmilError, "tokns"),
        (replace(own, recipe=replace(tiny_recipe, cohort="nowhere.csv")), CohortError, "no file"),
        (replace(own, recipe=unvalidated), RecipeError, "use the validation parts"),
    ):
        with pytest.raises(kind, match=message):
            run_sweep(wrong, tmp_path / "out", trials=3)
    assert (trained, list(tmp_path.iterdir())) == ([], [])


def test_a_part_of_a_large_grid_can_be_trained(
    trained: Trained, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    many = {"model.tokens": "2,4", "train.lr": ",".join(f"{k}e-6" for k in range(1, 400))}
    results = run_sweep(Plan(recipe=tiny_recipe, axes=many), tmp_path / "out", trials=2)
    assert len(results.points) == len(trained) == 2
    with pytest.raises(ValueError, match="trials=0"):
        run_sweep(results.plan, tmp_path / "out", trials=0)


# Sweeping


@pytest.fixture(scope="module")
def tokens(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A trained sweep of two points with two folds. It is shared: copy it before changing it."""
    quick = replace(
        tiny_recipe,
        train=replace(tiny_recipe.train, epochs=2),
        splits=replace(tiny_recipe.splits, folds=2),
        loggers={},
    )
    own = Plan(recipe=quick, axes={"model.tokens": "2,4"})
    folder = tmp_path_factory.mktemp("sweep") / "out"
    with quick_scoring():
        run_sweep(own, folder, device="cpu", progress=False)
    return own, folder


def test_the_csv_holds_every_fold_as_it_was_scored(tokens: tuple[Plan, Path]) -> None:
    _, folder = tokens
    found = rows(folder)
    assert [(row["tokens"], row["fold"]) for row in found] == list(
        product(("2", "4"), ("fold-0", "fold-1"))
    )
    for row in found:
        for part in ("validation", "test"):
            path = folder / "points" / row["point"] / "folds" / row["fold"] / f"{part}.csv"
            table = Predictions.read(path)
            area = roc_auc_score(np.asarray(table.labels), table.answers[:, 1])
            assert float(row[f"{part}_auc"]) == pytest.approx(area)


def test_every_point_is_a_run_with_its_own_recipe(tokens: tuple[Plan, Path]) -> None:
    own, folder = tokens
    for point in points(own):
        run = Run(folder / "points" / point.name)
        assert run.finished
        assert run.facts.digest == config.digest(own.recipe_at(point))
        assert run.model("fold-0").settings["tokens"] == int(point.changes["model.tokens"])
    assert (folder / "sweep.png").exists()
    assert config.load(folder / "sweep.toml", into=Plan) == own


def test_a_point_that_was_killed_is_resumed_and_ends_with_the_same_scores(
    tokens: tuple[Plan, Path], tmp_path: Path
) -> None:
    own, folder = tokens
    again = tmp_path / "out"
    shutil.copytree(folder, again)
    second = again / "points" / "tokens=4"
    (second / "scores.json").unlink()
    shutil.rmtree(second / "folds" / "fold-1")
    for name in ("sweep.csv", "sweep.md", "sweep.png"):
        (again / name).unlink()
    kept = [*(again / "points/tokens=2").rglob("*.*"), *(second / "folds/fold-0").rglob("*.*")]
    before = {path: path.stat().st_mtime_ns for path in kept}
    with quick_scoring():
        run_sweep(own, again, device="cpu", progress=False)
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert rows(again) == rows(folder)
