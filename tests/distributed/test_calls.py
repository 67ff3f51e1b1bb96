"""Remote calls: what is refused, where functions run and in which context and mode, who calls whom, and how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.outbox import Outgoing, SessionOutbox
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextReleasedError,
    DeadlineError,
    DistributedError,
    LimitError,
    NoContextError,
    NotExposedError,
    ProtocolError,
    RemoteError,
    UnknownPeerError,
)
from aiograd.testing.virtual_clock import VirtualClock
from tests.chaos.broken import without
from tests.distributed.memory import Switchboard
from tests.distributed.workers import echo, exposing, leaf, relay, settled, until, values, view, workers
from tests.support import cancel, custom_function
from tests.toy_device import ToyDevice

service = exposing(echo, relay)


@service.function
def square(x: Any) -> Any:
    return x * x


@service.function
async def twice_relayed(first: str, second: str, x: Any) -> Any:
    return await dist.current_worker().call(first, "relay", second, "square", x)


@service.function
async def wait_forever() -> None:
    await asyncio.Event().wait()


@service.function
async def sleep(seconds: float, value: Any) -> Any:
    await asyncio.sleep(seconds)
    return value


@service.function
async def fail(kind: str) -> None:
    raise {"value": ValueError("no such thing\nat all"), "type": TypeError("my own"), "key": KeyError("k")}[kind]


@service.function
async def grad_mode() -> bool:
    return ag.is_grad_enabled()


@custom_function(lambda x: x * 3)
async def Sleepy(ctx: Any, g: Any) -> Any:
    """Take a second."""
    await asyncio.sleep(1.0)
    return g * 3


@service.function
async def sleepy(x: Any) -> Any:
    """A second in forward, and one in backward."""
    await asyncio.sleep(1.0)
    return Sleepy.apply(x)


# -------------------------------------------------------------------- what cannot be sent, or called


class Odd:
    pass


class Titled(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Odd(), r"argument 0 has type .*Odd; .*keep it on its worker and send a RemoteRef"),
        ([1, {2, 3}], r"argument 0\[1\] has type set; .*convert it first"),
        ({"a": [(Odd,)]}, r"argument 0\['a'\]\[0\]\[0\] has type type"),
        (Titled(a=1), r"argument 0 has type .*Titled; .*convert it to dict first"),
        (np.float32(1), r"argument 0 has type numpy.float32; .*ag.tensor"),
        ([np.ones(3)], r"argument 0\[0\] has type numpy.ndarray; .*ag.tensor"),
        ({"a": {1: 2}}, r"argument 0\['a'\] has a key of type int"),
    ],
)
async def test_what_cannot_be_sent_is_named_with_its_place(value: Any, text: str) -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        with pytest.raises(ArgumentTypeError, match=f"^calling echo on b: {text}"):
            await a.call("b", "echo", value)
        with pytest.raises(ArgumentTypeError, match=r"^calling echo on b: argument 'value'"):
            await a.call("b", "echo", value=[leaf(1), value])
        assert not ctx.send_nodes and not ctx.known_workers, "nothing was sent"
        assert not b.statistics().contexts


async def test_a_result_that_cannot_be_sent_is_an_error_of_the_function() -> None:
    own = dist.Service()
    own.function("odd")(lambda: {"a": [1, Odd()]})
    async with workers("a", "b", service=own) as (a, _):
        with pytest.raises(RemoteError, match=r"Error on Node b: odd: ArgumentTypeError: sending a result: it\['a'\]\[1\] has type .*Odd") as caught:
            await a.call("b", "odd")
        assert caught.value.function == "odd"


async def test_values_that_contain_themselves_or_are_too_deep_are_refused() -> None:
    loop: list[Any] = []
    loop.append([loop])
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    async with workers("a", "b", service=service) as (a, _):
        with pytest.raises(LimitError, match="calling echo on b: a value is nested too deep to be sent, or contains itself"):
            await a.call("b", "echo", loop)
        with pytest.raises(LimitError, match=r"nested deeper than Limits.depth=16"):
            await a.call("b", "echo", deep)
        with pytest.raises(ArgumentError, match="64 bits"):
            await a.call("b", "echo", 1 << 63)


async def test_a_function_that_is_not_there() -> None:
    async with workers("a", "b", service=service) as (a, _):
        for to in ("b", "a"):
            with pytest.raises(NotExposedError, match=f"^Error on Node {to}: no function 'nothing' is exposed") as caught:
                await a.call(to, "nothing")
            assert caught.value.path == (to,) and isinstance(caught.value, LookupError)
        with pytest.raises(NotExposedError, match=r"aiograd.nonsense"):
            await a.call("b", "aiograd.nonsense")
        with pytest.raises(ArgumentTypeError, match="takes names of a worker and of a function that it exposes, found function"):
            await a.call("b", echo, 1)  # type: ignore[arg-type]
        with pytest.raises(UnknownPeerError, match="'c'"):
            await a.call("c", "echo", 1)


async def test_wrong_arguments_are_refused_before_the_function_runs() -> None:
    ran: list[Any] = []
    own = dist.Service()

    @own.function
    async def strict(x: ag.Tensor, n: int = 3, *, secret: str = "hunter2") -> Any:  # noqa: S107 - a default that must not show
        ran.append(x)

    async with workers("a", "b", service=own) as (a, _), a.context():
        for args, kwargs, text in (
            ((), {}, r"calling strict\(x: Tensor, n: int = \.\.\., \*, secret: str = \.\.\.\): missing a required argument: 'x'"),
            ((1,), {}, "calling strict: argument 'x' is int; expected Tensor"),
            ((leaf(1, 2), leaf(1, 2)), {}, r"calling strict: argument 'n' is a Tensor of shape \[2\]; expected int"),
            ((leaf(1), 1), {"other": 2}, "unexpected keyword argument 'other'"),
            ((leaf(1), True), {}, "argument 'n' is bool; expected int"),
        ):
            with pytest.raises(RemoteError, match=f"^Error on Node b: .*{text}") as caught:
                await a.call("b", "strict", *args, **kwargs)
            assert caught.value.type_name == "ArgumentTypeError" and "hunter2" not in str(caught.value)
    assert not ran


async def test_what_a_function_raises_comes_back_as_a_remote_error() -> None:
    async with workers("a", "b", "c", service=service) as (a, _, _), a.context() as ctx:
        with pytest.raises(RemoteError, match=r"^Error on Node b: fail: ValueError: no such thing$") as caught:
            await a.call("b", "fail", "value")
        error = caught.value
        assert (error.worker, error.function, error.type_name, error.code, error.path) == ("b", "fail", "ValueError", "raised", ("b",))
        assert error.correlation_id
        with pytest.raises(RemoteError, match=r"^Error on Node b: Error on Node c: fail: TypeError: my own$") as caught:
            await a.call("b", "relay", "c", "fail", "type")
        assert (caught.value.worker, caught.value.function, caught.value.type_name, caught.value.path) == ("c", "fail", "TypeError", ("b", "c"))
        with pytest.raises(RemoteError, match=r"^Error on Node a: fail: KeyError: 'k'$"):
            await a.call("a", "fail", "key")
        x = leaf(2)
        with pytest.raises(RemoteError):
            await a.call("b", "relay", "c", "fail", x)
        assert not ctx.send_nodes, "a call that failed leaves no edge"
        await ctx.backward((await a.call("b", "square", x)).sum(), mode="fast")
        assert values(ctx.grads[x]) == [4], "and the context goes on"


async def test_a_call_that_raises_leaves_no_edge_that_a_fast_pass_would_wait_for() -> None:
    own = dist.Service()

    @own.function
    async def may_fail(x: Any, fails: bool) -> Any:
        y = x * x
        if fails:
            raise ValueError("on demand")
        return y

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x = leaf(3)
        with pytest.raises(RemoteError):
            await a.call("b", "may_fail", x, True)
        await ctx.backward((await a.call("b", "may_fail", x, False)).sum(), mode="fast", timeout=5)
        assert values(ctx.grads[x]) == [6]


# -------------------------------------------------------------------- where functions run


async def test_def_runs_on_the_executor_and_async_def_on_the_loop() -> None:
    own = dist.Service()
    names: dict[str, Any] = {}

    def note(name: str) -> None:
        context = dist.current_context()
        names[name] = threading.current_thread() is threading.main_thread(), dist.current_worker().name, context and context.id

    @own.function
    def plain(x: Any) -> Any:
        note("plain")
        return x * 2

    @own.function
    async def on_loop(x: Any) -> Any:
        note("on_loop")
        return x * 2

    @own.function
    def makes_coroutine(x: Any) -> Any:
        async def inner() -> Any:
            note("inner")
            return x * 2

        return inner()

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x = leaf(1)
        for name in ("plain", "on_loop", "makes_coroutine"):
            y = await a.call("b", name, x)
            await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [6]
        assert names == {"plain": (False, "b", ctx.id), "on_loop": (True, "b", ctx.id), "inner": (True, "b", ctx.id)}


async def test_def_functions_do_not_hold_the_loop() -> None:
    own = dist.Service()
    gate = threading.Event()
    own.function("block")(lambda: gate.wait(30))
    own.function("open")(gate.set)
    async with workers("a", "b", service=own) as (a, _):
        blocked = asyncio.ensure_future(a.call("b", "block"))
        await a.call("b", "open")
        assert await blocked is True


async def test_functions_wait_for_the_executor_in_the_order_in_which_they_came() -> None:
    own = dist.Service()
    gate = threading.Event()
    ran: list[int] = []

    @own.function
    def block(number: int) -> bool:
        ran.append(number)
        return gate.wait(30)

    async with ag.Engine(threads=1), workers("a", "b", service=own, limits=Limits(executor_queue=2)) as (a, b):
        calls = [asyncio.ensure_future(a.call("b", "block", number)) for number in range(20)]
        await until(lambda: b.statistics().peers[0].running == 20 and b._calls._on_executor == 2 if b.statistics().peers else False)
        assert b.statistics().bytes_held > 0, "those that wait hold their bytes"
        calls[10].cancel()
        await until(lambda: b.statistics().peers[0].running == 19)
        gate.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found] == [bool] * 10 + [asyncio.CancelledError] + [bool] * 9
        assert ran == [number for number in range(20) if number != 10] and b._calls._on_executor == 0


async def test_a_thousand_calls_of_a_function_that_runs_on_the_executor_are_all_served() -> None:
    own = dist.Service()
    own.function("double")(lambda x: 2 * x)
    async with ag.Engine(threads=1), workers("a", "b", service=own) as (a, _):
        assert await asyncio.gather(*(a.call("b", "double", number) for number in range(1000))) == [2 * number for number in range(1000)]


async def test_small_messages_beside_streams_wait_for_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from where a message is queued to where it is sent, calls and answers alike."""
    sent: Counter[int] = Counter()
    queued: dict[Outgoing, int] = {}
    waited: Counter[int] = Counter()
    put, take = SessionOutbox.put, SessionOutbox.take

    def noting_put(outbox: SessionOutbox, message: Outgoing) -> None:
        put(outbox, message)
        queued.setdefault(message, sent[id(outbox)])

    def noting_take(outbox: SessionOutbox) -> Any:
        taken = take(outbox)
        if taken is not None:
            message = taken[0]
            if message.total > outbox.frame_bytes:
                sent[id(outbox)] += 1
            else:
                waited[sent[id(outbox)] - queued[message]] += 1
        return taken

    monkeypatch.setattr(SessionOutbox, "put", noting_put)
    monkeypatch.setattr(SessionOutbox, "take", noting_take)
    frame = 1 << 14
    async with workers("a", "b", service=service, limits=Limits(frame_bytes=frame), board=Switchboard(high_water=2 * frame)) as (a, _):
        streams = [asyncio.ensure_future(a.call("b", "echo", ag.zeros(128 * frame // 4))) for _ in range(2)]
        await until(lambda: sum(sent.values()) > 10)
        calls = 0
        while not all(stream.done() for stream in streams):
            assert await a.call("b", "echo", calls) == calls
            calls += 1
        await asyncio.gather(*streams)
    assert sum(sent.values()) >= 4 * 128 and calls > 50 and waited.total() >= 2 * calls
    assert max(waited) <= 1, f"large frames that went before a small message: {waited}"


async def test_one_callers_state_does_not_reach_the_functions_of_another() -> None:
    async with workers("a", "b", service=service) as (a, b):
        with ag.no_grad():
            assert await a.call("b", "grad_mode") is False
            assert await a.call("a", "grad_mode") is False
        assert await a.call("b", "grad_mode") is True
        own = dist.Service()

        @own.function
        async def scope() -> Any:
            context = dist.current_context()
            return dist.current_worker().name, None if context is None else context.id

        b._core.service = a._core.service = own
        assert await a.call("b", "scope") == ("b", None)
        async with a.context() as ctx:
            assert await a.call("b", "scope") == ("b", ctx.id) and await a.call("a", "scope") == ("a", ctx.id)
            assert await b.call("a", "scope") == ("a", None), "this is no context of b"
            assert dist.current_context() is ctx
        assert await a.call("b", "scope") == ("b", None)


# -------------------------------------------------------------------- contexts and grad mode


async def test_a_call_outside_of_any_context_refuses_what_would_lose_its_gradient() -> None:
    async with workers("a", "b", service=service) as (a, b):
        x = leaf(1)
        with pytest.raises(NoContextError, match=r"calling square on b with arguments that require grad outside of any context.*no_grad\(\)"):
            await a.call("b", "square", x)
        with pytest.raises(NoContextError):
            await a.call("b", "echo", {"deep": [(x * 2,)]})
        with ag.no_grad():
            y = await a.call("b", "square", x)
        assert not y.requires_grad and y.is_leaf
        y = await a.call("b", "square", x.detach())
        assert not y.requires_grad
        assert b.statistics().contexts == 0
        async with b.context():  # of another worker: still none of a's
            with pytest.raises(NoContextError):
                await a.call("b", "square", x)


async def test_parameters_over_there_come_back_without_grad_outside_of_a_context() -> None:
    own = dist.Service()
    weight = leaf(2)
    own.function("scale")(lambda x: x * weight)
    async with workers("a", "b", service=own) as (a, _):
        y = await a.call("b", "scale", ag.tensor([3.0]))
        assert values(y) == [6] and not y.requires_grad and y.is_leaf


async def test_no_grad_travels_with_the_call() -> None:
    own = dist.Service()
    weight = leaf(2)

    @own.function
    async def scale(x: Any) -> Any:
        y = x * weight
        with ag.enable_grad():
            return y.requires_grad, x * weight

    async with workers("a", "b", "c", services={"a": service, "b": service, "c": own}) as (a, b, c), a.context() as ctx:
        with ag.no_grad():
            recorded, y = await a.call("c", "scale", leaf(1))
            assert not recorded and not y.requires_grad, "what the function records in spite of it is cut off"
            recorded, y = await a.call("b", "relay", "c", "scale", leaf(1))
            assert not recorded and not y.requires_grad, "two workers away as well"
        assert not ctx.send_nodes and not ctx.recv_nodes
        assert not view(b, ctx).send_nodes and not view(c, ctx).send_nodes
        recorded, y = await a.call("c", "scale", leaf(1))
        assert recorded and y.requires_grad


async def test_no_grad_in_the_function_cuts_the_graph_there() -> None:
    own = dist.Service()

    @own.function
    @ag.no_grad()
    def frozen(x: Any) -> Any:
        return x * 2

    @own.function
    async def half(x: Any) -> Any:
        with ag.no_grad():
            y = x * 2
        return x * y

    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(3)
        assert not (await a.call("b", "frozen", x)).requires_grad
        y = await a.call("b", "half", x)
        assert y.requires_grad
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [6]
        assert len(view(b, ctx).recv_nodes) == 2 and len(view(b, ctx).send_nodes) == 1


async def test_leaving_the_context_ends_a_call_that_runs_in_it() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c):
        for call in (lambda: a.call("b", "wait_forever"), lambda: a.call("b", "relay", "c", "wait_forever"), lambda: a.call("a", "wait_forever")):
            async with a.context() as ctx:
                waiting = asyncio.ensure_future(call())
                await until(lambda: any(len(each.calls) for worker in (a, b, c) for each in worker._contexts))
                for _ in range(50):
                    await asyncio.sleep(0)
            with pytest.raises(ContextReleasedError, match=r"context a:.* has been released"):
                await waiting
            await settled(a, b, c)
            assert ctx.is_released


async def test_a_result_that_comes_after_the_context_was_left_is_an_error() -> None:
    own = dist.Service()
    gate = asyncio.Event()

    @own.function
    async def stubborn(x: Any) -> Any:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return x

    async with workers("a", "b", service=own) as (a, b):
        async with a.context():
            waiting = asyncio.ensure_future(a.call("b", "stubborn", leaf(1)))
            await until(lambda: any(len(each.calls) for each in b._contexts))
        with pytest.raises(ContextReleasedError):
            await waiting


# -------------------------------------------------------------------- who calls whom


async def test_a_worker_calls_itself() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        x = leaf(3)
        y = await a.call("a", "square", x)
        assert y is not x and len(ctx.send_nodes) == 2 and len(ctx.recv_nodes) == 2 and ctx.known_workers == {"a"}
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [6] and b.statistics().contexts == 0


async def test_a_function_calls_its_caller_back() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        x = leaf(3)
        y = await a.call("b", "relay", "a", "square", x)
        assert values(y) == [9]
        assert [len(ctx.send_nodes), len(ctx.recv_nodes)] == [2, 2]
        there = view(b, ctx)
        assert [len(there.send_nodes), len(there.recv_nodes)] == [2, 2]
        await ctx.backward((y * x).sum())
        assert values(ctx.grads[x]) == [27]


async def test_calls_go_round_a_ring_of_three() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        x = leaf(2)
        y = await a.call("b", "twice_relayed", "c", "a", x)  # a → b → c → a
        z = await a.call("c", "twice_relayed", "b", "c", y)  # a → c → b → c
        assert values(z) == [16]
        await ctx.backward(z.sum())
        assert values(ctx.grads[x]) == [32]
        assert ctx.known_workers == {"b", "c"} and view(b, ctx).known_workers == {"a", "c"} and view(c, ctx).known_workers == {"a", "b"}


async def test_calls_that_never_end_calling_each_other_are_stopped() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context():
        own = dist.Service()
        depth: list[int] = []

        @own.function
        async def ping(n: int) -> int:
            depth.append(n)
            worker = dist.current_worker()
            return await worker.call("b" if worker.name == "a" else "a", "ping", n + 1)  # type: ignore[no-any-return]

        a._core.service = b._core.service = own
        with pytest.raises(LimitError, match="calls are nested 64 deep already"):
            await a.call("b", "ping", 0)
        assert depth == list(range(64))


async def test_one_function_runs_for_many_calls_at_a_time() -> None:
    own = dist.Service()
    running = most = 0

    @own.function
    async def busy(x: Any, n: int) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(n % 7):
            await asyncio.sleep(0)
        running -= 1
        return x * n

    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(1, 2)
        results = await asyncio.gather(*(a.call("b", "busy", x, n) for n in range(50)))
        assert most > 10 and [values(y) for y in results] == [[n, 2 * n] for n in range(50)]
        await ctx.backward(sum(results[1:], results[0]).sum())
        assert values(ctx.grads[x]) == [1225, 1225]
        assert b.statistics().calls == 0


# -------------------------------------------------------------------- time


async def test_independent_calls_and_local_work_overlap_in_forward_and_in_backward(virtual_clock: VirtualClock) -> None:
    loop, board = asyncio.get_running_loop(), Switchboard()
    board.latency = 0.01
    async with workers("a", "b", "c", service=service, board=board) as (a, *_), a.context() as ctx:
        x = leaf(1, 2)

        async def here() -> Any:
            await asyncio.sleep(1.0)
            return Sleepy.apply(x)

        began = loop.time()
        results = await asyncio.gather(a.call("b", "sleepy", x), a.call("c", "sleepy", x), a.call("b", "sleepy", x), here())
        assert 1.0 < loop.time() - began < 1.2, "four times a second, side by side"
        began = loop.time()
        await ctx.backward(sum(results[1:], results[0]).sum())
        assert 1.0 < loop.time() - began < 1.3
        assert values(ctx.grads[x]) == [12, 12]


async def test_a_deadline_shrinks_from_worker_to_worker(virtual_clock: VirtualClock) -> None:
    left: list[float] = []
    own = dist.Service()

    @own.function
    async def deeper(names: list[str]) -> None:
        left.append(dist.current_worker()._core.time_for(None))
        if names:
            await dist.current_worker().call(names[0], "deeper", names[1:], timeout=1000.0)

    async with workers("a", "b", "c", service=own) as (a, *_):
        await a.call("b", "deeper", ["c", "a", "b"], timeout=10.0)
    assert len(left) == 4 and left[0] < 10 and all(before > after > 9 for before, after in itertools.pairwise(left)), left


async def test_a_call_that_is_nested_ends_before_the_one_it_serves(virtual_clock: VirtualClock) -> None:
    ended: list[tuple[str, float]] = []
    own = dist.Service()

    @own.function
    async def outer() -> str:
        try:
            await dist.current_worker().call("c", "inner", timeout=60.0)
        except DeadlineError as error:
            ended.append(("inner expired", asyncio.get_running_loop().time()))
            return str(error)
        return ""

    @own.function
    async def inner() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append(("inner cancelled", asyncio.get_running_loop().time()))
            raise

    async with workers("a", "b", "c", service=own) as (a, *_):
        text = await a.call("b", "outer", timeout=2.0)
        assert "did not end within" in text, "the answer still came in time"
    assert {name for name, _ in ended} == {"inner cancelled", "inner expired"} and all(1.5 < when < 2.0 for _, when in ended), ended


@pytest.mark.parametrize(("shrinks", "text"), [(False, "to worker 'b'"), (True, r"Error on Node b: .*to worker 'c'")])
async def test_without_shrinking_the_error_of_a_nested_call_comes_too_late(virtual_clock: VirtualClock, shrinks: bool, text: str) -> None:
    with contextlib.nullcontext() if shrinks else without("shrink_deadline"):
        async with workers("a", "b", "c", service=service) as (a, *_):
            with pytest.raises(DeadlineError, match=text):
                await a.call("b", "relay", "c", "wait_forever", timeout=2.0)


async def test_cancelling_a_call_cancels_what_runs_for_it_two_workers_away(virtual_clock: VirtualClock) -> None:
    events: list[str] = []
    own = dist.Service()

    @own.function
    async def outer() -> None:
        try:
            await dist.current_worker().call("c", "inner")
        except asyncio.CancelledError:
            events.append("outer")
            raise

    @own.function
    async def inner() -> None:
        events.append("began")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("inner")
            raise

    async with workers("a", "b", "c", service=own) as (a, b, c), a.context():
        call = asyncio.ensure_future(a.call("b", "outer"))
        await until(lambda: "began" in events)
        await cancel(call)
        await until(lambda: len(events) == 3)
        assert not any(worker.statistics().calls for worker in (a, b, c))
    assert virtual_clock.time() < 1.0
    assert sorted(events) == ["began", "inner", "outer"]


async def test_cancelling_a_call_to_oneself_cancels_the_function(virtual_clock: VirtualClock) -> None:
    async with workers("a", service=service) as (a,), a.context() as ctx:
        call = asyncio.ensure_future(a.call("a", "wait_forever"))
        await until(lambda: len(ctx.calls) == 1)
        await cancel(call)
        await until(lambda: not ctx.calls)


@pytest.mark.parametrize("timeout", [0, -1.0, 3601.0, float("nan"), float("inf")])
async def test_timeouts_that_make_no_sense(timeout: float) -> None:
    async with workers("a", "b", service=service) as (a, _):
        with pytest.raises(ArgumentError, match=r"expected seconds above 0 and at most 3600 \(Limits.max_deadline\)"):
            await a.call("b", "echo", 1, timeout=timeout)


@pytest.mark.parametrize("timeout", ["5", True, [5], b"5", 5j])
async def test_timeouts_that_are_no_numbers(timeout: Any) -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(1, 2)
        for ask in (
            lambda: a.call("b", "echo", 1, timeout=timeout),
            lambda: a.remote("b", "Anything", timeout=timeout),
            lambda: ctx.backward(x.sum(), timeout=timeout),
            lambda: dist.RemoteModule(a, "a", a.refer(object())).state_dict(timeout=timeout),
        ):
            with pytest.raises(ArgumentTypeError, match=rf"timeout=.*: expected seconds above 0.*, found {type(timeout).__name__}$"):
                await ask()
    with pytest.raises(ArgumentTypeError, match="start_timeout=.*: expected seconds"):
        dist.LocalCluster(1, service="module:name", start_timeout=timeout)


# -------------------------------------------------------------------- devices


async def test_values_and_gradients_cross_between_device_and_host() -> None:
    own = dist.Service()
    with ToyDevice() as toy:
        weight = ag.tensor([2.0, 3.0]).to(toy.name).requires_grad_()

        @own.function
        async def on_device(x: ag.Tensor) -> ag.Tensor:
            return x.to(toy.name) * weight

        @own.function
        async def device_of(x: ag.Tensor) -> str:
            return x.device

        async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
            x = leaf(5, 7)
            y = await a.call("b", "on_device", x)
            assert y.device == "cpu" and values(y) == [10, 21]
            await ctx.backward((y * y).sum())
            assert values(ctx.grads[x]) == [40, 126]
            grad = view(b, ctx).grads[weight]
            assert grad.device == toy.name and values((await grad).cpu()) == [100, 294]

            there = x.to(toy.name)  # from a device here, to the host there
            assert await a.call("b", "device_of", there) == "cpu"
            z = await a.call("b", "on_device", there * there)
            await ctx.backward(z.sum())
            assert values(ctx.grads[x]) == [40 + 20, 126 + 42]


async def test_a_device_that_is_slow_delays_only_its_own_call() -> None:
    own = dist.Service()
    with ToyDevice() as toy:

        @own.function
        async def on_device(x: ag.Tensor) -> ag.Tensor:
            return x.to(toy.name) * 2

        @own.function
        async def plain(x: ag.Tensor) -> ag.Tensor:
            return x * 3

        async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
            x = leaf(1)
            with toy.held():
                slow = asyncio.ensure_future(a.call("b", "on_device", x))
                fast = await a.call("b", "plain", x)
                assert not slow.done()
            await ctx.backward((await slow + fast).sum())
            assert values(ctx.grads[x]) == [5]
            toy.fail("mul")
            with pytest.raises(RemoteError, match=r"Error on Node b") as caught:
                await a.call("b", "on_device", x)
            assert caught.value.type_name in ("ToyError", "DeviceError")


# -------------------------------------------------------------------- peers that do not keep to the rules


async def test_malformed_calls_are_refused() -> None:
    async with workers("a", "b", service=service) as (a, b):
        heading = (b"k" * 16, "a", (-1,), 0, True)
        sound = ("echo", [1], {}, True, None)
        assert await a.endpoint.request("b", Kind.CALL, sound, 5) == (1, 0)
        for spoil in (
            3,
            sound[:4],
            (3, *sound[1:]),
            ("echo", (1,), {}, True, None),
            ("echo", [1], [], True, None),
            ("echo", [1], {}, 1, None),
            *((*sound[:4], bad) for bad in (1, heading[:4], *_spoilt(heading))),
        ):
            with pytest.raises(ProtocolError):
                await a.endpoint.request("b", Kind.CALL, spoil, 5)
        assert b.statistics().contexts == 0, "a malformed call opens nothing"


def _spoilt(heading: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    bad: list[tuple[int, Any]] = [
        (0, b"short"), (0, "k" * 16), (1, ""), (1, "x" * 129), (1, 3), (2, ()), (2, (1,)), (2, (0,)), (2, [-1]), (2, (-1.0,)), (2, (-1,) * 65),
        (3, -1), (3, None), (3, True), (4, 1),
    ]  # fmt: skip
    return [(*heading[:i], value, *heading[i + 1 :]) for i, value in bad]


async def test_claims_for_gradients_that_make_no_sense_are_refused() -> None:
    from aiograd.distributed.rpc.codec import WireTensor

    async with workers("a", "b", service=service) as (a, b):
        tensor = WireTensor(np.ones(2), True)
        for grad, heading in ((True, None), (True, (b"k" * 16, "a", (-1,), 0, True)), (False, (b"k" * 16, "a", (-1,), 5, True))):
            with pytest.raises(ProtocolError, match="claim gradients"):
                await a.endpoint.request("b", Kind.CALL, ("echo", [tensor], {}, grad, heading), 5)
        context = (b"q" * 16, "a", (-1,), 5, True)
        assert (await a.endpoint.request("b", Kind.CALL, ("echo", [tensor], {}, True, context), 5))[1] > 0
        with pytest.raises(ProtocolError, match="claim gradients"):  # the edge exists
            await a.endpoint.request("b", Kind.CALL, ("echo", [tensor], {}, True, context), 5)
        for each in list(b._contexts):
            await b._leases.release(each)


async def test_an_answer_that_makes_no_sense_is_refused() -> None:
    from aiograd.distributed.rpc.codec import WireTensor

    async with workers("a", "b", service=service) as (a, b):
        answers: list[Any] = [3, (1,), (1, None), (WireTensor(np.ones(2), True), 0)]

        async def answer(caller: Any, value: Any, timeout: float) -> Any:
            return answers[0]

        b._core.handlers[Kind.CALL] = answer
        while answers:
            async with a.context() as ctx:
                with pytest.raises(ProtocolError):
                    await a.call("b", "echo", leaf(1))
                assert not ctx.recv_nodes
                ctx.known_workers.clear()
            answers.pop(0)


async def test_calls_of_a_worker_that_is_not_open() -> None:
    board = Switchboard()
    worker = dist.Worker("a", transport=board.transport("a"))
    with pytest.raises(DistributedError, match="worker 'a' is not open"):
        _ = worker.url
    for _ in range(2):
        with pytest.raises(DistributedError, match="worker 'a' is not open"):
            await worker.call("b", "echo")
        async with worker if worker._url is None else contextlib.nullcontext():
            assert worker.url
