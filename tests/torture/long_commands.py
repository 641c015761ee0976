"""The commands that write much or for long, on the corpus, and what they leave in a folder."""

import csv
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from children import run_in_child
from corpus import Corpus, quick_scoring, train_words

TMP = "tmp"
TIMES = re.compile(r"seconds|written|created|started|finished|time|date|_ms|peak", re.IGNORECASE)
"""Keys of JSON and columns of CSV that say when, or how long. They differ from run to run."""
EVENTS = re.compile(r"events\.out\.tfevents\..*")  # of TensorBoard: a new file for each start
DIFFERENT = (".html", ".ts", "seconds.json", "sweep.md")  # hold dates, addresses or times


@dataclass(frozen=True)
class LongCommand:
    """A command in a folder of its own: `words` for the corpus, `inputs` that it changes."""

    name: str
    words: Callable[[Corpus], list[Any]]
    share: float  # of the kill points
    needs_run: bool = False  # it works in a copy of the run, called `run`

    def prepare(self, corpus: Corpus, folder: Path) -> None:
        """Put what the command needs into a folder."""
        (folder / TMP).mkdir(parents=True, exist_ok=True)
        if self.needs_run and not (folder / "run").exists():
            link_tree(corpus.run, folder / "run")

    def run(self, corpus: Corpus, folder: Path, *, preset: bool = True) -> None:
        """Run the command in a folder, in this process. It ends with SystemExit.

        Without `preset` Python looks for a temporary folder itself, by writing a file into it.
        """
        from caprmil.cli import run

        os.chdir(folder)
        os.environ["TMPDIR"] = str(folder / TMP)
        tempfile.tempdir = str(folder / TMP) if preset else None
        with quick_scoring(), tiny_demo():
            run([str(word) for word in self.words(corpus)])

    def run_in_child(
        self,
        corpus: Corpus,
        folder: Path,
        before: Callable[[], None] = lambda: None,
        kill_after: float | None = None,
        *,
        preset: bool = True,
    ) -> tuple[int, str]:
        """Run the command in a child, after `before`; return its exit code and what it printed."""

        def work() -> None:
            before()
            self.run(corpus, folder, preset=preset)

        return run_in_child(work, kill_after=kill_after)


def link_tree(source: Path, target: Path) -> None:
    """Copy a folder, with hard links if possible: no file is ever changed in place."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # another file system
            shutil.copy(one, other)

    shutil.copytree(source, target, copy_function=link)


def _sweep(corpus: Corpus) -> list[Any]:
    return ["sweep", *train_words(corpus, "out")[1:], "--set", "model.tokens=2,3"]


def _two(corpus: Corpus) -> list[Any]:
    return [corpus.run, corpus.run / "predictions.csv"]


def _convert(corpus: Corpus, to: str) -> list[Any]:
    return ["convert", corpus.features, "--to", to, "--out", "out", "--slide-mpp", "1.0"]


def _slides(corpus: Corpus, *words: object) -> list[Any]:
    names = ("jpeg.tiff", "deflate.tiff", "aperio.svs", "strips.tif")
    return [words[0], *(corpus.slides / name for name in names), "--out", "out", *words[1:]]


SIZE = ("--mpp", "2.0", "--set", "patches.px=64")  # of patches, for the small slides of the corpus
COLOURS = ("--encoder", "colours:mean_colour", *SIZE)


@contextmanager
def tiny_demo() -> Iterator[None]:
    """Let the demo be of a few small slides and one epoch."""
    from caprmil import demo

    cohort = replace(demo.SHORT.cohort, slides=12, width=640, height=640, tumour=0.2)
    with mock.patch.object(demo, "SHORT", replace(demo.SHORT, cohort=cohort, epochs=1)):
        yield


def _vectors(corpus: Corpus) -> list[Any]:
    """Train with covariates and vectors."""
    return ["train", corpus.folder / "kinds" / "covariates" / "recipe.toml", "--out", "out", *CPU]


CPU = ("--device", "cpu")
COMMANDS = (
    LongCommand("patch", lambda c: _slides(c, "patch", *SIZE), 0.17),
    LongCommand("encode", lambda c: _slides(c, "encode", *COLOURS, *CPU), 0.21),
    LongCommand("convert-trident", lambda c: _convert(c, "trident"), 0.06),
    LongCommand("convert-clam", lambda c: _convert(c, "clam"), 0.08),
    LongCommand("convert-stamp", lambda c: _convert(c, "stamp"), 0.06),
    LongCommand("train", lambda c: train_words(c, "out"), 0.12),
    LongCommand("train-vectors", _vectors, 0.03),
    LongCommand("sweep", _sweep, 0.05),
    LongCommand("predict", lambda c: ["predict", c.run, c.features, "--out", "out/a.csv"], 0.02),
    LongCommand("compare", lambda c: ["compare", *_two(c), "--out", "out"], 0.02),
    LongCommand("explain", lambda c: ["explain", "run", "slide_000", "--out", "out"], 0.03, True),
    LongCommand("report", lambda _: ["report", "run", "--slides", "1"], 0.03, True),
    LongCommand("export", lambda _: ["export", "run", "--to", "torchscript"], 0.03, True),
    LongCommand("faithfulness", lambda _: ["faithfulness", "run", "--most", "2"], 0.03, True),
    LongCommand("atlas", lambda _: ["atlas", "run", "--most", "4"], 0.02, True),
    LongCommand("demo", lambda _: ["demo", *CPU], 0.02),
    LongCommand("paper", lambda c: ["paper", c.folder / "cost", "--out", "out"], 0.02),
)


# What a folder holds


def contents(folder: Path) -> dict[str, Any]:
    """Return the content of every file by name, hidden ones too, without times and the folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if EVENTS.fullmatch(path.name):
            found[str(Path(name).with_name("events"))] = "of TensorBoard"
        elif path.is_dir():
            found[name + "/"] = "a folder"
        else:
            found[name] = _content(path, folder)
    return found


def _content(path: Path, folder: Path) -> Any:
    data = path.read_bytes().replace(str(folder).encode(), b"FOLDER")
    if path.name.endswith(DIFFERENT):
        return "not compared" if data else "empty"
    try:
        if path.suffix == ".h5" and b"FOLDER" in data:  # it has the path of its slide
            return _arrays(path)
        if path.suffix == ".json":
            return _without_times(json.loads(data))
        if path.suffix == ".csv":
            rows = csv.DictReader(io.StringIO(data.decode()))
            return [{k: v for k, v in row.items() if not TIMES.search(str(k))} for row in rows]
        if path.suffix in (".md", ".tex", ".txt", ".svg"):
            return re.sub(r"\d+(\.\d+)? (s|ms|MiB|seconds)\b", "TIME", data.decode())
    except ValueError:
        return f"damaged: {data[:80]!r}"
    return hashlib.sha256(data).hexdigest()


def _arrays(path: Path) -> Any:
    """Return what a bag holds but for the path of its slide."""
    import h5py

    try:
        with h5py.File(path) as file:
            holders = {"": file, **dict(file.items())}
            texts = {
                f"{name}.{key}": str(value)
                for name, each in holders.items()
                for key, value in each.attrs.items()
                if key != "slide_path"
            }
            arrays = {
                name: hashlib.sha256(each[()].tobytes()).hexdigest() for name, each in file.items()
            }
    except OSError as problem:
        return f"damaged: {problem}"
    return texts | arrays


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not TIMES.search(str(k))}
    return [_without_times(v) for v in value] if isinstance(value, list) else value


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Return what is lost, left over or changed in a folder; empty if nothing is."""
    parts = {
        "lost": [name for name in expected if name not in found],
        "left over": [name for name in found if name not in expected],
        "changed": [n for n in found if n in expected and found[n] != expected[n]],
    }
    lines = [f"{what}: {', '.join(names[:6])}" for what, names in parts.items() if names]
    if parts["changed"]:
        name = parts["changed"][0]
        lines.append(f"  {name}: {_where(found[name], expected[name])}")
    return "\n".join(lines)


def _where(found: Any, expected: Any) -> str:
    """Return the first place at which two values differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in [*expected, *found]:
            if found.get(key) != expected.get(key):
                return f"{key}: {_where(found.get(key), expected.get(key))}"
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for one, other in zip(found, expected, strict=True):
            if one != other:
                return _where(one, other)
    return f"{str(found)[:80]!r}, not {str(expected)[:80]!r}"
