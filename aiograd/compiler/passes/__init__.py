"""Passes: each a pure function from `ArrayCode` to `ArrayCode` that changes no bit of any result.

===============  =====================================================================
`constants`      calls of constants, done once
`common`         equal calls, done once
`products`       `numpy.dot` for `numpy.matmul`
`slices`         gradients of parts, joined
`layouts`        small operands laid out alike
`dead`           calls without a reader
`reuse`          element-wise calls that write into memory read for the last time
`arenas`         calls that make new arrays write into memory that is used again
===============  =====================================================================

The last one is for the forward only. `recompute` plans which values a program with a memory budget keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiograd.compiler.calls import ArrayCode
from aiograd.compiler.passes.common import with_common_calls_once
from aiograd.compiler.passes.constants import with_constants
from aiograd.compiler.passes.dead import without_dead_code
from aiograd.compiler.passes.layouts import with_equal_layouts
from aiograd.compiler.passes.products import with_products_by_dot
from aiograd.compiler.passes.reuse import with_memory_reused
from aiograd.compiler.passes.slices import with_slices_joined

#: in the order in which they run
PASSES: tuple[Callable[[ArrayCode], ArrayCode], ...] = (
    with_constants,
    with_common_calls_once,
    with_products_by_dot,
    with_slices_joined,
    with_equal_layouts,
    without_dead_code,
    with_memory_reused,
)


#: for native functions, which plan memory themselves
NATIVE_PASSES = tuple([each for each in PASSES if each not in (with_equal_layouts, with_memory_reused)])


#: for programs with a memory budget: no memory waits for a later use
BUDGET_PASSES: tuple[Callable[[ArrayCode], ArrayCode], ...] = (
    *[each for each in PASSES if each not in (with_equal_layouts, with_memory_reused)],
    partial(with_memory_reused, waits=False),
)


def optimized(code: ArrayCode, passes: tuple[Callable[[ArrayCode], ArrayCode], ...] = PASSES) -> ArrayCode:
    """The code after all passes."""
    for each in passes:
        code = each(code)
    return code
