"""Distributions: densities that integrate to 1, moments of samples, derivatives, entropies and divergences by summing up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.special

import aiograd as ag
from aiograd.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Distribution,
    Gamma,
    Multinomial,
    Normal,
    Uniform,
    kl_divergence,
    register_kl,
)
from aiograd.distributions.standard_gamma import sample_slope
from aiograd.errors import ArgumentError, ArgumentTypeError, NoRuleError, ShapeError
from aiograd.running.random import Generator
from tests.support import assert_raises, leaf
from tests.toy_device import ToyDevice

D = np.float64


#: a distribution of numbers, its parameters, another one of its class, and the ends of its support
CONTINUOUS: dict[str, tuple[Any, list[Any], list[Any], float, float]] = {
    "normal": (Normal, [0.5, 2.0], [-1.0, 1.5], -30.0, 30.0),
    "uniform": (Uniform, [-1.0, 3.0], [-2.0, 4.0], -1.0, 3.0),
    "gamma": (Gamma, [2.5, 1.5], [1.5, 0.7], 1e-9, 60.0),
    "beta": (Beta, [2.5, 3.5], [1.5, 2.0], 1e-9, 1 - 1e-9),
}
#: a distribution of classes or counts, its parameters, another one of its class, and all values
DISCRETE: dict[str, tuple[Any, dict[str, Any], dict[str, Any], Any]] = {
    "bernoulli": (Bernoulli, {"probs": 0.3}, {"probs": 0.6}, [0.0, 1.0]),
    "bernoulli logits": (Bernoulli, {"logits": 0.7}, {"logits": -0.2}, [0.0, 1.0]),
    "categorical": (Categorical, {"probs": [0.2, 0.5, 0.3]}, {"probs": [0.4, 0.4, 0.2]}, [0, 1, 2]),
    "categorical logits": (Categorical, {"logits": [0.2, -0.5, 1.3]}, {"logits": [0.0, 0.0, 1.0]}, [0, 1, 2]),
    "multinomial": (Multinomial, {"total_count": 3, "probs": [0.2, 0.5, 0.3]}, {}, [[i, j, 3 - i - j] for i in range(4) for j in range(4 - i)]),
}


@pytest.mark.parametrize("name", CONTINUOUS)
async def test_densities(name: str) -> None:
    cls, given, other, low, high = CONTINUOUS[name]
    p, q = cls(*map(leaf, given)), cls(*map(leaf, other))
    x = np.linspace(low, high, 400_001)
    x = (x[:-1] + x[1:]) / 2
    step = x[1] - x[0]
    log_p, log_q = (each.log_prob(x).detach().numpy() for each in (p, q))
    density = np.exp(log_p)
    assert density.sum() * step == pytest.approx(1, abs=1e-6)
    assert (density * x).sum() * step == pytest.approx(p.mean.item(), abs=1e-5)
    assert (density * (x - p.mean.item()) ** 2).sum() * step == pytest.approx(p.variance.item(), abs=1e-5)
    assert -(density * log_p).sum() * step == pytest.approx(p.entropy().item(), abs=1e-5)
    assert (density * (log_p - log_q)).sum() * step == pytest.approx(kl_divergence(p, q).item(), abs=1e-5)
    inputs = tuple(map(leaf, given))
    value = p.sample((4,))
    assert await ag.gradcheck(lambda *given: cls(*given).log_prob(value), inputs)
    assert await ag.gradgradcheck(lambda *given: cls(*given).log_prob(value), inputs, atol=1e-4)
    assert await ag.gradcheck(lambda *given: (cls(*given).entropy(), kl_divergence(cls(*given), q)), inputs)


@pytest.mark.parametrize("name", DISCRETE)
async def test_probabilities(name: str) -> None:
    cls, given, other, values = DISCRETE[name]
    p = cls(**given)
    log_p = p.log_prob(np.array(values)).numpy().astype(D)
    chances = np.exp(log_p)
    assert chances.sum() == pytest.approx(1, abs=1e-6)
    assert -(chances * log_p).sum() == pytest.approx(p.entropy().item(), abs=1e-5)
    if other:
        q = cls(**other)
        assert (chances * (log_p - q.log_prob(np.array(values)).numpy())).sum() == pytest.approx(kl_divergence(p, q).item(), abs=1e-5)
    drawn = cls(**given, generator=Generator(5)).sample((20_000,)).numpy()
    shares = [np.mean(np.all(drawn == value, axis=-1) if isinstance(value, list) else drawn == value) for value in values]
    np.testing.assert_allclose(shares, chances, atol=0.02)
    (key,) = given.keys() - {"total_count"}
    rest = {k: v for k, v in given.items() if k == "total_count"}
    assert await ag.gradcheck(lambda x: cls(**rest, **{key: x}).log_prob(np.array(values)), (leaf(given[key]),))
    assert await ag.gradcheck(lambda x: cls(**rest, **{key: x}).entropy(), (leaf(given[key]),))


@pytest.mark.parametrize(
    "make",
    [
        lambda g: Normal(leaf([0.5, -1.0]), leaf(2.0), generator=g), lambda g: Uniform(leaf([-1.0, 0.0]), 3.0, generator=g),
        lambda g: Gamma(leaf([0.7, 4.0]), leaf(1.5), generator=g), lambda g: Beta(leaf([0.7, 4.0]), leaf([2.0, 0.5]), generator=g),
        lambda g: Dirichlet(leaf([[0.7, 4.0, 1.0], [2.0, 2.0, 2.0]]), generator=g),
        lambda g: Multinomial(4, probs=np.array([[0.2, 0.8], [0.5, 0.5]]), generator=g),
    ],
)  # fmt: skip
async def test_samples(make: Any) -> None:
    p = make(Generator(1))
    x = p.sample((20_000,))
    assert x.shape == (20_000, *p.batch_shape, *p.event_shape) and not x.requires_grad
    error = 5 * p.stddev.detach().numpy() / math.sqrt(20_000)
    assert np.all(np.abs(x.numpy().mean(0) - p.mean.detach().numpy()) < error)
    np.testing.assert_allclose(x.numpy().var(0), p.variance.detach().numpy(), rtol=0.1)
    assert make(Generator(1)).sample((3,)).tolist() == make(Generator(1)).sample((3,)).tolist()
    assert np.isfinite(p.log_prob(x).detach().numpy()).all()
    if not p.has_rsample:
        assert_raises(NoRuleError, None, p.rsample)
        return
    y = p.rsample((20_000,))
    leaves = [t for t in vars(p).values() if isinstance(t, ag.Tensor) and t.requires_grad]
    means = await ag.grad(p.mean.sum(), leaves, allow_unused=True, materialize_grads=True)
    found = await ag.grad(y.mean(0).sum(), leaves)
    for a, b in zip(found, means, strict=True):  # the derivative of the mean is the mean of the derivatives
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=0.05)


@pytest.mark.parametrize("a", [0.05, 0.5, 1.0, 3.0, 40.0, 3000.0])
def test_the_slope_of_a_gamma_sample_keeps_its_quantile(a: float) -> None:
    def quantile(concentration: float, z: float) -> float:
        u = np.linspace(math.log(z) - 40.0 / min(1.0, a), math.log(z), 2_000_001)  # of log(z)
        return float(np.trapezoid(np.exp(concentration * u - np.exp(u) - math.lgamma(concentration)), u))

    z = np.random.default_rng(3).gamma(a, size=3) + 1e-8
    step = 1e-4 * a
    for each in z:
        slope = -(quantile(a + step, each) - quantile(a - step, each)) / (2 * step)
        slope /= math.exp((a - 1) * math.log(each) - each - math.lgamma(a))
        assert sample_slope(each, a) == pytest.approx(slope, rel=2e-4)


async def test_the_slope_of_a_beta_density_where_a_concentration_is_1() -> None:
    def density(a: ag.Tensor, b: ag.Tensor) -> ag.Tensor:
        return Beta(a, b).log_prob(np.array(0.5))

    for a, b in ((2.0, 1.0), (1.0, 2.0), (1.0, 1.0)):
        found = await ag.grad(density(*(given := (leaf(a), leaf(b)))), given)
        psi = scipy.special.digamma([a + b, a, b])
        expected = psi[0] - psi[1:] + math.log(0.5)
        assert [each.item() for each in found] == pytest.approx(expected)
        tangent = (await ag.jvp(density, given, (ag.tensor(0.0, dtype=D), ag.tensor(1.0, dtype=D))))[1]
        assert tangent.item() == pytest.approx(expected[1])


async def test_the_entropy_of_draws_with_an_impossible_class_has_a_gradient() -> None:
    for weights in ([0.5, 0.5], [0.25, 0.75]):
        (without,), (with_one,) = [await ag.grad(Multinomial(4, p := leaf(given)).entropy(), p) for given in (weights, [0.0, *weights])]
        assert np.isfinite(with_one.numpy()).all()
        np.testing.assert_allclose(with_one.numpy()[1:], without.numpy(), atol=1e-12)


def test_dirichlet() -> None:
    a = np.array([2.0, 3.0, 1.5])
    p, x = Dirichlet(a), np.array([0.2, 0.5, 0.3])
    beta = Beta(a[0], a[1] + a[2])  # each element is beta distributed
    two = Dirichlet(a[:2])
    assert two.log_prob(np.array([0.2, 0.8])).item() == pytest.approx(Beta(*a[:2]).log_prob(0.2).item())
    assert two.entropy().item() == pytest.approx(Beta(*a[:2]).entropy().item())
    assert kl_divergence(two, Dirichlet(a[1:])).item() == pytest.approx(kl_divergence(Beta(*a[:2]), Beta(*a[1:])).item())
    assert p.mean[0].item() == pytest.approx(beta.mean.item()) and p.variance[0].item() == pytest.approx(beta.variance.item())
    wanted = ((a - 1) * np.log(x)).sum() + math.lgamma(a.sum()) - sum(map(math.lgamma, a))
    assert p.log_prob(x).item() == pytest.approx(wanted)


def test_normal_quantiles_and_certainties() -> None:
    p = Normal(1.0, 2.0)
    assert p.icdf(p.cdf(0.3)).item() == pytest.approx(0.3, abs=1e-5)
    assert Bernoulli(1.0).log_prob(1.0).item() == 0.0 and Bernoulli(1.0).entropy().item() == 0.0
    assert Categorical([0.0, 1.0]).entropy().item() == 0.0 and Categorical([0.0, 1.0]).log_prob(0).item() == -math.inf
    assert Uniform(0.0, 1.0).log_prob(1.0).item() == -math.inf
    assert kl_divergence(Uniform(0.0, 2.0), Uniform(0.0, 1.0)).item() == math.inf
    assert Multinomial(2, [0.0, 1.0]).log_prob([0.0, 2.0]).item() == 0.0
    assert "batch_shape=[2]" in repr(Categorical(np.ones((2, 3))))
    np.testing.assert_allclose(Categorical([2.0, 6.0]).probs.numpy(), [0.25, 0.75])


def test_multinomial_draws_by_weight() -> None:
    weights = np.array([[1.0, 0.0, 3.0], [2.0, 2.0, 0.0]])
    found = ag.multinomial(weights, 10_000, replacement=True, generator=Generator(2)).numpy()
    np.testing.assert_allclose([(row == k).mean() for row in found for k in range(3)], [0.25, 0, 0.75, 0.5, 0.5, 0], atol=0.02)
    one = [ag.multinomial(weights[0], 2, generator=Generator(i)).tolist() for i in range(2000)]
    assert all(sorted(each) == [0, 2] for each in one)
    assert np.mean([each[0] == 2 for each in one]) == pytest.approx(0.75, abs=0.04)
    for wrong, error in (([-1.0, 2.0], ArgumentError), ([0.0, 0.0], ArgumentError), ([np.nan, 1.0], ArgumentError), (np.ones((1, 1, 2)), ShapeError)):
        assert_raises(error, None, ag.multinomial, wrong, 1)
    for count in (0, 3, True):
        assert_raises(ArgumentError, None, ag.multinomial, [1.0, 1.0], count)
    for replacement in (False, True):
        none = ag.multinomial(np.zeros((0, 3)), 2, replacement)
        assert none.shape == (0, 2) and none.dtype == np.int64
        for extreme in (1.5e308, 1e-320):
            drawn = [ag.multinomial(np.array([extreme, extreme]), 1, replacement, generator=Generator(i)).item() for i in range(200)]
            assert 50 < sum(drawn) < 150
    assert_raises(ArgumentError, "3 weights above 0", ag.multinomial, np.zeros((0, 3)), 4)


async def test_samples_and_densities_on_a_device() -> None:
    with ToyDevice("toy:0"):
        given = ag.tensor([1.5, 2.5], dtype=D, device="toy:0", requires_grad=True)
        for p in (Normal(given, 1.0), Uniform(0.0, given), Gamma(given, 2.0), Beta(given, given), Dirichlet(given)):
            await ag.ready(vars(p))  # samples of most are drawn on the host
            x = p.rsample((2,))
            loss = p.log_prob(x).sum() + p.entropy().sum()
            assert x.device == loss.device == "toy:0"
            (grad,) = await ag.grad(loss, [given])
            assert np.isfinite((await grad.to("cpu")).numpy()).all()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: Normal(0.0, 0.0), ArgumentError), (lambda: Normal(0.0, [1.0, np.nan]), ArgumentError), (lambda: Uniform(1.0, 1.0), ArgumentError),
        (lambda: Gamma(-1.0, 1.0), ArgumentError), (lambda: Bernoulli(1.5), ArgumentError), (lambda: Bernoulli(0.5, 0.5), ArgumentError),
        (lambda: Categorical([0.0, 0.0]), ArgumentError), (lambda: Categorical(0.5), ShapeError), (lambda: Dirichlet(1.0), ShapeError),
        (lambda: Multinomial(-1, [1.0]), ArgumentError), (lambda: Normal(1j, 1.0), ArgumentTypeError),
        (lambda: Normal(0.0, 1.0).sample(-1), ArgumentError), (lambda: Normal(0.0, 1.0).sample(None), ArgumentError),  # type: ignore[arg-type]
        (lambda: Normal(ag.zeros(2), ag.ones(3)), ShapeError), (lambda: Categorical(np.ones((2, 3))).log_prob([0, 1, 2]), ShapeError),
        (lambda: Dirichlet(np.ones(3)).log_prob([1.0]), ShapeError), (lambda: Dirichlet(np.ones((2, 3))).log_prob(np.eye(3)), ShapeError),
        (lambda: Multinomial(3, np.ones(3)).log_prob([3.0]), ShapeError), (lambda: Multinomial(1, np.ones((2, 3))).log_prob(np.eye(3)), ShapeError),
        (lambda: kl_divergence(Categorical(np.ones(3)), Categorical(np.ones(1))), ShapeError),
        (lambda: kl_divergence(Dirichlet(np.ones(3)), Dirichlet(np.ones(1))), ShapeError),
        (lambda: Bernoulli(logits=np.nan), ArgumentError), (lambda: Normal(np.nan, 1.0), ArgumentError),
        (lambda: Categorical(logits=[0.0, np.nan]), ArgumentError), (lambda: Multinomial(1, logits=[0.0, np.nan]), ArgumentError),
        (lambda: Categorical(logits=[[0.0, 0.0], [-np.inf, -np.inf]]), ArgumentError), (lambda: Categorical(logits=[0.0, np.inf]), ArgumentError),
        (lambda: Bernoulli(0.5).log_prob(0.5), ArgumentError), (lambda: Categorical([0.5, 0.5]).log_prob(2), ArgumentError),
        (lambda: Multinomial(2, [0.5, 0.5]).log_prob([1.0, 2.0]), ArgumentError), (lambda: Beta(1.0, 1.0).log_prob(2.0), ArgumentError),
        (lambda: kl_divergence(Normal(0.0, 1.0), Gamma(1.0, 1.0)), ArgumentTypeError), (lambda: Distribution(()).entropy(), NotImplementedError),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(call: Any, error: type[Exception]) -> None:
    assert_raises(error, None, call)


def test_unchecked_and_registered() -> None:
    assert Beta(1.0, 1.0, validate_args=False).log_prob(0.5).item() == 0.0

    class Mine(Normal):
        pass

    @register_kl(Mine, Normal)
    def always(p: Any, q: Any) -> ag.Tensor:
        return ag.tensor(7.0)

    assert kl_divergence(Mine(0.0, 1.0), Normal(0.0, 1.0)).item() == 7.0
    assert kl_divergence(Normal(0.0, 1.0), Mine(0.0, 1.0)).item() == 0.0
