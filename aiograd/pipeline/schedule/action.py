"""One cell of a pipeline schedule: a rank's work in one step, and its text form.

Schedules are built, checked, drawn and stored as data, so an action is a plain value with a text form that is read back exactly.

Note [Text of an action]
    ``<stage><kind>[<microbatch>]`` with numbers in plain decimal: ``1F0``, ``2I1``, ``0W3``, ``0B3``, ``2SEND_B2``, ``1RECV_F1``; kinds that
    concern the parameters of a stage have no microbatch: ``1UNSHARD``, ``3RESHARD``, ``0REDUCE_GRAD``. A forward and a backward that a rank
    runs side by side are ``(0F7;7B3)OVERLAP_F_B``. A blank cell is an idle step. Everything else is refused, a cell that starts like an
    action included (``0Foo``), and so is what would not be written that way (``00F1``).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any, Final

from aiograd.errors import ArgumentError, ArgumentTypeError


class ActionKind(enum.Enum):
    """The kind of an action. The value is the kind's text.

    >>> ag.pipeline.ActionKind("SEND_F") is ag.pipeline.ActionKind.SEND_F
    True
    """

    #: forward
    F = "F"
    #: backward with respect to the inputs of the stage
    I = "I"  # noqa: E741 (the name the literature and the text form use)
    #: backward with respect to the weights, after I
    W = "W"
    #: full backward: I and W at once
    B = "B"
    #: the stage's outputs go to the next stage
    SEND_F = "SEND_F"
    #: the stage's inputs come from the previous stage
    RECV_F = "RECV_F"
    #: the gradients of the stage's inputs go to the previous stage
    SEND_B = "SEND_B"
    #: the gradients of the stage's outputs come from the next stage
    RECV_B = "RECV_B"
    #: gather the sharded parameters of the stage
    UNSHARD = "UNSHARD"
    #: let go of the gathered parameters of the stage
    RESHARD = "RESHARD"
    #: sum the gradients of the stage's parameters over its shards, once it has seen every microbatch
    REDUCE_GRAD = "REDUCE_GRAD"
    #: a forward and a backward side by side; see `Action.parts`
    OVERLAP_F_B = "OVERLAP_F_B"

    # Members are singletons. The enum's own hash runs Python code, and passes over schedules are made of look-ups.
    __hash__: Any = object.__hash__

    @property
    def is_compute(self) -> bool:
        """True if it computes: F, I, W, B or OVERLAP_F_B. A schedule before lowering has these only."""
        return self in COMPUTE

    @property
    def is_backward(self) -> bool:
        """True if it is a part of a backward: I, W or B."""
        return self in BACKWARD

    @property
    def is_send(self) -> bool:
        """True if it is SEND_F or SEND_B."""
        return self in SEND

    @property
    def is_receive(self) -> bool:
        """True if it is RECV_F or RECV_B."""
        return self in RECEIVE

    @property
    def has_microbatch(self) -> bool:
        """True if an action of the kind is about one microbatch, rather than about the parameters of its stage."""
        return self not in PARAMETERS


_K = ActionKind
BACKWARD: Final = (_K.I, _K.W, _K.B)
COMPUTE: Final = (_K.F, *BACKWARD, _K.OVERLAP_F_B)
SEND: Final = (_K.SEND_F, _K.SEND_B)
RECEIVE: Final = (_K.RECV_F, _K.RECV_B)
PARAMETERS: Final = (_K.UNSHARD, _K.RESHARD, _K.REDUCE_GRAD)

#: the other end of a transfer: kind over there, and where its stage is from here
_OTHER_END: Final = {_K.SEND_F: (_K.RECV_F, 1), _K.RECV_F: (_K.SEND_F, -1), _K.SEND_B: (_K.RECV_B, -1), _K.RECV_B: (_K.SEND_B, 1)}

#: more digits than any schedule needs; keeps hostile text from becoming huge integers
_NUMBER = "0|[1-9][0-9]{0,8}"
_SIMPLE: Final = re.compile(f"({_NUMBER})({'|'.join(kind.value for kind in _K if kind is not _K.OVERLAP_F_B)})({_NUMBER})?")
_OVERLAP: Final = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """One action of a rank on one stage.

    Args:
        stage: index of the stage (not of the rank). For OVERLAP_F_B the forward's.
        kind: the kind of the action.
        microbatch: index of the microbatch; None for UNSHARD, RESHARD and REDUCE_GRAD. For OVERLAP_F_B the forward's.
        parts: for OVERLAP_F_B the forward and the backward (B or I) that run side by side, else None. `Action.overlap` fills it in.

    Raises:
        ArgumentError: numbers below zero, a microbatch missing or too much, parts that do not overlap.
        ArgumentTypeError: values of other types.

    >>> ag.pipeline.Action(0, ag.pipeline.ActionKind.F, 1)
    0F1
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    parts: tuple[Action, Action] | None = None

    def __post_init__(self) -> None:
        if type(self.stage) is not int or type(self.kind) is not ActionKind or (self.microbatch is not None and type(self.microbatch) is not int):
            kinds = ", ".join(type(value).__name__ for value in (self.stage, self.kind, self.microbatch))
            raise ArgumentTypeError(f"an action is made of an int, an ActionKind and an int or None, not of {kinds}; Action.parse reads text")
        if self.stage < 0 or (self.microbatch is not None and self.microbatch < 0):
            raise ArgumentError(f"an action needs a stage and a microbatch of 0 or more, not stage {self.stage} and microbatch {self.microbatch}")
        if (self.microbatch is not None) != self.kind.has_microbatch:
            need = "needs a microbatch" if self.kind.has_microbatch else f"is about the whole stage, not about microbatch {self.microbatch}"
            raise ArgumentError(f"{self.kind.value} of stage {self.stage} {need}")
        if (self.parts is not None) != (self.kind is _K.OVERLAP_F_B):
            raise ArgumentError(f"{self.kind.value} of stage {self.stage}: an OVERLAP_F_B has parts and no other kind does; use Action.overlap")
        if self.parts is not None:
            forward, backward = self.parts
            if forward.kind is not _K.F or backward.kind not in (_K.B, _K.I):
                raise ArgumentError(f"OVERLAP_F_B runs an F with a B or I, not {forward} with {backward}")
            if (self.stage, self.microbatch) != (forward.stage, forward.microbatch):
                raise ArgumentError(f"an OVERLAP_F_B takes stage and microbatch of its forward {forward}, not {self.stage} and {self.microbatch}")

    @classmethod
    def overlap(cls, forward: Action, backward: Action) -> Action:
        """A forward and a backward, of the same rank, that run side by side.

        Args:
            forward: an F.
            backward: a B or I, mostly of another stage and microbatch.

        Returns:
            The action, of kind OVERLAP_F_B.

        Raises:
            ArgumentError: actions of other kinds.
        """
        return cls(forward.stage, _K.OVERLAP_F_B, forward.microbatch, (forward, backward))

    @classmethod
    def parse(cls, text: str) -> Action | None:
        """Reads the text of an action; see Note [Text of an action].

        Args:
            text: one cell. Spaces around it do not count.

        Returns:
            The action, or None for an idle step.

        Raises:
            ArgumentTypeError: `text` is not a str.
            ArgumentError: it is no action.
        """
        if not isinstance(text, str):
            raise ArgumentTypeError(f"Action.parse takes the text of an action such as '1F0', not {type(text).__name__}")
        cell = text.strip()
        if not cell:
            return None
        overlap = _OVERLAP.fullmatch(cell)
        if overlap is None:
            return _parse_simple(cell, text)
        return cls.overlap(_parse_simple(overlap[1], text), _parse_simple(overlap[2], text))

    @property
    def computations(self) -> tuple[Action, ...]:
        """The computations of the action: itself, the parts of an OVERLAP_F_B, or nothing for kinds that move data."""
        if self.parts is not None:
            return self.parts
        return (self,) if self.kind.is_compute else ()

    @property
    def other_end(self) -> Action:
        """The RECV of a SEND, on the neighbouring stage, or the SEND of a RECV.

        Raises:
            ArgumentError: the action moves nothing between stages, or there is no stage on that side.
        """
        found = _OTHER_END.get(self.kind)
        if found is None or self.stage + found[1] < 0:
            raise ArgumentError(f"{self} has no other end: only a SEND or RECV between two stages has one")
        return Action(self.stage + found[1], found[0], self.microbatch)

    def __str__(self) -> str:
        if self.parts is not None:
            return f"({self.parts[0]};{self.parts[1]}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    __repr__ = __str__


def _parse_simple(cell: str, text: str) -> Action:
    match = _SIMPLE.fullmatch(cell)
    if match is None:
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ArgumentError(
            f"{shown!r} is no action of a pipeline schedule: expected <stage><kind><microbatch> such as '2F0' or '1SEND_B3', "
            f"'1UNSHARD', or '(0F7;7B3)OVERLAP_F_B'; a blank cell is an idle step"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), ActionKind(kind), None if microbatch is None else int(microbatch))
