"""RuleDispatch: hands rules to the executor or to the thread of a device."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from aiograd.engine.executors import ComputeExecutor
from aiograd.engine.placement import RulePlacement
from aiograd.engine.run.loop import not_none
from aiograd.graph.node import Node
from aiograd.running import devices
from aiograd.running.exceptions import call_for_future

#: submits a call and returns the future of its result
Submit: TypeAlias = Callable[[Callable[[], Any]], asyncio.Future[Any]]


class EngineSettings(Protocol):
    """The part of the engine that a runner uses."""

    concurrency: int | None
    cancel_grace: float
    placement: RulePlacement

    @property
    def executor(self) -> ComputeExecutor:
        """The executor of expensive rules."""


class RuleDispatch:
    """Hands the rules of an engine's passes to threads.

    Args:
        engine: the engine.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: EngineSettings) -> None:
        self._engine = engine

    def where(self, node: Node, grads: list[Any]) -> Submit | None:
        """The function that submits a call to the executor or device that runs a node's rule; None: the rule runs inline."""
        placement = self._engine.placement
        name = placement.device_of(node)
        if name != "cpu":
            device = not_none(devices.device(name))
            if device.launches_ahead and placement.stays_on(node, name):
                return None
            return lambda function: asyncio.wrap_future(
                device.submit(functools.partial(contextvars.copy_context().run, call_for_future, "a rule", function))
            )
        return self.offload if placement.needs_executor(node, grads) else None

    def offload(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function on the executor, in a copy of the running context; returns the future of its result."""
        return self._engine.executor.submit(asyncio.get_running_loop(), contextvars.copy_context(), function)
