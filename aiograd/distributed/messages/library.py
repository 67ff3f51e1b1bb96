"""Calls of the library's own functions on another worker.

Such a message goes as a `FunctionCall`: it has the function's name, its fields are the positional arguments. The fields hold the same types as the
call's arguments and results: a `RemoteRef` for a reference, Tensors in fields of type `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, dataclass_transform

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import M, Positive, WireMessage, encode, message, parse_answer
from aiograd.distributed.objects.references import RemoteRef

#: the number of a transfer, which its caller draws
TransferNumber: TypeAlias = Annotated[bytes, Bound("16 bytes", lambda number: len(number) == 16)]
_FUNCTIONS: dict[str, type[WireMessage]] = {}


def _is_path(path: tuple[Any, ...]) -> bool:
    return 1 <= len(path) <= 2 and {*map(type, path)} <= {str, int}


@dataclass_transform(frozen_default=True)
def function(name: str, answer: Any = Any) -> Callable[[type[M]], type[M]]:
    """Make a class the call of a function of the library, and register it in `LIBRARY`.

    Args:
        name: of the function, without ``aiograd.``.
        answer: the type of its answer, as an annotation.

    Returns:
        The decorator.
    """

    def decorate(cls: type[M]) -> type[M]:
        made = message(code="call", name=f"aiograd.{name}", answer=answer)(cls)
        _FUNCTIONS[made.form.name] = made
        return made

    return decorate


@message(code="call")
class ObjectRequest(WireMessage):
    """The first field of every request about an object."""

    ref: RemoteRef


@message(code="call")
class StreamRequest(ObjectRequest):
    """The first fields of every request about a stream of parameters."""

    number: TransferNumber


# ---------------------------------------------------------------- references


@function("reference.create", answer=RemoteRef)
class CreateObject(WireMessage):
    """Make an instance of an exposed class. The answer refers to it."""

    class_name: str
    args: list[Any]
    kwargs: dict[str, Any]


@function("reference.call")
class CallMethod(ObjectRequest):
    """Call a public method of an object. The answer is its result."""

    method: str
    args: list[Any]
    kwargs: dict[str, Any]


@function("reference.get")
class ReadObject(ObjectRequest):
    """Read an object that can be sent. The answer is the object."""


@function("reference.delete", answer=bool)
class DeleteObject(ObjectRequest):
    """Remove an object. The answer is False if it was removed before."""


@function("adapter.create", answer=RemoteRef)
class CreateAdapter(ObjectRequest):
    """Make an adapter around objects; see `RemoteRef.adapt`. The answer refers to it."""

    name: str
    others: list[RemoteRef]
    options: dict[str, Any]


# ---------------------------------------------------------------- states in several messages


@message(code="chunks")
class StateChunk(WireMessage):
    """A value of a state; or, of a Tensor that is too large for one message, some of its elements in order. Chunks of one Tensor are neighbours."""

    #: of the value: its name, or the name of a dict and the name in it
    path: Annotated[tuple[Any, ...], Bound("1 or 2 names, each str or int", _is_path)]
    #: None: `value` is the whole value; else the shape of the whole Tensor
    shape: tuple[Positive, ...] | None
    #: the value, or a Tensor ``(elements,)``
    value: Any


@message(code="chunks")
class StatePart(WireMessage):
    """The next chunks of a state that is read."""

    chunks: list[StateChunk]
    #: False: these are the last
    is_more: bool
    #: the values beside the state, with its first chunks
    head: Any = None


@message(code="call")
class StateRequest(StreamRequest):
    """The fields of a request to read a state."""

    #: of a message to the caller; a `Capacity`
    capacity: tuple[Positive, Positive, Positive]


@message(code="call")
class StateChunks(StreamRequest):
    """Chunks of a state that is loaded."""

    #: True for the first chunks of a state
    is_first: bool
    chunks: list[StateChunk]


@function("transfer.more", answer=StatePart)
class ReadMore(StreamRequest):
    """Read further chunks of a state."""


@function("transfer.put", answer=bool)
class PutChunks(StateChunks):
    """Keep chunks of a state until the last have come. The answer is True."""


@function("transfer.end", answer=bool)
class EndTransfer(StreamRequest):
    """Drop a transfer. The answer is True."""


# ---------------------------------------------------------------- modules


@function("module.parameters", answer=dict[str, RemoteRef])
class ModuleParameters(ObjectRequest):
    """Ask for the parameters of a module. The answer refers to them, by name."""


@function("module.state_dict", answer=StatePart)
class ReadModule(StateRequest):
    """Read the state of a module."""


@function("module.load_state_dict", answer=bool)
class LoadModule(StateChunks):
    """Load the state of a module, of which these chunks are the last. The answer is True."""


@function("module.train", answer=bool)
class TrainModule(ObjectRequest):
    """Switch a module to training or evaluation. The answer is True."""

    mode: bool


# ---------------------------------------------------------------- optimizers


@function("optimizer.create", answer=RemoteRef)
class CreateOptimizer(WireMessage):
    """Make an optimizer of parameters and modules. The answer refers to it."""

    class_name: str
    refs: list[RemoteRef]
    options: dict[str, Any]


@function("optimizer.step", answer=int)
class StepOptimizer(ObjectRequest):
    """Take a step; see Note [Optimizer steps] in `objects.optimizer_server`. The answer is the number of the last step taken."""

    number: int
    #: with the gradients in ``grad``: tells apart attempts at one step. None: with the gradients of the context of the call
    attempt: int | None = None


@function("optimizer.gradient_sizes", answer=list[Any])
class GradientSizes(ObjectRequest):
    """Ask for the norms of the gradients of a context. The answer has a Tensor ``()`` for each parameter with one."""

    norm_type: float


@function("optimizer.scale_gradients", answer=bool)
class ScaleGradients(ObjectRequest):
    """Scale the gradients of a context. The answer is True."""

    #: a Tensor ``()``
    factor: Any


@function("optimizer.set_options", answer=bool)
class SetOptions(ObjectRequest):
    """Change options of all parameter groups. The answer is True."""

    options: dict[str, Any]


@function("optimizer.state_dict", answer=StatePart)
class ReadOptimizer(StateRequest):
    """Read the state of an optimizer."""


@function("optimizer.load_state_dict", answer=bool)
class LoadOptimizer(StateChunks):
    """Load the state of an optimizer, of which these chunks are the last. The answer is True."""

    #: the head of `StatePart`
    head: dict[str, Any]


# ---------------------------------------------------------------- clusters and dashboards


@function("cluster.peers", answer=bool)
class SetPeers(WireMessage):
    """Set the URLs of peers. The answer is True."""

    #: by name; None removes a peer
    urls: dict[str, str | None]
    #: of those that were started again: any other incarnation of such a peer has ended
    incarnations: dict[str, bytes] | None = None


@function("cluster.dismiss", answer=bool)
class Dismiss(WireMessage):
    """Tell a worker that its cluster is closed. The answer is True."""


@function("cluster.restart", answer=bool)
class Restart(WireMessage):
    """Ask a worker to start again, without its state. The answer is True."""


@function("cluster.join", answer=bool)
class JoinRequest(WireMessage):
    """Ask the coordinating process of a cluster to admit the sender. The answer is True."""

    #: of the sender
    url: str
    #: of the library
    version: str


@function("dashboard.report", answer=str)
class ReportRequest(WireMessage):
    """Ask a worker for its report to a dashboard. The answer is JSON."""

    #: the number of the last event of the report before; 0 at first
    after: int
    #: also the graphs of the last passes, and the last steps of pipelines
    with_graphs: bool
    #: the number of the last logged scalar of the report before
    scalars_after: int
    #: the process that asks, by `ScalarLog.process`; another one is also told of scalars that belong to no worker
    asker: Annotated[str, Bound("at most 128 characters", lambda asker: len(asker) <= 128)]
    #: events per second to record
    rate: Positive


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
LIBRARY: Final[Mapping[str, type[WireMessage]]] = MappingProxyType(_FUNCTIONS)
