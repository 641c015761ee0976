"""Bags for a prediction where a run has several sources: which file is of which source.

A bag is of the source that has the name of its folder, or of a folder above. Otherwise it is of the
only source with its width, encoder and scale.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from caprmil.cohort.found_bags import bag_files_in, find_bags
from caprmil.encoders.card import same_encoder
from caprmil.errors import CohortError, RunError, shorten
from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.features.source_bags import Join, SlideFiles, SourceBags
from caprmil.io.paths import as_path
from caprmil.runs.facts import Facts, SourceFacts
from caprmil.slides.scale import same_scale


def find_slide_bags(facts: Facts, paths: Iterable[str | Path]) -> Mapping[str, SlideFiles]:
    """Return the bag of each slide among files and under folders, of all sources of a run."""
    if not facts.sources:
        return find_bags(paths)
    by_source: dict[str, list[Path]] = {source.name: [] for source in facts.sources}
    for path in bag_files_in(paths):
        by_source[source_of(path, facts.sources)].append(path)
    if empty := [name for name, own in by_source.items() if not own]:
        raise CohortError(
            f"The models read the sources {', '.join(by_source)}, and there is no bag of "
            f"{', '.join(empty)}. Pass bags of all sources."
        )
    return join_bags_of(facts, {name: find_bags(own) for name, own in by_source.items()})


def join_bags_of(
    facts: Facts, by_source: Mapping[str, Mapping[str, Path]]
) -> dict[str, SlideFiles]:
    """Return the files of each slide from its bags by source."""
    slides = sorted({slide for own in by_source.values() for slide in own})
    lost = [
        f"{slide} ({name})"
        for slide in slides
        for name, own in by_source.items()
        if slide not in own
    ]
    if lost:
        raise CohortError(
            f"Slides without a bag of every source: {shorten(lost)}. Pass these bags too, or leave "
            "the slides out."
        )
    return {
        slide: source_bags(facts, [own[slide] for own in by_source.values()]) for slide in slides
    }


def source_bags(facts: Facts, paths: Sequence[Path]) -> SourceBags:
    """Return the files of a slide as the models of a run read them."""
    join: Join = facts.join or "concatenation"
    return SourceBags(tuple(source.name for source in facts.sources), tuple(paths), join)


def source_of(path: Path, sources: Sequence[SourceFacts]) -> str:
    """Return the name of the source that a bag is of."""
    names = [source.name for source in sources]
    if above := [folder for folder in path.absolute().parent.parts if folder in names]:
        return above[-1]
    info = bags.inspect(path)
    fits = [source.name for source in sources if difference(info, source) is None]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise CohortError(
            f"{path} can be of the sources {' and '.join(fits)}: they do not differ in encoder and "
            f"scale. Put bags into folders of the names {' and '.join(fits)}."
        )
    apart = "; ".join(f"{each.name}: {difference(info, each)}" for each in sources)
    raise CohortError(
        f"{path} is of none of the sources that the models read ({apart}). Extract its features in "
        f"the same way, or name its folder as the source that it is of."
    )


def difference(info: BagInfo, known: Facts | SourceFacts) -> str | None:
    """Return how a bag differs from those of a run, in words; None if it does not."""
    if info.width != known.in_dim:
        return f"{info.width} features, not {known.in_dim}"
    if info.encoder and known.encoder and not same_encoder(info.encoder, known.encoder):
        return f"encoder {info.encoder}, not {known.encoder}"
    if info.fingerprint and known.fingerprint and info.fingerprint != known.fingerprint:
        return f"other weights or another transform of encoder {info.encoder}, not those"
    if info.mpp and known.mpp and not same_scale(info.mpp, known.mpp):
        return f"{info.mpp:g} um/px, not {known.mpp:g}"
    return None


def order_folders(
    facts: Facts, features: str | Path | Sequence[str | Path] | None, run: Path
) -> str | Path | list[str | Path] | None:
    """Return the folders of another cohort in the order of the sources of a run."""
    given = [features] if isinstance(features, str | Path) else list(features or ())
    names = [source.name for source in facts.sources]
    if not names:
        if len(given) > 1:
            raise RunError(f"The models of {run} read one source. Pass one folder: --features.")
        return given[0] if given else None
    if len(given) != len(names):
        raise RunError(
            f"The models of {run} read the sources {', '.join(names)}. Pass a folder for each, in "
            "this order: --features FOLDER --features FOLDER."
        )
    own = [as_path(folder).absolute().name for folder in given]
    by_name = dict(zip(own, given, strict=True))
    if by_name.keys() == set(names):
        return [by_name[name] for name in names]
    for folder, name in zip(own, names, strict=True):
        if folder in names and folder != name:
            raise RunError(
                f"The folder {folder} is passed as the source {name}, and {folder} is another one. "
                f"Pass the folders in the order {', '.join(names)}."
            )
    return list(given)
