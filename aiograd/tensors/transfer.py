"""Moving tensors between devices: the row ``to_device``, and indices on the device of the tensor that they index.

Forward copies in one direction, backward in the other, on the thread of the device; so a graph may cross between host and devices any
number of times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.engine.run import loop_is_running
from aiograd.errors import NotReadyError
from aiograd.ops.op import Op, define
from aiograd.running import devices
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore


def _to_device(x: Array, /, device: str, source: str) -> Any:
    """The array on another device; `source` is the device it is on."""
    if source != "cpu":
        ready = getattr(x, "__aiograd_is_ready__", None)
        if ready is not None and not ready() and loop_is_running():
            raise NotReadyError(f"moving a tensor from {source} whose data is still being computed would block the event loop: `await` it first")
        x = devices.device(source).to_host(x)  # type: ignore[union-attr]
    target = devices.device(device)
    return x if target is None else target.from_host(x)


to_device: Op = define(
    "to_device", _to_device, x=lambda g, device, source: to_device(g, device=source, source=device), jvp="forward", complex="explicit", cost=0.5
)


def index_there(tensor: TensorCore, index: Any) -> Any:
    """The index, with integer Tensors on the tensor's device replaced by device arrays: the device indexes with them without waiting."""
    if tensor._data.__class__ is np.ndarray:
        return index
    if isinstance(index, TensorCore):
        return index._data if index.dtype.kind in "iu" and index.device == tensor.device else index
    return tuple(index_there(tensor, part) for part in index) if index.__class__ is tuple else index
