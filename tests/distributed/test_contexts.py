"""Contexts: who opens them, who may use them, what follows the running code, and that nothing of them is left when they are over."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import re
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.autograd import context_table as contexts_module
from aiograd.distributed.autograd.context_table import ContextTable
from aiograd.distributed.kinds import Kind
from aiograd.distributed.messages.calls import CallHeader
from aiograd.distributed.messages.passes import Lease
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import (
    ArgumentTypeError,
    ContextError,
    ContextNotFoundError,
    ContextReleasedError,
    DistributedError,
    LimitError,
    NoContextError,
    Overloaded,
    RemoteError,
    UnknownPeerError,
    WorkerLostError,
)
from aiograd.testing.virtual_clock import VirtualClock
from tests.chaos.broken import without
from tests.distributed.memory import Switchboard
from tests.distributed.passes_kit import Net
from tests.distributed.workers import SECRET, busy, exposing, knows, leaf, relay, settled, square, until, values, view, workers

ME = PeerIdentity("a", b"i" * 16, "default")
OTHER = PeerIdentity("x", b"j" * 16, "tenant")

service = exposing(square, relay)
weight = leaf(2, 3)


@service.function
async def scale(x: Any) -> Any:
    return x * weight


@service.function
async def where() -> str | None:
    context = dist.current_context()
    return None if context is None else context.id


class Gated(ag.Function):
    """Its backward waits for a gate."""

    gate: asyncio.Event
    reached: asyncio.Event

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        Gated.reached.set()
        await Gated.gate.wait()
        return g


@service.function
async def gated(x: Any) -> Any:
    return Gated.apply(x)


@pytest.fixture
async def gate() -> asyncio.Event:
    Gated.gate, Gated.reached = asyncio.Event(), asyncio.Event()
    return Gated.gate


def table(**options: Any) -> ContextTable:
    drawn = iter(range(1000))
    return ContextTable("b", b"i" * 16, Limits(**options), lambda count: next(drawn).to_bytes(count, "big"), _no_backward)


async def _no_backward(*args: Any) -> None:
    raise NotImplementedError


def header(key: bytes = b"k" * 16, origin: str = "a", opens: bool = True) -> CallHeader:
    return CallHeader(key, origin, (-1,), 0, opens)


# -------------------------------------------------------------------- the block


async def test_a_context_is_current_in_its_block_and_released_everywhere_after_it() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c):
        assert dist.current_context() is None
        with pytest.raises(DistributedError, match=r"neither in a handler of a worker nor inside `async with worker.context"):
            dist.current_worker()
        async with a.context() as ctx:
            assert dist.current_context() is ctx and dist.current_worker() is a
            assert not knows(b, ctx), "nobody knows it before the first call"
            await a.call("b", "relay", "c", "scale", leaf(1, 1))
            assert [worker.statistics().contexts for worker in (a, b, c)] == [1, 1, 1]
        assert dist.current_context() is None and ctx.is_released
        assert not any(knows(worker, ctx) for worker in (a, b, c)), "released when the block is left, also where only another worker called"


async def test_ids_are_unguessable_printed_with_the_worker_and_never_used_again() -> None:
    async with workers("a", "b", service=service) as (a, b):
        keys: set[bytes] = set()
        for worker in (a, b) * 20:
            async with worker.context() as ctx:
                assert re.fullmatch(rf"{worker.name}:[0-9a-f]{{32}}", ctx.id) and len(ctx.key) == 16
                assert ctx.origin == worker.name and ctx.id in repr(ctx)
                keys.add(ctx.key)
        assert len(keys) == 40
        bits = np.unpackbits(np.frombuffer(b"".join(sorted(keys)), np.uint8).reshape(40, 16), axis=1)
        assert 10 <= bits.sum(0).min() and bits.sum(0).max() <= 30, "128 bits, none of which says anything"


async def test_contexts_do_not_nest_but_follow_each_other() -> None:
    async with workers("a", "b", service=service) as (a, b):
        async with a.context() as first:
            with pytest.raises(ContextError, match=f"has an autograd context already, {first.id}, and contexts do not nest"):
                await a.context().__aenter__()
            assert dist.current_context() is first
            async with b.context() as other:  # of another worker in this process
                assert dist.current_context() is other and other.here == "b"
            assert dist.current_context() is first
        async with a.context() as second:
            assert second.id != first.id
        block = a.context()
        async with block:
            pass
        with pytest.raises(ContextError, match="has been entered before"):
            await block.__aenter__()


async def test_a_function_works_in_the_context_of_its_caller_and_opens_none_of_its_own() -> None:
    own = dist.Service()

    @own.function
    async def nest() -> None:
        async with dist.current_worker().context():
            pass

    async with workers("a", "b", service=own) as (a, _):
        async with a.context():
            with pytest.raises(ContextError, match="a function that is called remotely has that of its caller"):
                await a.call("b", "nest")
        await a.call("b", "nest")


async def test_an_error_in_the_block_releases_the_context_and_goes_on() -> None:
    async with workers("a", "b", service=service) as (a, b):
        with pytest.raises(ZeroDivisionError):
            async with a.context():
                await a.call("b", "square", leaf(1))
                raise ZeroDivisionError
        assert b.statistics().contexts == 0 and dist.current_context() is None


async def test_a_block_that_is_left_in_another_task_says_so_and_is_released() -> None:
    async with workers("a", "b", service=service) as (a, _):
        block = a.context()
        ctx = await asyncio.create_task(block.__aenter__())
        with pytest.raises(ContextError, match="in another task than the one it was entered in"):
            await block.__aexit__(None, None, None)
        assert ctx.is_released


async def test_a_worker_that_is_not_open_has_no_contexts() -> None:
    worker = dist.Worker("a", transport=Switchboard().transport("a"))
    for _ in range(2):
        with pytest.raises(DistributedError, match="worker 'a' is not open"):
            await worker.context().__aenter__()
        async with worker if worker._url is None else contextlib.nullcontext():
            pass


async def test_within_makes_a_context_current_in_code_outside_of_its_block() -> None:
    async with workers("a", "b", service=service) as (a, b):
        opened = asyncio.Queue[Any]()
        results = asyncio.Queue[Any]()

        async def outside() -> None:
            ctx = await opened.get()
            assert dist.current_context() is None
            with pytest.raises(NoContextError):
                await a.call("b", "square", leaf(1))
            with b.within(view(b, ctx)):
                assert dist.current_worker() is b
            with pytest.raises(ContextError, match="that is how worker a sees a context, and this is worker b"), b.within(ctx):
                pass
            with a.within(ctx):
                assert dist.current_context() is ctx
                results.put_nowait(await a.call("b", "square", leaf(3)))
            assert dist.current_context() is None

        task = asyncio.create_task(outside())
        async with a.context() as ctx:
            await a.call("b", "square", leaf(1))
            opened.put_nowait(ctx)
            y = await results.get()
            await ctx.backward(y.sum())
            await task


# -------------------------------------------------------------------- it follows the running code


async def test_the_context_follows_child_tasks_gather_and_executor_hops() -> None:
    async with workers("a", "b", service=service) as (a, _):
        async with a.context() as ctx:
            x = leaf(1, 2)

            async def child() -> Any:
                assert dist.current_context() is ctx
                return await asyncio.create_task(a.call("b", "scale", x))

            assert await ag.offload(dist.current_context) is ctx
            assert await asyncio.to_thread(dist.current_context) is ctx
            parts = await asyncio.gather(child(), a.call("b", "scale", x), ag.offload(lambda: x * 2))
            async with asyncio.TaskGroup() as group:
                more = group.create_task(child())
            assert await a.call("b", "where") == await a.call("b", "relay", "a", "where") == ctx.id
            await ctx.backward((sum(parts[1:], parts[0]) + more.result()).sum())
            assert values(ctx.grads[x]) == [2 * 3 + 2, 3 * 3 + 2]
        assert await a.call("b", "where") is None


async def test_a_task_that_outlives_the_block_is_told() -> None:
    async with workers("a", "b", service=service) as (a, _):
        left = asyncio.Event()

        async def later() -> str:
            await left.wait()
            with pytest.raises(ContextReleasedError, match="has been released on a; open another"):
                await a.call("b", "square", leaf(1))
            async with a.context() as fresh:  # the old one is over, so this one does not nest
                return await a.call("b", "where") if dist.current_context() is fresh else ""

        async with a.context():
            task = asyncio.create_task(later())
        left.set()
        assert (await task).startswith("a:")


async def test_contexts_on_several_workers_at_the_same_time() -> None:
    async with workers("a", "b", "c", service=service) as everybody:

        async def train(worker: dist.Worker, other: str, third: str, n: int) -> None:
            async with worker.context() as ctx:
                x = leaf(n, 1)
                y = await worker.call(other, "relay", third, "scale", x)
                assert await worker.call(third, "where") == ctx.id
                z = await worker.call(other, "square", y)
                await ctx.backward(z.sum())
                assert values(ctx.grads[x]) == [2 * 4 * n, 2 * 9]

        names = ["a", "b", "c"]
        await asyncio.gather(
            *(train(everybody[i % 3], names[(i + 1) % 3], names[(i + 2) % 3], i) for i in range(1, 31)),
        )
        assert not any(map(busy, everybody))


async def test_contexts_that_meet_at_one_parameter_keep_their_gradients_apart() -> None:
    async with workers("a", "b", service=service) as (a, b):
        seen: list[list[float]] = []

        async def user(n: int) -> None:
            async with a.context() as ctx:
                y = await a.call("b", "scale", ag.tensor([float(n), 1.0]))
                await ctx.backward(y.sum())
                await asyncio.sleep(0)
                seen.append(values(view(b, ctx).grads[weight]))

        await asyncio.gather(*map(user, range(20)))
        assert sorted(seen) == [[float(n), 1.0] for n in range(20)] and weight.grad is None


# -------------------------------------------------------------------- gradients


async def test_gradients_belong_to_the_context_and_add_up_over_its_passes() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        x, unused = leaf(1, 2), leaf(5)
        x.grad = ag.tensor([7.0, 7.0])
        for n in (1, 2, 3):
            await ctx.backward((await a.call("b", "scale", x)).sum())
            assert values(ctx.grads[x]) == [2 * n, 3 * n] and values(view(b, ctx).grads[weight]) == [n, 2 * n]
        assert values(x.grad) == [7, 7] and weight.grad is None, "no grad attribute was touched"
        assert list(ctx.grads) == [x] and len(ctx.grads) == 1 and x in ctx.grads and unused not in ctx.grads
        assert ctx.grads.get(unused) is None and dict(ctx.grads)[x] is ctx.grads[x]
        with pytest.raises(KeyError, match=r"no backward pass of this context has reached this Tensor of shape \[1\] on this worker"):
            ctx.grads[unused]
        with pytest.raises(KeyError):
            ctx.grads[x * 2]
        with pytest.raises(ArgumentTypeError, match="found by leaf Tensor, not by str"):
            ctx.grads["x"]
        assert "x" not in ctx.grads and repr(ctx.grads) == "<gradients of 1 leaves>"


async def test_gradients_stay_readable_after_the_block() -> None:
    async with workers("a", "b", service=service) as (a, _):
        async with a.context() as ctx:
            x = leaf(1, 2)
            await ctx.backward((await a.call("b", "scale", x)).sum())
        assert values(ctx.grads[x]) == [2, 3]


async def test_the_gradient_of_a_leaf_that_is_gone_is_not_lost_for_others() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(1, 2)
        await ctx.backward((await a.call("b", "scale", leaf(3, 4) * x)).sum())
        gc.collect()
        assert values(ctx.grads[x]) == [6, 12] and len(ctx.grads) == 1


# -------------------------------------------------------------------- who knows whom


async def test_workers_know_whom_they_have_sent_messages_to() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        await a.call("b", "where")
        assert ctx.known_workers == {"b"} and view(b, ctx).known_workers == set(), "an answer without gradients tells the caller nothing"
        await a.call("b", "relay", "c", "scale", leaf(1, 1))
        assert ctx.known_workers == {"b"} and view(b, ctx).known_workers == {"a", "c"} and view(c, ctx).known_workers == {"b"}
        with pytest.raises(UnknownPeerError):
            await a.call("nobody", "where")


async def test_leaving_a_context_does_not_wait_for_a_worker_that_does_not_exist(virtual_clock: VirtualClock) -> None:
    async with workers("a", "b", service=service) as (a, _), a.context():
        with pytest.raises(UnknownPeerError):
            await a.call("nobody", "where")
    assert virtual_clock.time() < 0.1


async def test_closing_a_worker_with_many_contexts_waits_once_for_a_peer_that_is_silent(virtual_clock: VirtualClock) -> None:
    board = Switchboard()
    async with workers("a", "b", service=service, board=board, idle=False) as (a, _):

        async def hold() -> None:
            async with a.context():
                await a.call("b", "square", leaf(1))
                held.append(1)
                await asyncio.Event().wait()

        held: list[int] = []
        tasks = [asyncio.create_task(hold()) for _ in range(20)]
        await until(lambda: len(held) == 20)
        board.passes = lambda channel, frame: False
        began = asyncio.get_running_loop().time()
        await a.aclose()
        assert 1 < asyncio.get_running_loop().time() - began < 4, "not 20 times as long as for one"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# -------------------------------------------------------------------- errors of look-up


def requests_about(key: bytes) -> list[tuple[Kind, Any]]:
    """One message of each kind that names a context, but is no call."""
    return [
        (Kind.MARK, (key, "a", 1, [7])),
        (Kind.GRADIENT, (key, "a", 1, (7, [None], 0), 0, [])),
        (Kind.COMMIT, (key, "a", 1)),
        (Kind.ABORT, (key, "a", 1, "why")),
        (Kind.OUTCOME, (key, "a", 1)),
        (Kind.RELEASE, (key,)),
    ]


async def test_an_unknown_id_creates_nothing_whatever_names_it() -> None:
    async with workers("a", "b", service=service) as (a, b):
        for kind, value in requests_about(b"g" * 16):
            with pytest.raises(ContextNotFoundError, match="Error on Node b: worker b knows no such autograd context"):
                await a.endpoint.request("b", kind, value, 5)
        with pytest.raises(ContextNotFoundError):  # a call that does not say that it opens
            await a.endpoint.request("b", Kind.CALL, ("where", [], {}, True, (b"h" * 16, "a", (-1,), 0, False)), 5)
        with pytest.raises(ContextNotFoundError):  # nobody opens a context in b's name on b
            await a.endpoint.request("b", Kind.CALL, ("where", [], {}, True, (b"h" * 16, "b", (-1,), 0, True)), 5)
        assert await a.endpoint.request("b", Kind.RENEW, ([(b"g" * 16, 1)],), 5) is True
        assert b.statistics().contexts == 0


async def test_a_released_context_is_named_as_such_to_those_who_used_it() -> None:
    async with workers("a", "b", service=service) as (a, b):
        async with a.context() as ctx:
            y = await a.call("b", "scale", leaf(1, 1))
        for kind, value in requests_about(ctx.key):
            with pytest.raises(ContextReleasedError, match="Error on Node b: the context has been released on b"):
                await a.endpoint.request("b", kind, value, 5)
        late = ("scale", [], {}, True, (ctx.key, "a", (-1,), 0, True))
        with pytest.raises(ContextReleasedError):  # a call that is late does not open it again
            await a.endpoint.request("b", Kind.CALL, late, 5)
        assert b.statistics().contexts == 0
        with pytest.raises(ContextReleasedError, match="has been released on a; open another with"):
            ctx.backward(y.sum())
        with pytest.raises(ContextReleasedError, match="no longer valid"):
            await y.sum().backward()


async def test_without_tombstones_a_late_call_opens_the_context_again() -> None:
    with without("tombstone"):
        async with workers("a", "b", service=service) as (a, b):
            async with a.context() as ctx:
                await a.call("b", "where")
            await a.endpoint.request("b", Kind.CALL, ("where", [], {}, True, (ctx.key, "a", (-1,), 0, True)), 5)
            assert b.statistics().contexts == 1
            await a.endpoint.request("b", Kind.RELEASE, (ctx.key,), 5)


async def test_a_call_that_is_overtaken_by_the_release_of_its_context_does_not_open_it() -> None:
    ran: list[int] = []
    own = dist.Service()
    own.function("note")(lambda x: ran.append(x.size))
    async with workers("a", "b", service=own, board=Switchboard(high_water=1 << 16)) as (a, b):
        async with a.context():
            call = asyncio.ensure_future(a.call("b", "note", ag.ones((3_000_000,), requires_grad=True)))
            await until(lambda: any(peer.outstanding for peer in a.statistics().peers))
        with pytest.raises(ContextReleasedError):
            await call
        assert not ran and b.statistics().contexts == 0


async def test_only_those_who_opened_a_context_release_it() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        y = await a.call("b", "scale", leaf(1, 1))
        assert await c.endpoint.request("b", Kind.RELEASE, (ctx.key,), 5) is True
        assert await c.endpoint.request("a", Kind.RELEASE, (ctx.key,), 5) is True
        assert knows(b, ctx) and not ctx.is_released
        await ctx.backward(y.sum())


async def test_a_callee_that_leaves_takes_its_call_back_but_not_the_originators() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        await a.call("b", "relay", "c", "square", leaf(1))
        await a.call("c", "square", leaf(1))
        there = view(c, ctx)
        assert {name for name, _ in there.openers} == {"a", "b"}
        await b._leases.release(view(b, ctx))
        assert {name for name, _ in there.openers} == {"a"} and knows(c, ctx), "a still needs it there"
        with pytest.raises(ContextReleasedError, match="Error on Node b"):
            await a.call("b", "where")


# -------------------------------------------------------------------- the table by itself


def test_a_context_is_entered_only_by_who_may() -> None:
    contexts = table()
    with pytest.raises(ContextNotFoundError):
        contexts.enter(ME, header(opens=False), 0.0)
    with pytest.raises(ContextNotFoundError):
        contexts.enter(ME, header(origin="b"), 0.0)
    assert len(contexts) == 0
    context = contexts.enter(ME, header(), 0.0)
    assert contexts.enter(ME, header(opens=False), 1.0) is context is contexts.find(b"k" * 16, ME, 1.0)
    assert (context.origin, context.principal, context.here, context.id) == ("a", "default", "b", f"a:{'6b' * 16}")
    for key in (b"k" * 16, b"q" * 16):
        with pytest.raises(ContextNotFoundError) as caught:
            contexts.find(key, OTHER, 1.0)
        with pytest.raises(ContextNotFoundError, match=re.escape(str(caught.value))):
            contexts.enter(OTHER, header(key, opens=False), 1.0)
    assert len(contexts) == 1
    own = contexts.enter(OTHER, header(), 1.0)  # of the same id, and another one
    assert own is not context and own.principal == "tenant" and contexts.find(b"k" * 16, OTHER, 1.0) is own
    contexts.renew(OTHER, [Lease(b"k" * 16, 7)], 2.0)
    assert (own.counter, context.counter) == (7, 0)
    contexts.remove(own, 3.0)
    assert contexts.find(b"k" * 16, ME, 3.0) is context and len(contexts) == 1


def test_quotas_of_contexts() -> None:
    contexts = table(contexts_per_principal=2, contexts=3)
    mine = [contexts.enter(ME, header(bytes([n]) * 16), 0.0) for n in range(2)]
    with pytest.raises(Overloaded, match=r"has 2 open contexts for this principal \(Limits.contexts_per_principal=2\)"):
        contexts.enter(ME, header(), 0.0)
    contexts.enter(OTHER, header(b"x" * 16), 0.0)
    with pytest.raises(Overloaded, match=r"and 3 in all \(Limits.contexts=3\)"):
        contexts.enter(OTHER, header(b"y" * 16), 0.0)
    contexts.remove(mine[0], 1.0)
    assert not contexts.remove(mine[0], 1.0)
    contexts.enter(ME, header(), 1.0)


def test_tombstones_last_as_long_as_messages_may_be_late() -> None:
    contexts = table(default_deadline=10.0)
    contexts.remove(contexts.enter(ME, header(), 0.0), 5.0)
    for now in (5.0, 44.9):
        with pytest.raises(ContextReleasedError):
            contexts.enter(ME, header(), now)
        with pytest.raises(ContextNotFoundError):
            contexts.find(b"k" * 16, OTHER, now)
        with pytest.raises(ContextReleasedError):
            contexts.find(b"k" * 16, ME, now)
    with pytest.raises(ContextNotFoundError):  # forgotten for those who ask
        contexts.find(b"k" * 16, ME, 45.1)
    contexts.remove(contexts.enter(ME, header(b"q" * 16), 46.0), 46.0)  # and swept out by the next one
    assert contexts.enter(ME, header(), 46.0)


def test_tombstones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts_module, "TOMBSTONES", 3)
    contexts = table()
    keys = [bytes([n]) * 16 for n in range(5)]
    for key in keys:
        contexts.remove(contexts.enter(ME, header(key), 0.0), 0.0)
    assert list(contexts._released["default"]) == keys[2:]
    contexts.bury(b"x" * 16, "tenant", 0.0)
    assert list(contexts._released["default"]) == keys[2:] and list(contexts._released["tenant"]) == [b"x" * 16]


def test_leases_are_renewed_and_end() -> None:
    contexts = table(lease=10.0)
    context = contexts.enter(ME, header(), 0.0)
    own = contexts.open("default")
    contexts.enter(PeerIdentity("c", b"i" * 16, "default"), header(opens=False), 4.0)
    assert contexts.expired(9.9) == []
    contexts.renew(ME, [Lease(b"k" * 16, 1), Lease(b"u" * 16, 1)], 9.9)
    contexts.renew(PeerIdentity("a", b"another process!", "default"), [Lease(b"k" * 16, 2)], 15.0)
    contexts.renew(ME, [Lease(b"k" * 16, 1)], 18.0)  # nothing new from the worker that opened it
    assert contexts.expired(14.1) == [] and [name for name, _ in context.openers] == ["a"], "the lease of c is over"
    assert contexts.expired(19.8) == [] and contexts.expired(20.0) == [context]
    assert not own.openers and own not in contexts.expired(1e9), "what this worker opened itself needs no lease"
    own.known_workers |= {"b", "c"}
    assert contexts.renewals() == {("c", "default"): [Lease(own.key, 1)]}
    assert contexts.renewals() == {("c", "default"): [Lease(own.key, 2)]}


def test_the_opener_in_the_first_place_decides_for_all() -> None:
    contexts = table()
    other = PeerIdentity("c", b"i" * 16, "default")
    context = contexts.enter(ME, header(), 0.0)
    contexts.enter(other, header(), 0.0)
    assert not contexts.let_go(context, PeerIdentity("d", b"i" * 16, "default"))
    assert not contexts.let_go(context, other) and contexts.let_go(context, ME)
    contexts.enter(ME, header(), 0.0)
    contexts.enter(other, header(), 0.0)
    assert contexts.let_go(context, ME) and not context.openers


async def test_quotas_of_contexts_and_edges_between_workers() -> None:
    limits = Limits(contexts_per_principal=2, edges_per_context=4)
    async with workers("a", "b", service=service, limits=limits) as (a, b), a.context() as ctx:
        x = leaf(1, 1)
        for _ in range(2):
            await a.call("b", "scale", x)
        with pytest.raises(LimitError, match=r"has 4 edges on a, which is its limit \(Limits.edges_per_context\)"):
            await a.call("b", "scale", x)
        await a.call("b", "where")
        assert await ag.offload(lambda: ctx.check_open()) is None

        async def another() -> None:
            async with a.context():
                await a.call("b", "where")
                with pytest.raises(Overloaded, match="worker a has 2 open contexts"):
                    async with asyncio.timeout(5):
                        await b.call("a", "open_one")

        own = dist.Service()

        @own.function
        async def open_one() -> None:
            async with dist.current_worker().context():
                pass

        a._core.service = own
        await asyncio.create_task(another(), context=contextvars.Context())


# -------------------------------------------------------------------- a context that is left while a pass runs


async def test_leaving_a_context_ends_a_pass_that_runs_in_it(gate: asyncio.Event) -> None:
    async with workers("a", "b", service=service) as (a, b):
        async with a.context() as ctx:
            x = leaf(1)
            y = await a.call("b", "gated", x)
            running = asyncio.create_task(ctx.backward(y.sum()))
            await Gated.reached.wait()
            assert a.statistics().passes == b.statistics().passes == 1
        with pytest.raises(ContextError, match="was released while a backward pass was running in it"):
            await running
        await settled(a, b)
        assert x not in ctx.grads
        async with a.context() as ctx:  # and all is well
            gate.set()
            await ctx.backward((await a.call("b", "gated", x)).sum())
            assert values(ctx.grads[x]) == [1]


async def test_a_participant_that_is_told_to_release_during_a_pass(gate: asyncio.Event) -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        y = await a.call("b", "gated", leaf(1))
        running = asyncio.create_task(ctx.backward(y.sum()))
        await Gated.reached.wait()
        await b._leases.release(view(b, ctx))
        with pytest.raises((ContextError, RemoteError), match=r"Error on Node b: .*released"):
            await running
        assert not busy(b)


# -------------------------------------------------------------------- what is left


class Holder:
    """Something that a graph holds."""


class Keeps(ag.Function):
    """Saves an array and holds an object."""

    holders: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.holder = Holder()
        Keeps.holders.add(ctx.holder)
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (y,) = ctx.saved_tensors
        return g * 2 + y * 0


@service.function
async def keeps(x: Any) -> Any:
    return Keeps.apply(Keeps.apply(x))


async def test_the_graph_is_freed_on_both_workers_when_the_context_is_left() -> None:
    Keeps.holders.clear()
    async with workers("a", "b", service=service) as (a, b):
        x = leaf(1, 2)
        async with a.context() as ctx:
            y = await a.call("b", "keeps", x * 1)
            z = await a.call("b", "keeps", y)
            refs = [weakref.ref(node) for each in (ctx, view(b, ctx)) for node in (*each.send_nodes.values(), *each.recv_nodes.values())]
            refs += [weakref.ref(ctx), weakref.ref(view(b, ctx)), weakref.ref(y)]
            assert len(refs) == 11 and len(Keeps.holders) == 4
            await ctx.backward(z.sum())
            del y, z
        grads = values(ctx.grads[x])
        del ctx
        await settled(a, b)
        await asyncio.sleep(0)
        gc.collect()
        assert grads == [16, 16] and [ref() for ref in refs if ref() is not None] == [] and not len(Keeps.holders)


async def test_the_graph_is_freed_on_both_workers_when_no_backward_was_run() -> None:
    Keeps.holders.clear()
    async with workers("a", "b", service=service) as (a, b):
        async with a.context() as ctx:
            y = await a.call("b", "keeps", leaf(1))
            assert len(Keeps.holders) == 2
            del y
        del ctx
        await settled(a, b)
        gc.collect()
        assert not len(Keeps.holders)


async def test_saved_values_are_freed_on_both_workers_by_a_pass_that_does_not_retain_the_graph() -> None:
    saved: list[weakref.ref[Any]] = []
    own = dist.Service()

    @own.function
    async def exp(x: Any) -> Any:
        y = np.exp(x)
        saved.append(weakref.ref(y._data))
        return y * 2

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x = leaf(1, 2)

        async def forward() -> Any:
            h = np.exp(x)
            saved.append(weakref.ref(h._data))
            return (await a.call("b", "exp", h)).sum()

        loss = await forward()
        await asyncio.sleep(0)
        gc.collect()
        assert [ref() is not None for ref in saved] == [True, True]
        await ctx.backward(loss, retain_graph=True)
        gc.collect()
        assert [ref() is not None for ref in saved] == [True, True]
        await ctx.backward(loss)
        await asyncio.sleep(0)
        gc.collect()
        assert [ref() is not None for ref in saved] == [False, False]
        assert loss.requires_grad and len(ctx.send_nodes) == 1


async def test_a_released_context_keeps_nothing_alive_but_its_gradients() -> None:
    async with workers("a", "b", service=service) as (a, _):
        async with a.context() as ctx:
            x = leaf(1, 2)
            await ctx.backward((await a.call("b", "scale", x)).sum())
        assert not ctx.send_nodes and not ctx.recv_nodes and not ctx.participants and not ctx.calls and not ctx.history.outcomes
        assert len(ctx.grads) == 1


# -------------------------------------------------------------------- workers that are restarted


async def test_edges_of_a_worker_that_was_restarted_are_not_taken_for_those_it_had_before(virtual_clock: VirtualClock) -> None:
    """c, which calls b, is killed and started again, and gets to know the context again by d, which had not called it before."""

    board, x = Net(), leaf(5, 7)
    async with contextlib.AsyncExitStack() as stack:
        a, b, d = others = await stack.enter_async_context(workers("a", "b", "d", service=service, board=board))

        async def start() -> dist.Worker:
            c = await stack.enter_async_context(dist.Worker("c", service=service, secret=SECRET, transport=board.transport("c")))
            for other in others:
                other.add_peer("c", c.url)
                c.add_peer(other.name, other.url)
            return c

        await start()
        async with a.context() as ctx:
            old = await a.call("c", "relay", "b", "scale", x)
            board.kill("c")
            await start()
            for other in others:  # each finds out by itself
                with contextlib.suppress(WorkerLostError):
                    await other.call("c", "square", x.detach())
            with pytest.raises(ContextNotFoundError, match="forgotten when its worker is restarted"):
                await a.call("c", "scale", x)  # it has been called from here before
            new = await a.call("d", "relay", "c", "relay", "b", "scale", x)
            with pytest.raises(WorkerLostError, match="it has not sent message .* since it was started"):
                await ctx.backward(old.sum())
            assert x not in ctx.grads
            await ctx.backward(new.sum())
            assert values(ctx.grads[x]) == values(weight) and values(view(b, ctx).grads[weight]) == values(x)
        await asyncio.sleep(2 * a._core.limits.lease_seconds)  # nobody releases it on b in the name of the one that was killed
