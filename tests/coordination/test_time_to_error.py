"""A member is frozen at each moment of a transaction, with default limits: the time in which its caller has a result or a typed error.

Silence is counted once, from the last frame, so that is hardly more than one silence, before the decision as after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import failpoints
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.errors import CommitUnknown, StepError, WorkerLostError
from aiograd.testing import simulated_run
from aiograd.transaction import tree
from tests.coordination.faults import COORDINATOR, MEMBERS, Moment, Scene
from tests.coordination.scenes import SCENES, AgreementScene, PassScene, StepScene
from tests.distributed.local_steps.learners import OUTER, SGD, Learner
from tests.distributed.local_steps.learners import service as learners
from tests.sweeps import swept

DEFAULT = dist.Limits()
#: seconds from the freeze to the end of the transaction
AT_MOST = 2.0
#: seconds for which a member is frozen
FROZEN = 40.0


class RoundScene(StepScene):
    """A round of local steps, which goes on without a lost member."""

    moments = {
        "begun": Moment("before", "compute", "b"),
        "computed": Moment("after", "compute", "b"),
        "one is prepared": Moment("before", "prepare", "b"),
        "all are prepared": Moment("after", "prepare", "b"),
        **{name: moment for name, moment in StepScene.moments.items() if moment.message == "commit"},
    }
    service = learners

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        options: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": SGD, "outer_options": OUTER, "steps": 2, "quorum": 1}
        async with await dist.LocalSteps.create(self.workers[COORDINATOR], MEMBERS, Learner, **options) as self.training:
            yield

    async def step(self) -> None:
        await self.training.round()


#: without groups, where each member is a caller, and those that have voted wait as long as any may know the outcome
PROTOCOLS: Mapping[str, type[Scene]] = {
    **{name: scene for name, scene in SCENES.items() if not issubclass(scene, AgreementScene)},
    "local steps": RoundScene,
}
#: of a protocol: starts the wait for a place, where it then calls a function
Place = Callable[[Scene, Callable[[], None]], None]


class Freeze:
    """A transaction in which a member is frozen.

    Args:
        scene: the protocol.
        arm: lets a function be called at a place.
        name: of the member.
    """

    def __init__(self, scene: Scene, arm: Place, name: str) -> None:
        self.scene, self.arm, self.name = scene, arm, name
        scene.limits = DEFAULT
        #: when it was frozen; seconds from then to the end of the transaction; its error
        self.frozen_at = math.inf
        self.seconds = 0.0
        self.error: BaseException | None = None

    async def run(self) -> None:
        scene = self.scene
        scene.start()
        driving = scene.network.spawn(COORDINATOR, self.drive())
        await driving
        scene.network.calm()
        scene.over.set()
        await asyncio.gather(*scene.servers, return_exceptions=True)

    async def drive(self) -> None:
        scene, loop = self.scene, asyncio.get_running_loop()
        async with scene.worker(COORDINATOR), scene.session():
            self.arm(scene, self.freeze)
            try:
                await scene.step()
            except (WorkerLostError, CommitUnknown, StepError) as error:
                self.error = error
            self.seconds = loop.time() - self.frozen_at

    def freeze(self) -> None:
        self.frozen_at = asyncio.get_running_loop().time()
        self.scene.network.freeze(self.name, FROZEN)


def at_moment(moment: Moment) -> Place:
    """The place at which a message is at a member."""
    at_once = moment._replace(pauses=False)
    return lambda scene, strike: scene.arm(at_once, lambda scene: strike())


def at_point(point: str, name: str, hit: int) -> Place:
    """The place at which a member reaches a failpoint for the time number `hit`."""

    def arm(scene: Scene, strike: Callable[[], None]) -> None:
        scene.network.at(point, name, strike, hit=hit)

    return arm


def failpoint_places(protocol: str, visits: range) -> list[tuple[str, Place, str]]:
    """Visits of each failpoint by each member in a transaction without faults, by their numbers from 1."""
    seen: list[tuple[str, str]] = []

    def observe(scene: Scene, _: object) -> None:
        scene.network._at_close(failpoints.observe(lambda point: seen.append((point, scene.network.current or ""))))

    scene = PROTOCOLS[protocol]()
    simulated_run(lambda: Freeze(scene, observe, "").run())
    seen_by_members = [(point, name, seen[:number].count((point, name)) + 1) for number, (point, name) in enumerate(seen) if name in MEMBERS]
    return [(f"{name} at {point}, {hit}", at_point(point, name, hit), name) for point, name, hit in seen_by_members if hit in visits]


def places(protocol: str, visits: range) -> Iterator[tuple[str, Place, str]]:
    """Places at which a member is frozen, with a description and the member."""
    if 1 in visits:
        yield from ((name, at_moment(moment), "b") for name, moment in PROTOCOLS[protocol].moments.items())
    yield from failpoint_places(protocol, visits)


def measured(protocol: str, visits: range, block: int) -> dict[str, Freeze]:
    """A transaction for every other place, from the first or the second on."""
    found: dict[str, Freeze] = {}
    for what, arm, name in [*places(protocol, visits)][block::2]:
        freeze = found[what] = Freeze(PROTOCOLS[protocol](), arm, name)
        simulated_run(freeze.run)
        assert freeze.frozen_at < math.inf, f"{protocol}: {what} was not reached"
    return found


@pytest.mark.sim
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("visits", swept([range(1, 2), range(2, 1000)]), ids=["first", "later"])
@pytest.mark.parametrize("block", range(2))
def test_a_frozen_member_costs_one_silence(protocol: str, visits: range, block: int) -> None:
    """Each block has every other place."""
    freezes = measured(protocol, visits, block)
    times = {what: freeze.seconds for what, freeze in freezes.items()}
    assert max(times.values(), default=0.0) <= AT_MOST, {what: seconds for what, seconds in times.items() if seconds > AT_MOST}
    if 1 in visits:
        assert max(times.values()) >= DEFAULT.silence, "it was lost"
        assert len(times) >= 5


@pytest.mark.sim
@pytest.mark.parametrize("protocol", ["pass", "pipeline", "replicas"])
def test_a_silence_for_each_attempt_costs_several(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "silence_left", lambda self, peer: self.limits.silence)
    found = {moment: Freeze(PROTOCOLS[protocol](), at_moment(PROTOCOLS[protocol].moments[moment]), "b") for moment in ("decided", "one is told")}
    for freeze in found.values():
        simulated_run(freeze.run)
    assert min(freeze.seconds for freeze in found.values()) >= 3 * DEFAULT.silence


class LostRank(AgreementScene):
    """An agreement whose rank 0 is frozen when one of the others knows the decision."""

    limits = DEFAULT

    async def measure(self) -> float:
        """The seconds until the other one has learned it."""
        loop = asyncio.get_running_loop()
        frozen_at: list[float] = []

        def strike(scene: Scene) -> None:
            frozen_at.append(loop.time())
            self.network.freeze(COORDINATOR, FROZEN)

        async def drive() -> None:
            async with self.worker(COORDINATOR), self.session():
                self.arm(self.moments["one is told"]._replace(held=("answer to Vote", "b")), strike)
                await self.step()

        self.start()
        driving = self.network.spawn(COORDINATOR, drive())
        while not frozen_at:
            await asyncio.sleep(0.01)
        await self.voting["b"]
        seconds = loop.time() - frozen_at[0]
        await driving
        self.over.set()
        await asyncio.gather(*self.servers)
        return seconds


@pytest.mark.sim
def test_a_member_that_has_lost_rank_0_asks_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEFAULT.silence < simulated_run(LostRank().measure).value <= AT_MOST
    monkeypatch.setattr(Endpoint, "silence_left", lambda self, peer: self.limits.silence)
    assert simulated_run(LostRank().measure).value >= 2 * DEFAULT.silence


@pytest.mark.sim
def test_silence_left() -> None:
    """From the last frame in any session; dialling a lost peer does not begin it anew, a frame does."""

    async def main() -> None:
        scene = PassScene()
        scene.limits = DEFAULT
        network, silence = scene.network, DEFAULT.silence
        scene.start()

        async def drive() -> None:
            async with scene.worker(COORDINATOR) as worker:
                core = worker._core
                assert core.silence_left("a") == core.silence_left("nobody") == core.silence_left(COORDINATOR) == silence
                await worker.call("a", "weight")
                await asyncio.sleep(4 * silence)
                assert core.silence_left("a") >= silence - DEFAULT.heartbeat - 0.01, "it has nothing to do, and is heard"
                network.freeze("a", 4 * silence)
                await asyncio.sleep(0.8 * silence)
                assert 0 < core.silence_left("a") <= 0.21 * silence
                with pytest.raises(WorkerLostError):
                    await worker.call("a", "weight")
                assert core.silence_left("a") == 0
                with pytest.raises(WorkerLostError):
                    await worker.call("a", "weight")
                assert core.silence_left("a") == 0, "it was dialled, and not heard"
                await asyncio.sleep(4 * silence)
                await worker.call("a", "weight")
                assert core.silence_left("a") >= silence - 0.01
                network.cut(COORDINATOR, "b")
                with pytest.raises(WorkerLostError):
                    await worker.call("b", "weight")
                assert core.silence_left("b") == 0, "never heard, and counted since it was first dialled"

        await network.spawn(COORDINATOR, drive())
        scene.over.set()
        await asyncio.gather(*scene.servers)

    simulated_run(main)


@pytest.mark.sim
@pytest.mark.parametrize("protocol", ["pass", "pipeline"])
def test_a_member_that_is_slow_and_heard_is_waited_for(protocol: str) -> None:
    """Its answer to the decision takes two silences."""

    async def main() -> float:
        scene = PROTOCOLS[protocol]()
        scene.limits = DEFAULT
        scene.start()

        async def drive() -> float:
            async with scene.worker(COORDINATOR), scene.session():
                scene.arm(scene.moments["all are told"]._replace(pauses=True), lambda scene: None)
                await scene.step()
                return asyncio.get_running_loop().time()

        seconds = await scene.network.spawn(COORDINATOR, drive())
        scene.over.set()
        await asyncio.gather(*scene.servers)
        return seconds

    assert simulated_run(main).value >= 2 * DEFAULT.silence


@pytest.mark.sim
@pytest.mark.parametrize("protocol", ["pass", "pipeline"])
def test_a_lost_member_is_told_when_it_is_back(protocol: str) -> None:
    """The commit is in doubt after one silence; it is told again, by the pass itself, or by the next step."""

    async def main() -> None:
        scene = PROTOCOLS[protocol]()
        scene.limits = DEFAULT
        scene.start()

        async def drive() -> None:
            async with scene.worker(COORDINATOR), scene.session():
                scene.arm(scene.moments["decided"], lambda scene: scene.network.freeze("b", 2.5 * DEFAULT.silence))
                with pytest.raises(CommitUnknown) as caught:
                    await scene.step()
                assert caught.value.workers == ("b",) and scene.taken("b") == 0
                await asyncio.sleep(3 * DEFAULT.silence)
                if protocol == "pipeline":
                    await scene.step()
                assert scene.taken("b") == scene.taken("a") == 1 + (protocol == "pipeline")
                assert not scene.is_in_doubt("b") and not scene.is_in_doubt(COORDINATOR)

        await scene.network.spawn(COORDINATOR, drive())
        scene.over.set()
        await asyncio.gather(*scene.servers)

    simulated_run(main)


@pytest.mark.proc
@pytest.mark.parametrize(
    ("point", "expected"),
    [("commit.before_prepare", WorkerLostError), ("commit.after_prepare", WorkerLostError), ("commit.before_reply", CommitUnknown)],
)
async def test_a_process_that_is_stopped_at_a_commit(point: str, expected: type[Exception]) -> None:
    """The time is only printed: processes share their cores with others."""
    async with dist.LocalCluster(2, service="tests.coordination.stopping_service:service") as cluster:
        driver, (name, other) = cluster.driver, cluster.workers
        async with driver.context() as context:
            x = ag.tensor(np.ones(3), requires_grad=True)
            y = await driver.call(other, "times", await driver.call(name, "times", x))
            await driver.call(name, "stop_at", point)
            began = asyncio.get_running_loop().time()
            with pytest.raises(expected) as caught:
                await context.backward(y.sum())
            print(f"stopped at {point}: {type(caught.value).__name__} after {asyncio.get_running_loop().time() - began:.2f} s")
            assert name in str(caught.value)
        os.kill(cluster.pids[name], signal.SIGCONT)


@pytest.mark.sim
def test_many_lost_members_are_not_told_by_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no first one of a branch to tell."""
    monkeypatch.setattr(tree, "FANOUT", 1)

    async def main() -> None:
        scene = PROTOCOLS["pipeline"]()
        scene.limits = DEFAULT
        scene.start()

        def freeze(scene: Scene) -> None:
            for name in MEMBERS:
                scene.network.freeze(name, 3 * DEFAULT.silence)

        async def drive() -> None:
            async with scene.worker(COORDINATOR), scene.session():
                scene.arm(Moment("sent", "Relay", COORDINATOR), freeze)
                for _ in range(2):
                    with pytest.raises(CommitUnknown) as caught:
                        await scene.step()
                    assert caught.value.workers == MEMBERS
                await asyncio.sleep(3 * DEFAULT.silence)
                await scene.step()
                assert scene.taken("a") == scene.taken("b") == 2

        await scene.network.spawn(COORDINATOR, drive())
        scene.over.set()
        await asyncio.gather(*scene.servers)

    simulated_run(main)
