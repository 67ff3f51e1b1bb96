"""The command line: ``aiograd doctor`` and ``aiograd trace``.

The one place that may install things process-wide; the library never does.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aiograd import __version__, kernels
from aiograd.engine.run import run
from aiograd.errors import AiogradError
from aiograd.profiler import merge_traces, summarize_trace
from aiograd.tensors.tensor import tensor

#: distributions whose versions explain most questions
PACKAGES = ("numpy", "uvloop", "aiohttp", "cryptography", "safetensors", "numba", "threadpoolctl", "ml_dtypes", "numba-cuda", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status.

    Args:
        arguments: the words after the program's name; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="aiograd", description="Autograd for async Python.")
    parser.add_argument("--version", action="version", version=f"aiograd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="print what this installation has and whether it works")
    doctor.set_defaults(run=lambda options: _doctor())

    trace = commands.add_parser("trace", help="merge Chrome traces, or print a table of one")
    trace.add_argument("traces", nargs="+", type=Path, metavar="TRACE.json", help="files written by the profiler")
    trace.add_argument("-o", "--output", type=Path, help="write the merged trace here; open it in ui.perfetto.dev")
    trace.add_argument("-n", "--limit", type=int, default=20, help="rows of the table (default 20)")
    trace.set_defaults(run=lambda options: _trace(options.traces, options.output, options.limit))

    options = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except (AiogradError, OSError) as error:
        print(f"aiograd {options.command}: {error}", file=sys.stderr)
        return 1


def _doctor() -> int:
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
    rows.append(("kernels", kernels.describe()))
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
    variables = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    threads = next((f"{name}={os.environ[name]}" for name in variables if name in os.environ), "")
    return " ".join(filter(None, (blas.get("name", "unknown"), blas.get("version", ""), threads)))


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


def _trace(traces: list[Path], output: Path | None, limit: int) -> int:
    merged = merge_traces(traces, output)
    print(summarize_trace(merged, limit=limit))
    if output is not None:
        print(f"\nwrote {output}: open it in https://ui.perfetto.dev")
    return 0
