"""Conversion: every row keeps its position on the slide.

The pixels of the test slide encode their position, and the features of a patch encode the position
of its pixels. So a converted file can be checked with its own metadata alone, read as documented by
its tool.
"""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import pyvips
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from caprmil.errors import BagError, SlideError, UnknownNameError
from caprmil.features import bags, level0
from caprmil.features.convert import FORMATS, SIZES, Conversion, convert
from caprmil.slides.slide import Slide

MPP = 0.2527
SIZE = (2600, 1800)
CELLS = np.array([[c, r] for r in range(6) for c in range(9) if (c * r) % 4 != 3])  # with holes
SIDE = 64 / MPP  # 64 pixels of 1 um/px: 253.26 level-0 pixels
METADATA: dict[str, Any] = {
    "encoder": "uni_v1",
    "fingerprint": "abc123",
    "settings": "version = 1",
    "mpp": 1.0,
    "scale_rule": "exact",
    "patch_px": 64,
    "patch_level0": SIDE,
    "step": SIDE,
    "slide_mpp": MPP,
    "slide_size": SIZE,
}
Read = tuple[NDArray[Any], NDArray[Any], float]  # features, corners, side in level-0 pixels


@pytest.fixture(scope="module")
def tiff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, y = np.meshgrid(np.arange(SIZE[0]), np.arange(SIZE[1]))
    pixels = np.stack([x & 255, y & 255, (x >> 8) | ((y >> 8) << 4)], axis=2).astype(np.uint8)
    path = tmp_path_factory.mktemp("slides") / "slide.tif"
    image = pyvips.Image.new_from_array(pixels).copy(xres=1000 / MPP, yres=1000 / MPP)
    image.tiffsave(str(path), tile=True, compression="deflate", resunit="cm")
    return path


def centres(tiff: Path, corners: NDArray[Any], side: float) -> NDArray[np.float64]:
    """Return the centre of each patch, decoded from its pixels."""

    def position(pixel: NDArray[Any]) -> NDArray[np.float64]:
        r, g, b = pixel.astype(int)
        return np.array([r + 256 * (b & 15), g + 256 * (b >> 4)], dtype=float)

    with Slide(tiff) as slide:
        patches = [slide.read(x, y, side, round(side)) for x, y in corners.tolist()]
    return np.array([(position(p[0, 0]) + position(p[-1, -1]) + 1) / 2 for p in patches])


def encoded(positions: NDArray[Any]) -> NDArray[np.float32]:
    """Return positions as features that are exact in half precision."""
    return np.hstack([positions // 64, positions % 64]).astype(np.float32)


def decoded(features: NDArray[Any]) -> NDArray[np.float64]:
    return np.float64(features[:, :2]) * 64 + features[:, 2:]


# A bag of each tool, built as the tool writes it


def built_caprmil(folder: Path, tiff: Path) -> Path:
    corners = np.rint(CELLS * SIDE).astype(int)
    return bags.write(
        folder / "slide.h5", encoded(centres(tiff, corners, SIDE)), corners, **METADATA
    )


def built_trident(folder: Path, tiff: Path) -> Path:
    corners = CELLS * 256 + 3
    features = encoded(centres(tiff, corners, 256))
    with h5py.File(folder / "slide.h5", "w") as file:
        file["features"], file["coords"] = features, corners
        file["features"].attrs.update(name="slide", savetodir="features", encoder="uni_v1")
        file["coords"].attrs.update(
            patch_size=64,
            patch_size_level0=256.0,
            level0_magnification=40,
            target_magnification=10.0,
            overlap=0,
            name="slide",
            savetodir="patches",
            level0_width=SIZE[0],
            level0_height=SIZE[1],
        )
    return folder / "slide.h5"


def built_clam(folder: Path, tiff: Path) -> Path:
    corners = CELLS * 240 + 7
    for name in ("h5_files", "patches"):
        (folder / name).mkdir()
    with h5py.File(folder / "h5_files" / "slide.h5", "w") as file:
        file["features"] = encoded(centres(tiff, corners, 280))
        file["coords"] = corners.astype(np.int32)
    with h5py.File(folder / "patches" / "slide.h5", "w") as file:
        file["coords"] = corners
        file["coords"].attrs.update(
            patch_size=140,  # at level 1, with an overlap that only this file states
            patch_level=1,
            downsample=(2.0, 2.0),
            level_dim=(SIZE[0] // 2, SIZE[1] // 2),
            downsampled_level_dim=(SIZE[0] // 2, SIZE[1] // 2),
            name="slide",
            save_path="patches",
        )
    return folder / "h5_files" / "slide.h5"


def built_stamp(folder: Path, tiff: Path) -> Path:
    um = (CELLS * 64.0).astype(np.float32)
    corners = np.rint(um / MPP).astype(int)
    metadata = {"extractor": "uni_v1", "unit": "um", "tile_size_um": 64.0, "tile_size_px": 56}
    with h5py.File(folder / "slide.h5", "w") as file:
        file["feats"] = np.float16(encoded(centres(tiff, corners, 64 / MPP)))
        file["coords"] = um
        file.attrs.update(metadata, stamp_version="2.3.0", code_hash="0123abcd", feat_type="tile")
    return folder / "slide.h5"


BUILT: dict[str, Callable[[Path, Path], Path]] = {
    "caprmil": built_caprmil,
    "trident": built_trident,
    "clam": built_clam,
    "stamp": built_stamp,
}


# The metadata of each format, read as its tool documents it, without our reader


def read_caprmil(path: Path) -> Read:
    with h5py.File(path) as file:
        return file["features"][()], file["coords"][()], file.attrs["patch_level0"]


def read_trident(path: Path) -> Read:
    with h5py.File(path) as file:
        attributes = file["coords"].attrs  # TRIDENT's side is that of its own rule
        side = attributes.get("caprmil_patch_level0", attributes["patch_size_level0"])
        return file["features"][()], file["coords"][()], float(side)


def read_clam(path: Path) -> Read:
    with h5py.File(path.parents[1] / "patches" / path.name) as file:
        assert file["coords"].attrs["patch_level"] == 0
        side = file["coords"].attrs["patch_size"] * file["coords"].attrs["downsample"][0]
    with h5py.File(path) as file:
        return file["features"][()], file["coords"][()], float(side)


def read_stamp(path: Path) -> Read:
    with h5py.File(path) as file:
        return file["feats"][()], file["coords"][()] / MPP, file.attrs["tile_size_um"] / MPP


READ = {
    "caprmil": read_caprmil,
    "trident": read_trident,
    "clam": read_clam,
    "stamp": read_stamp,
}


def converted(source: Path, out: Path, to: str, **options: Any) -> Path:
    """Convert one bag, and return the file with its features."""
    done = convert({"slide": source}, out, to, **options)
    assert not done.failed
    return done.written[0]


def failure(source: Path, out: Path, to: str, **options: Any) -> str:
    done = convert({"slide": source}, out, to, **options)
    assert done.written == done.kept == []
    return done.failed["slide"]


@pytest.fixture
def full_bag(tmp_path: Path) -> Path:
    """A bag with all metadata, without a slide."""
    features = np.random.default_rng(0).normal(size=(len(CELLS), 6))
    corners = np.rint(CELLS * SIDE).astype(int)
    return bags.write(tmp_path / "full_bag" / "slide.h5", features, corners, **METADATA)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("of", FORMATS)
def test_every_row_keeps_its_position_by_the_pixels_of_the_slide(
    of: str, to: str, tiff: Path, tmp_path: Path
) -> None:
    source = BUILT[of](tmp_path, tiff)
    extra: dict[str, Any] = {"patch_px": 224, "encoder": "uni_v1"} if of == "clam" else {}
    path = converted(source, tmp_path / "out", to, slides={"slide": tiff}, **extra)
    assert bags.inspect(path).kind == to
    features, corners, side = READ[to](path)
    assert len(features) == len(CELLS)
    off = np.abs(decoded(features) - centres(tiff, corners, side))
    assert off.max() <= 1


def test_a_wrong_scale_is_detected_from_the_pixels(tiff: Path, tmp_path: Path) -> None:
    path = converted(built_stamp(tmp_path, tiff), tmp_path / "out", "caprmil", slide_mpp=0.26)
    features, corners, side = read_caprmil(path)
    assert np.abs(decoded(features) - centres(tiff, corners, side)).max() > 10


# Round trips


@pytest.mark.parametrize("to", ["trident", "stamp"])
def test_a_round_trip_keeps_everything(to: str, full_bag: Path, tmp_path: Path) -> None:
    other = converted(full_bag, tmp_path / "other", to)
    back = bags.read(converted(other, tmp_path / "back", "caprmil"))
    before = bags.read(full_bag)
    assert replace(back.info, path=full_bag) == before.info
    np.testing.assert_array_equal(back.features, before.features)
    np.testing.assert_array_equal(back.coords, before.coords)


def test_clam_keeps_the_grid_and_options_restore_the_rest(full_bag: Path, tmp_path: Path) -> None:
    other = converted(full_bag, tmp_path / "other", "clam")
    back = bags.read(converted(other, tmp_path / "back", "caprmil"))
    assert (back.info.encoder, back.info.mpp, back.info.patch_px) == (None, None, None)
    restored = converted(other, tmp_path / "restored", "caprmil", patch_px=64, encoder="uni_v1")
    info = bags.inspect(restored)
    assert info.mpp == pytest.approx(1.0)
    lost = {"fingerprint": None, "settings": None, "dtype": "float32"}
    assert replace(info, mpp=1.0) == replace(bags.inspect(full_bag), path=restored, **lost)
    np.testing.assert_array_equal(back.features, bags.read(full_bag).features)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None
)
@given(
    cells=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6),
    slide_mpp=st.floats(0.1, 1.0),
    side=st.floats(20, 2000),
    overlap=st.sampled_from([0, 0.25, 0.5]),
)
def test_any_grid_survives_a_round_trip_to_the_pixel(
    cells: list[tuple[int, int]],
    slide_mpp: float,
    side: float,
    overlap: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, step = tmp_path_factory.mktemp("grid"), side * (1 - overlap)
    corners = np.rint(np.array(cells) * step).astype(int)
    lengths = {"patch_level0": side, "step": step, "slide_mpp": slide_mpp}
    scale: dict[str, Any] = {"mpp": side * slide_mpp / 64, "patch_px": 64, "scale_rule": "exact"}
    features = np.arange(3.0 * len(cells)).reshape(-1, 3)
    source = bags.write(folder / "slide.h5", features, corners, encoder="e", **lengths, **scale)
    for to in ("trident", "clam", "stamp"):
        other = converted(source, folder / to, to)
        back = bags.read(converted(other, folder / to / "back", "caprmil"))
        np.testing.assert_array_equal(back.coords, corners)
        np.testing.assert_array_equal(back.features, features)
        assert {name: getattr(back.info, name) for name in lengths} == pytest.approx(lengths)


@pytest.mark.parametrize("to", ["trident", "clam", "stamp"])
def test_the_metadata_of_each_tool_is_sufficient(to: str, full_bag: Path, tmp_path: Path) -> None:
    other = converted(full_bag, tmp_path / "other", to)
    for file in (tmp_path / "other").rglob("*.h5"):
        with h5py.File(file, "a") as h5:
            for holder in (h5, *h5.values()):
                for name in [name for name in holder.attrs if name.startswith("caprmil_")]:
                    del holder.attrs[name]
    back = bags.read(converted(other, tmp_path / "back", "caprmil", slide_mpp=MPP))
    np.testing.assert_array_equal(back.coords, bags.read(full_bag).coords)
    side = 64 * 40 // 10 if to == "trident" else SIDE  # what TRIDENT cuts at these coordinates
    assert back.info.patch_level0 == pytest.approx(side, abs=0.5)
    assert back.info.scale_rule == {"trident": "nominal", "clam": None, "stamp": "exact"}[to]
    assert back.info.mpp == {"trident": 1.0, "clam": None, "stamp": pytest.approx(1.0)}[to]


def test_the_path_of_the_slide_is_kept_or_set_by_the_option(tiff: Path, tmp_path: Path) -> None:
    source = built_caprmil(tmp_path, tiff)
    path = converted(source, tmp_path / "one", "caprmil", slides={"slide": tiff})
    assert bags.inspect(path).slide_path == str(tiff)
    again = converted(path, tmp_path / "two", "caprmil")
    assert bags.inspect(again).slide_path == str(tiff)


def test_an_existing_file_is_kept_if_only_the_path_of_the_slide_differs(
    tiff: Path, tmp_path: Path
) -> None:
    source = built_caprmil(tmp_path, tiff)
    path = converted(source, tmp_path / "out", "caprmil")
    done = convert({"slide": source}, tmp_path / "out", "caprmil", slides={"slide": tiff})
    assert done.kept == [path]


# Files and attributes of each format


def test_a_trident_job_has_the_folders_and_attributes_of_trident(
    full_bag: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job" / "10x_64px_0px_overlap"
    path = converted(full_bag, tmp_path / "job", "trident")
    assert path == job / "features_uni_v1" / "slide.h5"
    expected = {
        "patch_size": 64,
        "patch_size_level0": 256,  # TRIDENT's rule, 64 * 40 // 10; caprmil_patch_level0 is 253.26
        "level0_magnification": 40,
        "target_magnification": 10,
        "overlap": 0,
        "name": "slide",
        "savetodir": str(job / "patches"),
        "level0_width": SIZE[0],
        "level0_height": SIZE[1],
    }
    for file in (path, job / "patches" / "slide_patches.h5"):
        with h5py.File(file) as h5:
            metadata = dict(h5["coords"].attrs)
            assert {name: metadata[name] for name in expected} == expected
            assert not {"caprmil_fingerprint", "caprmil_settings"} & metadata.keys()
            assert (h5["coords"].dtype, h5["coords"].chunks) == (np.int64, (1, 2))
            assert h5["coords"].maxshape == (None, 2)
    with h5py.File(path) as h5:
        assert (h5["features"].chunks, h5["features"].maxshape) == ((1, 6), (None, 6))
        assert h5["features"].attrs["encoder"] == "uni_v1"


@pytest.mark.parametrize(
    ("mpp", "step", "folder"),
    [(0.5, 1.0, "20x_64px_0px"), (256 / 224, 0.75, "8.75x_64px_16px"), (0.2515, 1, "40x_64px_0px")],
)
def test_the_folder_of_a_trident_job_names_scale_and_overlap(
    mpp: float, step: float, folder: str, tmp_path: Path
) -> None:
    side = 64 * mpp / MPP
    metadata = {
        **METADATA,
        "mpp": mpp,
        "patch_level0": side,
        "step": side * step,
        "encoder": "hub:a/b",
    }
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [1, 1]], **metadata)
    path = converted(source, tmp_path / "job", "trident")
    assert path.parent == tmp_path / "job" / f"{folder}_overlap" / "features_hub_a_b"


@pytest.mark.parametrize(("slide_mpp", "bucket"), [(0.12, 80), (0.299, 40), (0.301, 20), (5.0, 2)])
def test_a_slide_has_the_magnification_of_its_bucket(
    slide_mpp: float, bucket: int, tmp_path: Path
) -> None:
    metadata = {**METADATA, "mpp": 8.0, "patch_level0": 512 / slide_mpp, "slide_mpp": slide_mpp}
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [1, 1]], **metadata)
    with h5py.File(converted(source, tmp_path / "job", "trident")) as h5:
        assert h5["coords"].attrs["level0_magnification"] == bucket


def test_slides_of_one_bucket_have_one_side_in_trident(tmp_path: Path) -> None:
    sides = set()
    for name, mpp in (("a", 0.2498), ("b", 0.2527)):
        lengths = {"patch_level0": 64 / mpp, "step": 64 / mpp, "slide_mpp": mpp}
        corners = np.rint(CELLS * 64 / mpp).astype(int)
        path = tmp_path / f"{name}.h5"
        source = bags.write(path, np.ones((len(CELLS), 3)), corners, **{**METADATA, **lengths})
        with h5py.File(converted(source, tmp_path / "job" / name, "trident")) as h5:
            sides.add(int(h5["coords"].attrs["patch_size_level0"]))
    assert sides == {256}


def test_features_that_trident_encodes_at_our_coordinates_are_by_its_own_rule(
    full_bag: Path, tmp_path: Path
) -> None:
    path = converted(full_bag, tmp_path / "job", "trident")
    with h5py.File(path, "a") as h5:  # as TRIDENT does: the attributes of coords are copied
        for name in list(h5["features"].attrs):
            del h5["features"].attrs[name]
        h5["features"].attrs.update(name="slide", savetodir="features", encoder="conch_v15")
    for info in (
        bags.inspect(path),
        bags.inspect(converted(path, tmp_path / "back", "caprmil")),
    ):
        assert (info.encoder, info.scale_rule, info.mpp) == ("conch_v15", "nominal", 1.0)
        assert (info.patch_level0, info.step) == (256, 256)
        assert (info.fingerprint, info.settings) == (None, None)
        assert info.slide_mpp == MPP


@pytest.mark.parametrize(
    ("px", "overlap", "magnifications", "step"),
    [(200, 20, (40, 30.0), 240), (256, 64, (40, 20.0), 384), (256, 0, (40, 20), 512)],
)
def test_the_step_is_that_of_tridents_arithmetic_in_whole_pixels(
    px: int, overlap: int, magnifications: tuple[int, float], step: int, tmp_path: Path
) -> None:
    of_slide, target = magnifications
    with h5py.File(tmp_path / "slide.h5", "w") as file:
        file["features"], file["coords"] = np.ones((2, 3)), [[0, 0], [step, 0]]
        file["coords"].attrs.update(
            patch_size=px,
            patch_size_level0=px * of_slide // target,
            level0_magnification=of_slide,
            target_magnification=target,
            overlap=overlap,
            savetodir="patches",
        )
    bag = bags.read(tmp_path / "slide.h5")
    assert bag.info.step == step
    assert bag.grid() is not None


def test_a_nominal_bag_keeps_its_magnifications(tiff: Path, tmp_path: Path) -> None:
    source = converted(built_trident(tmp_path, tiff), tmp_path / "full_bag", "caprmil")
    with h5py.File(converted(source, tmp_path / "job", "trident")) as h5:
        metadata = h5["coords"].attrs
        assert (metadata["level0_magnification"], metadata["target_magnification"]) == (40, 10)
        assert metadata["patch_size_level0"] == 256


def test_clam_has_its_three_folders_and_a_list_of_sizes(full_bag: Path, tmp_path: Path) -> None:
    path = converted(full_bag, tmp_path / "out", "clam")
    with h5py.File(path) as h5:
        assert not [*h5.attrs, *h5["features"].attrs, *h5["coords"].attrs]
        assert (h5["features"].dtype, h5["features"].chunks) == (np.float32, (32, 6))
        assert h5["coords"].dtype == np.int32
        tensor = torch.load(tmp_path / "out" / "pt_files" / "slide.pt", weights_only=True)
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), h5["features"])
    with h5py.File(tmp_path / "out" / "patches" / "slide.h5") as h5:
        assert (h5["coords"].dtype, h5["coords"].chunks) == (np.int64, (1, 2))
        assert tuple(h5["coords"].attrs["level_dim"]) == SIZE
    convert({"other": full_bag}, tmp_path / "out", "clam")
    assert (tmp_path / "out" / SIZES).read_text() == "slide,2600,1800\nother,2600,1800\n"


def test_stamp_coordinates_are_in_micrometres(full_bag: Path, tmp_path: Path) -> None:
    with h5py.File(converted(full_bag, tmp_path / "out", "stamp")) as h5:
        assert (h5["feats"].dtype, h5["coords"].dtype) == (np.float16, np.float32)
        assert h5["feats"].chunks is h5["coords"].chunks is None
        metadata = dict(h5.attrs)
        expected = {"extractor": "uni_v1", "unit": "um", "tile_size_um": 64.0, "tile_size_px": 64}
        assert {name: metadata[name] for name in expected} == expected
        assert metadata["feat_type"] == "tile"
        assert "caprmil" in metadata["stamp_version"]
        assert len(bytes.fromhex(metadata["code_hash"])) == 4


def test_clam_patches_without_a_coordinate_file_are_adjacent(tiff: Path, tmp_path: Path) -> None:
    source = built_clam(tmp_path, tiff)
    found = bags.inspect(converted(source, tmp_path / "one", "caprmil"))
    assert (found.patch_level0, found.step) == (280, 240)
    (tmp_path / "patches" / "slide.h5").unlink()
    info = bags.inspect(converted(source, tmp_path / "two", "caprmil"))
    assert (info.patch_level0, info.step) == (240, 240)
    assert (info.mpp, info.patch_px, info.encoder) == (None, None, None)


def test_a_coordinate_file_of_other_patches_is_ignored(tiff: Path, tmp_path: Path) -> None:
    source = built_clam(tmp_path, tiff)
    with h5py.File(tmp_path / "patches" / "slide.h5", "a") as h5:
        h5["coords"][0] += 1
    assert bags.inspect(converted(source, tmp_path / "out", "caprmil")).patch_level0 == 240


ODD_VALUES = (
    "x",
    -1,
    0,
    1e300,
    1e-300,
    np.zeros(0),
    np.zeros((2, 2)),
    float("nan"),
    np.complex64(1j),
    b"\xff",
)


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
@pytest.mark.parametrize("name", ["patch_size", "downsample", "custom_downsample", "level_dim"])
def test_a_damaged_coordinate_file_costs_no_more_than_its_metadata(
    name: str, value: Any, tiff: Path, tmp_path: Path
) -> None:
    source = built_clam(tmp_path, tiff)
    with h5py.File(tmp_path / "patches" / "slide.h5", "r+") as file:
        file["coords"].attrs[name] = value
    done = converted(source, tmp_path / "out", "caprmil", slide_mpp=MPP)
    with h5py.File(done) as file:
        if name == "level_dim":
            assert file.attrs["patch_level0"] == 280
        else:  # that of adjacent patches
            assert file.attrs["patch_level0"] == 240


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
@pytest.mark.parametrize("name", ["patch_level0", "mpp", "scale_rule", "slide_size", "fingerprint"])
def test_a_field_that_cannot_be_is_left_out_or_an_error_of_one_line(
    name: str, value: Any, full_bag: Path, tmp_path: Path
) -> None:
    stamp = converted(full_bag, tmp_path / "stamp", "stamp")
    with h5py.File(stamp, "r+") as file:
        file.attrs[f"caprmil_{name}"] = value
    done = convert({"slide": stamp}, tmp_path / "back", "caprmil", slide_mpp=MPP)
    assert len(done.written) + len(done.failed) == 1
    assert "\n" not in done.failed.get("slide", "")


def test_a_rule_of_scale_that_is_not_known_is_left_out(full_bag: Path, tmp_path: Path) -> None:
    with h5py.File(full_bag, "r+") as file:
        file.attrs["scale_rule"] = "rough"
    assert bags.inspect(full_bag).scale_rule is None
    assert converted(full_bag, tmp_path / "out", "caprmil").exists()


def test_a_damaged_list_of_sizes_is_an_error_of_one_line(full_bag: Path, tmp_path: Path) -> None:
    converted(full_bag, tmp_path, "clam")
    (tmp_path / SIZES).write_bytes(b"\xff\xfe")
    with pytest.raises(BagError, match=r"slide_sizes\.txt is damaged .* Remove it"):
        convert({"slide": full_bag}, tmp_path, "clam")


def test_early_stamp_files_are_converted_to_level0_pixels(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "slide.h5", "w") as h5:
        h5["feats"], h5["coords"] = np.ones((len(CELLS), 3), np.float16), CELLS * 224
    bag = bags.read(converted(tmp_path / "slide.h5", tmp_path / "out", "caprmil", slide_mpp=0.5))
    np.testing.assert_array_equal(bag.coords, CELLS * 512)
    assert (bag.info.patch_level0, bag.info.patch_px) == (512, 224)


def test_a_bag_without_coordinates_converts_to_caprmil_only(tmp_path: Path) -> None:
    torch.save(torch.ones(4, 3), tmp_path / "slide.pt")
    path = converted(tmp_path / "slide.pt", tmp_path / "out", "caprmil", encoder="uni_v1")
    bag = bags.read(path)
    assert (bag.coords, bag.info.encoder) == (None, "uni_v1")
    for to in ("trident", "clam", "stamp"):
        assert "no coordinates" in failure(path, tmp_path / "others", to)


# Large bags, broken bags and existing files


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 20_000
    corners = np.stack([np.arange(n), np.arange(n)], axis=1)
    features = np.random.default_rng(0).normal(size=(n, 256)).astype(np.float16)
    source = bags.write(
        tmp_path / "slide.h5", features, corners, **{**METADATA, "slide_size": None}
    )
    monkeypatch.setattr(level0, "BLOCK", 2**16)
    for to in ("stamp", "caprmil"):
        tracemalloc.start()
        path = converted(source, tmp_path / to, to)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < features.nbytes / 4
        np.testing.assert_array_equal(bags.read(path).features, features)


@pytest.mark.parametrize("to", FORMATS)
def test_a_second_conversion_keeps_existing_files(to: str, full_bag: Path, tmp_path: Path) -> None:
    path = converted(full_bag, tmp_path / "out", to)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.*")}
    assert convert({"slide": full_bag}, tmp_path / "out", to) == Conversion(kept=[path])
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_a_missing_file_is_written_again(full_bag: Path, tmp_path: Path) -> None:
    path = converted(full_bag, tmp_path / "out", "clam")
    (tmp_path / "out" / "pt_files" / "slide.pt").unlink()
    assert convert({"slide": full_bag}, tmp_path / "out", "clam").written == [path]
    assert (tmp_path / "out" / "pt_files" / "slide.pt").is_file()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("change", ["features", "coords", "scale"])
def test_another_bag_with_that_name_is_replaced_only_on_request(
    change: str, to: str, full_bag: Path, tmp_path: Path
) -> None:
    bag = bags.read(full_bag)
    features, corners, metadata = bag.features.copy(), bag.coords, dict(METADATA)
    if change == "features":
        features[-1] += 1
    elif change == "coords":
        corners = corners + 1
    else:
        metadata |= {"patch_level0": 300.0, "step": 300.0, "slide_mpp": 64 / 300}
    other = bags.write(tmp_path / "other.h5", features, corners, **metadata)
    path = converted(full_bag, tmp_path / "out", to)
    before = path.read_bytes()
    assert "--replace" in failure(other, tmp_path / "out", to)
    assert path.read_bytes() == before
    converted(other, tmp_path / "out", to, replace=True)
    assert convert({"slide": other}, tmp_path / "out", to).kept == [path]


def test_a_bag_is_not_written_over_itself(full_bag: Path) -> None:
    before = full_bag.read_bytes()
    for to in ("stamp", "caprmil"):
        assert "over itself" in failure(full_bag, full_bag.parent, to, replace=True)
    assert full_bag.read_bytes() == before


def test_a_broken_bag_does_not_stop_the_others(full_bag: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.h5").write_bytes(full_bag.read_bytes()[:3000])
    steps: list[tuple[int, int]] = []
    sources = {"cut": tmp_path / "cut.h5", "slide": full_bag}
    done = convert(
        sources, tmp_path / "out", "stamp", progress=lambda at, of: steps.append((at, of))
    )
    assert [path.name for path in done.written] == ["slide.h5"]
    assert "truncated" in done.failed["cut"]
    assert steps == [(1, 2), (2, 2)]


@pytest.mark.parametrize("to", FORMATS)
def test_a_bag_with_nan_leaves_no_feature_file(to: str, full_bag: Path, tmp_path: Path) -> None:
    with h5py.File(full_bag, "a") as h5:
        h5["features"][5] = np.nan
    assert "NaN" in failure(full_bag, tmp_path / "out", to)
    left = {file.parent.name for file in (tmp_path / "out").rglob("*.*")}
    assert left <= {"patches"}


def test_features_too_large_for_float16_are_refused_for_stamp_only(tmp_path: Path) -> None:
    large = np.full((2, 3), 70_000.0)
    corners = [[0, 0], [1, 1]]
    source = bags.write(tmp_path / "slide.h5", large, corners, dtype="float32", **METADATA)
    assert "do not fit into float16" in failure(source, tmp_path / "out", "stamp")
    assert bags.read(converted(source, tmp_path / "out", "trident")).features.max() == 70_000


# Missing metadata


@pytest.mark.parametrize(
    ("missing", "to", "remedy"),
    [
        (("encoder",), "trident", "--encoder"),
        (("encoder",), "stamp", "--encoder"),
        (("patch_px",), "stamp", "--patch-px"),
        (("slide_mpp", "patch_level0"), "stamp", "size of its patches"),
        (("slide_mpp", "mpp"), "stamp", "--slides or --slide-mpp"),
        (("slide_mpp", "mpp"), "trident", "--slides or --slide-mpp"),
        (("slide_mpp", "patch_level0"), "clam", "size of its patches"),
    ],
)
def test_the_error_for_missing_metadata_names_the_option(
    missing: tuple[str, ...], to: str, remedy: str, tmp_path: Path
) -> None:
    metadata = {**METADATA, **dict.fromkeys(missing)}
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [300, 1]], **metadata)
    assert remedy in failure(source, tmp_path / "out", to)


def test_micrometres_need_the_scale_of_the_slide(tiff: Path, tmp_path: Path) -> None:
    source = built_stamp(tmp_path, tiff)
    assert "Pass --slides or --slide-mpp" in failure(source, tmp_path / "a", "caprmil")
    of_slide = converted(source, tmp_path / "b", "caprmil", slides={"slide": tiff})
    given = converted(source, tmp_path / "c", "caprmil", slide_mpp=MPP)
    np.testing.assert_array_equal(bags.read(of_slide).coords, bags.read(given).coords)


def test_an_exact_bag_implies_the_scale_of_its_slide(tmp_path: Path) -> None:
    metadata = {**METADATA, "slide_mpp": None}
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [300, 1]], **metadata)
    with h5py.File(converted(source, tmp_path / "out", "stamp")) as h5:
        assert h5["coords"][1, 0] == pytest.approx(300 * MPP)


@pytest.mark.parametrize("extra", [{"slide_mpp": 0.5}, {"patch_px": 224}])
def test_options_that_contradict_the_bag_are_refused(
    extra: dict[str, Any], full_bag: Path, tmp_path: Path
) -> None:
    assert "Omit the option" in failure(full_bag, tmp_path / "out", "stamp", **extra)


def test_a_scale_that_puts_patches_outside_the_slide_is_refused(tiff: Path, tmp_path: Path) -> None:
    source = built_stamp(tmp_path, tiff)
    options: dict[str, Any] = {"slides": {"slide": tiff}, "slide_mpp": 0.15}
    problem = failure(source, tmp_path / "out", "caprmil", **options)
    assert "its slide has 2600 x 1800 pixels" in problem


def test_another_scan_of_the_slide_is_refused(tiff: Path, tmp_path: Path) -> None:
    source = built_trident(tmp_path, tiff)
    with h5py.File(source, "a") as h5:
        h5["coords"].attrs["level0_width"] = 2700
    problem = failure(source, tmp_path / "out", "stamp", slides={"slide": tiff})
    assert "(2700, 1800) pixels" in problem


def test_coordinates_without_a_unit_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "slide.npz", features=np.ones((2, 3)), coords=[[0, 0], [1, 1]])
    assert "the unit of its coordinates" in failure(
        tmp_path / "slide.npz", tmp_path / "out", "caprmil"
    )


def test_invalid_options_are_refused_at_once(full_bag: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'stamp'"):
        convert({"slide": full_bag}, tmp_path, "stmp")
    with pytest.raises(SlideError, match="250 um/px"):
        convert({"slide": full_bag}, tmp_path, "stamp", slide_mpp=250)
