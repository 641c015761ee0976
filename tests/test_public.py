"""The public interface: names, light imports, and a README and docs that run as printed."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import caprmil
from caprmil import cli
from caprmil.synthetic import SlideCohort
from quick_scoring import quick_scoring

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that README and docs assume: slides, a table, features and the recipes."""
    home = tmp_path_factory.mktemp("readme")
    SlideCohort(slides=12, width=700, height=700, tumour=0.3).write(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run_command("caprmil encode slides --out features")
    shutil.copytree(ROOT / "recipes", home / "recipes")
    return home


def run_command(line: str) -> None:
    name, *words = line.split()
    assert name == "caprmil"
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"


def test_every_public_name_can_be_imported() -> None:
    for name in caprmil.__all__:
        assert getattr(caprmil, name).__module__.startswith("caprmil.")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = caprmil.nonsense


def test_modules_that_need_no_torch_do_not_load_it() -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"caprmil.{name}")
    if {"torch", "lightning"} & set(sys.modules):
        sys.exit(name)
"""
    modules = [
        *("features.bags", "cohort.cohort", "cohort.folds", "targets", "evaluation.predictions"),
        *("config", "cli", "figures", "slides.slide", "slides.tissue", "slides.patches"),
        *("slides.regions", "slides.qc", "encoders", "features.extract", "features.convert"),
    ]
    subprocess.run([sys.executable, "-c", code, *modules], check=True)


def test_models_load_without_h5py_and_lightning() -> None:
    code = "import sys, caprmil.models; print('h5py' in sys.modules, 'lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "written"),
    [
        ("README.md", ["runs/first/report/index.html"]),
        (
            "docs/quickstart.md",
            ["predictions.csv", "runs/first/scores.md", "runs/abmil/scores.md"],
        ),
    ],
)
def test_the_shell_commands_of_a_page_run(
    page: str, written: list[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (commands,) = blocks(page, "console")
    for line in commands.splitlines():
        run_command(line)
    assert [name for name in written if not Path(name).exists()] == []


@pytest.mark.slow
def test_the_first_page_of_the_site_runs_in_order(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From slides and a table alone. Training is the short one that the page proposes."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / "slides", "slides")
    shutil.copy(home / "labels.csv", ".")
    Path("new").mkdir()
    shutil.copy(next(Path("slides").iterdir()), "new/S21-0007.svs")
    short = "--folds 3 --epochs 8"
    assert short in (ROOT / "docs/start.md").read_text()
    done = []
    with quick_scoring():
        for line in "".join(blocks("docs/start.md", "sh")).splitlines():
            name, *words = shlex.split(line, comments=True)
            if name != "caprmil" or words[0] == "doctor":  # installation, and what it finds here
                continue
            if words[0] == "view":  # serves until it is stopped
                get_command(cli.app).commands["view"].make_context("view", words[1:])  # type: ignore[attr-defined]
                continue
            run_command(shlex.join([name, *words]) + f" {short}" * (words[0] == "train"))
            done.append(words[0])
    assert done == ["patch", "encode", "train", "report", "predict"]
    assert list(Path("check/qc").glob("slide_*.*"))
    assert Path("runs/first/report/index.html").exists()
    assert "S21-0007" in Path("predictions.csv").read_text()


def test_every_command_and_option_in_the_docs_exists() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    options = {
        name: {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        | {"--help", "-h"}
        for name, command in group.commands.items()
    }
    unknown = [
        f"{page.name}: {line}"
        for page in [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").glob("*.md"),
            *(ROOT / "src/caprmil/cli").glob("*.py"),
        ]
        for line in commands_on(page)
        for command, *words in [shlex.split(line, comments=True)[1:] or ["--help"]]
        if not command.startswith("-")
        and not {word.partition("=")[0] for word in words if word.startswith("--")}
        <= options.get(command, set())
    ]
    assert unknown == []


def commands_on(page: Path) -> list[str]:
    """Return the lines and code spans of a file that start with `caprmil `."""
    text = page.read_text().replace("\\\n", " ")
    return re.findall(r"^ *(caprmil .+)$", text, re.MULTILINE) + re.findall(
        r"`(caprmil [^`]+)`", text
    )


def test_the_readme_has_fewer_than_900_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 900


@pytest.mark.parametrize("page", ["README.md", "docs/models.md", "docs/explain.md"])
def test_the_python_on_a_page_runs(page: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_python(page, home, monkeypatch)


@pytest.mark.slow
def test_the_python_of_the_quickstart_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_python("docs/quickstart.md", home, monkeypatch)


def run_python(page: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


def test_the_table_of_models_is_what_the_command_measures() -> None:
    from caprmil.experiments import cost

    rows = re.findall(
        r"^\| `(\S+)` \| ([\d,]+) \| ([\d.]+) \|",
        (ROOT / "docs/models.md").read_text(),
        re.MULTILINE,
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

    full = caprmil.read_recipe(ROOT / "recipes/caprmil.toml")
    default = caprmil.Recipe(cohort="labels.csv", features="features")
    changes = config.differences(default, full)
    assert [line for line in changes if not line.startswith("model.")] == []
    built = [recipe.try_model().settings for recipe in (full, default)]
    assert built[0] == built[1]
