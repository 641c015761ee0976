"""The sources of a cohort: several folders of bags, and how they become one bag per slide."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from caprmil.cohort.cohort_bags import check_same_kind, inspect_bags
from caprmil.errors import BagError, count, shorten
from caprmil.features import bags
from caprmil.features.bag_files import join_infos, parts_of
from caprmil.features.bags import BagInfo
from caprmil.features.source_bags import Join, SourceBags, concatenate_infos, match_sources
from caprmil.io.findings import Findings
from caprmil.io.paths import as_path
from caprmil.io.progress import Step

JoinRule: TypeAlias = Literal["auto", "concatenation", "bag"]
"""How sources are joined: as in `Join`, or concatenated if all slides have the same patches in all
sources, and else one bag."""

Folders: TypeAlias = str | Path | Sequence[str | Path]
"""A folder of bags, or one for each source."""


@dataclass(frozen=True)
class Source:
    """A folder of bags, and the metadata of its bag of each slide."""

    name: str
    bags: dict[str, BagInfo]

    def first_known(self, field: str) -> Any:
        """Return a field of the first bag that has it, e.g. its encoder."""
        return next((v for bag in self.bags.values() if (v := getattr(bag, field))), None)


@dataclass(frozen=True)
class JoinedSources:
    """The files of each slide, their metadata, the sources, and how they were joined."""

    files: dict[str, SourceBags]
    bags: dict[str, BagInfo]
    sources: tuple[Source, ...]
    join: Join


def folders_of(features: Folders | None) -> list[str | Path | None]:
    """Return the folder of each source."""
    if features is None or isinstance(features, str | Path):
        return [features]
    return list(features)


def name_sources(folders: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the names of sources: those of their folders, with as many parents as they need."""
    paths = [as_path(folder).absolute() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["-".join(part.strip("/") for part in path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return tuple(names)


def join_sources(
    names: Sequence[str],
    located: Sequence[Mapping[str, Path]],
    rule: JoinRule,
    found: Findings,
    progress: Step | None,
    *,
    scan: bool,
    inspect: bool = True,
) -> JoinedSources:
    """Join the bags that each slide has in several folders.

    Slides without a bag in one of them are left out; that is a problem or a note already. Without
    `inspect` no bag is opened.
    """
    slides = [slide for slide in located[0] if all(slide in own for own in located)]
    if not slides and all(located):
        found.problems.append(f"No slide has a bag of every source ({', '.join(names)}).")
    _check_files(slides, names, located, found)
    if not inspect:
        return JoinedSources(_join(names, located, slides, "bag"), {}, (), "bag")
    sources = []
    for number, (name, paths) in enumerate(zip(names, located, strict=True)):
        own = {slide: paths[slide] for slide in slides}
        step = None if progress is None else _part_of(progress, number, len(names))
        infos = inspect_bags(own, found, step, scan=scan)
        check_same_kind(infos, found, source=name)
        sources.append(Source(name, infos))
    if found.problems:
        return JoinedSources({}, {}, tuple(sources), "bag")
    apart = []
    if rule != "bag":
        unjoined = _join(names, located, slides, "bag")
        reasons = _differences(unjoined, [source.bags for source in sources])
        apart = list(islice(reasons, 1 if rule == "auto" else None))
    if rule == "concatenation":
        advice = 'Encode them on one grid, or set sources.join = "bag".'
        found.problem("Sources that cannot be concatenated", apart, advice)
    join: Join = "bag" if rule == "bag" or apart else "concatenation"
    files = _join(names, located, slides, join)
    by_slide = {slide: [source.bags[slide] for source in sources] for slide in slides}
    joined = {
        slide: join_infos(parts_of(files[slide]), own) if join == "bag" else concatenate_infos(own)
        for slide, own in by_slide.items()
    }
    found.notes.append(_describe(names, join, rule, apart, len(slides)))
    return JoinedSources(files, joined, tuple(sources), join)


def _join(
    names: Sequence[str],
    located: Sequence[Mapping[str, Path]],
    slides: Sequence[str],
    join: Join,
) -> dict[str, SourceBags]:
    """Return the files of each slide."""
    return {
        slide: SourceBags(tuple(names), tuple(own[slide] for own in located), join)
        for slide in slides
    }


def _differences(
    files: Mapping[str, SourceBags], infos: Sequence[Mapping[str, BagInfo]]
) -> Iterator[str]:
    """Yield the slides whose sources have different patches, and why."""
    for slide, own in files.items():
        coords = []
        for path in own.paths:
            with bags.streaming(path) as stream:
                coords.append(stream.coords)
        try:
            match_sources(own.sources, [each[slide] for each in infos], coords)
        except BagError as problem:
            yield f"{slide}: {problem}"


def _describe(
    names: Sequence[str], join: Join, rule: JoinRule, apart: Sequence[str], slides: int
) -> str:
    """Return how sources were joined, and why, in sentences."""
    text = f"There are {len(names)} sources: {', '.join(names)}. "
    if join == "concatenation":
        where = count(slides, "slide")
        return f"{text}The features of each patch are concatenated: all have one grid ({where})."
    text += "The patches of all sources are one bag"
    if rule == "bag":
        return f'{text}, as sources.join = "bag" says.'
    return f"{text}, since grids differ ({shorten(apart)})."


def _check_files(
    slides: Sequence[str],
    names: Sequence[str],
    located: Sequence[Mapping[str, Path]],
    found: Findings,
) -> None:
    """Check that a slide has a file of its own in every source."""
    same = [s for s in slides if len({own[s].absolute() for own in located}) < len(located)]
    advice = "Name folders that do not hold each other, and no absolute paths in the table."
    found.problem(f"Slides with one file for several sources ({', '.join(names)})", same, advice)


def _part_of(progress: Step, number: int, parts: int) -> Step:
    def step(done: int, total: int) -> None:
        progress(number * total + done, parts * total)

    return step
