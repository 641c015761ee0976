"""Where the bags of a table's slides are: in its rows, or by name in a folder."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from caprmil.cohort.cohort_config import CohortConfig
from caprmil.errors import BagError, CaprmilError, count, shorten
from caprmil.features import bags
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.io.paths import as_path, join_path
from caprmil.io.tables import Row
from caprmil.slides.names import SLIDE_SUFFIXES

NEAREST = 3  # names that are proposed


def with_several_bags(found: Mapping[str, list[Path]]) -> list[str]:
    """Return the slides that have several bags, each with its files."""
    several = {name: own for name, own in found.items() if len(own) > 1}
    return [f"{name} ({' and '.join(map(str, own))})" for name, own in several.items()]


def of_patches(files: list[Path]) -> list[Path]:
    """Return those of several files of a slide that have features of its patches, if any has.

    Folders of TRIDENT and CLAM also hold files of coordinates, and TRIDENT's those of slides.
    """
    if len(files) < 2:
        return files
    found = []
    for file in files:
        with suppress(BagError):
            bags.inspect(file)
            found.append(file)
    return found or files


def locate_bags(
    rows: Mapping[str, Row],
    columns: Mapping[str, str],
    folder: Path,
    features: str | Path | None,
    config: CohortConfig,
    found: Findings,
    *,
    required: bool,
) -> dict[str, Path]:
    """Return the bag of each slide that has one: from its row, or by name in `features`.

    `required`: for training, which can leave out slides without features.
    """
    folders = [folder] if features is None else [as_path(features), folder]
    if not folders[0].is_dir():
        found.problems.append(f"There is no folder {features} to look for bags in.")
        return {}
    by_slide = {} if features is None else bags.group_by_slide(folders[0].rglob("*"))
    if features is not None and not by_slide and _has_slides(folders[0]):
        found.problems.append(
            f"{features} is a folder of slides, without features. Encode them, and pass the new "
            f"folder: caprmil encode {features} --out features"
        )
        return {}
    chosen: dict[str, list[Path]] = {}
    missing: dict[str, str] = {}  # by the name of the slide, with what is known of it
    reasons = {} if features is None else _reasons(folders[0])
    for name, row in rows.items():
        given, slide = row.get(columns.get("path", ""), ""), row[columns["slide"]]
        own = given or (slide if slide.lower().endswith(bags.SUFFIXES) else "")
        candidates = [join_path(folder, own) for folder in folders] if own else []
        there = [path for path in candidates if path.is_file()]
        chosen[name] = there[:1] or ([] if given else of_patches(by_slide.get(name, [])))
        if not chosen[name]:
            why = given or reasons.get(name)
            missing[name] = f"{name} ({why})" if why else name

    advice = "Choose a folder that has one of each, e.g. of one encoder, or add a path column."
    found.problem("Slides with more than one bag", with_several_bags(chosen), advice)
    headline = "Slides without a bag" if features is None else f"Slides without a bag in {features}"
    if config.missing == "skip" and len(missing) < len(rows):
        found.note(headline, missing.values(), "They were skipped.")
    else:
        advice = "Pass a folder of features" if features is None else "Extract their features"
        if missing.keys() & reasons.keys():
            advice = f"Correct what {folders[0] / 'qc.csv'} says of them and encode again"
        skip = 'set [data] missing = "skip" (--set data.missing=skip)'
        advice += f", or {skip if required else 'remove their rows'}."
        free = [name for name in by_slide if name not in rows]
        held = _held(free, len(by_slide), [name for name in missing if name not in reasons])
        found.problem(headline, missing.values(), f"{held}{advice}")
    return {name: own[0] for name, own in chosen.items() if own}


def _held(free: Sequence[str], number: int, missing: Sequence[str]) -> str:
    """Return what a folder does hold, and the names in it that are near to those of slides."""
    if not number:
        return ""
    if not free:
        return f"The folder holds {count(number, 'bag')}, all of other rows. "
    near: list[str] = []
    for name in missing[:10]:
        match = get_close_matches(name, free, n=1) or [each for each in free if name in each][:1]
        near += [f"{match[0]} for {name}"] if match and len(near) < NEAREST else []
    nearest = f" Nearest: {', '.join(near)}: names must be equal." if near else ""
    return f"The folder holds bags of other names ({len(free)}): {shorten(free[:5])}.{nearest} "


def _reasons(folder: Path) -> dict[str, str]:
    """Return why `caprmil encode` made no bag of a slide, as its table in the folder says."""
    file = folder / "qc.csv"
    found: dict[str, str] = {}
    with suppress(CaprmilError, OSError, KeyError):  # another program's table, or a damaged one
        for row in tables.rows(tables.read_table(file)) if file.is_file() else ():
            if row["state"] == "no tissue":
                found[row["slide"]] = "no tissue was found; encode --whole takes all of a picture"
            elif row["state"] == "failed":
                found[row["slide"]] = " ".join(row["reason"].split()).rstrip(".")
    return found


def _has_slides(folder: Path) -> bool:
    """Return whether a folder has slides."""
    return any(
        path.suffix.lower() in SLIDE_SUFFIXES and path.parent.name != "qc"
        for path in folder.rglob("*")
    )
