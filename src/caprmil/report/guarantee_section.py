"""The section of prediction sets in a run report: their coverage, and the risk of what is kept."""

from markupsafe import Markup

from caprmil import figures
from caprmil.report.html_page import EMPTY, render
from caprmil.report.report_inputs import RunInputs
from caprmil.runs.conformal_sets import read_guarantees


def guarantee_section(inputs: RunInputs) -> Markup:
    """Return coverage by class and site, and the curve of risk; nothing if it was not measured."""
    found = read_guarantees(inputs.run.folder)
    if found is None:
        return EMPTY
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
    figure = figures.selective_risk(points, title=found.risk_title, unit=found.unit)
    picture = Markup(figures.as_svg(figure, alt=f"{found.risk_title} of the answers that are kept"))
    return table + render("risk_curve.html", figure=picture, risk=found.risk_title, unit=found.unit)
