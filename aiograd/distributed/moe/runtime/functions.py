"""Calling functions that may be ``def`` or ``async def``, or give an awaitable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from aiograd.engine.run import current_engine
from aiograd.tensors.core import TensorCore


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function: on the loop if it is ``async def``, else on the executor."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args)
    result = await current_engine().offload(lambda: function(*args))
    if inspect.isawaitable(result) and not isinstance(result, TensorCore):
        result = await result
    return result
