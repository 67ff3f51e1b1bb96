"""Device functions: what kernels share.

Note [Inlined]
    A device function becomes part of the code of each kernel that calls it, before types are inferred: calling costs nothing, memory that it asks
    for is the kernel's (once for each place where it is called), and compiling needs no device, which numba wants to see for a function that
    it compiles by itself. In the simulator it stays a function of Python, and the simulator follows its barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import cuda

from aiograd.cuda.kernels.scalar import SIMULATED

F = TypeVar("F", bound=Callable[..., Any])


def device_function(function: F) -> F:
    """Decorator: a function in numba's language that kernels and other device functions may call by its name."""
    return function if SIMULATED else cuda.jit(device=True, inline="always")(function)
