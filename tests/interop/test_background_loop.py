"""The loop behind functions that torch and JAX call: who waits for whom, in which context, and how it ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import subprocess
import sys
import threading
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentTypeError, LoopError, MissingExtraError
from aiograd.graph import current_node
from aiograd.interop import BackgroundLoop, background
from aiograd.interop.background import LoopChoice, run_on, shared_loop
from tests.support import assert_raises


async def identity(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def test_a_coroutine_runs_in_another_thread_and_the_loop_ends_with_its_block() -> None:
    async def work() -> tuple[threading.Thread, Any]:
        x = ag.tensor([2.0], requires_grad=True)
        await (x * x).sum().backward()
        return threading.current_thread(), x.grad

    with BackgroundLoop() as loop:
        thread, grad = loop.run(work())
        assert thread is not threading.current_thread() and grad.tolist() == [4.0] and repr(loop) == "<BackgroundLoop: running>"
        assert loop.run(work())[0] is thread
    assert not thread.is_alive() and repr(loop) == "<BackgroundLoop: closed>"
    loop.close()
    assert_raises(LoopError, "has been closed; make another", lambda: loop.run(work()))
    with pytest.raises(ArgumentTypeError, match="expected a coroutine"), BackgroundLoop() as other:
        other.run(work)  # type: ignore[arg-type]


def test_exceptions_pass_through() -> None:
    async def fail() -> None:
        raise KeyError("nothing there")

    with BackgroundLoop() as loop, pytest.raises(KeyError, match="nothing there"):
        loop.run(fail())


def test_the_thread_ends_when_nobody_refers_to_the_loop() -> None:
    loop = shared_loop()
    assert shared_loop() is loop
    thread = loop.run(_thread())
    del loop
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    again = shared_loop()
    assert again.run(identity(1)) == 1, "another one"
    again.close()
    assert shared_loop() is not again


def test_the_shared_loop_lasts_as_long_as_a_worker_is_open_on_it() -> None:
    loop = shared_loop()
    thread = loop.run(_thread())

    async def opened() -> Any:
        return await dist.Worker("open").__aenter__()

    async def closed(worker: Any) -> None:
        await worker.__aexit__(None, None, None)

    worker = loop.run(opened())
    del loop
    gc.collect()
    again = shared_loop()
    assert again.run(_thread()) is thread and thread.is_alive()
    again.run(closed(worker))
    del again, worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


async def _thread() -> threading.Thread:
    return threading.current_thread()


def test_what_waits_when_a_loop_is_closed_is_told() -> None:
    loop, waiting = BackgroundLoop(), threading.Event()

    async def wait() -> None:
        waiting.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(loop.run, wait())
        waiting.wait()
        loop.close()
        assert_raises(LoopError, "was closed, or its task cancelled", future.result)


def test_a_loop_that_is_left_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LOOK_SECONDS", 0.001)
    loop = asyncio.new_event_loop()
    main = identity(1)
    assert_raises(LoopError, "has stopped", run_on, loop, main)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    main = identity(1)
    assert_raises(LoopError, "has been closed", run_on, loop, main)


def test_an_interrupt_in_the_waiting_thread_cancels_the_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def interrupted(*_: Any) -> Any:
        begun.wait()
        raise KeyboardInterrupt

    with BackgroundLoop() as loop:
        assert loop.run(identity(1)) == 1
        monkeypatch.setattr(background.concurrent.futures, "wait", interrupted)
        assert_raises(KeyboardInterrupt, None, lambda: loop.run(wait()))
        assert ended.wait(60)


async def test_waiting_in_the_loops_own_thread_is_refused() -> None:
    assert_raises(LoopError, "own event loop.*another thread", lambda: run_on(asyncio.get_running_loop(), identity(1)))
    with BackgroundLoop() as loop:
        assert loop.run(identity(3)) == 3, "another loop may be waited for"

        async def inside() -> None:
            loop.run(identity(1))

        assert_raises(LoopError, "own event loop", lambda: loop.run(inside()))


async def test_the_choice_of_a_loop() -> None:
    home = asyncio.get_running_loop()
    with BackgroundLoop() as named:
        assert LoopChoice(named).pick() is named.loop and LoopChoice(home).pick() is home
        choice, never = LoopChoice(None), LoopChoice(None, at_home=False)
        assert await asyncio.to_thread(choice.pick) is home and await asyncio.to_thread(never.pick) is not home
        assert choice.pick() is never.pick() is shared_loop().loop, "the loop's own thread must not wait for it"
    elsewhere = await asyncio.to_thread(LoopChoice, None)
    assert await asyncio.to_thread(elsewhere.pick) is shared_loop().loop
    assert_raises(ArgumentTypeError, "BackgroundLoop or an event loop", LoopChoice, 3)


# -------------------------------------------------------------------- surroundings

WORD: contextvars.ContextVar[str] = contextvars.ContextVar("WORD", default="none")


def test_it_runs_in_the_callers_context() -> None:
    async def look() -> tuple[str, Any, bool]:
        word, dtype = WORD.get(), ag.get_default_dtype()
        WORD.set("changed")
        return word, dtype, ag.is_grad_enabled()

    def caller() -> Any:
        WORD.set("callers")
        ag.set_default_dtype("float64")
        with BackgroundLoop() as loop:
            found = loop.run(look())
        assert WORD.get() == "callers", "a copy"
        return found

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # where a default dtype belongs to the context, not to the process
        assert pool.submit(contextvars.copy_context().run, caller).result() == ("callers", "float64", True)


class Inside(ag.Function):
    """Its rule waits for a pass on a loop, and says whether that runs within the pass of the rule."""

    loop: Any = None
    nodes: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        async def another() -> Any:
            Inside.nodes.append(current_node())
            y = ag.tensor([3.0], requires_grad=True)
            await ag.offload(lambda: None)  # takes a thread of the engine
            await (y * y).sum().backward()
            return y.grad

        found = run_on(Inside.loop, another())
        return grad * found


async def test_a_rule_may_wait_for_a_pass_on_its_own_loop_even_if_it_has_the_only_thread() -> None:
    x = ag.tensor([1.0], requires_grad=True)
    async with ag.Engine(threads=1):
        Inside.loop = asyncio.get_running_loop()
        try:
            await Inside.apply(x).sum().backward()
        finally:
            Inside.loop = None
    assert x.grad is not None and x.grad.tolist() == [6.0]
    assert Inside.nodes.pop() is None, "it belongs to no pass"


def test_a_distributed_context_is_the_callers() -> None:
    async def look() -> Any:
        return dist.current_context()

    with BackgroundLoop() as loop, loop.entered(dist.Worker("alone")) as worker, loop.entered(worker.context()) as context:
        assert loop.run(look()) is None
        with worker.within(context):
            assert loop.run(look()) is context


class Manager:
    """An asynchronous context manager that keeps what it is told."""

    def __init__(self, swallows: bool = False, fails: bool = False) -> None:
        self.swallows, self.fails = swallows, fails
        self.told: list[Any] = []

    async def __aenter__(self) -> str:
        if self.fails:
            raise ValueError("it does not open")
        self.told.append(asyncio.current_task())
        return "value"

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.told += [asyncio.current_task(), kind]
        return self.swallows


def test_a_context_manager_is_entered_and_left_by_one_task() -> None:
    with BackgroundLoop() as loop:
        calm, strict, soft, interrupted = Manager(), Manager(), Manager(swallows=True), Manager()
        with loop.entered(calm) as value:
            assert value == "value"
        with pytest.raises(KeyError, match="inside"), loop.entered(strict):
            raise KeyError("inside")
        with loop.entered(soft):
            raise KeyError("inside")
        with pytest.raises(KeyboardInterrupt), loop.entered(interrupted):
            raise KeyboardInterrupt
        with pytest.raises(ValueError, match="does not open"), loop.entered(Manager(fails=True)):
            pass
        for manager, kind in ((calm, None), (strict, KeyError), (soft, KeyError), (interrupted, asyncio.CancelledError)):
            entered, left, told = manager.told
            assert entered is left and told is kind
        assert loop.run(identity(1)) == 1


# -------------------------------------------------------------------- processes

FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from aiograd.interop import BackgroundLoop

async def number():
    return 7

loop = BackgroundLoop()
assert loop.run(number()) == 7
child = os.fork()
if child == 0:
    os._exit(loop.run(number()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.proc
def test_a_forked_child_has_a_loop_of_its_own_and_a_process_ends_with_one_open() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


MISSING = """
import sys
sys.modules["jax"] = sys.modules["torch"] = None
import aiograd as ag
from aiograd.interop import jax, torch
from aiograd.errors import MissingExtraError
for call in (lambda: jax.wrap(len), lambda: jax.to_jax(ag.ones(2)), lambda: torch.function(len)(1)):
    try:
        call()
    except MissingExtraError as error:
        print(error)
"""


@pytest.mark.proc
def test_the_extra_is_named_where_a_library_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done.stderr
    assert all("pip install 'aiograd[jax]'" in line for line in lines[:2]) and "pip install 'aiograd[torch]'" in lines[2]
    assert issubclass(MissingExtraError, ImportError)
