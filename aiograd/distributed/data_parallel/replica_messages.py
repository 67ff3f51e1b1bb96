"""The messages of replicas: arguments and results of calls of a `ReplicaMember`, and outlines of states as JSON beside their arrays. Pure."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import WireMessage, encode, message, parse
from aiograd.distributed.messages.fields import Count
from aiograd.distributed.messages.library import Positive
from aiograd.distributed.objects.references import RemoteRef
from aiograd.errors import ArgumentError, ProtocolError
from aiograd.running.types import Array

M = TypeVar("M", bound=WireMessage)

Norm: TypeAlias = Annotated[float, Bound("a finite number above 0", lambda norm: norm > 0 and math.isfinite(norm))]
#: -1: before the first step
Taken: TypeAlias = Annotated[int, Bound("an int from -1", lambda taken: taken >= -1)]


@message(code="replica", wire=dict)
class ReplicaOptions(WireMessage):
    """Options of a replica, for its member."""

    #: of the module, for the loss
    method: Annotated[str, Bound("the name of a public method", lambda name: bool(name) and not name.startswith("_"))]
    #: None: gradients are not scaled
    clip_norm: Norm | None
    #: steps until the optimizer takes one
    accumulate: Positive
    bucket_bytes: Positive
    shard_optimizer: bool
    optimizer: RemoteRef


@message(code="replica", wire=list)
class ReplicaVersion(WireMessage):
    """The version of a replica's state, see `Replica.version`."""

    loads: Count
    taken: Count


@message(code="replica", wire=dict)
class ReplicaResult(WireMessage):
    """The result of a step that is prepared."""

    #: a Tensor
    loss: Any
    #: seconds from the request on for which the step is kept
    kept: float


@message(code="replica", wire=list)
class PartStamp(WireMessage):
    """A `ShardStamp`."""

    loads: Count
    taken: Taken
    #: 0: there is no part
    size: Count
    shards: list[Count]


@message(code="replica", wire=list)
class StateEntry(WireMessage):
    """A value of the state of an optimizer."""

    #: of the parameter
    number: Count
    name: str
    #: the value is the next of the arrays
    is_array: bool
    #: None where it is an array
    value: Any


@message(code="replica", wire=dict)
class ReplicaOutline(WireMessage):
    """The outline of a replica's state. Its arrays follow: parameters and buffers, state of the optimizer, running gradients."""

    #: of parameters and buffers
    names: list[str]
    #: parameter groups of the optimizer
    groups: list[dict[str, Any]]
    states: list[StateEntry]
    #: numbers of the parameters that have running gradients
    running: list[Count]
    version: ReplicaVersion


@message(code="replica", wire=list)
class PartEntry(WireMessage):
    """A value of the state of some elements of a parameter."""

    #: of the parameter
    number: Count
    #: the first element, and behind the last one
    start: Count
    stop: Count
    name: str
    #: the value is the next of the arrays
    is_array: bool
    #: None where it is an array
    value: Any


@message(code="replica", wire=dict)
class PartOutline(WireMessage):
    """The outline of a part of the optimizer's state. Its arrays follow."""

    #: parameter groups of the optimizer
    groups: list[dict[str, Any]]
    entries: list[PartEntry]


@message(code="optimizer", wire=list)
class PieceEntry(WireMessage):
    """A value of the state of a piece of a parameter."""

    #: of the parameter
    number: Count
    #: the first element, and behind the last one
    start: Count
    stop: Count
    name: str
    #: None: it is an array
    value: Any


def to_json(outline: WireMessage) -> bytes:
    """An outline as JSON.

    Args:
        outline: the outline, with numbers of Python or numpy in its fields of type `Any`.

    Returns:
        The JSON.

    Raises:
        ArgumentError: a value is no JSON.
    """
    return json.dumps(encode(outline), default=_plain_number).encode()


def from_json(cls: type[M], text: Array) -> M:
    """The outline of a JSON that another replica has sent.

    Args:
        cls: the class of the outline.
        text: the bytes.

    Returns:
        The outline.

    Raises:
        ProtocolError: as for `parse`; or it is no JSON.
    """
    try:
        value = json.loads(text.tobytes())
    except ValueError as error:
        raise ProtocolError(f"a malformed {cls.form.name}: it is {text.nbytes} bytes; expected JSON", code=cls.form.code) from error
    return parse(cls, value)


def pieces_from_json(text: Array) -> list[PieceEntry]:
    """The entries of a member of a `ZeroRedundancyOptimizer`.

    Args:
        text: the bytes of a JSON list, from another member.

    Returns:
        The entries.

    Raises:
        ProtocolError: as for `parse`; or it is no JSON list.
    """
    try:
        entries = json.loads(text.tobytes())
    except ValueError:
        entries = None
    if not isinstance(entries, list):
        raise ProtocolError(f"a malformed outline of an optimizer's state: it is {text.nbytes} bytes; expected a JSON list", code="optimizer")
    return [parse(PieceEntry, each) for each in entries]


def _plain_number(value: Any) -> Any:
    """A number of numpy's as one of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise ArgumentError(f"the state of an optimizer has a {type(value).__name__}, which cannot be sent to another replica")
