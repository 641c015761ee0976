"""Memory counted tensor by tensor: the same number on every machine, without asking the system."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors made inside that are still alive, and keeps the peak.

    Views share their storage and count once; so does what is only kept for the backward pass,
    which is seen too. What a kernel takes for itself and returns within one operation is not.

    >>> with LiveTensors() as live:
    ...     model(features)
    >>> live.peak
    """

    def __init__(self, *, besides: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.besides = WeakIdKeyDictionary({t.untyped_storage(): True for t in besides})
        self.alive = WeakIdKeyDictionary()
        self.peak = 0

    @property
    def now(self) -> int:
        """The bytes of the tensors that are alive."""
        return sum(storage.nbytes() for storage in self.alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage not in self.besides:
                    self.alive[storage] = True
        self.peak = max(self.peak, self.now)
        return made
