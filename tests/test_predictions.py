"""Tables of predictions: round trips to disk, tables of other programs, and scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caprmil.errors import CaprmilError, CohortError
from caprmil.evaluation.predictions import Predictions
from caprmil.evaluation.score_summary import summary
from caprmil.targets import Classification
from caprmil.targets.classification_metrics import ace_floor
from caprmil.targets.metric import bootstrap


def cohort(folds: int = 3, per_fold: int = 20, classes: int = 2, seed: int = 0) -> Predictions:
    """Two slides for each patient, with labels drawn from their probabilities."""
    rng = np.random.default_rng(seed)
    n = folds * per_fold
    probabilities = rng.dirichlet([0.5] * classes, n)
    cumulative = probabilities.cumsum(axis=1)[:, :-1]
    return Predictions(
        slides=tuple(f"{k:03}" for k in range(n)),
        target=Classification(classes=("normal", "tumour", "other")[:classes]),
        answers=probabilities,
        labels=(rng.random((n, 1)) >= cumulative).sum(axis=1),
        patients=tuple(f"p{k // 2}" for k in range(n)),
        folds=tuple(str(k // per_fold) for k in range(n)),
        extra={"seen_in_training": ("no",) * n, "spread": tuple(f"0.{k}" for k in range(n))},
    )


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "preds.csv"
    path.write_text(text, encoding="utf-8")
    return path


def fields(predictions: Predictions) -> dict[str, Any]:
    """All content of a table, in a form that can be compared."""
    labels, probabilities = predictions.labels, predictions.answers
    return {
        **vars(predictions),
        "labels": None if labels is None else labels.tolist(),
        "answers": probabilities.tolist(),
        "order of extras": list(predictions.extra),
    }


def test_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    before = cohort(classes=3)
    assert fields(Predictions.read(before.write(tmp_path / "a.csv"))) == fields(before)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(
    lambda name: name == name.strip()
)


@settings(deadline=None, max_examples=60)
@given(
    slides=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    classes=st.lists(NAMES, min_size=2, max_size=3, unique_by=str.lower),
    numbers=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    known=st.booleans(),
)
def test_any_names_and_numbers_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    slides: list[str],
    classes: list[str],
    numbers: list[float],
    known: bool,
) -> None:
    probabilities = np.zeros((len(slides), len(classes)))
    probabilities[:, 0] = numbers[: len(slides)]
    probabilities[:, 1] = 1 - probabilities[:, 0]
    before = Predictions(
        slides=tuple(slides),
        target=Classification(classes=tuple(classes)),
        answers=probabilities,
        labels=np.array([1, -1, 0, 1])[: len(slides)] if known else None,
        patients=tuple(reversed(slides)) if known else None,
    )
    path = before.write(tmp_path_factory.mktemp("any") / "a.csv")
    assert fields(Predictions.read(path, allow_unlabelled=True)) == fields(before)


def test_separators_in_names_do_not_break_the_columns(tmp_path: Path) -> None:
    before = Predictions(
        slides=('a,"b"\n;',),
        target=Classification(classes=(";;;;;;;;", "\t,")),
        answers=np.array([[0.1, 0.9]]),
    )
    after = Predictions.read(before.write(tmp_path / "a.csv"))
    assert (after.slides, after.target.classes) == (('a,"b"\n;',), (";;;;;;;;", "\t,"))


def test_the_columns_have_a_fixed_order(tmp_path: Path) -> None:
    lines = cohort().write(tmp_path / "a.csv").read_text().splitlines()
    head = "slide,patient,fold,label,predicted,prob_normal,prob_tumour,seen_in_training,spread"
    assert lines[0] == head
    assert lines[1].startswith("000,p0,0,")


def test_a_table_without_labels_patients_or_folds_survives(tmp_path: Path) -> None:
    before = Predictions(
        slides=("a",), target=Classification(classes=("n", "y")), answers=np.array([[0.1, 0.9]])
    )
    after = Predictions.read(before.write(tmp_path / "deep" / "a.csv"))
    assert (after.labels, after.patients, after.folds) == (None, None, None)


def test_writing_never_overwrites(tmp_path: Path) -> None:
    path = table(tmp_path, "mine")
    with pytest.raises(CaprmilError, match="already exists"):
        cohort().write(path)
    assert path.read_text() == "mine"


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictions, "to_frame", lambda self: None)
    with pytest.raises(AttributeError, match="to_csv"):
        cohort().write(tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "slide,label,prob_0,prob_1\n007,1,0.25,0.75\n",
        "Slide_ID,Y,Y_hat,p_0,p_1\n007,1.0,1.0,0.25,0.75\n",  # CLAM
        "filename;y_true;probability_0;probability_1\n007;1;.25;.75\n",
        "\ufeffimage\ttarget\tscore\n007\t1\t0.75\n",
        "slide, truth, Probability\r\n007, 1, 0.75\r\n",
        '"slide","label","prob"\n\n"007","1","0.75"\n\n',
    ],
)
def test_tables_of_other_programs_are_read(tmp_path: Path, text: str) -> None:
    read = Predictions.read(table(tmp_path, text))
    assert (read.slides, read.target.classes, read.extra) == (("007",), ("0", "1"), {})
    assert read.labels is not None
    assert read.labels.tolist() == [1]
    assert read.answers.tolist() == [[0.25, 0.75]]


STAMP = "PATIENT,isMSIH,pred,isMSIH_MSIH,isMSIH_nonMSIH,loss\n01,MSIH,MSIH,0.7,0.3,0.36\n"


@pytest.mark.parametrize("label", [None, "isMSIH"])
def test_predictions_of_stamp_are_read(tmp_path: Path, label: str | None) -> None:
    read = Predictions.read(table(tmp_path, STAMP), label=label)
    assert read.target.classes == ("MSIH", "nonMSIH")
    assert read.slides == read.patients == ("01",)
    assert read.labels is not None
    assert read.labels.tolist() == [0]
    assert read.extra == {"loss": ("0.36",)}


def test_the_label_column_can_be_named(tmp_path: Path) -> None:
    path = table(tmp_path, "slide,label,grade,prob_a,prob_b\ns,?,b,0.5,0.5\n")
    read = Predictions.read(path, label="grade")
    assert read.labels is not None
    assert read.labels.tolist() == [1]
    assert read.extra == {"original_label": ("?",)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ("slide,label,score\n", "has no rows"),
        ("slide,label\na,1\n", "needs a column prob_<class> .* Its columns are slide, label"),
        ("name,label,score\na,1,0.5\n", "needs a column slide or patient.* name, label, score"),
        ("slide,slide,score\na,1,0.5\n", "2 columns called 'slide'"),
        ("slide,label,score\na,1,0.5\nb,,0.5\n", "line 3: the label is missing"),
        ("slide,label,score\na,tumour,0.5\n", "line 2: label 'tumour' is none of the classes 0, 1"),
        ("slide,label,score\na,1,0.5\nb,1,high\n", "line 3: score is 'high', not a number"),
        ("slide,label,score\n\n\na,1,\n", "line 4: score is '', not a number"),
        ("slide,label,score\na,1,1.7\n", "line 2: .* between 0 and 1"),
        ("slide,label,p_0,p_1\na,1,.5,.5\nb,1,.5,.6\n", "line 3: 0.5, 0.6 .* sum to 1"),
        ("slide,label,p_0,p_1\na,1,.5,nan\n", "line 2: 0.5, nan"),
        ("slide,label,score\na,1\n", "line 2: 2 cells, but 3 columns"),
        ("slide,label,score\n,1,0.5\n", "line 2: the slide is missing"),
        ("slide,label,score\na,1,0.5\na,1,0.5\n", "preds.csv: Slide 'a' has 2 rows"),
        ("slide,fold,label,score\na,x,1,0.5\na,x,1,0.5\n", "Slide 'a' of fold 'x' has 2 rows"),
    ],
)
def test_an_error_in_a_table_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(CohortError, match=words) as caught:
        Predictions.read(table(tmp_path, text))
    assert "preds.csv" in str(caught.value)


def test_a_class_column_with_probabilities_may_be_the_predicted_class(tmp_path: Path) -> None:
    read = Predictions.read(table(tmp_path, "slide,class,prob_a,prob_b\ns,b,0.5,0.5\n"))
    assert (read.labels, read.extra) == (None, {"class": ("b",)})


def test_a_missing_file_and_a_binary_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CohortError, match="no file"):
        Predictions.read(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_bytes(b"slide,label\n\xff\xfe")
    with pytest.raises(CohortError, match=r"b\.csv is not a table in UTF-8"):
        Predictions.read(tmp_path / "b.csv")


def test_a_missing_label_column_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CohortError, match="Did you mean 'isMSIH'"):
        Predictions.read(table(tmp_path, STAMP), label="isMSI")


@pytest.mark.parametrize(
    "change",
    [
        {"answers": np.full((1, 3), 1 / 3)},
        {"patients": ("p", "q")},
        {"labels": np.array([2])},
        {"labels": np.array([0, 1])},
        {"extra": {"fold": ("1",)}},
        {"extra": {"prob_max": ("1",)}},
        {"extra": {"note": ()}},
    ],
)
def test_an_inconsistent_table_is_refused(change: dict[str, Any]) -> None:
    valid: dict[str, Any] = {
        "slides": ("s",),
        "target": Classification(classes=("a", "b")),
        "answers": np.array([[0.5, 0.5]]),
    }
    Predictions(**valid)
    with pytest.raises(ValueError, match="="):
        Predictions(**(valid | change))


def test_concatenated_folds_are_the_table() -> None:
    whole = cohort()
    assert fields(Predictions.concatenate(list(whole.by_fold().values()))) == fields(whole)


def test_slides_without_labels_can_be_concatenated_with_others() -> None:
    first, second = list(cohort().by_fold().values())[:2]
    bare = Predictions(**{**vars(second), "labels": None})
    joined = Predictions.concatenate([first, bare])
    assert joined.labels is not None
    assert joined.labels[len(first) :].tolist() == [-1] * len(second)
    assert joined.scores() == first.scores()


def test_tables_of_other_classes_are_not_concatenated() -> None:
    with pytest.raises(CohortError, match="cannot be joined"):
        Predictions.concatenate([cohort(), cohort(classes=3)])


def test_scores_are_those_of_the_metrics() -> None:
    whole = cohort()
    assert whole.labels is not None
    assert whole.scores() == whole.target.score(whole.labels, whole.answers)
    fold = slice(20, 40)
    expected = whole.target.score(whole.labels[fold], whole.answers[fold])
    assert whole.fold_scores()["1"] == expected


def test_slides_without_a_label_are_not_scored_and_there_is_a_note() -> None:
    whole = cohort()
    assert whole.labels is not None
    labels = np.where(np.arange(60) < 40, whole.labels, -1)
    partly = Predictions(**{**vars(whole), "labels": labels})
    assert partly.scores() == whole.take(range(40)).scores()
    assert list(partly.fold_scores()) == ["0", "1"]
    assert "20 of 60 rows have no label" in summary(partly, draws=5).as_markdown()


def test_scoring_without_any_label_is_refused() -> None:
    with pytest.raises(CohortError, match="No slide has a label"):
        Predictions(**{**vars(cohort()), "labels": None}).scores()


def test_intervals_are_by_patient_and_by_slide_without_patients() -> None:
    whole = cohort()
    assert whole.labels is not None
    alone = Predictions(**{**vars(whole), "patients": None})
    for part, units in ((whole, whole.patients), (alone, whole.slides)):
        assert units is not None
        expected = bootstrap(
            whole.labels, whole.answers, units, whole.target.metrics.values(), draws=50
        )
        assert part.intervals(draws=50) == expected


def test_a_summary_has_folds_and_pooled_scores() -> None:
    # Each fold is ranked perfectly, but the second has another scale: pooled, they mix.
    positive = np.array([0.1, 0.2, 0.6, 0.7])
    whole = Predictions(
        slides=tuple("abcd"),
        target=Classification(classes=("n", "y")),
        answers=np.stack([1 - positive, positive], axis=1),
        labels=np.array([0, 1, 0, 1]),
        folds=("1", "1", "2", "2"),
    )
    found = summary(whole, draws=20)
    assert found.metrics["auc"].mean_over_folds == 1
    assert found.metrics["auc"].all_slides_pooled == 0.75
    row = found.as_rows()[0]
    assert list(row) == [
        "metric",
        "mean over folds",
        "std over folds",
        "folds counted",
        "all slides pooled",
        "95 % interval by slide",
    ]
    assert (row["mean over folds"], row["all slides pooled"]) == ("1.000", "0.750")


def test_a_summary_counts_slides_patients_and_folds() -> None:
    found = summary(cohort(), draws=20)
    assert (found.slides, found.patients, len(found.folds)) == (60, 30, 3)
    assert found.as_markdown().startswith("60 slides, 30 patients, 3 folds.\n")
    assert "95 % interval by patient" in found.as_rows()[0]


def test_a_summary_without_folds_has_no_columns_for_them() -> None:
    found = summary(Predictions(**{**vars(cohort()), "folds": None}), draws=20)
    assert not any("over folds" in column for column in found.as_rows()[0])
    assert found.more["ace_floor_on_a_fold"] is None


def test_calibration_is_given_with_its_floor_and_without_an_interval() -> None:
    whole = cohort()
    found = summary(whole, draws=20)
    assert found.metrics["ace"].interval is None
    assert found.more["ace_floor_pooled"] == ace_floor(whole.answers)
    # A fold is smaller than the table, so chance has a larger effect.
    assert found.more["ace_floor_on_a_fold"] is not None
    assert found.more["ace_floor_on_a_fold"][0] > found.more["ace_floor_pooled"][0]
    assert found.as_markdown().count("perfectly calibrated") == 2


def test_a_slide_in_several_folds_counts_once_as_a_slide() -> None:
    first = cohort(folds=1)
    again = Predictions(**{**vars(first), "folds": ("again",) * len(first)})
    found = summary(Predictions.concatenate([first, again]), draws=20)
    assert found.slides == len(first)
    assert found.more["ace_floor_pooled"] is None
    assert any("over 40 answers" in note for note in found.notes)


@pytest.mark.parametrize(("classes", "words"), [(2, "it has no AUC"), (3, "mean of the others")])
def test_a_fold_that_lacks_a_class_is_named(classes: int, words: str) -> None:
    whole = cohort(classes=classes)
    assert whole.labels is not None
    codes = np.array(whole.labels)
    codes[:20][codes[:20] == classes - 1] = 0
    found = summary(Predictions(**{**vars(whole), "labels": codes}), draws=20)
    assert any(note.startswith("Fold 0 has no slide of") and words in note for note in found.notes)
    assert found.metrics["auc"].folds_counted == classes


def test_a_summary_with_nan_is_valid_json() -> None:
    found = summary(cohort(folds=1), draws=20).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["metrics"]["auc"]["std_over_folds"] is None
    assert len(found["metrics"]["auc"]["interval"]) == 2


def test_rows_of_the_training_part_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("slide,label,probability,split\na,0,0.2,test\nb,1,0.9,train\n")
    with pytest.raises(CohortError, match="rows of train in column split"):
        Predictions.read(path)
