"""Is there a CUDA device, and if not, what is missing?

Note [Looking]
    Questions are asked in the order in which their answers depend on each other, and no further than the first no: whether packages are
    installed, whether the driver's library is there and how old it is, and only then, which takes a tenth of a second and cannot be
    undone, whether it starts. numba is not imported here. `reason` turns answers into a text for the user, and is pure.

Note [Versions]
    Major versions decide whether a driver can load a file: a driver of CUDA 13 loads machine code made for CUDA 13, of any minor version. That holds
    for machine code only, which is why nvJitLink must be there (see `aiograd.cuda.driver.compiling`).

A process that has looked for devices must not be forked afterwards: the driver does not survive that.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from dataclasses import dataclass

import numpy as np

from aiograd.errors import DeviceUnavailableError

INSTALL = 'Install them with: pip install "aiograd[cuda]"'
#: distributions that must be there, with the first version that will do
PACKAGES = {"numba-cuda": (0, 30), "cuda-core": (1, 0), "cuda-bindings": (12, 9)}
#: numba-cuda before this version calls ``row_stack``, which numpy 2.5 took away, as it compiles a kernel
_NUMBA_CUDA_WITHOUT_ROW_STACK = (0, 31)
#: libraries of the toolkit that compile kernels, by the names that cuda-pathfinder has for them
LIBRARIES = ("nvvm", "nvJitLink")
_DRIVER_LIBRARY = "libcuda.so.1"

#: results of cuInit that say something to a user
_INIT = {
    100: "no device was found (CUDA_ERROR_NO_DEVICE)",
    3: "the driver could not be initialised (CUDA_ERROR_NOT_INITIALIZED)",
    803: "the driver's library does not fit its kernel module (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH); restart the machine or reinstall the driver",
    802: "the system is not ready yet (CUDA_ERROR_SYSTEM_NOT_READY); is the fabric manager running?",
    804: "forward compatibility is not supported on this device (CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE)",
    999: "unknown error (CUDA_ERROR_UNKNOWN); often the device's nodes under /dev are missing in a container",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """The results of probing the system for CUDA. None means that something was not probed."""

    #: True if numba's simulator takes the place of devices
    is_simulated: bool = False
    #: distribution -> its version, None where it is not installed
    packages: tuple[tuple[str, str | None], ...] = ()
    #: numpy's version, where it has no ``row_stack``
    numpy_without_row_stack: str | None = None
    #: why the driver's library could not be loaded; empty where it could
    library_error: str | None = None
    #: of the CUDA driver, as in 13000 for 13.0
    driver_version: int | None = None
    #: libraries of the toolkit that were not found
    missing_libraries: tuple[str, ...] = ()
    #: result of initialising the driver
    init_status: int | None = None
    device_count: int | None = None
    #: names of the devices, as the driver reports them
    names: tuple[str, ...] = ()
    #: value of CUDA_VISIBLE_DEVICES, None where it is not set
    visible: str | None = None

    @property
    def bindings_major(self) -> int:
        """The major version of CUDA that the packages are made for."""
        version = dict(self.packages).get("cuda-bindings")
        return int(version.split(".")[0]) if version else 0


def is_simulated() -> bool:
    """True if numba's simulator takes the place of devices: NUMBA_ENABLE_CUDASIM=1."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


@functools.cache
def probe() -> Probe:
    """Probe the system, once in a process."""
    packages = tuple((name, _version(name)) for name in (("numba-cuda",) if is_simulated() else PACKAGES))
    found = Probe(
        is_simulated=is_simulated(),
        packages=packages,
        numpy_without_row_stack=None if hasattr(np, "row_stack") else np.__version__,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if found.is_simulated or reason(found) is not None:
        return found
    try:
        library = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError as error:
        return _with(found, library_error=str(error))
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    found = _with(found, library_error="", driver_version=version.value)
    if reason(found) is not None:
        return found
    found = _with(found, missing_libraries=_missing_libraries())
    if reason(found) is not None:
        return found
    status = int(library.cuInit(0))
    if status != 0:
        return _with(found, init_status=status)
    library.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        name = ctypes.create_string_buffer(128)
        library.cuDeviceGetName(name, len(name), ordinal)  # a device's handle is its number
        names.append(name.value.decode(errors="replace"))
    return _with(found, init_status=0, device_count=count.value, names=tuple(names))


def reason(found: Probe, ordinal: int | None = None) -> str | None:
    """The reason why a device cannot be used: a sentence with the missing component and the remedy; None if no obstacle was found.

    Args:
        ordinal: number of the device; None: any device.
    """
    outdated = []
    for name, version in found.packages:
        if version is None:
            return f"looked for the package {name}, which is not installed. {INSTALL}"
        least = PACKAGES[name]
        if _numbers(version) < least:
            outdated.append(f"{name} {version} (needed: {'.'.join(map(str, least))} or later)")
    if outdated:
        return f"found packages that are too old: {', '.join(outdated)}. {INSTALL}"
    numba_cuda = dict(found.packages).get("numba-cuda") or ""
    if found.numpy_without_row_stack and not found.is_simulated and _numbers(numba_cuda) < _NUMBA_CUDA_WITHOUT_ROW_STACK:
        return (
            f"found packages that do not fit each other: numba-cuda {numba_cuda} compiles kernels with numpy before 2.5, and numpy "
            f'{found.numpy_without_row_stack} is installed. Install an older one with: pip install "numpy<2.5"'
        )
    if found.is_simulated:
        return None if ordinal in (None, 0) else f"device {ordinal} was asked for, and there is one simulated device: cuda:0"
    if found.library_error:
        return (
            f"looked for the CUDA driver's library {_DRIVER_LIBRARY}: {found.library_error}. Install NVIDIA's driver; in a container, start it with "
            f"the devices (docker run --gpus all). Without a device, NUMBA_ENABLE_CUDASIM=1 runs tiny programs in a simulator."
        )
    if found.driver_version is not None and found.driver_version // 1000 < found.bindings_major:
        have = f"{found.driver_version // 1000}.{found.driver_version % 1000 // 10}"
        return (
            f"the driver is made for CUDA {have}, the installed packages (cuda-bindings {dict(found.packages)['cuda-bindings']}) need a driver for "
            f"CUDA {found.bindings_major}. Update the driver, or install packages for its version: "
            f'pip install "numba-cuda[cu{found.driver_version // 1000}]" "cuda-bindings=={found.driver_version // 1000}.*"'
        )
    if found.missing_libraries:
        return (
            f"looked for the toolkit's libraries {', '.join(found.missing_libraries)} in Python packages, CUDA_HOME and the system, and found none; "
            f"kernels cannot be compiled to what this driver loads without. {INSTALL}"
        )
    if found.init_status:
        return f"the CUDA driver does not start: {_INIT.get(found.init_status, 'error')} ({found.init_status}){_hidden(found)}."
    if found.device_count is None:
        return None
    if found.device_count == 0:
        return f"the CUDA driver reports no devices{_hidden(found)}."
    if ordinal is not None and not 0 <= ordinal < found.device_count:
        names = "cuda:0" if found.device_count == 1 else f"cuda:0 to cuda:{found.device_count - 1}"
        return f"device {ordinal} was asked for, and there is only {names}{_hidden(found)}."
    return None


def is_available() -> bool:
    """True if there is a CUDA device that aiograd can use, or numba's simulator takes its place. Never raises.

    Returns:
        True or False.
    """
    return why_not() is None


def device_count() -> int:
    """The number of devices ``cuda:0``, ``cuda:1`` ...; 0 if none can be used.

    Returns:
        The number.
    """
    if not is_available():
        return 0
    return 1 if probe().is_simulated else probe().device_count or 0


def why_not() -> str | None:
    """The reason why there is no CUDA device, with the places looked at and advice; None if there is one.

    Returns:
        A sentence, or None.
    """
    return reason(probe())


def require(ordinal: int) -> None:
    """Raise unless there is a device.

    Raises:
        DeviceUnavailableError: the device is not available; the message names the missing component and the remedy.
    """
    missing = reason(probe(), ordinal)
    if missing is not None:
        raise DeviceUnavailableError(f"cuda:{ordinal} cannot be used: {missing}")


def describe() -> str:
    """One line for ``aiograd doctor``."""
    missing = why_not()
    if missing is not None:
        return f"none: {missing}"
    found = probe()
    if found.is_simulated:
        return "simulated (NUMBA_ENABLE_CUDASIM)"
    version = found.driver_version or 0
    devices = ", ".join(f"cuda:{ordinal} {name}" for ordinal, name in enumerate(found.names))
    return f"{devices}; driver for CUDA {version // 1000}.{version % 1000 // 10}"


def _with(found: Probe, **changes: object) -> Probe:
    fields = {name: getattr(found, name) for name in Probe.__slots__}
    return Probe(**{**fields, **changes})


def _hidden(found: Probe) -> str:
    return "" if found.visible is None else f"; CUDA_VISIBLE_DEVICES is {found.visible!r} and hides the others"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _missing_libraries() -> tuple[str, ...]:
    from cuda import pathfinder

    missing = []
    for name in LIBRARIES:
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except Exception:  # its errors have no common base in all versions
            missing.append(name)
    return tuple(missing)
