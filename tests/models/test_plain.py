"""CAPRMIL against the paper's equations written directly: the same answers, the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from caprmil.experiments import cost
from caprmil.models import CAPRMIL, Output
from plain import PlainCAPRMIL

POOLS: dict[str, Any] = {
    "mean": "mean",
    "attention": {"name": "attention", "dropout": 0.0},
    "gated": {"name": "gated", "dropout": 0.0},
}
TOKENS = {"folded": 3, "as many as channels": 8, "more than channels": 11}  # of 2 heads, 16 wide

TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-3, "atol": 2e-5},
}


def pair(pool: str, depth: int, tokens: str, dtype: torch.dtype) -> tuple[CAPRMIL, PlainCAPRMIL]:
    torch.manual_seed(0)
    model = CAPRMIL(
        24, 3, dim=16, heads=2, depth=depth, tokens=TOKENS[tokens], dropout=0, pool=POOLS[pool]
    ).to(dtype)
    for name, value in model.named_parameters():  # away from the start, where much is alike
        torch.nn.init.normal_(value, std=1.0 if "temperature" in name else 0.3)
    return model, PlainCAPRMIL(model)


def gradients(
    model: CAPRMIL | PlainCAPRMIL, bags: Tensor, mask: Tensor | None
) -> tuple[Output, dict[str, Tensor]]:
    bags = bags.clone().requires_grad_()
    output = model.train()(bags, mask=mask)
    loss = model.loss(output, torch.arange(len(bags)) % 3)["bag"]
    # The assignments are an answer too: what is learnt from them must come out the same.
    (loss + sum(each.square().mean() for each in output.assignments)).backward()
    found = {name: value.grad for name, value in model.named_parameters()}
    return output, {name: grad for name, grad in found.items() if grad is not None} | {
        "bags": bags.grad if bags.grad is not None else torch.zeros(())
    }


def check(ours: Output, plain: Output, **tolerance: float) -> None:
    for one, other in [
        (ours.logits, plain.logits),
        (ours.embedding, plain.embedding),
        (ours.attention, plain.attention),
        *zip(ours.assignments, plain.assignments, strict=True),
    ]:
        torch.testing.assert_close(one, other, check_dtype=False, **tolerance)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("dtype", "depth"),
    [*((torch.float64, depth) for depth in (1, 2, 3)), *((torch.float32, d) for d in (1, 3))],
)
def test_answers_and_gradients_are_those_of_the_equations(
    pool: str, depth: int, tokens: str, dtype: torch.dtype
) -> None:
    tolerance = TOLERANCES[dtype]
    ours, plain = pair(pool, depth, tokens, dtype)
    bags = torch.randn(2, 33, 24, dtype=dtype)
    for mask in (None, torch.arange(33) < torch.tensor([[33], [20]])):
        real = bags if mask is None else bags * mask.unsqueeze(-1)
        answers, learnt = zip(
            *(gradients(model, real, mask) for model in (ours, plain)), strict=True
        )
        check(*answers, **tolerance)
        assert learnt[0].keys() == learnt[1].keys()
        for name, grad in learnt[0].items():
            torch.testing.assert_close(
                grad, learnt[1][name], **tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
        ours.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("pool", POOLS)
def test_looking_in_pieces_answers_like_the_equations(pool: str, depth: int, tokens: str) -> None:
    ours, plain = pair(pool, depth, tokens, torch.float64)
    bag = torch.randn(1, 2500, 24, dtype=torch.float64)
    with torch.no_grad():
        check(ours.eval()(bag), plain.eval()(bag), **TOLERANCES[torch.float64])


def test_the_parameters_have_the_same_names() -> None:
    model = CAPRMIL(24, 2, pool="gated")
    PlainCAPRMIL(model).load_state_dict(model.state_dict())


def test_a_thousand_patches_cost_the_equations_what_the_paper_says() -> None:
    measured = cost.flops(PlainCAPRMIL(CAPRMIL(1024, 2)), n_patches=1000)
    assert measured / 1e9 == pytest.approx(0.628, rel=0.01)
