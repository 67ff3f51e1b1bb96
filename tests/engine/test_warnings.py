"""Warnings of a pass: collected, and issued once in the caller, whatever the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import warnings
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GradcheckError
from aiograd.graph.current import CURRENT
from tests.support import assert_awaiting_raises, custom_function


def warning(*, inline: bool, fails: bool = False, user: bool = False) -> Any:
    """A function whose backward warns, twice."""

    @custom_function()
    def Warns(ctx: Any, g: Any) -> Any:
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


def line_of(code: Any, text: str) -> int:
    """The number of the only line of a function that ends with `text`."""
    lines, first = inspect.getsourcelines(code)
    (found,) = (first + i for i, line in enumerate(lines) if line.endswith(f"{text}\n"))
    return found


async def test_warnings_name_the_users_line_however_deep_the_call_lies() -> None:
    x = ag.tensor([1.0], requires_grad=True)
    apply = warning(inline=True)

    def function(a: Any) -> Any:
        return apply(a)

    async def here() -> None:
        with pytest.warns(RuntimeWarning, match="collected") as caught:
            await ag.jacobian(function, x)  # of a function
        with pytest.warns(UserWarning, match="create_graph=True") as method:
            await (x * x).sum().backward(create_graph=True)  # as a method
        x.grad = None
        with pytest.warns(UserWarning, match="not double precision") as check, contextlib.suppress(GradcheckError):
            await ag.gradcheck(lambda a: a * 2, x)  # a check
        with pytest.warns(UserWarning, match="there will be 1 microbatches") as split:
            ag.pipeline.split_microbatches((x,), None, 2)  # a batch
        found = [(warning.filename, warning.lineno) for warning in (caught[0], method[0], check[0], split[0])]
        assert found == [(__file__, line_of(here, f"  # {comment}")) for comment in ("of a function", "as a method", "a check", "a batch")]

    await here()


def test_warnings_of_a_pass_that_is_a_task_of_its_own_name_the_line_that_runs_the_loop() -> None:
    x = ag.tensor([1.0], requires_grad=True)
    y = warning(inline=True)(x).sum()

    async def main() -> None:
        await asyncio.create_task(y.backward())

    with pytest.warns(RuntimeWarning, match="collected") as caught:
        asyncio.run(main())  # of the loop
    here = test_warnings_of_a_pass_that_is_a_task_of_its_own_name_the_line_that_runs_the_loop
    assert (caught[0].filename, caught[0].lineno) == (__file__, line_of(here, "  # of the loop"))


async def test_a_warning_made_an_error_is_raised_after_the_commit() -> None:
    x = ag.tensor([1.0], requires_grad=True)
    y = warning(inline=True)(x).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raised = await assert_awaiting_raises(RuntimeWarning, "collected", y.backward())
    assert raised.committed and x.grad.item() == 1.0


@pytest.mark.parametrize("action", ["always", "error"])
async def test_warnings_of_a_pass_that_fails_do_not_hide_its_error(action: Any) -> None:
    x = ag.tensor([1.0], requires_grad=True)
    y = warning(inline=True, fails=True)(x).sum()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        await assert_awaiting_raises(ZeroDivisionError, None, y.backward())
    assert len(caught) == (1 if action == "always" else 0)
    assert x.grad is None


async def test_warnings_of_nested_passes_reach_whoever_awaits_them() -> None:
    x, w = ag.tensor([1.0], requires_grad=True), ag.tensor([1.0], requires_grad=True)

    @custom_function()
    async def Nests(ctx: Any, g: Any) -> Any:
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
