"""Roster: who is introduced to whom, who waits for what, and what is called back. Workers of this process stand in for processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.distributed.cluster.roster import Roster
from aiograd.distributed.messages.library import Dismiss, JoinRequest
from aiograd.errors import NotExposedError, UnknownPeerError, WorkerLostError
from tests.distributed.memory import Switchboard
from tests.distributed.workers import PATIENT, SECRET, until, workers


class Stage:
    """A driver with a roster, and workers that it leads but that know nobody."""

    def __init__(self, driver: dist.Worker, others: dict[str, dist.Worker]) -> None:
        self.events: list[tuple[str, str, object]] = []
        self.workers = others
        self.roster = Roster(
            "Cluster",
            driver,
            lambda name, status: self.events.append(("lost", name, status)),
            lambda name, url: self.events.append(("back", name, url)),
        )

    async def introduce(self, *names: str) -> None:
        for name in names:
            self.roster.add(name)
        await asyncio.gather(*(self.roster.introduce(name, self.workers[name].url, self.workers[name].endpoint.incarnation) for name in names))

    def known_to(self, name: str) -> set[str]:
        return set(self.workers[name].endpoint.peers) - {"driver"}


@contextlib.asynccontextmanager
async def stage(*names: str, board: Switchboard | None = None) -> AsyncIterator[Stage]:
    async with workers("driver", *names, board=board, idle=False) as (driver, *others):
        for worker in others:
            worker.membership.leader = "driver"
            for name in names:
                worker.remove_peer(name)
        for name in names:
            driver.remove_peer(name)
        yield Stage(driver, {worker.name: worker for worker in others})


async def test_workers_that_are_introduced_at_the_same_time_know_each_other() -> None:
    async with stage("a", "b", "c") as it:
        await it.introduce("a", "b", "c")
        for name in "abc":
            assert it.known_to(name) == set("abc") - {name}
        assert it.roster.names == ("a", "b", "c") and it.roster.urls == {name: it.workers[name].url for name in "abc"}
        assert it.events == []
        await it.introduce("b")
        assert it.events == [], "a worker that asks again has not been away"


async def test_a_worker_that_was_lost_comes_back_and_everybody_is_told_where() -> None:
    board = Switchboard()
    async with stage("a", "b", board=board) as it:
        await it.introduce("a", "b")
        waiting = asyncio.create_task(it.roster.wait_lost("b"))
        await asyncio.sleep(0)
        await it.workers["b"].aclose()
        it.roster.lost("b", -9, is_returning=True)
        it.roster.lost("b", -9, is_returning=True)
        assert await waiting == -9 and it.events == [("lost", "b", -9)]
        returning = asyncio.create_task(it.roster.wait_running("b"))
        await asyncio.sleep(0)
        assert not returning.done()
        async with dist.Worker("b", secret=SECRET, limits=PATIENT, transport=board.transport("elsewhere")) as anew:
            anew.membership.leader = "driver"
            await it.roster.introduce("b", anew.url, anew.endpoint.incarnation)
            await returning
            assert it.events[1:] == [("back", "b", anew.url)] and it.roster.urls["b"] == anew.url
            assert it.known_to("a") == {"b"} and set(anew.endpoint.peers) == {"a", "driver"}
            with pytest.raises(NotExposedError, match="worker b is led by driver"):  # the new one answers
                await it.workers["a"].call_apart("b", Dismiss.form.name)
            it.roster.lost("b", 0, is_returning=False, was_asked=True)
            assert len(it.events) == 2
            with pytest.raises(WorkerLostError, match=r"worker b has ended \(exit status 0\) and nothing restarts it"):
                await it.roster.wait_running("b")


async def test_calls_after_an_introduction_meet_the_new_process_though_the_end_of_the_old_one_was_not_noticed() -> None:
    board = Switchboard()
    async with stage("a", "b", board=board) as it:
        await it.introduce("a", "b")
        asking = [it.workers["a"], it.roster.driver]

        async def ask(worker: dist.Worker) -> None:
            with pytest.raises(NotExposedError):
                await worker.call_apart("b", JoinRequest.form.name, "", "")

        for each in asking:
            await ask(each)
        for channel in board.channels:
            channel.held = "b" in (channel.side, channel.other.side)  # as if its machine had gone
        under_way = [asyncio.create_task(ask(each)) for each in asking]
        await asyncio.sleep(0)
        async with dist.Worker("b", secret=SECRET, limits=PATIENT, transport=board.transport("elsewhere")) as anew:
            anew.membership.leader = "driver"
            await it.roster.introduce("b", anew.url, anew.endpoint.incarnation)
            for task in under_way:
                with pytest.raises(WorkerLostError, match="it was restarted"):
                    await task
            for each in asking:
                await ask(each)


async def test_one_that_is_lost_while_others_are_told_is_passed_over_and_one_that_is_lost_itself_is_not() -> None:
    async with stage("a", "b", "c") as it:
        await it.introduce("a", "b")
        await it.workers["a"].aclose()
        await it.introduce("c")
        assert it.known_to("b") == {"a", "c"} and it.roster.member("c").is_running
    async with stage("a", "b") as it:
        await it.introduce("a")
        await it.workers["b"].aclose()
        with pytest.raises(WorkerLostError):
            await it.introduce("b")
        assert not it.roster.member("b").is_running


async def test_a_loss_during_the_introduction_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage("a", "b") as it:
        await it.introduce("a")
        ask = it.roster._ask

        async def late(name: str, *words: Any, **options: Any) -> Any:
            answer = await ask(name, *words, **options)
            if name == "a":
                it.roster.lost("b", 1, is_returning=True)
            return answer

        monkeypatch.setattr(it.roster, "_ask", late)
        with pytest.raises(WorkerLostError, match="lost while it was being introduced"):
            await it.introduce("b")
        assert not it.roster.member("b").is_running and await it.roster.wait_lost("b") == 1


async def test_a_return_that_takes_two_attempts_is_called_back_once() -> None:
    board = Switchboard()
    async with stage("a", "b", board=board) as it:
        await it.introduce("a", "b")
        gone = it.workers["b"].url, it.workers["b"].endpoint.incarnation
        await it.workers["b"].aclose()
        it.roster.lost("b", 1, is_returning=True)
        with pytest.raises(WorkerLostError):
            await it.roster.introduce("b", *gone)
        assert it.events == [("lost", "b", 1)] and not it.roster.member("b").is_running
        async with dist.Worker("b", secret=SECRET, limits=PATIENT, transport=board.transport("elsewhere")) as anew:
            anew.membership.leader = "driver"
            await it.roster.introduce("b", anew.url, anew.endpoint.incarnation)
            await it.roster.introduce("b", anew.url, anew.endpoint.incarnation)
            assert it.events[1:] == [("back", "b", anew.url)]


async def test_a_worker_that_is_forgotten_is_unknown_to_all() -> None:
    async with stage("a", "b") as it:
        await it.introduce("a", "b")
        waiting = asyncio.create_task(it.roster.wait_lost("b"))
        await asyncio.sleep(0)
        await it.roster.forget("b")
        assert await waiting == 0 and it.events == []
        assert it.roster.names == ("a",) and it.known_to("a") == set()
        with pytest.raises(UnknownPeerError, match="Cluster has no worker 'b'; it has a"):
            it.roster.member("b")
        with pytest.raises(UnknownPeerError):
            await it.roster.ask("b", "anything")


async def test_dismissal_reaches_who_can_be_reached() -> None:
    async with stage("a", "b", "c") as it:
        await it.introduce("a", "b", "c")
        await it.workers["b"].aclose()
        await it.roster.dismiss(0.05, "a", "b")
        assert it.workers["a"].membership.dismissed.is_set() and not it.workers["c"].membership.dismissed.is_set()
        await it.roster.dismiss(0.05)
        await until(it.workers["c"].membership.dismissed.is_set)
