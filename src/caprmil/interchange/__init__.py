"""Interchange: bags in the layouts of TRIDENT, CLAM and STAMP, and theirs in ours.

Every bag is first put in our terms (`terms.py`), level-0 pixels and microns per pixel; from there
each layout is one function (`targets.py`), whose files are written, or kept, by `conversion.py`.
"""

from caprmil.interchange.conversion import LAYOUTS, SIZES, Converted, convert

__all__ = ["LAYOUTS", "SIZES", "Converted", "convert"]
