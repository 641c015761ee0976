"""The scripts of docs/slurm.md run on one machine with stand-ins for the programs of SLURM."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from caprmil import config
from caprmil.features import bags
from caprmil.runs.run import Run
from caprmil.synthetic import Section
from caprmil.training.distributed import find_free_network_port
from caprmil.training.recipe import Recipe
from executor_workers import RAY_ENVIRONMENT

PAGE = Path(__file__).parents[1] / "docs" / "slurm.md"
SCRIPTS = dict(
    zip(
        ("encode", "train", "ray"),
        re.findall(r"```bash\n(#!/bin/bash.*?)```", PAGE.read_text(), re.S),
        strict=True,
    )
)
CAPRMIL = f'#!/bin/bash\nexec "{sys.executable}" -m caprmil "$@"\n'
# Starts a process per task of the job, each with its variables of SLURM, and waits for all.
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) \\
        SLURM_NODEID=$((rank / SLURM_NTASKS_PER_NODE)) "$@" & started+=($!)
done
for process in "${started[@]}"; do wait "$process" || exit 1; done
"""
# Starts one process, and ignores all options.
SRUN_ONE = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
HOSTS = "#!/bin/bash\necho localhost\n"


def run(
    script: str, home: Path, *, srun: str = SRUN, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run a script with our own `caprmil`, `srun` and `scontrol` in the path."""
    for name, text in {"caprmil": CAPRMIL, "srun": srun, "scontrol": HOSTS}.items():
        program = home / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "RAY_worker_niceness": RAY_ENVIRONMENT["RAY_worker_niceness"],
        **{name: str(value) for name, value in variables.items()},
    }
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
    return subprocess.run(["bash", "-c", script], cwd=home, env=environment, **options)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_are_valid_bash(name: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=SCRIPTS[name], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_devices_and_nodes_equal_those_of_the_job(name: str) -> None:
    options = dict(re.findall(r"^#SBATCH --(\S+?)=(\S+)", SCRIPTS[name], re.M))
    if "--devices" in SCRIPTS[name]:
        assert f"--devices {options['ntasks-per-node']} --nodes {options['nodes']}" in SCRIPTS[name]
        assert options["gpus-per-node"] == options["ntasks-per-node"]
    if "--shard" in SCRIPTS[name]:
        assert options["array"].startswith("1-")


@pytest.mark.slow
def test_the_array_encodes_every_slide_once(tmp_path: Path) -> None:
    for seed in range(3):
        Section(seed=seed, width=600, height=600).write(tmp_path / "slides" / f"s{seed}.tiff")
    script = SCRIPTS["encode"].replace("--encoder uni ", "")
    made: set[str] = set()
    for task in (1, 2):
        ended = run(
            script,
            tmp_path,
            SLIDES=tmp_path / "slides",
            SLURM_ARRAY_TASK_ID=task,
            SLURM_ARRAY_TASK_COUNT=2,
            SLURM_CPUS_PER_TASK=1,
        )
        assert ended.returncode == 0, ended.stderr
        found = {path.stem for path in (tmp_path / "features").glob("*.h5")}
        assert found - made == ({"s0", "s2"} if task == 1 else {"s1"})
        made = found
    assert (tmp_path / "features" / "qc.csv").read_text().count("\n") == 4
    assert bags.inspect(tmp_path / "features" / "s1.h5").encoder == "lite0"


@pytest.mark.slow
def test_one_training_runs_on_two_nodes(tmp_path: Path, tiny_recipe: Recipe) -> None:
    (tmp_path / "recipe.toml").write_text(config.dump(tiny_recipe))
    script = SCRIPTS["train"].replace("--devices 4", "--no-mean --device cpu --devices 1")
    ended = run(
        script,
        tmp_path,
        RECIPE="recipe.toml",
        SLURM_NTASKS=2,
        SLURM_NTASKS_PER_NODE=1,
        SLURM_NNODES=2,
        SLURM_NODELIST="127.0.0.1",
        SLURM_JOB_NAME="train",
        SLURM_CPUS_PER_TASK=1,
        MASTER_PORT=find_free_network_port(),
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Written to runs/large") == 1
    assert Run(tmp_path / "runs" / "large").finished


@pytest.mark.slow
def test_ray_on_two_nodes_encodes_and_trains(tmp_path: Path, tiny_recipe: Recipe) -> None:
    for seed in range(3):
        Section(seed=seed, width=600, height=600).write(tmp_path / "slides" / f"s{seed}.tiff")
    (tmp_path / "recipe.toml").write_text(config.dump(tiny_recipe))
    changes = {
        "--encoder uni ": "--mpp 1 ",
        "--features features ": "--no-mean ",
        "6379": str(find_free_network_port()),
    }
    script = SCRIPTS["ray"]
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    ended = run(
        script,
        tmp_path,
        srun=SRUN_ONE,
        HOME=tmp_path,
        SLIDES=tmp_path / "slides",
        RECIPE="recipe.toml",
        SLURM_NNODES=2,
        SLURM_JOB_NODELIST="localhost",
        SLURM_CPUS_PER_TASK=1,
        OMP_NUM_THREADS=1,
    )
    assert ended.returncode == 0, ended.stderr
    assert {path.stem for path in (tmp_path / "features").glob("*.h5")} == {"s0", "s1", "s2"}
    assert Run(tmp_path / "runs" / "first").finished
