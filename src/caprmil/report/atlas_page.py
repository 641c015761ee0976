"""The page of an atlas: the tokens of a run over its cohort, in one HTML file."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from caprmil.errors import count, plural, shorten
from caprmil.explain.atlas_pictures import AtlasPictures
from caprmil.explain.patient_means import Estimate
from caprmil.explain.token_atlas import AtlasToken, TokenAtlas, TypicalPatch
from caprmil.explain.token_matching import REDUNDANT
from caprmil.report.html_page import asset, data_url, page, render
from caprmil.report.patch_pictures import Picture, as_jpeg
from caprmil.report.text_format import share, signed
from caprmil.runs.run import Run

ALIKE = 0.8  # mean correlation of matched tokens above which they are called stable
FEW = 10  # patients, below which intervals are unreliable


class Tile(NamedTuple):
    """A number in large print."""

    title: str
    value: str
    remark: str


class Bar(NamedTuple):
    """A mean with its interval as text, and as positions from 0 to 100 of a small chart."""

    text: str
    interval: str
    start: float
    end: float
    low: float | None
    high: float | None


class GroupRow(NamedTuple):
    """The usage and the effect of a token on the slides of one group."""

    name: str
    usage: Bar
    effect: Bar


class CardPatch(NamedTuple):
    """A typical patch: its picture, or else where it is."""

    url: str
    weight: str
    slide: str
    where: str


class TokenCard(NamedTuple):
    """A token as the page shows it. The script sorts cards by the numbers."""

    title: str
    number: int
    effect: float
    usage: float
    contrast: float  # the largest difference of usage between two groups
    remarks: tuple[str, ...]
    rows: tuple[GroupRow, ...]
    patches: tuple[CardPatch, ...]


def atlas_page(run: Run, atlas: TokenAtlas, pictures: AtlasPictures, figure: Picture) -> str:
    """Return the atlas as one HTML page, which loads nothing from the network."""
    name = run.folder.resolve().name
    sections = [
        render("atlas_summary.html", tiles=list(_tiles(atlas)), sentences=list(verdict(atlas))),
        render("atlas_figure.html", figure=figure, text=_figure_text(atlas, pictures)),
        _token_section(atlas, pictures),
        _table_section(atlas),
        _stability_section(atlas),
        _redundancy_section(atlas),
        _method_section(atlas, pictures),
    ]
    return page(
        "atlas_page.html",
        title=f"{name}, token atlas",
        name=name,
        model=atlas.model,
        slides=len(atlas.slides),
        patients=atlas.patients,
        folds=len(atlas.folds),
        sections=sections,
        scripts=[asset("sort_table.js"), asset("atlas_page.js")],
    )


def verdict(atlas: TokenAtlas) -> Iterator[str]:
    """Yield in a few sentences what the atlas says, and how far it can be relied on."""
    block = atlas.shape[0] - 1
    mean, chance = atlas.stability.mean(block), atlas.stability.chance(block)
    if atlas.shape[2] == 1:
        yield "Each head has one token, to which all patches are assigned: it collects nothing."
    elif math.isnan(mean):
        yield "There is one fold only, so it is not known whether its tokens would come back."
    else:
        matched = f"a mean correlation of {mean:.2f} ({chance:.2f} by chance)"
        if mean > ALIKE:
            yield f"Tokens are stable: those that match between two folds have {matched}."
        elif atlas.is_stable:
            yield (
                f"Tokens are partly stable: those that match best between two folds have "
                f"{matched}. How well a token is matched stands next to it."
            )
        elif len(atlas.folds) > 1:
            yield (
                f"Tokens are not stable: those that match best between two folds have {matched}. A "
                "token of the atlas mixes different tokens of different folds. Use --fold to see "
                "the tokens of one model."
            )
        else:
            yield (
                f"Tokens are not stable: those that match best between two folds have {matched}. "
                f"What follows is true of {atlas.reference} only."
            )
    ranked = atlas.ranked
    sizes = [token.effect_size for token in ranked]
    total = sum(sizes)
    if total and math.isfinite(total):
        half = next(n for n in range(1, len(sizes) + 1) if sum(sizes[:n]) >= total / 2)
        first = ranked[0]
        yield (
            f"{count(half, 'token')} of {len(ranked)} {'has' if half == 1 else 'have'} half of all "
            f"effects on the answer. The largest is that of {first.title.lower()}."
        )
    if atlas.target.has_classes and ranked:
        most = max(ranked, key=lambda token: token.turned)
        yield (
            f"The answer turns for at most {share(most.turned)} of the slides if the message of "
            f"one token is removed ({most.title.lower()})."
            if most.turned
            else "No answer turns if the message of a single token is removed."
        )
    if atlas.patients < FEW:
        yield f"{count(atlas.patients, 'patient')} are few: intervals are unreliable."


def _tiles(atlas: TokenAtlas) -> Iterator[Tile]:
    blocks, heads, per_head = atlas.shape
    where = f"in the last of {blocks} blocks" if blocks > 1 else "in the only block"
    yield Tile("Tokens", str(heads * per_head), f"{count(heads, 'head')} of {per_head}, {where}")
    mean, chance = atlas.stability.mean(blocks - 1), atlas.stability.chance(blocks - 1)
    known = not math.isnan(mean)
    yield Tile(
        "Stability between folds",
        f"{mean:.2f}" if known else "–",
        f"correlation of matched tokens; {chance:.2f} by chance" if known else "one fold only",
    )
    first = atlas.ranked[0]
    unit = f"{plural(atlas.target.output_name)}, " if atlas.target.has_classes else ""
    yield Tile("Largest effect", f"{first.effect_size:.3g}", f"{unit}{first.title.lower()}")
    groups = atlas.redundant[atlas.reference][blocks - 1]
    redundant = sum(len(group) for group in groups)
    yield Tile(
        "Redundant tokens",
        str(redundant),
        f"in {count(len(groups), 'group')}" if groups else f"none is correlated above {REDUNDANT}",
    )


def effect_text(atlas: TokenAtlas) -> str:
    """Return what an effect is, as the end of a sentence."""
    if atlas.target.has_classes:
        outputs = plural(atlas.target.output_name)
        return (
            f"how far the lead of the predicted class over the others falls, in {outputs}, if the "
            "token's message is removed. Above 0 the token supports the predicted class, below 0 "
            "another one"
        )
    return (
        f"how far the {atlas.target.lead_name} falls if the token's message is removed. Above 0 "
        "the token raises the value, below 0 it lowers it"
    )


def _figure_text(atlas: TokenAtlas, pictures: AtlasPictures) -> str:
    below = " Below each map: the most typical patches of the cohort." if pictures.patches else ""
    return (
        f"Top: weights of the patches of one slide on the tokens of head {atlas.head_to_draw + 1}, "
        f"by the model of {atlas.reference}.{below} Bottom: usage and effect of the "
        "tokens of all heads, as means over slides with 95 % intervals over patients."
    )


def _token_section(atlas: TokenAtlas, pictures: AtlasPictures) -> Markup:
    groups = [each for token in atlas.last for each in (token.usage.overall, *token.usage.groups)]
    longest = max((_reach(each) for each in groups), default=1.0)
    effects = [
        each for token in atlas.last for each in (token.effect.overall, *token.effect.groups)
    ]
    largest = max((_reach(each) for each in effects), default=1.0)
    cards = [
        _card(atlas, token, pictures, longest or 1.0, largest or 1.0) for token in atlas.ranked
    ]
    patches = (
        "The number under a patch is its weight on the token."
        if pictures.patches
        else "Typical patches are listed with their weight on the token: no slide file was found."
    )
    return render("atlas_tokens.html", cards=cards, effect=effect_text(atlas), patches=patches)


def _card(
    atlas: TokenAtlas, token: AtlasToken, pictures: AtlasPictures, longest: float, largest: float
) -> TokenCard:
    rows = [GroupRow("all", *_bars(token.usage.overall, token.effect.overall, longest, largest))]
    if len(atlas.groups) > 1:
        rows += [
            GroupRow(name, *_bars(usage, effect, longest, largest))
            for name, usage, effect in zip(
                atlas.groups, token.usage.groups, token.effect.groups, strict=True
            )
        ]
    means = [each.mean for each in token.usage.groups if not math.isnan(each.mean)]
    return TokenCard(
        title=token.title,
        number=token.head * atlas.shape[2] + token.token,
        effect=token.effect_size,
        usage=token.usage.overall.mean,
        contrast=max(means, default=0.0) - min(means, default=0.0),
        remarks=tuple(_remarks(atlas, token)),
        rows=tuple(rows),
        patches=tuple(_patch(patch, pictures) for patch in token.patches),
    )


def _remarks(atlas: TokenAtlas, token: AtlasToken) -> Iterator[str]:
    if not math.isnan(token.stability):
        yield f"matched in other folds: {token.stability:.2f}"
    if atlas.target.has_classes and token.turned:
        yield f"without it {share(token.turned)} of answers turn"
    if token.redundant:
        yield f"does the same as {_names(token.redundant)} (head.token)"


def _names(tokens: Sequence[tuple[int, int]]) -> str:
    return shorten(f"{head + 1}.{token + 1}" for head, token in tokens)


def _bars(usage: Estimate, effect: Estimate, longest: float, largest: float) -> tuple[Bar, Bar]:
    return (
        _bar(usage, share(usage.mean), share, lambda value: 100 * value / longest),
        _bar(effect, signed(effect.mean), signed, lambda value: 50 + 50 * value / largest),
    )


def _bar(
    estimate: Estimate,
    text: str,
    show: Callable[[float], str],
    place: Callable[[float], float],
) -> Bar:
    if math.isnan(estimate.mean):
        return Bar("–", "", 0.0, 0.0, None, None)
    low, high = estimate.interval
    known = not math.isnan(low)
    zero, end = place(0.0), place(estimate.mean)
    return Bar(
        text=text,
        interval=f"{show(low)} to {show(high)}" if known else "",
        start=round(min(zero, end), 2),
        end=round(max(zero, end), 2),
        low=round(place(low), 2) if known else None,
        high=round(place(high), 2) if known else None,
    )


def _reach(estimate: Estimate) -> float:
    values = (estimate.mean, *estimate.interval)
    return max((abs(value) for value in values if not math.isnan(value)), default=0.0)


def _patch(patch: TypicalPatch, pictures: AtlasPictures) -> CardPatch:
    picture = pictures.of(patch)
    where = "" if patch.x is None else f" at {patch.x:,.0f}, {patch.y:,.0f}"
    return CardPatch(
        url="" if picture is None else data_url(as_jpeg(picture)),
        weight=share(patch.weight),
        slide=patch.slide,
        where=f"patch {patch.row}{where}",
    )


def _table_section(atlas: TokenAtlas) -> Markup:
    several = len(atlas.groups) > 1
    groups = tuple(atlas.groups) if several else ()
    head = ["Token", "Usage", *(f"Usage, {g}" for g in groups)]
    head += ["Effect", *(f"Effect, {g}" for g in groups), "Answers turned", "Matched"]
    rows = []
    for token in atlas.last:
        usage = [token.usage.overall, *(token.usage.groups if several else ())]
        effect = [token.effect.overall, *(token.effect.groups if several else ())]
        cells = [(_text(share, each.mean), each.mean) for each in usage]
        cells += [(_text(signed, each.mean), each.mean) for each in effect]
        cells += [(share(token.turned), token.turned)]
        cells += [(_text("{:.2f}".format, token.stability), token.stability)]
        rows.append((token.title, [(text, _sortable(value)) for text, value in cells]))
    return render("atlas_table.html", head=head, rows=rows)


def _text(show: Callable[[float], str], value: float) -> str:
    return "–" if math.isnan(value) else show(value)


def _sortable(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _stability_section(atlas: TokenAtlas) -> Markup:
    blocks, stability = atlas.shape[0], atlas.stability
    head = ["Folds", *(["Block"] if blocks > 1 else []), "Matched correlation", "By chance"]
    rows = [
        [
            f"{pair.one} and {pair.other}",
            *([str(pair.block + 1)] if blocks > 1 else []),
            f"{pair.match.mean:.3f}",
            f"{pair.chance:.3f}",
        ]
        for pair in stability.pairs
    ]
    if not rows:
        return Markup("")
    notes = [
        f"The models of all folds were run on {count(stability.slides, 'slide')} with "
        f"{count(stability.patches, 'patch')} in total. Some of them were trained on these slides.",
        "Tokens of all heads are matched one to one, so that the sum of the correlations of their "
        "assignments over patches is the highest.",
        "By chance: the same after the patches of one model were permuted within each slide.",
    ]
    return render(
        "table_section.html", title="Stability between folds", head=head, rows=rows, notes=notes
    )


def _redundancy_section(atlas: TokenAtlas) -> Markup:
    per_head = atlas.shape[2]
    rows = [
        (fold, ", ".join(f"{index // per_head + 1}.{index % per_head + 1}" for index in group))
        for fold, blocks in atlas.redundant.items()
        for group in blocks[-1]
    ]
    return render("atlas_groups.html", rows=rows, above=REDUNDANT)


def _method_section(atlas: TokenAtlas, pictures: AtlasPictures) -> Markup:
    by_fold = ", ".join(f"{fold}: {n}" for fold, n in atlas.folds.items())
    lines = [
        f"Each slide was seen by one model that was not trained on it ({by_fold}). Heads and "
        f"tokens are those of {atlas.reference}; tokens of other folds are matched to them.",
        "Usage is the mean weight of a slide's patches on the token, as a mean over slides.",
        f"An effect is {effect_text(atlas)}. It is exact: the slide is predicted again without the "
        "message of the token in its block, for all patches.",
        "Intervals are 95 % bootstrap intervals over patients. They do not cover the choice of "
        "the folds.",
        "Typical patches have the highest weight on the token, each from another patient as long "
        "as there are enough.",
    ]
    if pictures.missing:
        first = next(iter(pictures.missing.items()))
        lines.append(
            f"Without pictures: {count(len(pictures.missing), 'slide')}, e.g. {first[0]}: "
            f"{first[1].rstrip('.')}. Pass the folder of the slides: --slides."
        )
    if atlas.left_out:
        first = next(iter(atlas.left_out.items()))
        lines.append(
            f"Left out: {count(len(atlas.left_out), 'slide')}, e.g. {first[0]}: {first[1]}"
        )
    return render("atlas_method.html", lines=lines)
