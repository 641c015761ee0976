"""A model around another one, which reads the patches."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from caprmil.models.base import Memory, MILModel, Output, Patches
from caprmil.models.influence import SummedParts


class WrappedModel(MILModel):
    """A model with another one inside, `image`, that has its properties as far as they agree."""

    image: MILModel

    def summed_parts(self) -> SummedParts | None:
        return self.image.summed_parts()

    def before_and_after_context(
        self, features: Float[Tensor, "1 N E"]
    ) -> tuple[Patches, Patches] | None:
        return self.image.before_and_after_context(features)

    def loss(self, output: Output, values: Tensor) -> dict[str, Float[Tensor, ""]]:
        return self.image.loss(output, values)

    def save_memory(self, how: Memory) -> None:
        self.image.save_memory(how)

    def on_epoch_start(self, epoch: int, n_bags: int) -> None:
        self.image.on_epoch_start(epoch, n_bags)

    def no_decay(self) -> set[str]:
        return {f"image.{name}" for name in self.image.no_decay()}

    @property
    def title(self) -> str:
        return self.image.title

    @property
    def order_matters(self) -> bool:  # type: ignore[override]
        return self.image.order_matters

    @property
    def weighs_patches(self) -> bool:  # type: ignore[override]
        return self.image.weighs_patches

    @property
    def has_patch_logits(self) -> bool:  # type: ignore[override]
        return self.image.has_patch_logits

    @property
    def streams(self) -> bool:
        return self.image.streams

    @property
    def streams_evidence(self) -> bool:
        return self.image.streams_evidence

    @property
    def top_k(self) -> int:
        return self.image.top_k

    @top_k.setter
    def top_k(self, k: int) -> None:
        self.image.top_k = k

    @property
    def token_shape(self) -> tuple[int, int, int] | None:
        return self.image.token_shape

    @property
    def n_assignments(self) -> int:
        return self.image.n_assignments


def build_image(image: MILModel | Mapping[str, Any], in_dim: int, n_outputs: int) -> MILModel:
    """Return the model behind another one, from its name and settings; a model is returned."""
    from caprmil.models.registry import create  # which imports these classes

    if isinstance(image, MILModel):
        return image
    settings = dict(image)
    return create(str(settings.pop("name", "")), in_dim, n_outputs, **settings)
