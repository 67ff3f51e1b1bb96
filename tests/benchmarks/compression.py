"""Compressing gradients with error feedback: processor time in copies of the same bytes, and the bytes that a payload takes.

Processor time of all threads together, since wall time on a machine with neighbours says more about them. The unit is `np.copyto` of the array
between two arrays that exist; results are new arrays, so the pages that they take are in the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aiograd import kernels
from aiograd.distributed import Blockwise, Compressor, TopK
from aiograd.kernels import selection
from tests.benchmarks.harness import Settings, Table, goal_cells

#: (compressor, operation, kernel set) -> copies that it may take
TARGETS = {
    (TopK(), "encode", "numba"): 8.0,
    (TopK(), "encode", "numpy"): 60.0,
    (TopK(), "decode", "numba"): 2.0,
    (Blockwise(8), "encode", "numba"): 5.0,
    (Blockwise(8), "decode", "numba"): 2.0,
}
COMPRESSORS: tuple[Compressor, ...] = (TopK(), TopK(1 / 16, bits=4), TopK(1 / 8, bits=4), Blockwise(8), Blockwise(4))


def run(settings: Settings) -> Iterator[Table]:
    """Encode and decode."""
    values = np.random.default_rng(0).standard_normal((2, settings.of(16 << 20, 10_000)), dtype=np.float32)
    before = selection.selected()
    table = Table(
        f"Compressing {values[0].nbytes >> 20} MB of float32 with feedback, copies of processor time",
        ["compressor", "operation", "kernels", "bits a value", "copies", "target", "beyond", "verdict"],
    )
    for kernel_set in ("numpy",) if settings.tiny or kernels.warm_up() != "numba" else ("numpy", "numba"):
        selection.use(kernel_set)  # type: ignore[arg-type]
        for compressor in COMPRESSORS:
            _measure(table, compressor, kernel_set, values[0], values[1], settings)
    if before is not None:
        selection.use(before)
    yield table


def _measure(table: Table, compressor: Compressor, kernel_set: str, values: Any, residual: Any, settings: Settings) -> None:
    payload, _ = compressor.encode(values, residual)
    target = np.empty_like(values)
    steps: dict[str, Callable[[], Any]] = {
        "encode": lambda: compressor.encode(values, residual),
        "decode": lambda: compressor.decode(payload, values.size),
    }
    for operation, step in steps.items():
        rounds = settings.of(3, 1)
        copies, found = [], []
        for _ in range(rounds):  # in turn, so that both see the same machine
            copies += [_seconds(lambda: np.copyto(target, values)) for _ in range(rounds)]
            found += [_seconds(step) for _ in range(rounds)]
        ratio = None if settings.tiny else min(found) / min(copies)
        cells = goal_cells(ratio, TARGETS.get((compressor, operation, kernel_set)), None)  # type: ignore[call-overload]
        shown = "" if ratio is None else f"{ratio:.2f}"
        table.add(compressor, operation, kernel_set, f"{8 * len(payload) / values.size:.3f}", shown, *cells)


def _seconds(step: Callable[[], Any]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started
