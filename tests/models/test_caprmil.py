"""CAPRMIL against its paper: sizes, operations, and the parts of section 3.1."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from caprmil.errors import RecipeError, RunError, UnknownNameError
from caprmil.experiments import cost
from caprmil.experiments.cost.measure import ONEDNN_PRODUCTS
from caprmil.models import ABMIL, CAPRMIL, MeanMIL, create
from caprmil.models.context import MIN_TEMPERATURE, ContextAttention, ContextStack


@pytest.mark.parametrize(
    ("settings", "parameters", "millions"),
    [  # the ablation table and the aggregators; the paper truncates instead of rounding
        ({"tokens": 2}, 314_284, 0.314),
        ({"tokens": 4}, 314_318, 0.314),
        ({"tokens": 8}, 314_386, 0.314),
        ({"tokens": 16}, 314_522, 0.314),
        ({"heads": 2}, 326_024, 0.326),
        ({"heads": 4}, 316_682, 0.316),
        ({"heads": 8}, 314_318, 0.314),
        pytest.param(
            {"heads": 12}, 310_742, 0.310, marks=pytest.mark.filterwarnings("ignore:12 heads")
        ),
        ({"mlp_ratio": 1}, 215_630, 0.215),
        ({"mlp_ratio": 2}, 248_526, 0.248),
        ({"mlp_ratio": 4}, 314_318, 0.314),
        ({"pool": "attention"}, 330_959, 0.331),
        ({"pool": "gated"}, 347_471, 0.347),
    ],
)
def test_the_numbers_of_parameters_are_those_of_the_paper(
    settings: dict[str, Any], parameters: int, millions: float
) -> None:
    size = cost.parameters(CAPRMIL(1024, 2, **settings))
    assert size == parameters
    assert size / 1e6 == pytest.approx(millions, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({"depth": 0}, 131_714),
        ({"depth": 2}, 496_922),
        ({"depth": 3}, 679_526),
        ({"dim": 256}, 990_606),
        ({"dim": 512}, 3_429_134),
        ({"learn_temperature": False}, 314_310),
    ],
)
def test_other_numbers_of_parameters_follow_the_closed_form(
    settings: dict[str, Any], parameters: int
) -> None:
    assert cost.parameters(CAPRMIL(1024, 2, **settings)) == parameters


def test_baselines_have_the_papers_numbers_of_parameters() -> None:
    assert cost.parameters(MeanMIL(1024, 2)) == 131_458
    assert cost.parameters(ABMIL(1024, 2)) == 657_283


@pytest.mark.parametrize(("name", "gflop"), [("mean", 0.260), ("abmil", 1.31)])
def test_a_thousand_patches_take_the_papers_operations(name: str, gflop: float) -> None:
    measured = cost.flops(create(name, in_dim=1024, n_outputs=2), n_patches=1000)
    assert measured / 1e9 == pytest.approx(gflop, rel=0.01)


def test_a_thousand_patches_take_fewer_operations_than_the_equations() -> None:
    """The equations take 0.628 GFLOP (test_plain_form.py)."""
    model, bag = CAPRMIL(1024, 2), torch.randn(1, 1000, 1024)
    assert cost.flops(model, n_patches=1000) / 1e9 == pytest.approx(0.418, rel=0.005)
    with (
        FlopCounterMode(display=False, custom_mapping=ONEDNN_PRODUCTS) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        model.train()(bag)
    assert counter.get_total_flops() / 1e9 == pytest.approx(0.549, rel=0.005)


def test_cost_grows_linearly_with_the_bag() -> None:
    small, large = (cost.flops(CAPRMIL(1024, 2), n_patches=n) for n in (1000, 11_000))
    per_patch = (large - small) / 10_000
    assert large == pytest.approx(11_000 * per_patch, rel=1e-3)


def attention_by_loops(layer: ContextAttention, patches: Tensor) -> Tensor:
    """Return the context of one bag by the equations of 3.1.3, in loops over patches and heads."""
    all_x, all_f = layer.project_x(patches), layer.project_f(patches)
    width, contexts = all_x.shape[1] // layer.heads, []
    for h in range(layer.heads):
        x, f = (part[:, h * width : (h + 1) * width] for part in (all_x, all_f))
        logits = (x @ layer.cluster.weight.T + layer.cluster.bias) / layer.temperature()[h]
        weights = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
        tokens = torch.stack(
            [
                sum(w * v for w, v in zip(column, f, strict=True)) / (column.sum() + 1e-5)
                for column in weights.T
            ]
        )
        q, k, v = (tokens @ part.T for part in layer.qkv.weight.chunk(3))
        attended = F.softmax(q @ k.T / math.sqrt(width), dim=1) @ v
        contexts.append(weights @ attended)
    return layer.project_out(torch.cat(contexts, dim=1))


def test_attention_equals_the_equations_of_the_paper() -> None:
    torch.manual_seed(0)
    layer = ContextAttention(24, heads=3, tokens=5, dropout=0.1, learn_temperature=True)
    layer = layer.double().eval()
    patches = torch.randn(1, 7, 24, dtype=torch.float64)
    context, _ = layer(patches, torch.ones(1, 7, dtype=torch.bool))
    torch.testing.assert_close(context[0], attention_by_loops(layer, patches[0]))


def test_the_assignments_of_a_patch_sum_to_one() -> None:
    output = CAPRMIL(24, 2, heads=4, tokens=6, depth=2)(torch.randn(2, 9, 24))
    for assignments in output.assignments:
        assert assignments.shape == (2, 4, 9, 6)
        torch.testing.assert_close(assignments.sum(dim=-1), torch.ones(2, 4, 9))


def test_cluster_weights_start_orthogonal() -> None:
    weight = CAPRMIL(1024, 2).context.blocks[0].attend.cluster.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(4))


def test_temperatures_start_at_a_half() -> None:
    temperature = CAPRMIL(1024, 2).context.blocks[0].attend.temperature()
    torch.testing.assert_close(temperature, torch.full((8,), 0.5))


@pytest.mark.parametrize("raw", [-1e4, -100.0, 0.0, 1e4])
def test_a_temperature_never_reaches_zero(raw: float) -> None:
    model = CAPRMIL(24, 2)
    temperature = model.context.blocks[0].attend.temperature
    nn.init.constant_(temperature.raw, raw)
    assert (temperature() >= MIN_TEMPERATURE).all()
    assert model(torch.randn(1, 5, 24)).logits.isfinite().all()


def test_heads_that_do_not_divide_the_width_cause_a_warning() -> None:
    with pytest.warns(UserWarning, match="12 heads do not divide a width of 128: 120 are used"):
        CAPRMIL(24, 2, heads=12)


def test_mixed_precision_is_close_to_full_precision() -> None:
    model, bag = CAPRMIL(24, 2).eval(), torch.randn(1, 3000, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixed = model(bag).logits
    torch.testing.assert_close(mixed.float(), model(bag).logits, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "settings", [{"tokens": 0}, {"depth": -1}, {"mlp_ratio": 0}, {"heads": 0}, {"heads": 129}]
)
def test_impossible_sizes_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        CAPRMIL(24, 2, **settings)


def test_two_context_stacks_have_the_assignments_of_both() -> None:
    model = CAPRMIL(24, 2, pool=CAPRMIL(128, 2, depth=2))
    assert len(model(torch.randn(1, 5, 24)).assignments) == 3


def test_any_model_or_pool_may_follow_the_context_stack() -> None:
    class First(nn.Module):
        def forward(self, patches: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return patches[:, 0], F.one_hot(torch.zeros(len(mask)).long(), mask.shape[1]).float()

    bag = torch.randn(1, 5, 24)
    for pool in ["gated", "abmil", {"name": "abmil", "dim": 16}, ABMIL(128, 2), First()]:
        output = CAPRMIL(24, 2, pool=pool)(bag)
        assert output.logits.shape == (1, 2)
        assert len(output.assignments) == 1


def test_the_context_stack_can_be_used_alone() -> None:
    stack = ContextStack(
        24, dim=16, depth=2, heads=2, tokens=3, mlp_ratio=2, dropout=0, learn_temperature=True
    )
    patches, assignments = stack(torch.randn(1, 9, 24), torch.ones(1, 9, dtype=torch.bool))
    assert patches.shape == (1, 9, 16)
    assert len(assignments) == 2


def test_a_model_of_another_width_after_the_context_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="made for 64 features"):
        CAPRMIL(24, 2, pool=ABMIL(64, 2))


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(
        UnknownNameError, match=r"no model called 'caprmill'. Did you mean 'caprmil'?"
    ):
        create("caprmill", 24, 2)
    with pytest.raises(
        UnknownNameError, match=r"no pool or model called 'maen'. Did you mean 'mean'?"
    ):
        create("caprmil+maen", 24, 2)
    with pytest.raises(RecipeError, match=r"no setting called 'token'. Did you mean 'tokens'?"):
        create("caprmil", 24, 2, token=4)


def test_a_pool_from_outside_the_package_must_be_passed_when_loading(tmp_path: Path) -> None:
    class Mine(nn.Module):
        def forward(self, patches: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return patches.mean(dim=1), mask / mask.sum(dim=1, keepdim=True)

    CAPRMIL(24, 2, pool=Mine()).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"a pool from outside the package, Mine. Pass it: pool="):
        CAPRMIL.from_pretrained(tmp_path)
    assert CAPRMIL.from_pretrained(tmp_path, pool=Mine())(torch.randn(1, 5, 24))


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no model: config.json is missing"):
        CAPRMIL.from_pretrained(tmp_path)


def test_damaged_weights_are_an_error_with_the_folder(tmp_path: Path) -> None:
    CAPRMIL(24, 2).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RunError, match=f"{tmp_path.name} cannot be loaded"):
        CAPRMIL.from_pretrained(tmp_path)


def test_temperatures_have_no_weight_decay() -> None:
    model = CAPRMIL(24, 2)
    assert model.no_decay() == {"context.blocks.0.attend.temperature.raw"}
    both = create("caprmil", 24, 2, pool=CAPRMIL(128, 2))
    assert len(both.no_decay()) == 2


def test_a_fixed_temperature_is_one() -> None:
    model = CAPRMIL(24, 2, learn_temperature=False)
    assert model.context.blocks[0].attend.temperature().eq(1).all()
    assert model.no_decay() == set()
    assert not any("temperature" in name for name in model.state_dict())


def test_the_initial_temperature_is_a_setting() -> None:
    model = CAPRMIL(24, 2, depth=2, temperature=0.15)
    for block in model.context.blocks:
        torch.testing.assert_close(block.attend.temperature(), torch.full((8,), 0.15))
    for wrong in (0, 1e-3, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"starts above 0\.001"):
            CAPRMIL(24, 2, temperature=wrong)


def test_titles_have_the_name_of_the_pool() -> None:
    assert CAPRMIL(24, 2).title == "CAPRMIL + mean"
    assert CAPRMIL(24, 2, pool={"name": "clam", "k": 2}).title == "CAPRMIL + clam"
    assert CAPRMIL(24, 2, pool=ABMIL(128, 2)).title == "CAPRMIL + ABMIL"
    assert ABMIL(24, 2).title == "ABMIL"
