"""DLPack: Tensors that share memory with arrays of other libraries, and the other way."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.errors import AiogradError, ArgumentError, ArgumentTypeError
from aiograd.running import devices
from aiograd.tensors.core import make
from aiograd.tensors.plain import plain_array
from aiograd.tensors.tensor import Tensor

#: DLPack's kinds of memory that a CUDA device reads: its own, and managed
_DLPACK_CUDA = (2, 13)


def from_dlpack(x: Any, /, *, device: str | None = None, copy: bool | None = None) -> Tensor:
    """A Tensor that shares memory with any array that supports DLPack, on the host or on a CUDA device.

    Args:
        x: anything with ``__dlpack__`` and ``__dlpack_device__``.
        device: where the Tensor shall be; where `x` is if None.
        copy: True always copies, False raises where a copy would be needed, None copies where `device` is another one.

    Returns:
        A leaf that requires no gradient.

    Raises:
        DeviceError: `x` is on a device that is not available here. ArgumentTypeError: `x` does not support DLPack or refuses to export its
            memory, or numpy has no such dtype (bfloat16). ArgumentError: a copy is needed and forbidden.
    """
    if not hasattr(x, "__dlpack_device__"):
        raise ArgumentTypeError(f"from_dlpack: expected an array that speaks DLPack, found {type(x).__name__}; use tensor() or asarray()")
    shared = _shared(plain_array(x))
    if copy:
        shared = shared.clone()
    if device is None or shared.to(device) is shared:
        return shared
    if copy is False:
        raise ArgumentError(f"from_dlpack(copy=False): from {shared.device} to {device} needs a copy")
    return shared.to(device)


def _shared(x: Any) -> Tensor:
    try:
        kind, ordinal = x.__dlpack_device__()
        if kind not in _DLPACK_CUDA:
            return make(np.from_dlpack(x))  # type: ignore[no-any-return]
        device: Any = devices.device(f"cuda:{ordinal}")
        return make(device.from_dlpack(x))  # type: ignore[no-any-return]
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        if isinstance(error, AiogradError):
            raise
        what = f"{type(x).__name__} of dtype {getattr(x, 'dtype', 'unknown')} cannot be shared: {str(error).rstrip('.')}"
        raise ArgumentTypeError(
            f"from_dlpack: memory of a {what}. Detach it, or cast it to a dtype that numpy has, such as float32, first."
        ) from error
