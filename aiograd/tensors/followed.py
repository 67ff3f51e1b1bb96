"""Arrays that a call of forward mode follows, as the rest of the package knows them: by their attributes (see `aiograd.forward.dual`)."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np


def without_tangent(data: Any, tensor: Any = None) -> Any:
    """The same array, of which no call of forward mode follows the values; `tensor` has it, where writes into it may give it another one."""
    return data.without_tangent(tensor) if data.__class__ is not np.ndarray and hasattr(data, "without_tangent") else data


def follows_writes(data: Any) -> bool:
    """True for an array of a level that gives a Tensor another array when it is written in place, or one that it is a view of."""
    return data.__class__ is not np.ndarray and hasattr(data, "lifted")


def follow(tensor: Any, data: Any) -> None:
    """Give a Tensor an array of such a level, with the same memory, until the level ends."""
    if not follows_writes(tensor._data) or tensor._data.level is not data.level:
        data.level.borrowed.append((weakref.ref(tensor), tensor._data))
    tensor._data = data


def has_tangent(tensor: Any) -> bool:
    """True if a call of forward mode follows the values of the tensor."""
    return follows_writes(tensor._data) and tensor._data.is_followed
