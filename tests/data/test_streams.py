"""Streams that know where they stand: their state is in the loader's at every time, and is a copy."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aiograd as ag
from aiograd.data import DataLoader
from tests.data.test_leases import leased
from tests.data.test_loader import taken


class Log:
    """A log without end, of which an epoch reads 7 lines on; its state is one dict, which changes."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": 0, "left": [7]}

    def __iter__(self) -> Iterator[int]:
        while self.state["left"][0]:
            self.state["left"][0] -= 1
            self.state["at"] += 1
            yield self.state["at"] - 1
        self.state["left"][0] = 7

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class AsyncLog(Log):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for line in Log.__iter__(self):
            yield line


WHOLE = [[0, 1, 2], [3, 4, 5], [6], [7, 8, 9], [10, 11, 12], [13], [14, 15, 16], [17, 18, 19], [20]]


@pytest.mark.parametrize("read", [leased, taken])
@pytest.mark.parametrize("kind", [Log, AsyncLog])
@pytest.mark.parametrize("workers", [0, 1])
async def test_a_stream_goes_on_from_a_state_of_any_time(workers: int, kind: Any, read: Any) -> None:
    for stop in range(7):
        loader = DataLoader(kind(), 3, workers=workers)
        found: list[Any] = []
        states = [loader.state_dict()]
        for most in ([3] * (stop // 3)) + [stop % 3]:
            found += await read(loader, None if most == 3 else most) if most else []
            states.append(loader.state_dict())
        await read(loader)  # the source moves on
        other = DataLoader(kind(), 3, workers=workers)
        other.load_state_dict(states[-1])
        assert json.loads(json.dumps(other.state_dict())) == states[-1] and other.epoch == stop // 3
        found += await read(other)
        assert found == WHOLE[: len(found)] and len(found) == 3 * (stop // 3 + 1)
        for state in (states[0], other.state_dict(), states[0]):
            loader.load_state_dict(state)  # the same source goes back
            at, before = state["source"]["at"], json.dumps(state)
            assert (await read(loader, 1))[0][0] == at and json.dumps(state) == before


async def test_a_state_of_a_stream_is_its_own_from_the_moment_on() -> None:
    loader = DataLoader(Log(), 3, prefetch=0)
    state = loader.state_dict()
    loader.load_state_dict({**state, "source": None})  # as a state of an earlier release has it
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    state["source"]["at"] = 99
    with pytest.raises(ZeroDivisionError):
        async for lease in loader.leases():
            async with lease:
                assert loader.state_dict()["source"]["at"] == 0, "the source went on with a copy of the loaded state"
                raise ZeroDivisionError
    assert await leased(loader, 1) == [[0, 1, 2]]
    state = loader.state_dict()
    state["source"]["at"] = 99
    assert loader.state_dict()["source"]["at"] == 3
    leases = loader.leases()
    async with await anext(leases):
        assert loader.state_dict()["source"]["at"] == 3, "its batch was not read"
    await leases.aclose()
    assert loader.state_dict()["source"]["at"] == 6


async def test_a_stream_without_a_state_and_a_sequence_have_none() -> None:
    class Kept(ag.nn.ParameterList):
        """A sequence with a state, which is no place."""

    for source in (Kept([ag.nn.Parameter(ag.ones(2))]), iter([1])):
        assert DataLoader(source).state_dict()["source"] is None


@pytest.mark.parametrize("read", [leased, taken])
async def test_a_thread_that_still_reads_does_not_move_a_source_that_was_put_back(read: Any) -> None:
    arrived, free = threading.Event(), threading.Event()

    class Slow(Log):
        def __iter__(self) -> Iterator[int]:
            while self.state["left"][0]:
                if self.state["at"] == 4 and not arrived.is_set():
                    arrived.set()
                    free.wait(60)
                self.state["left"][0] -= 1
                self.state["at"] += 1
                yield self.state["at"] - 1

    loader = DataLoader(Slow(), 3, workers=1, prefetch=1)
    state = loader.state_dict()
    if read is taken:
        async for _ in loader:
            while not arrived.is_set():
                await asyncio.sleep(0)
            break
    else:
        async for lease in loader.leases():
            async with lease:
                while not arrived.is_set():
                    await asyncio.sleep(0)
            break
    loader.load_state_dict(state)
    again = asyncio.ensure_future(read(loader))
    for _ in range(50):
        await asyncio.sleep(0)
    assert loader.source.state["at"] == 4, "it waits for the call"
    free.set()
    assert await again == WHOLE[:3]
