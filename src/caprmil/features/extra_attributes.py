"""What caprmil adds to files of other tools: attributes `caprmil_...`, which they ignore."""

from collections.abc import Callable, Mapping
from typing import Any

from caprmil.features.attributes import number, pair, rule, text

GRID = ("patch_level0", "step", "slide_mpp")
SCALE = ("mpp", "scale_rule")
ORIGIN = ("fingerprint", "settings")
"""Fields of `BagInfo` that other formats lack."""

OF_SLIDE = ("slide_mpp", "slide_size")  # whatever encoded the patches


def extra_fields(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in attributes `caprmil_...`, without those that cannot be.

    TRIDENT copies the attributes of coordinates to the features of other encoders, for which it
    reads patches by its own rule. Of these files, only what is true of the slide is returned.
    """
    readers: dict[str, Callable[[Any], Any]] = dict.fromkeys((*GRID, "mpp"), number)
    readers |= {**dict.fromkeys(ORIGIN, text), "scale_rule": rule, "slide_size": pair}
    if attributes.get("encoder") is not None and not _same(attributes, "encoder"):
        readers = {name: read for name, read in readers.items() if name in OF_SLIDE}
    found = {name: read(attributes.get(f"caprmil_{name}")) for name, read in readers.items()}
    return {name: value for name, value in found.items() if value is not None}


def _same(attributes: Mapping[str, Any], name: str) -> bool:
    return text(attributes[name]) == text(attributes.get(f"caprmil_{name}"))
