"""Loops over host arrays that numpy does too slowly: compiled by numba where that is installed and warmed up, in numpy otherwise.

Every function here takes and returns numpy arrays, whichever set of kernels is in use; see `aiograd.kernels.selection` for which one is.
Functions are pure (except `optimizer`, which works in place), may be called from several threads at once, and give the same bits however
many threads share the work. The two sets agree to a few units in the last place per operation (relative 1e-6 for float32 and 1e-14 for
float64, times the root of the length of a sum).

Nothing here knows about gradients beyond computing them: the rows in `aiograd.ops` attach these functions as `Fused`.
"""

from __future__ import annotations

from aiograd.kernels.native import native_available, native_problem
from aiograd.kernels.pool import owned_threads, stop_threads
from aiograd.kernels.selection import KernelSet, available, describe, selected, use, warm_up

__all__ = [
    "KernelSet", "available", "describe", "native_available", "native_problem", "owned_threads", "selected", "stop_threads", "use",
    "warm_up",
]  # fmt: skip
