"""Site: the ranks of a pipeline that run in one process during one step: tasks of one loop, which hand values to each other directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.modes import current_mode
from aiograd.pipeline.action import Action, ActionKind
from aiograd.pipeline.rank import Key, Rank
from aiograd.pipeline.run.mailbox import Mailbox
from aiograd.pipeline.run.outbox import Outbox
from aiograd.pipeline.run.together import together
from aiograd.pipeline.stage import Stage
from aiograd.pipeline.stage_run import StageRun
from aiograd.pipeline.staging import Staging
from aiograd.pipeline.step_random import StepRandom


class Event(NamedTuple):
    """An action that was carried out, in seconds of the loop's clock."""

    rank: int
    action: Action
    began: float
    ended: float


class Work(NamedTuple):
    """What a step asks of every rank of one process."""

    rows: Mapping[int, Sequence[Action]]
    stages: Mapping[int, Stage]
    stage_to_rank: tuple[int, ...]
    microbatches: int
    #: the stage that ends in the loss, or in the results
    last: int
    trains: bool
    loss_fn: Callable[..., Any] | None
    scale: float
    keep_outputs: bool
    random: StepRandom
    handlers: Mapping[ActionKind, Callable[[Action], Any]]


class Traffic(Protocol):
    """The values of a step on their way to ranks."""

    mailboxes: dict[int, Mailbox]
    outbox: Outbox

    def put(self, rank: int, key: Key, value: Any) -> None:
        """Hand a value to a rank, here or elsewhere."""


class Site:
    """The ranks of one process during one step, with the staging that they share.

    Args:
        work: what they do.
        traffic: what comes for them, and where what they give goes.
        events: takes what is carried out, or None.
    """

    def __init__(self, work: Work, traffic: Traffic, events: list[Event] | None = None) -> None:
        self.work = work
        self.traffic = traffic
        self.staging = Staging({index: stage.leaves() for index, stage in work.stages.items()}, work.microbatches) if work.trains else None
        self.runs = {
            index: StageRun(
                stage,
                index,
                self.staging,
                is_last=index == work.last,
                loss_fn=work.loss_fn,
                scale=work.scale,
                keep_outputs=work.keep_outputs,
                random=work.random,
            )
            for index, stage in work.stages.items()
        }
        self.ranks: dict[str, Rank] = {}
        for rank, row in work.rows.items():
            own = {index: run for index, run in self.runs.items() if work.stage_to_rank[index] == rank}
            self.ranks[f"rank {rank}"] = Rank(rank, row, own, _Exchange(self, rank, events), work.handlers)

    async def run(self) -> None:
        """Carry out every rank's actions. Cancelling ends all of them.

        Raises:
            PipelineError: an action failed.
        """
        try:
            await together({name: rank.run() for name, rank in self.ranks.items()}, self._whereabouts, self.traffic.outbox.failure)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Let go of what is kept for microbatches, and of what ties ranks together."""
        for rank in self.ranks.values():
            rank.clear()
        self.ranks.clear()

    def _whereabouts(self, name: str) -> str:
        action = self.ranks[name].current
        return "" if action is None else f", in {action}"

    async def prepare(self) -> None:
        """Wait until nothing can hold up the commit any more."""
        if self.staging is not None:
            await self.staging.prepare()

    @property
    def leaves(self) -> frozenset[AccumulateGrad]:
        """Whose gradients are staged."""
        return frozenset() if self.staging is None else self.staging.leaves

    def commit(self) -> None:
        """Write every gradient, in one step."""
        if self.staging is not None:
            self.staging.commit()

    async def after_commit(self) -> None:
        """Call the hooks of the leaves."""
        if self.staging is not None:
            await self.staging.after_commit()

    def results(self) -> tuple[list[Any] | None, list[Any] | None]:
        """Losses and outputs by microbatch, where the last stage runs here. Once."""
        run = self.runs.get(self.work.last)
        losses, outputs = (None, None) if run is None else ([part[i] for i in sorted(part)] for part in (run.losses, run.outputs))
        self.clear()
        return losses, outputs


class _Exchange:
    """How a rank of this process reaches the others."""

    __slots__ = ("_site", "_rank", "_events")

    def __init__(self, site: Site, rank: int, events: list[Event] | None) -> None:
        self._site = site
        self._rank = rank
        self._events = events

    def send(self, key: Key, value: Any) -> None:
        self._site.traffic.put(self._site.work.stage_to_rank[key[1]], key, value)

    async def receive(self, key: Key) -> Any:
        return await self._site.traffic.mailboxes[self._rank].take(key)

    async def both(self, first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
        await together({f"rank {self._rank}: forward": first, f"rank {self._rank}: backward": second})

    def began(self, action: Action) -> Callable[[], None]:
        profiler = current_mode().profiler
        note = self._note(action)
        if profiler is None:
            return note
        name = f"PP:{action}"
        start_ns = time.perf_counter_ns()

        def ended() -> None:
            profiler.add(name, "scope", f"PP:{action.kind.value}", start_ns, time.perf_counter_ns())
            note()

        return ended

    def _note(self, action: Action) -> Callable[[], None]:
        events = self._events
        if events is None:
            return _nothing
        loop = asyncio.get_running_loop()
        start = loop.time()
        place = len(events)
        events.append(Event(self._rank, action, start, start))

        def ended() -> None:
            events[place] = Event(self._rank, action, start, loop.time())

        return ended


def _nothing() -> None:
    pass
