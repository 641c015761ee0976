"""`caprmil.explain(run, slide)`: the package itself can be called.

`caprmil.explain` is this package, so a function of that name would hide it.
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from caprmil.explain.attribution import Method
from caprmil.explain.explained_slide import ExplainedSlide, explain_slide
from caprmil.explain.slide_reference import locate_slide
from caprmil.features.bag_files import BagFiles
from caprmil.runs.run import Run


def explain_run(
    run: Run | str | Path,
    slide: str | BagFiles,
    *,
    pixels: str | Path | None = None,
    fold: str | None = None,
    method: Method | None = None,
    first: str | None = None,
    maps: Sequence[str] = (),
    regions: bool = False,
    force: bool = False,
    device: str = "auto",
) -> ExplainedSlide:
    """Predict a slide with a run, and explain the prediction: `caprmil.explain(run, slide)`.

    `slide` is its name in the run, or the file of its bag; `pixels` is the slide's file or its
    folder, if it has moved. The result has the answer, and in `explanation` the evidence, attention
    and tokens of every patch. `to_frame()` is a row per patch. In a notebook it shows its map.
    """
    run = run if isinstance(run, Run) else Run(run)
    reference = locate_slide(run, slide, pixels=None if pixels is None else Path(pixels))
    options: dict[str, Any] = {"method": method, "first": first, "maps": maps, "regions": regions}
    return explain_slide(run, reference, fold=fold, force=force, device=device, **options)


class CallablePackage(ModuleType):
    """A package that can be called like `explain_run`."""

    def __call__(self, *args: Any, **options: Any) -> ExplainedSlide:
        return explain_run(*args, **options)

    __call__.__doc__ = explain_run.__doc__
    __call__.__wrapped__ = explain_run  # type: ignore[attr-defined]
