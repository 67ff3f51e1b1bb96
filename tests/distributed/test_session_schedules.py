"""Sessions over a link that drops, repeats, reorders, alters and closes, as seeds will have it; and that each safeguard is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiograd.distributed import incoming
from aiograd.distributed.safeguards import ALL_ON, Safeguards
from tests.distributed.link import SMALL, Faults, Link, simulate, traffic


def slow_handlers(safeguards: Safeguards) -> Link:
    """Handlers use all the time they are given, over a link that is quick enough."""
    link = Link(1, Faults(latency=0.005), safeguards)
    link.handler_time = lambda timeout: timeout * 0.999  # type: ignore[method-assign]
    link.attach()
    for number in range(5):
        link.at(link.now + number, "ask", 0, b"%d|" % number, 0.5 + number)
    link.run(link.now + 10)
    link.settle()
    for asked in link.sides[0].asked.values():
        if asked.outcome != "answered":
            link.broken.append(f"late: {asked.token!r} was {asked.outcome}, though its handler kept its time")
    return link


@pytest.mark.sim
@pytest.mark.parametrize("block", range(2))
def test_whatever_the_link_does(block):
    outcomes = set()
    for seed in range(100 * block, 100 * block + 100):
        link = simulate(seed)
        assert link.faults() == [], seed
        outcomes |= {asked.outcome for side in link.sides for asked in side.asked.values()}
    assert outcomes == {"answered", "refused", "expired", ""}


@pytest.mark.sim
def test_over_a_good_link_all_is_answered():
    for seed in range(20):
        link = Link(seed, Faults(), limits=replace(SMALL, requests_per_peer=50, bytes_per_peer=10**6, bytes_total=10**6))
        link.handler_time = lambda timeout: 0.05  # type: ignore[method-assign]
        link.attach()
        for number in range(40):
            message = b"%d|" % number + bytes(number * 60 // 5 * 5)
            link.at(link.now + number * 0.02, "ask", number % 2, message, 5.0)
        link.run(link.now + 2.0)
        assert {asked.outcome for side in link.sides for asked in side.asked.values()} == {"answered"}
        assert all(side.session.statistics().resent == 0 for side in link.sides)
        link.settle()
        assert link.faults() == []


@pytest.mark.sim
@pytest.mark.parametrize("flag", ["dedupe", "dedupe_running", "checksum", "retry_same_id", "return_budget", "propagate_cancel"])
def test_each_safeguard_is_needed(flag):
    without = replace(ALL_ON, **{flag: False})
    for seed in range(100):
        found = simulate(seed, without).faults()
        if found:
            break
    expected = {
        "dedupe": "twice",
        "dedupe_running": "twice",
        "checksum": "wrong",
        "retry_same_id": "twice",
        "return_budget": "bytes",
        "propagate_cancel": "idle",
    }[flag]
    assert any(fault.startswith(expected) for fault in found), found
    assert simulate(seed).faults() == []


@pytest.mark.sim
def test_deadlines_that_do_not_shrink_are_noticed():
    assert slow_handlers(ALL_ON).faults() == []
    assert any(fault.startswith("late") for fault in slow_handlers(replace(ALL_ON, shrink_deadline=False)).faults())


@pytest.mark.sim
def test_the_ledger_notices_a_lost_answer(monkeypatch):
    """The checks can fail: an answerer that forgets to send is found out."""
    monkeypatch.setattr(incoming.Answers, "respond", lambda *_: None)
    link = Link(0, Faults())
    link.attach()
    traffic(link, 5, 1.0)
    link.run(link.now + 2.0)
    link.settle()
    assert {asked.outcome for side in link.sides for asked in side.asked.values()} <= {"expired", ""}
