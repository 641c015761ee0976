"""Memory counted tensor by tensor: the same number on every machine."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all tensors that are created inside the context and still alive, and their peak.

    Views share their storage and count once. Tensors that are saved for the backward pass count.
    Scratch memory that a kernel allocates and frees within one operation does not.

    >>> with LiveTensors() as live:
    ...     model(features)
    >>> live.peak
    """

    def __init__(self, *, exclude: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.excluded = WeakIdKeyDictionary({t.untyped_storage(): True for t in exclude})
        self.alive = WeakIdKeyDictionary()
        self.peak = 0

    @property
    def now(self) -> int:
        """The bytes of the tensors that are alive."""
        return sum(storage.nbytes() for storage in self.alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage not in self.excluded:
                    self.alive[storage] = True
        self.peak = max(self.peak, self.now)
        return result
