"""Which set of kernels a process uses: numpy's functions, or loops compiled by numba.

Note [One set per process]
    The two sets agree to a tolerance, not to the bit, so a result must not depend on whether some compilation had finished when it was
    computed. The set is therefore chosen once, when a kernel is first asked for on an array large enough to matter:

    ======================  ================================================================================================
    ``AIOGRAD_KERNELS``     choice
    ======================  ================================================================================================
    unset, ``auto``         numba if `warm_up` has completed by then, else numpy
    ``numpy``               numpy
    ``numba``               numba; the first use compiles, and blocks while it does
    ======================  ================================================================================================

    Another value is a warning when the package is imported, and an error when the set is chosen.

    Nothing is ever compiled by a call that did not ask for it: after `warm_up` the compiled functions refuse other types. A service
    calls ``await loop.run_in_executor(None, warm_up)`` before it serves; a script calls ``warm_up()``.

Note [By shape alone]
    Compiled loops cost about a microsecond to enter and their gain is in memory traffic, so small arrays always take numpy's
    functions. Which path an array takes depends on its shape and dtype, never on timing.

Rejected: compiling in the background and switching over when done (bits would depend on timing); a choice per Engine (a tensor recorded
under one and differentiated under another would mix sets).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import warnings
from types import ModuleType
from typing import Any, Literal

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.kernels.cache import private_directory
from aiograd.kernels.pool import stop_threads, thread_count

KernelSet = Literal["numpy", "numba"]

#: from how many elements on compiled kernels are used
THRESHOLD = 50_000

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_lock = threading.RLock()
_module: ModuleType | None = None
_chosen: KernelSet | None = None


def _setting() -> str:
    value = os.environ.get("AIOGRAD_KERNELS", "auto").strip().lower() or "auto"
    if value not in ("auto", "numpy", "numba"):
        raise ArgumentError(f"AIOGRAD_KERNELS={value!r}: expected 'auto', 'numpy' or 'numba'")
    return value


try:
    _setting()
except ArgumentError as refused:  # as a warning: a program that meets no large array works
    warnings.warn(f"{refused}; arrays that are large enough for kernels will be refused", UserWarning, stacklevel=1)


def _found() -> str:
    return "installed" if importlib.util.find_spec("numba") is not None else "not installed"


def available() -> bool:
    """True if compiled kernels can be had: numba is installed and ``AIOGRAD_KERNELS`` is not ``numpy``.

    Returns:
        True or False.
    """
    return _setting() != "numpy" and _found() == "installed"


def selected() -> KernelSet | None:
    """The set in use, or None while no choice has been made.

    Returns:
        ``"numba"``, ``"numpy"`` or None.
    """
    return _chosen


def warm_up() -> KernelSet:
    """Compile every kernel, or load it from the user's cache, so that compiled kernels are used from now on.

    Blocks for about a minute when nothing is cached, for about a second when all is; call it in an executor where an event loop runs.
    Has no effect once numpy has been chosen (see `use`).

    Returns:
        The set in use: "numpy" when numba is not available or the choice had been made.
    """
    with _lock:
        if _chosen is None and available():
            _adopt()
        return _chosen or _choose()


def describe() -> str:
    """One line that says which set is used or would be, on how many threads, and where compiled code is kept.

    Returns:
        The line.
    """
    if not available():
        return f"numpy (AIOGRAD_KERNELS is {_setting()!r}, numba is {_found()})"
    if _chosen == "numpy":
        return "numpy (chosen for this process before any warm_up)"
    state = "in use" if _chosen == "numba" else "compiled at first use" if _setting() == "numba" else "installed; numpy until warm_up() is called"
    return f"numba ({state}), {thread_count()} threads, cache in {private_directory() or 'memory only: no private directory'}"


def use(name: KernelSet) -> None:
    """Use this set from now on; compiles if need be, and ends the threads of the set that is left.

    Call it while no pass is running, since the two sets differ in the last bits.

    Args:
        name: "numpy" or "numba".

    Raises:
        ArgumentError: an unknown set, or numba when it is not available.
    """
    global _chosen
    if name not in ("numpy", "numba"):
        raise ArgumentError(f"kernels.use({name!r}): expected 'numpy' or 'numba'")
    with _lock:
        if name == "numba":
            if not available():
                raise ArgumentError(
                    f"selecting the kernels of numba: AIOGRAD_KERNELS is {_setting()!r} and numba is {_found()}; install aiograd[kernels]"
                )
            _adopt()
        else:
            _chosen = "numpy"
            stop_threads()


def _load() -> ModuleType:
    return importlib.import_module("aiograd.kernels.compiled")


def _adopt() -> None:
    global _chosen, _module
    if _module is None:
        module = _load()
        module.compile_all()
        _module = module
    _chosen = "numba"


def _choose() -> KernelSet:
    global _chosen
    with _lock:
        if _chosen is None:
            if _setting() == "numba":
                use("numba")
            else:
                _chosen = "numpy"
        return _chosen or "numpy"


def compiled(work: int, *arrays: Any) -> Any:
    """The module of compiled kernels if they are to be used here, else None.

    Args:
        work: how many elements the kernel goes through.
        arrays: the arguments of the kernel; None stands for an absent one. They must share a dtype, float32 or float64.
    """
    if work < THRESHOLD or (_chosen or _choose()) != "numba":
        return None
    dtype = arrays[0].dtype
    if dtype not in _FLOATS or any(a is not None and a.dtype != dtype for a in arrays):
        return None
    return _module
