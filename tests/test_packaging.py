"""What is published: metadata, source archive and wheel."""

import importlib.util
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import caprmil

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_source_archive_is_small_and_the_wheel_can_be_built_from_it(tmp_path: Path) -> None:
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as files:
        sizes = {member.name: member.size for member in files.getmembers()}
        files.extractall(tmp_path, filter="data")
    assert max(sizes.values()) < 400_000  # OpenSeadragon is the largest file
    assert Path(archive).stat().st_size < 1_500_000
    source = tmp_path / f"caprmil-{caprmil.__version__}"
    (wheel,) = WheelBuilder(str(source)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    assert "caprmil/py.typed" in names
    assert sum(bool(re.fullmatch(r"caprmil/recipes/\w[\w-]*\.toml", name)) for name in names) >= 17
    assert [name for name in names if "license" in name.lower() and "dist-info" in name] != []


def test_the_archive_has_every_file_of_the_package(tmp_path: Path) -> None:
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    ours = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert ours - packed == set()


def test_urls_and_absolute_links_come_from_one_address(hook: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "![map](docs/a.png) [page](docs/b.md) [![badge](docs/c.svg)](LICENSE) [x](https://e.org)"
    )
    settings = {"repository": "https://example.org/lab/caprmil", "documentation": "https://d.org"}
    metadata: dict[str, object] = {}
    hook.AddressHook(str(tmp_path), settings).update(metadata)
    base = "https://example.org/lab/caprmil"
    assert metadata["readme"] == {
        "content-type": "text/markdown",
        "text": f"![map]({base}/raw/main/docs/a.png) [page]({base}/blob/main/docs/b.md) "
        f"[![badge]({base}/raw/main/docs/c.svg)]({base}/blob/main/LICENSE) [x](https://e.org)",
    }
    assert metadata["urls"]["Documentation"] == "https://d.org"  # type: ignore[index]


def test_without_an_address_the_package_names_no_host(hook: ModuleType) -> None:
    metadata: dict[str, object] = {}
    hook.AddressHook(str(ROOT), {"repository": "", "documentation": ""}).update(metadata)
    assert "urls" not in metadata
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text()  # type: ignore[index]


def test_classifiers_are_known_and_all_extras_are_in_all() -> None:
    # Fails on a classifier that PyPI does not know.
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    assert "Typing :: Typed" in core.classifiers
    extras = PYPROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.findall(r"[a-z]+", everything.partition("[")[2]))
    assert named == set(extras) - {"all", "dev"}


def test_the_changelog_and_the_citation_have_the_version() -> None:
    assert f"\n## {caprmil.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {caprmil.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_reference_of_python_has_every_public_name() -> None:
    page = (ROOT / "docs/python.md").read_text()
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, re.MULTILINE))
    assert set(caprmil.__all__) - shown == {"CaprmilError"}  # on the page with all errors
