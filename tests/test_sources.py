"""Several sources of features per slide: concatenated, or as one bag."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor

from caprmil.cohort.cohort import load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import BagError, CohortError, ExportError, RecipeError, RunError
from caprmil.experiments.status import read_status
from caprmil.explain import explain_slide, locate_slide
from caprmil.explain.browser import pack
from caprmil.explain.slide_shares import slide_explanations, slide_shares
from caprmil.features import bag_files, bags
from caprmil.features.bag_files import SlideBags
from caprmil.features.source_bags import Join, SourceBags, mean_patch
from caprmil.io.paths import RemotePath, upload
from caprmil.models import MODELS, POOLS, FusedModel, MILModel
from caprmil.models.source_model import SourceModel
from caprmil.runs.conformal_sets import mean_feature
from caprmil.runs.facts import SourceFacts
from caprmil.runs.run import Run
from caprmil.runs.source_inputs import find_slide_bags, order_folders
from caprmil.synthetic import TwoSources
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe, SourcesConfig
from caprmil.training.recipe_files import read_recipe
from caprmil.training.train_config import TrainConfig
from small_models import small_model

WIDTHS = (6, 9)
SIDE = 224


def square(n: int, step: int = SIDE) -> NDArray[np.int64]:
    return step * np.stack([np.arange(n) % 5, np.arange(n) // 5], axis=1)


def write(path: Path, features: NDArray[Any], coords: NDArray[Any] | None, **info: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    side = {} if coords is None else {"step": float(SIDE), "patch_level0": float(SIDE)}
    return bags.write(path, features, coords, dtype="float32", **side | info)


def two_files(
    folder: Path, *, join: Join, coords: NDArray[Any] | None, seed: int = 0, **info: Any
) -> SourceBags:
    """A slide of 23 patches in a source, and patches at `coords` in another one."""
    rng = np.random.default_rng(seed)
    n = 23 if coords is None else len(coords)
    first = write(folder / "a" / "s.h5", rng.normal(size=(23, 6)).astype("f4"), square(23))
    second = write(folder / "b" / "s.h5", rng.normal(size=(n, 9)).astype("f4"), coords, **info)
    return SourceBags(("a", "b"), (first, second), join)


def chunks_of(files: bag_files.BagFiles) -> NDArray[Any]:
    with bag_files.streaming(files, rows=7) as stream:
        return np.concatenate(list(stream()))


# Concatenation


def test_concatenated_features_are_those_of_the_patches_at_the_same_place(tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(23)
    files = two_files(tmp_path, join="concatenation", coords=square(23)[order])
    bag, one, other = bag_files.read(files), *map(bags.read, files.paths)
    assert one.coords is not None
    assert other.coords is not None
    by_place = dict(zip(map(tuple, other.coords.tolist()), other.features, strict=True))
    naive = [
        [*own.tolist(), *by_place[tuple(place)].tolist()]
        for own, place in zip(one.features, one.coords.tolist(), strict=True)
    ]
    assert bag.features.tolist() == naive
    assert chunks_of(files).tolist() == naive
    assert bag.info.width == bag_files.inspect(files).width == 15
    np.testing.assert_array_equal(bag.grid(), one.grid())


@pytest.mark.parametrize(
    ("coords", "reason"),
    [
        (square(23) + 1, "patches at different places"),
        (square(20), "a has 23 patches, b 20"),
        (None, "b has no coordinates"),
        (np.concatenate([square(22)[::-1], square(1)]), "patches at different places"),
    ],
)
def test_sources_whose_patches_differ_are_not_concatenated(
    tmp_path: Path, coords: NDArray[Any] | None, reason: str
) -> None:
    files = two_files(tmp_path, join="concatenation", coords=coords)
    with pytest.raises(BagError, match=reason):
        bag_files.read(files)


def test_patches_that_share_a_place_are_matched_only_in_the_same_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    places = np.repeat(square(5), 2, axis=0)
    paths = [
        write(tmp_path / name / "s.h5", rng.normal(size=(10, 4)), places[order])
        for name, order in (("a", slice(None)), ("b", slice(None)), ("c", slice(None, None, -1)))
    ]
    same = SourceBags(("a", "b"), (paths[0], paths[1]), "concatenation")
    assert bag_files.read(same).features.shape == (10, 8)
    with pytest.raises(BagError, match="different places"):
        bag_files.read(replace(same, paths=(paths[0], paths[2])))


# One bag


def test_one_bag_has_the_patches_of_all_sources_with_their_own_widths(tmp_path: Path) -> None:
    files = two_files(tmp_path, join="bag", coords=2 * square(6), step=2.0 * SIDE)
    bag, one, other = bag_files.read(files), *map(bags.read, files.paths)
    naive = [[*row, 0, 0, 0, 1, 0] for row in one.features.tolist()]
    naive += [[*row, 0, 1] for row in other.features.tolist()]
    assert bag.features.tolist() == naive
    assert chunks_of(files).tolist() == naive
    assert bag.info.widths == bag_files.inspect(files).widths == WIDTHS
    assert bag.slide_of is not None
    assert bag.slide_of.tolist() == [0] * 23 + [1] * 6
    grid = bag.grid()
    assert grid is not None
    assert len(np.unique(grid, axis=0)) == 29  # sources never share a cell
    means = np.concatenate([one.features.mean(axis=0), other.features.mean(axis=0)])
    np.testing.assert_allclose(mean_patch(bag), means, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean_feature(files), means, rtol=1e-5, atol=1e-6)


def test_the_bag_of_a_patient_has_all_sources_of_all_slides(tmp_path: Path) -> None:
    slides = {
        name: two_files(tmp_path / name, join="bag", coords=2 * square(6), seed=seed)
        for seed, name in enumerate(("s1", "s2"))
        if (tmp_path / name).mkdir() is None
    }
    patient = SlideBags.of(slides)
    bag = bag_files.read(patient)
    assert [part.name for part in bag.info.slides] == ["s1 a", "s1 b", "s2 a", "s2 b"]
    alone = [bag_files.read(files).features for files in slides.values()]
    np.testing.assert_array_equal(bag.features, np.concatenate(alone))
    np.testing.assert_array_equal(chunks_of(patient), bag.features)
    apart = {n: replace(files, join="concatenation") for n, files in slides.items()}
    with pytest.raises(BagError, match="different places"):
        bag_files.read(SlideBags.of(apart))


# The model


def source_model(name: str, **settings: Any) -> SourceModel:
    torch.manual_seed(0)
    image = small_model(name, in_dim=12, n_outputs=3, **settings)
    model = SourceModel(max(WIDTHS) + 2, 3, image=image, widths=WIDTHS, dim=12)
    model.eval()
    return model


def wide_bag(sources: Sequence[int]) -> Tensor:
    rows = torch.zeros(len(sources), max(WIDTHS) + 2)
    for row, source in zip(rows, sources, strict=True):
        row[: WIDTHS[source]] = torch.randn(WIDTHS[source])
        row[max(WIDTHS) + source] = 1
    return rows[None]


def naive_projection(model: SourceModel, bag: Tensor, sources: Sequence[int]) -> Tensor:
    weights = [layer.weight for layer in model.projections]
    rows = [
        weights[source] @ row[: WIDTHS[source]] + model.vectors[source]
        for row, source in zip(bag[0], sources, strict=True)
    ]
    return torch.stack(rows)[None]


@pytest.mark.parametrize(
    "name", [*MODELS, *(f"caprmil+{pool}" for pool in POOLS if pool != "mean"), "caprmil+dsmil"]
)
def test_every_model_gets_the_projected_patches(name: str) -> None:
    model, sources = source_model(name), [0] * 11 + [1] * 5
    bag, grid = wide_bag(sources), torch.arange(32).reshape(1, 16, 2)
    patches = naive_projection(model, bag, sources)
    torch.manual_seed(1)
    output = model(bag, grid=grid)
    torch.manual_seed(1)
    expected = model.image(patches, grid=grid)
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.attention, expected.attention)
    found, naive = model.evidence(bag, grid[0]), model.image.evidence(patches, grid[0])
    assert (found is None) == (naive is None)
    if found is not None and naive is not None:
        torch.testing.assert_close(found.terms, naive.terms)
    if model.streams:
        streamed = model.stream(lambda: torch.split(bag, 3, dim=1))
        torch.testing.assert_close(streamed.logits, model.image.stream(lambda: [patches]).logits)


def test_all_properties_of_a_model_are_those_of_the_model_behind_the_projections() -> None:
    names = {
        name
        for name, value in vars(MILModel).items()
        if isinstance(value, property | bool | int | tuple) and not name.startswith("_")
    } - {"export_problem", "input_layer", "probe_units", "evaluates_in_chunks", "needs_classes"}
    assert len(names) > 8
    for name in MODELS:
        model = source_model(name)
        for each in names:
            assert getattr(model, each) == getattr(model.image, each), (name, each)


def test_a_saved_model_is_loaded_with_its_sources(tmp_path: Path) -> None:
    model, bag = source_model("caprmil"), wide_bag([0, 1, 1])
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(MILModel.from_pretrained(tmp_path)(bag).logits, model(bag).logits)


@pytest.mark.parametrize("how", ["concatenation", "late", "film"])
def test_covariates_are_added_to_a_model_of_several_sources(how: str) -> None:
    column = {"name": "age", "kind": "number", "width": 1, "mean": 0.0, "std": 1.0}
    model = FusedModel(11, 3, image=source_model("caprmil"), columns=[column], how=how, dim=4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.eval()
    bag, covariates = wide_bag([0, 0, 1]), torch.tensor([[0.7]])
    expected = model(bag, covariates=covariates).logits
    alone = model.of_slide(covariates[0])
    torch.testing.assert_close(alone(bag).logits, expected)
    evidence = alone.evidence(bag)
    assert evidence is not None
    torch.testing.assert_close(evidence.logits, expected[0])


# Cohorts and runs


@pytest.fixture(scope="module")
def cohorts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cohorts: `two` with a grid for each source, `one` with the same patches in both."""
    folder = tmp_path_factory.mktemp("sources")
    small: dict[str, Any] = {"slides": 24, "patches": 16, "widths": WIDTHS, "shift": 5.0}
    TwoSources(**small).write(folder / "two")
    TwoSources(**small, one_grid=True).write(folder / "one")
    return folder


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    recipe = Recipe(
        cohort=str(folder / "labels.csv"),
        features=(str(folder / "fine"), str(folder / "coarse")),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2),
        train=TrainConfig(epochs=6, warmup_epochs=0, lr=1e-2, weights="last"),
        loggers={},
    )
    return replace(recipe, **changes)


def train(recipe: Recipe, out: Path) -> Run:
    return cross_validate(recipe, out, device="cpu", progress=False, score=False)


@pytest.fixture(scope="module")
def two(cohorts: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with two sources in one bag."""
    recipe = recipe_of(cohorts / "two", sources=SourcesConfig(dim=8))
    return train(recipe, tmp_path_factory.mktemp("runs") / "two")


@pytest.fixture(scope="module")
def one(cohorts: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with two concatenated sources."""
    short = TrainConfig(epochs=2, warmup_epochs=0)
    return train(recipe_of(cohorts / "one", train=short), tmp_path_factory.mktemp("runs") / "one")


def test_a_run_of_concatenated_sources_is_that_of_features_concatenated_by_hand(
    cohorts: Path, one: Run, tmp_path: Path
) -> None:
    for path in (cohorts / "one" / "fine").glob("*.h5"):
        bag, other = bags.read(path), bags.read(cohorts / "one" / "coarse" / path.name)
        assert bag.coords is not None
        assert other.coords is not None
        places = other.coords.tolist()
        rows = [places.index(place) for place in bag.coords.tolist()]
        together = np.concatenate([bag.features, other.features[rows]], axis=1)
        write(tmp_path / "hand" / path.name, together, bag.coords)
    short = TrainConfig(epochs=2, warmup_epochs=0)
    by_hand = recipe_of(cohorts / "one", features=str(tmp_path / "hand"), train=short)
    run = train(by_hand, tmp_path / "run")
    for fold in run.splits:
        own, expected = (each.fold_folder(fold.name) / "test.csv" for each in (one, run))
        assert own.read_bytes() == expected.read_bytes()
        weights = "model/model.safetensors"
        found = [(each.fold_folder(fold.name) / weights).read_bytes() for each in (one, run)]
        assert found[0] == found[1]


def test_a_source_with_the_signal_is_found_beside_one_of_noise(two: Run) -> None:
    assert two.facts.join == "bag"
    assert [source.in_dim for source in two.facts.sources] == list(WIDTHS)
    answers, labels = two.all_tested.answers[:, 1], two.all_tested.labels
    assert labels is not None
    ranks = answers[labels == 1][:, None] > answers[labels == 0][None]
    assert ranks.mean() > 0.9  # the area under the ROC curve


@pytest.mark.slow
def test_permuted_labels_of_slides_with_two_sources_are_predicted_by_chance(
    tmp_path: Path,
) -> None:
    table = TwoSources(slides=160, patches=8, widths=WIDTHS, shift=5.0).write(tmp_path)
    frame = pd.read_csv(table)
    owners = frame.drop_duplicates("patient").set_index("patient")["label"]
    mixed = dict(zip(owners.index, owners.sample(frac=1, random_state=0), strict=True))
    frame.assign(label=frame["patient"].map(mixed)).to_csv(table, index=False)
    short = TrainConfig(epochs=3, warmup_epochs=0, lr=1e-2, weights="last")
    run = train(recipe_of(tmp_path, sources=SourcesConfig(dim=8), train=short), tmp_path / "run")
    answers, labels = run.all_tested.answers[:, 1], run.all_tested.labels
    # Three standard errors of the AUC of 80 patients.
    assert abs(roc_auc_score(labels, answers) - 0.5) < 0.2


def test_a_run_of_sources_is_resumed_with_the_same_bags_only(
    two: Run, cohorts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(two.folder, out)
    shutil.rmtree(out / "folds" / "fold-1")
    recipe = recipe_of(cohorts / "two", sources=SourcesConfig(dim=8))
    found = train(recipe, out).fold_folder("fold-1") / "test.csv"
    assert found.read_bytes() == (two.fold_folder("fold-1") / "test.csv").read_bytes()
    shutil.rmtree(out / "folds" / "fold-1")
    with pytest.raises(RunError, match=r"another recipe.*sources\.join: auto -> bag"):
        train(replace(recipe, sources=SourcesConfig(dim=8, join="bag")), out)


def test_the_evidence_of_the_sources_sums_to_that_of_the_slide(two: Run) -> None:
    case = explain_slide(two, locate_slide(two, "slide_001"), regions=False, device="cpu")
    shares = slide_shares(case.explanation)
    assert [(share.name, share.patches) for share in shares] == [("fine", 16), ("coarse", 4)]
    total = case.explanation.evidence.astype(float).sum(axis=0)
    np.testing.assert_allclose(sum(share.terms for share in shares), total)
    for own, path in zip(
        slide_explanations(case.explanation),
        bag_files.paths_of(case.reference.bag),
        strict=True,
    ):
        bag = bags.read(path)  # each source in the coordinates of the slide, at its own size
        np.testing.assert_array_equal(own.coords, bag.coords)
        assert own.info.patch_level0 == bag.info.patch_level0 == bag.info.step
    facts = pack(case).facts
    assert (facts["part"], facts["unit"], facts["mpp"]) == ("source", "slide", None)
    assert abs(shares[0].terms[1]) > abs(shares[1].terms[1])


@pytest.mark.parametrize("way", ["by name", "by scale"])
def test_new_bags_are_assigned_to_their_sources(
    way: str, two: Run, cohorts: Path, tmp_path: Path
) -> None:
    slide = "slide_003.h5"
    names = (
        {"fine": "fine", "coarse": "coarse"} if way == "by name" else {"fine": "x", "coarse": "y"}
    )
    for source, folder in names.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / slide).write_bytes((cohorts / "two" / source / slide).read_bytes())
    found = find_slide_bags(two.facts, [tmp_path])
    assert [path.parent.name for path in bag_files.paths_of(found["slide_003"])] == [
        *names.values()
    ]
    answers = two.predict(found, device="cpu").answers
    known = two.predict({"slide_003": two.bags["slide_003"]}, device="cpu").answers
    np.testing.assert_array_equal(answers, known)


def test_moved_bags_of_all_sources_are_found(two: Run, cohorts: Path, tmp_path: Path) -> None:
    shutil.copytree(cohorts / "two", tmp_path / "moved")
    run = Run(two.folder)
    run.use_features(tmp_path / "moved" / "coarse", tmp_path / "moved" / "fine")
    for slide, files in run.bags.items():
        expected = [tmp_path / "moved" / name / f"{slide}.h5" for name in ("fine", "coarse")]
        assert [*bag_files.paths_of(files)] == expected


def test_patches_in_another_order_have_the_same_answer(
    one: Run, two: Run, cohorts: Path, tmp_path: Path
) -> None:
    for name, run in (("one", one), ("two", two)):
        bag = bags.read(cohorts / name / "coarse" / "slide_003.h5")
        assert bag.coords is not None
        info: dict[str, Any] = {"step": bag.info.step, "patch_level0": bag.info.patch_level0}
        other = write(
            tmp_path / name / "slide_003.h5", bag.features[::-1], bag.coords[::-1], **info
        )
        files = run.bags["slide_003"]
        assert isinstance(files, SourceBags)
        moved = replace(files, paths=(files.paths[0], other))
        answers = run.predict({"x": files, "y": moved}, device="cpu").answers
        if name == "one":  # the first source gives the order
            np.testing.assert_array_equal(answers[0], answers[1])
        np.testing.assert_allclose(answers[0], answers[1], atol=1e-6)


def test_an_external_cohort_is_scored_with_a_folder_for_each_source(
    two: Run, tmp_path: Path
) -> None:
    new = TwoSources(slides=6, patches=16, widths=WIDTHS, shift=5.0, seed=7)
    table = new.write(tmp_path / "new")
    names = table.read_text().replace("patient_", "other_").replace("slide_", "new_")
    table.write_text(names)
    for path in [*table.parent.glob("*/*.h5")]:
        path.rename(path.with_name(path.name.replace("slide_", "new_")))
    folders = [table.parent / "coarse", table.parent / "fine"]  # ordered by their names
    assert len(two.evaluate(table, folders, device="cpu")) == 6 * 2  # by two models
    with pytest.raises(RunError, match=r"sources fine, coarse\. Pass a folder for each"):
        two.evaluate(table, folders[0], device="cpu")


def test_patients_have_the_patches_of_all_sources(cohorts: Path) -> None:
    folders = [cohorts / "two" / name for name in ("fine", "coarse")]
    unit = CohortConfig(unit="patient")
    cohort, _ = load_cohort(cohorts / "two" / "labels.csv", folders, unit)
    assert len(cohort) == 12
    first = cohort.entries[0]
    info, bag = cohort.bags[first.name], bag_files.read(first.path)
    assert (info.n_patches, info.width) == bag.features.shape == (40, 11)
    assert {slide.patches for slide in cohort.slides} == {20}


def test_the_rule_of_a_recipe_decides_how_sources_are_joined(cohorts: Path) -> None:
    def joined(name: str, **rule: Any) -> tuple[str | None, int]:
        folders = [cohorts / name / each for each in ("fine", "coarse")]
        cohort, _ = load_cohort(cohorts / name / "labels.csv", folders, **rule)
        assert any("2 sources: fine, coarse" in note for note in cohort.notes)
        return cohort.join, cohort.in_dim

    assert joined("one") == ("concatenation", 15)
    assert joined("one", join="bag") == ("bag", 11)
    assert joined("two") == ("bag", 11)
    with pytest.raises(CohortError, match=r"cannot be concatenated \(24\).*different places"):
        joined("two", join="concatenation")


def test_sources_can_be_remote(cohorts: Path, memory: RemotePath, tmp_path: Path) -> None:
    table, folders = copied(cohorts, tmp_path)
    remote = [memory / folder.name for folder in folders]
    for folder, there in zip(folders, remote, strict=True):
        for path in folder.glob("*.h5"):
            upload(path, there / path.name)
    cohort, _ = load_cohort(table, remote)
    local, _ = load_cohort(table, folders)
    assert [source.name for source in cohort.sources] == ["fine", "coarse"]
    for there, here in zip(cohort.entries, local.entries, strict=True):
        one, other = bag_files.read(there.path), bag_files.read(here.path)
        np.testing.assert_array_equal(one.features, other.features)


# Mistakes


def copied(cohorts: Path, folder: Path) -> tuple[Path, list[Path]]:
    """The first four slides of a cohort with two grids, to be damaged."""
    sources = [folder / name for name in ("fine", "coarse")]
    for source in sources:
        source.mkdir()
        for path in sorted((cohorts / "two" / source.name).glob("*.h5"))[:4]:
            (source / path.name).write_bytes(path.read_bytes())
    table = folder / "labels.csv"
    table.write_text(
        "".join((cohorts / "two" / "labels.csv").read_text().splitlines(keepends=True)[:5])
    )
    return table, sources


def test_slides_that_lack_a_source_are_named_or_skipped(cohorts: Path, tmp_path: Path) -> None:
    table, folders = copied(cohorts, tmp_path)
    (folders[1] / "slide_002.h5").unlink()
    with pytest.raises(CohortError, match=r"Slides without a bag in .*coarse \(1\): slide_002"):
        load_cohort(table, folders)
    cohort, _ = load_cohort(table, folders, CohortConfig(missing="skip"))
    assert [entry.name for entry in cohort.entries] == ["slide_000", "slide_001", "slide_003"]
    assert any("coarse (1): slide_002. They were skipped" in note for note in cohort.notes)


def test_a_file_is_the_bag_of_one_source_only(cohorts: Path, tmp_path: Path) -> None:
    table, folders = copied(cohorts, tmp_path)
    text = table.read_text().splitlines()
    paths = [f"{line},{folders[0] / line.split(',')[0]}.h5" for line in text[1:]]
    table.write_text("\n".join([f"{text[0]},path", *paths]))
    with pytest.raises(CohortError, match=r"one file for several sources \(fine, coarse\) \(4\)"):
        load_cohort(table, folders)


def test_bags_of_one_source_must_be_alike(cohorts: Path, tmp_path: Path) -> None:
    table, folders = copied(cohorts, tmp_path)
    (folders[1] / "slide_001.h5").write_bytes((folders[0] / "slide_001.h5").read_bytes())
    with pytest.raises(CohortError, match=r"Bags of coarse that differ in width \(2\): 9"):
        load_cohort(table, folders)


def test_prediction_refuses_bags_that_are_not_those_of_its_sources(
    two: Run, cohorts: Path, tmp_path: Path
) -> None:
    folder = cohorts / "two"
    with pytest.raises(CohortError, match="there is no bag of coarse"):
        find_slide_bags(two.facts, [folder / "fine"])
    some = [folder / "fine", folder / "coarse" / "slide_001.h5"]
    with pytest.raises(CohortError, match=r"without a bag of every source: slide_000 \(coarse\)"):
        find_slide_bags(two.facts, some)
    with pytest.raises(
        BagError, match=r"one bag, and the models of .* read the sources fine, coar"
    ):
        two.predict({"slide_001": folder / "fine" / "slide_001.h5"}, device="cpu")
    bag = bags.read(folder / "fine" / "slide_001.h5")
    for name, info in (("scale", {"mpp": 0.25}), ("encoder", {"encoder": "uni_v1"})):
        path = write(tmp_path / name / "slide_001.h5", bag.features, bag.coords, **info)
        with pytest.raises(
            CohortError, match=r"is of none of the sources.*coarse: 6 features, not"
        ):
            find_slide_bags(two.facts, [path])
        files = two.bags["slide_001"]
        assert isinstance(files, SourceBags)
        other = replace(files, paths=(path, files.paths[1]))
        with pytest.raises(BagError, match=r"slide_001 \(fine\) is of .*pass --force"):
            two.predict({"slide_001": other}, device="cpu")
        assert len(two.predict({"slide_001": other}, force=True, device="cpu")) == 1


def test_bags_that_fit_to_several_sources_need_the_folders_of_their_names(
    one: Run, tmp_path: Path, cohorts: Path
) -> None:
    alike = replace(one.facts.sources[0], name="again")
    facts = replace(one.facts, sources=(one.facts.sources[0], alike))
    path = tmp_path / "slide_001.h5"
    path.write_bytes((cohorts / "one" / "fine" / path.name).read_bytes())
    with pytest.raises(CohortError, match=r"can be of the sources fine and again.*folders of the"):
        find_slide_bags(facts, [path])


def test_a_folder_with_the_name_of_another_source_is_not_taken_for_it(tiny_run: Run) -> None:
    """Bags of one encoder and scale, raw and normalised, do not differ otherwise."""
    sources = tuple(SourceFacts(name=name, in_dim=8) for name in ("raw", "normalised"))
    facts = replace(tiny_run.facts, sources=sources, join="concatenation")
    assert order_folders(facts, ["b/normalised", "b/raw"], Path("run")) == ["b/raw", "b/normalised"]
    assert order_folders(facts, ["b/x", "b/normalised"], Path("run")) == ["b/x", "b/normalised"]
    with pytest.raises(RunError, match="in the order raw, normalised"):
        order_folders(facts, ["b/normalised", "b/x"], Path("run"))


def test_a_recipe_of_sources_is_checked(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    read = read_recipe(table, features=["a", "b"], changes=["sources.dim=7"])
    assert (read.features, read.join) == (("a", "b"), "auto")
    assert read_recipe(table, features=["a"]) == read_recipe(table, features="a")
    for features, changes, reason in (
        (["a", "a"], [], "none of them twice"),
        ("a", ["sources.join=bag"], "there is one"),
        (["a", "b"], ["sources.join=both"], "must be 'auto' or 'concatenation' or 'bag'"),
        (["a", "b"], ["sources.dim=0"], "must be 1 or more"),
    ):
        with pytest.raises(RecipeError, match=reason):
            read_recipe(table, features=features, changes=changes)
    for change in ("train.probes=2", "train.compile=true"):
        recipe = read_recipe(table, features=["a", "b"], changes=[change])
        with pytest.raises(RecipeError, match="patches of several sources are one bag"):
            recipe.build_model(11, recipe.target.example(), (), WIDTHS)


@pytest.mark.parametrize("name", ["../elsewhere", "..", "", "/tmp", "a\\b"])
def test_the_name_of_a_source_is_not_a_path(name: str) -> None:
    with pytest.raises(RecipeError, match="cannot be the name of a source"):
        SourceFacts(name=name, in_dim=3)
    assert SourceFacts(name="..a", in_dim=3).name == "..a"


def test_what_one_source_writes_names_no_sources(tiny_run: Run) -> None:
    for name in ("run.json", "splits.json", "recipe.toml"):
        assert "sources" not in (tiny_run.folder / name).read_text()


def test_a_model_of_several_sources_in_one_bag_is_not_exported(two: Run, tmp_path: Path) -> None:
    from caprmil.export import export_run

    with pytest.raises(ExportError, match="patches of several sources"):
        export_run(two, "onnx", tmp_path / "out")


@pytest.mark.slow
def test_each_source_is_trained_alone_beside_all_on_the_same_folds(tmp_path: Path) -> None:
    study = TwoSources(slides=32)
    table = study.write(tmp_path)
    recipe = Recipe(
        cohort=str(table),
        features=(str(tmp_path / "fine"), str(tmp_path / "coarse")),
        model=ModelConfig(settings={"dim": 8, "heads": 2, "tokens": 2}),
        splits=SplitConfig(folds=2, validation=0.25),
        train=TrainConfig(epochs=6, warmup_epochs=1, lr=1e-2),
        loggers={},
    )
    out = tmp_path / "run"
    options: dict[str, Any] = {"device": "cpu", "progress": False, "modalities": True}
    run = cross_validate(recipe, out, **options)
    pairs = {(d["first"], d["second"]): d for d in run.scores["modalities"]["differences"]}
    assert pairs.keys() == {
        *(
            ("all sources", "fine only"),
            ("all sources", "coarse only"),
            ("fine only", "coarse only"),
        )
    }
    for source in ("fine", "coarse"):
        alone = Run(out / f"source-{source}")
        assert [fold.test for fold in alone.splits] == [fold.test for fold in run.splits]
        assert alone.facts.in_dim == study.widths[source == "coarse"]
        assert not alone.sources
        paths = {Path(path).parent.name for path in alone.paths.values()}
        assert paths == {source}
        trained = cross_validate(
            replace(recipe, features=str(tmp_path / source)),
            tmp_path / source / "run",
            device="cpu",
            progress=False,
            score=False,
        )  # the same as a run of this source alone
        np.testing.assert_allclose(trained.all_tested.answers, alone.all_tested.answers, atol=1e-6)
    names = [task.name for task in read_status(out).tasks]
    assert "source-fine/fold-0" in names
    text = (out / "scores.md").read_text()
    assert "What each modality adds" in text
    assert "The patches of coarse change the auc" in text
    assert "(fine only)" in text
    assert pairs["all sources", "coarse only"]["difference"] > 0.1  # where the signal is not
