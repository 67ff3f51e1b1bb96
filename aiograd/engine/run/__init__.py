"""The asyncio side of the engine: everything that awaits.

`runner` runs one pass, `short_passes` those without a task; `engine` owns threads and limits and starts passes; `main` is ``aiograd.run``; `loop`
answers questions about the loop; `paced_collector` and `tuned_gc` keep Python's garbage collector from holding the loop up; `allocator` keeps
freed memory.
"""

from __future__ import annotations

from aiograd.engine.run.allocator import tune_malloc as tune_malloc
from aiograd.engine.run.current import aclose_default_engine as aclose_default_engine
from aiograd.engine.run.current import current_engine as current_engine
from aiograd.engine.run.engine import BUDGET as BUDGET
from aiograd.engine.run.engine import Engine as Engine
from aiograd.engine.run.loop import check_can_run as check_can_run
from aiograd.engine.run.loop import clock_of as clock_of
from aiograd.engine.run.loop import current_task_name as current_task_name
from aiograd.engine.run.loop import loop_is_running as loop_is_running
from aiograd.engine.run.loop import running_loop as running_loop
from aiograd.engine.run.loop import running_task as running_task
from aiograd.engine.run.main import run as run
from aiograd.engine.run.new_task import new_graph_task as new_graph_task
from aiograd.engine.run.statistics import EngineStatistics as EngineStatistics
from aiograd.engine.run.tuned_gc import tuned_gc as tuned_gc
