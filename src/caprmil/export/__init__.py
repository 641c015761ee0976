"""Export: a trained model as one file that answers bags of any size without this package."""

from caprmil.export.formats import FORMATS, read_facts
from caprmil.export.program import Program
from caprmil.export.writing import (
    SIZES,
    TOLERANCE,
    Exported,
    export,
    parse_changes,
    write,
)

__all__ = [
    "FORMATS",
    "SIZES",
    "TOLERANCE",
    "Exported",
    "Program",
    "export",
    "parse_changes",
    "read_facts",
    "write",
]
