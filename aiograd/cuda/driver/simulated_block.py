"""Runs a kernel in Python: every thread of every block, on the caller's thread, with what CUDA would leave undefined made visible.

Note [Threads that wait for each other]
    A thread of a block that reaches ``syncthreads`` must stop until all others have. So a kernel that has such a statement is run as a
    generator, with ``yield`` in its place, and the threads of a block take turns from one to the next. A device function that has one, or calls
    one that has, is a generator too, and its callers say ``yield from``. That a block's threads do not all come to the same barriers is an
    error here (on a device it is undefined). numba's own simulator starts a Python thread for each, at about 85 µs a piece, which is what
    made this one necessary.

Note [Copies]
    Kernels and device functions run as copies, with globals of their own in which ``cuda`` is the block that is simulated: their modules are
    not touched, so code of the host may use them meanwhile.

Note [Made visible]
    Shared memory is full of NaN (−1 for integers) when a block starts; a pointer reaches as far as its array; a negative index raises.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.np.numpy_support import as_dtype
from numba.cuda.simulator.kernel import _push_kernel_context
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule

Size = tuple[int, int, int]


class SimulatedMemory(np.ndarray[Any, Any]):
    """Flat memory behind a pointer, for one kernel."""

    def __getitem__(self, index: Any) -> Any:
        if index < 0:
            raise IndexError(f"index {index} is before the start of the array")
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if index < 0:
            raise IndexError(f"index {index} is before the start of the array")
        super().__setitem__(index, value)


class _Shared:
    """Shared memory of the block that is running: an array for each place that asks for one, in a kernel or a function that it calls there."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[tuple[int, int], ...], np.ndarray[Any, Any]] = {}

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> np.ndarray[Any, Any]:
        frame = sys._getframe(1)
        calls: list[tuple[int, int]] = []
        while frame.f_code.co_filename != __file__ and frame.f_back is not None:
            calls.append((id(frame.f_code), frame.f_lineno))
            frame = frame.f_back
        place = tuple(calls)
        found = self.arrays.get(place)
        if found is None:
            found = self.arrays[place] = np.empty(shape, as_dtype(dtype))
            found.view(np.uint8).fill(0xFF)
        return found


class _Cuda(FakeCUDAModule):
    """The object that a simulated kernel uses under the name ``cuda``."""

    def __init__(self) -> None:
        super().__init__(Dim3(1, 1, 1), Dim3(1, 1, 1), 0)
        self._sizes: tuple[Size, Size] = ((1, 1, 1), (1, 1, 1))
        self.here: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 0, 0), (0, 0, 0))
        self.shared_memory = _Shared()

    def start(self, grid: Size, block: Size) -> None:
        """Begin another kernel."""
        self.gridDim, self.blockDim, self._sizes = Dim3(*grid), Dim3(*block), (grid, block)

    @property
    def shared(self) -> Any:
        return self.shared_memory

    @property
    def threadIdx(self) -> Any:
        return Dim3(*self.here[1])

    @property
    def blockIdx(self) -> Any:
        return Dim3(*self.here[0])

    def grid(self, ndim: int) -> Any:
        (_, block), (where, thread) = self._sizes, self.here
        places = tuple(where[axis] * block[axis] + thread[axis] for axis in range(ndim))
        return places[0] if ndim == 1 else places

    def gridsize(self, ndim: int) -> Any:
        grid, block = self._sizes
        sizes = tuple(grid[axis] * block[axis] for axis in range(ndim))
        return sizes[0] if ndim == 1 else sizes


#: one kernel runs at a time, see `aiograd.cuda.driver.simulator`
_cuda = _Cuda()


def run(kernel: Callable[..., None], grid: Size, block: Size, args: tuple[Any, ...]) -> None:
    """Run a kernel to its end. Arrays among the arguments are flat; the kernel's memory is theirs.

    Raises:
        The kernel's errors; IndexError where it leaves an array; RuntimeError where threads of a block part at a barrier.
    """
    _cuda.start(grid, block)
    values = tuple(value.view(SimulatedMemory) if isinstance(value, np.ndarray) else value for value in args)
    simulated = simulate(kernel)
    function = simulated.function
    threads = list(itertools.product(*map(range, block)))
    with np.errstate(all="ignore"), _push_kernel_context(_cuda):
        for where in itertools.product(*map(range, grid)):
            _cuda.shared_memory.arrays.clear()
            if simulated.waits:
                _run_block(where, threads, [function(*values) for _ in threads])
                continue
            for thread in threads:
                _cuda.here = (where, thread)
                function(*values)


def _run_block(where: tuple[int, ...], threads: list[tuple[int, ...]], running: list[Any]) -> None:
    """Let all threads go to the next barrier, again and again."""
    while True:
        ended = 0
        for thread, each in zip(threads, running, strict=True):
            _cuda.here = (where, thread)
            if next(each, running) is running:
                ended += 1
        if ended == len(running):
            return
        if ended:
            raise RuntimeError(f"{ended} of {len(running)} threads of block {where} ended while the others wait at syncthreads()")


@dataclass(frozen=True, slots=True)
class Simulated:
    """The copy of a kernel or device function that runs."""

    function: Callable[..., Any]
    #: True if it is a generator, which yields at each barrier
    waits: bool


@functools.lru_cache(maxsize=4096)
def simulate(function: Callable[..., Any]) -> Simulated:
    """A copy of a function that calls copies of its callees; see Note [Copies] and Note [Threads that wait for each other].

    Raises:
        TypeError: it has barriers and is no plain function.
    """
    code = function.__code__
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)}
    used = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    called = {name: simulate(value) for name, value in (used | cells).items() if isinstance(value, FunctionType)}
    space = function.__globals__ | {name: _cuda for name, value in used.items() if value is cuda}
    space |= {name: copy.function for name, copy in called.items() if name not in cells}
    cells |= {name: copy.function for name, copy in called.items() if name in cells}
    waiting = frozenset(name for name, copy in called.items() if copy.waits)
    if waiting or "syncthreads" in code.co_names:
        return Simulated(_generator(function, space, cells, waiting), True)
    closure = tuple(CellType(cells[name]) for name in code.co_freevars)
    return Simulated(FunctionType(code, space, function.__name__, function.__defaults__, closure), False)


def _generator(function: Callable[..., Any], space: dict[str, Any], cells: dict[str, Any], waiting: frozenset[str]) -> Callable[..., Any]:
    """The function with ``yield`` for barriers, and ``yield from`` before calls of functions with barriers."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"kernel {function.__name__}: expected a function")
    definition.decorator_list = []
    _Yields(waiting).visit(definition)
    outer = ast.parse(f"def outer({', '.join(cells)}):\n    return {definition.name}").body[0]
    outer.body.insert(0, definition)  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    made: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), space, made)  # noqa: S102  # the function's own source
    copied: Callable[..., Any] = made["outer"](*cells.values())
    return copied


class _Yields(ast.NodeTransformer):
    """``cuda.syncthreads()`` as a statement becomes ``yield``; ``f()``, where f waits, becomes ``(yield from f())``."""

    def __init__(self, waiting: frozenset[str]) -> None:
        self._waiting = waiting

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "syncthreads":
            return ast.copy_location(ast.Expr(ast.copy_location(ast.Yield(None), node)), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        call = self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self._waiting:
            return ast.copy_location(ast.YieldFrom(call), node)  # type: ignore[arg-type]
        return call
