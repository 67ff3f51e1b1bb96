"""The decorators that make a kernel: compiled for float32 and float64 on demand, never by a call.

A kernel says the types of its arguments, so that `compile_all` can compile it (or load it from the user's cache) ahead of time; then the
function is closed, and a call with other types is an error rather than a second of silence. ``inline`` functions are compiled into the
kernels that call them.

Note [Which liberties the compiler may take]
    ``contract`` (fused multiply-add) everywhere; it is the same in every lane and every block. ``reassoc`` and ``nsz`` only in sums, to
    let them use vector lanes. Never ``nnan`` or ``ninf`` where a value is computed: NaN and infinity come out as they go in. Without any of
    these (``exact``) a kernel gives the bits of numpy's operations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.core import caching

from aiograd.kernels.cache import private_directory

F = TypeVar("F", bound=Callable[..., Any])
Spec = Callable[[Any], Any]

#: flags for sums over lanes
SUMS = {"contract", "reassoc", "nsz"}
_PLAIN = {"contract"}


def reads(ndim: int, dtype: Any = None) -> Spec:
    """A C-contiguous array that the kernel only reads; of the kernel's float type by default."""
    return lambda real: types.Array(dtype or real, ndim, "C", readonly=True)


def writes(ndim: int, dtype: Any = None) -> Spec:
    """A C-contiguous array that the kernel writes to."""
    return lambda real: types.Array(dtype or real, ndim, "C")


def strided(ndim: int) -> Spec:
    """An array of any strides that the kernel only reads."""
    return lambda real: types.Array(real, ndim, "A", readonly=True)


def writes_strided(ndim: int) -> Spec:
    """An array of any strides that the kernel writes to."""
    return lambda real: types.Array(real, ndim, "A")


def whole(real: Any) -> Any:
    """A Python int."""
    return types.int64


def wholes(count: int) -> Spec:
    """A tuple of Python ints."""
    return lambda real: types.UniTuple(types.int64, count)


def real(real: Any) -> Any:
    """A Python float."""
    return types.float64


def flag(real: Any) -> Any:
    """A Python bool."""
    return types.boolean


_kernels: list[tuple[Any, tuple[Spec, ...]]] = []


def kernel(*specs: Spec, sums: bool = False, exact: bool = False) -> Callable[[F], F]:
    """Decorator: a function of arrays and numbers that `compile_all` compiles. Three ints (block, low, high) are added to `specs`.

    Args:
        specs: the type of each argument.
        sums: sums may be reordered into vector lanes.
        exact: results have the bits that numpy's operations give: no fused multiply-add.
    """

    def decorate(function: F) -> F:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy", fastmath=set() if exact else SUMS if sums else _PLAIN)(function)
        if _DIRECTORY is not None:
            dispatcher._cache = _PrivateCache(function)
        _kernels.append((dispatcher, (*specs, whole, whole, whole)))
        return dispatcher  # type: ignore[no-any-return]

    return decorate


def inline(function: F | None = None, *, flags: set[str] | None = None) -> Any:
    """Decorator: a function that kernels call."""
    decorate = numba.njit(nogil=True, forceinline=True, error_model="numpy", fastmath=_PLAIN if flags is None else flags)
    return decorate if function is None else decorate(function)


def compile_all() -> None:
    """Compile every kernel for float32 and float64, and close it."""
    for dispatcher, specs in _kernels:
        for scalar in (types.float32, types.float64):
            dispatcher.compile(tuple(spec(scalar) for spec in specs))
        dispatcher.disable_compile()


def _fingerprint() -> str:
    digest = hashlib.sha256(np.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


_DIRECTORY = private_directory()
#: of all kernels' sources: a kernel must be compiled anew when a function it calls has changed, in any file
_STAMP = _fingerprint()


class _PrivateLocator(caching._CacheLocator):
    """Tells numba to keep a function's code in the private directory."""

    def __init__(self, function: Any, path: str) -> None:
        self._py_file = path
        self._lineno = function.__code__.co_firstlineno

    def ensure_cache_path(self) -> None:
        if private_directory() != _DIRECTORY:
            raise OSError("the kernel cache is no longer private")

    def get_cache_path(self) -> str:
        return str(_DIRECTORY)

    def get_source_stamp(self) -> str:
        return _STAMP

    def get_disambiguator(self) -> str:
        return str(self._lineno)

    @classmethod
    def from_function(cls, function: Any, path: str) -> _PrivateLocator:
        return cls(function, path)


class _PrivateImpl(caching.CompileResultCacheImpl):
    _locator_classes = (_PrivateLocator,)


class _PrivateCache(caching.FunctionCache):
    _impl_class = _PrivateImpl
