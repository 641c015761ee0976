"""Synthetic slides and bags with known ground truth, for the demo, tests and benchmarks."""

from caprmil.synthetic.anatomy import KINDS, TRUTH_UM
from caprmil.synthetic.benchmark_cohorts import BenchmarkCohort
from caprmil.synthetic.graded_bags import GradedBags
from caprmil.synthetic.graded_slides import GradedSlides
from caprmil.synthetic.planted_shares import PlantedShares
from caprmil.synthetic.rare_signal import RareSignal
from caprmil.synthetic.rendering import ARTEFACTS
from caprmil.synthetic.sections import Rendered, Section, SlideCohort
from caprmil.synthetic.survival_bags import SurvivalBags
from caprmil.synthetic.two_modalities import TwoModalities
from caprmil.synthetic.two_sources import TwoSources

__all__ = [
    "ARTEFACTS",
    "KINDS",
    "TRUTH_UM",
    "BenchmarkCohort",
    "GradedBags",
    "GradedSlides",
    "PlantedShares",
    "RareSignal",
    "Rendered",
    "Section",
    "SlideCohort",
    "SurvivalBags",
    "TwoModalities",
    "TwoSources",
]
