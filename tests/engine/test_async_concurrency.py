"""Several passes, loops and threads at once; the life of an Engine; what a GraphTask tells."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.run import EngineStatistics, new_graph_task
from aiograd.errors import ArgumentError, ArgumentTypeError, EngineClosedError, GraphFreedError, LoopError
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import Switch, chain, function, number, rounds
from tests.loops import LOOPS
from tests.support import assert_awaiting_raises, assert_raises, cancel, custom_function, leaf

# -------------------------------------------------------------------- passes on one loop


@pytest.mark.parametrize("seed", range(3))
def test_passes_over_one_graph_with_retain_graph_add_up(seed: int) -> None:
    async def main() -> float:
        async def rule(ctx: Any, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            await asyncio.sleep(0.01)
            return g * x

        x = leaf(3.0)
        y = chain(function(rule)(x * x), 30)
        async with ag.Engine(budget=2, clock=iter(range(10**9)).__next__):
            await asyncio.gather(*(y.backward(retain_graph=True) for _ in range(10)))
        return number(x.grad)

    assert simulated_run(main, seed=seed, order="permuted").value == 10 * 9.0 * 6.0


@pytest.mark.parametrize("seed", range(5))
def test_of_passes_over_one_graph_without_retain_graph_at_least_one_succeeds(seed: int) -> None:
    """The others raise, and what arrives in the leaf is a whole number of passes."""

    async def main() -> tuple[float, int, int]:
        x = leaf(1.0)
        y = chain(x * x, 100)
        async with ag.Engine(budget=2, clock=iter(range(10**9)).__next__):
            results = await asyncio.gather(*(y.backward() for _ in range(5)), return_exceptions=True)
        assert all(result is None or isinstance(result, GraphFreedError) for result in results)
        return number(x.grad), results.count(None), len(results)

    total, succeeded, _ = simulated_run(main, seed=seed, order="permuted").value
    assert succeeded >= 1
    assert total == 2.0 * succeeded


async def test_passes_of_every_kind_at_once() -> None:
    async def rule(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return g

    x = leaf([1.0, 2.0])

    async def one(n: int) -> None:
        kind = n % 5
        y = x * float(n)
        if kind == 0:
            await y.sum().backward()
        elif kind == 1:
            await function(rule)(y).sum().backward()
        elif kind == 2:
            await function(lambda ctx, g: g)(y).sum().backward()
        elif kind == 3:
            (grad,) = await ag.grad(y.sum(), x)
            assert grad.numpy().tolist() == [n, n]
        else:
            with pytest.raises(ZeroDivisionError):
                y.register_hook(lambda g: 1 / 0)
                await (y * 1.0).sum().backward()

    await asyncio.gather(*(one(n) for n in range(200)))
    expected = float(sum(n for n in range(200) if n % 5 < 3))
    assert x.grad.numpy().tolist() == [expected, expected]


async def test_ten_thousand_tiny_passes_in_flight() -> None:
    leaves = [leaf(float(i)) for i in range(10_000)]
    shared = leaf(1.0)
    await asyncio.gather(*((x * x * shared).backward() for x in leaves))
    assert [number(x.grad) for x in leaves] == [2.0 * i for i in range(10_000)]
    assert number(shared.grad) == float(sum(i * i for i in range(10_000)))


async def test_nothing_piles_up_over_many_passes_that_succeed_fail_and_are_cancelled() -> None:
    async def sleeps(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return g

    async def waits(ctx: Any, g: Any) -> Any:
        await asyncio.Event().wait()

    async def hook(*_: Any) -> None:
        await asyncio.sleep(0)

    ok, in_thread, stuck = function(sleeps), function(lambda ctx, g: g), function(waits)
    failing = function(lambda ctx, g: 1 / 0)
    x = leaf([1.0, 2.0])

    async def several() -> None:
        x.grad = None
        await chain(x, 40).sum().backward()
        y = ok(x * 2.0) + in_thread(x)
        y.register_hook(hook)
        await (y * y).sum().backward(retain_graph=True)
        await ag.grad((y * x).sum(), x)
        await assert_awaiting_raises(ZeroDivisionError, None, (failing(x * 1.0) + ok(x)).sum().backward())
        task = asyncio.create_task((stuck(x * 1.0) * stuck(x)).sum().backward())
        await rounds(4)
        await cancel(task)

    counts: list[int] = []
    async with ag.Engine(threads=2):
        for _ in range(5):
            for _ in range(40):
                await several()
            await rounds(5)
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert max(counts[1:]) - min(counts[1:]) < 40, counts


# -------------------------------------------------------------------- loops in threads


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_in_several_threads_accumulate_into_one_leaf_and_lose_nothing(loop: str, frantic_threads: None) -> None:
    """While somebody keeps reading the gradient, which makes a Tensor of it."""
    passes, threads = 150, 6
    x = leaf([1.0, 1.0])
    start = threading.Barrier(threads + 1)
    over = threading.Event()
    errors: list[BaseException] = []

    def work(n: int) -> None:
        async def main() -> None:
            for i in range(passes):
                y = x * float(2**n)
                if i % 3 == 1:
                    y = function(lambda ctx, g: g)(y)
                if i % 3 == 2:
                    y.register_hook(lambda g: None)
                    y = y * 1.0
                await y.sum().backward()
            await ag.aclose_default_engine()

        start.wait(timeout=60)
        try:
            with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
                runner.run(main())
        except BaseException as error:
            errors.append(error)

    def reads() -> None:
        start.wait(timeout=60)
        while not over.is_set():
            grad = x.grad
            assert grad is None or grad.shape == (2,)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    reader = threading.Thread(target=reads)
    for thread in (*workers, reader):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    reader.join()
    assert errors == []
    assert x.grad.numpy().tolist() == [float(passes * (2**threads - 1))] * 2


def test_a_graph_recorded_in_one_thread_runs_in_the_loop_of_another() -> None:
    x = leaf(3.0)
    y = x * x
    result: list[float] = []

    def work() -> None:
        async def main() -> None:
            await y.backward()

        ag.run(main())
        result.append(number(x.grad))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result == [6.0]


async def test_passes_of_a_coroutine_that_moves_to_another_loop_find_its_engine() -> None:
    """A context that was copied from another loop names an engine of that loop, which is not to be used here."""
    async with ag.Engine() as engine:
        assert ag.current_engine() is engine

        def work() -> None:
            async def inner() -> None:
                assert ag.current_engine() is not engine
                x = leaf(2.0)
                await (x * x).backward()
                assert number(x.grad) == 4.0

            asyncio.run(inner())

        await asyncio.to_thread(work)


# -------------------------------------------------------------------- the life of an Engine


async def test_the_engine_of_a_block_and_the_default_one() -> None:
    default = ag.current_engine()
    assert ag.current_engine() is default
    async with ag.Engine() as outer:
        assert ag.current_engine() is outer
        async with ag.Engine() as inner:
            assert ag.current_engine() is inner
            seen = await asyncio.create_task(current())
            assert seen is inner
        assert ag.current_engine() is outer
    assert ag.current_engine() is default
    await ag.aclose_default_engine()
    again = ag.current_engine()
    assert again is not default
    await ag.aclose_default_engine()
    await ag.aclose_default_engine()


async def current() -> ag.Engine:
    return ag.current_engine()


async def test_the_default_engine_of_a_block_serves_tasks_that_know_nothing_of_it() -> None:
    """The lifespan of a web application is a task, and so is each handler; none descends from another."""
    started, stop = asyncio.Event(), asyncio.Event()

    async def lifespan() -> ag.Engine:
        async with ag.Engine(default=True) as engine:
            started.set()
            await stop.wait()
        return engine

    first = ag.current_engine()
    serving = asyncio.create_task(lifespan())
    await started.wait()
    engine = await asyncio.create_task(current())
    assert engine is not first and ag.current_engine() is engine
    x = leaf(2.0)
    await (x * x).backward()
    async with ag.Engine() as own:
        assert ag.current_engine() is own
    assert ag.current_engine() is engine
    stop.set()
    assert await serving is engine
    assert (engine.statistics().committed, first.statistics().begun) == (1, 0)
    assert ag.current_engine() is first


async def test_default_engines_left_in_another_order_leave_the_first_one_in_place() -> None:
    first = ag.current_engine()
    a, b, c = (ag.Engine(default=True) for _ in range(3))
    for engine in (a, b, c):
        await asyncio.create_task(engine.__aenter__())
        assert ag.current_engine() is engine
    await b.__aexit__(None, None, None)
    assert ag.current_engine() is c
    await c.__aexit__(None, None, None)
    assert ag.current_engine() is a
    await a.__aexit__(None, None, None)
    assert ag.current_engine() is first


async def test_where_there_was_no_default_engine_none_is_left() -> None:
    await ag.aclose_default_engine()
    async with ag.Engine(default=True) as engine:
        pass
    assert ag.current_engine() is not engine


async def test_the_number_of_blas_threads_needs_a_package_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    before = ag.current_engine()
    with pytest.raises(ArgumentError, match=r"blas_threads=1\).*pip install 'aiograd\[kernels\]'"):
        async with ag.Engine(blas_threads=1, default=True):
            pass
    assert ag.current_engine() is before


async def test_statistics_count_every_pass_by_how_it_ended() -> None:
    @custom_function()
    async def Odd(ctx: Any, g: Any) -> Any:
        await reached.wait()
        if fails:
            raise ZeroDivisionError
        return g

    reached, fails = asyncio.Event(), False
    async with ag.Engine() as engine:
        assert engine.statistics() == EngineStatistics(begun=0, committed=0, failed=0, cancelled=0, in_flight=0, lag=0.0, longest_lag=0.0)
        passes = [asyncio.create_task(Odd.apply(leaf(1.0)).backward()) for _ in range(3)]
        while engine.statistics().in_flight < 3:
            await asyncio.sleep(0)
        passes[0].cancel()
        await asyncio.wait(passes[:1])
        reached.set()
        await asyncio.gather(*passes[1:])
        fails = True
        await assert_awaiting_raises(ZeroDivisionError, None, Odd.apply(leaf(1.0)).backward())
        x = leaf(1.0)
        x.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        await assert_awaiting_raises(ZeroDivisionError, None, (x * 1).backward())
        y = leaf(2.0)
        task = engine.execute([ag.graph.get_gradient_edge(y * y)], [np.ones(())])
        await task.future
        (gradient,) = await ag.grad(y * y, [y])
        assert number(gradient) == 4.0
    counted = engine.statistics()
    assert (counted.begun, counted.committed, counted.failed, counted.cancelled, counted.in_flight) == (7, 5, 1, 1, 0)
    with pytest.raises(AttributeError):
        counted.begun = 0  # type: ignore[misc]


async def test_statistics_say_how_late_the_loop_was() -> None:
    now = 0.0

    def hold(seconds: float) -> None:
        nonlocal now
        now += seconds

    seen = []
    async with ag.Engine(clock=lambda: now, budget=10.0) as engine:
        for held in (0.5, 0.25):
            x = leaf(1.0)
            y = x * 2
            y.register_hook(lambda g, held=held: hold(held))
            await y.backward()
            for _ in range(5):
                await asyncio.sleep(0)  # the loop goes round
            seen.append((engine.statistics().lag, engine.statistics().longest_lag))
    assert seen == [(0.5, 0.5), (0.25, 0.5)]


async def test_a_closed_engine_says_so_and_closing_twice_is_harmless() -> None:
    x = leaf(2.0)
    async with ag.Engine() as engine:
        await (x * x).backward()
    await engine.aclose()
    await engine.aclose()
    assert number(x.grad) == 4.0
    y = x * x
    assert_raises(EngineClosedError, "make a new one", lambda: engine.execute([ag.graph.get_gradient_edge(y)], [np.ones(())]))
    assert_raises(EngineClosedError, "make a new one", lambda: engine.executor)
    with pytest.raises(EngineClosedError):
        async with engine:
            pass
    await y.backward()  # on the default one; the graph is as it was
    assert number(x.grad) == 8.0


def test_an_engine_belongs_to_one_loop() -> None:
    engine = ag.Engine()
    x = leaf(2.0)
    y = x * x

    async def first() -> None:
        async with engine:
            pass

    async def use() -> None:
        engine.execute([ag.graph.get_gradient_edge(y)], [np.ones(())])

    other = ag.Engine()

    async def bind() -> None:
        await other.execute([ag.graph.get_gradient_edge(leaf(1.0) * 1.0)], [np.ones(())]).future

    async def wrong() -> None:
        assert_raises(LoopError, "another event loop", lambda: other.execute([ag.graph.get_gradient_edge(y)], [np.ones(())]))
        with pytest.raises(LoopError, match="another event loop"):
            async with other:
                pass

    asyncio.run(first())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(bind())
    asyncio.run(wrong())
    loop.run_until_complete(other.aclose())
    loop.close()


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"concurrency": 0}, {"blas_threads": -1}, {"budget": 0.0}, {"cancel_grace": -1.0}, {"inline_ns": float("nan")}],
    ids=str,
)
def test_an_engine_refuses_senseless_limits(options: dict[str, Any]) -> None:
    assert_raises(ArgumentError, r"Engine\(" + next(iter(options)), lambda: ag.Engine(**options))


def test_an_engine_that_was_left_in_another_task_is_closed_all_the_same() -> None:
    """Fixtures of async test frameworks enter in one context and leave in another."""

    async def main() -> None:
        async def fixture() -> Any:
            async with ag.Engine() as engine:
                yield engine

        generator = fixture()
        engine = await asyncio.create_task(anext(generator))

        async def leave() -> None:
            await assert_awaiting_raises(StopAsyncIteration, None, anext(generator))

        await asyncio.create_task(leave())
        assert_raises(EngineClosedError, None, engine.execute, [], [])

    asyncio.run(main())


async def test_closing_fails_the_passes_that_somebody_awaits(virtual_clock: VirtualClock) -> None:
    x = leaf(1.0, grad=5.0)
    ended: list[str] = []

    async def rule(ctx: Any, g: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)
            ended.append("rule")

    async def user() -> str:
        try:
            await (function(rule)(x) + function(rule)(x)).backward()
        except EngineClosedError as error:
            assert asyncio.current_task().cancelling() == 0
            await asyncio.sleep(0)  # the task itself lives on
            return str(error)
        return "no error"

    async with ag.Engine():
        task = asyncio.create_task(user())
        alone = asyncio.create_task(function(rule)(x).backward())
        await rounds(5)
    assert ended == ["rule"] * 3, "closing did not wait"
    assert "closed while a pass was running" in await task
    await assert_awaiting_raises(EngineClosedError, None, alone)
    assert number(x.grad) == 5.0


async def test_a_pass_that_is_cancelled_and_whose_engine_is_closed_is_cancelled(virtual_clock: VirtualClock) -> None:
    async def rule(ctx: Any, g: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)

    for cancel_first in (True, False):
        async with ag.Engine() as engine:
            task = asyncio.create_task((function(rule)(leaf(1.0)) + function(rule)(leaf(1.0))).backward())
            await rounds(5)
            if cancel_first:
                task.cancel()
            closing = asyncio.create_task(engine.aclose())
            await rounds(2)
            if not cancel_first:
                task.cancel()
            await closing
        await assert_awaiting_raises(asyncio.CancelledError, None, task)


@pytest.mark.parametrize("how", ["inline", "beside others", "def"])
async def test_closing_from_inside_of_a_pass(how: str) -> None:
    """The pass goes on as far as it can without the engine."""
    x = leaf(1.0)
    engine = ag.Engine()

    async def closes(ctx: Any, g: Any) -> Any:
        await engine.aclose()
        return g

    y = x * 1.0
    if how == "def":
        y = function(lambda ctx, g: g)(y)
    y = function(closes)(y)
    if how == "beside others":
        y = y + function(closes)(x)
    async with engine:
        async with asyncio.timeout(20):
            if how == "inline":
                await y.backward()
                assert number(x.grad) == 1.0
            else:
                await assert_awaiting_raises(EngineClosedError, None, y.backward())
                assert x.grad is None


async def test_leaving_the_block_by_an_error_closes_the_engine() -> None:
    with pytest.raises(ValueError, match="mine"):
        async with ag.Engine() as engine:
            await function(lambda ctx, g: g)(leaf(1.0)).backward()
            raise ValueError("mine")
    assert_raises(EngineClosedError, None, lambda: engine.executor)


def test_ag_run_inside_a_running_loop_says_what_to_do_and_leaves_nothing_behind() -> None:
    async def training() -> None:
        raise AssertionError("it never begins")

    async def cell() -> None:
        coroutine = training()
        assert_raises(LoopError, r"ag\.run\(training\(\)\) inside a running event loop.*use `await training\(\)`", ag.run, coroutine)
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(cell())
    assert_raises(ArgumentTypeError, r"expected a coroutine, as in ag\.run\(main\(\)\), found function", ag.run, training)


def test_ag_run_closes_the_default_engine() -> None:
    engines: list[ag.Engine] = []

    async def main() -> int:
        await function(lambda ctx, g: g)(leaf(1.0)).backward()
        engines.append(ag.current_engine())
        return 7

    assert ag.run(main()) == 7
    assert_raises(EngineClosedError, None, lambda: engines[0].executor)


async def test_nested_passes_run_on_the_engine_of_the_outer_one() -> None:
    seen: list[ag.Engine] = []

    async def rule(ctx: Any, g: Any) -> Any:
        seen.append(ag.current_engine())
        return g

    x = leaf(1.0)
    async with ag.Engine() as engine:
        await function(rule)(x).backward()
        await (function(rule)(x) + function(rule)(x)).backward()
        await engine.execute([ag.graph.get_gradient_edge(function(rule)(x))], [np.ones(())]).future
    assert seen == [engine] * 4


# -------------------------------------------------------------------- execute


async def test_execute_starts_at_once_and_several_may_await_it() -> None:
    leave = Switch()
    x, y = leaf(2.0), leaf(3.0)

    async def rule(ctx: Any, g: Any) -> Any:
        await leave
        return g

    z = function(rule)(x * y)
    async with ag.Engine() as engine:
        task = engine.execute([ag.graph.get_gradient_edge(z)], [np.array(1.0)], inputs=[ag.graph.get_gradient_edge(x), ag.graph.get_gradient_edge(y)])

        async def wait() -> list[float]:
            return [number(g) for g in await task.future]

        waiters = [asyncio.create_task(wait()) for _ in range(4)]
        await rounds(3)
        assert not task.completed
        assert isinstance(task.future, asyncio.Future)
        waiters[0].cancel()
        waiters[1].cancel()
        await rounds(2)
        leave.on()
        assert await waiters[2] == [3.0, 2.0]
        assert await waiters[3] == [3.0, 2.0]
        assert [number(g) for g in await task.future] == [3.0, 2.0]
        assert task.future.done()
        await assert_awaiting_raises(asyncio.CancelledError, None, waiters[0])
    assert x.grad is None


async def test_execute_accumulates_by_default() -> None:
    x, y = leaf(2.0), leaf(3.0)
    async with ag.Engine() as engine:
        await engine.execute([ag.graph.get_gradient_edge(x * y)], [np.array(1.0)]).future
        assert (number(x.grad), number(y.grad)) == (3.0, 2.0)
        await engine.execute([ag.graph.get_gradient_edge(x * y)], [np.array(1.0)], inputs=[ag.graph.get_gradient_edge(x)], accumulate=True).future
        assert (number(x.grad), number(y.grad)) == (6.0, 2.0)


async def test_cancelling_who_started_a_pass_cancels_it_and_nobody_else_does() -> None:
    async def rule(ctx: Any, g: Any) -> Any:
        await asyncio.Event().wait()

    x = leaf(1.0)
    async with ag.Engine() as engine:
        started: list[ag.GraphTask] = []

        async def starts() -> None:
            started.append(engine.execute([ag.graph.get_gradient_edge(function(rule)(x))], [np.ones(())]))
            await started[0].future

        async def waits() -> None:
            await started[0].future

        starter = asyncio.create_task(starts())
        await rounds(2)
        others = [asyncio.create_task(waits()) for _ in range(2)]
        await rounds(2)
        others[0].cancel()
        await rounds(5)
        assert not started[0].completed
        starter.cancel()
        await rounds(10)
        assert started[0].completed and started[0].future.cancelled()
        results = await asyncio.gather(starter, *others, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 3
    assert x.grad is None


async def test_closing_cancels_executed_passes_even_those_that_have_not_begun() -> None:
    async def rule(ctx: Any, g: Any) -> Any:
        await asyncio.Event().wait()

    x = leaf(1.0)
    async with ag.Engine() as engine:
        running = engine.execute([ag.graph.get_gradient_edge(function(rule)(x))], [np.ones(())])
        first = running.future
        await rounds(3)
        not_begun = engine.execute([ag.graph.get_gradient_edge(x * 1.0)], [np.ones(())])
        second = not_begun.future
        await engine.aclose()
        await rounds(2)
        for future in (first, second, running.future, not_begun.future):
            assert future.cancelled()
        assert running.completed and not_begun.completed
        assert x.grad is None


async def test_the_error_of_an_executed_pass_goes_to_whoever_asks(caplog: pytest.LogCaptureFixture) -> None:
    def fails(ctx: Any, g: Any) -> Any:
        raise ValueError("told")

    x = leaf(1.0)
    async with ag.Engine() as engine:
        before = engine.execute([ag.graph.get_gradient_edge(function(fails)(x))], [np.ones(())])
        for _ in range(2):
            await assert_awaiting_raises(ValueError, "told", before.future)
        await assert_awaiting_raises(ValueError, "told", before.future)
        late = engine.execute([ag.graph.get_gradient_edge(function(fails, inline=True)(x))], [np.ones(())])
        await rounds(5)
        assert late.completed
        await assert_awaiting_raises(ValueError, "told", late.future)
    del before, late
    gc.collect()
    assert x.grad is None


def test_an_error_that_nobody_asks_for_is_reported() -> None:
    reports: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))

        def fails(ctx: Any, g: Any) -> Any:
            raise ValueError("told")

        async with ag.Engine() as engine:
            engine.execute([ag.graph.get_gradient_edge(function(fails, inline=True)(leaf(1.0)))], [np.ones(())])
            await rounds(5)
            gc.collect()
            await rounds(2)

    asyncio.run(main())
    assert [str(report["exception"]) for report in reports] == ["told"]


# -------------------------------------------------------------------- what a GraphTask tells


async def test_a_graph_task_tells_how_far_it_is() -> None:
    leave = Switch()
    x, y = leaf(2.0), leaf(3.0)

    async def rule(ctx: Any, g: Any) -> Any:
        await leave
        return g

    product = x * y
    z = function(rule)(product)
    edge = ag.graph.get_gradient_edge(z)
    async with ag.Engine() as engine:
        task = engine.execute([edge], [np.array(1.0)], keep_graph=True)
        other = engine.execute([ag.graph.get_gradient_edge(x * x)], [np.array(1.0)])
        assert other.id == task.id + 1
        assert (task.completed, task.keep_graph, other.keep_graph, task.reentrant_depth) == (False, True, False, 0)
        assert task.exec_info is None  # everything runs
        assert [tuple(root) for root in task.roots] == [tuple(edge)]
        await other.future  # in more turns of the loop where the machine is held up in one
        await rounds(20)
        assert task.outstanding == 1
        assert "1 outstanding" in repr(task)
        assert other.completed
        leave.on()
        await task.future
    assert (task.completed, task.committed, task.outstanding) == (True, True, 0)
    assert "completed" in repr(task)
    leaves = {ag.graph.get_gradient_edge(t).node for t in (x, y)}
    assert task.nodes_in_graph == {product.grad_fn} | leaves
    assert task.can_checkpoint


async def test_exec_info_says_which_nodes_run() -> None:
    x, y = leaf(2.0), leaf(3.0)
    a, b = x * 2.0, y * 3.0
    c = a * b
    node_of = {name: ag.graph.get_gradient_edge(t).node for name, t in {"x": x, "y": y, "a": a, "b": b, "c": c}.items()}
    async with ag.Engine() as engine:
        root = [ag.graph.get_gradient_edge(c)]
        grad = engine.execute(root, [np.array(1.0)], inputs=[ag.graph.get_gradient_edge(x), ag.graph.get_gradient_edge(b)], keep_graph=True)
        await grad.future
        assert {name for name, node in node_of.items() if grad.exec_info.get(node)} == {"a", "c"}
        assert not grad.can_checkpoint
        backward = engine.execute(root, [np.array(1.0)], inputs=[ag.graph.get_gradient_edge(x)], accumulate=True)
        await backward.future
        assert {name for name, node in node_of.items() if backward.exec_info.get(node)} == {"x", "a", "c"}
        assert backward.can_checkpoint


async def test_ids_count_up_and_depth_counts_nesting() -> None:
    ids: list[int] = []
    depths: list[int] = []
    x = leaf(1.0)

    async def rule(ctx: Any, g: Any) -> Any:
        ids.append(ag.graph.current_graph_task_id())
        if len(ids) < 4:
            with ag.enable_grad():
                y = function(rule)(x)
            depths.append(new_graph_task([ag.graph.get_gradient_edge(y)], [np.ones(())]).reentrant_depth)
            await y.backward()
        return g

    await function(rule)(x).backward()
    assert ids == sorted(set(ids))
    assert depths == [1, 2, 3]
    assert ag.graph.current_graph_task_id() == -1


async def test_the_future_resolves_once_everything_is_done_also_the_callbacks() -> None:
    log: list[str] = []
    x = leaf(1.0)
    y = x * 2.0

    async def callback() -> None:
        await asyncio.sleep(0)
        log.append("callback")

    y.register_hook(lambda g: ag.graph.queue_callback(callback))
    async with ag.Engine() as engine:
        task = engine.execute([ag.graph.get_gradient_edge(y * 1.0)], [np.ones(())])
        task.future.add_done_callback(lambda f: log.append(f"future, {task.outstanding} outstanding, committed {task.committed}"))
        await task.future
    assert log == ["callback", "future, 0 outstanding, committed True"]

