"""ExportedModel files predict bags of any size as the model does, or are not kept."""

import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from caprmil import export
from caprmil.cli import app
from caprmil.cohort.covariates import NumberColumn, column_table
from caprmil.errors import CaprmilError, ExportError, RecipeError, UnknownNameError
from caprmil.export import ExportedModel, model_export, model_files
from caprmil.features import bags
from caprmil.models import MODELS, FusedModel, MILModel, Output, create
from caprmil.runs.run import Run
from caprmil.targets import Regression

pytestmark = pytest.mark.slow

SUFFIXES = {name: kind.suffix for name, kind in export.FORMATS.items()}
SMALL: dict[str, dict[str, Any]] = {
    "caprmil": {"dim": 16, "heads": 2},
    "caprmil+attention": {"dim": 16, "heads": 4, "tokens": 8},  # projections that are not folded
    "caprmil+gated": {"dim": 16, "heads": 2, "depth": 2},
    "caprmil+abmil": {"dim": 16, "heads": 2},
    "mean": {"dim": 16},
    "abmil": {"dim": 16, "hidden": 8},
    "clam": {"dim": 16, "hidden": 8},
    "dsmil": {"hidden": 8},
    "bayesmil": {"dim": 16, "hidden": 8, "draws": 0},
}
REFUSED = {name: MODELS[name] for name in ("dtfd", "transmil", "dgrmil", "bayesmil", "sgpmil")}


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a file with two bags only, where the check itself is not tested."""
    monkeypatch.setattr(model_export, "SIZES", (1, 17))


def small(name: str, seed: int = 0) -> MILModel:
    torch.manual_seed(seed)
    return create(name, 24, 3, **SMALL[name]).eval()


@pytest.mark.parametrize("name", [name for name in SMALL if name != "bayesmil"])
def test_torchscript_predicts_bags_of_any_size_as_the_model_does(name: str, tmp_path: Path) -> None:
    written = export.export_model(small(name), tmp_path / "model.ts", to="torchscript")
    assert written.deviation < 1e-6  # at 1, 2, 17, 1,000 and 5,000 patches
    assert written.path.exists()


def test_the_deviation_of_large_numbers_is_relative_to_their_scale(tmp_path: Path) -> None:
    target = Regression().fit([1e6, 2e6, 5e6])  # float32 has a resolution of 0.25 here
    torch.manual_seed(0)
    model = create("abmil", 24, 1, **SMALL["abmil"]).eval()
    path = tmp_path / "model.ts"
    assert export.export_model(model, path, to="torchscript", targets=[target]).deviation < 1e-5


def test_torch_export_predicts_as_the_model_does(tmp_path: Path) -> None:
    """One model here; the slow test below has all of them, and ONNX."""
    assert export.export_model(small("bayesmil"), tmp_path / "m.pt2", to="pt2").deviation < 1e-5


@pytest.mark.parametrize("to", ["pt2", "onnx"])
@pytest.mark.parametrize("name", SMALL)
def test_every_model_predicts_the_same_in_every_format(name: str, to: str, tmp_path: Path) -> None:
    assert export.export_model(small(name), tmp_path / f"m.{to}", to=to).deviation < 1e-5


@pytest.mark.parametrize(
    ("to", "how"),
    [*((to, "film") for to in SUFFIXES), ("torchscript", "concatenation"), ("torchscript", "late")],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_sizes")
def test_a_model_with_covariates_reads_them_as_a_second_input(
    to: str, how: str, tmp_path: Path
) -> None:
    columns = [column_table(NumberColumn(name="age", mean=60.0, std=8.0, missing=0.1))]
    model = FusedModel(24, 3, image=small("caprmil"), columns=columns, how=how, dim=8).eval()
    torch.nn.init.normal_(model.classify.weight)
    written = export.export_model(model, tmp_path / f"m{SUFFIXES[to]}", to=to)
    assert written.deviation < 1e-5
    assert export.read_metadata(written.path)["covariates"] == columns
    assert "covariates" in written.usage
    bag = np.random.default_rng(0).normal(size=(9, 24)).astype(np.float32)
    for values in ([0.5, -0.1], [2.0, 0.9]):
        covariates = np.array(values, dtype=np.float32)
        answer, *_ = export.FORMATS[to].open(written.path)(bag, covariates)
        with torch.no_grad():
            expected = model(torch.from_numpy(bag)[None], covariates=torch.tensor([values]))
        np.testing.assert_allclose(answer, expected.logits[0].softmax(dim=-1), atol=1e-5)


@pytest.mark.parametrize("to", SUFFIXES)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_sizes")
def test_two_streams_are_exported_as_the_mean_of_their_probabilities(
    to: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = create("dsmil", 24, 3, hidden=8, both_streams=True).eval()
    written = export.export_model(model, tmp_path / f"m{SUFFIXES[to]}", to=to)
    assert written.deviation < 1e-5


@pytest.mark.filterwarnings("ignore")  # torch calls TorchScript deprecated
@pytest.mark.usefixtures("few_sizes")
def test_several_models_are_exported_as_their_mean(tmp_path: Path) -> None:
    models = [small("caprmil", seed) for seed in range(2)]
    written = export.export_model(models, tmp_path / "model.ts", to="torchscript")
    bag = torch.randn(40, 24)
    probabilities, logits, attention = map(
        torch.from_numpy, export.FORMATS["torchscript"].open(written.path)(bag.numpy())
    )
    with torch.no_grad():
        mean = torch.stack([m(bag[None]).logits[0].softmax(dim=-1) for m in models]).mean(dim=0)
    torch.testing.assert_close(probabilities, mean)
    torch.testing.assert_close(logits.softmax(dim=-1), mean)
    assert attention.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_exported_is_refused_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=REFUSED[name].__name__):
        export.export_model(create(name, 24, 3).eval(), tmp_path / "model.pt2", to="pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_submodel_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"TransMIL cannot .* Use caprmil predict"):
        export.export_model(
            create("caprmil+transmil", 24, 3).eval(), tmp_path / "m.ts", to="torchscript"
        )


def test_a_file_that_works_for_one_size_only_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"does not run on a bag of 5000 .* It was not kept"):
        export.export_model(small("bayesmil"), tmp_path / "model.ts", to="torchscript")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_deviates_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropping(MODELS["mean"]):  # type: ignore[name-defined,misc]
        def forward_bags(self, features: Any, mask: Any, grid: Any) -> Output:
            return super().forward_bags(features, mask, grid)

        def stream_bag(self, chunks: Any, *, keep: bool) -> Output:
            return super().stream_bag(lambda: [next(iter(chunks()))[:, :1]], keep=keep)

    torch.manual_seed(0)
    with pytest.raises(ExportError, match=r"(probabilities|attention) by .* 0.0001 is allowed"):
        export.export_model(Dropping(24, 3).eval(), tmp_path / "model.ts", to="torchscript")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_torch_cannot_trace_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Branching(MODELS["mean"]):  # type: ignore[name-defined,misc]
        def forward_bags(self, features: Any, mask: Any, grid: Any) -> Output:
            return super().forward_bags(features if features.sum() > 0 else -features, mask, grid)

    with pytest.raises(ExportError, match=r"Branching cannot be exported to pt2: .*data-dependent"):
        export.export_model(Branching(24, 3).eval(), tmp_path / "model.pt2", to="pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def exported(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    """The first fold of a run as ONNX."""
    out = tmp_path_factory.mktemp("exported") / "model.onnx"
    return export.export_run(tiny_run, "onnx", out, fold=tiny_run.done[0].name)[0]


def test_a_file_holds_its_metadata(tiny_run: Run, exported: ExportedModel) -> None:
    metadata = export.read_metadata(exported.path)
    assert metadata["target"]["classes"] == list(tiny_run.target.names)
    assert metadata["fold"] == tiny_run.done[0].name
    assert metadata["outputs"] == ["probabilities", "logits", "attention", "assignments_1"]
    assert {"encoder", "fingerprint", "mpp", "patch_px", "caprmil", "model"} <= metadata.keys()


def test_an_onnx_file_runs_without_torch(
    tiny_run: Run, exported: ExportedModel, tmp_path: Path
) -> None:
    bag = tiny_run.bag_paths()[0]
    np.save(tmp_path / "bag.npy", bags.read(bag).features.astype(np.float32))
    code = f"""
import json, sys, numpy, onnxruntime
features = numpy.load({str(tmp_path / "bag.npy")!r})
{exported.usage}
facts = json.loads(session.get_modelmeta().custom_metadata_map["caprmil.json"])
assert "torch" not in sys.modules
classes = facts["target"]["classes"]
print(json.dumps([classes, probabilities.tolist(), attention.shape, features.shape]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    classes, probabilities, shares, shape = json.loads(result.stdout)
    expected = tiny_run.predict({"bag": bag}, fold=exported.metadata["fold"], device="cpu")
    assert (classes, shares) == (list(expected.target.names), shape[:1])
    np.testing.assert_allclose(probabilities, expected.answers[0], atol=1e-5)


@pytest.mark.parametrize("to", ["pt2", "torchscript"])
def test_torch_files_hold_the_same_metadata(to: str, tmp_path: Path) -> None:
    written = export.export_model(
        small("mean"), tmp_path / f"m{SUFFIXES[to]}", to=to, metadata={"fold": "a"}
    )
    assert export.read_metadata(written.path) == {**written.metadata}


@pytest.mark.filterwarnings("ignore")
def test_other_files_have_no_metadata(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"end in \.onnx, \.pt2, \.ts"):
        export.read_metadata(tmp_path / "model.safetensors")
    scripted = torch.jit.script(torch.nn.Linear(2, 2))  # type: ignore[no-untyped-call]
    scripted.save(str(tmp_path / "other.ts"))
    with pytest.raises(ExportError, match="was not written by caprmil export"):
        export.read_metadata(tmp_path / "other.ts")


class Executes:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("to", ["pt2", "torchscript"])
def test_reading_the_metadata_runs_nothing_in_the_file(to: str, tmp_path: Path) -> None:
    metadata = {"fold": "a"}
    path = tmp_path / f"m{SUFFIXES[to]}"
    written = export.export_model(small("mean"), path, to=to, metadata=metadata)
    hostile, marker = tmp_path / f"hostile{path.suffix}", tmp_path / "executed"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(hostile, "w") as new:
        for name in old.namelist():
            pickled = name.endswith((".pt", ".pkl"))
            new.writestr(name, pickle.dumps(Executes(marker)) if pickled else old.read(name))
    assert export.read_metadata(hostile) == {**written.metadata}
    assert not marker.exists()


@pytest.mark.parametrize("to", SUFFIXES)
def test_a_damaged_file_is_an_error_of_one_line(to: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{SUFFIXES[to]}"
    export.export_model(small("mean"), path, to=to, metadata={"fold": "a"})
    whole, broken = path.read_bytes(), tmp_path / f"broken{path.suffix}"
    for content in (b"", b"no archive", whole[:-100], whole[: len(whole) // 2]):
        broken.write_bytes(content)
        with pytest.raises(ExportError, match=r"is damaged|was not written by caprmil export"):
            export.read_metadata(broken)
    with pytest.raises(ExportError, match="cannot be read: No such file"):
        export.read_metadata(tmp_path / f"missing{path.suffix}")


def test_existing_files_are_not_overwritten(tiny_run: Run, tmp_path: Path) -> None:
    there = tmp_path / f"{tiny_run.done[-1].name}.ts"
    there.write_text("existing")
    with pytest.raises(CaprmilError, match="already exists"):
        export.export_run(tiny_run, "torchscript", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["existing"]


@pytest.mark.usefixtures("few_sizes")
def test_an_export_that_was_stopped_between_two_folds_is_completed(
    tiny_run: Run, tmp_path: Path
) -> None:
    first, *others = export.export_run(tiny_run, "torchscript", tmp_path)
    for each in others:
        each.path.unlink()  # as if the process had been killed after the first file
    again = export.export_run(tiny_run, "torchscript", tmp_path)
    assert [each.path for each in again] == [first.path, *(each.path for each in others)]
    assert all(each.path.exists() for each in again)
    first.path.replace(others[-1].path)  # a file of another fold is not ours to replace
    with pytest.raises(CaprmilError, match="already exists"):
        export.export_run(tiny_run, "torchscript", tmp_path)


def test_several_folds_need_a_folder_or_a_choice(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"3 folds. Pass a folder, or choose --fold"):
        export.export_run(tiny_run, "torchscript", tmp_path / "all.ts")
    with pytest.raises(ExportError, match="leave out --fold or --ensemble"):
        export.export_run(tiny_run, "torchscript", tmp_path, fold="fold-0", ensemble=True)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        model_files, "find_spec", lambda name: None if name == "onnxruntime" else name
    )
    with pytest.raises(ExportError, match=r"needs onnxruntime. Install: pip install 'caprmil\[on"):
        model_files.find_format("onnx")
    with pytest.raises(UnknownNameError, match="Did you mean 'onnx'"):
        model_files.find_format("onxx")


def test_a_setting_of_the_model_can_be_changed(tmp_path: Path, tiny_run: Run) -> None:
    assert export.parse_changes(["draws=0"]) == {"draws": 0}
    with pytest.raises(RecipeError, match="no setting called 'draws'"):
        export.export_run(tiny_run, "pt2", tmp_path, changes={"draws": 0})


@pytest.mark.usefixtures("few_sizes")
def test_the_command_writes_each_fold_and_prints_how_to_run_it(
    tiny_run: Run, tmp_path: Path
) -> None:
    command = ["export", str(tiny_run.folder), "--to", "torchscript", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert {path.stem for path in tmp_path.iterdir()} == {fold.name for fold in tiny_run.done}
    assert "largest deviation" in result.output
    assert "assignments_1 = program(features)" in result.output


@pytest.mark.usefixtures("few_sizes")
def test_the_command_writes_the_mean_of_all_folds(tiny_run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mean.ts"
    command = ["export", str(tiny_run.folder), "--to", "torchscript", "--out", str(file)]
    result = CliRunner().invoke(app, [*command, "--ensemble"])
    assert result.exit_code == 0, result.output
    assert export.read_metadata(file)["folds"] == [fold.name for fold in tiny_run.done]


def test_a_run_without_its_bags_is_checked_with_random_numbers(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "bag_paths", lambda run: [tmp_path / "gone.h5"])
    assert model_export._example_features(tiny_run) is None
