"""StageHost: the ranks of a pipeline that live in one process: this one, or a worker's.

On a worker it is made around the modules of its stages, by name (see `aiograd.distributed.register_adapter`), and asked by the process that has
the `Pipeline`: to carry out a step, to commit it, or to drop it. Hosts send values to each other directly.

Note [Steps]
    Steps are numbered by the pipeline, and every number is tried once. What comes for a number above the last one makes the host drop what it
    had of earlier ones; what comes for a lower one comes too late and changes nothing. A step that has been carried out is *prepared*: its
    gradients wait in the staging until they are committed, all in one moment, or dropped with the next step or with the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiograd.engine.run.failures import mark_committed
from aiograd.errors import ArgumentError, ArgumentTypeError, DeviceError, PipelineError
from aiograd.offloading import ready
from aiograd.pipeline.action import Action, ActionKind
from aiograd.pipeline.rank import Key
from aiograd.pipeline.run.local import Event, Site, Work
from aiograd.pipeline.run.mailbox import Mailbox
from aiograd.pipeline.run.outbox import Outbox, received
from aiograd.pipeline.stage import Stage

#: name under which hosts are made on workers
ADAPTER = "pipeline.host"


class Charge(NamedTuple):
    """What a host is in charge of."""

    stages: Mapping[int, Stage]
    #: by rank
    training: Mapping[int, Sequence[Action]]
    evaluation: Mapping[int, Sequence[Action]]
    stage_to_rank: tuple[int, ...]
    microbatches: int
    #: stage that ends in the loss, and the one that ends in the results
    loss_stage: int
    last_stage: int
    loss_fn: Callable[..., Any] | None
    scale: float
    #: lost workers are replaced
    recovers: bool
    handlers: Mapping[ActionKind, Callable[[Action], Any]] = {}
    #: where to note what is done
    events: list[Event] | None = None

    def to_wire(self) -> dict[str, Any]:
        """As `parse` takes it on another worker, where the modules come with the call."""
        return {
            "stages": {str(index): [stage.where, stage.device, stage.pass_indices] for index, stage in self.stages.items()},
            "training": {str(rank): " ".join(map(str, row)) for rank, row in self.training.items()},
            "evaluation": {str(rank): " ".join(map(str, row)) for rank, row in self.evaluation.items()},
            "stage_to_rank": list(self.stage_to_rank),
            "microbatches": self.microbatches,
            "loss_stage": self.loss_stage,
            "last_stage": self.last_stage,
            "scale": self.scale,
            "recovers": self.recovers,
        }

    @classmethod
    def parse(cls, modules: list[Any], options: dict[str, Any]) -> Charge:
        """What a pipeline on another worker asks for.

        Raises:
            ArgumentError: it makes no sense.
        """
        try:
            stages = {
                int(index): Stage(module, where=where, device=device, pass_indices=bool(flag))
                for (index, (where, device, flag)), module in zip(options["stages"].items(), modules, strict=True)
            }
            training, evaluation = (
                {int(rank): tuple(map(_action, text.split())) for rank, text in options[mode].items()} for mode in ("training", "evaluation")
            )
            charge = cls(
                stages=stages,
                training=training,
                evaluation=evaluation,
                stage_to_rank=tuple(map(int, options["stage_to_rank"])),
                microbatches=int(options["microbatches"]),
                loss_stage=int(options["loss_stage"]),
                last_stage=int(options["last_stage"]),
                loss_fn=None,
                scale=float(options["scale"]),
                recovers=bool(options["recovers"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, DeviceError) as error:
            raise ArgumentError(f"a malformed request for stages of a pipeline: {type(error).__name__}: {error}") from error
        charge.check()
        return charge

    def check(self) -> None:
        """Raise unless stages, rows and numbers fit each other."""
        mine = {self.stage_to_rank[index] for index in self.stages if 0 <= index < len(self.stage_to_rank)}
        is_strange = any(not 0 <= index < len(self.stage_to_rank) for index in self.stages)
        if is_strange or not mine >= self.training.keys() | self.evaluation.keys():
            raise ArgumentError("a malformed request for stages of a pipeline: its ranks and stages do not fit each other")
        for action in (action for rows in (self.training, self.evaluation) for row in rows.values() for action in row):
            for part in action.parts or (action,):
                if part.stage not in self.stages or (part.microbatch or 0) >= self.microbatches:
                    raise ArgumentError(f"a malformed request for stages of a pipeline: {action} is about nothing that is here")


class Session:
    """One step, as one host sees it."""

    __slots__ = ("step", "mailboxes", "outbox", "site", "runner", "state")

    def __init__(self, step: int, ranks: Iterable[int], recovers: bool) -> None:
        self.step = step
        self.mailboxes = {rank: Mailbox() for rank in ranks}
        self.outbox = Outbox(step, recovers)
        self.site: Site | None = None
        #: the task that carries it out
        self.runner: asyncio.Task[Any] | None = None
        #: open, running, prepared, committed or dropped
        self.state = "open"

    def put(self, rank: int, key: Key, value: Any) -> None:
        """Hand a value to a rank, here or elsewhere."""
        mailbox = self.mailboxes.get(rank)
        if mailbox is not None:
            mailbox.put(key, value)
        else:
            self.outbox.post(rank, key, value)

    def drop(self) -> None:
        """The step is over: let go of everything."""
        if self.state != "committed":
            self.state = "dropped"
        self.site = None
        self.outbox.close()
        for mailbox in self.mailboxes.values():
            mailbox.clear()
        if self.runner is not None:
            self.runner.cancel()
        self.runner = None


class StageHost:
    """The ranks of a pipeline that live in one process.

    Args:
        modules: of the stages, in the order of `charge`.
        charge: what it is in charge of; from another worker a dict, see `Charge.to_wire`.
    """

    def __init__(self, modules: list[Any], charge: Any) -> None:
        self._charge = charge if isinstance(charge, Charge) else Charge.parse(modules, charge)
        self._session: Session | None = None

    # ---------------------------------------------------------------- what others may call

    async def receive(self, step: int, rank: int, kind: str, stage: int, microbatch: int, value: Any) -> bool:
        """A value for a rank that lives here. Returns whether it was of use; what comes too late is not."""
        session = self._find(step)
        if session is None:
            return False
        charge = self._charge
        if rank not in session.mailboxes or stage not in charge.stages or not 0 <= microbatch < charge.microbatches:
            raise ArgumentError(f"a value for stage {stage}, microbatch {microbatch} on rank {rank} of a pipeline came to the wrong place")
        session.mailboxes[rank].put((kind, stage, microbatch), received(kind, value))
        return True

    async def run(self, step: int, trains: bool, peers: dict[str, Any]) -> dict[str, Any]:
        """Carry out every action of a step, in the caller's grad mode. Cancelling gives the step up.

        Args:
            step: its number; see Note [Steps].
            trains: with backward; the step is prepared then. Else an evaluation.
            peers: for each rank that lives elsewhere how often it has been replaced, and its host.

        Returns:
            Losses and outputs by microbatch, where the last stage is here.

        Raises:
            PipelineError: a stage failed, or the step comes too late.
        """
        session = self._find(step)
        if session is None or session.state != "open":
            raise PipelineError(f"step {step} of a pipeline comes too late: its host has seen a later one, or this one before")
        session.runner = asyncio.current_task()
        session.state = "running"
        session.outbox.route(peers)
        charge = self._charge
        work = Work(
            rows=charge.training if trains else charge.evaluation,
            stages=charge.stages,
            stage_to_rank=charge.stage_to_rank,
            microbatches=charge.microbatches,
            last=charge.loss_stage if trains else charge.last_stage,
            trains=trains,
            loss_fn=charge.loss_fn,
            scale=charge.scale,
            keep_outputs=False,
            handlers=charge.handlers,
        )
        try:
            site = Site(work, session, charge.events)
            await site.run()
            await session.outbox.drain()
            await site.prepare()
            losses, outputs = site.results()
            await ready((losses, outputs))
        except BaseException:
            session.runner = None
            session.drop()
            raise
        session.runner = None
        session.site = site
        session.state = "prepared"
        return {"losses": losses, "outputs": outputs}

    async def check(self, step: int) -> bool:
        """Whether a step is prepared here."""
        return self._session is not None and self._session.step == step and self._session.state in ("prepared", "committed")

    async def reroute(self, step: int, peers: dict[str, Any]) -> bool:
        """Ranks that were lost are somewhere else now: repeat what they had been sent."""
        session = self._find(step)
        if session is not None:
            await session.outbox.repeat(session.outbox.route(peers))
        return session is not None

    async def commit(self, step: int) -> bool:
        """Write the gradients of a step that is prepared. Doing it again does nothing.

        Raises:
            PipelineError: it is not prepared here; nothing is written.
        """
        session = self._session
        if session is not None and session.step == step and session.state == "committed":
            return True
        if session is None or session.step != step or session.state != "prepared":
            raise PipelineError(f"step {step} of a pipeline is not prepared on this worker: its gradients are gone")
        site = self._commit(session)
        await self._after_commit(site)
        return True

    async def abort(self, step: int) -> bool:
        """Drop a step."""
        session = self._find(step)
        if session is not None:
            session.drop()
        return session is not None

    # ---------------------------------------------------------------- inside

    def _begin(self, step: int) -> Session:
        session = self._find(step)
        if session is None:
            raise PipelineError(f"step {step} of a pipeline has been begun before")
        return session

    def _find(self, step: int) -> Session | None:
        """The session of a step, made if it is the first time that it is heard of; None if it comes too late."""
        session = self._session
        if session is not None and session.step >= step:
            return session if session.step == step and session.state != "dropped" else None
        if session is not None:
            session.drop()
        charge = self._charge
        self._session = session = Session(step, charge.training.keys() | charge.evaluation.keys(), charge.recovers)
        return session

    def _commit(self, session: Session) -> Site | None:
        site = session.site
        if site is not None:
            site.commit()
        session.state = "committed"
        session.drop()
        return site

    async def _after_commit(self, site: Site | None) -> None:
        if site is None:
            return
        try:
            await site.after_commit()
        except BaseException as error:
            mark_committed(error)
            raise


def _action(text: str) -> Action:
    action = Action.parse(text)
    if action is None:
        raise ArgumentTypeError("an idle step")
    return action
