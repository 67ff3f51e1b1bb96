"""DataLoader: which batches come, in which order, how far ahead they are read, and where it goes on after a state was loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.data import DataLoader, TensorDataset, collate
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.running.random import Generator
from tests.support import assert_awaiting_raises, assert_raises, cancel


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, ag.Tensor) else batch


async def taken(loader: DataLoader, most: int | None = None) -> list[Any]:
    found: list[Any] = []
    async for batch in loader:
        found.append(plain(batch))
        if len(found) == most:
            break
    return found


class Counting:
    """A sequence that counts what is read, at the same time and in all."""

    def __init__(self, count: int) -> None:
        self.count, self.read, self.now, self.most = count, 0, 0, 0
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.read += 1
            self.now += 1
            self.most = max(self.most, self.now)
        with self.lock:
            self.now -= 1
        return index


class Stream:
    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at, self.started = count, fails_at, 0

    def __iter__(self) -> Iterator[int]:
        self.started += 1
        for i in range(self.count):
            if i == self.fails_at:
                raise OSError("unreadable")
            yield i


class AsyncStream(Stream):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for i in range(self.count):
            await asyncio.sleep(0)
            yield i


class Resumable:
    """A stream that knows where it stands, and is never read twice."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("source", [range(10), list(range(10)), np.arange(10), Stream(10), AsyncStream(10)])
async def test_batches_of_every_source(source: Any, prefetch: int, workers: int) -> None:
    options: dict[str, Any] = {"workers": workers, "prefetch": prefetch}
    loader = DataLoader(source, 4, **options)
    for epoch in range(2):
        assert loader.epoch == epoch
        assert await taken(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert await taken(DataLoader(source, 4, drop_last=True, **options)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert await taken(DataLoader(source, **options)) == list(range(10))
    assert await taken(DataLoader(source, 3, collate=lambda x: (len(x), sum(x)), **options)) == [(3, 3), (3, 12), (3, 21), (1, 9)]
    assert await taken(DataLoader(source, collate=lambda x: -x, **options)) == [-i for i in range(10)]


# ---- a plain for


@pytest.mark.parametrize("source", [range(10), list(range(10)), np.arange(10), Stream(10), Counting(10)])
def test_a_plain_for_reads_when_asked_and_needs_no_loop(source: Any) -> None:
    loader = DataLoader(source, 4, prefetch=3)
    for epoch in range(2):
        assert loader.epoch == epoch
        assert [plain(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(DataLoader(source, 3, collate=sum, drop_last=True)) == [3, 12, 21]
    counted = Counting(10)
    batches = iter(DataLoader(counted, 4, prefetch=3))
    next(batches)
    assert counted.read == 4


async def test_a_plain_for_takes_the_order_and_the_state_of_an_asynchronous_one() -> None:
    ones, other = (DataLoader(range(10), 3, shuffle=True, generator=Generator(5)) for _ in range(2))
    epoch = await taken(ones)
    assert [plain(batch) for batch in other] == epoch
    began = []
    for batch in other:
        began.append(plain(batch))
        if len(began) == 2:
            break
    state = other.state_dict()
    assert state["batches"] == 2
    again = DataLoader(range(10), 3, shuffle=True, generator=Generator(5))
    again.load_state_dict(state)
    assert began + [plain(batch) for batch in again] == await taken(ones) and again.epoch == 2


async def _in_time(examples: Any) -> Any:
    await asyncio.sleep(1e9)
    return examples


class Awaited(Counting):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: DataLoader(range(4), 2, workers=1), "its workers=1 have to be awaited"),
        (lambda: DataLoader(AsyncStream(4), 2), "the examples of AsyncStream have to be awaited"),
        (lambda: DataLoader(Awaited(4), 2), "the examples of Awaited have to be awaited"),
        (lambda: DataLoader(range(4), 2, collate=_in_time), "its source or its collate function awaits something"),
    ],
)
async def test_a_plain_for_where_something_has_to_be_awaited_names_async_for(make: Any, what: str) -> None:
    assert_raises(ArgumentTypeError, rf"`for` over it, but {what}; write `async for`, in an `async def`", lambda: list(make()))


def test_the_names_of_pytorch() -> None:
    make: Any = DataLoader
    loader = make(dataset=range(4), batch_size=2, num_workers=0, collate_fn=sum, pin_memory=True, persistent_workers=False)
    assert list(loader) == [1, 5] and len(loader.dataset) == 4 and loader.num_workers == 0
    with pytest.raises(ArgumentTypeError, match=r"DataLoader\(\): workers is given twice, as workers= and as num_workers=; leave one out"):
        make(range(4), 2, workers=1, num_workers=1)
    assert_raises(ArgumentTypeError, r"DataLoader\(\): source is given twice, by position and as dataset=", lambda: make(range(4), dataset=range(4)))


async def test_lengths_and_samplers() -> None:
    assert [len(DataLoader(range(10), 4)), len(DataLoader(range(10), 4, drop_last=True)), len(DataLoader(range(10)))] == [3, 2, 10]
    loader = DataLoader(range(10), batch_sampler=[[3, 1], [7], [0, 0, 9]])
    assert len(loader) == 3 and await taken(loader) == await taken(loader) == [[3, 1], [7], [0, 0, 9]]
    assert_raises(TypeError, None, lambda: len(DataLoader(Stream(3))))


async def test_every_epoch_has_another_order_which_the_generator_determines() -> None:
    first = DataLoader(range(20), 6, shuffle=True, generator=Generator(3))
    second = DataLoader(range(20), 6, shuffle=True, generator=Generator(3), workers=2, prefetch=5)
    one, two = await taken(first), await taken(first)
    assert [one, two] == [await taken(second), await taken(second)] and one != two
    flat = [[i for batch in epoch for i in batch] for epoch in (one, two)]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(20)) != flat[0]
    ag.seed(5)
    third = await taken(DataLoader(range(20), shuffle=True))
    ag.seed(5)
    assert third == await taken(DataLoader(range(20), shuffle=True)) != list(range(20))


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_no_more_is_read_ahead_than_asked_for(prefetch: int) -> None:
    source = Counting(40)
    loader = DataLoader(source, 2, prefetch=prefetch, workers=1)
    count = 0
    async for _ in loader:
        count += 1
        await ag.ready(())
        for _ in range(200):
            await asyncio.sleep(0)
        assert source.read <= 2 * (count + prefetch)
    assert (count, source.read) == (20, 40)


async def test_threads_read_at_the_same_time_and_batches_keep_their_order() -> None:
    barrier = threading.Barrier(3)  # passed only if three threads are in it at once

    class Meeting:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            barrier.wait(20)
            assert threading.current_thread().name.startswith("aiograd-data")
            return index

    assert await taken(DataLoader(Meeting(), 1, workers=3, prefetch=5)) == [[0], [1], [2], [3], [4], [5]]


async def test_examples_may_be_awaited_and_given_many_at_once() -> None:
    class Later:
        def __len__(self) -> int:
            return 5

        async def __getitem__(self, index: int) -> int:
            await asyncio.sleep(0)
            return index * 10

    class Many(Later):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [i * 100 for i in indices]

    assert await taken(DataLoader(Later(), 2)) == [[0, 10], [20, 30], [40]]
    assert await taken(DataLoader(Later(), workers=1)) == [0, 10, 20, 30, 40]
    assert await taken(DataLoader(Many(), 2)) == [[0, 100], [200, 300], [400]]


class Wrapped:
    """A source whose plain ``__getitem__`` gives what another one gives: of odd examples coroutines."""

    def __init__(self, later: Any) -> None:
        self.later = later

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self.later(index) if index % 2 else index


@pytest.mark.parametrize("workers", [0, 1])
async def test_coroutines_of_a_plain_source_are_awaited_together(workers: int) -> None:
    met: list[int] = []
    both = asyncio.Event()

    async def later(index: int) -> int:
        met.append(index)
        if len(met) == 2:  # of one batch
            both.set()
        await both.wait()
        return index

    loader = DataLoader(Wrapped(later), 4, workers=workers, prefetch=0)
    assert await taken(loader) == [[0, 1, 2, 3], [4]] and met == [1, 3]
    assert await taken(DataLoader(Wrapped(later), workers=workers)) == [0, 1, 2, 3, 4]
    assert (await loader.read([1, 0, 3])).tolist() == [1, 0, 3]
    if not workers:
        assert [plain(batch) for batch in loader] == [[0, 1, 2, 3], [4]]
        both.clear()
        assert_raises(ArgumentTypeError, "its source or its collate function awaits something", lambda: list(loader))


@pytest.mark.parametrize("workers", [0, 2])
async def test_leaving_early_ends_what_reads(workers: int) -> None:
    source = Counting(100)
    loader = DataLoader(source, 2, workers=workers)
    assert await taken(loader, 3) == [[0, 1], [2, 3], [4, 5]]
    for _ in range(50):  # the generator that was left is closed by the loop
        await asyncio.sleep(0)
    assert source.read < 20 and loader.epoch == 0
    assert (await taken(loader))[0] == [0, 1]


@pytest.mark.parametrize("workers", [0, 1])
async def test_an_error_comes_in_its_turn(workers: int) -> None:
    class Broken(Counting):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise OSError("unreadable")
            return index

    for source in (Broken(8), Stream(8, 5)):
        found = []
        with pytest.raises(OSError, match="unreadable"):
            async for batch in DataLoader(source, 2, workers=workers, prefetch=4):
                found.append(plain(batch))
        assert found == [[0, 1], [2, 3]]


class Stopping:
    """A sequence that raises StopIteration at one place."""

    def __init__(self, place: str) -> None:
        self.place = place
        if place == "__getitems__":
            self.__getitems__ = self.collated

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.place == "__getitem__":
            raise StopIteration(index)
        return index

    def collated(self, examples: list[int]) -> list[int]:
        raise StopIteration(examples[0])


class StoppingStream:
    def __iter__(self) -> Iterator[int]:
        raise StopIteration(0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("place", ["__getitem__", "__getitems__", "collate", "__iter__"])
async def test_stop_iteration_of_a_source_arrives_as_a_runtime_error(place: str, workers: int) -> None:
    source: Any = StoppingStream() if place == "__iter__" else Stopping(place)
    loader = DataLoader(source, batch_size=2, workers=workers, collate=Stopping(place).collated if place == "collate" else None)
    error = await assert_awaiting_raises(RuntimeError, "StopIteration", taken(loader))
    causes = [error.__cause__, error.__cause__ and error.__cause__.__cause__]
    assert any(isinstance(cause, StopIteration) and cause.value == 0 for cause in causes)


async def test_a_consumer_that_is_cancelled_leaves_nothing() -> None:
    entered, free = asyncio.Event(), asyncio.Event()

    class Slow:
        def __len__(self) -> int:
            return 3

        async def __getitem__(self, index: int) -> int:
            entered.set()
            await free.wait()
            return index

    task = asyncio.ensure_future(taken(DataLoader(Slow(), 1)))
    await entered.wait()
    await cancel(task)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


MAKERS: dict[str, Any] = {
    "sequence": lambda: DataLoader(range(11), 2, workers=2),
    "shuffled": lambda: DataLoader(range(11), 2, shuffle=True, generator=Generator(4)),
    "one by one": lambda: DataLoader(range(11), shuffle=True, generator=Generator(4), prefetch=0),
    "default generator": lambda: DataLoader(range(11), 3, shuffle=True),
    "sampled": lambda: DataLoader(range(11), batch_sampler=[[i, i + 1] for i in range(9)]),
    "stream": lambda: DataLoader(Stream(11), 2, prefetch=4),
    "async stream": lambda: DataLoader(AsyncStream(11), 2),
    "resumable": lambda: DataLoader(Resumable(), 3),
}


@pytest.mark.parametrize("name", MAKERS)
async def test_it_goes_on_in_mid_epoch_where_it_stood(name: str, tmp_path: Any) -> None:
    ag.seed(1)
    whole = MAKERS[name]()
    wanted = [await taken(whole), await taken(whole)] if name != "resumable" else [await taken(whole)]
    for stop in range(len(wanted[0]) + 1):
        ag.seed(1)
        loader = MAKERS[name]()
        found, state = [], loader.state_dict()
        async for batch in loader:
            if len(found) == stop:
                break
            found.append(plain(batch))
            state = loader.state_dict()
        ag.save({"loader": state}, tmp_path / "state.safetensors")
        random = ag.default_generator().state_dict()
        other = MAKERS[name]()
        if stop == 0:
            continue
        other.load_state_dict(ag.load(tmp_path / "state.safetensors")["loader"])
        ag.default_generator().load_state_dict(random)
        assert found + await taken(other) == wanted[0]
        if len(wanted) == 2:
            assert await taken(other) == wanted[1]
            assert other.epoch == 2


async def test_states_that_do_not_fit_change_nothing() -> None:
    loader = DataLoader(range(6), 2)
    state = loader.state_dict()
    for wrong in (3, {}, {**state, "batches": -1}, {**state, "generator": Generator(0).state_dict()}, {**state, "order": Generator(0).state_dict()}):
        assert_raises(ArgumentError, None, loader.load_state_dict, wrong)
    assert loader.state_dict() == state and repr(loader) == "DataLoader(range, batch_size=2, epoch=0, batches=0)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(3), lambda: DataLoader(range(3), 0), lambda: DataLoader(range(3), 1.5), lambda: DataLoader(range(3), 1, workers=-1),
        lambda: DataLoader(range(3), 1, prefetch=True), lambda: DataLoader(range(3), 1, batch_sampler=[[0]]),
        lambda: DataLoader(range(3), drop_last=True),
        lambda: DataLoader(Stream(3), 1, shuffle=True), lambda: DataLoader(AsyncStream(3), batch_sampler=[[0]]),
        lambda: DataLoader(range(3), 1, generator=np.random.default_rng(0)), lambda: DataLoader(range(3), 1, collate=3),
        lambda: DataLoader(range(3), batch_sampler=3), lambda: DataLoader({"a": 1}), lambda: TensorDataset(3), lambda: TensorDataset(),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(make: Any) -> None:
    assert_raises(ArgumentError, None, make)


def test_collate() -> None:
    batch = collate([(np.ones(2, np.float32), {"label": 1, "name": "a"}), (np.zeros(2, np.float32), {"label": 2, "name": "b"})])
    assert batch[0].tolist() == [[1, 1], [0, 0]] and batch[0].dtype == np.float32
    assert batch[1]["label"].tolist() == [1, 2] and batch[1]["name"] == ["a", "b"]
    assert collate([1.5, 2.0]).dtype == np.float32 and collate([np.float64(1)]).dtype == np.float64 and collate([True]).dtype == bool
    assert collate([ag.tensor([1.0]), ag.tensor([2.0])]).shape == (2, 1)
    for wrong in ([np.ones(2), np.ones(3)], [(1, 2), (1,)], [{"a": 1}, {"b": 1}]):
        assert_raises(ShapeError, None, collate, wrong)
    assert_raises(ArgumentTypeError, None, collate, [])


async def test_a_progress_bar_counts_the_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert [plain(batch) async for batch in ag.progress(DataLoader(range(6), 2), "epoch 1")] == [[0, 1], [2, 3], [4, 5]]
    assert "epoch 1: 100%" in capsys.readouterr().err


def test_a_state_of_another_kind_of_loader_is_refused_before_anything_changes() -> None:
    def begun(make: Any) -> DataLoader:
        loader: DataLoader = make()
        next(iter(loader))
        return loader

    makers: dict[str, Any] = {
        "twos": lambda: DataLoader(range(12), 2, generator=Generator(3)),
        "threes": lambda: DataLoader(range(12), 3, generator=Generator(3)),
        "more": lambda: DataLoader(range(14), 2, generator=Generator(3)),
        "one by one": lambda: DataLoader(range(12), generator=Generator(3)),
        "sampled": lambda: DataLoader(range(12), batch_sampler=[[0, 1], [2]], generator=Generator(3)),
        "stream": lambda: DataLoader(Stream(12), 2, generator=Generator(3)),
        "resumable": lambda: DataLoader(Resumable(), 2, generator=Generator(3)),
        "resumable of threes": lambda: DataLoader(Resumable(), 3, generator=Generator(3)),
    }
    streams = {"stream", "resumable", "resumable of threes"}
    for name, make in makers.items():
        for other, of_other in makers.items():
            loader, state, between = begun(make), begun(of_other).state_dict(), of_other().state_dict()
            before = loader.state_dict()
            if {name, other} <= {"stream", "resumable"}:
                expected = (name, other) == ("stream", "resumable")
            else:
                expected = name != other
            if expected:
                assert_raises(ArgumentError, "DataLoader.load_state_dict", loader.load_state_dict, state)
                assert loader.state_dict() == before
            else:
                loader.load_state_dict(state)
            if (name in streams) == (other in streams) and (name, other[:9]) != ("stream", "resumable"):
                loader.load_state_dict(between)  # an epoch that begins may have other batches
            elif expected:
                assert_raises(ArgumentError, "DataLoader.load_state_dict", loader.load_state_dict, between)
                assert loader.state_dict() == before
    for wrong in ({"kind": 3}, {"kind": {}}, {"epoch": float("inf")}, {"batches": float("inf")}, {"source": {"place": 3}}):
        assert_raises(ArgumentError, None, begun(makers["twos"]).load_state_dict, {**begun(makers["twos"]).state_dict(), **wrong})


def test_a_source_whose_length_is_not_known_takes_a_state() -> None:
    class Unknown(Counting):
        def __len__(self) -> int:
            raise OSError("not there yet")

    loader = DataLoader(range(12), 2)
    next(iter(loader))
    other = DataLoader(Unknown(12), 2)
    other.load_state_dict(loader.state_dict())
    assert other.state_dict()["batches"] == 1 and other.state_dict()["kind"]["examples"] is None
    loader.load_state_dict(other.state_dict())
