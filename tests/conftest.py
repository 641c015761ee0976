"""Fixtures that tests share. In the tests of models, every annotated tensor is checked."""

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the cores

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jaxtyping

jaxtyping.install_import_hook("caprmil.models", "beartype.beartype")

if TYPE_CHECKING:  # Lightning is slow to import, and most tests do not need it
    from caprmil.io.paths import RemotePath
    from caprmil.runs.run import Run
    from caprmil.training.recipe import Recipe
    from caprmil.viewer import Library


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes in the tests of models only: the checks take a third of a small training."""
    jaxtyping.config.update("jaxtyping_disable", "models" not in item.path.parent.name)


LONGEST = ("torture", "demo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest modules first, so that no process works on them alone at the end."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session")
def tiny_cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 slides with a strong signal, next to their bags in `features`."""
    from caprmil.synthetic import RareSignal

    study = RareSignal(slides=24, width=64, patches=(40, 80), signal=0.3, stain=0.5)
    return study.write(tmp_path_factory.mktemp("tiny_cohort"))


@pytest.fixture(scope="session")
def tiny_recipe(tiny_cohort: Path) -> "Recipe":
    """Three folds of a tiny model, trained in a second or two."""
    from caprmil.cohort.folds import SplitConfig
    from caprmil.training.recipe import ModelConfig, Recipe
    from caprmil.training.train_config import TrainConfig

    return Recipe(
        cohort=str(tiny_cohort),
        features=str(tiny_cohort.parent / "features"),
        model=ModelConfig(settings={"dim": 16, "heads": 2}),
        splits=SplitConfig(folds=3, validation=0.25),
        train=TrainConfig(epochs=3, warmup_epochs=1, lr=3e-3),
    )


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe: "Recipe", tmp_path_factory: pytest.TempPathFactory) -> "Run":
    """A finished run of that recipe, with its maps ranked on two slides.

    It is shared: copy its folder before changing anything.
    """
    from caprmil.training.cross_validation import cross_validate

    folder = tmp_path_factory.mktemp("tiny_run") / "run"
    run = cross_validate(tiny_recipe, folder, device="cpu", progress=False)
    with pytest.MonkeyPatch.context() as patch:
        ranking = importlib.import_module("caprmil.explain.map_ranking")
        patch.setattr(ranking, "SLIDES", 2)
        ranking.map_ranking(run)
    return run


@pytest.fixture(scope="session")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two slides of the tiny run, as pixels; the others have none."""
    from caprmil.synthetic import Section

    folder = tmp_path_factory.mktemp("pixels")
    for number in range(2):
        Section(seed=number, width=2016, height=2016).write(folder / f"slide_00{number}.tiff")
    return folder


@pytest.fixture(scope="session")
def library(tiny_run: "Run", pixels: Path) -> "Library":
    """The viewer's slides of the tiny run."""
    from caprmil.viewer import Library

    return Library(tiny_run, pixels=pixels, device="cpu")


@pytest.fixture
def mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command that must exit with 2 and one line, and return the line."""

    from caprmil import cli

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["caprmil", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.run()
        (line,) = capsys.readouterr().err.splitlines()
        assert (end.value.code, line[:7]) == (2, "error: ")
        return line

    return run


@pytest.fixture
def memory(tmp_path: Path) -> Iterator["RemotePath"]:
    """An empty folder in the memory file system of fsspec."""
    from caprmil.io.paths import RemotePath

    folder = RemotePath(f"memory:/{tmp_path.name}")
    yield folder
    if folder.exists():
        folder.filesystem.rm(str(folder), recursive=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of an empty bucket on a local S3 server."""
    import boto3
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="lab")
        yield "s3://lab"
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(scope="module", params=["memory", "s3"])
def remote_cohort(request: pytest.FixtureRequest, tiny_cohort: Path) -> Iterator["RemotePath"]:
    """A remote folder with the tiny cohort."""
    from caprmil.io.paths import RemotePath, as_path, upload_all

    url = "memory://lab" if request.param == "memory" else request.getfixturevalue("s3")
    folder = as_path(url)
    assert isinstance(folder, RemotePath)
    files = [tiny_cohort, *(tiny_cohort.parent / "features").iterdir()]
    upload_all(files, tiny_cohort.parent, folder)
    yield folder
    if request.param == "memory":
        folder.filesystem.rm(str(folder), recursive=True)


@pytest.fixture(scope="module")  # playwright's event loop would disturb other modules
def chromium() -> Iterator[Any]:
    """A browser without a window, from Debian's package chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("There is no chromium here. On Debian: apt-get install chromium.")
    playwright = pytest.importorskip("playwright.sync_api")
    flags = [
        *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    ]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()
