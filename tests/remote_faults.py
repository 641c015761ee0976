"""Faults of remote file systems, for tests."""

from pathlib import Path
from typing import Any

import fsspec
import pytest


def fail_uploads_after(patch: pytest.MonkeyPatch, puts: int) -> None:
    """Let uploads to memory fail after that many files, in the middle of the next one."""
    system = fsspec.get_filesystem_class("memory")
    put, left = system.put_file, [puts]

    def put_file(self: Any, local: str, path: str, **options: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            self.pipe_file(path, Path(local).read_bytes()[:10])
            raise OSError("the network is gone")
        put(self, local, path, **options)

    patch.setattr(system, "put_file", put_file)


def reset_connections(patch: pytest.MonkeyPatch) -> None:
    """Drop the connections to S3, which keep the methods of their creation."""
    system = fsspec.get_filesystem_class("s3")
    system.clear_instance_cache()
    patch.setattr(system, "_cache", {})
