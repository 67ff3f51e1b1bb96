"""One benchmark, or the description of the machine, on standard output as it goes: ``python -m tests.gpu.benchmark latency``."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import time
from collections.abc import Iterator
from typing import Any

import aiograd as ag
from aiograd.cuda import discovery
from tests.gpu.measuring import Run


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.benchmark", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    run = Run(ag.devices.device("cuda:0"), None if options.no_torch else _torch(), options.tiny)
    started = time.perf_counter()
    for line in _machine(run) if options.name == "machine" else importlib.import_module(f"tests.gpu.{options.name}").run(run):
        print(line, flush=True)
    if options.name != "machine":
        fallbacks = ag.cuda.statistics().fallbacks
        print(f"\nOn the host instead: {fallbacks or 'nothing'}. {time.perf_counter() - started:.0f} s.\n", flush=True)


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch


def _machine(run: Run) -> Iterator[str]:
    versions = []
    for name in ("numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cublas", "torch", "numpy"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    properties = run.device.properties
    yield "# aiograd on a GPU\n"
    yield (
        f"{discovery.describe()}; {properties.multiprocessors} multiprocessors, {properties.total_memory / 1e9:.0f} GB; Python "
        f"{platform.python_version()}; {', '.join(versions)}. "
        f"Products: {'cuBLAS' if hasattr(run.device.driver, 'gemm') else 'kernels of our own, cuBLAS was not found'}.\n"
    )


if __name__ == "__main__":
    main()
