"""Leases: every batch counts once, wherever a step fails, a loop is left or a process is started again."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiograd as ag
from aiograd.data import DataLoader
from aiograd.errors import ArgumentError, DataError, ModeError
from tests.data.test_loader import AsyncStream, Counting, Resumable, Stream, plain, taken
from tests.support import assert_awaiting_raises, assert_raises, cancel


class Committed(Exception):
    committed = True


class Failed(Exception):
    committed = False


async def waiting(count: int) -> AsyncIterator[int]:
    for i in range(count):
        for _ in range(i % 3):
            await asyncio.sleep(0)
        yield i


MAKERS: dict[str, Any] = {
    "sequence": lambda **o: DataLoader(range(11), 3, **o),
    "shuffled": lambda **o: DataLoader(range(11), 3, shuffle=True, generator=ag.Generator(4), **o),
    "array": lambda **o: DataLoader(np.arange(11), 3, shuffle=True, generator=ag.Generator(4), **o),
    "one by one": lambda **o: DataLoader(range(11), shuffle=True, generator=ag.Generator(4), **o),
    "sampled": lambda **o: DataLoader(range(11), batch_sampler=iter([[i, i + 1] for i in range(9)]), **o),
    "stream": lambda **o: DataLoader(Stream(11), 3, **o),
    "iterator": lambda **o: DataLoader(iter(range(11)), 3, **o),
    "async stream": lambda **o: DataLoader(AsyncStream(11), 3, **o),
    "async iterator": lambda **o: DataLoader(waiting(11), 3, **o),
    "resumable": lambda **o: DataLoader(Resumable(), 3, **o),
}
AGAIN = {name: MAKERS[name] for name in MAKERS if "iterator" not in name}


async def leased(loader: DataLoader, most: int | None = None, **split: int) -> list[Any]:
    """The batches that one loop reads, up to `most`."""
    found: list[Any] = []
    async for lease in loader.leases(**split):
        async with lease as batch:
            found.append(plain(batch))
        if len(found) == most:
            break
    return found


@pytest.mark.parametrize("name", AGAIN)
async def test_leases_give_the_batches_of_a_plain_loop(name: str) -> None:
    ones, other = MAKERS[name](), MAKERS[name]()
    for epoch in range(1 if name in ("sampled", "resumable") else 2):
        found = []
        async for lease in ones.leases():
            assert (lease.epoch, lease.number) == (epoch, len(found)) and repr(lease) == f"BatchLease(epoch={epoch}, number={len(found)})"
            async with lease as batch:
                found.append(plain(batch))
                assert lease.indices == (found[-1] if isinstance(found[-1], list) else [found[-1]]) or name == "sampled"
        assert found == await taken(other) and ones.epoch == epoch + 1


ENDS = st.lists(st.sampled_from(["read", "committed", "cause", "group", "fail", "cancel", "leave entered", "leave", "resume", "kill"]), max_size=25)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=30)
@given(ends=ENDS)
def test_every_batch_counts_once_whatever_ends_its_lease(name: str, workers: int, ends: list[str]) -> None:
    async def main() -> None:
        ag.seed(7)
        wanted = [(plain(batch)) async for batch in MAKERS[name]()]
        loader = MAKERS[name](workers=workers)
        found: list[Any] = []
        draws: dict[int, set[float]] = {}
        kinds, state = iter(ends), ""
        while loader.epoch == 0:
            before = len(found)
            async for lease in loader.leases():
                assert lease.number == len(found)
                kind = next(kinds, "read")
                if kind == "leave":
                    break
                try:
                    async with lease as batch:
                        draws.setdefault(lease.number, set()).add(ag.rand(()).item())
                        state = json.dumps(loader.state_dict())
                        if kind in ("read", "committed", "cause", "group", "resume"):
                            found.append(plain(batch))
                        if isinstance(batch, ag.Tensor) and batch.ndim:
                            batch.fill_(-1)  # a batch that comes again is whole
                        raise_as(kind)
                        if kind in ("leave entered", "kill"):
                            raise Failed
                except (Failed, Committed, ExceptionGroup, TimeoutError, asyncio.CancelledError):
                    pass
                if kind.startswith("leave"):
                    break
                if kind in ("resume", "kill") and "iterator" not in name:  # another process goes on, from a state of before or after the step
                    state = json.dumps(loader.state_dict()) if kind == "resume" else state
                    loader = MAKERS[name](workers=workers)
                    loader.load_state_dict(json.loads(state))
                    break
            assert loader.state_dict()["batches"] == (0 if loader.epoch else len(found))
            assert before <= len(found)
        assert found == wanted and all(len(drawn) == 1 for drawn in draws.values()) and len(set.union(*draws.values())) == len(wanted)

    asyncio.run(main())


def raise_as(kind: str) -> None:
    if kind == "committed":
        raise Committed
    if kind == "cause":
        raise TimeoutError from Committed()
    if kind == "group":
        raise ExceptionGroup("of a task group", [Failed(), Committed()])
    if kind == "fail":
        raise Failed
    if kind == "cancel":
        raise asyncio.CancelledError


async def test_a_cause_that_goes_in_a_circle_ends() -> None:
    loader = DataLoader(range(4), 2)
    async for lease in loader.leases():
        with pytest.raises(Failed):
            async with lease:
                error = Failed()
                raise error from error
        break
    assert loader.state_dict()["batches"] == 0


@pytest.mark.parametrize("name", AGAIN)
async def test_a_step_that_is_cancelled_gives_its_batch_back(name: str) -> None:
    loader, entered = MAKERS[name](), asyncio.Event()
    first = (await taken(MAKERS[name](), 1))[0]

    async def forever() -> None:
        async for lease in loader.leases():
            async with lease:
                entered.set()
                await asyncio.sleep(1e9)

    task = asyncio.ensure_future(forever())
    await entered.wait()
    await cancel(task)
    assert (await leased(loader))[0] == first and loader.epoch == 1


@pytest.mark.parametrize("most", range(5))
async def test_the_rows_of_a_rank_are_those_of_array_split(most: int) -> None:
    for name in ("sequence", "array", "stream", "sampled"):
        whole = await taken(MAKERS[name]())
        parts = []
        for rank in range(4):
            loader = MAKERS[name]()
            parts.append(await leased(loader, most, rank=rank, size=4) if most else [])
            rest = await leased(loader, rank=0, size=1)  # the others are lost
            assert rest == whole[most:]
        for number, batch in enumerate(whole[:most]):
            assert [part[number] for part in parts] == [each.tolist() for each in np.array_split(np.array(batch), 4)]


async def test_a_rank_without_rows_has_tensors_without_rows() -> None:
    examples = [(np.ones(2, np.float32), {"label": i, "name": "a"}) for i in range(5)]
    for source in (examples, Stream(5)):
        loader = DataLoader(source, 4)
        rows = []
        async for lease in loader.leases(3, 4):
            async with lease as batch:
                rows.append((lease.indices, batch))
        assert [indices for indices, _ in rows] == [[3], []]
        whole, empty = rows[0][1], rows[1][1]
        if source is examples:
            assert empty[0].shape == (0, 2) and empty[0].dtype == np.float32
            assert empty[1]["label"].shape == (0,) and empty[1]["label"].dtype == whole[1]["label"].dtype and empty[1]["name"] == []
        else:
            assert empty.shape == (0,) and empty.dtype == whole.dtype
    assert await leased(DataLoader(range(5), 4, collate=list), rank=3, size=4) == [[3], []]
    tensors = ag.data.TensorDataset(ag.ones(5, 2))
    async for lease in DataLoader(tensors, 5).leases(6, 7):
        async with lease as (x,):
            assert x.shape == (0, 2)
    async for lease in DataLoader(ag.ones(5, 2), 5).leases(6, 7):
        async with lease as x:
            assert x.shape == (0, 2)


# ---- draws


class Noisy:
    """Examples with noise of the default generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return ag.rand(2)


async def test_draws_belong_to_the_batch_and_the_rank() -> None:
    async def drawn(loader: DataLoader, fails: bool, **split: int) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        async for lease in loader.leases(**split):
            tries = found.setdefault(lease.number, [])
            try:
                async with lease as batch:
                    tries.append((batch.tolist(), ag.rand(3).tolist(), ag.default_generator().fork().integers(0, 2**60).item()))
                    if fails and len(tries) == 1:
                        raise Failed
            except Failed:
                ag.rand(7)  # other draws change nothing
        return found

    def make(**options: Any) -> DataLoader:
        return DataLoader(Noisy(), 2, generator=ag.Generator(3), **options)

    smooth = await drawn(make(), False)
    rough = await drawn(make(prefetch=0, workers=1), True)
    assert all(len(tries) == 2 and tries[0] == tries[1] == smooth[number][0] for number, tries in rough.items()) and len(rough) == 3
    assert len({str(tries[0][1]) for tries in smooth.values()}) == 3
    assert (await drawn(make(), False, rank=1, size=2))[0][0][1] != (await drawn(make(), False, rank=0, size=2))[0][0][1]
    ag.seed(5)
    outside = ag.rand(()).item()
    ag.seed(5)
    await drawn(make(), True)
    assert ag.rand(()).item() != outside  # only draws outside of the leases
    loader = DataLoader(range(4), 2, shuffle=True, generator=ag.Generator(1))
    (await leased(loader), await leased(loader, 1))
    generator = ag.Generator(1)
    generator.fork()
    order = generator.fork()
    assert loader.state_dict()["order"] == order.state_dict() and order.permutation(4).tolist()[:2] == (await leased_indices(loader, 1))


async def leased_indices(loader: DataLoader, back: int) -> list[int]:
    """The indices of the batch before the place of the loader."""
    state = loader.state_dict()
    loader.load_state_dict({**state, "batches": state["batches"] - back})
    async for lease in loader.leases():
        return lease.indices
    return []


# ---- misuse


async def test_a_lease_is_entered_once_and_before_the_next() -> None:
    loader = DataLoader(range(6), 2)
    with pytest.raises(ModeError, match=r"the loop goes on, but BatchLease\(epoch=0, number=0\) was not entered; use it as"):
        async for _ in loader.leases():
            pass
    leases = loader.leases()
    first = await anext(leases)
    assert first.number == 0
    async with first:
        with pytest.raises(ModeError, match="it was entered before"):
            await first.__aenter__()
    with pytest.raises(ModeError, match="enter every lease once"):
        async with first:
            pass
    assert loader.state_dict()["batches"] == 1
    second = await anext(leases)
    again = await anext(loader.leases())  # that loop was left
    assert (second.number, again.number) == (1, 1)
    with pytest.raises(ModeError):
        await second.__aenter__()
    with pytest.raises(ModeError, match="number=2"):
        async for _ in leases:
            pass
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ModeError, match="its loader is at another place"):
        await again.__aenter__()
    assert await leased(loader) == [[2, 3], [4, 5]] and loader.epoch == 1


async def test_arguments_that_make_no_sense_are_refused() -> None:
    loader = DataLoader(range(6), 2)
    for rank, size in ((2, 2), (-1, 2), (0, 0), (True, 2), (0, 1.5), ("0", 1)):
        assert_raises(ArgumentError, r"DataLoader.leases\(rank=", loader.leases, rank, size)
    assert_raises(ArgumentError, "single examples have no rows to divide", DataLoader(range(6)).leases, 0, 2)
    for wrong in ({"ahead": ["x"]}, {"ahead": 3}, {"ahead": [-1]}, {"epoch": "x"}, {"epoch": -1}, {"batches": None}):
        assert_raises(ArgumentError, None, loader.load_state_dict, {**loader.state_dict(), **wrong})
    assert_raises(ArgumentError, None, loader.load_state_dict, {**loader.state_dict(), "more": 1})


# ---- several tasks, errors, leftover tasks and threads


@pytest.mark.parametrize("name", AGAIN)
async def test_several_tasks_take_from_one_loop(name: str) -> None:
    wanted = await taken(MAKERS[name]())
    loader = MAKERS[name]()
    leases, found, failed = loader.leases(), [], set()
    states = []

    async def work() -> None:
        async for lease in leases:
            try:
                async with lease as batch:
                    for _ in range(50 if lease.number == 1 else 1):
                        await asyncio.sleep(0)
                    if lease.number % 2 and lease.number not in failed:
                        failed.add(lease.number)
                        raise Failed
                    found.append(plain(batch))
                states.append((json.dumps(loader.state_dict()), list(found)))
            except Failed:
                pass

    await asyncio.gather(*(work() for _ in range(3)))
    assert sorted(found, key=wanted.index) == wanted and loader.epoch == 1
    for state, before in states:
        other = MAKERS[name]()
        other.load_state_dict(json.loads(state))
        rest = await leased(other)
        assert sorted(before + rest, key=wanted.index) == wanted


async def test_a_loaded_state_moves_a_loop_that_runs() -> None:
    loader = DataLoader(range(10), 2)
    ahead = {**loader.state_dict(), "epoch": 3, "batches": 3}
    found = []
    async for lease in loader.leases():
        async with lease as batch:
            found.append((lease.epoch, plain(batch)))
            if len(found) == 1:
                loader.load_state_dict(ahead)  # leaving this lease counts nothing there
    assert found == [(0, [0, 1]), (3, [6, 7]), (3, [8, 9])] and loader.epoch == 4


@pytest.mark.parametrize("workers", [0, 1])
async def test_an_error_of_the_source_comes_in_its_turn_and_the_batch_again(workers: int) -> None:
    class Flaky(Counting):
        fails = True

        def __getitem__(self, index: int) -> int:
            if index == 5 and self.fails:
                self.fails = False
                raise OSError("unreadable")
            return index

    class FlakyStream(Stream):
        def __iter__(self) -> Iterator[int]:
            fails_at, self.fails_at = self.fails_at, -1
            return Stream(self.count, fails_at).__iter__()

    for source in (Flaky(8), FlakyStream(8, 5)):
        loader = DataLoader(source, 2, workers=workers, prefetch=4)
        found: list[Any] = []
        with pytest.raises(OSError, match="unreadable"):
            async for lease in loader.leases():
                async with lease as batch:
                    found.append(plain(batch))
        assert found == [[0, 1], [2, 3]]
        assert await leased(loader) == [[4, 5], [6, 7]]
    loader = DataLoader(iter(Stream(8, 5)), 2)
    with pytest.raises(OSError):
        await leased(loader)
    with pytest.raises(DataError, match="reading batch 2 of generator, which is an iterator"):
        await leased(loader)
    assert loader.state_dict()["batches"] == 2 and loader.epoch == 0


class StoppingAt:
    """A sequence, a sampler and a collate function, of which one raises StopIteration or StopAsyncIteration at example 5."""

    def __init__(self, place: str, kind: type[Exception], is_async: bool) -> None:
        self.place, self.kind, self.is_async = place, kind, is_async

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.later(index) if self.is_async else self.at("example", index)

    async def later(self, index: int) -> int:
        return self.at("example", index)

    def at(self, place: str, index: int) -> int:
        if place == self.place and index == 5:
            raise self.kind("of the source")
        return index

    def sampled(self) -> Iterator[Any]:
        yield from ([i, i + 1] for i in range(0, 8, 2) if self.at("sampler", i + 1) + 1)

    def collated(self, examples: list[int]) -> list[int]:
        return [self.at("collate", index) for index in examples]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
@pytest.mark.parametrize(("place", "is_async"), [("example", False), ("example", True), ("collate", False), ("sampler", False)])
async def test_an_error_that_means_the_end_elsewhere_does_not_end_the_epoch(place: str, is_async: bool, kind: Any, workers: int) -> None:
    source = StoppingAt(place, kind, is_async)
    order: dict[str, Any] = {"batch_sampler": source.sampled()} if place == "sampler" else {"batch_size": 2}
    loader = DataLoader(source, collate=source.collated, workers=workers, **order)
    with pytest.raises(RuntimeError, match="Stop"):
        await leased(loader)
    assert loader.state_dict()["batches"] == 2 and loader.epoch == 0
    source.place = ""
    if place != "sampler":
        assert await leased(loader) == [[4, 5], [6, 7]] and loader.epoch == 1
        source.place = place
        await assert_awaiting_raises(RuntimeError, "Stop", loader.read([4, 5]))
        if not workers:
            assert_raises(RuntimeError, "Stop", lambda: list(loader))


async def test_an_iterator_cannot_go_back_to_a_place() -> None:
    loader = DataLoader(iter(range(10)), 2, prefetch=0)
    await leased(loader, 2)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="gone past the place of a loaded state"):
        await leased(loader)


async def test_a_stream_that_is_cancelled_as_it_waits_is_read_again_from_its_place() -> None:
    class Slow(AsyncStream):
        async def __aiter__(self) -> AsyncIterator[int]:
            for i in range(self.count):
                for _ in range(5):
                    await asyncio.sleep(0)
                yield i

    for prefetch in (0, 2):
        loader = DataLoader(Slow(9), 2, prefetch=prefetch)
        found = await leased(loader, 2)
        task = asyncio.ensure_future(leased(loader))
        for _ in range(4):
            await asyncio.sleep(0)
        await cancel(task)
        found += await leased(loader, 1)
        assert found + await leased(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


async def test_an_iterator_that_waits_is_not_cancelled_but_with_its_loader() -> None:
    free, ended = asyncio.Event(), []

    async def source() -> AsyncIterator[int]:
        try:
            yield 0
            await free.wait()
            yield 1
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    loader = DataLoader(source(), 1)
    assert await leased(loader, 1) == [[0]]
    task = asyncio.ensure_future(leased(loader, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancel(task)
    free.set()
    assert await leased(loader, 1) == [[1]] and not ended
    del task, loader
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)
    assert ended and asyncio.all_tasks() == {asyncio.current_task()}


def test_an_iterator_that_ended_with_its_loop_is_an_error() -> None:
    loader = DataLoader(waiting(9), 1, prefetch=0)
    assert asyncio.run(leased(loader, 2)) == [[0], [1]]
    with pytest.raises(DataError, match="reading batch 2 of async_generator, which is an iterator: it raised, was cancelled or lost its loop"):
        asyncio.run(leased(loader))
    assert loader.state_dict()["batches"] == 2 and loader.epoch == 0
    loader = DataLoader(AsyncStream(40), 3)
    found = [batch for _ in range(5) for batch in asyncio.run(leased(loader, 3))]
    assert found == [list(range(i, min(i + 3, 40))) for i in range(0, 40, 3)]


async def test_waiting_for_a_batch_may_be_cancelled() -> None:
    free = asyncio.Event()

    class Slow(Counting):
        async def __getitem__(self, index: int) -> int:  # type: ignore[override]
            self.read += 1
            await free.wait()
            return index

    source = Slow(6)
    loader = DataLoader(source, 2, prefetch=0)
    leases = loader.leases()
    for _ in range(2):
        task = asyncio.ensure_future(anext(leases))
        for _ in range(3):
            await asyncio.sleep(0)
        await cancel(task)
    free.set()
    async with await anext(leases) as batch:
        assert plain(batch) == [0, 1] and source.read == 2  # the read that had begun went on
    await leases.aclose()


@pytest.mark.parametrize("workers", [0, 2])
async def test_leaving_early_keeps_the_place_and_leaves_nothing(workers: int) -> None:
    source = Counting(100)
    loader = DataLoader(source, 2, workers=workers)
    async for lease in loader.leases():
        async with lease as batch:
            assert plain(batch) == [0, 1]
            break
    assert loader.state_dict()["batches"] == 1
    following = await anext(loader.leases())
    assert following.number == 1 and lease.number == 0
    gc.collect()
    for _ in range(200):
        await asyncio.sleep(0)
        if asyncio.all_tasks() == {asyncio.current_task()} and not reader_threads():
            break
    else:
        while reader_threads():  # they end with their last call
            await asyncio.sleep(0.001)
    assert asyncio.all_tasks() == {asyncio.current_task()} and source.read < 20
    leases = loader.leases()
    async with await anext(leases):
        pass
    await leases.aclose()
    await leases.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()} and not reader_threads()
    with pytest.raises(StopAsyncIteration):
        await anext(leases)
    assert loader.epoch == 0 and loader.state_dict()["batches"] == 2


def reader_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("aiograd-data")]


async def test_closing_while_a_task_waits_ends_its_loop_and_no_epoch() -> None:
    free = asyncio.Event()

    class Held(Counting):
        async def __getitem__(self, index: int) -> int:  # type: ignore[override]
            await free.wait()
            return index

    loader = DataLoader(Held(4), 2)
    leases = loader.leases()
    task = asyncio.ensure_future(anext(leases, None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await leases.aclose()
    assert await task is None and loader.epoch == 0
    free.set()
    assert await leased(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", AGAIN)
def test_a_loader_goes_on_in_another_loop(name: str) -> None:
    loader = MAKERS[name]()
    wanted = asyncio.run(taken(MAKERS[name]()))
    found = asyncio.run(leased(loader, 2))
    assert found + asyncio.run(leased(loader)) == wanted


async def test_the_rest_of_a_plain_loop_can_be_leased_and_a_plain_loop_begins_anew() -> None:
    loader = DataLoader(range(8), 2)
    assert await taken(loader, 1) + await leased(loader, 1) == [[0, 1], [2, 3]]
    assert await taken(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


async def test_states_from_before_there_were_leases_are_taken() -> None:
    loader = MAKERS["shuffled"]()
    first = await taken(loader, 1)
    state = loader.state_dict()
    del state["ahead"], state["draws"]
    other = MAKERS["shuffled"]()
    other.load_state_dict(state)
    assert first + await leased(other) == await taken(MAKERS["shuffled"]())
