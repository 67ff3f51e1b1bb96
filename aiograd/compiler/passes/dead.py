"""Dead code: pure calls with results that are never read, and that raise no error."""

from __future__ import annotations

from dataclasses import replace

from aiograd.compiler.calls import ArrayCode, Call, Ref
from aiograd.running.trees import leaves_of


def without_dead_code(code: ArrayCode) -> ArrayCode:
    """The code without pure calls with results that are neither read nor returned; calls that may raise an error are kept."""
    read = set(leaves_of(code.results, Ref))
    kept: list[Call] = []
    for call in reversed(code.calls):
        if not call.pure or call.refuses or not read.isdisjoint(call.results):
            kept.append(call)
            read.update(call.refs())
    return replace(code, calls=tuple(reversed(kept)))
