"""Which entry is due next, against a plain dictionary."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.timer_queue import SLACK, TimerQueue

TIMES = st.integers(0, 20).map(float)
STEPS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 8), TIMES),
    st.tuples(st.just("remove"), st.integers(0, 8)),
    st.tuples(st.just("take"), TIMES),
    st.tuples(st.just("next")),
)


@given(st.lists(STEPS, max_size=80))
def test_against_a_dictionary(steps):
    timers, naive = TimerQueue(), {}
    for step, *arguments in steps:
        if step == "set":
            timers.set(*arguments)
            naive[arguments[0]] = arguments[1]
        elif step == "remove":
            timers.remove(*arguments)
            naive.pop(arguments[0], None)
        elif step == "take":
            taken = timers.take(*arguments)
            assert [naive[id] for id in taken] == sorted(naive[id] for id in taken)
            assert sorted(taken) == sorted(id for id, when in naive.items() if when <= arguments[0])
            for id in taken:
                del naive[id]
        else:
            assert timers.next() == min(naive.values(), default=None)


def test_a_rebuild_keeps_the_order():
    rng, timers, naive = Random(3), TimerQueue(), {}
    for _ in range(20 * SLACK):
        id = rng.randrange(SLACK)
        naive[id] = rng.random()
        timers.set(id, naive[id])
        assert timers.next() == min(naive.values())
        if rng.random() < 0.8:
            id = rng.choice([*naive])
            del naive[id]
            timers.remove(id)
    assert timers.take(1.0) == sorted(naive, key=naive.__getitem__)


def test_entries_that_never_come_due_take_no_room():
    timers = TimerQueue()
    timers.set(0, 5.0)
    for id in range(1, 100_000):
        timers.set(id, 60.0)
        timers.remove(id)
    assert len(timers._heap) <= SLACK + 8
    assert timers.take(60.0) == [0]


def test_postponing_leaves_one_entry():
    timers = TimerQueue()
    for when in range(100_000):
        timers.set(1, float(when))
    assert len(timers._heap) == 1
    assert timers.take(99_998.0) == []
    assert timers.take(99_999.0) == [1]
