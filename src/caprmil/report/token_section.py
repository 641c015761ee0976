"""The section of tokens in a slide report: the map, the usage and the patches of each token."""

from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from caprmil.errors import count
from caprmil.explain import TOP, Explanation, top_patches
from caprmil.report.html_page import EMPTY, render
from caprmil.report.patch_pictures import GalleryPatch, PatchPictures
from caprmil.report.report_inputs import SlideInputs
from caprmil.report.text_format import share

TOP_PER_HEAD = 4  # patches of a token in a single head


class TokenCard(NamedTuple):
    """A token as the section shows it. The map is drawn by the script."""

    number: int
    usage: str
    bar: float
    gallery: list[GalleryPatch]


def token_section(inputs: SlideInputs) -> Markup:
    """Return the tokens of the last block; nothing if the model has none."""
    explanation, pictures = inputs.explained.explanation, inputs.pictures
    if explanation.assignments is None:
        return EMPTY
    _, heads, _, tokens = explanation.assignments.shape
    over_heads, per_head = include_pictures(explanation, pictures)
    return render(
        "tokens.html",
        introduction=_introduction(explanation),
        heads=heads if inputs.has_heads and heads > 1 else 0,
        cards=[_card(explanation, m, pictures, over_heads) for m in range(tokens)],
        patches=over_heads or TOP,
        patches_per_head=per_head or TOP_PER_HEAD,
        included=included(pictures, over_heads, per_head, heads=heads if inputs.has_heads else 0),
    )


def include_pictures(explanation: Explanation, pictures: PatchPictures) -> tuple[int, int]:
    """Include the top patches of each token; return how many, over all heads and per head."""
    assert explanation.assignments is not None
    _, heads, _, tokens = explanation.assignments.shape
    over_heads = [top_patches(explanation.token(m)).tolist() for m in range(tokens)]
    per_head = [
        top_patches(explanation.token(m, head=h)).tolist()
        for h in range(heads)
        for m in range(tokens)
    ]
    return pictures.include(over_heads, TOP), pictures.include(per_head, TOP_PER_HEAD)


def _introduction(explanation: Explanation) -> str:
    assert explanation.assignments is not None
    blocks, heads, _, tokens = explanation.assignments.shape
    entropy = float(explanation.uncertainty[-1].mean())
    where = f"In each of {heads} heads" if heads > 1 else "In the only head"
    block = f" Shown: the last of {blocks} blocks." if blocks > 1 else ""
    return (
        f"{where}, each patch distributes a weight of 1 over {count(tokens, 'token')}. Patches "
        f"exchange information only through tokens.{block} The mean entropy of the weights is "
        f"{share(entropy)} of its maximum (0 %: all weight on one token; 100 %: equal weight on "
        "all)."
    )


def included(pictures: PatchPictures, over_heads: int, per_head: int, *, heads: int) -> str:
    """Return a sentence on the pictures and maps in the file. `heads`: 0 if left out."""
    if not pictures.available:
        text = "There are no pictures of patches: the slide file was not found."
    elif over_heads and per_head and heads > 1:
        text = (
            f"Pictures in this file: {count(over_heads, 'patch')} of each token over all heads, "
            f"and {per_head} of each token in a single head."
        )
    elif over_heads:
        text = f"Pictures in this file: {count(over_heads, 'patch')} of each token over all heads."
    else:
        text = "Pictures of the patches of tokens are left out to keep the file small."
    if not heads:
        text += " Maps of single heads are left out to keep the file small."
    return text


def _card(explanation: Explanation, token: int, pictures: PatchPictures, k: int) -> TokenCard:
    weights, usage = explanation.token(token), float(explanation.usage[-1, :, token].mean())
    patches = top_patches(weights)[: k or TOP].tolist()
    captions = [(share(float(weights[row])), "weight") for row in patches]
    return TokenCard(
        number=token,
        usage=share(usage),
        bar=round(100 * float(np.clip(usage, 0, 1)), 2),
        gallery=pictures.gallery(patches, captions),
    )
