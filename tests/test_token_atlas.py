"""`caprmil atlas`: the usage and effect of tokens over a cohort, against naive computations."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from caprmil.cli import app
from caprmil.errors import RunError, UnknownNameError
from caprmil.explain import explain, locate_slide
from caprmil.explain import slide_tokens as slide_tokens_module
from caprmil.explain.atlas_pictures import read_pictures
from caprmil.explain.patient_means import PatientMeans
from caprmil.explain.slide_tokens import TopRows, slide_tokens
from caprmil.explain.token_atlas import TokenAtlas, choose_typical, make_atlas
from caprmil.explain.token_matching import (
    Moments,
    match_tokens,
    measure_stability,
    redundant_groups,
)
from caprmil.features import bags
from caprmil.report import atlas_files
from caprmil.runs.run import Run
from small_models import small_model

pytestmark = pytest.mark.slow

FILES = {"index.html", "atlas.csv", "atlas.png", "atlas.json"}


def caprmil(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def atlas(tiny_run: Run) -> TokenAtlas:
    return make_atlas(tiny_run)


def assignments(run: Run, slide: str, fold: str) -> np.ndarray:
    """Return the assignments of a slide (T, H, N, M) from its explanation."""
    bag = bags.read(locate_slide(run, slide).bag)
    found = explain(run.model(fold), bag, target=run.fold_target(fold))
    assert found.assignments is not None
    return found.assignments


# Matching


def test_permuted_tokens_are_found_again_with_a_correlation_of_one() -> None:
    rng = np.random.default_rng(0)
    slides = [rng.dirichlet(np.ones(4), size=(200, 3)).reshape(200, 12) for _ in range(3)]
    order = rng.permutation(12)
    found = measure_stability({"a": [x], "b": [x[:, order]]} for x in slides)
    (pair,) = found.pairs
    assert pair.match.tokens.tolist() == np.argsort(order).tolist()
    assert found.mean(0) == pytest.approx(1)
    assert 0 < found.chance(0) < 0.3  # the best matching of chance correlations is above 0
    a_to_b, b_to_a = found.matched("a", "b", 0), found.matched("b", "a", 0)
    assert a_to_b is not None
    assert b_to_a is not None
    assert b_to_a.tokens[a_to_b.tokens].tolist() == list(range(12))
    assert found.correlations("b", 0) == pytest.approx(np.ones(12))


def test_correlations_are_those_of_numpy_and_zero_for_a_constant() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.random((90, 3)), rng.random((90, 4))
    other[:, 0] += one[:, 1]
    one[:, 2] = 0.25
    sums = Moments()
    for rows in np.split(np.arange(90), 5):
        sums.add(one[rows], other[rows])
    expected = np.corrcoef(one[:, :2].T, other.T)[:2, 2:]
    assert sums.correlation()[:2] == pytest.approx(expected)
    assert sums.correlation()[2] == pytest.approx(np.zeros(4))


def test_matching_has_the_highest_sum_of_all_permutations() -> None:
    from itertools import permutations

    values = np.random.default_rng(1).random((5, 5))
    best = max(sum(values[n, m] for n, m in enumerate(p)) for p in permutations(range(5)))
    assert match_tokens(values).correlations.sum() == pytest.approx(best)


def test_correlated_tokens_of_different_heads_are_a_group() -> None:
    same = np.eye(6)
    for a, b in [(0, 2), (2, 5), (0, 1)]:  # 0 and 1 are of the same head
        same[a, b] = same[b, a] = 0.95
    heads = [0, 0, 1, 1, 2, 2]
    assert redundant_groups(same, heads) == ((0, 2, 5),)
    assert redundant_groups(same, heads, above=0.96) == ()


# One slide


def test_the_top_rows_of_chunks_are_those_of_the_whole_bag_and_ties_keep_their_order() -> None:
    values = torch.randint(4, (50, 2, 3)).double()
    top = TopRows(2)
    for chunk in torch.split(values, 7):
        top.add(chunk)
    for head, token in np.ndindex(2, 3):
        column = values[:, head, token].numpy()
        expected = np.argsort(-column, kind="stable")[:2]
        assert top.rows[head, token].tolist() == expected.tolist()
        assert top.values[head, token].tolist() == column[expected].tolist()


def test_a_slide_is_measured_as_by_a_naive_count(tiny_run: Run) -> None:
    slide = next(iter(tiny_run.paths))
    fold = tiny_run.unseen_folds(slide)[0].name
    bag, model = bags.read(locate_slide(tiny_run, slide).bag), tiny_run.model(fold).eval()
    target = tiny_run.fold_target(fold)
    found = slide_tokens(model, bag, target=target)
    weights = assignments(tiny_run, slide, fold)
    blocks, heads, n, tokens = weights.shape
    for t, h, m in np.ndindex(blocks, heads, tokens):
        total = sum(float(weights[t, h, row, m]) for row in range(n))
        assert found.usage[t, h, m] == pytest.approx(total / n, rel=1e-5)
        assert found.rows[t, h, m, 0] == int(weights[t, h, :, m].argmax())
    assert found.coords is not None
    assert bag.coords is not None
    assert found.coords[0, 0, 0, 0].tolist() == bag.coords[found.rows[0, 0, 0, 0]].tolist()
    features = torch.from_numpy(bag.features)[None]
    with torch.no_grad():
        logits = model(features).logits[0].double()
    contrast = target.contrasts[found.predicted]
    removal = model.token_removal(lambda: [features], keep=True)
    without = removal.without_token(0, 1, 2).logits[0].double()
    fall = float(contrast.of(logits) - contrast.of(without))
    assert found.effect[0, 1, 2] == pytest.approx(fall, abs=1e-5)


def test_a_bag_that_is_read_in_chunks_gives_the_same(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide, path = next(iter(tiny_run.paths.items()))
    fold = tiny_run.unseen_folds(slide)[0].name
    model, target = tiny_run.model(fold), tiny_run.fold_target(fold)
    whole = slide_tokens(model, bags.read(path), target=target)
    monkeypatch.setattr(slide_tokens_module, "may_keep", lambda _: False)
    with bags.streaming(path, rows=7) as stream:
        found = slide_tokens(model, stream, target=target)
    assert found.effect == pytest.approx(whole.effect, abs=1e-5)
    assert found.usage == pytest.approx(whole.usage, abs=1e-6)
    assert found.rows.tolist() == whole.rows.tolist()


# The cohort


def test_typical_patches_are_of_different_patients_while_there_are_enough() -> None:
    weights = np.array([[0.9, 0.8], [0.7, 0.6], [0.95, 0.5], [0.2, -1]])
    patients = ["a", "a", "b", "c"]
    assert choose_typical(weights, patients, 3) == [(2, 0), (0, 0), (3, 0)]
    assert choose_typical(weights, patients, 5) == [(2, 0), (0, 0), (0, 1), (1, 0), (3, 0)]
    assert (3, 1) not in choose_typical(weights, patients, 99)


def test_intervals_are_those_of_a_bootstrap_loop_over_patients() -> None:
    rng = np.random.default_rng(0)
    patients = [f"p{n // 2}" for n in range(20)]
    values, groups = rng.normal(size=(20, 2)), np.arange(20) % 2
    groups[4:] = 0
    found = PatientMeans(patients, groups, 3).of(values)
    from caprmil.evaluation.paired_tests import draw_patients

    names = sorted(set(patients))
    drawn = []
    for times in draw_patients(len(names), 2000, 0):
        rows = [
            row
            for name, k in zip(names, times, strict=True)
            for row in range(20)
            if patients[row] == name
            for _ in range(k)
        ]
        drawn.append(values[rows].mean(axis=0))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    for column in range(2):
        assert found[column].overall.mean == pytest.approx(values[:, column].mean())
        assert found[column].overall.interval == pytest.approx((low[column], high[column]))
        assert found[column].groups[1].mean == pytest.approx(values[[1, 3], column].mean())
        assert np.isnan(found[column].groups[2].mean)  # no slide


def test_usage_is_the_mean_over_slides_of_matched_tokens(tiny_run: Run, atlas: TokenAtlas) -> None:
    """Each slide by the model that has not seen it, its tokens in the order of the reference."""
    assert sorted(atlas.slides) == sorted(tiny_run.paths)
    blocks, heads, per_head = atlas.shape
    usage = []
    for slide in atlas.slides:
        (fold,) = tiny_run.unseen_folds(slide)
        own = assignments(tiny_run, slide, fold.name).mean(axis=2)[-1].reshape(-1)
        match = atlas.stability.matched(atlas.reference, fold.name, blocks - 1)
        usage.append(own if match is None else own[match.tokens])
    labels = np.array([tiny_run.labels[slide] for slide in atlas.slides])
    for index, token in enumerate(atlas.last):
        column = np.array([each[index] for each in usage])
        assert token.usage.overall.mean == pytest.approx(column.mean(), rel=1e-4)
        for name, group in zip(atlas.groups, token.usage.groups, strict=True):
            assert group.mean == pytest.approx(column[labels == name].mean(), rel=1e-4)
            assert group.interval.low < group.mean < group.interval.high
    assert sum(token.usage.overall.mean for token in atlas.last) == pytest.approx(heads)
    assert len(atlas.tokens) == blocks * heads * per_head


def test_typical_patches_of_the_atlas_have_the_highest_weights(
    tiny_run: Run, atlas: TokenAtlas
) -> None:
    token = atlas.last[0]
    assert len({patch.patient for patch in token.patches}) == len(token.patches) == 8
    highest = []
    for slide in atlas.slides:
        (fold,) = tiny_run.unseen_folds(slide)
        weights = assignments(tiny_run, slide, fold.name)[-1]
        match = atlas.stability.matched(atlas.reference, fold.name, atlas.shape[0] - 1)
        head, number = divmod(0 if match is None else int(match.tokens[0]), atlas.shape[2])
        highest.append(float(weights[head, :, number].max()))
    expected = sorted(highest, reverse=True)[:8]
    assert [patch.weight for patch in token.patches] == pytest.approx(expected, rel=1e-5)


def test_the_atlas_of_one_fold_uses_its_own_unseen_slides(tiny_run: Run) -> None:
    fold = tiny_run.splits[1]
    found = make_atlas(tiny_run, fold=fold.name, most=3)
    assert set(found.slides) <= set(fold.test)
    assert len(found.slides) == 3
    assert found.folds == {fold.name: 3}
    assert len(found.stability.folds) == 3  # still compared with the others
    with pytest.raises(UnknownNameError, match="no fold"):
        make_atlas(tiny_run, fold="fold 99")


def test_pictures_are_read_where_the_slide_is_found(
    tiny_run: Run, atlas: TokenAtlas, pixels: Path
) -> None:
    from caprmil.explain import open_slide, patch_boxes, read_patch

    found = read_pictures(tiny_run, atlas, pixels=pixels)
    assert {slide for slide, _ in found.patches} <= {"slide_000", "slide_001"}
    assert "not found" in found.missing["slide_002"] or "slide_002" not in found.missing
    (slide, row), picture = next(iter(found.patches.items()))
    reference = locate_slide(tiny_run, slide, pixels=pixels)
    assert reference.pixels is not None
    bag = bags.read(reference.bag)
    with open_slide(reference.pixels, bag.info) as opened:
        boxes = patch_boxes(bag.info, bag.coords, opened.mpp)
        assert boxes is not None
        assert np.array_equal(picture, read_patch(opened, boxes, row, len(picture)))


# The command


def test_the_command_writes_a_page_a_figure_and_tables(
    tiny_run: Run, pixels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atlas_files, "DPI", 50)
    output = caprmil(
        "atlas", tiny_run.folder, "--out", tmp_path / "atlas", "--slides", pixels, "--top", 4
    )
    made = tmp_path / "atlas"
    assert {path.name for path in made.iterdir()} == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"atlas"}
    assert "the largest effects" in output
    assert "Without pictures of" in output
    with (made / "atlas.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["block"], row["head"], row["token"]) for row in rows][:2] == [
        ("1", "1", "1"),
        ("1", "1", "2"),
    ]
    record = json.loads((made / "atlas.json").read_text())
    assert len(rows) == len(record["atlas"]) == 2 * 4
    for row, token in zip(rows, record["atlas"], strict=True):
        assert float(row["usage_tumour"]) == pytest.approx(
            token["usage"]["groups"]["tumour"]["mean"], rel=1e-4
        )
        assert float(row["effect"]) == pytest.approx(token["effect"]["mean"], rel=1e-4)
        assert len(row["typical_patches"].split()) == 4
    page = (made / "index.html").read_text()
    assert page.count('class="atlas-token"') == 8
    assert "data:image/jpeg;base64," in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_a_run_without_tokens_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    for fold in run.done:
        folder = run.fold_folder(fold.name) / "model"
        shutil.rmtree(folder)
        small_model("abmil", run.facts.in_dim, 2).save_pretrained(folder)
    with pytest.raises(RunError, match=r"ABMIL has no tokens. Only CAPRMIL"):
        caprmil("atlas", run.folder)
    assert not (run.folder / "atlas").exists()


def test_a_missing_bag_is_left_out_and_named(tiny_run: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_run.folder, tmp_path / "run")
    splits = json.loads((folder / "splits.json").read_text())
    splits["paths"]["slide_000"] = str(tmp_path / "gone.h5")
    (folder / "splits.json").write_text(json.dumps(splits))
    found = make_atlas(Run(folder))
    assert set(found.left_out) == {"slide_000"}
    assert len(found.slides) == 23
