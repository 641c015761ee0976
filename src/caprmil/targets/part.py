"""A part of a target that is made of several: where its numbers are among those of all."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from caprmil.targets.target import Answers, Label, Labels, Target

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """A target, and which of the labels, outputs and answers of all parts are its own."""

    name: str
    target: Target
    labels: slice
    outputs: slice
    answers: slice
    contrasts: slice

    @property
    def is_scalar(self) -> bool:
        """Whether a label is one number."""
        return is_scalar(self.target)

    def label_of(self, label: Label) -> Label | None:
        """Return the own label; None if it is missing."""
        own = tuple(label)[self.labels]
        found = self.target.as_labels([own[0] if self.is_scalar else own])
        if not self.target.known(found)[0]:
            return None
        return found[0].item() if self.is_scalar else tuple(found[0].tolist())

    def labels_of(self, labels: Labels) -> Labels:
        """Return the own labels (n,) or (n, L), as the target has them."""
        own = labels[:, self.labels]
        return self.target.as_labels(own[:, 0].tolist() if self.is_scalar else own.tolist())

    def answers_of(self, answers: Answers) -> Answers:
        """Return the own answers (n, A)."""
        return answers[:, self.answers]

    def known_of(self, labels: Labels, answers: Answers) -> tuple[Labels, Answers]:
        """Return the own labels and answers of the slides whose label is known."""
        own = self.labels_of(labels)
        known = self.target.known(own)
        return own[known], self.answers_of(answers)[known]

    def values_of(self, labels: "Tensor") -> "Tensor":
        """Return the own labels of a batch, in the type that the loss of the target takes."""
        import torch

        own = labels[:, self.labels]
        own = own[:, 0] if self.is_scalar else own
        whole = np.issubdtype(self.target.as_labels([None]).dtype, np.integer)
        return own.to(torch.int64) if whole else own


def is_scalar(target: Target) -> bool:
    """Return whether a label of a target is one number."""
    return np.ndim(target.missing) == 0


def lay_out(targets: dict[str, Target]) -> dict[str, Part]:
    """Return the parts of several targets, whose numbers follow each other."""
    ends = np.zeros(4, dtype=int)
    parts = {}
    for name, target in targets.items():
        starts = ends
        numbers = np.size(target.missing), target.n_outputs
        ends = starts + np.array([*numbers, len(target.columns), len(target.contrasts)])
        slices = (slice(int(a), int(b)) for a, b in zip(starts, ends, strict=True))
        labels, outputs, answers, contrasts = slices
        parts[name] = Part(
            name=name,
            target=target,
            labels=labels,
            outputs=outputs,
            answers=answers,
            contrasts=contrasts,
        )
    return parts
