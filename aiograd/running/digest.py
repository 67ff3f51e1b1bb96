"""The digest of a state: one function for versions of weights, local steps and data parallelism."""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError

#: names of the dtypes that a state may have
STATE_DTYPES = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128".split(),
)


def state_digest(state: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """SHA-256 over paths, dtypes, shapes and bytes of a state, in the order of the mapping.

    Values count bit by bit: 0.0 and -0.0 differ, and so do two NaNs of other bits. Strides and byte order of the memory do not count.

        >>> from aiograd.running.digest import state_digest
        >>> weights = np.arange(6.0).reshape(2, 3)
        >>> state_digest({"weight": weights}) == state_digest({"weight": np.asfortranarray(weights)})
        True
        >>> state_digest({"weight": weights}) == state_digest({"weight": weights.T})
        False

    Args:
        state: arrays by path.

    Returns:
        64 hexadecimal digits.

    Raises:
        ArgumentTypeError: a path is no string, or a value no array of numbers.
    """
    digest = hashlib.sha256(b"aiograd state 1\n")
    for path, array in state.items():
        dtype = _name_of(array.dtype) if isinstance(array, np.ndarray) else b""
        if not isinstance(path, str) or not dtype:
            found = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
            raise ArgumentTypeError(f"state_digest: expected arrays of numbers by paths that are strings, found {path!r} with {found}")
        name = path.encode("utf-8", "surrogatepass")
        header = struct.pack("<QBB", len(name), len(dtype), array.ndim)
        digest.update(b"".join((header, name, dtype, struct.pack(f"<{array.ndim}Q", *array.shape))))
        is_big = array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big")
        digest.update(np.ascontiguousarray(array.byteswap() if is_big else array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> bytes:
    """The name of a dtype that a state may have, else nothing; numpy makes the name anew each time, in microseconds."""
    return dtype.name.encode() if dtype.name in STATE_DTYPES else b""
