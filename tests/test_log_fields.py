"""Fields of log records: worker, context, pass and peer."""

from __future__ import annotations

import logging

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.running.log_fields import FIELDS, LogFields, structured_logger
from tests.distributed.memory import Switchboard
from tests.distributed.workers import SECRET, workers
from tests.support import assert_awaiting_raises

service = dist.Service()
mine = logging.getLogger("tests.mine")


@service.function
async def talk(x: ag.Tensor) -> ag.Tensor:
    mine.warning("from a function")
    return x.sum()


@service.function
def fail() -> None:
    raise ValueError("on purpose")


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(LogFields())
        self.seen: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)


@pytest.fixture
def records() -> Records:
    handler = Records()
    mine.addHandler(handler)
    yield handler  # type: ignore[misc]
    mine.removeHandler(handler)


async def test_a_filter_gives_the_users_records_their_place(records: Records) -> None:
    async with workers("driver", "left", service=service) as (driver, _):
        mine.warning("outside")
        async with driver.context() as ctx:
            x = ag.tensor([1.0, 2.0], requires_grad=True)
            y = await driver.call("left", "talk", x)
            x.register_hook(lambda gradient: mine.warning("from a hook"))
            await ctx.backward(y)
        outside, function, hook = records.seen
        assert [getattr(outside, name) for name in FIELDS] == [None] * 4
        assert (function.worker, function.context) == ("left", ctx.id)  # type: ignore[attr-defined]
        assert (hook.worker, hook.context) == ("driver", ctx.id)  # type: ignore[attr-defined]
        assert isinstance(getattr(hook, "pass"), int)


async def test_a_failed_function_says_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiograd.distributed")
    board = Switchboard()
    async with dist.Worker("driver", secret=SECRET, transport=board.transport("driver")) as driver:
        async with dist.Worker("left", service=service, secret=SECRET, transport=board.transport("left")) as left:
            driver.add_peer("left", left.url)
            await assert_awaiting_raises(ag.errors.RemoteError, None, driver.call("left", "fail"))
            (failed,) = [record for record in caplog.records if "ValueError" in record.getMessage()]
            assert failed.worker == "left"  # type: ignore[attr-defined]
    assert all(hasattr(record, name) for record in caplog.records for name in FIELDS)


def test_fields_that_a_call_gives_win(caplog: pytest.LogCaptureFixture) -> None:
    structured_logger("aiograd.test").warning("lost", extra={"peer": "left"})
    (record,) = caplog.records
    assert record.peer == "left" and record.worker is None  # type: ignore[attr-defined]
