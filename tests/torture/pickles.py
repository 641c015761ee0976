"""Crafted pickles in every place where the file of a stranger is read, and names of modules.

If a pickle is executed or a module is imported, a file called `executed` appears. None may.
"""

import io
import json
import os
import pickle
import struct
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import tomli_w
from calls import command
from children import BrokenPromiseError, Case
from corpus import Corpus
from damaged_files import Damaged, Readers
from long_commands import link_tree

MARKER = "executed"
ORDER = f"open({MARKER!r}, 'w').close()"


class _Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *values: Any) -> None:
        self.function, self.values = function, values

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.values


class _State:
    """An object whose pickle sets a state through a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter([("a", _Call(os.mkdir, MARKER))])


class _Late:
    """A class of this campaign: a reader that finds it has imported a module of a stranger."""

    def __init__(self, _: object) -> None:
        pass


def payloads() -> dict[str, bytes]:
    """Return pickles that would create the marker, by name."""
    return {
        "mkdir": pickle.dumps(_Call(os.mkdir, MARKER), 2),
        "exec": pickle.dumps(_Call(exec, ORDER), 4),
        "eval": pickle.dumps([_Call(eval, ORDER)], 2),
        "system": pickle.dumps({"features": _Call(os.system, f"touch {MARKER}")}, 2),
        "items": pickle.dumps(_State(), 4),
        "instance": b"(S'" + MARKER.encode() + b"'\nios\nmkdir\n.",
        "object": b"(cos\nmkdir\nS'" + MARKER.encode() + b"'\no.",
        "global": b"cos\nmkdir\n(S'" + MARKER.encode() + b"'\ntR.",
        "stack": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x08" + MARKER.encode() + b"\x85R.",
        "dotted": b"\x80\x04\x8c\x07pathlib\x8c\x08os.mkdir\x93\x8c\x08executed\x85R.",
        "getattr": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'mkdir'\ntR"
        b"(S'executed'\ntR.",
        "build": pickle.dumps(_Call(_Late, _Call(os.mkdir, MARKER)), 2),
        "torch": b"\x80\x04\x8c\x13torch.serialization\x8c\x08os.mkdir\x93\x8c\x08executed\x85R.",
    }


def _control(payload: bytes) -> Callable[[Path], None]:
    """Return a case that unpickles a payload: if it does nothing, no place would show a fault."""

    def run(folder: Path) -> None:
        pickle.loads(payload)
        if not (folder / MARKER).exists():
            raise BrokenPromiseError("the payload itself does nothing")

    return run


def cases(corpus: Corpus, _: Path, scale: float) -> Iterator[Case]:
    """Yield every payload in every place."""
    for name, payload in payloads().items():
        yield Case(f"pickles/control/{name}", _control(payload))
    for number, (place, craft) in enumerate(places(corpus).items()):
        names = list(payloads())
        if scale < 0.3 and place.startswith("kept"):
            continue  # it is read after a whole training
        if scale < 0.3 or "ckpt" in place:  # resuming a training takes seconds
            names = names[number % len(names) :][:1]
        for name in names:
            case = _crafted(craft, payloads()[name])
            yield Case(f"pickles/{place}/{name}", case, 30.0)

    for name, name_module in {"logger": _name_logger, "encoder": _name_encoder}.items():
        yield Case(f"pickles/module/{name}", _imported(corpus, name_module), 30.0)


def _imported(
    corpus: Corpus, name_module: Callable[[Corpus, Path], None]
) -> Callable[[Path], None]:
    """Return a case in which a file names a module that is there, and that would run code."""

    def run(folder: Path) -> None:
        (folder / "stranger.py").write_text(f"open({str(folder / MARKER)!r}, 'w').close()\n")
        sys.path.insert(0, str(folder))
        try:
            name_module(corpus, folder)
        finally:
            sys.path.remove(str(folder))
        if (folder / MARKER).exists():
            raise BrokenPromiseError("a module that the file names was imported")

    return run


def _name_logger(corpus: Corpus, folder: Path) -> None:
    """Read a recipe that names a logger of a stranger."""
    recipe = tomllib.loads((corpus.run / "recipe.toml").read_text())
    text = tomli_w.dumps(recipe | {"loggers": {"stranger.Logger": {}}})
    _read(Readers(corpus), "recipe", folder, "recipe.toml", text.encode())


def _name_encoder(corpus: Corpus, folder: Path) -> None:
    """Predict a slide with a run whose bags were made by a function of a stranger."""
    link_tree(corpus.run, folder / "run")
    facts = json.loads((folder / "run" / "run.json").read_text())
    facts |= {"encoder": "stranger:encode", "mpp": 2.0, "patch_px": 64}
    (folder / "run" / "run.json").unlink()
    (folder / "run" / "run.json").write_text(json.dumps(facts))
    command("predict", "run", corpus.slides / "jpeg.tiff", "--device", "cpu")


def _crafted(craft: Callable[[Path, bytes], None], payload: bytes) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        craft(folder, payload)
        if any(folder.rglob(MARKER)):
            raise BrokenPromiseError("code in the file was executed")

    return run


def places(corpus: Corpus) -> dict[str, Callable[[Path, bytes], None]]:
    """Return how to put a pickle into each kind of file, and to read it, by name."""
    readers = Readers(corpus)

    def plain(kind: str, name: str) -> Callable[[Path, bytes], None]:
        return lambda folder, data: _read(readers, kind, folder, name, data)

    def packed(kind: str, seed: Path, end: str) -> Callable[[Path, bytes], None]:
        def craft(folder: Path, data: bytes) -> None:
            _read(readers, kind, folder, seed.name, _replace(seed, end, data), seed)

        return craft

    bags, weights = corpus.folder / "bags", corpus.folder / "weights"
    found = {
        f"bag{suffix}": plain("bag", f"x{suffix}") for suffix in (".pt", ".npy", ".npz", ".h5")
    }
    found |= {f"weights{s}": plain("weights", f"x{s}") for s in (".bin", ".pth", ".safetensors")}
    for seed in (bags / "tensor.pt", bags / "arrays.pt", bags / "list.pt"):
        found[seed.name] = packed("bag", seed, "data.pkl")
    found["model.bin"] = packed("weights", weights / "model.bin", "data.pkl")
    found["legacy"] = lambda folder, data: _read(readers, "bag", folder, "x.pt", _legacy(data))
    found["array.npy"] = lambda folder, data: _read(readers, "bag", folder, "x.npy", _objects(data))
    found["array.npz"] = lambda folder, data: _read(
        readers, "bag", folder, "x.npz", _archive({"features.npy": _objects(data)})
    )
    found["array in npz"] = lambda folder, data: _read(
        readers, "bag", folder, "x.npz", _archive({"features": data, "features.pkl": data})
    )
    for seed in corpus.files("exports", ".pt2", ".ts"):
        with zipfile.ZipFile(seed) as archive:
            names = [name for name in archive.namelist() if name.endswith((".pt", ".pkl"))]
        for name in names:
            found[f"{seed.name}:{Path(name).name}"] = packed("export", seed, name)
        found[f"{seed.name}:added"] = packed("export", seed, "data/sample_inputs/model.pt")
    for name in ("last.ckpt", "kept.ckpt"):
        for seed in corpus.stopped.rglob(name):
            found[name] = packed("checkpoint", seed, "data.pkl")
            found[f"{name} itself"] = lambda folder, data, seed=seed: _read(
                readers, "checkpoint", folder, seed.name, data, seed
            )
    model = corpus.run / "folds" / "fold-0" / "model" / "model.safetensors"
    found["model.safetensors"] = lambda folder, data: _read(
        readers, "model", folder, model.name, data, model
    )
    for name in ("labels.csv", "labels.xlsx", "labels.parquet"):
        found[name] = plain("table", name)
    return found


def _read(
    readers: Readers, kind: str, folder: Path, name: str, data: bytes, seed: Path | None = None
) -> None:
    path = folder / name
    path.write_bytes(data)
    if kind == "bag":
        readers.predict(Damaged(path, path, Random(0)))
    getattr(readers, kind)(Damaged(path, seed or path, Random(0)))


def _replace(seed: Path, end: str, data: bytes) -> bytes:
    """Return an archive of torch in which an entry is the pickle, in an archive if it was one."""
    packed = io.BytesIO()
    with zipfile.ZipFile(seed) as old, zipfile.ZipFile(packed, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        done = False
        for name in old.namelist():
            content = old.read(name)
            if name.endswith(end):
                content, done = _like(content, data), True
            new.writestr(name, content)
        if not done:
            new.writestr(f"{root}/{end}", _archive({"archive/data.pkl": data}))
    return packed.getvalue()


def _like(content: bytes, data: bytes) -> bytes:
    if not content.startswith(b"PK"):
        return data
    with zipfile.ZipFile(io.BytesIO(content)) as inner:
        entries = {name: inner.read(name) for name in inner.namelist()}
    return _archive({n: data if n.endswith("data.pkl") else old for n, old in entries.items()})


def _archive(entries: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return packed.getvalue()


def _legacy(data: bytes) -> bytes:
    """Return a file of torch before 1.6: a number, a version, the system, and the object."""
    number, facts = 0x1950A86A20F9469CFC6C, {"protocol_version": 1001, "little_endian": True}
    sizes = {"short": 2, "int": 4, "long": 4}
    parts = [number, 1001, facts | {"type_sizes": sizes}]
    return b"".join(pickle.dumps(part, 2) for part in parts) + data + pickle.dumps([], 2)


def _objects(data: bytes) -> bytes:
    """Return a NumPy file with an array of objects."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data
