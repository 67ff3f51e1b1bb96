"""Random numbers from a counter: Philox 4x32 with ten rounds, four numbers a thread, so nothing depends on how threads are arranged.

Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from aiograd.cuda.kernels.scalar import TYPES

_u4 = TYPES["u4"]
_u8 = TYPES["u8"]

_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_FIRST = np.uint64(0xD2511F53)
_SECOND = np.uint64(0xCD9E8D57)
_STEP0 = np.uint64(0x9E3779B9)
_STEP1 = np.uint64(0xBB67AE85)


def _philox(masking: bool) -> Any:
    def philox(out: Any, n: int, key: Any, stream: Any, threshold: Any, dropped: Any, kept: Any) -> None:
        """Numbers of 32 bits; or, when masking, `kept` where they reach a threshold and `dropped` elsewhere."""
        for i in range(cuda.grid(1), (n + 3) // 4, cuda.gridsize(1)):
            c0 = _u8(i) & _LOW
            c1 = _u8(i) >> _HALF
            c2 = stream & _LOW
            c3 = stream >> _HALF
            k0 = key & _LOW
            k1 = key >> _HALF
            for _ in range(10):
                p0 = _FIRST * c0
                p1 = _SECOND * c2
                c0 = (p1 >> _HALF) ^ c1 ^ k0
                c1 = p1 & _LOW
                c2 = (p0 >> _HALF) ^ c3 ^ k1
                c3 = p0 & _LOW
                k0 = (k0 + _STEP0) & _LOW
                k1 = (k1 + _STEP1) & _LOW
            for lane in range(4):
                number = c0 if lane == 0 else (c1 if lane == 1 else (c2 if lane == 2 else c3))
                place = 4 * i + lane
                if place < n:
                    if masking:
                        out[place] = kept if number >= threshold else dropped
                    else:
                        out[place] = _u4(number)

    return philox


numbers = _philox(False)
mask = _philox(True)
