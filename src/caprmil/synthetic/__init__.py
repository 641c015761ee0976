"""Synthetic data with a known secret, for first steps, the demo and tests."""

from caprmil.synthetic.anatomy import KINDS, TRUTH_UM
from caprmil.synthetic.bags import RareSignal
from caprmil.synthetic.painting import ARTEFACTS
from caprmil.synthetic.sections import Rendered, Section, SlideCohort
from caprmil.synthetic.standins import StandIn

__all__ = [
    "ARTEFACTS",
    "KINDS",
    "TRUTH_UM",
    "RareSignal",
    "Rendered",
    "Section",
    "SlideCohort",
    "StandIn",
]
