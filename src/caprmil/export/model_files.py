"""Model files: how a model is written in each format, opened again and run."""

import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from caprmil import config
from caprmil.cohort.covariates import parse_columns
from caprmil.errors import ExportError, UnknownNameError
from caprmil.export.export_module import ExportModule
from caprmil.io.json_files import parse_json
from caprmil.runs.facts import check_positive
from caprmil.targets.target_table import parse_target

OPSET = 20  # of ONNX: supported by onnxruntime 1.17 and later
EXAMPLE = 50  # patches of the bag that a model is traced with; any other number must work too
METADATA = "caprmil.json"  # the name of the metadata in a file of any format
LONGEST = 2**24  # bytes of metadata

Values: TypeAlias = NDArray[np.float32]
Predict: TypeAlias = Callable[..., list[Values]]
"""Returns the outputs, given the features of a bag and, if a model reads them, covariates."""


class Format(NamedTuple):
    """A file format."""

    suffix: str
    write: Callable[[ExportModule, Path, str], None]
    open: Callable[[Path], Predict]  # runs what the file contains: for own files only
    read: Callable[[Path], bytes | None]  # the metadata; runs nothing
    usage: tuple[str, str]
    needs: tuple[str, ...] = ()  # packages


@dataclass(frozen=True, kw_only=True)
class FileMetadata:
    """The metadata of a file. A model that is not from a run has no field of a run."""

    caprmil: str
    in_dim: int
    outputs: tuple[str, ...]
    model: str = ""
    target: dict[str, Any] = field(default_factory=dict)
    encoder: str | None = None
    fingerprint: str | None = None
    mpp: float | None = None
    patch_px: int | None = None
    inputs: tuple[str, ...] = ("features",)
    covariates: tuple[dict[str, Any], ...] = ()
    """The columns of the covariates, in the order of their numbers: `docs/export.md`."""
    others: dict[str, Any] = field(default_factory=dict, metadata=config.REST)

    def __post_init__(self) -> None:
        for name in ("in_dim", "mpp", "patch_px"):
            check_positive(name, getattr(self, name))
        if self.target:
            parse_target(self.target)
        parse_columns(self.covariates)


def _write_onnx(module: ExportModule, path: Path, metadata: str) -> None:
    written = torch.onnx.export(
        module,
        _example(module),
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=_any_size(module),
        input_names=module.inputs,
        output_names=module.outputs,
        verbose=False,
    )
    assert written is not None  # never with dynamo=True
    written.model.metadata_props[METADATA] = metadata
    written.save(str(path), external_data=False)


def _open_onnx(path: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def _read_onnx(path: Path) -> bytes | None:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError as problem:
        raise ExportError(f"{path} is damaged: it is not an ONNX file.") from problem
    found = {entry.key: entry.value for entry in model.metadata_props}
    return found[METADATA].encode() if METADATA in found else None


def _write_pt2(module: ExportModule, path: Path, metadata: str) -> None:
    recorded = torch.export.export(module, _example(module), dynamic_shapes=_any_size(module))
    content = BytesIO()  # on a full disk, torch itself would end the process
    torch.export.save(recorded, content, extra_files={METADATA: metadata})
    path.write_bytes(content.getbuffer())


def _open_pt2(path: Path) -> Predict:
    return _predict_with(torch.export.load(path).module())


def _read_archive(path: Path) -> bytes | None:
    """Read the metadata from the zip archive of torch. Nothing else in it is opened."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [e for e in archive.infolist() if e.filename.endswith(f"/extra/{METADATA}")]
            if not entries:
                return None
            if len(entries) > 1 or entries[0].file_size > LONGEST:
                raise ExportError(f"{path} is damaged: its {METADATA} is repeated or too long.")
            return archive.read(entries[0])
    except (ExportError, OSError):
        raise
    except Exception as problem:  # zipfile raises errors of many types
        raise ExportError(f"{path} is damaged: {problem}") from problem


def _write_torchscript(module: ExportModule, path: Path, metadata: str) -> None:
    # A trace follows one example. The check of the file finds out if it fails for another.
    traced = torch.jit.trace(module, _example(module), check_trace=False)  # type: ignore[no-untyped-call]
    content = BytesIO()
    torch.jit.save(traced, content, _extra_files={METADATA: metadata})
    path.write_bytes(content.getbuffer())


def _open_torchscript(path: Path) -> Predict:
    return _predict_with(torch.jit.load(str(path)))  # type: ignore[no-untyped-call]


def _example(module: ExportModule) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(EXAMPLE, module.width, generator=generator)
    if not module.columns:
        return (features,)
    return features, torch.randn(module.n_covariates, generator=generator)


def _any_size(module: ExportModule) -> Any:
    return ({0: torch.export.Dim("patches", min=1)}, *([None] if module.columns else []))


def _predict_with(module: Callable[..., Any]) -> Predict:
    return lambda *inputs: [part.numpy() for part in module(*map(torch.from_numpy, inputs))]


FORMATS = {
    "onnx": Format(
        ".onnx",
        _write_onnx,
        _open_onnx,
        _read_onnx,
        (
            'session = onnxruntime.InferenceSession("{path}")',
            "{names} = session.run(None, {{{feed}}})",
        ),
        needs=("onnx", "onnxscript", "onnxruntime"),
    ),
    "pt2": Format(
        ".pt2",
        _write_pt2,
        _open_pt2,
        _read_archive,
        ('program = torch.export.load("{path}").module()', "{names} = program({inputs})"),
    ),
    "torchscript": Format(
        ".ts",
        _write_torchscript,
        _open_torchscript,
        _read_archive,
        ('program = torch.jit.load("{path}")', "{names} = program({inputs})"),
    ),
}


def find_format(name: str) -> Format:
    """Return a format by name, if the packages that it needs are installed."""
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    missing = [package for package in FORMATS[name].needs if find_spec(package) is None]
    if missing:
        raise ExportError(
            f"Export to {name} needs {', '.join(missing)}. Install: pip install 'caprmil[{name}]'"
        )
    return FORMATS[name]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of an exported file: target, encoder, scale, model, version.

    Nothing in the file is run, so the file of a stranger can be read.
    """
    path = Path(path)
    name = next((name for name, kind in FORMATS.items() if kind.suffix == path.suffix), None)
    if name is None:
        suffixes = ", ".join(kind.suffix for kind in FORMATS.values())
        raise ExportError(f"{path} is not an exported model: their names end in {suffixes}.")
    try:
        text = find_format(name).read(path)
    except OSError as problem:
        raise ExportError(f"{path} cannot be read: {problem.strerror}.") from problem
    if text is None:
        raise ExportError(
            f"{path} was not written by caprmil export: there is no {METADATA} in it."
        )
    try:
        metadata = parse_json(text)
        config.parse(metadata, into=FileMetadata, name=METADATA)
    except (ValueError, TypeError) as problem:
        raise ExportError(f"{path} is damaged: its {METADATA} is not ours ({problem})") from problem
    found: dict[str, Any] = metadata
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and log messages of torch's exporters."""
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
