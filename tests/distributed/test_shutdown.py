"""The end of a process or of its loop in the middle of a pass: quick, quiet, and known to the peers."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.cluster import LocalCluster
from aiograd.errors import ContextError, DistributedError, RemoteError, WorkerLostError
from tests.distributed.shutdown_service import OnLoop, reached
from tests.distributed.workers import PATIENT, SECRET, leaf, settled, until, workers
from tests.sweeps import swept

SERVICE = "tests.distributed.shutdown_service:service"
#: every warning is an error, and the interpreter looks closely
STRICT = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error", "OPENBLAS_NUM_THREADS": "1"}
#: what a process must not say at its end
COMPLAINT = re.compile(r"Traceback|Warning|Error|never (awaited|retrieved)|destroyed|Exception ignored|unclosed")


async def begun(driver: dist.Worker, name: str) -> None:
    while not await driver.call(name, "has_begun"):
        await asyncio.sleep(0.005)


async def test_a_worker_that_is_closed_says_so_to_those_for_whom_it_works() -> None:
    service = dist.Service()
    waiting = 0

    @service.function
    async def on_loop(x: ag.Tensor) -> ag.Tensor:
        return OnLoop.apply(x)

    @service.function
    async def wait(x: ag.Tensor) -> None:
        nonlocal waiting
        waiting += 1
        await asyncio.Event().wait()

    reached.clear()
    async with workers("a", "b", service=service) as (a, b):
        async with a.context() as ctx:
            x = leaf(1.0)
            y = await a.call("b", "on_loop", x)
            inside = [asyncio.ensure_future(ctx.backward(y.sum())), asyncio.ensure_future(a.call("b", "wait", x))]
            await until(lambda: reached and waiting == 1)
        for each in inside:  # who leaves the context has itself to blame
            with pytest.raises(ContextError):
                await each
        await settled(a, b)
        reached.clear()
        async with a.context() as ctx:
            y = await a.call("b", "on_loop", x)
            inside = [asyncio.ensure_future(ctx.backward(y.sum())), asyncio.ensure_future(a.call("b", "wait", x))]
            outside = asyncio.create_task(a.call("b", "wait", x.detach()), context=contextvars.Context())
            await until(lambda: reached and waiting == 3)
            await b.aclose()
            for each in (*inside, outside):
                with pytest.raises(WorkerLostError, match="it was closed") as caught:
                    await each
                assert caught.value.worker == "b"
            assert x not in ctx.grads and not a.statistics().passes


@pytest.mark.proc
async def test_a_worker_that_is_told_to_end_in_the_middle_of_its_work_ends_quickly_and_tells_its_peers(capfd: pytest.CaptureFixture[str]) -> None:
    kinds = ("on_loop", "on_thread", "never_returns")
    lost: list[tuple[str, int]] = []
    cluster = LocalCluster(3, names=kinds, service=SERVICE, environment=STRICT, on_lost=lambda name, status: lost.append((name, status)))
    async with cluster:
        driver, pids = cluster.driver, cluster.pids

        async def one(kind: str) -> BaseException:
            async with driver.context() as ctx:
                x = leaf(1.0)

                async def work() -> None:
                    await ctx.backward((await driver.call(kind, kind, x)).sum())

                working = asyncio.create_task(work())
                await begun(driver, kind)
                os.kill(pids[kind], signal.SIGTERM)
                with pytest.raises(DistributedError) as caught:
                    await working
                assert x not in ctx.grads
                return caught.value

        for error in await asyncio.gather(*map(one, kinds)):
            assert isinstance(error, WorkerLostError) and "it was closed" in str(error), f"told, rather than found silent: {error!r}"
        while len(lost) < 3:
            await asyncio.sleep(0.01)
        assert sorted(lost) == sorted((kind, 0) for kind in kinds)
        assert driver.statistics().contexts == driver.statistics().passes == 0
    said = capfd.readouterr().err
    assert not COMPLAINT.search(said), said


@pytest.mark.proc
async def test_a_function_that_exits_ends_its_call_and_not_its_worker(capfd: pytest.CaptureFixture[str]) -> None:
    lost: list[int] = []
    options: dict[str, Any] = {"environment": STRICT, "log_level": "critical"}  # what is on standard error otherwise is no log
    async with LocalCluster(1, names=["w"], service=SERVICE, on_lost=lambda name, status: lost.append(status), **options) as cluster:
        with pytest.raises(RemoteError, match=r"^Error on Node w: exits: SystemExit: 7$") as caught:
            await cluster.driver.call("w", "exits")
        assert caught.value.type_name == "SystemExit"
        assert await cluster.driver.call("w", "has_begun") is False and not lost
    said = capfd.readouterr().err
    assert not COMPLAINT.search(said), said


#: a process with a worker that is in the middle of a pass in which the peer "t" takes part, when it ends in the way of its third argument
CHILD = """
import asyncio, signal, sys
import aiograd as ag
import aiograd.distributed as dist

url, secret, how = sys.argv[1:]

async def work(worker, ctx):
    x = ag.tensor([1.0], requires_grad=True)
    try:
        await ctx.backward((await worker.call("t", "on_loop", x)).sum())
    except ag.errors.DistributedError as error:
        print(error)

async def main():
    worker = dist.Worker("c", peers={"t": url}, secret=bytes.fromhex(secret), limits=dist.Limits(missed_heartbeats=1000))
    if how == "left open":
        await worker.__aenter__()
        ctx = await worker.context().__aenter__()
        asyncio.create_task(work(worker, ctx))
        while not await worker.call("t", "has_begun"):
            await asyncio.sleep(0.005)
        print("begun", flush=True)
        return
    async with worker, worker.context() as ctx:
        working = asyncio.create_task(work(worker, ctx))
        while not await worker.call("t", "has_begun"):
            await asyncio.sleep(0.005)
        print("begun", flush=True)
        if how == "raise":
            raise ValueError("the end of main")
        if how == "stop":
            asyncio.get_running_loop().stop()
        if how == "return":
            return
        await working

ag.run(main()) if how.endswith("uvloop") else asyncio.run(main())
"""


@pytest.mark.proc
@pytest.mark.parametrize(
    ("how", "status", "last"),
    swept([
        ("return", 0, ""),
        ("raise", 1, "ValueError: the end of main"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("interrupt uvloop", -signal.SIGINT, "KeyboardInterrupt"),
        ("left open", 0, ""),
        ("stop", 1, "RuntimeError: Event loop stopped before Future completed."),
    ], keep=3),
)  # fmt: skip
async def test_a_loop_that_ends_in_the_middle_of_a_pass(how: str, status: int, last: str) -> None:
    service = dist.Service()
    begun = asyncio.Event()

    @service.function
    async def on_loop(x: ag.Tensor) -> ag.Tensor:
        y = OnLoop.apply(x)
        y.grad_fn.register_prehook(lambda grads: begun.set())
        return y

    service.function("has_begun")(_is_set(begun))
    limits = dist.Limits() if how == "left open" else PATIENT  # where nothing tells the peer, it finds out by itself
    async with dist.Worker("t", service=service, secret=SECRET, limits=limits) as t:
        environment = {**os.environ, **STRICT, "PYTHONPATH": str(Path(__file__).parents[2])}
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, t.url, SECRET.hex(), how, env=environment, stdout=pipe, stderr=pipe
        )
        assert child.stdout is not None
        assert (await child.stdout.readline()).startswith(b"begun")
        if how.startswith("interrupt"):
            child.send_signal(signal.SIGINT)
        printed, written = await child.communicate()
        lines = written.decode().splitlines()
        said = "\n".join(line for line in lines if not line.startswith("Executing <"))  # the interpreter's complaint of a slow machine
        assert child.returncode == status, (said, printed)
        if how == "left open":  # the peer keeps the context for its lease; sockets are reported
            assert not re.search("destroyed|never", said), said
        else:
            assert (said.splitlines() or [""])[-1] == last, said
            assert said.count("Traceback") == (2 if "interrupt" in how else 1 if last else 0), said
            assert not re.search("destroyed|never|Warning|unclosed|Exception ignored", said), said
            while t.statistics().contexts:  # where nobody tells it, a context is kept for its lease, which is longer than a test may take
                await asyncio.sleep(0.005)
        while t.statistics().passes:
            await asyncio.sleep(0.005)


def _is_set(event: asyncio.Event) -> Any:
    async def has_begun() -> bool:
        return event.is_set()

    return has_begun
