"""Correctness, then speed, on the GPU of this machine; the tables go to out/gpu.md. ``make gpu``.

Without a GPU it says what is missing and ends well: there is nothing to measure.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiograd as ag
from aiograd.cuda import discovery
from tests.gpu.measuring import Run

ROOT = Path(__file__).parents[2]
NAMES = ("latency", "bandwidth", "products", "training")


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which benchmarks: {', '.join(NAMES)} (all by default)")
    parser.add_argument("--tiny", action="store_true", help="whether they run, not how fast they are; in the simulator too")
    parser.add_argument("--no-tests", action="store_true", help="benchmarks only")
    parser.add_argument("--no-torch", action="store_true", help="without PyTorch")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu.md", help="where the tables go")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    missing = discovery.why_not()
    if missing is not None:
        print(f"no GPU, so nothing is tested or measured: {missing}")
        return 0
    failed = 0
    if not options.no_tests:
        failed = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], check=False, cwd=ROOT).returncode
    run = Run(ag.devices.device("cuda:0"), None if options.no_torch else _torch(), options.tiny)
    parts = [_machine(run, failed, tested=not options.no_tests)]
    print(parts[0], flush=True)
    for name in options.names or NAMES:
        started = time.perf_counter()
        for text in importlib.import_module(f"tests.gpu.{name}").run(run):
            parts.append(text)
            print(text, flush=True)
        print(f"({name}: {time.perf_counter() - started:.0f} s)\n", flush=True)
    statistics = ag.cuda.statistics()
    parts.append(f"Operations that ran on the host instead: {statistics.fallbacks or 'none'}.\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(parts), encoding="utf-8")
    print(parts[-1], f"written to {options.out}", sep="")
    return failed


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch


def _machine(run: Run, failed: int, *, tested: bool) -> str:
    versions = []
    for name in ("numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cublas", "torch", "numpy"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    properties = run.device.properties
    lines = [
        "# aiograd on a GPU",
        "",
        f"{discovery.describe()}; {properties.multiprocessors} multiprocessors, {properties.total_memory / 1e9:.0f} GB; Python "
        f"{platform.python_version()}; {', '.join(versions)}.",
        "",
        f"Products: {'cuBLAS' if hasattr(run.device.driver, 'gemm') else 'kernels of our own: cuBLAS was not found'}. "
        + ("Tests were not run." if not tested else "All tests passed." if not failed else "TESTS FAILED."),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
