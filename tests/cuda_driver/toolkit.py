"""The toolchain that compiles kernels to machine code: numba-cuda, nvvm and nvJitLink. The simulator takes their place where it is switched on."""

from __future__ import annotations

import importlib.util
import os

import numpy as np


def is_missing() -> bool:
    """True if kernels cannot be compiled here, because of numpy, too: see `aiograd.cuda.discovery`."""
    if not hasattr(np, "row_stack"):
        return True
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0" or importlib.util.find_spec("numba_cuda") is None:
        return True
    from cuda import pathfinder

    try:
        for name in ("nvvm", "nvJitLink"):
            pathfinder.load_nvidia_dynamic_lib(name)
    except Exception:  # its errors have no common base in all versions
        return True
    return False
