"""Decisions of a group: every member applies what it has prepared, or none does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.messages.groups import GroupOutcome, Vote
from aiograd.errors import CollectiveError, DeadlineError, DistributedError, WorkerLostError
from tests.distributed.groups import everywhere, groups
from tests.distributed.workers import simulate, until

NAMES = ("w0", "w1", "w2")


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_all_members_apply_what_they_have(count: int) -> None:
    async with groups(*NAMES[:count]) as (_, joined):
        applied: list[tuple[int, int]] = []

        async def several(group: dist.Group) -> None:
            for number in range(3):
                await group.commit(lambda number=number: applied.append((number, group.rank)))

        assert await everywhere(joined, several) == [None] * count
        assert sorted(applied) == [(number, rank) for number in range(3) for rank in range(count)]
        assert next(rank for number, rank in applied if number == 2) == 0


async def test_nobody_applies_anything_before_the_last_is_ready() -> None:
    async with groups(*NAMES) as (_, joined):
        applied: list[int] = []
        running = [asyncio.ensure_future(group.commit(lambda rank=group.rank: applied.append(rank))) for group in joined[:2]]
        for _ in range(200):
            await asyncio.sleep(0)
        assert not applied
        await joined[2].commit(lambda: applied.append(2))
        await asyncio.gather(*running)
        assert sorted(applied) == [0, 1, 2]


async def test_nothing_is_applied_where_rank_0_cannot() -> None:
    async with groups(*NAMES) as (_, joined):
        applied: list[int] = []

        def apply(rank: int) -> None:
            if rank == 0:
                raise ZeroDivisionError("not now")
            applied.append(rank)

        first, *rest = await everywhere(joined, lambda group: group.commit(lambda: apply(group.rank)))
        assert isinstance(first, ZeroDivisionError) and not applied
        assert all(isinstance(error, DistributedError) and "not now" in str(error) for error in rest), rest


@pytest.mark.parametrize("who", [0, 1])
async def test_nothing_is_applied_where_a_member_gives_up_before(who: int) -> None:
    async with groups(*NAMES) as (_, joined):
        applied: list[int] = []
        running = [asyncio.ensure_future(group.commit(lambda rank=group.rank: applied.append(rank))) for group in joined if group.rank != who]
        for _ in range(50):
            await asyncio.sleep(0)
        joined[who].fail(CollectiveError("no more"))
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, CollectiveError) and "no more" in str(outcome)
        with pytest.raises(CollectiveError, match="no more"):
            await joined[who].commit(lambda: applied.append(who))
        assert not applied


async def test_a_member_that_is_ready_and_cancelled_learns_the_decision_first() -> None:
    async with groups(*NAMES) as (_, joined):
        applied: list[int] = []
        running = [asyncio.ensure_future(group.commit(lambda rank=group.rank: applied.append(rank))) for group in joined[:2]]
        for _ in range(50):
            await asyncio.sleep(0)
        running[1].cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not running[1].done()
        await joined[2].commit(lambda: applied.append(2))
        first, second = await asyncio.gather(*running, return_exceptions=True)
        assert sorted(applied) == [0, 1, 2] and first is None and isinstance(second, asyncio.CancelledError)


def test_a_member_that_does_not_get_ready_in_time() -> None:
    async def main() -> None:
        async with groups(*NAMES) as (_, joined):
            applied: list[int] = []
            found = await asyncio.gather(
                *(group.commit(lambda rank=group.rank: applied.append(rank), timeout=5.0) for group in joined[:2]), return_exceptions=True
            )
            assert not applied and all(isinstance(error, DeadlineError) for error in found), found
            assert "w2" in str(found[0])

    assert 5.0 <= simulate(main) < 12.0


async def test_only_rank_0_decides() -> None:
    async with groups(*NAMES[:2]) as (opened, joined):
        with pytest.raises(DistributedError, match="decided"):
            await joined[0].ask("w1", Vote(joined[0].key, "default", 1), 5.0)
        with pytest.raises(DistributedError, match="knows nothing"):
            await joined[0].ask("w1", GroupOutcome(b"0" * 16, 1), 5.0)
        assert await joined[0].ask("w1", GroupOutcome(joined[0].key, 1), 5.0) == "undecided"
        await until(lambda: True)
        assert opened


def test_a_question_that_ends_in_an_error_of_any_kind_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a vote is lost, and the first question about the outcome runs out of memory: the next round of questions settles it."""
    send = dist.Group.ask
    errors = [MemoryError("no memory for the question")]
    asked: list[str] = []

    async def ask(group: dist.Group, peer: str, message: Any, timeout: float) -> Any:
        answer = send(group, peer, message, timeout)
        if isinstance(message, Vote):
            await answer
            raise WorkerLostError("contact was lost", worker=peer)
        asked.append(peer)
        if errors:
            answer.close()
            raise errors.pop()
        return await answer

    monkeypatch.setattr(dist.Group, "ask", ask)

    async def main() -> None:
        async with groups(*NAMES[:2]) as (_, joined):
            applied: list[int] = []
            running = [asyncio.ensure_future(group.commit(lambda rank=group.rank: applied.append(rank))) for group in joined]
            await asyncio.wait(running, timeout=600.0)
            outcomes = [task.done() for task in running]
            for group in joined:
                group.fail(CollectiveError("the test is over"))
            assert outcomes == [True, True] and applied == [0, 1] and asked == ["w0", "w0"]

    simulate(main)
