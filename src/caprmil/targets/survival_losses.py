"""Losses of survival: Cox's partial likelihood over a batch or a memory, and discrete time.

Labels are (B, 2): time, and 1 for an event or 0 for a censored slide.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Labels = Float[Tensor, "B 2"]


def cox_loss(risks: Float[Tensor, " B"], labels: Labels) -> Float[Tensor, ""]:
    """Return minus the log partial likelihood per event, with Efron's ties; 0 without events."""
    risks, times, events = risks.double(), labels[:, 0].double(), labels[:, 1] > 0
    if not events.any():
        return 0 * risks.sum()
    order = torch.argsort(times, descending=True)
    risks, times, events = risks[order], times[order], events[order]
    _, group, counts = torch.unique_consecutive(times, return_inverse=True, return_counts=True)
    hazards = (risks - risks.detach().max()).exp()
    at_risk = hazards.cumsum(0)[counts.cumsum(0) - 1]  # of each time: all of it and later ones
    died = events.double()
    deaths = torch.zeros_like(at_risk).index_add(0, group, died)
    tied = torch.zeros_like(at_risk).index_add(0, group, hazards * died)
    # The one after l of d tied events has l/d of their hazards taken out of its risk set.
    before = died.cumsum(0) - died
    first = torch.cat([before.new_zeros(1), deaths.cumsum(0)[:-1]])
    share = (before - first[group]) / deaths.clamp(min=1)[group]
    total = at_risk[group] - share * tied[group]
    total = total[events].clamp(min=torch.finfo(torch.float64).tiny)
    likelihood = risks[events] - risks.detach().max() - total.log()
    return -likelihood.mean()


class BatchCox:
    """Cox's loss with the slides of a step as the risk set."""

    def __call__(self, outputs: Float[Tensor, "B 1"], labels: Labels) -> Float[Tensor, ""]:
        return cox_loss(outputs[:, 0], labels).to(outputs.dtype)


class MemoryCox:
    """Cox's loss with all training slides as the risk set, also with one bag in a step.

    The risks of the slides that are not in a step are remembered from when they were last seen, at
    most an epoch before. Only the slides of the step have a gradient: it is that of the loss of
    the whole training part, as far as they contribute to it.

    A place in the memory belongs to a label. Slides with the same time and event share their
    places in turn.
    """

    def __init__(self, labels: Sequence[tuple[float, float]]) -> None:
        self.labels = torch.tensor(np.array(labels, dtype=np.float32).reshape(-1, 2))
        self.risks = torch.full((len(self.labels),), torch.nan)
        self.turns = torch.zeros(len(self.labels), dtype=torch.long)
        self.places: dict[tuple[float, ...], list[int]] = {}
        for place, label in enumerate(self.labels.tolist()):
            self.places.setdefault(tuple(label), []).append(place)

    def __call__(self, outputs: Float[Tensor, "B 1"], labels: Labels) -> Float[Tensor, ""]:
        risks = outputs[:, 0]
        if not torch.is_grad_enabled():  # evaluation does not change the memory
            return cox_loss(risks, labels).to(outputs.dtype)
        taken = self._take(labels)
        known = ~self.risks.isnan()
        known[taken] = False
        everyone = torch.cat([self.risks[known].to(risks), risks])
        truth = torch.cat([self.labels[known].to(labels), labels])
        self.risks[taken] = risks.detach().float().cpu()
        loss = cox_loss(everyone, truth)
        # A slide is one of many in the loss: its gradient is scaled to that of a mean over slides.
        scaled = loss * (len(everyone) / len(risks))
        return (scaled - scaled.detach() + loss.detach()).to(outputs.dtype)

    def _take(self, labels: Labels) -> list[int]:
        """Return a place in the memory for each label: of those of its own, the oldest."""
        found = []
        for label in labels.detach().float().cpu().tolist():
            own = self.places[tuple(label)]
            turn = int(self.turns[own[0]])
            found.append(own[turn % len(own)])
            self.turns[own[0]] = turn + 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, which a resumed training continues with."""
        return {"risks": self.risks.clone(), "turns": self.turns.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the memory of an interrupted training."""
        self.risks, self.turns = state["risks"].clone(), state["turns"].clone()


class DiscreteLoss:
    """The likelihood of logistic hazards: one output per interval of time.

    An event counts in its interval, and as survival of those before. A slide that is censored
    within an interval has survived a part of it, at a constant hazard.
    """

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)

    def __call__(self, outputs: Float[Tensor, "B K"], labels: Labels) -> Float[Tensor, ""]:
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        edges = torch.tensor(self.edges, dtype=torch.float64, device=outputs.device)
        times, died = labels[:, 0].double(), (labels[:, 1] > 0).to(outputs)
        place = torch.searchsorted(edges, times.contiguous()).clamp(max=len(edges) - 1)
        passed = exposure(times, edges).to(outputs)
        event = torch.nn.functional.one_hot(place, len(edges)).to(outputs) * died[:, None]
        survived = passed * (1 - event)
        log_hazard = torch.nn.functional.logsigmoid(outputs)
        log_survival = torch.nn.functional.logsigmoid(-outputs)
        return -(event * log_hazard + survived * log_survival).sum(dim=1).mean()


def exposure(times: Tensor, edges: Tensor) -> Float[Tensor, "B K"]:
    """Return the share of each interval that has passed at each time. Intervals end at edges."""
    starts = torch.cat([edges.new_zeros(1), edges[:-1]])
    width = edges - starts
    passed = (times[:, None] - starts) / torch.where(width > 0, width, 1)
    return torch.where(width > 0, passed.clamp(0, 1), 0)
