"""Whether kernels can be compiled to machine code here: numba-cuda, nvvm and nvJitLink are installed, and the simulator is not in their place."""

from __future__ import annotations

import importlib.util
import os


def is_missing() -> bool:
    """Whether they cannot."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0" or importlib.util.find_spec("numba_cuda") is None:
        return True
    from cuda import pathfinder

    try:
        for name in ("nvvm", "nvJitLink"):
            pathfinder.load_nvidia_dynamic_lib(name)
    except Exception:  # its errors have no common base in all versions
        return True
    return False
