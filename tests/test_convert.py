"""What conversion promises: every row stays at its place on the slide, and that can be seen.

The slide here says in every pixel where it is. Features are what the pixels of their patch say, so
that a converted file can be checked by nothing but its own words, read as its tool documents them.
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

from caprmil.errors import SlideError, UnknownNameError
from caprmil.features import bags, level0
from caprmil.features.convert import FORMATS, SIZES, Conversion, convert
from caprmil.slides.slide import Slide

MPP = 0.2527
SIZE = (2600, 1800)
CELLS = np.array([[c, r] for r in range(6) for c in range(9) if (c * r) % 4 != 3])  # with holes
SIDE = 64 / MPP  # 64 pixels of 1 um/px: 253.26 level-0 pixels
OURS: dict[str, Any] = {
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
    """Ask the pixels of each patch where its centre is."""

    def place(pixel: NDArray[Any]) -> NDArray[np.float64]:
        r, g, b = pixel.astype(int)
        return np.array([r + 256 * (b & 15), g + 256 * (b >> 4)], dtype=float)

    with Slide(tiff) as slide:
        seen = [slide.read(x, y, side, round(side)) for x, y in corners.tolist()]
    return np.array([(place(p[0, 0]) + place(p[-1, -1]) + 1) / 2 for p in seen])


def encoded(places: NDArray[Any]) -> NDArray[np.float32]:
    """Write places so that half precision can hold them."""
    return np.hstack([places // 64, places % 64]).astype(np.float32)


def decoded(features: NDArray[Any]) -> NDArray[np.float64]:
    return np.float64(features[:, :2]) * 64 + features[:, 2:]


# A bag of each tool, built by hand as it does, on its own grid


def built_caprmil(folder: Path, tiff: Path) -> Path:
    corners = np.rint(CELLS * SIDE).astype(int)
    return bags.write(folder / "slide.h5", encoded(centres(tiff, corners, SIDE)), corners, **OURS)


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
            patch_size=140,  # at level 1, with an overlap that only this file tells of
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
    said = {"extractor": "uni_v1", "unit": "um", "tile_size_um": 64.0, "tile_size_px": 56}
    with h5py.File(folder / "slide.h5", "w") as file:
        file["feats"] = np.float16(encoded(centres(tiff, corners, 64 / MPP)))
        file["coords"] = um
        file.attrs.update(said, stamp_version="2.3.0", code_hash="0123abcd", feat_type="tile")
    return folder / "slide.h5"


BUILT: dict[str, Callable[[Path, Path], Path]] = {
    "caprmil": built_caprmil,
    "trident": built_trident,
    "clam": built_clam,
    "stamp": built_stamp,
}


# The words of each layout, read as its tool documents them, without our reader


def read_caprmil(path: Path) -> Read:
    with h5py.File(path) as file:
        return file["features"][()], file["coords"][()], file.attrs["patch_level0"]


def read_trident(path: Path) -> Read:
    with h5py.File(path) as file:
        side = file["coords"].attrs["patch_size_level0"]
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


def moved(source: Path, out: Path, to: str, **options: Any) -> Path:
    """Convert one bag, and return the file with its features."""
    done = convert({"slide": source}, out, to, **options)
    assert not done.failed
    return done.written[0]


def failure(source: Path, out: Path, to: str, **options: Any) -> str:
    done = convert({"slide": source}, out, to, **options)
    assert done.written == done.kept == []
    return done.failed["slide"]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A bag that says everything, without a slide."""
    features = np.random.default_rng(0).normal(size=(len(CELLS), 6))
    corners = np.rint(CELLS * SIDE).astype(int)
    return bags.write(tmp_path / "ours" / "slide.h5", features, corners, **OURS)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("of", FORMATS)
def test_the_pixels_say_that_every_row_is_at_its_place(
    of: str, to: str, tiff: Path, tmp_path: Path
) -> None:
    source = BUILT[of](tmp_path, tiff)
    told: dict[str, Any] = {"patch_px": 224, "encoder": "uni_v1"} if of == "clam" else {}
    path = moved(source, tmp_path / "out", to, slides={"slide": tiff}, **told)
    assert bags.inspect(path).kind == to
    features, corners, side = READ[to](path)
    assert len(features) == len(CELLS)
    off = np.abs(decoded(features) - centres(tiff, corners, side))
    assert off.max() <= 1


def test_the_pixel_test_would_see_a_wrong_scale(tiff: Path, tmp_path: Path) -> None:
    path = moved(built_stamp(tmp_path, tiff), tmp_path / "out", "caprmil", slide_mpp=0.26)
    features, corners, side = read_caprmil(path)
    assert np.abs(decoded(features) - centres(tiff, corners, side)).max() > 10


# There and back


@pytest.mark.parametrize("to", ["trident", "stamp"])
def test_there_and_back_nothing_is_lost(to: str, ours: Path, tmp_path: Path) -> None:
    there = moved(ours, tmp_path / "there", to)
    back = bags.read(moved(there, tmp_path / "back", "caprmil"))
    before = bags.read(ours)
    assert replace(back.info, path=ours) == before.info
    np.testing.assert_array_equal(back.features, before.features)
    np.testing.assert_array_equal(back.coords, before.coords)


def test_clam_keeps_the_grid_and_the_rest_is_told_again(ours: Path, tmp_path: Path) -> None:
    there = moved(ours, tmp_path / "there", "clam")
    back = bags.read(moved(there, tmp_path / "back", "caprmil"))
    assert (back.info.encoder, back.info.mpp, back.info.patch_px) == (None, None, None)
    told = moved(there, tmp_path / "told", "caprmil", patch_px=64, encoder="uni_v1")
    info = bags.inspect(told)
    assert info.mpp == pytest.approx(1.0)
    lost = {"fingerprint": None, "settings": None, "dtype": "float32"}
    assert replace(info, mpp=1.0) == replace(bags.inspect(ours), path=told, **lost)
    np.testing.assert_array_equal(back.features, bags.read(ours).features)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None
)
@given(
    cells=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6),
    slide_mpp=st.floats(0.1, 1.0),
    side=st.floats(20, 2000),
    overlap=st.sampled_from([0, 0.25, 0.5]),
)
def test_any_grid_comes_back_to_the_pixel(
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
        there = moved(source, folder / to, to)
        back = bags.read(moved(there, folder / to / "back", "caprmil"))
        np.testing.assert_array_equal(back.coords, corners)
        np.testing.assert_array_equal(back.features, features)
        assert {name: getattr(back.info, name) for name in lengths} == pytest.approx(lengths)


@pytest.mark.parametrize("to", ["trident", "clam", "stamp"])
def test_without_our_notes_the_tools_own_words_suffice(to: str, ours: Path, tmp_path: Path) -> None:
    there = moved(ours, tmp_path / "there", to)
    for file in (tmp_path / "there").rglob("*.h5"):
        with h5py.File(file, "a") as h5:
            for holder in (h5, *h5.values()):
                for name in [name for name in holder.attrs if name.startswith("caprmil_")]:
                    del holder.attrs[name]
    back = bags.read(moved(there, tmp_path / "back", "caprmil", slide_mpp=MPP))
    np.testing.assert_array_equal(back.coords, bags.read(ours).coords)
    assert back.info.patch_level0 == pytest.approx(SIDE, abs=0.5)
    assert back.info.scale_rule == {"trident": "nominal", "clam": None, "stamp": "exact"}[to]
    assert back.info.mpp == {"trident": 1.0, "clam": None, "stamp": pytest.approx(1.0)}[to]


# What each layout looks like


def test_a_trident_job_looks_like_one(ours: Path, tmp_path: Path) -> None:
    job = tmp_path / "job" / "10x_64px_0px_overlap"
    path = moved(ours, tmp_path / "job", "trident")
    assert path == job / "features_uni_v1" / "slide.h5"
    expected = {
        "patch_size": 64,
        "patch_size_level0": 253,  # true; 64 * 40 // 10 = 256 would be the next patch's pixels
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
            said = dict(h5["coords"].attrs)
            assert {name: said[name] for name in expected} == expected
            assert not {"caprmil_fingerprint", "caprmil_settings"} & said.keys()
            assert (h5["coords"].dtype, h5["coords"].chunks) == (np.int64, (1, 2))
            assert h5["coords"].maxshape == (None, 2)
    with h5py.File(path) as h5:
        assert (h5["features"].chunks, h5["features"].maxshape) == ((1, 6), (None, 6))
        assert h5["features"].attrs["encoder"] == "uni_v1"


@pytest.mark.parametrize(
    ("mpp", "step", "folder"),
    [(0.5, 1.0, "20x_64px_0px"), (256 / 224, 0.75, "8.75x_64px_16px"), (0.2515, 1, "40x_64px_0px")],
)
def test_the_folder_of_a_trident_job_tells_scale_and_overlap(
    mpp: float, step: float, folder: str, tmp_path: Path
) -> None:
    side = 64 * mpp / MPP
    said = {**OURS, "mpp": mpp, "patch_level0": side, "step": side * step, "encoder": "hub:a/b"}
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [1, 1]], **said)
    path = moved(source, tmp_path / "job", "trident")
    assert path.parent == tmp_path / "job" / f"{folder}_overlap" / "features_hub_a_b"


@pytest.mark.parametrize(("slide_mpp", "bucket"), [(0.12, 80), (0.299, 40), (0.301, 20), (5.0, 2)])
def test_a_slide_has_the_magnification_of_its_bucket(
    slide_mpp: float, bucket: int, tmp_path: Path
) -> None:
    said = {**OURS, "mpp": 8.0, "patch_level0": 512 / slide_mpp, "slide_mpp": slide_mpp}
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [1, 1]], **said)
    with h5py.File(moved(source, tmp_path / "job", "trident")) as h5:
        assert h5["coords"].attrs["level0_magnification"] == bucket


def test_a_nominal_bag_has_the_magnification_its_rule_began_with(
    tiff: Path, tmp_path: Path
) -> None:
    source = moved(built_trident(tmp_path, tiff), tmp_path / "ours", "caprmil")
    with h5py.File(moved(source, tmp_path / "job", "trident")) as h5:
        said = h5["coords"].attrs
        assert (said["level0_magnification"], said["target_magnification"]) == (40, 10)
        assert said["patch_size_level0"] == 256


def test_clam_has_its_three_folders_and_a_list_of_sizes(ours: Path, tmp_path: Path) -> None:
    path = moved(ours, tmp_path / "out", "clam")
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
    convert({"other": ours}, tmp_path / "out", "clam")
    assert (tmp_path / "out" / SIZES).read_text() == "slide,2600,1800\nother,2600,1800\n"


def test_stamp_counts_in_micrometres(ours: Path, tmp_path: Path) -> None:
    with h5py.File(moved(ours, tmp_path / "out", "stamp")) as h5:
        assert (h5["feats"].dtype, h5["coords"].dtype) == (np.float16, np.float32)
        assert h5["feats"].chunks is h5["coords"].chunks is None
        said = dict(h5.attrs)
        expected = {"extractor": "uni_v1", "unit": "um", "tile_size_um": 64.0, "tile_size_px": 64}
        assert {name: said[name] for name in expected} == expected
        assert said["feat_type"] == "tile"
        assert "caprmil" in said["stamp_version"]
        assert len(bytes.fromhex(said["code_hash"])) == 4


def test_without_a_file_of_patches_clams_are_taken_to_touch(tiff: Path, tmp_path: Path) -> None:
    source = built_clam(tmp_path, tiff)
    found = bags.inspect(moved(source, tmp_path / "one", "caprmil"))
    assert (found.patch_level0, found.step) == (280, 240)
    (tmp_path / "patches" / "slide.h5").unlink()
    info = bags.inspect(moved(source, tmp_path / "two", "caprmil"))
    assert (info.patch_level0, info.step) == (240, 240)
    assert (info.mpp, info.patch_px, info.encoder) == (None, None, None)


def test_a_file_of_other_patches_is_not_believed(tiff: Path, tmp_path: Path) -> None:
    source = built_clam(tmp_path, tiff)
    with h5py.File(tmp_path / "patches" / "slide.h5", "a") as h5:
        h5["coords"][0] += 1
    assert bags.inspect(moved(source, tmp_path / "out", "caprmil")).patch_level0 == 240


def test_historic_stamp_files_are_put_on_the_slide(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "slide.h5", "w") as h5:
        h5["feats"], h5["coords"] = np.ones((len(CELLS), 3), np.float16), CELLS * 224
    bag = bags.read(moved(tmp_path / "slide.h5", tmp_path / "out", "caprmil", slide_mpp=0.5))
    np.testing.assert_array_equal(bag.coords, CELLS * 512)
    assert (bag.info.patch_level0, bag.info.patch_px) == (512, 224)


def test_a_bag_without_coordinates_can_still_become_ours(tmp_path: Path) -> None:
    torch.save(torch.ones(4, 3), tmp_path / "slide.pt")
    path = moved(tmp_path / "slide.pt", tmp_path / "out", "caprmil", encoder="uni_v1")
    bag = bags.read(path)
    assert (bag.coords, bag.info.encoder) == (None, "uni_v1")
    for to in ("trident", "clam", "stamp"):
        assert "no coordinates" in failure(path, tmp_path / "theirs", to)


# Large, broken, and there already


def test_a_bag_is_never_in_memory_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 20_000
    corners = np.stack([np.arange(n), np.arange(n)], axis=1)
    features = np.random.default_rng(0).normal(size=(n, 256)).astype(np.float16)
    source = bags.write(tmp_path / "slide.h5", features, corners, **{**OURS, "slide_size": None})
    monkeypatch.setattr(level0, "BLOCK", 2**16)
    for to in ("stamp", "caprmil"):
        tracemalloc.start()
        path = moved(source, tmp_path / to, to)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < features.nbytes / 4
        np.testing.assert_array_equal(bags.read(path).features, features)


@pytest.mark.parametrize("to", FORMATS)
def test_giving_the_command_again_keeps_what_is_there(to: str, ours: Path, tmp_path: Path) -> None:
    path = moved(ours, tmp_path / "out", to)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.*")}
    assert convert({"slide": ours}, tmp_path / "out", to) == Conversion(kept=[path])
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_what_is_missing_is_made_up_for(ours: Path, tmp_path: Path) -> None:
    path = moved(ours, tmp_path / "out", "clam")
    (tmp_path / "out" / "pt_files" / "slide.pt").unlink()
    assert convert({"slide": ours}, tmp_path / "out", "clam").written == [path]
    assert (tmp_path / "out" / "pt_files" / "slide.pt").is_file()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("change", ["features", "coords", "scale"])
def test_another_bag_of_that_name_is_replaced_only_if_asked(
    change: str, to: str, ours: Path, tmp_path: Path
) -> None:
    bag = bags.read(ours)
    features, corners, said = bag.features.copy(), bag.coords, dict(OURS)
    if change == "features":
        features[-1] += 1
    elif change == "coords":
        corners = corners + 1
    else:
        said |= {"patch_level0": 300.0, "step": 300.0, "slide_mpp": 64 / 300}
    other = bags.write(tmp_path / "other.h5", features, corners, **said)
    path = moved(ours, tmp_path / "out", to)
    before = path.read_bytes()
    assert "--replace" in failure(other, tmp_path / "out", to)
    assert path.read_bytes() == before
    moved(other, tmp_path / "out", to, replace=True)
    assert convert({"slide": other}, tmp_path / "out", to).kept == [path]


def test_a_bag_is_not_written_over_itself(ours: Path) -> None:
    before = ours.read_bytes()
    for to in ("stamp", "caprmil"):
        assert "over itself" in failure(ours, ours.parent, to, replace=True)
    assert ours.read_bytes() == before


def test_a_broken_bag_does_not_stop_the_others(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.h5").write_bytes(ours.read_bytes()[:3000])
    steps: list[tuple[int, int]] = []
    sources = {"cut": tmp_path / "cut.h5", "slide": ours}
    done = convert(
        sources, tmp_path / "out", "stamp", progress=lambda at, of: steps.append((at, of))
    )
    assert [path.name for path in done.written] == ["slide.h5"]
    assert "cut short" in done.failed["cut"]
    assert steps == [(1, 2), (2, 2)]


@pytest.mark.parametrize("to", FORMATS)
def test_a_bag_that_turns_out_bad_leaves_no_features(to: str, ours: Path, tmp_path: Path) -> None:
    with h5py.File(ours, "a") as h5:
        h5["features"][5] = np.nan
    assert "NaN" in failure(ours, tmp_path / "out", to)
    left = {file.parent.name for file in (tmp_path / "out").rglob("*.*")}
    assert left <= {"patches"}


def test_features_too_large_for_stamp_are_refused_there_alone(tmp_path: Path) -> None:
    large = np.full((2, 3), 70_000.0)
    corners = [[0, 0], [1, 1]]
    source = bags.write(tmp_path / "slide.h5", large, corners, dtype="float32", **OURS)
    assert "do not fit into float16" in failure(source, tmp_path / "out", "stamp")
    assert bags.read(moved(source, tmp_path / "out", "trident")).features.max() == 70_000


# What a bag does not say


@pytest.mark.parametrize(
    ("unsaid", "to", "remedy"),
    [
        (("encoder",), "trident", "--encoder"),
        (("encoder",), "stamp", "--encoder"),
        (("patch_px",), "stamp", "--patch-px"),
        (("slide_mpp", "patch_level0"), "stamp", "how wide"),
        (("slide_mpp", "mpp"), "stamp", "--slides or --slide-mpp"),
        (("slide_mpp", "mpp"), "trident", "--slides or --slide-mpp"),
        (("slide_mpp", "patch_level0"), "clam", "how wide"),
    ],
)
def test_what_is_not_known_is_asked_for(
    unsaid: tuple[str, ...], to: str, remedy: str, tmp_path: Path
) -> None:
    said = {**OURS, **dict.fromkeys(unsaid)}
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [300, 1]], **said)
    assert remedy in failure(source, tmp_path / "out", to)


def test_micrometres_need_the_scale_of_the_slide(tiff: Path, tmp_path: Path) -> None:
    source = built_stamp(tmp_path, tiff)
    assert "Pass --slides or --slide-mpp" in failure(source, tmp_path / "a", "caprmil")
    of_slide = moved(source, tmp_path / "b", "caprmil", slides={"slide": tiff})
    told = moved(source, tmp_path / "c", "caprmil", slide_mpp=MPP)
    np.testing.assert_array_equal(bags.read(of_slide).coords, bags.read(told).coords)


def test_an_exact_bag_implies_the_scale_of_its_slide(tmp_path: Path) -> None:
    said = {**OURS, "slide_mpp": None}
    source = bags.write(tmp_path / "slide.h5", np.ones((2, 3)), [[0, 0], [300, 1]], **said)
    with h5py.File(moved(source, tmp_path / "out", "stamp")) as h5:
        assert h5["coords"][1, 0] == pytest.approx(300 * MPP)


@pytest.mark.parametrize("told", [{"slide_mpp": 0.5}, {"patch_px": 224}])
def test_nobody_may_contradict_a_bag(told: dict[str, Any], ours: Path, tmp_path: Path) -> None:
    assert "Leave the option out" in failure(ours, tmp_path / "out", "stamp", **told)


def test_a_scale_that_throws_patches_off_the_slide_is_wrong(tiff: Path, tmp_path: Path) -> None:
    source = built_stamp(tmp_path, tiff)
    options: dict[str, Any] = {"slides": {"slide": tiff}, "slide_mpp": 0.15}
    problem = failure(source, tmp_path / "out", "caprmil", **options)
    assert "its slide has 2600 x 1800 pixels" in problem


def test_another_scan_of_the_slide_is_noticed(tiff: Path, tmp_path: Path) -> None:
    source = built_trident(tmp_path, tiff)
    with h5py.File(source, "a") as h5:
        h5["coords"].attrs["level0_width"] = 2700
    problem = failure(source, tmp_path / "out", "stamp", slides={"slide": tiff})
    assert "(2700, 1800) pixels" in problem


def test_coordinates_without_a_unit_are_not_guessed(tmp_path: Path) -> None:
    np.savez(tmp_path / "slide.npz", features=np.ones((2, 3)), coords=[[0, 0], [1, 1]])
    assert "in what unit" in failure(tmp_path / "slide.npz", tmp_path / "out", "caprmil")


def test_impossible_wishes_are_refused_before_any_work(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'stamp'"):
        convert({"slide": ours}, tmp_path, "stmp")
    with pytest.raises(SlideError, match="250 um/px"):
        convert({"slide": ours}, tmp_path, "stamp", slide_mpp=250)
