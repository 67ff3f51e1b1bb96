"""Being told that a device is done: by a semaphore that C code posts to, or by threads that block."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiograd.cuda.driver.bindings import CallError
from aiograd.cuda.driver.completion import HostFunctionCompletions, Semaphore, WaitingThreads
from tests.support import assert_raises

LONG = 60.0


class Device:
    """Events are done when they are in `done`; host functions run when a test says so."""

    def __init__(self) -> None:
        self.done: set[Any] = set()
        self.error: Exception | None = None
        self.queued: list[tuple[Any, int, int]] = []
        self.changed = threading.Condition()

    def call_on_host(self, stream: Any, function: int, argument: int) -> None:
        if isinstance(stream, Exception):
            raise stream
        self.queued.append((stream, function, argument))

    def is_done(self, event: Any) -> bool:
        if self.error is not None:
            raise self.error
        return event in self.done

    def wait(self, event: Any) -> None:
        with self.changed:
            self.changed.wait_for(lambda: event in self.done or self.error is not None, LONG)
        if self.error is not None:
            raise self.error

    def finish(self, *events: Any) -> None:
        """The device comes to some events, and to the host functions behind all that is queued, on a thread that has no Python."""
        with self.changed:
            self.done.update(events)
            self.changed.notify_all()
        for _, function, argument in self.queued:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
        self.queued.clear()

    def fail(self, error: Exception) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()


Make = Callable[..., Any]


@pytest.fixture(params=["host functions", "threads"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Device]]:
    device = Device()
    name = "test-completions"
    completions: Any = (
        HostFunctionCompletions(device.call_on_host, device.is_done, name, heartbeat=0.05)
        if request.param == "host functions"
        else WaitingThreads(device.wait, name)
    )
    yield completions, device
    device.fail(RuntimeError("the test is over"))
    completions.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_a_semaphore_lets_one_wait_go_on_for_each_post() -> None:
    semaphore = Semaphore()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(semaphore.post_address)(semaphore.address)
    semaphore.post()
    semaphore.wait(LONG)
    semaphore.wait(LONG)
    semaphore.wait(0.001)  # nothing left: it is the time that ends this


def test_called_back_when_done_and_not_before(made: tuple[Any, Device]) -> None:
    completions, device = made
    called, stream = threading.Event(), object()
    completions.notify(stream, "a", called.set)
    assert not called.is_set()
    device.finish("a")
    assert called.wait(LONG)


def test_in_the_order_of_a_stream(made: tuple[Any, Device]) -> None:
    completions, device = made
    order: list[str] = []
    last, stream = threading.Event(), object()
    for name in "abc":
        completions.notify(stream, name, lambda name=name: order.append(name) or (name == "c" and last.set()))
    device.finish(*"abc")
    assert last.wait(LONG)
    assert order == ["a", "b", "c"]


def test_streams_do_not_wait_for_each_other(made: tuple[Any, Device]) -> None:
    completions, device = made
    slow, quick = object(), object()
    called = threading.Event()
    completions.notify(slow, "slow", lambda: None)
    completions.notify(quick, "quick", called.set)
    device.finish("quick")
    assert called.wait(LONG)


def test_a_device_that_fails_calls_everybody(made: tuple[Any, Device]) -> None:
    completions, device = made
    called = [threading.Event() for _ in range(3)]
    streams = [object(), object()]
    for number, event in enumerate(called):
        completions.notify(streams[number % 2], number, event.set)
    device.fail(RuntimeError("lost"))  # no host function will run
    assert all(event.wait(LONG) for event in called)


def test_a_callback_that_raises_does_not_stop_the_others(made: tuple[Any, Device], caplog: pytest.LogCaptureFixture) -> None:
    completions, device = made
    called, stream = threading.Event(), object()
    with caplog.at_level(logging.ERROR, "aiograd.cuda"):
        completions.notify(stream, "a", lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        completions.notify(stream, "b", called.set)
        device.finish("a", "b")
        assert called.wait(LONG)
    assert "ZeroDivisionError" in caplog.text


def test_closing_calls_what_is_outstanding() -> None:
    device = Device()
    completions = HostFunctionCompletions(device.call_on_host, device.is_done, "test-completions")
    called = threading.Event()
    completions.notify(object(), "never", called.set)
    completions.close()
    completions.close()
    assert called.is_set()


def test_what_the_device_refuses_is_not_outstanding() -> None:
    device = Device()
    completions = HostFunctionCompletions(device.call_on_host, device.is_done, "test-completions")
    assert_raises(CallError, None, lambda: completions.notify(CallError("cuLaunchHostFunc", 1), "a", lambda: None))
    assert not any(completions._waiting.values())
    completions.close()
