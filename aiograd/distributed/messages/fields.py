"""Types of fields that several messages have."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import WireMessage, message
from aiograd.running import tracing

#: the largest depth of nested calls in one context, each made by the handler of the one before
NESTED: Final = 64


_INT: Final = {int}


def _is_place(value: tuple[int, ...]) -> bool:
    return 0 < len(value) <= NESTED + 1 and set(map(type, value)) == _INT and max(value) < 0


#: the key of a context
ContextKey: TypeAlias = Annotated[bytes, Bound("a key of 16 bytes", lambda key: len(key) == 16)]
#: a place in the order of recording, see Note [Places] in `autograd.context`, without its infinities
Place: TypeAlias = Annotated[tuple[Any, ...], Bound(f"1 to {NESTED + 1} ints from -2**63 to -1", _is_place)]
#: the W3C traceparent of a span, or ""
Traceparent: TypeAlias = Annotated[str, Bound("a W3C traceparent or ''", lambda value: not value or tracing.is_traceparent(value))]


@message(code="trace")
class TraceContext(WireMessage):
    """The last field of a message that begins work on another worker; absent where its sender neither traces nor profiles.

    A worker that is being watched records the work of such messages, so the same steps are seen on all workers.
    """

    #: of the sender's span; "" where there is none
    traceparent: Traceparent
    #: True if the sender records a profile
    is_recorded: bool

    @property
    def parent(self) -> str | None:
        """The traceparent of the sender's span, or None."""
        return self.traceparent or None


#: the trace context of a message without one
NO_TRACE: Final = TraceContext("", False)
