"""The answer of a run to a slide, in words, and where it stands among the test slides."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from caprmil.explain import Case, temperatures
from caprmil.io.json_files import read_json
from caprmil.report import charts
from caprmil.report.page import EMPTY, Html, fill, join, tag
from caprmil.report.words import count, part, percent
from caprmil.runs.run import CALIBRATION, Run

Groups = Mapping[str, NDArray[np.float64]]


def predicted(case: Case) -> int:
    """Return the class that the run predicts: the likeliest of the mean over its models."""
    return int(case.answer.probabilities.argmax())


def section(run: Run, case: Case) -> Html:
    """Return the head of a report: what was answered, how surely, and who answered."""
    of, answer = predicted(case), case.answer
    name = run.classes[of]
    sure = answer.probabilities if answer.calibrated is None else answer.calibrated
    kind = "probability, not calibrated" if answer.calibrated is None else "calibrated probability"
    return fill(
        "answer.html",
        predicted=name,
        truth=_truth(case, name),
        probability=percent(float(sure[of])),
        exact=repr(float(sure[of])),
        kind=kind,
        calibration=calibration(run, case),
        bars=_bars(run.classes, sure),
        who=" ".join(who(run, case)),
        cohort=cohort(run, case),
    )


def _truth(case: Case, name: str) -> Html:
    if case.label is None:
        return tag("span", "No label is known", class_="pill")
    right = case.label == name
    word = "right" if right else "a mistake"
    return tag(
        "span", f"Labelled {case.label}: {word}", class_=f"pill {'good' if right else 'bad'}"
    )


def calibration(run: Run, case: Case) -> str:
    """Return what the probability is worth: calibrated, or why not."""
    answer, of = case.answer, predicted(case)
    known = temperatures(run)
    if answer.calibrated is not None:
        told = ", ".join(f"{known[fold]:.2f}" for fold in answer.by_fold)
        return (
            f"Calibrated with the temperature of its fold ({told}), fitted on the fold's "
            f"validation part. Before that: {percent(float(answer.probabilities[of]))}."
        )
    path = run.folder / CALIBRATION
    if not path.exists():
        return "Not calibrated: the run has no temperatures (it is unfinished, or an older one)."
    missing = [fold for fold in answer.by_fold if fold not in known]
    reasons: dict[str, list[str]] = {}
    for note in read_json(path).get("notes", []):
        fold, _, reason = str(note).partition(": ")
        if fold in missing:
            reasons.setdefault(reason, []).append(fold)
    why = [f"{', '.join(folds)}: {reason}" for reason, folds in reasons.items()]
    return f"Not calibrated. {' '.join(why) or 'A fold has no temperature.'}"


def who(run: Run, case: Case) -> Iterator[str]:
    """Say whose answer it is, how far the models agree, and which one is explained."""
    answer, of = case.answer, predicted(case)
    folds, told = list(answer.by_fold), case.explanation
    if not answer.unseen:
        yield "Careful: every model that answers has seen this slide in training."
    if len(folds) == 1:
        of_many = answer.unseen and case.name in run.paths and len(run.done) > 1
        yield f"Answered by the model of {folds[0]}" + (
            ", which has not seen this slide in training." if of_many else "."
        )
    else:
        each = sorted(float(p[of]) for p in answer.by_fold.values())
        votes = [int(p.argmax()) for p in answer.by_fold.values()]
        agree = votes.count(of)
        same = "all predict it" if agree == len(votes) else f"{agree} of them predict it"
        yield (
            f"The mean of {len(folds)} models; {same}. They give "
            f"{run.classes[of]} from {percent(each[0])} to {percent(each[-1])} (standard "
            f"deviation {np.std(each, ddof=1):.3f}, before calibration)."
        )
    yield (
        f"Explained below: {told.model} of {told.fold}"
        + (", whose answer lies nearest to the mean" if len(folds) > 1 else "")
        + f". It gives {run.classes[of]} {percent(float(told.probabilities[of]))}."
    )
    if told.predicted != of:
        yield f"On its own, that model predicts {run.classes[told.predicted]}."


def _bars(classes: tuple[str, ...], sure: NDArray[np.float64]) -> Html:
    rows = []
    for number in np.argsort(-sure, kind="stable"):
        bar = tag("rect", width=max(round(200 * float(sure[number]), 2), 0.5), height=8, rx=1.5)
        drawn = tag(
            "svg",
            bar,
            viewBox="0 0 200 8",
            class_="share",
            aria_hidden="true",
            preserveAspectRatio="none",
        )
        said = percent(float(sure[number]))
        rows.append(
            tag("tr", tag("th", classes[number], scope="row"), tag("td", drawn), tag("td", said))
        )
    return tag("table", tag("tbody", *rows), class_="bars")


def peers(run: Run, name: str, of: int) -> Groups:
    """Return the probabilities of a class on all other test slides, by their true label.

    A slide that several folds tested counts once, with the mean of their answers.
    """
    if not run.finished or run.predictions.labels is None:
        return {}
    table = run.predictions.labelled()
    owners: dict[str, tuple[int, list[float]]] = {}
    for slide, label, row in zip(
        table.slides, np.asarray(table.labels), table.probabilities, strict=True
    ):
        if slide != name:
            owners.setdefault(slide, (int(label), []))[1].append(float(row[of]))
    groups: dict[str, NDArray[np.float64]] = {}
    for code, label in enumerate(run.classes):
        own = [np.mean(values) for at, values in owners.values() if at == code]
        if own:
            groups[label] = np.array(own, dtype=np.float64)
    return groups


def cohort(run: Run, case: Case) -> Html:
    """Return where the slide stands among the run's test slides, drawn and said."""
    of = predicted(case)
    here, event = float(case.answer.probabilities[of]), run.classes[of]
    groups = peers(run, case.name, of)
    if not groups:
        words = "The run is not finished, so there are no test slides to compare with."
        return tag("p", words, class_="quiet")
    models = [float(p[of]) for p in case.answer.by_fold.values()]
    said = [
        f"{_lower(values, here)} labelled {label} got a lower probability of {event}"
        for label, values in groups.items()
    ]
    line = f"Of the other test slides, {'; '.join(said)}."
    remark = "Each dot is a test slide, answered by a model that had not seen it; the line is this "
    remark += "slide. All before calibration."
    if len(models) > 1:
        remark += " The dots on the axis are the single models."
    drawn = charts.strip(groups, here=here, models=models, event=event)
    return join(
        [drawn, tag("p", line, class_="percentile"), tag("p", remark, class_="quiet"), EMPTY]
    )


def _lower(values: NDArray[np.float64], here: float) -> str:
    below = int((values < here).sum())
    if below == len(values):
        return f"all {len(values):,}" if below > 1 else "the only one"
    if not below:
        return f"none of {count(len(values), 'slide')}"
    return f"{below:,} of {count(len(values), 'slide')} ({part(below / len(values))})"
