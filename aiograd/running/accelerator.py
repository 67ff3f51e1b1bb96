"""PyTorch's ``torch.accelerator``: CUDA devices, by functions that do not name their kind; ``await ag.accelerator.synchronize()``."""

from __future__ import annotations

from aiograd.cuda import device_count, empty_cache, is_available, synchronize
from aiograd.running.devices import DeviceName

__all__ = ["current_accelerator", "device_count", "empty_cache", "is_available", "synchronize"]


def current_accelerator(check_available: bool = False) -> DeviceName | None:
    """The first CUDA device, ``cuda:0``.

    Args:
        check_available: accepted for PyTorch's sake; a device that is not there is never returned.

    Returns:
        Its name, or None where there is no device that can be used.
    """
    return DeviceName("cuda:0") if is_available() else None
