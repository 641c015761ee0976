"""Extraction: a folder of slides becomes a folder of bags. It can be stopped and resumed.

OUT/NAME.h5       the bag of a slide, with all settings that shaped it
OUT/qc.csv        every slide: tissue, patches, flags, or the reason of its failure
OUT/qc/NAME.png   slide, outline of the tissue and grid; .geojson for QuPath; .json, its row above
OUT/.status       the status of unfinished slides: see `executors.job_status`
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from caprmil import config
from caprmil.errors import (
    BagError,
    CaprmilError,
    EncoderError,
    RecipeError,
    RunError,
    SlideError,
    shorten,
)
from caprmil.executors import Executor, Failed, LocalExecutor, Succeeded, Task, Worker
from caprmil.executors.executor import OnProgress
from caprmil.executors.job_status import process_name, read_statuses, status_path
from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.features.prepared_slide import PreparedSlide, prepare_slide
from caprmil.features.settings import ExtractionConfig, Settings, hash_slide_file
from caprmil.io.atomic import check_writable, remove_leftovers
from caprmil.io.leftovers import clear_leftovers
from caprmil.io.paths import RemotePath, as_path
from caprmil.io.progress import Bar, Pace
from caprmil.slides import patches, qc
from caprmil.slides.qc import Record

if TYPE_CHECKING:  # torch is slow to import
    from caprmil.encoders import Encoder

_log = logging.getLogger("caprmil")


@dataclass(eq=False, kw_only=True)
class Extraction:
    """The extraction of slides to bags in one folder, with one encoder and one set of settings.

    Without an encoder, only the pictures and the table are made. `mpp` replaces the scale in the
    files of the slides, `mpps` that of single slides by name. `regions` is a GeoJSON file, or a
    folder with a file per slide. Bags with other settings are an error, or with `replace` are made
    again. `load_encoder` loads the encoder in other processes. Without it, they get a copy.
    """

    out: Path
    encoder: "Encoder | None"
    config: ExtractionConfig = field(default_factory=ExtractionConfig)
    mpp: float | None = None
    mpps: Mapping[str, float] = field(default_factory=dict)
    regions: Path | None = None
    replace: bool = False
    batch: int = 32
    workers: int = 2
    load_encoder: "Callable[[], Encoder] | None" = None

    def run(
        self,
        slides: Mapping[str, Path],
        *,
        progress: Bar | None = None,
        executor: Executor | None = None,
    ) -> list[Record]:
        """Encode every slide that is not done yet, and return a record per slide.

        If a slide fails, its record has the reason, and the others are still encoded. Several
        processes may work on one folder: each takes slides that no other process is encoding.
        """
        self.out = as_path(self.out)
        self._check()
        done = self._find_done(slides)
        if done:
            _log.info("%d of %d slides are done already.", len(done), len(slides))
        for name in read_statuses(self.out).keys() & done.keys():  # of killed processes
            status_path(self.out, name).unlink(missing_ok=True)
        pace, executor = Pace(progress, total=len(slides) - len(done)), executor or LocalExecutor()
        make_worker, on_progress = self._worker_factory(executor), _on_progress(pace)
        try:
            # First the slides that no other process is encoding, then the others.
            for wait in (False, True):
                tasks = [
                    Task(name, status_path(self.out, name), SlidePayload(path, wait=wait))
                    for name, path in slides.items()
                    if name not in done
                ]
                for outcome in executor.run(tasks, make_worker, on_progress):
                    name = outcome.task.name
                    if record := self._record(outcome):
                        done[name] = record
                        pace.tick(name, record.patches)
                    else:
                        _log.info("Another process is encoding %s.", name)
        finally:
            with self._lock("qc.csv"):
                qc.write_table(self._qc, self.out / "qc.csv")
        return [done[name] for name in slides]

    def settings(self, name: str, path: Path) -> Settings:
        """Return everything that shapes the bag of a slide."""
        file = self._regions_file(name)
        return Settings(
            encoder=self.encoder.name if self.encoder else None,
            fingerprint=self.encoder.fingerprint if self.encoder else None,
            extraction=self.config,
            slide_file=hash_slide_file(path),
            slide_mpp=self.mpps.get(name, self.mpp),
            regions=hashlib.sha256(file.read_bytes()).hexdigest() if file else None,
        )

    def prepare(self, name: str, path: Path) -> PreparedSlide | Exception:
        """Return the slide ready to be encoded; or the error, which is raised when it is needed."""

        def find_regions() -> Path | None:
            file = self._regions_file(name)
            if self.regions is not None and file is None:
                raise SlideError(f"There is no {name}.geojson in {self.regions}. Draw its regions.")
            return file

        try:
            mpp = self.mpps.get(name, self.mpp)
            return prepare_slide(path, self.config, mpp=mpp, find_regions=find_regions)
        except Exception as error:
            return error

    def encode(
        self, name: str, task: "SlidePayload", prepared: PreparedSlide | Exception, report: Bar
    ) -> Record | None:
        """Encode a slide and write its record; return None if another process is encoding it."""
        settings = self.settings(name, task.path)
        digest = config.digest(settings)
        record = Record(slide=name, state="failed", path=str(task.path), digest=digest)
        with suppress(Timeout), self._lock(name, wait=task.wait):
            for file in (
                self.out / f"{name}.h5",
                *(self._qc / f"{name}.{kind}" for kind in ("png", "geojson", "json")),
            ):
                remove_leftovers(file, locked=True)
            try:
                if done := self._done(name, settings):
                    return done
                if isinstance(prepared, Exception):
                    raise prepared
                record = self._write(record, prepared, settings, report)
            except CaprmilError as error:
                if done := self._made_meanwhile(record, prepared, settings):
                    return done
                return self._failed(record, str(error))
            record.write(self._qc)
            return record
        return None

    def _worker_factory(self, executor: Executor) -> "Callable[[], SlideEncoder]":
        """Return a function that makes a worker, with this encoder or one that it loads itself."""
        if not executor.remote or self.load_encoder is None or self.encoder is None:
            return partial(SlideEncoder, self)
        job = replace(self, encoder=None)
        return partial(_load_slide_encoder, job, self.load_encoder, self.encoder.fingerprint)

    def _record(self, outcome: Succeeded | Failed) -> Record | None:
        """Return the record of a slide, or None if another process is encoding it."""
        if isinstance(outcome, Succeeded):
            record: Record | None = outcome.result
            return record
        name, path = outcome.task.name, outcome.task.payload.path
        bug = None if isinstance(outcome.error, CaprmilError) else outcome.error
        _log.error("while encoding %s: %s", name, outcome.reason, exc_info=bug)
        # The record has no digest of the settings: perhaps the slide cannot be read any more.
        return self._failed(Record(slide=name, state="failed", path=str(path)), outcome.reason)

    def _failed(self, record: Record, reason: str) -> Record:
        """Write the record of a slide that failed, with the reason."""
        bag = self.out / f"{record.slide}.h5"
        if bag.exists():
            reason += f" {bag} is still there, with other settings."
        record = replace(record, state="failed", reason=reason)
        record.write(self._qc)
        return record

    def _check(self) -> None:
        """Raise an error if the settings and folders do not fit, before any work."""
        drawn = self.regions
        if drawn is not None and not drawn.exists():
            raise SlideError(f"There is no file or folder of regions {drawn}.")
        if drawn is not None and self.out.resolve() in (drawn.resolve(), *drawn.resolve().parents):
            raise SlideError(
                f"{drawn} is in {self.out}, where outlines are written. Copy your regions to "
                "another folder."
            )
        if drawn is None and self.config != replace(
            self.config, regions="and tissue", region_classes=()
        ):
            raise RecipeError("regions and region_classes need --regions FILE_OR_FOLDER.")
        if self.encoder is None and any(self.out.glob("*.h5")):
            raise RunError(f"{self.out} holds bags. Choose another folder for the pictures.")
        if isinstance(self.out, RemotePath):
            check_writable(self.out)
        else:
            clear_leftovers(self.out)

    def _find_done(self, slides: Mapping[str, Path]) -> dict[str, Record]:
        """Return the records of finished slides; raise an error at bags with other settings."""
        done: dict[str, Record] = {}
        problems: list[str] = []
        for name, path in slides.items():
            try:
                record = self._done(name, self.settings(name, path))
            except BagError as error:
                problems.append(str(error))
            else:
                done |= {name: record} if record else {}
        if problems:
            more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
            raise RunError(
                f"{problems[0]}{more} Choose another --out, or pass --replace to make them again."
            )
        return done

    def _done(self, name: str, settings: Settings) -> Record | None:
        """Return the record of a finished slide; raise an error at a bag with other settings.

        A bag without a record is not finished: the process was killed between the two.
        """
        record = Record.read(self._qc, name)
        if record and (record.digest != config.digest(settings) or record.state == "failed"):
            record = None
        try:
            if self.encoder is None or self._has_bag(name, settings):
                return record
        except BagError:
            if self.replace:
                return None
            raise
        return record if record and record.state == "no tissue" else None

    def _has_bag(self, name: str, settings: Settings) -> bool:
        """Return whether the bag of a slide is there; raise an error if it has other settings."""
        bag = self.out / f"{name}.h5"
        if not bag.exists():
            return False
        try:
            found = config.parse(config.read_toml(bags.inspect(bag).settings or ""), into=Settings)
        except (BagError, RecipeError, ValueError, RecursionError) as error:
            raise BagError(f"{bag} exists and is not a bag of `caprmil encode` ({error})") from None
        if found != settings:
            changes = shorten(config.differences(found, settings))
            raise BagError(f"{bag} was made with other settings ({changes}).")
        return True

    def _made_meanwhile(
        self, record: Record, prepared: PreparedSlide | Exception, settings: Settings
    ) -> Record | None:
        """Return the record of a remote bag: without locks, another process may have made it."""
        with suppress(CaprmilError):
            if isinstance(self.out, RemotePath) and self._has_bag(record.slide, settings):
                found = None if isinstance(prepared, Exception) else prepared.describe(record)
                return self._done(record.slide, settings) or found
        return None

    def _write(
        self, record: Record, prepared: PreparedSlide, settings: Settings, report: Bar
    ) -> Record:
        """Write the picture and the bag of a slide, if it has none, and return its record."""
        start, slide, grid = monotonic(), prepared.slide, prepared.patches
        record = prepared.describe(record)
        prepared.draw(record, self._qc)
        has_bag = False
        with suppress(BagError):  # with other settings: it is replaced
            has_bag = self._has_bag(record.slide, settings)
        if not len(grid) and self.replace:
            (self.out / f"{record.slide}.h5").unlink(missing_ok=True)  # has other settings
        if len(grid) and self.encoder is not None and not has_bag:
            info = self._bag_info(record.slide, prepared, settings, self.encoder)
            encoded = 0
            with bags.writing(info, grid.coords, replace=self.replace) as put:
                for pixels in patches.read(slide, grid, batch=self.batch, workers=self.workers):
                    put(self.encoder(pixels))
                    encoded += len(pixels)
                    report(encoded, len(grid), "patches")
        return replace(record, seconds=prepared.seconds + monotonic() - start)

    def _bag_info(
        self, name: str, prepared: PreparedSlide, settings: Settings, encoder: "Encoder"
    ) -> BagInfo:
        slide, grid = prepared.slide, prepared.patches
        return BagInfo(
            path=self.out / f"{name}.h5",
            kind="caprmil",
            n_patches=len(grid),
            width=encoder.width,
            dtype=self.config.dtype,
            encoder=encoder.name,
            fingerprint=encoder.fingerprint,
            settings=config.dump(settings),
            mpp=self.config.patches.mpp,
            scale_rule=self.config.patches.scale_rule,
            patch_px=grid.px,
            patch_level0=grid.side,
            step=grid.step,
            slide_size=slide.size,
            slide_mpp=slide.mpp,
            slide_path=str(slide.path.absolute()),
        )

    def _regions_file(self, name: str) -> Path | None:
        if self.regions is None or self.regions.is_file():
            return self.regions
        file = self.regions / f"{name}.geojson"
        return file if file.is_file() else None

    @property
    def _qc(self) -> Path:
        return self.out / "qc"

    @contextmanager
    def _lock(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock of a slide. The system releases it when the process ends, or is killed.

        Remote folders have no locks: two processes may make the same bag, and the first one stays.
        """
        if isinstance(self.out, RemotePath):
            yield
            return
        folder = self.out / ".locks"
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock").acquire(timeout=-1 if wait else 0):
            yield


@dataclass(frozen=True)
class SlidePayload:
    """The payload of a task: a slide to encode."""

    path: Path
    wait: bool = field(kw_only=True)
    """Whether to wait for another process that is encoding the slide, or to skip it."""


class SlideEncoder(Worker):
    """Encodes slides. It prepares the next slide in a thread while it encodes the current one."""

    prefetches = True

    def __init__(self, job: Extraction) -> None:
        self.job = job
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self.prefetched: dict[str, Future[PreparedSlide | Exception]] = {}

    def prefetch(self, task: Task) -> None:
        future = self.pool.submit(self.job.prepare, task.name, task.payload.path)
        self.prefetched[task.name] = future

    def run(self, task: Task, report: Bar) -> Record | None:
        future = self.prefetched.pop(task.name, None)
        prepared = future.result() if future else self.job.prepare(task.name, task.payload.path)
        with nullcontext() if isinstance(prepared, Exception) else prepared.slide:
            return self.job.encode(task.name, task.payload, prepared, report)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        for future in self.prefetched.values():
            if not future.cancelled() and not isinstance(prepared := future.result(), Exception):
                prepared.slide.close()


def _load_slide_encoder(
    job: Extraction, load_encoder: "Callable[[], Encoder]", fingerprint: str
) -> SlideEncoder:
    """Return a worker that loads its encoder; raise an error if it has other weights."""
    encoder = load_encoder()
    if encoder.fingerprint != fingerprint:
        raise EncoderError(
            f"{encoder.name} has other weights on {process_name()} than in the main process. "
            "Pass the same file on all nodes with --weights."
        )
    batch = job.batch or default_batch(encoder.device.type)
    return SlideEncoder(replace(job, encoder=encoder, batch=batch))


def default_batch(device: str) -> int:
    """Return the default number of patches per batch on a type of device."""
    return 32 if device == "cpu" else 256


def _on_progress(pace: Pace) -> OnProgress:
    return lambda task, done, total, _: pace.count(task.name, done, total)
