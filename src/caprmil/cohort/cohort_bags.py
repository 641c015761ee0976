"""The bags of a cohort: read and checked, and their metadata."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caprmil.encoders.card import same_encoder
from caprmil.errors import BagError, shorten
from caprmil.features import bag_files, bags
from caprmil.features.bags import BagInfo
from caprmil.features.placed_slides import place_slides
from caprmil.io.findings import Findings
from caprmil.io.progress import Step
from caprmil.slides.scale import same_scale


def inspect_bags(
    paths: Mapping[str, Path], found: Findings, progress: Step | None, *, scan: bool
) -> dict[str, BagInfo]:
    """Return the metadata of each bag; with `scan`, after all of it was read.

    One after the other: h5py reads one file at a time, and so does our reader of .pt files.
    """
    infos: dict[str, BagInfo] = {}
    broken: list[str] = []
    for done, (name, path) in enumerate(paths.items(), 1):
        try:
            infos[name] = bags.read(path).info if scan else bags.inspect(path)
        except BagError as problem:
            broken.append(str(problem))
        if progress is not None:
            progress(done, len(paths))
    if broken:
        each = shorten(broken, separator="\n    ")
        found.problems.append(f"Bags that cannot be used ({len(broken)}):\n    {each}")
    return infos


def check_same_kind(infos: Mapping[str, BagInfo], found: Findings) -> None:
    """Check that all bags have one width, one encoder and one scale."""

    def group(field: str) -> dict[Any, list[str]]:
        groups: dict[Any, list[str]] = defaultdict(list)
        for name, info in infos.items():
            groups[getattr(info, field)].append(name)
        return groups

    widths, encoders, scales = group("width"), group("encoder"), group("mpp")
    weights = group("fingerprint")
    nameless = encoders.pop(None, [])
    scales.pop(None, [])
    weights.pop(None, [])
    if encoders and all(same_encoder(name, next(iter(encoders))) for name in encoders):
        encoders = dict([next(iter(encoders.items()))])
    if scales and same_scale(min(scales), max(scales)):
        scales = {}
    kinds = {
        "width": widths,
        "encoder": encoders,
        "the encoder's weights or transform": {} if len(encoders) > 1 else weights,
        "microns per pixel": scales,
    }
    for what, groups in kinds.items():
        apart = [f"{value} ({shorten(own)})" for value, own in groups.items() if len(groups) > 1]
        found.problem(f"Bags that differ in {what}", apart, "Extract all in the same way.")
    if len(encoders) == 1:
        advice = f"They are assumed to be of {next(iter(encoders))}, like the others."
        found.note("Bags that do not name their encoder", nameless, advice)


def join_infos(slides: Sequence[str], infos: Mapping[str, BagInfo]) -> BagInfo:
    """Return the metadata of the bag of a patient."""
    own = [infos[slide] for slide in slides]
    return bag_files.join_infos(own, place_slides(slides, own, [None] * len(own)))
