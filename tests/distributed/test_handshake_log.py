"""Handshakes that fail leave a line, however many there are."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable

import pytest

from aiograd.distributed.rpc import handshake_log
from aiograd.distributed.rpc.handshake_log import ADDRESSES, INTERVAL, HandshakeLog
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.world import World

#: what is in the log, about handshakes
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, logger="aiograd.distributed")
    return lambda: [record.getMessage() for record in caplog.records if "handshake" in record.getMessage()]


async def test_the_first_is_told_in_full_and_others_as_a_number(virtual_clock: object, lines: Lines) -> None:
    log, context = HandshakeLog("w"), contextvars.copy_context()
    for n in range(2300):
        log.failed(f"10.0.0.{n % 2}:{n}", ValueError(f"number {n}"), context)
    assert lines() == ["worker w: a handshake with 10.0.0.0:0 failed: number 0"]
    await asyncio.sleep(INTERVAL)
    assert lines()[1:] == [
        "worker w: 2299 more handshakes failed within 10 s, of 2 addresses, most often with 10.0.0.1 (1150), 10.0.0.0 (1149); the last one with "
        "10.0.0.1:2299: number 2299"
    ]
    log.failed("10.0.0.7:1", None, context)
    assert len(lines()) == 2, "still counted: the last ones were not long ago"
    await asyncio.sleep(2 * INTERVAL)
    assert "1 more handshakes failed" in lines()[2]
    log.failed("10.0.0.8:1", None, context)
    assert lines()[3] == "worker w: a handshake with 10.0.0.8:1 failed: None"
    log.failed("10.0.0.9:1", None, context)
    log.close()
    assert len(lines()) == 5 and "1 more" in lines()[4]
    log.close()
    assert len(lines()) == 5


async def test_addresses_without_end_take_no_memory_without_end(virtual_clock: object, lines: Lines) -> None:
    log, context = HandshakeLog("w"), contextvars.copy_context()
    for n in range(10_000):
        log.failed(f"[2001:db8::{n:x}]:1", None, context)
    assert len(log._sources) == ADDRESSES
    log.close()
    assert f"9999 more handshakes failed within 10 s, of more than {ADDRESSES} addresses" in lines()[1]


async def test_a_worker_that_is_dialled_with_the_wrong_key_writes_a_line_or_two(world: World, virtual_clock: VirtualClock, lines: Lines) -> None:
    b = await world.node("b")
    strangers = [await world.node(f"s{n}", b, keyring=Keyring(bytes([n + 1]) * 32)) for n in range(20)]
    await asyncio.gather(*(each.ask("b", "echo", 1, timeout=5.0) for each in strangers), return_exceptions=True)
    assert b.endpoint.statistics().failed_handshakes == 100
    await asyncio.sleep(handshake_log.INTERVAL)
    assert len(lines()) == 2 and "99 more handshakes failed" in lines()[1]
