"""Observing: each exchange with another worker as an event of the profile and as a span, and what of both travels in messages.

Note [Trail]
    A message that begins work on another worker (a call, the gradients of a pass) ends with a trail where its sender profiles or traces: the W3C
    traceparent of the sender's span ("" where there is none), and if the sender records a profile at the moment. A worker that is being watched
    records the work of such messages, so the same steps are seen on all workers. A message without a trail has the form it always had.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from aiograd.distributed.meter import Meter
from aiograd.errors import ProtocolError
from aiograd.running import tracing

WireTrail: TypeAlias = tuple[str, bool]


class Trail(NamedTuple):
    """The end of a message, see Note [Trail]."""

    #: of the sender's span; None where there is none
    traceparent: str | None = None
    #: True if the sender records a profile
    is_recorded: bool = False

    @classmethod
    def parse(cls, value: Any) -> Trail:
        """The trail of a message that has one.

        Raises:
            ProtocolError: it is malformed.
        """
        if not (isinstance(value, tuple) and len(value) == 2 and value[0].__class__ is str and value[1].__class__ is bool):
            raise ProtocolError("a malformed trail of a message", code="trail")
        if value[0] and not tracing.is_traceparent(value[0]):
            raise ProtocolError("the trail of a message holds no W3C traceparent", code="trail")
        return cls(value[0] or None, value[1])


NO_TRAIL = Trail()


def trail(profiler: Any) -> tuple[WireTrail] | tuple[()]:
    """The values at the end of a message: one trail, or none.

    Args:
        profiler: the recorder of the running code, or None.
    """
    parent = tracing.traceparent()
    return ((parent, profiler is not None),) if parent or profiler is not None else ()


class observe:
    """A ``with`` block around one exchange: it is counted, is an event of the running profile, and has a span.

    Args:
        meter: counts it.
        category: of the event.
        name: of the function or message.
        peer: the other worker.
        kind: of the span; None: there is none.
        parent: as for `tracing.span`.
        profiler: the recorder, or None.
        attributes: of the span.

    Attributes:
        nbytes: bytes of the tensors of the exchange, where the block knows them.
    """

    __slots__ = ("nbytes", "_meter", "_category", "_name", "_peer", "_profiler", "_began", "_span")

    def __init__(
        self, meter: Meter, category: str, name: str, peer: str, profiler: Any, kind: tracing.SpanKindName | None = None, parent: str | None = None,
        **attributes: Any,
    ) -> None:  # fmt: skip
        self.nbytes: int | None = None
        self._meter = meter
        self._category = category
        self._name = name
        self._peer = peer
        self._profiler = profiler
        self._began = 0
        self._span: AbstractContextManager[Any] | None = None
        if kind is not None and tracing.is_traced():
            if kind != "INTERNAL":
                attributes |= {"rpc.system": "aiograd", "rpc.method": name}
                name = f"{category} {name}"
            self._span = tracing.span(name, kind, attributes, parent)

    def __enter__(self) -> Self:
        if self._span is not None:
            self._span.__enter__()
        self._began = time.perf_counter_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._meter.histograms[self._category].add((time.perf_counter_ns() - self._began) / 1e9, error is not None)
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        if self._profiler is not None:
            self._profiler.end_exchange(self._began, self._category, self._name, self._peer, self.nbytes)
