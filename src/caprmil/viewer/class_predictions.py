"""What the viewer sends of predicted classes: labels, probabilities and scores.

The page shows it with `static/class_parts.js`.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from caprmil.models.base import Output
from caprmil.runs.run import Run


def describe_target(run: Run) -> dict[str, Any]:
    """Return the classes of a run, and its headline score if it is finished."""
    metric, score = run.target.headline_metric, None
    if run.finished:
        value = run.scores["metrics"][metric.name]["all_slides_pooled"]
        score = None if value is None else f"{metric.title} {value:.3f}"
    return {"classes": run.target.names, "score": score}


def list_predictions(run: Run) -> dict[str, dict[str, Any]]:
    """Return label and mean probabilities of each slide that the run has tested."""
    if not run.finished:
        return {}
    table = run.predictions
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, slide in enumerate(table.slides):
        rows_of[slide].append(row)
    found = {}
    for slide, rows in rows_of.items():
        mean = table.answers[rows].mean(axis=0)
        code = -1 if table.labels is None else int(table.labels[rows[0]])
        label = table.target.names[code] if code >= 0 else None
        predicted = table.target.names[int(np.argmax(mean))]
        folds = dict.fromkeys(table.folds[n] for n in rows) if table.folds else {}
        found[slide] = {
            "label": label,
            "predicted": predicted,
            "probabilities": mean.tolist(),
            "right": None if label is None else label == predicted,
            "fold": ", ".join(folds) or None,
        }
    return found


NO_PREDICTION: dict[str, Any] = dict.fromkeys(
    ("label", "predicted", "probabilities", "right", "fold")
)


def summarise(
    run: Run, outputs: Mapping[str, Output], *, explained: str, exact: bool
) -> dict[str, Any]:
    """Return the prediction of a run from the outputs of its models, by fold.

    `explained` is the fold whose model is explained. If its evidence is exact, its logits are those
    that the evidence adds up to.
    """
    by_fold = {
        fold: run.fold_target(fold).answer(output.logits[0].cpu().double()).numpy()
        for fold, output in outputs.items()
    }
    calibrated = run.calibrate(by_fold)
    own = outputs[explained]
    logits = own.aux.get("mean_logits", own.logits) if exact else own.logits
    return {
        "probabilities": by_fold[explained].tolist(),
        "logits": logits[0].tolist(),
        "answer": np.mean(list(by_fold.values()), axis=0).tolist(),
        "calibrated": None if calibrated is None else calibrated.tolist(),
    }
