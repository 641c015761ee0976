"""Small synthetic cohorts with the names, labels and splits of public benchmarks."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from caprmil.errors import UnknownNameError
from caprmil.features import bags
from caprmil.features.description import GENERATED
from caprmil.io.atomic import write_text
from caprmil.synthetic.cohort_folder import claim_folder

Row = dict[str, str]


def _camelyon16(number: int) -> Row:
    kind = ("normal", "tumor")[number % 2]
    test = number % 3 == 0
    return {"slide": f"test_{number:03d}" if test else f"{kind}_{number:03d}", "label": kind}


def _nsclc(number: int) -> Row:
    patient = number // 2 if number < 8 else number  # a few patients have two slides
    kind = ("LUSC", "LUAD")[patient % 2]
    site = ("05", "44", "78", "MN")[patient % 4]
    return {"slide_id": f"TCGA-{site}-{patient:04d}-01Z-00-DX{number % 2 + 1}", "subtype": kind}


def _panda(number: int) -> Row:
    provider = ("karolinska", "radboud")[number // 6 % 2]
    return {
        "image_id": f"{number:032x}",
        "data_provider": provider,
        "isup_grade": str(number % 6),
    }


def _bracs(number: int) -> Row:
    kinds = ("N", "FEA", "IC", "PB", "ADH", "DCIS", "UDH")
    part = ("Training", "Training", "Validation", "Testing")[number // 7 % 4]
    return {
        "WSI Filename": f"BRACS_{1000 + number}",
        "Patient Id": str(number),
        "WSI label": kinds[number % 7],
        "Set": part,
    }


GROUPS = {"N": 1, "PB": 1, "UDH": 1, "FEA": 0, "ADH": 0, "DCIS": 2, "IC": 2}
BENCHMARKS: dict[str, tuple[int, Callable[[Row], int], Callable[[int], Row]]] = {
    "camelyon16": (36, lambda row: int(row["label"] == "tumor"), _camelyon16),
    "tcga-nsclc": (40, lambda row: int(row["subtype"] == "LUAD"), _nsclc),
    "panda": (72, lambda row: int(row["isup_grade"]), _panda),
    "bracs": (56, lambda row: GROUPS[row["WSI label"]], _bracs),
}
"""Number of slides, class of a row, and row of a slide in the format of the benchmark's table."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkCohort:
    """A cohort with the table of a benchmark and easy classes. Its scores have no meaning."""

    protocol: str
    width: int = 64
    patches: tuple[int, int] = (30, 60)  # minimum, and maximum (exclusive)
    strength: float = 4.0  # shift of a third of the patches, in standard deviations of the noise
    seed: int = 0

    def __post_init__(self) -> None:
        if self.protocol not in BENCHMARKS:
            raise UnknownNameError("protocol", self.protocol, BENCHMARKS)

    def write(self, folder: str | Path) -> Path:
        """Write bags and the table into a folder, and return the table's path."""
        folder = Path(folder)
        claim_folder(folder, self)
        slides, label, row = BENCHMARKS[self.protocol]
        rows = [row(number) for number in range(slides)]
        text = StringIO()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        for number, cells in enumerate(rows):
            name = next(iter(cells.values()))
            path = folder / "features" / f"{name}.h5"
            if not path.exists():
                self._write_bag(path, number, label(cells))
        path = folder / "labels.csv"
        if path.exists() and path.read_text(encoding="utf-8") == text.getvalue():
            return path
        return write_text(path, text.getvalue())

    def _write_bag(self, path: Path, number: int, label: int) -> None:
        rng = np.random.default_rng([self.seed, number])
        n = int(rng.integers(*self.patches))
        features = rng.normal(size=(n, self.width))
        features[: n // 3, label] += self.strength
        side = int(np.ceil(np.sqrt(n)))
        coords = 224 * np.stack([np.arange(n) % side, np.arange(n) // side], axis=1)
        sizes: dict[str, Any] = {"patch_px": 224, "patch_level0": 224.0, "step": 224.0}
        bags.write(path, features.astype(np.float32), coords, encoder=GENERATED, mpp=1.0, **sizes)
