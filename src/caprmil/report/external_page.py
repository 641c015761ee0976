"""External validation as files: one HTML page, JSON, and a CSV of each table.

index.html
external.json        everything but the answers
scores.csv           each metric in cross-validation and outside
shift.csv            each quantity in which the cohorts may differ
recalibration.csv    each metric before and after recalibration, if it was asked for
predictions.csv      the answers of each fold's model
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from caprmil import figures
from caprmil.errors import count
from caprmil.evaluation.external_scores import Estimate, mean_over_models, score_rows, show
from caprmil.evaluation.predictions import Predictions
from caprmil.figures.estimate_rows import EstimateRow, estimate_rows
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.io.new_files import new_files
from caprmil.report.html_page import EMPTY, page, render
from caprmil.report.report_files import INDEX
from caprmil.report.score_section import Headline
from caprmil.runs.external import ExternalValidation
from caprmil.targets.calibration_method import CalibrationSide

SCORES, SHIFT, RECALIBRATION = "scores.csv", "shift.csv", "recalibration.csv"
JSON, PREDICTIONS = "external.json", "predictions.csv"
FILES = (INDEX, JSON, SCORES, SHIFT, RECALIBRATION, PREDICTIONS)


def write_external(found: ExternalValidation, out: Path) -> list[Path]:
    """Write the files into a folder, and return their paths. Nothing is overwritten."""
    facts = found.as_dict()
    texts = {INDEX: external_page(found), JSON: as_json(facts), SCORES: as_csv(facts["scores"])}
    if found.shifts:
        texts[SHIFT] = as_csv(facts["shifts"])
    if found.recalibrated is not None:
        texts[RECALIBRATION] = as_csv(facts["recalibration"]["metrics"])
    with new_files(out, FILES) as folder:
        for name, text in texts.items():
            write_text(folder / name, text)
        found.predictions.write(folder / PREDICTIONS)
    return [out / name for name in (*texts, PREDICTIONS)]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return records as a CSV in full precision; what is within another record as outer_inner."""
    flat = [
        {
            (f"{name}_{key}" if isinstance(value, Mapping) else name): inner
            for name, value in row.items()
            for key, inner in (value.items() if isinstance(value, Mapping) else [("", value)])
        }
        for row in rows
    ]
    text = StringIO()
    table = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    table.writeheader()
    for row in flat:
        empty = (isinstance(value, float) and np.isnan(value) for value in row.values())
        cells = zip(row, row.values(), empty, strict=True)
        table.writerow({name: "" if is_empty else value for name, value, is_empty in cells})
    return text.getvalue()


def external_page(found: ExternalValidation) -> str:
    """Return the page."""
    sections = [
        render("headline_scores.html", headlines=_headlines(found)),
        _findings(found),
        _scores(found),
        _shifts(found),
        _recalibration(found),
        _sites(found),
    ]
    return page(
        "external_page.html",
        title="External validation",
        name=f"{Path(found.run).name} on {Path(found.cohort).name}",
        model=found.model,
        size=found.size(),
        scripts=(),
        sections=sections,
    )


def _headlines(found: ExternalValidation) -> list[Headline]:
    first = found.first
    tiles = [
        _headline(f"{first.title}, external", first.external, "mean over single models"),
        _headline(f"{first.title}, cross-validation", first.internal, "mean over folds"),
        _headline("Difference", first.difference, _verdict(first.verdict), signed=True),
    ]
    if found.unlike is not None:
        unlike, of = found.unlike
        title = f"Unlike the training {found.bag_unit}s"
        tiles.append(Headline(title, f"{unlike / of:.0%}", f"{unlike:,} of {of:,}", ""))
    return tiles


def _headline(title: str, value: Estimate, remark: str, *, signed: bool = False) -> Headline:
    shown = show(Estimate(value.value), signed=signed)
    ends = show(value, signed=signed).partition("(")[2].rstrip(")")
    return Headline(title, shown, remark, f"95 % interval {ends}" if ends else "")


def _verdict(verdict: str) -> str:
    words = {"worse": "worse outside", "better": "better outside"}
    return words.get(verdict, f"a difference is {verdict}")


def _findings(found: ExternalValidation) -> Markup:
    first = found.first
    rows = [
        EstimateRow("cross-validation", *first.internal, is_reference=True),
        EstimateRow("external, single models", *first.external),
        EstimateRow("external, all together", *first.together),
        *(EstimateRow(f"site {row.site}", *row.score) for row in found.sites),
    ]
    figure = estimate_rows(
        [row for row in rows if not np.isnan(row.value)],
        title=first.title,
        chance=found.predictions.target.headline_metric.chance,
    )
    picture = Markup(figures.as_svg(figure, alt=f"{first.title} of each cohort with its interval"))
    return render("external_findings.html", sentences=list(found.sentences()), figure=picture)


def _scores(found: ExternalValidation) -> Markup:
    head, rows = score_rows(found.scores)
    notes = found.notes
    return render("external_table.html", title="Scores", head=head[1:], rows=rows, notes=notes)


def _shifts(found: ExternalValidation) -> Markup:
    if not found.shifts:
        return EMPTY
    return render("external_shifts.html", shifts=found.shifts)


def _recalibration(validation: ExternalValidation) -> Markup:
    """Return predicted against observed; if recalibrated, scores and figures on both sides."""
    found = validation.recalibrated
    if found is None:
        together = mean_over_models(validation.predictions)
        return Markup("").join(_reliability(together, None))
    head, rows = found.as_rows()
    table = render(
        "external_table.html",
        title=f"Recalibrated on {count(len(found.fitted), found.unit)}",
        head=head[1:],
        rows=rows,
        notes=found.notes,
    )
    return table + Markup("").join(_reliability(found.before, found.after))


def _reliability(before: Predictions, after: Predictions | None) -> Iterator[Markup]:
    """Yield the diagram of predicted against observed of a target, or of each of several."""
    later = {} if after is None else after.leaves()
    for name, own in before.leaves().items():
        method = own.target.calibration
        if method is None or not own.has_labels:
            continue
        one = CalibrationSide(*own.scored().truth)
        other = CalibrationSide(*later[name].scored().truth) if later else None
        drawn = method.draw(one, other, how="recalibration", unit=before.unit)
        if drawn is not None:
            picture = Markup(figures.as_svg(drawn, alt="Predicted against observed"))
            title = f"Reliability of {name}" if name else "Reliability"
            yield render("external_reliability.html", title=title, figure=picture)


def _sites(found: ExternalValidation) -> Markup:
    if not found.sites:
        return EMPTY
    patients = ["patients"] if found.unit == "slide" else []
    head = [f"{found.unit}s", *patients, "labels", found.first.title, "unlike training"]
    rows = [
        [
            row.site,
            f"{row.slides:,}",
            *([f"{row.patients:,}"] if patients else []),
            row.labels,
            show(row.score),
            "–" if row.unlike is None else f"{row.unlike:.0%}",
        ]
        for row in found.sites
    ]
    note = "Scores are those of all models together, on the labels of each site."
    return render("external_table.html", title="Sites", head=head, rows=rows, notes=[note])
