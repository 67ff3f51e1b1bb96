"""A gradient is never dropped in silence: code that would use only the values of a tensor that requires grad raises, and names what records."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
import aiograd.nn.functional as F
from aiograd.errors import GraphError, NoRuleError
from tests.support import assert_raises, leaf

scipy = pytest.importorskip("scipy", reason="it comes with the extra `scipy`")
for _name in ("fft", "integrate", "linalg", "special", "stats"):
    pytest.importorskip(f"scipy.{_name}")

# -------------------------------------------------------------------- stores into arrays


def _first(target: Any, value: Any, index: Any = 0) -> None:
    target[index] = value


STORES: dict[str, Callable[[Any], None]] = {
    "ndarray": lambda t: _first(np.zeros(3), t),
    "complex ndarray": lambda t: _first(np.zeros(3, complex), t),
    "0-d ndarray": lambda t: _first(np.zeros(()), t, ()),
    "ellipsis": lambda t: _first(np.zeros(3), t, ...),
    "slice": lambda t: _first(np.zeros(3), t, slice(2)),
    "list of them": lambda t: _first(np.zeros(3), [t, t], slice(2)),
    "indices": lambda t: _first(np.zeros(3), t, [0]),
    "mask": lambda t: _first(np.zeros(3), t, np.ones(3, bool)),
    "flat": lambda t: _first(np.zeros(3).flat, t),
    "array.array": lambda t: _first(array.array("d", [0.0]), t),
    "memoryview": lambda t: _first(memoryview(array.array("d", [0.0])), t),
}


@pytest.mark.parametrize("name", STORES)
def test_storing_a_tensor_that_requires_grad_in_an_array_raises(name: str) -> None:
    x = leaf([1.0, 2.0, 3.0])
    with pytest.raises((GraphError, ValueError)) as refused:  # numpy puts a ValueError on top of what the conversion of one element raises
        STORES[name](x[0])
    cause = refused.value if isinstance(refused.value, GraphError) else refused.value.__cause__
    assert name == "flat" or (isinstance(cause, GraphError) and "aiograd.stack" in str(cause))  # numpy drops the cause there
    STORES[name](x[0].detach())


def test_a_refused_store_changes_nothing() -> None:
    target = np.zeros(3)
    with pytest.raises(ValueError, match="setting an array element"):
        target[0] = leaf([1.0, 2.0, 3.0])[1]
    assert target.tolist() == [0.0] * 3


def test_numbers_are_read_and_stored_where_no_graph_is_lost() -> None:
    x, target, kept = leaf([1.0, 2.0, 3.0]), np.zeros(3), {}
    target[0] = float(x[1])
    target[1] = x[2].item()
    kept["loss"] = x[0]
    with ag.no_grad():
        target[2] = x[0]
    assert target.tolist() == [2.0, 3.0, 1.0] and kept["loss"].requires_grad and float(x[1]) == 2.0 and complex(x[1]) == 2.0
    made = ag.zeros(3, dtype=ag.float64)
    made[0] = x[1]
    assert made.requires_grad, "a tensor that is assigned to keeps the graph"


# -------------------------------------------------------------------- settings

Z = ag.zeros(4, dtype=ag.float64)
#: operations that get a tensor for an argument that takes a number
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "full": lambda t: ag.full((2,), t),
    "full_like": lambda t: ag.full_like(Z, t),
    "new_full": lambda t: Z.new_full((2,), t),
    "arange": lambda t: ag.arange(t),
    "linspace": lambda t: ag.linspace(t, 5.0, 3),
    "logspace": lambda t: ag.logspace(0.0, t, 3),
    "pad": lambda t: ag.pad(Z, 1, value=t),
    "nan_to_num": lambda t: ag.nan_to_num(Z, nan=t),
    "quantile": lambda t: ag.quantile(Z, t / 4),
    "var": lambda t: ag.var(Z, correction=t),
    "vector_norm": lambda t: ag.linalg.vector_norm(Z, ord=t),
    "pinv": lambda t: ag.linalg.pinv(ag.eye(2), rtol=t),
    "elu": lambda t: ag.elu(Z, alpha=t),
    "leaky_relu": lambda t: ag.leaky_relu(Z, negative_slope=t),
    "softplus": lambda t: ag.softplus(Z, beta=t),
    "huber_loss": lambda t: F.huber_loss(Z, Z, delta=t),
    "layer_norm": lambda t: F.layer_norm(Z, (4,), eps=t),
    "attention": lambda t: F.scaled_dot_product_attention(Z[None, :, None], Z[None, :, None], Z[None, :, None], scale=t),
    "label_smoothing": lambda t: F.cross_entropy(Z[None], ag.tensor([0]), label_smoothing=t / 4),
    "weight of cross_entropy": lambda t: F.cross_entropy(Z[None], ag.tensor([0]), weight=t * ag.ones(4, dtype=ag.float64)),
    "weight of nll_loss": lambda t: F.nll_loss(Z[None], ag.tensor([0]), weight=t * ag.ones(4, dtype=ag.float64)),
    "weight of binary_cross_entropy": lambda t: F.binary_cross_entropy(Z + 0.5, Z, weight=t),
    "pos_weight": lambda t: F.binary_cross_entropy_with_logits(Z, Z, pos_weight=t),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_requires_grad_raises(name: str) -> None:
    t = ag.tensor(1.0, dtype=ag.float64, requires_grad=True)
    assert_raises(GraphError, "gradient would be lost", lambda: SETTINGS[name](t))
    with ag.no_grad():
        SETTINGS[name](t)
    assert isinstance(SETTINGS[name](t.detach()), ag.Tensor)


FACTORS: dict[str, Callable[[Any], Any]] = {
    "add": lambda t: ag.add(Z, Z + 2.0, alpha=t),
    "subtract": lambda t: ag.subtract(Z, Z - 2.0, alpha=t),
    "add_": lambda t: Z.clone().add_(Z + 2.0, alpha=t),
    "sub_": lambda t: Z.clone().sub_(Z - 2.0, alpha=t),
    "addcmul": lambda t: ag.addcmul(Z, Z + 1.0, Z + 2.0, value=t),
    "addmm": lambda t: ag.addmm(Z, ag.eye(4, dtype=ag.float64), ag.eye(4, dtype=ag.float64) * 0.5, alpha=t),
    "beta of addmm": lambda t: ag.addmm(Z + 0.5, ag.eye(4, dtype=ag.float64), ag.eye(4, dtype=ag.float64), beta=t),
}


@pytest.mark.parametrize("name", FACTORS)
async def test_a_factor_of_one_that_requires_grad_gets_its_gradient(name: str) -> None:
    t = ag.tensor(1.0, dtype=ag.float64, requires_grad=True)
    result = FACTORS[name](t)
    await result.sum().backward()
    assert t.grad.item() == (2.0 if "addmm" in name and "beta" not in name else 8.0)


def test_a_number_of_a_tensor_keeps_its_dtype_in_a_new_one() -> None:
    assert ag.full((2,), ag.tensor(0.3, dtype=ag.float64)).tolist() == [0.3, 0.3]
    assert ag.arange(ag.tensor(3)).tolist() == [0, 1, 2] and ag.linspace(ag.tensor(0.0), ag.tensor(1.0), 3).tolist() == [0.0, 0.5, 1.0]


# -------------------------------------------------------------------- arguments without a rule


async def test_an_argument_for_which_a_row_has_no_gradient_raises() -> None:
    s, q = ag.tensor([2.0, 3.0], dtype=ag.float64, requires_grad=True), ag.tensor([1.5, 2.5], dtype=ag.float64, requires_grad=True)
    for zeta in (ag.special.zeta, scipy.special.zeta):
        for second in (1.0, 1.0, q, q):  # what the first call finds out holds for the second
            assert_raises(NoRuleError, "zeta: its argument 'x1' requires grad", zeta, s, second)
    assert_raises(NoRuleError, None, scipy.special.zeta, s)
    assert await ag.gradcheck(lambda q: scipy.special.zeta(2.5, q), (q,))
    with ag.no_grad():
        np.testing.assert_allclose(ag.special.zeta(s, 1.0).numpy(), scipy.special.zeta(s.detach().numpy(), 1.0))
    chosen = ag.where(q > 2.0, q, 0.0)
    assert chosen.requires_grad


# -------------------------------------------------------------------- functions of SciPy

#: calls of SciPy, and the name of the function in the message with the counterpart that it advises
OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scipy.special.logsumexp": (scipy.special.logsumexp, "aiograd.special.logsumexp"),
    "scipy.special.softmax": (scipy.special.softmax, "aiograd.special.softmax"),
    "scipy.special.log_softmax": (scipy.special.log_softmax, "aiograd.special.log_softmax"),
    "scipy.special.polygamma": (lambda t: scipy.special.polygamma(1, t), "aiograd.special.polygamma"),
    "scipy.special.factorial": (scipy.special.factorial, "no counterpart"),
    "scipy.special.spence": (scipy.special.spence, "no counterpart"),
    "scipy.stats.norm.logpdf": (scipy.stats.norm.logpdf, "log_prob|aiograd.stats"),
    "scipy.stats.norm.cdf": (lambda t: scipy.stats.norm(t, 1.0).cdf(0.5), "cdf"),
    "scipy.stats.zscore": (scipy.stats.zscore, "no counterpart"),
    "scipy.linalg.toeplitz": (scipy.linalg.toeplitz, "no counterpart"),
    "scipy.linalg.inv": (lambda t: scipy.linalg.inv(t * t[:, None] + ag.eye(3)), "aiograd.linalg.inv"),
    "scipy.linalg.cholesky": (lambda t: scipy.linalg.cholesky(t * t[:, None] + ag.eye(3)), "aiograd.linalg.cholesky"),
    "scipy.fft.fft": (scipy.fft.fft, "aiograd.fft.fft"),
    "scipy.integrate.trapezoid": (scipy.integrate.trapezoid, "aiograd.trapezoid"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_error_names_the_function_of_scipy_and_what_records_in_its_place(name: str) -> None:
    call, wanted = OTHERS[name]
    assert_raises((GraphError, NoRuleError), rf"{name}\b.*({wanted})", lambda: call(leaf([1.0, 2.0, 3.0])))
    with ag.no_grad():
        call(leaf([1.0, 2.0, 3.0]).detach())


def test_a_conversion_outside_of_scipy_says_what_to_do() -> None:
    for call in (np.asarray, lambda t: scipy.integrate.quad(lambda _: np.asarray(t).sum(), 0.0, 1.0)):
        with pytest.raises(GraphError, match=r"detach\(\)\.numpy\(\) where its values are meant"):
            call(leaf([1.0, 2.0, 3.0]))
