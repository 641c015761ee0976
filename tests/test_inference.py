"""Prediction of slides: they are encoded with the settings of the run."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from caprmil import encoders
from caprmil.cli import app
from caprmil.cohort.folds import SplitConfig
from caprmil.errors import BagError, EncoderError, RunError, SlideError
from caprmil.features import bags
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.io.json_files import as_json, read_json
from caprmil.runs.bag_checks import check_bag
from caprmil.runs.input_bags import bags_of, for_run
from caprmil.runs.run import FACTS, Run
from caprmil.slides.slide import find_slides
from caprmil.synthetic import Section
from caprmil.training.cross_validation import cross_validate
from caprmil.training.recipe import ModelConfig, Recipe
from caprmil.training.train_config import TrainConfig


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small slides, encoded and trained on: folders slides, features and run."""
    folder = tmp_path_factory.mktemp("study")
    lines = ["slide,label"]
    for number in range(12):
        section = Section(seed=number, width=700, height=700, mpp=1.0, tumour=0.3 * (number % 2))
        section.write(folder / "slides" / f"s{number:02d}.tiff")
        lines.append(f"s{number:02d},{number % 2}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    encoder = encoders.load("lite0")
    job = Extraction(out=folder / "features", encoder=encoder, config=configure(encoder.card))
    job.run(find_slides([folder / "slides"]))
    recipe = Recipe(
        cohort=str(folder / "labels.csv"),
        features=str(folder / "features"),
        model=ModelConfig(name="mean"),
        splits=SplitConfig(folds=2, validation=0.34),
        train=TrainConfig(epochs=2, warmup_epochs=1),
    )
    cross_validate(recipe, folder / "run", device="cpu", progress=False)
    return folder


@pytest.fixture
def run(study: Path) -> Run:
    return Run(study / "run")


def changed(run: Run, **facts: object) -> Run:
    run.facts = replace(run.facts, **facts)  # type: ignore[arg-type]
    return run


def test_a_run_has_the_settings_of_its_bags(run: Run) -> None:
    job = for_run(run, Path("anywhere"))
    assert job.encoder is not None
    assert (job.encoder.name, job.encoder.fingerprint) == ("lite0", run.facts.fingerprint)
    assert (job.config.patches.px, job.config.patches.mpp) == (224, 1.0)


def test_a_slide_gives_the_bag_that_it_was_trained_on(
    study: Path, run: Run, tmp_path: Path
) -> None:
    found, failed = bags_of(run, [study / "slides" / "s03.tiff"], tmp_path)
    again, before = bags.read(found["s03"]), bags.read(study / "features" / "s03.h5")
    assert failed == []
    np.testing.assert_array_equal(again.coords, before.coords)
    np.testing.assert_allclose(again.features, before.features, atol=2e-3)
    assert again.info.settings == before.info.settings


def test_one_command_predicts_a_slide_from_its_pixels(study: Path, tmp_path: Path) -> None:
    new = Section(seed=99, width=700, height=700, mpp=1.0, tumour=0.3).write(tmp_path / "new.tiff")
    answers = tmp_path / "answers.csv"
    command = ["predict", str(study / "run"), str(new)]
    result = CliRunner().invoke(app, [*command, "--out", str(answers), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "new" in result.output
    assert answers.read_text().startswith("slide,")
    assert CliRunner().invoke(app, [*command, "--device", "cpu"]).exit_code == 0  # only prints


def test_slides_and_bags_are_predicted_together_and_broken_ones_are_named(
    study: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.tiff"
    broken.write_bytes(b"nothing of the kind")
    inputs = [str(study / "features" / "s00.h5"), str(study / "slides" / "s01.tiff"), str(broken)]
    out = ["--out", str(tmp_path / "answers.csv"), "--features", str(tmp_path / "kept")]
    result = CliRunner().invoke(app, ["predict", str(study / "run"), *inputs, *out])
    assert result.exit_code == 2
    assert "failed: broken:" in result.output
    assert "2 slides predicted" in result.output
    assert (tmp_path / "kept" / "s01.h5").exists()


def test_other_weights_of_the_encoder_are_refused_before_any_work(run: Run, tmp_path: Path) -> None:
    changed(run, fingerprint="0" * 64)
    with pytest.raises(EncoderError, match=r"not those that .* was trained with.*--weights"):
        for_run(run, tmp_path)
    assert for_run(run, tmp_path, force=True).encoder is not None


def test_a_bag_of_other_weights_is_refused(run: Run, study: Path) -> None:
    info = bags.inspect(study / "features" / "s00.h5")
    check_bag(run, "s00", info)
    with pytest.raises(BagError, match="other weights or another transform"):
        check_bag(run, "s00", replace(info, fingerprint="0" * 64))


def test_bags_without_encoder_and_scale_are_an_error(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Encode the slides in the same way"):
        for_run(changed(run, encoder=None), tmp_path)


def test_scale_and_size_are_enough_if_there_are_no_settings(run: Run, tmp_path: Path) -> None:
    foreign = changed(run, settings=None, fingerprint=None, scale_rule="nominal", mpp=0.5)
    patches = for_run(foreign, tmp_path).config.patches
    assert (patches.px, patches.mpp, patches.scale_rule) == (224, 0.5, "nominal")


def test_a_slide_is_not_encoded_if_its_bag_is_passed_too(
    run: Run, study: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(study / "slides", mixed)
    shutil.copy(study / "features" / "s00.h5", mixed)
    for file in list(mixed.glob("*.tiff"))[2:]:
        file.unlink()
    found, _ = bags_of(run, [mixed], tmp_path / "out")
    assert found["s00"] == mixed / "s00.h5"
    assert {path.stem for path in mixed.iterdir()} == found.keys()


def test_custom_code_of_a_run_runs_only_if_allowed(run: Run, tmp_path: Path) -> None:
    changed(run, encoder="antigravity:encode", fingerprint=None)
    with pytest.raises(EncoderError, match="--trust-remote-code"):
        for_run(run, tmp_path)


def test_a_run_on_annotated_regions_needs_force_without_them(run: Run, tmp_path: Path) -> None:
    drawn = f'regions = "abc"\n{run.facts.settings}'
    with pytest.raises(RunError, match="are from annotated regions"):
        for_run(changed(run, settings=drawn), tmp_path)
    assert for_run(run, tmp_path, force=True).regions is None


def test_a_run_of_another_method_version_is_an_error(run: Run, tmp_path: Path) -> None:
    later = str(run.facts.settings).replace("version = 1", "version = 2")
    with pytest.raises(RunError, match="made by method 2"):
        for_run(changed(run, settings=later), tmp_path)
    with pytest.raises(RunError, match="of another caprmil"):
        for_run(changed(run, settings="colour = 3"), tmp_path)


def test_predicting_only_slides_without_tissue_is_an_error(run: Run, tmp_path: Path) -> None:
    import pyvips

    blank = tmp_path / "blank.png"
    noise = np.random.default_rng(0).normal(240, 2, (600, 600, 3)).astype(np.uint8)
    pyvips.Image.new_from_array(noise).pngsave(str(blank))
    with pytest.raises(SlideError, match="No tissue was found"):
        bags_of(run, [blank], tmp_path / "out", mpp=1.0)


def test_runs_without_this_metadata_still_open(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(study / "run", folder)
    facts = read_json(folder / FACTS)
    for name in ("fingerprint", "patch_px", "scale_rule", "settings"):
        del facts[name]
    (folder / FACTS).write_text(as_json(facts))
    assert Run(folder).facts.settings is None
