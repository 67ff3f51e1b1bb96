"""Sampling: an allowance of events, windows that open and close with it, and nothing at all while nobody watches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import aiograd as ag
from aiograd.dashboard import pass_graph
from aiograd.dashboard.sampling import Allowance, EventRing, Sampler
from aiograd.profiler.event import Event
from aiograd.running.modes import DEFAULT_MODE


def event(name: str = "mul") -> Event:
    return Event(name, "forward", name, 0, 1, 1, "MainThread", 0, None)


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    made = Sampler(100, 40)
    yield made
    made.close()
    assert DEFAULT_MODE.profiler is None


def test_an_allowance_is_used_up_and_grows_with_time_up_to_two_seconds_of_it() -> None:
    allowance = Allowance(10)
    allowance.grow(5.0)
    assert allowance.is_ample and [allowance.take() for _ in range(7)] == [True] * 5 + [False] * 2
    allowance.grow(5.25)
    assert not allowance.is_ample and [allowance.take() for _ in range(3)] == [True, True, False]
    allowance.grow(100.0)
    assert allowance.is_ample and allowance.left == 20


def test_a_ring_keeps_the_last_and_gives_what_is_new() -> None:
    ring = EventRing(3, Allowance(100))
    for name in "abcde":
        ring.append(event(name))
    assert [(number, kept.name) for number, kept in ring.after(0, 10)] == [(3, "c"), (4, "d"), (5, "e")]
    assert [number for number, _ in ring.after(4, 10)] == [5] and ring.after(5, 10) == []
    assert [number for number, _ in ring.after(0, 2)] == [4, 5], "the latest, where there are too many"


def test_threads_may_append_while_one_reads() -> None:
    ring = EventRing(100, Allowance(1e9))
    done = threading.Event()

    def append() -> None:
        while not done.is_set():
            ring.append(event())

    threads = [threading.Thread(target=append) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(500):
            numbers = [number for number, _ in ring.after(0, 1000)]
            assert len(numbers) <= 100 and len(set(numbers)) == len(numbers)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_window_records_everything_until_the_allowance_is_gone(sampler: Sampler) -> None:
    x = ag.tensor([1.0, 2.0])
    _ = x * x
    assert not sampler.ring.after(0, 10), "nobody watches"
    sampler.tick(0.0)
    assert sampler.is_open and len(sampler.windows) == 1
    for _ in range(60):
        _ = x * x
    assert not sampler.is_open and DEFAULT_MODE.profiler is None and DEFAULT_MODE.plain, "the modes are what they were"
    assert len(sampler.ring.after(0, 1000)) == 40 and sampler.windows[-1][1] > sampler.windows[-1][0]
    sampler.tick(0.1)
    assert not sampler.is_open, "not before there is enough for a while"
    sampler.tick(0.7)
    assert sampler.is_open


def test_an_event_says_shape_bytes_and_line(sampler: Sampler) -> None:
    sampler.tick(0.0)
    _ = ag.tensor([[1.0, 2.0]]) + 1.0
    (_, seen), *_ = sampler.ring.after(0, 10)
    assert seen.shapes == ((1, 2),) and seen.nbytes == 8
    assert seen.line is not None and seen.line.rpartition(":")[0] == __file__


def test_work_for_a_peer_is_recorded_if_the_peer_records_or_a_window_is_open(sampler: Sampler) -> None:
    assert sampler.recorder(False) is None and sampler.recorder(True) is not None
    sampler.tick(0.0)
    assert sampler.recorder(False) is not None
    while sampler.allowance.take():
        pass
    assert sampler.recorder(True) is None, "the allowance bounds that as well"


def test_a_profile_of_the_user_is_left_alone(sampler: Sampler) -> None:
    with ag.profiler.profile() as profile:
        sampler.tick(0.0)
        _ = ag.tensor([1.0]) * 2.0
    assert len(profile.events) == 1 and not sampler.ring.after(0, 10)


async def test_the_graph_of_a_pass_is_noted(sampler: Sampler) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    sampler.tick(0.0)
    await (x * x).sum().backward()
    ((left_out, rows),) = sampler.graphs.rows()
    assert not left_out
    names = [row[1] for row in rows]
    assert names == ["SumBackward", "MulBackward", "AccumulateGrad"]
    assert rows[0][4] == [rows[1][0]] and set(rows[1][4]) == {rows[2][0]} and rows[2][4] == []


async def test_a_pass_that_outlasts_its_window_is_noted_to_its_end(sampler: Sampler) -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    y = x
    for _ in range(60):
        y = y * 1.5
    sampler.tick(0.0)
    await y.sum().backward()
    assert not sampler.is_open, "more nodes than events are allowed"
    ((left_out, rows),) = sampler.graphs.rows()
    assert len(rows) == 62 and not left_out


async def test_of_large_passes_the_first_nodes_are_noted_and_the_others_counted(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_graph, "MOST_NODES", 10)
    monkeypatch.setattr(pass_graph, "ALL_NODES", 25)
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    for number in range(4):
        sampler.tick(number * 5.0)
        y = x
        for _ in range(12):
            y = y * 1.5
        await y.sum().backward()
    assert [(left_out, len(rows)) for left_out, rows in sampler.graphs.rows()] == [(4, 10), (4, 10)], "as many passes as have room"
