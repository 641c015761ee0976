"""The doctor: what it looks at, and that it can be dissatisfied."""

import shutil
from collections import namedtuple

import pytest

from caprmil.doctor import _gated_access, examine


def test_it_looks_at_versions_devices_memory_and_disk() -> None:
    seen = {finding.what for finding in examine()}
    assert {"Python", "torch", "CPU", "bf16 on the CPU", "memory", "disk here"} <= seen


def test_a_full_disk_is_a_bad_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    full = namedtuple("full", "total used free")(100, 100, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert [finding.what for finding in examine() if not finding.good] == ["disk here"]


def test_readers_encoders_and_access_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    found = {finding.what: finding for finding in examine()}
    assert found["OpenSlide"].found.startswith("4.")
    assert found["encoder lite0"].good
    assert found["gated encoders"].found == "no login"
    assert {"libvips", "timm", "transformers", "weights here"} <= found.keys()


def test_a_token_is_tried_on_every_gated_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError

    class Api:
        def auth_check(self, hub: str) -> None:
            if hub != "MahmoodLab/UNI":
                raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert _gated_access(["MahmoodLab/UNI", "paige-ai/Virchow2"]).found == "MahmoodLab/UNI"


def test_a_hub_out_of_reach_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def auth_check(self, hub: str) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert "cannot be reached" in _gated_access(["MahmoodLab/UNI"]).remark
