"""``aiograd doctor``: what this installation has and whether it works."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import platform
import time
from typing import Any

import numpy as np

from aiograd import __version__, kernels
from aiograd.cuda import discovery
from aiograd.engine.run import run
from aiograd.tensors.creation import tensor

#: distributions with versions that explain most questions
PACKAGES = (
    "numpy", "uvloop", "aiohttp", "cryptography", "safetensors", "numba", "threadpoolctl", "ml_dtypes", "numba-cuda", "cuda-core", "cuda-bindings",
    "torch",
)  # fmt: skip

BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def doctor(options: argparse.Namespace) -> int:
    """Print what there is; fails where a small pass gives wrong gradients."""
    rows: list[tuple[str, str]] = [
        ("aiograd", __version__),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()}, {platform.system()} {platform.machine()})"),
        ("cores", f"{os.cpu_count()} in the machine, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else '?'} for this process"),
    ]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    rows.append(("BLAS", _blas()))
    rows.append(("BLAS threads", _blas_threads()))
    rows.append(("kernels", kernels.describe()))
    problem = kernels.native_problem()
    rows.append(("native programs", "available" if problem is None else f"not available: {problem}"))
    rows.append(("CUDA", discovery.describe()))
    loop, gradient, microseconds = run(_self_test())
    right = np.array_equal(gradient, [2.0, 4.0, 6.0])
    rows.append(("event loop", loop))
    rows.append(("backward", f"{'works' if right else f'WRONG: {gradient}'}, {microseconds:.0f} µs for a graph of three nodes"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    return 0 if right else 1


def _blas() -> str:
    blas = (np.show_config(mode="dicts") or {}).get("Build Dependencies", {}).get("blas", {})
    return " ".join(filter(None, (blas.get("name", "unknown"), blas.get("version", ""))))


def _blas_threads() -> str:
    """How many threads BLAS uses, and what to do about it."""
    advice = "a service, or several processes on these cores, do best with 1: OPENBLAS_NUM_THREADS=1, or ag.Engine(blas_threads=1)"
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        set_by = next((f"{name}={os.environ[name]}" for name in BLAS_VARIABLES if name in os.environ), "one per core unless BLAS was built otherwise")
        return f"{set_by} (pip install 'aiograd[kernels]' to see and set it here); {advice}"
    threads = max((library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"), default=1)
    return str(threads) if threads == 1 else f"{threads}; {advice}"


async def _self_test() -> tuple[str, Any, float]:
    times = []
    for _ in range(20):
        x = tensor([1.0, 2.0, 3.0], requires_grad=True)
        loss = (x * x).sum()
        start = time.perf_counter()
        await loss.backward()
        times.append(time.perf_counter() - start)
    loop = type(asyncio.get_running_loop())
    return f"{loop.__module__}.{loop.__qualname__}", x.grad.numpy(), sorted(times)[len(times) // 2] * 1e6
