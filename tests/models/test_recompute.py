"""Training that recomputes activations has the gradients of the plain form in every memory mode."""

from typing import Any

import pytest
import torch
from fast_forms import POOLS, gradients, make_model, plain, without_dropout
from torch import Tensor

from caprmil.experiments.cost import LiveTensors
from caprmil.models import CAPRMIL, Output, recompute
from caprmil.models import caprmil as caprmil_module
from caprmil.models.recompute import RecomputedBag


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "CHUNK", 7)


@pytest.mark.parametrize("how", ["keep", "stream"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("depth", "tokens"), [(1, 3), (1, 20), (3, 3)])
def test_gradients_are_those_of_the_plain_form(
    depth: int, tokens: int, pool: str, how: Any
) -> None:
    model = without_dropout(make_model(depth=depth, tokens=tokens, pool=pool))
    bag = torch.randn(1, 17, 24).double()
    expected = plain(model, bag)
    expected_gradients = gradients(model, expected)
    model.save_memory(how)
    found = model(bag)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.attention, expected.attention)
    torch.testing.assert_close(gradients(model, found), expected_gradients)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_recomputed_dropout_has_the_same_random_numbers(
    pool: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with one graph of all chunks, without checkpoints."""
    model, bag = make_model(depth=2, pool=pool, dropout=0.3), torch.randn(1, 17, 24).double()

    def compute_gradients() -> dict[str, Tensor]:
        torch.manual_seed(5)
        recomputed = RecomputedBag(model.context, model.pool, bag, keep=keep)
        return gradients(model, model.output(*recomputed.forward()))

    found = compute_gradients()
    monkeypatch.setattr(recompute, "checkpointed", lambda function, *args: function(*args))
    torch.testing.assert_close(found, compute_gradients())


def test_two_steps_have_different_dropout() -> None:
    model, bag = make_model(dropout=0.5), torch.randn(1, 17, 24).double()
    model.save_memory("keep")
    assert not torch.equal(model(bag).logits, model(bag).logits)
    torch.manual_seed(3)
    first = model(bag).logits
    torch.manual_seed(3)
    assert torch.equal(model(bag).logits, first)


def test_a_step_advances_the_random_state_by_one_draw() -> None:
    model, bag = make_model(dropout=0.5), torch.randn(1, 17, 24).double()
    model.save_memory("stream")
    torch.manual_seed(3)
    torch.randint(2**62, ())
    expected = torch.rand(())
    torch.manual_seed(3)
    model(bag).logits.sum().backward()
    assert torch.equal(torch.rand(()), expected)


def test_features_in_half_precision_are_cast_chunk_by_chunk() -> None:
    model, bag = without_dropout(make_model()).float(), torch.randn(1, 17, 24).half()
    expected_gradients = gradients(model, plain(model, bag))
    model.save_memory("keep")
    torch.testing.assert_close(gradients(model, model(bag)), expected_gradients)


@pytest.mark.parametrize("how", ["keep", "stream"])
def test_no_copy_of_the_features_is_kept(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "CHUNK", 100)
    model, bag = CAPRMIL(512, 2, dim=16, heads=2), torch.randn(1, 1000, 512).half()
    model.save_memory(how)
    with LiveTensors(exclude=[*model.parameters(), bag]) as live:
        model(bag).logits.sum().backward()
    assert live.peak < 1000 * 512 * 4 / 2  # half of a copy in float32


def test_gradients_of_features_are_those_of_the_plain_form() -> None:
    model, bag = without_dropout(make_model()), torch.randn(1, 17, 24).double().requires_grad_()
    (expected_gradients,) = torch.autograd.grad(plain(model, bag).logits.square().sum(), bag)
    model.save_memory("stream")
    (found,) = torch.autograd.grad(model(bag).logits.square().sum(), bag)
    torch.testing.assert_close(found, expected_gradients)


def test_the_backward_pass_has_the_same_mixed_precision() -> None:
    model, bag = without_dropout(make_model()).float(), torch.randn(1, 17, 24)
    found = []
    for how in ("whole", "keep", "stream"):
        model.save_memory(how)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(bag)
        found.append(gradients(model, Output(**vars(output) | {"logits": output.logits.float()})))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0.1, atol=0.05)


def test_frozen_parameters_have_no_gradient() -> None:
    model, bag = without_dropout(make_model()), torch.randn(1, 17, 24).double()
    model.context.project.requires_grad_(False)
    model.save_memory("stream")
    model(bag).logits.sum().backward()
    assert model.context.project[0].weight.grad is None
    assert model.context.blocks[0].attend.project_x.weight.grad is not None


def test_the_size_of_a_bag_determines_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "WHOLE", 10)
    monkeypatch.setattr(recompute, "KEEP", 20)
    kept = []
    forward = recompute.forward_recomputed
    monkeypatch.setattr(
        caprmil_module,
        "forward_recomputed",
        lambda *args, keep: kept.append(keep) or forward(*args, keep=keep),
    )
    model = without_dropout(make_model())
    for n in (10, 11, 20, 21):
        model(torch.randn(1, n, 24).double())
    assert kept == [True, True, False]
