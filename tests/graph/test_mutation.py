"""allow_mutation_on_saved_tensors: old values survive modification, and are copied only then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GraphError
from aiograd.graph import allow_mutation_on_saved_tensors
from tests.support import assert_awaiting_raises, custom_function, leaf, same


async def test_gradients_are_those_of_the_old_values() -> None:
    x = leaf([2.0, 3.0])
    with allow_mutation_on_saved_tensors():
        y = x * 1
        z = y * y
        y *= 10
        y.zero_()
        await z.sum().backward()
    same(x.grad, [4.0, 6.0])


async def test_modification_through_views_and_without_a_graph() -> None:
    x = leaf([2.0, 3.0])
    with allow_mutation_on_saved_tensors():
        y = x * 1
        z = y * y
        view = y[0:1]
        view.fill_(9.0)
        with ag.no_grad():
            y.detach()[1] = 7.0
        assert y.detach().tolist() == [9.0, 7.0]
        await z.sum().backward()
    same(x.grad, [4.0, 6.0])


async def test_a_leaf_can_be_updated_before_backward() -> None:
    w = leaf([2.0])
    with allow_mutation_on_saved_tensors():
        loss = (w * w * w).sum()
        with ag.no_grad():
            w -= 1
        await loss.backward()
    same(w.grad, [12.0])


async def test_outputs_and_functions_are_covered() -> None:
    @custom_function(lambda a: a * a, inline=True, saves=True)
    def Square(ctx: Any, g: Any) -> Any:
        (a,) = ctx.saved_tensors
        return 2 * a * g

    x = leaf([2.0])
    with allow_mutation_on_saved_tensors():
        y = x * 1
        z = Square.apply(y)
        e = np.exp(z)
        y += 1
        e.zero_()
        out = (e + z).sum()
        await out.backward()
    same(x.grad, [4.0])  # the exponential was overwritten, z was not


async def test_only_what_is_modified_is_copied_and_once() -> None:
    y = leaf(np.ones(4)) * 1
    u = leaf(np.ones(4)) * 1
    with allow_mutation_on_saved_tensors() as saved:
        z = y * y
        _ = u * u
        kept = list(saved._kept)
        y += 1
        copies = [k.tensor._data for k in kept if not np.shares_memory(k.tensor._data, u._data) and not np.shares_memory(k.tensor._data, y._data)]
        assert len(copies) == 2 and copies[0] is copies[1]
        assert sum(np.shares_memory(k.tensor._data, u._data) for k in kept) == 2
        await z.sum().backward()


async def test_second_derivatives() -> None:
    x = leaf([2.0])
    with allow_mutation_on_saved_tensors():
        y = x * 1
        z = y * y * y
        y.zero_()
        (first,) = await ag.grad(z.sum(), x, create_graph=True)
        (second,) = await ag.grad(first.sum(), x)
    same(first, [12.0])
    same(second, [12.0])


async def test_a_pass_outside_of_the_block_is_an_error() -> None:
    x = leaf([2.0])
    with allow_mutation_on_saved_tensors():
        y = x * x
    await assert_awaiting_raises(GraphError, "Trying to backward outside of the 'allow_mutation_on_saved_tensors' context", y.sum().backward())
    with allow_mutation_on_saved_tensors() as saved:
        y = x * x
        saved.clear()
        await assert_awaiting_raises(GraphError, "outside", y.sum().backward())
    assert x.grad is None


def test_blocks_cannot_be_nested() -> None:
    with allow_mutation_on_saved_tensors():
        with pytest.raises(GraphError, match="cannot be nested"), allow_mutation_on_saved_tensors():
            pass
    with allow_mutation_on_saved_tensors():
        pass


def test_blocks_cannot_be_entered_where_hooks_are_disabled() -> None:
    with ag.graph.disable_saved_tensors_hooks("no hooks"), pytest.raises(GraphError, match="no hooks"), allow_mutation_on_saved_tensors():
        pass
    assert ag.is_grad_enabled()
