"""CompressedPass: gradients of one pass on their way through a group of workers as payloads, with the residuals that the compressor leaves.

Note [Sums of payloads]
    A bucket is a row of bytes: for each parameter a flag that tells whether it has a gradient on this rank, further marks, and the payload of each
    parameter, compressed by itself. All ranks gather the rows of all, and each adds up the decoded values by rank, in float64, and rounds the sum or
    mean once to the dtype of the parameter. So the gradients have the same bits on every rank, for any size of buckets.

Note [Residuals of a pass]
    A pass reads the residuals and writes none. The new ones wait in `CompressedPass.residuals` until the pass is committed; a pass that fails, or is
    cancelled, leaves the old ones in place. A parameter without a gradient on any rank keeps its residual; one without a gradient on this rank
    counts as zeros, so its residual travels.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.buckets import GradientBuckets, ParameterSpec
from aiograd.coordination.compression import Compressor
from aiograd.coordination.device_copies import on_host
from aiograd.coordination.reduced_pass import ReducedPass, ReducingGroup
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, ProtocolError
from aiograd.running.types import Array

#: bytes of gradients up to which a bucket is compressed on the loop
INLINE_BYTES = 64 << 10


class CompressedPass(ReducedPass):
    """The gradients of one pass on their way through the group, as payloads. See `ReducedPass`.

    Args:
        group, buckets, op, timeout, marks: as of `ReducedPass`.
        compressor: of the gradients.
        before: the residuals by parameter, which are not written to; None: zeros.

    Attributes:
        residuals: once there are results, the residuals that a commit of the pass puts in the place of `before`.
    """

    def __init__(
        self,
        group: ReducingGroup,
        buckets: GradientBuckets,
        compressor: Compressor,
        before: Sequence[Array | None],
        op: str = "mean",
        timeout: float | None = None,
        marks: Sequence[bool] = (),
    ) -> None:
        super().__init__(group, buckets, op, timeout, marks)
        self._specs = buckets.specs
        self._compressor = compressor
        self._before = before
        self._fresh: dict[int, Array] = {}
        #: by bucket, set when its exchange has begun: exchanges begin in one order on every rank
        self._begun = [asyncio.Event() for _ in self._buckets]
        self.residuals = list(before)

    def _begin(self, number: int) -> Coroutine[Any, Any, Any]:
        return self._exchange(number, *self._buckets[number].taken())

    async def _exchange(self, number: int, grads: dict[int, Array]) -> tuple[dict[int, Array | None], list[float]]:
        grads = {index: await on_host(grad) for index, grad in grads.items()}
        payload = await self._apart(number, functools.partial(self._pack, number, grads))
        if number:
            await self._begun[number - 1].wait()
        gathering = self._group.all_gather(payload, timeout=self._timeout)
        self._begun[number].set()
        reduced: tuple[dict[int, Array | None], list[float]]
        reduced = await self._apart(number, functools.partial(self._add_up, number, await gathering))
        return reduced

    async def _apart(self, number: int, function: Callable[[], Any]) -> Any:
        """The result of a function, on the executor where the bucket is large."""
        specs = [self._specs[index] for index in self._buckets[number].indices]
        is_large = sum(_size(spec) * spec.dtype.itemsize for spec in specs) > INLINE_BYTES
        return await current_engine().offload(function) if is_large else function()

    def _marks_of(self, number: int) -> Sequence[bool]:
        return () if number else self._marks

    def _pack(self, number: int, grads: dict[int, Array]) -> Array:
        """The row of bytes of a bucket; notes the new residuals."""
        indices = self._buckets[number].indices
        flags = np.array([*(index in grads for index in indices), *self._marks_of(number)], np.uint8)
        pieces = [flags]
        for index in indices:
            shape, dtype = self._specs[index]
            values = grads[index] if index in grads else np.zeros(shape, dtype)
            try:
                payload, self._fresh[index] = self._compressor.encode(values, self._before[index])
            except ArgumentError as error:
                raise ArgumentError(f"the gradient of parameter {index}, {dtype}{list(shape)}, on rank {self._group.rank}: {error}") from error
            pieces.append(np.frombuffer(payload, np.uint8))
        return np.concatenate(pieces)

    def _add_up(self, number: int, rows: Sequence[Array]) -> tuple[dict[int, Array | None], list[float]]:
        """The gradients of a bucket, and the combined marks, from the rows of all ranks."""
        indices, marks = self._buckets[number].indices, len(self._marks_of(number))
        sizes = [self._compressor.packed_size(_size(self._specs[index])) for index in indices]
        begins = np.cumsum([len(indices) + marks, *sizes]).tolist()
        for rank, row in enumerate(rows):
            if row.dtype != np.uint8 or row.shape != (begins[-1],) or row[: begins[0]].max(initial=0) > 1:
                raise ProtocolError(
                    f"rank {rank} of group {self._group.name!r} sent {row.dtype}{list(row.shape)} for bucket {number}; expected {begins[-1]} bytes "
                    f"that begin with {begins[0]} flags: members need the same parameters and the same compressor, {self._compressor} on this rank",
                    code="compressor",
                )
        flags: Array = np.sum([row[: begins[0]] for row in rows], axis=0, dtype=np.int64)
        share = len(rows) if self._op == "mean" else 1
        found: dict[int, Array | None] = {}
        for place, index in enumerate(indices):
            if not flags[place]:
                found[index] = None
                continue
            shape, dtype = self._specs[index]
            total = np.zeros(_size(self._specs[index]))
            for row in rows:
                self._compressor.add_decoded(row[begins[place] : begins[place + 1]], total)
            with np.errstate(over="ignore"):
                found[index] = (total / share if share > 1 else total).astype(dtype).reshape(shape)
        return found, (flags[len(indices) :] / share).tolist()

    def _split(self, number: int, result: Any) -> tuple[dict[int, Array | None], list[float]]:
        found, marks = result
        for index, grad in found.items():
            if grad is not None:
                self.residuals[index] = self._fresh[index]
        return found, marks


def _size(spec: ParameterSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64))


def checked_compressor(what: str, name: str, compressor: object) -> Compressor | None:
    """The compressor that a caller gives, or None.

    Args:
        what: the class that takes it.
        name: of the argument.
        compressor: the argument.

    Returns:
        The compressor.

    Raises:
        ArgumentTypeError: it is none.
    """
    if compressor is not None and not isinstance(compressor, Compressor):
        raise ArgumentTypeError(f"{what}({name}={compressor!r}): expected dist.TopK(...), dist.Blockwise(...) or None")
    return compressor


def check_compressible(what: str, compressor: Compressor | None, specs: Iterable[tuple[str, ParameterSpec]]) -> None:
    """Raise unless gradients of all parameters can be compressed.

    Args:
        what: the class that takes the compressor.
        compressor: None: nothing is checked.
        specs: of the parameters, each with a name for it.

    Raises:
        ArgumentTypeError: a parameter has another dtype than float32 and float64.
    """
    for name, spec in specs if compressor is not None else ():
        if spec.dtype not in (np.float32, np.float64):
            raise ArgumentTypeError(f"{what}(compress={compressor}): {name} is {spec.dtype}; every parameter has to be float32 or float64")
