"""Rank: carries out one row of a lowered schedule, from left to right, over the stages that live on it.

The same code runs ranks of one process, which are tasks of one loop, and ranks on other workers: how values travel between ranks is behind
`Exchange`. Sending hands a value over and goes on; receiving waits, unless the value has come. Between stages of one rank values are handed over
directly.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from aiograd.errors import PipelineError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.step.stage_run import StageRun
from aiograd.running.exceptions import summary_of

_K = ActionKind

#: key of a value sent between ranks: its kind (see below), the receiving stage, the microbatch
Key: TypeAlias = tuple[str, int, int]

#: arguments of the batch (a tuple of args and kwargs); a message; a list of gradients; a target (a tuple of one, or none)
ENTRY, FORWARD, BACKWARD, TARGET = "entry", "forward", "backward", "target"
#: with the number of the sending stage, see `kind_from`: values that a stage gives, a message; their gradients, a list
GIVEN, RETURNED = "given", "returned"
#: gradients of weights of a microbatch that was taken over, a list; see Note [Microbatches taken over] in `run.absorbed_execution`
WEIGHTS = "weights"

#: carries out an action in place of the rank
Handler: TypeAlias = Callable[[Action], Any]


def kind_from(kind: str, stage: int) -> str:
    """The kind of values from one stage, GIVEN or RETURNED; see Note [Values for stages that are no neighbours] in `links`."""
    return f"{kind} {stage}"


def base_of(kind: str) -> str:
    """A kind without the number of the sending stage."""
    return kind.partition(" ")[0]


class Exchange(Protocol):
    """The connection of a rank to the other ranks and to its event loop."""

    def send(self, key: Key, value: Any) -> None:
        """Hand a value to the rank that has the stage in `key`, and go on."""

    def has(self, key: Key) -> bool:
        """True if a value has come."""

    def take(self, key: Key) -> Any:
        """Take a value that has come."""

    async def receive(self, key: Key) -> Any:
        """Wait for a value and take it."""

    async def both(self, first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
        """Run two things side by side; where one fails the other is cancelled."""

    def began(self) -> Any:
        """Note that an action begins; returns the time."""

    def ended(self, action: Action, began: Any) -> None:
        """Note the end of the action that began at this time."""


class Rank:
    """One rank during one step.

    Args:
        index: its number.
        row: its actions.
        runs: its stages, by number.
        exchange: its connection to other ranks.
        handlers: by kind of action, the functions that carry it out in place of the rank.
        stages: the number of stages of the pipeline, where those of the row are numbered through over all replicas; values then always travel by
            SEND and RECV. 0: of one replica.
        made: gets the results of computations, in case the step is repeated: by FORWARD or BACKWARD, stage and microbatch, a dict of values
            by the keys under which they are sent. None: they are not kept.
    """

    def __init__(
        self,
        index: int,
        row: Sequence[Action | None],
        runs: Mapping[int, StageRun],
        exchange: Exchange,
        handlers: Mapping[ActionKind, Callable[[Action], Any]] | None = None,
        stages: int = 0,
        made: dict[Key, dict[Key, Any]] | None = None,
    ) -> None:
        self.index = index
        self._stages = stages
        self._made = made
        self.row = row
        self.runs = runs
        #: the action that it is at
        self.current: Action | None = None
        self._exchange = exchange
        self._handlers = handlers or {}
        #: values that have come for an action or wait to be sent, by stage and microbatch
        self._messages: dict[tuple[int, int], Any] = {}
        self._grads: dict[tuple[int, int], Any] = {}
        self._outgoing: dict[tuple[str, int, int], Any] = {}

    async def run(self) -> None:
        """Carry out every action. Cancelling ends it; what its stages keep goes with it.

        Raises:
            PipelineError: an action failed; the cause is chained.
        """
        for action in self.row:
            if action is None:
                continue
            self.current = action
            if action.parts is None:
                await self._perform(action)
            else:
                await self._exchange.both(self._perform(action.parts[0]), self._perform(action.parts[1]))
        self.current = None

    async def _perform(self, action: Action) -> None:
        began = self._exchange.began()
        try:
            handler = self._handlers.get(action.kind)
            if handler is not None:
                await handler(action)
            else:
                rest = _DO[action.kind](self, action, (action.stage, action.microbatch))
                if rest is not None:
                    await rest
        except Exception as error:
            stage = action.stage % self._stages if self._stages else action.stage
            raise failure(self.index, action if stage == action.stage else Action(stage, action.kind, action.microbatch), error) from error
        finally:
            self._exchange.ended(action, began)

    @property
    def received(self) -> dict[Key, Any]:
        """The values that have come for actions that have not begun."""
        return {(FORWARD, *key): value for key, value in self._messages.items()} | {(BACKWARD, *key): value for key, value in self._grads.items()}

    def clear(self) -> None:
        """Drop the values of all microbatches: the step is over, or abandoned."""
        for run in self.runs.values():
            run.clear()
        for kept in (self._messages, self._grads, self._outgoing):
            kept.clear()

    # ---------------------------------------------------------------- computing

    async def _forward(self, action: Action, key: tuple[int, int]) -> None:
        stage, microbatch = key
        run = self.runs[stage]
        target = await self._value((TARGET, *key)) if run.takes_target else ()
        args, kwargs = await self._value((ENTRY, *key)) if run.takes_entry else ((), {})
        taken = {source: await self._value((kind_from(GIVEN, source), *key)) for source in run.sources}
        if run.index:
            made = await run.forward(microbatch, self._messages.pop(key), target, kwargs, taken)
            del kwargs, taken
        else:
            made = await run.enter(microbatch, args, kwargs, target, [])
            del args, kwargs
        sent: dict[Key, Any] = {}
        for to, message in made.given.items():
            each = kind_from(GIVEN, run.index), stage - run.index + to, microbatch
            sent[each] = message
            self._exchange.send(each, message)
        if not run.is_last:
            self._hand_on((FORWARD, stage + 1, microbatch), made.message, self._messages)
            sent[FORWARD, stage + 1, microbatch] = made.message
        if self._made is not None:
            self._made[FORWARD, stage, microbatch] = sent

    async def _backward(self, action: Action, key: tuple[int, int]) -> None:
        stage, microbatch = key
        run = self.runs[stage]
        grads = None if run.is_last else self._grads.pop(key)
        returned = {to: await self._value((kind_from(RETURNED, to), *key)) for to in run.destinations}
        back, taken = await (run.backward if action.kind is _K.B else run.backward_input)(microbatch, grads, returned)
        sent: dict[Key, Any] = {}
        for source, values in taken.items():
            each = kind_from(RETURNED, run.index), stage - run.index + source, microbatch
            sent[each] = values
            self._exchange.send(each, values)
        if run.index:
            self._hand_on((BACKWARD, stage - 1, microbatch), back, self._grads)
            sent[BACKWARD, stage - 1, microbatch] = back
        if self._made is not None:
            self._made[BACKWARD, stage, microbatch] = sent

    def _hand_on(self, key: Key, value: Any, into: dict[tuple[int, int], Any]) -> None:
        """Hand a value to a neighbouring stage of this rank, or keep it for the SEND."""
        if not self._stages and key[1] in self.runs:
            into[key[1:]] = value
        else:
            self._outgoing[key] = value

    async def _backward_weight(self, action: Action, key: tuple[int, int]) -> None:
        await self.runs[key[0]].backward_weight(key[1])

    # ---------------------------------------------------------------- moving

    def _send_forward(self, action: Action, key: tuple[int, int]) -> None:
        self._send((FORWARD, key[0] + 1, key[1]))

    def _send_backward(self, action: Action, key: tuple[int, int]) -> None:
        self._send((BACKWARD, key[0] - 1, key[1]))

    def _send(self, key: Key) -> None:
        self._exchange.send(key, self._outgoing.pop(key))

    def _receive_forward(self, action: Action, key: tuple[int, int]) -> Coroutine[Any, Any, None] | None:
        return self._receive((FORWARD, *key), self._messages)

    def _receive_backward(self, action: Action, key: tuple[int, int]) -> Coroutine[Any, Any, None] | None:
        return self._receive((BACKWARD, *key), self._grads)

    def _receive(self, key: Key, into: dict[tuple[int, int], Any]) -> Coroutine[Any, Any, None] | None:
        """Take a value if it has come; else a coroutine that waits for it."""
        if not self._exchange.has(key):
            return self._await(key, into)
        into[key[1:]] = self._exchange.take(key)
        return None

    async def _await(self, key: Key, into: dict[tuple[int, int], Any]) -> None:
        into[key[1:]] = await self._exchange.receive(key)

    async def _value(self, key: Key) -> Any:
        return self._exchange.take(key) if self._exchange.has(key) else await self._exchange.receive(key)

    def _nothing(self, action: Action, key: tuple[int, int]) -> None:
        """The default handler of UNSHARD, RESHARD and REDUCE_GRAD: does nothing."""


#: some only begin an action and return a coroutine of the rest
_DO: Mapping[ActionKind, Callable[[Rank, Action, Any], Coroutine[Any, Any, None] | None]] = {
    _K.F: Rank._forward,
    _K.B: Rank._backward,
    _K.I: Rank._backward,
    _K.W: Rank._backward_weight,
    _K.SEND_F: Rank._send_forward,
    _K.SEND_B: Rank._send_backward,
    _K.RECV_F: Rank._receive_forward,
    _K.RECV_B: Rank._receive_backward,
    _K.UNSHARD: Rank._nothing,
    _K.RESHARD: Rank._nothing,
    _K.REDUCE_GRAD: Rank._nothing,
}


def failure(rank: int, action: Action, error: BaseException) -> PipelineError:
    """The error for an action that has failed."""
    microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return PipelineError(
        f"pipeline action {action} failed (stage {action.stage}{microbatch}, rank {rank}): {summary_of(error, 300)}",
        stage=action.stage,
        microbatch=action.microbatch,
        action=str(action),
        rank=rank,
    )
