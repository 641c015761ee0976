"""Training: the paper's recipe, reproducible numbers, also after an interruption."""

import csv
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from caprmil.errors import BagError, RecipeError, RunError
from caprmil.features import bags, batches
from caprmil.features.batches import Batch, Sample, collate
from caprmil.models import MODELS, MILModel, create
from caprmil.models.layers import weighted_cross_entropy
from caprmil.runs.history import Row
from caprmil.runs.inference import TrainedModel, predict_samples
from caprmil.runs.timing import read_timing
from caprmil.synthetic import RareSignal
from caprmil.targets import Classification
from caprmil.training.checkpoints import CheckpointKeeper
from caprmil.training.module import (
    MILModule,
    TrainConfig,
    fit,
    kept_epoch,
    learning_rate,
)
from caprmil.training.trainer import usable_precision
from small_models import small_model

TARGET = Classification(classes=("normal", "tumour"))
STUDY = RareSignal(slides=20, width=16, patches=(10, 30), signal=0.3, stain=0.5)
SLIDES = [Sample(f"s{n}", bags.from_arrays(STUDY.bag(n)[0]), n % 2) for n in range(20)]
TRAIN, VALIDATION = SLIDES[:8], SLIDES[12:]
BALANCED = replace(TARGET, class_weights="balanced")
QUICK = {"epochs": 3, "warmup_epochs": 1, "lr": 3e-3, "patience": 100}
# The learning rate becomes too high: validation improves, then worsens, and training stops early.
EARLY_STOPPING = {"epochs": 30, "warmup_epochs": 20, "warmup_lr": 1e-3, "lr": 0.1, "patience": 2}


Result = tuple[dict[str, Tensor], list[Row]]  # weights and history


def tiny(seed: int = 0, **settings: Any) -> MILModel:
    torch.manual_seed(seed)
    return create("caprmil", 16, 2, **{"dim": 16, "heads": 2, **settings})


def learn(
    folder: Path,
    *,
    train: list[Sample] = TRAIN,
    validation: list[Sample] = VALIDATION,
    seed: int = 0,
    on_epoch: Callable[[Row], None] | None = None,
    model: MILModel | None = None,
    target: Classification = TARGET,
    **settings: Any,
) -> Result:
    model, config = model or tiny(), TrainConfig(**{**QUICK, **settings})
    options: dict[str, Any] = {
        "seed": seed,
        "on_epoch": on_epoch,
        "device": "cpu",
        "target": target,
    }
    history = fit(model, train, validation, folder=folder, settings=config, **options)
    return model.state_dict(), history


def read_table(path: Path) -> list[Row]:
    with path.open() as file:
        return [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def stop_after(epoch: int) -> Callable[[Row], None]:
    def on_epoch(row: Row) -> None:
        if row["epoch"] == epoch:
            raise KeyboardInterrupt

    return on_epoch


def as_batch(slides: list[Sample]) -> Batch:
    return collate([(slide, slide.bag) for slide in slides if isinstance(slide.bag, bags.Bag)])


def bag_loss(model: MILModel, slides: list[Sample]) -> float:
    """Return the mean cross-entropy, slide by slide."""
    probabilities = predict_samples(TrainedModel(model, TARGET), slides)
    return float(
        np.mean([-np.log(row[s.label]) for row, s in zip(probabilities, slides, strict=True)])
    )


# The recipe


def test_the_learning_rate_is_that_of_the_paper() -> None:
    warmup = [1e-5, 4.8e-5, 8.6e-5, 1.24e-4, 1.62e-4, 2e-4]
    cosine = [1e-7 + (2e-4 - 1e-7) * (1 + cos(pi * e / 24)) / 2 for e in range(24)]
    rates = [learning_rate(epoch, TrainConfig()) for epoch in range(30)]
    assert rates == pytest.approx(warmup + cosine, rel=1e-12)


def test_without_warm_up_the_learning_rate_is_a_cosine() -> None:
    plain = TrainConfig(warmup_epochs=0)
    expected = [1e-7 + (2e-4 - 1e-7) * (1 + cos(pi * e / 30)) / 2 for e in range(30)]
    assert [learning_rate(epoch, plain) for epoch in range(30)] == pytest.approx(expected)


def test_the_optimizer_steps_at_these_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, step = [], torch.optim.AdamW.step

    def record(optimizer: torch.optim.AdamW, *args: Any, **options: Any) -> Any:
        used.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    _, history = learn(tmp_path, warmup_epochs=2)
    expected = [learning_rate(e, TrainConfig(**QUICK | {"warmup_epochs": 2})) for e in range(3)]
    assert used == pytest.approx(np.repeat(expected, 8))
    assert [row["lr"] for row in history] == expected


def test_the_temperature_has_no_weight_decay() -> None:
    model = tiny()
    (optimizer,), _ = MILModule(model, TARGET, TrainConfig(), seed=0).configure_optimizers()
    decays = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert type(optimizer) is torch.optim.AdamW
    without_decay = [name for name, p in model.named_parameters() if decays[id(p)] == 0]
    assert without_decay == ["context.blocks.0.attend.temperature.raw"]
    assert len(decays) == len(list(model.parameters()))
    assert set(decays.values()) == {0.0, 1e-5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"lr": 0.0},
        {"clip": -1.0},
        {"warmup_epochs": 30},
        {"patience": 0},
        {"top_k": -1},
        {"probes": -1},
        {"drop_patches": 1.0},
    ],
    ids=str,
)
def test_an_invalid_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        TrainConfig(**wrong)


# Order, repetition


def test_the_same_seed_gives_the_same_weights_and_history(tmp_path: Path) -> None:
    one, first = learn(tmp_path / "a")
    torch.rand(7)  # earlier draws have no effect
    other, second = learn(tmp_path / "b")
    assert same(one, other)
    assert first == second


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    assert not same(learn(tmp_path / "a")[0], learn(tmp_path / "b", seed=1)[0])


def test_every_epoch_has_its_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, step = [], MILModule.training_step

    def record(self: MILModule, batch: Batch, number: int) -> Tensor:
        seen.extend(batch.slides)
        return step(self, batch, number)

    monkeypatch.setattr(MILModule, "training_step", record)
    learn(tmp_path)
    epochs = [seen[start : start + 8] for start in (0, 8, 16)]
    assert len(set(map(tuple, epochs))) == 3
    assert all(set(epoch) == {slide.slide for slide in TRAIN} for epoch in epochs)


def test_a_model_in_evaluation_mode_is_trained_with_dropout(tmp_path: Path) -> None:
    fresh, used = tiny(dropout=0.5), tiny(dropout=0.5).eval()
    assert same(learn(tmp_path / "a", model=fresh)[0], learn(tmp_path / "b", model=used)[0])


def test_validation_labels_affect_weights_only_by_early_stopping(tmp_path: Path) -> None:
    swapped = [slide._replace(label=1 - slide.label) for slide in VALIDATION]
    original, true = learn(tmp_path / "a", weights="last")
    changed, false = learn(tmp_path / "b", weights="last", validation=swapped)
    assert same(original, changed)
    assert [row["val_loss"] for row in true] != [row["val_loss"] for row in false]


def test_validation_does_not_change_the_training(tmp_path: Path) -> None:
    with_validation, without_validation = (
        learn(tmp_path / "a", weights="last"),
        learn(tmp_path / "b", validation=[]),
    )
    assert same(with_validation[0], without_validation[0])


# The options


def test_class_weights_apply_to_batches_of_one(tmp_path: Path) -> None:
    uneven = [slide for slide in TRAIN if slide.label == 0 or slide.slide == "s1"]
    options: dict[str, Any] = {"train": uneven, "validation": [], "epochs": 2}
    plain = learn(tmp_path / "a", **options)
    weighted = learn(tmp_path / "b", target=BALANCED, **options)
    assert not same(plain[0], weighted[0])


def test_class_weights_are_the_rarity_of_the_classes() -> None:
    uneven = [slide.label for slide in TRAIN if slide.label == 0 or slide.slide == "s1"]
    criterion = BALANCED.criterion(uneven)
    assert isinstance(criterion, partial)
    assert criterion.keywords["weights"].tolist() == pytest.approx([5 / 2 / 4, 5 / 2 / 1])


def test_a_trained_model_has_no_class_weights_left(tmp_path: Path) -> None:
    model = tiny()
    learn(tmp_path, model=model, target=BALANCED, epochs=2)
    assert model.criterion is weighted_cross_entropy


def test_balanced_sampling_draws_both_classes_equally_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven = [slide for slide in TRAIN if slide.label == 0 or slide.slide == "s1"]
    seen, terms = [], MILModule.training_step
    monkeypatch.setattr(
        MILModule,
        "training_step",
        lambda self, batch, n: (seen.extend(batch.labels.tolist()), terms(self, batch, n))[1],
    )
    learn(tmp_path, train=uneven, validation=[], sampling="balanced", epochs=12)
    assert np.mean(seen) == pytest.approx(1 / 2, abs=0.2)  # without it: 1 / 5


def test_clipping_bounds_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms, step = [], torch.optim.AdamW.step

    def record(optimizer: torch.optim.AdamW, closure: Any) -> Any:
        def watched() -> Any:
            loss = closure()
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            norms.append(float(torch.nn.utils.get_total_norm(grads)))
            return loss

        return step(optimizer, watched)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    learn(tmp_path / "a", validation=[], epochs=2)
    unclipped = max(norms)
    norms.clear()
    learn(tmp_path / "b", validation=[], epochs=2, clip=0.01)
    assert max(norms) <= 0.01 * 1.0001 < unclipped


def test_the_loss_of_a_batch_is_the_mean_over_its_bags() -> None:
    model = tiny().eval().requires_grad_(False)
    together = float(
        MILModule(model, TARGET, TrainConfig(), seed=0).loss_terms(as_batch(TRAIN))[1]["bag"]
    )
    assert together == pytest.approx(bag_loss(model, TRAIN), rel=1e-5)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_validation_loss_of_every_model_is_the_plain_cross_entropy(name: str) -> None:
    """It does not depend on the weight of the bag term, so curves and min_delta can be compared."""
    model = small_model(name, 16, 2).requires_grad_(False)
    module = MILModule(model, TARGET, TrainConfig(), seed=0, n_validation=len(TRAIN))
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    for slide in TRAIN:
        module.validation_step(as_batch([slide]), 0)
    module.on_validation_epoch_end()
    assert module.validation_row["val_loss"] == pytest.approx(bag_loss(model, TRAIN), rel=1e-5)
    terms = model.loss(model(**as_batch(TRAIN[:1]).inputs), as_batch(TRAIN[:1]).labels)
    logged = {f"val_{term}" for term in terms if term != "bag"}
    assert logged == module.validation_row.keys() - {"val_loss", "val_auc"}


def test_batches_of_several_bags_train_a_model(tmp_path: Path) -> None:
    five = TRAIN[:5]  # a batch of four, and one of one
    initial = bag_loss(tiny(), five)
    options: dict[str, Any] = {"train": five, "validation": [], "batch_size": 4}
    frozen: dict[str, Any] = {"lr": 1e-30, "warmup_lr": 1e-30, "min_lr": 1e-30}
    _, constant = learn(tmp_path / "a", **options, model=tiny(dropout=0.0), **frozen)
    _, trained = learn(tmp_path / "b", **options, epochs=15, lr=1e-2)
    assert constant[0]["train_loss"] == pytest.approx(initial, rel=1e-5)  # each bag counts once
    assert trained[-1]["train_loss"] < initial / 2


def test_packed_bags_give_the_weights_of_padded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "lr": 1e-3}
    packed, _ = learn(tmp_path / "a", model=tiny(dropout=0.0), **options)
    shapes = list[int]()

    def pad(items: Any, **_: Any) -> Batch:
        made = collate(items, padded=True)
        shapes.append(len(made.features))
        return made

    monkeypatch.setattr(batches, "collate", pad)
    padded, _ = learn(tmp_path / "b", model=tiny(dropout=0.0), **options)
    assert max(shapes) == 4  # otherwise both would be packed
    torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-5)


def test_training_on_packed_bags_is_reproducible_and_resumes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 3, "weights": "last"}
    whole = learn(tmp_path / "a", **options)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "b", **options, on_epoch=stop_after(1))
    resumed = learn(tmp_path / "b", **options)
    assert same(whole[0], resumed[0])
    assert whole[1] == resumed[1]


def test_the_waiting_time_for_bags_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="log")
    fit(
        tiny(),
        TRAIN,
        target=TARGET,
        folder=tmp_path,
        settings=TrainConfig(**QUICK),
        loggers=[logger],
    )
    logger.save()
    rows = read_table(tmp_path / "log" / "metrics.csv")
    assert all(0 <= row["seconds_waiting"] < 60 for row in rows)


def test_a_bag_that_cannot_be_read_stops_a_training_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "broken.h5").write_bytes(b"nothing")
    with pytest.raises(BagError, match=r"broken\.h5"):
        learn(tmp_path, train=[*TRAIN, Sample("s99", tmp_path / "broken.h5", 0)])


def test_half_precision_on_a_cpu_without_it_warns_and_trains_in_full(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="fp16"):
        halved, _ = learn(tmp_path / "a", precision="fp16")
    assert same(halved, learn(tmp_path / "b")[0])


def test_bfloat16_is_used_if_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert usable_precision("bf16", cpu) == "bf16-mixed"
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    with pytest.warns(UserWarning, match="bf16"):
        assert usable_precision("bf16", cpu) == "32-true"


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_loss_of_nan_is_an_error_with_advice(tmp_path: Path, part: str) -> None:
    model = tiny()
    odd = SLIDES[3 if part == "train" else 13]  # infinite for this slide only
    size = len(odd.bag.features) if isinstance(odd.bag, bags.Bag) else 0
    train, validation = [SLIDES[0], SLIDES[3]], [SLIDES[12], SLIDES[13]]
    assert len({len(s.bag.features) for s in (*train, *validation)}) == 4  # type: ignore[union-attr]

    def broken(output: Any, labels: Tensor) -> dict[str, Tensor]:
        found = weighted_cross_entropy(output.logits, labels)
        return {"bag": found / 0 if output.attention.shape[1] == size else found}

    model.loss = broken  # type: ignore[method-assign]
    with pytest.raises(RunError, match=rf"inf in epoch 0 at slide {odd.slide}\. Lower train.lr"):
        learn(tmp_path, model=model, train=train, validation=validation)
    assert not (tmp_path / "last.ckpt").exists()


# Which weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A training that stopped early, some epochs after its best."""
    return learn(tmp_path_factory.mktemp("whole"), **EARLY_STOPPING)


def best(result: Result) -> int:
    return kept_epoch(result[1], TrainConfig())


def test_training_stops_after_patience_epochs_without_improvement(whole: Result) -> None:
    losses, lowest, waited = [row["val_loss"] for row in whole[1]], float("inf"), 0
    for epoch, loss in enumerate(losses):
        lowest, waited = (loss, 0) if loss < lowest - 1e-4 else (lowest, waited + 1)
        assert (waited == 2) == (epoch == len(losses) - 1)
    assert len(losses) < 30


@pytest.mark.parametrize("weights", ["best", "last"])
def test_the_weights_are_those_of_the_reported_epoch(tmp_path: Path, weights: Any) -> None:
    model = tiny()
    _, history = learn(tmp_path, model=model, **EARLY_STOPPING, weights=weights)
    epoch = kept_epoch(history, TrainConfig(weights=weights))
    losses = [row["val_loss"] for row in history]
    assert bag_loss(model, VALIDATION) == pytest.approx(losses[epoch], rel=1e-5)
    assert losses[-1] > min(losses)
    assert epoch == (losses.index(min(losses)) if weights == "best" else len(losses) - 1)


def test_without_validation_the_last_weights_are_kept_after_all_epochs(tmp_path: Path) -> None:
    state, history = learn(tmp_path, patience=1, validation=[])
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert len(history) == 3
    assert "val_loss" not in history[0]
    assert same(state, {name.removeprefix("model."): value for name, value in last.items()})


def test_the_loss_on_top_patches_counts_in_training_only(tmp_path: Path) -> None:
    weights, rows = learn(tmp_path / "top", top_k=3)
    plain, plain_rows = learn(tmp_path / "plain")
    assert not same(weights, plain)
    assert rows[0]["train_loss"] > 1.5 * plain_rows[0]["train_loss"]  # the sum of two losses
    assert abs(rows[0]["val_loss"] - plain_rows[0]["val_loss"]) < 0.2  # of the bags only


@pytest.mark.parametrize("setting", [{"drop_patches": 0.8}, {"probes": 2}], ids=str)
def test_dropped_patches_and_probes_are_the_same_after_an_interruption(
    setting: dict[str, float], tmp_path: Path
) -> None:
    settings = {**setting, "weights": "last"}
    whole, rows = learn(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "stopped", on_epoch=stop_after(1), **settings)
    resumed, again = learn(tmp_path / "stopped", **settings)
    assert same(whole, resumed)
    assert rows == again
    assert not same(whole, learn(tmp_path / "plain", weights="last")[0])


def test_the_loss_on_top_patches_is_refused_without_patch_logits(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="choose caprmil with the pool mean"):
        learn(tmp_path, model=create("transmil", 16, 2, dim=16, heads=2, landmarks=4), top_k=3)


def test_probes_are_refused_where_a_model_cannot_start_from_them(tmp_path: Path) -> None:
    transmil = create("transmil", 16, 2, dim=16, heads=2, landmarks=4)
    with pytest.raises(RecipeError, match="choose caprmil or abmil for a classification"):
        learn(tmp_path, model=transmil, probes=2)
    with pytest.raises(RecipeError, match="at most 2 probes"):
        learn(tmp_path, probes=99)


def test_a_strong_signal_is_learnt(tmp_path: Path) -> None:
    _, history = learn(tmp_path, train=SLIDES[:12], epochs=12, lr=5e-3)
    assert max(row["val_auc"] for row in history) == 1.0
    assert history[-1]["train_loss"] < 0.2 < history[0]["train_loss"]


def test_the_history_is_written_as_csv(tmp_path: Path) -> None:
    assert learn(tmp_path)[1] == read_table(tmp_path / "history.csv")


# Interruptions


SLOW = pytest.mark.slow


@pytest.mark.parametrize("later", [pytest.param(-1, marks=SLOW), pytest.param(0, marks=SLOW), 1, 2])
def test_an_interrupted_training_ends_with_the_same_weights(
    tmp_path: Path, whole: Result, later: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path, **EARLY_STOPPING, on_epoch=stop_after(best(whole) + later))
    resumed = learn(tmp_path, **EARLY_STOPPING)
    assert same(whole[0], resumed[0])
    assert whole[1] == resumed[1] == read_table(tmp_path / "history.csv")


def test_every_epoch_is_timed_once_and_a_pause_is_not_training(tmp_path: Path) -> None:
    paused, started = 0.0, time.perf_counter()

    def pause(row: Row) -> None:
        nonlocal paused
        time.sleep(0.2)
        paused += 0.2
        stop(row)

    stop = stop_after(1)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path, on_epoch=pause)
    before = read_timing(tmp_path).epochs
    stop = stop_after(-1)
    learn(tmp_path, on_epoch=pause)
    epochs = read_timing(tmp_path).epochs
    assert [each.epoch for each in before] == [0, 1]
    assert [each.epoch for each in epochs] == [0, 1, 2]
    assert epochs[0] == before[0]  # the epoch that was saved; the second one was repeated
    assert epochs[1] != before[1]
    assert {each.peak_mib for each in epochs} == {None}  # on a CPU
    measured = sum(each.seconds for each in epochs) + before[1].seconds
    assert 0 < measured < time.perf_counter() - started - paused


@pytest.mark.parametrize("changes", [{"weights": "last"}, {"validation": []}], ids=str)
def test_the_last_weights_are_the_same_after_an_interruption(tmp_path: Path, changes: Any) -> None:
    uninterrupted = learn(tmp_path / "a", **changes)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "b", **changes, on_epoch=stop_after(1))
    resumed = learn(tmp_path / "b", **changes)
    assert same(uninterrupted[0], resumed[0])
    assert uninterrupted[1] == resumed[1]


@pytest.mark.parametrize(
    ("name", "later"),
    [
        pytest.param("kept.ckpt", 0, marks=SLOW),
        pytest.param("last.ckpt", 0, marks=SLOW),
        ("last.ckpt", 2),
    ],
)
def test_a_training_resumes_after_an_interruption_while_an_epoch_is_written(
    tmp_path: Path, whole: Result, monkeypatch: pytest.MonkeyPatch, name: str, later: int
) -> None:
    save = CheckpointKeeper.save

    def broken(self: CheckpointKeeper, trainer: Any, path: Path) -> None:
        if path.name == name and trainer.current_epoch == best(whole) + later:
            raise KeyboardInterrupt
        save(self, trainer, path)

    monkeypatch.setattr(CheckpointKeeper, "save", broken)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path, **EARLY_STOPPING)
    monkeypatch.undo()
    resumed = learn(tmp_path, **EARLY_STOPPING)
    assert same(whole[0], resumed[0])
    assert whole[1] == resumed[1]


def test_a_finished_training_is_not_continued(tmp_path: Path, whole: Result) -> None:
    learn(tmp_path, **EARLY_STOPPING)
    again = learn(tmp_path, **EARLY_STOPPING, on_epoch=lambda _: pytest.fail("went on"))
    assert same(whole[0], again[0])
    assert whole[1] == again[1]


def test_a_training_resumes_in_a_folder_that_was_moved(tmp_path: Path, whole: Result) -> None:
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "here", **EARLY_STOPPING, on_epoch=stop_after(best(whole) + 1))
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert same(whole[0], learn(tmp_path / "there", **EARLY_STOPPING)[0])


def test_ctrl_c_works_a_second_time(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path, on_epoch=stop_after(0))
    assert signal.getsignal(signal.SIGINT) is before is not signal.SIG_IGN


def test_a_terminated_job_does_not_exit_with_0(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        learn(tmp_path, on_epoch=lambda _: signal.raise_signal(signal.SIGTERM))
    assert caught.value.code == 143
