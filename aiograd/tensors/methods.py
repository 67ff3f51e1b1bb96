"""The base class of Tensor that holds the methods which compute.

`aiograd.array_functions.methods` puts them there when the package is imported. Type checkers read their signatures in the stub beside this file,
which ``python -m tests.method_stub`` writes.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class TensorMethods(Generic[T]):
    """Methods that take a tensor of type `T` and return such tensors."""

    __slots__ = ()
