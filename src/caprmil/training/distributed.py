"""Devices: one training on several, on one machine or on more, each in a process of its own.

The leader is rank 0, on one machine the process that was asked: it does all that a process alone
would do, and writes every file. The followers only take part in learning: they hear from the
leader what to learn, and leave when it does. Lightning's DDP averages the gradients in between.

Under srun, torchrun, LSF or MPI every process is there already. Elsewhere the leader starts its
followers itself, as `python -c` of `serve` below, and not with Lightning's launchers: `ddp` runs
the command of the leader again, which a notebook or a test does not have; `ddp_spawn` imports the
leader's script again, and wants to pickle whoever listens to the training.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, NamedTuple, TypeVar

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch import distributed

from caprmil.errors import CaprmilError, RunError
from caprmil.features.batches import Cache
from caprmil.models.device import pick_device

Mine = TypeVar("Mine")
Job = Callable[["Team"], Any]

LONG = timedelta(days=30)  # followers wait while the leader alone does what is not learning
LAUNCHERS: tuple[type[ClusterEnvironment], ...] = (
    # In Lightning's order: torchrun may be used inside of SLURM.
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)


class Seat(ClusterEnvironment):
    """Where a process of a team sits, in the words that Lightning asks for it."""

    creates_processes_externally = True
    main_address = ""
    main_port = 0

    def __init__(
        self, address: str, port: int, node: int, local: int, devices: int, nodes: int
    ) -> None:
        self.main_address, self.main_port = address, port
        self.node, self.local, self.devices, self.nodes = node, local, devices, nodes

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.devices * self.nodes

    def global_rank(self) -> int:
        return self.node * self.devices + self.local

    def local_rank(self) -> int:
        return self.local

    def node_rank(self) -> int:
        return self.node

    def set_world_size(self, size: int) -> None:
        """Stay: the seat is given."""

    def set_global_rank(self, rank: int) -> None:
        """Stay: the seat is given."""


class Follower(NamedTuple):
    """A process that the leader has started. It ends when its standard input does."""

    process: "subprocess.Popen[str]"
    said: IO[str]

    def last_words(self) -> str:
        """Return what it said if it has come to a bad end, and else nothing."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return ""
        self.said.seek(0)
        return (self.said.read().strip() or f"A process ended with {code}.") if code else ""


class Team:
    """The processes that train together, seen from one of them. Most often it is alone.

    To be used with `with`: on entering the others are started or met, on leaving they go.
    """

    def __init__(
        self, device: str = "auto", devices: int = 1, nodes: int = 1, *, seat: Seat | None = None
    ) -> None:
        self.name, self.devices, self.nodes, self.world = device, devices, nodes, devices * nodes
        if devices < 1 or nodes < 1:
            raise RunError(f"devices and nodes are 1 or more: {devices=}, {nodes=}.")
        self.starts = seat is None and self.world > 1 and not _launcher()
        self.seat = (seat or _sit(devices, nodes)) if self.world > 1 else None
        if self.seat and device != "cpu" and self.seat.local < torch.cuda.device_count():
            torch.cuda.set_device(self.seat.local)  # before anything is put on the first by default
        self.device = pick_device(device)
        self.refuse()
        self.rank = self.seat.global_rank() if self.seat else 0
        self.cache: Cache | None = None
        self.followers: list[Follower] = []
        self.busy = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def refuse(self) -> None:
        """Raise at devices that are not there."""
        if self.world > 1 and ":" in self.name:
            raise RunError(f"{self.name} is one device. For several, name its kind: --device cuda.")
        there = {"cpu": os.cpu_count() or 1, "cuda": torch.cuda.device_count()}
        count = there.get(self.device.type, 1)
        if self.devices > count:
            kind = {"cpu": "CPU cores", "cuda": "GPUs"}.get(self.device.type, self.device.type)
            raise RunError(
                f"--devices {self.devices} is more than there are here: {kind}: {count}. "
                f"Ask for {count} at most."
            )

    def __enter__(self) -> "Team":
        if self.seat is None:
            return self
        self.threads = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
        try:
            if self.starts:
                self.followers = [self._start(self.seat, local) for local in range(1, self.devices)]
                self._wait_until_ready()
            self._meet(self.seat)
        except BaseException:
            self._dismiss(failed=True)
            raise
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        problem: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        if self.seat is None:
            return
        try:
            if self.leads and not self.busy:
                self._tell(None if problem is None else str(problem) or type(problem).__name__)
        finally:
            self._dismiss(failed=problem is not None)

    def _start(self, seat: Seat, local: int) -> Follower:
        said = TemporaryFile("w+")  # noqa: SIM115  closed when it is read
        where = [seat.main_address, seat.main_port, seat.node, local, self.devices, self.nodes]
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from caprmil.training.distributed import serve; serve()"),
                *map(str, [self.name, *where]),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # Ctrl-C is for the leader
        )
        return Follower(process, said)

    def _wait_until_ready(self) -> None:
        """Wait for a line of each: who cannot even start will never be met."""
        for follower in self.followers:
            answer = follower.process.stdout
            if answer is None or not answer.readline():
                raise _as_error(follower.last_words())

    def _meet(self, seat: Seat) -> None:
        options: dict[str, Any] = {}
        if self.device.type == "cuda":
            options = {"device_id": torch.device("cuda", seat.local)}
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"tcp://{seat.main_address}:{seat.main_port}",
            rank=self.rank,
            world_size=self.world,
            **options,
        )
        # Words and scores go beside the gradients, and may be long in coming.
        self.words = distributed.new_group(backend="gloo", timeout=LONG)

    def _dismiss(self, *, failed: bool) -> None:
        """End the followers, whatever they do; after a failure they do not wait for the leader."""
        for process, _ in self.followers:
            if failed and process.stdin is not None:
                process.stdin.close()
        for process, said in self.followers:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, said):
                if stream is not None:
                    stream.close()
        self.followers = []
        if distributed.is_initialized():
            distributed.destroy_process_group()
        threads, told = self.threads
        torch.set_num_threads(threads)  # Lightning shares the cores out among the processes
        if told is None:
            os.environ.pop("OMP_NUM_THREADS", None)

    @contextmanager
    def working(self, job: Job) -> Iterator[None]:
        """Let the followers do a job while the leader does the same."""
        if self.world == 1:
            yield
            return
        try:
            self._tell(job)
            self.busy = True
            yield
        except RuntimeError as problem:  # what the other end of a broken connection sees
            if words := next(filter(None, (each.last_words() for each in self.followers)), ""):
                raise _as_error(words) from problem
            if not self.starts:
                problem.add_note("If another process of this training ended, see what it said.")
            raise
        self.busy = False

    def follow(self) -> None:
        """Do what the leader asks for, until it is done."""
        while (job := self._hear()) is not None:
            if isinstance(job, str):
                raise RunError(f"The leader of this training has stopped: {job}")
            job(self)

    def _tell(self, job: Job | str | None) -> None:
        distributed.broadcast_object_list([job], src=0, group=self.words)

    def _hear(self) -> Job | str | None:
        box: list[Job | str | None] = [None]
        try:
            distributed.broadcast_object_list(box, src=0, group=self.words)
        except RuntimeError as problem:
            raise RunError("The leader of this training is gone. See what it said.") from problem
        return box[0]

    def gather(self, mine: Mine) -> list[Mine]:
        """Return what each process has, by rank, to all of them."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        distributed.all_gather_object(everyone, mine, group=self.words)
        return everyone


def serve() -> None:
    """Be a follower: the program that a leader starts. It goes when the leader is gone."""

    def leave_with_the_leader() -> None:
        sys.stdin.read()
        os._exit(1)

    device, address, *numbers = sys.argv[1:]
    threading.Thread(target=leave_with_the_leader, daemon=True).start()
    seat = Seat(address, *map(int, numbers))
    try:
        team = Team(device, seat.devices, seat.nodes, seat=seat)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        os.dup2(
            2, 1
        )  # nobody reads on: what is said from here on, as by NCCL, goes with the errors
        with team:
            team.follow()
    except CaprmilError as problem:
        notes = "".join(f" ({note})" for note in getattr(problem, "__notes__", ()))
        sys.stderr.write(f"error: {problem}{notes}")
        raise SystemExit(2) from None


def _as_error(words: str) -> Exception:
    """Return what a follower said as an error: one that a user can put right, or else a bug."""
    *_, last = words.split("error: ", 1)
    return RunError(last) if words.startswith("error: ") else RuntimeError(words)


def _launcher() -> ClusterEnvironment | None:
    """Return who started the processes, if somebody did. Lightning knows how to tell."""
    try:
        found = next((kind() for kind in LAUNCHERS if kind.detect()), None)
    except RuntimeError as problem:  # srun --ntasks without a number for each node
        raise RunError(f"{problem} For caprmil: as many as --devices says.") from None
    return found


def _sit(devices: int, nodes: int) -> Seat:
    """Return the place of this process among all."""
    launcher = _launcher()
    if launcher is None:
        told = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")]
        address, port, node = told if nodes > 1 else ("127.0.0.1", find_free_network_port(), 0)
        if address is None or port is None or node is None:
            raise RunError(
                f"--nodes {nodes} needs a launcher that starts all processes: srun or torchrun. "
                "Without one, set MASTER_ADDR, MASTER_PORT and NODE_RANK on each node."
            )
        return Seat(address, int(port), int(node), 0, devices, nodes)
    if launcher.world_size() != devices * nodes:
        raise RunError(
            f"{launcher.world_size()} processes were started, not --devices {devices} times "
            f"--nodes {nodes}. Start them with: "
            f"srun --nodes={nodes} --ntasks-per-node={devices} caprmil train ..."
        )
    return Seat(
        launcher.main_address,
        launcher.main_port,
        launcher.node_rank(),
        launcher.local_rank(),
        devices,
        nodes,
    )
