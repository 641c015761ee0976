"""Variants in the benchmark of speed: our models, the paper's equations, torchmil, the limit.

torchmil (MIT licence) is not a dependency. If it cannot be imported, its models are left out.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from caprmil.features import bags
from caprmil.models import CAPRMIL, MILModel, create
from caprmil.models.base import Memory
from plain import PlainCAPRMIL

N_CLASSES = 2
BAGS = 16  # small bags of one size, packed into one step, in the group `packed`
CHUNK = 1024  # patches that the limit processes at once: they fit into the CPU cache


class Unavailable(Exception):  # noqa: N818
    """The reason why a variant cannot be measured."""


class Variant(Protocol):
    """A model or a reference that is measured."""

    def infer(self, features: Tensor) -> object:
        """Run inference, without gradients."""

    def train(self, features: Tensor) -> object:
        """Run a training step: forward, loss, backward, AdamW."""

    def prepare(self, features: Tensor, folder: Path) -> None:
        """Do what is not measured, e.g. write the bag to disk."""

    def own(self) -> Iterable[Tensor]:
        """Return the tensors that exist before, which are not counted as its memory."""


class Model:
    """A torch module; `loss` returns its loss of a bag."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        self.model, self.loss = model, loss
        # Fused, as training on a CPU (training/module.py).
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=2e-4, weight_decay=1e-5, fused=True
        )

    def prepare(self, features: Tensor, folder: Path) -> None:
        """Do nothing: only the bag is needed."""

    def infer(self, features: Tensor) -> object:
        self.model.eval()
        with torch.no_grad():
            return self.model(features)

    def train(self, features: Tensor) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(features).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def own(self) -> Iterable[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()


def as_variant(model: MILModel) -> Model:
    """Return a model of the package as a variant."""
    model.on_epoch_start(0, 1)
    label = torch.zeros(1, dtype=torch.long)

    def loss(features: Tensor) -> Tensor:
        return torch.stack(list(model.loss(model(features), label).values())).sum()

    return Model(model, loss)


def ours(name: str, in_dim: int) -> Model:
    return as_variant(create(name, in_dim, N_CLASSES))


def plain(in_dim: int, pool: str = "mean") -> Model:
    return as_variant(PlainCAPRMIL(CAPRMIL(in_dim, N_CLASSES, pool=pool)))


class Packed(Model):
    """CAPRMIL on small bags of the same size, which are packed into one."""

    def __init__(self, in_dim: int) -> None:
        self.network = create("caprmil", in_dim, N_CLASSES)
        super().__init__(self.network, self.packed_loss)

    def packed_loss(self, features: Tensor) -> Tensor:
        output = self.network(features, sizes=(features.shape[1] // BAGS,) * BAGS)
        labels = torch.arange(BAGS) % N_CLASSES
        return torch.stack(list(self.network.loss(output, labels).values())).sum()


class OneByOne(Model):
    """The plain form on the same small bags, one bag per step."""

    def __init__(self, in_dim: int) -> None:
        single = plain(in_dim)
        super().__init__(single.model, single.loss)

    def train(self, features: Tensor) -> None:
        for bag in torch.split(features, features.shape[1] // BAGS, dim=1):
            super().train(bag)


class Limit:
    """The two products that CAPRMIL needs in any case, and the features read once.

    The products are those of the projection and of the first layer of the MLP, in chunks, written
    into allocated memory, which is the fastest way that we know. In training each product has a
    gradient of its weights, and the second one also of its patches.
    """

    def __init__(self, in_dim: int, dim: int = 128, hidden: int = 512) -> None:
        self.first, self.second = torch.randn(in_dim, dim), torch.randn(dim, hidden)
        self.patches, self.hidden = torch.empty(CHUNK, dim), torch.empty(CHUNK, hidden)
        self.back = torch.empty(CHUNK, dim)
        self.gradients = [torch.zeros_like(self.first), torch.zeros_like(self.second)]

    def prepare(self, features: Tensor, folder: Path) -> None:
        """Do nothing: only the bag is needed."""

    def infer(self, features: Tensor) -> object:
        for rows in torch.split(features[0], CHUNK):
            n = len(rows)
            torch.mm(rows, self.first, out=self.patches[:n])
            torch.mm(self.patches[:n], self.second, out=self.hidden[:n])
        return features.sum()

    def train(self, features: Tensor) -> object:
        output = self.infer(features)
        for rows in torch.split(features[0], CHUNK):
            n = len(rows)
            self.gradients[0].addmm_(rows.mT, self.patches[:n])
            self.gradients[1].addmm_(self.patches[:n].mT, self.hidden[:n])
            torch.mm(self.hidden[:n], self.second.mT, out=self.back[:n])
        return output

    def own(self) -> Iterable[Tensor]:
        return [
            self.first, self.second, self.patches, self.hidden, self.back, *self.gradients
        ]  # fmt: skip


class Stored(Model):
    """CAPRMIL on a bag in a file, in half precision: read completely, or streamed.

    A streamed bag is read twice. Between the two, projected patches can be kept, as in a prediction
    of up to 400,000 patches. If they are not kept, memory does not grow with the bag.
    """

    def __init__(self, in_dim: int, *, streamed: bool, keep: bool = False) -> None:
        self.network = create("caprmil", in_dim, N_CLASSES).eval()
        super().__init__(self.network, lambda _: torch.zeros(()))
        self.streamed, self.keep, self.path = streamed, keep, Path()

    def prepare(self, features: Tensor, folder: Path) -> None:
        self.path = folder / "bag.h5"
        if not self.path.exists():
            bags.write(self.path, features[0].numpy())

    def infer(self, features: Tensor) -> object:  # noqa: ARG002
        if not self.streamed:
            whole = torch.from_numpy(bags.read(self.path).features)
            return super().infer(whole[None])
        with bags.streaming(self.path) as stream:
            return self.network.stream(
                lambda: (torch.from_numpy(some)[None] for some in stream()), keep=self.keep
            )


def saving(memory: Memory) -> Callable[[int], Model]:
    """Return a function that creates CAPRMIL with a memory mode for training."""

    def build(in_dim: int) -> Model:
        model = create("caprmil", in_dim, N_CLASSES)
        model.save_memory(memory)
        return as_variant(model)

    return build


def torchmil(name: str, in_dim: int, **settings: Any) -> Model:
    """Return a model of torchmil in the sizes of ours.

    Its models have one logit where ours have one per class. The projection of patches is a module
    that is passed to them.
    """
    try:
        kinds = import_module("torchmil.models")
    except ImportError as problem:
        raise Unavailable(f"torchmil cannot be imported ({problem})") from None
    model = getattr(kinds, name)((in_dim,), **settings)
    label = torch.zeros(1)
    masked = {"mask": torch.ones(1, 1, dtype=torch.bool)} if name == "DTFDMIL" else {}

    def keywords(features: Tensor) -> dict[str, Tensor]:
        return {key: value.expand(features.shape[:2]) for key, value in masked.items()}

    def loss(features: Tensor) -> Tensor:
        _, terms = model.compute_loss(label, features, **keywords(features))
        return torch.stack(list(terms.values())).sum()

    variant = Model(model, loss)
    if masked:  # this model requires a mask
        variant.infer = lambda features: _masked_infer(model, features, keywords)  # type: ignore[method-assign]
    return variant


@torch.no_grad()
def _masked_infer(model: nn.Module, features: Tensor, keywords: Callable[..., Any]) -> object:
    return model.eval()(features, **keywords(features))


def projection(in_dim: int, *, dropout: float = 0.0, bias: bool = True) -> nn.Module:
    """Return the first layer of the models of width 512."""
    parts = [nn.Linear(in_dim, 512, bias=bias), nn.ReLU()]
    return nn.Sequential(*parts, *[nn.Dropout(dropout)] * (dropout > 0))


def _torchmil_abmil(e: int) -> Model:
    return torchmil("ABMIL", e, att_dim=128, gated=True, feat_ext=projection(e))


def _torchmil_clam(e: int) -> Model:
    front = projection(e, dropout=0.25)
    return torchmil("CLAM_SB", e, att_dim=384, gated=True, k_sample=32, feat_ext=front)


def _torchmil_dsmil(e: int) -> Model:
    return torchmil("DSMIL", e, att_dim=128, nonlinear_q=True)


def _torchmil_dtfd(e: int) -> Model:
    front = projection(e, bias=False)
    return torchmil("DTFDMIL", e, att_dim=128, n_groups=4, distill_mode="afs", feat_ext=front)


def _torchmil_transmil(e: int) -> Model:
    return torchmil("TransMIL", e, att_dim=512, n_heads=8, n_landmarks=256, dropout=0.1)


def _ours(name: str) -> Callable[[int], Variant]:
    return lambda in_dim: ours(name, in_dim)


LIMIT, PLAIN = "limit", "plain form"
PACKED, ONE_BY_ONE = f"caprmil, {BAGS} packed bags", f"plain form, {BAGS} bags one by one"
READ, STREAMED = "caprmil, file read whole", "caprmil, file streamed"
STREAMED_KEEPING = "caprmil, file streamed, patches kept"
WHOLE, KEEP, STREAM = (f"caprmil, memory {how}" for how in ("whole", "keep", "stream"))

VARIANTS: dict[str, Callable[[int], Variant]] = {
    LIMIT: Limit,
    PLAIN: plain,
    **{
        name: _ours(name)
        for name in (
            *("caprmil", "caprmil+attention", "caprmil+gated"),
            *("mean", "abmil", "clam", "dsmil", "dtfd"),
            *("transmil", "dgrmil", "bayesmil", "sgpmil"),
        )
    },
    READ: partial(Stored, streamed=False),
    STREAMED_KEEPING: partial(Stored, streamed=True, keep=True),
    STREAMED: partial(Stored, streamed=True),
    WHOLE: saving("whole"),
    KEEP: saving("keep"),
    STREAM: saving("stream"),
    PACKED: Packed,
    ONE_BY_ONE: OneByOne,
    "torchmil ABMIL": _torchmil_abmil,
    "torchmil CLAM_SB": _torchmil_clam,
    "torchmil DSMIL": _torchmil_dsmil,
    "torchmil DTFDMIL": _torchmil_dtfd,
    "torchmil TransMIL": _torchmil_transmil,
}
"""A function from the width of the features to the variant, by name."""

PEERS = {
    "abmil": "torchmil ABMIL",
    "clam": "torchmil CLAM_SB",
    "dsmil": "torchmil DSMIL",
    "dtfd": "torchmil DTFDMIL",
    "transmil": "torchmil TransMIL",
}
"""Our models, and the same models of torchmil."""


class Group:
    """Variants that are measured in alternation, and their largest bags.

    Some would take hours or too much memory on the largest bags; they have smaller limits. `only`
    is a size of their own, instead of those of the other groups; they are not in the tables.
    """

    def __init__(
        self, *variants: str, infer: int = 200_000, train: int = 200_000, only: int | None = None
    ) -> None:
        self.variants: Sequence[str] = variants
        self.largest, self.only = {"infer": infer, "train": train}, only


GROUPS: dict[str, Group] = {
    "caprmil": Group(LIMIT, "caprmil", WHOLE, PLAIN),
    "pools": Group("caprmil+attention", "caprmil+gated", "mean", train=50_000),
    "memory": Group(PLAIN, KEEP, STREAM, infer=0, train=50_000),
    "disk": Group("caprmil", READ, STREAMED_KEEPING, STREAMED, infer=50_000, train=0),
    **{name: Group(name, peer, infer=50_000, train=50_000) for name, peer in PEERS.items()},
    "abmil": Group("abmil", PEERS["abmil"], train=50_000),
    "transmil": Group("transmil", PEERS["transmil"], infer=10_000, train=10_000),
    "dgrmil": Group("dgrmil", infer=10_000, train=10_000),
    "draws": Group("bayesmil", "sgpmil", infer=10_000, train=10_000),
    "packed": Group(LIMIT, ONE_BY_ONE, PACKED, infer=0, only=500 * BAGS),
}
