"""Costs of a call of a compiled function around its program: guards, results and node, in microseconds of one call, minima.

The program is the generated function of arrays alone. A call without it is what a compiled function of no operations would cost.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import nn
from tests.benchmarks.harness import Settings, Table, threads

#: calls until nothing more is prepared
WARM = 6


def run(settings: Settings) -> Iterator[Table]:
    """Split some calls, and time recordings."""
    with threads(1):
        yield _split(settings)
        yield _recorded(settings)


def _split(settings: Settings) -> Table:
    columns = ["call", "whole", "guards", "program", "results and node", "all but the program"]
    table = Table("One call of a compiled function, 1 thread, microseconds", columns)
    draw = np.random.default_rng(0).standard_normal
    five = [ag.tensor(draw(4).astype(np.float32), requires_grad=True) for _ in range(5)]
    one, sample = ag.tensor(draw((1, 4)).astype(np.float32)), ag.tensor(draw((1, 64)).astype(np.float32))
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    ten = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    calls: list[tuple[str, Any, list[Any]]] = [
        ("five tensors summed", lambda a, b, c, d, e: a + b + c + d + e, five),
        ("MLP 64-64-10, one sample", mlp, [sample]),
        ("module of ten parameters", ten, [one]),
    ]
    for name, function, args in calls:
        for grad in (True, False):
            with ag.set_grad_enabled(grad):
                table.add(f"{name}{'' if grad else ', no_grad'}", *[f"{each:.2f}" for each in _parts(ag.compile(function), args, settings)])
    return table


def _parts(compiled: Any, args: list[Any], settings: Settings) -> tuple[float, float, float, float, float]:
    """Microseconds of a whole call, of the guards, the program, the results, and of all but the program."""
    for _ in range(WARM):
        compiled(*args)
    _, code, inputs = compiled._find(tuple(args), {})
    given = [tensor._data for tensor in (*inputs, *code.program.tensors)]
    forward, arenas = code.forward
    arena = arenas.take()
    given += [] if arena is None else [arena.arrays]
    sides = (
        lambda: None, lambda: compiled(*args), lambda: compiled._find(tuple(args), {}), lambda: forward(*given), lambda: code.run(inputs),
    )  # fmt: skip
    nothing, whole, guards, program, ran = _shortest(sides, settings)
    return whole - nothing, guards - nothing, program - nothing, ran - program, whole - program


def _recorded(settings: Settings) -> Table:
    """Time to record and compile."""
    count = settings.of(1000, 20)
    a, b, x = (ag.tensor(np.full(4, value, np.float32), requires_grad=True) for value in (0.5, 0.25, 1.0))

    def chain(x: Any) -> Any:
        for _ in range(count // 2):
            x = x * a + b
        return x

    eager = min(_processor_seconds(lambda: chain(x)) for _ in range(settings.of(20, 2)))
    recorded = min(_processor_seconds(lambda: ag.compile(chain)(x)) for _ in range(settings.of(20, 2)))
    table = Table(f"Recording and compiling {count} operations, 1 thread, milliseconds of processor time", ["", "milliseconds"])
    table.add("eager call", f"{1e3 * eager:.1f}")
    table.add("first call of the compiled function", f"{1e3 * recorded:.1f}")
    return table


def _processor_seconds(function: Callable[[], Any]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def _shortest(functions: Sequence[Callable[[], Any]], settings: Settings) -> list[float]:
    """Microseconds of one call of each, the least of many rounds over all of them."""
    count, best = settings.of(500, 10), [float("inf")] * len(functions)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(settings.of(60, 2)):
            for i, function in enumerate(functions):
                began = time.perf_counter_ns()
                for _ in range(count):
                    function()
                best[i] = min(best[i], (time.perf_counter_ns() - began) / count)
    finally:
        if was_enabled:
            gc.enable()
    return [each / 1000 for each in best]
