"""Formats: how a program is written to a file, and how the file is opened and asked."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil.errors import ExportError, UnknownNameError
from caprmil.export.program import Program

OPSET = 20  # of ONNX: known to onnxruntime 1.17 and newer
EXAMPLE = 50  # patches of the bag that a program is recorded with; it must not matter
FACTS = "caprmil.json"  # what a file says of itself, under this name in all of them

Values: TypeAlias = NDArray[np.float32]
Ask: TypeAlias = Callable[[Values], list[Values]]


class Format(NamedTuple):
    """A kind of file."""

    ending: str
    write: Callable[[Program, Path, str], None]
    open: Callable[[Path], tuple[Ask, str]]  # how to ask it, and the facts in it
    usage: tuple[str, str]
    needs: tuple[str, ...] = ()


def _write_onnx(program: Program, path: Path, facts: str) -> None:
    written = torch.onnx.export(
        program,
        _example(program),
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=_any_size(),
        input_names=["features"],
        output_names=program.outputs,
        verbose=False,
    )
    assert written is not None  # it is with dynamo=True
    written.model.metadata_props[FACTS] = facts
    written.save(str(path), external_data=False)


def _open_onnx(path: Path) -> tuple[Ask, str]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map.get(FACTS, "")
    return lambda features: session.run(None, {"features": features}), facts


def _write_pt2(program: Program, path: Path, facts: str) -> None:
    recorded = torch.export.export(program, _example(program), dynamic_shapes=_any_size())
    torch.export.save(recorded, path, extra_files={FACTS: facts})


def _open_pt2(path: Path) -> tuple[Ask, str]:
    extra = {FACTS: ""}
    return _asking(torch.export.load(path, extra_files=extra).module()), extra[FACTS]


def _write_torchscript(program: Program, path: Path, facts: str) -> None:
    # It follows one example and asks no questions: what it gets wrong, the check finds.
    traced = torch.jit.trace(program, _example(program), check_trace=False)  # type: ignore[no-untyped-call]
    torch.jit.save(traced, str(path), _extra_files={FACTS: facts})


def _open_torchscript(path: Path) -> tuple[Ask, str]:
    extra: dict[str, Any] = {FACTS: ""}
    module = torch.jit.load(str(path), _extra_files=extra)  # type: ignore[no-untyped-call]
    return _asking(module), bytes(extra[FACTS]).decode() if extra[FACTS] else ""


def _example(program: Program) -> tuple[torch.Tensor]:
    return (torch.randn(EXAMPLE, program.width, generator=torch.Generator().manual_seed(0)),)


def _any_size() -> Any:
    return ({0: torch.export.Dim("patches", min=1)},)


def _asking(module: Callable[..., Any]) -> Ask:
    return lambda features: [part.numpy() for part in module(torch.from_numpy(features))]


FORMATS = {
    "onnx": Format(
        ".onnx",
        _write_onnx,
        _open_onnx,
        (
            'session = onnxruntime.InferenceSession("{path}")',
            '{names} = session.run(None, {{"features": features}})',
        ),
        needs=("onnx", "onnxscript", "onnxruntime"),
    ),
    "pt2": Format(
        ".pt2",
        _write_pt2,
        _open_pt2,
        ('program = torch.export.load("{path}").module()', "{names} = program(features)"),
    ),
    "torchscript": Format(
        ".ts",
        _write_torchscript,
        _open_torchscript,
        ('program = torch.jit.load("{path}")', "{names} = program(features)"),
    ),
}


def find_format(name: str) -> Format:
    """Return the format of that name, if all that it needs is installed."""
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    missing = [package for package in FORMATS[name].needs if find_spec(package) is None]
    if missing:
        raise ExportError(
            f"Export to {name} needs {', '.join(missing)}. Install: pip install 'caprmil[{name}]'"
        )
    return FORMATS[name]


def read_facts(path: str | Path) -> dict[str, Any]:
    """Return what an exported file says of itself: classes, encoder, scale, model, version."""
    path = Path(path)
    name = next((name for name, kind in FORMATS.items() if kind.ending == path.suffix), None)
    if name is None:
        endings = ", ".join(kind.ending for kind in FORMATS.values())
        raise ExportError(f"{path} is no exported model: those end in {endings}.")
    with quiet():
        text = find_format(name).open(path)[1]
    if not text:
        raise ExportError(f"{path} was not written by caprmil export: it has no {FACTS} in it.")
    facts: dict[str, Any] = json.loads(text)
    return facts


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's announcements, and its advice to its developers, off the screen."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
