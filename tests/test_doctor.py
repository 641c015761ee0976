"""The doctor: what it looks at, and that it can be dissatisfied."""

import shutil
from collections import namedtuple

import pytest

from caprmil.doctor import examine


def test_it_looks_at_versions_devices_memory_and_disk() -> None:
    seen = {finding.what for finding in examine()}
    assert {"Python", "torch", "CPU", "bf16 on the CPU", "memory", "disk here"} <= seen


def test_a_full_disk_is_a_bad_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    full = namedtuple("full", "total used free")(100, 100, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert [finding.what for finding in examine() if not finding.good] == ["disk here"]
