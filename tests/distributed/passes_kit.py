"""For tests of backward across workers: graphs that several workers record, what their gradients are in one process, and a network to break.

Note [Stages]
    The functions of a `Stage` are written once and run twice: called by name on real workers, and called directly in one process, on the
    same leaves. The gradients of the one must be those of the other, bit for bit. All functions use each argument once, or only through
    other values, so that no sum is grouped in two ways (see test_bitwise).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.kinds import Kind
from aiograd.testing import Faults, SimulatedNetwork
from tests.distributed.memory import MemoryChannel, MemoryTransport, Switchboard
from tests.distributed.workers import context_here, knows, view, workers

SIZE = 3
Function = Callable[..., Awaitable[Any]]


# -------------------------------------------------------------------- functions and graphs


@dataclass(frozen=True)
class Here:
    """Where a function of a stage runs: its worker's name and weight, and how to call others."""

    name: str
    weight: Any
    call: Callable[..., Awaitable[Any]]


class Stage:
    """Leaves of some workers, and functions that all of them expose.

    Args:
        whole: small whole numbers in float64, whose sums and products are exact in any order, instead of random float32.
    """

    def __init__(self, names: Sequence[str] = "abcd", seed: int = 0, *, whole: bool = False) -> None:
        random = np.random.default_rng(seed)

        def leaf() -> Any:
            data = random.integers(1, 9, SIZE).astype(np.float64) if whole else random.standard_normal(SIZE).astype(np.float32)
            return ag.tensor(data, requires_grad=True)

        self.names = names
        self.x = leaf()
        self.weights = {name: leaf() for name in names}
        self.functions: dict[str, Function] = dict(FUNCTIONS)

    def service(self) -> dist.Service:
        service = dist.Service()
        for name in self.functions:
            service.function(name)(self._exposed(name))
        return service

    def _exposed(self, name: str) -> Function:
        async def exposed(*args: Any) -> Any:
            worker = dist.current_worker()
            return await self.functions[name](Here(worker.name, self.weights[worker.name], worker.call), *args)

        return exposed

    def suspend(self, name: str, rule: Callable[[Any], Awaitable[Any]]) -> None:
        """Have a function weigh its argument; `rule` is what its backward awaits."""

        async def weigh(here: Here, x: Any) -> Any:
            return Suspend.apply(x * here.weight, rule)

        self.functions[name] = weigh

    def differentiates(self, function: str, **options: Any) -> list[str]:
        """Expose `differentiate`, which runs a pass through a function of c in the context of its caller; returns how its passes failed."""
        ends: list[str] = []

        async def differentiate(here: Here, x: Any) -> None:
            try:
                await context_here().backward((await here.call("c", function, x)).sum(), **options)
            except BaseException as error:
                ends.append(type(error).__name__)
                raise

        self.functions["differentiate"] = differentiate
        return ends

    async def local(self, name: str, function: str, *args: Any) -> Any:
        """Call a function in this process."""
        return await self.functions[function](Here(name, self.weights[name], self.local), *args)

    def here(self, worker: dist.Worker) -> Here:
        return Here(worker.name, self.weights[worker.name], worker.call)

    @property
    def leaves(self) -> dict[str, list[Any]]:
        first = self.names[0]
        return {name: [weight, self.x] if name == first else [weight] for name, weight in self.weights.items()}

    async def reference(self, graph: Function) -> dict[str, list[Any]]:
        """Gradients of a graph that this process computes alone, by worker; arrays or None."""
        loss = await graph(Here(self.names[0], self.weights[self.names[0]], self.local), self.x)
        everything = [leaf for leaves in self.leaves.values() for leaf in leaves]
        grads = list(await ag.grad(loss, everything, allow_unused=True))
        return {name: [None if (grad := grads.pop(0)) is None else grad.numpy() for _ in leaves] for name, leaves in self.leaves.items()}

    def found(self, ctx: Context, opened: Sequence[dist.Worker]) -> dict[str, list[Any]]:
        """The gradients that a context has, by worker; arrays or None."""
        grads: dict[str, list[Any]] = {}
        for worker in opened:
            context = view(worker, ctx) if knows(worker, ctx) else None
            grads[worker.name] = [
                None if context is None or leaf not in context.grads else context.grads[leaf].detach().numpy() for leaf in self.leaves[worker.name]
            ]
        return grads

    @contextlib.asynccontextmanager
    async def open(self, board: Switchboard | None = None, **options: Any) -> AsyncIterator[tuple[dist.Worker, ...]]:
        """Workers that expose the functions."""
        async with workers(*self.names, service=self.service(), board=board or Net(), **options) as opened:
            yield opened


async def weigh(here: Here, x: Any) -> Any:
    return x * here.weight


async def via(here: Here, path: str, x: Any) -> Any:
    """Through the weights of this worker and of those of `path`, each calling the next."""
    x = x * here.weight
    return await here.call(path[0], "via", path[1:], x) if path else x


async def sums(here: Here, xs: list[Any]) -> Any:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total * here.weight


async def both(here: Here, x: Any) -> Any:
    """Two results."""
    y = x * here.weight
    return y * 2, y * here.weight


async def fork(here: Here, to: str, x: Any) -> Any:
    """Through several workers at the same time."""
    y = x * here.weight
    return await here.call(here.name, "sums", list(await asyncio.gather(*(here.call(name, "weigh", y) for name in to))))


async def wasteful(here: Here, x: Any) -> Any:
    """Calls somebody for nothing."""
    y = x * here.weight
    await here.call("c", "weigh", y)
    return y


async def keep(here: Here, *xs: Any) -> Any:
    """The first of the arguments; the others are dropped."""
    return xs[0] * here.weight


async def tie(here: Here, u: Any) -> Any:
    """Ties what came to something of b, whose gradient needs nothing more of here."""
    return u * await here.call("b", "weigh", u.detach())


async def onward(here: Here, x: Any) -> Any:
    """The output of c."""
    return await here.call("c", "weigh", x)


FUNCTIONS: dict[str, Function] = {f.__name__: f for f in (weigh, via, sums, both, fork, wasteful, keep, tie, onward)}


async def chain(here: Here, x: Any) -> Any:
    return (await here.call("b", "via", "cd", x)).sum()


async def ring(here: Here, x: Any) -> Any:
    """Each call is made by the one before: a → b → a → b."""
    return (await here.call("b", "via", "ab", x * here.weight)).sum()


async def spiral(here: Here, x: Any) -> Any:
    """a makes every call: through b, and back, three times."""
    for _ in range(3):
        x = (await here.call("b", "weigh", x)) * here.weight
    return x.sum()


async def triangle(here: Here, x: Any) -> Any:
    """Around three workers twice, and every corner has been there before."""
    return (await here.call("b", "via", "cabca", x)).sum()


async def diamond(here: Here, x: Any) -> Any:
    y = await here.call("b", "weigh", x)
    left, right = await asyncio.gather(here.call("c", "weigh", y), here.call("d", "weigh", y))
    return (await here.call("b", "sums", [left, right, y])).sum()


async def forked(here: Here, x: Any) -> Any:
    return ((await here.call("b", "fork", "cda", x)) * here.weight).sum()


async def many(here: Here, x: Any) -> Any:
    """Many edges between the same two workers, both ways."""
    ys = await asyncio.gather(*(here.call("b", "weigh", x * (n + 1)) for n in range(12)))
    return sum((y * here.weight for y in ys[1:]), ys[0]).sum()


async def twice(here: Here, x: Any) -> Any:
    """Two results of one message, one used twice."""
    p, q = await here.call("b", "both", x)
    return (p * here.weight + q + (await here.call("c", "weigh", p))).sum()


async def myself(here: Here, x: Any) -> Any:
    """A worker that calls itself, also from within a call."""
    y = await here.call("a", "weigh", x)
    return (await here.call("b", "via", "bb", y)).sum()


async def crossing(here: Here, x: Any) -> Any:
    """b calls c while c calls b."""
    ys = await asyncio.gather(here.call("b", "via", "c", x), here.call("c", "via", "b", x * here.weight))
    return (ys[0] * ys[1]).sum()


async def knot(here: Here, x: Any) -> Any:
    """c waits for b's answer, b for gradients of a, and a for those of c: which must not wait for c's answer."""
    return (await here.call("c", "tie", await here.call("b", "weigh", x))).sum()


async def alone(here: Here, x: Any) -> Any:
    """Nothing remote."""
    return (x * here.weight).sum()


#: every remote result is used for the loss
GRAPHS: dict[str, Function] = {f.__name__: f for f in (chain, ring, spiral, triangle, diamond, forked, many, twice, myself, crossing, knot, alone)}


async def unused(here: Here, x: Any) -> Any:
    y = await here.call("b", "weigh", x)
    await here.call("b", "weigh", x)
    await here.call("d", "weigh", y)
    return y.sum()


async def beside(here: Here, x: Any) -> Any:
    """A result is used, but not for the loss."""
    y, z = await here.call("b", "weigh", x), await here.call("c", "weigh", x)
    (y * z).sum()
    return y.sum()


async def callee_wastes(here: Here, x: Any) -> Any:
    """The caller cannot know that its callee has called somebody for nothing."""
    return (await here.call("b", "wasteful", x)).sum()


async def dropped(here: Here, x: Any) -> Any:
    """Something comes from c, goes to b and is dropped there. Edges are those of messages, so c takes part, and gets no gradients."""
    y = await here.call("c", "weigh", x)
    return (await here.call("b", "keep", x, y, y * 2)).sum()


async def detached(here: Here, x: Any) -> Any:
    y = await here.call("b", "weigh", x)
    z = await here.call("c", "weigh", y)
    return (y * z.detach()).sum()


async def half_used(here: Here, x: Any) -> Any:
    """One of two results is used, and the other is on its way to a third worker for nothing."""
    p, q = await here.call("b", "both", x)
    await here.call("c", "weigh", q)
    return p.sum()


async def without_grad(here: Here, x: Any) -> Any:
    y = await here.call("b", "weigh", x)
    with ag.no_grad():
        z = await here.call("c", "weigh", y)
    return (y * z).sum()


async def other_root(here: Here, x: Any) -> Any:
    """Two losses over the same edges; one of them is differentiated."""
    y = await here.call("b", "via", "c", x)
    await here.call("c", "via", "b", y)
    return (y * here.weight).sum()


#: some remote results are not used for the loss; with the workers that have no part in it
WASTEFUL: dict[str, tuple[Function, str]] = {
    f.__name__: (f, idle)
    for f, idle in (
        (unused, "d"), (beside, "c"), (callee_wastes, "c"), (dropped, ""), (detached, "c"), (half_used, "c"), (without_grad, "c"), (other_root, ""),
    )
}  # fmt: skip


def same(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    """Fail unless gradients are equal to the last bit."""
    for name, grads in wanted.items():
        for n, (grad, want) in enumerate(zip(found[name], grads, strict=True)):
            if want is None or grad is None:
                assert grad is None and want is None, f"{name}[{n}]: found {grad}, expected {want}"
            else:
                assert grad.dtype == want.dtype and grad.tobytes() == want.tobytes(), f"{name}[{n}]: found {grad}, expected {want}"


def scaled(grads: dict[str, list[Any]], factor: float) -> dict[str, list[Any]]:
    """Gradients times a power of two, which is exact."""
    return {name: [None if grad is None else (grad * grad.dtype.type(factor)).astype(grad.dtype) for grad in known] for name, known in grads.items()}


def passes(opened: Sequence[dist.Worker]) -> list[int]:
    """How many passes run on each worker."""
    return [worker.statistics().passes for worker in opened]


# -------------------------------------------------------------------- rules that misbehave


class Misbehave(ag.Function):
    """The identity, whose rule is the first of `rules`: ``f(gradient) -> gradient``."""

    inline = True

    @staticmethod
    def forward(ctx: Any, x: Any, rule: Callable[[Any], Any]) -> Any:
        ctx.rule = rule
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.rule(g), None


class Suspend(ag.Function):
    """The identity, whose rule is a coroutine function ``f(gradient) -> gradient``."""

    @staticmethod
    def forward(ctx: Any, x: Any, rule: Callable[[Any], Awaitable[Any]]) -> Any:
        ctx.rule = rule
        return x * 1

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        return await ctx.rule(g), None


async def forever(g: Any) -> Any:
    """A rule that does not end."""
    await asyncio.sleep(10_000)


# -------------------------------------------------------------------- messages


@dataclass
class Log:
    """The requests that workers make of each other: who asked whom for what."""

    seen: list[tuple[str, str, str]] = field(default_factory=list)

    def watch(self, *opened: dist.Worker) -> Log:
        for worker in opened:
            self._watch(worker)
        return self

    def _watch(self, worker: dist.Worker) -> None:
        endpoint = worker._core.endpoint
        request = endpoint.request

        def spied(peer: str, kind: int, *rest: Any) -> Any:
            self.seen.append((worker.name, peer, Kind(kind).name))
            return request(peer, kind, *rest)

        endpoint.request = spied  # type: ignore[method-assign]

    def count(self) -> Counter[str]:
        """How many of which kind since the last time."""
        found = Counter(kind for _, _, kind in self.seen)
        self.seen.clear()
        return found


@contextlib.contextmanager
def before(worker: dist.Worker, kind: Kind, action: Callable[[], Awaitable[None] | None], *, is_after: bool = False) -> Iterator[None]:
    """Run `action` whenever a message of a kind has come, before it is served; what it raises is the answer."""
    handlers = worker._core.handlers
    serve = handlers[kind]

    async def served(caller: Any, value: Any, timeout: float) -> Any:
        answer = await serve(caller, value, timeout) if is_after else None
        waiting = action()
        if waiting is not None:
            await waiting
        return answer if is_after else await serve(caller, value, timeout)

    handlers[kind] = served
    try:
        yield
    finally:
        handlers[kind] = serve


#: as `before`, when the message has been served and before it is answered
after = functools.partial(before, is_after=True)


# -------------------------------------------------------------------- a network


class Net(Switchboard):
    """A switchboard on which single workers lose sight of each other: what is sent waits until they see each other again, and nobody is told."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cuts: set[frozenset[str]] = set()
        self.hosts: dict[str, MemoryTransport] = {}

    def transport(self, host: str, **options: Any) -> MemoryTransport:
        transport = self.hosts[host] = _Transport(self, host, **options)
        return transport

    def cut(self, *names: str) -> None:
        """Part one worker from another, or from all if only one is named."""
        self.cuts |= self._pairs(names)
        self._update()

    def heal(self, *names: str) -> None:
        self.cuts -= self._pairs(names)
        self._update()

    def kill(self, name: str) -> None:
        """The process is gone; connections to it are reset."""
        self.hosts[name].crash()

    def _pairs(self, names: tuple[str, ...]) -> set[frozenset[str]]:
        others = names[1:] or tuple(self.hosts)
        return {frozenset((names[0], other)) for other in others if other != names[0]}

    def _update(self) -> None:
        for channel in self.channels:
            if frozenset((channel.side, channel.remote.removeprefix("memory://"))) in self.cuts:
                channel.held = True
            elif channel.held:
                channel.release()


class _Transport(MemoryTransport):
    async def connect(self, url: str, timeout: float) -> MemoryChannel:
        board: Any = self.board
        if frozenset((self.host, url.removeprefix("memory://"))) in board.cuts:
            board.dials += 1
            async with asyncio.timeout(timeout):
                await asyncio.Event().wait()
        return await super().connect(url, timeout)


class Slowly:
    """Transports of a network on which every frame takes its own time."""

    def __init__(self, seed: int) -> None:
        self.network = SimulatedNetwork(seed, faults=Faults(latency=(1e-4, 1e-2), jitter=3e-3))

    def transport(self, host: str, **options: Any) -> Any:
        return self.network.transport(host)
