"""Tables of an atlas: a row per block, head and token as CSV, and everything as JSON.

Blocks, heads and tokens count from 1.

    slides                     over which means are taken
    usage                      the share of a slide's patches that is assigned to the token
    effect                     how far the contrast of the answer falls without its message
    ..._low, ..._high          95 % bootstrap interval over patients
    usage_NAME, effect_NAME    the same for the slides of a class or quarter
    answers_turned             the share of the slides with another answer without its message
    matched_correlation        mean correlation with the matched tokens of the other folds
    redundant_with             tokens of other heads that do the same, as head.token
    typical_patches            slide:row@x,y of the most typical patches, the best first
"""

import csv
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from io import StringIO
from typing import Any

from caprmil.explain.atlas_pictures import AtlasPictures
from caprmil.explain.patient_means import Estimate, Estimates
from caprmil.explain.token_atlas import AtlasToken, TokenAtlas, TypicalPatch
from caprmil.explain.token_matching import REDUNDANT
from caprmil.runs.run import Run


def atlas_csv(atlas: TokenAtlas) -> str:
    """Return the table of all tokens."""
    text = StringIO()
    rows = [_row(atlas, token) for token in atlas.tokens]
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _row(atlas: TokenAtlas, token: AtlasToken) -> dict[str, Any]:
    numbers = {"block": token.block + 1, "head": token.head + 1, "token": token.token + 1}
    return {
        **numbers,
        "slides": len(atlas.slides),
        **_columns("usage", token.usage, atlas.groups),
        **_columns("effect", token.effect, atlas.groups),
        "answers_turned": f"{token.turned:.6f}",
        "matched_correlation": _cell(token.stability),
        "redundant_with": " ".join(f"{h + 1}.{m + 1}" for h, m in token.redundant),
        "typical_patches": " ".join(_patch_text(patch) for patch in token.patches),
    }


def _columns(name: str, estimates: Estimates, groups: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    parts = {name: estimates.overall}
    parts |= {f"{name}_{g}": own for g, own in zip(groups, estimates.groups, strict=True)}
    for title, (mean, interval) in parts.items():
        found |= {title: _cell(mean)}
        found |= {f"{title}_low": _cell(interval.low), f"{title}_high": _cell(interval.high)}
    return found


def _cell(value: float) -> str:
    return "" if value != value else f"{value:.6g}"  # NaN: empty


def _patch_text(patch: TypicalPatch) -> str:
    where = "" if patch.x is None else f"@{patch.x:g},{patch.y:g}"
    return f"{patch.slide}:{patch.row}{where}"


def atlas_record(atlas: TokenAtlas, run: Run, pictures: AtlasPictures) -> dict[str, Any]:
    """Return the whole atlas for JSON, with its provenance."""
    blocks, heads, per_head = atlas.shape
    stability = atlas.stability
    return {
        "model": atlas.model,
        "tokens": {"blocks": blocks, "heads": heads, "tokens_per_head": per_head},
        "slides": list(atlas.slides),
        "patients": atlas.patients,
        "groups": dict(atlas.groups),
        "slides_by_fold": dict(atlas.folds),
        "reference_fold": atlas.reference,
        "left_out": dict(atlas.left_out),
        "without_pictures": dict(pictures.missing),
        "stability": {
            "folds": list(stability.folds),
            "slides": stability.slides,
            "patches": stability.patches,
            "by_block": [
                {
                    "matched_correlation": stability.mean(block),
                    "chance": stability.chance(block),
                    "pairs": [
                        {
                            "folds": [pair.one, pair.other],
                            "matched_correlation": pair.match.mean,
                            "chance": pair.chance,
                            "matches": [
                                [_name(a, per_head), _name(int(b), per_head), float(r)]
                                for a, (b, r) in enumerate(zip(*pair.match, strict=True))
                            ],
                        }
                        for pair in stability.of_block(block)
                    ],
                }
                for block in range(blocks)
            ],
        },
        "redundant": {
            "correlation_above": REDUNDANT,
            "by_fold": {
                fold: [[[_name(n, per_head) for n in group] for group in own] for own in groups]
                for fold, groups in atlas.redundant.items()
            },
        },
        "atlas": [_token(atlas, token) for token in atlas.tokens],
        "provenance": {
            "caprmil": version("caprmil"),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": str(run.folder),
            "recipe": run.facts.digest,
        },
    }


def _token(atlas: TokenAtlas, token: AtlasToken) -> dict[str, Any]:
    return {
        "block": token.block + 1,
        "head": token.head + 1,
        "token": token.token + 1,
        "usage": _estimates(token.usage, atlas.groups),
        "effect": _estimates(token.effect, atlas.groups),
        "answers_turned": token.turned,
        "matched_correlation": token.stability,
        "redundant_with": [f"{h + 1}.{m + 1}" for h, m in token.redundant],
        "typical_patches": [patch._asdict() for patch in token.patches],
    }


def _estimates(estimates: Estimates, groups: Iterable[str]) -> dict[str, Any]:
    by_group = zip(groups, estimates.groups, strict=True)
    return {
        **_estimate(estimates.overall),
        "groups": {group: _estimate(own) for group, own in by_group},
    }


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.mean, "low": estimate.interval.low, "high": estimate.interval.high}


def _name(index: int, per_head: int) -> str:
    head, token = divmod(index, per_head)
    return f"{head + 1}.{token + 1}"
