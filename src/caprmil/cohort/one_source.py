"""A cohort of several sources of features, as if it had one of them only."""

from dataclasses import replace
from pathlib import Path

from caprmil.cohort.cohort import Cohort
from caprmil.cohort.cohort_bags import join_infos
from caprmil.features.bag_files import BagFiles, SlideBags
from caprmil.features.source_bags import SourceBags


def only_source(cohort: Cohort, number: int) -> Cohort:
    """Return a cohort with the bags of one of its sources, and without covariates."""
    bags = cohort.sources[number].bags

    def of_slide(files: BagFiles) -> Path:
        assert isinstance(files, SourceBags)
        return files.paths[number]

    def own(files: BagFiles) -> BagFiles:
        if isinstance(files, SlideBags):
            return replace(files, paths=tuple(map(of_slide, files.paths)))
        return of_slide(files)

    infos = {
        entry.name: join_infos(entry.path.slides, bags)
        if isinstance(entry.path, SlideBags)
        else bags[entry.name]
        for entry in cohort.entries
    }
    return replace(
        cohort,
        entries=tuple(replace(entry, path=own(entry.path)) for entry in cohort.entries),
        bags=infos,
        sources=(),
        join=None,
        covariates=None,
    )
