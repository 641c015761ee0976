"""Folders and tables of STAMP, TRIDENT, CLAM and Patho-Bench are read as they are."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest

from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import Fold, SplitConfig
from caprmil.cohort.found_bags import find_bags
from caprmil.errors import CohortError, RecipeError
from caprmil.features import bags
from caprmil.features.convert import convert
from caprmil.targets import Survival
from caprmil.training.recipe_files import read_recipe

CELLS = 256 * np.array([[0, 0], [1, 0], [0, 1]])
RNG = np.random.default_rng(0)


def stamp_bag(path: Path, *, width: int = 6, extractor: str = "uni") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["feats"] = RNG.normal(size=(3, width)).astype(np.float16)
        file["coords"] = CELLS.astype(np.float32)
        file.attrs.update(extractor=extractor, unit="um", tile_size_um=256.0, tile_size_px=224)
        file.attrs.update(stamp_version="2.3.0", code_hash="0123abcd", feat_type="tile")
    return path


def trident_bag(folder: Path, name: str, *, encoder: str, width: int = 6) -> None:
    on_coords = {"patch_size": 256, "patch_size_level0": 256, "overlap": 0, "savetodir": "patches"}
    on_coords |= {"level0_magnification": 20, "target_magnification": 20.0}
    files = {"patches": f"{name}_patches", f"features_{encoder}": name}
    for part, file_name in (files | {"slide_features_titan": name}).items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        with h5py.File(folder / part / f"{file_name}.h5", "w") as file:
            file["coords"] = CELLS
            file["coords"].attrs.update(on_coords)
            if part != "patches":
                shape = (3, width) if part.startswith("features") else (8,)
                file["features"] = RNG.normal(size=shape).astype(np.float32)
                file["features"].attrs.update(name=name, savetodir=part, encoder=encoder)


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def read(table: Path, features: Path, **data: Any) -> tuple[Cohort, list[Fold]]:
    splits = SplitConfig(folds=2, validation=0)
    return load_cohort(table, features, CohortConfig(**data), splits)


# STAMP


CLINI = ("PATIENT,AGE,isMSIH", "a,60,yes", "b,50,no", "c,55,yes", "d,70,no", "e,71,no")
SLIDES = ("FILENAME,PATIENT", "x/a1.h5,a", "x/a2.h5,a", "b1.h5,b", "c1.h5,c", "d1.h5,d", "f1.h5,f")


@pytest.fixture
def stamp(tmp_path: Path) -> Path:
    for name in ("x/a1", "x/a2", "b1", "c1", "d1"):
        stamp_bag(tmp_path / "features" / f"{name}.h5")
    return tmp_path


def check_stamp(cohort: Cohort) -> None:
    assert cohort.patients == {"a": "a", "b": "b", "c": "c", "d": "d"}
    assert cohort.bags["a"].n_patches == 6
    assert [cohort.target.show_label(e.label) for e in cohort.entries if e.label is not None] == [
        *("yes", "no", "yes", "no")
    ]
    notes = " ".join(cohort.notes)
    assert "Patients of slide.csv that are not in clini." in notes
    assert "(1): f. Their slides were left out." in notes
    assert "without a slide (1): e. They were left out." in notes


@pytest.mark.parametrize("ending", ["csv", "xlsx"])
def test_stamps_two_tables_are_one_cohort(stamp: Path, ending: str) -> None:
    write(stamp / "clini.csv", *CLINI)
    write(stamp / "tables" / "slide.csv", *SLIDES)
    clini = stamp / f"clini.{ending}"
    if ending == "xlsx":
        pd.read_csv(stamp / "clini.csv").to_excel(clini, index=False)
    options = {"unit": "patient", "label": "isMSIH", "slide_table": "tables/slide.csv"}
    cohort, folds = read(clini, stamp / "features", **options)
    check_stamp(cohort)
    assert len(folds) == 2


def test_a_folder_with_stamps_two_tables_is_one_cohort(stamp: Path) -> None:
    write(stamp / "study" / "clini.csv", *CLINI)
    write(stamp / "study" / "slide.csv", *SLIDES)
    cohort, _ = read(stamp / "study", stamp / "features", unit="patient", label="isMSIH")
    check_stamp(cohort)
    assert read_recipe(stamp / "study").cohort == str(stamp / "study")


def test_stamps_columns_may_have_other_names(stamp: Path) -> None:
    write(stamp / "clini.csv", "submitter,grade", "a,1", "b,2", "c,1", "d,2")
    write(stamp / "slide.csv", "submitter,h5", "x/a1.h5,a")
    rows = ("submitter,h5", "a,x/a1.h5", "b,b1.h5", "c,c1.h5", "d,d1.h5")
    write(stamp / "slide.csv", *rows)
    columns = {"patient": "submitter", "slide": "h5", "label": "grade"}
    table = {"slide_table": str(stamp / "slide.csv")}
    cohort, _ = read(stamp / "clini.csv", stamp / "features", **columns, **table)
    assert cohort.patients == {"a1": "a", "b1": "b", "c1": "c", "d1": "d"}


def test_the_survival_of_stamps_table_is_read(stamp: Path) -> None:
    rows = ("PATIENT,days,status", "a,100,dead", "b,50,alive", "c,70,dead", "d,80,alive")
    clini = write(stamp / "clini.csv", *rows)
    write(stamp / "slide.csv", *SLIDES)
    config = CohortConfig(unit="patient", slide_table="slide.csv")
    found, _ = load_cohort(clini, stamp / "features", config, target=Survival())
    assert len(found.labels) == 4


def test_tables_without_a_common_patient_are_an_error_that_shows_both(stamp: Path) -> None:
    clini = write(stamp / "clini.csv", "PATIENT,label", "TCGA-1,x")
    write(stamp / "slide.csv", *SLIDES)
    with pytest.raises(CohortError, match=r"No patient of .*slide\.csv is in .*: a, b.* TCGA-1\."):
        read(clini, stamp / "features", slide_table="slide.csv")


def test_a_folder_with_more_tables_is_an_error_that_names_the_setting(stamp: Path) -> None:
    for name in ("clini", "other"):
        write(stamp / "study" / f"{name}.csv", *CLINI)
    write(stamp / "study" / "slide.csv", *SLIDES)
    with pytest.raises(CohortError, match=r"2 tables of patients and 1 .* data\.slide_table=FILE"):
        read(stamp / "study", stamp / "features")
    with pytest.raises(RecipeError, match=r"is a folder\. Pass a table"):
        read_recipe(stamp / "features")


# Patho-Bench


CONFIG = """task_type: classification
task_col: OS  # the label
sample_col: case_id
extra_cols: []
metrics: ['macro-ovr-auc']
"""


def test_a_task_folder_of_patho_bench_is_a_cohort_with_its_folds(tmp_path: Path) -> None:
    rows = [f"c{n}\ts{n}\t{n % 2}\t{n % 3}\t{'test' if n > 3 else 'train'}" for n in range(6)]
    write(tmp_path / "task" / "k=all.tsv", "case_id\tslide_id\tOS\tOther\tfold_0", *rows)
    write(tmp_path / "task" / "config.yaml", CONFIG)
    for n in range(6):
        trident_bag(tmp_path / "job", f"s{n}", encoder="uni_v1")
    config = CohortConfig(unit="patient")
    splits = SplitConfig(kind="fixed", validation=0)
    cohort, folds = load_cohort(tmp_path / "task", tmp_path / "job", config, splits)
    assert folds[0].test == ("c4", "c5")
    assert [cohort.labels[f"c{n}"] for n in range(6)] == [0, 1, 0, 1, 0, 1]
    assert any("data.unit=patient" in note for note in cohort.notes)
    assert set(cohort.entries[0].row) == {"fold_0"}


@pytest.mark.parametrize("extra", ["['OS_event', 'OS_days']", "\n  - OS_event\n  - OS_days"])
def test_the_columns_of_a_survival_task_are_kept(tmp_path: Path, extra: str) -> None:
    rows = [f"c{n}\ts{n}\t{n % 2}\t{n % 2}\t{100 + n}\ttrain" for n in range(4)]
    header = "case_id\tslide_id\tOS\tOS_event\tOS_days\tfold_0"
    write(tmp_path / "k=all.tsv", header, *rows)
    config = CONFIG.replace("[]", extra).replace("classification", "survival")
    write(tmp_path / "config.yaml", config)
    for n in range(4):
        trident_bag(tmp_path / "job", f"s{n}", encoder="uni_v1")
    found, _ = load_cohort(tmp_path, tmp_path / "job", target=Survival())
    assert len(found.labels) == 4


# Folders of features


def test_a_whole_job_of_trident_has_a_bag_for_each_slide(tmp_path: Path) -> None:
    for name in "ab":
        trident_bag(tmp_path / "job" / "20x_256px_0px_overlap", name, encoder="uni_v1")
    table = write(tmp_path / "labels.csv", "slide,label", "a,x", "b,y")
    cohort, _ = load_cohort(table, tmp_path / "job")
    assert {bag.encoder for bag in cohort.bags.values()} == {"uni_v1"}
    assert list(find_bags([tmp_path / "job"])) == ["a", "b"]


def test_a_job_with_two_encoders_is_an_error_that_names_both(tmp_path: Path) -> None:
    for encoder in ("uni_v1", "conch_v15"):
        trident_bag(tmp_path / "job", "a", encoder=encoder)
    table = write(tmp_path / "labels.csv", "slide,label", "a,x")
    with pytest.raises(CohortError, match=r"features_conch_v15/a\.h5 and .*features_uni_v1/a\.h5"):
        load_cohort(table, tmp_path / "job")


def test_what_convert_writes_for_clam_is_read_from_its_folder(tmp_path: Path) -> None:
    lengths: dict[str, Any] = {"patch_level0": 256.0, "step": 256.0, "slide_mpp": 0.5, "mpp": 0.5}
    for name in "ab":
        bags.write(tmp_path / "ours" / f"{name}.h5", RNG.normal(size=(3, 6)), CELLS, **lengths)
    done = convert(find_bags([tmp_path / "ours"]), tmp_path / "clam", "clam")
    assert not done.failed
    table = write(tmp_path / "labels.csv", "slide,label", "a,x", "b,y")
    cohort, _ = load_cohort(table, tmp_path / "clam")
    assert [e.path for e in cohort.entries] == [
        tmp_path / "clam" / "h5_files" / f"{name}.h5" for name in "ab"
    ]
    assert list(find_bags([tmp_path / "clam"])) == ["a", "b"]


def test_a_snapshot_of_the_hub_with_links_to_its_files_is_read(tmp_path: Path) -> None:
    hub = tmp_path / "models--a--b"
    for name in "ab":
        (hub / "snapshots" / "0f" / "features_uni_v1").mkdir(parents=True, exist_ok=True)
        blob = stamp_bag(hub / "blobs" / f"{name}.h5").rename(hub / "blobs" / f"{name * 32}")
        link = hub / "snapshots" / "0f" / "features_uni_v1" / f"{name}.h5"
        link.symlink_to(Path("../../../blobs") / blob.name)
    table = write(tmp_path / "labels.csv", "slide,label", "a,x", "b,y")
    cohort, _ = load_cohort(table, hub)
    assert len(cohort) == 2
    assert list(find_bags([hub])) == ["a", "b"]


# Encoders


@pytest.mark.parametrize(
    ("written", "width", "name"),
    [
        ("virchow2", 1280, "virchow2-cls"),
        ("virchow2", 2560, "virchow2"),
        ("Virchow-Full", 2560, "Virchow-Full"),
        ("virchow-full", 1280, "virchow-cls"),
        ("midnight", 1536, "midnight-cls"),
        ("h0-mini", 1536, "h0-mini"),
        ("uni", 6, "uni"),
        ("own.package:encoder", 1280, "own.package:encoder"),
    ],
)
def test_an_encoder_is_told_by_its_name_and_width(
    written: str, width: int, name: str, tmp_path: Path
) -> None:
    path = stamp_bag(tmp_path / "a.h5", width=width, extractor=written)
    assert bags.inspect(path).encoder == name


def test_vectors_of_one_name_and_two_widths_are_not_mixed(tmp_path: Path) -> None:
    stamp_bag(tmp_path / "bags" / "a.h5", width=1280, extractor="virchow2")
    trident_bag(tmp_path / "job", "b", encoder="virchow2", width=2560)
    (tmp_path / "job" / "features_virchow2" / "b.h5").rename(tmp_path / "bags" / "b.h5")
    table = write(tmp_path / "labels.csv", "slide,label", "a,x", "b,y")
    with pytest.raises(CohortError) as problem:
        load_cohort(table, tmp_path / "bags")
    assert "Bags that differ in width (2): 1280 (a), 2560 (b)." in str(problem.value)
    assert "Bags that differ in encoder (2): virchow2-cls (a), virchow2 (b)." in str(problem.value)
