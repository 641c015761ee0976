"""What is promised to the outside: names, light imports, README and docs that run as printed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import caprmil
from caprmil.synthetic import SlideCohort

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the README assumes: slides, a table, features and the recipes."""
    home = tmp_path_factory.mktemp("readme")
    SlideCohort(slides=12, width=700, height=700, tumour=0.3).write(home)
    encode = ["encode", "slides", "--out", "features"]
    subprocess.run([sys.executable, "-m", "caprmil", *encode], cwd=home, check=True)
    shutil.copytree(ROOT / "recipes", home / "recipes")
    return home


def test_every_public_name_is_there() -> None:
    for name in caprmil.__all__:
        assert getattr(caprmil, name).__module__.startswith("caprmil.")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = caprmil.nonsense


@pytest.mark.parametrize(
    "module",
    [
        *("features.bags", "cohort.cohort", "cohort.folds", "targets", "evaluation.predictions"),
        *("config", "cli", "figures", "slides.slide", "slides.tissue", "slides.patches"),
        *("slides.regions", "slides.qc", "encoders", "features.extract", "features.convert"),
    ],
)
def test_what_needs_no_torch_does_not_load_it(module: str) -> None:
    code = (
        f"import sys, caprmil.{module}; print('torch' in sys.modules, 'lightning' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]


def test_models_load_without_files_of_bags() -> None:
    code = "import sys, caprmil.models; print('h5py' in sys.modules, 'lightning' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]


def test_the_shell_tour_of_the_readme_runs(home: Path) -> None:
    (tour,) = blocks("README.md", "console")
    for line in tour.splitlines():
        name, *words = line.split()
        assert name == "caprmil"
        command = [sys.executable, "-m", "caprmil", *words]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (home / "answers.csv").read_text().count("\n") == 3
    assert (home / "runs/abmil/scores.md").exists()


@pytest.mark.parametrize("page", ["README.md", "docs/models.md", "docs/explain.md"])
def test_the_python_on_a_page_runs(page: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


def test_the_table_of_models_is_what_the_command_measures() -> None:
    from caprmil.experiments import cost

    rows = re.findall(
        r"^\| `(\S+)` \| ([\d,]+) \| ([\d.]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 12
    for name, parameters, gigaflops in rows:
        model = caprmil.create(name, in_dim=1024, n_outputs=2)
        assert f"{cost.parameters(model):,}" == parameters
        assert f"{cost.flops(model) / 1e9:.3f}" == gigaflops


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*.toml")))
def test_every_recipe_can_be_read_and_its_model_built(recipe: str) -> None:
    settings = caprmil.read_recipe(ROOT / "recipes" / recipe)
    assert settings.model.build(16, settings.target.example())


def test_the_papers_recipe_is_the_default() -> None:
    from caprmil import config

    spelt = caprmil.read_recipe(ROOT / "recipes/caprmil.toml")
    default = caprmil.Recipe(cohort="labels.csv", features="features")
    told = [line for line in config.differences(default, spelt) if not line.startswith("model.")]
    assert told == []
    built = [recipe.try_model().settings for recipe in (spelt, default)]
    assert built[0] == built[1]
