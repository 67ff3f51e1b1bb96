"""Calls of the library's own functions on another worker.

Such a message goes as a `FunctionCall`: it has the function's name, its fields are the positional arguments. The fields hold the same types as the
call's arguments and results: a `RemoteRef` for a reference, Tensors in fields of type `Any`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import WireMessage, encode, message, parse_answer
from aiograd.distributed.objects.references import RemoteRef

Positive: TypeAlias = Annotated[int, Bound("an int from 1", lambda number: number >= 1)]
#: the number of a transfer, which its caller draws
TransferNumber: TypeAlias = Annotated[bytes, Bound("16 bytes", lambda number: len(number) == 16)]

# ---------------------------------------------------------------- references


@message(code="call", name="aiograd.reference.create", answer=RemoteRef)
class CreateObject(WireMessage):
    """Make an instance of an exposed class. The answer refers to it."""

    class_name: str
    args: list[Any]
    kwargs: dict[str, Any]


@message(code="call", name="aiograd.reference.call")
class CallMethod(WireMessage):
    """Call a public method of an object. The answer is its result."""

    ref: RemoteRef
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


@message(code="call", name="aiograd.reference.get")
class ReadObject(WireMessage):
    """Read an object that can be sent. The answer is the object."""

    ref: RemoteRef


@message(code="call", name="aiograd.reference.delete", answer=bool)
class DeleteObject(WireMessage):
    """Remove an object. The answer is False if it was removed before."""

    ref: RemoteRef


@message(code="call", name="aiograd.adapter.create", answer=RemoteRef)
class CreateAdapter(WireMessage):
    """Make an adapter around objects; see `RemoteRef.adapt`. The answer refers to it."""

    ref: RemoteRef
    name: str
    others: list[RemoteRef]
    options: dict[str, Any]


# ---------------------------------------------------------------- states in several messages


@message(code="chunks")
class StateChunk(WireMessage):
    """A value of a state; or, of a Tensor that is too large for one message, some of its elements in order. Chunks of one Tensor are neighbours."""

    name: Any
    #: None: `value` is the whole value; else the shape of the whole Tensor
    shape: tuple[Positive, ...] | None
    #: the value, or a Tensor ``(elements,)``
    value: Any


@message(code="chunks")
class StateBegun(WireMessage):
    """The beginning of a state that is read."""

    #: the values beside the chunks
    head: Any
    chunks: list[StateChunk]
    is_more: bool


@message(code="chunks")
class StateContinued(WireMessage):
    """Further chunks of a state that is read."""

    chunks: list[StateChunk]
    is_more: bool


@message(code="call")
class StateRequest(WireMessage):
    """The fields of a request to read a state."""

    ref: RemoteRef
    number: TransferNumber
    #: of a message to the caller; a `Capacity`
    capacity: tuple[Positive, Positive, Positive]


@message(code="call")
class StateChunks(WireMessage):
    """Chunks of a state that is loaded."""

    ref: RemoteRef
    number: TransferNumber
    #: True for the first chunks of a state
    is_first: bool
    chunks: list[StateChunk]


@message(code="call", name="aiograd.transfer.more", answer=StateContinued)
class ReadMore(WireMessage):
    """Read further chunks of a state."""

    ref: RemoteRef
    number: TransferNumber


@message(code="call", name="aiograd.transfer.put", answer=bool)
class PutChunks(StateChunks):
    """Keep chunks of a state until the last have come. The answer is True."""


@message(code="call", name="aiograd.transfer.end", answer=bool)
class EndTransfer(WireMessage):
    """Drop a transfer. The answer is True."""

    ref: RemoteRef
    number: TransferNumber


# ---------------------------------------------------------------- modules


@message(code="call", name="aiograd.module.parameters", answer=dict[str, RemoteRef])
class ModuleParameters(WireMessage):
    """Ask for the parameters of a module. The answer refers to them, by name."""

    ref: RemoteRef


@message(code="call", name="aiograd.module.state_dict", answer=StateBegun)
class ReadModule(StateRequest):
    """Read the state of a module."""


@message(code="call", name="aiograd.module.load_state_dict", answer=bool)
class LoadModule(StateChunks):
    """Load the state of a module, of which these chunks are the last. The answer is True."""


@message(code="call", name="aiograd.module.train", answer=bool)
class TrainModule(WireMessage):
    """Switch a module to training or evaluation. The answer is True."""

    ref: RemoteRef
    mode: bool


# ---------------------------------------------------------------- optimizers


@message(code="call", name="aiograd.optimizer.create", answer=RemoteRef)
class CreateOptimizer(WireMessage):
    """Make an optimizer of parameters and modules. The answer refers to it."""

    class_name: str
    refs: list[RemoteRef]
    options: dict[str, Any]


@message(code="call", name="aiograd.optimizer.step", answer=int)
class StepOptimizer(WireMessage):
    """Take a step; see Note [Optimizer steps] in `objects.optimizer_server`. The answer is the number of the last step taken."""

    ref: RemoteRef
    number: int
    #: with the gradients in ``grad``: tells apart attempts at one step. None: with the gradients of the context of the call
    attempt: int | None = None


@message(code="call", name="aiograd.optimizer.gradient_sizes", answer=list[Any])
class GradientSizes(WireMessage):
    """Ask for the norms of the gradients of a context. The answer has a Tensor ``()`` for each parameter with one."""

    ref: RemoteRef
    norm_type: float


@message(code="call", name="aiograd.optimizer.scale_gradients", answer=bool)
class ScaleGradients(WireMessage):
    """Scale the gradients of a context. The answer is True."""

    ref: RemoteRef
    #: a Tensor ``()``
    factor: Any


@message(code="call", name="aiograd.optimizer.set_options", answer=bool)
class SetOptions(WireMessage):
    """Change options of all parameter groups. The answer is True."""

    ref: RemoteRef
    options: dict[str, Any]


@message(code="call", name="aiograd.optimizer.state_dict", answer=StateBegun)
class ReadOptimizer(StateRequest):
    """Read the state of an optimizer."""


@message(code="call", name="aiograd.optimizer.load_state_dict", answer=bool)
class LoadOptimizer(StateChunks):
    """Load the state of an optimizer, of which these chunks are the last. The answer is True."""

    #: the head of `StateBegun`
    head: dict[str, Any]


# ---------------------------------------------------------------- clusters and dashboards


@message(code="call", name="aiograd.cluster.peers", answer=bool)
class SetPeers(WireMessage):
    """Set the URLs of peers. The answer is True."""

    #: by name; None removes a peer
    urls: dict[str, str | None]


@message(code="call", name="aiograd.cluster.dismiss", answer=bool)
class Dismiss(WireMessage):
    """Tell a worker that its cluster is closed. The answer is True."""


@message(code="call", name="aiograd.cluster.restart", answer=bool)
class Restart(WireMessage):
    """Ask a worker to start again, without its state. The answer is True."""


@message(code="call", name="aiograd.cluster.join", answer=bool)
class JoinRequest(WireMessage):
    """Ask the driver of a cluster to admit the sender. The answer is True."""

    #: of the sender
    url: str
    #: of the library
    version: str


@message(code="call", name="aiograd.dashboard.report", answer=str)
class ReportRequest(WireMessage):
    """Ask a worker for its report to a dashboard. The answer is JSON."""

    #: JSON, see `aiograd.dashboard.reporter`
    question: str


async def ask_library(worker: Any, peer: str, message: WireMessage, timeout: float | None) -> Any:
    """Call a function of the library itself. Cancelling cancels the function on its worker.

    Args:
        worker: a `Worker`.
        peer: name of the worker that has the function.
        message: the message of the function.
        timeout: seconds; None: the worker's default.

    Returns:
        The answer to the message.
    """
    return parse_answer(type(message), await worker.call(peer, message.form.name, *encode(message), timeout=timeout), peer)


#: by the names of the functions
LIBRARY: Final[Mapping[str, type[WireMessage]]] = {
    each.form.name: each
    for each in (
        CreateObject, CallMethod, ReadObject, DeleteObject, CreateAdapter, ReadMore, PutChunks, EndTransfer, ModuleParameters, ReadModule, LoadModule,
        TrainModule, CreateOptimizer, StepOptimizer, GradientSizes, ScaleGradients, SetOptions, ReadOptimizer, LoadOptimizer, SetPeers, Dismiss,
        Restart, JoinRequest, ReportRequest,
    )
}  # fmt: skip
