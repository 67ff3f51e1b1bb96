"""KeptStep: the work of a member for a step that was given up, for the step that takes its place after the loss of another worker.

Note [Nothing is done twice]
    With `Pipeline(absorb=True)` a step that is given up since a worker was lost is taken again in the same call, with another number and other rows,
    but on the same inputs and with the same random numbers. So all that the other members have computed for it is still right: each keeps the
    activations of microbatches under way, the sum of its weight gradients so far, the values that have come for it, and the values that it has
    made for others. It tells the coordinating process the values that need not come again (`KnownValues`), leaves out the actions that are done, and
    sends the values that it has made to ranks that have not got them, above all to the new ranks of a lost stage. A computation that the loss
    has cut short is done again, and so is all work that was taken over from a rank lost before: its gradients may have been on the worker that
    is lost now.

    Where the forwards of a member change buffers, undoing the step has put these back, so the member keeps nothing and begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiograd.pipeline.run.messages import KnownValues
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.step.accumulator import GradientAccumulator
from aiograd.pipeline.step.rank import BACKWARD, ENTRY, FORWARD, GIVEN, RETURNED, TARGET, Key
from aiograd.pipeline.step.stage_run import StageProgress

_K = ActionKind
#: by kind of action, the computation that it belongs to
_PART = {_K.RECV_F: _K.F, _K.F: _K.F, _K.SEND_F: _K.F, _K.RECV_B: _K.I, _K.I: _K.I, _K.SEND_B: _K.I, _K.W: _K.W}


class KeptStep:
    """The work of a member for a step, on the microbatches of its own replica.

    Args:
        repeats: the number that the step had at first.
        stages: how far each stage is.
        made: as of `Rank`, by stage.
        values: that have come and were not used.
        gradients: of weights.
        microbatches: their number.
    """

    def __init__(
        self,
        repeats: int,
        stages: Mapping[int, StageProgress],
        made: Mapping[Key, Mapping[Key, Any]],
        values: Mapping[Key, Any],
        gradients: GradientAccumulator,
        microbatches: int,
    ) -> None:
        self.repeats = repeats
        self.gradients = gradients
        self.values = values
        #: the computations that are done and need not be done again
        self._done: set[tuple[int, ActionKind, int]] = set()
        for stage, progress in stages.items():
            for microbatch in range(microbatches):
                has_weights = gradients.has(stage, microbatch)
                has_inputs = has_weights or (microbatch in progress.groups and (BACKWARD, stage, microbatch) in made)
                has_outputs = has_inputs or (microbatch in progress.saved and (FORWARD, stage, microbatch) in made)
                found = ((_K.W, has_weights), (_K.I, has_inputs), (_K.F, has_outputs))
                self._done |= {(stage, kind, microbatch) for kind, is_done in found if is_done}
        self.stages = {stage: self._of_done(stage, progress) for stage, progress in stages.items()}
        self.made = {key: value for key, value in made.items() if (key[1], _K.F if key[0] == FORWARD else _K.I, key[2]) in self._done}

    def _of_done(self, stage: int, progress: StageProgress) -> StageProgress:
        """Without computations that were cut short."""
        by_microbatch: tuple[dict[int, Any], ...] = progress
        parts = zip(by_microbatch, (_K.F, _K.I, _K.I, _K.F, _K.F), strict=True)
        return StageProgress(*({number: held[number] for number in held if (stage, kind, number) in self._done} for held, kind in parts))

    def has_done(self, stage: int, action: Action) -> bool:
        """True if an action on a stage is done, or a part of a computation that is done."""
        return (stage, _PART[action.kind], action.microbatch) in self._done

    @property
    def sent(self) -> dict[Key, Any]:
        """The values that were sent or are to be sent, by their keys in mailboxes."""
        return {key: value for values in self.made.values() for key, value in values.items()}

    def known(self) -> KnownValues:
        """The values that are here, or needed no more."""
        keys = set(self.values)
        for stage, kind, microbatch in self._done:
            if kind is _K.F:
                keys |= {(each, stage, microbatch) for each in (ENTRY, *((FORWARD, GIVEN) if stage else ()), TARGET)}
            elif kind is _K.I:
                keys |= {(BACKWARD, stage, microbatch), (RETURNED, stage, microbatch)}
        return known_values(keys)


def known_values(keys: set[Key]) -> KnownValues:
    """The message of keys of values. Values that one stage gives another are in it where the computation that takes them is done."""
    found: dict[str, dict[str, list[int]]] = {kind: {} for kind in KnownValues.form.names}
    for kind, stage, microbatch in sorted(key for key in keys if key[0] in found):
        found[kind].setdefault(str(stage), []).append(microbatch)
    return KnownValues(**found)


def keys_of(known: KnownValues, first_stage: int = 0) -> set[Key]:
    """The keys of values in a message.

    Args:
        known: the message.
        first_stage: is added to the numbers of stages.
    """
    return {
        (kind, first_stage + int(stage), microbatch)
        for kind in KnownValues.form.names
        for stage, microbatches in getattr(known, kind).items()
        for microbatch in microbatches
    }
