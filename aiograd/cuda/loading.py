"""From the name ``cuda:0`` to a device: everything that needs numba is imported here, when the first device is asked for.

Environment:

=========================  ==================================================================================================
NUMBA_ENABLE_CUDASIM=1     numba's simulator takes the place of devices: for tiny shapes
AIOGRAD_CUDA_SYNC=1        wait for each kernel, so that an error names the one that failed
AIOGRAD_CUDA_TF32=1        single precision may be multiplied with eleven bits, on tensor cores
AIOGRAD_CUDA_CUBLAS=0      multiply matrices with kernels of our own
AIOGRAD_CUDA_COMPLETIONS   ``threads``: learn of completed work by blocking threads, where host functions do not work
=========================  ==================================================================================================
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from typing import Any

from aiograd.cuda import discovery
from aiograd.errors import DeviceUnavailableError


def load(name: str) -> Any:
    """A module of this package that needs numba.

    Raises:
        DeviceUnavailableError: it cannot be imported.
    """
    try:
        return importlib.import_module(f"aiograd.cuda.{name}")
    except ImportError as error:
        raise DeviceUnavailableError(f"aiograd.cuda.{name} cannot be imported: {error}. {discovery.INSTALL}") from error


def make_device(ordinal: int) -> Any:
    """The device ``cuda:ordinal``, on hardware or, with NUMBA_ENABLE_CUDASIM=1, in numba's simulator.

    Raises:
        DeviceUnavailableError: there is no device; the message names the missing component and the remedy.
    """
    discovery.require(ordinal)
    driver = load("driver.simulator").SimulatorDriver(ordinal) if discovery.is_simulated() else _hardware(ordinal)
    return load("device").CudaDevice(driver)


def _hardware(ordinal: int) -> Any:
    bindings, hardware = load("driver.bindings"), load("driver.hardware")
    compiling = load("driver.compiling")
    try:
        return hardware.HardwareDriver(
            ordinal,
            bindings.Bindings(),
            compiling.compile_kernel,
            blas=_cublas(),
            wait_in_threads=os.environ.get("AIOGRAD_CUDA_COMPLETIONS") == "threads",
        )
    except bindings.CallError as error:
        raise DeviceUnavailableError(f"cuda:{ordinal} is there but cannot be used: {error}") from error


def _cublas() -> Any:
    """A factory of `Cublas` objects, or None if the library is not installed, is too old, or is turned off by AIOGRAD_CUDA_CUBLAS=0."""
    from cuda import pathfinder

    if os.environ.get("AIOGRAD_CUDA_CUBLAS") == "0":
        return None
    try:
        path = pathfinder.load_nvidia_dynamic_lib("cublas").abs_path
    except Exception:  # its errors have no common base in all versions
        return None
    library = ctypes.CDLL(path)
    if not hasattr(library, "cublasGemmStridedBatchedEx_64"):
        return None
    return functools.partial(load("driver.cublas").Cublas, library)
