"""Survival losses on generated bags: C-index on new slides over seeds, beside the best possible.

    python benchmarks/survival.py

A seed decides the slides, their times and the training. The oracle knows how many patches of a
slide carry the harmful signal. One bag in a step, unless the batch size is named.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import mean, stdev
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil import MILSurvival
from caprmil.synthetic import SurvivalBags
from caprmil.targets import Survival

METHODS: dict[str, dict[str, Any]] = {
    "Cox, memory": {"loss": "cox", "risk_set": "memory"},
    "discrete": {"loss": "discrete"},
    "Cox, batch of 16": {"loss": "cox", "risk_set": "batch", "batch_size": 16, "lr": 4e-3},
    "discrete, batch of 16": {"loss": "discrete", "batch_size": 16, "lr": 4e-3},
}
SETTINGS = {"dim": 16, "heads": 2, "tokens": 2}
NEW = 300  # slides to test on


class Outcome(NamedTuple):
    """The scores of a method with one seed."""

    c_index: float
    ibs: float
    seconds: float


def measure(method: str, slides: int, seed: int, epochs: int, effect: float) -> Outcome:
    """Train on some slides of a cohort, and score on others."""
    made = SurvivalBags(slides=slides + NEW, effect=effect, seed=seed)
    found = [made.bag(number) for number in range(made.slides)]
    bags = [bag.features for bag in found]
    labels = np.array([(bag.months, bag.event) for bag in found], dtype=np.float64)
    start = process_time()
    model = MILSurvival(
        settings=SETTINGS,
        epochs=epochs,
        seed=seed,
        device="cpu",
        horizons=(6.0, 12.0, 24.0, 36.0),
        **{"lr": 2e-3} | METHODS[method],
    ).fit(bags[:slides], labels[:slides])
    seconds = process_time() - start
    survival = model.predict_survival(bags[slides:])
    answers = np.concatenate([model.predict(bags[slides:])[:, None], survival], axis=1)
    scores = model.target_.metrics
    c_index, ibs = (scores[name].function(labels[slides:], answers) for name in ("c_index", "ibs"))
    return Outcome(c_index, ibs, seconds)


def oracle(slides: int, seed: int, effect: float) -> float:
    """Return the C-index of the best possible risks on the same new slides."""
    made = SurvivalBags(slides=slides + NEW, effect=effect, seed=seed)
    found = [made.bag(number) for number in range(slides, made.slides)]
    labels = np.array([(bag.months, bag.event) for bag in found], dtype=np.float64)
    risks: NDArray[np.float64] = np.array([[made.oracle(int(bag.planted.sum()))] for bag in found])
    return Survival().metrics["c_index"].function(labels, risks)


def table(sizes: Sequence[int], seeds: int, epochs: int, effect: float) -> str:
    """Return the mean and the standard deviation over seeds, as a table in Markdown."""
    head = ["training slides", "", "C-index", "difference from the oracle", "IBS", "CPU s"]
    lines = [head, ["---"] * len(head)]
    for size in sizes:
        best = [oracle(size, seed, effect) for seed in range(seeds)]
        lines.append([str(size), "oracle", _spread(best), "", "", ""])
        for method in METHODS:
            run = partial(measure, method, size, epochs=epochs, effect=effect)
            found = [run(seed=seed) for seed in range(seeds)]
            apart = [one.c_index - other for one, other in zip(found, best, strict=True)]
            c_index, ibs = (_spread([getattr(o, n) for o in found]) for n in ("c_index", "ibs"))
            seconds = f"{mean(o.seconds for o in found):.1f}"
            lines.append([str(size), method, c_index, _spread(apart, sign="+"), ibs, seconds])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _spread(values: Sequence[float], sign: str = "") -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.3f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[60, 120])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--effect", type=float, default=4.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(table(given.sizes, given.seeds, given.epochs, given.effect))


if __name__ == "__main__":
    main()
