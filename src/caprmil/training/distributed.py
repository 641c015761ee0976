"""Distributed training: one training on several devices, with one process per device.

The main process is rank 0. It does everything that a single process would do, and writes all files.
The worker processes only take part in the training: they receive the job from the main process, and
exit with it. Lightning's DDP averages the gradients.

Under srun, torchrun, LSF or MPI all processes are already running. Otherwise the main process
starts the workers itself, as `python -c` of `run_worker` below. It does not use the launchers of
Lightning: `ddp` runs the command of the main process again, which does not exist in a notebook or a
test; `ddp_spawn` imports the main script again, and has to pickle the callbacks of the training.
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

T = TypeVar("T")
Job = Callable[["ProcessGroup"], Any]

# Workers wait this long at most while the main process is busy with other things than training.
CONTROL_TIMEOUT = timedelta(days=30)
LAUNCHERS: tuple[type[ClusterEnvironment], ...] = (
    # In Lightning's order: torchrun may be used inside of SLURM.
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)


class ProcessEnvironment(ClusterEnvironment):
    """The rank and the address of one process, in the form that Lightning needs."""

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
        """Do nothing: the world size is given."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is given."""


class WorkerProcess(NamedTuple):
    """A process that the main process has started. It exits when its standard input is closed."""

    process: "subprocess.Popen[str]"
    stderr: IO[str]

    def error_output(self) -> str:
        """Return the error output of a process that failed, or an empty string."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return ""
        self.stderr.seek(0)
        return (self.stderr.read().strip() or f"A process ended with {code}.") if code else ""


class ProcessGroup:
    """The processes that train together, from the view of one of them. Often it is the only one.

    Use it in a `with` statement. It starts or connects to the other processes, and ends them.
    """

    def __init__(
        self,
        device: str = "auto",
        devices: int = 1,
        nodes: int = 1,
        *,
        environment: ProcessEnvironment | None = None,
    ) -> None:
        if devices < 1 or nodes < 1:
            raise RunError(f"devices and nodes are 1 or more: {devices=}, {nodes=}.")
        self.device_name, self.devices, self.nodes = device, devices, nodes
        self.world_size = devices * nodes
        distributed_training = self.world_size > 1
        self.starts_workers = (
            environment is None and distributed_training and not _detect_launcher()
        )
        self.environment: ProcessEnvironment | None = None
        if distributed_training:
            self.environment = environment or _find_environment(devices, nodes)
            if device != "cpu" and self.environment.local < torch.cuda.device_count():
                # Before anything is put on the first device by default.
                torch.cuda.set_device(self.environment.local)
        self.device = pick_device(device)
        self.check_devices()
        self.rank = self.environment.global_rank() if self.environment else 0
        self.cache: Cache | None = None
        self.workers: list[WorkerProcess] = []
        self.running = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def check_devices(self) -> None:
        """Raise an error if there are not enough devices."""
        if self.world_size > 1 and ":" in self.device_name:
            raise RunError(
                f"{self.device_name} is one device. For several, name its kind: --device cuda."
            )
        available = {"cpu": os.cpu_count() or 1, "cuda": torch.cuda.device_count()}
        count = available.get(self.device.type, 1)
        if self.devices > count:
            kind = {"cpu": "CPU cores", "cuda": "GPUs"}.get(self.device.type, self.device.type)
            raise RunError(
                f"--devices {self.devices} is more than this machine has: {kind}: {count}. "
                f"Use {count} at most."
            )

    def __enter__(self) -> "ProcessGroup":
        if self.environment is None:
            return self
        self.threads = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
        try:
            if self.starts_workers:
                self.workers = [
                    self._start_worker(self.environment, local) for local in range(1, self.devices)
                ]
                self._wait_until_ready()
            self._connect(self.environment)
        except BaseException:
            self._shut_down(failed=True)
            raise
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        if self.environment is None:
            return
        try:
            if self.is_main and not self.running:
                self._broadcast(None if error is None else str(error) or type(error).__name__)
        finally:
            self._shut_down(failed=error is not None)

    def _start_worker(self, main: ProcessEnvironment, local: int) -> WorkerProcess:
        stderr = TemporaryFile("w+")  # noqa: SIM115  closed in _shut_down
        numbers = [main.main_port, main.node, local, self.devices, self.nodes]
        code = "from caprmil.training.distributed import run_worker; run_worker()"
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", code),
                *(self.device_name, main.main_address, *map(str, numbers)),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # Ctrl-C is for the main process
        )
        return WorkerProcess(process, stderr)

    def _wait_until_ready(self) -> None:
        """Wait for the first line of each worker: one that cannot start never connects."""
        for worker in self.workers:
            output = worker.process.stdout
            if output is None or not output.readline():
                raise _as_error(worker.error_output())

    def _connect(self, environment: ProcessEnvironment) -> None:
        options: dict[str, Any] = {}
        if self.device.type == "cuda":
            options = {"device_id": torch.device("cuda", environment.local)}
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"tcp://{environment.main_address}:{environment.main_port}",
            rank=self.rank,
            world_size=self.world_size,
            **options,
        )
        # Jobs and scores have a group of their own, with a longer timeout than the gradients.
        self.control = distributed.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)

    def _shut_down(self, *, failed: bool) -> None:
        """End the workers and the connection. After a failure the workers are not waited for."""
        for process, _ in self.workers:
            if failed and process.stdin is not None:
                process.stdin.close()
        for process, stderr in self.workers:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, stderr):
                if stream is not None:
                    stream.close()
        self.workers = []
        if distributed.is_initialized():
            distributed.destroy_process_group()
        threads, variable = self.threads
        torch.set_num_threads(threads)  # Lightning divides the cores among the processes
        if variable is None:
            os.environ.pop("OMP_NUM_THREADS", None)

    @contextmanager
    def distribute(self, job: Job) -> Iterator[None]:
        """Run a job on the workers, while the main process runs the same job in the body."""
        if self.world_size == 1:
            yield
            return
        try:
            self._broadcast(job)
            self.running = True
            yield
        except RuntimeError as error:  # raised when the connection to a worker breaks
            outputs = (worker.error_output() for worker in self.workers)
            if output := next(filter(None, outputs), ""):
                raise _as_error(output) from error
            if not self.starts_workers:
                error.add_note("If another process of this training ended, see its error output.")
            raise
        self.running = False

    def run_jobs(self) -> None:
        """Run the jobs of the main process on this worker, until the main process ends."""
        while (job := self._receive()) is not None:
            if isinstance(job, str):
                raise RunError(f"The main process of this training has stopped: {job}")
            job(self)

    def _broadcast(self, job: Job | str | None) -> None:
        """Send a job to all workers; or None at the end, or the reason of a failure."""
        distributed.broadcast_object_list([job], src=0, group=self.control)

    def _receive(self) -> Job | str | None:
        received: list[Job | str | None] = [None]
        try:
            distributed.broadcast_object_list(received, src=0, group=self.control)
        except RuntimeError as error:
            raise RunError(
                "The main process of this training is gone. See its error output."
            ) from error
        return received[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank, in every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self.control)
        return values


def run_worker() -> None:
    """Run a worker process that the main process starts. It exits when the main process does."""

    def exit_with_main() -> None:
        sys.stdin.read()
        os._exit(1)

    device, address, *numbers = sys.argv[1:]
    threading.Thread(target=exit_with_main, daemon=True).start()
    environment = ProcessEnvironment(address, *map(int, numbers))
    try:
        group = ProcessGroup(
            device, environment.devices, environment.nodes, environment=environment
        )
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        os.dup2(2, 1)  # nothing reads stdout from here on: output, e.g. of NCCL, goes to stderr
        with group:
            group.run_jobs()
    except CaprmilError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        sys.stderr.write(f"error: {error}{notes}")
        raise SystemExit(2) from None


def _as_error(output: str) -> Exception:
    """Return the error output of a worker as an error: a RunError if a user can fix it."""
    *_, last = output.split("error: ", 1)
    return RunError(last) if output.startswith("error: ") else RuntimeError(output)


def _detect_launcher() -> ClusterEnvironment | None:
    """Return the environment of the launcher that started this process, if there is one."""
    try:
        found = next((kind() for kind in LAUNCHERS if kind.detect()), None)
    except RuntimeError as error:  # srun --ntasks without a number for each node
        raise RunError(f"{error} For caprmil: as many as --devices says.") from None
    return found


def _find_environment(devices: int, nodes: int) -> ProcessEnvironment:
    """Return the rank and the address of this process."""
    launcher = _detect_launcher()
    if launcher is None:
        names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
        given = [os.environ.get(name) for name in names]
        address, port, node = given if nodes > 1 else ("127.0.0.1", find_free_network_port(), 0)
        if address is None or port is None or node is None:
            raise RunError(
                f"--nodes {nodes} needs a launcher that starts all processes: srun or torchrun. "
                "Without one, set MASTER_ADDR, MASTER_PORT and NODE_RANK on each node."
            )
        return ProcessEnvironment(address, int(port), int(node), 0, devices, nodes)
    if launcher.world_size() != devices * nodes:
        raise RunError(
            f"{launcher.world_size()} processes were started, not --devices {devices} times "
            f"--nodes {nodes}. Start them with: "
            f"srun --nodes={nodes} --ntasks-per-node={devices} caprmil train ..."
        )
    return ProcessEnvironment(
        launcher.main_address,
        launcher.main_port,
        launcher.node_rank(),
        launcher.local_rank(),
        devices,
        nodes,
    )
