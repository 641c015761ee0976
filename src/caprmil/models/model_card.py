"""The card of a model: README.md of its repository on the hub, with YAML that the hub indexes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caprmil.io.model_hub import REPLACED
from caprmil.io.tables import markdown_table

UNKNOWN = "not known"
FEATURES = ("encoder", "encoder_licence", "fingerprint", "in_dim", "mpp", "patch_px", "scale_rule")
INTENDED_USE = """\
Research on features of the encoder and scale above, from slides like those of its cohort. Features
of another encoder or scale give meaningless answers. It is not a medical device, was not validated
for diagnosis, and must not decide on the care of patients. Validate it on slides of your own
institution first: `caprmil evaluate RUN --cohort TABLE`."""


@dataclass(frozen=True, kw_only=True)
class CardScore:
    """A metric in a card: over all slides, with its interval, and over folds."""

    name: str
    title: str
    value: float | None
    interval: tuple[float, float] | None = None
    mean_over_folds: float | None = None
    std_over_folds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CardScores:
    """The scores in a card, and what they were measured on."""

    rows: tuple[CardScore, ...]
    measured_on: str
    level: float = 0.95
    notes: tuple[str, ...] = ()


def model_card(
    name: str,
    metadata: Mapping[str, Any],
    *,
    in_dim: int,
    title: str = "",
    licence: str | None = None,
    scores: CardScores | None = None,
    recipe: str = "",
    usage: str = "",
) -> str:
    """Return the card of a model of this name, from its metadata and what else is known."""
    sections = [
        f"# {title or name}",
        REPLACED,
        _summary(name, metadata, in_dim),
        "## Use",
        usage or model_usage("OWNER/NAME"),
        "## Scores",
        _score_table(scores),
        "## Intended use",
        INTENDED_USE,
    ]
    if recipe:
        sections += ["## Recipe", f"```toml\n{recipe.strip()}\n```"]
    front = _front_matter(name, metadata, in_dim, licence=licence, scores=scores)
    return f"---\n{front}\n---\n\n" + "\n\n".join(part.strip() for part in sections) + "\n"


def model_usage(repository: str) -> str:
    """Return how a model is loaded from a repository."""
    return f"""\
```python
from caprmil import MILModel

model = MILModel.from_pretrained("{repository}")
output = model(features[None])  # features: patches x width, float32
```

`model.metadata` has target, encoder and scale."""


def _front_matter(
    name: str,
    metadata: Mapping[str, Any],
    in_dim: int,
    *,
    licence: str | None,
    scores: CardScores | None,
) -> str:
    """Return the YAML: what the hub knows, and the rest under `caprmil`."""
    from huggingface_hub import ModelCardData

    sources = _sources(metadata, in_dim)
    hubs = dict.fromkeys(source["encoder_hub"] for source in sources if source.get("encoder_hub"))
    own = {
        "model": name,
        "target": _plain_target(metadata.get("target") or {}),
        "features": [
            {key: source[key] for key in ("name", *FEATURES) if source.get(key) is not None}
            for source in sources
        ],
        "covariates": metadata.get("covariates"),
        "cohort": metadata.get("cohort"),
        "recipe": metadata.get("digest"),
        "trained_with": metadata.get("trained_with"),
        "intended_use": "research",
        "scores": scores and _plain_scores(scores),
    }
    data = ModelCardData(
        library_name="caprmil",
        license=licence,
        base_model=[*hubs] or None,
        tags=["caprmil", "histopathology", "multiple-instance-learning", "whole-slide-images"],
        metrics=[score.name for score in scores.rows] if scores else None,
        caprmil={key: value for key, value in own.items() if value},
    )
    return data.to_yaml().strip()


def _sources(metadata: Mapping[str, Any], in_dim: int) -> list[dict[str, Any]]:
    """Return what is known of the features: of each source, if there are several."""
    sources = metadata.get("sources")
    return [dict(each) for each in sources] if sources else [{"in_dim": in_dim, **metadata}]


def _plain_target(target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a target for a card: names and horizons, no times of patients."""
    return {
        key: list(value) if isinstance(value, (list, tuple)) else value
        for key, value in target.items()
        if isinstance(value, (str, int, float))
        or (isinstance(value, (list, tuple)) and value and _is_setting(key, value))
    }


def _is_setting(key: str, value: Sequence[Any]) -> bool:
    return key == "horizons" or all(isinstance(each, str) for each in value)


def _plain_scores(scores: CardScores) -> dict[str, Any]:
    found: dict[str, Any] = {"measured_on": scores.measured_on, "interval_level": scores.level}
    for score in scores.rows:
        numbers = {"value": score.value, "mean_over_folds": score.mean_over_folds}
        numbers |= {"std_over_folds": score.std_over_folds}
        known = {key: round(number, 4) for key, number in numbers.items() if number is not None}
        ends = score.interval and {"interval": [round(end, 4) for end in score.interval]}
        found[score.name] = known | (ends or {})
    return found


def _summary(name: str, metadata: Mapping[str, Any], in_dim: int) -> str:
    """Return the table of what a model predicts, and from what."""
    target, cohort = metadata.get("target") or {}, metadata.get("cohort") or {}
    label = f" of {metadata['label']}" if metadata.get("label") else ""
    rows = [["model", name], ["predicts", f"{target.get('kind', UNKNOWN)}{label}"]]
    if classes := target.get("classes"):
        rows.append(["classes", ", ".join(map(str, classes))])
    for source in _sources(metadata, in_dim):
        of = f" of {source['name']}" if source.get("name") else ""
        mpp, patch = source.get("mpp"), source.get("patch_px")
        scale = f"{mpp:g} µm per pixel" if mpp else UNKNOWN
        rows += [
            [f"encoder{of}", str(source.get("encoder") or UNKNOWN)],
            [f"licence of the encoder{of}", str(source.get("encoder_licence") or UNKNOWN)],
            [f"scale{of}", scale + (f", patches of {patch} px" if patch else "")],
            [f"features{of}", f"{source['in_dim']} per patch"],
        ]
    if covariates := metadata.get("covariates"):
        rows.append(["covariates", ", ".join(covariates)])
    rows.append(["cohort", _cohort(cohort)])
    rows.append(["recipe", str(metadata.get("digest") or UNKNOWN)])
    rows.append(["trained with", f"caprmil {metadata.get('trained_with') or UNKNOWN}"])
    return markdown_table(
        ["", ""], [[cell.replace("|", "\\|") for cell in row] for row in rows], ()
    )


def _cohort(cohort: Mapping[str, Any]) -> str:
    """Return the size of a cohort as text."""
    sizes = ", ".join(f"{cohort[key]} {key}" for key in ("slides", "patients") if cohort.get(key))
    split = ", ".join(
        f"{cohort[part]} {part}" for part in ("train", "validation", "test") if part in cohort
    )
    return (f"{sizes} ({split})" if split else sizes) or UNKNOWN


def _score_table(scores: CardScores | None) -> str:
    if scores is None or not scores.rows:
        return "None were measured, or they are not with the model."
    rows = []
    for score in scores.rows:
        interval = " to ".join(f"{end:.3f}" for end in score.interval) if score.interval else "–"
        folds = _number(score.mean_over_folds)
        if score.std_over_folds is not None:
            folds += f" ± {score.std_over_folds:.3f}"
        rows.append([score.title, _number(score.value), interval, folds])
    head = ["", "value", f"{100 * scores.level:g} % interval", "mean and deviation over folds"]
    return f"{scores.measured_on}\n\n{markdown_table(head, rows, scores.notes)}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
