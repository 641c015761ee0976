"""Runs work from any working directory, and after they or their features were moved."""

import json
import shlex
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from caprmil import figures
from caprmil.cli import app
from caprmil.cohort.cohort import load_cohort
from caprmil.errors import CohortError, RunError
from caprmil.explain import locate_slide
from caprmil.features import bags
from caprmil.io.moved_files import find_moved
from caprmil.runs.run import Run
from caprmil.runs.splits import SPLITS
from caprmil.training.recipe import Recipe
from caprmil.training.run_folder import open_run

FIRST = "slide_000"


@pytest.fixture
def project(tiny_run: Run, tiny_cohort: Path, tmp_path: Path) -> Path:
    """A project with features and a run that has their absolute paths."""
    project = tmp_path / "project"
    shutil.copytree(tiny_cohort.parent / "features", project / "features")
    shutil.copytree(tiny_run.folder, project / "runs" / "first")
    set_paths(project / "runs" / "first", str(project / "features"))
    return project


def set_paths(run: Path, features: str) -> None:
    """Let a run name bags in this folder."""
    splits = json.loads((run / SPLITS).read_text())
    splits["paths"] = {name: f"{features}/{name}.h5" for name in splits["paths"]}
    (run / SPLITS).write_text(json.dumps(splits))


def test_a_run_has_absolute_paths_wherever_it_was_trained(
    tiny_recipe: Recipe, tiny_cohort: Path, tmp_path: Path
) -> None:
    with chdir(tiny_cohort.parent):
        recipe = replace(tiny_recipe, cohort=tiny_cohort.name, features="features")
        cohort, folds = load_cohort(recipe.cohort, recipe.features, None, recipe.splits)
        open_run(tmp_path, recipe, cohort, folds)
    stored = json.loads((tmp_path / SPLITS).read_text())["paths"]
    assert stored[FIRST] == str(tiny_cohort.parent / "features" / f"{FIRST}.h5")


def test_a_project_that_was_moved_as_a_whole_finds_its_bags(project: Path, tmp_path: Path) -> None:
    moved = project.rename(tmp_path / "elsewhere")
    run = Run(moved / "runs" / "first")
    assert run.bags[FIRST] == moved / "features" / f"{FIRST}.h5"
    assert len(run.bag_paths()) == len(run.paths)


def test_a_copy_of_a_run_alone_reads_the_bags_where_they_were(
    project: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(project / "runs" / "first", tmp_path / "far" / "away"))
    assert Run(copy).bags[FIRST] == project / "features" / f"{FIRST}.h5"


def test_a_folder_with_a_missing_bag_was_not_moved(project: Path, tmp_path: Path) -> None:
    """A folder of other features beside the run is not read instead."""
    kept = Path(shutil.copytree(project / "features", tmp_path / "kept" / "features"))
    set_paths(project / "runs" / "first", str(kept))
    names = sorted(Run(project / "runs" / "first").paths)
    (kept / f"{names[0]}.h5").unlink()
    paths = Run(project / "runs" / "first").paths
    assert paths == {name: str(kept / f"{name}.h5") for name in names}


def test_a_run_with_relative_paths_works_from_any_working_directory(
    project: Path, tmp_path: Path
) -> None:
    set_paths(project / "runs" / "first", "features")
    for folder in (project, tmp_path, project / "runs" / "first"):
        with chdir(folder):
            for name in (project / "runs" / "first", Path("runs/first")):
                if name.exists():
                    assert Run(name).bags[FIRST] == project / "features" / f"{FIRST}.h5"


def test_a_path_that_is_nowhere_stays_as_it_is(tmp_path: Path) -> None:
    paths = {"a": "/nowhere/a.h5", "b": "gone/b.h5", "c": "s3://lab/c.h5"}
    assert {name: str(path) for name, path in find_moved(paths, tmp_path).items()} == paths


def test_moved_bags_are_found_in_a_folder_that_is_named(project: Path, tmp_path: Path) -> None:
    (project / "features").rename(tmp_path / "new features")
    run = Run(project / "runs" / "first")
    with pytest.raises(RunError, match="--features FOLDER"):
        locate_slide(run, FIRST)
    with pytest.raises(RunError, match="are no longer where they were"):
        run.bag_paths()
    run.use_features(tmp_path / "new features")
    assert locate_slide(run, FIRST).bag == tmp_path / "new features" / f"{FIRST}.h5"


def test_a_folder_of_other_bags_is_refused(project: Path, tmp_path: Path) -> None:
    run = Run(project / "runs" / "first")
    bags.write(tmp_path / "others" / "x.h5", np.ones((3, 64), dtype=np.float32))
    with pytest.raises(RunError, match=r"bags of other slides \(x\), none of those of"):
        run.use_features(tmp_path / "others")
    with pytest.raises(CohortError, match="There is no file or folder"):
        run.use_features(tmp_path / "nowhere")


def test_commands_take_the_folder_of_moved_bags(project: Path, tmp_path: Path) -> None:
    (project / "features").rename(tmp_path / "moved")
    words = ["faithfulness", project / "runs" / "first", FIRST, "--features", tmp_path / "moved"]
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    assert (project / "runs" / "first" / "faithfulness" / "faithfulness.csv").exists()


def test_advice_after_moved_bags_has_the_option_that_it_needs(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "settle", lambda figure: None)
    monkeypatch.setattr(figures, "save", lambda figure, path, dpi: path.touch())
    (project / "features").rename(moved := tmp_path / "moved bags")
    run = project / "runs" / "first"
    words = ["explain", run, FIRST, "--features", moved, "--fold", "fold-0"]
    output = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False).stdout
    *_, report, view = output.splitlines()
    option = f"--features '{moved}'"
    assert report == f"As one HTML file: caprmil report {run} {FIRST} {option} --fold fold-0"
    assert view == f"In a viewer: caprmil view {run} {option}"
    result = CliRunner().invoke(app, shlex.split(report.partition(": caprmil ")[2]))
    lines = result.output.splitlines()
    assert f"All slides in a viewer: caprmil view {run} {option}" in lines
    assert "Open it in a browser." in lines
    assert f"Without pictures, because the slide file was not found: {FIRST}. If" in result.stderr


def test_slides_that_were_moved_with_their_bags_are_found(project: Path, tmp_path: Path) -> None:
    slide = project / "slides" / f"{FIRST}.svs"
    slide.parent.mkdir()
    slide.touch()
    (project / "features" / f"{FIRST}.h5").unlink()
    features = np.ones((3, 64), dtype=np.float32)
    bags.write(project / "features" / f"{FIRST}.h5", features, slide_path=str(slide))
    assert locate_slide(Run(project / "runs" / "first"), FIRST).pixels == slide
    moved = project.rename(tmp_path / "elsewhere")
    found = locate_slide(Run(moved / "runs" / "first"), FIRST)
    assert found.pixels == moved / "slides" / slide.name


def test_an_unfinished_run_resumes_after_its_bags_were_moved(
    tiny_recipe: Recipe, tiny_cohort: Path, tmp_path: Path
) -> None:
    features = Path(shutil.copytree(tiny_cohort.parent / "features", tmp_path / "f"))
    for folder in (tiny_cohort.parent / "features", features):
        cohort, folds = load_cohort(tiny_cohort, folder, None, tiny_recipe.splits)
        open_run(tmp_path / "run", tiny_recipe, cohort, folds)
    (features / f"{FIRST}.h5").unlink()
    bags.write(features / f"{FIRST}.h5", np.ones((3, 64)), encoder="synthetic", mpp=1.0)
    cohort, folds = load_cohort(tiny_cohort, features, None, tiny_recipe.splits)
    with pytest.raises(RunError, match="is not what this recipe gives now"):
        open_run(tmp_path / "run", tiny_recipe, cohort, folds)
