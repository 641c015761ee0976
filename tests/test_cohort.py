"""Cohorts: every bag is found, and every problem is reported before training."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caprmil.cohort.cohort import Cohort, load_cohort
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.cohort.folds import Fold, SplitConfig
from caprmil.cohort.found_bags import find_bags
from caprmil.errors import CohortError, RecipeError
from caprmil.features import bags
from caprmil.targets import Classification

TWO_FOLDS = SplitConfig(folds=2, validation=0.5)


def write_bag(path: Path, width: int = 4, **metadata: Any) -> Path:
    """Write a bag of three patches."""
    if path.suffix == ".h5":
        return bags.write(path, np.ones((3, width)), **metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.ones((3, width), dtype=np.float32))
    return path


def write_table(folder: Path, *lines: str, name: str = "cohort.csv") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


def write_study(folder: Path, header: str = "case_id,slide_id,label", *, size: int = 8) -> Path:
    """Write a table of patients with a slide each, and their bags in `bags`."""
    for number in range(size):
        write_bag(folder / "bags" / f"s{number}.npy")
    rows = [f"p{number},s{number},{'ab'[number % 2]}" for number in range(size)]
    return write_table(folder, header, *rows)


def read(
    table: Path, splits: SplitConfig | None = None, classes: tuple[str, ...] = (), **settings: Any
) -> tuple[Cohort, list[Fold]]:
    config, target = CohortConfig(**settings), Classification(classes=classes)
    return load_cohort(table, table.parent / "bags", config, splits, target=target)


def problems(table: Path, splits: SplitConfig | None = TWO_FOLDS, **settings: Any) -> str:
    with pytest.raises(CohortError) as caught:
        read(table, splits, **settings)
    return str(caught.value)


def write_split(folder: Path, parts: Iterable[str], name: str = "cohort.csv") -> Path:
    """Write a study with these cells in its split column; labels alternate."""
    write_study(folder, size=len(parts := list(parts)))
    rows = [f"p{n},s{n},{'ab'[n % 2]},{part}" for n, part in enumerate(parts)]
    return write_table(folder, "case_id,slide_id,label,split", *rows, name=name)


FIXED = SplitConfig(kind="fixed", validation=0.5)
HALVES = ["train"] * 4 + ["test"] * 4


# Tables


def test_a_cohort_has_slides_patients_labels_and_bags(tmp_path: Path) -> None:
    cohort, folds = read(write_study(tmp_path), TWO_FOLDS)
    assert cohort.target.classes == ("a", "b")
    assert cohort["s3"].patient == cohort.patients["s3"] == "p3"
    assert cohort["s3"].label == cohort.labels["s3"] == 1
    assert cohort["s3"].path == tmp_path / "bags" / "s3.npy"
    assert (len(cohort), cohort.in_dim, cohort.bags["s3"].n_patches) == (8, 4, 3)
    assert [entry.name for entry in cohort.subset(folds[0].test)] == list(folds[0].test)


@pytest.mark.parametrize(
    "header",
    [
        "case_id,slide_id,label",
        "PATIENT,FILENAME,target",
        "Patient_ID,Image_ID,Class",
        "case,slide,y",
        "Case ID,WSI,Truth",
    ],
)
def test_usual_columns_are_recognised_in_any_case(tmp_path: Path, header: str) -> None:
    cohort, _ = read(write_study(tmp_path, header))
    assert (cohort["s1"].patient, cohort["s1"].label) == ("p1", 1)
    assert cohort.notes == ()


def test_unusual_columns_can_be_named(tmp_path: Path) -> None:
    table = write_study(tmp_path, "who,what,why")
    cohort, _ = read(table, patient="who", slide="what", label="why")
    assert (cohort["s1"].patient, cohort["s1"].label) == ("p1", 1)
    with pytest.raises(CohortError, match=r"no column is 'wat'\. Did you mean 'what'"):
        read(table, slide="wat")


def test_an_unknown_slide_column_names_the_columns(tmp_path: Path) -> None:
    assert "Columns: who, what, why. Set [data] slide (--set data.slide=COLUMN)." in problems(
        write_study(tmp_path, "who,what,why")
    )


def test_another_cohort_has_no_settings_to_advise(tmp_path: Path) -> None:
    """`caprmil evaluate` has no --set."""
    with pytest.raises(CohortError, match=r"Rename the column of the slide to slide\.$"):
        read(write_study(tmp_path, "who,what,why"))
    (tmp_path / "bags" / "s1.npy").unlink()
    with pytest.raises(CohortError, match="or remove their rows") as caught:
        read(write_study(tmp_path, size=8) and write_table(tmp_path, "slide,label", "s0,a", "x,b"))
    assert "--set" not in str(caught.value)


def test_tabs_semicolons_bom_blank_lines_and_quotes_are_read(tmp_path: Path) -> None:
    write_study(tmp_path)
    rows = ["slide{0}label{0}site", "", "s0{0}a{0}x", "{0}{0}", 's1{0}"b, or c"{0}', ""]
    for name, mark in ("c.tsv", "\t"), ("c.txt", "\t"), ("c.csv", ";"):
        table = write_table(tmp_path, *(row.format(mark) for row in rows), name=name)
        table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))
        cohort, _ = read(table)
        assert (cohort.target.classes, cohort["s0"].row) == (("a", "b, or c"), {"site": "x"})


def test_leading_zeros_are_kept(tmp_path: Path) -> None:
    write_bag(tmp_path / "bags" / "007.npy")
    cohort, _ = read(write_table(tmp_path, "slide,patient,label,age", "007,01,1,050"))
    assert (cohort["007"].patient, cohort["007"].row) == ("01", {"age": "050"})


def test_classes_are_sorted_as_numbers_or_in_the_given_order(tmp_path: Path) -> None:
    write_study(tmp_path)
    table = write_table(tmp_path, "slide,label", "s0,10", "s1,9", "s2,0")
    assert read(table)[0].target.classes == ("0", "9", "10")
    assert read(table, classes=("9", "10", "0"))[0].labels == {"s0": 1, "s1": 0, "s2": 2}


def test_the_index_column_of_pandas_is_not_a_label(tmp_path: Path) -> None:
    write_study(tmp_path)
    table = write_table(tmp_path, ",case_id,slide_id,subtype", "0,p0,s0,a", "1,p1,s1,b")
    assert read(table)[0]["s1"].row == {}


def test_a_single_other_column_is_the_label(tmp_path: Path) -> None:
    write_study(tmp_path)
    head = "case_id\tslide_id\tBRAF\tfold_0\tfold_1"
    table = write_table(
        tmp_path, head, "p0\ts0\t0\ttrain\ttest", "p1\ts1\t1\ttest\ttrain", name="k=all.tsv"
    )
    assert read(table)[0].labels == {"s0": 0, "s1": 1}


def test_neither_of_two_other_columns_is_the_label(tmp_path: Path) -> None:
    write_study(tmp_path)
    text = problems(write_table(tmp_path, "slide,grade,age", "s0,1,50", "s1,2,60"))
    assert "label. Columns: slide, grade, age. Set [data] label (--label COLUMN)." in text


def test_without_patients_each_slide_is_a_patient_and_there_is_a_note(tmp_path: Path) -> None:
    cohort, _ = read(write_table(write_study(tmp_path).parent, "slide,label", "s0,a", "s1,b"))
    assert cohort.notes == ("No patient column: every slide counts as its own patient.",)
    assert cohort.patients == {"s0": "s0", "s1": "s1"}


def test_an_empty_patient_column_counts_as_none_with_a_note(tmp_path: Path) -> None:
    write_study(tmp_path)
    rows = [f",s{n},{'ab'[n % 2]}" for n in range(8)]
    cohort, folds = read(write_table(tmp_path, "case_id,slide_id,label", *rows), TWO_FOLDS)
    assert (cohort.patients["s3"], len(folds)) == ("s3", 2)
    assert cohort.notes == (
        "Column case_id is empty, and is left out.",
        "No patient column: every slide counts as its own patient.",
    )
    chosen = problems(tmp_path / "cohort.csv", patient="case_id")
    assert "Slides without a patient (8)" in chosen


def test_slides_without_a_patient_are_not_also_reported_as_too_few_patients(tmp_path: Path) -> None:
    write_study(tmp_path)
    rows = [f"{'p0' if n == 0 else ''},s{n},{'ab'[n % 2]}" for n in range(8)]
    text = problems(write_table(tmp_path, "case_id,slide_id,label", *rows))
    assert "Slides without a patient (7): s1, s2" in text
    assert "Fill column case_id, remove their rows, or delete the column if every" in text
    assert "too few" not in text
    rows = [f"p{n // 2},s{n},{'ab'[n % 2]}" for n in range(8)]
    text = problems(write_table(tmp_path, "case_id,slide_id,label", *rows))
    assert "Patients with more than one label (4)" in text
    assert "too few" not in text


def test_without_splits_labels_may_be_missing(tmp_path: Path) -> None:
    write_study(tmp_path)
    cohort, folds = read(write_table(tmp_path, "patient,slide,label", "p,s0,a", "p,s1,"))
    assert (cohort["s1"].label, cohort.labels, folds) == (None, {"s0": 0}, [])
    assert any("without a label (1): s1" in note for note in cohort.notes)


@pytest.mark.parametrize("word", ["None", "null", "inf", "-Infinity", "NA", "nan", "N/A", "#N/A"])
def test_words_for_a_missing_label_are_not_classes(tmp_path: Path, word: str) -> None:
    write_study(tmp_path)
    table = write_table(tmp_path, "patient,slide,label", "p,s0,a", f"q,s1,{word}")
    cohort, _ = read(table)
    assert (cohort.labels, cohort.target.names) == ({"s0": 0}, ("a",))
    assert any(f"without a label (1): s1 ({word})" in note for note in cohort.notes)
    told = problems(table)
    assert f"without a label (1): s1 ({word}). Fill column label" in told
    assert f"If {word} is a class, name all classes in [target] classes." in told
    cohort, _ = read(table, classes=("a", word))
    assert cohort.labels == {"s0": 0, "s1": 1}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"slide,label\n", "no rows"),
        (b"slide,label\ns0,a,b\n", "cohort.csv, line 2: 3 cells, but 2 columns"),
        (b"slide,slide\ns0,a\n", "2 columns called 'slide'"),
        (b"slide,label\ns0,\xe9\n", "UTF-8"),
    ],
)
def test_a_malformed_table_is_an_error(tmp_path: Path, content: bytes, expected: str) -> None:
    table = write_study(tmp_path)
    table.write_bytes(content)
    assert expected in problems(table)


def test_a_missing_file_or_another_file_is_an_error(tmp_path: Path) -> None:
    assert "There is no file" in problems(tmp_path / "nowhere.csv")
    (tmp_path / "cohort.xlsx").write_bytes(b"PK\x03\x04\xff")
    assert "Save it as .csv" in problems(tmp_path / "cohort.xlsx")


# Bags


@pytest.mark.parametrize("cell", ["s0.svs", "s0.NDPI", "scans/s0.tiff", "s0.h5", r"scans\s0.svs"])
def test_a_suffix_in_the_table_is_ignored(tmp_path: Path, cell: str) -> None:
    write_bag(tmp_path / "bags" / "s0.h5")
    cohort, _ = read(write_table(tmp_path, "slide,label", f"{cell},a"))
    assert cohort["s0"].path == tmp_path / "bags" / "s0.h5"


def test_dots_in_a_name_are_not_suffixes(tmp_path: Path) -> None:
    write_bag(tmp_path / "bags" / "TCGA-05-DX1.a1b2.h5")
    cohort, _ = read(write_table(tmp_path, "slide,label", "TCGA-05-DX1.a1b2,a"))
    assert [entry.name for entry in cohort.entries] == ["TCGA-05-DX1.a1b2"]


def test_the_preferred_format_is_used_for_a_slide_with_several_files(tmp_path: Path) -> None:
    write_bag(tmp_path / "bags" / "npy_files" / "s0.npy")
    best = write_bag(tmp_path / "bags" / "h5_files" / "s0.h5")
    (tmp_path / "bags" / "h5_files" / "._s0.h5").touch()
    assert read(write_table(tmp_path, "slide,label", "s0,a"))[0]["s0"].path == best
    assert find_bags([tmp_path]) == {"s0": best}


def test_two_bags_of_a_slide_are_both_named(tmp_path: Path) -> None:
    both = [write_bag(tmp_path / "bags" / folder / "s0.npy") for folder in ("uni", "conch")]
    text = problems(write_table(tmp_path, "slide,label", "s0,a"))
    assert all(str(path) in text for path in both)


def test_a_row_may_have_the_path_of_its_bag(tmp_path: Path) -> None:
    one, two = write_bag(tmp_path / "bags" / "uni" / "x.npy"), write_bag(tmp_path / "y.npy")
    table = write_table(tmp_path, "slide,label,path", "s0,a,uni/x.npy", "s1,b,y.npy")
    cohort, _ = read(table)
    assert [entry.path for entry in cohort.entries] == [one, two]
    one.unlink()
    assert "(1): s0 (uni/x.npy)." in problems(table)


def test_without_a_features_folder_the_paths_are_enough(tmp_path: Path) -> None:
    write_bag(tmp_path / "y.npy")
    assert load_cohort(write_table(tmp_path, "slide,label,path", "s0,a,y.npy"), None)[0].in_dim == 4
    with pytest.raises(CohortError, match=r"without a bag \(1\): s0. Pass a folder"):
        load_cohort(write_table(tmp_path, "slide,label", "s0,a"), None)


def test_slides_without_a_bag_are_named_or_skipped(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    (tmp_path / "bags" / "s1.npy").unlink()
    expected = "(1): s1. The folder holds 7 bags, all of other rows. Extract"
    assert expected in problems(table)
    cohort, _ = read(table, SplitConfig(folds=3), missing="skip")
    assert "s1" not in cohort.patients
    assert any("(1): s1. They were skipped." in note for note in cohort.notes)


def test_long_lists_are_cut_after_ten(tmp_path: Path) -> None:
    table = write_table(
        write_study(tmp_path).parent, "slide,label", *(f"x{n},a" for n in range(14))
    )
    assert "(14): x0, x1, x2, x3, x4, x5, x6, x7, x8, x9 and 4 more." in problems(table)


def test_bags_of_other_names_are_shown_with_the_nearest(tmp_path: Path) -> None:
    for name in ("TCGA-01-0001-01Z.a1b2", "TCGA-01-0002-01Z.c3d4", "other"):
        write_bag(tmp_path / "bags" / f"{name}.npy")
    text = problems(write_table(tmp_path, "slide,label", "TCGA-01-0001-01Z,a", "TCGA-01-0002,b"))
    assert "The folder holds bags of other names (3): TCGA-01-0001-01Z.a1b2, TCGA-" in text
    nearest = "TCGA-01-0001-01Z.a1b2 for TCGA-01-0001-01Z, TCGA-01-0002-01Z.c3d4 for TCGA-01-0002"
    assert f"Nearest: {nearest}: names must be equal." in text


def test_a_folder_of_coordinates_is_answered_once_and_names_that_of_features(
    tmp_path: Path,
) -> None:
    table = write_study(tmp_path, size=12)
    for number in range(12):
        (tmp_path / "bags" / f"s{number}.npy").unlink()
        with h5py.File(tmp_path / "bags" / f"s{number}.h5", "w") as file:
            file["coords"] = np.ones((3, 2), dtype=np.int64)
    text = problems(table)
    assert "Files of coordinates, without features (12): s0, s1" in text
    assert text.count("h5_files of CLAM") == 1
    assert "cannot be used (" not in text


def test_a_folder_of_slides_is_not_one_of_features(tmp_path: Path) -> None:
    write_study(tmp_path)
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "s0.svs").touch()
    with pytest.raises(CohortError, match=r"a folder of slides.*caprmil encode .*slides --out"):
        load_cohort(tmp_path / "cohort.csv", tmp_path / "slides", None, TWO_FOLDS)


@pytest.mark.parametrize(
    ("labels", "measured"),
    [
        ([0.1, 0.25, 0.7, 0.3, 0.31, 0.9, 0.8, 0.2], True),
        (range(8), False),  # eight slides of eight grades are few, and named as such
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0], False),
        (range(30, 60), True),
        ([0, 1, 2, 3, 4, 5] * 4, False),
    ],
)
def test_labels_that_are_measurements_name_regression(
    tmp_path: Path, labels: Sequence[float], measured: bool
) -> None:
    rows = [f"s{number},{label}" for number, label in enumerate(labels)]
    for number in range(len(labels)):
        write_bag(tmp_path / "bags" / f"s{number}.npy")
    table = write_table(tmp_path, "slide,label", *rows)
    try:
        read(table, TWO_FOLDS)
        text = ""
    except CohortError as problem:
        text = str(problem)
    assert ("--set target.kind=regression" in text) == measured
    assert not measured or "too few patients" not in text


def test_a_scan_finds_every_broken_bag_at_once(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    np.save(tmp_path / "bags" / "s1.npy", np.full((3, 4), np.nan, dtype=np.float32))
    (tmp_path / "bags" / "s2.npy").write_bytes(b"\x93NUMPY")
    text = problems(table)
    assert "Bags that cannot be used (2):" in text
    assert "s1.npy" in text
    assert "s2.npy" in text


def test_without_a_scan_only_headers_are_read(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    np.save(tmp_path / "bags" / "s1.npy", np.full((3, 4), np.nan, dtype=np.float32))
    assert len(read(table, TWO_FOLDS, scan=False)[0]) == 8


def test_progress_counts_every_bag(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_cohort(write_study(tmp_path), tmp_path / "bags", progress=lambda *step: seen.append(step))
    assert seen == [(done, 8) for done in range(1, 9)]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"width": 5}, "differ in width (2): 4 (s0), 5 (s1)."),
        ({"encoder": "conch"}, "differ in encoder (2): uni (s0), conch (s1)."),
        ({"mpp": 0.25}, "differ in microns per pixel (2): 0.5 (s0), 0.25 (s1)."),
    ],
)
def test_bags_of_different_encoders_or_scales_are_refused(
    tmp_path: Path, metadata: dict[str, Any], expected: str
) -> None:
    write_bag(tmp_path / "bags" / "s0.h5", encoder="uni", mpp=0.5)
    write_bag(tmp_path / "bags" / "s1.h5", **{"encoder": "uni", "mpp": 0.5, **metadata})
    table = write_table(tmp_path, "slide,label", "s0,a", "s1,b")
    assert expected in problems(table, None)


def test_bags_of_one_encoder_give_its_name_and_scale(tmp_path: Path) -> None:
    for name, mpp in ("s0", 0.5), ("s1", 0.52), ("s2", 0.49):
        write_bag(tmp_path / "bags" / f"{name}.h5", encoder="uni", mpp=mpp)
    write_bag(tmp_path / "bags" / "s3.npy")
    cohort, _ = read(write_table(tmp_path, "slide,label", "s0,a", "s1,a", "s2,b", "s3,b"))
    assert (cohort.first_known("encoder"), cohort.mpp) == ("uni", 0.5)
    assert "do not name their encoder (1): s3. They are assumed to be of uni" in cohort.notes[-1]


def test_bags_are_found_among_files_and_folders(tmp_path: Path) -> None:
    one = write_bag(tmp_path / "more" / "deep" / "b.npy")
    two = write_bag(tmp_path / "a.svs.npy")
    assert find_bags([two, tmp_path / "more", one]) == {"a": two, "b": one}
    with pytest.raises(CohortError, match="no file or folder"):
        find_bags([tmp_path / "nowhere"])
    with pytest.raises(CohortError, match=r"ends in \.h5"):
        find_bags([write_table(tmp_path, "slide")])
    (tmp_path / "none").mkdir()
    with pytest.raises(CohortError, match="No bag"):
        find_bags([tmp_path / "none"])


# Problems


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    write_study(tmp_path)
    rows = [
        "p0,s0,a",
        "p1,s1,",
        "p2,s2,a",
        "p2,s3,b",
        ",s4,b",
        "p5,s5,a",
        "p5,s5,a",
        "p9,s9,b",
        "p6,,a",
    ]
    (tmp_path / "bags" / "s0.npy").write_bytes(b"")
    write_bag(tmp_path / "bags" / "s2.h5", width=7)
    text = problems(write_table(tmp_path, "case_id,slide_id,label", *rows))
    for expected in (
        "Rows without a slide (1): 9.",
        "more than one row (1): s5.",
        "Slides without a bag in",
        "Slides without a patient (1): s4.",
        "Slides without a label (1): s1.",
        "Patients with more than one label (1): p2 (a, b).",
        "Bags that cannot be used (1):",
        "Bags that differ in width",
        "Classes with too few patients",
    ):
        assert expected in text


def test_patients_may_have_two_labels_if_labels_belong_to_slides(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    table.write_text(table.read_text().replace("p1,", "p0,"))
    assert "p0 (a, b)" in problems(table)
    _, folds = read(table, SplitConfig(folds=2, validation=0), mixed_patients=True)
    assert {("s0" in fold.test, "s1" in fold.test) for fold in folds} == {
        (True, True),
        (False, False),
    }


@pytest.mark.parametrize(
    ("labels", "settings", "expected"),
    [
        ("aabx", {"classes": ("a", "b")}, "not a class (1): s3 (x). [target] classes are a, b."),
        ("aaaa", {}, "fewer than two classes: a."),
        ("AAaa", {}, "differ only in spelling (1): A and a."),
        ("aaaab", {}, "too few patients (1): b: 1. folds = 2 with validation = 0.5 needs 4"),
    ],
)
def test_labels_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, labels: str, settings: dict[str, Any], expected: str
) -> None:
    write_study(tmp_path)
    rows = [f"p{number},s{number},{label}" for number, label in enumerate(labels)]
    assert expected in problems(write_table(tmp_path, "case,slide,label", *rows), **settings)


def test_settings_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(RecipeError, match="twice"):
        Classification(classes=("a", "a"))
    with pytest.raises(RecipeError, match="error or skip"):
        CohortConfig(missing="ignore")  # type: ignore[arg-type]


# Fixed splits


def test_a_split_column_is_kept_and_its_validation_drawn(tmp_path: Path) -> None:
    _, folds = read(
        write_split(tmp_path, HALVES), SplitConfig(kind="fixed", validation=0.5, repeats=4)
    )
    assert {fold.test for fold in folds} == {("s4", "s5", "s6", "s7")}
    assert all(len(fold.train) == len(fold.validation) == 2 for fold in folds)
    assert len({fold.validation for fold in folds}) > 1


def test_columns_of_patho_bench_are_folds(tmp_path: Path) -> None:
    write_study(tmp_path)
    rows = [
        f"p{n},s{n},{n % 2},{'train' if n < 4 else 'test'},{'test' if n < 4 else 'train'}"
        for n in range(8)
    ]
    table = write_table(tmp_path, "case_id,slide_id,label,fold_1,fold_0", *rows)
    _, folds = read(table, FIXED)
    assert [fold.test[0] for fold in folds] == ["s0", "s4"]


def test_split_files_of_clam_are_read_in_order(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    for number, test in (10, "s4"), (2, "s2"):
        text = f",train,val,test\n0,s0,s6,{test}\n1,s1.svs,s7,s5\n2,s3,,\n"
        (tmp_path / f"splits_{number}.csv").write_text(text)
    for name in "splits_2_bool.csv", "splits_2_descriptor.csv":
        (tmp_path / name).write_text(",train,val,test\ns0,True,False,False\n")
    _, folds = read(table, SplitConfig(kind="fixed", files=str(tmp_path)))
    assert [(f.train, f.validation, f.test) for f in folds] == [
        (("s0", "s1", "s3"), ("s6", "s7"), ("s2", "s5")),
        (("s0", "s1", "s3"), ("s6", "s7"), ("s4", "s5")),
    ]
    assert read(table, SplitConfig(kind="fixed", files="splits_10.csv"))[1][0].test == ("s4", "s5")


def test_a_slide_that_a_split_file_lists_twice_counts_once(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    (tmp_path / "splits_0.csv").write_text("train,val,test\ns0,s2,s4\ns1,s3,s5\ns1,s3,s5\n")
    _, (fold,) = read(table, SplitConfig(kind="fixed", files="splits_0.csv"))
    assert (fold.train, fold.validation, fold.test) == (("s0", "s1"), ("s2", "s3"), ("s4", "s5"))


def test_a_skipped_slide_may_be_in_a_split(tmp_path: Path) -> None:
    table = write_split(tmp_path, HALVES)
    (tmp_path / "bags" / "s6.npy").unlink()
    _, (fold,) = read(table, FIXED, missing="skip")
    assert fold.test == ("s4", "s5", "s7")


def test_an_unused_split_has_a_note(tmp_path: Path) -> None:
    cohort, _ = read(write_split(tmp_path, HALVES), TWO_FOLDS)
    assert 'not used (1): split. Set [splits] kind = "fixed"' in cohort.notes[0]


@pytest.mark.parametrize("kind", ["fixed", "kfold"])
def test_a_patient_column_that_repeats_the_label_has_advice_that_helps(
    tmp_path: Path, kind: Any
) -> None:
    table = write_split(tmp_path, HALVES)
    lines = [line.split(",") for line in table.read_text().splitlines()]
    patients = {"a": "patient_0", "b": "patient_1", "label": "case_id"}
    write_table(tmp_path, *(",".join([patients[row[2]], *row[1:]]) for row in lines))
    splits = SplitConfig(kind=kind, folds=2, validation=0)
    text = problems(table, splits)
    assert "case_id does not name patients" in text
    assert "(patient_0, patient_1)" in text
    assert "Patients in test" not in text
    assert "too few patients" not in text
    # What it advises.
    found, folds = read(table, splits, slide="slide_id", patient="slide_id")
    assert found.patients == {f"s{n}": f"s{n}" for n in range(len(found))}
    assert folds
    write_table(tmp_path, *(",".join(row[1:]) for row in lines))
    assert read(table, splits)[1] == folds


def test_two_patients_of_two_classes_can_be_predicted(tmp_path: Path) -> None:
    write_study(tmp_path)
    table = write_table(tmp_path, "patient,slide,label", "p,s0,a", "p,s1,a", "q,s2,b")
    assert read(table)[0].patients == {"s0": "p", "s1": "p", "s2": "q"}


def test_a_patient_in_train_and_test_is_a_leak_unless_allowed(tmp_path: Path) -> None:
    table = write_split(tmp_path, HALVES)
    table.write_text(table.read_text().replace("p4,", "p0,"))
    assert "Patients in test and in another part (1): p0 (split)." in problems(table, FIXED)
    allowed = SplitConfig(kind="fixed", validation=0.5, allow_shared_patients=True)
    assert "Patients in test and in another part (1): p0" in read(table, allowed)[0].notes[0]


def test_a_patient_in_train_and_validation_is_noted(tmp_path: Path) -> None:
    table = write_split(tmp_path, ["train"] * 4 + ["val"] * 2 + ["test"] * 2)
    table.write_text(table.read_text().replace("p4,", "p0,"))
    cohort, _ = read(table, SplitConfig(kind="fixed", repeats=5))
    assert "Patients in train and validation (1): p0 (split)." in cohort.notes[0]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["train"] * 8, "Empty parts (1): test (split)."),
        (
            ["train", "hold-out"] + ["test"] * 6,
            "other than train, val and test (1): hold-out (split).",
        ),
        (["train", "", "train"] + ["test"] * 5, "Classes missing from train (1): b (split)."),
        (["train"] * 3 + ["test"] * 5, "none left for validation (1): b (split)."),
    ],
)
def test_gaps_in_a_split_are_found(tmp_path: Path, parts: list[str], expected: str) -> None:
    assert expected in problems(write_split(tmp_path, parts), FIXED)


def test_split_files_that_do_not_fit_the_table_are_refused(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    (tmp_path / "splits_0.csv").write_text(",train,val,test\n0,s0,s2,s4\n1,s1,s3,s1\n2,zz,,s5\n")
    text = problems(table, SplitConfig(kind="fixed", files="splits_0.csv"))
    assert "not in the table (1): zz (splits_0.csv)." in text
    assert "in two parts of a split (1): s1 (splits_0.csv)." in text


def test_a_fixed_split_must_be_in_the_table_or_in_files(tmp_path: Path) -> None:
    table = write_study(tmp_path)
    assert "Add a column split" in problems(table, FIXED)
    assert "no splits_0.csv" in problems(table, SplitConfig(kind="fixed", files="nowhere"))


def test_slides_in_no_part_are_noted(tmp_path: Path) -> None:
    cohort, (fold,) = read(write_split(tmp_path, [*HALVES, ""]), FIXED)
    assert "Slides in no part of a split (1): s8 (split)." in cohort.notes[0]
    assert "s8" not in {*fold.train, *fold.validation, *fold.test}


def test_h5_bags_of_trident_have_their_encoder_and_scale(tmp_path: Path) -> None:
    (tmp_path / "bags").mkdir()
    with h5py.File(tmp_path / "bags" / "s0.h5", "w") as file:
        file["features"] = np.ones((2, 4), dtype=np.float32)
        file["coords"] = np.array([[0, 0], [512, 0]])
        file["features"].attrs.update(encoder="uni_v1", savetodir="x")
        file["coords"].attrs.update(patch_size=256, patch_size_level0=512, target_magnification=20)
    cohort, _ = read(write_table(tmp_path, "slide,label", "s0,a"))
    assert (cohort.first_known("encoder"), cohort.mpp, cohort.in_dim) == ("uni_v1", 0.5, 4)
