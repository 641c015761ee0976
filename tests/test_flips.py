"""Flips: how many patches are removed before a prediction turns, per slide and over a cohort."""

import json
import shutil
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from caprmil import report
from caprmil.errors import CaprmilError
from caprmil.explain import flips
from caprmil.explain.chosen_patches import support_order
from caprmil.explain.explanation import explain
from caprmil.explain.flips import (
    Flips,
    SlideFlip,
    first_turn,
    flips_of,
    measure_flips,
    removals_to_turn,
    unseen_slides,
)
from caprmil.explain.map_ranking import MapRanking
from caprmil.features import bags
from caprmil.report.flip_section import flip_chart
from caprmil.runs.inference import TrainedModel
from caprmil.runs.run import Run
from caprmil.targets import Classification, Regression
from small_models import small_model

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "SLIDES", 5)


@pytest.fixture(scope="module")
def run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy of the tiny run without flips, and with a ranking that takes no time."""
    folder = tmp_path_factory.mktemp("flips") / "run"
    shutil.copytree(
        tiny_run.folder, folder, ignore=shutil.ignore_patterns("flips.json", "maps.json")
    )
    ranking = MapRanking(
        first="influence", beats_chance=True, slides=8, areas={"influence": (0.5, 0.4, 0.6)}
    )
    (folder / "maps.json").write_text(json.dumps(ranking.as_dict()))
    return Run(folder)


@pytest.mark.parametrize("n", [2, 3, 10, 77, 1000])
def test_the_first_turn_of_a_monotone_answer_is_exact(n: int) -> None:
    for turn in {1, 2, n // 3, n // 2, n - 1} - {0}:
        calls = []

        def turned(removed: int, turn: int = turn, calls: list[int] = calls) -> bool:
            calls.append(removed)
            return removed >= turn

        assert first_turn(turned, n) == (turn if turn < n else None)
        assert max(calls) < n
        assert len(calls) <= 25


def test_an_answer_that_turns_back_has_its_first_turn_on_the_grid() -> None:
    found = first_turn(lambda removed: 30 <= removed < 60 or removed > 90, 100)
    assert found == 30
    assert first_turn(lambda _: False, 100) is None
    assert first_turn(lambda _: True, 100) == 1
    assert first_turn(lambda _: True, 1) is None  # a single patch cannot be removed


def test_removals_are_those_of_a_loop_over_all_numbers() -> None:
    target = Classification(classes=("a", "b"))
    features = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    bag = bags.from_arrays(features)
    turns = 0
    for seed in range(6):
        model = small_model("mean", 6, 2, seed=seed)
        order = support_order(explain(model, bag, target=target, first="influence"))
        with torch.no_grad():
            classes = [
                int(model(torch.from_numpy(features[order[removed:]])[None]).logits.argmax())
                for removed in range(40)
            ]
        expected = next((n for n in range(40) if classes[n] != classes[0]), None)
        assert removals_to_turn(TrainedModel(model, target), bag, order) == expected
        turns += expected is not None
    assert turns > 2


def test_a_number_turns_if_it_moves_by_half_of_its_distance_from_the_mean_label() -> None:
    target = Regression(mean=10.0, std=2.0)

    def turned(before: float, after: float) -> bool:
        return target.turned(np.array([before]), np.array([after]))

    assert turned(20, 14.9)
    assert not turned(20, 15.1)
    assert turned(20, 25.1)
    assert not turned(10, 10.9)  # close to the mean, half of a standard deviation is needed
    assert turned(10, 11.1)
    assert [target.sign_of(np.array([value])) for value in (9.0, 11.0)] == [-1, 1]


def test_a_low_value_is_removed_by_its_patches_for_a_lower_value() -> None:
    bag = bags.from_arrays(np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32))
    model = small_model("mean", 6, 1)
    for mean in (-5.0, 5.0):
        target = Regression(mean=mean, std=1.0)
        found = explain(model, bag, target=target, first="influence")
        values = found.values("influence", 0)
        sign = 1 if found.answer[0] > mean else -1
        np.testing.assert_array_equal(support_order(found), np.argsort(-sign * values))


def test_slides_are_test_slides_and_occur_once(run: Run) -> None:
    folds = {fold.name: fold for fold in run.splits}
    pairs = unseen_slides(run)
    assert all(slide in folds[fold].test for fold, slide in pairs)
    assert sorted(slide for _, slide in pairs) == sorted(run.paths)
    assert len({fold for fold, _ in pairs[:3]}) == 3


def test_flips_are_measured_once_and_again_for_another_map(run: Run) -> None:
    found = flips_of(run)
    assert found is not None
    assert len(found.slides) == 5
    path = run.folder / "flips.json"
    stored = json.loads(path.read_text())
    assert Flips.from_dict(stored) == found
    assert stored["verdict"] == found.in_words()
    path.write_text(json.dumps({**stored, "slides": stored["slides"][:1]}))
    again = flips_of(run)
    assert again is not None
    assert len(again.slides) == 1
    path.write_text(json.dumps({**stored, "map": "attention"}))
    assert flips_of(run) == found
    path.write_text('{"map": "the best"}')
    with pytest.raises(CaprmilError, match=r"flips\.json is damaged .* Remove it"):
        flips_of(run)
    path.write_text(json.dumps(stored))


def test_each_slide_is_measured_by_a_model_that_has_not_seen_it(run: Run) -> None:
    found = measure_flips(run, first="influence", slides=2)
    assert found is not None
    assert found.map == "influence"
    for flip in found.slides:
        trained, bag = run.trained(flip.fold), bags.read(run.paths[flip.slide])
        assert flip.slide in {f.name: f for f in run.splits}[flip.fold].test
        explanation = explain(trained.model, bag, target=trained.target, first="influence")
        order = np.argsort(-explanation.values("influence", explanation.predicted), kind="stable")
        answers = []
        for removed in (0, flip.by_map or len(order) - 1):
            rest = torch.from_numpy(bag.features[np.sort(order[removed:])])[None]
            with torch.no_grad():
                answers.append(int(trained.model(rest).logits.argmax()))
        assert (answers[0] != answers[1]) == (flip.by_map is not None)


def flips_with(*numbers: tuple[int | None, int | None]) -> Flips:
    slides = [
        SlideFlip(slide=f"s{n}", fold="f", patches=100, by_map=a, by_chance=b)
        for n, (a, b) in enumerate(numbers)
    ]
    return Flips(map="influence", rule="another class is predicted", slides=tuple(slides))


def test_the_sentence_is_about_half_of_the_slides() -> None:
    assert flips_with((1, 50), (3, 61), (3, 70), (9, None)).in_words() == (
        "On half of the slides, removing 3 % of the patches turns the prediction; at random 61 %."
    )
    assert (
        "at random, half of them or more never turn" in flips_with((1, None), (3, None)).in_words()
    )
    never = flips_with((1, 4), (None, None), (None, None)).in_words()
    assert never.startswith("On 2 of 3 slides, the prediction never turns")
    assert never.endswith("at random on 2.")
    assert flips_with((1, 50), (None, None)).shares() == ([0.01, inf], [0.5, inf])


def test_the_chart_has_a_dot_for_each_slide_and_order() -> None:
    chart = flip_chart(flips_with((1, 50), (3, None), (40, 61)), "slide")
    assert chart.count('class="test-slide"') == 6
    assert "never" in chart
    assert "here-mark" not in chart
    assert flip_chart(flips_with((None, None)), "slide").count('class="test-slide"') == 2


def test_the_report_of_a_run_shows_the_flips(run: Run, tmp_path: Path) -> None:
    path, _, _ = report.write_run_report(run, out=tmp_path / "run.html", device="cpu")
    found = flips_of(run)
    assert found is not None
    text = path.read_text().replace("\u00a0", " ")
    assert "How much a prediction rests on" in text
    assert found.in_words() in text
    assert "before another class is predicted" in text
    assert "How much a prediction rests on" not in report.run_report(run)


def test_a_run_whose_bags_are_gone_has_no_flips(run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(run.folder, tmp_path / "run")
    (folder / "flips.json").unlink()
    splits = json.loads((folder / "splits.json").read_text())
    splits["paths"] = {name: str(tmp_path / f"{name}.h5") for name in splits["paths"]}
    (folder / "splits.json").write_text(json.dumps(splits))
    assert flips_of(Run(folder)) is None
    (folder / "maps.json").unlink(missing_ok=True)
    assert flips_of(Run(folder)) is None
