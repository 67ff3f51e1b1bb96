"""`warm_up` of a compiled function: its program, recorded, compiled and native, before the first call.

The call that is recorded, and a run of its program, happen between a `Snapshot` and its undoing. The backward runs by itself, into nothing. Calls
with effects outside of the process's own memory, or on a device, are refused before they are made.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from aiograd.compiler.awaiting import RecordedCoroutine
from aiograd.compiler.native.tiers import compiler, is_simulated, native_problem
from aiograd.compiler.recorded_results import ResultRecorder
from aiograd.compiler.snapshot import Snapshot
from aiograd.engine.run.current import current_engine
from aiograd.errors import TraceError
from aiograd.graph.released import ReleasedVariables
from aiograd.running.modes import ModeScope
from aiograd.running.random import default_generator


class WarmingRecorder(ResultRecorder):
    """A recorder of a call that is undone; it remembers what a call between rows is going to change.

    Attributes:
        snapshot: the state that was remembered.
    """

    snapshot: Snapshot

    def _keep_gradient(self, tensor: Any) -> Any:
        self.snapshot.remember(tensor._node if tensor._node is not None and tensor._node.is_leaf else tensor)
        return super()._keep_gradient(tensor)

    def _know(self, tensor: Any, *args: Any) -> Any:
        if tensor._node is None or tensor._node.is_leaf:
            self.snapshot.remember(tensor)
        return super()._know(tensor, *args)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.snapshot.remember(function, args, kwargs)
        if function.__module__.startswith("aiograd.interop"):
            refuse("it runs a module of another library, with a state that cannot be put back")
        if any([node._extra is not None and node._extra.reducer is not None for node in self.snapshot.leaves]):
            refuse("its gradients are reduced with other workers")
        return super()._call(function, args, kwargs)


def refuse(reason: str) -> None:
    """Raise the error for a function that cannot be warmed up."""
    raise TraceError(f"warm_up(): {reason}. Call the function instead: its first call records it.")


async def warm_up(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record, compile and make native the program for a call; see `aiograd.compiler.compiled.CompiledFunction.warm_up`.

    Args:
        compiled: the compiled function.
        args, kwargs: of the call.
    """
    snapshot = Snapshot()
    snapshot.remember(compiled.function, args, kwargs, default_generator())
    if snapshot.devices:
        refuse(f"it has tensors on {', '.join(sorted(snapshot.devices))}, which cannot be put back")
    try:
        key, code, inputs = compiled._find(args, kwargs)
        if code is None:
            if key is not None:
                await _record(compiled, key, inputs, (args, kwargs), snapshot)
            snapshot.undo()
            _, code, inputs = compiled._find(args, kwargs)
            if code is None:
                reasons = compiled.statistics().reasons.values()
                refuse(f"it has no program for this call: {'; '.join(reasons) or 'it changes what it reads, or operations are watched'}")
        await _run(compiled, code, inputs, snapshot)
    finally:
        snapshot.undo()
    await _make_native(code)


async def _record(compiled: Any, key: Any, inputs: list[Any], given: Any, snapshot: Snapshot) -> None:
    kind = functools.partial(_recorder, snapshot)
    with compiled._recorded(inputs, *given, kind) as (recorder, args, kwargs):
        if compiled._is_async:
            result = await RecordedCoroutine(compiled.function(*args, **kwargs), recorder)
        else:
            with recorder.watcher.watching():
                result = compiled.function(*args, **kwargs)
    if snapshot.devices:
        refuse(f"it has tensors on {', '.join(sorted(snapshot.devices))}, which cannot be put back")
    compiled._keep(key, recorder, inputs, given, result)


def _recorder(snapshot: Snapshot, *args: Any, **options: Any) -> WarmingRecorder:
    recorder = WarmingRecorder.__new__(WarmingRecorder)
    recorder.snapshot = snapshot
    recorder.__init__(*args, **options)  # type: ignore[misc]
    return recorder


async def _run(compiled: Any, code: Any, inputs: list[Any], snapshot: Snapshot) -> None:
    """One run of a program and of its backward, none of which counts."""
    snapshot.remember(code.program.tensors, inputs)
    codes = (code, *[part for part in code.numeric if part is not code])
    runs = [each.runs for each in codes]
    nodes: list[Any] = []
    try:
        with ModeScope(collect=nodes.append):
            result = await code.run_async(inputs) if compiled._is_async else code.run(inputs)  # noqa: F841 - its graph lives until the end
        for node in nodes:
            if getattr(node, "is_program", False) and not isinstance(node._saved, ReleasedVariables) and node.code.program.device == "cpu":
                seeds = [np.ones(metadata.shape, metadata.dtype) for metadata in node.input_metadata]
                await current_engine().offload(functools.partial(node.vjp, seeds))
    finally:
        for each, number in zip(codes, runs, strict=True):
            each.runs = number


async def _make_native(code: Any) -> None:
    """Wait for the native functions of a program; where time is simulated they are made by the calls alone, or never."""
    parts = [part for part in code.numeric if part.native is not None and part.hot]
    if not parts or is_simulated() or native_problem() is not None:
        return
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def job() -> None:
        try:
            for part in parts:
                part.hot = 0
                part.native.begin()
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish)

    compiler.submit(job)
    await done
