"""Followers on a simulated network, under faults that a seed draws: each version that a follower serves was committed by a leader, whole and named by
its digest, and when the network is calm all followers serve what the leader serves."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd import distributed as dist
from aiograd import serving
from aiograd.errors import ServingError
from aiograd.running.digest import state_digest
from aiograd.serving import follower as module
from aiograd.testing import Faults, HostKilledError, SimulatedNetwork, simulated_run
from tests.distributed.workers import SECRET
from tests.serving.models import Two, ones, state, values

FOLLOWERS = ("follower0", "follower1")
LIMITS = dist.Limits(default_deadline=10.0)
#: virtual seconds of faults, and until everything agrees afterwards
FAULTY, CALM = 6.0, 30.0
SEEDS = 10


class World:
    """One run.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.network = SimulatedNetwork(seed, faults=Faults.drawn(self.draw))
        self.counts: Counter[str] = Counter()
        #: by number and digest: the value in the weights of each version that has served on a leader
        self.committed: dict[tuple[int, str], float] = {}
        self.servers: dict[str, serving.Server] = {}
        self.value = 0.0
        self.is_over = self.is_stopped = False
        self.processes: dict[str, asyncio.Future[None]] = {}

    def next_value(self) -> float:
        self.value += 1.0
        return self.value

    def commit(self, version: serving.Version) -> None:
        self.committed[version.number, version.digest] = float(version.state["first"][0])

    # ---- processes

    async def lead(self) -> None:
        draw, service = Random(self.value), dist.Service()
        model = Two(self.next_value())
        server = serving.Server(model, keep=draw.choice((1, 2, 10)))
        serving.lead(service, server)
        async with server, dist.Worker("leader", service=service, secret=SECRET, limits=LIMITS, transport=self.network.transport("leader")):
            self.commit(server.current)
            self.servers["leader"] = server
            while not self.is_over:
                await asyncio.sleep(draw.uniform(0.0, 0.3))
                model.set(self.next_value())
                try:
                    match draw.choice(("publish",) * 5 + ("candidate", "rollback", "promote")):
                        case "publish":
                            self.commit(await server.publish())
                        case "candidate":
                            await server.publish(promote=False)
                        case "rollback":
                            self.commit(server.rollback())
                        case _:
                            self.commit(server.promote(draw.choice(server.versions).number))
                except ServingError:
                    self.counts["refused"] += 1
            while not self.is_stopped:
                await asyncio.sleep(0.1)

    async def follow(self, name: str) -> None:
        peers, transport = {"leader": "sim://leader"}, self.network.transport(name)
        async with dist.Worker(name, peers=peers, secret=SECRET, limits=LIMITS, transport=transport) as worker:
            follower = serving.Follower(worker, "leader", Two(-1.0), max_batch=4)
            adopt = follower._adopt

            def checked(version: serving.Version) -> None:
                assert version.digest == state_digest(version.state), "whole"
                assert self.committed[version.number, version.digest] == version.state["first"] == version.state["second"], "committed"
                adopt(version)
                self.counts["adopted"] += 1

            follower._adopt = checked  # type: ignore[method-assign]
            async with follower:
                self.servers[name] = follower
                while not self.is_stopped:
                    answer = await follower.predict(ones())
                    assert values(answer) == {self.committed[answer.version, answer.digest]}
                    assert not isinstance(follower.error, (AssertionError, KeyError)), follower.error
                    self.counts["answers"] += 1
                    await asyncio.sleep(0.05)

    def start(self, name: str) -> None:
        self.servers.pop(name, None)
        self.processes[name] = self.network.spawn(name, self.lead() if name == "leader" else self.follow(name))

    # ---- the run

    async def run(self) -> None:
        for name in ("leader", *FOLLOWERS):
            self.start(name)
        until = asyncio.get_running_loop().time() + FAULTY
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(self.draw.uniform(0.0, 1.5))
            await self.trouble()
        self.network.calm()
        self.network.heal_all()
        self.is_over = True
        async with asyncio.timeout(CALM):
            while not self.agree():
                self.raise_failures()
                await asyncio.sleep(0.05)
        self.is_stopped = True
        await asyncio.gather(*self.processes.values())

    async def trouble(self) -> None:
        name, seconds = self.draw.choice(("leader", *FOLLOWERS)), self.draw.uniform(0, 4)
        what = self.draw.choice(("none", "kill", "lose power", "freeze", "cut off"))
        self.counts[what] += 1
        match what:
            case "freeze":
                self.network.freeze(name, seconds)
            case "cut off":
                self.network.cut("leader", self.draw.choice(FOLLOWERS), both=self.draw.random() < 0.5)
                await asyncio.sleep(seconds)
                self.network.heal_all()
            case "kill" | "lose power":
                self.network.kill(name, silent=what == "lose power")
                self.raise_failures()
                await asyncio.sleep(seconds)
                self.network.restart(name)
                self.start(name)
        self.raise_failures()

    def raise_failures(self) -> None:
        for process in self.processes.values():
            if process.done() and not isinstance(process.exception(), HostKilledError):
                process.result()

    def agree(self) -> bool:
        def served(name: str) -> Any:
            version = self.servers[name].current
            return version.number, version.digest

        return len(self.servers) == 3 and {served(name) for name in FOLLOWERS} == {served("leader")}


@pytest.mark.sim
@pytest.mark.parametrize("block", range(20))
def test_a_follower_serves_only_what_a_leader_has_committed(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        monkeypatch.setattr(module, "PART", (100, 1 << 22)[seed % 2])
        world = World(seed)
        run = simulated_run(world.run)
        assert not run.leftover_tasks, (seed, run.leftover_tasks)
        counts += world.counts
    assert counts["adopted"] > 20 * SEEDS and counts["answers"] > 50 * SEEDS, counts
    assert all(counts[what] for what in ("kill", "lose power", "freeze", "cut off"))


def test_states_of_different_values_differ_in_their_digests() -> None:
    """The test above tells versions apart by their digests."""
    assert len({state_digest(state(value)) for value in np.arange(100.0)}) == 100
