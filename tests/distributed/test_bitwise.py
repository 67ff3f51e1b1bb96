"""Gradients of a graph over several workers are those of the same graph in one process, to the last bit, whatever the timing.

Note [What the same graph is]
    Sums of gradients are folded from the contribution recorded last to the one recorded first. A message is one more place where that
    happens: what the receiver of a value contributes by several uses of it is added up there first, and arrives as one contribution. So a
    remote function that uses an argument once, or returns it, gives exactly the sums of an ordinary function; one that uses it several
    times gives those of an ordinary function that begins by taking a copy of it. The programs here are of either kind, and the reference
    copies arguments (multiplies them by 1) in the second.

Source of what breaks it: values of very different size, so that a sum depends on its order, and functions whose turns come in another order
than that of their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.cluster import LocalCluster
from aiograd.distributed.rpc.codec import Encoding
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed import bitwise_service
from tests.distributed.passes_kit import GRAPHS, WASTEFUL, Here, Slowly, Stage, passes, same
from tests.distributed.workers import PATIENT, context_here, simulate, values, view, workers

# -------------------------------------------------------------------- random programs

#: parameters per worker
PARAMETERS = 1
#: what steps of programs do; most of those that may call do
KINDS = ("parameter", "multiply", "multiply", "times", "add", "scale")
CALLS = ("call",) * 6


class Programs(Stage):
    """A stage with one more function: it runs a program, which is data.

    Args:
        seed: draws the leaves, and how long functions take.
        copies: whether the reference copies arguments: see Note [What the same graph is].
    """

    def __init__(self, names: str, seed: int, *, copies: bool) -> None:
        super().__init__(names, seed)
        random = np.random.default_rng(seed)

        def leaf() -> Any:
            return ag.tensor(random.uniform(-1, 1, 4).astype(np.float32), requires_grad=True)

        self.x = leaf()
        self.parameters = {name: [leaf() for _ in range(PARAMETERS)] for name in names}
        self.naps = Random(seed)
        self.copies = copies
        self.functions["run"] = self.run
        self.is_local = False

    @property
    def leaves(self) -> dict[str, list[Any]]:
        return {name: [*known, self.x] if name == self.names[0] else known for name, known in self.parameters.items()}

    async def run(self, here: Here, program: list[Any], inputs: list[Any]) -> list[Any]:
        """Run a program; its calls overlap, but are made in order."""
        steps, returned = program
        await self._nap()  # so functions do not record in the order in which they were called
        parameters = self.parameters[here.name]
        known = list(inputs)
        if self.is_local and self.copies:
            known = [x * 1 for x in known]
        calls: list[tuple[int, asyncio.Future[Any]]] = []

        async def value(n: int) -> Any:
            if isinstance(known[n], tuple):  # of a call that is under way
                call, i = known[n]
                known[n] = (await call)[i]
            return known[n]

        for kind, *what in steps:
            match kind:
                case "parameter":
                    known.append(parameters[what[0]] * 0.5)
                case "multiply":
                    known.append((await value(what[0])) * parameters[what[1]])
                case "times":
                    known.append((await value(what[0])) * (await value(what[1])))
                case "add":
                    known.append((await value(what[0])) + (await value(what[1])))
                case "scale":
                    known.append((await value(what[0])) * what[1])
                case "call":
                    peer, given, inner = what
                    arguments = [await value(n) for n in given]
                    calling = here.call(peer, "run", inner, arguments)
                    if self.is_local:
                        known.extend(await calling)
                        continue
                    call = asyncio.ensure_future(calling)
                    calls.append((len(known), call))
                    known.extend((call, i) for i in range(len(inner[1])))
                    # virtual time passes only when nothing is left to do, so by then the call has been made
                    await asyncio.sleep(1e-6)
        await self._nap()
        for _, call in calls:
            await call
        return [await value(n) for n in returned]

    async def _nap(self) -> None:
        if not self.is_local and self.naps.random() < 0.7:
            await asyncio.sleep(self.naps.uniform(0, 0.05))

    async def reference_of(self, program: list[Any]) -> dict[str, list[Any]]:
        self.is_local = True

        async def graph(here: Here, x: Any) -> Any:
            return total(await self.run(here, program, [x]))

        try:
            return await self.reference(graph)
        finally:
            self.is_local = False


def total(outputs: list[Any]) -> Any:
    loss = outputs[0].sum()
    for output in outputs[1:]:
        loss = loss + output.sum()
    return loss


def draw(random: Random, names: str, inputs: int, depth: int, *, once: bool) -> list[Any]:
    """A program: steps that make values out of earlier ones, and which values it returns.

    Args:
        once: use each of the `inputs` at most once.
    """
    steps: list[list[Any]] = []
    fresh = list(range(inputs))
    count = inputs
    own: list[int] = []

    def pick() -> int | None:
        if once and fresh and random.random() < 0.6:
            return fresh.pop(random.randrange(len(fresh)))
        choices = own if once else range(count)
        return random.choice(choices) if choices else None

    for _ in range(random.randint(3, 8)):
        kind = random.choice((*KINDS, *CALLS) if depth else KINDS)
        first, second = pick(), pick() if kind in ("times", "add") else None
        if first is None or (kind in ("times", "add") and second is None):
            kind = "parameter"
        match kind:
            case "parameter":
                steps.append(["parameter", random.randrange(PARAMETERS)])
            case "multiply":
                steps.append(["multiply", first, random.randrange(PARAMETERS)])
            case "scale":
                steps.append(["scale", first, random.choice((0.3, -1.1))])
            case "call":
                given = list(dict.fromkeys(n for n in (first, *(pick() for _ in range(random.randint(0, 2)))) if n is not None))
                inner = draw(random, names, len(given), depth - 1, once=once)
                steps.append(["call", random.choice(names), given, inner])
                own.extend(range(count, count + len(inner[1])))
                count += len(inner[1])
                continue
            case _:
                steps.append([kind, first, second])
        own.append(count)
        count += 1
    returned = sorted({random.choice(own) for _ in range(random.randint(1, 3))})
    return [steps, returned]


@pytest.mark.sim
@pytest.mark.parametrize("once", [True, False], ids=["arguments used once", "arguments used often"])
@pytest.mark.parametrize("block", range(8))
def test_random_graphs_on_random_networks(block: int, once: bool) -> None:
    edges: list[int] = []
    for n in range(12):
        seed = 1000 * block + n
        random = Random(f"{seed}:{once}")
        names = "abcd"[: random.randint(2, 4)]
        stage = Programs(names, seed, copies=not once)
        program = draw(random, names, 1, 3, once=once)

        async def main(stage: Programs = stage, program: list[Any] = program, seed: int = seed) -> int:
            wanted = await stage.reference_of(program)
            async with stage.open(Slowly(seed), idle=False) as opened, opened[0].context() as ctx:  # type: ignore[arg-type]
                loss = total(await stage.run(stage.here(opened[0]), program, [stage.x]))
                await ctx.backward(loss, mode="smart")
                same(stage.found(ctx, opened), wanted)
                assert not any(passes(opened))
                return sum(len(view(worker, ctx).send_nodes) for worker in opened if worker.statistics().contexts)

        edges.append(_simulated(main, seed=seed, order=random.choice(("fifo", "permuted"))))
    assert sum(edges) > 100, f"edges between workers: {edges}"


def _simulated(main: Callable[[], Awaitable[int]], **options: Any) -> int:
    found: list[int] = []

    async def noted() -> None:
        found.append(await main())

    simulate(noted, **options)
    return found[0]


@pytest.mark.sim
def test_the_same_graph_at_many_times_and_in_many_orders() -> None:
    """One program, recorded once and differentiated on many networks, in both modes."""
    stage = Programs("abc", 5, copies=True)
    program = draw(Random("many"), "abc", 1, 3, once=False)
    results: set[bytes] = set()

    def run(seed: int) -> None:
        async def main() -> None:
            stage.naps = Random(seed)
            async with stage.open(Slowly(seed), idle=False) as opened, opened[0].context() as ctx:  # type: ignore[arg-type]
                loss = total(await stage.run(stage.here(opened[0]), program, [stage.x]))
                for _ in range(3):
                    await ctx.backward(loss, retain_graph=True)
                found = stage.found(ctx, opened)
                results.add(b"".join(b"-" if grad is None else grad.tobytes() for name in sorted(found) for grad in found[name]))

        simulate(main, seed=seed, order="permuted" if seed % 2 else "fifo")

    for seed in range(12):
        run(seed)
    assert len(results) == 1


@pytest.mark.sim
@pytest.mark.parametrize("name", [*GRAPHS, *WASTEFUL])
def test_the_graphs_of_the_other_tests_on_slow_networks(name: str) -> None:
    graph = GRAPHS[name] if name in GRAPHS else WASTEFUL[name][0]

    def run(seed: int) -> None:
        async def main() -> None:
            stage = Stage(seed=seed)
            wanted = await stage.reference(graph)
            async with stage.open(Slowly(seed), idle=False) as opened, opened[0].context() as ctx:  # type: ignore[arg-type]
                await ctx.backward(await graph(stage.here(opened[0]), stage.x))
                same(stage.found(ctx, opened), wanted)

        simulate(main, seed=seed)

    for seed in range(3):
        run(seed)


# -------------------------------------------------------------------- one at a time

#: their sum depends on the order: 0 from the last to the first, 1 from the first to the last, in float32
UNEVEN = (1e8, -1e8, 1.0)


async def _calls_in_another_order(naps: list[float]) -> tuple[list[float], list[int]]:
    """Three calls that use one parameter of b, whose turns come in the order of `naps`; returns its gradient and the order."""
    service = dist.Service()
    weight = ag.tensor(np.ones(1, np.float32), requires_grad=True)
    order: list[int] = []

    @service.function
    async def use(n: int, seconds: float, x: Any) -> Any:
        await asyncio.sleep(seconds)
        order.append(n)
        return weight * x

    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        xs = [ag.tensor(np.array([value], np.float32)) for value in UNEVEN]
        ys = await asyncio.gather(*(a.call("b", "use", n, nap, x) for n, (nap, x) in enumerate(zip(naps, xs, strict=True))))
        await ctx.backward((ys[0] + ys[1] + ys[2]).sum())
        return values(view(b, ctx).grads[weight]), order


@pytest.mark.parametrize("naps", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]])
async def test_a_shared_parameter_is_summed_in_the_order_of_the_calls(virtual_clock: VirtualClock, naps: list[float]) -> None:
    weight = ag.tensor(np.ones(1, np.float32), requires_grad=True)
    ys = [weight * ag.tensor(np.array([value], np.float32)) for value in UNEVEN]
    (wanted,) = await ag.grad((ys[0] + ys[1] + ys[2]).sum(), [weight])
    found, order = await _calls_in_another_order(naps)
    assert order == sorted(range(3), key=lambda n: naps[n])
    assert found == values(wanted)
    assert values(wanted) != [float(np.float32(UNEVEN[0]) + np.float32(UNEVEN[1]) + np.float32(UNEVEN[2]))], "the order does matter"


async def test_answers_that_come_in_another_order_are_summed_in_that_of_the_calls(virtual_clock: VirtualClock) -> None:
    """The results of three calls meet at one value of the caller, which sent it to all of them."""

    service = dist.Service()

    @service.function
    async def use(seconds: float, factor: float, x: Any) -> Any:
        await asyncio.sleep(seconds)
        return x * factor

    wanted = None
    for naps in ((0, 0, 0), (2, 1, 0), (0, 2, 1)):
        async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
            x = ag.tensor(np.ones(1, np.float32), requires_grad=True)
            y = x * 1
            zs = await asyncio.gather(*(a.call("b", "use", nap, factor, y) for nap, factor in zip(naps, UNEVEN, strict=True)))
            await ctx.backward((zs[0] + zs[1] + zs[2]).sum())
            if wanted is None:
                y = x * 1
                zs = [y * factor for factor in UNEVEN]
                (wanted,) = await ag.grad((zs[0] + zs[1] + zs[2]).sum(), [x])
            assert values(ctx.grads[x]) == values(wanted)


@pytest.mark.parametrize("depth", [1, 3])
async def test_calls_within_calls_have_their_place(virtual_clock: VirtualClock, depth: int) -> None:
    """A parameter of c is used by calls of a, and by calls that b makes for a in between, whose turn comes first."""

    service = dist.Service()
    weight = ag.tensor(np.ones(1, np.float32), requires_grad=True)

    @service.function
    async def use(seconds: float, x: Any) -> Any:
        await asyncio.sleep(seconds)
        return weight * x

    @service.function
    async def relay(depth: int, seconds: float, x: Any) -> Any:
        worker = dist.current_worker()
        if depth > 1:
            return await worker.call("b" if worker.name == "d" else "d", "relay", depth - 1, seconds, x)
        return await worker.call("c", "use", seconds, x)

    async with workers("a", "b", "c", "d", service=service) as (a, _, c, _d), a.context() as ctx:
        xs = [ag.tensor(np.array([value], np.float32)) for value in UNEVEN]
        calls = [a.call("c", "use", 2.0, xs[0]), a.call("b", "relay", depth, 0.0, xs[1]), a.call("c", "use", 1.0, xs[2])]
        ys = await asyncio.gather(*calls)
        await ctx.backward((ys[0] + ys[1] + ys[2]).sum())
        local = [weight * x for x in xs]
        (wanted,) = await ag.grad((local[0] + local[1] + local[2]).sum(), [weight])
        assert values(view(c, ctx).grads[weight]) == values(wanted)


async def test_what_a_function_contributes_by_several_uses_is_added_up_there() -> None:
    """The rule of Note [What the same graph is], by numbers for which it makes a difference."""
    service = dist.Service()

    @service.function
    async def twice(x: Any) -> Any:
        return x * -1e8 + x * 1e8

    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = ag.tensor(np.ones(1, np.float32), requires_grad=True)
        y = await a.call("b", "twice", x)
        z = x * 1.0  # contributes first, since it was recorded last
        await ctx.backward((y + z).sum())
        assert values(ctx.grads[x]) == [1.0], "1 + (1e8 - 1e8), not (1 + 1e8) - 1e8"
        local = x * -1e8 + x * 1e8
        (flat,) = await ag.grad((local + x * 1.0).sum(), [x])
        copy = x * 1
        local = copy * -1e8 + copy * 1e8
        (copied,) = await ag.grad((local + x * 1.0).sum(), [x])
        assert values(flat) == [0.0] and values(copied) == [1.0]


async def test_reduced_precision_is_off_and_can_be_asked_for() -> None:
    stage = Stage("ab")
    wanted = await stage.reference(GRAPHS["spiral"])
    for encoding, exact in ((Encoding.PLAIN, True), (Encoding.FLOAT16, False)):
        async with stage.open(gradient_encoding=encoding) as opened, opened[0].context() as ctx:
            await ctx.backward(await GRAPHS["spiral"](stage.here(opened[0]), stage.x))
            found = stage.found(ctx, opened)
            if exact:
                same(found, wanted)
            else:
                assert found["b"][0].tobytes() != wanted["b"][0].tobytes()
                np.testing.assert_allclose(found["b"][0], wanted["b"][0], rtol=1e-2)


# -------------------------------------------------------------------- processes of their own


@pytest.mark.proc
async def test_processes_that_have_done_other_things_before() -> None:
    """Every process numbers what it records by itself; where those numbers begin is no matter, neither for gradients nor for theirs."""
    seconds: dict[str, set[bytes]] = {}
    for counts in ((0, 0, 0), (100_000, 10, 30_000)):
        async with LocalCluster(3, service="tests.distributed.bitwise_service:service", names=("b", "c", "d"), limits=PATIENT) as cluster:
            driver = cluster.driver
            for name, count in zip(cluster.workers, counts, strict=True):
                await driver.call(name, "advance", count)
            for name, graph in {**{name: GRAPHS[name] for name in ("diamond", "many", "twice")}, "rounds": _rounds}.items():
                stage = bitwise_service.make()
                wanted = await stage.reference(graph)

                async with driver.context() as ctx:
                    here = Here("driver", stage.weights["driver"], driver.call)
                    await ctx.backward(await graph(here, stage.x))
                    found = [None if grad is None else grad.detach().numpy() for grad in await _gradients(cluster, stage)]
                    same({"all": found}, {"all": [grad for grads in wanted.values() for grad in grads]})
                async with driver.context() as ctx:
                    await ctx.backward(await graph(here, stage.x), create_graph=True)
                    penalty = sum((grad * grad).sum() for grad in await _gradients(cluster, stage) if grad is not None)
                    await ctx.backward(penalty)
                    bits = [b"-" if grad is None else grad.detach().numpy().tobytes() for grad in await _gradients(cluster, stage)]
                    seconds.setdefault(name, set()).add(b"".join(bits))
    assert {name: len(results) for name, results in seconds.items()} == dict.fromkeys(seconds, 1)


async def _gradients(cluster: LocalCluster, stage: Stage) -> list[Any]:
    """Of the current context: those of the leaves here, and of each process's weight."""
    context = context_here()
    mine = [context.grads.get(leaf) for leaf in stage.leaves["driver"]]
    return mine + [await cluster.driver.call(name, "gradient") for name in cluster.workers]


async def _rounds(here: Here, x: Any) -> Any:
    """Through b and c again and again, so that their weights get many contributions."""
    for _ in range(6):
        x = (await here.call("b", "weigh", x)) + (await here.call("c", "via", "b", x * here.weight))
    return x.sum()
