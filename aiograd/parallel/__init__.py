"""One function, many argument sets: forward of all of them at once, backward of all of them at once, one node in the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.functional.isolation import IsolatedContext as IsolatedContext
from aiograd.functional.isolation import run_isolated_backward as run_isolated_backward
from aiograd.functional.isolation import run_isolated_forward as run_isolated_forward
from aiograd.parallel.mapping import map_with_parallel_backward as map_with_parallel_backward
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)
