"""Stream and Event: queues of work on a device, and places in them.

Note [The purpose of a stream]
    Work on one stream is done in order; work on several may overlap. Inside ``with stream:`` operations go to the stream, and so does the
    backward work of everything recorded there, even if the pass starts elsewhere. Arrays may be used on any stream: what one made the other waits
    for by itself (`aiograd.cuda.command`, Note [Ordering between streams]), so streams change the time of work, never its results.

Source: PyTorch's Note [Streaming backwards] for where backward work goes.
"""

from __future__ import annotations

from contextvars import Token
from types import TracebackType
from typing import Any, Self

from aiograd.cuda.device import CudaDevice
from aiograd.cuda.stream_state import StreamState
from aiograd.engine.run import loop_is_running
from aiograd.errors import ArgumentError, ModeError, NotReadyError
from aiograd.running import devices


class Event:
    """A place in a stream: done when the device has come to it.

    Args:
        timing: remember when that was; see `elapsed_ms`.

    >>> x = ag.ones(3, device="cuda:0") * 2
    >>> event = ag.cuda.Event().record()
    >>> await event
    >>> event.query()
    True
    """

    __slots__ = ("timing", "_stream_state", "_count", "_handle", "_device")

    def __init__(self, *, timing: bool = False) -> None:
        self.timing: bool = timing
        self._device: CudaDevice | None = None
        self._stream_state: StreamState | None = None
        self._count = 0
        self._handle: Any = None

    def __repr__(self) -> str:
        return f"<Event {'never recorded' if self._stream_state is None else f'on {self._stream_state.name}'}>"

    def record(self, stream: Stream | None = None) -> Self:
        """Put the event behind all present work of a stream (by default the caller's); returns at once.

        Args:
            stream: the stream; None: the caller's.

        Returns:
            The event itself.
        """
        stream = current_stream() if stream is None else stream
        device, stream_state = stream.device_object, stream.stream_state
        self._device, self._stream_state, self._handle = device, None, None

        def job() -> None:
            stream_state.count += 1
            self._count, self._stream_state = stream_state.count, stream_state
            if self.timing:
                self._handle = device.driver.record(stream_state.handle, timing=True)

        device.thread.submit(job)
        return self

    def _place(self) -> tuple[StreamState, int] | None:
        return None if self._stream_state is None else (self._stream_state, self._count)

    def query(self) -> bool:
        """True if the device has come to it (True for one that was never recorded).

        Returns:
            True or False; does not wait.

        Raises:
            DeviceLostError: the device failed.
        """
        if self._device is None:
            return True
        return self._stream_state is not None and self._stream_state.is_done(self._count)

    async def wait(self) -> None:
        """Wait until the device has come to it. Cancelling stops the waiting only.

        Raises:
            DeviceLostError: the device failed.

        >>> await ag.cuda.current_stream().record_event().wait()
        """
        if self._device is not None and not self.query():
            await self._device.thread.wait(self._place)
            self.query()  # raises where the device is lost

    def __await__(self) -> Any:
        return self.wait().__await__()

    def synchronize(self) -> None:
        """Block the thread until the device has come to the event.

        Raises:
            NotReadyError: an event loop is running and it has not come to pass: ``await event``.
        """
        if self.query() or self._device is None:
            return
        if loop_is_running():
            raise NotReadyError("waiting for an event of a device would block the event loop: `await event` instead")
        self._device.thread.block(self._place)
        self.query()  # raises where the device is lost

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds of the device between this event and a later one, both with timing and both done.

        Args:
            end: the later event.

        Returns:
            Milliseconds.

        Raises:
            ArgumentError: one was made without ``timing=True``, was never recorded or is not done.
        """
        for event in (self, end):
            if not event.timing or event._device is None or not event.query():
                raise ArgumentError(f"time between {self} and {end}: both must be made with timing=True, recorded and done; await them first")
        device = self._device
        if device is None:
            return 0.0
        milliseconds: float = device.thread.submit(lambda: device.driver.elapsed_ms(self._handle, end._handle), urgent=True).result()
        return milliseconds


class Stream:
    """A queue of work on a device. ``with Stream():`` sends the operations of the block there.

    Args:
        device: name of the device.
        priority: lower numbers go first where the device has to choose; 0 or −1.

    >>> x = ag.tensor([1.0, 2.0], device="cuda:0")
    >>> with ag.cuda.Stream():
    ...     y = x * x
    >>> (await y).numpy()
    array([1., 4.], dtype=float32)
    """

    __slots__ = ("device_object", "stream_state", "_tokens")

    def __init__(self, device: str = "cuda:0", *, priority: int = 0) -> None:
        self.device_object: CudaDevice = _cuda_device(device)
        self.stream_state: StreamState = self.device_object.new_stream_state(f"stream of {device}", priority)
        self._tokens: list[Token[StreamState | None]] = []

    @classmethod
    def _of(cls, device: CudaDevice, stream_state: StreamState) -> Stream:
        stream = cls.__new__(cls)
        stream.device_object, stream.stream_state, stream._tokens = device, stream_state, []
        return stream

    def __repr__(self) -> str:
        return f"<Stream {self.stream_state.name} on {self.device}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_state is self.stream_state

    def __hash__(self) -> int:
        return hash(self.stream_state)

    @property
    def device(self) -> str:
        """Name of its device."""
        return self.device_object.name

    def __enter__(self) -> Self:
        self._tokens.append(self.device_object.stream_state_of_caller.set(self.stream_state))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.device_object.stream_state_of_caller.reset(self._tokens.pop())
        except (ValueError, IndexError) as cause:
            raise ModeError(f"leaving {self} in another task or context than it was entered in") from cause

    def query(self) -> bool:
        """True if everything asked of it is known to be done.

        Returns:
            True or False; does not wait.

        Raises:
            DeviceLostError: the device failed.
        """
        return self.stream_state.is_idle()

    async def done(self) -> None:
        """Wait until everything asked of it so far is done. Cancelling stops the waiting only.

        Raises:
            DeviceLostError: the device failed.

        >>> with ag.cuda.Stream() as stream:
        ...     y = ag.ones(3, device="cuda:0") + 1
        >>> await stream.done()
        >>> stream.query()
        True
        """
        event = self.record_event()
        await event.wait()
        event.query()

    def synchronize(self) -> None:
        """Block the thread until everything asked of the stream is done.

        Raises:
            NotReadyError: an event loop is running: ``await stream.done()``.
        """
        self.record_event().synchronize()

    def record_event(self, *, timing: bool = False) -> Event:
        """An event behind everything asked of it so far.

        Args:
            timing: the event can measure time, see `Event.elapsed_ms`.

        Returns:
            The event, recorded.
        """
        return Event(timing=timing).record(self)

    def wait_event(self, event: Event) -> None:
        """Make later work on this stream wait for an event; returns at once. Only needed for work that no array connects.

        Args:
            event: the event; one that was never recorded is not waited for.
        """
        device, stream_state = self.device_object, self.stream_state

        def job() -> None:
            place = event._place()
            if place is not None:
                stream_state.follow(*place)

        device.thread.submit(job)

    def wait_stream(self, other: Stream) -> None:
        """Make later work on this stream wait for all present work of another; returns at once.

        Args:
            other: a stream of the same device.
        """
        self.wait_event(other.record_event())


def current_stream(device: str = "cuda:0") -> Stream:
    """The stream that operations of the caller go to.

    Args:
        device: name of the device.

    Returns:
        The stream that the running task has entered, else the device's default one.
    """
    found = _cuda_device(device)
    return Stream._of(found, found.current_stream_state())


def _cuda_device(name: str) -> CudaDevice:
    found = devices.device(name)
    if not isinstance(found, CudaDevice):
        raise ArgumentError(f"a stream of device {name!r}: expected a CUDA device such as 'cuda:0'")
    return found
