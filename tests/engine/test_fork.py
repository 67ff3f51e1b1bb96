"""After a fork: a child inherits an engine without its threads, and its passes work all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.graph import accumulate_grad
from tests.support import custom_function

pytestmark = [pytest.mark.proc, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")]


@custom_function(lambda a: a * a, saves=True)
def Threaded(ctx: Any, g: Any) -> Any:
    """Its rule runs on the executor."""
    (a,) = ctx.saved_tensors
    return 2 * a * g


async def train() -> float:
    x = ag.tensor([3.0], requires_grad=True)
    y = Threaded.apply(x)
    await (y + Threaded.apply(y)).sum().backward()
    return float(x.grad.item())


EXPECTED = 6.0 + 4 * 27.0


def in_child(work: Callable[[], None], *, seconds: int = 30) -> None:
    """Run `work` in a forked child and fail with its traceback if it fails or takes too long."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks in processes with threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(seconds)
            work()
            status = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        report = stream.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, report or f"the child ended with status {status}"


def expect(value: float) -> None:
    if value != EXPECTED:
        raise AssertionError(f"{value}, expected {EXPECTED}")


def test_a_child_of_a_process_whose_threads_have_started_runs_passes() -> None:
    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(train()) == EXPECTED  # starts the threads of this loop's engine
        in_child(lambda: expect(ag.run(train())))
        in_child(lambda: expect(loop.run_until_complete(train())))  # the very engine whose threads are gone
        assert loop.run_until_complete(train()) == EXPECTED
        loop.run_until_complete(ag.aclose_default_engine())
    finally:
        loop.close()


def test_a_child_of_a_child() -> None:
    def child() -> None:
        expect(ag.run(train()))
        in_child(lambda: expect(ag.run(train())))

    assert ag.run(train()) == EXPECTED
    in_child(child)


def test_a_child_forked_while_a_gradient_is_being_committed_elsewhere_is_not_stuck() -> None:
    with accumulate_grad._commit_lock:  # as another thread might hold it
        in_child(lambda: expect(ag.run(train())))
    assert ag.run(train()) == EXPECTED


def test_gradients_of_the_parent_are_known_to_the_child_and_stay_its_own() -> None:
    x = ag.tensor([3.0], requires_grad=True)
    ag.run(run_backward(x))

    def child() -> None:
        ag.run(run_backward(x))
        np.testing.assert_array_equal(x.grad.numpy(), [12.0])

    in_child(child)
    np.testing.assert_array_equal(x.grad.numpy(), [6.0])


async def run_backward(x: Any) -> None:
    await Threaded.apply(x).sum().backward()


async def test_an_engine_of_a_running_loop_is_not_used_by_the_loop_of_a_child() -> None:
    async with ag.Engine(threads=2):
        assert await train() == EXPECTED
        in_child(lambda: expect(ag.run(train())))
        assert await train() == EXPECTED
