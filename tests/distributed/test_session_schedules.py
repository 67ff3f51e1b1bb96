"""Sessions over a link that is slow and breaks, as seeds will have it; and that each protection is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiograd.distributed.rpc import inbound
from tests.chaos.broken import without
from tests.distributed.session_link import SMALL, Faults, SessionLink, simulate, traffic


def slow_handlers() -> SessionLink:
    """Handlers use all the time they are given, over a link that is quick enough."""
    link = SessionLink(1, Faults(latency=0.005))
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
        link = SessionLink(seed, Faults(), limits=replace(SMALL, requests_per_peer=50, bytes_per_peer=10**6, bytes_total=10**6))
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
@pytest.mark.parametrize("protection", ["dedupe", "dedupe_running", "retry_same_id", "return_budget", "propagate_cancel"])
def test_each_protection_is_needed(protection):
    for seed in range(100):
        with without(protection):
            found = simulate(seed).faults()
        if found:
            break
    expected = {
        "dedupe": "twice",
        "dedupe_running": "twice",
        "retry_same_id": "twice",
        "return_budget": "bytes",
        "propagate_cancel": "idle",
    }[protection]
    assert any(fault.startswith(expected) for fault in found), found
    assert simulate(seed).faults() == []


@pytest.mark.sim
def test_deadlines_that_do_not_shrink_are_noticed():
    assert slow_handlers().faults() == []
    with without("shrink_deadline"):
        assert any(fault.startswith("late") for fault in slow_handlers().faults())


@pytest.mark.sim
def test_the_ledger_notices_a_lost_answer(monkeypatch):
    """The checks can fail: an answerer that forgets to send is found out."""
    monkeypatch.setattr(inbound.InboundRequests, "respond", lambda *_: None)
    link = SessionLink(0, Faults())
    link.attach()
    traffic(link, 5, 1.0)
    link.run(link.now + 2.0)
    link.settle()
    assert {asked.outcome for side in link.sides for asked in side.asked.values()} <= {"expired", ""}
