"""What batches promise: padding is told from patches, and an order can be had again."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from caprmil import bags
from caprmil.bags import Bag
from caprmil.batches import BagDataset, Batch, Cache, EpochSampler, Sample, collate, load
from caprmil.errors import BagError


def bag(length: int, *, placed: bool = True, dtype: str = "float32") -> Bag:
    """A bag in which no value is zero, on a grid of two columns."""
    features = np.arange(1, 3 * length + 1, dtype=dtype).reshape(length, 3)
    coords = 256 * np.stack([np.arange(length) % 2, np.arange(length) // 2], axis=1)
    return bags.from_arrays(features, coords if placed else None, step=256.0 if placed else None)


def batch(*contents: Bag) -> Batch:
    return collate([(Sample(f"s{n}", each, n), each) for n, each in enumerate(contents)])


def write(path: Path, length: int) -> Path:
    return bags.write(path, bag(length).features, dtype="float32")


def samples(labels: str) -> list[Sample]:
    return [Sample(str(n), bag(1), int(label)) for n, label in enumerate(labels)]


def order(sampler: EpochSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_padding_is_zero_and_false_in_the_mask() -> None:
    short, long = bag(2), bag(5)
    both = batch(short, long)
    assert both.mask is not None
    assert both.mask.tolist() == [[True, True, False, False, False], [True] * 5]
    assert np.array_equal(both.features[0, :2], short.features)
    assert np.array_equal(both.features[1], long.features)
    assert both.features[~both.mask].eq(0).all()


def test_slides_and_labels_stand_in_the_order_of_their_bags() -> None:
    both = batch(bag(2), bag(5))
    assert (both.slides, both.labels.tolist()) == (("s0", "s1"), [0, 1])


def test_one_bag_has_neither_padding_nor_mask() -> None:
    alone = batch(bag(4))
    assert alone.mask is None
    assert alone.features.shape == (1, 4, 3)


@pytest.mark.parametrize("number", [1, 2])
def test_half_precision_stays_half(number: int) -> None:
    assert batch(*[bag(4, dtype="float16")] * number).features.dtype == torch.float16


def test_the_grid_goes_with_its_patches() -> None:
    both = batch(bag(2), bag(3))
    assert both.grid is not None
    assert both.grid.tolist() == [[[0, 0], [1, 0], [0, 0]], [[0, 0], [1, 0], [0, 1]]]


def test_there_is_no_grid_where_one_bag_knows_none() -> None:
    assert batch(bag(2), bag(3, placed=False)).grid is None


def test_a_cache_gives_the_same_bag_again(tmp_path: Path) -> None:
    cache, path = Cache(1.0), write(tmp_path / "a.h5", 4)
    assert cache.read(path) is cache.read(path)
    assert np.array_equal(cache.read(path).features, bags.read(path).features)


def test_a_cache_keeps_to_its_limit_and_keeps_what_it_has(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.h5", 10) for n in range(4)]  # 120 bytes each
    cache = Cache(300e-9)
    first = [cache.read(path) for path in paths]
    assert [cache.read(path) is bag for path, bag in zip(paths, first, strict=True)] == [
        *(True, True, False, False)
    ]


def test_workers_read_the_same_bags_and_keep_none(tmp_path: Path) -> None:
    wanted, cache = [Sample(str(n), write(tmp_path / f"{n}.h5", n + 1)) for n in range(3)], Cache(1)
    read = list(load(wanted, cache=cache, workers=1))
    assert [b.features.shape[1] for b in read] == [1, 2, 3]
    assert cache.kept == {}


def test_a_bag_that_cannot_be_read_says_of_which_slide(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"nothing")
    with pytest.raises(BagError) as caught:
        BagDataset([Sample("slide_7", tmp_path / "a.h5")], Cache(0))[0]
    assert "while reading slide slide_7" in caught.value.__notes__


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    one, other = (EpochSampler(samples("01" * 10), seed=5, balanced=False) for _ in range(2))
    later = order(one, 3)
    order(other, 0)
    assert order(other, 3) == later == order(one, 3)


def test_the_order_changes_with_the_epoch_and_with_the_seed() -> None:
    orders = {
        tuple(order(EpochSampler(samples("01" * 10), seed=seed, balanced=False), epoch))
        for seed in (5, 6)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 6


def test_an_epoch_has_every_slide_once() -> None:
    assert sorted(order(EpochSampler(samples("0" * 20), seed=5, balanced=False), 1)) == [*range(20)]


def test_balanced_sampling_draws_every_class_as_often() -> None:
    labels = "0" * 90 + "1" * 9 + "2"
    sampler = EpochSampler(samples(labels), seed=0, balanced=True)
    drawn = Counter(labels[at] for epoch in range(100) for at in order(sampler, epoch))
    assert len(list(sampler)) == 100
    assert all(abs(count / 10_000 - 1 / 3) < 0.02 for count in drawn.values())  # 4 sigma
