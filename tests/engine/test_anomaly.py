"""Anomaly mode: what went wrong where, and where that was recorded."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import NaNGradientError
from tests.support import assert_awaiting_raises, custom_function, leaf


@contextmanager
def caught_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@custom_function(inline=True)
def Fails(ctx: Any, g: Any) -> Any:
    raise ZeroDivisionError("on purpose")


@custom_function(lambda a, b: a + b, inline=True)
def NaN(ctx: Any, g: Any) -> Any:
    """Has a gradient of NaN for its second argument."""
    return g, g * float("nan")


def the_line_that_failed(x: Any) -> Any:
    return Fails.apply(x)


async def test_an_error_tells_where_its_node_was_recorded() -> None:
    x = leaf([1.0])
    with caught_warnings() as found, ag.detect_anomaly():
        y = the_line_that_failed(x).sum()
        with pytest.raises(ZeroDivisionError) as caught:
            await y.backward()
    notes = "\n".join(caught.value.__notes__)
    assert "Error detected in FailsBackward. Traceback of forward call that caused the error:" in notes
    assert "the_line_that_failed" in notes and "return Fails.apply(x)" in notes
    (warning,) = found
    assert "Error detected in FailsBackward" in str(warning.message) and "the_line_that_failed" in str(warning.message)
    assert warning.filename == __file__


async def test_an_error_wins_over_a_warning_that_a_filter_makes_an_exception_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ag.detect_anomaly(), pytest.raises(ZeroDivisionError):
            await Fails.apply(leaf([1.0])).sum().backward()


async def test_rows_and_executor_and_coroutines_are_covered() -> None:
    class Threaded(Fails):
        inline = False

    @custom_function()
    async def Awaited(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    def modified(x: Any) -> Any:
        y = x * 1
        z = y * y
        y += 1
        return z

    for function, name, error in (
        (Threaded.apply, "ThreadedBackward", ZeroDivisionError),
        (Awaited.apply, "AwaitedBackward", ZeroDivisionError),
        (modified, "MulBackward", ag.errors.ModifiedError),
    ):
        with caught_warnings(), ag.detect_anomaly():
            y = function(leaf([1.0])).sum()
            caught = await assert_awaiting_raises(error, None, y.backward())
        assert f"Error detected in {name}" in "\n".join(caught.__notes__)


async def test_a_forward_outside_of_anomaly_mode_is_said_to_be_unknown() -> None:
    y = Fails.apply(leaf([1.0])).sum()
    with caught_warnings() as found, ag.detect_anomaly(), pytest.raises(ZeroDivisionError) as caught:
        await y.backward()
    assert "No forward pass information for FailsBackward" in "\n".join(caught.value.__notes__)
    assert "No forward pass information" in str(found[0].message)


async def test_without_anomaly_mode_the_node_and_the_line_of_a_function_are_named_all_the_same() -> None:
    with caught_warnings() as found, pytest.raises(ZeroDivisionError) as caught:
        await the_line_that_failed(leaf([1.0])).sum().backward()
    (note,) = caught.value.__notes__
    assert "in the backward of FailsBackward" in note and "recorded at" in note and "test_anomaly.py" in note
    assert not found


async def test_the_error_of_a_second_derivative_tells_what_induced_it() -> None:
    @custom_function(lambda a: a * a, inline=True, saves=True)
    def Inner(ctx: Any, g: Any) -> Any:
        """Its backward records a function that fails in turn."""
        (a,) = ctx.saved_tensors
        return Fails.apply(a) * 2 * g

    def the_first_forward(x: Any) -> Any:
        return Inner.apply(x)

    x = leaf([1.0])
    with caught_warnings() as found, ag.detect_anomaly():
        y = the_first_forward(x)
        (g,) = await ag.grad(y.sum(), x, create_graph=True)
        caught = await assert_awaiting_raises(ZeroDivisionError, None, g.sum().backward())
    notes = caught.__notes__
    assert len(notes) == 3
    assert "Error detected in FailsBackward" in notes[1]
    assert "Previous calculation was induced by InnerBackward" in notes[2] and "the_first_forward" in notes[2]
    assert len(found) == 2


@pytest.mark.parametrize("inline", [True, False])
async def test_a_nan_in_a_gradient_is_an_error(inline: bool) -> None:
    class Threaded(NaN):
        pass

    Threaded.inline = inline
    x, w = leaf([1.0]), leaf([1.0])
    with caught_warnings(), ag.detect_anomaly(), pytest.raises(NaNGradientError, match="'ThreadedBackward' returned nan values in its 1th output"):
        await Threaded.apply(x, w).sum().backward()
    assert x.grad is None and w.grad is None


async def test_a_nan_of_a_row_is_an_error_and_names_the_row() -> None:
    x = leaf([0.0])
    with caught_warnings(), ag.detect_anomaly(), np.errstate(all="ignore"):
        y = (np.sqrt(x) * 0.0).sum()
        caught = await assert_awaiting_raises(NaNGradientError, "Function 'SqrtBackward' returned nan values in its 0th output", y.backward())
    assert isinstance(caught, RuntimeError)


async def test_nan_may_be_let_through() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    with ag.detect_anomaly(check_nan=False):
        await NaN.apply(x, w).sum().backward()
    assert np.isnan(w.grad.item()) and x.grad.item() == 1.0
    with ag.detect_anomaly(check_nan=False), caught_warnings(), pytest.raises(ZeroDivisionError) as caught:
        await Fails.apply(x).sum().backward()
    assert "Error detected in FailsBackward" in "\n".join(caught.value.__notes__)


async def test_a_posthook_may_repair_a_nan() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    with ag.detect_anomaly():
        y = NaN.apply(x, w)
        y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: (grad_inputs[0], grad_outputs[0] * 0))
        await y.sum().backward()
    assert w.grad.item() == 0.0


async def test_an_inner_pass_has_the_anomaly_mode_of_its_own_task() -> None:
    x, w = leaf([1.0]), leaf([1.0])

    @custom_function()
    async def Nests(ctx: Any, g: Any) -> Any:
        with ag.enable_grad(), ag.detect_anomaly():
            inner = NaN.apply(w, w).sum()
            await assert_awaiting_raises(NaNGradientError, None, inner.backward())
        return g * float("nan")

    with caught_warnings():
        await Nests.apply(x).sum().backward()
    assert np.isnan(x.grad.item())


async def test_anomaly_mode_belongs_to_the_task() -> None:
    inside, done = asyncio.Event(), asyncio.Event()

    async def watched() -> None:
        with ag.detect_anomaly():
            inside.set()
            await done.wait()

    task = asyncio.create_task(watched())
    await inside.wait()
    x, w = leaf([1.0]), leaf([1.0])
    await NaN.apply(x, w).sum().backward()
    assert np.isnan(w.grad.item())
    done.set()
    await task
