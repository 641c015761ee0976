"""How a table is read: the [data] table of a recipe."""

from dataclasses import dataclass, field
from typing import Literal

from caprmil.config import LATER
from caprmil.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class CohortConfig:
    """How a table is read: the [data] table of a recipe."""

    slide: str | None = None
    """Column of the slide, where its name is not recognised."""
    patient: str | None = None
    """Column of the patient, likewise."""
    label: str | None = None
    """Column of the label, likewise."""
    slide_table: str | None = field(default=None, metadata=LATER)
    """A second table, with the slides of each patient: STAMP's slide table."""
    site: str | None = None
    """Column of the institution, for the baseline `site`, where its name is not recognised."""
    covariates: tuple[str, ...] | None = None
    """Columns that a model reads besides the patches, e.g. ["age", "sex"]: docs/covariates.md."""
    categorical: tuple[str, ...] | None = None
    """The covariates with numbers that are names of categories, e.g. ["ward"]."""
    vectors: str | None = None
    """A table or folder with a vector of each slide, e.g. of TITAN: docs/covariates.md."""
    missing: Literal["error", "skip"] = "error"
    """What to do about slides without a bag."""
    mixed_patients: bool = False
    """Accept patients with two labels, where the label belongs to the slide (BRACS)."""
    scan: bool = True
    """Read every bag once before training, to find broken ones before hours of training."""
    unit: Literal["slide", "patient"] = field(default="slide", metadata=LATER)
    """What is predicted, split and scored: single slides, or patients with all their slides."""
    combine: Literal["bag", "mean", "max", "learned"] = field(default="bag", metadata=LATER)
    """With unit = "patient": all slides are one bag, or each is answered alone, and the answer of
    the patient is the mean of their answers, the highest one, or a learned combination."""

    def __post_init__(self) -> None:
        allowed = {"missing": ("error", "skip"), "unit": ("slide", "patient")}
        for name, values in (allowed | {"combine": ("bag", "mean", "max", "learned")}).items():
            if getattr(self, name) not in values:
                known = f"{', '.join(values[:-1])} or {values[-1]}"
                raise RecipeError(f"[data] {name} is {getattr(self, name)!r}, and must be {known}.")
        if self.unit == "slide" and self.combine != "bag":
            raise RecipeError(
                f'[data] combine = "{self.combine}" is for patients: set unit = "patient".'
            )
        if self.unit == "patient" and self.mixed_patients:
            raise RecipeError(
                "[data] mixed_patients = true says that a label belongs to a slide, so unit cannot "
                'be "patient". Leave one of them out.'
            )
        if self.categorical and not self.covariates:
            raise RecipeError("[data] categorical names covariates, and there are none.")

    @property
    def reads_covariates(self) -> bool:
        """Whether a model reads anything besides the patches."""
        return bool(self.covariates or self.vectors)

    @property
    def joins(self) -> bool:
        """Whether all slides of a patient are one bag."""
        return self.unit == "patient" and self.combine == "bag"
