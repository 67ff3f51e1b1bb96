"""Profiling: where the time of a forward and a backward goes, as a table, a Chrome trace and a list of events.

::

    with ag.profiler.profile() as prof:
        with prof.scope("step"):
            loss = model(x)
            await loss.backward()
    print(prof.table(limit=10))
    prof.chrome_trace("trace.json")        # open it in https://ui.perfetto.dev

A profile belongs to the asyncio task that entered it and to what that task starts; off, it costs one test per operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.profiler.chrome_trace import merge_traces, read_trace
from aiograd.profiler.event import Event
from aiograd.profiler.profiling import profile, scope
from aiograd.profiler.table import summarize_trace
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = ["Event", "merge_traces", "profile", "read_trace", "scope", "summarize_trace"]
