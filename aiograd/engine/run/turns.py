"""PassTurns: the place of a running pass on its event loop, its turns and its cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.loop_budget import LoopBudget
from aiograd.engine.run.dispatch import EngineSettings
from aiograd.engine.run.loop import not_none


class PassTurns:
    """The turns of one pass and the asyncio task that awaits it. `task` is set before the pass runs.

    Args:
        engine: limits, executor and placement of the pass.
        turns: the turns of the loop.
    """

    # The first values, which most passes keep; on the class, because setting them for each pass would cost a small one several percent
    #: True if closing the engine has cancelled the pass
    is_interrupted: bool = False
    #: resolves when the pass is over; created by `interrupt`
    ended: asyncio.Future[None] | None = None
    holds_turn: bool = False
    #: the cancellation that came while the pass waited for its first turn; the pass raises it when it runs
    stopped: BaseException | None = None
    task: GraphTask

    def __init__(self, engine: EngineSettings, turns: LoopBudget) -> None:
        self.engine = engine
        self.turns = turns
        #: the asyncio task that awaits the pass, and the number of its cancellations before the pass
        self.asyncio_task: asyncio.Task[Any] = not_none(asyncio.current_task())
        self.cancellations: int = self.asyncio_task.cancelling()

    async def take_turn(self) -> None:
        """Wait until it is the turn of the pass."""
        if not self.holds_turn:
            if not self.turns.take():
                await self.turns.wait()
            self.holds_turn = True

    async def queue(self) -> None:
        """Wait for the first turn, before there is a `task`. A cancellation is kept in `stopped`."""
        try:
            await self.take_turn()
        except BaseException as error:
            self.stopped = error

    async def pause(self) -> None:
        """Let other passes and the rest of the program run."""
        if self.task.hooks is not None:
            self.task.hooks.on_wait()
        self.holds_turn = False
        await self.turns.pause()
        self.holds_turn = True

    def close(self) -> None:
        """End the turn."""
        if self.holds_turn:
            self.holds_turn = False
            self.turns.release()

    def is_cancelled(self) -> bool:
        """True if the pass has been cancelled."""
        return bool(self.asyncio_task.cancelling() > self.cancellations)

    def interrupt(self) -> asyncio.Future[None]:
        """Make the pass fail because its engine is being closed; the future resolves when it has."""
        self.is_interrupted = True
        self.asyncio_task.cancel()
        self.ended = asyncio.get_running_loop().create_future()
        return self.ended

    def was_interrupted(self) -> bool:
        """True if closing the engine, and nothing else, has cancelled the pass; takes that cancellation back."""
        if not self.is_interrupted:
            return False
        self.is_interrupted = False
        return bool(self.asyncio_task.uncancel() <= self.cancellations)
