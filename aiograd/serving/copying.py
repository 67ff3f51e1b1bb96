"""Copies of a model's state while the model trains.

Note [The copy]
    Small states are copied on the loop, with a turn for other tasks after each `TURN_BYTES` and around the digest, others on the executor. So are
    digests of more than `TURN_BYTES`, which let other threads run. The modification counters of the Tensors are compared before and after: if one
    moved, a step has run meanwhile and the copy is made again; after `MOST_COPIES` tries it is made in one section. The look at the numbers comes
    right after the copy, while they are in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError
from aiograd.nn.module import Module
from aiograd.running.digest import state_digest
from aiograd.serving.versions import Array, Precision, Version, all_finite, check_fits, copies, snapshot
from aiograd.tensors.core import TensorCore, host_array

#: bytes of a state that is copied on the event loop, and bytes that are copied there between two turns of other tasks, or hashed
ON_LOOP_BYTES, TURN_BYTES = 1 << 19, 1 << 16
#: copies that a step may spoil before one is made in one section
MOST_COPIES = 5


async def copy_of_state(
    model: Module, state: Mapping[str, Any] | None, base: Version | None, precision: Precision
) -> tuple[dict[str, Array], str, bool]:
    """Read-only copies of a state, or of the model's if it is None, in the order of the model's; unchanged arrays are the arrays of `base`.

    Returns the arrays by path, their digest, and True if they are finite. Raises `ArgumentError` for other paths, shapes or dtypes than the model's.
    """
    tensors: Mapping[str, Any] = {}

    def copy() -> tuple[dict[str, Array], str, bool]:
        arrays = snapshot(_arrays(tensors), base, precision)
        if base is not None and _is_state_of(base, arrays):
            return arrays, base.digest, base.is_finite
        return arrays, state_digest(arrays), all_finite(arrays, base)

    for _ in range(MOST_COPIES):
        own = model.state_dict()
        own_arrays = _arrays(own)
        if base is not None:
            check_fits(own_arrays, base.state)
        tensors = own if state is None else {path: state[path] for path in check_fits(_arrays(state), own_arrays)}
        counters = _counters(tensors)
        if sum([array.nbytes for array in own_arrays.values()]) > ON_LOOP_BYTES:
            found = await current_engine().offload(copy)
            if counters == _counters(tensors):
                return found  # type: ignore[no-any-return]
            continue
        arrays, is_finite, copied = dict[str, Array](), True, 0
        for path, array in copies(_arrays(tensors), base, precision):
            arrays[path] = array
            is_finite = is_finite and all_finite({path: array}, base)
            copied += array.nbytes
            if copied >= TURN_BYTES and len(counters) == len(tensors):  # arrays have no counters
                copied = 0
                await asyncio.sleep(0)
        if counters == _counters(tensors):
            if base is not None and _is_state_of(base, arrays):
                return arrays, base.digest, base.is_finite
            if sum([array.nbytes for array in arrays.values()]) > TURN_BYTES:
                return arrays, await current_engine().offload(partial(state_digest, arrays)), is_finite
            await asyncio.sleep(0)
            digest = state_digest(arrays)
            await asyncio.sleep(0)
            return arrays, digest, is_finite
    return copy()


def _is_state_of(version: Version, arrays: Mapping[str, Array]) -> bool:
    return all(version.state.get(path) is array for path, array in arrays.items())


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"publish: expected the state as Tensors or arrays by path, found {type(tensors).__name__}")
    return {path: host_array(tensor) if isinstance(tensor, TensorCore) else np.asarray(tensor) for path, tensor in tensors.items()}


def _counters(tensors: Mapping[str, Any]) -> list[int]:
    return [tensor.version for tensor in tensors.values() if isinstance(tensor, TensorCore)]
