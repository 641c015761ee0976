"""Parameters and operations, which are counted; time and peak memory, which are measured."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from caprmil.experiments.cost.live_tensors import LiveTensors
from caprmil.io.progress import Step
from caprmil.models import MILModel

MIB = 2**20
WARM_UP = 2  # rounds that do not count: the first pass allocates memory and selects kernels


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
    """Of a forward pass in evaluation: matrix products only, a multiply-add counts as two."""
    flops_as_written: int
    """Of the same pass by the equations of the model, before products are reordered."""
    train_ms: float
    """Median of a training step: forward, loss, backward, AdamW."""
    train_ms_spread: float
    """Interquartile range."""
    inference_ms: float
    inference_ms_spread: float
    train_peak_mib: float
    """Beyond parameters, buffers and the bag. It includes gradients and AdamW's moments."""
    inference_peak_mib: float


class RandomBag(NamedTuple):
    """Random features on a square grid, for models that use positions."""

    features: Tensor
    grid: Tensor


def random_bag(model: MILModel, n_patches: int, seed: int = 0) -> RandomBag:
    """Return a bag of the model's width, on its device."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, n_patches, model.in_dim, generator=generator)
    side = max(1, round(n_patches**0.5))
    cells = torch.arange(n_patches)
    grid = torch.stack([cells % side, cells // side], dim=-1)[None]
    return RandomBag(features.to(device), grid.to(device))


def parameters(model: MILModel) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _linear_flops(values: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * values.numel() * weight[0]


# Torch's counter does not know the products of `models/products.py`.
ONEDNN_PRODUCTS: dict[Any, Any] = (
    {torch.ops.mkldnn._linear_pointwise: _linear_flops}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else {}
)


def flops(model: MILModel, n_patches: int = 1000, *, as_written: bool = False) -> int:
    """Return the operations of one forward pass in evaluation; a multiply-add counts as two.

    A single bag may take a faster form with the same result. With `as_written` it takes
    `forward_bags`, which has the equations of the model. Torch's counter sees matrix products only,
    and nothing of the fused attention on CPUs. So attention is computed in its plain form here.
    """
    was_training = model.training
    bag = random_bag(model, n_patches)
    counter = FlopCounterMode(display=False, custom_mapping=ONEDNN_PRODUCTS)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model.eval()
        if as_written:
            model.forward_bags(*model.validate(bag.features, None), bag.grid)
        else:
            model(bag.features, grid=bag.grid)
    model.train(was_training)
    return int(counter.get_total_flops())


@dataclass
class Bench:
    """A copy of a model with a bag, an optimizer, and the times measured so far."""

    model: MILModel
    n_patches: int
    train_times: list[float] = field(default_factory=list)
    inference_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.bag = random_bag(self.model, self.n_patches)
        self.label = torch.zeros(1, dtype=torch.long, device=self.device)
        self.model.on_epoch_start(0, 1)
        self.reset()

    def reset(self) -> None:
        """Drop gradients and moments, so that the memory of a step is counted from zero."""
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
        """Run two steps: only from the second on do AdamW's moments exist during the forward."""
        self.reset()
        self.train()
        self.train()

    def peak_mib(self, work: Callable[[], None]) -> float:
        """Return the peak memory of the work, beyond the model and its bag."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            work()
            torch.cuda.synchronize(self.device)
            return (torch.cuda.max_memory_allocated(self.device) - before) / MIB
        known = [*self.model.parameters(), *self.model.buffers(), *self.bag, self.label]
        with LiveTensors(exclude=known) as live:
            work()
        return live.peak / MIB

    def milliseconds(self, work: Callable[[], None]) -> float:
        synchronize(self.device)
        start = perf_counter()
        work()
        synchronize(self.device)
        return 1000 * (perf_counter() - start)

    def cost(self, name: str) -> Cost:
        """Return the times of the rounds, with peak memory, parameters and operations."""
        self.reset()
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
            flops_as_written=flops(self.model, self.n_patches, as_written=True),
            train_ms=float(np.median(self.train_times)),
            train_ms_spread=interquartile_range(self.train_times),
            inference_ms=float(np.median(self.inference_times)),
            inference_ms_spread=interquartile_range(self.inference_times),
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
    """Return what a model costs on a bag of that size. The model itself is not changed."""
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
    """Return what models cost. They alternate, so that a busy minute affects all of them."""
    if n_patches < 1 or repeats < 1:
        raise ValueError(f"There must be patches and repeats: {n_patches=}, {repeats=}.")
    device, rounds = torch.device(device), WARM_UP + repeats
    done, total = 0, len(models) * (rounds + 1)
    with fixed_seed(device):
        benches = {
            name: Bench(deepcopy(model).to(device), n_patches) for name, model in models.items()
        }
        for number in range(rounds):
            # Every other round is reversed: no model always follows the same one, with its caches.
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


def interquartile_range(times: list[float]) -> float:
    low, high = np.quantile(times, [0.25, 0.75])
    return float(high - low)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def fixed_seed(device: torch.device) -> Iterator[None]:
    """Draw random numbers from a fixed seed, and restore the caller's state."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
