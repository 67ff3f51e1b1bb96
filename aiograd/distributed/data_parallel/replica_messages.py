"""The messages of replicas: arguments and results of calls of a `ReplicaMember`, and outlines of states, JSON beside their arrays. Pure."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeAlias

from aiograd.coordination.compressor_message import CompressorForm
from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import Count, Positive, WireMessage, message
from aiograd.distributed.objects.references import RemoteRef

MethodName: TypeAlias = Annotated[str, Bound("the name of a public method", lambda name: bool(name) and not name.startswith("_"))]
Norm: TypeAlias = Annotated[float, Bound("a finite number above 0", lambda norm: norm > 0 and math.isfinite(norm))]
#: -1: before the first step
Taken: TypeAlias = Annotated[int, Bound("an int from -1", lambda taken: taken >= -1)]


@message(code="replica", wire=dict)
class ReplicaOptions(WireMessage):
    """Options of a replica, for its member."""

    #: of the module, for the loss
    method: MethodName
    #: None: gradients are not scaled
    clip_norm: Norm | None
    #: steps until the optimizer takes one
    accumulate: Positive
    bucket_bytes: Positive
    shard_optimizer: bool
    optimizer: RemoteRef
    #: losses and gradients are kept until a step is committed, for the next attempt
    absorb: bool
    #: None: gradients are sent as they are
    compress: CompressorForm | None = None


@message(code="replica", wire=list)
class ReplicaVersion(WireMessage):
    """The version of a replica's state, see `Replica.version`."""

    loads: Count
    taken: Count


@message(code="replica", wire=list)
class ShardRun(WireMessage):
    """The shards that a replica computes in a step."""

    #: attempts to take one step have the same number
    call: Count
    #: the index of the first
    first: Count
    #: of each the arguments of the method that computes the loss
    shards: list[list[Any]]
    #: of each its part of the rows of the batch; 0: it has none, and the loss is not computed
    weights: list[float]
    #: of the random numbers of the step; the index of the shard follows
    seed: list[int]
    #: the replicas add their gradients in turn, since others than the first have several shards
    is_in_turn: bool


@message(code="replica", wire=dict)
class ReplicaResult(WireMessage):
    """The result of a step that is prepared."""

    #: Tensors, by shard
    losses: list[Any]
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
