"""A simulated device with a library that multiplies matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.cuda.driver.protocol import Pointer
from aiograd.cuda.driver.simulator import SimulatorDriver


class Library(SimulatorDriver):
    """A simulator whose driver multiplies matrices as cuBLAS does: by numpy, from leading dimensions and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def gemm(
        self, out: Pointer, a: Pointer, b: Pointer, m: int, n: int, k: int, batch: int,
        layout_a: tuple[int, bool, int], layout_b: tuple[int, bool, int], layout_out: tuple[int, int], alpha: float, beta: float, stream: Any,
    ) -> None:  # fmt: skip
        def matrices(pointer: Pointer, rows: int, columns: int, step: int, turned: bool, stride: int) -> np.ndarray:
            if turned:
                rows, columns = columns, rows
            assert step >= columns
            size = pointer.dtype.itemsize
            whole = np.ndarray((batch, rows, columns), pointer.dtype, pointer.memory.data, pointer.offset, (stride * size, step * size, size))
            return whole.swapaxes(1, 2) if turned else whole

        self.calls.append((m, n, k, batch, layout_a, layout_b))
        matrices(out, m, n, layout_out[0], False, layout_out[1])[...] = alpha * np.matmul(matrices(a, m, k, *layout_a), matrices(b, k, n, *layout_b))
        assert beta == 0
