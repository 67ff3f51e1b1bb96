"""Endpoints under faults that seeds draw: every request runs at most once, ends in time, and nothing is left.

A run is a few workers that ask each other things while connections break, go silent and are slow, links are cut, and workers are
frozen, killed and restarted. Its oracle counts what handlers ran, by a name that each request carries.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import AiogradError, DistributedError, RemoteError
from aiograd.testing import Faults, HostKilledError, SimulatedNetwork, simulated_run
from tests.chaos.broken import without
from tests.sweeps import swept

pytestmark = pytest.mark.sim

SEEDS = 300
KEY = b"k" * 32
LIMITS = Limits(frame_bytes=2048, handshake_timeout=2.0)
#: an answer may be late by as much: one heartbeat
SLACK = LIMITS.heartbeat
REQUEST = 1


class Broken(AssertionError):
    """A promise was not kept."""


def expect(condition: bool, promise: str) -> None:
    """Raise `Broken` unless `condition`."""
    if not condition:
        raise Broken(promise)


@dataclass
class World:
    """The state that all workers of a run share."""

    network: SimulatedNetwork
    random: Random
    names: list[str]
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    ran: Counter[str] = field(default_factory=Counter)
    answered: set[str] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    frozen: dict[str, float] = field(default_factory=dict)
    requests: int = 0

    async def serve(self, name: str) -> None:
        """Run a worker until it is killed or closed."""
        endpoint = Endpoint(name, transport=self.network.transport(name), keyring=Keyring(KEY), limits=LIMITS, handler=self._handle)
        await endpoint.open("", 0)
        for other in self.names:
            if other != name:
                endpoint.add_peer(other, f"sim://{other}")
        self.endpoints[name] = endpoint

    async def _handle(self, peer: PeerIdentity, kind: int, value: Any, timeout: float) -> Any:
        label, nap, tensor = value
        self.ran[label] += 1
        if nap < 0:
            raise ValueError(label)
        if nap:
            await asyncio.sleep(nap)
        return [label, WireTensor(tensor.array * 2, False)]

    async def ask(self, name: str, peer: str, seconds: float, *, nap: float = 0.0, size: int = 4, give_up: float | None = None) -> str:
        """One request from `name` to `peer`, in the name of that worker.

        Returns:
            How it ended.
        """
        self.requests += 1
        label = f"{name}>{peer}:{self.requests}"
        loop = asyncio.get_running_loop()
        start = loop.time()
        sent = np.arange(size, dtype=np.float64)
        request = asyncio.ensure_future(self.endpoints[name].request(peer, REQUEST, (label, nap, WireTensor(sent, False)), seconds))
        if give_up is not None:
            loop.call_later(give_up, request.cancel)
        try:
            answer_label, answer = await request
        except asyncio.CancelledError:
            outcome = "cancelled"
        except RemoteError as error:
            outcome = "raised"
            expect(nap < 0 and str(error).startswith(f"Error on Node {peer}: ") and str(error).endswith(f": {label}"), f"{label} raised {error}")
            expect(self.ran[label] == 1, f"{label} raised and ran {self.ran[label]} times")
        except DistributedError as error:
            outcome = type(error).__name__
        except AiogradError as error:
            raise Broken(f"{label}: an error of the wrong kind: {error!r}") from error
        else:
            outcome = "answered"
            expect(answer_label == label, f"{label} got the answer to {answer_label}")
            expect(answer.array.tobytes() == (sent * 2).tobytes(), f"{label} got wrong numbers")
            expect(self.ran[label] == 1, f"{label} was answered and ran {self.ran[label]} times")
        took = loop.time() - start
        if took > seconds + SLACK and self.frozen.get(name, -1.0) < start:
            raise Broken(f"{label} took {took:g} s of {seconds:g} s and {outcome}")
        self.outcomes[outcome] += 1
        return outcome

    async def work(self, name: str) -> None:
        """Ask others for things, some at a time."""
        random = Random(f"{self.network.seed}:{name}")
        for _ in range(random.randint(1, 3)):
            size = random.choice((1, 4, 2000))
            nap = random.choice((0.0, 0.0, 0.3, -1.0))
            async with asyncio.TaskGroup() as group:
                for _ in range(random.randint(1, 4)):
                    give_up = random.uniform(0, 0.5) if random.random() < 0.15 else None
                    seconds = random.choice((0.2, 2.0, 20.0))
                    group.create_task(self.ask(name, random.choice(self.names), seconds, nap=nap, size=size, give_up=give_up))
            await asyncio.sleep(random.choice((0.0, 0.05, 1.0)))

    async def trouble(self, mayhem: int) -> None:
        """Things that happen to hosts and links rather than to frames."""
        random, network = self.random, self.network
        for _ in range(mayhem):
            await asyncio.sleep(random.uniform(0, 1.0))
            a, b = random.sample(self.names, 2)
            match random.choice(("cut", "cut one way", "reset", "freeze", "kill", "silent kill", "clog", "swizzle")):
                case "cut":
                    network.cut(a, b)
                case "cut one way":
                    network.cut(a, b, both=False)
                case "reset":
                    network.reset(a, b)
                case "freeze":
                    seconds = random.choice((0.2, 1.0, 3.0))
                    self.frozen[a] = asyncio.get_running_loop().time() + seconds
                    network.freeze(a, seconds)
                case "clog":
                    network.clog(a)
                    asyncio.get_running_loop().call_later(random.uniform(0, 2), network.unclog, a)
                case "swizzle":
                    await network.swizzle_clog(seconds=1.0)
                case word:
                    network.kill(a, silent=word == "silent kill")
                    self.endpoints.pop(a, None)
                    await asyncio.sleep(random.choice((0.0, 0.1, 2.0)))
                    network.restart(a)
                    await network.spawn(a, self.serve(a))
            if random.random() < 0.5:
                network.heal_all()

    async def settle(self) -> None:
        """After all faults have ended everybody reaches everybody again."""
        self.network.calm()
        thawed = max(self.frozen.values(), default=0.0)
        await asyncio.sleep(2.0 + max(0.0, thawed - asyncio.get_running_loop().time()))
        for name in self.names:
            for peer in self.names:
                outcomes = [await self.network.spawn(name, self.ask(name, peer, 10.0)) for _ in range(2)]
                expect("answered" in outcomes, f"{name} does not reach {peer} after the faults have ended: {outcomes}")

    async def close(self) -> None:
        """Close all workers; nothing may be left."""
        for name in self.names:
            figures = self.endpoints[name].statistics()
            for peer in figures.peers:
                expect(peer.outstanding == 0, f"{name} waits for {peer.outstanding} answers of {peer.name} that nobody wants")
        await asyncio.sleep(LIMITS.handshake_timeout + 1)
        for name in self.names:
            figures = self.endpoints[name].statistics()
            expect(figures.bytes_held == 0, f"{name} holds {figures.bytes_held} bytes for nobody")
            expect(figures.handshakes == 0, f"{name} is in {figures.handshakes} handshakes with nobody")
            await self.network.spawn(name, self.endpoints[name].aclose())
        await asyncio.sleep(3.0)
        expect(self.network.open_channels == 0, f"{self.network.open_channels} channels are open")
        doubled = sorted(label for label, count in self.ran.items() if count > 1)
        expect(not doubled, f"ran more than once: {doubled}")


async def run(seed: int) -> tuple[dict[str, int], dict[str, int], str]:
    """One run.

    Returns:
        How requests ended, which faults there were, and the hash of the network.
    """
    random = Random(f"{seed}:faults")
    network = SimulatedNetwork(seed, faults=Faults.drawn(random))
    world = World(network, random, [f"w{number}" for number in range(random.randint(2, 4))])
    for name in world.names:
        await network.spawn(name, world.serve(name))
    works = [network.spawn(name, world.work(name)) for name in world.names]
    trouble = asyncio.create_task(world.trouble(random.choice((0, 0, 1, 3))))
    async with asyncio.timeout(200):
        results = await asyncio.gather(trouble, *works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, HostKilledError):
            raise result
    await world.settle()
    await world.close()
    faults: Counter[str] = Counter()
    for (fault, _), count in network.coverage.items():
        faults[fault] += count
    return dict(world.outcomes), dict(faults), network.trace_hash


def simulate(seed: int) -> Any:
    """`run` on a loop of its own, in one of both orders."""
    return simulated_run(run, seed, seed=seed, order="permuted" if seed % 2 else "fifo")


@pytest.mark.parametrize("part", swept(range(6)))
def test_requests_run_at_most_once_and_end_in_time_whatever_happens(part: int) -> None:
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(part, SEEDS, 6):
        simulation = simulate(seed)
        assert simulation.leftover_tasks == (), f"seed {seed}"
        outcomes.update(simulation.value[0])
        faults.update(simulation.value[1])
    assert outcomes["answered"] > 500 and min(outcomes[name] for name in ("raised", "DeadlineError", "WorkerLostError")) > 5, outcomes
    missing: Mapping[str, int] = {
        kind: faults[kind] for kind in ("reset", "stall", "slow", "cut", "kill") if faults[kind] < 5
    }
    assert not missing


def test_a_seed_repeats_its_run() -> None:
    for seed in range(6):
        first, second = simulate(seed), simulate(seed)
        assert (first.value, first.trace_hash, first.steps) == (second.value, second.trace_hash, second.steps)


@pytest.mark.parametrize("protection", ["dedupe", "dedupe_running", "epoch_fence", "retry_same_id"])
def test_without_a_protection_a_seed_breaks_a_promise(protection: str) -> None:
    for seed in range(1000):
        try:
            with without(protection):
                simulate(seed)
        except Broken:
            return
        except BaseExceptionGroup as errors:
            if errors.subgroup(Broken) is None:
                raise
            return
    pytest.fail(f"nothing noticed that {protection} is missing")
