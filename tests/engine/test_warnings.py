"""Warnings of a pass: collected, and issued once in the caller, whatever the outcome."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.graph.current import CURRENT


def warning(*, inline: bool, fails: bool = False, user: bool = False) -> Any:
    """A function whose backward warns, twice."""

    class Warns(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a * 1

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            for _ in range(2):
                if user:
                    warnings.warn("from the rule itself", UserWarning, stacklevel=1)
                else:
                    current = CURRENT.get()
                    assert current is not None
                    current.task.warn("collected", RuntimeWarning)
            if fails:
                raise ZeroDivisionError
            return g

    Warns.inline = inline
    return Warns.apply


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "executor"])
async def test_a_warning_is_issued_once_at_the_line_that_awaits(inline: bool) -> None:
    x = ag.tensor([1.0], requires_grad=True)
    apply = warning(inline=inline)
    y = (apply(x) + apply(x)).sum()
    with pytest.warns(RuntimeWarning, match="collected") as caught:
        await y.backward()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert x.grad.item() == 2.0
    with pytest.warns(RuntimeWarning) as caught:
        await ag.grad(apply(x).sum(), x)
    assert caught[0].filename == __file__


async def test_a_warning_made_an_error_is_raised_after_the_commit() -> None:
    x = ag.tensor([1.0], requires_grad=True)
    y = warning(inline=True)(x).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="collected"):
            await y.backward()
    assert x.grad.item() == 1.0


@pytest.mark.parametrize("action", ["always", "error"])
async def test_warnings_of_a_pass_that_fails_do_not_hide_its_error(action: Any) -> None:
    x = ag.tensor([1.0], requires_grad=True)
    y = warning(inline=True, fails=True)(x).sum()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        with pytest.raises(ZeroDivisionError):
            await y.backward()
    assert len(caught) == (1 if action == "always" else 0)
    assert x.grad is None


async def test_warnings_of_nested_passes_reach_whoever_awaits_them() -> None:
    x, w = ag.tensor([1.0], requires_grad=True), ag.tensor([1.0], requires_grad=True)

    class Nests(ag.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a * 1

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            with ag.enable_grad():
                inner = warning(inline=True)(w).sum()
            with pytest.warns(RuntimeWarning, match="collected"):
                await inner.backward()
            return g

    await Nests.apply(x).sum().backward()
    assert w.grad.item() == 1.0


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "executor"])
async def test_warnings_of_user_code_arrive(inline: bool) -> None:
    x = ag.tensor([1.0], requires_grad=True)
    y = warning(inline=inline, user=True)(x).sum()
    with pytest.warns(UserWarning, match="from the rule itself"):
        await y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1.0])
