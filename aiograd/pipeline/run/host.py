"""StageHost: the ranks of a pipeline that live in one process: this one, or a worker's.

On a worker it is made around the modules of its stages, by name (see `aiograd.distributed.register_adapter`), and asked by the process that has
the `Pipeline`: to carry out a step, to commit it, or to drop it. Hosts send values to each other directly.

Note [Steps]
    Steps are numbered by the pipeline, and every number is tried once. What comes for a number above the last one makes the host drop what it
    had of earlier ones; what comes for a lower one comes too late and changes nothing. A step that has been carried out is *prepared*: its
    gradients wait in the staging until they are committed, all in one moment, or dropped. A host on a worker takes no further step before it
    knows which of the two: the pipeline sees to it that it does, and if nothing is heard of the pipeline the host finds out by itself
    (see Note [In doubt] in `watch`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiograd.engine.run.failures import mark_committed
from aiograd.errors import ArgumentError, CommitUnknown, PipelineError
from aiograd.offloading import ready
from aiograd.pipeline.run.charge import Charge
from aiograd.pipeline.run.local import Site, Work
from aiograd.pipeline.run.outbox import received
from aiograd.pipeline.run.session import Session
from aiograd.pipeline.run.watch import COMMITTED, DROPPED, OPEN, PREPARED, RUNNING, UNKNOWN, Home, kept_for, watch
from aiograd.pipeline.step_random import StepRandom

logger = logging.getLogger("aiograd.pipeline")

#: name under which hosts are made on workers
ADAPTER = "pipeline.host"
#: committed steps that are remembered, for hosts that ask
REMEMBERED = 64
#: seconds for which the pipeline's own process keeps a step
FOREVER = 1e9
#: what to do about a step that is in doubt
ADVICE = "Let the pipeline settle() it, or restore all workers from one checkpoint and make a new Pipeline."


class StageHost:
    """The ranks of a pipeline that live in one process.

    Args:
        modules: of the stages, in the order of `charge`.
        charge: what it is in charge of; from another worker a dict, see `Charge.to_wire`.
        home: the worker that it was made on for a pipeline elsewhere; None in the pipeline's own process, which decides.
    """

    def __init__(self, modules: list[Any], charge: Any, home: Home | None = None) -> None:
        self._charge = charge if isinstance(charge, Charge) else Charge.parse(modules, charge)
        self._home = home
        self._session: Session | None = None
        self._committed: deque[int] = deque(maxlen=REMEMBERED)
        #: names of the workers that have not confirmed a commit, as the pipeline tells its own host
        self.unconfirmed: Callable[[], Sequence[str]] = tuple

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

    async def run(self, step: int, trains: bool, peers: dict[str, Any], driver: Any = None, seed: Any = None) -> dict[str, Any]:
        """Carry out every action of a step, in the caller's grad mode. Cancelling gives the step up.

        Args:
            step: its number; see Note [Steps].
            trains: with backward; the step is prepared then. Else an evaluation.
            peers: for each rank that lives elsewhere how often it has been replaced, and its host.
            driver: the host of the process that decides; None: it cannot be asked.
            seed: of the step's `StepRandom`; None: a new one.

        Returns:
            Losses and outputs by microbatch, where the last stage is here.

        Raises:
            PipelineError: a stage failed, or the step comes too late. CommitUnknown: an earlier step is in doubt here.
        """
        random = StepRandom(seed)
        session = self._find(step)
        if session is None or session.state != OPEN:
            raise PipelineError(f"step {step} of a pipeline comes too late: its host has seen a later one, or this one before")
        session.runner = asyncio.current_task()
        session.state = RUNNING
        session.trains = trains
        session.driver = driver
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
            keep_outputs=session.keeps_outputs,
            random=random,
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
        session.leaves = site.leaves
        session.state = PREPARED
        session.hear()
        return {"losses": losses, "outputs": outputs}

    async def check(self, step: int) -> float:
        """For how many seconds, from now on, a step is surely kept that is prepared here; 0: it is not."""
        session = self._session
        if session is None or session.step != step or session.state not in (PREPARED, COMMITTED):
            return 0.0
        session.hear()
        return FOREVER if self._home is None else kept_for(self._home.lease)

    async def outcome(self, step: int) -> str:
        """What became of a step here, or how far it is: one of the states in `watch`. See Note [In doubt] there."""
        if step in self._committed:
            return COMMITTED
        session = self._session
        if session is None or session.step < step:
            if self._home is None:
                return UNKNOWN
            session = self._begin(step)
            session.drop()  # who asks believes from now on that the step was dropped, so it must never run here
        if session.step == step:
            return session.state
        return DROPPED if session.step - step < REMEMBERED else UNKNOWN

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
        if step in self._committed:
            return True
        session = self._session
        if session is None or session.step != step or session.state != PREPARED:
            raise PipelineError(
                f"step {step} of a pipeline cannot be committed: it is not prepared on this worker, or is no more; its gradients are gone. Restore "
                "all workers from one checkpoint"
            )
        site = self._commit(session)
        await self._after_commit(site)
        return True

    async def abort(self, step: int) -> bool:
        """Drop a step; one that was in doubt is so no more. What is committed stays."""
        session = self._session
        if session is None or session.step != step:
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
        """The session of a step, made if it is the first time that it is heard of; None if it comes too late.

        Raises:
            CommitUnknown: an earlier step is in doubt here.
        """
        session = self._session
        if session is not None and session.step >= step:
            return session if session.step == step and session.state not in (DROPPED, UNKNOWN) else None
        if session is not None:
            if self._home is not None and session.is_in_doubt:
                doubt = self._describe_doubt(session, self._home)
                raise CommitUnknown(f"step {step} of a pipeline cannot begin on this worker: {doubt}", workers=(self._home.name,))
            session.drop()
        charge = self._charge
        self._session = session = Session(step, charge.training.keys() | charge.evaluation.keys(), charge.recovers)
        if self._home is not None:
            session.watcher = self._home.keep(self._watch(session, self._home), f"pipeline step {step}")
        return session

    def _commit(self, session: Session) -> Site | None:
        site = session.site
        if site is not None:
            site.commit()
        session.state = COMMITTED
        self._committed.append(session.step)
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

    async def _watch(self, session: Session, home: Home) -> None:
        outcome = await watch(session, home.lease)
        if outcome == COMMITTED:
            await self._after_commit(self._commit(session))
            return
        session.drop(outcome)
        if outcome == UNKNOWN:
            logger.warning("worker %s: %s", home.name, self._describe_doubt(session, home))

    # ---------------------------------------------------------------- what the worker itself asks

    def _doubt(self, leaves: Iterable[Any], owners: Iterable[str]) -> CommitUnknown | None:
        """What to raise if gradients of these leaves, or those on these workers, are in doubt."""
        session = self._session
        if self._home is not None and session is not None and session.is_in_doubt and not session.leaves.isdisjoint(leaves):
            text = f"the gradients may not be complete: {self._describe_doubt(session, self._home)}"
            return CommitUnknown(text, workers=(self._home.name,))
        unconfirmed = sorted({*owners} & {*self.unconfirmed()})
        if unconfirmed:
            text = f"the gradients on {', '.join(unconfirmed)} may not be complete: a step of a pipeline is not known to be committed there. {ADVICE}"
            return CommitUnknown(text, workers=tuple(unconfirmed))
        return None

    def _leave(self) -> None:
        """The pipeline is closed."""
        if self._session is not None:
            self._session.drop(UNKNOWN if self._session.is_in_doubt else DROPPED)

    @staticmethod
    def _describe_doubt(session: Session, home: Home) -> str:
        if session.state == PREPARED:
            return f"step {session.step} of a pipeline is prepared on {home.name}, which does not know yet whether it was committed. {ADVICE}"
        return f"nobody could tell {home.name} whether step {session.step} of a pipeline was committed, so its gradients were dropped there. {ADVICE}"
