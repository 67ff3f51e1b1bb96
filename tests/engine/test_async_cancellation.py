"""Cancelled at every step of the loop at which it can be, a pass has happened wholly or not at all, and leaves nothing behind.

Each scenario is run once undisturbed, then once per step with a cancellation right before that step, in the documented order of the loop
and in drawn ones. The engine's clock ticks with every reading, so that passes pause every few nodes and there are many such steps.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import CancelGraceError, GraphFreedError
from aiograd.testing import SimulatedLoop, simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import Switch, chain, function, message, number, rounds, ticking
from tests.support import assert_awaiting_raises, bits, cancel, leaf

Scenario = Callable[["World"], Coroutine[Any, Any, None]]


class World:
    """The leaves and outcomes of one run of a scenario."""

    def __init__(self) -> None:
        self.leaves: list[ag.Tensor] = []
        #: tensors that only the graph keeps alive
        self.saved: list[weakref.ref[ag.Tensor]] = []
        self.inside = 0
        self.before: list[Any] = []
        self.after: list[bytes | None] = []
        self.is_started = self.is_over = False
        self.failure: str | None = None
        self.committed = False

    def leaf(self, *values: float) -> ag.Tensor:
        """A leaf that has a gradient already."""
        made = leaf(values, grad=[0.5] * len(values))
        self.leaves.append(made)
        return made

    def keep(self, tensor: ag.Tensor) -> ag.Tensor:
        """Watch when a tensor dies."""
        self.saved.append(weakref.ref(tensor))
        return tensor

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around user code: by the time the pass is over nobody may be inside."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def attempt(self, start: Callable[[], Coroutine[Any, Any, Any]], again: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Await a pass, and check what must be true the moment it is over."""
        self.before = [tensor.grad for tensor in self.leaves]
        before = bits(*self.before)
        self.is_started = True
        try:
            await start()
        except asyncio.CancelledError as error:
            self.failure = type(error).__name__
            self.committed = getattr(error, "committed", False)
        self.is_over = True
        assert self.inside == 0, "user code still runs"
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left running"
        self.after = bits(*(tensor.grad for tensor in self.leaves))
        if self.failure is not None and not self.committed:
            assert all(tensor.grad is grad for tensor, grad in zip(self.leaves, self.before, strict=True)), "a gradient was replaced"
            assert self.after == before
        if self.failure is not None:
            await asyncio.sleep(0)  # in the step that threw it asyncio itself holds on to the cancellation, and that to the frames it went through
        assert [ref for ref in self.saved if ref() is not None] == [], "saved values were kept"
        if again is not None:
            first = "CancelledError" if self.failure else "second time"
            await assert_awaiting_raises(GraphFreedError, first, again())
            assert bits(*(tensor.grad for tensor in self.leaves)) == self.after


# -------------------------------------------------------------------- scenarios


async def plain(world: World) -> None:
    """A graph for the short cut."""
    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    loss = chain(world.keep(x * y), 150, 1.0).sum()
    await world.attempt(loss.backward, loss.backward)


async def long(world: World) -> None:
    """A graph whose walk pauses as well; what it saves at its far end is released even if the walk has not come there."""
    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    loss = chain(world.keep(x * y) * y, 1400, 1.0).sum()
    await world.attempt(loss.backward, loss.backward)


async def hooked(world: World) -> None:
    """Synchronous hooks everywhere, and a gradient kept at a tensor that is no leaf."""
    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    middle = x * y
    middle.register_hook(lambda g: g * 2.0)
    middle.retain_grad()
    loss = chain(middle, 12, 1.5)
    loss.grad_fn.register_prehook(lambda gs: None)
    loss.grad_fn.register_hook(lambda gi, go: None)
    loss = world.keep(loss * y).sum()
    await world.attempt(loss.backward)
    assert (middle.grad is None) is (world.failure is not None and not world.committed)


async def async_rules(world: World) -> None:
    """Rules that sleep, side by side and one after another."""

    def rule(times: int) -> Any:
        async def backward(ctx: Any, g: Any) -> Any:
            with world.working():
                for _ in range(times):
                    await asyncio.sleep(0.01)
                return g * 3.0

        return function(backward)

    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    shared = world.keep(x * y)
    parts = [rule(n)(shared * float(n + 1)) for n in range(4)]
    loss = (rule(1)(parts[0] + parts[1]) * parts[2] + parts[3]).sum()
    del shared, parts
    await world.attempt(loss.backward, loss.backward)


async def executor_rules(world: World) -> None:
    """Rules on the executor, mixed with rules that sleep."""

    def on_executor(ctx: Any, g: Any) -> Any:
        with world.working():
            return g * 3.0

    async def on_loop(ctx: Any, g: Any) -> Any:
        with world.working():
            await asyncio.sleep(0)
            return g * 2.0

    f, h = function(on_executor), function(on_loop)
    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    shared = world.keep(f(x * y))
    loss = (f(shared) * h(shared) + f(h(x))).sum()
    del shared
    await world.attempt(loss.backward, loss.backward)


async def everything_offloaded(world: World) -> None:
    """Every rule, every large sum and the staging of every leaf on the executor."""
    large = np.ones(1 << 18)
    x, y = leaf(large, grad=large), leaf(large, grad=large)
    world.leaves += [x, y]
    middle = world.keep(x * y)
    loss = (middle + middle * y + x).sum()
    del middle
    await world.attempt(loss.backward, loss.backward)


async def async_hooks(world: World) -> None:
    """Hooks of every kind that suspend."""

    async def hook(*_: Any) -> None:
        with world.working():
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)

    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    middle = x * y
    middle.register_hook(hook)
    x.register_hook(hook)
    other = y * 2.0
    other.register_hook(hook)
    other.grad_fn.register_prehook(hook)
    middle.grad_fn.register_hook(hook)
    ag.graph.register_multi_grad_hook([middle, other], hook)
    loss = (middle * other).sum()
    await world.attempt(loss.backward)


async def captures(world: World) -> None:
    """Gradients that are returned instead of accumulated."""

    async def hook(g: Any) -> Any:
        with world.working():
            await asyncio.sleep(0)
            return g * 2.0

    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    middle = x * y
    middle.register_hook(hook)
    loss = chain(middle, 10, 1.5).sum()
    before = list(world.leaves)
    await world.attempt(lambda: ag.grad(loss, [x, middle, y]))
    assert [tensor.grad for tensor in before] == world.before


async def unpacking(world: World) -> None:
    """Saved values that have to be fetched, slowly."""
    stored: dict[int, ag.Tensor] = {}

    def pack(tensor: ag.Tensor) -> int:
        stored[len(stored)] = tensor.detach()
        return len(stored) - 1

    async def unpack(key: int) -> ag.Tensor:
        with world.working():
            await asyncio.sleep(0.01)
            return stored[key]

    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    with ag.graph.saved_tensors_hooks(pack, unpack):
        loss = ((x * y) * (x + y)).sum()
    await world.attempt(loss.backward, loss.backward)


async def second_order(world: World) -> None:
    """A pass that records itself, then one through the record."""
    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)

    async def both() -> None:
        product = world.keep(x * y)
        product.register_hook(lambda grad: None)
        loss = (product * x).sum()
        del product
        first = await ag.grad(loss, [x, y], create_graph=True)
        del loss
        await (first[0] * first[1]).sum().backward()

    await world.attempt(both)


async def second_order_swept(world: World) -> None:
    """The same over graphs without user code, long enough for pauses in the short cut."""
    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)

    async def both() -> None:
        loss = (chain(world.keep(x * y), 150, 1.0) * x).sum()
        first = await ag.grad(loss, [x, y], create_graph=True)
        del loss
        await (first[0] * first[1]).sum().backward()

    await world.attempt(both)


async def nested(world: World) -> None:
    """A rule that runs a pass of its own: that one commits by itself."""
    other = leaf([1.0, 1.0], grad=[8.0, 8.0])

    async def rule(ctx: Any, g: Any) -> Any:
        with world.working(), ag.enable_grad():
            await chain(other, 6, 1.0).sum().backward()
            await asyncio.sleep(0)
        return g

    x = world.leaf(1.0, -2.0)
    loss = function(rule)(world.keep(x * x) * 1.0).sum()
    await world.attempt(loss.backward, loss.backward)
    assert bits(other.grad) in (bits(ag.tensor([8.0, 8.0], dtype="float64")), bits(ag.tensor([9.0, 9.0], dtype="float64")))


async def after_the_commit(world: World) -> None:
    """Post-accumulate hooks and final callbacks that suspend: the gradients are there already, and stay."""

    async def later(*_: Any) -> None:
        with world.working():
            await asyncio.sleep(0.01)

    async def more() -> None:
        await later()
        ag.graph.queue_callback(later)

    x, y = world.leaf(1.0, -2.0), world.leaf(3.0, 0.25)
    x.register_post_accumulate_grad_hook(later)
    y.register_post_accumulate_grad_hook(later)
    middle = x * y
    middle.register_hook(lambda g: ag.graph.queue_callback(more))
    loss = chain(middle, 100).sum()
    await world.attempt(loss.backward)


async def executed(world: World) -> None:
    """A pass started with `execute`; cancelling the one who started it cancels it."""

    async def rule(ctx: Any, g: Any) -> Any:
        with world.working():
            await asyncio.sleep(0.01)
            return g

    x = world.leaf(1.0, -2.0)
    loss = chain(function(rule)(world.keep(x * x) * 1.0), 8).sum()

    async def start() -> None:
        task = ag.current_engine().execute([ag.graph.get_gradient_edge(loss)], [np.ones(())])
        try:
            await task.future
            await rounds(2)
        except asyncio.CancelledError as error:
            await rounds(30)
            assert task.completed
            error.committed = task.committed
            raise

    await world.attempt(start)


SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "plain": (plain, {"budget": 1}),
    "long": (long, {"budget": 1}),
    "hooked": (hooked, {"budget": 2}),
    "async rules": (async_rules, {"budget": 3}),
    "async rules, one at a time": (async_rules, {"budget": 3, "concurrency": 1}),
    "executor rules": (executor_rules, {"budget": 3}),
    "everything offloaded": (everything_offloaded, {"budget": 3, "inline_ns": 1.0}),
    "async hooks": (async_hooks, {"budget": 3}),
    "captures": (captures, {"budget": 3}),
    "unpacking": (unpacking, {"budget": 3}),
    "second order": (second_order, {"budget": 3}),
    "second order, swept": (second_order_swept, {"budget": 1}),
    "nested": (nested, {"budget": 3}),
    "after the commit": (after_the_commit, {"budget": 1}),
    "executed": (executed, {"budget": 3}),
}


async def scene(scenario: Scenario, world: World, options: dict[str, Any]) -> None:
    try:
        async with ag.Engine(clock=ticking(), **options):
            await scenario(world)
    except asyncio.CancelledError:
        assert world.failure is None, "cancelled twice"
        assert world.is_over or not world.is_started


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", list(SCENARIOS))
@pytest.mark.parametrize("block", range(3))
def test_cancelled_at_every_step(name: str, seed: int | None, block: int, no_collector: None) -> None:
    """Each block has every third of them, of few steps each one."""
    scenario, options = SCENARIOS[name]
    order: Any = "fifo" if seed is None else "permuted"

    def run(cancel_at: int | None) -> tuple[World, int]:
        world = World()
        try:
            simulation = simulated_run(scene, scenario, world, options, seed=seed, order=order, cancel_at=cancel_at)
        except asyncio.CancelledError:  # before the first step of the task
            assert not world.is_started
            return world, 0
        assert simulation.leftover_tasks == ()
        return world, simulation.steps

    undisturbed, steps = run(None)
    assert undisturbed.failure is None
    assert undisturbed.is_over
    outcomes = {"before": 0, "after": 0}
    first, stride = (1 + block, 3) if steps > 60 else (1, 1)
    for n in range(first, steps + 1, stride):
        world, _ = run(n)
        if not world.is_started:
            continue
        happened = world.failure is None or world.committed
        outcomes["after" if happened else "before"] += 1
        if happened:
            assert world.after == undisturbed.after
    assert outcomes["before"] > steps / (4 * stride), outcomes
    if name == "after the commit":
        assert outcomes["after"] > 2, outcomes


@pytest.mark.parametrize("seed", range(4))
def test_passes_on_one_leaf_are_each_wholly_in_or_out(seed: int) -> None:
    """Every pass adds its own power of two, so the sum says which of them happened."""

    async def passes(cancelled: set[int]) -> tuple[float, set[int]]:
        x = leaf(1.0)

        async def rule(ctx: Any, g: Any) -> Any:
            await asyncio.sleep(0)
            return g

        async def one(n: int) -> None:
            y = chain(x, 5)
            y = function(rule)(y) if n % 2 else chain(y, 60)
            await (y * float(2**n)).backward()

        async with ag.Engine(clock=ticking(), budget=3):
            tasks = [asyncio.create_task(one(n)) for n in range(6)]
            for n in sorted(cancelled):
                await rounds(3 * n)
                tasks[n].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        return number(x.grad) if x.grad is not None else 0.0, {n for n, result in enumerate(results) if result is None}

    for chosen in range(64):
        cancelled = {n for n in range(6) if chosen >> n & 1}
        total, happened = simulated_run(passes, cancelled, seed=seed, order="permuted").value
        assert total == sum(2**n for n in happened)
        assert happened >= set(range(6)) - cancelled


# -------------------------------------------------------------------- timeouts


async def test_a_timeout_ends_the_pass_and_is_a_timeout_error(virtual_clock: VirtualClock) -> None:
    async def rule(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(3600)

    x = leaf(1.0, grad=7.0)
    y = function(rule)(x)
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError) as raised:
        async with asyncio.timeout(5):
            await y.backward()
    assert loop.time() == 5
    assert not raised.value.__cause__.committed if hasattr(raised.value.__cause__, "committed") else True
    await assert_awaiting_raises(GraphFreedError, "CancelledError", y.backward())
    assert number(x.grad) == 7.0


@pytest.mark.parametrize(("inner", "outer", "first"), [(1.0, 2.0, "inner"), (2.0, 1.0, "outer"), (1.0, 1.0, "outer")])
@pytest.mark.parametrize("beside", [False, True])
async def test_of_nested_timeouts_the_right_one_ends(virtual_clock: VirtualClock, inner: float, outer: float, first: str, beside: bool) -> None:
    async def rule(ctx: Any, g: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.5)  # cleaning up takes long enough for the other timeout to come

    x, ended = leaf(1.0), []
    y = function(rule)(x)
    if beside:
        y = y + function(rule)(x)
    try:
        async with asyncio.timeout(outer):
            try:
                async with asyncio.timeout(inner):
                    await y.backward()
            except TimeoutError:
                ended.append("inner")
    except TimeoutError:
        ended.append("outer")
    assert ended == [first]


async def test_a_cancellation_while_the_pass_cleans_up_after_a_timeout_is_not_lost(virtual_clock: VirtualClock) -> None:
    cleaning = Switch()

    async def rule(ctx: Any, g: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaning.on()
            await asyncio.sleep(0.5)

    x = leaf(1.0)
    y = function(rule)(x) + function(rule)(x)

    async def with_timeout() -> None:
        async with asyncio.timeout(1):
            await y.backward()

    task = asyncio.create_task(with_timeout())
    await cleaning
    await cancel(task)
    assert virtual_clock.time() == 1.5, "cleaning up was cut short"


async def test_an_error_while_another_node_cleans_up_gives_way_to_a_cancellation(virtual_clock: VirtualClock) -> None:
    cleaning = Switch()

    async def fails(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(1)
        raise ValueError("first")

    async def slow(ctx: Any, g: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaning.on()
            await asyncio.sleep(0.5)

    x = leaf(1.0, grad=1.0)
    task = asyncio.create_task((function(fails)(x) + function(slow)(x)).backward())
    await cleaning
    task.cancel()
    raised = await assert_awaiting_raises(asyncio.CancelledError, None, task)
    assert isinstance(raised.__context__, ValueError)
    assert number(x.grad) == 1.0


# -------------------------------------------------------------------- coroutines that do not stop


def captured_reports() -> list[dict[str, Any]]:
    """The reports to the running loop's exception handler from now on."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    return reports


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
def test_a_coroutine_that_does_not_stop_is_left_and_reported(beside: bool) -> None:
    async def main() -> None:
        reports = captured_reports()
        ended = asyncio.Event()

        async def stubborn(ctx: Any, g: Any) -> Any:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(100)
                ended.set()
                raise

        x = leaf(1.0, grad=2.0)
        y = function(stubborn)(x)
        if beside:
            y = y * function(stubborn)(x)
        loop = asyncio.get_running_loop()
        async with ag.Engine(cancel_grace=3.0):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(10):
                    await y.backward()
            assert loop.time() == 13
            assert number(x.grad) == 2.0
        (report,) = reports
        assert isinstance(report["exception"], CancelGraceError)
        assert "FBackward" in report["message"] and " 3 s " in report["message"]
        await ended.wait()
        await rounds(3)

    assert simulated_run(main).leftover_tasks == ()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
async def test_a_coroutine_that_swallows_the_cancellation_does_not_keep_the_pass_going(virtual_clock: VirtualClock, beside: bool) -> None:
    async def swallows(ctx: Any, g: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return g * 5.0

    x = leaf(1.0, grad=2.0)
    y = function(swallows)(x)
    if beside:
        y = y * function(swallows)(x)
    task = asyncio.create_task(y.backward())
    await rounds(5)
    await cancel(task)
    assert task.cancelled()
    assert number(x.grad) == 2.0


async def test_a_timeout_inside_a_rule_is_the_rules_own_business(virtual_clock: VirtualClock) -> None:
    async def impatient(ctx: Any, g: Any) -> Any:
        try:
            async with asyncio.timeout(1):
                await asyncio.sleep(3600)
        except TimeoutError:
            await asyncio.sleep(1)
        return g * 4.0

    x = leaf(1.0)
    await function(impatient)(x).backward()
    assert (number(x.grad), virtual_clock.time()) == (4.0, 2)


async def test_what_a_coroutine_raises_while_it_is_cancelled_does_not_hide_the_cancellation(virtual_clock: VirtualClock) -> None:
    async def raises(ctx: Any, g: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ValueError("while cleaning up") from None

    x = leaf(1.0)
    for y in (function(raises)(x), function(raises)(x) * function(raises)(x)):
        task = asyncio.create_task(y.backward())
        await rounds(5)
        await cancel(task)


async def test_nested_passes_are_cancelled_from_the_outside_in_at_any_depth() -> None:
    inside = 0
    deepest = asyncio.Event()

    async def rule(ctx: Any, g: Any) -> Any:
        nonlocal inside
        inside += 1
        try:
            if inside < 300:
                with ag.enable_grad():
                    await function(rule)(leaf(1.0)).backward()
            else:
                deepest.set()
                await asyncio.Event().wait()
        finally:
            inside -= 1
        return g

    x = leaf(1.0)
    task = asyncio.create_task(function(rule)(x).backward())
    await deepest.wait()
    assert inside == 300
    await cancel(task)
    assert inside == 0
    assert x.grad is None


async def test_a_cancelled_task_may_run_a_pass_while_it_cleans_up(virtual_clock: VirtualClock) -> None:
    x = leaf(1.0)

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:

            async def rule(ctx: Any, g: Any) -> Any:
                await asyncio.sleep(1)
                return g * 2.0

            await function(rule)(x).backward()

    task = asyncio.create_task(work())
    await rounds(2)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert number(x.grad) == 2.0


async def test_the_second_use_names_the_first_error(virtual_clock: VirtualClock) -> None:
    def rule(ctx: Any, g: Any) -> Any:
        raise ValueError("the disk is full\nsecond line")

    x = leaf(3.0, grad=1.0)
    y = function(rule, inline=True)(x * x)
    await assert_awaiting_raises(ValueError, "disk", y.backward())
    raised = await assert_awaiting_raises(GraphFreedError, r"first pass ended with: ValueError: the disk is full\. Specify", y.backward())
    assert "FBackward" in message(raised)
    assert number(x.grad) == 1.0
    kept = function(rule, inline=True)(x * x)
    for _ in range(2):
        await assert_awaiting_raises(ValueError, "disk", kept.backward(retain_graph=True))


async def test_a_pass_refused_by_a_spent_graph_leaves_the_pass_alone_that_is_using_it(virtual_clock: VirtualClock) -> None:
    """Without retain_graph a second pass over the same graph fails, and must not take the first one's saved values."""

    inside, leave = Switch(), Switch()

    async def waits(ctx: Any, g: Any) -> Any:
        inside.on()
        await leave
        return g

    x = leaf(3.0)
    base = x * x  # needed by both
    shared = function(waits)(base)
    first = asyncio.create_task((shared * shared).backward())  # releases its own product, then waits
    await inside
    used = shared * 1.0
    spent = used * used
    await ag.grad(spent, used)
    await assert_awaiting_raises(GraphFreedError, None, spent.backward())
    leave.on()
    await first
    # d(x^4)/dx at 3
    assert (number(x.grad), []) == (108.0, [])


class StuckJobs:
    """An executor whose jobs start but never come back."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop

    def submit(self, job: Any) -> asyncio.Future[Any]:
        return self.loop.create_future()


def test_a_job_that_never_comes_back_does_not_hold_the_pass() -> None:
    async def main() -> float:
        x = leaf(1.0, grad=4.0)
        y = function(lambda ctx, g: g)(x)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await y.backward()
        assert asyncio.get_running_loop().time() == 1
        return number(x.grad)

    assert simulated_run(main, executor=StuckJobs).value == 4.0
