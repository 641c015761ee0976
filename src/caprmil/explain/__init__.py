"""Explain: the evidence, attention and tokens behind a prediction, and how faithful maps are.

The package can be called: `caprmil.explain(run, slide)` is `explain_run`.
"""

import sys

from caprmil.explain.atlas_pictures import (
    AtlasPictures,
    ExampleSlide,
    example_slide,
    read_pictures,
)
from caprmil.explain.attribution import METHODS, Method, attribute, gradient_times_input
from caprmil.explain.chosen_patches import MarkedMost, Region, parse_region
from caprmil.explain.explained_run import CallablePackage, explain_run
from caprmil.explain.explained_slide import ExplainedSlide, explain_slide
from caprmil.explain.explanation import (
    TOP,
    Explanation,
    Layer,
    explain,
    top_patches,
)
from caprmil.explain.explanation_figures import ExplanationFigures
from caprmil.explain.faithfulness import (
    DeletionCurves,
    Faithfulness,
    faithfulness,
    relevance_maps,
)
from caprmil.explain.faithfulness_summary import (
    FaithfulnessSummary,
    measure_faithfulness,
    summarise_faithfulness,
)
from caprmil.explain.flips import Flips, flips_of
from caprmil.explain.geojson import write_geojson, write_region_geojson
from caprmil.explain.implant import Implant, implant_region
from caprmil.explain.map_kinds import KINDS, MapKind
from caprmil.explain.map_ranking import MapRanking, map_ranking
from caprmil.explain.marked_regions import (
    MarkedRegion,
    MeasuredRegion,
    RegionEffects,
    find_regions,
    region_effects,
)
from caprmil.explain.patch_boxes import (
    PatchBoxes,
    open_slide,
    patch_boxes,
    read_patch,
    why_no_boxes,
)
from caprmil.explain.patch_tables import write_csv, write_hdf5, write_parquet
from caprmil.explain.principal_plane import PrincipalPlane
from caprmil.explain.removal import RemovalEffect, removal_effect
from caprmil.explain.slide_answer import Answer, predict_slide
from caprmil.explain.slide_reference import SlideReference, locate_slide, open_pixels
from caprmil.explain.slide_tokens import outputs_without, remove_tokens
from caprmil.explain.token_atlas import TokenAtlas, make_atlas

__all__ = [
    "KINDS",
    "METHODS",
    "TOP",
    "Answer",
    "AtlasPictures",
    "DeletionCurves",
    "ExampleSlide",
    "ExplainedSlide",
    "Explanation",
    "ExplanationFigures",
    "Faithfulness",
    "FaithfulnessSummary",
    "Flips",
    "Implant",
    "Layer",
    "MapKind",
    "MapRanking",
    "MarkedMost",
    "MarkedRegion",
    "MeasuredRegion",
    "Method",
    "PatchBoxes",
    "PrincipalPlane",
    "Region",
    "RegionEffects",
    "RemovalEffect",
    "SlideReference",
    "TokenAtlas",
    "attribute",
    "example_slide",
    "explain",
    "explain_run",
    "explain_slide",
    "faithfulness",
    "find_regions",
    "flips_of",
    "gradient_times_input",
    "implant_region",
    "locate_slide",
    "make_atlas",
    "map_ranking",
    "measure_faithfulness",
    "open_pixels",
    "open_slide",
    "outputs_without",
    "parse_region",
    "patch_boxes",
    "predict_slide",
    "read_patch",
    "read_pictures",
    "region_effects",
    "relevance_maps",
    "removal_effect",
    "remove_tokens",
    "summarise_faithfulness",
    "top_patches",
    "why_no_boxes",
    "write_csv",
    "write_geojson",
    "write_hdf5",
    "write_parquet",
    "write_region_geojson",
]

sys.modules[__name__].__class__ = CallablePackage
