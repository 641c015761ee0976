"""Execute notebooks in place: python website/run_notebooks.py ENVIRONMENT NOTEBOOK_OR_FOLDER...

The kernel is the Python of ENVIRONMENT, where caprmil is installed. ipykernel comes from the
environment that runs this script, which must have the same version of Python.
"""

import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

SOURCE = Path(__file__).parents[1] / "src"
LAUNCH = """
import sys
sys.path.append({packages!r})
from ipykernel.kernelapp import launch_new_instance
launch_new_instance()
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LARGEST = 250_000  # bytes of a notebook


def main(environment: Path, paths: list[Path]) -> None:
    """Execute each notebook in a new folder, and write it back with its outputs."""
    os.environ["PATH"] = f"{environment.resolve() / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(SOURCE)
    os.environ["MPLBACKEND"] = "agg"  # that of ipykernel is not known to commands in cells
    with tempfile.TemporaryDirectory() as home:
        kernels = write_kernel(Path(home), environment.resolve() / "bin" / "python")
        for path in paths:
            start = time.perf_counter()
            size = execute(path, kernels)
            seconds = time.perf_counter() - start
            print(f"{path}: {seconds:.0f} s, {size:,} bytes")  # noqa: T201
            if size > LARGEST:
                sys.exit(f"{path} has more than {LARGEST:,} bytes. Make its pictures smaller.")


def write_kernel(home: Path, python: Path) -> KernelSpecManager:
    """Write the description of a kernel, and return a manager that finds it."""
    code = LAUNCH.format(packages=sysconfig.get_path("purelib"))
    kernel = {
        "argv": [str(python), "-c", code, "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    (home / "python3").mkdir()
    (home / "python3" / "kernel.json").write_text(json.dumps(kernel))
    return KernelSpecManager(kernel_dirs=[str(home)], ensure_native_kernel=False)


def execute(path: Path, kernels: KernelSpecManager) -> int:
    """Execute a notebook, keep its outputs without progress and times, and return its size."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
        NotebookClient(
            notebook, km=manager, timeout=600, resources={"metadata": {"path": folder}}
        ).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    nbformat.write(notebook, path)
    return path.stat().st_size


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return outputs with the pieces of what was printed in one, and without progress."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    for output in kept:  # at the end: a colour may be in two pieces
        if output.output_type == "stream":
            output.text = COLOUR.sub("", output.text)
    return kept


if __name__ == "__main__":
    named = [Path(word) for word in sys.argv[2:]]
    main(
        Path(sys.argv[1]),
        [
            each
            for path in named
            for each in ([path] if path.is_file() else sorted(path.glob("*.ipynb")))
        ],
    )
