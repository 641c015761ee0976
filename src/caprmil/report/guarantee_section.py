"""The section of prediction sets in a run report: their coverage, and the risk of what is kept."""

from markupsafe import Markup

from caprmil import figures
from caprmil.evaluation.guarantees import CoverageRow, Guarantees
from caprmil.report.html_page import EMPTY, render
from caprmil.report.report_inputs import RunInputs
from caprmil.runs.conformal_sets import read_guarantees


def guarantee_section(inputs: RunInputs) -> Markup:
    """Return coverage by class and site, and the curve of risk; nothing if it was not measured."""
    stored = read_guarantees(inputs.run.folder)
    if stored is None:
        return EMPTY
    rows = tuple(
        CoverageRow(**{**vars(row), "size": float("inf") if row.size is None else row.size})
        for row in stored.rows
    )
    found = Guarantees(**{**vars(stored), "rows": rows})
    head, cells = found.as_rows()
    table = render(
        "table_section.html",
        title=f"Prediction sets of {100 * found.coverage:g} %",
        head=["", *head[1:]],
        rows=cells,
        notes=found.notes,
    )
    if not found.risks:
        return table
    points = [(point.kept, point.risk) for point in found.risks]
    figure = figures.selective_risk(points, title=found.risk_title)
    picture = Markup(figures.as_svg(figure, alt=f"{found.risk_title} of the answers that are kept"))
    return table + render("risk_curve.html", figure=picture, risk=found.risk_title)
