"""Functions, rules and hooks that raise anything, return nonsense, return too late or never: one request fails and says whose fault it was."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.rpc.limits import Limits
from aiograd.engine.run.current import aclose_default_engine
from aiograd.errors import DeadlineError, Overloaded, RemoteError
from aiograd.testing import SimulatedLoop
from aiograd.testing.jobs import InlineJobs
from tests.distributed.workers import busy, leaf, simulate, until, values, view, workers
from tests.loops import LOOPS
from tests.support import custom_function


class Stop(BaseException):
    """Neither an Exception nor one of Python's own."""


#: SystemExit is meant for whoever runs the code, which is the peer that has called it, and not this worker
ORDINARY = [ValueError, MemoryError, Stop, GeneratorExit, asyncio.CancelledError, StopIteration, RecursionError, SystemExit]


def raising(error: type[BaseException]) -> dist.Service:
    """Functions that raise, on the loop and on a thread, and one that does not."""
    service = dist.Service()

    @service.function
    async def on_loop() -> None:
        raise error("no")

    @service.function
    def on_thread() -> None:
        raise error("no")

    @service.function
    async def fine(x: Any) -> Any:
        return x * 2

    return service


# -------------------------------------------------------------------- functions


@pytest.mark.parametrize("error", [*ORDINARY, KeyboardInterrupt])
async def test_whatever_a_function_raises_fails_its_call_and_nothing_else(error: type[BaseException]) -> None:
    """On the loop or on a thread, on another worker or on the caller's own."""
    async with workers("a", "b", service=raising(error)) as (a, b):
        for function in ("on_thread",) if error is KeyboardInterrupt else ("on_loop", "on_thread"):
            for peer in ("a", "b"):
                with pytest.raises(RemoteError, match=f"^Error on Node {peer}: ") as caught:
                    await a.call(peer, function)
                assert (caught.value.worker, caught.value.function) == (peer, function)
                assert caught.value.type_name == ("RuntimeError" if error is StopIteration else error.__name__)
                async with a.context() as ctx:
                    x = leaf(1)
                    with pytest.raises(RemoteError):
                        await a.call(peer, function)
                    await ctx.backward((await a.call(peer, "fine", x)).sum())
                    assert values(ctx.grads[x]) == [2]
        assert not busy(b) and b.statistics().stuck == 0
        gc.collect()  # a task whose error nobody asked for would be reported now


@pytest.mark.parametrize("loop_factory", LOOPS.values(), ids=LOOPS)
def test_an_interrupt_leaves_the_loop_after_the_caller_was_answered(loop_factory: Callable[[], Any]) -> None:
    """As out of any coroutine. Who runs the loop again finds all in order."""
    told: list[BaseException] = []

    async def main() -> None:
        async with workers("a", "b", service=raising(KeyboardInterrupt)) as (a, _):
            with pytest.raises(RemoteError, match=r"^Error on Node b: \w+: \w+: no$") as caught:
                await a.call("b", "on_loop")
            told.append(caught.value)
            assert values(await a.call("b", "fine", ag.tensor([1.0]))) == [2]

    loop = loop_factory()
    try:
        task = loop.create_task(main())
        with pytest.raises(KeyboardInterrupt, match="no"):
            loop.run_until_complete(task)
        loop.run_until_complete(task)
        assert told[0].type_name == "KeyboardInterrupt" and told[0].function == "on_loop"  # type: ignore[attr-defined]
        gc.collect()
    finally:
        loop.close()


@pytest.mark.parametrize("peer", ["a", "b"])
async def test_a_function_that_exits_when_it_is_given_up_ends_nothing_else(peer: str) -> None:
    service = dist.Service()
    exited: list[str] = []

    @service.function
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            exited.append("stubborn")
            raise SystemExit(3)

    service.function("fine")(lambda x: x * 2)
    async with workers("a", "b", service=service) as (a, _):
        call = asyncio.ensure_future(a.call(peer, "stubborn"))
        for _ in range(20):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: exited)
        assert values(await a.call(peer, "fine", ag.tensor([1.0]))) == [2]


async def test_a_function_that_never_returns_ends_at_its_deadline_and_holds_one_thread_and_nothing_else() -> None:
    service = dist.Service()
    gate = threading.Event()
    ended: list[str] = []
    weight = leaf(2)

    @service.function
    def stuck(x: Any) -> Any:
        gate.wait(30)
        ended.append("stuck")
        return x * weight

    service.function("quick")(lambda x: x * weight)
    try:
        async with ag.Engine(threads=1), workers("a", "b", service=service) as (a, b), a.context() as ctx:
            x = leaf(1)
            with pytest.raises(DeadlineError, match=r"^calling stuck on b: request CALL to worker 'b' did not end within 0.05 s"):
                await a.call("b", "stuck", x, timeout=0.05)
            await until(lambda: b.statistics().stuck == 1)
            assert b.statistics().stuck == 1 and not view(b, ctx).calls
            await ctx.backward((await a.call("b", "quick", x)).sum(), mode="fast", timeout=5)
            assert values(ctx.grads[x]) == [2] and values(view(b, ctx).grads[weight]) == [1]
            gate.set()
            await until(lambda: ended, turns=1_000_000)
            await until(lambda: not b.statistics().stuck, turns=1_000_000)
            assert len(view(b, ctx).send_nodes) == 1, "what came too late made no edge"
            assert values(view(b, ctx).grads[weight]) == [1]
    finally:
        gate.set()


async def test_functions_that_never_return_do_not_gather_threads() -> None:
    service = dist.Service()
    gate = threading.Event()
    service.function("stuck")(lambda: gate.wait(30))
    service.function("quick")(lambda: 1)
    try:
        async with ag.Engine(threads=1), workers("a", "b", service=service, limits=Limits(executor_queue=3)) as (a, b):
            for count in range(1, 4):
                call = asyncio.ensure_future(a.call("b", "stuck"))
                await until(lambda: b._calls._on_executor == 1)
                await asyncio.sleep(0.01 if count == 1 else 0)
                call.cancel()
                await until(lambda count=count: b.statistics().stuck == count)
            with pytest.raises(Overloaded, match=r"worker b has 3 functions that were given up and have not ended, which is its limit \(Limits.exec"):
                await a.call("b", "quick")
            gate.set()
            await until(lambda: not b.statistics().stuck, turns=1_000_000)
            assert await a.call("b", "quick") == 1
    finally:
        gate.set()


# -------------------------------------------------------------------- rules and hooks


def spoilt(kind: str, backward: Callable[[], Any]) -> Any:
    """A function whose rule calls `backward`: on a thread, on the loop, or as a coroutine."""

    def Spoilt(ctx: Any, g: Any) -> Any:
        found = backward()
        return g * 3 if found is None else found

    async def later(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return Spoilt(ctx, g)

    later.__name__ = Spoilt.__name__
    return custom_function(lambda x: x * 3, inline=kind == "inline")(later if kind == "async" else Spoilt)


class Rig:
    """A service with a rule and hooks that do what they are told; the worker's own weight takes part."""

    def __init__(self, kind: str = "thread", place: str = "rule") -> None:
        self.does: Callable[[], Any] = lambda: None
        self.weight = leaf(2)
        self.service = dist.Service()
        function = spoilt(kind, lambda: self.does() if place == "rule" else None)

        def hook(*_: Any) -> Any:
            self.does()

        async def coroutine(*_: Any) -> Any:
            await asyncio.sleep(0)
            self.does()

        called = coroutine if kind == "async" else hook

        @self.service.function
        async def run(x: Any) -> Any:
            y = function.apply(x * self.weight)
            node = y.grad_fn
            match place:
                case "tensor hook":
                    y.register_hook(called)
                case "prehook":
                    node.register_prehook(called)
                case "posthook":
                    node.register_hook(called)
            return y * 1

        if place == "leaf hook":
            self.weight.register_hook(called)
        if place == "post-accumulate":
            self.weight.register_post_accumulate_grad_hook(called)


def fails(error: BaseException) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


RULES = [(kind, error) for error in (ValueError, Stop, asyncio.CancelledError, StopIteration) for kind in ("thread", "inline", "async")]


@pytest.mark.parametrize(("kind", "error"), [*RULES, ("thread", SystemExit), ("inline", SystemExit)])  # out of a task it leaves the loop
async def test_whatever_a_rule_raises_fails_the_pass_everywhere_and_nothing_else(kind: str, error: type[BaseException]) -> None:
    rig = Rig(kind)
    async with workers("a", "b", service=rig.service) as (a, b), a.context() as ctx:
        x, other = leaf(1), leaf(1)
        y = (await a.call("b", "run", x)).sum() + other.sum()
        rig.does = fails(error("no"))
        with pytest.raises(RemoteError, match=r"^Error on Node b: ") as caught:
            await ctx.backward(y, retain_graph=True)
        assert (caught.value.worker, caught.value.function) == ("b", "SpoiltBackward")
        assert caught.value.type_name == ("RuntimeError" if error is StopIteration else error.__name__)
        await settled_passes(a, b)
        assert not [*ctx.grads] and not [*view(b, ctx).grads], "nothing was committed on either"
        rig.does = lambda: None
        y = (await a.call("b", "run", x)).sum() + other.sum()
        await ctx.backward(y)
        assert (values(ctx.grads[x]), values(ctx.grads[other]), values(view(b, ctx).grads[rig.weight])) == ([6], [1], [3])
        gc.collect()


async def settled_passes(*opened: dist.Worker) -> None:
    await until(lambda: not any(worker.statistics().passes for worker in opened))


@pytest.mark.parametrize("loop_factory", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kind", ["thread", "inline"])
def test_an_interrupt_in_a_rule_fails_the_pass_and_leaves_the_loop(
    kind: str, loop_factory: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "aiograd.distributed")  # records that pytest keeps would keep the frames of the traceback alive
    rig = Rig(kind)
    interrupts = 0

    async def main() -> None:
        async with workers("a", "b", service=rig.service) as (a, b), a.context() as ctx:
            x = leaf(1)
            rig.does = fails(KeyboardInterrupt("no"))
            y = await a.call("b", "run", x)
            with pytest.raises(RemoteError, match=r"^Error on Node b: \w+: \w+: no$") as caught:
                await ctx.backward(y.sum())
            assert (caught.value.function, caught.value.type_name) == ("SpoiltBackward", "KeyboardInterrupt")
            rig.does = lambda: None
            await settled_passes(a, b)
            assert x not in ctx.grads and rig.weight not in view(b, ctx).grads
            await ctx.backward((await a.call("b", "run", x)).sum())
            assert values(ctx.grads[x]) == [6]

    loop = loop_factory()
    try:
        task = loop.create_task(main())
        while not task.done():
            try:
                loop.run_until_complete(task)
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
        task.result()
        gc.collect()
    finally:
        loop.run_until_complete(aclose_default_engine())
        loop.close()


SHAPES: dict[str, Callable[[], Any]] = {
    "another shape": lambda: np.ones(3, np.float32),
    "another kind of thing": lambda: "gradient",
    "too many": lambda: (np.ones(2, np.float32), np.ones(2, np.float32)),
    "too few": lambda: (),
    "an array of objects": lambda: np.array([object()]),
}


@pytest.mark.parametrize("kind", ["thread", "inline", "async"])
@pytest.mark.parametrize("nonsense", SHAPES)
async def test_a_rule_that_returns_nonsense_is_named(nonsense: str, kind: str) -> None:
    rig = Rig(kind)
    rig.does = SHAPES[nonsense]
    async with workers("a", "b", service=rig.service) as (a, b), a.context() as ctx:
        x = leaf(1, 1)
        with pytest.raises(RemoteError, match=r"^Error on Node b: .*Spoilt") as caught:
            await ctx.backward((await a.call("b", "run", x)).sum())
        assert caught.value.function == "SpoiltBackward" and caught.value.type_name.endswith("Error"), caught.value
        await settled_passes(a, b)
        assert not [*ctx.grads] and not [*view(b, ctx).grads]


@pytest.mark.parametrize("kind", ["def", "async"])
@pytest.mark.parametrize("place", ["tensor hook", "prehook", "posthook", "leaf hook", "post-accumulate"])
async def test_a_hook_that_raises_fails_the_pass_everywhere_and_nothing_else(place: str, kind: str) -> None:
    """One that runs after the commit says that the gradients are there, and they are."""
    rig, committed = Rig(kind, place), place == "post-accumulate"
    async with workers("a", "b", service=rig.service) as (a, b), a.context() as ctx:
        x = leaf(1)
        rig.does = fails(ValueError("no"))
        with pytest.raises(RemoteError, match=r"^Error on Node b: \w+: \w+: no$") as caught:
            await ctx.backward((await a.call("b", "run", x)).sum())
        assert caught.value.type_name == "ValueError" and caught.value.committed == committed
        assert caught.value.function in ("SpoiltBackward", "AccumulateGrad")[committed:]
        if committed:
            assert values(ctx.grads[x]) == [6] and values(view(b, ctx).grads[rig.weight]) == [3]
            assert a.statistics().in_doubt == b.statistics().in_doubt == 0
        else:
            await settled_passes(a, b)
            assert not [*ctx.grads] and not [*view(b, ctx).grads]
        rig.does = lambda: None
        await ctx.backward((await a.call("b", "run", x)).sum())
        times = 1 + committed
        assert values(ctx.grads[x]) == [6 * times] and values(view(b, ctx).grads[rig.weight]) == [3 * times]


class Held(InlineJobs):
    """An executor whose jobs do not return while they are held."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__(loop)
        self.is_holding = False
        self.held: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self.loop = loop

    def submit(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        if not self.is_holding:
            return super().submit(job)
        future: asyncio.Future[Any] = self.loop.create_future()
        self.held.append((job, future))
        return future

    def release(self) -> None:
        """They return after all."""
        for job, future in self.held:
            found = job()
            if not future.done():
                future.set_result(found)


def test_a_rule_that_never_returns_ends_the_pass_at_its_deadline_and_its_late_result_changes_nothing() -> None:
    rig = Rig("thread")
    jobs: list[Held] = []

    def executor(loop: SimulatedLoop) -> Held:
        jobs.append(Held(loop))
        return jobs[0]

    async def main() -> None:
        async with workers("a", "b", service=rig.service) as (a, b), a.context() as ctx:
            x = leaf(1)
            y = await a.call("b", "run", x)
            jobs[0].is_holding = True
            with pytest.raises(DeadlineError, match=r"did not end in time on b: it waited for the rule or a hook of SpoiltBackward"):
                await ctx.backward(y.sum(), timeout=2)
            assert len(jobs[0].held) == 1
            await settled_passes(a, b)
            jobs[0].is_holding = False
            await ctx.backward((await a.call("b", "run", x)).sum())
            grads = values(ctx.grads[x]), values(view(b, ctx).grads[rig.weight])
            assert grads == ([6], [3])
            jobs[0].release()
            await asyncio.sleep(1)
            assert (values(ctx.grads[x]), values(view(b, ctx).grads[rig.weight])) == grads

    assert 2 <= simulate(main, executor=executor) < 4
