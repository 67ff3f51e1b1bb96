"""Test a distributed training loop of your own under a few hundred kinds of bad luck, in seconds, and repeat each run from its seed.

    python examples/simulated_faults.py                      # 200 seeds; then the same loop with a line left out
    python examples/simulated_faults.py --seeds 2000
    python examples/simulated_faults.py --seed 20 --forget   # one run, and what happened in it

Everything runs in this process on virtual time: the network loses, repeats, delays and alters frames, links are cut, workers are frozen, killed
and restarted, all as the seed says. What is tested is `Loop`, which goes on from a checkpoint after whatever fails. It has to arrive at the same
bits as a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import DistributedError, ReferenceLostError
from aiograd.testing import Faults, SimulatedNetwork, Simulation, simulated_run

STEPS = 6
SAVE_EVERY = 2
WORKERS = ("left", "right")
#: the same in every run, so that a seed repeats its run to the last bit
SECRET = b"32 bytes that the workers share."
LIMITS = dist.Limits(default_deadline=10.0)

numbers = np.random.default_rng(0)
INPUTS = {name: ag.asarray(numbers.normal(size=(16, 4)).astype(np.float32)) for name in WORKERS}
WANTED = ag.asarray(numbers.normal(size=(16, 1)).astype(np.float32))


# -------------------------------------------------------------------- what is tested: nothing here knows of any simulation

service = dist.Service()


@service.reference
class Half(ag.nn.Linear):
    """Half of a model."""

    def __init__(self, name: str) -> None:
        super().__init__(4, 1, generator=ag.Generator(WORKERS.index(name)))


class Loop:
    """Trains a model whose halves live on two workers, and goes on from the last checkpoint after whatever fails.

    Args:
        driver: the worker of this process.
        forget: leave out what puts the optimizer back.
        tell: is told what happens.
    """

    def __init__(self, driver: dist.Worker, *, forget: bool, tell: Callable[[str], None]) -> None:
        self.driver = driver
        self.errors: Counter[str] = Counter()
        self._forget = forget
        self._tell = tell
        self._halves: dict[str, dist.RemoteModule] = {}
        self._step = 0
        self._saved: tuple[int, dict[str, Any], dict[str, Any]] | None = None

    async def run(self) -> dict[str, bytes]:
        """Train; returns the weights, bit for bit."""
        while True:
            try:
                await self._restore()
                while self._step < STEPS:
                    await self._train()
                    self._step += 1
                    if self._step % SAVE_EVERY == 0:
                        await self._save()
                states = {name: await half.state_dict() for name, half in self._halves.items()}
                return {f"{name}.{key}": value.numpy().tobytes() for name, state in states.items() for key, value in state.items()}
            except DistributedError as error:
                self.errors[type(error).__name__] += 1
                self._tell(f"step {self._step}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.5)

    async def _train(self) -> None:
        async with self.driver.context() as ctx:
            left, right = await asyncio.gather(*(half(INPUTS[name]) for name, half in self._halves.items()))
            await ctx.backward(((left + right - WANTED) ** 2).mean())
            await self._optimizer.step(ctx)

    async def _save(self) -> None:
        weights = {name: await half.state_dict() for name, half in self._halves.items()}
        self._saved = (self._step, weights, await self._optimizer.state_dict())
        self._tell(f"step {self._step}: saved")

    async def _restore(self) -> None:
        """Put all workers where the checkpoint was made, or at the beginning."""
        self._step, weights, state = self._saved or (0, {}, {})
        for name in WORKERS:
            await self._restore_half(name, weights.get(name))
        self._optimizer = dist.DistributedOptimizer(self.driver, ag.optim.SGD, self._halves.values(), lr=0.1, momentum=0.9)
        if state and not self._forget:
            await self._optimizer.load_state_dict(state)

    async def _restore_half(self, name: str, weights: dict[str, Any] | None) -> None:
        if weights is not None:
            with contextlib.suppress(ReferenceLostError):  # it has been restarted and knows nothing: make another
                return await self._halves[name].load_state_dict(weights)
        half = self._halves[name] = dist.RemoteModule(self.driver, name, await self.driver.remote(name, Half, name))
        if weights is not None:
            await half.load_state_dict(weights)


# -------------------------------------------------------------------- how it is tested


class World:
    """One run: a network, the workers on it, and trouble.

    Args:
        seed: decides everything; None: nothing goes wrong.
        forget: as for `Loop`.
        show: print what happens.
    """

    def __init__(self, seed: int | None, *, forget: bool = False, show: bool = False) -> None:
        self.draw = Random(seed)
        self.is_calm = seed is None
        self.network = SimulatedNetwork(seed or 0, faults=None if seed is None else Faults.drawn(self.draw))
        self.forget = forget
        self.show = show
        self.errors: Counter[str] = Counter()

    async def run(self) -> dict[str, bytes]:
        """What the loop arrives at."""
        for name in WORKERS:
            self.network.spawn(name, self._serve(name))
        training = self.network.spawn("driver", self._drive())
        async with asyncio.TaskGroup() as group:
            if not self.is_calm:
                self.tell(f"every link: {self.network}")
                group.create_task(self._trouble())
            return await training

    async def _serve(self, name: str) -> None:
        async with dist.Worker(name, service=service, secret=SECRET, limits=LIMITS, transport=self.network.transport(name)):
            await asyncio.Event().wait()

    async def _drive(self) -> dict[str, bytes]:
        peers = {name: f"sim://{name}" for name in WORKERS}
        async with dist.Worker("driver", peers=peers, secret=SECRET, limits=LIMITS, transport=self.network.transport("driver")) as driver:
            loop = Loop(driver, forget=self.forget, tell=self.tell)
            self.errors = loop.errors
            return await loop.run()

    async def _trouble(self) -> None:
        """What happens to workers and links, rather than to frames."""
        draw, network = self.draw, self.network
        for _ in range(draw.randint(0, 3)):
            await asyncio.sleep(draw.uniform(0, 0.3))
            name, seconds = draw.choice(WORKERS), draw.uniform(0, 3)
            what = draw.choice(("kill", "lose power", "freeze", "cut off"))
            self.tell(f"TROUBLE: {what} {name} for {seconds:.2f} s")
            match what:
                case "freeze":
                    network.freeze(name, seconds)
                case "cut off":
                    network.cut("driver", name)
                    await asyncio.sleep(seconds)
                    network.heal("driver", name)
                case _:
                    network.kill(name, silent=what == "lose power")
                    await asyncio.sleep(seconds)
                    network.restart(name)
                    network.spawn(name, self._serve(name))

    def tell(self, text: str) -> None:
        """Print what happens, where somebody wants to see it."""
        if self.show:
            print(f"{asyncio.get_running_loop().time():8.3f} s  {text}")


def simulate(world: World) -> Simulation[dict[str, bytes]]:
    """Run a world on virtual time."""
    return simulated_run(world.run)


def survey(count: int, expected: dict[str, bytes]) -> None:
    """Run the loop under `count` seeds and print how it went."""
    started = time.perf_counter()
    faults: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    frames, seconds, right = 0, 0.0, 0
    for seed in range(count):
        world = World(seed)
        run = simulate(world)
        right += run.value == expected
        seconds += run.time
        errors += world.errors
        frames += sum(link.sent for link in world.network.statistics().values())
        for (kind, _), hits in world.network.coverage.items():
            faults[kind] += hits
    print(f"{count} seeds, {frames:,} frames, {seconds:,.0f} s of virtual time in {time.perf_counter() - started:.1f} s")
    print("    happened     " + ", ".join(f"{kind} {hits:,}" for kind, hits in faults.most_common()))
    print("    the loop saw " + ", ".join(f"{name} {hits:,}" for name, hits in errors.most_common()))
    print(f"    {right} of {count} runs arrive at the same bits as the one that nothing happened to")
    assert right == count


def find(count: int, expected: dict[str, bytes]) -> None:
    """Find the first seed under which the forgetful loop goes wrong."""
    for seed in range(count):
        if simulate(World(seed, forget=True)).value != expected:
            print(f"    seed {seed} is the first to notice; what happened in it: python examples/simulated_faults.py --forget --seed {seed}")
            return
    print(f"    none of {count} seeds has noticed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, help="run only this one, and tell its story")
    parser.add_argument("--forget", action="store_true", help="with --seed: the loop that forgets to restore its optimizer")
    options = parser.parse_args()
    calm = simulate(World(None)).value
    if options.seed is not None:
        run = simulate(World(options.seed, forget=options.forget, show=True))
        same = "the same bits as without any trouble" if run.value == calm else "OTHER WEIGHTS than without any trouble"
        print(f"{run.time:8.3f} s  done: {same} (trace {run.trace_hash[:16]}, the same whenever this seed is run)")
    else:
        survey(options.seeds, calm)
        print("\nThe same loop, if it forgets to restore the state of its optimizer:")
        find(options.seeds, calm)
