"""The service of the worker processes of `processes`; imported there by name.

Besides what every worker of a chaos run serves, one can be told to run a pass of its own and to kill itself at a protocol point.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import failpoints
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.failpoints import Failpoint
from aiograd.errors import AiogradError, CommitUnknown, DistributedError
from tests.chaos import programs
from tests.chaos.oracle import factor_of
from tests.chaos.service import UNTIL, Served


class Counts:
    """Counts what ran in this process."""

    def __init__(self) -> None:
        self.ran: Counter[int] = Counter()
        self.running = 0

    def begin(self, token: int, until: float) -> None:
        """See `service.Journal`."""
        self.ran[token] += 1
        self.running += 1

    def end(self, token: int) -> None:
        """See `service.Journal`."""
        self.running -= 1


class ProcessServed(Served):
    """The service of one process."""

    def __init__(self) -> None:
        self.counts = Counts()
        super().__init__("", self.counts)
        self.armed: list[Failpoint] = []
        self._tokens = 0
        for function in (self.drive, self.gradients, self.orphans, self.arm, self.figures):
            self.service.function(function)

    def settle(self) -> dist.Worker:
        """Know which worker this is."""
        worker: dist.Worker = dist.current_worker()
        if self.name != worker.name:
            self.name, self.worker, self.leaves = worker.name, worker, programs.parameters(worker.name)
        return worker

    async def run(self, program: list, inputs: list, token: int, until: float) -> list:
        """See `Served.run`."""
        self.settle()
        return await super().run(program, inputs, token, until)

    async def ask(self, what: str, make: Callable[[int, float], Coroutine[Any, Any, Any]], timeout: float | None = None) -> Any:
        """See `Served.ask`; a token is different in each process and for each call."""
        self._tokens += 1
        return await make(os.getpid() << 32 | self._tokens, UNTIL.get())

    # ---------------------------------------------------------------- a pass of its own

    async def drive(self, program: list, workers: list, seconds: float) -> dict:
        """Run a program forward and backward in a context of this worker's own, and see whether gradients are right.

        Returns:
            ``outcome``: a word; ``error``: what was raised; ``at``: the time then, on a clock that all processes share; ``wrong``: what is
            not as it should be.
        """
        worker = self.settle()
        want = await programs.reference(program, worker.name, workers)
        found: dict[str, Any] = {"outcome": "committed", "error": "", "wrong": []}
        async with worker.context() as ctx:
            x = programs.new_input()
            is_in, doubtful = True, tuple[str, ...]()
            try:
                async with asyncio.timeout(2 * seconds):
                    loss = programs.total(await programs.execute(program, [x], self.leaves, self))
                    await ctx.backward(loss, timeout=seconds)
            except AiogradError as error:
                found["error"] = f"{type(error).__name__}: {error}"
                found["outcome"] = "unknown" if isinstance(error, CommitUnknown) else "failed"
                is_in = error.committed
                if isinstance(error, CommitUnknown):
                    doubtful = error.workers
            found["at"] = time.monotonic()
            for name in dict.fromkeys((worker.name, *workers)):
                found["wrong"] += await self._check(name, want[name], is_in, name in doubtful)
        return found

    async def _check(self, name: str, want: list[Any], is_in: bool, is_doubtful: bool) -> list[str]:
        try:
            grads = await self.worker.call(name, "gradients")
        except DistributedError:
            return []  # it is gone, and the context with it
        wrong = []
        for i, (grad, expected) in enumerate(zip(grads, want, strict=True)):
            factor = factor_of(None if grad is None else grad.numpy(), expected)
            if factor is not None and factor != int(is_in) and not (is_doubtful and factor in (0, 1)):
                wrong.append(f"gradient {i} on {name} is {factor} times what it should be, and the pass {'is in' if is_in else 'is out'}")
        return wrong

    async def gradients(self) -> list:
        """The gradients of this worker's leaves in the caller's context."""
        self.settle()
        context = dist.current_context()
        return [None if context is None else _detached(context.grads.get(leaf)) for leaf in self.leaves]

    async def orphans(self) -> dict:
        """Of every context that was not opened here and in which nothing is undecided: whether anything was committed in it."""
        worker = self.settle()
        contexts: list[Context] = list(worker._contexts)
        return {c.key.hex(): len(c.grads) > 0 for c in contexts if c.origin != worker.name and not c.participants and not c.in_doubt and c.recv_nodes}

    # ---------------------------------------------------------------- what is done to it

    async def arm(self, point: str, hit: int, note: str) -> None:
        """Kill this process when it comes to a point; the time is noted in the file `note`."""

        def kill() -> None:
            Path(note).write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        def arm() -> None:
            for failpoint in self.armed:
                failpoint.disarm()
            self.armed = [failpoints.arm(point, kill, hit=hit)] if point else []

        asyncio.get_running_loop().call_later(0.02, arm)  # after the answer to this

    async def figures(self) -> dict:
        """Counts of contexts, calls and bytes on this worker, this call left out."""
        figures = self.settle().statistics()
        mine = min((peer.bytes_held for peer in figures.peers if peer.name == "driver" and peer.running == 1), default=0)
        return {
            "contexts": figures.contexts,
            "passes": figures.passes,
            "calls": figures.calls,
            "bytes_held": figures.bytes_held - mine,
            "running": self.counts.running,
            "twice": sum(count > 1 for count in self.counts.ran.values()),
        }


def _detached(grad: Any) -> ag.Tensor | None:
    return None if grad is None else grad.detach()


served = ProcessServed()
service = served.service
