"""The plain form of CAPRMIL against the equations of the paper, in benchmarks/plain.py."""

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
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-3, "atol": 2e-5},
}


def pair(pool: str, depth: int, dtype: torch.dtype) -> tuple[CAPRMIL, PlainCAPRMIL]:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dim": 16, "heads": 2, "depth": depth, "tokens": 3}
    model = CAPRMIL(24, 3, **settings, dropout=0, pool=POOLS[pool]).to(dtype)
    for name, value in model.named_parameters():  # errors can be invisible at initial weights
        torch.nn.init.normal_(value, std=1.0 if "temperature" in name else 0.3)
    return model, PlainCAPRMIL(model)


def gradients(
    model: CAPRMIL | PlainCAPRMIL, bags: Tensor, mask: Tensor
) -> tuple[Output, dict[str, Tensor]]:
    bags = bags.clone().requires_grad_()
    output = model.train()(bags, mask=mask)
    loss = model.loss(output, torch.arange(len(bags)) % 3)["bag"]
    # Assignments are outputs too: their gradients must be the same.
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


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("dtype", "depth"), [(torch.float64, 1), (torch.float64, 3), (torch.float32, 1)]
)
def test_outputs_and_gradients_equal_those_of_the_equations(
    pool: str, depth: int, dtype: torch.dtype
) -> None:
    tolerance = TOLERANCES[dtype]
    ours, plain = pair(pool, depth, dtype)
    bags = torch.randn(2, 33, 24, dtype=dtype)
    for mask in (
        torch.ones(2, 33, dtype=torch.bool),
        torch.arange(33) < torch.tensor([[33], [20]]),
    ):
        real = bags * mask.unsqueeze(-1)
        outputs, found = zip(
            *(gradients(model, real, mask) for model in (ours, plain)), strict=True
        )
        check(*outputs, **tolerance)
        assert found[0].keys() == found[1].keys()
        for name, grad in found[0].items():
            torch.testing.assert_close(
                grad, found[1][name], **tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
        ours.zero_grad()
        plain.zero_grad()


def test_the_parameters_have_the_same_names() -> None:
    model = CAPRMIL(24, 2, pool="gated")
    PlainCAPRMIL(model).load_state_dict(model.state_dict())


def test_the_equations_take_the_papers_operations() -> None:
    measured = cost.flops(PlainCAPRMIL(CAPRMIL(1024, 2)), n_patches=1000)
    assert measured / 1e9 == pytest.approx(0.628, rel=0.01)
