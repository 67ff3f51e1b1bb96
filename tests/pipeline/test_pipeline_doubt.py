"""Steps over workers whose driver falls silent: hosts drop what they hold or find out what was decided, and nobody uses gradients in doubt."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.coordination.session import kept_for
from aiograd.distributed.rpc.keyring import Keyring, kid_of
from aiograd.errors import CommitUnknown, PipelineError, RemoteError, StepError
from aiograd.pipeline import Pipeline, Schedule, make_schedule
from aiograd.testing import Faults, HostKilledError, SimulatedNetwork, simulated_run
from tests.distributed.workers import SECRET
from tests.pipeline.models import blocks, data, gradients, mean_square, serial, values
from tests.pipeline.remote import behind, place, service

LEASE = 8.0
LIMITS = dist.Limits(default_deadline=60.0, lease=LEASE)
#: virtual seconds that a forward takes
FORWARD = 0.1
BATCH = data(8)

#: what runs on the driver
Main = Callable[["World"], Awaitable[Any]]


def order(stages: int) -> Schedule:
    return make_schedule("1F1B", stages, 4)


class World:
    """A driver and workers on a simulated network, with a pipeline of a stage each."""

    def __init__(self, homes: str = "ab", lease: float = LEASE) -> None:
        self.network = SimulatedNetwork(1, faults=Faults(latency=(0.001, 0.002)))
        self.homes = [None if home == "." else home for home in homes]
        self.names = ["driver", *sorted({home for home in homes if home != "."})]
        self.limits = dataclasses.replace(LIMITS, lease=lease)
        self.over = asyncio.Event()
        #: of workers that have one of their own
        self.secrets: dict[str, Keyring] = {}
        self.workers: dict[str, dist.Worker] = {}
        #: the hosts of the pipeline by worker, and the modules by stage, as they are there
        self.hosts: dict[str, Any] = {}
        self.real: list[Any] = []

    async def serve(self, name: str) -> None:
        async with self.worker(name):
            await self.over.wait()

    def worker(self, name: str) -> dist.Worker:
        peers = {other: f"sim://{other}" for other in self.names if other != name}
        secret = self.secrets.get(name, SECRET)
        made = dist.Worker(name, service=service, peers=peers, secret=secret, transport=self.network.transport(name), limits=self.limits)
        self.workers[name] = made
        return made

    def run(self, main: Main, test: Callable[[asyncio.Future[Any]], Awaitable[None]] | None = None) -> None:
        """Run `main` on the driver to its end, or until `test` is over, and see that nothing is left running."""

        async def running() -> None:
            servers = [self.network.spawn(name, self.serve(name)) for name in self.names[1:]]
            driving = self.network.spawn("driver", self.drive(main))
            try:
                await (driving if test is None else test(driving))
            finally:
                driving.cancel()
                self.over.set()
                await asyncio.gather(driving, *servers, return_exceptions=True)

        assert not simulated_run(running).leftover_tasks

    async def drive(self, main: Main) -> Any:
        async with self.worker("driver") as self.driver:
            self.modules = await place(self.driver, self.homes, wait=FORWARD)
            self.real = [behind(module, *self.workers.values()) for module in self.modules]
            async with Pipeline(self.modules, order(len(self.modules)), loss_fn=mean_square) as self.pipe:
                await self.pipe.eval(BATCH[0])
                self.find_hosts()
                return await main(self)

    def find_hosts(self) -> None:
        for remote in self.pipe._coordinator.remotes:
            self.hosts[remote.owner] = behind(dist.RemoteModule(self.driver, remote.owner, remote.ref), *self.workers.values())

    def before(self, owner: str, method: str, action: Callable[[], Any]) -> None:
        """Do something when a host is asked for something, before it does it; once."""
        self._around(owner, method, action, True)

    def after(self, owner: str, method: str, action: Callable[[], Any]) -> None:
        """The same, before the answer goes out."""
        self._around(owner, method, action, False)

    def _around(self, owner: str, method: str, action: Callable[[], Any], is_before: bool) -> None:
        host = self.hosts[owner]
        original = getattr(host, method)

        async def wrapped(step: int) -> Any:
            vars(host).pop(method, None)
            if is_before:
                action()
            result = await original(step)
            if not is_before:
                action()
            return result

        setattr(host, method, wrapped)

    def at_decision(self, action: Callable[[], Any]) -> None:
        """Do something when the driver has decided to commit, before anybody is told; once."""
        decisions = self.pipe._coordinator.decisions
        original = decisions._commit

        def wrapped(decision: Any) -> Any:
            vars(decisions).pop("_commit", None)
            result = original(decision)
            action()
            return result

        decisions._commit = wrapped  # type: ignore[method-assign]

    def cut(self, name: str, *others: str) -> None:
        for other in others:
            self.network.cut(name, other)

    def heal(self) -> None:
        self.network.heal_all()

    def found(self, stage: int) -> Any:
        return gradients([self.real[stage]])

    @property
    def state(self) -> str:
        """How the last step is, host by host."""
        return " ".join(f"{name}:{host._session.transaction.outcome}" for name, host in sorted(self.hosts.items()))

    @property
    def staged(self) -> list[str]:
        """The steps that hosts still hold."""
        held = []
        for name, host in self.hosts.items():
            session = host._session
            values = [*session.work.outbox._entries, *(value for box in session.work.mailboxes.values() for value in box._values.values())]
            if session.work.execution is not None or values or session.work.runner is not None or session.drive.timer is not None:
                held.append(name)
        return held


def expected(steps: int = 1, stages: int = 2) -> list[Any]:
    """Bytes of the gradients by stage, after so many steps of the same batch."""

    async def alone() -> list[Any]:
        modules = blocks(stages)
        for _ in range(steps):
            await serial(modules, 4, *BATCH)
        return [gradients([module]) for module in modules]

    return list(simulated_run(alone).value)


NOTHING = [None, None]


async def step(world: World) -> list[float]:
    return values(await world.pipe.step(*BATCH))


# ---------------------------------------------------------------- the driver dies


def test_the_driver_dies_when_all_are_prepared() -> None:
    """Nobody can tell what it had decided: the gradients go, and with them the trust in what is there."""
    world = World()

    async def main(world: World) -> None:
        world.at_decision(lambda: world.network.kill("driver"))
        optimizer = dist.DistributedOptimizer(world.driver, ag.optim.SGD, world.modules, lr=0.1)
        await optimizer.set_options(lr=0.1)
        await step(world)

    async def test(driving: asyncio.Future[Any]) -> None:
        with pytest.raises(HostKilledError):
            await driving
        await asyncio.sleep(kept_for(LEASE) - 1)
        assert world.state == "a:prepared b:prepared", "the driver may be there again until then"
        await asyncio.sleep(LEASE - kept_for(LEASE) + 1)
        assert world.staged == [] and world.state == "a:unknown b:unknown"
        assert [world.found(0), world.found(1)] == [NOTHING, NOTHING]
        doubt = r"step 3 .* cannot begin .*no peer could tell a whether step 2 .*settle\(\) it, or restore"
        with pytest.raises(CommitUnknown, match=doubt) as caught:
            await asyncio.wait_for(world.hosts["a"].run(3, True, {}), 5)
        assert caught.value.workers == ("a",)
        with pytest.raises(CommitUnknown, match="gradients may not be complete: no peer could tell a whether step 2"):
            world.workers["a"]._objects.check_certain(leaves=[each._node for each in world.real[0].parameters()])
        world.workers["a"]._objects.check_certain(leaves=[each._node for each in world.real[1].parameters()])
        assert await world.hosts["a"].abort(2) and world.state == "a:aborted b:unknown"
        world.workers["a"]._objects.check_certain(leaves=[each._node for each in world.real[0].parameters()])
        world.hosts["a"]._take((3, 0, "entry", 0, 0, (BATCH[:1], {})))
        assert world.hosts["a"]._session is not None and world.hosts["a"]._session.step == 3

    world.run(main, test)


# ---------------------------------------------------------------- the driver is frozen


@pytest.mark.parametrize(("lease", "seconds"), [(LEASE, 3 * LEASE), (1.0, 1.2)])
def test_a_driver_that_was_frozen_decides_nothing_on_old_promises(lease: float, seconds: float) -> None:
    """Hosts have told it that they are prepared, and have dropped the step by the time it hears that."""
    world = World(lease=lease)

    async def main(world: World) -> None:
        world.after("b", "check", lambda: world.network.freeze("driver", seconds))
        with pytest.raises(PipelineError, match="has dropped a step of a pipeline that it had prepared") as caught:
            await step(world)
        assert not getattr(caught.value, "committed", False)

    world.run(main)


# ---------------------------------------------------------------- a worker is cut off, or frozen


@pytest.mark.parametrize("homes", ["ab", ".b"])
def test_a_worker_that_is_not_told_asks_the_others(homes: str) -> None:
    """With another worker it learns of the commit from that one; else from the driver, when they can reach each other again."""
    world = World(homes, lease=60.0)

    async def main(world: World) -> None:
        optimizer = dist.DistributedOptimizer(world.driver, ag.optim.SGD, world.modules[homes.count(".") :], lr=0.1)
        await optimizer.set_options(lr=0.1)
        world.at_decision(lambda: world.cut("driver", "b"))
        with pytest.raises(CommitUnknown, match=r"was committed, but not confirmed by b .*settle\(\)") as caught:
            await step(world)
        assert caught.value.committed and caught.value.workers == ("b",)
        for again in (lambda: step(world), lambda: world.pipe.eval(BATCH[0]), world.pipe.settle):
            with pytest.raises(CommitUnknown, match="earlier step of a pipeline was committed, but not confirmed by b") as caught:
                await again()
            assert not getattr(caught.value, "committed", False)
        with pytest.raises(CommitUnknown, match="gradients on b may not be complete") as caught:
            await optimizer.step()
        assert optimizer.steps == 0 and caught.value.workers == ("b",)
        if homes == "ab":
            assert world.found(1) == wanted[1], "it has asked a"
        else:
            assert world.state == "b:prepared"
        world.heal()
        if homes == ".b":
            world.pipe._coordinator.decisions.unconfirmed = tuple  # type: ignore[assignment,method-assign]  # as on a driver that knows nothing of it
            with pytest.raises(StepError, match="may not be complete: step 2 of a pipeline is prepared on b, which does not know yet"):
                await optimizer.step()
        await world.pipe.settle()
        assert [world.found(0), world.found(1)] == wanted
        await step(world)
        assert [world.found(0), world.found(1)] == twice
        await optimizer.step()
        assert optimizer.steps == 1 and world.found(1) == NOTHING

    wanted, twice = expected(), expected(2)
    world.run(main)


def test_a_worker_that_is_cut_off_for_longer_than_its_lease() -> None:
    """It has lost its gradients: the pipeline says so, for good."""
    world = World()

    async def main(world: World) -> None:
        world.at_decision(lambda: world.cut("b", "driver", "a"))
        with pytest.raises(CommitUnknown):
            await step(world)
        await asyncio.sleep(LEASE)
        world.heal()
        for again in (world.pipe.settle, lambda: step(world)):
            with pytest.raises(CommitUnknown, match=r"its gradients are gone.*restore all workers from one checkpoint and make a new Pipeline"):
                await again()

    world.run(main)


# ---------------------------------------------------------------- nothing is wrong


def test_one_that_waits_for_others_for_longer_than_its_lease_keeps_its_gradients() -> None:
    """It hears that the driver is there, or that the others are still at it; the driver cannot be asked where it has no Worker."""
    for homes, by_reference in (("ab", False), (".b", False), ("ab", True)):
        world = World(homes)

        async def main(world: World, by_reference: bool = by_reference) -> None:
            getattr(world.real[0], "inner", world.real[0])[0].weight.register_hook(lambda grad: asyncio.sleep(LEASE))
            if not by_reference:
                await step(world)
            else:
                heads = [each.ref for each in world.modules[:1]], await place_head(world)
                async with Pipeline([*heads[0], heads[1]], order(2)) as pipe:
                    await pipe.step(*BATCH)
                    assert pipe._coordinator._outcomes_ref is None
            assert NOTHING not in [world.found(0), world.found(1)]

        world.run(main)


async def place_head(world: World) -> Any:
    ref = await world.driver.remote("b", "Head", 1)
    world.real[1] = behind(dist.RemoteModule(world.driver, "b", ref), *world.workers.values())
    return ref


def test_an_evaluation_may_take_longer_on_another_worker_than_a_lease() -> None:
    """The one that is done asks, and hears that the others are still at it."""
    world = World()

    async def main(world: World) -> None:
        late = getattr(world.real[1], "inner", world.real[1])
        forward, took = late.forward, []

        async def slow(x: Any) -> Any:
            if not took:
                took.append(True)
                await asyncio.sleep(3 * LEASE)
            return forward(x)

        late.forward = slow
        world.real[1].forward = slow
        await world.pipe.eval(BATCH[0])
        assert took

    world.run(main)


def test_a_step_that_a_host_was_asked_about_and_never_heard_of_cannot_run_there() -> None:
    world = World()

    async def main(world: World) -> None:
        host, ref = world.hosts["b"], world.pipe._coordinator.remotes[1].ref
        assert await ref.call("outcome", 2) == "aborted"
        await ref.post([(2, 1, "forward", 1, 0, ((), ()))])
        assert not world.staged, "it came too late"
        with pytest.raises(RemoteError, match="too late"):
            await ref.call("run", 2, True, {})
        assert await world.pipe._coordinator.outcomes.outcome(9) == "unknown", "the driver's steps are its own"
        with pytest.raises(PipelineError, match="too late"):
            await step(world)
        await step(world)
        assert await ref.call("outcome", 3) == "committed" and await ref.call("outcome", 2) == "aborted"
        await host.abort(100)
        assert await ref.call("outcome", 3) == "committed" and await ref.call("outcome", 4) == "unknown", "too long ago"

    world.run(main)


def test_values_for_a_step_that_nobody_runs_are_dropped() -> None:
    world = World()

    async def main(world: World) -> None:
        ref = world.pipe._coordinator.remotes[0].ref
        await ref.post([(2, 0, "entry", 0, 0, (BATCH[:1], {}))])
        await asyncio.sleep(kept_for(LEASE) - 1)
        assert world.staged == ["a"]
        await asyncio.sleep(LEASE - kept_for(LEASE) + 1)
        assert world.staged == [] and world.state.startswith("a:aborted")

    world.run(main)


def test_a_host_that_is_let_go_of_drops_what_it_holds() -> None:
    world = World()

    async def main(world: World) -> None:
        world.at_decision(lambda: world.cut("b", "a", "driver"))
        with pytest.raises(CommitUnknown):
            await step(world)
        assert world.staged == ["b"]
        held = world.pipe._coordinator.remotes[1].ref
        world.network.heal("driver", "b")
        await held.delete()
        assert world.staged == [] and not world.workers["b"]._objects.adapters

    world.run(main)


def test_a_pipeline_that_is_closed_tells_of_the_commit_first() -> None:
    world = World(".b")

    async def main(world: World) -> None:
        world.at_decision(lambda: world.cut("b", "driver"))
        with pytest.raises(CommitUnknown):
            await step(world)
        world.hosts["b"]._session.transaction.pause = 600.0  # it would find out by itself
        world.hosts["b"]._session.drive.disarm()
        await asyncio.sleep(2.0)  # until what it has asked has been given up
        world.heal()
        await asyncio.sleep(0.1)
        assert world.state == "b:prepared"
        await world.pipe.aclose()
        assert world.staged == [] and [world.found(0), world.found(1)] == wanted

    wanted = expected()
    world.run(main)


@pytest.mark.parametrize("tries", [1, 4])
def test_a_commit_is_told_again_to_a_worker_that_is_short_of_memory(tries: int) -> None:
    world = World()

    async def main(world: World) -> None:
        left = [MemoryError("no room")] * tries

        def trouble() -> None:
            execution = world.hosts["b"]._session.work.execution
            commit = execution.commit

            def scarce() -> None:
                if left:
                    raise left.pop()
                commit()

            execution.commit = scarce

        world.at_decision(trouble)
        await step(world)
        assert not left and [world.found(0), world.found(1)] == wanted

    wanted = expected()
    world.run(main)


def test_a_driver_that_cannot_commit_itself() -> None:
    """It has decided nothing then, and says so."""
    world = World(".b")

    async def main(world: World) -> None:
        decisions = world.pipe._coordinator.decisions

        def fail(decision: Any) -> Any:
            del decisions._commit
            raise MemoryError("no room")

        decisions._commit = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError) as caught:
            await step(world)
        assert not getattr(caught.value, "committed", False)
        assert world.state == "b:aborted" and world.staged == [] and [world.found(0), world.found(1)] == [NOTHING, NOTHING]

    world.run(main)


def test_a_driver_without_stages_is_asked_too_and_long_after_the_request() -> None:
    world = World(lease=300.0)

    async def main(world: World) -> None:
        head = dist.RemoteModule(world.driver, "b", await place_head(world))
        async with Pipeline([world.modules[0], head], order(2), timeout=3.0) as world.pipe:
            await world.pipe.eval(BATCH[0])
            world.find_hosts()
            world.at_decision(lambda: world.cut("b", "driver", "a"))
            with pytest.raises(CommitUnknown):
                await step(world)
            await asyncio.sleep(LIMITS.default_deadline + 10)
            assert world.state == "a:committed b:prepared"
            world.network.heal("driver", "b")
            await asyncio.sleep(3)
            assert world.state == "a:committed b:committed"

    world.run(main)


def test_a_host_that_says_for_how_long_it_keeps_a_step_counts_from_then() -> None:
    world = World()

    async def main(world: World) -> None:
        def forget() -> None:
            world.hosts["b"]._session.transaction.due = 0.0

        due: list[float] = []
        world.before("b", "check", forget)
        world.at_decision(lambda: due.append(world.hosts["b"]._session.transaction.due))
        await step(world)
        assert due[0] > asyncio.get_running_loop().time() + LEASE / 8 - 0.1

    world.run(main)


def test_hosts_ask_on_behalf_of_whom_they_were_made_for() -> None:
    """A worker's own principal is another than that of the pipeline."""
    world = World(lease=60.0)
    world.secrets["b"] = Keyring(b"another secret!!" * 2, principal="somebody")
    world.secrets["b"].add(kid_of(SECRET), SECRET)

    async def main(world: World) -> None:
        world.at_decision(lambda: world.cut("b", "driver"))
        with pytest.raises(CommitUnknown):
            await step(world)
        await asyncio.sleep(2 * LIMITS.silence)  # b asks a
        assert world.state == "a:committed b:committed"

    world.run(main)
