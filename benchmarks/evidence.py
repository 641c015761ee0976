"""Maps of every model compared with the known tumour of generated slides.

    python benchmarks/evidence.py

Every model is cross-validated on the same slides. Each slide with tumour is explained by the model
that has not seen it, with every method, and each map is compared with the truth. Slides, features
and runs are kept in a folder, results in a JSON lines file next to the page, so that an interrupted
benchmark can be resumed.
"""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

from caprmil import config, encoders, explain, figures
from caprmil.errors import CaprmilError, UnknownNameError
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
from task_models import MODELS
from timed_maps import timed_maps

HALF = 0.5  # share of a patch from which it counts as tumour
DRAWS = 50  # random maps per slide


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The slides, and one recipe for all models. The page gives the reasons."""

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
    """Return a digest of everything that a result depends on, except its job."""
    settings = json.dumps({"plan": asdict(plan), "models": MODELS, "half": HALF})
    return sha256(settings.encode()).hexdigest()[:12]


def prepare(plan: Plan, folder: Path) -> None:
    """Generate and encode the slides that do not exist yet."""
    with bar("Generating slides") as step:
        table = plan.cohort.write(folder / "cohort", progress=step)
    encoder = encoders.load(encoders.DEFAULT, device=pick_device("cpu"))
    with bar("Encoding") as step:
        job = Extraction(out=folder / "features", encoder=encoder, config=configure(encoder.card))
        job.run(find_slides([table.parent / "slides"]), progress=step)


def run(plan: Plan, folder: Path, job: Job) -> Result:
    """Train a model, explain the slides with tumour, and compare every map with the truth."""
    start = process_time()
    out = folder / f"{job.model}-{job.seed}"
    with quiet():
        trained = complete(plan.recipe(job, folder), out, device="cpu", progress=False)
    slides: list[str] = []
    maps: dict[str, dict[str, list[float]]] = {}
    for fold in trained.splits:
        model = trained.model(fold.name)
        for slide in fold.test:
            bag = bags.read(trained.paths[slide])
            share = shares(bag, tumour(folder / "cohort" / "truth" / f"{slide}.png"))
            if share.max() < HALF or share.min() > 0:
                continue  # an AUC needs patches of both classes
            slides.append(slide)
            for name, scores in score_maps(model, bag, share, trained, slide).items():
                for score, value in scores.items():
                    maps.setdefault(name, {}).setdefault(score, []).append(round(value, 5))
    return Result(
        *job,
        settings=fingerprint(plan),
        slide_aucs=[round(fold["auc"], 4) for fold in trained.scores["folds"].values()],
        slides=slides,
        maps=maps,
        seconds=round(process_time() - start, 2),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of caprmil: three folds of twenty slides are few, and that is known."""
    logger = logging.getLogger("caprmil")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def tumour(path: Path) -> NDArray[np.bool_]:
    """Return a mask of the tumour, on the grid of the truth."""
    return np.asarray(Image.open(path)) == KINDS.index("tumour")


def shares(bag: Bag, truth: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the share of each patch that is tumour."""
    boxes = explain.patch_boxes(bag.info, bag.coords, None)
    if boxes is None or bag.info.slide_mpp is None:
        raise CaprmilError("The bags have no coordinates. Encode the slides again.")
    scale = bag.info.slide_mpp / TRUTH_UM
    corners, side = np.rint(boxes.corners * scale).astype(int), round(boxes.side * scale)
    # A patch at the lower or right edge can exceed the truth: there is only background.
    padded = np.pad(truth, ((0, side), (0, side)))
    return np.array([padded[y : y + side, x : x + side].mean() for x, y in corners])


def score_maps(
    model: MILModel, bag: Bag, share: NDArray[np.float64], trained: Run, slide: str
) -> dict[str, dict[str, float]]:
    """Return the scores of each map: AUC of all patches and of clear patches, and area."""
    of = trained.target.names.index(CLASS)
    explanation = explain.explain(model, bag, target=trained.target, slide=slide)
    features, cells = torch.from_numpy(bag.features)[None], bag.grid()
    grid = None if cells is None else torch.from_numpy(cells)
    maps, costs = timed_maps(model, features, grid, trained.target.contrasts[of])
    stored = set(explanation.map_names) & {"class attention", "patch scores"}
    maps |= {name: explanation.values(name, of) for name in stored}
    deletion = explain.faithfulness(model, bag, explanation, of=of, maps=maps).curves
    if explanation.assignments is not None:
        n_tokens = explanation.assignments.shape[-1]
        tokens = [explanation.token(number) for number in range(n_tokens)]
        maps[TOKEN] = max(tokens, key=lambda token: roc_auc_score(share >= HALF, token))
    scores = {name: auc_scores(share, values) for name, values in maps.items()}
    chance = np.random.default_rng(crc32(slide.encode())).random((DRAWS, len(share)))
    drawn = [auc_scores(share, values) for values in chance]
    scores[RANDOM] = {name: float(np.mean([each[name] for each in drawn])) for name in drawn[0]}
    for name, curves in deletion.items():
        scores[name]["area"] = curves.area
    for name, cost in costs.items():
        scores[name]["cost"] = cost
    return scores


def auc_scores(share: NDArray[np.float64], values: NDArray[Any]) -> dict[str, float]:
    """Return the AUC of a map for tumour: among all patches, and among the clear ones."""
    clear = (share >= HALF) | (share == 0)
    return {
        "found": float(roc_auc_score(share >= HALF, values)),
        "clear": float(roc_auc_score(share[clear] > 0, values[clear])),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table, write page and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of the split and the weights")
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
        page = Page(args.out, "benchmarks/evidence.py", "Maps compared with a known tumour")
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
