"""Bags: reading the files of every tool (built here as the tool writes them), and writing."""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from caprmil.cohort.found_bags import find_bags
from caprmil.encoders import Card, load
from caprmil.errors import BagError, CaprmilError
from caprmil.explain import locate_slide
from caprmil.features import bags
from caprmil.features.extract import Extraction
from caprmil.features.settings import configure
from caprmil.runs.run import Run
from caprmil.slides.slide import find_slides
from caprmil.synthetic import Section

N, E = 5, 8
FEATURES = np.random.default_rng(0).normal(size=(N, E)).astype(np.float32)
CELLS = np.array([[0, 0], [1, 0], [3, 0], [1, 1], [1, 4]])  # column and row, with gaps


def h5(path: Path, metadata: dict[str, Any] | None = None, **arrays: Any) -> Path:
    """Write datasets and attributes: by dataset name, or '' for the file."""
    with h5py.File(path, "w") as file:
        for name, data in arrays.items():
            file[name] = data
        for holder, attributes in (metadata or {}).items():
            (file[holder] if holder else file).attrs.update(attributes)
    return path


def trident(
    path: Path, features: Any = FEATURES, coords: Any = CELLS * 448, **changes: Any
) -> Path:
    """Write 256 px patches at 20x with 32 px overlap on a 40x slide, with floats as since 0.3."""
    on_coords = {
        "patch_size": 256,
        "patch_size_level0": 512.0,
        "level0_magnification": 40,
        "target_magnification": 20.0,
        "overlap": 32,
        "name": "slide",
        "savetodir": "/data/patches",
        "level0_width": 90_000,
        "level0_height": 60_000,
    }
    on_features = {"name": "slide", "savetodir": "/data/features", "encoder": "uni_v1"}
    for name, value in changes.items():
        (on_features if name in on_features else on_coords)[name] = value
    metadata = {"features": on_features, "coords": on_coords}
    return h5(path, metadata, features=features, coords=coords)


def stamp(path: Path, coords: Any = CELLS * 256.0, **attributes: Any) -> Path:
    return h5(path, {"": attributes}, feats=np.float16(FEATURES), coords=coords)


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def pt(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


class Exploit:
    """Unpickling it would create a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slide.h5"


# The format of caprmil


def test_a_written_bag_is_read_back(path: Path) -> None:
    metadata: dict[str, Any] = {
        "encoder": "uni_v1",
        "mpp": 0.5,
        "scale_rule": "exact",
        "patch_px": 256,
        "patch_level0": 512.5,
        "step": 512.5,
        "slide_size": (900, 600),
        "slide_path": "/data/slides/slide.svs",
    }
    bag = bags.read(bags.write(path, FEATURES, CELLS * 512, dtype="float32", **metadata))
    np.testing.assert_array_equal(bag.features, FEATURES)
    np.testing.assert_array_equal(bag.coords, CELLS * 512)
    assert bag.info == bags.BagInfo(
        path=path, kind="caprmil", n_patches=N, width=E, dtype="float32", unit="px", **metadata
    )


def test_the_path_of_the_slide_is_an_attribute(path: Path) -> None:
    bags.write(path, FEATURES, slide_path="s3://bucket/slide.svs")
    with h5py.File(path) as file:
        assert file.attrs["slide_path"] == "s3://bucket/slide.svs"
    assert bags.inspect(path).slide_path == "s3://bucket/slide.svs"


def test_without_a_path_of_the_slide_a_bag_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """Bags of earlier versions have no such attribute, and are read with None."""
    metadata: dict[str, Any] = {"encoder": "uni_v1", "mpp": 0.5, "slide_size": (900, 600)}
    coords = np.asarray(CELLS * 512, dtype=np.int64)
    path = bags.write(tmp_path / "new.h5", FEATURES, coords, **metadata)
    old = BytesIO()  # with a file on disk, HDF5 puts the same parts in another order
    with h5py.File(old, "w") as file:  # as version 0.1.0 wrote it
        dataset = file.create_dataset("features", FEATURES.shape, "float16")
        file.create_dataset("coords", data=coords)
        file.attrs.update(
            caprmil_schema=1, encoder="uni_v1", mpp=0.5, slide_width=900, slide_height=600
        )
        dataset[:] = FEATURES.astype(np.float16)
    assert path.read_bytes() == old.getvalue()
    assert bags.inspect(path).slide_path is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    features=hnp.arrays(
        np.float16,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
        elements=st.floats(-60_000, 60_000, width=16),
    )
)
def test_half_precision_is_bit_exact(path: Path, features: Any) -> None:
    path.unlink(missing_ok=True)
    bag = bags.read(bags.write(path, features))
    assert bag.features.dtype == np.float16
    assert bag.features.tobytes() == features.tobytes()


def test_the_file_has_plain_datasets_and_attributes(path: Path) -> None:
    bags.write(path, FEATURES, CELLS, encoder="uni_v1", attributes={"scanner": "GT450"})
    with h5py.File(path) as file:
        assert file["features"].dtype == np.float16
        assert file["features"].chunks is None
        assert file["features"].compression is None
        assert file["coords"].dtype == np.int64
        assert dict(file.attrs) == {"caprmil_schema": 1, "encoder": "uni_v1", "scanner": "GT450"}


def test_a_bag_needs_no_coordinates(path: Path) -> None:
    bag = bags.read(bags.write(path, FEATURES))
    assert bag.coords is None
    assert bag.info.unit is None
    assert bag.grid() is None


def test_a_file_is_never_overwritten(path: Path) -> None:
    bags.write(path, FEATURES)
    before = path.read_bytes()
    with pytest.raises(BagError, match="already exists"):
        bags.write(path, FEATURES + 1)
    assert path.read_bytes() == before


def test_a_failed_write_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CaprmilError, match=r"slide\.h5 cannot be written \(No space left"):
        bags.write(path, FEATURES)
    assert list(path.parent.iterdir()) == []


def test_a_killed_write_leaves_only_a_hidden_file(path: Path) -> None:
    script = (
        "import os, sys, numpy; from caprmil.features import bags\n"
        "os.fsync = lambda _: os._exit(9)\n"
        "bags.write(sys.argv[1], numpy.ones((3, 4)))"
    )
    assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == 9
    assert not path.exists()
    assert [left.name[0] for left in path.parent.iterdir()] == ["."]
    assert bags.group_by_slide(path.parent.iterdir()) == {}


def test_missing_folders_are_created(tmp_path: Path) -> None:
    assert bags.write(tmp_path / "new" / "slide.h5", FEATURES).is_file()


def test_values_too_large_for_half_precision_are_refused(path: Path) -> None:
    with pytest.raises(BagError, match=r'up to 7e\+04 do not fit into float16. .*dtype="float32"'):
        bags.write(path, FEATURES + 70_000 * (np.arange(E) == 1))
    bags.write(path, np.full((2, 3), 70_000.0), dtype="float32")
    assert bags.read(path).features.max() == 70_000


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_only_finite_values_are_written(path: Path, bad: float) -> None:
    with pytest.raises(BagError, match=r"2 of 5 patches have NaN or infinite.* in row 1"):
        bags.write(path, np.where(np.arange(N)[:, None] % 2, bad, FEATURES))
    assert not path.exists()


def test_coordinates_are_written_as_integers(path: Path) -> None:
    with pytest.raises(BagError, match="integer level-0 pixels"):
        bags.write(path, FEATURES, CELLS * 256.3)
    coords = bags.read(bags.write(path, FEATURES, CELLS * 256.0)).coords
    assert coords is not None
    assert coords.dtype == np.int64


def test_only_hdf5_is_written(tmp_path: Path) -> None:
    with pytest.raises(BagError, match=r"as '\.pt'. Use \.h5"):
        bags.write(tmp_path / "slide.pt", FEATURES)


@pytest.mark.parametrize(
    "mistake",
    [{"attributes": {"mpp": 1}}, {"dtype": "int8"}, {"scale_rule": "guess"}, {"step": 0}],
)
def test_invalid_arguments_are_value_errors(path: Path, mistake: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(mistake.get("attributes", mistake)))):
        bags.write(path, FEATURES, **mistake)


def test_a_later_schema_is_refused(path: Path) -> None:
    h5(path, {"": {"caprmil_schema": 2}}, features=FEATURES)
    with pytest.raises(BagError, match=r"schema 2, .* up to 1\. Upgrade caprmil"):
        bags.inspect(path)


# Formats of other tools


def test_all_metadata_of_trident_is_read(path: Path) -> None:
    assert bags.read(trident(path)).info == bags.BagInfo(
        path=path,
        kind="trident",
        n_patches=N,
        width=E,
        dtype="float32",
        encoder="uni_v1",
        mpp=0.5,
        scale_rule="nominal",
        patch_px=256,
        patch_level0=512,
        step=448,  # an overlap of 32 pixels at 20x is 64 pixels at 40x
        unit="px",
        slide_size=(90_000, 60_000),
    )


def test_integer_attributes_of_older_trident_files_are_read(path: Path, tmp_path: Path) -> None:
    old = trident(tmp_path / "old.h5", patch_size_level0=512, target_magnification=20)
    old_info, info = bags.inspect(old), bags.inspect(trident(path))
    assert (old_info.mpp, old_info.step) == (info.mpp, info.step)


def test_the_text_none_of_trident_is_none(path: Path) -> None:
    info = bags.inspect(trident(path, encoder="None", target_magnification="None", overlap="None"))
    assert (info.encoder, info.mpp, info.scale_rule) == (None, None, None)
    assert info.step == 512


def test_the_step_is_inferred_for_a_trident_file_without_sizes(path: Path) -> None:
    info = bags.inspect(trident(path, patch_size_level0="None"))
    assert (info.kind, info.patch_level0, info.step) == ("trident", None, 448)


def test_the_step_of_a_clam_file_is_inferred(path: Path) -> None:
    h5(path, features=FEATURES, coords=(CELLS * 256).astype(np.int32))
    bag = bags.read(path)
    assert (bag.info.kind, bag.info.step, bag.info.unit) == ("clam", 256, "px")
    np.testing.assert_array_equal(bag.grid(), CELLS)


def test_the_step_is_inferred_across_separate_contour_grids(path: Path) -> None:
    square = np.stack(np.meshgrid(range(4), range(4)), axis=-1).reshape(-1, 2) * 256
    coords = np.concatenate([square + corner for corner in ([0, 0], [613, 77], [301, 1999])])
    bag = bags.read(h5(path, features=np.ones((48, E), np.float32), coords=coords))
    assert bag.info.step == 256


def test_stamp_coordinates_are_in_micrometres(path: Path) -> None:
    stamp(
        path,
        stamp_version="2.4.0",
        extractor="virchow2",
        unit="um",
        tile_size_um=256.0,
        tile_size_px=224,
        feat_type="tile",
    )
    bag = bags.read(path)
    assert (bag.info.kind, bag.info.unit, bag.info.step) == ("stamp", "um", 256)
    assert (bag.info.encoder, bag.info.dtype, bag.info.patch_px) == ("virchow2", "float16", 224)
    assert (bag.info.mpp, bag.info.scale_rule) == (256 / 224, "exact")
    np.testing.assert_array_equal(bag.grid(), CELLS)


def test_older_stamp_files_have_one_size(path: Path) -> None:
    info = bags.inspect(stamp(path, unit="um", tile_size=256.0))
    assert (info.kind, info.unit, info.step, info.mpp) == ("stamp", "um", 256, None)


def test_pixels_of_early_stamp_files_become_micrometres(path: Path) -> None:
    bag = bags.read(stamp(path, coords=CELLS * 224))
    assert (bag.info.unit, bag.info.step, bag.info.mpp) == ("um", 256, 256 / 224)
    np.testing.assert_allclose(bag.coords, CELLS * 256)


@pytest.mark.parametrize("name", ["patch_embeddings", "embeddings"])
def test_features_are_found_under_other_names(path: Path, name: str) -> None:
    bag = bags.read(h5(path, coordinates=CELLS * 9, **{name: FEATURES}))
    assert (bag.info.kind, bag.info.step, bag.info.unit) == ("h5", 9, None)
    np.testing.assert_array_equal(bag.features, FEATURES)


def test_a_plain_array_is_a_bag(tmp_path: Path) -> None:
    np.save(tmp_path / "slide.npy", np.asfortranarray(FEATURES))
    bag = bags.read(tmp_path / "slide.npy")
    assert bag.info.kind == "npy"
    assert bag.features.flags["C_CONTIGUOUS"]
    assert bag.features.flags["OWNDATA"] or bag.features.base.flags["OWNDATA"]
    np.testing.assert_array_equal(bag.features, FEATURES)


@pytest.mark.parametrize("name", ["features", "feats", "embeddings", "arr_0"])
def test_a_npz_file_may_have_coordinates(tmp_path: Path, name: str) -> None:
    bag = bags.read(npz(tmp_path / "slide.npz", coords=CELLS, **{name: FEATURES}))
    np.testing.assert_array_equal(bag.features, FEATURES)
    np.testing.assert_array_equal(bag.coords, CELLS)


@pytest.mark.parametrize(
    "content",
    [
        torch.from_numpy(FEATURES),  # CLAM
        FEATURES,  # TRIDENT
        {"features": torch.from_numpy(FEATURES), "slide": "a"},
        {"anything": FEATURES},
        list(torch.from_numpy(FEATURES)),
        [FEATURES[:2], FEATURES[2:]],
        torch.from_numpy(FEATURES)[None],
        torch.nn.Parameter(torch.from_numpy(FEATURES)),
    ],
    ids=["tensor", "array", "dict", "lone", "vectors", "chunks", "batch", "parameter"],
)
def test_a_pt_file_may_have_tensors_or_arrays(tmp_path: Path, content: Any) -> None:
    bag = bags.read(pt(tmp_path / "slide.pt", content))
    assert (bag.info.kind, bag.info.dtype) == ("pt", "float32")
    np.testing.assert_array_equal(bag.features, FEATURES)


def test_a_pt_file_may_have_coordinates(tmp_path: Path) -> None:
    content = {"feats": torch.from_numpy(FEATURES), "coords": torch.from_numpy(CELLS * 7)}
    bag = bags.read(pt(tmp_path / "slide.pt", content))
    assert bag.info.step == 7
    np.testing.assert_array_equal(bag.coords, CELLS * 7)


def test_arrays_pickled_by_another_numpy_are_read(tmp_path: Path) -> None:
    path = pt(tmp_path / "slide.pt", FEATURES)
    torch.save(FEATURES, path, _use_new_zipfile_serialization=False)
    pickled = path.read_bytes()
    assert pickled.count(b"numpy._core.") == 1
    path.write_bytes(pickled.replace(b"numpy._core.", b"numpy.core."))
    np.testing.assert_array_equal(bags.read(path).features, FEATURES)


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    tensor = torch.from_numpy(FEATURES).bfloat16()
    bag = bags.read(pt(tmp_path / "slide.pt", tensor))
    assert (bag.info.dtype, bag.features.dtype) == ("bfloat16", np.float32)
    np.testing.assert_array_equal(bag.features, tensor.float())


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    exploit = Exploit(tmp_path / "harm")
    for content in (exploit, {"features": FEATURES, "more": exploit}):
        path = pt(tmp_path / "slide.pt", content)
        with pytest.raises(BagError, match="was not unpickled"):
            bags.read(path)
    path.write_bytes(pickle.dumps(exploit))
    with pytest.raises(BagError):
        bags.read(path)
    assert not (tmp_path / "harm").exists()


def test_safe_classes_are_not_registered_globally(tmp_path: Path) -> None:
    bags.read(pt(tmp_path / "slide.pt", FEATURES))
    assert np.ndarray not in torch.serialization.get_safe_globals()


def test_pt_files_can_be_read_in_threads(tmp_path: Path) -> None:
    paths = [pt(tmp_path / f"{number}.pt", FEATURES + number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(bags.read, paths * 10))
    for number, bag in enumerate(read):
        np.testing.assert_array_equal(bag.features, FEATURES + number % 8)


# Arrays


@pytest.mark.parametrize(
    ("stored", "kept"), [("f2", "f2"), ("f4", "f4"), ("f8", "f4"), (">f4", "f4"), (">f2", "f2")]
)
def test_half_and_single_precision_are_kept(path: Path, stored: str, kept: str) -> None:
    bag = bags.read(h5(path, features=FEATURES.astype(stored)))
    assert bag.features.dtype == np.dtype(kept)
    assert bag.info.dtype == str(np.dtype(stored))


def test_a_batch_of_one_bag_is_a_bag(path: Path) -> None:
    bag = bags.read(h5(path, features=FEATURES[None], coords=CELLS[None]))
    assert bag.features.shape == (N, E)
    assert bag.coords is not None
    assert bag.coords.shape == (N, 2)


def test_one_patch_is_a_bag_without_a_step(path: Path) -> None:
    bag = bags.read(h5(path, features=FEATURES[:1], coords=CELLS[:1]))
    assert (bag.info.n_patches, bag.info.step, bag.grid()) == (1, None, None)


def test_scattered_patches_have_no_step(path: Path) -> None:
    coords = [[0, 0], [10, 0], [31, 0], [0, 55], [7, 201]]
    assert bags.inspect(h5(path, features=FEATURES, coords=coords)).step is None


def test_a_grid_keeps_gaps_and_tolerates_rounding() -> None:
    coords = np.rint(CELLS * 455.1 + [1000, 77]).astype(int)
    bag = bags.from_arrays(FEATURES, coords, step=455.1)
    np.testing.assert_array_equal(bag.grid(), CELLS)


def test_a_bag_can_be_created_in_memory() -> None:
    bag = bags.from_arrays(FEATURES, CELLS * 512, encoder="uni_v1")
    assert (bag.info.path, bag.info.kind, bag.info.step) == (None, "memory", 512)
    with pytest.raises(BagError, match="The bag in memory has no patches"):
        bags.from_arrays(FEATURES[:0])


def test_changing_an_array_does_not_change_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "slide.npy", FEATURES)
    bags.read(tmp_path / "slide.npy").features[:] = 0
    assert bags.read(tmp_path / "slide.npy").features.any()


# Metadata


@pytest.mark.parametrize("kind", ["caprmil", "trident", "clam", "stamp", "npy", "npz", "pt"])
def test_inspecting_and_reading_give_the_same_metadata(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"slide.{kind if kind in ('npy', 'npz', 'pt') else 'h5'}"
    match kind:
        case "caprmil":
            bags.write(path, FEATURES, CELLS * 512, mpp=0.5)
        case "trident":
            trident(path)
        case "clam":
            h5(path, features=FEATURES, coords=CELLS * 512)
        case "stamp":
            stamp(path, coords=CELLS * 224)
        case "npy":
            np.save(path, FEATURES)
        case "npz":
            npz(path, features=FEATURES, coords=CELLS * 512)
        case "pt":
            pt(path, FEATURES)
    assert bags.inspect(path) == bags.read(path).info
    assert bags.inspect(path).kind == kind


def test_inspecting_does_not_read_the_features(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5(path, features=FEATURES)
    monkeypatch.delattr(h5py.Dataset, "__getitem__")
    monkeypatch.delattr(h5py.Dataset, "read_direct")
    assert bags.inspect(path).n_patches == len(FEATURES)


def test_bags_load_without_torch() -> None:
    script = "import caprmil.features.bags, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# Invalid files


def test_texts_that_hdf5_would_read_for_ever_are_an_error(tmp_path: Path) -> None:
    path = bags.write(tmp_path / "a.h5", np.ones((5, 4)), encoder="synthetic", mpp=1.0)
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL")
    at = heap + 16
    while number := int.from_bytes(content[at : at + 2], "little"):  # 0 is what is free
        length = int.from_bytes(content[at + 8 : at + 16], "little")
        at += 16 + (length + 7) // 8 * 8
        assert number < 100
    content[at + 8 : at + 16] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(BagError, match="texts of its attributes are damaged"):
        bags.inspect(path)


@pytest.mark.parametrize("function", [bags.inspect, bags.read])
@pytest.mark.parametrize("chunks", [None, (1, 1024)])
def test_an_array_that_was_declared_and_never_written_is_an_error(
    path: Path, chunks: tuple[int, int] | None, function: Any
) -> None:
    with h5py.File(path, "w") as file:  # 4 GB of zeros in a file of a few kB
        file.create_dataset("features", (10**6, 1024), np.float32, chunks=chunks)
    with pytest.raises(BagError, match=r"features is declared .* never written"):
        function(path)


def test_a_file_that_was_not_written_to_its_end_is_an_error(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (100, 8), np.float32, chunks=(10, 8))[:90] = 1
    with pytest.raises(BagError, match="never written"):
        bags.read(path)


@pytest.mark.parametrize("how", ["external link", "soft link", "external storage", "virtual"])
def test_features_in_another_file_are_not_read(path: Path, how: str) -> None:
    other = path.with_name("other.h5")
    h5(other, features=FEATURES)
    with h5py.File(path, "w") as file:
        if how == "external link":
            file["features"] = h5py.ExternalLink(other.name, "features")
        elif how == "soft link":
            file["other"] = h5py.ExternalLink(other.name, "/")
            file["features"] = h5py.SoftLink("/other/features")
        elif how == "external storage":
            size = other.stat().st_size // 8
            storage = [(str(other), 0, 4 * size)]
            file.create_dataset("features", (size, 1), np.float32, external=storage)
        else:
            layout = h5py.VirtualLayout(FEATURES.shape, np.float32)
            layout[:] = h5py.VirtualSource(str(other), "features", FEATURES.shape)
            file.create_virtual_dataset("features", layout)
    with pytest.raises(BagError, match=r"features is (a link|stored in another file)"):
        bags.read(path)


@pytest.mark.parametrize("function", [bags.inspect, bags.read])
def test_a_missing_file_is_named(path: Path, function: Any) -> None:
    with pytest.raises(BagError, match=r"There is no file .*slide\.h5\. Check"):
        function(path)


def test_a_folder_is_not_a_bag(tmp_path: Path) -> None:
    with pytest.raises(BagError, match=r"is a folder. Pass a feature file"):
        bags.read(tmp_path)


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "slide.svs").write_bytes(b"II*")
    with pytest.raises(BagError, match=r"slide\.svs .* Known: \.h5, \.hdf5, \.npz, \.npy, \.pt"):
        bags.read(tmp_path / "slide.svs")


@pytest.mark.parametrize("suffix", bags.SUFFIXES)
def test_an_empty_file_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"slide{suffix}").touch()
    with pytest.raises(BagError, match="is empty"):
        bags.inspect(tmp_path / f"slide{suffix}")


@pytest.mark.parametrize("suffix", bags.SUFFIXES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, share: float) -> None:
    path = tmp_path / f"slide{suffix}"
    match suffix:
        case ".npy":
            np.save(path, FEATURES)
        case ".npz":
            npz(path, features=FEATURES)
        case ".pt":
            pt(path, FEATURES)
        case _:
            bags.write(path, FEATURES, CELLS)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BagError, match=r"slide.* (cannot be read|was not unpickled)"):
        bags.read(path)


@pytest.mark.parametrize("suffix", bags.SUFFIXES)
def test_text_under_a_wrong_suffix_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"slide{suffix}"
    path.write_text("<html>Access denied</html>")
    with pytest.raises(BagError, match=r"is not an HDF5 file|cannot be read|was not unpickled"):
        bags.read(path)


def test_a_file_without_features_lists_what_it_has(path: Path) -> None:
    h5(path, coords=CELLS, attention_scores=FEATURES[:, :1])
    with pytest.raises(BagError, match="no features; it has: attention_scores, coords"):
        bags.inspect(path)


@pytest.mark.parametrize("shape", [(0, E), (0,), (1, 0, E)])
def test_a_slide_without_patches_is_refused(path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(BagError, match="has no patches"):
        bags.inspect(trident(path, np.zeros(shape, np.float32), np.zeros((0, 2), int)))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_patches_with_nan_or_infinity_are_counted(path: Path, bad: float, dtype: str) -> None:
    features = FEATURES.astype(dtype)
    features[[2, 4], 3] = bad
    with pytest.raises(BagError, match=r"2 of 5 patches have NaN or infinite.*first in row 2"):
        bags.read(h5(path, features=features))


@pytest.mark.parametrize("negative", [False, True])
def test_all_float16_values_are_classified_as_finite_or_not(negative: bool) -> None:
    bits = np.arange(2**15, dtype=np.uint16) | np.uint16(0x8000 * negative)
    features = bits.view(np.float16)[:, None]
    finite = np.isfinite(features[:, 0])
    assert bags.from_arrays(features[finite]).info.n_patches == finite.sum() == 31 * 2**10
    with pytest.raises(BagError, match=r"1024 of 32768 patches .* in row 31744"):
        bags.from_arrays(features)


@pytest.mark.parametrize(
    ("features", "attributes"),
    [(FEATURES[0], {}), (FEATURES[:1], {"feat_type": "slide"}), (FEATURES[:1], {})],
    ids=["vector", "marked", "more coordinates"],
)
def test_slide_level_features_are_refused(path: Path, features: Any, attributes: Any) -> None:
    h5(path, {"": attributes}, feats=features, coords=CELLS)
    with pytest.raises(BagError, match=r"looks like slide-level features. Pass the patch features"):
        bags.inspect(path)


@pytest.mark.parametrize("dtype", ["i8", "u1", "S3", "c8"])
def test_features_must_be_floating_point(path: Path, dtype: str) -> None:
    with pytest.raises(BagError, match=r"has features of type .* float16"):
        bags.inspect(h5(path, features=np.ones((N, E), dtype)))


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_arrays_of_python_objects_are_not_unpickled(tmp_path: Path, suffix: str) -> None:
    path, objects = tmp_path / f"slide{suffix}", np.array([[Exploit(tmp_path / "harm")]])
    (np.save if suffix == ".npy" else np.savez)(path, objects)
    with pytest.raises(BagError, match="cannot be read"):
        bags.read(path)
    assert not (tmp_path / "harm").exists()


def test_a_stack_of_bags_is_refused(path: Path) -> None:
    with pytest.raises(BagError, match=r"shape \(2, 5, 8\). Save them as \(patches, width\)"):
        bags.inspect(h5(path, features=np.stack([FEATURES, FEATURES])))


@pytest.mark.parametrize("coords", [CELLS[:3], CELLS[:, :1], np.zeros((N, 4), int)])
def test_every_patch_has_one_coordinate_pair(path: Path, coords: Any) -> None:
    with pytest.raises(BagError, match=r"5 patches but coordinates of shape .* not \(5, 2\)"):
        bags.inspect(h5(path, features=FEATURES, coords=coords))


def test_coordinates_must_be_finite_numbers(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BagError, match="NaN or infinite coordinates"):
        bags.read(h5(path, features=FEATURES, coords=CELLS * np.nan))
    with pytest.raises(BagError, match="coordinates of type"):
        bags.read(h5(tmp_path / "b.h5", features=FEATURES, coords=CELLS.astype("S3")))


def test_a_locked_file_is_refused(path: Path) -> None:
    trident(path)
    path.with_name("slide.h5.lock").touch()
    with pytest.raises(
        BagError, match=r"still being written: .* slide\.h5\.lock.* remove the lock"
    ):
        bags.inspect(path)


def test_a_file_open_for_writing_in_another_process_is_refused(path: Path) -> None:
    script = (
        "import h5py, sys; file = h5py.File(sys.argv[1], 'w'); file['features'] = 1.0;"
        "file.flush(); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BagError, match="still being written"):
            bags.inspect(path)
        other.communicate()


# The path of the slide


def mean_colour(x: torch.Tensor) -> torch.Tensor:
    return x.mean(dim=(2, 3))


def test_encode_stores_the_path_of_the_slide_and_does_not_depend_on_it(tmp_path: Path) -> None:
    encoder = load(mean_colour, card=Card(name="mean", input_px=64, mpp=2.0))
    job = Extraction(out=tmp_path / "out", encoder=encoder, config=configure(encoder.card))
    slide = Section(width=600, height=600).write(tmp_path / "slide.tiff")
    job.run({"slide": slide})
    before = (tmp_path / "out" / "slide.h5").stat().st_mtime_ns
    assert bags.inspect(tmp_path / "out" / "slide.h5").slide_path == str(slide)

    moved = slide.rename(tmp_path / "moved.tiff")
    job.run({"slide": moved})
    assert (tmp_path / "out" / "slide.h5").stat().st_mtime_ns == before


def test_the_slide_of_a_bag_is_located_without_a_record(tmp_path: Path, tiny_run: Run) -> None:
    slide = tmp_path / "slide.tiff"
    slide.touch()
    bag = bags.write(tmp_path / "slide.h5", FEATURES, slide_path=str(slide))
    assert locate_slide(tiny_run, bag).pixels == slide
    slide.unlink()
    assert locate_slide(tiny_run, bag).pixels is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
@pytest.mark.parametrize("name", [b"slide_\xff.h5", b"folder_\xe9/slide.h5"])
def test_a_file_name_that_is_not_utf8_is_an_error_of_one_line(tmp_path: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(CaprmilError, match=r"not UTF-8\. Rename it") as problem:
        find_bags([path.parent])
    assert "\n" not in str(problem.value)
    slide = path.with_suffix(".png")
    slide.touch()
    with pytest.raises(CaprmilError, match=r"not UTF-8\. Rename it"):
        find_slides([slide])


@pytest.mark.parametrize("value", [b"\xff", np.array([b"\xff"], h5py.string_dtype())[0]])
def test_text_that_is_not_utf8_is_no_encoder(path: Path, value: Any) -> None:
    bags.write(path, np.ones((3, 4)), encoder="uni")
    with h5py.File(path, "r+") as file:
        file.attrs.create("encoder", value, dtype=h5py.string_dtype())
    assert bags.inspect(path).encoder is None
