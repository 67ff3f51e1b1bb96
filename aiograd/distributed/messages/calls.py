"""Messages that call functions, give values to objects, and go to many workers."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import Count, WireMessage, message
from aiograd.distributed.failpoints import RequestPoints
from aiograd.distributed.messages.fields import NESTED, ContextKey, Place, TraceContext
from aiograd.distributed.rpc.codec import WireReference

WorkerName: TypeAlias = Annotated[str, Bound("a name of 1 to 128 characters", lambda name: 0 < len(name) <= 128)]
#: the place of a call
CallPlace: TypeAlias = Annotated[Place, Bound(f"at most {NESTED} nested calls", lambda place: len(place) <= NESTED)]


@message(code="call")
class CallHeader(WireMessage):
    """The context of a call."""

    key: ContextKey
    #: the worker that first opened the context
    origin: WorkerName
    place: CallPlace
    #: send edge of the arguments; 0 if none is differentiable
    edge: Count
    #: True if this call may open the context on the receiver
    opens: bool


@message(code="tangent")
class SentTangent(WireMessage):
    """The tangent of a tensor in a call or its answer; see Note [Tangents beside the arguments] in `aiograd.distributed.tangents`."""

    #: number of the level, the outermost first
    level: Count
    #: number of the tensor
    of: Count
    #: the tangent, of the shape and dtype of the tensor
    value: Any


@message(code="answer")
class CallResult(WireMessage):
    """The answer to `FunctionCall`."""

    #: the result
    value: Any
    #: send edge of the result; 0 if nothing in it is differentiable
    edge: Count
    #: edges of the caller that are all that is behind the result, where that is known
    behind: list[int] | None = None
    #: the tangents of the result, where the call had some
    tangents: list[SentTangent] | None = None


@message(
    kind=1, name="CALL", code="call", answer=CallResult, failpoints=RequestPoints(answer_begun="fwd.mid_send", answer_sent="fwd.after_send")
)
class FunctionCall(WireMessage):
    """Run an exposed function."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any]
    #: True if the function records a graph
    grad: bool
    #: None outside of a context
    header: CallHeader | None
    trace: TraceContext | None = None
    #: the tangents of the arguments, within forward mode
    tangents: list[SentTangent] | None = None


@message(kind=11, name="POST", code="post", answer=None)
class Post(WireMessage):
    """Values for an object of the receiver, which takes them at once. Where the sender does not wait, the answer may go with the next message."""

    reference: WireReference
    values: list[Any]
    #: True if the sender waits for the answer
    waits: bool
    trace: TraceContext | None = None


@message(kind=12, name="WAITS", code="wait")
class AskWaits(WireMessage):
    """Ask what waits on the receiver. The answer is a `WaitReport` of its principal's works, as the bytes of JSON; the asker checks it by itself."""

    #: True: also on the workers that the receiver knows
    with_known: bool


@message(code="relay")
class RelayedMessage(WireMessage):
    """A message that is passed on."""

    #: of the worker that it is for
    name: str
    #: the wire value of a message of the kind of `Relay`
    value: Any


@message(code="relay")
class RelayedAnswer(WireMessage):
    """The answer to a message that was passed on."""

    #: of the worker that has answered
    name: str
    failed: bool
    #: the wire value of the answer or of the error
    value: Any


@message(kind=10, name="RELAY", code="relay", answer=list[RelayedAnswer])
class Relay(WireMessage):
    """Messages to many workers by way of the receiver, its own first. The answer has the answers of the workers that were reached."""

    #: the kind of the messages
    request_kind: int
    messages: Annotated[list[RelayedMessage], Bound("1 message or more", len)]
