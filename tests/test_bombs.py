"""Bombs: small files that declare far more than they have are errors, in little time and memory."""

import csv
import io
import json
import resource
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from caprmil.encoders.hub import read_weights
from caprmil.errors import BagError, CohortError, EncoderError, RunError
from caprmil.features import bags, stored_arrays
from caprmil.features.level0 import to_level0
from caprmil.io import tables
from caprmil.models import CAPRMIL, MODELS, MILModel, create

FEATURES = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
BILLION = 10**9


def npz(path: Path, **shapes: tuple[int, ...] | None) -> Path:
    """Write an .npz file whose arrays have these shapes in their headers, and few numbers."""
    path = path.with_suffix(".npz")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in shapes.items():
            stream = io.BytesIO()
            np.save(stream, FEATURES)
            content = stream.getvalue()
            if shape is not None:
                old, new = b"(5, 8), }", f"{shape}, }}".encode()
                header = content[:128].replace(old + b" " * (len(new) - len(old)), new)
                content = header + content[128:]
            archive.writestr(f"{name}.npy", content)
    return path


def npz_of_a_long_header(path: Path) -> Path:
    """Write an .npz file with a header of 40 MB."""
    path = path.with_suffix(".npz")
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("features.npy", "w") as entry,
    ):
        entry.write(b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little"))
        for _ in range(40):
            entry.write(b" " * 10**6)
    return path


def npz_of_zeros(path: Path) -> Path:
    """Write an .npz file of a real array: 8 MB of zeros, compressed."""
    path = path.with_suffix(".npz")
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("features.npy", "w") as entry,
    ):
        np.lib.format.write_array_header_1_0(
            entry, {"descr": "<f4", "fortran_order": False, "shape": (2000, 1024)}
        )
        entry.write(bytes(4096 * 2000))
    return path


def h5_of_zeros(path: Path, name: str, rows: int, *others: str, chunk: int = 1000) -> Path:
    """Write arrays, of which one is zeros in compressed chunks."""
    with h5py.File(path, "w") as file:
        for other in others:
            file[other] = FEATURES
        width = 2 if name == "coords" else 1024
        options: dict[str, Any] = {"maxshape": (None, width), "compression": 9}
        zeros = file.create_dataset(name, (rows, width), "f4", chunks=(chunk, width), **options)
        for start in range(0, rows, chunk):
            zeros[start : min(rows, start + chunk)] = 0
    return path


def h5_never_written(path: Path, features: str, **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        file[features] = FEATURES
        file.create_dataset("coords", (BILLION, 2), np.int64)
        file.attrs.update(attributes)
    return path


def pt(path: Path, content: Any) -> Path:
    path = path.with_suffix(".pt")
    torch.save(content, path)
    return path


BOMBS: dict[str, Callable[[Path], Path]] = {
    "npz header": lambda path: npz(path, features=(BILLION, 1024)),
    "npz coordinates": lambda path: npz(path, features=None, coords=(BILLION, 2)),
    "npz long header": npz_of_a_long_header,
    "npz zeros": npz_of_zeros,
    "h5 zeros": lambda path: h5_of_zeros(path, "features", 2000),
    "h5 chunk": lambda path: h5_of_zeros(path, "features", 5, chunk=2000),
    "h5 coordinates": lambda path: h5_of_zeros(path, "coords", 10**6, "features", chunk=10**5),
    "h5 no coordinates": lambda path: h5_never_written(path, "features"),
    "stamp no coordinates": lambda path: h5_never_written(path, "feats", stamp_version="2.0"),
    "pt repeated": lambda path: pt(path, torch.zeros(1).expand(BILLION, 1024)),
    "pt list": lambda path: pt(path, [torch.ones(2**9, 2**9)] * 500),
    "pt vectors": lambda path: pt(path, {"features": torch.zeros(1, 1).expand(BILLION, 8)}),
}


@pytest.mark.parametrize("function", [bags.inspect, bags.read, lambda path: to_level0("s", path)])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bag_that_declares_far_more_than_its_file_has_is_an_error(
    tmp_path: Path, kind: str, function: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_arrays, "SMALL", 2**20)  # so that the bombs are small, too
    path = BOMBS[kind](tmp_path / "slide.h5")
    assert path.stat().st_size < 5e6
    tracemalloc.start()
    try:
        with pytest.raises(BagError, match=r"slide\.\w+ cannot be used") as problem:
            function(path)
        assert "\n" not in str(problem.value)
        assert tracemalloc.get_traced_memory()[1] < 6e6
    finally:
        tracemalloc.stop()


def test_an_array_file_that_declares_more_than_it_has_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "slide.npy"
    np.save(path, FEATURES)
    path.write_bytes(path.read_bytes().replace(b"(5, 8), }       ", b"(99999999, 8), }"))
    with pytest.raises(BagError, match=r"slide\.npy cannot be read"):
        bags.read(path)


def test_small_arrays_may_compress_well(tmp_path: Path) -> None:
    constant = np.ones((20_000, 64), np.float32)
    np.savez_compressed(tmp_path / "a.npz", features=constant)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("features", data=constant, compression=9)
    torch.save(torch.ones(1, 64).expand(20_000, 64), tmp_path / "c.pt")
    for name in ("a.npz", "b.h5", "c.pt"):
        assert (tmp_path / name).stat().st_size < constant.nbytes / 100
        np.testing.assert_array_equal(bags.read(tmp_path / name).features, constant)


def test_a_bag_that_does_not_fit_into_memory_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "slide.npy", FEATURES)

    def fill(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "require", fill)
    with pytest.raises(BagError, match=r"not enough memory for .*slide\.npy"):
        bags.read(tmp_path / "slide.npy")


def wide_csv(path: Path) -> Path:
    """Write 300 short lines below a header of 9,000 columns."""
    with path.with_suffix(".csv").open("w", encoding="utf-8") as file:
        csv.writer(file).writerow(["slide", *(f"c{n}" for n in range(9000))])
        file.writelines(f"s{n}\n" for n in range(300))
    return path.with_suffix(".csv")


def distant_cell(path: Path) -> Path:
    """Write a sheet with a cell in the last column, and many short rows."""
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.append(["slide", "label"])
    sheet.cell(1, 16_384, "last")
    for number in range(2, 1500):
        sheet.cell(number, 1, f"s{number}")
    sheet.cell(1_048_576, 1, "last")
    book.save(path.with_suffix(".xlsx"))
    return path.with_suffix(".xlsx")


def xml_of_spaces(path: Path) -> Path:
    """Write a sheet with 20 MB of spaces."""
    path = path.with_suffix(".xlsx")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/worksheets/sheet1.xml", b" " * (2 * 10**7))
    return path


def run_lengths(path: Path) -> Path:
    """Write 3 million equal values, which Parquet stores as a value and a number."""
    path = path.with_suffix(".parquet")
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(3 * 10**6, np.int8)), ["a"])
    pq.write_table(pa.table({"slide": column}), path)
    return path


@pytest.mark.parametrize("bomb", [wide_csv, distant_cell, xml_of_spaces, run_lengths])
def test_a_table_of_too_many_cells_is_an_error(
    tmp_path: Path, bomb: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "CELLS", 2_000_000)  # so that the bombs are small, too
    path = bomb(tmp_path / "table")
    assert path.stat().st_size < 2e6
    with pytest.raises(CohortError, match=r"table\.\w+ has .*(cells|MB of text)"):
        tables.read_table(path, pad=True)


def test_a_long_text_that_a_table_repeats_is_kept_once(tmp_path: Path) -> None:
    n = 2000
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int8)), ["b" * 100_000])
    slides = pa.array([f"s{number}" for number in range(n)])
    pq.write_table(pa.table({"slide": slides, "remark": texts.cast("string")}), tmp_path / "t.pq")
    assert (tmp_path / "t.pq").stat().st_size < 1e6
    tracemalloc.start()
    try:
        table = tables.read_table(tmp_path / "t.pq")
        assert tracemalloc.get_traced_memory()[1] < 2e7  # 200 MB if each had its own
    finally:
        tracemalloc.stop()
    assert table["remark"].tolist() == ["b" * 100_000] * n
    assert table["slide"].tolist() == [f"s{number}" for number in range(n)]


def test_texts_of_parquet_with_gaps_are_read(tmp_path: Path) -> None:
    table = pa.table({"slide": ["a", "b", "c"], "label": ["x", None, " x"]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert tables.read_table(tmp_path / "t.parquet")["label"].tolist() == ["x", "", "x"]


def test_weights_that_repeat_a_number_are_an_error_of_one_line(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(BILLION, 1024)}, tmp_path / "model.bin")
    with pytest.raises(EncoderError, match=r"model\.bin is damaged: a repeats") as problem:
        read_weights(tmp_path / "model.bin")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 60_000},
        {"in_dim": 60_000},
        {"mlp_ratio": 1e7},
        {"pool": {"name": "abmil", "dim": 60_000}},
        {"pool": {"name": "abmil", "dim": BILLION}},
    ],
    ids=str,
)
def test_a_model_that_is_larger_than_its_weights_is_an_error_before_it_takes_memory(
    tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    CAPRMIL(8, 2, dim=16, heads=2).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunError, match=r"config\.json is damaged") as problem:
        MILModel.from_pretrained(tmp_path)
    assert "\n" not in str(problem.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10**5  # kB


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_as_large_as_its_settings_say(tmp_path: Path, name: str) -> None:
    model = create(name, in_dim=8, n_outputs=2)
    model.save_pretrained(tmp_path)
    assert MILModel.from_pretrained(tmp_path).state_dict().keys() == model.state_dict().keys()


def test_a_sheet_with_gaps_is_read(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.cell(2, 1, "slide")
    sheet.cell(2, 3, "label")
    sheet.cell(9, 1, "s0")
    sheet.cell(9, 3, 1.0)
    book.save(tmp_path / "t.xlsx")
    table = tables.read_table(tmp_path / "t.xlsx")
    assert table.to_dict("list") == {"slide": ["s0"], "label": ["1"]}
