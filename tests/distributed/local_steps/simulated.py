"""Trainings with local steps on a simulated network, in virtual time, with all decisions noted for the oracle."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.local_steps.coordinator import RoundCoordinator
from aiograd.distributed.local_steps.remote_local_member import RemoteLocalMember
from aiograd.errors import DistributedError
from tests.distributed.local_steps.learners import OUTER, SGD, Learner, Oracle, service
from tests.distributed.training_world import TrainingWorld
from tests.support import run_by

greeting = dist.Service()


@greeting.function
def hello() -> bool:
    """Called by members that only dial out."""
    return True


class World(TrainingWorld):
    """A driver with members on workers of a simulated network.

    Args:
        names: of the workers; the first `members` of them have a member.
        members: None: all.
        dials_out: the driver has no URL of the workers: they dial it.
        options: of `LocalSteps.create`.
    """

    def __init__(
        self,
        names: Sequence[str] = ("w0", "w1", "w2"),
        members: int | None = None,
        *,
        module: Any = Learner,
        seed: int = 1,
        dials_out: bool = False,
        **options: Any,
    ) -> None:
        options = {"optimizer": ag.optim.SGD, "optimizer_options": SGD, "outer_options": OUTER, "steps": 2, **options}
        super().__init__(names, members, module, seed, options)
        self.seed = seed
        self.dials_out = dials_out
        self.training: dist.LocalSteps
        #: rounds as they were decided, and names of members that begin anew or leave, in order
        self.history: list[Any] = []
        #: the contributors to each round that began while their last contribution was in exchange
        self.carrying: list[set[str]] = []
        #: the digests after the rounds
        self.digests: list[str] = []

    @property
    def coordinator(self) -> RoundCoordinator:
        return self.training._coordinator

    def peers(self, name: str) -> list[str]:
        if name != "driver":
            return ["driver"]
        return [] if self.dials_out else self.names

    def service(self, name: str) -> dist.Service:
        return service if name != "driver" else greeting

    async def serve(self, name: str) -> None:
        async with self.worker(name) as worker:
            while not self.over.is_set():
                if self.dials_out:
                    with contextlib.suppress(DistributedError):
                        await worker.call("driver", "hello", timeout=2.0)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), 0.5 if self.dials_out else None)

    async def drive(self, main: Callable[[World], Awaitable[Any]]) -> Any:
        ag.seed(self.seed)
        async with self.worker("driver") as self.driver:
            if self.dials_out:
                await asyncio.sleep(1.0)
            async with await dist.LocalSteps.create(self.driver, self.first, self.module, **self.options) as self.training:
                self.note(self.training._coordinator)
                return await main(self)

    def note(self, coordinator: RoundCoordinator) -> None:
        """Note all decisions of the coordinator."""
        decided, give_back, leave = coordinator._decided, coordinator.give_back, coordinator.leave

        def note_decided(members: Any, contributors: Any, *args: Any) -> None:
            carrying = {member.owner for member, each in contributors.items() if each.carried is not None}
            decided(members, contributors, *args)
            assert coordinator._record is not None
            self.history.append(coordinator._record)
            self.carrying.append(carrying)
            self.digests.append(coordinator.digest)

        def note_give_back(member: RemoteLocalMember) -> None:
            # a contribution that waits was computed before: the member begins anew after the round that has it
            self.history.append(("anew" if member.contribution is None else "anew later", member.owner))
            give_back(member)

        def note_leave(member: RemoteLocalMember) -> None:
            self.history.append(("left", member.owner))
            leave(member)

        coordinator._decided = note_decided  # type: ignore[method-assign]
        coordinator.give_back = note_give_back  # type: ignore[method-assign]
        coordinator.leave = note_leave  # type: ignore[method-assign]

    @property
    def records(self) -> list[dist.local_steps.RoundRecord]:
        return [each for each in self.history if not isinstance(each, tuple)]

    async def oracle(self) -> Oracle:
        """One process that has taken the same rounds; see that the training has its bits, and that no batch was read twice."""
        options = {name: value for name, value in self.options.items() if name in ("compress", "answer", "overlap")}
        oracle = Oracle(self.module(), SGD, self.options["outer_options"], seed=self.training._coordinator.seed, **options)
        read: Counter[tuple[int, int]] = Counter()
        later: set[str] = set()
        for event in self.history:
            if isinstance(event, tuple):
                what, name = event
                later = later | {name} if what == "anew later" else later - {name}
                if what != "anew later":
                    oracle.forget(name, residual=what == "left")
                continue
            await oracle.take(event, self.carrying[event.number - 1])
            for name in later & {*event.members}:
                oracle.forget(name)
            later -= {*event.members}
            assert oracle.digest == self.digests[event.number - 1], f"other bits than one process has after {event}"
            read.update(batch for name in event.members for batch in event.batches[name])
        assert not read or max(read.values()) == 1, "a batch was read twice"
        first = self.training._coordinator.ledger.first
        length = self.training._coordinator.ledger.length or 0
        whole = {(epoch, number) for epoch in range(first.epoch + 1) for number in range(length) if (epoch, number) < tuple(first)}
        assert whole <= read.keys(), "a batch counts as read, and no round has it"
        assert self.training.version == len(oracle.bases) - 1
        assert self.training.digest == oracle.digest
        assert set((await self.training.digests()).values()) <= {oracle.digest}
        return oracle

    def model(self, name: str) -> Any:
        return self.member(name)._training.module


def in_world(*names: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator of tests that run on the driver of such a world; each gets it first."""
    return run_by(lambda main: World(*names, **options).simulate(main))
