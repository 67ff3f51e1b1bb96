"""Members that call different operations, and members that give one up: who gets a result, and who an error."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from aiograd import distributed as dist
from aiograd.errors import CollectiveError, DeadlineError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.groups import everywhere, groups

Call = Callable[[dist.Group], Coroutine[Any, Any, Any]]


def broadcast(size: int, root: int, is_given: bool = False) -> Call:
    """A broadcast, to which other ranks than the root give arrays as well where `is_given` says so."""
    return lambda group: group.broadcast([np.ones(size)] if is_given or group.rank == root else None, root)


#: values that take one message between two members, and many
SMALL, LARGE = 3, 30_000
CALLS: dict[str, Call] = {
    "broadcast": broadcast(SMALL, 0),
    "broadcast from another rank": broadcast(SMALL, 1),
    "broadcast of a known shape": broadcast(SMALL, 0, is_given=True),
    "broadcast of another shape": broadcast(SMALL + 1, 0, is_given=True),
    "large broadcast": broadcast(LARGE, 0),
    "large broadcast from another rank": broadcast(LARGE, 1),
    "large broadcast of a known shape": broadcast(LARGE, 0, is_given=True),
    "all_gather": lambda group: group.all_gather(np.ones(SMALL)),
    "all_reduce": lambda group: group.all_reduce(np.ones(SMALL)),
    "maximum": lambda group: group.all_reduce(np.ones(SMALL), "max"),
    "all_reduce of another dtype": lambda group: group.all_reduce(np.ones(SMALL, np.float32)),
    "large all_reduce": lambda group: group.all_reduce(np.ones(LARGE)),
    "large maximum": lambda group: group.all_reduce(np.ones(LARGE), "max"),
    "reduce_scatter": lambda group: group.reduce_scatter(np.ones(SMALL)),
    "large reduce_scatter": lambda group: group.reduce_scatter(np.ones(LARGE)),
    "barrier": lambda group: group.barrier(),
}
#: broadcasts from rank 0: those in which all give arrays can differ
FROM_0 = {"broadcast", "broadcast of a known shape", "broadcast of another shape", "large broadcast", "large broadcast of a known shape"}
FROM_1 = {"broadcast from another rank", "large broadcast from another rank"}


def may_agree(name: str, odd_name: str) -> bool:
    """True if members that call the one and members that call the other may do so together."""
    both = {name, odd_name}
    return both <= FROM_1 or (both <= FROM_0 and not all(" of " in each for each in both)) or name == odd_name


@pytest.mark.sim
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("count", "odds"), [(2, (0,)), (4, (0, 1)), (17, (1,))], ids=["pair", "mesh", "ring"])
async def test_operations_that_differ_are_an_error_on_every_member(virtual_clock: VirtualClock, name: str, count: int, odds: tuple[int, ...]) -> None:
    """Also on those that have got all that they need from members that agree with them."""
    outcomes: list[tuple[str, int, list[Any]]] = []
    for odd_name, odd in itertools.product(CALLS, odds):
        if not may_agree(name, odd_name):
            async with groups(*(f"w{rank}" for rank in range(count)), idle=False) as (_, joined):
                found = await everywhere(joined, lambda group, odd=odd, other=odd_name: CALLS[other if group.rank == odd else name](group))  # type: ignore[misc]
            outcomes.append((odd_name, odd, found))
    assert outcomes
    for odd_name, odd, found in outcomes:
        kinds = (CollectiveError, DeadlineError) if count == 17 else CollectiveError  # on a ring two may wait for each other
        assert all(isinstance(error, kinds) for error in found), (odd_name, odd, found)


@pytest.mark.sim
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", [2, 4], ids=["pair", "mesh"])
async def test_what_begins_when_a_member_has_given_one_up_has_a_result_nowhere(virtual_clock: VirtualClock, name: str, count: int) -> None:
    """The one that is given up may have ended on some members."""
    operate = CALLS[name]
    cases = itertools.product((0, count - 1), (0, 2, 3, 5, 8, 13))

    async def one(gives_up: int, turns: int) -> None:
        async with groups(*(f"w{rank}" for rank in range(count)), idle=False) as (_, joined):

            async def member(group: dist.Group) -> Any:
                if group.rank == (gives_up + 1) % count:
                    for _ in range(8):
                        await asyncio.sleep(0)
                return await operate(group)

            tasks = [asyncio.ensure_future(member(group)) for group in joined]
            for _ in range(turns + 1):
                await asyncio.sleep(0)
            tasks[gives_up].cancel()
            first = await asyncio.gather(*tasks, return_exceptions=True)
            for error in first:
                assert not isinstance(error, BaseException) or isinstance(error, (CollectiveError, asyncio.CancelledError)), first
            if any(isinstance(error, BaseException) for error in first):
                second = await everywhere(joined, operate)
                assert all(isinstance(error, CollectiveError) for error in second), (gives_up, turns, first, second)
    for case in cases:
        await one(*case)


async def test_the_parts_of_a_broadcast_say_its_shapes_even_after_a_message_that_could_not(
    virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for the last one to begin learns the shapes meanwhile, and sends its part before the root's message arrives there."""
    send, released = dist.Group.ask, asyncio.Event()

    async def ask(group: dist.Group, peer: str, value: Any, timeout: float) -> Any:
        if group.rank == 0 and peer == "w3":
            await released.wait()
        return await send(group, peer, value, timeout)

    monkeypatch.setattr(dist.Group, "ask", ask)
    async with groups(*(f"w{rank}" for rank in range(4)), idle=False) as (_, joined):
        values = np.arange(2.0**14)
        running = [asyncio.ensure_future(group.broadcast([values] if group.rank == 0 else None, root=0)) for group in joined[:3]]
        for delay in (1.0, 1.0):
            await asyncio.sleep(delay)
            if len(running) == 3:
                running.append(asyncio.ensure_future(joined[3].broadcast(None, root=0)))
        released.set()
        for (result,) in await asyncio.gather(*running):
            assert np.array_equal(result, values)
