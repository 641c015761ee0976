"""The bags of a cohort: read and checked, and their metadata."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caprmil.encoders.card import same_encoder
from caprmil.errors import BagError, shorten
from caprmil.features import bag_files, bags
from caprmil.features.bag_files import Part
from caprmil.features.bags import BagInfo
from caprmil.features.checked_bags import CheckedBags
from caprmil.features.formats import CoordinatesError
from caprmil.io.findings import Findings
from caprmil.io.progress import Step
from caprmil.slides.scale import same_scale


def inspect_bags(
    paths: Mapping[str, Path], found: Findings, progress: Step | None, *, scan: bool
) -> dict[str, BagInfo]:
    """Return the metadata of each bag; with `scan`, after all of it was read, now or before.

    One after the other: h5py reads one file at a time, and so does our reader of .pt files.
    """
    infos: dict[str, BagInfo] = {}
    broken: list[str] = []
    places: list[str] = []
    checked = CheckedBags(paths.values() if scan else ())
    for done, (name, path) in enumerate(paths.items(), 1):
        try:
            if not scan or checked.has(path):
                infos[name] = bags.inspect(path)
            else:
                before = checked.state(path)
                infos[name] = bags.read(path).info
                checked.add(path, before)
        except CoordinatesError:
            places.append(name)
        except BagError as problem:
            broken.append(str(problem))
        if progress is not None:
            progress(done, len(paths))
    checked.write()
    found.problem("Files of coordinates, without features", places, CoordinatesError.advice)
    if broken:
        each = shorten(broken, separator="\n    ")
        found.problems.append(f"Bags that cannot be used ({len(broken)}):\n    {each}")
    return infos


def check_same_kind(infos: Mapping[str, BagInfo], found: Findings, source: str = "") -> None:
    """Check that all bags, of one source if there are several, have one width, encoder and scale"""
    which = f"Bags of {source}" if source else "Bags"

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
        found.problem(f"{which} that differ in {what}", apart, "Extract all in the same way.")
    if len(encoders) == 1:
        advice = f"They are assumed to be of {next(iter(encoders))}, like the others."
        found.note(f"{which} that do not name their encoder", nameless, advice)


def join_infos(slides: Sequence[str], infos: Mapping[str, BagInfo]) -> BagInfo:
    """Return the metadata of the bag of a patient."""
    found = []
    for slide in slides:
        own = infos[slide]
        parts = [Part(slide, Path(), slide)]  # or, with several sources in one bag, each of them
        if own.slides:
            parts = [Part(f"{slide} {p.name}", Path(), slide, p.source) for p in own.slides]
        found += list(zip(parts, [p.info for p in own.slides] or [own], strict=True))
    return bag_files.join_infos([part for part, _ in found], [info for _, info in found])
