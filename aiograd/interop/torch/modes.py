"""Modes of torch that belong to a thread: grad mode, inference mode and autocast. See `aiograd.running.foreign_modes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from aiograd.interop.extras import from_extra
from aiograd.running.foreign_modes import Enter

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")

#: the kinds of devices that aiograd shares with torch
_KINDS = ("cpu", "cuda")


def noted_modes() -> Enter | None:
    """The modes in which the running thread is.

    Returns:
        A function that enters them in another thread, or None where every thread begins with these modes.
    """
    records, infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocasts = [
        {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "cache_enabled": torch.is_autocast_cache_enabled()}
        for kind in _KINDS
        if torch.is_autocast_enabled(kind)
    ]
    if records and not infers and not autocasts:
        return None

    @contextmanager
    def entered() -> Iterator[Any]:
        with ExitStack() as stack:
            if infers:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(records))
            for options in autocasts:
                stack.enter_context(torch.autocast(**options))
            yield

    return entered
