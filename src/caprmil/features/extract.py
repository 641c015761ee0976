"""Extraction: a folder of slides becomes a folder of bags, and can be stopped and started at will.

OUT/NAME.h5       the bag of a slide, with all settings that shaped it
OUT/qc.csv        every slide: tissue, patches, flags, or why it failed
OUT/qc/NAME.png   slide, outline of the tissue and grid; .geojson for QuPath; .json, its row above
OUT/.status       the status of unfinished slides: see `executors.job_status`
"""

import hashlib
import json
import logging
import tomllib
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
from caprmil.executors.base import OnProgress
from caprmil.executors.job_status import process_name, status_path
from caprmil.features import bags
from caprmil.features.bags import BagInfo
from caprmil.features.settings import ExtractionConfig, Settings, hash_slide_file
from caprmil.io.atomic import check_writable, remove_leftovers, write_text
from caprmil.io.paths import RemotePath, as_path
from caprmil.io.progress import Bar, Pace
from caprmil.slides import patches, qc, regions, tissue
from caprmil.slides.patches import Patches
from caprmil.slides.qc import Record
from caprmil.slides.slide import Slide, Thumbnail
from caprmil.slides.tissue import Tissue

if TYPE_CHECKING:  # torch takes its time
    from caprmil.encoders import Encoder

_log = logging.getLogger("caprmil")


@dataclass(eq=False, kw_only=True)
class Prepared:
    """A slide that is open, with its tissue found and its grid laid."""

    slide: Slide
    thumbnail: Thumbnail
    tissue: Tissue
    patches: Patches
    seconds: float


@dataclass(eq=False, kw_only=True)
class Extraction:
    """Slides to bags in one folder, with one encoder and one set of settings.

    Without an encoder only the pictures and the table are made. `mpp` is the scale of the slides
    instead of what they say, `mpps` that of single ones by name. `regions` is a GeoJSON file, or
    a folder with one for each slide. Bags of other settings are an error, or made anew with
    `replace`. `load` gets the encoder in another process, which is otherwise sent this one.
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
    load: "Callable[[], Encoder] | None" = None

    def run(
        self,
        slides: Mapping[str, Path],
        *,
        progress: Bar | None = None,
        executor: Executor | None = None,
    ) -> list[Record]:
        """Encode every slide that is not done yet, and return what became of each.

        A slide that fails is noted, and the others go on. Several processes may work on one
        folder: each takes slides that no other has in hand. So may the workers of an executor.
        """
        self.out = as_path(self.out)
        self._check()
        done = self._look(slides)
        if done:
            _log.info("%d of %d slides are done already.", len(done), len(slides))
        clock, executor = Pace(progress, total=len(slides) - len(done)), executor or LocalExecutor()
        try:
            for wait in (False, True):  # first what nobody has in hand, then what is left
                todo = [
                    Task(name, status_path(self.out, name), SlideTask(path, wait=wait))
                    for name, path in slides.items()
                    if name not in done
                ]
                for outcome in executor.run(
                    todo, self._worker_factory(executor), _on_progress(clock)
                ):
                    name = outcome.task.name
                    if record := self._record(outcome):
                        done[name] = record
                        clock.tick(name, record.patches)
                    else:
                        _log.info("%s is in the hands of another process.", name)
        finally:
            with self._lock("qc.csv"):
                qc.write_table(self._qc, self.out / "qc.csv")
        return [done[name] for name in slides]

    def _worker_factory(self, executor: Executor) -> "Callable[[], Encoding]":
        """Return what makes a worker: with our encoder, or one that it loads where it is."""
        if not executor.remote or self.load is None or self.encoder is None:
            return partial(Encoding, self)
        return partial(
            _load_and_encode, replace(self, encoder=None), self.load, self.encoder.fingerprint
        )

    def _record(self, outcome: Succeeded | Failed) -> Record | None:
        """Return what became of a slide, or None if another process has it in hand."""
        if isinstance(outcome, Succeeded):
            record: Record | None = outcome.result
            return record
        name, path = outcome.task.name, outcome.task.payload.path
        _log.error("while encoding %s: %s", name, outcome.reason, exc_info=outcome.error)
        # Without the digest of its settings: the slide may be what cannot be read any more.
        return self._failed(Record(slide=name, state="failed", path=str(path)), outcome.reason)

    def _failed(self, record: Record, reason: str) -> Record:
        """Note that a slide failed, and why."""
        bag = self.out / f"{record.slide}.h5"
        if bag.exists():
            reason += f" {bag} is still there, of other settings."
        record = replace(record, state="failed", reason=reason)
        record.write(self._qc)
        return record

    def _check(self) -> None:
        """Refuse what could not end well, before any work."""
        drawn = self.regions
        if drawn is not None and not drawn.exists():
            raise SlideError(f"There is no file or folder of regions {drawn}.")
        if drawn is not None and self.out.resolve() in (drawn.resolve(), *drawn.resolve().parents):
            raise SlideError(
                f"{drawn} lies in {self.out}, where outlines are written. Copy your regions to a "
                "folder of their own."
            )
        if drawn is None and self.config != replace(
            self.config, regions="and tissue", region_classes=()
        ):
            raise RecipeError("regions and region_classes go with --regions FILE_OR_FOLDER.")
        if self.encoder is None and any(self.out.glob("*.h5")):
            raise RunError(f"{self.out} holds bags. Choose another folder for pictures alone.")
        if isinstance(self.out, RemotePath):
            check_writable(self.out)

    def _look(self, slides: Mapping[str, Path]) -> dict[str, Record]:
        """Return the slides that are done with these settings; refuse bags of others."""
        done: dict[str, Record] = {}
        stale: list[str] = []
        for name, path in slides.items():
            try:
                record = self._done(name, self.settings(name, path))
            except BagError as problem:
                stale.append(str(problem))
            else:
                done |= {name: record} if record else {}
        if stale and not self.replace:
            more = f" And {len(stale) - 1} more." if len(stale) > 1 else ""
            raise RunError(
                f"{stale[0]}{more} Choose another --out, or pass --replace to make them again."
            )
        return done

    def _done(self, name: str, wanted: Settings) -> Record | None:
        """Return the record of a slide that is done; raise at a bag that is something else."""
        record, bag = Record.read(self._qc, name), self.out / f"{name}.h5"
        if record and (record.digest != config.digest(wanted) or record.state == "failed"):
            record = None
        if self.encoder is None or not bag.exists():
            return record if record and (record.state == "no tissue" or not self.encoder) else None
        try:
            info = bags.inspect(bag)
            made = config.parse(tomllib.loads(info.settings or ""), into=Settings)
        except (BagError, RecipeError, tomllib.TOMLDecodeError) as problem:
            raise BagError(
                f"{bag} is there, but is no bag of `caprmil encode` ({problem})"
            ) from None
        if made != wanted:
            raise BagError(
                f"{bag} was made with other settings ({shorten(config.differences(made, wanted))})."
            )
        return record or self._noted(name, wanted, info)

    def _noted(self, name: str, wanted: Settings, info: BagInfo) -> Record:
        """Note a bag anew whose record is gone, e.g. by a kill in just that moment."""
        width, height = info.slide_size or (0, 0)
        record = Record(
            slide=name,
            state="done",
            patches=info.n_patches,
            width=width,
            height=height,
            mpp=info.slide_mpp or 0.0,
            digest=config.digest(wanted),
        )
        record.write(self._qc)
        return record

    def settings(self, name: str, path: Path) -> Settings:
        """Return everything that shapes the bag of a slide."""
        drawn = self._drawn(name)
        return Settings(
            encoder=self.encoder.name if self.encoder else None,
            fingerprint=self.encoder.fingerprint if self.encoder else None,
            extraction=self.config,
            slide_file=hash_slide_file(path),
            slide_mpp=self.mpps.get(name, self.mpp),
            regions=hashlib.sha256(drawn.read_bytes()).hexdigest() if drawn else None,
        )

    def prepare(self, name: str, path: Path) -> Prepared | Exception:
        """Open a slide, find its tissue, lay the grid; or return what stood in the way."""
        start, slide = monotonic(), None
        try:
            slide = Slide(path, mpp=self.mpps.get(name, self.mpp))
            thumbnail = slide.thumbnail(self.config.tissue.mpp)
            found = tissue.find(thumbnail.image, thumbnail.mpp, self.config.tissue)
            if self.regions is not None:
                found = self._restricted(name, found, thumbnail.scale)
            grid = patches.lay_grid(slide, found.mask, thumbnail.scale, self.config.patches)
        except Exception as problem:
            if slide is not None:
                slide.close()
            return problem
        taken = monotonic() - start
        return Prepared(slide=slide, thumbnail=thumbnail, tissue=found, patches=grid, seconds=taken)

    def _restricted(self, name: str, found: Tissue, scale: float) -> Tissue:
        """Return the tissue within the regions that were drawn, or the regions in its stead."""
        file = self._drawn(name)
        if file is None:
            raise SlideError(f"There is no {name}.geojson in {self.regions}. Draw its regions.")
        drawn = regions.read_regions(file, classes=self.config.region_classes or None)
        mask = drawn.to_mask(found.mask.shape, (1 / scale, 1 / scale))
        if self.config.regions == "and tissue":
            mask &= found.mask
        flags = tuple(flag for flag in found.flags if flag != "no tissue")
        return replace(found, mask=mask, flags=flags if mask.any() else (*flags, "no tissue"))

    def _drawn(self, name: str) -> Path | None:
        if self.regions is None or self.regions.is_file():
            return self.regions
        file = self.regions / f"{name}.geojson"
        return file if file.is_file() else None

    def take(
        self, name: str, task: "SlideTask", ready: Prepared | Exception, report: Bar
    ) -> Record | None:
        """Encode a slide and note what became of it; None if another process has it in hand."""
        wanted = self.settings(name, task.path)
        digest = config.digest(wanted)
        record = Record(slide=name, state="failed", path=str(task.path), digest=digest)
        with suppress(Timeout), self._lock(name, wait=task.wait):
            for file in (
                self.out / f"{name}.h5",
                *(self._qc / f"{name}.{kind}" for kind in ("png", "geojson", "json")),
            ):
                remove_leftovers(file)
            try:
                if done := self._done_by_another(name, wanted):
                    return done
                if isinstance(ready, Exception):
                    raise ready
                record = self._encode(record, ready, wanted, report)
            except CaprmilError as problem:
                if done := self._made_meanwhile(name, wanted):
                    return done
                return self._failed(record, str(problem))
            record.write(self._qc)
            return record
        return None

    def _done_by_another(self, name: str, wanted: Settings) -> Record | None:
        try:
            return self._done(name, wanted)
        except BagError:
            if self.replace:
                return None
            raise

    def _made_meanwhile(self, name: str, wanted: Settings) -> Record | None:
        """Return the record of a bag elsewhere: without locks, another may have been quicker."""
        if isinstance(self.out, RemotePath):
            with suppress(CaprmilError):
                return self._done(name, wanted)
        return None

    def _encode(self, record: Record, ready: Prepared, wanted: Settings, report: Bar) -> Record:
        start, slide, grid = monotonic(), ready.slide, ready.patches
        described = replace(
            record,
            state="done" if len(grid) else "no tissue",
            patches=len(grid),
            tissue_mm2=ready.tissue.area_mm2,
            tissue_share=float(ready.tissue.mask.mean()),
            flags="; ".join([*ready.tissue.flags, *_doubts(slide)]),
            width=slide.size[0],
            height=slide.size[1],
            mpp=slide.mpp,
            reader=f"{slide.vendor}, {'libvips' if slide.fast else 'OpenSlide'}",
        )
        self._draw(described, ready)
        if not len(grid) and self.replace:
            (self.out / f"{record.slide}.h5").unlink(missing_ok=True)  # of other settings
        if len(grid) and self.encoder is not None:
            info = self._describe(record.slide, slide, grid, wanted, self.encoder)
            encoded = 0
            with bags.writing(info, grid.coords, replace=self.replace) as put:
                for pixels in patches.read(slide, grid, batch=self.batch, workers=self.workers):
                    put(self.encoder(pixels))
                    encoded += len(pixels)
                    report(encoded, len(grid), "patches")
        return replace(described, seconds=ready.seconds + monotonic() - start)

    def _describe(
        self, name: str, slide: Slide, grid: Patches, wanted: Settings, encoder: "Encoder"
    ) -> BagInfo:
        return BagInfo(
            path=self.out / f"{name}.h5",
            kind="caprmil",
            n_patches=len(grid),
            width=encoder.width,
            dtype=self.config.dtype,
            encoder=encoder.name,
            fingerprint=encoder.fingerprint,
            settings=config.dump(wanted),
            mpp=self.config.patches.mpp,
            scale_rule=self.config.patches.scale_rule,
            patch_px=grid.px,
            patch_level0=grid.side,
            step=grid.step,
            slide_size=slide.size,
            slide_mpp=slide.mpp,
            slide_path=str(slide.path.absolute()),
        )

    def _draw(self, record: Record, ready: Prepared) -> None:
        """Write the picture of a slide, and its outline for QuPath."""
        mask, scale = ready.tissue.mask, ready.thumbnail.scale
        image = qc.overlay(ready.thumbnail, mask, ready.tissue.pen, ready.patches)
        text = (
            f"{record.slide}: {record.patches:,} patches of {ready.patches.side * record.mpp:.0f} "
            f"um, {record.tissue_mm2:.1f} mm2 of tissue"
        )
        text += f"; {record.flags}" if record.flags else ""
        qc.save_image(qc.add_caption(image, text), self._qc / f"{record.slide}.png")
        outline = json.dumps(regions.as_geojson(mask, (scale, scale)))
        write_text(self._qc / f"{record.slide}.geojson", outline, replace=True)

    @property
    def _qc(self) -> Path:
        return self.out / "qc"

    @contextmanager
    def _lock(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock of a slide. It goes with the process that holds it, however that ends.

        Elsewhere are no locks: two processes may make the same bag, and the first one stays.
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
class SlideTask:
    """What there is to know of a slide to encode, beside its name."""

    path: Path
    wait: bool = field(kw_only=True)
    """Wait for a process that has it in hand, or leave it to that."""


class Encoding(Worker):
    """Encodes slide after slide. The next is looked at while the present one is being encoded."""

    prefetches = True

    def __init__(self, job: Extraction) -> None:
        self.job = job
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self.coming: dict[str, Future[Prepared | Exception]] = {}

    def prefetch(self, task: Task) -> None:
        self.coming[task.name] = self.pool.submit(self.job.prepare, task.name, task.payload.path)

    def run(self, task: Task, report: Bar) -> Record | None:
        coming = self.coming.pop(task.name, None)
        ready = coming.result() if coming else self.job.prepare(task.name, task.payload.path)
        with nullcontext() if isinstance(ready, Exception) else ready.slide:
            return self.job.take(task.name, task.payload, ready, report)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        for coming in self.coming.values():
            if not coming.cancelled() and not isinstance(ready := coming.result(), Exception):
                ready.slide.close()


def _load_and_encode(job: Extraction, load: "Callable[[], Encoder]", fingerprint: str) -> Encoding:
    """Return a worker with an encoder of its own, which must be the one that was asked for."""
    encoder = load()
    if encoder.fingerprint != fingerprint:
        raise EncoderError(
            f"{encoder.name} has other weights on {process_name()} than in the main process. "
            "Pass the same file on all nodes with --weights."
        )
    batch = job.batch or batch_on(encoder.device.type)
    return Encoding(replace(job, encoder=encoder, batch=batch))


def batch_on(device: str) -> int:
    """Return how many patches a kind of device has at once, unless somebody knows better."""
    return 32 if device == "cpu" else 256


def _on_progress(clock: Pace) -> OnProgress:
    return lambda task, done, total, _: clock.count(task.name, done, total)


def _doubts(slide: Slide) -> list[str]:
    """Return a flag if the scale that was given is not the one in the file."""
    said = slide.reported_mpp
    if said is None or max(said, slide.mpp) <= 1.05 * min(said, slide.mpp):
        return []
    return [f"scale given as {slide.mpp:g} um/px, the file says {said:g}"]
