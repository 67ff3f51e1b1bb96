"""Spans of OpenTelemetry, where the program has set a provider; nothing otherwise.

A span is made for each backward pass, each remote call on both sides, and each step of an optimizer or a pipeline. The parent of work that is
done for another worker travels with the message as a W3C ``traceparent``.

Note [Without a provider]
    The package never imports OpenTelemetry by itself: a program that has not imported it has set no provider. So without one the price is one
    look-up in ``sys.modules`` per pass or call. A provider that is set later is used from then on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

from aiograd.running.version import __version__

SpanKindName: TypeAlias = Literal["INTERNAL", "CLIENT", "SERVER"]

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_NOTHING: AbstractContextManager[None] = nullcontext()


def _api() -> Any:
    """The tracing module of OpenTelemetry; None where no provider has been set."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)) else api


def span(
    name: str, kind: SpanKindName = "INTERNAL", attributes: Mapping[str, Any] | None = None, parent: str | None = None
) -> AbstractContextManager[Any]:
    """A span around the code of a ``with`` block, the current one while it runs; an exception of the block is recorded in it.

    Args:
        name: of few values: a function, not its arguments.
        attributes: str, bool, int or float by name.
        parent: the traceparent of a message; None: the current span, if there is one.
    """
    api = _api()
    if api is None:
        return _NOTHING
    context = None if parent is None else _context(api, parent)
    made: AbstractContextManager[Any] = api.get_tracer("aiograd", __version__).start_as_current_span(
        name, context=context, kind=api.SpanKind[kind], attributes=dict(attributes or {})
    )
    return made


def follow(parent: str) -> None:
    """Make the span of a message the current one, in the running `contextvars` context and for good."""
    api, context = _api(), sys.modules.get("opentelemetry.context")
    if api is not None and context is not None:
        context.attach(_context(api, parent))


def is_traced() -> bool:
    """True if the program has set a provider."""
    return _api() is not None


def traceparent() -> str:
    """The current span as a W3C traceparent; empty where there is none."""
    api = _api()
    if api is None:
        return ""
    current = api.get_current_span().get_span_context()
    return f"00-{current.trace_id:032x}-{current.span_id:016x}-{int(current.trace_flags):02x}" if current.is_valid else ""


def is_traceparent(text: str) -> bool:
    """True if `text` is the W3C traceparent of a valid span."""
    return _TRACEPARENT.match(text) is not None


def _context(api: Any, parent: str) -> Any:
    _, trace_id, span_id, flags = parent.split("-")
    remote = api.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=api.TraceFlags(int(flags, 16)))
    return api.set_span_in_context(api.NonRecordingSpan(remote))
