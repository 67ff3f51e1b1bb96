"""Runs the programs of ``tests/cuda`` with a driver that compiles what it is asked to launch: every row with its rules
(rules of rules in single precision), every ufunc in every dtype, training steps at real sizes. Fails where a kernel does not compile; prints what
was compiled and how long it took.

Values are zeros here, so what depends on values is not what is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "bool")
SCALE = 16


def jobs() -> list[tuple[str, str]]:
    """Everything there is to do, as (kind, name)."""
    from aiograd.ops.op import UFUNCS
    from tests.cuda.programs import DOMAINS, NOT_ON_DEVICES, TRAINING

    found = [("training", name) for name in TRAINING]
    found += [("row", name) for name in sorted(set(DOMAINS) - NOT_ON_DEVICES)]
    return found + [("ufunc", name) for name in sorted(ufunc.__name__ for ufunc in UFUNCS)]


def compile_part(part: list[tuple[str, str]], capability: tuple[int, int], small: bool) -> tuple[dict[tuple[Any, ...], float], list[str]]:
    """Do some of the jobs: seconds by kernel and types, and what went wrong."""
    from aiograd.cuda.device import CudaDevice
    from aiograd.running.devices import register_device
    from tests.ptx.compile_only import CompileOnlyDriver

    warnings.simplefilter("ignore")
    driver = CompileOnlyDriver(capability=capability)
    device = CudaDevice(driver)
    register_device(device)
    problems: list[str] = []

    async def run() -> None:
        for kind, name in part:
            for what, program in _programs(kind, name, device, small):
                try:
                    await asyncio.wait_for(program(), 300)
                except np.linalg.LinAlgError:
                    continue  # decompositions run on the host, and these values are zeros
                except Exception as error:
                    problems.append(f"{what}: {type(error).__name__}: {str(error)[:600]}")

    asyncio.run(run())
    device.close()
    return {key: seconds for key, (_, seconds) in zip(((k[0].__name__, str(k[1:])) for k in driver.compiled), driver.timings, strict=True)}, problems


def _programs(kind: str, name: str, device: Any, small: bool) -> Any:
    from tests.cuda.programs import DOMAINS, TRAINING, differentiate

    if kind == "training":
        yield f"training {name}", lambda: TRAINING[name]("cuda:0", SCALE)
    elif kind == "row":
        for variety in range(DOMAINS[name].varieties):
            yield f"row {name} {variety} float32", lambda v=variety: differentiate(name, v, "cuda:0", np.float32, second_order=not small)
        for dtype in () if small else ("float64", "float16"):
            yield f"row {name} 0 {dtype}", lambda t=dtype: differentiate(name, 0, "cuda:0", np.dtype(t), second_order=False)
    else:
        ufunc = getattr(np, name)
        for dtype in DTYPES[:1] if small else DTYPES:
            yield f"ufunc {name} {dtype}", lambda t=dtype: _call(ufunc, device, t)


async def _call(ufunc: Any, device: Any, dtype: str) -> None:
    """One element-wise operation on arrays side by side, broadcast and strided."""
    shapes = [(4, 4), (4,), (1,)]
    try:
        host = [np.ones(shapes[i % 3], dtype) for i in range(ufunc.nin)]
        ufunc(*host)
    except TypeError:
        return  # numpy does not do this either
    results = ufunc(*[device.from_host(array) for array in host])
    for result in results if isinstance(results, tuple) else (results,):
        await result.__aiograd_wait__()


def main() -> int:
    """Compile everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--capability", default="9.0", help="compute capability to compile for")
    parser.add_argument("--small", action="store_true", help="single precision only, and no rules of rules")
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    major, _, minor = options.capability.partition(".")
    todo = [job for job in jobs() if options.only in job[1]]
    parts = [todo[i :: options.jobs * 4] for i in range(options.jobs * 4)]
    started = time.perf_counter()
    compiled: dict[tuple[Any, ...], float] = {}
    problems: list[str] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for found, wrong in pool.map(compile_part, parts, [(int(major), int(minor))] * len(parts), [options.small] * len(parts)):
            compiled |= found
            problems += wrong
    names = Counter(name for name, _ in compiled)
    seconds = time.perf_counter() - started
    print(f"compiled {len(compiled)} kernels ({len(names)} names) for compute capability {options.capability} in {seconds:.0f} s")
    slowest = sorted(compiled.items(), key=lambda item: -item[1])[:5]
    print("slowest: " + ", ".join(f"{name} {each:.1f} s" for (name, _), each in slowest))
    for problem in problems:
        print("FAILED", problem)
    return 1 if problems or not compiled else 0

