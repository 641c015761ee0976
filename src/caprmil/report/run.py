"""The report of a run: how good it is, where it fails, and what it was made of, in one file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caprmil.errors import BagError
from caprmil.evaluation.predictions import Predictions
from caprmil.features import bags
from caprmil.io.progress import Step
from caprmil.report import curves, mistakes, scores
from caprmil.report.page import EMPTY, Html, asset, fill, join, page, tag
from caprmil.report.slide import DISCLAIMER, made, origin, table
from caprmil.report.words import count, percent
from caprmil.runs.run import RECIPE, Run


@dataclass(frozen=True, kw_only=True)
class Row:
    """A test slide as the table of all slides shows it."""

    slide: str
    label: str
    predicted: str
    probability: float  # of the predicted class
    by_class: tuple[float, ...]
    fold: str
    patches: int | None

    @property
    def wrong(self) -> bool:
        return self.label not in ("", self.predicted)


def run_report(
    run: Run,
    *,
    links: Mapping[str, str] | None = None,
    pixels: Path | None = None,
    progress: Step | None = None,
) -> str:
    """Return the report of a finished run as one HTML page.

    `links` are the addresses of slide reports, by slide, as seen from where the page will lie;
    `pixels` is a folder to find slides in, if they are no longer where they were encoded.
    """
    answers, links = run.predictions, links or {}
    rows = list(_rows(run, answers, progress))
    body = fill(
        "run.html",
        name=run.folder.resolve().name,
        subtitle=_subtitle(run, answers),
        disclaimer=DISCLAIMER,
        tiles=scores.tiles(run),
        scores=scores.table(run),
        folds=scores.folds(run),
        curves=curves.section(run),
        confusion=scores.confusion(answers),
        shortcuts=scores.shortcuts(run),
        mistakes=mistakes.section(run, links, pixels),
        slides=_table(run, rows, links),
        counted=_counted(rows),
        recipe=_recipe(run),
        provenance=table(_provenance(run)),
        notes=_notes(run),
    )
    return page(f"{run.folder.resolve().name}, a run report", body, scripts=[asset("run.js")])


def _subtitle(run: Run, answers: Predictions) -> str:
    patients = f" of {count(len(set(answers.patients)), 'patient')}" if answers.patients else ""
    folds = count(len(run.splits), "fold")
    slides = count(len(set(answers.slides)), "slide")
    return f"{run.facts.model}: {' or '.join(run.classes)}. {slides}{patients}, {folds}."


def _rows(run: Run, answers: Predictions, progress: Step | None) -> Iterator[Row]:
    sizes: dict[str, int | None] = {}
    best = answers.probabilities.argmax(axis=1)
    for n, slide in enumerate(answers.slides):
        if slide not in sizes:
            sizes[slide] = _patches(run, slide)
        code = -1 if answers.labels is None else int(answers.labels[n])
        yield Row(
            slide=slide,
            label=run.classes[code] if code >= 0 else "",
            predicted=run.classes[best[n]],
            probability=float(answers.probabilities[n, best[n]]),
            by_class=tuple(float(p) for p in answers.probabilities[n]),
            fold=answers.folds[n] if answers.folds else "",
            patches=sizes[slide],
        )
        if progress:
            progress(n + 1, len(answers))


def _patches(run: Run, slide: str) -> int | None:
    """Return how many patches a slide has, if its bag is where it was."""
    try:
        return bags.inspect(run.paths[slide]).n_patches
    except (BagError, KeyError, OSError):
        return None


def _table(run: Run, rows: Sequence[Row], links: Mapping[str, str]) -> Html:
    two = len(run.classes) == 2
    sure = f"Probability of {run.classes[1]}" if two else "Its probability"
    names = ("Slide", "Label", "Predicted", sure, "Fold", "Patches", "Report")
    head = [tag("th", n, scope="col", class_="words" if n in names[1:3] else None) for n in names]
    body = [_line(row, links, two=two) for row in rows]
    whole = [tag("thead", tag("tr", *head)), tag("tbody", *body)]
    return tag("table", *whole, class_="grid-table", id="slides")


def _line(row: Row, links: Mapping[str, str], *, two: bool) -> Html:
    value = row.by_class[1] if two else row.probability
    link = tag("a", "open", href=links[row.slide]) if row.slide in links else EMPTY
    patches = "" if row.patches is None else f"{row.patches:,}"
    cells = [
        tag("th", row.slide, scope="row"),
        tag("td", row.label or "–", class_="words"),
        tag(
            "td",
            row.predicted,
            tag("span", " wrong", class_="hidden") if row.wrong else None,
            class_="words",
        ),
        tag("td", f"{value:.4f}", data_value=repr(value), title=percent(value)),
        tag("td", row.fold),
        tag("td", patches, data_value=row.patches or 0),
        tag("td", link),
    ]
    return tag("tr", *cells, class_="wrong" if row.wrong else None)


def _counted(rows: Sequence[Row]) -> str:
    wrong = sum(row.wrong for row in rows)
    return f"{count(len(rows), 'answer')}, {wrong:,} of them wrong (shaded)."


def _recipe(run: Run) -> Html:
    path = run.folder / RECIPE
    return tag("pre", path.read_text(encoding="utf-8")) if path.exists() else EMPTY


def _provenance(run: Run) -> Iterator[tuple[str, str]]:
    facts = run.facts
    yield "Model", f"{facts.model}, weights of the {facts.weights} epoch of each fold"
    yield from origin(run)
    yield from made(["caprmil", "report", str(run.folder)])


def _notes(run: Run) -> Html:
    said: list[Any] = [*run.facts.notes]
    if not said:
        return EMPTY
    return join(
        [tag("h3", "Notes"), tag("ul", *(tag("li", note) for note in said), class_="notes")]
    )
