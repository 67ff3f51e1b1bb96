"""One seed: workers on a simulated network run random programs forward and backward while things go wrong, and every promise is checked.

Note [The oracle]
    Each pass of a context is the same graph, scaled by its own power of two. A worker's gradients must therefore be the reference gradient
    times a sum of distinct powers: those of the passes that were committed, and none of those that failed. A wrong factor names the pass
    that was lost or counted twice. A pass whose outcome was reported as unknown may be in or out, on each of the workers that were
    named.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import failpoints
from aiograd.distributed.safeguards import ALL_ON, Safeguards
from aiograd.errors import AiogradError, CommitUnknown, DistributedError
from aiograd.testing import Faults, HostKilledError, SimulatedNetwork, simulated_run
from tests.chaos import programs

KEY = b"c" * 32
LIMITS = dist.Limits(frame_bytes=1024, handshake_timeout=2.0, default_deadline=20.0, lease=30.0)
#: an await may outlast its deadline by as much: telling the others
SLACK = LIMITS.silence + LIMITS.heartbeat
DRIVER = "driver"
#: a gradient of zeros fits every factor
ANY = -1


class Broken(AssertionError):
    """A promise was not kept."""


def expect(condition: bool, promise: str) -> None:
    """Raise `Broken` unless `condition`."""
    if not condition:
        raise Broken(promise)


@dataclass
class Outcome:
    """What one seed did."""

    seed: int | str
    order: str
    counts: Counter[str] = field(default_factory=Counter)
    coverage: dict[tuple[str, str], int] = field(default_factory=dict)
    trace_hash: str = ""
    steps: int = 0


class Host:
    """A worker's process: its leaves, and what it exposes."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.leaves = programs.parameters(name)
        self.service = dist.Service()
        self.service.function("run")(self.run)
        self.worker = dist.Worker(name, service=self.service, secret=KEY, limits=LIMITS, transport=world.network.transport(name))

    async def open(self) -> None:
        """Begin to serve."""
        await self.worker.__aenter__()
        for other in self.world.names:
            if other != self.name:
                self.worker.add_peer(other, f"sim://{other}")

    async def run(self, program: list, inputs: list) -> list:
        """The exposed function."""
        nap = self.world.naps.random()
        if nap < 0.2:
            await asyncio.sleep(nap)
        return await programs.execute(program, inputs, self.leaves, self.call, asyncio.gather)

    async def call(self, peer: str, program: list[Any], given: list[ag.Tensor]) -> list[Any]:
        """Run a part of a program elsewhere."""
        if self.world.fails.random() < self.world.failing:
            raise ValueError("a rule that fails")
        return await self.worker.call(peer, "run", program, given)


class World:
    """Everything of one seed."""

    def __init__(self, seed: int | str, network: SimulatedNetwork, *, calm: bool = False) -> None:
        self.seed = seed
        self.network = network
        self.random = Random(f"{seed}:world")
        self.naps = Random(f"{seed}:naps")
        self.fails = Random(f"{seed}:fails")
        self.failing = self.random.choice((0.0, 0.0, 0.05))
        self.calm = calm
        self.names = [DRIVER, *(f"w{i}" for i in range(self.random.randint(1, 3)))]
        self.hosts: dict[str, Host] = {}
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.armed: list[failpoints.Failpoint] = []
        #: when a host that was frozen goes on: its awaits may be late
        self.frozen_until = 0.0

    async def start(self, name: str) -> None:
        """Run a worker on its host; returns when it listens."""
        host = Host(self, name)
        await host.open()
        self.hosts[name] = host

    # ---------------------------------------------------------------- the work

    async def train(self) -> None:
        """What the driver does: contexts one after the other, some passes in each."""
        driver = self.hosts[DRIVER]
        for number in range(self.random.randint(1, 3)):
            await self.one_context(driver, Random(f"{self.seed}:context:{number}"))

    async def one_context(self, driver: Host, random: Random) -> None:
        """Forward, then some backward passes; gradients are checked before the context is left."""
        loop = asyncio.get_running_loop()
        program = programs.draw(random, self.names, DRIVER, 1, 3)
        x = ag.tensor(np.array([1.0, 2.0, 3.0]), requires_grad=True)
        try:
            async with driver.worker.context() as ctx:
                held = {name: host for name, host in self.hosts.items()}
                try:
                    outputs = await programs.execute(program, [x], driver.leaves, driver.call, asyncio.gather)
                except (DistributedError, ValueError) as error:
                    self.counts[f"forward {type(error).__name__}"] += 1
                    return
                loss = programs.total(outputs)
                if not loss.requires_grad or loss.grad_fn is None:
                    return
                want, passes = await self.wanted(program, x), random.randint(1, 3)
                committed, unknown = 0, 0
                for number in range(passes):
                    scaled = loss * float(1 << (8 * number))
                    seconds = random.choice((2.0, 20.0))
                    mode = "fast" if random.random() < 0.15 else "smart"
                    begun = loop.time()
                    task = asyncio.ensure_future(ctx.backward(scaled, retain_graph=number + 1 < passes, mode=mode, timeout=seconds))
                    if random.random() < 0.15:
                        loop.call_later(random.uniform(0, 0.1), task.cancel)
                    outcome = "committed"
                    try:
                        await task
                    except asyncio.CancelledError as error:
                        outcome = "cancelled" if not getattr(error, "committed", False) else "unknown" if ctx.in_doubt else "committed"
                    except CommitUnknown:
                        outcome = "unknown"
                    except AiogradError as error:
                        outcome = "committed" if error.committed else type(error).__name__
                        self.errors.append(str(error))
                    self.counts[outcome] += 1
                    if outcome == "committed":
                        committed |= 1 << (8 * number)
                    elif outcome == "unknown":
                        unknown |= 1 << (8 * number)
                    took = loop.time() - begun
                    if took > seconds + SLACK and self.frozen_until < begun:
                        raise Broken(f"a backward pass took {took:g} s of {seconds:g} s and {outcome}")
                    self.check(ctx, held, x, want, committed, unknown)
        finally:
            await asyncio.sleep(self.random.choice((0.0, 0.5)))

    async def wanted(self, program: list[Any], x: ag.Tensor) -> dict[str, list[Any]]:
        """The reference gradients: of x under the driver's name with ``.x``, and of each worker's leaves."""
        leaves = {name: programs.parameters(name) for name in self.names}
        mine = ag.tensor(x.detach().numpy(), requires_grad=True)
        loss = await programs.reference(program, DRIVER, mine, leaves)
        everything = [mine, *(leaf for name in self.names for leaf in leaves[name])]
        grads = list(await ag.grad(loss, everything, allow_unused=True))
        want: dict[str, list[Any]] = {".x": [grads.pop(0)]}
        for name in self.names:
            want[name] = [grads.pop(0) for _ in leaves[name]]
        return want

    def check(self, ctx: Any, held: dict[str, Host], x: ag.Tensor, want: dict[str, list[Any]], committed: int, unknown: int) -> None:
        """See Note [The oracle]."""
        for name, host in held.items():
            if self.hosts.get(name) is not host:
                continue  # restarted: it has nothing of this context any more
            context = next((known for known in host.worker._office.contexts if known.key == ctx.key), None)
            leaves = [*zip(host.leaves, want[name], strict=True), *([(x, want[".x"][0])] if name == DRIVER else ())]
            for number, (leaf, expected) in enumerate(leaves):
                grad = None if context is None else context.grads.get(leaf)
                expect(leaf.grad is None, f"{name}: .grad of leaf {number} was touched")
                if context is None:
                    continue
                factor = self._factor(grad, expected)
                expect(
                    factor is not None and (factor == ANY or self._fits(factor, committed, unknown)),
                    f"{name}: gradient {number} in {ctx.id} is {grad}, which is {factor} times the reference {expected}; committed passes make {committed}, "
                    f"unknown ones {unknown}",
                )

    @staticmethod
    def _factor(grad: Any, expected: Any) -> int | None:
        if expected is None or not expected.numpy().any():
            return ANY if grad is None or not np.any(grad.numpy()) else None
        reference = expected.numpy()
        if grad is None:
            return 0
        found = grad.numpy()
        nonzero = reference != 0
        factor = found[nonzero][0] / reference[nonzero][0]
        if factor != int(factor) or not np.array_equal(found, reference * factor):
            return None
        return int(factor)

    @staticmethod
    def _fits(factor: int, committed: int, unknown: int) -> bool:
        return factor >= 0 and factor & ~unknown == committed & ~unknown and factor & ~(committed | unknown) == 0

    # ---------------------------------------------------------------- trouble

    async def trouble(self) -> None:
        """Things that happen to hosts and links rather than to frames."""
        random, network = self.random, self.network
        points = [point for point in failpoints.POINTS]
        for _ in range(random.choice((0, 0, 1, 2, 3))):
            await asyncio.sleep(random.uniform(0, 1.0))
            a, b = random.sample(self.names, 2)
            workers = [name for name in self.names if name != DRIVER]
            match random.choice(("cut", "cut one way", "reset", "freeze", "kill", "silent kill", "swizzle", "kill at a point", "kill at a point")):
                case "cut":
                    network.cut(a, b)
                case "cut one way":
                    network.cut(a, b, both=False)
                case "reset":
                    network.reset(a, b)
                case "freeze":
                    seconds = random.choice((0.2, 1.0, 3.0))
                    self.frozen_until = max(self.frozen_until, asyncio.get_running_loop().time() + seconds)
                    network.freeze(random.choice(workers), seconds)
                case "swizzle":
                    await network.swizzle_clog(seconds=1.0)
                case "kill at a point":
                    point, name = random.choice(points), random.choice(workers)
                    self.armed.append(network.at(point, name, "kill", hit=random.randint(1, 3)))
                    self.counts[f"armed {point}"] += 1
                case word:
                    name = random.choice(workers)
                    network.kill(name, silent=word == "silent kill")
                    self.counts[word] += 1
            if random.random() < 0.5:
                await asyncio.sleep(random.uniform(0, 2.0))
                network.heal_all()
        await asyncio.sleep(random.uniform(0, 1.0))
        network.heal_all()

    async def respawn(self) -> None:
        """A supervisor: what was killed comes back after a while."""
        while True:
            await asyncio.sleep(0.2)
            for name in self.names:
                host = self.network.find(name)
                if host is not None and host.owner.is_dead:
                    self.hosts.pop(name, None)
                    self.network.restart(name)
                    await self.network.spawn(name, self.start(name))
                    self.counts["restarts"] += 1


async def _main(seed: int | str, safeguards: Safeguards, faults: Faults | None) -> Counter[str]:
    loop = asyncio.get_running_loop()
    complaints: list[str] = []
    loop.set_exception_handler(lambda _, what: complaints.append(f"{what.get('message')}: {what.get('exception')!r}"))
    random = Random(f"{seed}:network")
    network = SimulatedNetwork(seed, faults=Faults.drawn(random) if faults is None else faults, safeguards=safeguards, reliable=None)
    stop = network.observe_points()
    world = World(seed, network)
    for name in world.names:
        await network.spawn(name, world.start(name))
    supervisor = asyncio.ensure_future(world.respawn())
    trouble = asyncio.ensure_future(world.trouble())
    try:
        async with asyncio.timeout(600):
            await network.spawn(DRIVER, world.train())
    except HostKilledError:
        world.counts["driver killed"] += 1
    except TimeoutError:
        raise Broken("the driver hangs: its work did not end within ten minutes") from None
    finally:
        trouble.cancel()
        await asyncio.wait([trouble])
    for failpoint in world.armed:
        failpoint.disarm()
    network.calm()
    await asyncio.sleep(3.0)  # whoever was killed last comes back
    supervisor.cancel()
    await asyncio.wait([supervisor])
    # a fresh pass succeeds, no other process restarted
    driver = world.hosts[DRIVER]
    world.failing = 0.0
    await network.spawn(DRIVER, _fresh_pass(world, driver))
    await asyncio.sleep(2.5 * LIMITS.lease_seconds)
    for name, host in world.hosts.items():
        found = host.worker.statistics()
        expect(found.contexts == 0 and found.passes == 0 and found.calls == 0 and found.bytes_held == 0, f"{name} is left with {found}")
    for host in list(world.hosts.values()):
        await network.spawn(host.name, host.worker.aclose())
    stop()
    expect(not complaints, f"the loop was told of: {complaints[:3]}")
    world.counts.update({f"fault {kind}": count for kind, count in _faults(network).items()})
    return world.counts


async def _fresh_pass(world: World, driver: Host) -> None:
    for name in world.names:
        if name == DRIVER:
            continue
        async with driver.worker.context() as ctx:
            x = ag.tensor(np.array([1.0, 2.0, 3.0]), requires_grad=True)
            (y,) = await driver.worker.call(name, "run", [[["multiply", 0, 0]], [1]], [x], timeout=LIMITS.default_deadline)
            await ctx.backward(y.sum())
            expect(np.array_equal(ctx.grads[x].numpy(), programs.parameters(name)[0].numpy()), f"after everything has healed {name} gives wrong gradients")


def _faults(network: SimulatedNetwork) -> Counter[str]:
    found: Counter[str] = Counter()
    for (kind, *_), count in network.coverage.items():
        found[kind] += count
    return found


def run_seed(seed: int | str, *, safeguards: Safeguards = ALL_ON, faults: Faults | None = None, order: str | None = None) -> Outcome:
    """Run one seed; half of the seeds run first-in first-out, half permuted.

    Raises:
        Broken: a promise was not kept; the note says how to see it again.
    """
    chosen: Any = order or ("fifo" if Random(f"{seed}:order").random() < 0.5 else "permuted")
    try:
        run = simulated_run(_main, seed, safeguards, faults, seed=seed, order=chosen)
    except BaseException as error:
        error.add_note(f"see it again: python -m tests.chaos --seed {seed}")
        raise
    outcome = Outcome(seed, chosen, run.value, trace_hash=run.trace_hash, steps=run.steps)
    expect(not run.leftover_tasks, f"seed {seed}: tasks were left behind: {run.leftover_tasks[:3]}")
    return outcome


Check = Callable[[], None]
