"""SGPMIL against a dense Gaussian process with explicit inverses, and against its paper."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import expit, softmax
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from caprmil.errors import RunError, UnknownNameError
from caprmil.experiments import cost
from caprmil.models import SGPMIL
from caprmil.models.sgpmil import SparseGP, cholesky

Array = NDArray[np.float64]


def small(**settings: Any) -> SGPMIL:
    """Return a small model whose process has no initial values, as after training."""
    torch.manual_seed(0)
    sizes = {"dims": (12, 7), "gp_dim": 4, "inducing": 6}
    model = SGPMIL(5, 3, **{**sizes, **settings}).double().eval()
    with torch.no_grad():
        for parameter in model.process.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    return model


def bag(patches: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, patches, 5, generator=generator, dtype=torch.float64)


def dense(process: SparseGP, points: Array) -> tuple[Array, Array]:
    """Return mean and variance of the posterior at each point, with explicit inverses."""
    inducing, mean, factor, slope, offset, raw = (p.detach().numpy() for p in process.parameters())
    length, scale, constant = np.log1p(np.exp(raw))

    def kernel(one: Array, other: Array) -> Array:
        distance = ((one[:, None] - other[None]) ** 2).sum(axis=-1)
        return scale * np.exp(-distance / (2 * length**2)) + constant

    prior = kernel(inducing, inducing) + 1e-4 * np.eye(len(inducing))
    root, factor = np.linalg.cholesky(prior), np.tril(factor)
    values, covariance = root @ mean, root @ factor @ factor.T @ root.T  # at the inducing points
    gain = kernel(points, inducing) @ np.linalg.inv(prior)
    posterior = kernel(points, points) - gain @ (prior - covariance) @ gain.T
    return points @ slope + offset + gain @ values, posterior.diagonal() + 1e-4


def plain(model: SGPMIL, features: Tensor) -> tuple[Array, Array]:
    """Return the weights and logits of each draw, with the noise of the model's seed."""
    patches = model.project(features[0])
    mean, variance = dense(model.process, model.reduce(patches).detach().numpy())
    generator, shared = torch.Generator().manual_seed(model.seed), model.noise == "shared"
    noise = torch.randn(model.draws, 1 if shared else len(mean), generator=generator).numpy()
    if not shared:  # the first number is for the patch with the smallest sum
        noise = noise[:, features[0].sum(dim=1).argsort().argsort()]
    weights = expit(mean + np.sqrt(variance) * noise)
    shares = weights / weights.sum(axis=1, keepdims=True) if model.normalise else weights
    bags = shares @ patches.detach().numpy()
    weight, bias = (p.detach().numpy() for p in model.classify.parameters())
    return shares, bags @ weight.T + bias


def test_the_number_of_parameters_is_that_of_the_release() -> None:
    assert cost.parameters(SGPMIL(1024, 2)) == 1_209_686


@pytest.mark.parametrize(("draws", "gflop"), [(30, 2.429), (0, 2.415)])
def test_draws_add_few_operations(draws: int, gflop: float) -> None:
    measured = cost.flops(SGPMIL(1024, 2, draws=draws), n_patches=1000)
    assert measured / 1e9 == pytest.approx(gflop, rel=2e-3)


def test_initial_values_are_those_of_the_release() -> None:
    process = SGPMIL(1024, 2).process
    assert [h.item() for h in process.hyperparameters()] == pytest.approx([math.log(2)] * 3)
    assert torch.equal(process.factor, torch.eye(80))
    assert process.mean.std().item() == pytest.approx(1e-3, rel=0.3)
    assert process.slope.std().item() == pytest.approx(1, rel=0.3)
    low, high = process.inducing.aminmax()
    assert 0 <= low < 0.01
    assert 0.99 < high <= 1


def test_the_posterior_equals_that_of_a_dense_process() -> None:
    process, points = small().process, torch.rand(9, 4, dtype=torch.float64)
    mean, variance = process(points)
    expected_mean, expected_variance = dense(process, points.numpy())
    np.testing.assert_allclose(mean.detach(), expected_mean, rtol=1e-8)
    np.testing.assert_allclose(variance.detach(), expected_variance, rtol=1e-8)


def test_the_variance_is_small_at_a_known_inducing_point_and_large_far_away() -> None:
    process = small().process
    process.factor.data.zero_()
    assert process(process.inducing)[1].max() < 1e-3
    assert process(process.inducing + 100.0)[1].min() > 0.1


def test_the_variance_has_a_lower_bound() -> None:
    process = small(inducing=1).process
    process.factor.data.zero_()
    process.raw.data[1:] = 1e14  # the variance at the point is lost in rounding
    variance = process(process.inducing.repeat(9, 1))[1]
    assert (variance >= 1e-6).all()


def test_the_process_computes_in_double_precision() -> None:
    process, points = small().process, torch.rand(9, 4)
    double = process.double()(points)
    single = process.float()(points)
    assert single[1].dtype == torch.float64
    torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inducing", [1, 6])
def test_the_divergence_is_that_of_two_normal_distributions(inducing: int) -> None:
    process = small(inducing=inducing).process
    process.factor.data[0].neg_()  # the sign of a row has no effect
    factor = process.factor.tril()
    values = MultivariateNormal(process.mean, covariance_matrix=factor @ factor.mT)
    prior = MultivariateNormal(torch.zeros_like(process.mean), torch.eye(inducing).double())
    torch.testing.assert_close(process.kl(), kl_divergence(values, prior))


def test_the_divergence_starts_near_zero_and_is_divided_by_the_number_of_bags() -> None:
    model, labels = small(), torch.tensor([1])
    assert SparseGP(4, inducing=6).kl().item() == pytest.approx(0, abs=1e-4)
    output = model(bag())
    torch.testing.assert_close(model.loss(output, labels)["kl"], model.process.kl())
    model.on_epoch_start(0, 50)
    torch.testing.assert_close(model.loss(output, labels)["kl"], model.process.kl() / 50)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_draws_equal_those_of_the_papers_equations(noise: str, normalise: bool) -> None:
    model = small(noise=noise, normalise=normalise)
    output, (weights, logits) = model(bag()), plain(model, bag())
    mean, probabilities = weights.mean(axis=0), softmax(logits, axis=1)
    close = {"rtol": 1e-6, "atol": 1e-9}
    np.testing.assert_allclose(output.attention[0].detach(), mean / mean.sum(), **close)
    np.testing.assert_allclose(output.logits[0].exp().detach(), probabilities.mean(axis=0), **close)
    np.testing.assert_allclose(output.aux["mean_logits"][0].detach(), logits.mean(axis=0), **close)
    spread = probabilities.std(axis=0, ddof=1), weights.std(axis=0, ddof=1) / mean.sum()
    np.testing.assert_allclose(output.uncertainty.probabilities[0].detach(), spread[0], **close)
    np.testing.assert_allclose(output.uncertainty.attention[0].detach(), spread[1], **close)


@pytest.mark.parametrize("normalise", [False, True])
def test_mean_logits_are_sums_over_patches(normalise: bool) -> None:
    model = small(normalise=normalise)
    output, patches = model(bag()), model.project(bag()[0])
    mean_weight = torch.from_numpy(plain(model, bag())[0].mean(axis=0))
    each = mean_weight[:, None] * (patches @ model.classify.weight.mT)
    expected = model.classify.bias + each.sum(dim=0)
    torch.testing.assert_close(output.aux["mean_logits"][0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", ["independent", "shared"])
def test_draws_have_the_mean_and_variance_of_the_process(noise: str) -> None:
    model, patches = small(noise=noise, draws=20_000), small().project(bag()[0])
    mean, variance = model.process(model.reduce(patches))
    weights = model.log_weights(
        patches, *model.process(model.reduce(patches)), model.draw(bag()[0])
    ).exp()
    scores = weights.logit()
    torch.testing.assert_close(scores.mean(dim=0), mean, rtol=0, atol=0.05)
    torch.testing.assert_close(scores.var(dim=0), variance, rtol=0.05, atol=0)
    correlations = np.corrcoef(scores.detach().numpy().T)
    expected = np.eye(9) if noise == "independent" else np.ones((9, 9))
    np.testing.assert_allclose(correlations, expected, atol=0.03)


def test_shared_noise_does_not_average_out_over_a_large_bag() -> None:
    spreads = {}
    for noise in ("independent", "shared"):
        model = small(noise=noise, normalise=False)
        model.classify.weight.data /= 100  # else the sum of 2000 patches saturates the softmax
        spreads[noise] = model(bag(2000)).uncertainty.probabilities.max()
    assert spreads["shared"] > 10 * spreads["independent"]


@pytest.mark.parametrize(("normalise", "growth"), [(False, 4), (True, 1)])
def test_the_embedding_grows_with_the_bag_unless_normalised(normalise: bool, growth: int) -> None:
    model = small(draws=0, normalise=normalise)
    once, repeated = model(bag()), model(bag().repeat(1, 4, 1))
    torch.testing.assert_close(repeated.embedding, growth * once.embedding)
    torch.testing.assert_close(repeated.attention[:, :9], once.attention / 4)


def test_without_draws_the_weights_are_those_of_the_mean_scores() -> None:
    model = small(draws=0)
    output, patches = model(bag()), model.project(bag()[0])
    mean, _ = dense(model.process, model.reduce(patches).detach().numpy())
    logits = model.classify(torch.from_numpy(expit(mean)) @ patches)
    torch.testing.assert_close(output.aux["mean_logits"][0], logits)
    torch.testing.assert_close(output.logits[0], logits.log_softmax(dim=-1))
    assert output.uncertainty is None


def test_training_draws_at_least_once() -> None:
    model = small(draws=0).train()
    first, second = model(bag()), model(bag())
    assert not torch.equal(first.logits, second.logits)


def test_the_loss_uses_the_mean_of_the_logits() -> None:
    model, labels = small(draws=3, noise="shared"), torch.tensor([2])
    output = model(bag(300))
    logits = torch.from_numpy(plain(model, bag(300))[1].mean(axis=0))
    loss = model.loss(output, labels)["bag"]
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits[None], labels))
    assert not torch.isclose(loss.double(), F.cross_entropy(output.logits, labels))


def test_repeated_evaluations_are_bit_identical() -> None:
    model = small()
    first, state = model(bag()), torch.get_rng_state()
    assert torch.equal(model(bag()).logits, first.logits)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(model(bag()).logits, first.logits)
    assert not torch.equal(small(seed=1)(bag()).logits, first.logits)


def test_the_order_of_patches_does_not_matter() -> None:
    model, order = small(), torch.tensor([3, 7, 0, 8, 5, 1, 6, 2, 4])
    output, permuted = model(bag()), model(bag()[:, order])
    torch.testing.assert_close(permuted.logits, output.logits)
    torch.testing.assert_close(permuted.attention, output.attention[:, order])
    torch.testing.assert_close(
        permuted.uncertainty.attention, output.uncertainty.attention[:, order]
    )


def test_attention_sums_to_one_if_all_weights_underflow() -> None:
    model = small().float()
    model.process.offset.data.fill_(-500.0)  # its sigmoid is zero in float32
    attention = model(bag()).attention
    assert attention.sum().item() == pytest.approx(1)


def test_inducing_points_may_coincide() -> None:
    process, points = small().process, torch.rand(9, 4, dtype=torch.float64)
    process.inducing.data[:] = process.inducing.data[0]
    mean, variance = process(points)
    expected_mean, expected_variance = dense(process, points.numpy())
    np.testing.assert_allclose(mean.detach(), expected_mean, rtol=1e-6)
    np.testing.assert_allclose(variance.detach(), expected_variance, rtol=1e-6)


def coincident(excess: float) -> Tensor:
    """Return the covariance of two coincident points with a rounding error of `excess`."""
    covariance = torch.ones(2, 2, dtype=torch.float64)
    covariance[0, 1] = covariance[1, 0] = 1 + excess
    return covariance


@pytest.mark.parametrize(("excess", "jitter"), [(0.0, 1e-4), (5e-4, 1e-3), (5e-3, 1e-2)])
def test_jitter_grows_in_steps_of_ten_until_it_suffices(excess: float, jitter: float) -> None:
    root = cholesky(coincident(excess))
    expected = coincident(excess) + jitter * torch.eye(2).double()
    torch.testing.assert_close(root @ root.mT, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("excess", [0.05, torch.nan])
def test_a_broken_covariance_is_an_error(excess: float) -> None:
    with pytest.raises(RunError, match=r"Lower train\.lr"):
        cholesky(coincident(excess))


def test_a_process_that_has_diverged_is_an_error() -> None:
    model = small()
    model.process.inducing.data[0, 0] = torch.nan
    with pytest.raises(RunError, match="no Cholesky factor"):
        model(bag())


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'shared'"):
        SGPMIL(5, 2, noise="share")
    for settings in ({"draws": -1}, {"inducing": 0}, {"dims": ()}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}="):
            SGPMIL(5, 2, **settings)
