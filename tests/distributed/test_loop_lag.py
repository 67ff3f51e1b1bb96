"""The lag of a worker's loop: samples of a loop whose time the test sets, and none before and after they are wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiograd.distributed import loop_lag
from aiograd.distributed.loop_lag import INTERVAL, SAMPLES, LoopLag
from tests.distributed.workers import until, workers


class Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due, self.call, self.is_cancelled = due, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class LateLoop:
    """An event loop whose timers fire when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        callback(*arguments)

    def call_at(self, due: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        self.timers.append(Timer(due, lambda: callback(*arguments)))
        return self.timers[-1]

    def fire(self, late: float) -> None:
        (timer,) = self.timers
        self.timers.clear()
        self.now = timer.due + late
        timer.call()


def test_each_sample_is_how_late_the_timer_fires() -> None:
    loop: Any = LateLoop()
    lag = LoopLag()
    assert lag.quantile(0.5) == 0.0 and not lag.is_sampled
    lag.sample(loop, 60.0)
    for late in (0.0, 0.0, 0.3, 0.02, 0.0):
        loop.fire(late)
    assert lag.histogram.count == 5 and abs(lag.histogram.total - 0.32) < 1e-9
    assert lag.quantile(0.5) == 0.0 and abs(lag.quantile(0.99) - 0.3) < 1e-9
    for _ in range(SAMPLES):
        loop.fire(0.0)
    assert lag.quantile(0.99) < 1e-9 and lag.histogram.count == SAMPLES + 5, "quantiles are of the latest, the histogram of all"


def test_sampling_ends_with_the_time_that_was_asked_for_and_begins_again() -> None:
    loop: Any = LateLoop()
    lag = LoopLag()
    lag.sample(loop, 4 * INTERVAL)
    lag.sample(loop, INTERVAL / 2)
    assert len(loop.timers) == 1, "one timer, however many ask"
    while loop.timers:
        loop.fire(0.0)
    assert lag.histogram.count in (4, 5) and not lag.is_sampled
    loop.now += 50.0
    lag.sample(loop, 1.0)
    loop.fire(0.0)
    assert lag.quantile(0.99) < 1e-9, "the time without samples is no lag"
    lag.stop()
    assert loop.timers[0].is_cancelled and not lag.is_sampled


async def test_samples_may_be_asked_for_from_another_thread_and_end_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "INTERVAL", 0.0)
    async with workers("driver") as (driver,):
        core = driver._core
        thread = threading.Thread(target=core.loop_lag.sample, args=(core.loop, 1000.0))
        thread.start()
        thread.join()
        await until(lambda: core.loop_lag.histogram.count > 2)
        assert core.loop_lag.is_sampled
    assert not core.loop_lag.is_sampled
