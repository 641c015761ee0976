"""Models from the Hugging Face hub: by name, from the cache when offline, and clear errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from caprmil.errors import RecipeError, RunError
from caprmil.models import (
    ABMIL,
    CAPRMIL,
    MODELS,
    MILModel,
    create,
    list_models,
    register_model,
)


def test_a_name_is_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAPRMIL(24, 2, tokens=3)
    model.save_pretrained(tmp_path)
    requests = []

    def download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        requests.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = CAPRMIL.from_pretrained("somebody/caprmil-lymph-node")
    assert requests == [("somebody/caprmil-lymph-node", ["config.json", "model.safetensors"])]
    bag = torch.randn(1, 5, 24)
    torch.testing.assert_close(loaded(bag).logits, model.eval()(bag).logits)


def test_the_cache_of_the_hub_is_used_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--somebody--model" / "snapshots" / "0123abcd"
    CAPRMIL(24, 2).save_pretrained(snapshot)
    (tmp_path / "models--somebody--model" / "refs").mkdir()
    (tmp_path / "models--somebody--model" / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert isinstance(MILModel.from_pretrained("somebody/model"), CAPRMIL)


def test_without_network_and_folder_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RunError, match=r"There is no folder nobody/nothing[\s\S]*pass the path"):
        MILModel.from_pretrained("nobody/nothing")


def test_a_path_that_is_not_the_name_of_a_repository_is_refused() -> None:
    with pytest.raises(RunError, match="neither a folder nor the name of a repository"):
        MILModel.from_pretrained("no/such/folder")


def test_a_folder_with_another_model_is_refused(tmp_path: Path) -> None:
    CAPRMIL(24, 2).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="holds a CAPRMIL, not a ABMIL"):
        ABMIL.from_pretrained(tmp_path)


def test_a_config_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    CAPRMIL(24, 2).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tokens"', '"run_this"'))
    with pytest.raises(RecipeError, match="no setting called 'run_this'"):
        MILModel.from_pretrained(tmp_path)


def test_a_model_that_is_not_registered_is_not_saved(tmp_path: Path) -> None:
    class Mine(ABMIL):
        pass

    with pytest.raises(RecipeError, match="Mine is not registered"):
        Mine(24, 2).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.fixture
def _registry() -> Iterator[None]:
    """Restore MODELS after the test."""
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


@pytest.mark.usefixtures("_registry")
def test_a_registered_model_of_another_package_can_be_saved_and_loaded(tmp_path: Path) -> None:

    @register_model("mine")
    class Mine(ABMIL):
        pass

    model = create("mine", 24, 2, dim=8)
    assert type(model) is Mine
    model.save_pretrained(tmp_path)
    assert type(MILModel.from_pretrained(tmp_path)) is Mine
    assert "mine" in list_models()
    assert type(create("caprmil+mine", 24, 2).pool) is Mine


def test_a_name_is_registered_once() -> None:
    for name in ("caprmil", "gated"):
        with pytest.raises(ValueError, match=f"already a model or pool called '{name}'"):
            register_model(name)(type("Mine", (ABMIL,), {}))
    with pytest.raises(ValueError, match="letters, digits and _"):
        register_model("a+b")(ABMIL)
    assert register_model("abmil")(ABMIL) is ABMIL


def test_a_model_of_an_older_version_is_refused(tmp_path: Path) -> None:
    CAPRMIL(24, 3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["n_classes"] = config.pop("n_outputs")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"was saved by an older caprmil[\s\S]*train it again"):
        MILModel.from_pretrained(tmp_path)
