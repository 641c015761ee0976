"""The loss of several targets: the weighted sum of theirs, with weights given or learned."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from caprmil.targets.part import Part
from caprmil.targets.target import Criterion

Loss = Callable[[Tensor, Tensor], Tensor]


class PartLosses(nn.Module):
    """The weighted sum of the losses of parts, each on the slides that have its label.

    A slide without the label adds nothing: a part that half of the slides have counts half. With
    `learned`, each loss L is exp(-s) L + s / 2, where s is a parameter, the logarithm of the
    variance of the part (Kendall et al., CVPR 2018). At the best s, exp(s) is twice the loss.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        criteria: Mapping[str, Criterion],
        weights: Mapping[str, float],
        *,
        learned: bool,
    ) -> None:
        super().__init__()
        self.parts, self.criteria, self.weights = dict(parts), dict(criteria), dict(weights)
        self.own = nn.ModuleList(c for c in criteria.values() if isinstance(c, nn.Module))
        self.log_variances = nn.Parameter(torch.zeros(len(parts))) if learned else None

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self._sum(outputs, labels, self.criteria)

    def validation_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of all validation slides together, as early stopping watches it."""

        def of(name: str) -> Loss:
            def loss(own: Tensor, values: Tensor) -> Tensor:
                together = self.parts[name].target.validation_loss(own, values)
                return self.criteria[name](own, values) if together is None else together

            return loss

        with torch.no_grad():
            return self._sum(outputs, labels, {name: of(name) for name in self.criteria})

    def _sum(self, outputs: Tensor, labels: Tensor, losses: Mapping[str, Loss]) -> Tensor:
        terms = []
        for number, (name, part) in enumerate(self.parts.items()):
            own, values = outputs[..., part.outputs], part.values_of(labels)
            known = torch.from_numpy(part.target.known(values.detach().cpu().numpy()))
            share = float(known.double().mean())
            known = known.to(own.device)
            loss = losses[name](own[known], values[known]) if share else own.float().sum() * 0
            if self.log_variances is not None:
                s = self.log_variances[number].to(loss)
                loss = (-s).exp() * loss + s / 2
            terms.append(self.weights[name] * share * loss)
        return torch.stack(terms).sum()

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the losses of parts remember from step to step, for checkpoints."""
        return {name: own.state_dict() for name, own in self._with_memory().items()}

    def set_extra_state(self, state: Any) -> None:
        for name, own in self._with_memory().items():
            own.load_state_dict(state[name])

    def _with_memory(self) -> dict[str, Any]:
        return {
            name: own
            for name, own in self.criteria.items()
            if hasattr(own, "state_dict") and not isinstance(own, nn.Module)
        }

    def numbers(self) -> dict[str, float]:
        """Return the learned weights of an epoch, for the history of a training."""
        if self.log_variances is None:
            return {}
        found = (-self.log_variances.detach()).exp().tolist()
        return {
            f"weight_{name}": self.weights[name] * value
            for name, value in zip(self.parts, found, strict=True)
        }
