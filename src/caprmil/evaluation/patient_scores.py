"""Targets that score patients, among several: each patient counts once for them."""

from collections.abc import Hashable, Sequence

import numpy as np

from caprmil.targets.target import Answers, Labels, Target


def once_per_patient(
    target: Target, labels: Labels, answers: Answers, slides: Sequence[str], of: Sequence[Hashable]
) -> tuple[Labels, Answers]:
    """Return labels and answers in which a patient has one label of each part that scores patients.

    `of` is the patient of each slide, and its fold. The first slide of a patient by name has the
    mean answer of all that have the same label; for the others, the label of the part is missing.
    """
    labels, answers = labels.copy(), answers.astype(np.float64)
    for part in target.parts.values():
        if not part.target.scores_patients:
            continue
        own = part.labels_of(labels)
        groups: dict[Hashable, list[int]] = {}
        for row in np.flatnonzero(part.target.known(own)).tolist():
            groups.setdefault((of[row], part.target.show_label(own[row].tolist())), []).append(row)
        for rows in groups.values():
            first, *others = sorted(rows, key=lambda row: slides[row])
            answers[first, part.answers] = part.answers_of(answers)[rows].mean(axis=0)
            labels[others, part.labels] = part.target.missing
    return labels, answers


def patient_parts(target: Target) -> list[str]:
    """Return the names of the parts of a target that score patients."""
    return [name for name, part in target.parts.items() if part.target.scores_patients]
