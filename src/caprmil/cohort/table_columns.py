"""The columns of a table: slide, patient, label and path, by their names or as the settings say."""

from caprmil.cohort import folds
from caprmil.cohort.cohort_config import CohortConfig
from caprmil.errors import CohortError, suggest
from caprmil.io import tables
from caprmil.io.findings import Findings
from caprmil.targets import Target


def find_columns(
    header: list[str], config: CohortConfig, target: Target, found: Findings, *, required: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the column of each role that has one, and the columns of the label.

    Settings are only named as advice if they are `required`, for training: evaluation has none.
    """
    own = target.find_columns(header)
    given = {role: getattr(config, role) for role in ("slide", "patient", "label", "site")}
    columns = {role: column for role, column in given.items() if column is not None}
    for role, column in columns.items():
        if column not in header:
            raise CohortError(f"[data] {role}: no column is '{column}'.{suggest(column, header)}")
        if role != "site" and column == config.site:
            raise CohortError(
                f"[data] site: column '{column}' is the {role}. Name the one of the institution."
            )
    free = [name for name in header if name not in (*columns.values(), *own)]
    for role in ("slide", "patient", "path") if own else ("slide", "patient", "label", "path"):
        known = tables.matching_columns(free, tables.COLUMNS[role])
        if known and role not in columns:
            columns[role] = known[0]
            if role == "label":
                advice = f"It is taken from {known[0]}. Choose with [data] label (--label COLUMN)."
                found.note("Other columns that could be the label", known[1:], advice)
    everything = f"Columns: {', '.join(header)}."
    if "slide" not in columns:
        setting = "Set [data] slide (--set data.slide=COLUMN)."
        advice = setting if required else "Rename the column of the slide to slide."
        raise CohortError(f"No column is recognised as the slide. {everything} {advice}")
    if "label" not in columns and not own:
        taken = {*columns.values(), *(config.covariates or ())}
        left = [n for n in header if n not in taken and not folds.is_split(n)]
        if len(left) == 1:
            columns["label"] = left[0]
        elif required:
            text = f"No column is recognised as the label. {everything} Set [data] label "
            text += "(--label COLUMN)."
            found.problems.append(text)
    label = columns.pop("label", None)
    return columns, own or ((label,) if label else ())
