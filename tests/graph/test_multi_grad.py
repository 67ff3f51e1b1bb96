"""Hooks on several tensors at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, NoGraphError
from aiograd.graph import register_multi_grad_hook
from tests.support import assert_awaiting_raises, assert_raises, custom_function, leaf


def numbers(grads: Any) -> list[Any]:
    return [None if g is None else g.item() for g in grads]


@custom_function(lambda a, b: a * 1 + b * 1, inline=True)
def SecondIsNone(ctx: Any, g: Any) -> Any:
    """Gives its second argument no gradient."""
    return g * 5, None


async def test_all_fires_once_per_pass_when_every_gradient_is_there() -> None:
    a, b, c = leaf([1.0]), leaf([1.0]), leaf([1.0])
    y = b * 3
    calls: list[Any] = []
    register_multi_grad_hook([a, y, c], lambda grads: calls.append(numbers(grads)))
    out = (a * 2 + y * 4 + c * 5).sum()
    await out.backward(retain_graph=True)
    assert calls == [[2.0, 4.0, 5.0]]
    await out.backward()
    assert calls == [[2.0, 4.0, 5.0]] * 2


async def test_all_does_not_wait_for_what_takes_no_part() -> None:
    a, b, c = leaf([1.0]), leaf([1.0]), leaf([1.0])
    calls: list[Any] = []
    register_multi_grad_hook([a, b, c], lambda grads: calls.append(numbers(grads)))
    await (a * 2 + b * 3).sum().backward()
    assert calls == [[2.0, 3.0, None]]
    await ag.grad((a * 2 + b * 3 + c).sum(), b)
    assert calls[1:] == [[None, 3.0, None]]
    await (a * 2 + b * 3 + c).sum().backward(inputs=[c, a])
    assert calls[2:] == [[2.0, None, 1.0]]


async def test_all_is_not_fired_where_none_takes_part() -> None:
    a, b = leaf([1.0]), leaf([1.0])
    register_multi_grad_hook([a], lambda grads: pytest.fail("nothing arrived"))
    await (b * 2).sum().backward()


async def test_a_gradient_that_is_none_counts_as_arrived() -> None:
    a, b = leaf([1.0]), leaf([1.0])
    x, y = a * 1, b * 1
    calls: list[Any] = []
    register_multi_grad_hook([x, y], lambda grads: calls.append(numbers(grads)))
    await SecondIsNone.apply(x, y).sum().backward()
    assert calls == [[5.0, None]]


async def test_outputs_of_one_node_count_each() -> None:
    x = leaf([1.0, 2.0])
    a, b = np.split(x, 2)
    calls: list[Any] = []
    register_multi_grad_hook([a, b], lambda grads: calls.append(numbers(grads)))
    await (a * 2).sum().backward(retain_graph=True)
    assert calls == [[2.0, None]]
    await (a * 2 + b * 3).sum().backward()
    assert calls[1:] == [[2.0, 3.0]]


async def test_a_tensor_may_be_listed_twice() -> None:
    a = leaf([1.0])
    calls: list[Any] = []
    register_multi_grad_hook([a, a], lambda grads: calls.append(numbers(grads)))
    await (a * 2).sum().backward()
    assert calls == [[2.0, 2.0]]


async def test_any_fires_with_the_first_gradient_only() -> None:
    a, b = leaf([1.0]), leaf([1.0])
    first, second = a * 2, b * 3  # the second is recorded later, so its gradient is looked at first
    calls: list[float] = []
    register_multi_grad_hook([first, second], lambda grad: calls.append(grad.item()), mode="any")
    out = (first * 10 + second * 20).sum()
    await out.backward(retain_graph=True)
    assert calls == [20.0]
    await out.backward()
    assert calls == [20.0, 20.0]


async def test_any_waits_for_a_gradient_that_is_one() -> None:
    a, b = leaf([1.0]), leaf([1.0])
    x, y = a * 1, b * 1
    calls: list[float] = []
    register_multi_grad_hook([x, y], lambda grad: calls.append(grad.item()), mode="any")
    await SecondIsNone.apply(x, y).sum().backward()
    assert calls == [5.0]


async def test_it_is_not_fired_when_the_pass_fails() -> None:
    class Fails(SecondIsNone):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            raise ZeroDivisionError

    a, b = leaf([1.0]), leaf([1.0])
    register_multi_grad_hook([a, b], lambda grads: pytest.fail("the pass failed"))
    await assert_awaiting_raises(ZeroDivisionError, None, Fails.apply(a, b * 2).sum().backward())


async def test_it_can_be_removed() -> None:
    a, b = leaf([1.0]), leaf([1.0])
    with register_multi_grad_hook([a, b], lambda grads: pytest.fail("removed")):
        pass
    await (a + b).sum().backward()


def test_bad_arguments_are_refused_before_anything_is_registered() -> None:
    a = leaf([1.0])
    assert_raises(ArgumentError, "Expects mode to be one of", register_multi_grad_hook, [a], print, mode="some")
    assert_raises(ArgumentTypeError, "expected a callable", register_multi_grad_hook, [a], None)
    assert_raises(NoGraphError, "does not require gradients", lambda: register_multi_grad_hook([a, ag.tensor([1.0])], print))
    assert_raises(ArgumentTypeError, "expected a Tensor", register_multi_grad_hook, [a, 3], print)
    assert a._node._extra is None
