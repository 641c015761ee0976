"""Models from the Hugging Face hub: by name, from the cache when offline, or a clear refusal."""

from pathlib import Path

import pytest
import torch

from caprmil.errors import RecipeError, RunError
from caprmil.models import ABMIL, CAPRMIL, MILModel


def test_a_name_is_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAPRMIL(24, 2, tokens=3)
    model.save_pretrained(tmp_path)
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = CAPRMIL.from_pretrained("somebody/caprmil-lymph-node")
    assert asked == [("somebody/caprmil-lymph-node", ["config.json", "model.safetensors"])]
    bag = torch.randn(1, 5, 24)
    torch.testing.assert_close(loaded(bag).logits, model.eval()(bag).logits)


def test_the_hubs_own_cache_serves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--somebody--model" / "snapshots" / "0123abcd"
    CAPRMIL(24, 2).save_pretrained(snapshot)
    (tmp_path / "models--somebody--model" / "refs").mkdir()
    (tmp_path / "models--somebody--model" / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert isinstance(MILModel.from_pretrained("somebody/model"), CAPRMIL)


def test_without_network_and_folder_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RunError, match=r"There is no folder nobody/nothing[\s\S]*pass the folder"):
        MILModel.from_pretrained("nobody/nothing")


def test_a_path_that_is_no_name_is_refused() -> None:
    with pytest.raises(RunError, match="neither a folder nor a repository"):
        MILModel.from_pretrained("no/such/folder")


def test_a_folder_with_another_model_is_refused(tmp_path: Path) -> None:
    CAPRMIL(24, 2).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="holds a CAPRMIL, not a ABMIL"):
        ABMIL.from_pretrained(tmp_path)


def test_a_strangers_config_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    CAPRMIL(24, 2).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tokens"', '"run_this"'))
    with pytest.raises(RecipeError, match="no setting called 'run_this'"):
        MILModel.from_pretrained(tmp_path)


def test_a_model_that_nobody_could_load_is_not_saved(tmp_path: Path) -> None:
    class Mine(ABMIL):
        pass

    with pytest.raises(RecipeError, match="Mine is not registered"):
        Mine(24, 2).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
