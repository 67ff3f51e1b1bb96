"""The service of the workers of a chaos run, on simulated hosts and in real processes alike.

Every call carries a token, by which the journal knows whether it ran, and the time until which it may run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from random import Random
from typing import Any, Protocol

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from tests.chaos import programs


class Journal(Protocol):
    """Where it is noted what ran."""

    def begin(self, token: int, until: float) -> None:
        """A function begins that was called with this token."""

    def end(self, token: int) -> None:
        """It has ended, however it did."""


#: until when the function may run that the running code belongs to
UNTIL: ContextVar[float] = ContextVar("until", default=float("inf"))


class Failure(Exception):
    """The exception that user code raises here."""


class Tally:
    """Counts what it is told; telling twice shows."""

    def __init__(self) -> None:
        self.value = 0

    async def add(self, amount: int) -> int:
        """Add, after a moment in which anything may happen."""
        await asyncio.sleep(0.001)
        self.value += amount
        return self.value


class Scale:
    """A factor that an optimizer updates."""

    def __init__(self) -> None:
        self.weight = ag.zeros((programs.SIZE,), dtype=ag.float64, requires_grad=True)

    def parameters(self) -> list[ag.Tensor]:
        """The factor."""
        return [self.weight]

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        """Times the factor; its gradient is `x`, whatever it is."""
        return x * self.weight


class Served:
    """The functions of one worker, and its hands, see `programs.Hands`.

    Args:
        name: of the worker.
        journal: where it is noted what ran.
    """

    def __init__(self, name: str, journal: Journal) -> None:
        self.name = name
        self.journal = journal
        self.leaves = programs.parameters(name)
        self.service = dist.Service()
        self.service.function("run")(self.run)
        self.service.function("plain")(self.on_plain)
        self.service.function("echo")(self.echo)
        self.service.function("nap")(self.nap)
        self.service.reference(Tally)
        self.service.reference(Scale)
        self.worker: dist.Worker

    # ---------------------------------------------------------------- what is exposed

    async def run(self, program: list, inputs: list, token: int, until: float) -> list:
        """Run a program."""
        self.journal.begin(token, until)
        UNTIL.set(until)
        try:
            await self.pause()
            return await programs.execute(program, inputs, self.leaves, self)
        finally:
            self.journal.end(token)

    def on_plain(self, given: ag.Tensor, parameter: int, token: int, until: float) -> ag.Tensor:
        """Multiply by a parameter, on the executor."""
        self.journal.begin(token, until)
        try:
            return given * self.leaves[parameter]
        finally:
            self.journal.end(token)

    async def echo(self, value: dict, token: int, until: float) -> dict:
        """Give back what came."""
        self.journal.begin(token, until)
        try:
            await self.pause()
            return value
        finally:
            self.journal.end(token)

    async def nap(self, seconds: float, peer: str, token: int, until: float) -> bool:
        """Wait, here or on another worker."""
        self.journal.begin(token, until)
        UNTIL.set(until)
        try:
            if peer == self.name:
                await asyncio.sleep(seconds)
            else:
                await self.ask(f"nap on {peer}", lambda token, until: self.worker.call(peer, "nap", seconds, peer, token, until))
            return True
        finally:
            self.journal.end(token)

    # ---------------------------------------------------------------- hands

    async def ask(self, what: str, make: Callable[[int, float], Coroutine[Any, Any, Any]], timeout: float | None = None) -> Any:
        """Ask a peer for something.

        Args:
            what: for people.
            make: makes the request, given a token and the time until which it may run.
            timeout: seconds; None: the default.
        """
        raise NotImplementedError

    async def pause(self) -> None:
        """A moment's wait, or none."""

    async def call(self, peer: str, program: list[Any], given: list[ag.Tensor]) -> list[ag.Tensor]:
        """See `programs.Hands`."""
        result: list[ag.Tensor] = await self.ask(
            f"a program on {peer}", lambda token, until: self.worker.call(peer, "run", program, given, token, until)
        )
        return result

    async def plain(self, peer: str, given: ag.Tensor, parameter: int) -> ag.Tensor:
        """See `programs.Hands`."""
        result: ag.Tensor = await self.ask(
            f"a plain function on {peer}", lambda token, until: self.worker.call(peer, "plain", given, parameter, token, until)
        )
        return result

    async def offload(self, given: ag.Tensor) -> ag.Tensor:
        """See `programs.Hands`."""
        return await ag.offload(_double, given)

    def hook(self, value: ag.Tensor) -> None:
        """See `programs.Hands`."""

    async def together(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        """See `programs.Hands`."""
        return await asyncio.gather(*awaitables)


async def all_of(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Run coroutines at the same time; the first error cancels the others, in order (a TaskGroup has none, so runs could not be repeated)."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


def _double(given: ag.Tensor) -> ag.Tensor:
    return given * 2.0


def new_values(random: Random, elements: int) -> dict[str, Any]:
    """Values of all sorts, with floating-point numbers of random bits: among them infinities and NaN with a payload."""
    bits = b"".join((random.getrandbits(64) | (0x7FF << 52 if random.random() < 0.2 else 0)).to_bytes(8, "little") for _ in range(elements))
    return {
        "bits": ag.tensor(np.frombuffer(bits, "<f8").copy()),
        "nested": [None, True, -(1 << 63), 1.5, -0.0, "ä\n", bits[:5], (1, [2, {"x": ag.tensor([3], dtype=ag.int64)}])],
        "none": ag.zeros((0, 3)),
    }


def is_same(a: Any, b: Any) -> bool:
    """True if two values are the same to the bit."""
    if isinstance(a, ag.Tensor):
        return isinstance(b, ag.Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and repr(a) == repr(b)

