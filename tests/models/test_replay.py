"""Training in bounded memory: the gradients of the plain form, whatever is kept of a bag."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caprmil.models import CAPRMIL, create
from caprmil.models import caprmil as home
from caprmil.models import replay as replaying
from caprmil.models.layers import Dropout
from caprmil.models.replay import Player

POOLS = ("mean", "attention", "gated")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "PIECE", 7)


def a_model(**settings: Any) -> CAPRMIL:
    torch.manual_seed(0)
    small = {"dim": 16, "heads": 2, "tokens": 3, **settings}
    model = create("caprmil", 24, 3, **small).double().train()
    if not settings.get("dropout"):
        for layer in model.modules():
            if isinstance(layer, Dropout):
                layer.p = 0.0
    return model


def learn(model: CAPRMIL, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    F.cross_entropy(logits, torch.tensor([1])).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("how", ["keep", "stream"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradients_are_those_of_the_whole_bag(depth: int, pool: str, how: Any) -> None:
    model, bag = a_model(depth=depth, pool=pool), torch.randn(1, 30, 24).double()
    model.save_memory("whole")
    whole = model(bag)
    wanted = learn(model, whole.logits)
    model.save_memory(how)
    replayed = model(bag)
    torch.testing.assert_close(replayed.logits, whole.logits)
    torch.testing.assert_close(replayed.attention, whole.attention)
    torch.testing.assert_close(learn(model, replayed.logits), wanted)


@pytest.mark.parametrize("tokens", [3, 20])  # folded, and the plain order of products
def test_either_order_of_products_is_replayed(tokens: int) -> None:
    model, bag = a_model(tokens=tokens), torch.randn(1, 30, 24).double()
    model.save_memory("whole")
    wanted = learn(model, model(bag).logits)
    model.save_memory("stream")
    torch.testing.assert_close(learn(model, model(bag).logits), wanted)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_dropout_draws_the_same_when_a_piece_comes_again(pool: str, keep: bool) -> None:
    """Against one graph that holds all pieces, with the same dice."""
    model, bag = a_model(depth=2, pool=pool, dropout=0.3), torch.randn(1, 30, 24).double()
    player = Player(model.context, model.pool, bag, keep=False, seed=5)
    embedding, _ = player.embed(player.tokens()[1])
    wanted = learn(model, model.classify(embedding))
    player = Player(model.context, model.pool, bag, keep=keep, seed=5)
    parameters = [*model.context.parameters(), *model.pool.parameters()]
    embedding, _ = replaying.Replay.apply(player, *parameters)
    torch.testing.assert_close(learn(model, model.classify(embedding)), wanted)


def test_two_steps_draw_different_dropout() -> None:
    model, bag = a_model(dropout=0.5), torch.randn(1, 30, 24).double()
    model.save_memory("keep")
    assert not torch.equal(model(bag).logits, model(bag).logits)
    torch.manual_seed(3)
    first = model(bag).logits
    torch.manual_seed(3)
    assert torch.equal(model(bag).logits, first)


def test_half_precision_features_are_cast_piece_by_piece() -> None:
    model, bag = a_model().float(), torch.randn(1, 30, 24).half()
    model.save_memory("whole")
    wanted = learn(model, model(bag).logits)
    model.save_memory("keep")
    torch.testing.assert_close(learn(model, model(bag).logits), wanted)


def test_mixed_precision_is_the_same_on_the_way_back() -> None:
    model, bag = a_model().float(), torch.randn(1, 30, 24)
    gradients = []
    for how in ("whole", "keep", "stream"):
        model.save_memory(how)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(bag).logits
        gradients.append(learn(model, logits.float()))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=0.1, atol=0.01)


def test_frozen_parameters_stay_frozen() -> None:
    model, bag = a_model(), torch.randn(1, 30, 24).double()
    model.context.project.requires_grad_(False)
    model.save_memory("stream")
    model(bag).logits.sum().backward()
    assert model.context.project[0].weight.grad is None
    assert model.context.blocks[0].attend.place.weight.grad is not None


def test_size_chooses_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "WHOLE", 10)
    monkeypatch.setattr(home, "KEPT", 20)
    kept = []
    monkeypatch.setattr(
        home, "replay", lambda *a, keep: kept.append(keep) or replaying.replay(*a, keep=keep)
    )
    model = a_model()
    for n in (10, 11, 20, 21):
        model(torch.randn(1, n, 24).double())
    assert kept == [True, True, False]


def test_dropout_loses_its_share_and_keeps_the_mean() -> None:
    layer, values = Dropout(0.3).train(), torch.ones(1000, 1001, dtype=torch.float64)
    dropped = layer(values)
    assert (dropped == 0).double().mean().item() == pytest.approx(0.3, abs=0.003)
    assert dropped.mean().item() == pytest.approx(1, abs=0.005)
    assert len(dropped.unique()) == 2
    assert torch.equal(layer.eval()(values), values)


def test_dropout_passes_gradients_where_it_passed_values() -> None:
    values = torch.rand(9, 5, dtype=torch.float64) + 1
    values.requires_grad_()
    dropped = Dropout(0.5).train()(values)
    (slope,) = torch.autograd.grad(dropped.sum(), values)
    torch.testing.assert_close(slope, (dropped / values).detach())


def test_dropout_of_neighbours_is_independent() -> None:
    """Four draws come from one random number: they must not know of each other."""
    torch.manual_seed(0)
    lost = Dropout(0.5).train()(torch.ones(100_000, 8)) == 0
    together = torch.corrcoef(lost.T.float()) - torch.eye(8)
    assert together.abs().max() < 0.02


def test_a_share_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to below 1"):
        Dropout(1.0)
    assert isinstance(Dropout(0.1), nn.Module)
