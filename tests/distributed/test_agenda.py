"""Which entry is due next, against a plain dictionary."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.agenda import SLACK, Agenda

TIMES = st.integers(0, 20).map(float)
STEPS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 8), TIMES),
    st.tuples(st.just("remove"), st.integers(0, 8)),
    st.tuples(st.just("take"), TIMES),
    st.tuples(st.just("next")),
)


@given(st.lists(STEPS, max_size=80))
def test_against_a_dictionary(steps):
    agenda, naive = Agenda(), {}
    for step, *arguments in steps:
        if step == "set":
            agenda.set(*arguments)
            naive[arguments[0]] = arguments[1]
        elif step == "remove":
            agenda.remove(*arguments)
            naive.pop(arguments[0], None)
        elif step == "take":
            taken = agenda.take(*arguments)
            assert [naive[id] for id in taken] == sorted(naive[id] for id in taken)
            assert sorted(taken) == sorted(id for id, when in naive.items() if when <= arguments[0])
            for id in taken:
                del naive[id]
        else:
            assert agenda.next() == min(naive.values(), default=None)


def test_a_rebuild_keeps_the_order():
    rng, agenda, naive = Random(3), Agenda(), {}
    for _ in range(20 * SLACK):
        id = rng.randrange(SLACK)
        naive[id] = rng.random()
        agenda.set(id, naive[id])
        assert agenda.next() == min(naive.values())
        if rng.random() < 0.8:
            id = rng.choice([*naive])
            del naive[id]
            agenda.remove(id)
    assert agenda.take(1.0) == sorted(naive, key=naive.__getitem__)


def test_entries_that_never_come_due_take_no_room():
    agenda = Agenda()
    agenda.set(0, 5.0)
    for id in range(1, 100_000):
        agenda.set(id, 60.0)
        agenda.remove(id)
    assert len(agenda._heap) <= SLACK + 8
    assert agenda.take(60.0) == [0]


def test_postponing_leaves_one_entry():
    agenda = Agenda()
    for when in range(100_000):
        agenda.set(1, float(when))
    assert len(agenda._heap) == 1
    assert agenda.take(99_998.0) == []
    assert agenda.take(99_999.0) == [1]
