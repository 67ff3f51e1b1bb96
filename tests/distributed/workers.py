"""Workers for tests: as many as wanted in one process, on one switchboard, each knowing the others; all closed and seen idle at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.testing import SimulatedLoop, simulated_run
from tests.distributed.memory import Switchboard

SECRET = b"0123456789abcdef" * 2
OTHER_SECRET = b"fedcba9876543210" * 2
#: on a real loop nobody is lost for being slow
PATIENT = Limits(missed_heartbeats=1000)


@contextlib.asynccontextmanager
async def workers(
    *names: str,
    service: dist.Service | None = None,
    services: Mapping[str, dist.Service] | None = None,
    board: Switchboard | None = None,
    secrets: Mapping[str, Any] | None = None,
    idle: bool = True,
    **options: Any,
) -> AsyncIterator[tuple[dist.Worker, ...]]:
    """Open workers; ``async with workers("a", "b", service=service) as (a, b)``.

    Args:
        service: of all of them. services: of those that have one of their own.
        secrets: secret or Keyring by name, where they are not all the same.
        idle: check at the end that nothing is open or running any more.
        options: of every Worker.
    """
    board = board or Switchboard()
    if not isinstance(asyncio.get_running_loop(), SimulatedLoop):
        options.setdefault("limits", PATIENT)
    opened: list[dist.Worker] = []
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            mine = (services or {}).get(name, service)
            secret = (secrets or {}).get(name, SECRET)
            transport = board.transport(name)
            opened.append(await stack.enter_async_context(dist.Worker(name, service=mine, secret=secret, transport=transport, **options)))
        for worker in opened:
            for other in opened:
                worker.add_peer(other.name, other.url)
        yield tuple(opened)
        if idle:
            await settled(*opened)


def two_principals() -> tuple[Keyring, Keyring]:
    """Keys of a worker that two principals may call, the workers' own and a tenant, and the tenant's."""
    both = Keyring(SECRET)
    both.add("tenant", OTHER_SECRET, principal="tenant")
    return both, Keyring(OTHER_SECRET, kid="tenant", principal="tenant")


def busy(worker: dist.Worker) -> dict[str, int]:
    """Counts of everything open or running on a worker."""
    figures = worker.statistics()
    counts = {name: getattr(figures, name) for name in ("contexts", "passes", "calls", "in_doubt", "bytes_held")}
    counts["running"] = sum(peer.running for peer in figures.peers)
    counts["outstanding"] = sum(peer.outstanding for peer in figures.peers)
    return {name: count for name, count in counts.items() if count}


async def settled(*opened: dist.Worker, turns: int = 200) -> None:
    """Wait until nothing is open or running, and fail if that does not come about by itself. Lost workers are told of an abort for a silence."""
    for turn in range(2 * turns):
        if not any(map(busy, opened)):
            return
        await asyncio.sleep(0 if turn < turns else 0.02)
    left = {worker.name: counts for worker in opened if (counts := busy(worker))}
    assert not left, f"not idle at the end: {left}"


async def until(condition: Callable[[], Any], turns: int = 10_000) -> None:
    """Give the loop turns until something has happened."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


def view(worker: dist.Worker, context: Context) -> Context:
    """A context as another worker sees it."""
    return next(each for each in worker._contexts if (each.key, each.principal) == (context.key, context.principal))


def knows(worker: dist.Worker, context: Context) -> bool:
    """True if a worker has a context."""
    return any((each.key, each.principal) == (context.key, context.principal) for each in worker._contexts)


def leaf(*values: float, dtype: Any = np.float32) -> Any:
    """A one-dimensional tensor that requires grad."""
    return ag.tensor(np.array(values, dtype), requires_grad=True)


def values(tensor: Any) -> list[Any]:
    """A tensor's values as lists."""
    return tensor.detach().tolist()  # type: ignore[no-any-return]


def simulate(main: Callable[[], Coroutine[Any, Any, Any]], **options: Any) -> float:
    """Run on virtual time; returns how many seconds it took. Nothing may be left running."""
    run = simulated_run(main, **options)
    assert not run.leftover_tasks, run.leftover_tasks
    return run.time


# -------------------------------------------------------------------- functions that workers of tests expose


async def echo(value: Any) -> Any:
    return value


async def square(x: Any) -> Any:
    return x * x


async def double(x: Any) -> Any:
    return x * 2


async def triple(x: Any) -> Any:
    return x * 3


def context_here() -> Context:
    """The context that a function runs in, which has one."""
    context = dist.current_context()
    assert context is not None
    return context


async def relay(to: str, function: str, *args: Any) -> Any:
    """Call a function of a third worker, or of the caller."""
    return await dist.current_worker().call(to, function, *args)


def exposing(*functions: Callable[..., Any]) -> dist.Service:
    """A service of functions by their names."""
    service = dist.Service()
    for function in functions:
        service.function(function)
    return service
