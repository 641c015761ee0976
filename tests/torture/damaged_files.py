"""Damaged files: every kind of input, damaged at random, through every reader of it.

An error of ours is an answer. A traceback, the end of the process, more than ten seconds or more
than 2 GB of memory is a failure.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from calls import command, last_lines, reads
from children import SECONDS, BrokenPromiseError, Case
from corpus import WIDTH, Corpus, quick_scoring, train_words
from hdf5_damage import damage_hdf5
from long_commands import COLOURS, SIZE, link_tree
from mutations import damage
from other_runs import SmallRun, main_run, other_runs

FILES = 20_000


@dataclass(frozen=True)
class Damaged:
    """A damaged file, the sound file that it was, and the random numbers of its case."""

    path: Path
    seed: Path
    random: Random


@dataclass(frozen=True)
class Kind:
    """A kind of files: sound ones, the reader that reads a damaged one, and how many to try."""

    name: str
    seeds: Sequence[Path]
    reader: Callable[[Damaged], object]
    share: float
    seconds: float = SECONDS


def kinds(corpus: Corpus) -> list[Kind]:
    """Return every kind of input."""
    readers = Readers(corpus)
    run, stopped = run_files(corpus.run), _all_files(corpus.stopped)
    checkpoints = [path for path in stopped if path.suffix in (".ckpt", ".csv", ".json", ".toml")]
    model = [path for path in run if path.parent.name == "model"]
    tables = corpus.files("tables", ".csv", ".tsv", ".xlsx", ".parquet")
    slides = corpus.files("slides")
    encoded = _all_files(corpus.folder / "encoded")
    return [
        Kind("bag", corpus.files("bags"), readers.bag, 0.408),
        Kind("table", tables, readers.table, 0.09),
        Kind("predictions", [corpus.run / "predictions.csv"], readers.predictions, 0.04),
        Kind("recipe", [corpus.folder / "tables" / "recipe.toml"], readers.recipe, 0.06),
        Kind("setting", [corpus.run / "recipe.toml"], readers.setting, 0.04),
        Kind("run", run, readers.run, 0.06, 30.0),
        *(
            Kind(each.kind, run_files(each.run), readers.run_of(each), 0.006, 30.0)
            for each in other_runs(corpus)
        ),
        Kind("outside", corpus.files("outside/features"), readers.external, 0.004, 30.0),
        Kind("checkpoint", checkpoints, readers.checkpoint, 0.003, 60.0),
        Kind("model", model, readers.model, 0.04),
        Kind("slide", slides, readers.slide, 0.05),
        Kind("regions", corpus.files("regions"), readers.regions, 0.06),
        Kind("weights", corpus.files("weights"), readers.weights, 0.06),
        Kind("export", corpus.files("exports"), readers.export, 0.04),
        Kind("encoded", encoded, readers.encoded, 0.015, 30.0),
    ]


def cases(corpus: Corpus, _: Path, scale: float) -> Iterator[Case]:
    """Yield the damaged files, the kinds after each other."""
    for kind in kinds(corpus):
        for number in range(max(1, round(FILES * scale * kind.share))):
            seed = kind.seeds[number % len(kind.seeds)]
            name = f"files/{kind.name}/{seed.name}/{number}"
            yield Case(name, _damaged(kind, seed, number), kind.seconds)


def _damaged(kind: Kind, seed: Path, number: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        random = Random(f"{kind.name}/{seed.name}/{number}")
        path = folder / seed.name
        data = seed.read_bytes()
        if seed.suffix == ".h5" and random.random() < 0.5:
            path.write_bytes(data)
            damage_hdf5(path, random)
        else:
            path.write_bytes(damage(data, seed.suffix, random))
        with quick_scoring():
            kind.reader(Damaged(path, seed, random))

    return run


def run_files(run: Path) -> list[Path]:
    """Return the files of a run that are read again."""
    return _all_files(run)


def _all_files(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    skipped = (".png", ".lock", ".md", ".txt", ".ts", ".pt2", ".onnx")
    return [
        p
        for p in found
        if p.suffix not in skipped and "tfevents" not in p.name and p.stat().st_size
    ]


class Readers:
    """Each method takes a damaged file and tries what a user would do with it."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def bag(self, file: Damaged) -> None:
        from caprmil.features import bags

        def stream(path: Path) -> None:
            with bags.streaming(path, rows=4) as opened:
                assert sum(len(rows) for rows in opened()) == opened.info.n_patches
                opened.grid()

        for read in (bags.inspect, lambda path: bags.read(path).grid(), stream):
            reads(read, file.path)
        chance = file.random.random()
        if chance < 0.04:
            self.predict(file)
        elif chance < 0.08:
            to = file.random.choice(("caprmil", "trident", "clam", "stamp"))
            command("convert", file.path, "--to", to, "--out", "out", "--slide-mpp", "1.0")

    def predict(self, file: Damaged) -> None:
        """Predict a damaged bag and a sound one: the sound one must be answered.

        Bags that are not damaged, but of another width, are an error before any work.
        """
        sound = self.corpus.features / "slide_001.h5"
        words = ("predict", self.corpus.run, file.path, sound, "--force", "--device", "cpu")
        _, printed = command(*words, "--out", "answers.csv")
        answers = Path("answers.csv")
        if not answers.exists() and " as the models of " in printed:
            return
        if not answers.exists() or "slide_001" not in answers.read_text():
            raise BrokenPromiseError(f"the sound bag has no answer\n{last_lines(printed)}")

    def table(self, file: Damaged) -> None:
        from caprmil.cohort.cohort import load_cohort
        from caprmil.cohort.folds import SplitConfig

        reads(
            lambda p: load_cohort(p, self.corpus.features, splits=SplitConfig(folds=2)), file.path
        )
        reads(lambda p: load_cohort(p, self.corpus.features), file.path)

    def predictions(self, file: Damaged) -> None:
        from caprmil.evaluation.predictions import Predictions

        reads(Predictions.read, file.path)
        if file.random.random() < 0.3:
            command("evaluate", file.path)

    def recipe(self, file: Damaged) -> None:
        from caprmil.training.recipe_files import read_recipe

        reads(lambda p: self._plan(read_recipe(p)), file.path)

    def setting(self, file: Damaged) -> None:
        """Change a setting to something impossible. The damaged file is not used."""
        from caprmil.training.recipe_files import read_recipe

        names = _names(tomllib.loads(file.seed.read_text()))
        values = ("inf", "-inf", "nan", "-1", "0", "1.5", "1e308", "1e-320", "x", '""', "[]", "{}")
        values += ("true", "null", str(10**18), "1" * 400, "[1, 2]", "'", "\x00", "1e999", "2,3")
        changes = [f"{file.random.choice(names)}={file.random.choice(values)}"]
        changes += [f"model.{file.random.choice(MODEL)}={file.random.choice(values)}"]
        change = [file.random.choice(changes)]
        reads(lambda _: self._plan(read_recipe(self.corpus.labels, changes=change)), file.path)

    def _plan(self, recipe: Any) -> None:
        """Do all that `train` does with a recipe before the first fold, and predict a bag."""
        import torch

        from caprmil.errors import CaprmilError
        from caprmil.training import cross_validation, fold_worker

        def no_training(training: Any, *_: object, **__: object) -> None:
            cohort = training.cohort
            model = training.recipe.model.build(cohort.in_dim, cohort.target).eval()
            with torch.no_grad():
                model(torch.zeros(1, 3, WIDTH))
            raise CaprmilError("The recipe is sound.")

        if recipe.features is None:
            recipe = replace(recipe, features=str(self.corpus.features))
        with mock.patch.object(fold_worker, "train_fold", no_training):
            cross_validation.cross_validate(recipe, "out", device="cpu", progress=False)

    def run(self, file: Damaged) -> None:
        """Put a damaged file into the run of the corpus, and give a command on it."""
        self.run_of(main_run(self.corpus))(file)

    def run_of(self, small: SmallRun) -> Callable[[Damaged], None]:
        return lambda file: self._run(small, file)

    def _run(self, small: SmallRun, file: Damaged) -> None:
        """Put a damaged file into a run, and give a command on the run."""
        folder = self.replaced(small.run, file)
        commands: list[tuple[list[object], float]] = [
            (["predict", folder, *small.features, "--device", "cpu"], 3),
            (["evaluate", folder], 2),
            (["compare", folder], 1),
            (["status", folder], 1),
            (["calibrate", folder], 1),
            (["evaluate", folder, *small.external(), "--device", "cpu"], 1),
            (["explain", folder, small.slide, "--out", "explained"], 0.6),
            (["report", folder, "--out", "report", "--slides", "1"], 0.6),
            (["report", folder, small.slide, "--out", "page.html"], 0.4),
            (
                ["cost", "--run", folder, "--patches", "10", "--repeats", "1", "--device", "cpu"],
                0.4,
            ),
            (["paper", folder, "--out", "paper"], 0.4),
            (["check", folder, "--most", "1"], 0.2),
            (["faithfulness", folder, "--most", "1", "--out", "faithful"], 0.2),
            (["atlas", folder, "--most", "2", "--out", "atlas"], 0.2),
        ]
        words = file.random.choices([w for w, _ in commands], [share for _, share in commands])[0]
        command(*words, codes=(0, 1, 2) if words[0] == "check" else (0, 2))

    def external(self, file: Damaged) -> None:
        """Score a cohort with one damaged bag: the others must be answered."""
        small, home = main_run(self.corpus), file.path.parent / "cohort"
        link_tree(small.home / "outside", home)
        (home / "features" / file.seed.name).unlink()
        file.path.rename(home / "features" / file.seed.name)
        words = ["evaluate", small.run, *small.external(home), "--device", "cpu", "--force"]
        code, printed = command(*words, "--out", "answers.csv")
        answers = Path("answers.csv")
        if not answers.exists() and ("that differ in" in printed or "as the models of" in printed):
            return
        names = {path.stem for path in self.corpus.files("outside/features")} - {file.seed.stem}
        text = answers.read_text() if answers.exists() else ""
        if lost := [name for name in sorted(names) if name not in text]:
            raise BrokenPromiseError(f"no answer for {lost} ({code})\n{last_lines(printed)}")

    def checkpoint(self, file: Damaged) -> None:
        """Resume a training with a damaged file."""
        folder = self.replaced(self.corpus.stopped, file)
        command(*train_words(self.corpus, folder))

    def model(self, file: Damaged) -> None:
        from caprmil.models import pretrained

        folder = self.replaced(file.seed.parent, file)
        reads(pretrained.load, folder)

    def slide(self, file: Damaged) -> None:
        """Find the tissue of a sound slide and a damaged one: the sound one must be done."""
        sound = self.corpus.slides / "jpeg.tiff"
        damaged = file.path.rename(file.path.with_name(f"damaged{file.path.suffix}"))
        words: list[object] = [sound, damaged, "--out", "out", "--slide-mpp", "2.0"]
        if file.random.random() < 0.2:
            command("encode", *words, *COLOURS, "--device", "cpu")
        else:
            command("patch", *words, *SIZE)
        record = json.loads(Path("out/qc/jpeg.json").read_text())
        if record["state"] != "done":
            raise BrokenPromiseError(f"the sound slide was not done: {record['reason']}")

    def regions(self, file: Damaged) -> None:
        from caprmil.slides.regions import read_regions

        def masks(path: Path) -> None:
            import numpy as np

            found = read_regions(path)
            found.to_mask((96, 112), (0.25, 0.25))
            found.contains(np.zeros((2, 2)))

        reads(masks, file.path)

    def weights(self, file: Damaged) -> None:
        from caprmil.encoders.hub import read_weights

        reads(read_weights, file.path)

    def export(self, file: Damaged) -> None:
        from caprmil.export import read_metadata

        reads(read_metadata, file.path)

    def encoded(self, file: Damaged) -> None:
        """Put a damaged file into a folder of bags; ask for its status, or encode again."""
        folder = self.replaced(self.corpus.folder / "encoded", file)
        command("status", folder)
        if file.random.random() < 0.5:
            slides = (self.corpus.slides / name for name in ("jpeg.tiff", "aperio.svs"))
            command("encode", *slides, "--out", folder, *COLOURS, "--device", "cpu")

    def replaced(self, folder: Path, file: Damaged) -> Path:
        """Return a copy of a folder in which a damaged file has replaced the sound one."""
        copy = file.path.parent / "copy"
        link_tree(folder, copy)
        target = copy / file.seed.relative_to(folder)
        target.unlink()
        file.path.rename(target)
        return copy


MODEL = ("dim", "heads", "tokens", "blocks", "mlp_ratio", "dropout", "temperature", "pool", "name")


def _names(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the names of all settings in a recipe: train.lr, ..."""
    names = []
    for key, value in table.items():
        names += _names(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return names
