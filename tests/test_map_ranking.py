"""The first map of a run is the one that is most faithful on its validation slides."""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from caprmil import explain
from caprmil.errors import CaprmilError
from caprmil.explain.attribution import (
    draw_samples,
    integrated_gradients,
    log_scale,
    sampled_influence,
)
from caprmil.explain.map_kinds import COMPUTED, KINDS, of_contrasts
from caprmil.explain.map_ranking import (
    PATCHES,
    MapRanking,
    map_ranking,
    sample_patches,
    validation_slides,
)
from caprmil.features import bags
from caprmil.io.json_files import as_json
from caprmil.models import create
from caprmil.runs.run import Run
from caprmil.targets import Classification
from caprmil.viewer import Library


@pytest.fixture(autouse=True)
def few_slides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure three slides: the module has the name of a function in its package."""
    monkeypatch.setattr(importlib.import_module("caprmil.explain.map_ranking"), "SLIDES", 3)


@pytest.fixture(scope="module")
def run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy of the tiny run without a ranking."""
    folder = tmp_path_factory.mktemp("ranked") / "run"
    shutil.copytree(tiny_run.folder, folder, ignore=shutil.ignore_patterns("maps.json"))
    return Run(folder)


def test_the_ranking_is_measured_once_and_stored(run: Run) -> None:
    first = map_ranking(run)
    stored = (run.folder / "maps.json").read_text()
    assert first is not None
    assert {"sampled influence", "influence", "integrated gradients", "evidence"} <= set(
        first.areas
    )
    means = [mean for mean, _, _ in first.areas.values()]
    assert means == sorted(means, reverse=True)
    assert first.first == next(iter(first.areas))
    assert map_ranking(run) == first
    assert (run.folder / "maps.json").read_text() == stored


def test_slides_are_those_that_a_fold_was_not_trained_on(run: Run) -> None:
    folds = {fold.name: fold for fold in run.splits}
    pairs = validation_slides(run)
    assert len({fold for fold, _ in pairs[:3]}) == 3
    assert all(slide in folds[fold].validation for fold, slide in pairs)


def test_a_damaged_ranking_is_an_error(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    (tmp_path / "run" / "maps.json").write_text('{"first": "the best"}')
    with pytest.raises(CaprmilError, match=r"maps\.json is damaged .* Remove it"):
        map_ranking(Run(tmp_path / "run"))


def test_the_first_map_is_shown_with_its_faithfulness(run: Run) -> None:
    slide = next(iter(run.paths))
    case = explain.explain_slide(run, explain.locate_slide(run, slide), device="cpu")
    ranking, effect = case.ranking, case.effect
    assert ranking is not None
    assert effect is not None
    assert case.explanation.first == ranking.first == effect.map
    text = case.faithfulness_text()
    assert "10\u00a0% of patches that it marks most" in text
    assert f"Faithfulness on {ranking.slides} validation slides" in text
    assert next(case.explanation.layers()).key.startswith(KINDS[ranking.first].key)


def test_the_effect_of_a_removal_is_that_of_a_bag_without_these_patches(run: Run) -> None:
    slide = next(iter(run.paths))
    case = explain.explain_slide(
        run, explain.locate_slide(run, slide), first="influence", device="cpu"
    )
    explanation, effect = case.explanation, case.effect
    assert effect is not None
    of = explanation.predicted
    values, bag = explanation.values("influence", of), bags.read(run.paths[slide])
    kept = np.sort(np.argsort(-values, kind="stable")[round(0.1 * len(values)) :])
    model = run.model(explanation.fold)
    with torch.no_grad():
        logits = model(torch.from_numpy(bag.features[kept])[None]).logits[0]
    assert effect.after == pytest.approx(float(logits.softmax(dim=0)[of]), rel=1e-4)
    assert effect.before == pytest.approx(float(explanation.answer[of]))


def test_a_ranking_that_does_not_beat_chance_says_so() -> None:
    ranking = MapRanking(
        first="influence", beats_chance=False, slides=3, areas={"influence": (0.1, -0.1, 0.3)}
    )
    assert "not shown to be better than a random map" in ranking.in_words("influence")
    assert "3 validation slides, which are few: 0.10 (-0.10 to 0.30)" in ranking.in_words(
        "influence"
    )
    assert "was not measured" in ranking.in_words("attention")
    assert MapRanking.from_dict(json.loads(json.dumps(ranking.as_dict()))) == ranking


def test_large_slides_are_sampled_in_their_order() -> None:
    features = np.arange(3 * PATCHES, dtype=np.float32)[:, None]
    sampled = sample_patches(bags.from_arrays(features), "s").features[:, 0]
    assert len(sampled) == PATCHES
    assert (np.diff(sampled) > 0).all()


@pytest.mark.parametrize("n", [1, 2, 30, 500, 40_000])
def test_samples_are_small_and_disjoint_as_far_as_possible(n: int) -> None:
    samples = draw_samples(n)
    assert samples.shape[1] <= max(n // 2, 1)
    assert all(len(row.unique()) == len(row) for row in samples)
    if samples.numel() <= n:
        assert len(samples.unique()) == samples.numel()
    torch.testing.assert_close(samples, draw_samples(n))


def test_sampled_influence_is_the_mean_over_samples_without_the_patch() -> None:
    torch.manual_seed(0)
    model = create("clam", 8, 2, dim=8, hidden=4).eval()
    bag, expected, times = torch.randn(1, 40, 8), torch.zeros(40, 2), torch.zeros(40, 1)
    for rows in draw_samples(40):
        inside = torch.zeros(40, dtype=torch.bool)
        inside[rows] = True
        counts = torch.where(inside, 1.0, 1e-6).requires_grad_()
        logits = model.forward_weighted(bag, counts).logits[0]
        for output in range(2):
            (own,) = torch.autograd.grad(logits[output], counts, retain_graph=True)
            expected[:, output] += torch.where(inside, 0.0, own)
        times += ~inside[:, None]
    mean = expected / times
    expected = mean.sign() * torch.log1p(mean.abs() / mean.abs().median(dim=0).values)
    torch.testing.assert_close(sampled_influence(model, bag), expected, rtol=1e-4, atol=1e-4)


def test_the_scale_of_sampled_influence_keeps_order_and_sign() -> None:
    values = torch.tensor([[-300.0], [0.0], [0.1], [-0.2], [500.0]])
    scaled = log_scale(values)
    assert torch.equal(scaled.argsort(dim=0), values.argsort(dim=0))
    assert torch.equal(scaled.sign(), values.sign())
    assert scaled.abs().max() < 10
    assert torch.equal(log_scale(torch.zeros(3, 1)), torch.zeros(3, 1))


def test_integrated_gradients_are_complete_within_one_per_cent() -> None:
    torch.manual_seed(0)
    model = create("caprmil", 16, 2, dim=16, heads=2).eval()
    bag = 3 * torch.randn(1, 50, 16)
    found = integrated_gradients(model, bag, directions=torch.tensor([[-1.0, 1.0]]))
    with torch.no_grad():
        start = model(bag.mean(dim=1, keepdim=True).expand_as(bag)).logits[0]
        change = float((model(bag).logits[0] - start).diff())
    assert float(found.terms.sum()) == pytest.approx(change, rel=0.01)
    assert float(found.rest) == pytest.approx(float(start.diff()), rel=1e-4)


@pytest.mark.parametrize("name", COMPUTED)
def test_random_weights_change_the_map(name: str) -> None:
    """A map that does not depend on the weights cannot explain them (Adebayo et al. 2018)."""
    torch.manual_seed(0)
    bag = torch.randn(1, 200, 16)
    maps = [
        COMPUTED[name](
            create("caprmil", 16, 2, dim=16, heads=2).eval(), bag, None, torch.tensor([[-1.0, 1.0]])
        )[:, 0]
        for _ in range(2)
    ]
    assert abs(float(torch.corrcoef(torch.stack(maps))[0, 1])) < 0.5


def test_only_one_of_two_opposite_contrasts_is_computed() -> None:
    requested = []

    def compute(directions: torch.Tensor) -> torch.Tensor:
        requested.append(directions.tolist())
        return torch.ones(5, len(directions))

    two, three = (Classification(classes=tuple("abc"[:n])) for n in (2, 3))
    assert of_contrasts(two, 2, compute).tolist() == [[-1.0, 1.0]] * 5
    assert of_contrasts(three, 3, compute).shape == (5, 3)
    assert requested == [[[-1.0, 1.0]], [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]]


def test_a_run_that_was_copied_without_its_bags_has_no_ranking(run: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("maps.json"))
    features = str(Path(next(iter(run.paths.values()))).parent)
    for file in copy.glob("*.json"):
        file.write_text(file.read_text().replace(features, str(tmp_path / "gone")))
    moved = Run(copy)
    assert all("gone" in str(path) for path in moved.paths.values())
    assert map_ranking(moved) is None
    bag = next(iter(run.paths.values()))
    case = explain.explain_slide(moved, explain.locate_slide(moved, bag), device="cpu")
    assert case.explanation.first == "sampled influence"
    assert "faithfulness on this run is unknown" in case.faithfulness_text()
    assert not (copy / "maps.json").exists()


def test_the_viewer_stores_no_ranking(run: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("maps.json"))
    library = Library(Run(copy), device="cpu")
    before = set(copy.rglob("*"))
    library.explained(next(iter(library.entries)))
    assert set(copy.rglob("*")) == before


def test_a_ranking_over_one_patient_is_stored_and_read() -> None:
    nan = float("nan")
    ranking = MapRanking(
        first="influence", beats_chance=False, slides=1, areas={"influence": (0.5, nan, nan)}
    )
    read = MapRanking.from_dict(json.loads(as_json(ranking.as_dict())))
    assert np.isnan(read.areas["influence"][1])
    assert read.areas["influence"][0] == 0.5
