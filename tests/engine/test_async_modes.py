"""Modes belong to the asyncio task: whatever else runs, suspends, is cancelled or hops to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import GraphError, ModeError
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import Switch, function, number, rounds
from tests.support import assert_awaiting_raises, assert_raises, cancel, custom_function, leaf

# -------------------------------------------------------------------- tasks


async def test_no_grad_of_a_suspended_task_is_its_own() -> None:
    entered, leave = Switch(), Switch()

    async def inside() -> bool:
        with ag.no_grad():
            entered.on()
            await leave
            return ag.is_grad_enabled()

    task = asyncio.create_task(inside())
    await entered
    assert ag.is_grad_enabled()
    assert (leaf(1.0) * 2.0).requires_grad
    leave.on()
    assert await task is False
    assert ag.is_grad_enabled()


async def test_two_tasks_interleave_opposite_modes() -> None:
    seen: dict[str, list[bool]] = {"off": [], "on": []}

    async def off() -> None:
        for _ in range(20):
            with ag.no_grad():
                await asyncio.sleep(0)
                seen["off"].append((leaf(1.0) * 2.0).requires_grad)
            seen["on"].append(ag.is_grad_enabled())

    async def on() -> None:
        for _ in range(40):
            with ag.enable_grad():
                await asyncio.sleep(0)
                seen["on"].append((leaf(1.0) * 2.0).requires_grad)

    await asyncio.gather(off(), on(), off())
    assert not any(seen["off"])
    assert all(seen["on"])


async def test_tasks_inherit_the_mode_they_are_started_in_and_keep_it() -> None:
    async def child() -> bool:
        await rounds(3)
        return ag.is_grad_enabled()

    with ag.no_grad():
        task = asyncio.create_task(child())
    assert ag.is_grad_enabled()
    assert await task is False


@pytest.mark.parametrize("how", ["cancelled", "failed", "returned"])
async def test_nothing_leaks_when_a_task_ends_inside_a_mode(how: str) -> None:
    async def body() -> None:
        ag.no_grad().__enter__()
        ag.detect_anomaly().__enter__()
        ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
        if how == "cancelled":
            await asyncio.Event().wait()
        if how == "failed":
            raise ValueError

    task = asyncio.create_task(body())
    await rounds(2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    x = leaf(2.0)
    y = x * x
    assert y.requires_grad
    assert isinstance(y.grad_fn._saved, tuple)
    assert y.grad_fn.thread_id is None  # anomaly mode would have recorded it


async def test_anomaly_mode_and_saved_tensor_hooks_are_per_task() -> None:
    packed: list[Any] = []
    entered, leave = Switch(), Switch()

    async def inside() -> None:
        with ag.detect_anomaly(), ag.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            entered.on()
            await leave
            x = leaf(2.0)
            _ = x * x

    task = asyncio.create_task(inside())
    await entered
    x = leaf(2.0)
    y = x * x
    assert not packed
    assert y.grad_fn.thread_id is None
    leave.on()
    await task
    assert packed


async def test_hooks_can_be_disabled_for_one_task_only() -> None:
    entered, leave = Switch(), Switch()

    async def inside() -> None:
        with ag.graph.disable_saved_tensors_hooks("not here"):
            entered.on()
            await leave
            with pytest.raises(GraphError, match="not here"), ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                pass

    task = asyncio.create_task(inside())
    await entered
    with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pass
    leave.on()
    await task


# -------------------------------------------------------------------- decorators


@pytest.mark.parametrize(
    "make", [lambda: ag.no_grad(), lambda: ag.no_grad, lambda: ag.set_grad_enabled(False)], ids=["called", "bare", "set_grad_enabled"]
)
async def test_decorators_on_every_kind_of_function(make: Callable[[], Any]) -> None:
    def decorate(function: Any) -> Any:
        return make()(function)

    assert ag.is_grad_enabled()

    @decorate
    def plain(a: int, *, b: int) -> tuple[bool, int]:
        """Doc."""
        return ag.is_grad_enabled(), a + b

    @decorate
    async def coroutine(a: int) -> tuple[bool, bool, int]:
        before = ag.is_grad_enabled()
        await rounds(2)
        return before, ag.is_grad_enabled(), a

    @decorate
    def generator(n: int) -> Generator[bool, None, bool]:
        for _ in range(n):
            yield ag.is_grad_enabled()
        return ag.is_grad_enabled()

    @decorate
    async def async_generator(n: int) -> AsyncGenerator[bool, None]:
        for _ in range(n):
            await asyncio.sleep(0)
            yield ag.is_grad_enabled()

    assert plain(1, b=2) == (False, 3)
    assert plain.__name__ == "plain" and plain.__doc__ == "Doc."
    assert asyncio.iscoroutinefunction(coroutine) and await coroutine(4) == (False, False, 4)
    iterator = generator(2)
    for _ in range(2):
        assert next(iterator) is False
        assert ag.is_grad_enabled()
    stop = assert_raises(StopIteration, None, next, iterator)
    assert stop.value is False
    count = 0
    async for enabled in async_generator(3):
        count += 1
        assert enabled is False
        assert ag.is_grad_enabled()
        await asyncio.sleep(0)
        assert ag.is_grad_enabled()
    assert count == 3
    assert ag.is_grad_enabled()


async def test_a_decorated_coroutine_does_not_switch_gradients_off_for_its_caller_while_it_waits() -> None:
    entered, leave = Switch(), Switch()

    @ag.no_grad()
    async def body() -> bool:
        entered.on()
        await leave
        return ag.is_grad_enabled()

    task = asyncio.create_task(body())
    await entered
    assert ag.is_grad_enabled()
    leave.on()
    assert await task is False


def test_generator_send_throw_close_and_return() -> None:
    log: list[Any] = []

    @ag.no_grad()
    def body() -> Generator[str, str, str]:
        try:
            while True:
                try:
                    log.append((yield "value"))
                except KeyError as error:
                    log.append(error)
                log.append(ag.is_grad_enabled())
        finally:
            log.append(("closed", ag.is_grad_enabled()))

    generator = body()
    assert next(generator) == "value"
    assert ag.is_grad_enabled()
    assert generator.send("sent") == "value"
    thrown = KeyError("k")
    assert generator.throw(thrown) == "value"
    assert ag.is_grad_enabled()
    generator.close()
    assert log == ["sent", False, thrown, False, ("closed", False)]
    assert_raises(StopIteration, None, next, generator)
    body().close()  # never started
    assert log[-1] == ("closed", False) and len(log) == 5
    other = body()
    next(other)
    assert_raises(ZeroDivisionError, None, other.throw, ZeroDivisionError)
    assert ag.is_grad_enabled()


async def test_async_generator_asend_athrow_aclose() -> None:
    log: list[Any] = []

    @ag.no_grad()
    async def body() -> AsyncGenerator[str, str]:
        try:
            while True:
                try:
                    log.append((yield "value"))
                except KeyError as error:
                    log.append(error)
                await asyncio.sleep(0)
                log.append(ag.is_grad_enabled())
        finally:
            await asyncio.sleep(0)
            log.append(("closed", ag.is_grad_enabled()))

    generator = body()
    assert await anext(generator) == "value"
    assert await generator.asend("sent") == "value"
    assert ag.is_grad_enabled()
    thrown = KeyError("k")
    assert await generator.athrow(thrown) == "value"
    await generator.aclose()
    assert log == ["sent", False, thrown, False, ("closed", False)]
    assert ag.is_grad_enabled()


def test_with_around_a_yield_inside_a_decorated_generator_does_not_leak() -> None:
    @ag.no_grad()
    def body() -> Generator[bool, None, None]:
        yield ag.is_grad_enabled()
        with ag.enable_grad():
            yield ag.is_grad_enabled()
            yield ag.is_grad_enabled()
        yield ag.is_grad_enabled()

    seen = []
    with ag.no_grad():
        for value in body():
            seen.append(value)
            assert not ag.is_grad_enabled()
    assert seen == [False, True, True, False]
    assert ag.is_grad_enabled()


async def test_async_generator_stepped_by_different_tasks() -> None:
    @ag.no_grad()
    async def body() -> AsyncGenerator[bool, None]:
        for _ in range(4):
            await asyncio.sleep(0)
            yield ag.is_grad_enabled()

    generator = body()
    for _ in range(4):
        assert await asyncio.create_task(anext(generator)) is False
    await generator.aclose()
    assert ag.is_grad_enabled()


# -------------------------------------------------------------------- leaving in the wrong place


async def test_plain_generator_closed_in_another_task_is_an_error() -> None:
    def body() -> Generator[None, None, None]:
        with ag.no_grad():
            yield

    async def starts() -> Generator[None, None, None]:
        generator = body()
        next(generator)
        return generator

    generator = await asyncio.create_task(starts())
    assert_raises(ModeError, "decorator form", generator.close)
    assert ag.is_grad_enabled()


# -------------------------------------------------------------------- inside a pass


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("caller", [False, True])
@pytest.mark.parametrize("kind", ["def", "inline", "async"])
async def test_rules_and_hooks_run_with_grad_mode_create_graph(kind: str, caller: bool, create_graph: bool) -> None:
    seen: list[bool] = []

    def rule(ctx: Any, g: Any) -> Any:
        seen.append(ag.is_grad_enabled())
        return g * 2.0

    async def async_rule(ctx: Any, g: Any) -> Any:
        seen.append(ag.is_grad_enabled())
        await asyncio.sleep(0)
        seen.append(ag.is_grad_enabled())
        return g * 2.0

    async def hook(g: Any) -> None:
        seen.append(ag.is_grad_enabled())
        await asyncio.sleep(0)
        seen.append(ag.is_grad_enabled())

    x = leaf(3.0)
    y = function(async_rule if kind == "async" else rule, inline=kind == "inline")(x * 1.0)
    y.register_hook(lambda g: seen.append(ag.is_grad_enabled()))
    x.register_hook(hook)
    with ag.set_grad_enabled(caller):
        (grad,) = await ag.grad(y, x, create_graph=create_graph)
        assert ag.is_grad_enabled() is caller
    assert seen and set(seen) == {create_graph}
    assert number(grad) == 2.0


@pytest.mark.parametrize("caller", [False, True])
async def test_the_callers_mode_is_back_after_a_failed_and_a_cancelled_pass(caller: bool) -> None:
    async def fails(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def waits(ctx: Any, g: Any) -> Any:
        await asyncio.Event().wait()

    failing, waiting = function(fails)(leaf(1.0)), function(waits)(leaf(1.0))
    with ag.set_grad_enabled(caller):
        await assert_awaiting_raises(ValueError, "no", failing.backward())
        assert ag.is_grad_enabled() is caller
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await waiting.backward()
        assert ag.is_grad_enabled() is caller


async def test_a_pass_suspended_in_a_hook_does_not_switch_gradients_off_for_others(virtual_clock: VirtualClock) -> None:
    inside, leave, seen = Switch(), Switch(), []

    async def hook(g: Any) -> None:
        inside.on()
        await leave

    x = leaf(1.0)
    y = x * 2.0
    y.register_hook(hook)
    task = asyncio.create_task(y.backward())
    await inside
    seen.append(ag.is_grad_enabled())
    leave.on()
    await task
    seen.append(ag.is_grad_enabled())
    assert seen == [True, True]


async def test_a_rule_cancelled_inside_no_grad_that_still_cleans_up_takes_its_mode_along(virtual_clock: VirtualClock) -> None:
    ends: list[bool] = []

    @custom_function()
    async def Slow(ctx: Any, g: Any) -> Any:
        try:
            with ag.no_grad():
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0.01)
                    ends.append(ag.is_grad_enabled())
        finally:
            ends.append(ag.is_grad_enabled())
        return g

    x = ag.tensor([1.0], requires_grad=True)
    task = asyncio.ensure_future(Slow.apply(x).sum().backward())
    await asyncio.sleep(1)
    await cancel(task)
    assert ag.is_grad_enabled()
    assert ends == [False, False]  # a pass that records nothing runs its rules without grad
