"""Several coroutines of a pipeline that stand or fall together, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiograd.engine.run.together import first_failure
from aiograd.errors import PipelineError


async def together(
    coroutines: Mapping[str, Coroutine[Any, Any, Any]], whereabouts: Callable[[str], str] = str, failure: asyncio.Future[None] | None = None
) -> dict[str, Any]:
    """Run coroutines side by side; the first to fail takes the others with it.

    Cancelling cancels all of them. They are waited for, but not longer than the engine's `cancel_grace` once they have been cancelled.

    Args:
        coroutines: by name.
        whereabouts: describes the work of the coroutine of a name, for one that was cancelled from within.
        failure: a future that fails if the coroutines are to fail for another reason; else it stays as it is.

    Returns:
        Their results, by name.
    """
    if not coroutines:
        return {}
    loop = asyncio.get_running_loop()
    tasks = {name: loop.create_task(coroutine, name=f"aiograd:{name}") for name, coroutine in coroutines.items()}
    failed = await first_failure(tasks.values(), failure)
    if failed is not None and failed.cancelled():
        name = next(name for name, task in tasks.items() if task is failed)
        raise PipelineError(f"{name} of a pipeline was cancelled by its own code{whereabouts(name)}")
    return {name: task.result() for name, task in (tasks.items() if failed is None else [("", failed)])}
