"""Which operations have kernels of their own: numpy functions, rows of the op tables, and fused pairs of kernels.

A function in none of the tables is computed on the host by the device's thread (`aiograd.cuda.fallback`): correct, slow, and counted.
Families fill the tables when they are imported (`aiograd.cuda.operations`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from aiograd.ops.op import ROWS, Fused

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ArrayOperations:
    """Operations behind methods of arrays that are built on arrays, so that arrays cannot import them."""

    #: ``(name, function, args, kwargs)``: computed on the host
    on_host: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    #: ``(array, dtype)``: the elements with a dtype, in memory of their own
    cast: Callable[[Any, np.dtype[Any]], Any]
    #: ``(array, index)``
    getitem: Callable[[Any, Any], Any]
    #: ``(array, index, value)``
    setitem: Callable[[Any, Any, Any], None]


#: set by `aiograd.cuda.operations`
ARRAY_OPERATIONS: ArrayOperations

#: numpy function -> what answers for it; called with numpy's own arguments, at least one of which is a CudaArray
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
#: (ufunc, method) such as (np.add, "reduce") -> likewise
METHODS: dict[tuple[Any, str], Callable[..., Any]] = {}
#: name of a row -> a forward for CudaArrays
ROW_KERNELS: dict[str, Callable[..., Any]] = {}
#: rows that are computed by the host as a whole: their forwards look at values
ROWS_ON_HOST = frozenset({"eig", "eigvals", "expm"})
#: name of a row -> forward with residuals, and rules
FUSED: dict[str, Fused] = {}


def function(*functions: Any) -> Callable[[F], F]:
    """Decorator: answers for these numpy functions. Returning NotImplemented leaves a call to the host."""

    def register(implementation: F) -> F:
        for target in functions:
            FUNCTIONS[target] = implementation
        return implementation

    return register


def method(ufunc: Any, name: str) -> Callable[[F], F]:
    """Decorator: answers for a method of a ufunc, called with the method's own arguments."""

    def register(implementation: F) -> F:
        METHODS[ufunc, name] = implementation
        return implementation

    return register


def row(*names: str) -> Callable[[F], F]:
    """Decorator: answers for rows of the op tables, called with the row's arguments. Returning NotImplemented leaves it to the row's forward.

    Raises:
        KeyError: there is no such row.
    """

    def register(implementation: F) -> F:
        for name in names:
            if name not in ROWS:
                raise KeyError(f"registering a kernel for row {name!r}: there is no such row")
            ROW_KERNELS[name] = implementation
        return implementation

    return register


def fused(name: str, kernels: Fused) -> None:
    """Add a fused pair of kernels for a row.

    Raises:
        TypeError: a rule names something that neither the row nor the kernels have.
    """
    ROWS[name].check_fused(kernels)
    FUSED[name] = kernels
