"""``python -m tests.cpus.probe``: which code path this process really takes, as JSON."""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
from typing import Any

import numpy as np
from numpy._core import _multiarray_umath as umath
from threadpoolctl import threadpool_info

import tests.cpus.threads  # noqa: F401 - as the tests have it

try:
    from numba.core.registry import cpu_target
except ImportError:
    cpu_target = None


def probe() -> dict[str, Any]:
    """The machine as `tests.cpus.paths.Machine` has it, and what is in use."""
    blas = next((each for each in threadpool_info() if each["user_api"] == "blas" and "numpy" in each["filepath"]), None)
    blas = blas or next((each for each in threadpool_info() if each["user_api"] == "blas"), {})
    # numpy's own BLAS is not among the symbols that the whole process sees
    is_other = hasattr(ctypes.CDLL(None), "scipy_cblas_dgemm64_")
    features = [name for name, enabled in umath.__cpu_features__.items() if enabled]
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "blas": blas.get("internal_api", ""),
        "prefix": blas.get("prefix", ""),
        "compiler": shutil.which("cc") or shutil.which("gcc") or "",
        "features": features,
        "dispatched": [name for name in umath.__cpu_dispatch__ if name in features],
        "core": "of other_cpu.c" if is_other else blas.get("architecture", "unknown"),
        "threads": blas.get("num_threads", 0),
        "numba": "none" if cpu_target is None else cpu_target.target_context.codegen().magic_tuple()[1],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
