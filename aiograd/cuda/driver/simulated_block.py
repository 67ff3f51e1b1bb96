"""Runs a kernel in Python: every thread of every block, on the caller's thread, with what CUDA would leave undefined made visible.

Note [Threads that wait for each other]
    A thread of a block that reaches ``syncthreads`` must stop until all others have. So a kernel that has such a statement is run as a
    generator, with ``yield`` in its place, and the threads of a block take turns from one to the next. That a block's threads do not all come
    to the same barriers is an error here (on a device it is undefined). numba's own simulator starts a Python thread for each, at about 85 µs
    a piece, which is what made this one necessary.

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
from typing import Any

import numpy as np
from numba.cuda.np.numpy_support import as_dtype
from numba.cuda.simulator.kernel import _push_kernel_context
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule, swapped_cuda_module

Size = tuple[int, int, int]


class Memory(np.ndarray[Any, Any]):
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
    """Shared memory of the block that is running: an array for each line that asks for one."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, int], np.ndarray[Any, Any]] = {}

    def array(self, shape: Any, dtype: Any, alignment: Any = None) -> np.ndarray[Any, Any]:
        frame = sys._getframe(1)
        place = (frame.f_code.co_filename, frame.f_lineno)
        found = self.arrays.get(place)
        if found is None:
            found = self.arrays[place] = np.empty(shape, as_dtype(dtype))
            found.view(np.uint8).fill(0xFF)
        return found


class _Cuda(FakeCUDAModule):
    """What a kernel finds under the name ``cuda``."""

    def __init__(self, grid: Size, block: Size) -> None:
        super().__init__(Dim3(*grid), Dim3(*block), 0)
        self._sizes = (grid, block)
        self.here: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 0, 0), (0, 0, 0))
        self.shared_memory = _Shared()

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


def run(kernel: Callable[..., None], grid: Size, block: Size, args: tuple[Any, ...]) -> None:
    """Run a kernel to its end. Arrays among the arguments are flat; the kernel's memory is theirs.

    Raises:
        Whatever the kernel raises; IndexError where it leaves an array; RuntimeError where threads of a block part at a barrier.
    """
    fake = _Cuda(grid, block)
    values = tuple(value.view(Memory) if isinstance(value, np.ndarray) else value for value in args)
    generator = as_generator(kernel)
    threads = list(itertools.product(*map(range, block)))
    with np.errstate(all="ignore"), _push_kernel_context(fake), swapped_cuda_module(kernel, fake):
        for where in itertools.product(*map(range, grid)):
            fake.shared_memory.arrays.clear()
            if generator is None:
                for thread in threads:
                    fake.here = (where, thread)
                    kernel(*values)
            else:
                _run_block(fake, where, threads, [generator(*values) for _ in threads])


def _run_block(fake: _Cuda, where: tuple[int, ...], threads: list[tuple[int, ...]], running: list[Any]) -> None:
    """Let all threads go to the next barrier, again and again."""
    while True:
        ended = 0
        for thread, each in zip(threads, running, strict=True):
            fake.here = (where, thread)
            if next(each, running) is running:
                ended += 1
        if ended == len(running):
            return
        if ended:
            raise RuntimeError(f"{ended} of {len(running)} threads of block {where} ended while the others wait at syncthreads()")


@functools.lru_cache(maxsize=4096)
def as_generator(kernel: Any) -> Callable[..., Any] | None:
    """The kernel with ``yield`` for ``cuda.syncthreads()``; None where it has none."""
    if "syncthreads" not in kernel.__code__.co_names:
        return None
    lines, first = inspect.getsourcelines(kernel)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"kernel {kernel.__name__}: expected a function")
    definition.decorator_list = []
    _Yields().visit(definition)
    free = kernel.__code__.co_freevars
    outer = ast.parse(f"def outer({', '.join(free)}):\n    return {definition.name}").body[0]
    outer.body.insert(0, definition)  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    space: dict[str, Any] = {}
    exec(compile(module, kernel.__code__.co_filename, "exec"), kernel.__globals__, space)  # noqa: S102  # the kernel's own source
    made: Callable[..., Any] = space["outer"](*[cell.cell_contents for cell in kernel.__closure__ or ()])
    return made


class _Yields(ast.NodeTransformer):
    """``cuda.syncthreads()`` as a statement becomes ``yield``."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "syncthreads":
            return ast.copy_location(ast.Expr(ast.copy_location(ast.Yield(None), node)), node)
        return node
