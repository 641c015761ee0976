"""Tokens: what a model's patches were gathered into, each with its map and its patches."""

import numpy as np

from caprmil.explain import TOP, Case, Explanation, top_patches
from caprmil.report.page import EMPTY, Html, fill, join, tag
from caprmil.report.pictures import Album
from caprmil.report.words import count, part

HEAD_TOP = 4  # patches of a token in a single head


def choose(case: Case, album: Album) -> tuple[int, int]:
    """Ask for pictures; return how many patches of a token have one, over heads and in one."""
    told = case.explanation
    if told.assignments is None:
        return 0, 0
    _, heads, _, tokens = told.assignments.shape
    of_all = [top_patches(told.token(m)).tolist() for m in range(tokens)]
    of_each = [
        top_patches(told.token(m, head=h)).tolist() for h in range(heads) for m in range(tokens)
    ]
    return album.choose(of_all, TOP), album.choose(of_each, HEAD_TOP)


def section(case: Case, album: Album, sizes: tuple[int, int], *, heads_stored: bool) -> Html:
    """Return the tokens of the last block; nothing where a model has none."""
    told = case.explanation
    if told.assignments is None:
        return EMPTY
    blocks, heads, _, tokens = told.assignments.shape
    return fill(
        "tokens.html",
        lede=_lede(told, blocks, heads, tokens),
        chooser=_chooser(heads) if heads_stored and heads > 1 else EMPTY,
        cards=join(_card(told, token, album, sizes[0]) for token in range(tokens)),
        included=included(album, sizes, heads if heads_stored else 0),
    )


def _lede(told: Explanation, blocks: int, heads: int, tokens: int) -> str:
    undecided = float(told.uncertainty[-1].mean())
    where = f" Shown: the last of {blocks} blocks." if blocks > 1 else ""
    return (
        f"In {count(heads, 'head')}, each patch spreads one unit of weight over "
        f"{count(tokens, 'token')}; tokens are what patches learn of each other through.{where} "
        f"On average patches are {part(undecided)} undecided (0 %: all weight on one token; "
        "100 %: the same on all)."
    )


def included(album: Album, sizes: tuple[int, int], heads: int) -> str:
    """Say which pictures are in the file."""
    if not album.open:
        words = "There are no pictures of patches, since the slide was not at hand."
    elif sizes[0] and sizes[1] and heads > 1:
        words = (
            f"Pictures in this file: {count(sizes[0], 'patch')} of each token over all heads, "
            f"and {sizes[1]} of each token in a single head."
        )
    elif sizes[0]:
        words = f"Pictures in this file: {count(sizes[0], 'patch')} of each token over all heads."
    else:
        words = "Pictures of the tokens' patches would have made this file too large."
    if not heads:
        words += " Maps of single heads were left out, to keep the file small."
    return words


def _chooser(heads: int) -> Html:
    options = [tag("option", "All heads, their mean", value="")]
    options += [tag("option", f"Head {head + 1}", value=head) for head in range(heads)]
    return tag("label", "Head ", tag("select", *options, id="head"))


def _card(told: Explanation, token: int, album: Album, k: int) -> Html:
    values, used = told.token(token), float(told.usage[-1, :, token].mean())
    patches = top_patches(values)[: k or TOP].tolist()
    captions = [(part(float(values[row])), "of it") for row in patches]
    return fill(
        "token.html",
        token=token,
        title=f"Token {token + 1}",
        usage=part(used),
        bar=round(100 * float(np.clip(used, 0, 1)), 2),
        gallery=album.gallery(patches, captions),
    )
