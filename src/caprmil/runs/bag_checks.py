"""Bags for the models of a run are compared with those that they were trained on."""

from collections.abc import Mapping

from caprmil.errors import BagError, shorten
from caprmil.features import bag_files
from caprmil.features.bag_files import BagFiles
from caprmil.features.bags import BagInfo
from caprmil.runs.facts import Facts, SourceFacts
from caprmil.runs.run import Run
from caprmil.runs.source_inputs import difference


def check_bag(run: Run, slide: str, info: BagInfo, *, force: bool = False) -> None:
    """Refuse a bag that differs from those the models were trained on.

    `force` accepts another encoder or scale, never another width.
    """
    sources = run.facts.sources
    for part in info.slides:
        if part.source is None:
            check_bag(run, part.name, part.info, force=force)
        elif part.source < len(sources):
            _check(run, f"{slide} ({part.name})", part.info, sources[part.source], force=force)
    for source, own in zip(sources, info.sources, strict=False):
        _check(run, f"{slide} ({source.name})", own, source, force=force)
    if sources and not (info.slides or info.sources):
        raise BagError(
            f"{slide} has one bag, and the models of {run.folder} read the sources "
            f"{', '.join(source.name for source in sources)}. Pass bags of all sources."
        )
    _check(run, slide, info, run.facts, force=force or bool(sources))


def _check(run: Run, name: str, info: BagInfo, known: Facts | SourceFacts, *, force: bool) -> None:
    differs = difference(info, known)
    same_width = info.width == known.in_dim
    if differs and not (force and same_width):
        advice = ", or pass --force" if same_width else ""
        raise BagError(
            f"{name} is of {differs} as the models of {run.folder} were trained on. "
            f"Extract its features in the same way{advice}."
        )


def check_bags(run: Run, paths: Mapping[str, BagFiles], *, force: bool) -> None:
    """Refuse bags that differ, all of them in one error. Damaged ones fail one by one later."""
    problems = []
    for slide, path in paths.items():
        try:
            info = bag_files.inspect(path)
        except BagError:
            continue
        try:
            check_bag(run, slide, info, force=force)
        except BagError as problem:
            problems.append(str(problem))
    if problems:
        raise BagError(shorten(problems, separator="\n- "))
