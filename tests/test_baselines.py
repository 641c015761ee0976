"""Baselines: they find a planted signal, and do not use the labels of the test part."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import Fold, SplitConfig
from caprmil.errors import CohortError
from caprmil.evaluation import baselines
from caprmil.features import bags
from caprmil.runs.run import Run
from caprmil.targets import Regression
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig

pytestmark = pytest.mark.slow

SLIDES = 48
# Slide n has class n % 2. Pure codes contain n % 2, mixed codes contain n // 10.
PURE_CODES = "TCGA-{1}A-00{0:02d}-01Z-00-DX1"
MIXED_CODES = "TCGA-{2}A-00{0:02d}-01Z-00-DX1"
Loaded = tuple[Cohort, list[Fold]]


def write(
    folder: Path,
    *,
    count: Callable[[int], int] = lambda n: 8,
    site: Callable[[int], str] | None = None,
    shift: Callable[[int], float] = lambda n: 0.0,
    classes: int = 2,
    name: str = "slide_{:02d}",
) -> Path:
    """Write slides of alternating classes with given patch counts, sites and means, and a table.

    Each patient has two slides of one class.
    """
    rng, lines = np.random.default_rng(0), [f"slide,patient,label{',site' * (site is not None)}"]
    for n in range(SLIDES):
        slide, label = name.format(n, n % classes, n // 10), n % classes
        features = rng.normal(size=(count(n), 6))
        features += shift(n) - features.mean(axis=0)  # so that the mean is the shift
        bags.write(folder / "features" / f"{slide}.h5", features.astype(np.float32))
        patient = f"p{n // (2 * classes) * classes + label}"
        cells = [slide, patient, "abc"[label], *([site(n)] if site else [])]
        lines.append(",".join(cells))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder / "labels.csv"


def read(table: Path, **splits: object) -> Loaded:
    config = SplitConfig(**({"folds": 3, "validation": 0.25} | splits))  # type: ignore[arg-type]
    return load_cohort(table, table.parent / "features", splits=config)


def aucs(cohort: Cohort, folds: list[Fold]) -> dict[str, list[float]]:
    return {
        name: [
            roc_auc_score(np.asarray(part.labels), part.answers[:, 1])
            for part in table.by_fold().values()
        ]
        for name, table in baselines.predict_baselines(cohort, folds).items()
    }


def halves(n: int) -> str:
    """Return the site of a slide: two sites, each with as many slides of either class."""
    return "AB"[n // 2 % 2]


PLANTED = {
    "patch count": {"count": lambda n: 30 if n % 2 else 8, "site": halves},
    "site": {"site": lambda n: "BA"[n % 2]},
    "mean feature": {"shift": lambda n: 0.5 * (n % 2), "site": halves},
}


@pytest.fixture(scope="module", params=sorted(PLANTED))
def planted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Loaded]:
    """A cohort with the label in one property only."""
    folder = tmp_path_factory.mktemp("planted")
    return request.param, read(write(folder, **PLANTED[request.param]))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A cohort of three classes, with a weak label in all properties."""
    rng = np.random.default_rng(1)
    hints = rng.normal(size=SLIDES) + np.arange(SLIDES) % 3
    return read(
        write(
            tmp_path_factory.mktemp("mixed"),
            count=lambda n: int(20 + 5 * hints[n]),
            site=lambda n: "XYZ"[int(hints[n] > 1) + int(hints[n] > 2)] if n else "",
            shift=lambda n: float(0.3 * hints[n]),
            classes=3,
        )
    )


# Planted signals


def test_only_the_planted_baseline_finds_the_label(planted: tuple[str, Loaded]) -> None:
    planted_name, (cohort, folds) = planted
    for name, found in aucs(cohort, folds).items():
        if name == planted_name:
            assert found == [1.0] * len(folds)
        else:
            assert np.mean(found) < 0.7


def test_medium_counts_are_separated_from_small_and_large_ones(tmp_path: Path) -> None:
    table = write(tmp_path, count=lambda n: 16 if n % 2 else (8, 32)[n // 2 % 2])
    assert aucs(*read(table))["patch count"] == [1.0] * 3


def test_the_labels_of_the_test_part_are_not_used(planted: tuple[str, Loaded]) -> None:
    _, (cohort, folds) = planted
    fold = folds[0]
    flipped = tuple(
        replace(entry, label=1 - (entry.label or 0)) if entry.name in fold.test else entry
        for entry in cohort.entries
    )
    expected = baselines.predict_baselines(cohort, [fold])
    for name, table in baselines.predict_baselines(
        replace(cohort, entries=flipped), [fold]
    ).items():
        np.testing.assert_array_equal(table.answers, expected[name].answers)


def test_every_test_slide_is_predicted_once_with_its_label_and_patient(mixed: Loaded) -> None:
    cohort, folds = mixed
    for table in baselines.predict_baselines(cohort, folds).values():
        assert sorted(table.slides) == sorted(cohort.labels)
        rows = zip(table.slides, np.asarray(table.labels), table.patients or (), strict=True)
        assert all(
            (cohort[slide].label, cohort[slide].patient) == (label, patient)
            for slide, label, patient in rows
        )


# Comparison with plain implementations


def test_the_site_predicts_smoothed_shares(mixed: Loaded) -> None:
    cohort, folds = mixed
    for fold in folds:
        known = [cohort[name] for name in (*fold.train, *fold.validation)]
        table = baselines.predict_baselines(cohort, [fold])["site"]
        for slide, row in zip(table.slides, table.answers, strict=True):
            here = [e for e in known if e.row["site"] == cohort[slide].row["site"] != ""]
            for label, p in enumerate(row):
                share = np.mean([e.label == label for e in known])
                hits = sum(e.label == label for e in here)
                assert p == pytest.approx((hits + 3 * share) / (len(here) + 3))


def test_the_mean_feature_is_a_logistic_regression_chosen_on_the_validation_part(
    mixed: Loaded,
) -> None:
    cohort, folds = mixed
    fold = folds[0]

    def values(names: tuple[str, ...]) -> tuple[np.ndarray, list[int]]:
        means = [bags.read(cohort[name].path).features.mean(axis=0) for name in names]
        return np.array(means, dtype=float), [cohort.labels[name] for name in names]

    def fit(names: tuple[str, ...], penalty: float) -> Callable[[np.ndarray], np.ndarray]:
        x, y = values(names)
        middle, spread = x.mean(axis=0), x.std(axis=0)
        model = LogisticRegression(C=penalty, max_iter=10_000).fit((x - middle) / spread, y)
        return lambda new: model.predict_proba((new - middle) / spread)

    x, y = values(fold.validation)
    losses = {c: log_loss(y, fit(fold.train, c)(x)) for c in (1e-4, 1e-3, 1e-2, 0.1, 1.0)}
    best = min(losses, key=lambda c: losses[c])
    expected = fit((*fold.train, *fold.validation), best)(values(fold.test)[0])
    found = baselines.predict_baselines(cohort, [fold])["mean feature"].answers
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_without_a_validation_part_the_strength_is_chosen_on_patients_of_the_train_part(
    tmp_path: Path,
) -> None:
    cohort, folds = read(write(tmp_path, shift=lambda n: 0.5 * (n % 2)), validation=0)
    assert all(fold.validation == () for fold in folds)
    assert aucs(cohort, folds)["mean feature"] == [1.0] * 3
    train, inner = baselines._inner_split(cohort, folds[0].train)
    patients = [{cohort[name].patient for name in part} for part in (train, inner)]
    assert patients[0].isdisjoint(patients[1])
    assert {cohort[name].label for name in train} == {0, 1}
    assert sorted((*train, *inner)) == sorted(folds[0].train)


# Sites


def test_a_site_that_is_not_in_training_gets_the_shares_of_all(tmp_path: Path) -> None:
    cohort, folds = read(write(tmp_path, site=lambda n: "AB"[n % 2]))
    fold, unseen = folds[0], folds[0].test[0]
    entries = tuple(
        replace(e, row={"site": "new"}) if e.name == unseen else e for e in cohort.entries
    )
    table = baselines.predict_baselines(replace(cohort, entries=entries), [fold])["site"]
    known = [cohort.labels[name] for name in (*fold.train, *fold.validation)]
    shares = np.bincount(known) / len(known)
    np.testing.assert_allclose(table.answers[table.slides.index(unseen)], shares)


def test_the_site_is_read_from_tcga_barcodes(tmp_path: Path) -> None:
    cohort, folds = read(write(tmp_path, name=MIXED_CODES))
    sites = baselines.find_sites(cohort)
    assert sites.of["TCGA-4A-0041-01Z-00-DX1"] == "4A"
    assert sites.remark == "The site is taken from the barcodes of TCGA."
    assert "site" in baselines.predict_baselines(cohort, folds)


@pytest.fixture(scope="module")
def pure_codes(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A cohort of two studies, as TCGA-NSCLC is: no code is in both."""
    return read(write(tmp_path_factory.mktemp("studies"), name=PURE_CODES))


def test_codes_that_tcga_gives_per_study_are_not_sites(pure_codes: Loaded) -> None:
    cohort, folds = pure_codes
    labels: dict[str, set[object]] = {}
    for entry in cohort.entries:
        labels.setdefault(entry.name[5:7], set()).add(entry.label)
    assert all(len(own) == 1 for own in labels.values())
    assert len(labels) < SLIDES
    sites = baselines.find_sites(cohort)
    assert not sites.of
    assert "per study" in sites.remark
    assert "[data] site" in sites.remark
    assert set(baselines.predict_baselines(cohort, folds[:1])) == {"patch count", "mean feature"}


def test_a_column_with_the_same_codes_is_not_a_site_either(pure_codes: Loaded) -> None:
    cohort = pure_codes[0]
    codes = [entry.name[5:7].lower() for entry in cohort.entries]
    assert not baselines.find_sites(with_sites(cohort, "tissue_source_site", codes)).of


def test_a_pure_column_that_the_user_names_is_kept(pure_codes: Loaded) -> None:
    cohort = pure_codes[0]
    sites = baselines.find_sites(with_sites(cohort, "hospital", ["Athens", "Paris"]))
    assert set(sites.of.values()) == {"Athens", "Paris"}


def test_one_code_with_two_labels_makes_codes_sites(pure_codes: Loaded) -> None:
    cohort = pure_codes[0]
    first = replace(cohort.entries[0], label=1)
    assert cohort.entries[0].label == 0
    assert baselines.find_sites(replace(cohort, entries=(first, *cohort.entries[1:]))).of


def test_codes_are_sites_where_there_are_no_classes(tmp_path: Path) -> None:
    table = write(tmp_path, name=PURE_CODES)
    text = table.read_text().replace(",a", ",1.5").replace(",b", ",2.5")
    table.write_text(text)
    cohort, _ = load_cohort(table, tmp_path / "features", target=Regression())
    assert baselines.find_sites(cohort).of


def test_data_site_names_the_column_of_the_institution(tmp_path: Path) -> None:
    table = write(tmp_path, name=PURE_CODES, site=halves)
    table.write_text(table.read_text().replace("label,site", "label,sent by"))
    cohort, _ = load_cohort(table, tmp_path / "features", CohortConfig(site="sent by"))
    sites = baselines.find_sites(cohort)
    assert set(sites.of.values()) == {"A", "B"}
    assert sites.remark == "The site is taken from sent by."
    assert cohort.entries[0].row == {"sent by": "A"}
    with pytest.raises(
        CohortError, match=r"\[data\] site: no column is 'sent'. Did you mean 'sent"
    ):
        load_cohort(table, tmp_path / "features", CohortConfig(site="sent"))
    with pytest.raises(
        CohortError, match=r"column 'label' is the label\. Name the one of the inst"
    ):
        load_cohort(table, tmp_path / "features", CohortConfig(label="label", site="label"))


def with_sites(cohort: Cohort, column: str, cells: list[str]) -> Cohort:
    entries = (
        replace(entry, row={column: cells[n % len(cells)]})
        for n, entry in enumerate(cohort.entries)
    )
    return replace(cohort, entries=tuple(entries))


@pytest.mark.parametrize("column", ["site", "Medical Centre", "TSS", "hospital"])
def test_a_column_of_sites_has_many_names(planted: tuple[str, Loaded], column: str) -> None:
    sites = baselines.find_sites(with_sites(planted[1][0], column, ["A", "B", "n/a"]))
    assert set(sites.of.values()) == {"A", "B"}
    assert len(sites.of) == 2 * SLIDES // 3
    assert sites.remark == f"The site is taken from {column}."


@pytest.mark.parametrize(
    ("column", "cells", "remark"),
    [
        ("site", ["A"], "By site, there are fewer than two sites."),
        ("site", ["", "NA"], "By site, there are fewer than two sites."),
        ("age", ["40", "50"], "The table has no column for the site, and slides have no TCGA"),
    ],
)
def test_without_two_sites_the_reason_is_noted(
    planted: tuple[str, Loaded], column: str, cells: list[str], remark: str
) -> None:
    cohort, folds = planted[1]
    cohort = with_sites(cohort, column, cells)
    assert baselines.find_sites(cohort).remark.startswith(remark)
    assert set(baselines.predict_baselines(cohort, folds[:1])) == {"patch count", "mean feature"}


# Runs


def test_a_run_that_does_not_beat_a_baseline_reports_it(tmp_path: Path) -> None:
    table = write(tmp_path, **PLANTED["patch count"])
    recipe = Recipe(
        cohort=str(table),
        features=str(tmp_path / "features"),
        model=ModelConfig(settings={"dim": 16, "heads": 2}),
        splits=SplitConfig(folds=2),
        train=TrainConfig(epochs=1, warmup_epochs=0, lr=1e-6),
        loggers={},
    )
    run = cross_validate(recipe, tmp_path / "run", device="cpu", progress=False)
    text = (run.folder / "scores.md").read_text()
    assert "The model does not beat 'patch count' (p" in text
    assert "The site is taken from site." in text
    assert run.scores["baselines"]["differences"][0]["second"] == "patch count"


def test_a_run_stores_its_baselines(tiny_run: Run) -> None:
    assert set(tiny_run.baselines) == {"patch count", "mean feature"}
    for table in tiny_run.baselines.values():
        assert (table.slides, table.folds) == (
            tiny_run.predictions.slides,
            tiny_run.predictions.folds,
        )
    assert "slides have no TCGA barcodes" in (tiny_run.folder / "scores.md").read_text()


def test_a_mean_is_trained_beside_a_model_and_resumes(tmp_path: Path, tiny_recipe: Recipe) -> None:
    stopped = []

    def stop(fold: str, _: object) -> None:
        stopped.append(fold)
        if len(stopped) == 11:  # three folds of three epochs, then the Mean
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cross_validate(tiny_recipe, tmp_path / "run", mean=True, device="cpu", on_epoch=stop)
    assert not Run(tmp_path / "run").finished
    run = cross_validate(tiny_recipe, tmp_path / "run", mean=True, device="cpu")
    model = replace(tiny_recipe, model=ModelConfig(name="mean"), loggers={})
    alone = cross_validate(model, tmp_path / "mean", device="cpu")
    found = run.baselines["mean model"]
    assert found.slides == alone.predictions.slides
    assert np.array_equal(found.answers, alone.predictions.answers)
    assert "| mean model |" in (run.folder / "scores.md").read_text()


def test_no_mean_is_trained_beside_a_mean(tmp_path: Path, tiny_recipe: Recipe) -> None:
    model = replace(tiny_recipe, model=ModelConfig(name="mean"))
    run = cross_validate(model, tmp_path / "run", mean=True, device="cpu")
    assert "mean model" not in run.baselines
    assert not (run.folder / "mean").exists()
