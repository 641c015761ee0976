"""Bombs: small files that declare far more than they hold. Each must be refused at little cost."""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from children import Case
from corpus import Corpus
from damaged_files import Damaged, Readers

ROWS = (10**7, 10**9, 10**12)
Make = Callable[[Path], None]


TIMES = {"run": 8, "slide": 3}  # readers of a kind that are chosen at random


def cases(corpus: Corpus, _: Path, scale: float) -> Iterator[Case]:
    """Yield every bomb. They are few: all of them are always tried, through one reader at least."""
    readers = Readers(corpus)
    for name, make in bombs(corpus).items():
        kind, _, file = name.partition("/")
        for number in range(TIMES.get(kind, 1) if scale >= 0.3 else 1):
            run = _bomb(make, getattr(readers, kind), corpus, file, number)
            yield Case(f"bombs/{name}/{number}", run)
        if kind == "bag":
            predict = _bomb(make, readers.predict, corpus, file, 0)
            yield Case(f"bombs/{name}/predict", predict)


def _bomb(
    make: Make, reader: Callable[[Damaged], object], corpus: Corpus, file: str, number: int
) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        name = file.rpartition(":")[2]
        path = folder / Path(name).name
        make(path)
        reader(Damaged(path, corpus.folder / name, Random(number)))

    return run


def bombs(corpus: Corpus) -> dict[str, Make]:
    """Return how each bomb is made, by the kind of file and its name."""
    found: dict[str, Make] = {}
    for rows in ROWS:
        for name in ("features", "coords", "feats"):
            for chunks in (None, 1024):
                layout = "chunked" if chunks else "contiguous"
                found[f"bag/{name}-{rows:.0e}-{layout}.h5"] = _declared(name, rows, chunks)
        found[f"bag/array-{rows:.0e}.npy"] = lambda p, n=rows: _write(p, _npy_header((n, 8)))
        found[f"bag/arrays-{rows:.0e}.npz"] = lambda p, n=rows: _npz(p, "features", (n, 8))
        found[f"bag/coords-{rows:.0e}.npz"] = lambda p, n=rows: _npz(p, "coords", (n, 2))
        found[f"bag/tensor-{rows:.0e}.pt"] = lambda p, n=rows: _tensor(p, n)
    found["bag/deep-header.npy"] = lambda p: _write(p, _npy(b"(" * 50_000 + b")" * 50_000))
    found["bag/wide.npy"] = lambda p: _write(p, _npy_header((1, 2**40)))
    found["bag/many-dimensions.npy"] = lambda p: _write(p, _npy_header((1,) * 60))
    deep = "[" * 200_000
    for name in ("run/run:run/run.json", "run/splits:run/splits.json"):
        found[name] = lambda p: _write(p, deep)
    found["run/scores:run/scores.json"] = lambda p: _write(p, '{"metrics":' * 50_000)
    found["run/digits:run/calibration.json"] = lambda p: _write(
        p, '{"temperatures": {"fold-0": ' + "9" * 5000 + "}}"
    )
    found["regions/deep.geojson"] = lambda p: _write(p, '{"type":"Feature","geometry":' * 50_000)
    found["regions/digits.geojson"] = lambda p: _write(p, _polygon("9" * 400))
    found["regions/huge.geojson"] = lambda p: _write(p, _polygon("1e300"))
    found["regions/far.geojson"] = lambda p: _write(p, _polygon("1e15"))
    found["recipe/deep.toml"] = lambda p: _write(p, "a = " + "[" * 100_000)
    found["recipe/dotted.toml"] = lambda p: _write(p, ".".join(["a"] * 50_000) + " = 1")
    found["recipe/digits.toml"] = lambda p: _write(p, "[train]\nepochs = " + "9" * 5000)
    found["table/wide.csv"] = lambda p: _write(p, "slide,label" + ",x" * 200_000 + "\na,b\n")
    found["table/long-cell.csv"] = lambda p: _write(p, "slide,label\na," + "b" * 10**6 + "\n")
    found["table/sheet.xlsx"] = lambda p: _sheet(p, corpus)
    found["weights/header.safetensors"] = lambda p: _write(p, struct.pack("<Q", 2**62) + b"{}")
    found["weights/tensor.safetensors"] = lambda p: _write(p, _safetensors(10**12))
    found["weights/storage.pth"] = lambda p: _tensor(p, 10**12)
    found["export/metadata.pt2"] = lambda p: _archive(p, 2**27)
    found["export/metadata.ts"] = lambda p: _archive(p, 2**26)
    config = "run/folds/fold-0/model/config.json"
    for key, value in (("dim", 10**9), ("tokens", 10**12), ("in_dim", 2**40), ("heads", 10**18)):
        found[f"model/{key}:{config}"] = lambda p, k=key, v=value: _config(p, corpus, k, v)
    for width, height in ((2**31 - 1, 2**31 - 1), (60_000, 60_000), (2**20, 2**20)):
        found[f"slide/{width}.png"] = lambda p, s=(width, height): _write(p, _png(*s))
        for side in (256, 2**30):
            make = lambda p, s=(width, height), t=side: _write(p, _tiff(*s, t))  # noqa: E731
            found[f"slide/{width}-{side}.tiff"] = make
    found["slide/65500.jpg"] = lambda p: _write(p, _jpeg(65_500, 65_500))
    return found


def _write(path: Path, data: bytes | str) -> None:
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def _declared(name: str, rows: int, chunks: int | None) -> Make:
    """Return how to make an HDF5 file with an array that was declared and never written."""

    def make(path: Path) -> None:
        import h5py
        import numpy as np

        with h5py.File(path, "w") as file:
            width = 2 if name == "coords" else 8
            tiles = (chunks, width) if chunks else None
            file.create_dataset(name, (rows, width), "f4", chunks=tiles)
            if name == "coords":
                file["feats"] = np.ones((6, 8), np.float32)
            elif name == "feats":
                file.create_dataset("coords", (rows, 2), "f4", chunks=tiles and (tiles[0], 2))

    return make


def _npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header


def _npy_header(shape: tuple[int, ...]) -> bytes:
    table = {"descr": "<f4", "fortran_order": False, "shape": shape}
    return _npy(f"{table!r}\n".encode()) + bytes(64)


def _npz(path: Path, name: str, shape: tuple[int, ...]) -> None:
    import numpy as np

    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.npy", _npy_header(shape))
        other = io.BytesIO()
        np.save(other, np.zeros((6, 8), np.float32))
        file.writestr("coords.npy" if name == "features" else "features.npy", other.getvalue())


def _tensor(path: Path, rows: int) -> None:
    """Write a tensor that is a single number, repeated by its strides, of any number of rows."""
    import torch

    value = torch.zeros(1).expand(rows, 8)
    torch.save(value if path.suffix == ".pt" else {"a": value}, path)


def _polygon(number: str) -> str:
    corners = f"[[0,0],[{number},0],[{number},{number}],[0,{number}],[0,0]]"
    return f'{{"type":"Polygon","coordinates":[{corners}]}}'


def _sheet(path: Path, corpus: Corpus) -> None:
    """Write a sheet whose only row is the last one possible, and whose text inflates to 1 GB."""
    with (
        zipfile.ZipFile(corpus.folder / "tables" / "labels.xlsx") as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("sheet1.xml"):
                content = content.replace(b'r="13"', b'r="1048576"').replace(
                    b'"A13"', b'"XFD1048576"'
                )
            new.writestr(entry.filename, content)


def _safetensors(rows: int) -> bytes:
    entry = {"dtype": "F32", "shape": [rows], "data_offsets": [0, 4 * rows]}
    header = json.dumps({"a": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def _archive(path: Path, size: int) -> None:
    """Write an export whose metadata inflates to a given size."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("model/extra/caprmil.json", "w", force_zip64=True) as entry,
    ):
        for _ in range(size // 2**24):
            entry.write(b" " * 2**24)


def _config(path: Path, corpus: Corpus, key: str, value: int) -> None:
    sound = json.loads((corpus.run / "folds/fold-0/model/config.json").read_text())
    path.write_text(json.dumps(sound | {key: value}))


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        total = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", total)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes(3000)))
    return b"\x89PNG\r\n\x1a\n" + head + rows + chunk(b"IEND", b"")


def _jpeg(width: int, height: int) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, "JPEG")
    data = bytearray(stream.getvalue())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def _tiff(width: int, height: int, side: int) -> bytes:
    """Return a TIFF of a given size with one tile of a given side, of 16 bytes."""
    tags = [(256, width), (257, height), (258, 8), (259, 1), (262, 2), (277, 3), (284, 1)]
    tags += [(322, side), (323, side), (324, 8), (325, 16)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", 24) + bytes(16) + directory
