"""Batches: packing and padding, the cache, prefetching, and the order of an epoch."""

import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch

from caprmil.errors import BagError
from caprmil.features import bags
from caprmil.features.bags import Bag
from caprmil.features.batches import (
    BagDataset,
    Batch,
    Cache,
    Sample,
    collate,
    load,
    random_rows,
)
from caprmil.training.data import EpochSampler


def bag(length: int, *, has_coords: bool = True, dtype: str = "float32") -> Bag:
    """Return a bag without zeros, on a grid of two columns."""
    features = np.arange(1, 3 * length + 1, dtype=dtype).reshape(length, 3)
    coords = 256 * np.stack([np.arange(length) % 2, np.arange(length) // 2], axis=1)
    return bags.from_arrays(
        features, coords if has_coords else None, step=256.0 if has_coords else None
    )


def batch(*contents: Bag, padded: bool = False) -> Batch:
    items = [(Sample(f"s{n}", each, n), each) for n, each in enumerate(contents)]
    return collate(items, padded=padded)


def write(path: Path, length: int) -> Path:
    return bags.write(path, bag(length).features, dtype="float32")


def samples(labels: str) -> list[Sample]:
    return [Sample(str(n), bag(1), int(label)) for n, label in enumerate(labels)]


def order(sampler: EpochSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_padding_is_zero_and_false_in_the_mask() -> None:
    short, long = bag(2), bag(5)
    both = batch(short, long, padded=True)
    assert both.sizes is None
    assert both.mask is not None
    assert both.mask.tolist() == [[True, True, False, False, False], [True] * 5]
    assert np.array_equal(both.features[0, :2], short.features)
    assert np.array_equal(both.features[1], long.features)
    assert both.features[~both.mask].eq(0).all()


def test_packed_bags_are_concatenated_without_padding() -> None:
    short, long = bag(2), bag(5)
    both = batch(short, long)
    assert (both.sizes, both.mask) == ((2, 5), None)
    assert np.array_equal(both.features, [np.concatenate([short.features, long.features])])


def test_slides_and_labels_have_the_order_of_their_bags() -> None:
    both = batch(bag(2), bag(5))
    assert (both.slides, both.labels.tolist()) == (("s0", "s1"), [0, 1])


@pytest.mark.parametrize("padded", [False, True])
def test_one_bag_is_neither_packed_nor_padded(padded: bool) -> None:
    alone = batch(bag(4), padded=padded)
    assert (alone.mask, alone.sizes) == (None, None)
    assert alone.features.shape == (1, 4, 3)


@pytest.mark.parametrize(("number", "padded"), [(1, False), (2, False), (2, True)])
def test_half_precision_is_kept(number: int, padded: bool) -> None:
    both = batch(*[bag(4, dtype="float16")] * number, padded=padded)
    assert both.features.dtype == torch.float16


def test_the_grid_is_packed_and_padded_like_the_features() -> None:
    packed, padded = (batch(bag(2), bag(3), padded=padded).grid for padded in (False, True))
    assert packed is not None
    assert padded is not None
    assert packed.tolist() == [[[0, 0], [1, 0], [0, 0], [1, 0], [0, 1]]]
    assert padded.tolist() == [[[0, 0], [1, 0], [0, 0]], [[0, 0], [1, 0], [0, 1]]]


def test_there_is_no_grid_if_one_bag_has_none() -> None:
    assert batch(bag(2), bag(3, has_coords=False)).grid is None


@pytest.mark.parametrize("padded", [False, True])
def test_dropped_patches_leave_whole_rows_of_each_bag(padded: bool) -> None:
    torch.manual_seed(0)
    both = batch(bag(40), bag(200), padded=padded)
    fewer = both.drop_patches(0.9)
    assert fewer.grid is not None
    for number, content in enumerate((bag(40), bag(200))):
        if padded:
            assert fewer.mask is not None
            rows = fewer.features[number][fewer.mask[number]]
            cells = fewer.grid[number][fewer.mask[number]]
        else:
            assert fewer.sizes is not None
            start = sum(fewer.sizes[:number])
            rows = fewer.features[0, start : start + fewer.sizes[number]]
            cells = fewer.grid[0, start : start + fewer.sizes[number]]
        kept = (rows[:, 0].int() - 1) // 3  # the number of each patch in its bag
        assert 1 <= len(kept) < len(content.features)
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert torch.equal(cells[:, 0], kept % 2)
        assert torch.equal(cells[:, 1], torch.div(kept, 2, rounding_mode="floor"))


def test_the_share_of_dropped_patches_is_uniform_up_to_its_limit_and_one_patch_stays() -> None:
    torch.manual_seed(0)
    shares = [1 - random_rows(1000, 0.8).double().mean().item() for _ in range(400)]
    assert np.mean(shares) == pytest.approx(0.4, abs=0.04)
    assert min(shares) < 0.05
    assert 0.75 < max(shares) < 0.86
    assert all(random_rows(1, 0.99).all() for _ in range(50))


def test_a_cached_bag_is_returned_again(tmp_path: Path) -> None:
    cache, path = Cache(1.0), write(tmp_path / "a.h5", 4)
    assert cache.read(path) is cache.read(path)
    assert np.array_equal(cache.read(path).features, bags.read(path).features)


def test_the_cache_has_a_limit_and_does_not_evict(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.h5", 10) for n in range(4)]  # 120 bytes each
    cache = Cache(300e-9)
    first = [cache.read(path) for path in paths]
    assert [cache.read(path) is bag for path, bag in zip(paths, first, strict=True)] == [
        *(True, True, False, False)
    ]


def test_workers_read_the_same_bags_without_the_cache(tmp_path: Path) -> None:
    samples_on_disk, cache = (
        [Sample(str(n), write(tmp_path / f"{n}.h5", n + 1)) for n in range(3)],
        Cache(1),
    )
    read = list(load(samples_on_disk, cache=cache, workers=1))
    assert [b.features.shape[1] for b in read] == [1, 2, 3]
    assert cache.kept == {}


def test_the_error_of_a_bag_names_its_slide(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"nothing")
    with pytest.raises(BagError) as caught:
        BagDataset([Sample("slide_7", tmp_path / "a.h5")], Cache(0))[0]
    assert "while reading slide slide_7" in caught.value.__notes__


# Prefetching


def on_disk(folder: Path, n: int) -> list[Sample]:
    return [Sample(f"s{i}", write(folder / f"{i}.h5", i + 1)) for i in range(n)]


def readers() -> list[str]:
    """Return the names of prefetching threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_batches_are_in_order_and_no_thread_is_left(tmp_path: Path) -> None:
    read = load(on_disk(tmp_path, 5), batch_size=2)
    for _ in range(2):
        assert [b.slides for b in read] == [("s0", "s1"), ("s2", "s3"), ("s4",)]
    assert readers() == []
    assert list(load([])) == []


def test_exactly_one_batch_is_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, read = list[str](), bags.read
    monkeypatch.setattr(bags, "read", lambda path: (names.append(path.stem), read(path))[1])
    batches = iter(load(on_disk(tmp_path, 4)))
    next(batches)
    batches.close()  # waits for the batch that is being read
    assert names == ["0", "1"]
    assert readers() == []


def test_the_waiting_time_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = bags.read
    monkeypatch.setattr(bags, "read", lambda path: (sleep(0.05), read(path))[1])
    slow = load(on_disk(tmp_path, 3))
    list(slow)
    assert 0.1 < slow.waited < 10


def test_an_error_in_the_thread_keeps_its_message_and_note(tmp_path: Path) -> None:
    samples_on_disk = on_disk(tmp_path, 3)
    (tmp_path / "1.h5").write_bytes(b"nothing")
    batches = iter(load(samples_on_disk))
    assert next(batches).slides == ("s0",)
    with pytest.raises(BagError, match=r"1\.h5") as caught:
        next(batches)
    assert "while reading slide s1" in caught.value.__notes__
    assert readers() == []


def test_ctrl_c_while_reading_ends_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> Bag:
        signal.raise_signal(signal.SIGINT)
        sleep(0.2)
        return bag(1)

    monkeypatch.setattr(bags, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(load(on_disk(tmp_path, 3)))
    for _ in range(500):  # a thread that is starting ends by itself
        if not readers():
            break
        sleep(0.01)
    assert readers() == []


def test_an_abandoned_epoch_does_not_block_the_exit(tmp_path: Path) -> None:
    on_disk(tmp_path, 3)
    code = (
        "import sys; from pathlib import Path; from caprmil.features.batches import Sample, load\n"
        "paths = sorted(Path(sys.argv[1]).glob('*.h5'))\n"
        "batches = iter(load([Sample(p.stem, p) for p in paths])); next(batches); sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60).returncode == 7


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    one, other = (EpochSampler(len("01" * 10), seed=5) for _ in range(2))
    later = order(one, 3)
    order(other, 0)
    assert order(other, 3) == later == order(one, 3)


def test_the_order_changes_with_the_epoch_and_with_the_seed() -> None:
    orders = {
        tuple(order(EpochSampler(len("01" * 10), seed=seed), epoch))
        for seed in (5, 6)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 6


def test_an_epoch_has_every_slide_once() -> None:
    assert sorted(order(EpochSampler(len("0" * 20), seed=5), 1)) == [*range(20)]


def test_balanced_sampling_draws_all_classes_equally_often() -> None:
    labels = "0" * 90 + "1" * 9 + "2"
    sampler = EpochSampler(len(labels), seed=0, strata=[int(label) for label in labels])
    drawn = Counter(labels[at] for epoch in range(100) for at in order(sampler, epoch))
    assert len(list(sampler)) == 100
    assert all(abs(count / 10_000 - 1 / 3) < 0.02 for count in drawn.values())  # 4 sigma
