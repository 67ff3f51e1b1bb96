"""One function, many argument sets: forward of all of them at once, backward of all of them at once, one node in the graph."""

from __future__ import annotations

from aiograd.functional.isolation import IsolatedContext as IsolatedContext
from aiograd.functional.isolation import run_isolated_backward as run_isolated_backward
from aiograd.functional.isolation import run_isolated_forward as run_isolated_forward
from aiograd.parallel.mapping import map_with_parallel_backward as map_with_parallel_backward
