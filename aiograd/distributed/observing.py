"""Observing: each exchange with another worker as an event of the profile and as a span, and the trace context of messages."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from aiograd.distributed.messages.fields import TraceContext
from aiograd.distributed.meter import Meter
from aiograd.running import tracing


def trace_context(profiler: Any) -> TraceContext | None:
    """The trace context of a message, or None where its sender neither traces nor profiles.

    Args:
        profiler: the recorder of the running code, or None.
    """
    parent = tracing.traceparent()
    return TraceContext(parent, profiler is not None) if parent or profiler is not None else None


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
