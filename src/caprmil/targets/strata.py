"""Strata of slides with several labels each: rare labels are kept in balance first."""

from collections import Counter
from collections.abc import Mapping, Sequence

RARE, FEWEST_RARE, FEWEST = 20, 3, 10  # slides

Strata = tuple[dict[str, int], tuple[str, ...]]


def cross(slides: Sequence[str], labels: Mapping[str, Strata]) -> Strata:
    """Return strata of slides from the strata by each label. A slide may lack some of them.

    Slides are divided by the label with the rarest stratum, each part again by the others, as long
    as parts keep ten slides; a stratum that is rare in all slides may be smaller. Neighbours differ
    the least, so that folds which deal one after the other balance every label.
    """
    codes = {
        name: {slide: own.get(slide, -1) for slide in slides} for name, (own, _) in labels.items()
    }
    whole = {name: Counter(own.values()) for name, own in codes.items()}

    def groups_of(name: str, members: Sequence[str]) -> dict[int, list[str]]:
        """Return the groups of a label that are large enough; the others are one, of code -2."""
        groups: dict[int, list[str]] = {}
        for slide in members:
            groups.setdefault(codes[name][slide], []).append(slide)

        def fewest(code: int) -> int:
            return FEWEST_RARE if whole[name][code] < RARE else FEWEST

        small = [code for code in groups if len(groups[code]) < fewest(code)]
        rest = [slide for code in small for slide in groups.pop(code)]
        if rest and (len(rest) >= FEWEST or not groups):
            groups[-2] = rest
        elif rest:
            groups[max(groups, key=lambda code: len(groups[code]))] += rest
        return groups

    def divide(
        members: Sequence[str], left: Sequence[str], path: tuple[str, ...]
    ) -> list[tuple[Sequence[str], tuple[str, ...]]]:
        options = {name: groups_of(name, members) for name in left}
        options = {name: groups for name, groups in options.items() if len(groups) > 1}
        if not options:
            return [(members, path)]
        chosen = min(options, key=lambda name: min(map(len, options[name].values())))
        others, names = [name for name in left if name != chosen], labels[chosen][1]
        found = []
        for code, own in sorted(options[chosen].items()):
            word = names[code] if code >= 0 else ("unknown" if code == -1 else "other")
            found += divide(own, others, (*path, f"{chosen} {word}"))
        return found

    leaves = divide(list(slides), list(labels), ())
    strata = {slide: number for number, (own, _) in enumerate(leaves) for slide in own}
    names = tuple("; ".join(path) or "all" for _, path in leaves)
    return {slide: strata[slide] for slide in slides}, names
