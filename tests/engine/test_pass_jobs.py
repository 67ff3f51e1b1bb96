"""Jobs of the executor that go on to the next nodes of their pass, and when they stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.executors import ComputeExecutor
from aiograd.engine.run import pass_jobs
from aiograd.graph.node import Node
from tests.engine.cases import chain
from tests.support import assert_awaiting_raises, cancel, leaf

ONES = ag.tensor(np.ones(8))


class Watched:
    """The work of jobs: the nodes that they run, in order, and how many jobs there were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes: list[str] = []
        self.jobs = 0
        self.errors: list[BaseException] = []
        #: called on the thread that has run the node of a number
        self.after: dict[int, Callable[[], Any]] = {}
        #: likewise of a certain node
        self.after_node: dict[Node, Callable[[], Any]] = {}
        self.is_open = threading.Event()
        run_node, submit, go_on, run_job = pass_jobs.run_node, ComputeExecutor.submit, pass_jobs.PassJobs.open, pass_jobs.PassJobs.run

        def run(task: Any, node: Node, grads: Any, values: Any) -> Any:
            self.is_open.wait(30)
            place = len(self.nodes)
            self.nodes.append(node.name)
            outputs = run_node(task, node, grads, values)
            self.after.get(place, lambda: None)()
            self.after_node.get(node, lambda: None)()
            return outputs

        def submitted(executor: ComputeExecutor, *args: Any) -> Any:
            self.jobs += 1
            return submit(executor, *args)

        def opened(jobs: pass_jobs.PassJobs) -> None:
            go_on(jobs)
            self.is_open.set()

        def job(*args: Any) -> Any:
            try:
                return run_job(*args)
            except BaseException as error:
                self.errors.append(error)
                raise

        patch.setattr(pass_jobs, "run_node", run)
        patch.setattr(pass_jobs.PassJobs, "run", job)
        patch.setattr(ComputeExecutor, "submit", submitted)
        patch.setattr(pass_jobs.PassJobs, "open", opened)

    def pause_at(self, place: int) -> tuple[asyncio.Future[None], threading.Event]:
        """A future for the moment when a thread is has run a node, and what lets it go on."""
        loop = asyncio.get_running_loop()
        began, gate = loop.create_future(), threading.Event()

        def wait() -> None:
            loop.call_soon_threadsafe(began.set_result, None)
            gate.wait(30)

        self.after[place] = wait
        return began, gate


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


async def test_expensive_nodes_in_a_row_are_one_job(watched: Watched) -> None:
    x = leaf(np.full(8, 1.0))
    async with ag.Engine(inline_ns=1.0):
        await chain(x, 5, 2.0).backward(ONES)
    assert watched.nodes == [*["MulBackward"] * 5, "AccumulateGrad"]
    assert watched.jobs == 1
    assert x.grad is not None and x.grad.numpy().tolist() == [32.0] * 8


async def test_a_job_goes_through_a_few_cheap_nodes(watched: Watched) -> None:
    """Through many it does not: its thread would hold the interpreter's lock, and the loop would wait for it."""
    wide = ag.tensor(np.ones((8, 20_000)))
    for count in (pass_jobs.MOST_CHEAP - 4, 4 * pass_jobs.MOST_CHEAP):
        x = leaf(np.ones((8, 1)))
        watched.nodes.clear()
        watched.is_open.clear()
        async with ag.Engine(inline_ns=20_000.0):
            await (chain(x, count, 1.0) * wide).sum().backward()
        assert watched.nodes.count("AccumulateGrad") == (count < pass_jobs.MOST_CHEAP)
        assert watched.nodes.count("MulBackward") == 1 + min(count, pass_jobs.MOST_CHEAP)
        assert x.grad is not None and x.grad.numpy().tolist() == [[20_000.0]] * 8


async def test_nothing_starts_after_a_cancellation(watched: Watched) -> None:
    x = leaf(np.full(8, 1.0))
    async with ag.Engine(inline_ns=1.0):
        began, gate = watched.pause_at(2)
        running = asyncio.ensure_future(chain(x, 5, 2.0).backward(ONES))
        await began
        await cancel(running)
        gate.set()
    assert watched.nodes == ["MulBackward"] * 3
    assert not watched.errors
    assert x.grad is None


async def test_the_thread_is_left_to_a_job_that_waits(watched: Watched) -> None:
    x = leaf(np.full(8, 1.0))
    async with ag.Engine(inline_ns=1.0, threads=1) as engine:
        began, gate = watched.pause_at(1)
        running = asyncio.ensure_future(chain(x, 3, 2.0).backward(ONES))
        await began
        other = asyncio.ensure_future(engine.offload(lambda: watched.nodes.append("other")))
        await asyncio.sleep(0)
        gate.set()
        await running
        await other
    assert watched.nodes == ["MulBackward", "MulBackward", "other", "MulBackward", "AccumulateGrad"]
    assert x.grad is not None and x.grad.numpy().tolist() == [8.0] * 8


async def test_two_expensive_nodes_run_at_the_same_time(watched: Watched) -> None:
    x, z = leaf(np.full(8, 1.0)), leaf(np.full(8, 2.0))
    meeting = threading.Barrier(2, timeout=30)
    async with ag.Engine(inline_ns=1.0, threads=2):
        y = x.exp() + z.exp()
        watched.after_node = {node: meeting.wait for node in y.grad_fn.next_nodes}
        await y.backward(ONES)
    assert sorted(watched.nodes) == ["AccumulateGrad"] * 2 + ["AddBackward"] + ["ExpBackward"] * 2


async def test_a_failure_names_the_node_that_failed(watched: Watched) -> None:
    def fail() -> None:
        raise FloatingPointError("lost")

    x = leaf(np.full(8, 1.0))
    watched.after[2] = fail
    async with ag.Engine(inline_ns=1.0):
        y = chain(chain(x, 1, 2.0).exp(), 2, 2.0)
        caught = await assert_awaiting_raises(FloatingPointError, None, y.backward(ONES))
    assert len(caught.__notes__) == 1
    assert "ExpBackward" in caught.__notes__[0]
    assert x.grad is None
