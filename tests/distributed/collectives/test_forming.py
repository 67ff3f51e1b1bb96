"""Groups that fail while some of their members still form them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.coordination.message_form import WireMessage
from aiograd.distributed.messages.groups import GroupJoin
from aiograd.errors import WorkerLostError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.workers import until, workers

NAMES = ("w0", "w1", "w2")
LOST = WorkerLostError("nothing was heard from w0", worker="w0")


@pytest.mark.sim
async def test_a_member_that_asks_to_join_a_group_that_has_failed_is_told_so(virtual_clock: VirtualClock) -> None:
    """The others have formed it before that, as they had its answer; and the one that lost it cannot tell it."""
    now = asyncio.get_running_loop().time
    async with workers(*NAMES) as opened:
        core, released = opened[0].groups.core, asyncio.Event()
        ask = core.ask

        async def hold(peer: str, message: WireMessage, timeout: float, principal: str | None = None) -> Any:
            if isinstance(message, GroupJoin) and peer == "w1":
                await released.wait()
            return await ask(peer, message, timeout, principal)

        core.ask = hold  # type: ignore[method-assign]
        last = asyncio.ensure_future(dist.join_group(opened[0], NAMES))
        joined = await asyncio.gather(*(dist.join_group(worker, NAMES) for worker in opened[1:]))
        joined[0].fail(LOST, lost="w0")
        await until(lambda: joined[1].error)
        began = now()
        released.set()
        with pytest.raises(WorkerLostError, match="nothing was heard from w0"):
            await last
        assert now() < began + 0.1
        again = await asyncio.gather(*(dist.join_group(worker, NAMES) for worker in opened))
        await asyncio.gather(*(group.aclose() for group in again))


async def test_the_news_that_a_group_has_failed_reaches_a_member_that_forms_it_yet() -> None:
    async with workers(*NAMES) as opened:
        forming, released = opened[1].groups.forming, asyncio.Event()
        answer = forming.on_join

        async def late(caller: Any, *args: Any) -> Any:
            found = await answer(caller, *args)
            if caller.name == "w0":
                await released.wait()
            return found

        forming.on_join = late  # type: ignore[assignment, method-assign]
        last = asyncio.ensure_future(dist.join_group(opened[0], NAMES))
        joined = await asyncio.gather(*(dist.join_group(worker, NAMES) for worker in opened[1:]))
        joined[0].fail(LOST)
        await until(lambda: joined[1].error)
        released.set()
        group = await last
        await until(lambda: group.error)
        assert "nothing was heard from w0" in str(group.error)
        await asyncio.gather(*(each.aclose() for each in (group, *joined)))
