"""A pass is a transaction: what fails before the commit changes nothing, what fails after it undoes nothing, and the order around it is fixed."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GraphError, NestedPassError
from aiograd.graph import accumulate_grad
from aiograd.graph.boundary import BOUNDARY
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.engine.cases import Switch, chain, function, message, number, rounds
from tests.support import assert_awaiting_raises, assert_raises, bits, leaf


class Stop(BaseException):
    """Not an Exception."""


# -------------------------------------------------------------------- errors before the commit


def raiser(kind: str, error: BaseException) -> Callable[..., Any]:
    """User code that raises: at once, or as a coroutine after having waited."""
    if kind == "async":

        async def later(*_: Any) -> Any:
            await asyncio.sleep(0.01)
            raise error

        return later

    def at_once(*_: Any) -> Any:
        raise error

    return at_once


def failing(place: str, kind: str, error: BaseException, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    """A graph of two leaves whose pass raises `error` somewhere, after `y` has been reached."""
    raising = raiser(kind, error)
    if place == "rule":
        z = function(raising, inline=kind == "inline")(x * 2.0)
    else:
        z = x * 2.0
    if place == "tensor hook":
        z.register_hook(raising)
    if place == "leaf hook":
        x.register_hook(raising)
    if place == "prehook":
        z.grad_fn.register_prehook(raising)
    if place == "posthook":
        z.grad_fn.register_hook(raising)
    if place == "multi-grad hook":
        ag.graph.register_multi_grad_hook([z, x], raising)
    if place == "unpack":
        with ag.graph.saved_tensors_hooks(lambda t: t, raising):
            z = z * z
    return (z + y * 1.0).sum()


PLACES = ["rule", "tensor hook", "leaf hook", "prehook", "posthook", "multi-grad hook", "unpack"]
ERRORS = [ValueError("no"), KeyboardInterrupt("no"), SystemExit("no"), Stop("no"), MemoryError("no")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["def", "inline", "async"])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_changes_nothing_keeps_its_type_and_names_its_place(place: str, kind: str, error: BaseException) -> None:
    if place != "rule" and kind == "inline":
        kind = "def"
    raised = type(error)("no")
    x, y = leaf([1.0, 2.0], grad=[3.0, 4.0]), leaf([1.0, 2.0], grad=[3.0, 4.0])
    before = [x.grad, y.grad]
    values = bits(*before)
    second: list[BaseException] = []

    async def main() -> BaseException:
        loss = failing(place, kind, raised, x, y)
        try:
            await loss.backward()
        except BaseException as caught:
            seen = caught
        await asyncio.sleep(0)
        again = await assert_awaiting_raises(BaseException, None, loss.backward())
        second.append(again)
        return seen

    assert simulated_run(main).value is raised
    assert x.grad is before[0] and y.grad is before[1]
    assert bits(x.grad, y.grad) == values
    assert not getattr(raised, "committed", False)
    text = message(raised)
    assert "of graph task" in text
    assert ("FBackward" if place == "rule" else "AccumulateGrad" if place in ("leaf hook", "multi-grad hook") else "MulBackward") in text
    if place == "rule":
        assert "test_async_transaction.py" in text  # the line that recorded it
        assert type(raised).__name__ in str(second[0])


def test_interrupts_in_a_coroutine_that_runs_beside_others_end_the_loop_and_change_nothing() -> None:
    """asyncio lets KeyboardInterrupt out of run_forever when it leaves a task, and cancels the others."""
    x = leaf(1.0, grad=1.0)
    held: list[Any] = []

    async def main() -> None:
        async def interrupts(ctx: Any, g: Any) -> Any:
            await asyncio.sleep(1)
            raise KeyboardInterrupt

        async def waits(ctx: Any, g: Any) -> Any:
            try:
                await asyncio.sleep(2)
            finally:
                held.append("awaited")

        await (function(interrupts)(x) + function(waits)(x)).backward()

    assert_raises(KeyboardInterrupt, None, simulated_run, main)
    assert held == ["awaited"]
    assert number(x.grad) == 1.0


@pytest.mark.parametrize("kind", ["def", "inline", "async"])
@pytest.mark.parametrize("place", ["rule", "tensor hook", "prehook", "posthook", "unpack"])
async def test_stop_iteration_becomes_a_runtime_error(place: str, kind: str) -> None:
    if place != "rule" and kind == "inline":
        kind = "def"
    x, y = leaf(1.0, grad=1.0), leaf(1.0)
    raised = await assert_awaiting_raises(RuntimeError, "StopIteration", failing(place, kind, StopIteration(5), x, y).backward())
    assert isinstance(raised.__cause__, StopIteration)
    assert "of graph task" in message(raised)
    assert number(x.grad) == 1.0 and y.grad is None


@pytest.mark.parametrize("kind", ["def", "inline", "async"])
async def test_a_rule_that_raises_cancelled_error_ends_the_pass_as_cancelled(kind: str) -> None:
    x, y = leaf(1.0, grad=1.0), leaf(1.0)
    await assert_awaiting_raises(asyncio.CancelledError, None, failing("rule", kind, asyncio.CancelledError(), x, y).backward())
    assert number(x.grad) == 1.0 and y.grad is None
    assert asyncio.current_task().cancelling() == 0


async def test_of_several_errors_the_first_counts_and_no_other_is_reported() -> None:
    barrier = threading.Barrier(2)

    def fails(name: str) -> Any:
        def rule(ctx: Any, g: Any) -> Any:
            barrier.wait(timeout=30)
            raise ValueError(name)

        return rule

    x = leaf(1.0)
    async with ag.Engine(threads=2):
        await assert_awaiting_raises(ValueError, r"one|two", (function(fails("one"))(x) + function(fails("two"))(x)).backward())
        await rounds(3)
    gc.collect()  # a future whose exception nobody fetched would report itself now
    assert x.grad is None


@pytest.mark.parametrize("kind", ["def", "async"])
async def test_errors_that_arrive_at_the_same_moment_are_reported_once(virtual_clock: VirtualClock, kind: str) -> None:
    x = leaf(1.0)
    total = x * 0.0
    for _ in range(4):
        total = total + function(raiser(kind, ValueError("no")))(x)
    await assert_awaiting_raises(ValueError, None, total.backward())
    await rounds(3)
    gc.collect()  # a future whose exception nobody fetched would report itself now, and the test would fail


async def test_wrong_results_of_rules_are_errors_that_change_nothing() -> None:
    x, y = leaf([1.0, 2.0], grad=[0.0, 0.0]), leaf([1.0, 2.0])
    before = x.grad
    for result in ("text", (None, None, 1.0), np.zeros(3), np.zeros(2, dtype=np.int64), 5):
        for kind in ("def", "inline", "async"):

            async def later(ctx: Any, g: Any, result: Any = result) -> Any:
                return result

            def now(ctx: Any, g: Any, result: Any = result) -> Any:
                return result

            loss = (function(later if kind == "async" else now, inline=kind == "inline")(x) + y).sum()
            await assert_awaiting_raises(RuntimeError, "FBackward", loss.backward())
    assert x.grad is before and y.grad is None


# -------------------------------------------------------------------- the commit


async def test_gradients_share_memory_with_nothing() -> None:
    x, y, z = leaf([1.0, 2.0]), leaf([3.0, 4.0]), leaf([5.0, 6.0])
    seed = ag.tensor(np.array([1.0, 1.0]))
    await (x + y + z.reshape(2)).backward(seed)
    arrays = [x.grad.numpy(), y.grad.numpy(), z.grad.numpy(), seed.numpy()]
    for i, a in enumerate(arrays):
        for b in arrays[i + 1 :]:
            assert not np.shares_memory(a, b)


async def test_large_gradients_share_memory_with_nothing_and_are_staged_off_the_loop() -> None:
    threads: set[str] = set()
    loop_thread = threading.current_thread().name
    original = accumulate_grad.Staged.add_up

    def watched(self: Any) -> None:
        threads.add(threading.current_thread().name)
        original(self)

    large = np.ones(1 << 20)
    x, y = leaf(large, grad=large), leaf(large)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulate_grad.Staged, "add_up", watched)
        await (x + y).sum().backward()
    assert loop_thread not in threads and threads
    assert not np.shares_memory(x.grad.numpy(), y.grad.numpy())
    assert x.grad.numpy()[0] == 2.0 and y.grad.numpy()[0] == 1.0
    assert y.grad.numpy().flags.owndata


async def test_a_commit_that_fails_halfway_has_written_nothing(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pass overtakes a pass with two leaves, so both sums are made again in the commit; the second one fails."""
    original = accumulate_grad._add

    inside, leave = Switch(), Switch()

    async def waits(ctx: Any, g: Any) -> Any:
        inside.on()
        await leave
        return g

    x, y, z = leaf(1.0), leaf(1.0), leaf(1.0)
    kept = z * 1.0
    kept.retain_grad()
    late = function(waits)(leaf(1.0) * 1.0)
    first = asyncio.create_task((x * 2.0 + y * 3.0 + kept + late).backward())
    await inside
    await (x * 10.0 + y * 20.0).backward()
    calls = 0

    def fails_at_the_second(base: Any, grad: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("the second sum")
        return original(base, grad)

    monkeypatch.setattr(accumulate_grad, "_add", fails_at_the_second)
    leave.on()
    raised = await assert_awaiting_raises(MemoryError, None, first)
    assert not getattr(raised, "committed", False)
    assert calls == 2
    assert z.grad is None and kept.grad is None
    assert [number(x.grad), number(y.grad)] == [10.0, 20.0]


@pytest.mark.parametrize("change", ["pass", "replaced", "none", "in place", "read"])
async def test_what_happens_to_a_gradient_while_a_pass_is_running_is_not_lost(virtual_clock: VirtualClock, change: str) -> None:
    expected = {"pass": 111.0, "replaced": 1001.0, "none": 1.0, "in place": 201.0, "read": 101.0}
    inside, leave = Switch(), Switch()

    async def waits(ctx: Any, g: Any) -> Any:
        inside.on()
        await leave
        return g

    x, other = leaf(1.0, grad=100.0), leaf(1.0)
    slow = function(waits)(other)
    running = asyncio.create_task((x * 1.0 + slow).backward())  # x is staged, then the pass waits
    await inside
    if change == "pass":
        await (x * 10.0).backward()
    elif change == "replaced":
        x.grad = ag.tensor(np.array(1000.0))
    elif change == "none":
        x.grad = None
    elif change == "in place":
        with ag.no_grad():
            x.grad.mul_(2.0)
    else:
        assert number(x.grad) == 100.0
    leave.on()
    await running
    assert number(x.grad) == expected[change]


def test_reading_a_gradient_while_another_thread_commits_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading makes a Tensor of the array that the leaf holds, and must not put it in the place of a newer one."""
    x = leaf(1.0)
    node = ag.graph.get_gradient_edge(x).node
    node.grad = np.array(1.0)
    committed = threading.Event()
    original = BOUNDARY.wrap

    def commits() -> None:
        accumulate_grad.commit([accumulate_grad.Staged(node, np.array(10.0))])
        committed.set()

    other = threading.Thread(target=commits)

    def wrap(array: Any) -> Any:
        monkeypatch.undo()
        other.start()
        committed.wait(timeout=0.1)
        return original(array)

    monkeypatch.setattr(BOUNDARY, "wrap", wrap)
    assert number(x.grad) == 1.0
    other.join()
    assert number(x.grad) == 11.0


async def test_a_large_sum_that_was_overtaken_is_made_again_off_the_loop(virtual_clock: VirtualClock) -> None:
    """The commit itself has nothing left to add up."""
    inside_commit: list[bool] = []

    inside, leave = Switch(), Switch()

    async def waits(ctx: Any, g: Any) -> Any:
        inside.on()
        await leave
        return g

    large = np.ones(1 << 18)
    x, other = leaf(large), leaf(1.0)
    running = asyncio.create_task(((x * 2.0).sum() + function(waits)(other)).backward())
    await inside
    await (x * 5.0).sum().backward()
    original = accumulate_grad.Staged.add_up

    def watched(self: Any) -> None:
        inside_commit.append(accumulate_grad._commit_lock.locked())
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulate_grad.Staged, "add_up", watched)
        leave.on()
        await running
    assert (float(x.grad.numpy().min()), float(x.grad.numpy().max())) == (7.0, 7.0)
    assert inside_commit == [False]


async def test_retained_gradients_take_part_in_the_transaction() -> None:
    x = leaf([1.0, 2.0])
    y = x * 2.0
    y.retain_grad()
    await (y * 3.0).sum().backward(retain_graph=True)
    kept = y.grad

    def fails(g: Any) -> None:
        raise ValueError

    x.register_hook(fails)
    await assert_awaiting_raises(ValueError, None, (y * 3.0).sum().backward())
    assert y.grad is kept
    assert kept.numpy().tolist() == [3.0, 3.0]


# -------------------------------------------------------------------- after the commit


async def test_the_order_at_the_end_of_a_pass() -> None:
    """All nodes → commit → post-accumulate hooks → final callbacks → the pass returns; callbacks see the committed gradients."""
    log: list[Any] = []
    x, y = leaf(2.0), leaf(3.0)

    async def after(which: str, tensor: ag.Tensor) -> None:
        log.append((which, number(x.grad), number(y.grad)))
        await asyncio.sleep(0)
        log.append(f"{which} awaited")

    x.register_post_accumulate_grad_hook(lambda t: after("x", t))
    y.register_post_accumulate_grad_hook(lambda t: log.append("y"))
    y.register_post_accumulate_grad_hook(lambda t: log.append("y again"))

    async def callback() -> None:
        log.append(("callback", number(x.grad)))
        ag.graph.queue_callback(lambda: log.append("queued by a callback"))
        await asyncio.sleep(0)
        log.append("callback awaited")

    z = x * y
    z.register_hook(lambda g: ag.graph.queue_callback(callback))
    x.register_hook(lambda g: ag.graph.queue_callback(lambda: log.append("second")))
    z.grad_fn.register_hook(lambda gi, go: log.append(("node", x.grad)))
    await (z * 1.0).backward()
    log.append("returned")
    assert log == [
        ("node", None), ("x", 3.0, 2.0), "x awaited", "y", "y again", ("callback", 3.0), "callback awaited", "second", "queued by a callback",
        "returned",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["def", "async"])
@pytest.mark.parametrize("place", ["post-accumulate hook", "final callback"])
@pytest.mark.parametrize("error", [ValueError("late"), Stop("late"), asyncio.CancelledError("late")], ids=lambda error: type(error).__name__)
async def test_errors_after_the_commit_say_so_and_roll_nothing_back(place: str, kind: str, error: BaseException) -> None:
    x, y = leaf(2.0), leaf(3.0)
    raised = type(error)("late")
    raising = raiser(kind, raised)
    ran: list[str] = []
    z = x * y
    if place == "final callback":
        z.register_hook(lambda g: ag.graph.queue_callback(raising))
        z.register_hook(lambda g: ag.graph.queue_callback(lambda: ran.append("later callback")))
    else:
        x.register_post_accumulate_grad_hook(raising)
        z.register_hook(lambda g: ag.graph.queue_callback(lambda: ran.append("later callback")))
    seen = await assert_awaiting_raises(type(error), None, (z * 1.0).backward())
    assert seen is raised
    assert raised.committed is True
    assert "of graph task" in message(raised)
    assert (number(x.grad), number(y.grad)) == (3.0, 2.0)
    assert ran == []


async def test_a_cancellation_after_the_commit_says_so(virtual_clock: VirtualClock) -> None:
    x = leaf(2.0)
    inside = Switch()

    async def hook(tensor: Any) -> None:
        inside.on()
        await asyncio.Event().wait()

    x.register_post_accumulate_grad_hook(hook)
    task = asyncio.create_task((x * 3.0).backward())
    await inside
    task.cancel()
    error = await assert_awaiting_raises(asyncio.CancelledError, None, task)
    assert (error.committed, number(x.grad)) == (True, 3.0)


async def test_eager_leaves_accumulate_at_once_and_are_the_one_exception() -> None:
    log: list[Any] = []
    early, late = leaf(2.0), leaf(3.0)

    def step(tensor: ag.Tensor) -> None:
        log.append(("eager", number(tensor.grad), late.grad))
        tensor.grad = None

    early.register_post_accumulate_grad_hook(step, eager=True)
    early.register_post_accumulate_grad_hook(lambda t: log.append("also at once"))

    def fails(ctx: Any, g: Any) -> Any:
        log.append("fails")
        raise ValueError

    inner = function(fails, inline=True)(late * 1.0)
    outer = inner * early
    await assert_awaiting_raises(ValueError, None, outer.backward())
    assert log == [("eager", 3.0, None), "also at once", "fails"]
    assert early.grad is None and late.grad is None


async def test_an_eager_hook_that_is_registered_or_removed_while_the_pass_runs() -> None:
    log: list[str] = []
    x, y = leaf(2.0), leaf(3.0)
    x.register_post_accumulate_grad_hook(lambda t: log.append("x"))
    z = x * y

    # x is staged for the commit; the eager hook comes too late for this pass, which then calls it with the others
    def register(g: Any) -> None:
        x.register_post_accumulate_grad_hook(lambda t: log.append("eager"), eager=True)

    y.register_hook(register)
    await z.backward()
    assert log == ["x", "eager"]
    assert number(x.grad) == 3.0


async def test_eager_and_plain_hooks_see_the_accumulated_gradient() -> None:
    for eager in (False, True):
        seen: list[float] = []
        x = leaf(2.0, grad=10.0)
        x.register_post_accumulate_grad_hook(lambda t, seen=seen: seen.append(number(t.grad)), eager=eager)
        await (x * 3.0).backward()
        assert seen == [13.0]


async def test_post_accumulate_hooks_run_once_per_pass_that_reaches_the_leaf() -> None:
    calls: list[str] = []
    x, y = leaf(2.0), leaf(3.0)
    handle = x.register_post_accumulate_grad_hook(lambda t: calls.append("x"))
    y.register_post_accumulate_grad_hook(lambda t: calls.append("y"))
    await (x * x + x).backward()
    assert calls == ["x"]
    await ag.grad(x * y, [x, y])
    assert calls == ["x"]
    await ag.backward(x * y, inputs=[y])
    assert calls == ["x", "y"]
    handle.remove()
    await (x * y).backward()
    assert calls == ["x", "y", "y"]


# -------------------------------------------------------------------- final callbacks


async def test_queue_callback_outside_of_a_pass_and_after_one() -> None:
    assert_raises(GraphError, "only be installed during backward pass", ag.graph.queue_callback, print)
    x = leaf(2.0)
    outside: list[Any] = []

    async def keeps_going() -> None:
        await rounds(10)
        assert_raises(GraphError, "only be installed during backward pass", ag.graph.queue_callback, print)
        outside.append("refused")

    tasks: list[asyncio.Task[None]] = []
    x.register_hook(lambda g: tasks.append(asyncio.create_task(keeps_going())))
    await (x * 3.0).backward()
    await tasks[0]
    assert outside == ["refused"]


@pytest.mark.parametrize("kind", ["def", "inline", "async"])
async def test_callbacks_may_be_queued_from_any_rule(kind: str) -> None:
    log: list[str] = []

    def rule(ctx: Any, g: Any) -> Any:
        ag.graph.queue_callback(lambda: log.append(threading.current_thread().name))
        return g

    async def async_rule(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return rule(ctx, g)

    x = leaf(2.0)
    await function(async_rule if kind == "async" else rule, inline=kind == "inline")(x).backward()
    assert log == [threading.current_thread().name]  # on the loop, wherever it was queued


async def test_callbacks_belong_to_the_pass_that_was_current() -> None:
    log: list[str] = []
    x, z = leaf(2.0), leaf(3.0)

    async def rule(ctx: Any, g: Any) -> Any:
        ag.graph.queue_callback(lambda: log.append("outer"))
        with ag.enable_grad():
            inner = z * z
            inner.register_hook(lambda g: ag.graph.queue_callback(lambda: log.append("inner")))
            await (inner * 1.0).backward()
        log.append("inner pass is over")
        ag.graph.queue_callback(lambda: log.append("outer again"))
        return g

    await function(rule)(x).backward()
    assert log == ["inner", "inner pass is over", "outer", "outer again"]


async def test_callbacks_do_not_run_when_the_pass_fails() -> None:
    log: list[str] = []
    x = leaf(2.0)

    def fails(g: Any) -> None:
        ag.graph.queue_callback(lambda: log.append("callback"))
        raise ValueError

    y = x * 2.0
    y.register_hook(fails)
    await assert_awaiting_raises(ValueError, None, (y * 1.0).backward())
    assert log == []


@pytest.mark.parametrize("place", ["post-accumulate hook", "final callback", "hook", "rule"])
async def test_passes_may_run_inside_of_everything_that_is_awaited(place: str) -> None:
    x, z = leaf(2.0), leaf(3.0)

    async def nested(*_: Any) -> None:
        with ag.enable_grad():
            await chain(z * z, 3).backward()
            await function(lambda ctx, g: g)(z * z).backward()

    async def rule(ctx: Any, g: Any) -> Any:
        await nested()
        return g

    y = function(rule)(x * 2.0) if place == "rule" else x * 2.0
    if place == "hook":
        y.register_hook(nested)
    if place == "final callback":
        y.register_hook(lambda g: ag.graph.queue_callback(nested))
    if place == "post-accumulate hook":
        x.register_post_accumulate_grad_hook(nested)
    async with asyncio.timeout(20):
        await (y * 1.0).backward()
    assert number(x.grad) == 2.0
    assert number(z.grad) == 12.0


# -------------------------------------------------------------------- nested passes


@pytest.mark.parametrize("inline", [False, True])
async def test_a_synchronous_rule_cannot_run_a_pass(inline: bool) -> None:
    x, z = leaf(2.0), leaf(3.0)
    product = z * z

    async def waits_for(tensor: ag.Tensor) -> None:
        await tensor.backward()

    def with_a_loop(ctx: Any, g: Any) -> Any:
        asyncio.run(waits_for(product))

    def without(ctx: Any, g: Any) -> Any:
        product.backward()

    def with_grad(ctx: Any, g: Any) -> Any:
        ag.grad(product, z)

    for rule in (without, with_grad) if inline else (without, with_grad, with_a_loop):
        with pytest.raises(NestedPassError, match=r"synchronous rule of FBackward.*Make it `async def`"):
            try:
                await function(rule, inline=inline)(x).backward()
            finally:
                gc.collect()
    assert x.grad is None and z.grad is None


async def test_only_the_node_that_called_waits_for_a_nested_pass() -> None:
    x, z = leaf(2.0), leaf(3.0)
    log: list[str] = []
    inside, leave = Switch(), Switch()

    async def innermost(ctx: Any, g: Any) -> Any:
        inside.on()
        await leave
        log.append("inner")
        return g

    async def nests(ctx: Any, g: Any) -> Any:
        with ag.enable_grad():
            await function(innermost)(z).backward()
        log.append("nested done")
        return g

    async def beside(ctx: Any, g: Any) -> Any:
        await inside
        log.append("beside")
        leave.on()
        return g

    await (function(nests)(x) + function(beside)(x)).backward()
    assert log == ["beside", "inner", "nested done"]


# -------------------------------------------------------------------- nothing is kept


@pytest.mark.parametrize("kind", ["def", "inline", "async", "ok", "plain", "hook", "timeout", "nested", "callback", "create_graph", "execute"])
@pytest.mark.parametrize("simulated", [True, False])
def test_after_a_pass_everything_dies_by_reference_count(kind: str, simulated: bool, no_collector: None) -> None:
    watched: list[weakref.ref[Any]] = []

    # each error is a new one: the classes of functions are garbage only the collector can take, and would keep it with its traceback
    def fails(ctx: Any, g: Any) -> Any:
        raise ValueError("no")

    async def fails_later(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def one() -> None:
        async def nests(ctx: Any, g: Any) -> Any:
            with ag.enable_grad():
                await function(fails_later)(leaf(1.0)).backward()

        async def waits(ctx: Any, g: Any) -> Any:
            await asyncio.Event().wait()

        class Marker:
            pass

        x = leaf([1.0, 2.0])
        middle = x * x
        marker = Marker()
        rules: dict[str, Any] = {"nested": nests, "timeout": waits, "ok": lambda ctx, g: g, "execute": fails_later, "async": fails_later}
        if kind in ("def", "inline"):
            out = function(fails, inline=kind == "inline")(middle)
        elif kind in rules:
            out = function(rules[kind])(middle)
        else:
            out = middle * middle
        if kind == "hook":
            middle.register_hook(lambda g, marker=marker: 1 / 0)
        if kind == "callback":
            middle.register_hook(lambda g: ag.graph.queue_callback(lambda marker=marker: 1 / 0))
        loss = (out * out).sum()
        watched.extend(map(weakref.ref, (x, middle, out, loss, marker, middle.grad_fn, out.grad_fn, ag.graph.get_gradient_edge(x).node)))
        try:
            if kind == "create_graph":
                first = (await ag.grad(loss, x, create_graph=True))[0].sum()
                watched.append(weakref.ref(first))
                await first.backward()
            elif kind == "execute":
                await ag.current_engine().execute([ag.graph.get_gradient_edge(loss)], [np.ones(())]).future
            else:
                async with asyncio.timeout(0.01):
                    await loss.backward()
        except (ValueError, ZeroDivisionError, TimeoutError):
            pass
        else:
            assert kind in ("ok", "plain", "create_graph")

    async def main() -> list[Any]:
        for _ in range(2):
            await one()
            await rounds(4)  # callbacks that were scheduled are gone by then
        return [found for ref in watched if (found := ref()) is not None]

    try:
        if simulated:
            assert simulated_run(main).value == []
        else:
            assert ag.run(main()) == []
    finally:
        watched.clear()
