"""Doctor: which checks it makes, and when a finding is bad."""

import shutil
from collections import namedtuple

import pytest

from caprmil.doctor import _gated_access, examine


def test_versions_devices_memory_and_disk_are_checked() -> None:
    found = {finding.what for finding in examine()}
    assert {"Python", "torch", "CPU", "bf16 on the CPU", "memory", "disk"} <= found


def test_a_full_disk_is_a_bad_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    full = namedtuple("full", "total used free")(100, 100, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert [finding.what for finding in examine() if not finding.good] == ["disk"]


def test_readers_encoders_and_access_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    found = {finding.what: finding for finding in examine()}
    assert found["OpenSlide"].found.startswith("4.")
    assert found["encoder lite0"].good
    assert found["gated encoders"].found == "not logged in"
    assert {"libvips", "timm", "transformers", "downloaded weights"} <= found.keys()


def test_access_is_checked_for_every_gated_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError

    class Api:
        def auth_check(self, hub: str) -> None:
            if hub != "MahmoodLab/UNI":
                raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert _gated_access(["MahmoodLab/UNI", "paige-ai/Virchow2"]).found == "MahmoodLab/UNI"


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def auth_check(self, hub: str) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert "cannot be reached" in _gated_access(["MahmoodLab/UNI"]).remark
