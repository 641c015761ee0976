"""Do maps find the tumour? Patch by patch, on generated slides where it is known.

    python benchmarks/evidence.py

Every model is cross-validated on the same slides. Each slide with tumour is then explained by the
model that has not seen it, in every way there is, and each map is held against the truth. Slides,
features and runs stay in a folder, results in a JSON lines file beside the page: a run that was
stopped goes on.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import process_time
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import roc_auc_score

from bags import MODELS
from caprmil import config, encoders, explain, figures
from caprmil.errors import CaprmilError, UnknownNameError
from caprmil.explain.attribution import integrated_gradients, leave_one_out
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.io.progress import bar
from caprmil.models import MILModel
from caprmil.models.device import pick_device
from caprmil.runs.run import Run
from caprmil.slides.slide import find_slides
from caprmil.synthetic import KINDS, TRUTH_UM, SlideCohort
from caprmil.training.cross_validation import complete
from caprmil.training.recipe import Recipe
from evidence_page import CLASS, RANDOM, TOKEN, Job, Result, picture, report, table
from record import Page, Record

HALF = 0.5  # of a patch, from which on it is called tumour
DRAWS = 50  # random maps a slide


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The slides, and one recipe for all models. Why these is told on the page."""

    cohort: SlideCohort = field(default_factory=lambda: SlideCohort(slides=60, tumour=0.1))
    folds: int = 3
    epochs: int = 20
    lr: float = 5e-4

    def recipe(self, job: Job, folder: Path) -> Recipe:
        settings: dict[str, Any] = {
            "cohort": str(folder / "cohort" / "labels.csv"),
            "features": str(folder / "features"),
            "model": {"name": job.model, **MODELS[job.model]},
            "splits": {"folds": self.folds, "validation": 0.2, "seed": 2025 + job.seed},
            "train": {"epochs": self.epochs, "warmup_epochs": self.epochs // 8, "lr": self.lr},
            "loggers": {},
        }
        return config.parse(settings, into=Recipe)


def fingerprint(plan: Plan) -> str:
    """Return a digest of all that a result depends on, besides its job."""
    told = json.dumps({"plan": asdict(plan), "models": MODELS, "half": HALF})
    return sha256(told.encode()).hexdigest()[:12]


def prepare(plan: Plan, folder: Path) -> None:
    """Generate and encode the slides, as far as they are not there yet."""
    with bar("Generating slides") as step:
        table = plan.cohort.write(folder / "cohort", progress=step)
    encoder = encoders.load(encoders.DEFAULT, device=pick_device("cpu"))
    with bar("Encoding") as step:
        job = Extraction(out=folder / "features", encoder=encoder, config=configure(encoder.card))
        job.run(find_slides([table.parent / "slides"]), progress=step)


def run(plan: Plan, folder: Path, job: Job) -> Result:
    """Train a model, explain the slides with tumour, and hold every map against the truth."""
    start = process_time()
    logging.getLogger("caprmil").setLevel(logging.ERROR)
    trained = complete(
        plan.recipe(job, folder), folder / f"{job.model}-{job.seed}", device="cpu", progress=False
    )
    slides: list[str] = []
    maps: dict[str, dict[str, list[float]]] = {}
    for fold in trained.splits:
        model = trained.model(fold.name)
        for slide in fold.test:
            bag = bags.read(trained.paths[slide])
            share = shares(bag, tumour(folder / "cohort" / "truth" / f"{slide}.png"))
            if share.max() < HALF or share.min() > 0:
                continue  # nothing to be found, or nothing else
            slides.append(slide)
            for name, marks in judge(model, bag, share, trained, slide).items():
                for mark, value in marks.items():
                    maps.setdefault(name, {}).setdefault(mark, []).append(round(value, 5))
    return Result(
        *job,
        settings=fingerprint(plan),
        slide_aucs=[round(fold["auc"], 4) for fold in trained.scores["folds"].values()],
        slides=slides,
        maps=maps,
        seconds=round(process_time() - start, 2),
    )


def tumour(path: Path) -> NDArray[np.bool_]:
    """Return where there is tumour, on the grid of the truth."""
    return np.asarray(Image.open(path)) == KINDS.index("tumour")


def shares(bag: Bag, truth: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the share of each patch that is tumour."""
    where = explain.patch_boxes(bag.info, bag.coords, None)
    if where is None or bag.info.slide_mpp is None:
        raise CaprmilError("The features do not say where patches lie. Encode the slides again.")
    scale = bag.info.slide_mpp / TRUTH_UM
    corners, side = np.rint(where.corners * scale).astype(int), round(where.side * scale)
    # A patch on the lower or right edge may reach beyond the truth: what is there is glass.
    padded = np.pad(truth, ((0, side), (0, side)))
    return np.array([padded[y : y + side, x : x + side].mean() for x, y in corners])


def judge(
    model: MILModel, bag: Bag, share: NDArray[np.float64], trained: Run, slide: str
) -> dict[str, dict[str, float]]:
    """Return by map: how well it finds tumour, all patches and clear ones, and its area."""
    of = trained.target.names.index(CLASS)
    told = explain.explain(model, bag, target=trained.target, slide=slide)
    maps = every_map(model, bag, told, of)
    flipped = explain.faithfulness(model, bag, told, of=of, maps=maps).curves
    if told.assignments is not None:
        tokens = [told.token(number) for number in range(told.assignments.shape[-1])]
        maps[TOKEN] = max(tokens, key=lambda token: roc_auc_score(share >= HALF, token))
    marks = {name: against(share, values) for name, values in maps.items()}
    chance = np.random.default_rng(crc32(slide.encode())).random((DRAWS, len(share)))
    drawn = [against(share, values) for values in chance]
    marks[RANDOM] = {mark: float(np.mean([each[mark] for each in drawn])) for mark in drawn[0]}
    for name, curves in flipped.items():
        marks[name]["area"] = curves.area
    return marks


def against(share: NDArray[np.float64], values: NDArray[Any]) -> dict[str, float]:
    """Return how well a map finds tumour: among all patches, and among the clear ones."""
    clear = (share >= HALF) | (share == 0)
    return {
        "found": float(roc_auc_score(share >= HALF, values)),
        "clear": float(roc_auc_score(share[clear] > 0, values[clear])),
    }


def every_map(
    model: MILModel, bag: Bag, told: explain.Explanation, of: int
) -> dict[str, NDArray[Any]]:
    """Return each map for a class. Estimates are made of additive models too, to be compared."""
    features = torch.from_numpy(bag.features)[None]
    cells = bag.grid()
    grid = None if cells is None else torch.from_numpy(cells)
    maps = explain.relevance_maps(model, features, grid, told, of=of)
    exact = {"evidence, exact": maps.pop("evidence")} if told.exact else {}
    maps.pop("evidence", None)
    estimates = {
        "perturbation": leave_one_out(model, features, grid),
        "integrated gradients": integrated_gradients(model, features, grid),
    }
    contrast = told.target.contrasts[of]
    found = {name: contrast.of(each.terms).numpy() for name, each in estimates.items()}
    return {**exact, **found, **maps}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, print the tables, write page and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=1, help="of the split and the weights")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence.md"), help="the page")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/evidence"), help="for slides, features and runs"
    )
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(arguments)
    models, plan = args.models.split(","), Plan()
    try:
        for name in models:
            if name not in MODELS:
                raise UnknownNameError("model", name, MODELS)
        page = Page(args.out, "benchmarks/evidence.py", "Do maps find the tumour?")
        prepare(plan, args.folder)
        record = Record(args.out.with_suffix(".jsonl"), Result, fingerprint(plan))
        jobs = [Job(model, seed) for seed in range(args.seeds) for model in models]
        made = record.complete(jobs, partial(run, plan, args.folder), processes=args.processes)
        results = sorted(made, key=lambda result: (models.index(result.model), result.seed))
        image = args.out.with_name(f"{args.out.stem}-maps.png")
        figures.save(picture(results), image, replace=True)
        command = "python benchmarks/evidence.py"
        for option in ("models", "seeds"):
            if (value := getattr(args, option)) != parser.get_default(option):
                command += f" --{option} {value}"
        page.write(report(results, settings=asdict(plan), command=command, image=image.name))
    except CaprmilError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(table(results, "found"))
    print(f"\nWritten to {args.out} and {image}; the results are in {record.path}.")


if __name__ == "__main__":
    main()
