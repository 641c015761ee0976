"""Export: a trained model as one file that predicts bags of any size without this package."""

from caprmil.export.export_module import ExportModule
from caprmil.export.model_export import (
    SIZES,
    TOLERANCE,
    ExportedModel,
    export_model,
    export_run,
    parse_changes,
)
from caprmil.export.model_files import FORMATS, read_metadata

__all__ = [
    "FORMATS",
    "SIZES",
    "TOLERANCE",
    "ExportModule",
    "ExportedModel",
    "export_model",
    "export_run",
    "parse_changes",
    "read_metadata",
]
