"""What must be measured: the time of a training step and of an answer, and their peak memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

from caprmil.experiments.cost.memory import LiveTensors
from caprmil.experiments.cost.sizes import flops, parameters, random_bag
from caprmil.io.progress import Step
from caprmil.models import MILModel

MIB = 2**20
WARM_UP = 2  # rounds that do not count: the first pass asks for memory and picks its kernels


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one model costs on one bag."""

    name: str
    in_dim: int
    n_outputs: int
    n_patches: int
    device: str
    parameters: int
    flops: int
    """Of an evaluation pass, matrix products only, two for a multiplication with an addition."""
    train_ms: float
    """Median of a training step: forward, loss, backward, AdamW."""
    train_ms_spread: float
    """Between the quartiles."""
    inference_ms: float
    inference_ms_spread: float
    train_peak_mib: float
    """Beyond parameters, buffers and the bag; gradients and AdamW's moments are in it."""
    inference_peak_mib: float


@dataclass
class Bench:
    """A copy of a model with all that a step needs. The model itself learns nothing."""

    model: MILModel
    n_patches: int
    train_times: list[float] = field(default_factory=list)
    inference_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.bag = random_bag(self.model, self.n_patches)
        self.label = torch.zeros(1, dtype=torch.long, device=self.device)
        self.model.on_epoch_start(0, 1)
        self.start_anew()

    def start_anew(self) -> None:
        """Forget gradients and moments: the memory of a step begins with none of them."""
        self.model.zero_grad(set_to_none=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, weight_decay=1e-5)

    def train(self) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(self.bag.features, grid=self.bag.grid)
        loss = torch.stack(list(self.model.loss(output, self.label).values())).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def infer(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(self.bag.features, grid=self.bag.grid)

    def train_twice(self) -> None:
        """Do two steps: from the second on, the moments lie beside the activations."""
        self.start_anew()
        self.train()
        self.train()

    def peak_mib(self, work: Callable[[], None]) -> float:
        """Return the most memory that the work takes beyond the model and its bag."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            work()
            torch.cuda.synchronize(self.device)
            return (torch.cuda.max_memory_allocated(self.device) - before) / MIB
        known = [*self.model.parameters(), *self.model.buffers(), *self.bag, self.label]
        with LiveTensors(besides=known) as live:
            work()
        return live.peak / MIB

    def milliseconds(self, work: Callable[[], None]) -> float:
        synchronize(self.device)
        start = perf_counter()
        work()
        synchronize(self.device)
        return 1000 * (perf_counter() - start)

    def cost(self, name: str) -> Cost:
        """Put together what the rounds have measured, and what needs no rounds."""
        self.start_anew()
        inference_peak = self.peak_mib(self.infer)
        train_peak = self.peak_mib(self.train_twice)
        return Cost(
            name=name,
            in_dim=self.model.in_dim,
            n_outputs=self.model.n_outputs,
            n_patches=self.n_patches,
            device=str(self.device),
            parameters=parameters(self.model),
            flops=flops(self.model, self.n_patches),
            train_ms=float(np.median(self.train_times)),
            train_ms_spread=between_quartiles(self.train_times),
            inference_ms=float(np.median(self.inference_times)),
            inference_ms_spread=between_quartiles(self.inference_times),
            train_peak_mib=train_peak,
            inference_peak_mib=inference_peak,
        )


def measure(
    model: MILModel,
    n_patches: int = 1000,
    *,
    name: str = "",
    device: str | torch.device = "cpu",
    repeats: int = 15,
) -> Cost:
    """Return what a model costs on a bag of that size. The model is left as it was."""
    models = {name or type(model).__name__: model}
    return compare(models, n_patches, device=device, repeats=repeats)[0]


def compare(
    models: Mapping[str, MILModel],
    n_patches: int = 1000,
    *,
    device: str | torch.device = "cpu",
    repeats: int = 15,
    progress: Step | None = None,
) -> list[Cost]:
    """Return what models cost. They take turns, so that a busy minute strikes them all alike."""
    if n_patches < 1 or repeats < 1:
        raise ValueError(f"There must be patches and repeats: {n_patches=}, {repeats=}.")
    place, rounds = torch.device(device), WARM_UP + repeats
    done, total = 0, len(models) * (rounds + 1)
    with own_randomness(place):
        benches = {
            name: Bench(deepcopy(model).to(place), n_patches) for name, model in models.items()
        }
        for number in range(rounds):
            # To and fro: nobody comes always after the same one, whose memory is still warm.
            for bench in list(benches.values())[:: -1 if number % 2 else 1]:
                times = bench.milliseconds(bench.train), bench.milliseconds(bench.infer)
                if number >= WARM_UP:
                    bench.train_times.append(times[0])
                    bench.inference_times.append(times[1])
                done += 1
                if progress:
                    progress(done, total)
        costs = []
        for name, bench in benches.items():
            costs.append(bench.cost(name))
            done += 1
            if progress:
                progress(done, total)
    return costs


def between_quartiles(times: list[float]) -> float:
    low, high = np.quantile(times, [0.25, 0.75])
    return float(high - low)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Draw what is drawn from a seed of its own, and leave the caller's as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
