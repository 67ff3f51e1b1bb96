"""The arrays that members of a group hand to an operation, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.distributed.collectives.operation import REDUCED_KINDS, ArraySpec, check_arrays, specs_of
from aiograd.errors import ArgumentError
from aiograd.tensors.core import TensorCore


def is_single(arrays: Any) -> bool:
    """True for one array, which is not in a list."""
    return not isinstance(arrays, (list, tuple))


def data_of(what: str, arrays: Any, kinds: str) -> list[Any]:
    """The data of arrays and Tensors, checked; arrays of the host are C-contiguous."""
    data: list[Any] = [array._data if isinstance(array, TensorCore) else array for array in ([arrays] if is_single(arrays) else arrays)]
    data = [np.asarray(array) if isinstance(array, (np.generic, int, float, complex)) else array for array in data]
    return check_arrays(what, data, kinds)


def data_of_lists(lists: Sequence[Sequence[Any]], rank: int) -> tuple[list[Any], tuple[ArraySpec, ...]]:
    """The data of the lists of `Group.sum_in_turn`, one after another, and the shapes and dtypes of each.

    Raises:
        ArgumentError: no list, several on rank 0, or lists that differ.
    """
    values = [data_of("sum_in_turn", each, REDUCED_KINDS["sum"]) for each in lists]
    specs = [specs_of(each) for each in values]
    if not specs or specs.count(specs[0]) < len(specs) or (len(specs) > 1 and rank == 0):
        raise ArgumentError(
            f"sum_in_turn: got lists of {', '.join(str(len(each)) for each in values) or 'no'} arrays on rank {rank}; expected one list, or on other "
            "ranks than 0 several, of the same shapes and dtypes"
        )
    return [array for each in values for array in each], specs[0]
