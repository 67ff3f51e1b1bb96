"""The messages of pipelines: arguments and results of calls of a `StageMember`, and the values that ranks send each other. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from aiograd.coordination.malformed import malformed
from aiograd.coordination.message_code import Bound, shown
from aiograd.coordination.message_form import Count, Positive, WireMessage, message, parse
from aiograd.pipeline.step.message import StageMessage
from aiograd.pipeline.step.rank import BACKWARD, ENTRY, FORWARD, GIVEN, RETURNED, TARGET, WEIGHTS, base_of

#: the types of values between ranks, by kind; the kinds GIVEN and RETURNED end with the number of the sending stage
KINDS: Final = {ENTRY: tuple, FORWARD: tuple, BACKWARD: list, TARGET: tuple, WEIGHTS: list, GIVEN: tuple, RETURNED: list}


def _has_numbers(table: dict[str, Any]) -> bool:
    return all(key.__class__ is str and key.isdecimal() for key in table)


def _is_kind(kind: str) -> bool:
    base, _, number = kind.partition(" ")
    return base in KINDS and (number.isascii() and number.isdecimal() if base in (GIVEN, RETURNED) else kind == base)


ValueKind: TypeAlias = Annotated[str, Bound(f"one of {', '.join(KINDS)}", _is_kind)]
#: actions as text, by the number of a rank
Rows: TypeAlias = Annotated[dict[str, str], Bound("a dict by numbers of ranks", _has_numbers)]
#: microbatches, by the number of a stage
Microbatches: TypeAlias = Annotated[dict[str, list[Count]], Bound("a dict by numbers of stages", _has_numbers)]


@message(code="pipeline", wire=list)
class StageOptions(WireMessage):
    """Options of a `Stage`."""

    where: Annotated[str, Bound("'executor' or 'loop'", lambda where: where in ("executor", "loop"))] | None
    device: str | None
    pass_indices: bool


@message(code="pipeline", wire=dict)
class StagesRequest(WireMessage):
    """A `StageAssignment` for another worker, where the modules come with the call."""

    #: by number, in the order of the modules
    stages: Annotated[dict[str, StageOptions], Bound("a dict by numbers of stages", _has_numbers)]
    training: Rows
    evaluation: Rows
    stage_to_rank: list[Count]
    microbatches: Positive
    loss_stage: Count
    last_stage: Count
    scale: float
    recovers: bool
    absorbs: bool | None = None
    #: of `StageLinks`: name, source and destination; and the stages that take arguments of the batch
    links: list[tuple[str, Count, Count]] | None = None
    entries: list[Count] | None = None


@message(code="pipeline", wire=list)
class ReplicaShare(WireMessage):
    """The share of a replica in a batch."""

    #: the factor of losses
    scale: float
    #: number of the first microbatch
    first: Count
    #: references to members of other replicas, which may know the outcome of the step
    witnesses: list[Any]


@message(code="pipeline", wire=dict)
class KnownValues(WireMessage):
    """The values that need not be sent in a step that is repeated, since a rank has them or has used them: microbatches by receiving stage."""

    entry: Microbatches
    forward: Microbatches
    backward: Microbatches
    target: Microbatches
    given: Microbatches
    returned: Microbatches


@message(code="pipeline", wire=dict)
class AbsorbedRows(WireMessage):
    """The part of a member in a step after a loss. Stages are numbered through over all replicas, replica by replica."""

    #: the replica of the member
    replica: Count
    #: its actions, by rank
    rows: Rows
    #: by stage, the rank that computes each microbatch
    homes: Annotated[dict[str, list[Count]], Bound("a dict by numbers of stages", _has_numbers)]
    #: by lost stage, the rank that adds up its gradients
    adders: Annotated[dict[str, Count], Bound("a dict by numbers of stages", _has_numbers)]
    #: by replica: the factor of losses, and the number of the first microbatch
    scales: list[float]
    firsts: list[Count]
    #: where the step is repeated: the number that it had at first, and the values that are not sent again
    repeats: Count | None = None
    known: KnownValues | None = None


@message(code="pipeline", wire=dict)
class StageResults(WireMessage):
    """The results of a step of some ranks."""

    #: by microbatch; None: the last stage is elsewhere. In a step after a loss by microbatch of all replicas, None for each that is elsewhere
    losses: list[Any] | None
    outputs: list[Any] | None
    #: by the number of a stage, where they were asked for: the sizes of gradients, Tensors ``()``
    sizes: Annotated[dict[str, list[Any]], Bound("a dict by numbers of stages", _has_numbers)] | None = None


@message(code="pipeline")
class RankValue(WireMessage):
    """A value on its way from one rank to another."""

    step: int
    rank: int
    #: of the value, with stage and microbatch the key of a mailbox
    kind: ValueKind
    stage: int
    microbatch: int
    value: Any


@message(code="pipeline")
class EntryValue(WireMessage):
    """The arguments of the batch for a stage."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@message(code="pipeline")
class ForwardValue(WireMessage):
    """A `StageMessage`."""

    values: Any
    wants: tuple[bool, ...]


def received(kind: str, value: Any) -> Any:
    """A value that came from another worker, as the rank takes it.

    Args:
        kind: one of `KINDS`.
        value: the field `value` of a `RankValue`.

    Returns:
        A `StageMessage` for a forward and for given values; else the value.

    Raises:
        ProtocolError: it does not fit its kind.
    """
    kind = base_of(kind)
    expected = KINDS[kind]
    if value.__class__ is not expected:
        raise malformed(RankValue.form, f"{shown(value)} of kind {kind}", expected.__name__, "value")
    if kind in (FORWARD, GIVEN):
        forward = parse(ForwardValue, value)
        return StageMessage(forward.values, forward.wants)
    if kind == ENTRY:
        parse(EntryValue, value)
    return value
