"""Targets that are made of others: one model, and a few outputs for each of them.

Everything is passed to the parts. A slide may lack the labels of some of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.targets import strata
from caprmil.targets.metric import Metric
from caprmil.targets.named_cells import join_cells, split_cells
from caprmil.targets.part import Part, lay_out
from caprmil.targets.part_metrics import of_part
from caprmil.targets.recalibration import Recalibration, unchanged
from caprmil.targets.target import Answers, Contrast, Criterion, Label, Labels, Target

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Composite(Target):
    """Base of targets that are made of others. A label is the numbers of all parts, in order."""

    has_parts: ClassVar[bool] = True
    answer_name: ClassVar[str] = "answers"
    strata_title: ClassVar[str] = "Combinations of labels"
    merges_strata: ClassVar[bool] = True

    @property
    def targets(self) -> dict[str, Target]:
        """The target of each part, by its name."""
        raise NotImplementedError

    def with_targets(self, targets: dict[str, Target]) -> Self:
        """Return the same with other targets for the parts."""
        raise NotImplementedError

    def cells_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the label columns of a part, in a table of predictions."""
        own = self.targets[name].label_names
        return tuple(f"{name}.{column}" for column in own)

    def setting_of(self, name: str) -> str:
        """Return where the settings of a part are in a recipe, for errors."""
        raise NotImplementedError

    @property
    def parts(self) -> Mapping[str, Part]:
        return self._parts

    @cached_property
    def _parts(self) -> dict[str, Part]:
        return lay_out(self.targets)

    # Labels

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(column for name in self.parts for column in self.cells_of(name))

    def named(self, columns: Sequence[str]) -> Self:
        at, found = 0, dict[str, Target]()
        for name, target in self.targets.items():
            n = len(target.label_names)
            found[name] = target.named(columns[at : at + n])
            at += n
        return self.with_targets(found)

    def join_cells(self, cells: Sequence[str]) -> str:
        return join_cells(self._joined(cells))

    def _joined(self, cells: Sequence[str]) -> dict[str, str]:
        """Return the text of each part's label, from the cells of all label columns."""
        at, found = 0, {}
        for name, part in self.parts.items():
            n = len(self.cells_of(name))
            text = part.target.join_cells(cells[at : at + n])
            found[name] = text if part.target.is_label(text) else ""
            at += n
        return found

    def split_label(self, label: Label) -> tuple[str, ...]:
        cells: list[str] = []
        for name, part in self.parts.items():
            own = part.label_of(label)
            blank = ("",) * len(self.cells_of(name))
            cells += blank if own is None else part.target.split_label(own)
        return tuple(cells)

    def read(
        self, cells: Mapping[str, str], column: str, found: Findings, *, required: bool
    ) -> tuple[Self, dict[str, Label]]:
        texts = {slide: split_cells(cell, self.parts) for slide, cell in cells.items()}
        targets, labels = dict(self.targets), dict[str, dict[str, Label]]()
        for name, target in self.targets.items():
            own = {slide: text[name] for slide, text in texts.items() if text[name]}
            columns = " and ".join(self.columns_of(name))
            if not own:
                text = f"No slide has a label of {name} (column {columns})."
                advice = f" Add them, or change {self.setting_of(name)}."
                (found.problems if required else found.notes).append(text + advice)
                continue
            of_part = Findings()
            targets[name], labels[name] = target.read(own, columns, of_part, required=required)
            self._add(name, of_part, found)
            if missing := len(cells) - len(labels[name]):
                known = f"{len(labels[name])} of {len(cells)} slides have a label of {name}"
                found.notes.append(f"{known}; the other {missing} do not count for it.")
        none = [slide for slide in cells if not any(slide in own for own in labels.values())]
        report = found.problem if required else found.note
        report("Slides without any label", none, "Fill their labels, or remove their rows.")
        read = self.with_targets(targets)
        return read, {
            slide: read.join_labels({name: own.get(slide) for name, own in labels.items()})
            for slide in cells
            if slide not in none
        }

    def columns_of(self, name: str) -> tuple[str, ...]:
        """Return the columns of a cohort that hold the label of a part, for errors."""
        return self.cells_of(name)

    def _add(self, name: str, of_part: Findings, found: Findings) -> None:
        """Add the findings of a part, with its name and the place of its settings."""
        for texts, own in ((found.problems, of_part.problems), (found.notes, of_part.notes)):
            texts += [f"{name}: {t.replace('[target]', self.setting_of(name))}" for t in own]

    def join_labels(self, labels: Mapping[str, Label | None]) -> Label:
        """Return one label from those of the parts; None or no entry is missing."""
        numbers: list[float] = []
        for name, part in self.parts.items():
            own = labels.get(name)
            own = part.target.missing if own is None else own
            numbers += [own] if part.is_scalar else own
        return tuple(map(float, numbers))

    @property
    def ready(self) -> bool:
        return all(target.ready for target in self.targets.values())

    def example(self) -> Self:
        return self.with_targets({name: own.example() for name, own in self.targets.items()})

    def strata(self, labels: Mapping[str, Label]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return combinations of the strata by each part, in which rare labels are in balance."""
        known = {name: self._known_of(part, labels) for name, part in self.parts.items()}
        own = {name: self.targets[name].strata(found) for name, found in known.items() if found}
        return strata.cross(list(labels), own)

    def _known_of(self, part: Part, labels: Mapping[str, Label]) -> dict[str, Label]:
        if not labels:
            return {}
        own = part.labels_of(np.array(list(labels.values()), dtype=np.float64))
        known = part.target.known(own)
        values = zip(labels, own.tolist(), known.tolist(), strict=True)
        return {slide: value for slide, value, is_known in values if is_known}

    @property
    def missing(self) -> Label:
        return self.join_labels({})

    def known(self, labels: Labels) -> NDArray[np.bool_]:
        known = [part.target.known(part.labels_of(labels)) for part in self.parts.values()]
        return np.asarray(np.any(known, axis=0))

    def as_labels(self, labels: Iterable[Label | None]) -> Labels:
        rows = [self.missing if label is None else label for label in labels]
        return np.array(rows, dtype=np.float64).reshape(len(rows), -1)

    def check_labels(self, labels: Labels) -> None:
        width = len(self.missing)
        if labels.ndim != 2 or labels.shape[1] != width:
            raise ValueError(f"Labels are (slides, {width}). {labels.shape=}")
        for part in self.parts.values():
            part.target.check_labels(part.labels_of(labels))

    def show_label(self, label: Label) -> str:
        found = {name: part.label_of(label) for name, part in self.parts.items()}
        return join_cells(
            {n: self.targets[n].show_label(own) for n, own in found.items() if own is not None}
        )

    def is_label(self, cell: str) -> bool:
        return bool(cell)

    def parse_label(self, cell: str) -> Label:
        found: dict[str, Label] = {}
        for name, own in split_cells(cell, self.parts).items():
            if own:
                try:
                    found[name] = self.targets[name].parse_label(own)
                except ValueError as problem:
                    raise ValueError(f"{name}: {problem}") from None
        if not found:
            raise ValueError(f"label '{cell}' has nothing of {', '.join(self.parts)}.")
        return self.join_labels(found)

    def agree(self, labels: Iterable[Label]) -> bool:
        known = [[part.label_of(label) for part in self.parts.values()] for label in labels]
        return all(
            part.target.agree([own for own in column if own is not None])
            for part, column in zip(self.parts.values(), zip(*known, strict=True), strict=False)
        )

    def merge(self, labels: Sequence[Label]) -> Label:
        """Return the first known label of each part: slides may lack different ones."""
        known = self.own_labels(labels)
        return self.join_labels({name: own[0] for name, own in known.items() if own})

    # Models

    @property
    def n_outputs(self) -> int:
        return sum(target.n_outputs for target in self.targets.values())

    def own_labels(self, labels: Sequence[Label]) -> dict[str, list[Label]]:
        """Return the known labels of each part."""
        found = {}
        for name, part in self.parts.items():
            own = [part.label_of(label) for label in labels]
            found[name] = [label for label in own if label is not None]
        return found

    def fit(self, labels: Sequence[Label]) -> Self:
        known = self.own_labels(labels)
        return self.with_targets(
            {
                name: own.fit(known[name]) if known[name] else own
                for name, own in self.targets.items()
            }
        )

    def criterion(self, labels: Sequence[Label]) -> Criterion:
        raise NotImplementedError

    @property
    def calibrates(self) -> bool:  # type: ignore[override]
        return any(target.calibrates for target in self.targets.values())

    @property
    def completes(self) -> bool:  # type: ignore[override]
        return any(target.completes for target in self.targets.values())

    def complete(self, outputs: "Tensor", labels: Labels) -> Self:
        import torch

        found = dict(self.targets)
        for name, part in self.parts.items():
            own = part.labels_of(labels)
            known = part.target.known(own)
            if part.target.completes and known.any():
                rows = outputs[torch.from_numpy(known).to(outputs.device)][..., part.outputs]
                found[name] = part.target.complete(rows, own[known])
        return self.with_targets(found)

    @property
    def one_device(self) -> str:
        reasons = (f"{n}: {t.one_device}" for n, t in self.targets.items() if t.one_device)
        return next(reasons, "")

    @property
    def scales(self) -> NDArray[np.float64]:
        return np.concatenate([target.scales for target in self.targets.values()])

    def answer(self, outputs: "Tensor") -> "Tensor":
        import torch

        own = [part.target.answer(outputs[..., part.outputs]) for part in self.parts.values()]
        return torch.cat(own, dim=-1)

    # Predictions

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"{name}.{own}" for name, t in self.targets.items() for own in t.columns)

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(f"{name}: {own}" for name, t in self.targets.items() for own in t.titles)

    def read_table(
        self, table: "pd.DataFrame", label: str | None
    ) -> "tuple[Target, tuple[str, ...], list[str], Answers] | None":
        if not set(self.columns) <= set(table.columns):
            return None
        answers = np.array([tables.numbers(table, column) for column in self.columns]).T
        self.check_answers(answers, list(table.index))
        known = set(self.label_names) <= set(table.columns)
        return self, self.label_names if known else (), list(self.columns), answers

    def check_answers(self, answers: Answers, names: Sequence[str] | None = None) -> None:
        if answers.ndim != 2 or answers.shape[1] != len(self.columns):
            raise ValueError(f"Give (slides, {len(self.columns)}) answers. {answers.shape=}")
        for part in self.parts.values():
            part.target.check_answers(part.answers_of(answers), names)

    def predicted(self, answers: Answers) -> list[str]:
        own = {name: p.target.predicted(p.answers_of(answers)) for name, p in self.parts.items()}
        rows = zip(*own.values(), strict=True)
        return [join_cells(dict(zip(own, row, strict=True))) for row in rows]

    def describe(self, answer: NDArray[np.floating]) -> dict[str, Any]:
        (predicted,) = self.predicted(answer[None])
        own = {name: p.target.describe(answer[p.answers]) for name, p in self.parts.items()}
        return {"predicted": predicted, "targets": own}

    def show(self, answer: NDArray[np.floating]) -> str:
        own = (f"{name} {p.target.show(answer[p.answers])}" for name, p in self.parts.items())
        return "; ".join(own)

    @property
    def has_order(self) -> bool:
        return all(target.has_order for target in self.targets.values())

    @property
    def without_order(self) -> str:
        reasons = {name: target.without_order for name, target in self.targets.items()}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)

    def slide_weights(self, answers: Answers, how: str) -> NDArray[np.float64]:
        """Return the weights of each part by its own answers: another slide may decide each."""
        own = [p.target.slide_weights(p.answers_of(answers), how) for p in self.parts.values()]
        return np.concatenate(own, axis=1)

    def disagreement(self, answers: Answers) -> float:
        """Return the mean over parts, each relative to the scale of its answers."""
        own = [
            part.target.disagreement(part.answers_of(answers)) / part.target.scale
            for part in self.parts.values()
        ]
        return float(np.mean(own))

    def reordered(self, other: Target, labels: Labels, answers: Answers) -> tuple[Labels, Answers]:
        found = []
        for name, part in self.parts.items():
            theirs = other.parts[name]
            own = theirs.labels_of(labels)
            known = theirs.target.known(own)
            moved, answered = part.target.reordered(theirs.target, own, theirs.answers_of(answers))
            rows = [
                label if here else None for label, here in zip(moved.tolist(), known, strict=True)
            ]
            own = part.target.as_labels(rows).astype(np.float64)
            found.append((own.reshape(len(labels), -1), answered))
        return tuple(np.concatenate(each, axis=1) for each in zip(*found, strict=True))  # type: ignore[return-value]

    # Scores

    @property
    def part_metrics(self) -> dict[str, dict[str, Metric]]:
        """The metrics of each part, on the slides that have its label, by part and own name."""
        return {
            name: {key: of_part(metric, part) for key, metric in part.target.metrics.items()}
            for name, part in self.parts.items()
        }

    def can_score(self, labels: Labels) -> bool:
        for part in self.parts.values():
            own = part.labels_of(labels)
            known = part.target.known(own)
            if known.any() and part.target.can_score(own[known]):
                return True
        return False

    def notes(self, fold: str, labels: Labels, answers: Answers) -> Iterator[str]:
        for name, part in self.parts.items():
            own = part.known_of(labels, answers)
            if not len(own[0]):
                yield f"Fold {fold} has no slide with a label of {name}."
                continue
            for note in part.target.notes(fold, *own):
                yield f"{name}: {note}"

    def comparison_notes(
        self, fold: str, labels: Labels, owners: NDArray[np.int64]
    ) -> Iterator[str]:
        for name, part in self.parts.items():
            own = part.labels_of(labels)
            known = part.target.known(own)
            if known.any():
                for note in part.target.comparison_notes(fold, own[known], owners[known]):
                    yield f"{name}: {note}"

    def summary(
        self, folds: "Sequence[Answers]", pooled: "Answers | None", seed: int
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, part in self.parts.items():
            own = [part.answers_of(answers) for answers in folds]
            whole = None if pooled is None else part.answers_of(pooled)
            found[name] = part.target.summary(own, whole, seed)
        notes = [f"{n}: {note}" for n, own in found.items() for note in own.pop("notes", ())]
        return {"targets": {name: own for name, own in found.items() if own}, "notes": notes}

    def figures(self, folds: "Mapping[str, tuple[Labels, Answers]]") -> "dict[str, Figure]":
        found = {}
        for name, part in self.parts.items():
            own = {fold: part.known_of(*truth) for fold, truth in folds.items()}
            own = {fold: truth for fold, truth in own.items() if len(truth[0])}
            for file, figure in (part.target.figures(own) if own else {}).items():
                found[f"{name}-{file}"] = figure
        return found

    # Baselines: each part has its own, on the slides that have its label.

    def as_answers(self, labels: Labels) -> Answers:
        own = [p.target.as_answers(p.labels_of(labels)) for p in self.parts.values()]
        return np.concatenate(own, axis=1)

    # Guarantees: each part has its own sets, see `Predictions.leaves`.

    no_sets: ClassVar[str] = " together: each has its own"

    # Other sites: each part is corrected by itself, on the slides that have its label.

    def recalibrate(self, labels: Labels, answers: Answers) -> Recalibration:
        found = {}
        for name, part in self.parts.items():
            own = part.known_of(labels, answers)
            known = len(own[0]) > 0
            found[name] = part.target.recalibrate(*own) if known else unchanged("no label")

        def apply(other: Answers) -> Answers:
            own = (found[name].apply(part.answers_of(other)) for name, part in self.parts.items())
            return np.concatenate(list(own), axis=1)

        return Recalibration(
            apply, "; ".join(f"{name}: {own.words}" for name, own in found.items())
        )

    @property
    def calibration_metrics(self) -> dict[str, Metric]:
        each = (
            of_part(metric, part)
            for part in self.parts.values()
            for metric in part.target.calibration_metrics.values()
        )
        return {metric.name: metric for metric in each}

    # Evidence

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        return tuple(
            _of_outputs(name, contrast, part.outputs)
            for name, part in self.parts.items()
            for contrast in part.target.contrasts
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"{name}: {own}" for name, t in self.targets.items() for own in t.output_names)

    def followed(self, answer: Any) -> Any:
        own = [part.target.followed(answer[..., part.answers]) for part in self.parts.values()]
        if isinstance(answer, np.ndarray):
            return np.concatenate(own, axis=-1)
        import torch

        return torch.cat(own, dim=-1)


def _of_outputs(name: str, contrast: Contrast, outputs: slice) -> Contrast:
    """Return a contrast of a part as one of all outputs, with the name of the part."""
    against, _, rest = contrast.negative.partition(" ")
    return replace(
        contrast,
        name=f"{name}: {contrast.name}",
        of=lambda values: contrast.of(values[..., outputs]),
        negative=f"{against} {name}: {rest}",
        total=f"{contrast.total} ({name})",
    )
