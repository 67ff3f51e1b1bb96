"""CUDA devices: ``t.to("cuda:0")``, streams, events, memory.

Importing this needs neither numba nor a device; both are looked for when the first device is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

from aiograd.cuda import loading
from aiograd.cuda.discovery import device_count as device_count
from aiograd.cuda.discovery import is_available as is_available
from aiograd.cuda.discovery import why_not as why_not
from aiograd.engine.run import loop_is_running
from aiograd.errors import ArgumentError
from aiograd.running.caller import called
from aiograd.running.devices import device as _device_by_name
from aiograd.running.lazy import on_first_use

if TYPE_CHECKING:
    from aiograd.cuda.stream import Event as Event
    from aiograd.cuda.stream import Stream as Stream
    from aiograd.cuda.stream import current_stream as current_stream
else:  # it needs numba
    __getattr__, __dir__ = on_first_use(__name__, dict.fromkeys(("Stream", "Event", "current_stream"), "stream"), load=loading.load)


def synchronize(device: str | int | None = None) -> Awaitable[None]:
    """Wait until a device has done everything asked of it: ``await ag.cuda.synchronize()``; without a running event loop the call itself blocks.

    Args:
        device: name or number; by default ``cuda:0``.

    Returns:
        An awaitable without a value; it is done already where no loop runs.

    Raises:
        DeviceLostError: the device failed.

    Cancelling stops the waiting; the device goes on.
    """
    found = _device(device)
    return called(_awaited(found, found.finish), "synchronize") if loop_is_running() else _done(found, found.finish)


def empty_cache(device: str | int | None = None) -> Awaitable[None]:
    """Give memory that lies in reserve back to the device, for other programs; waits as `synchronize` does.

    Args:
        device: name or number; by default ``cuda:0``.

    Returns:
        An awaitable without a value; it is done already where no loop runs.

    Cancelling stops the waiting; the memory is given back all the same.
    """
    found = _device(device)
    trim = found.driver.trim
    return called(_awaited(found, trim), "empty_cache") if loop_is_running() else _done(found, trim)


def memory_stats(device: str | int | None = None) -> dict[str, int]:
    """Bytes ``allocated, reserved, peak_allocated, peak_reserved``, and how many ``allocations, frees, out_of_memory`` since the first use.

    Args:
        device: name or number; by default ``cuda:0``.

    Returns:
        The numbers by these names.
    """
    stats: dict[str, int] = _device(device).memory_stats()
    return stats


def statistics(device: str | int | None = None) -> Any:
    """Counts of a device's work so far: commands, copies from and to the host, and operations without a kernel that ran on the host.

    Args:
        device: name or number; by default ``cuda:0``.

    Returns:
        An object with these counts as attributes; ``fallbacks`` has the operations by name.
    """
    return _device(device).statistics()


def _device(device: str | int | None) -> Any:
    name = "cuda:0" if device is None else f"cuda:{device}" if isinstance(device, int) else str(device)
    if name.partition(":")[0] != "cuda":
        raise ArgumentError(f"aiograd.cuda with device {device!r}: expected a CUDA device such as 'cuda:0' or its number")
    return _device_by_name(name)


class _Done:
    """There is nothing to wait for any more."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def _done(device: Any, function: Callable[[], None]) -> Awaitable[None]:
    device.thread.submit(function).result()
    return _Done()


async def _awaited(device: Any, function: Callable[[], None]) -> None:
    future = device.thread.submit(function)
    await device.thread.wait(lambda: None)  # comes behind it
    future.result()
