"""Derivatives of functions with a part on other workers: what crosses crosses whole, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError
from tests.distributed.workers import echo, exposing, square, workers


async def test_an_array_of_a_level_is_refused_where_it_would_be_sent() -> None:
    batch = ag.tensor(np.arange(6.0).reshape(3, 2))
    async with workers("a", "b", service=exposing(square, echo)) as (a, _):

        async def remote(x: Any) -> Any:
            return await a.call("b", "echo", {"k": [x]})

        with pytest.raises(ArgumentTypeError, match=r"calling echo on b: argument 0\['k'\]\[0\] is a tensor of vmap:\d+, shape \[2\], which stand"):
            await ag.vmap(remote)(batch)
        with pytest.raises(ArgumentTypeError, match="Take the part that another worker computes out"):
            await ag.vmap(lambda x: a.call("b", "square", x * 2))(batch)
        assert (await a.call("b", "square", batch)).numpy()[2, 1] == 25, "the connection is as it was"


async def test_gradients_of_a_batch_do_not_cross_and_rows_are_passes_of_their_own() -> None:
    x = ag.tensor([1.0, 2.0, 3.0], requires_grad=True)
    async with workers("a", "b", service=exposing(square)) as (a, _), a.context():

        async def function(x: Any) -> Any:
            return (await a.call("b", "square", x)) * x

        y = await function(x)
        with pytest.raises(ArgumentTypeError, match="stands for more than one value"):
            await ag.vmap(lambda seed: ag.grad(y, [x], seed, retain_graph=True))(ag.tensor(np.eye(3, dtype=np.float32)))
        expected = np.diag(3 * x.detach().numpy() ** 2)
        np.testing.assert_allclose((await ag.jacrev(function, x)).numpy(), expected)
        np.testing.assert_allclose((await ag.jacobian(function, x, chunk_size=2)).numpy(), expected)
