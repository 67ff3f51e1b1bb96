"""One run: workers on a simulated network run random programs forward and backward while things go wrong, and every promise is checked.

A run begins with everything that a `Mix` says; then the network heals, every driver has to succeed with a fresh pass to every worker at the
first attempt, everything has to come to rest, and all workers close. The promises that have to hold meanwhile are in `promises` and `oracle`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from unittest import mock

from aiograd.testing import HostKilledError, SimulatedLoop, SimulatedNetwork, simulated_run
from aiograd.transaction import tree
from tests.chaos.hosts import DRIVER, TENANT, Host, new_limits
from tests.chaos.jobs import FaultyJobs, JobFaults
from tests.chaos.mix import Activity, Mix
from tests.chaos.oracle import Book
from tests.chaos.promises import Broken, Notes
from tests.chaos.service import all_of
from tests.chaos.trouble import Troubles
from tests.chaos.work import Work, fresh_pass

#: virtual seconds in which the drivers have to be done
LONGEST = 600.0
#: virtual seconds after the last trouble until everybody has to be there again
RECOVERY = 2.0
#: kinds of what a network counts that are no faults
HARMLESS = ("close", "slow")
#: something for a driver to do
Errand = Callable[[Work], Coroutine[Any, Any, None]]


@dataclass
class Outcome:
    """The outcome of one run."""

    seed: int | str
    mix: Mix
    counts: Counter[str] = field(default_factory=Counter)
    #: (protocol point, fault) -> how often that fault came after that point
    points: Counter[tuple[str, str]] = field(default_factory=Counter)
    trace_hash: str = ""
    steps: int = 0
    story: list[str] = field(default_factory=list)


class World:
    """Everything of one run."""

    def __init__(
        self, seed: int | str, mix: Mix, network: SimulatedNetwork, jobs: FaultyJobs, story: list[str] | None, errands: list[Errand] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.seed = seed
        self.mix = mix
        self.network = network
        self.jobs = jobs
        self.limits = new_limits(mix.frame_bytes)
        self.notes = Notes(loop.time, self.strikes, mix.is_gentle, self.limits.heartbeat, self.limits.silence)
        self.notes.story = story
        self.streams = {name: Random(f"{seed}:{name}") for name in ("pauses", "failures")}
        self.names = [DRIVER, *(f"w{i}" for i in range(mix.workers)), *((TENANT,) if mix.tenant else ())]
        self.hosts: dict[str, Host] = {}
        #: whether user code may fail and callers may give up
        self.may_fail = True
        self.troubles = Troubles(self, Random(f"{seed}:trouble"))
        #: what drivers have yet to do, and the contexts that they have open
        self.plans: dict[str, list[tuple[Errand, ...]]] = {}
        self.books: dict[str, list[Book]] = {DRIVER: [], TENANT: []}
        #: foreign contexts that the tenant has claimed to release, and the workers that were told: they may tell it that much
        self.buried: set[tuple[str, bytes]] = set()
        #: and those whose ids it has opened contexts of its own with
        self.squatted: set[tuple[str, bytes]] = set()
        self.healed = asyncio.Event()
        if errands is None:
            self._plan(DRIVER, mix.rounds)
        else:
            self.plans[DRIVER] = [(errand,) for errand in errands]
        if mix.tenant:
            self._plan(TENANT, mix.tenant_rounds)
        self.trained = {name: asyncio.Event() for name in self.plans}
        self.refreshed = {name: asyncio.Event() for name in self.plans}
        self.is_over = False

    def _plan(self, name: str, rounds: tuple[tuple[Activity, ...], ...]) -> None:
        self.plans[name] = [
            tuple(partial(Work.do, activity=activity, random=Random(f"{self.seed}:{name}:{i}:{j}")) for j, activity in enumerate(activities))
            for i, activities in enumerate(rounds)
        ]

    def strikes(self) -> int:
        """How many faults have struck so far, of all kinds."""
        counts = self.notes.counts
        of_frames = sum(count for (kind, _), count in self.network.coverage.items() if kind not in HARMLESS)
        return of_frames + self.jobs.hits.total() + self.troubles.struck + counts["failure"] + counts["killed"]

    # ---------------------------------------------------------------- processes

    async def supervise(self, name: str) -> None:
        """Run a host's process, and again whenever it has ended."""
        work = self.work if name in self.plans else None
        random = Random(f"{self.seed}:supervisor:{name}")
        while True:
            host = Host(self, name, work)
            try:
                await self.network.spawn(name, host.main())
            except HostKilledError:
                self.notes.count("killed")
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                self.notes.count("stopped")
            except Exception as error:
                self.notes.expect(False, f"{name} ended with {error!r}")
                raise
            if self.hosts.get(name) is host:
                del self.hosts[name]
            if self.is_over:
                return
            for book in self.books.get(name, ()):
                if book.running:
                    asyncio.get_running_loop().call_later(random.choice((0.1, 5.0)), book.check_orphan)
            self.books[name] = []
            await asyncio.sleep(random.uniform(0.02, 0.5))
            self.network.restart(name)

    async def work(self, host: Host) -> None:
        """The plan of a driver, over all of its incarnations."""
        name = host.name
        await self.complete()
        work, plan = Work(self, host, self.books[name]), self.plans[name]
        while plan:
            await all_of([errand(work) for errand in plan.pop(0)])
        self.trained[name].set()
        await self.healed.wait()
        for peer in work.peers:
            await fresh_pass(host, peer, self.notes)
        self.refreshed[name].set()

    # ---------------------------------------------------------------- the course of a run

    async def run(self) -> None:
        """Everything."""
        stop = self.network.observe_points()
        supervisors = [asyncio.ensure_future(self.supervise(name)) for name in self.names]
        trouble = asyncio.ensure_future(self.troubles.run())
        try:
            await self._until_all(self.trained, supervisors, "the work of the drivers", LONGEST)
            trouble.cancel()
            await asyncio.wait([trouble])
            await self.heal()
            await self._until_all(self.refreshed, supervisors, "a fresh pass to every worker", 2 * self.limits.default_deadline)
            await self.rest()
            self.is_over = True
            for host in list(self.hosts.values()):
                if host.main_task is not None:
                    host.main_task.cancel()
            await asyncio.wait(supervisors)
            await asyncio.sleep(0.1)
            self.notes.expect(not self.network.open_channels, f"{self.network.open_channels} channels are open after everybody has closed")
        finally:
            self.is_over = True
            stop()
            for task in (trouble, *supervisors):
                task.cancel()
            await asyncio.wait([trouble, *supervisors])
        for task in (trouble, *supervisors):
            if not task.cancelled():
                task.result()

    async def heal(self) -> None:
        """Let nothing go wrong any more, and wait until everybody is there."""
        self.troubles.end()
        self.may_fail = False
        self.jobs.faults = JobFaults()
        await asyncio.sleep(RECOVERY)
        await self.complete()
        await asyncio.sleep(RECOVERY)
        self.notes.tell("everything has healed")
        self.healed.set()

    async def complete(self) -> None:
        """Wait until all hosts are there."""
        while not self.is_complete:
            await asyncio.sleep(0.02)

    @property
    def is_complete(self) -> bool:
        """True if all hosts are there, and none is frozen."""
        now = self.notes.clock()
        return all(name in self.hosts and (host := self.network.find(name)) is not None and host.frozen_until <= now for name in self.names)

    async def rest(self) -> None:
        """Wait until nothing is left of anything; contexts of drivers that were killed go when their leases end."""
        until = self.notes.clock() + 2.5 * self.limits.lease_seconds
        while left := self.left():
            if self.notes.clock() > until:
                self.notes.expect(False, f"left over: {left}")
                return
            await asyncio.sleep(self.limits.heartbeat)

    def left(self) -> dict[str, Any]:
        """Counts of everything open, held or remembered, by host."""
        found: dict[str, Any] = {}
        for name, host in self.hosts.items():
            figures = host.worker.statistics()
            counts: Counter[str] = Counter({key: getattr(figures, key) for key in ("contexts", "passes", "calls", "in_doubt", "bytes_held")})
            for each in host.worker.endpoint.sessions():
                session = each.rpc_session.statistics()
                counts.update({key: getattr(session, key) for key in ("outstanding", "running", "remembered", "bytes_stored", "bytes_unsent")})
            if (living := self.network.find(name)) is not None:
                counts["channels to the dead"] = sum(channel._peer.place.owner.is_dead for channel in living.channels)
                if not self.jobs.hits["never"]:  # there are those who wait for such a job
                    counts["tasks"] = sum(not task.done() for task in living.owner._tasks if task is not host.main_task)
            if +counts:
                found[name] = dict(+counts)
        return found

    async def _until_all(self, events: dict[str, asyncio.Event], supervisors: list[asyncio.Future[None]], what: str, seconds: float) -> None:
        waiting = asyncio.ensure_future(asyncio.wait([asyncio.ensure_future(event.wait()) for event in events.values()]))
        done, _ = await asyncio.wait([waiting, *supervisors], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            return
        waiting.cancel()
        for supervisor in supervisors:
            if supervisor.done():
                supervisor.result()
        raise Broken(f"{what} did not end within {seconds:g} s: {self.notes.broken[:3]}")


async def _main(
    seed: int | str,
    mix: Mix,
    story: list[str] | None,
    errands: list[Errand] | None,
    holder: list[FaultyJobs],
    outcome: Outcome,
    complaints: list[str],
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(f"{what.get('message')}: {what.get('exception')!r}"))
    network = SimulatedNetwork(seed, faults=mix.faults)
    world = World(seed, mix, network, holder[0], story, errands)
    try:
        await world.run()
    finally:
        outcome.counts = world.notes.counts
        for (kind, *_), count in network.coverage.items():
            outcome.counts[f"fault: {kind}"] += count
        outcome.counts.update({f"job: {kind}": count for kind, count in world.jobs.hits.items()})
        outcome.points = network.point_coverage
        outcome.trace_hash = network.trace_hash
        if world.notes.broken and (error := sys.exception()) is not None:
            error.add_note(f"broken before: {world.notes.broken[:3]}")
    if world.notes.broken:
        raise Broken("; ".join(world.notes.broken[:3]))


def run_seed(
    seed: int | str,
    *,
    mix: Mix | None = None,
    story: list[str] | None = None,
    errands: list[Errand] | None = None,
) -> Outcome:
    """Run one seed.

    Args:
        mix: what happens; None: what the seed draws.
        story: gets what happened, in words.
        errands: what the driver does, one after the other, instead of what the mix says.

    Raises:
        Broken: a promise was not kept; the note says how to see it again.
    """
    chosen = Mix.drawn(seed) if mix is None else mix
    outcome = Outcome(seed, chosen)
    holder: list[FaultyJobs] = []

    def executor(loop: SimulatedLoop) -> FaultyJobs:
        holder.append(FaultyJobs(loop, chosen.jobs))
        return holder[0]

    complaints: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: complaints.append(f"{what.err_msg}: {what.exc_value!r}")
    try:
        with warnings.catch_warnings(record=True) as caught, mock.patch.object(tree, "FANOUT", chosen.fanout):
            warnings.simplefilter("always")
            run = simulated_run(
                _main, seed, chosen, story, errands, holder, outcome, complaints, seed=seed, order=chosen.order, executor=executor
            )
            gc.collect()  # what nobody has looked at complains when it goes; quick, since objects older than the run are frozen
        complaints += [str(each.message) for each in caught]
        if run.leftover_tasks or complaints:
            raise Broken(f"left behind: {[*run.leftover_tasks, *complaints][:3]}")
    except BaseException as error:
        error.add_note(f"see it again: python -m tests.chaos --seed {seed}")
        raise
    finally:
        sys.unraisablehook = hook
    outcome.trace_hash += run.trace_hash
    outcome.steps = run.steps
    return outcome
