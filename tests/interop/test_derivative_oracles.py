"""Derivatives of functions beside those of `torch.func` and JAX: the same function, written once for all three."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn

#: a warning of torch.func at its first use
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
RANDOM = np.random.default_rng(0)
INNER, OUTER = RANDOM.normal(size=(5, 4)), RANDOM.normal(size=(4, 3))
X, V = RANDOM.normal(size=5), RANDOM.normal(size=5)


class Oracle(NamedTuple):
    """Another library: its functions, how it makes an array, and its derivatives of functions."""

    functions: Any
    array: Callable[[Any], Any]
    derivatives: Any
    vmap: Callable[..., Any]


@pytest.fixture(params=["torch", "jax"])
def library(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        func = importlib.import_module("torch.func")
        yield Oracle(torch, torch.as_tensor, func, func.vmap)
        return
    jax = pytest.importorskip("jax")
    numpy = importlib.import_module("jax.numpy")
    with jax.enable_x64(True):  # of these tests alone: others see that no dtype changes in silence
        yield Oracle(numpy, numpy.asarray, jax, jax.vmap)


def network(lib: Any, array: Any, x: Any) -> Any:
    return lib.tanh(lib.tanh(x @ array(INNER)) @ array(OUTER))


def neighbours(lib: Any, array: Any, x: Any) -> Any:
    return x[1:] * lib.sin(x[:-1]) + lib.exp(-(x[1:] ** 2))


def softmax(lib: Any, array: Any, x: Any) -> Any:
    powers = lib.exp(x - x.sum() / 7)
    return powers / powers.sum()


def joined(lib: Any, array: Any, x: Any) -> Any:
    join = getattr(lib, "concatenate", None) or lib.cat
    return lib.sqrt(join((x * x, x[:2] ** 2)) + 1)


FUNCTIONS = {function.__name__: function for function in (network, neighbours, softmax, joined)}


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found.detach().numpy(), np.asarray(expected), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_products_and_matrices(name: str, library: Oracle) -> None:
    ours = functools.partial(FUNCTIONS[name], ag, ag.asarray)
    theirs = functools.partial(FUNCTIONS[name], library.functions, library.array)
    x, v, there = ag.asarray(X), ag.asarray(V), library.array(X)
    outputs, product = await ag.jvp(ours, x, v)
    expected_outputs, expected_product = library.derivatives.jvp(theirs, (there,), (library.array(V),))
    close(outputs, expected_outputs)
    close(product, expected_product)
    _, push = await ag.linearize(ours, x)
    close(await push(v), expected_product)
    matrix = library.derivatives.jacfwd(theirs)(there)
    for jacobian in (ag.jacfwd, ag.jacrev, ag.jacobian):
        close(await jacobian(ours, x), matrix)
    pytest.importorskip("scipy")
    np.testing.assert_allclose((await ag.sparse_jacobian(ours, x)).toarray(), np.asarray(matrix), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_second_derivatives(name: str, library: Oracle) -> None:
    def ours(x: Any) -> Any:
        return (FUNCTIONS[name](ag, ag.asarray, x) ** 3).sum()

    def theirs(x: Any) -> Any:
        return (FUNCTIONS[name](library.functions, library.array, x) ** 3).sum()

    x, there = ag.asarray(X), library.array(X)
    matrix = library.derivatives.hessian(theirs)(there)
    close(await ag.hessian(ours, x), matrix)
    value, product = await ag.hvp(ours, x, ag.asarray(V))
    close(value, theirs(there))
    close(product, np.asarray(matrix) @ V)


async def test_gradients_of_examples_and_the_sum_of_a_private_step(library: Oracle) -> None:
    inputs, targets = RANDOM.normal(size=(6, 5)), RANDOM.normal(size=(6, 3))

    def loss(lib: Any, weights: Any, x: Any, y: Any) -> Any:
        return ((lib.tanh(x @ weights[0]) @ weights[1] - y) ** 2).sum()

    there = [library.array(INNER), library.array(OUTER)]
    each = library.vmap(library.derivatives.grad(functools.partial(loss, library.functions)), (None, 0, 0))(
        there, library.array(inputs), library.array(targets)
    )
    weights = [nn.Parameter(ag.tensor(INNER)), nn.Parameter(ag.tensor(OUTER))]  # copies: a step writes them
    found = await ag.grad_per_sample(lambda x, y: loss(ag, weights, x, y), weights, (inputs, targets))
    for one, other in zip(found, each, strict=True):
        close(one, other)
    norms = np.sqrt(sum((np.asarray(part) ** 2).reshape(6, -1).sum(1) for part in each))
    close(await ag.grad_norms_per_sample(lambda x, y: loss(ag, weights, x, y), weights, (inputs, targets)), norms)
    limit = float(np.median(norms))
    private = ag.optim.Private(ag.optim.SGD(weights, lr=1.0), noise_multiplier=0.0, max_grad_norm=limit, sample_rate=0.5, dataset_size=12)
    await private.step(lambda x, y: loss(ag, weights, x, y), (inputs, targets))
    scale = np.minimum(1.0, limit / norms) / 6
    for weight, start, part in zip(weights, (INNER, OUTER), each, strict=True):
        close(weight, start - np.tensordot(scale, np.asarray(part), 1))
