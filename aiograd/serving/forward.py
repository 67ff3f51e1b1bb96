"""Runs a model's forward with the arrays of any version: one compiled program per shape for all versions, or the function itself.

Note [A module for every version]
    Nothing is swapped in the user's model, and no two versions share a module. `VersionedForward` copies the modules once, as shallow as
    `functional_call` does, sets evaluation mode in the copy and calls a copy of that with a version's Tensors. A synchronous forward is compiled as
    a function of these Tensors, so a new version costs no recording; a forward that awaits runs on a module of its version, which other
    batches of that version share.

Note [Sizes]
    A program belongs to one shape. Batches are padded with copies of their last row to one of few sizes, less than a quarter larger, so that a
    server of batches up to 64 rows records at most 20 programs, which share their machine code. Only compiled forwards are padded. Each size has a
    compiled function of its own, because one function compares its calls quickly with the last few programs only (`compiler.compiled.CHECKED`).
"""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.compiler.compiled import CompiledFunction
from aiograd.compiler.compiled_statistics import SIZES, CompileOptions
from aiograd.compiler.native.tiers import default_tier
from aiograd.engine.run import clock_of, current_engine
from aiograd.nn.module import Module
from aiograd.nn.stateless import twin_of
from aiograd.running.modes import no_grad
from aiograd.serving.versions import Version
from aiograd.tensors.core import TensorCore, host_array, make

#: seconds that a batch may take on the event loop; longer ones run on the executor
ON_LOOP = 1e-3
#: signatures with programs that are kept for batches of one size, for columns of several shapes; each may have `SIZES` of them
SIGNATURES = 256 // SIZES


def padded(rows: int) -> int:
    """The size to which a batch of `rows` rows is padded: `rows` up to 8, beyond it the next multiple of an eighth of a power of two."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


class BoundVersion:
    """A version with the Tensors that its forward runs on."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.tensors = tuple([make(array) for array in version.state.values()])
        #: the module of an eager forward, made by its first batch
        self.module: Module | None = None


class VersionedForward:
    """The forward of a model as a function of a version and columns; `forward` is called with a module and columns, None calls the module."""

    def __init__(self, model: Module, forward: Callable[..., Any] | None, max_batch: int) -> None:
        self._template = twin_of(model, _apart(model)).eval()
        self._forward = operator.call if forward is None else forward
        self._paths = tuple(model.state_dict())
        self._max_batch = max_batch
        function = model.forward if forward is None else forward
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
        self._options = CompileOptions("eager", SIGNATURES, default_tier(), dynamic=True)
        #: by number of rows: the compiled forward, and the seconds that a batch takes; one that waited for the CPU or the GIL hardly counts
        self._programs: dict[int, CompiledFunction] = {}
        self._seconds: dict[int, float] = {}

    @property
    def recordings(self) -> int:
        """The number of recorded programs."""
        return sum([program.statistics().recordings for program in self._programs.values()])

    async def __call__(self, bound: BoundVersion, parts: Sequence[Sequence[Any]], size: int) -> Any:
        """The forward's result for a batch of `size` rows, from the columns of each of its requests."""
        with no_grad():
            if self._is_async:
                if bound.module is None:
                    bound.module = self._module(bound.tensors)
                result = self._forward(bound.module, *_columns(parts, size, size))
                return await result if inspect.isawaitable(result) and not isinstance(result, TensorCore) else result
            rows = min(padded(size), max(size, self._max_batch))
            columns = _columns(parts, size, rows)
            if (program := self._programs.get(rows)) is None:
                program = self._programs[rows] = CompiledFunction(self._run, self._options, warns=False)
            clock = clock_of(asyncio.get_running_loop())

            def compute() -> tuple[Any, float]:
                began = clock()
                outputs = program(bound.tensors, *columns)
                return outputs, clock() - began

            seconds = self._seconds.get(rows)
            is_cheap = seconds is not None and seconds < ON_LOOP
            try:
                outputs, took = compute() if is_cheap else await current_engine().offload(compute)
            except _ForwardAwaits:
                self._is_async = True
                return await self(bound, parts, size)
            self._seconds[rows] = took if seconds is None else min(took, 2.0 * seconds)
            return outputs if rows == size else _first(outputs, size, rows)

    def _run(self, tensors: tuple[Any, ...], *columns: Any) -> Any:
        outputs = self._forward(self._module(tensors), *columns)
        if inspect.iscoroutine(outputs):
            outputs.close()
            raise _ForwardAwaits
        return outputs

    def _module(self, tensors: tuple[Any, ...]) -> Module:
        return twin_of(self._template, dict(zip(self._paths, tensors, strict=True)))


class _ForwardAwaits(Exception):
    """A forward that is no coroutine function has returned a coroutine."""


def _apart(model: Module) -> dict[str, Any]:
    """Copies of the buffers that are in no version, by path: the model changes its own while it trains."""
    state, copies = model.state_dict(), dict[int, Any]()
    buffers = [(path, buffer) for path, buffer in model.named_buffers(remove_duplicate=False) if path not in state]
    return {path: copies.setdefault(id(buffer), make(host_array(buffer).copy())) for path, buffer in buffers}


def _columns(parts: Sequence[Sequence[Any]], size: int, rows: int) -> list[Any]:
    """The columns of all parts, Tensors of host arrays, one below the other and padded from `size` to `rows` rows."""
    if len(parts) == 1 and rows == size:
        return list(parts[0])
    columns = []
    for pieces in zip(*parts, strict=True):
        arrays = [piece._data for piece in pieces]
        column = np.empty((rows, *arrays[0].shape[1:]), arrays[0].dtype)
        np.concatenate(arrays, out=column[:size])
        column[size:] = column[size - 1]
        columns.append(make(column))
    return columns


def _first(outputs: Any, count: int, rows: int) -> Any:
    """The outputs without the rows of the padding; outputs that have other than `rows` rows as they are."""
    if isinstance(outputs, (tuple, list)):
        return tuple(_first(output, count, rows) for output in outputs)
    has_rows = isinstance(outputs, TensorCore) and outputs.ndim and outputs.shape[0] == rows
    return make(host_array(outputs)[:count]) if has_rows else outputs
