"""The application, and options and tables that several commands share."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caprmil.cli.command_help import HELP_OPTIONS, CommandHelp, GroupHelp, show_help
from caprmil.io.paths import as_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from caprmil.errors import CaprmilError
    from caprmil.evaluation.predictions import Predictions
    from caprmil.executors import Executor
    from caprmil.runs.run import Run
    from caprmil.slides.qc import Record


_words: ContextVar[list[str]] = ContextVar("words")


def command_words() -> list[str]:
    """Return the words of the command that runs, as they were typed after `caprmil`."""
    return list(_words.get())


class Commands(GroupHelp):
    """The commands. The words of the one that runs are kept."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _words.set(list(args))
        show_help(ctx, args[:1])
        kept = self.params, self.add_help_option
        if args and not args[0].startswith("-"):
            # To find that options before the command were not given, typer loads pydantic.
            self.params, self.add_help_option = [], False
        try:
            return super().parse_args(ctx, args)
        finally:
            self.params, self.add_help_option = kept


class App(typer.Typer):
    """Commands whose paths may be URLs. pathlib removes a slash of a URL; `as_path` restores it."""

    def command(self, *args: Any, **settings: Any) -> Callable[..., Any]:
        register = super().command(*args, **{"cls": CommandHelp, **settings})

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def with_paths(**options: Any) -> Any:
                return function(**{name: _as_paths(value) for name, value in options.items()})

            register(with_paths)
            return function

        return add


def _as_paths(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_paths(each) for each in value]
    return as_path(value) if isinstance(value, Path) else value


app = App(
    name="caprmil",
    cls=Commands,
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

WIDE = 120  # characters of a table in a pipe or a file
NUMBERS = 12  # of an answer that fit into a line

RunFolder = Annotated[Path, typer.Argument(help="A run that `caprmil train` made.")]
SharedRun = Annotated[Path, typer.Argument(help="A run, also on the hub: hf://OWNER/NAME.")]
Pixels = Annotated[
    Path | None,
    typer.Option("--slide", help="The slide file, or its folder, for the pixels."),
]
MovedFeatures = Annotated[
    list[Path] | None,
    typer.Option("--features", help="Folder of the run's bags, if they were moved."),
]
Force = Annotated[bool, typer.Option(help="Accept another encoder or scale.")]
CovariateTable = Annotated[
    Path | None,
    typer.Option("--table", help="Table with the covariates of slides that the run does not have."),
]
SlideVectors = Annotated[
    Path | None,
    typer.Option("--vectors", help="Table or folder with the vectors of such slides."),
]
Features = Annotated[
    list[Path] | None,
    typer.Option(help="Folder with the bags. Repeat it for several sources, e.g. two encoders."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
SlideScale = Annotated[
    float | None, typer.Option(help="Microns per pixel of the slides, instead of their metadata.")
]
Weights = Annotated[Path | None, typer.Option(help="Local file or folder of encoder weights.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Allow an encoder to run Python code of the hub."),
]
AllowLogger = Annotated[
    list[str] | None,
    typer.Option(help="Allow a logger of the recipe to run code: module.Class. May be repeated."),
]
Ray = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Use all cores or GPUs of this machine with Ray; with HOST:PORT or auto, those of a "
        "cluster.",
        show_default=False,
    ),
]
Gpus = Annotated[float, typer.Option(help="With --ray: share of a GPU per worker.", min=0.01)]
ADDRESS = re.compile(r"auto|local|[^\s/=]+:\d+")


class RayCommand(CommandHelp):
    """A command with --ray, which may be followed by an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--ray" in args:
            after = args.index("--ray") + 1
            if not ADDRESS.fullmatch("".join(args[after : after + 1])):
                args = [*args[:after], "local", *args[after:]]
        return super().parse_args(ctx, args)


def typed(**options: Any) -> str:
    """Return options as they are typed, for a command that is proposed: those that were given."""
    words: list[str] = []
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each not in (None, False, ""):
                word = f"--{name.replace('_', '-')}"
                words.append(word if each is True else f"{word} {quote(str(each))}")
    return "".join(f" {word}" for word in words)


def find_executor(
    ray: str, device: str, gpus: float, readers: int = 1
) -> "AbstractContextManager[Executor]":
    """Return the executor: this process, or Ray at an address.

    A worker of Ray has a share of a GPU and cores for its readers, or one core per thread.
    """
    from caprmil.errors import CaprmilError
    from caprmil.executors import LocalExecutor, RayExecutor

    if not ray:
        return nullcontext(LocalExecutor())
    if ":" in device:
        raise CaprmilError(f"Ray chooses the GPU of a worker. Use --device cuda, not {device}.")
    if gpus > 1 and gpus != int(gpus):
        raise CaprmilError(
            f"A worker has a share of one GPU, or an integer number of GPUs, not {gpus:g}."
        )
    share = 0.0 if device == "cpu" else gpus
    return RayExecutor(ray, gpus=share, reader_threads=readers, require_gpus=device != "auto")


def find_run(folder: Path) -> "Run":
    """Return the run in a folder, or at hf://OWNER/NAME on the hub."""
    from caprmil.runs.run import Run

    if folder.parts[:1] == ("hf:",):
        return Run.from_pretrained("/".join(folder.parts[1:]))
    return Run(folder)


def open_run(folder: Path, features: list[Path] | None) -> "Run":
    """Return a run, whose bags may have been moved to another folder."""
    run = find_run(folder)
    if features:
        run.use_features(*features)
    return run


def show_table(header: "Sequence[str]", rows: "Iterable[Sequence[str]]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    table.columns[0].no_wrap = True  # other columns wrap first
    for column in table.columns:
        column.overflow = "fold"  # a long word goes on in the next line, and is not cut
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else WIDE
    Console(markup=False, width=width).print(table)  # a name may contain brackets


def name_runs(paths: "Sequence[Path]") -> dict[Path, str]:
    """Return the name of each path: its last part, or the whole path if that is not unique."""
    from caprmil.errors import CohortError

    if len({path.resolve() for path in paths}) < len(paths):
        raise CohortError("A run is named twice. Name each once.")
    words = [path.resolve().name for path in paths]
    return {
        path: word if words.count(word) == 1 else str(path)
        for path, word in zip(paths, words, strict=True)
    }


def answers_table(answers: "Predictions") -> None:
    shown, target = zip(answers.slides[:20], answers.answers[:20], strict=True), answers.target
    if len(target.titles) > NUMBERS:
        show_table(
            [answers.unit, "predicted"], [[slide, target.show(values)] for slide, values in shown]
        )
        return
    rows = [[slide, *(f"{value:.4f}" for value in values)] for slide, values in shown]
    show_table([answers.unit, *target.titles], rows)


def failed_records(problems: "Mapping[str, CaprmilError]") -> "list[Record]":
    """Return the records of slides that failed, from their errors."""
    if not problems:
        return []
    from caprmil.slides.qc import Record

    return [Record(slide=s, state="failed", reason=str(p)) for s, p in problems.items()]


def end_with_failed(failed: "Sequence[Record]") -> None:
    """Print the slides that failed, and exit with 2 if there are any. The others are done."""
    for record in failed:
        typer.secho(f"failed: {record.slide}: {record.reason}", err=True, fg="red")
    if failed:
        typer.secho("Correct these errors and repeat the command: it tries these again.", err=True)
        raise typer.Exit(2)
