"""The thread of a device: when it polls for what is done soon, and when it has the driver call back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiograd.cuda import executor
from aiograd.cuda.executor import DeviceThread
from aiograd.cuda.stream_state import StreamState


class Driver:
    """Its events are done after they were asked so many times."""

    def __init__(self) -> None:
        self.polls = 0
        self.done_after = 0
        self.notified: list[Callable[[], None]] = []

    def record(self, stream: Any) -> Any:
        return object()

    def is_done(self, event: Any) -> bool:
        self.polls += 1
        return self.polls > self.done_after

    def notify(self, stream: Any, event: Any, callback: Callable[[], None]) -> None:
        self.notified.append(callback)
        callback()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def thread(driver: Driver) -> Iterator[DeviceThread]:
    made = DeviceThread("device of a test", driver, weakref.WeakSet())  # type: ignore[arg-type]
    yield made
    made.close()


def _waited(thread: DeviceThread, driver: Driver) -> None:
    stream_state = StreamState(driver, None, "stream")  # type: ignore[arg-type]
    stream_state.count = 1
    called = threading.Event()
    thread.when_done(lambda: (stream_state, 1), called.set)
    assert called.wait(60)


def test_the_driver_is_not_bothered_with_what_is_done_soon(thread: DeviceThread, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "POLLING", 60.0)
    driver.done_after = 10
    _waited(thread, driver)
    assert driver.notified == [] and driver.polls == 11


def test_what_takes_longer_is_the_drivers_to_report(thread: DeviceThread, driver: Driver) -> None:
    driver.done_after = 10**9
    _waited(thread, driver)
    assert len(driver.notified) == 1


def test_other_work_is_not_kept_waiting(thread: DeviceThread, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "POLLING", 60.0)
    driver.done_after = 10**9
    go, started = threading.Event(), threading.Event()
    thread.perform(lambda: (started.set(), go.wait(60)) and None)
    assert started.wait(60)
    stream_state = StreamState(driver, None, "stream")  # type: ignore[arg-type]
    stream_state.count = 1
    called = threading.Event()
    thread.when_done(lambda: (stream_state, 1), called.set)
    after = thread.submit(lambda: len(driver.notified))
    go.set()
    assert after.result(60) == 1 and called.is_set()
