"""Copies of a model's state while the model trains.

Note [The copy]
    Small states are copied on the loop in one section, others on the executor. There the modification counters of the Tensors are compared before
    and after: if one moved, a step has run meanwhile and the copy is made again; after `MOST_COPIES` tries it is made on the loop. On the loop
    other tasks get their turn between the copy, its digest and the look at its numbers, which are the longest parts (``make bench ARGS=serving``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError
from aiograd.nn.module import Module
from aiograd.running.digest import state_digest
from aiograd.serving.versions import Array, Precision, Version, all_finite, check_fits, snapshot
from aiograd.tensors.core import TensorCore, host_array

#: bytes of a state that is copied and hashed on the event loop
ON_LOOP_BYTES = 1 << 19
#: copies on the executor before the copy is made on the loop
MOST_COPIES = 5


async def copy_of_state(
    model: Module, state: Mapping[str, Any] | None, base: Version | None, precision: Precision
) -> tuple[dict[str, Array], str, bool]:
    """Read-only copies of a state, or of the model's if it is None, in the order of the model's; unchanged arrays are the arrays of `base`.

    Returns the arrays by path, their digest, and True if they are finite. Raises `ArgumentError` for other paths, shapes or dtypes than the model's.
    """

    def copy(tensors: Mapping[str, Any]) -> tuple[dict[str, Array], str, bool]:
        arrays = snapshot(_arrays(tensors), base, precision)
        if base is not None and _is_state_of(base, arrays):
            return arrays, base.digest, base.is_finite
        return arrays, state_digest(arrays), all_finite(arrays, base)

    for _ in range(MOST_COPIES):
        own = model.state_dict()
        tensors = own if state is None else {path: state[path] for path in check_fits(_arrays(state), _arrays(own))}
        if sum(array.nbytes for array in _arrays(own).values()) <= ON_LOOP_BYTES:
            break
        counters = _counters(tensors)
        found = await current_engine().offload(lambda tensors=tensors: copy(tensors))  # type: ignore[misc]
        if counters == _counters(tensors):
            return found  # type: ignore[no-any-return]
    arrays = snapshot(_arrays(tensors), base, precision)
    if base is not None and _is_state_of(base, arrays):
        return arrays, base.digest, base.is_finite
    await asyncio.sleep(0)
    digest = state_digest(arrays)
    await asyncio.sleep(0)
    return arrays, digest, all_finite(arrays, base)


def _is_state_of(version: Version, arrays: Mapping[str, Array]) -> bool:
    return all(version.state.get(path) is array for path, array in arrays.items())


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(f"publish: expected the state as Tensors or arrays by path, found {type(tensors).__name__}")
    return {path: host_array(tensor) if isinstance(tensor, TensorCore) else np.asarray(tensor) for path, tensor in tensors.items()}


def _counters(tensors: Mapping[str, Any]) -> list[int]:
    return [tensor.version for tensor in tensors.values() if isinstance(tensor, TensorCore)]
