"""Reports: a slide or a run as one HTML file that opens anywhere, without network or server."""

from caprmil.report.run import run_report
from caprmil.report.slide import slide_report
from caprmil.report.writing import (
    home,
    places,
    safe_name,
    subjects,
    write_run,
    write_slide,
)

__all__ = [
    "home",
    "places",
    "run_report",
    "safe_name",
    "slide_report",
    "subjects",
    "write_run",
    "write_slide",
]
