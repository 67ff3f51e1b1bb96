"""GradientBuckets: parameters in buckets, with one reduction of gradients for each. Pure.

Note [Order of buckets]
    Backward reaches the last layers first, so buckets are filled from the last parameter to the first: the first bucket is complete early, and
    travels while the gradients of earlier layers are computed. Nothing but the order of the parameters decides, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.running.types import Array, Shape

#: bytes above which no further parameter is put into a bucket
BUCKET_BYTES = 4 << 20


class ParameterSpec(NamedTuple):
    """Shape and dtype of a parameter."""

    shape: Shape
    dtype: np.dtype


class Bucket:
    """The gradients of some parameters in one pass.

    They travel with one flag for each, which tells a parameter that no rank has used from a parameter with gradients of zeros.

    Args:
        indices: of the parameters, in the order in which they stand in the bucket.
        specs: of all parameters.
        addends: gradients of each parameter, which are not added up here.
    """

    __slots__ = ("indices", "missing", "_specs", "_grads")

    def __init__(self, indices: tuple[int, ...], specs: Sequence[ParameterSpec], addends: int = 1) -> None:
        self.indices = indices
        #: how many gradients are still to come
        self.missing = len(indices)
        self._specs = specs
        #: by parameter
        self._grads: list[dict[int, Array]] = [{} for _ in range(addends)]

    def put(self, index: int, *grads: Array | None) -> None:
        """Take the gradients of a parameter; None: there is none."""
        self.missing -= 1
        for place, grad in enumerate(grads):
            if grad is not None:
                self._grads[place][index] = grad

    def taken(self) -> list[dict[int, Array]]:
        """Take out the gradients that were put here; returns them by parameter, the first of each, then the second, and so on."""
        grads, self._grads = self._grads, []
        return grads

    def arrays(self, marks: Sequence[bool] = ()) -> list[list[Array]]:
        """The arrays to be reduced, a list for each addend: gradients, and flags.

        Where there is no gradient it is -0.0, which changes no sum, not even the sign of a zero.

        Args:
            marks: further flags at the end.
        """
        lists = []
        for grads in self.taken():
            flags = np.array([*(index in grads for index in self.indices), *marks], self._specs[self.indices[0]].dtype)
            lists.append([*(grads[index] if index in grads else nothing(*self._specs[index]) for index in self.indices), flags])
        return lists

    def split(self, arrays: Sequence[Array]) -> tuple[dict[int, Array | None], list[float]]:
        """The reduced gradients by parameter, None where no rank had one; and the reduced marks."""
        *grads, flags = arrays
        used = flags.real.tolist()
        found = {index: grad if flag else None for index, grad, flag in zip(self.indices, grads, used, strict=False)}
        return found, used[len(self.indices) :]


def nothing(shape: Shape, dtype: np.dtype) -> Array:
    """The contribution of a rank without a gradient: negative zeros, which leave every sum as it is, to the bit."""
    return np.negative(np.zeros(shape, dtype))


class GradientBuckets:
    """Parameters in buckets. See Note [Order of buckets].

    Args:
        specs: of the parameters, in the order in which forward uses them, more or less.
        bucket_bytes: a bucket is complete when it has so many bytes; a parameter is never divided.

    Raises:
        ArgumentError: no such number of bytes, or no parameters.
    """

    def __init__(self, specs: Sequence[ParameterSpec], bucket_bytes: int = BUCKET_BYTES) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ArgumentError(f"bucket_bytes={bucket_bytes!r}: expected a number of bytes of at least 1")
        if not specs:
            raise ArgumentError("there are no parameters that require grad, so there is nothing to reduce")
        self.specs = list(specs)
        #: the parameters of each bucket, and the bucket of each parameter
        self.indices: list[tuple[int, ...]] = []
        self.bucket_of: dict[int, int] = {}
        filling: list[int] = []
        size = 0
        for index in reversed(range(len(self.specs))):
            shape, dtype = self.specs[index]
            filling.append(index)
            size += int(np.prod(shape)) * dtype.itemsize
            if size >= bucket_bytes or not index:
                self.bucket_of |= dict.fromkeys(filling, len(self.indices))
                self.indices.append(tuple(filling))
                filling, size = [], 0

    def empty(self, addends: int = 1) -> list[Bucket]:
        """Buckets for one pass, with so many gradients of each parameter."""
        return [Bucket(indices, self.specs, addends) for indices in self.indices]
