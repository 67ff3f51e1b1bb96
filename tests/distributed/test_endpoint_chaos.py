"""Endpoints on a network where everything goes wrong that a seed draws: each request runs once or not at all, and says which it knows.

What holds under every fault: a request that is answered ran exactly once and its answer is right; one that fails has a typed error and ran
at most once; it ends by its deadline and a heartbeat; once the network is well, every pair of workers can talk; nothing is left over.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import AuthenticationError, DeadlineError, RemoteError, WorkerLostError
from aiograd.testing import simulated_run
from aiograd.testing.network import Faults, HostKilledError, SimulatedNetwork
from tests.chaos.broken import without

NAMES = ("a", "b", "c")
REQUESTS = 50
#: small frames, so that messages have several
LIMITS = Limits(frame_bytes=4096)
#: AuthenticationError: a network that alters every handshake cannot be told from a peer with another key
TYPED = (DeadlineError, WorkerLostError, AuthenticationError)
#: the longest that a host is frozen
FROZEN = 3.0


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(f"{seed}:chaos")
        self.network = SimulatedNetwork(seed, faults=Faults.drawn(Random(f"{seed}:faults")))
        self.endpoints: dict[str, Endpoint] = {}
        self.ran: Counter[int] = Counter()
        self.answered: set[int] = set()
        #: by how much a host may be late through no fault of its own
        self.frozen: Counter[str] = Counter()

    async def start(self, name: str) -> None:
        endpoint = Endpoint(name, transport=self.network.transport(name), keyring=Keyring(b"k" * 32), limits=LIMITS, handler=self.handle)
        await endpoint.open("", 0)
        for other in NAMES:
            if other != name:
                endpoint.add_peer(other, f"sim://{other}")
        self.endpoints[name] = endpoint

    async def handle(self, peer: PeerIdentity, kind: int, value: Any, timeout: float) -> Any:
        number, seconds, tensor = value
        self.ran[number] += 1
        if seconds < 0:
            raise ValueError(f"request {number}")
        await asyncio.sleep(seconds)
        return number, WireTensor(tensor.array + number, False)

    async def ask(self, origin: str, target: str, number: int, seconds: float, size: int, timeout: float) -> None:
        sent = np.arange(size, dtype=np.float64)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            answer, tensor = await self.endpoints[origin].request(target, 1, (number, seconds, WireTensor(sent, False)), timeout)
            assert answer == number
            np.testing.assert_array_equal(tensor.array, sent + number)
            self.answered.add(number)
        except RemoteError as error:
            assert seconds < 0 and str(error).startswith(f"Error on Node {target}: ") and str(error).endswith(f": request {number}")
            self.answered.add(number)
        except TYPED:
            pass
        assert loop.time() - started <= timeout + LIMITS.heartbeat + self.frozen[origin]

    async def trouble(self) -> None:
        network, draw = self.network, self.draw
        later = asyncio.get_running_loop().call_later
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(draw.uniform(0, 2))
            a, b = draw.sample(NAMES, 2)
            match draw.choice(("kill", "reset", "cut", "freeze", "clog", "swizzle")):
                case "kill":
                    network.kill(a, silent=draw.random() < 0.5)
                    await asyncio.sleep(draw.choice((0.0, 0.01, 1.0, 3.0)))
                    network.restart(a)
                    await network.spawn(a, self.start(a))
                case "reset":
                    network.reset(a, b)
                case "cut":
                    network.cut(a, b, both=draw.random() < 0.5)
                    later(draw.uniform(0, 3), network.heal, a, b)
                case "freeze":
                    self.frozen[a] += FROZEN
                    network.freeze(a, draw.uniform(0, FROZEN))
                case "clog":
                    network.clog(a)
                    later(draw.uniform(0, 2), network.unclog, a)
                case "swizzle":
                    await network.swizzle_clog()

    async def main(self) -> None:
        network, draw = self.network, self.draw
        for name in NAMES:
            await network.spawn(name, self.start(name))
        trouble = asyncio.create_task(self.trouble())
        asking = []
        for number in range(REQUESTS):
            await asyncio.sleep(draw.expovariate(8))
            origin, target = draw.choices(NAMES, k=2)
            request = self.ask(origin, target, number, draw.choice((-1, 0, 0.05, draw.random())), draw.choice((1, 100, 5000)), draw.choice((0.5, 8)))
            try:
                asking.append(network.spawn(origin, request))
            except ValueError:  # the host is dead now
                continue
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, HostKilledError):
                raise outcome
        await trouble
        network.calm()
        await asyncio.sleep(4)
        pairs = [(origin, target) for origin in NAMES for target in NAMES]
        for number, (origin, target) in enumerate(pairs, REQUESTS):
            await network.spawn(origin, self.ask(origin, target, number, 0, 10, 5))
            assert number in self.answered, f"{origin} and {target} cannot talk, though nothing is wrong with the network"
        await asyncio.sleep(10)
        assert set(self.ran.values()) == {1}
        assert self.answered <= set(self.ran)
        for name in NAMES:
            statistics = self.endpoints[name].statistics()
            assert statistics.bytes_held == 0
            assert not any(peer.outstanding or peer.running for peer in statistics.peers)
            await network.spawn(name, self.endpoints[name].aclose())
        await asyncio.sleep(1)
        assert network.open_channels == 0


def run(seed: int) -> None:
    assert not simulated_run(Run(seed).main, seed=seed).leftover_tasks


@pytest.mark.sim
@pytest.mark.parametrize("block", range(5))
def test_requests_run_once_or_not_at_all(block: int) -> None:
    count = int(os.environ.get("AIOGRAD_SEEDS", "50")) // 5
    for seed in range(block * count, (block + 1) * count):
        run(seed)


@pytest.mark.sim
@pytest.mark.parametrize("protection", ["dedupe", "dedupe_running", "epoch_fence", "retry_same_id"])
def test_the_checks_notice_when_a_protection_is_missing(protection: str) -> None:
    for seed in range(60):
        try:
            with without(protection):
                run(seed)
        except AssertionError:
            return
    pytest.fail(f"nothing went wrong without {protection}")
