"""Inference: from slides to bags as a run knows them, for its models to answer."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from caprmil import bags, config, encoders
from caprmil.cohort import find_bags
from caprmil.errors import CohortError, EncoderError, RunError, SlideError, some
from caprmil.extraction import Extraction, ExtractionConfig, Settings
from caprmil.patches import PatchConfig
from caprmil.progress import Bar
from caprmil.qc import Record
from caprmil.runs import Run, pick_device
from caprmil.slides import find_slides


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
) -> tuple[dict[str, Path], list[Record]]:
    """Return the bags of slides and bags, for a run to answer, and the slides that gave none.

    Slides are encoded into `out` as the run's own bags were.
    """
    given, pixels = _told_apart(inputs)
    found = find_bags(given) if given else {}
    if not pixels:
        return found, []
    slides = find_slides(pixels)
    if twins := sorted(found.keys() & slides):
        raise CohortError(f"Both a slide and a bag are given of {some(twins)}. Pass one of them.")
    loading: dict[str, Any] = {"weights": weights, "trust_remote_code": trust_remote_code}
    job = for_run(run, out, device=device, force=force, **loading)
    job.mpp = mpp
    records = job.run(slides, progress=progress)
    failed = [
        replace(r, reason=r.reason or "No tissue was found.") for r in records if r.state != "done"
    ]
    found |= {r.slide: out / f"{r.slide}.h5" for r in records if r.state == "done"}
    if not found:
        raise SlideError(f"No slide could be encoded. {failed[0].slide}: {failed[0].reason}")
    return found, failed


def for_run(
    run: Run, out: Path, *, device: str = "auto", force: bool = False, **loading: Any
) -> Extraction:
    """Return an extraction that makes bags as those were made that a run was trained on.

    `loading` is passed to `encoders.load`.
    """
    facts = run.facts
    if facts.encoder is None or facts.mpp is None or facts.patch_px is None:
        raise RunError(
            f"The bags of {run.folder} do not say with which encoder and at which scale they were "
            "made. Encode the slides in the same way, and pass the bags."
        )
    encoder = encoders.load(facts.encoder, device=pick_device(device), **loading)
    if facts.fingerprint not in (None, encoder.fingerprint) and not force:
        raise EncoderError(
            f"The weights or the transform of {encoder.name} are not those that {run.folder} was "
            f"trained with: {encoder.fingerprint[:12]}, not {str(facts.fingerprint)[:12]}. "
            "Pass the right ones with --weights, or accept these with --force."
        )
    if facts.settings is not None:
        made = config.parse(tomllib.loads(facts.settings), into=Settings)
        return Extraction(out=out, encoder=encoder, config=made.extraction)
    rule: Any = facts.scale_rule or "exact"
    grid = PatchConfig(px=facts.patch_px, mpp=facts.mpp, scale_rule=rule)
    return Extraction(out=out, encoder=encoder, config=ExtractionConfig(patches=grid))


def _told_apart(inputs: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return bags, and slides. A folder that holds bags is a folder of bags."""

    def holds_bags(path: Path) -> bool:
        files = path.rglob("*") if path.is_dir() else [path]
        return any(file.suffix.lower() in bags.SUFFIXES for file in files)

    given = [path for path in inputs if holds_bags(path)]
    return given, [path for path in inputs if path not in given]
