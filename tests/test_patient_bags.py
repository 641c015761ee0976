"""Bags of patients: the patches of several slides, one slide after the other, side by side."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caprmil.errors import BagError
from caprmil.features import bag_files, bags
from caprmil.features.bag_files import SlideBags
from caprmil.features.batches import Cache, Sample, collate
from caprmil.models import create
from patient_cohort import write_bag


def slides_of(folder: Path, **changes: dict[str, Any]) -> dict[str, Path]:
    """Three slides of one patient, with grids of different sizes and scales."""
    rng = np.random.default_rng(0)
    found = {}
    for name, n, columns, step in (("a", 12, 4, 224), ("b", 7, 3, 448), ("c", 1, 1, 224)):
        corner = rng.integers(0, 5000, size=2)
        places = np.stack([np.arange(n) % columns, np.arange(n) // columns], axis=1)
        sizes: dict[str, Any] = {"step": float(step), "patch_level0": float(step)}
        sizes |= {"slide_mpp": 224 / step, **changes.get(name, {})}
        features = rng.normal(size=(n, 8)).astype(np.float32)
        path = folder / f"{name}.h5"
        found[name] = write_bag(path, features, corner + step * places, **sizes)
    return found


def naive_bag(paths: dict[str, Path]) -> tuple[list[list[float]], list[list[int]], list[int]]:
    """Return features, cells and numbers of slides, patch by patch."""
    features: list[list[float]] = []
    cells: list[list[int]] = []
    numbers: list[int] = []
    column = 0
    for number, path in enumerate(paths.values()):
        bag = bags.read(path)
        assert bag.coords is not None
        own = bag.coords.tolist()
        left, top = min(x for x, _ in own), min(y for _, y in own)
        step = bag.info.step or 224
        for row, (x, y) in zip(bag.features.tolist(), own, strict=True):
            features.append(row)
            cells.append([column + round((x - left) / step), round((y - top) / step)])
            numbers.append(number)
        column = max(cell[0] for cell in cells) + 1 + 2
    return features, cells, numbers


def test_the_bag_of_a_patient_has_the_patches_of_all_slides_and_their_grids_side_by_side(
    tmp_path: Path,
) -> None:
    paths = slides_of(tmp_path)
    bag, (features, cells, numbers) = bag_files.read(SlideBags.of(paths)), naive_bag(paths)
    assert bag.features.tolist() == features
    grid = bag.grid()
    assert grid is not None
    assert grid.tolist() == cells
    assert bag.slide_of is not None
    assert bag.slide_of.tolist() == numbers
    assert bag.info.n_patches == 20
    assert [slide.name for slide in bag.info.slides] == ["a", "b", "c"]


def test_the_coordinates_of_each_slide_are_found_again(tmp_path: Path) -> None:
    paths = slides_of(tmp_path)
    bag = bag_files.read(SlideBags.of(paths))
    assert bag.coords is not None
    assert bag.slide_of is not None
    for number, (place, path) in enumerate(zip(bag.info.slides, paths.values(), strict=True)):
        own = place.own(bag.coords[bag.slide_of == number])
        assert own.dtype == np.int64
        np.testing.assert_array_equal(own, bags.read(path).coords)


def test_patches_of_two_slides_do_not_overlap_in_the_picture(tmp_path: Path) -> None:
    bag = bag_files.read(SlideBags.of(slides_of(tmp_path)))
    assert bag.coords is not None
    assert bag.info.slide_size is not None
    corners, side = bag.coords, bag.info.patch_level0
    assert side == 224.0  # that of the first slide; the second has twice as many pixels
    for one in range(len(corners)):
        for other in range(one):
            assert np.abs(corners[one] - corners[other]).max() >= side - 1e-6
    assert (corners >= 0).all()
    assert (corners + side <= bag.info.slide_size).all()


def test_a_selection_keeps_the_slides_of_its_patches(tmp_path: Path) -> None:
    bag = bag_files.read(SlideBags.of(slides_of(tmp_path)))
    part = bag.select(np.array([0, 3, 13, 19]))
    assert part.slide_of is not None
    assert part.slide_of.tolist() == [0, 0, 1, 2]
    grid = part.grid()
    assert grid is not None
    assert grid[:, 0].tolist() == [0, 3, 6, 11]


def test_a_stream_of_a_patient_is_its_bag(tmp_path: Path) -> None:
    files = SlideBags.of(slides_of(tmp_path))
    bag = bag_files.read(files)
    with bag_files.streaming(files, rows=5) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream())), bag.features)
        np.testing.assert_array_equal(stream.grid(), bag.grid())
        assert stream.info == bag.info
    assert bag_files.inspect(files).n_patches == bag.info.n_patches


def test_a_slide_without_coordinates_leaves_the_patient_without_a_grid(tmp_path: Path) -> None:
    paths = slides_of(tmp_path)
    plain = tmp_path / "d.npy"
    np.save(plain, np.ones((3, 8), dtype=np.float32))
    bag = bag_files.read(SlideBags.of({**paths, "d": plain}))
    assert bag.coords is None
    assert bag.grid() is None
    assert len(bag.features) == 23


def test_slides_of_different_widths_cannot_be_one_bag(tmp_path: Path) -> None:
    paths = slides_of(tmp_path)
    plain = tmp_path / "d.npy"
    np.save(plain, np.ones((3, 9), dtype=np.float32))
    with pytest.raises(BagError, match="a has 8, d has 9"):
        bag_files.read(SlideBags.of({"a": paths["a"], "d": plain}))


@pytest.mark.parametrize("name", ["mean", "abmil", "caprmil", "clam", "dsmil"])
def test_answers_do_not_depend_on_the_order_of_slides(name: str, tmp_path: Path) -> None:
    paths = slides_of(tmp_path)
    orders = (["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"])
    found = [SlideBags.of({key: paths[key] for key in order}) for order in orders]
    torch.manual_seed(0)
    settings = {"dim": 16, "heads": 2} if name == "caprmil" else {}
    model = create(name, 8, 2, **settings).eval()
    logits = []
    for files in found:
        batch = collate([(Sample("p", files), bag_files.read(files))])
        with torch.no_grad():
            logits.append(model(batch.features, grid=batch.grid).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-4, atol=1e-5)


def test_the_cache_keeps_the_bag_of_a_patient(tmp_path: Path) -> None:
    files, cache = SlideBags.of(slides_of(tmp_path)), Cache(1.0)
    assert cache.read(files) is cache.read(SlideBags(files.slides, files.paths))
