"""Bags for a prediction: slides are encoded with the settings of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caprmil import config, encoders
from caprmil.errors import EncoderError, RunError, SlideError, UnknownNameError
from caprmil.features import bags
from caprmil.features.source_bags import SlideFiles
from caprmil.io.paths import as_path
from caprmil.io.progress import Bar
from caprmil.models.device import pick_device
from caprmil.runs.facts import Facts, SourceFacts
from caprmil.runs.run import Run
from caprmil.runs.source_inputs import find_slide_bags, join_bags_of
from caprmil.slides.names import SLIDE_SUFFIXES

if TYPE_CHECKING:
    from caprmil.features.extract import Extraction
    from caprmil.features.settings import ExtractionConfig
    from caprmil.slides.qc import Record


TABLES = (".csv", ".tsv", ".txt", ".xlsx", ".parquet")


def bags_of(
    run: Run,
    inputs: Sequence[Path],
    out: Path,
    *,
    weights: Path | None = None,
    trust_remote_code: bool = False,
    mpp: float | None = None,
    device: str = "auto",
    force: bool = False,
    progress: Bar | None = None,
) -> tuple[dict[str, SlideFiles], "list[Record]"]:
    """Return the bags of the inputs (slides or bags), and the records of slides without one.

    Slides are encoded into `out` with the settings of the run, unless their bag is an input too; of
    several sources, into a folder for each.
    """
    inputs, out = [as_path(path) for path in inputs], as_path(out)
    for path in inputs:
        if path.suffix.lower() in TABLES:
            raise RunError(f"{path} is a table. Pass slides or bags, or folders of them.")
    given = [path for path in inputs if _holds(path, bags.SUFFIXES)]
    found = dict(find_slide_bags(run.facts, given)) if given else {}
    pixels = [path for path in inputs if path not in given or _holds(path, SLIDE_SUFFIXES)]
    if not pixels:
        return found, []
    from caprmil.slides.slide import find_slides  # here: bags need no reader of slides

    slides = find_slides(pixels, exclude=out)
    slides = {name: path for name, path in slides.items() if name not in found}
    if not slides:
        return found, []
    loading: dict[str, Any] = {"weights": weights, "trust_remote_code": trust_remote_code}
    encoders_read = {source.encoder for source in run.facts.sources}
    if weights is not None and len(encoders_read) > 1:
        raise EncoderError(
            f"The sources of {run.folder} have different encoders "
            f"({', '.join(map(str, encoders_read))}), and --weights are of one. Encode the slides "
            "for each source with `caprmil encode`, and pass the bags."
        )
    failed: list[Record] = []
    encoded: dict[str, Mapping[str, Path]] = {}
    for facts in run.facts.sources or (run.facts,):
        folder = out / facts.name if isinstance(facts, SourceFacts) else out
        job = for_run(run, folder, facts, device=device, force=force, **loading)
        job.mpp = mpp
        records = job.run(slides, progress=progress)
        missing = [
            replace(r, reason=r.reason or "No tissue was found.")
            for r in records
            if r.state != "done"
        ]
        failed += missing
        slides = {name: slides[name] for name in slides if name not in {r.slide for r in missing}}
        encoded[str(folder)] = {
            r.slide: folder / f"{r.slide}.h5" for r in records if r.state == "done"
        }
    complete = {name: {slide: own[slide] for slide in slides} for name, own in encoded.items()}
    found |= join_bags_of(run.facts, complete) if run.facts.sources else complete[str(out)]
    if not found:
        raise SlideError(f"No slide could be encoded. {failed[0].slide}: {failed[0].reason}")
    return found, failed


def for_run(
    run: Run,
    out: Path,
    facts: Facts | SourceFacts | None = None,
    *,
    device: str = "auto",
    force: bool = False,
    **loading: Any,
) -> "Extraction":
    """Return an extraction with the settings of the bags that a run was trained on.

    `facts` are those of one of its sources, if there are several. `loading` is passed to
    `encoders.load`.
    """
    from caprmil.features.extract import Extraction
    from caprmil.features.settings import ExtractionConfig
    from caprmil.slides.patches import PatchConfig

    facts = facts or run.facts
    if facts.encoder is None or facts.mpp is None or facts.patch_px is None:
        raise RunError(
            f"The bags of {run.folder} do not state their encoder and scale. Encode the slides in "
            "the same way, and pass the bags."
        )
    if ":" in facts.encoder and not (
        facts.encoder.startswith("timm:") or loading.get("trust_remote_code")
    ):
        raise EncoderError(
            f"The bags of {run.folder} were made by custom code, {facts.encoder}, which would run "
            "with your permissions. Allow it with --trust-remote-code, or pass bags."
        )
    try:
        encoder = encoders.load(facts.encoder, device=pick_device(device), **loading)
    except UnknownNameError:
        raise EncoderError(
            f"The models of {run.folder} read features of {facts.encoder}, an encoder that caprmil "
            "does not have. Make the features of the slides in the same way, and pass the bags."
        ) from None
    if facts.fingerprint not in (None, encoder.fingerprint) and not force:
        raise EncoderError(
            f"The weights or the transform of {encoder.name} are not those that {run.folder} was "
            f"trained with: {encoder.fingerprint[:12]}, not {str(facts.fingerprint)[:12]}. "
            "Pass the right ones with --weights, or accept these with --force."
        )
    if facts.settings is not None:
        return Extraction(out=out, encoder=encoder, config=_settings(run, facts.settings, force))
    rule: Any = facts.scale_rule or "exact"
    grid = PatchConfig(px=facts.patch_px, mpp=facts.mpp, scale_rule=rule)
    return Extraction(out=out, encoder=encoder, config=ExtractionConfig(patches=grid))


def _settings(run: Run, text: str, force: bool) -> "ExtractionConfig":
    """Return the settings of a bag of the run, if slides can be encoded with them."""
    from caprmil.features.settings import VERSION, Settings

    try:
        made = config.parse(config.read_toml(text), into=Settings)
    except (ValueError, RecursionError) as problem:
        raise RunError(f"The bags of {run.folder} are of another caprmil ({problem}).") from None
    if made.version != VERSION:
        raise RunError(
            f"The bags of {run.folder} were made by method {made.version}, and this caprmil has "
            f"{VERSION}. Use the caprmil that made them, or encode and train again."
        )
    if made.regions is not None and not force:
        raise RunError(
            f"The bags of {run.folder} are from annotated regions. Encode the slides with "
            "`caprmil encode --regions` and pass the bags, or use all tissue with --force."
        )
    return replace(made.extraction, regions="and tissue", region_classes=())


def _holds(path: Path, endings: Sequence[str]) -> bool:
    """Return whether a file, or any file in a folder, has one of these suffixes."""
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.suffix.lower() in endings and file.parent.name != "qc" for file in files)
