"""The simulator's threads: barriers in kernels and in the functions that they call, and shared memory of each place that asks for some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from aiograd.cuda.driver.simulated_block import run
from aiograd.cuda.kernels.device_function import device_function
from aiograd.cuda.kernels.scalar import TYPES
from tests.support import assert_raises

THREADS = 8


@device_function
def neighbour(values: Any, t: int) -> Any:
    """The value that the next thread wrote."""
    cuda.syncthreads()
    return values[(t + 1) % THREADS]


@device_function
def passed_on(value: Any, t: int) -> Any:
    """The value of the next thread."""
    mine = cuda.shared.array(THREADS, TYPES["i8"])
    mine[t] = value
    return neighbour(mine, t)


@device_function
def square(value: Any) -> Any:
    return value * value


def _made(scale: int) -> Callable[..., Any]:
    @device_function
    def scaled(value: Any, t: int) -> Any:
        mine = cuda.shared.array(THREADS, TYPES["i8"])
        mine[t] = scale * value
        return neighbour(mine, t)

    return scaled


def _run(kernel: Callable[..., None], *more: Any) -> list[int]:
    out = np.zeros(THREADS, np.int64)
    run(kernel, (1, 1, 1), (THREADS, 1, 1), (out, *more))
    return out.tolist()


def _after(step: int) -> list[int]:
    return [(t + step) % THREADS for t in range(THREADS)]


def test_a_barrier_in_a_function_that_a_function_calls() -> None:
    def kernel(out: Any) -> None:
        t = cuda.threadIdx.x
        out[t] = passed_on(t, t)

    assert _run(kernel) == _after(1)


def test_each_place_that_calls_has_shared_memory_of_its_own() -> None:
    def kernel(out: Any) -> None:
        t = cuda.threadIdx.x
        first = passed_on(t, t)
        second = passed_on(first, t)  # no barrier between: slower threads still read what the first call wrote
        out[t] = second

    assert _run(kernel) == _after(2)


def test_functions_of_one_factory_keep_what_they_close_over() -> None:
    double, triple = _made(2), _made(3)

    def kernel(out: Any) -> None:
        t = cuda.threadIdx.x
        out[t] = double(t + 1, t) + triple(t + 1, t) + square(t)

    assert _run(kernel) == [5 * (after + 1) + t * t for t, after in enumerate(_after(1))]


def test_a_loop_waits_in_each_turn() -> None:
    def kernel(out: Any, turns: int) -> None:
        t = cuda.threadIdx.x
        values = cuda.shared.array(THREADS, TYPES["i8"])
        values[t] = t
        for _ in range(turns):
            found = neighbour(values, t)
            cuda.syncthreads()
            values[t] = found
        cuda.syncthreads()
        out[t] = values[t]

    assert _run(kernel, 3) == _after(3)


def test_threads_that_part_at_a_barrier_of_a_function_are_found() -> None:
    def kernel(out: Any) -> None:
        t = cuda.threadIdx.x
        if t < 3:
            out[t] = neighbour(out, t)

    assert_raises(RuntimeError, "5 of 8 threads of block", _run, kernel)


def test_modules_of_kernels_are_not_touched_while_one_runs() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(globals()["cuda"])

    def kernel(out: Any) -> None:
        out[cuda.threadIdx.x] = cuda.blockDim.x
        host()

    host = look.__call__  # no function of Python, so it is none of the device's
    assert _run(kernel) == [THREADS] * THREADS
    assert all(each is cuda for each in seen) and len(seen) == THREADS
