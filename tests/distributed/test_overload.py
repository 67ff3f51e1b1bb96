"""More than a worker takes: what is too much is refused at once, what was admitted ends well, and afterwards all is as before."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import DistributedError, Overloaded
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import Switchboard
from tests.distributed.workers import SECRET, knows, leaf, settled, triple, values, view, workers

#: how many at once, of anything
CAPACITY = 8
#: virtual seconds within which a refusal is there
AT_ONCE = 0.05


class Crowd:
    """Requests at the same time, and what becomes of them."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest_refusal = 0.0

    async def one(self, request: Callable[[], Awaitable[Any]]) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            await request()
            self.outcomes["done"] += 1
        except Overloaded as error:
            assert error.retry_after > 0
            self.outcomes["refused"] += 1
            self.slowest_refusal = max(self.slowest_refusal, clock() - begun)

    async def all(self, count: int, request: Callable[[], Awaitable[Any]]) -> Counter[str]:
        await asyncio.gather(*(self.one(request) for _ in range(count)))
        return self.outcomes


def slow_service() -> dist.Service:
    service = dist.Service()

    @service.function
    async def slow(x: Any) -> Any:
        await asyncio.sleep(1.0)
        return x * 3

    @service.function
    async def open_one() -> None:
        async with dist.current_worker().context():
            await asyncio.sleep(1.0)

    return service


LIMITED: dict[str, tuple[Limits, Callable[[dist.Worker], Awaitable[Any]], bool]] = {
    "requests": (Limits(requests_per_peer=CAPACITY), lambda a: a.call("b", "slow", ag.tensor([1.0])), True),
    "contexts": (Limits(contexts_per_principal=CAPACITY), lambda a: a.call("b", "open_one"), True),
    "contexts in all": (Limits(contexts=CAPACITY), lambda a: a.call("b", "open_one"), True),
    "bytes": (Limits(bytes_per_peer=CAPACITY * 9000), lambda a: a.call("b", "slow", ag.zeros(2048, dtype=ag.float32)), False),
}


@pytest.mark.parametrize("factor", [2, 10])
@pytest.mark.parametrize("name", LIMITED)
async def test_what_is_too_much_is_refused_at_once_and_what_was_admitted_ends(virtual_clock: VirtualClock, name: str, factor: int) -> None:
    limits, request, is_exact = LIMITED[name]

    board = Switchboard()
    async with (
        dist.Worker("b", service=slow_service(), secret=SECRET, limits=limits, transport=board.transport("b")) as b,
        dist.Worker("a", secret=SECRET, transport=board.transport("a"), peers={"b": b.url}) as a,
    ):
        for _ in range(3):
            crowd = Crowd()
            outcomes = await crowd.all(factor * CAPACITY, lambda: request(a))
            assert outcomes["refused"] and outcomes.total() == factor * CAPACITY
            assert outcomes["done"] == CAPACITY if is_exact else CAPACITY - 1 <= outcomes["done"] <= CAPACITY
            assert crowd.slowest_refusal <= AT_ONCE
            for _ in range(3):  # after the burst
                assert (await Crowd().all(CAPACITY - 1, lambda: request(a))) == {"done": CAPACITY - 1}
        await settled(a, b)
    assert virtual_clock.time() < 20.0


async def test_more_functions_than_the_executor_takes_wait_and_what_is_above_the_requests_of_a_peer_is_refused_at_once(
    virtual_clock: VirtualClock,
) -> None:
    service = dist.Service()
    service.function("double")(lambda x: x * 2)
    limits = Limits(executor_queue=CAPACITY, requests_per_peer=5 * CAPACITY)
    board = Switchboard()
    async with (
        ag.Engine(threads=1),
        dist.Worker("b", service=service, secret=SECRET, limits=limits, transport=board.transport("b")) as b,
        dist.Worker("a", secret=SECRET, transport=board.transport("a"), peers={"b": b.url}) as a,
    ):
        for _ in range(3):
            assert await Crowd().all(5 * CAPACITY, lambda: a.call("b", "double", ag.tensor([1.0]))) == {"done": 5 * CAPACITY}
            crowd = Crowd()
            outcomes = await crowd.all(10 * CAPACITY, lambda: a.call("b", "double", ag.tensor([1.0])))
            assert outcomes == {"done": 5 * CAPACITY, "refused": 5 * CAPACITY}
            assert crowd.slowest_refusal <= AT_ONCE
        await settled(a, b)


@pytest.mark.parametrize("capacity", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("slow", [0.0, 0.2])
async def test_passes_above_capacity_are_exact_or_refused_and_never_in_doubt(virtual_clock: VirtualClock, slow: float, capacity: int) -> None:
    """Also where it is a message of the pass itself that finds no room: gradients, the decision, the release of the context."""
    weights = {name: ag.tensor(np.array([2.0, 3.0]), requires_grad=True) for name in "bc"}
    service = dist.Service()

    @service.function
    async def through(path: str, x: Any) -> Any:
        worker = dist.current_worker()
        await asyncio.sleep(slow)
        y = x * weights[worker.name]
        return await worker.call(path[0], "through", path[1:], y) if path else y

    outcomes: Counter[str] = Counter()

    async def one(a: dist.Worker, others: tuple[dist.Worker, ...], number: int) -> None:
        factor = float(1 << number % 20)
        async with a.context() as ctx:
            x = ag.tensor(np.array([1.0, 1.0]), requires_grad=True)
            try:
                y = await a.call("b", "through", "c", x, timeout=20)
                await ctx.backward((y * factor).sum(), timeout=20)
            except DistributedError as error:
                outcomes[type(error).__name__] += 1
                assert isinstance(error, Overloaded), repr(error)
                assert x not in ctx.grads
                for other in others:
                    assert not knows(other, ctx) or not [*view(other, ctx).grads], "nothing is committed anywhere"
                return
            outcomes["committed"] += 1
            assert values(ctx.grads[x]) == [4 * factor, 9 * factor]
            for other in others:
                assert values(view(other, ctx).grads[weights[other.name]]) == [2 * factor, 3 * factor]

    async with workers("a", "b", "c", service=service, limits=Limits(requests_per_peer=capacity)) as (a, b, c):
        a._core.limits = Limits()  # the driver takes what comes
        await asyncio.gather(*(one(a, (b, c), number) for number in range(40)))
        assert outcomes.total() == 40
        burst = outcomes["committed"]
        await asyncio.sleep(20)
        await settled(a, b, c)
        for number in range(10):
            await one(a, (b, c), number)
        assert outcomes["committed"] == burst + 10, "as before the burst"
        assert a.statistics().in_doubt == b.statistics().in_doubt == c.statistics().in_doubt == 0
    assert outcomes["Overloaded"], "there was no overload"


async def test_a_decision_that_finds_no_room_is_told_again(virtual_clock: VirtualClock) -> None:
    """Its pass is committed already: it must not stay in doubt because a worker is busy."""
    service = slow_service()
    weight = leaf(2)
    service.function("scale")(lambda x: x * weight)
    refused: list[int] = []

    async with workers("a", "b", service=service, limits=Limits(requests_per_peer=2)) as (a, b), a.context() as ctx:
        x = leaf(1)
        y = await a.call("b", "scale", x)
        plain = a.endpoint.request
        slow: list[asyncio.Future[Any]] = []

        async def request(peer: str, kind: int, *rest: Any) -> Any:
            if kind == Kind.COMMIT and not slow:
                slow.extend(asyncio.ensure_future(plain("b", Kind.CALL, ("slow", [1], {}, True, None), 9)) for _ in range(2))
                await asyncio.sleep(0.01)
            try:
                return await plain(peer, kind, *rest)
            except Overloaded:
                refused.append(kind)
                raise

        a.endpoint.request = request  # type: ignore[method-assign, assignment]
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [2] and values(view(b, ctx).grads[weight]) == [1]
        assert not ctx.in_doubt
        await asyncio.gather(*slow)
    assert refused and set(refused) == {Kind.COMMIT}


async def test_a_peer_that_takes_all_it_can_get_leaves_others_their_share() -> None:
    service = slow_service()
    service.function("quick")(triple)
    async with workers("a", "b", "greedy", service=service, limits=Limits(requests_per_peer=CAPACITY)) as (a, b, greedy):
        hogging = [asyncio.ensure_future(greedy.call("b", "slow", ag.tensor([1.0]))) for _ in range(10 * CAPACITY)]
        for _ in range(20):
            async with a.context() as ctx:
                x = leaf(1)
                await ctx.backward((await a.call("b", "quick", x)).sum(), timeout=5)
                assert values(ctx.grads[x]) == [3]
        for call in hogging:
            call.cancel()
        for call in hogging:
            with contextlib.suppress(asyncio.CancelledError, Overloaded):
                await call
        await settled(a, b, greedy)
