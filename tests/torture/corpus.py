"""The corpus: small sound files of every kind that the package reads, made by the campaign itself.

COHORT/           12 bags, labels in every format of tables, recipes
COHORT/run        a finished run, with exports and an explanation
COHORT/stopped    a run that was killed after its first checkpoint
COHORT/bags       a bag in every layout
COHORT/encoded    bags that `caprmil encode` made, one slide is marked as running
COHORT/slides     slides, images and drawn regions
COHORT/weights    weights of an encoder in every format
COHORT/cost       the cost of the run, as `caprmil paper` reads it
COHORT/outside    a cohort that the run has not seen
COHORT/kinds      runs of other kinds: see `other_runs`
"""

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from calls import command
from children import run_in_child, start, wait

Step = Callable[["Corpus"], None]

WIDTH = 8
QUICK = ("train.epochs=2", "train.warmup_epochs=1", "splits.folds=2", "splits.validation=0.25")
QUICK += ("model.dim=16", "model.heads=2")
PIXEL = bytes.fromhex(  # a PNG of one pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63600000"
    "00020001485ef8520000000049454e44ae426082"
)
TISSUE = (slice(60, 300), slice(60, 330))  # rows and columns


@dataclass(frozen=True)
class Corpus:
    """The folder of the corpus, and what is in it."""

    folder: Path

    @property
    def labels(self) -> Path:
        return self.folder / "labels.csv"

    @property
    def features(self) -> Path:
        return self.folder / "features"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def stopped(self) -> Path:
        return self.folder / "stopped"

    @property
    def slides(self) -> Path:
        return self.folder / "slides"

    def files(self, folder: str, *suffixes: str) -> list[Path]:
        """Return the files in a folder of the corpus, sorted, without hidden ones."""
        found = [path for path in (self.folder / folder).iterdir() if path.is_file()]
        return sorted(
            p for p in found if p.name[0] != "." and (p.suffix in suffixes or not suffixes)
        )


def train_words(corpus: Corpus, out: object) -> list[str]:
    """Return the command that trains the small run."""
    changes = [word for change in QUICK for word in ("--set", change)]
    words = ["train", corpus.labels, "--features", corpus.features, "--out", out, *changes]
    return [*map(str, words), "--device", "cpu"]


def warm_up() -> None:
    """Import what the commands import, so that no child has to. Nothing is computed here."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "VIPS_CONCURRENCY": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    names = ["demo", "report", "viewer", "viewer.app", "export", "experiments.sweep.runner", "cli"]
    names += ["explain.map_ranking", "experiments.cost", "experiments.status", "runs.input_bags"]
    names += ["training.cross_validation", "features.convert", "runs.check", "report.paper_page"]
    names += ["experiments.gathered_runs", "figures", "explain.map_checks", "runs.scoring"]
    for name in names:
        importlib.import_module(f"caprmil.{name}")
    for name in ("pyvips", "openslide", "openpyxl", "pyarrow.parquet", "tensorboard", "tifffile"):
        importlib.import_module(name)
    importlib.import_module("torch.utils.tensorboard")
    importlib.import_module("matplotlib.backends.backend_agg")


@contextmanager
def quick_scoring() -> Iterator[None]:
    """Score with few bootstrap draws and plain figures: the files are as always, only smaller."""
    from caprmil import figures
    from caprmil.evaluation import comparison, external_scores, predictions, recalibration, shift
    from caprmil.evaluation.paired_tests import draw_patients
    from caprmil.explain import flips
    from caprmil.io.atomic import atomic_write
    from caprmil.targets.metric import bootstrap

    def few_patients(patients: int, draws: int, seed: int) -> Any:
        return draw_patients(patients, min(draws, 50), seed)

    def few_draws(*args: Any, **options: Any) -> Any:
        return bootstrap(*args, **options | {"draws": 10})

    def save(figure: Any, path: Path, *, replace: bool = False, **_: Any) -> Path:
        with atomic_write(path, replace=replace) as temporary:
            temporary.write_bytes(PIXEL)
        return path

    ranking = importlib.import_module("caprmil.explain.map_ranking")  # not the function
    with (
        mock.patch.object(figures, "save", save),
        mock.patch.object(predictions, "bootstrap", few_draws),
        mock.patch.object(comparison, "draw_patients", few_patients),
        mock.patch.object(external_scores, "draw_patients", few_patients),
        mock.patch.object(recalibration, "draw_patients", few_patients),
        mock.patch.object(shift, "SPLITS", 130),
        mock.patch.object(flips, "SLIDES", 2),
        mock.patch.object(ranking, "SLIDES", 2),
    ):
        yield


def make_corpus(folder: Path, *, kinds: bool = True) -> Corpus:
    """Make the corpus in a child, with or without the runs of other kinds, and return it."""
    from other_runs import make_other_runs, make_outside

    corpus, output = Corpus(folder), folder / "output.txt"
    folder.mkdir(parents=True)
    steps: list[Step] = [_write_cohort, make_outside, _write_slides, _train, _encode]
    steps += [_write_exports, _stop, *([_measure_cost, make_other_runs] if kinds else [])]
    for step in steps:
        imported = folder / f"{step.__name__}.modules"

        def work(step: Step = step, imported: Path = imported) -> None:
            step(corpus)
            imported.write_text("\n".join(sys.modules))

        if wait(start(work, output)) != 0:
            raise SystemExit(f"The corpus cannot be made: {step.__name__}\n{output.read_text()}")
        if step is _train:
            _import_as(imported)
    return corpus


def _import_as(imported: Path) -> None:
    """Import here what a child has imported while it worked, so that the next ones need not."""
    for name in imported.read_text().splitlines():
        if name not in sys.modules and "__main__" not in name:
            with suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection in each child would copy all of this


def _write_cohort(corpus: Corpus) -> None:
    import numpy as np
    import pandas as pd
    import torch
    from safetensors.torch import save_file

    from caprmil.synthetic import RareSignal

    RareSignal(slides=12, width=WIDTH, patches=(6, 10), signal=0.4).write(corpus.folder)
    table = pd.read_csv(corpus.labels)
    tables = corpus.folder / "tables"
    tables.mkdir()
    table.to_csv(tables / "labels.csv", index=False)
    table.to_csv(tables / "labels.tsv", index=False, sep="\t")
    table.to_excel(tables / "labels.xlsx", index=False)
    table.to_parquet(tables / "labels.parquet")
    _write_bags(corpus.folder / "bags")
    weights = corpus.folder / "weights"
    weights.mkdir()
    state = {"conv.weight": torch.ones(3, 2), "conv.bias": torch.zeros(2)}
    save_file(state, weights / "model.safetensors")
    torch.save(state, weights / "model.bin")
    torch.save(state, weights / "model.pth", _use_new_zipfile_serialization=False)
    np.save(weights / "model.npy", np.ones(3))


def _write_bags(folder: Path) -> None:
    """Write a bag in every layout that is read."""
    import h5py
    import numpy as np
    import torch

    from caprmil.features import bags
    from caprmil.features.convert import convert

    rng = np.random.default_rng(0)
    features = rng.normal(size=(6, WIDTH)).astype(np.float32)
    coords = np.array([[224 * (n % 3), 224 * (n // 3)] for n in range(6)])
    folder.mkdir()
    facts: dict[str, Any] = {"encoder": "synthetic", "mpp": 1.0, "patch_px": 224, "step": 224.0}
    facts |= {"patch_level0": 224.0, "slide_mpp": 1.0, "scale_rule": "exact"}
    own = bags.write(folder / "caprmil.h5", features, coords, **facts, slide_size=(700, 500))
    for to in ("trident", "clam", "stamp"):
        convert({to: own}, folder / f"as-{to}", to)
        for path in (folder / f"as-{to}").rglob(f"{to}.*"):
            if "patches" not in path.parts:
                shutil.copy(path, folder / path.name)
        shutil.rmtree(folder / f"as-{to}")
    with h5py.File(folder / "early-stamp.h5", "w") as file:
        file["feats"], file["coords"] = features.astype(np.float16), coords
    with h5py.File(folder / "chunked.h5", "w") as file:
        options = {"compression": "gzip", "shuffle": True, "fletcher32": True, "chunks": (2, WIDTH)}
        file.create_dataset("features", data=features, **options)
        file.create_dataset("coords", data=coords, chunks=(1, 2), maxshape=(None, 2))
    with h5py.File(folder / "batched.h5", "w", libver="latest") as file:
        file["patch_embeddings"] = features[None]
    np.savez(folder / "arrays.npz", features=features, coords=coords)
    np.savez_compressed(folder / "packed.npz", features=features, coords=coords)
    np.save(folder / "array.npy", features)
    torch.save(torch.from_numpy(features), folder / "tensor.pt")
    torch.save({"features": features, "coords": coords}, folder / "arrays.pt", pickle_protocol=4)
    old = torch.from_numpy(features)
    torch.save(old, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save([old[0], old[1]], folder / "list.pt")


def section(seed: int = 0, height: int = 384, width: int = 448) -> Any:
    """Return an image of glass with a block of tissue."""
    import numpy as np

    rng = np.random.default_rng(seed)
    image = np.full((height, width, 3), 240.0) + rng.normal(0, 1.5, (height, width, 3))
    image[TISSUE] = rng.normal(0, 25, image[TISSUE].shape) + np.array([180, 100, 160])
    return image.clip(0, 255).astype(np.uint8)


def _write_slides(corpus: Corpus) -> None:
    """Write slides, images and drawn regions. libvips has threads, so not in the parent."""
    import json

    import pyvips
    import tifffile
    from PIL import Image

    folder = corpus.slides
    folder.mkdir()
    scale = {"xres": 500.0, "yres": 500.0, "resunit": "cm"}  # 2 um/px
    tiles: dict[str, Any] = {"tile": True, "tile_width": 128, "tile_height": 128, **scale}
    image = pyvips.Image.new_from_array(section())
    image.tiffsave(str(folder / "jpeg.tiff"), compression="jpeg", pyramid=True, **tiles)
    image.tiffsave(str(folder / "deflate.tiff"), compression="deflate", pyramid=True, **tiles)
    image.tiffsave(str(folder / "big.tiff"), compression="lzw", bigtiff=True, **tiles)
    image.tiffsave(str(folder / "strips.tif"), compression="none", **scale)
    image.pngsave(str(folder / "image.png"), compression=6)
    Image.fromarray(section()).save(folder / "photo.jpg", quality=80, dpi=(12700, 12700))
    Image.fromarray(section()).save(folder / "crop.bmp", dpi=(12700, 12700))
    text = "Aperio Image Library v11\r\n448x384 [0,0 448x384] (128x128) JPEG|AppMag = 20|MPP = 2.0"
    with tifffile.TiffWriter(folder / "aperio.svs") as file:
        options: dict[str, Any] = {"photometric": "rgb", "metadata": None, "compression": "deflate"}
        file.write(section(), tile=(128, 128), description=text, **options)
        file.write(section()[::4, ::4], description=text, **options)
    corners = [[50, 50], [330, 50], [330, 300], [50, 300], [50, 50]]
    hole = [[100, 100], [150, 100], [150, 150], [100, 100]]
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [corners, hole]},
            "properties": {"classification": {"name": "Tumour", "color": [200, 0, 0]}},
        },
        {
            "type": "Feature",
            "geometry": {"type": "MultiPolygon", "coordinates": [[corners], [hole]]},
            "properties": {"classification": {"names": ["Stroma", "Dense"]}},
        },
    ]
    regions = corpus.folder / "regions"
    regions.mkdir()
    content = {"type": "FeatureCollection", "features": features}
    (regions / "drawn.geojson").write_text(json.dumps(content))


def _train(corpus: Corpus) -> None:
    os.chdir(corpus.folder)
    with quick_scoring():
        command(*train_words(corpus, corpus.run), codes=[0])
    recipe = (corpus.run / "recipe.toml").read_text()
    (corpus.folder / "tables" / "recipe.toml").write_text(recipe)


def _encode(corpus: Corpus) -> None:
    """Encode two slides, and mark one of them as running, as a killed process leaves it."""
    from long_commands import COLOURS

    from caprmil.executors.job_status import JobStatus, status_path

    slides, out = [corpus.slides / name for name in ("jpeg.tiff", "aperio.svs")], corpus.folder
    command("encode", *slides, "--out", out / "encoded", *COLOURS, "--device", "cpu", codes=[0])
    JobStatus(state="running", process="1@here").write(status_path(out / "encoded", "aperio"))


def _write_exports(corpus: Corpus) -> None:
    for kind in ("pt2", "torchscript", "onnx"):
        words = ("export", corpus.run, "--to", kind, "--fold", "fold-0")
        command(*words, "--out", corpus.folder / "exports", codes=[0])


def _measure_cost(corpus: Corpus) -> None:
    words = ("cost", "--run", corpus.run, "--patches", "10", "--repeats", "1", "--device", "cpu")
    command(*words, "--out", corpus.folder / "cost", codes=[0])


def _stop(corpus: Corpus) -> None:
    """Train a run, and kill it at its second checkpoint: the first one is left."""
    from kills import kill_at_event

    from caprmil.cli import run

    def second_checkpoint(event: str, path: str) -> bool:
        return event == "os.rename" and path.endswith("last.ckpt") and os.path.exists(path)  # noqa: PTH110

    def work() -> None:
        kill_at_event(corpus.folder, when=second_checkpoint)
        run(train_words(corpus, corpus.stopped))

    code, printed = run_in_child(work)
    if code != -signal.SIGKILL:
        raise RuntimeError(f"The run was not killed at its second checkpoint: {code}\n{printed}")
