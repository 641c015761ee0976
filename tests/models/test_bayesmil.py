"""BayesMIL against its paper, step by step in numpy: layers, smoothing, draws and divergences."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.ndimage import convolve
from scipy.special import expit, softmax
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from caprmil.errors import BagError, RecipeError, UnknownNameError
from caprmil.experiments import cost
from caprmil.models import BayesMIL
from caprmil.models.bayesmil import Noise, VariationalLinear, smooth

Array = NDArray[np.float64]
CENTRE, SIDE, CORNER = 0.619347, 0.083820, 0.011344
KERNEL = [[CORNER, SIDE, CORNER], [SIDE, CENTRE, SIDE], [CORNER, SIDE, CORNER]]

# Negative cells, a gap, cells at both ends of a row, and two patches in the cell (1, -2).
GRID = torch.tensor([[-3, -2], [1, -2], [-3, -1], [-2, -1], [1, -1], [-3, 0], [0, 4], [1, -2]])


def small(**settings: Any) -> BayesMIL:
    """Return a small model with large weights and large noise, as after training."""
    torch.manual_seed(0)
    model = BayesMIL(6, 2, **{"dim": 8, "hidden": 5, **settings}).double().eval()
    with torch.no_grad():
        for layer in (model.hidden, model.gate, model.out, model.classify):
            layer.weight.mul_(60)
            layer.log_alpha.normal_(mean=-1.0)
            layer.bias.normal_()
    return model


def bag(patches: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, patches, 6, generator=generator, dtype=torch.float64)


class Draws(NamedTuple):
    """The values of each draw, as the equations of the paper give them."""

    mean: Array
    log_variance: Array
    shares: Array
    logits: Array


def plain(model: BayesMIL, features: Tensor, grid: Tensor | None, draws: int) -> Draws:
    """Classify a bag in numpy, with noise of its own. With 0 draws, classify by the means."""
    random = np.random.default_rng(7)

    def noise(*shape: int) -> Array:
        return random.standard_normal(shape) if draws else np.zeros(shape)

    def linear(layer: VariationalLinear, inputs: Array) -> Array:
        weight, log_alpha, bias = (p.detach().numpy() for p in layer.parameters())
        mean = inputs @ weight.T + bias
        variance = inputs**2 @ (np.exp(log_alpha) * weight**2 + 1e-8).T
        return mean + np.sqrt(variance) * noise(*mean.shape)

    hidden = np.maximum(model.project(features[0]).detach().numpy(), 0)
    hidden = np.broadcast_to(hidden, (max(1, draws), *hidden.shape))
    scores = linear(
        model.out, np.tanh(linear(model.hidden, hidden)) * expit(linear(model.gate, hidden))
    )
    mean, log_variance = scores[..., 0], scores[..., 1]
    smoothed = mean if grid is None else smooth_densely(mean, grid)
    attention = expit(smoothed + np.exp(log_variance / 2) * noise(*mean.shape))
    shares = attention / attention.sum(axis=1, keepdims=True)
    logits = linear(model.classify, np.einsum("rn,rnd->rd", shares, hidden))
    return Draws(mean, log_variance, shares, logits)


def smooth_densely(values: Array, grid: Tensor) -> Array:
    """Smooth on a dense image: 0 in empty cells, the mean in cells with several patches."""
    columns, rows = (grid - grid.amin(dim=0)).numpy().T
    total, patches = np.zeros((2, len(values), rows.max() + 1, columns.max() + 1))
    for n, (row, column) in enumerate(zip(rows, columns, strict=True)):
        total[:, row, column] += values[:, n]
        patches[:, row, column] += 1
    smoothed = convolve(total / np.maximum(patches, 1), np.array([KERNEL]), mode="constant")
    return smoothed[:, rows, columns]


@pytest.mark.parametrize("spatial", [False, True])
@pytest.mark.parametrize(("hidden", "parameters"), [(384, 1_315_588), (256, 1_052_676)])
def test_the_number_of_parameters_is_that_of_the_release(
    spatial: bool, hidden: int, parameters: int
) -> None:
    assert cost.parameters(BayesMIL(1024, 2, hidden=hidden, spatial=spatial)) == parameters


@pytest.mark.parametrize(("draws", "gflop"), [(0, 1.838), (1, 2.626), (16, 2.687)])
def test_more_draws_add_few_operations(draws: int, gflop: float) -> None:
    measured = cost.flops(BayesMIL(1024, 2, spatial=True, draws=draws), n_patches=1000)
    assert measured / 1e9 == pytest.approx(gflop, rel=1e-3)


@pytest.mark.parametrize(("spatial", "attention"), [(False, -1.0), (True, -4.0)])
def test_initial_values_are_those_of_the_release(spatial: bool, attention: float) -> None:
    model = BayesMIL(1024, 2, spatial=spatial)
    layers = (model.hidden, model.gate, model.out, model.classify)
    starts = (attention, attention, attention, -3.0)
    for layer, start in zip(layers, starts, strict=True):
        assert layer.log_alpha.eq(start).all()
        assert layer.bias.eq(0).all()
    assert model.hidden.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert model.project.weight.std().item() == pytest.approx(math.sqrt(2 / 1536), rel=0.02)
    assert model.project.weight.max() > 4 * math.sqrt(2 / 1536)  # normal, not uniform
    assert model.project.bias.eq(0).all()


def test_the_outputs_of_a_layer_have_the_mean_and_deviation_of_gaussian_weights() -> None:
    layer, inputs = small().hidden, bag(3).repeat(1, 1, 2)[..., :8]
    weight, spread = layer.weight.detach(), (layer.log_alpha / 2).detach().exp()
    drawn = weight * (1 + spread * torch.randn(40_000, 5, 8, dtype=torch.float64))
    outputs = inputs @ drawn.mT + layer.bias.detach()
    ours = layer(inputs, Noise(40_000, inputs, None)).detach()
    torch.testing.assert_close(ours.mean(dim=0), layer(inputs, None)[0].detach())
    torch.testing.assert_close(ours.mean(dim=0), outputs.mean(dim=0), rtol=0, atol=0.05)
    torch.testing.assert_close(ours.std(dim=0), outputs.std(dim=0), rtol=0.02, atol=0)


def test_the_outputs_of_a_layer_are_drawn_independently() -> None:
    layer, inputs = small().hidden, torch.ones(1, 3, 8, dtype=torch.float64)
    outputs = layer(inputs, Noise(40_000, inputs, None)).detach()
    correlations = np.corrcoef(outputs.flatten(1).numpy().T)
    np.testing.assert_allclose(correlations, np.eye(15), atol=0.03)


def test_a_weight_of_zero_has_a_small_variance() -> None:
    layer, inputs = VariationalLinear(8, 5, log_alpha=-4.0), torch.randn(3, 8)
    layer.weight.data.zero_()
    expected = 1e-4 * inputs.norm(dim=1, keepdim=True).expand(3, 5)
    torch.testing.assert_close(layer.std(inputs), expected)


def test_an_input_of_zeros_has_finite_gradients() -> None:
    layer, inputs = small().hidden, torch.zeros(1, 1, 8, dtype=torch.float64)
    layer(inputs, Noise(1, inputs, None)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_the_divergence_of_the_weights_is_that_of_the_published_formula() -> None:
    layer, expected = small().hidden, 0.0
    for output in layer.log_alpha.tolist():
        for each in output:
            bump = 0.6134 * math.exp(-((0.2026 + 0.7126 * each) ** 2))
            expected += (0.5 * math.log(1 + math.exp(-each)) - bump) / len(output)
    assert layer.kl().item() == pytest.approx(expected)


@pytest.mark.parametrize("draws", [1, 2, 7])
def test_noise_is_drawn_in_pairs_of_opposite_sign(draws: int) -> None:
    noise = Noise(draws, torch.empty(0), torch.Generator().manual_seed(0))(5, 4000)
    assert noise.shape == (draws, 5, 4000)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(noise[1::2], -noise[: draws - draws % 2 : 2])
    assert noise[::2].flatten().unique().numel() > 19_990


def test_smoothing_has_a_gaussian_kernel_with_a_deviation_of_half_a_cell() -> None:
    steps = torch.arange(3)
    values = torch.eye(9)[4:5]  # 1 in the centre, 0 elsewhere
    smoothed = smooth(values, torch.cartesian_prod(steps, steps))
    torch.testing.assert_close(smoothed.reshape(3, 3), torch.tensor(KERNEL), rtol=0, atol=1e-6)


def test_smoothing_equals_a_convolution_of_the_dense_image() -> None:
    random = np.random.default_rng(0)
    many = torch.from_numpy(random.integers([-9, 40], [9, 52], size=(150, 2)))
    assert len(many.unique(dim=0)) < len(many)  # some share a cell
    for grid in (many, GRID):
        values = random.standard_normal((2, len(grid)))
        smoothed = smooth(torch.from_numpy(values), grid)
        np.testing.assert_allclose(smoothed, smooth_densely(values, grid), atol=1e-5)


def test_a_grid_of_small_integers_does_not_overflow() -> None:
    grid, values = torch.tensor([[0, 0], [254, 0], [0, 256]]), torch.randn(1, 3)
    torch.testing.assert_close(smooth(values, grid.short()), CENTRE * values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("grid", [None, GRID])
def test_without_draws_the_means_are_used(grid: Tensor | None) -> None:
    model = small(spatial=grid is not None, draws=0)
    output = model(bag(), grid=None if grid is None else grid[None])
    expected = plain(model, bag(), grid, draws=0)
    np.testing.assert_allclose(output.attention.detach(), expected.shares, atol=1e-6)
    np.testing.assert_allclose(output.logits.detach(), expected.logits, atol=1e-5)
    assert output.uncertainty is None


def test_without_draws_a_logit_is_a_sum_over_patches() -> None:
    model = small(spatial=True, draws=0)
    output = model(bag(), grid=GRID[None])
    each = output.attention.mT * (F.relu(model.project(bag()[0])) @ model.classify.weight.mT)
    expected = each.sum(dim=0) + model.classify.bias
    torch.testing.assert_close(output.logits[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grid", [None, GRID])
def test_draws_have_the_mean_and_deviation_of_the_papers_equations(grid: Tensor | None) -> None:
    model = small(spatial=grid is not None, draws=20_000)
    with torch.no_grad():
        output = model(bag(), grid=None if grid is None else grid[None])
    expected = plain(model, bag(), grid, draws=20_000)
    probabilities = softmax(expected.logits, axis=1)
    np.testing.assert_allclose(output.attention[0], expected.shares.mean(axis=0), atol=2e-3)
    found = output.uncertainty
    np.testing.assert_allclose(found.attention[0], expected.shares.std(axis=0), atol=2e-3)
    np.testing.assert_allclose(output.logits[0].exp(), probabilities.mean(axis=0), atol=8e-3)
    np.testing.assert_allclose(found.probabilities[0], probabilities.std(axis=0), atol=4e-3)


@pytest.mark.parametrize("draws", [2, 5, 16])
def test_probabilities_are_means_over_draws_and_uncertainty_is_their_deviation(draws: int) -> None:
    model, seen = small(draws=draws), []
    model.classify.register_forward_hook(lambda _, inputs, out: seen.extend([inputs[0], out]))
    output = model(bag(3))
    embeddings, probabilities = seen[0][:, 0], seen[1][:, 0].softmax(dim=-1)
    # An embedding is shares @ patches.
    shares = embeddings @ torch.linalg.pinv(F.relu(model.project(bag(3)[0])))
    assert probabilities.shape == (draws, 2)
    torch.testing.assert_close(output.logits.softmax(dim=-1)[0], probabilities.mean(dim=0))
    torch.testing.assert_close(output.attention[0], shares.mean(dim=0))
    found = output.uncertainty
    torch.testing.assert_close(found.probabilities[0], probabilities.std(dim=0, correction=0))
    torch.testing.assert_close(found.attention[0], shares.std(dim=0, correction=0))


def test_one_draw_has_no_uncertainty() -> None:
    assert small(draws=1)(bag()).uncertainty is None
    assert small().train()(bag()).uncertainty is None


def test_padding_and_its_cells_do_not_change_the_output() -> None:
    model = small(spatial=True, prior="detection")
    features = torch.cat([bag(), bag().flip(1)])
    grids, mask = torch.stack([GRID, GRID]), torch.arange(8) < torch.tensor([[5], [8]])
    together, alone = (
        model(features, mask=mask, grid=grids),
        model(bag()[:, :5], grid=GRID[None, :5]),
    )
    torch.testing.assert_close(together.logits[:1], alone.logits)
    torch.testing.assert_close(together.uncertainty.attention[:1, :5], alone.uncertainty.attention)
    torch.testing.assert_close(together.aux["attention_kl"][:1], alone.aux["attention_kl"])
    assert together.uncertainty.attention[0, 5:].eq(0).all()


@pytest.mark.parametrize(
    ("prior", "pairs"),
    [("detection", [(-5.0, -1.0), (0.0, 3.0)]), ("subtyping", [(3.0, 5.0), (3.0, 5.0)])],
)
def test_the_label_chooses_the_prior_in_the_loss(
    prior: str, pairs: list[tuple[float, float]]
) -> None:
    model = small(spatial=True, draws=0, prior=prior)
    output, drawn = model(bag(), grid=GRID[None]), plain(model, bag(), GRID, draws=0)
    mean, log_variance = torch.from_numpy(drawn.mean), torch.from_numpy(drawn.log_variance)
    for label, (centre, width) in enumerate(pairs):
        chosen = Normal(centre, math.exp(width / 2))
        expected = kl_divergence(Normal(mean, (log_variance / 2).exp()), chosen).mean()
        loss = model.loss(output, torch.tensor([label]))["attention_kl"]
        torch.testing.assert_close(1e12 * loss, expected)


def test_each_bag_of_a_batch_has_its_own_prior() -> None:
    model = small(draws=0, prior="detection")
    output = model(torch.cat([bag(), 2 * bag()]))
    divergences = output.aux["attention_kl"]
    loss = model.loss(output, torch.tensor([1, 0]))["attention_kl"]
    torch.testing.assert_close(1e12 * loss, (divergences[0, 1] + divergences[1, 0]) / 2)


def test_the_loss_has_the_divergence_of_all_layers() -> None:
    model = small()
    terms = model.loss(model(bag()), torch.tensor([1]))
    layers = [m for m in model.modules() if isinstance(m, VariationalLinear)]
    assert len(layers) == 4
    torch.testing.assert_close(1e8 * terms["weights_kl"], sum(layer.kl() for layer in layers))
    assert set(terms) == {"bag", "weights_kl"}


def test_training_draws_once_and_dropout_may_precede_the_relu() -> None:
    model = small(dropout=0.25).train()
    torch.manual_seed(3)
    output = model(bag())
    torch.manual_seed(3)
    noise = Noise(1, bag(), None)
    hidden = F.relu(F.dropout(model.project(bag()), 0.25))  # in the order of the release
    content = F.dropout(model.hidden(hidden, noise).tanh(), 0.25)
    gate = F.dropout(model.gate(hidden, noise).sigmoid(), 0.25)
    mean, log_variance = model.out(content * gate, noise).unbind(dim=-1)
    attention = (mean + (log_variance / 2).exp() * noise(8)).sigmoid()
    embedding = (attention / attention.sum()) @ hidden[0]
    torch.testing.assert_close(output.logits, model.classify(embedding[None], noise)[0])


@pytest.mark.parametrize(("bias", "bound"), [(1e6, 10.0), (-1e6, -10.0)])
def test_a_log_variance_is_clamped_to_ten(bias: float, bound: float) -> None:
    model = small(prior="detection")
    model.out.bias.data[1] = bias
    _, log_variance = model.score(F.relu(model.project(bag()[0])), None)
    assert log_variance.eq(bound).all()
    assert model(bag()).aux["attention_kl"].isfinite().all()


def test_attention_sums_to_one_if_all_weights_underflow() -> None:
    model = small(draws=0)
    model.out.bias.data[0] = -1e4  # its sigmoid is zero
    attention = model(bag()).attention
    torch.testing.assert_close(attention.sum().item(), 1.0)


def test_repeated_evaluations_are_bit_identical() -> None:
    model = small()
    first, after = model(bag()), torch.get_rng_state()
    torch.manual_seed(99)
    second = model(bag())
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.uncertainty.attention, second.uncertainty.attention)
    torch.set_rng_state(after)
    model(bag())
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(small(seed=1)(bag()).logits, first.logits)


def test_the_order_of_patches_does_not_matter() -> None:
    model, order = small(spatial=True), torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])
    features = bag()
    features[0, :3] = features[0, 3]  # equal features, different coordinates
    output, permuted = (
        model(features, grid=GRID[None]),
        model(features[:, order], grid=GRID[None, order]),
    )
    torch.testing.assert_close(permuted.logits, output.logits)
    torch.testing.assert_close(permuted.attention, output.attention[:, order])
    torch.testing.assert_close(
        permuted.uncertainty.attention, output.uncertainty.attention[:, order]
    )


def test_the_spatial_form_without_a_grid_is_an_error() -> None:
    with pytest.raises(BagError, match="needs the coordinates of the patches"):
        small(spatial=True)(bag())


def test_the_form_without_smoothing_ignores_the_grid() -> None:
    model = small()
    assert torch.equal(model(bag(), grid=GRID[None]).logits, model(bag()).logits)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(RecipeError, match="two classes, not 3"):
        BayesMIL(6, 3, prior="detection")
    with pytest.raises(UnknownNameError, match="Did you mean 'detection'"):
        BayesMIL(6, 2, prior="detect")
    with pytest.raises(ValueError, match="draws=-1"):
        BayesMIL(6, 2, draws=-1)
