"""Masks of dropout drawn on the device: no numbers are drawn on the host and none are copied, save the key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray, empty
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.kernels import random as kernels
from aiograd.cuda.launching import launch, spread
from aiograd.running.types import Shape


def dropout_mask(device: DeviceCore, seed: tuple[int, int], shape: Shape, p: float, dtype: Any) -> CudaArray:
    """See `aiograd.running.devices.DrawsMasks`."""
    out = empty(device, shape, dtype)
    if out.size:
        key, stream = (np.uint64(word) for word in seed)
        threshold, kept = np.uint64(math.ceil(p * 2**32)), out.dtype.type(1 / (1 - p))
        args = (out, out.size, key, stream, threshold, out.dtype.type(0), kept)
        launch(kernels.mask, *spread(device, math.ceil(out.size / 4)), *args, writes=(out,))
    return out

