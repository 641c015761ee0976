"""Runs: opening, predicting bags like those of the training, and scoring unseen slides only."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from caprmil.errors import BagError, RunError, UnknownNameError
from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.features.batches import Sample
from caprmil.io.json_files import as_json, read_json
from caprmil.models.device import pick_device
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.external_cohort import check_unseen
from caprmil.runs.inference import predict_samples
from caprmil.runs.run import FACTS, SCORES, SPLITS, Run
from caprmil.synthetic import RareSignal

SAME_KIND = BagInfo(path=None, kind="caprmil", n_patches=9, width=64, dtype="float16")
SAME_KIND = replace(SAME_KIND, encoder="synthetic", mpp=1.0)


@pytest.fixture
def new_bag(tmp_path: Path) -> Path:
    """A bag that no fold has seen."""
    features = RareSignal(width=64, patches=(40, 80)).bag(777)[0]
    return bags.write(tmp_path / "new_bag.h5", features, encoder="synthetic", mpp=1.0)


@pytest.fixture
def copy(tiny_run: Run, tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed."""
    return Path(shutil.copytree(tiny_run.folder, tmp_path / "copy"))


def own_paths(run: Run) -> dict[str, Path]:
    return {slide: Path(path) for slide, path in run.paths.items()}


# Opening


def test_a_run_has_the_metadata_of_its_training(tiny_run: Run) -> None:
    facts = tiny_run.facts
    assert (facts.model, facts.in_dim, facts.encoder, facts.mpp) == ("caprmil", 64, "synthetic", 1)
    assert facts.target["classes"] == ["normal", "tumour"]
    assert facts.versions["torch"] == torch.__version__
    assert tiny_run.finished
    assert "3 folds" in repr(tiny_run)


@pytest.mark.parametrize("name", ["nowhere", "empty", "a_file"])
def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").touch()
    with pytest.raises(RunError, match=r"is not a run: there is no run\.json"):
        Run(tmp_path / name)


def test_a_prediction_of_a_new_bag_loads_only_what_it_needs(tiny_run: Run, new_bag: Path) -> None:
    code = """
import sys
from caprmil.cli import run
try:
    run(sys.argv[1:])
except SystemExit as end:
    assert not end.code
heavy = "lightning sklearn matplotlib scipy pandas torch._dynamo sympy PIL openslide"
print("loaded:", *(name for name in heavy.split() if name in sys.modules))
"""
    process = [sys.executable, "-c", code, "predict", str(tiny_run.folder), str(new_bag)]
    done = subprocess.run(process, capture_output=True, text=True, check=True)
    assert "1 slide predicted" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]


@pytest.mark.parametrize("name", [FACTS, SPLITS])
@pytest.mark.parametrize("text", ["{", "[]", "3", "{}", '{"target": 3}', "\udcff"])
def test_a_damaged_run_is_an_error(copy: Path, name: str, text: str) -> None:
    (copy / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(RunError, match="damaged"):
        Run(copy)


@pytest.mark.parametrize("temperature", ["0", "-1", "1e999", '"warm"', "[]", "NaN"])
def test_a_temperature_that_is_not_positive_is_an_error(copy: Path, temperature: str) -> None:
    (copy / "calibration.json").write_text(f'{{"temperatures": {{"fold-0": {temperature}}}}}')
    with pytest.raises(
        RunError, match=r"calibration\.json is damaged .* Delete the file, then: caprmil calibrate"
    ):
        _ = Run(copy).temperatures


@pytest.mark.parametrize("text", ["", "{", "3", '{"temperatures": [1]}', "[" * 100_000])
def test_a_damaged_calibration_is_an_error(copy: Path, text: str) -> None:
    (copy / "calibration.json").write_text(text)
    with pytest.raises(RunError, match=r"calibration\.json is damaged"):
        _ = Run(copy).temperatures


@pytest.mark.parametrize("text", ["{", "{}", '{"target": 3}', '{"target": {"kind": "x"}}'])
def test_a_damaged_fold_is_an_error(copy: Path, text: str) -> None:
    (copy / "folds" / "fold-0" / "fold.json").write_text(text)
    with pytest.raises(RunError, match=r"fold\.json is damaged .* Train the run again"):
        Run(copy).trained("fold-0")


def test_a_run_of_another_format_is_refused_with_both_versions(copy: Path) -> None:
    facts = read_json(copy / FACTS) | {"version": "0.1.0"}
    del facts["format"]
    (copy / FACTS).write_text(as_json(facts), encoding="utf-8")
    with pytest.raises(
        RunError, match=rf"caprmil 0\.1\.0 in run format 1; .* {version('caprmil')}, .* 2"
    ):
        Run(copy)


def test_an_unfinished_run_lists_what_is_missing(copy: Path) -> None:
    (copy / SCORES).unlink()
    with pytest.raises(RunError, match="still to do: the scores"):
        _ = Run(copy).predictions
    shutil.rmtree(copy / "folds" / "fold-1")
    with pytest.raises(RunError, match="still to do: fold-1"):
        _ = Run(copy).scores
    assert [fold.name for fold in Run(copy).done] == ["fold-0", "fold-2"]
    assert "unfinished" in repr(Run(copy))


def test_a_run_without_models_cannot_predict(copy: Path, new_bag: Path) -> None:
    shutil.rmtree(copy / "folds")
    with pytest.raises(RunError, match="no trained model yet"):
        Run(copy).predict({"new_bag": new_bag})


def test_an_unknown_fold_is_an_error_with_the_known_ones(tiny_run: Run) -> None:
    with pytest.raises(UnknownNameError, match="fold-0, fold-1, fold-2"):
        tiny_run.model("fold-7")


def test_unicode_names_survive(copy: Path) -> None:
    for name in (FACTS, SPLITS):
        text = (copy / name).read_text().replace("tumour", "Krebs-Geschwür")
        (copy / name).write_text(text, encoding="utf-8")
    assert "ü" in (copy / FACTS).read_text(encoding="utf-8")
    assert Run(copy).target.names == ("normal", "Krebs-Geschwür")


# Bags of another kind


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"width": 32}, "of 32 features, not 64 as the models"),
        ({"encoder": "uni"}, "encoder uni, not synthetic as .*--force"),
        ({"mpp": 0.5}, "0.5 um/px, not 1 as .*--force"),
    ],
)
def test_bags_of_another_encoder_width_or_scale_are_refused(
    tiny_run: Run, changes: dict, expected: str
) -> None:
    with pytest.raises(BagError, match=expected):
        check_bag(tiny_run, "s", replace(SAME_KIND, **changes))


@pytest.mark.parametrize(
    "changes", [{}, {"encoder": "Synthetic"}, {"mpp": 1.05}, {"mpp": None}, {"encoder": None}]
)
def test_bags_of_the_same_encoder_are_accepted(tiny_run: Run, changes: dict) -> None:
    check_bag(tiny_run, "s", replace(SAME_KIND, **changes))


def test_force_accepts_everything_but_another_width(tiny_run: Run) -> None:
    check_bag(tiny_run, "s", replace(SAME_KIND, encoder="uni", mpp=0.5), force=True)
    with pytest.raises(BagError, match="32 features"):
        check_bag(tiny_run, "s", replace(SAME_KIND, width=32), force=True)


def test_all_bags_are_checked_before_the_first_prediction(
    tiny_run: Run, tmp_path: Path, new_bag: Path
) -> None:
    narrow = bags.write(tmp_path / "narrow.h5", np.ones((5, 32)))
    with pytest.raises(BagError, match="narrow is of 32 features"):
        tiny_run.predict({"new_bag": new_bag, "narrow": narrow}, device="cpu")


# Predictions


def test_a_new_slide_is_predicted_by_the_mean_of_the_folds(tiny_run: Run, new_bag: Path) -> None:
    predicted = tiny_run.predict({"new": new_bag}, device="cpu")
    sample = [Sample("new", new_bag)]
    each = [predict_samples(tiny_run.trained(fold.name), sample)[0] for fold in tiny_run.splits]
    np.testing.assert_allclose(predicted.answers[0], np.mean(each, axis=0), rtol=1e-12)
    assert predicted.extra["models"] == ("3",)
    spread = np.std([row[predicted.answers[0].argmax()] for row in each], ddof=1)
    assert float(predicted.extra["spread"][0]) == pytest.approx(spread, abs=1e-4)


def test_a_single_fold_can_predict(tiny_run: Run, new_bag: Path) -> None:
    predicted = tiny_run.predict({"new": new_bag}, fold="fold-1", device="cpu")
    alone = predict_samples(tiny_run.trained("fold-1"), [Sample("new", new_bag)])
    np.testing.assert_array_equal(predicted.answers, alone)
    assert predicted.extra["models"] == ("1",)


def test_a_slide_of_the_cohort_is_predicted_as_in_cross_validation(tiny_run: Run) -> None:
    predicted = tiny_run.predict(own_paths(tiny_run), device="cpu")
    out_of_fold = tiny_run.predictions
    expected = dict(zip(out_of_fold.slides, out_of_fold.answers, strict=True))
    for slide, probabilities in zip(predicted.slides, predicted.answers, strict=True):
        np.testing.assert_allclose(probabilities, expected[slide], rtol=1e-6)
    assert set(predicted.extra["models"]) == {"1"}


def test_a_prediction_of_models_that_saw_the_slide_is_marked(tiny_run: Run) -> None:
    known = tiny_run.splits[0].train[0]
    predicted = tiny_run.predict({known: own_paths(tiny_run)[known]}, fold="fold-0", device="cpu")
    assert predicted.extra["models"] == ("1 (all saw it in training)",)


def extreme(folder: Path) -> Path:
    """Write a bag whose numbers are too large for a model."""
    return bags.write(folder / "extreme.h5", np.full((5, 64), 1e30), dtype="float32")


def test_a_bag_without_a_finite_answer_does_not_cost_the_others_theirs(
    tiny_run: Run, tmp_path: Path, new_bag: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(new_bag.read_bytes()[:1000])
    paths = {"extreme": extreme(tmp_path), "new": new_bag, "damaged": damaged}
    failed: dict[str, BagError] = {}
    predicted = tiny_run.predict(paths, device="cpu", failed=failed)
    alone = tiny_run.predict({"new": new_bag}, device="cpu")
    np.testing.assert_array_equal(predicted.answers, alone.answers)
    assert (predicted.slides, sorted(failed)) == (("new",), ["damaged", "extreme"])
    assert "features, which go up to 1e+30" in str(failed["extreme"])
    tiny_run.predict(paths, device="cpu")
    assert "extreme" in caplog.text
    with pytest.raises(BagError, match=r"None of these bags has an answer\. extreme"):
        tiny_run.predict({"extreme": paths["extreme"]}, device="cpu")


def test_a_slide_without_a_finite_answer_is_left_out_of_the_scores(
    tiny_run: Run, tmp_path: Path
) -> None:
    other = RareSignal(width=64, patches=(40, 80), seed=9)
    for number in (0, 1):
        bags.write(tmp_path / f"other_{number}.h5", other.bag(number)[0])
    extreme(tmp_path)
    table = tmp_path / "table.csv"
    table.write_text("slide,label\nother_0,normal\nextreme,tumour\nother_1,tumour\n")
    failed: dict[str, BagError] = {}
    predicted = tiny_run.evaluate(table, tmp_path, device="cpu", failed=failed)
    assert predicted.slides == ("other_0", "other_1") * 3
    assert list(failed) == ["extreme"]


# Other cohorts


def test_slides_and_patients_that_were_trained_on_are_not_scored(tiny_run: Run) -> None:
    check_unseen(tiny_run, {"other": "patient a"})
    with pytest.raises(RunError, match=r"trained on 1 of these slides.*slide_003"):
        check_unseen(tiny_run, {"other": "patient a", "slide_003": "patient b"})
    with pytest.raises(RunError, match=r"trained on 1 of these slides.*other"):
        check_unseen(tiny_run, {"other": "patient_003"})


def test_a_slide_that_was_only_tested_counts_as_unseen(copy: Path) -> None:
    splits = read_json(copy / SPLITS)
    for fold in splits["folds"]:
        for part in ("train", "validation"):
            fold[part] = [slide for slide in fold[part] if slide != "slide_003"]
    (copy / SPLITS).write_text(json.dumps(splits))
    check_unseen(Run(copy), {"slide_003": "patient_003"})


def test_every_model_predicts_another_cohort(tiny_run: Run, tmp_path: Path) -> None:
    other = RareSignal(width=64, patches=(40, 80), seed=9)
    for number in (0, 1):
        bags.write(tmp_path / f"other_{number}.h5", other.bag(number)[0])
    table = tmp_path / "table.csv"
    table.write_text("slide,label\nother_0,normal\nother_1,tumour\n")
    predicted = tiny_run.evaluate(table, tmp_path, device="cpu")
    assert len(predicted) == 6
    assert predicted.labels is not None
    assert predicted.labels.tolist() == [0, 1] * 3
    assert sorted(set(predicted.folds or ())) == ["fold-0", "fold-1", "fold-2"]


# Devices


@pytest.mark.parametrize("name", ["gpu", "", "cuda:", "meta", "cpu:1", "banana"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(RunError, match="A device is auto, cpu, cuda"):
        pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_device_is_refused_and_auto_is_the_cpu() -> None:
    with pytest.raises(RunError, match="There is no device 'cuda:1' here"):
        pick_device("cuda:1")
    assert pick_device("auto") == torch.device("cpu")
