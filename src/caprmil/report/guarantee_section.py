"""The section of prediction sets in a run report: their coverage, and the risk of what is kept."""

from markupsafe import Markup

from caprmil import figures
from caprmil.evaluation.guarantees import Guarantees
from caprmil.report.html_page import EMPTY, render
from caprmil.report.report_inputs import RunInputs
from caprmil.runs.conformal_sets import read_guarantees


def guarantee_section(inputs: RunInputs) -> Markup:
    """Return coverage by class and site, and the curve of risk, of each target that has them."""
    found = read_guarantees(inputs.run.folder)
    return Markup("").join(_of_target(name, own) for name, own in found.items())


def _of_target(name: str, found: Guarantees) -> Markup:
    table = EMPTY
    if found.rows:
        head, cells = found.as_rows()
        title = f"Prediction sets of {100 * found.coverage:g} %"
        table = render(
            "table_section.html",
            title=f"{name}: {title[0].lower()}{title[1:]}" if name else title,
            head=["", *head[1:]],
            rows=cells,
            notes=found.notes,
        )
    if not found.risks:
        return table
    points = [(point.kept, point.risk) for point in found.risks]
    risk = (
        f"{name}: {found.risk_title[0].lower()}{found.risk_title[1:]}" if name else found.risk_title
    )
    figure = figures.selective_risk(points, title=risk, unit=found.unit)
    picture = Markup(figures.as_svg(figure, alt=f"{risk} of the answers that are kept"))
    return table + render("risk_curve.html", figure=picture, risk=risk, unit=found.unit)
