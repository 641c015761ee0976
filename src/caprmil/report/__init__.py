"""Reports: a slide or a run as one HTML file that opens without network or server."""

from caprmil.report.atlas_files import write_atlas
from caprmil.report.report_files import (
    chosen_slides,
    find_or_encode,
    report_folder,
    report_paths,
    safe_name,
    without_pixels,
    write_run_report,
    write_slide_report,
)
from caprmil.report.run_page import run_report
from caprmil.report.slide_page import slide_report

__all__ = [
    "chosen_slides",
    "find_or_encode",
    "report_folder",
    "report_paths",
    "run_report",
    "safe_name",
    "slide_report",
    "without_pixels",
    "write_atlas",
    "write_run_report",
    "write_slide_report",
]
