"""Streams of parameters: a state, names and arrays of any size, on its way between workers in as many messages as it takes.

A state is a dict of values, or of dicts of values as optimizers have for each parameter. `split` cuts it into chunks that fit into messages, `join`
makes it whole again. An object is read with `fetch`, a request that derives from `StateRequest`, which its worker answers with
`ParameterStreams.send`; it is loaded with `store`, whose last request its worker ends with `ParameterStreams.finish`.

Note [One moment]
    A state that is read is copied in one go, before its first chunk is sent; one that is loaded is gathered until it is complete, and loaded in one
    go. The copied or gathered chunks of an abandoned stream are dropped when the other side says so or is lost, or when there are `OPEN` newer
    streams of the same object.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from aiograd.coordination.malformed import malformed
from aiograd.distributed.messages.library import (
    EndTransfer,
    LoadOptimizer,
    PutChunks,
    ReadMore,
    StateChunk,
    StateChunks,
    StatePart,
    StateRequest,
    ask_library,
)
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits, check_number
from aiograd.errors import ArgumentTypeError, DistributedError, LimitError
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make

#: streams of one object that are under way at most
OPEN = 2
#: bytes allowed for the description of each value in a message: name, type, shape, alignment
EACH = 512


class Capacity(NamedTuple):
    """The room in a message; or the room that values take."""

    tensors: int
    #: bytes that are not elements of Tensors
    head: int
    #: bytes, elements included
    size: int

    @classmethod
    def of(cls, limits: Limits) -> Capacity:
        """The room for chunks in a message of a worker with these limits; a little is left for the other fields."""
        return cls(limits.tensors, max(limits.head_bytes - 8 * EACH, 2 * EACH), max(limits.message_bytes - 8 * EACH, 4 * EACH))

    def plus(self, other: Capacity) -> Capacity:
        """Both together."""
        return Capacity(*(one + another for one, another in zip(self, other, strict=True)))

    def holds(self, other: Capacity) -> bool:
        """True if `other` fits into this capacity."""
        return all(limit >= taken for limit, taken in zip(self, other, strict=True))


# ---------------------------------------------------------------- chunks


def split(state: Mapping[Any, Any], capacity: Capacity) -> Iterator[list[StateChunk]]:
    """Cut a state into chunks.

    Args:
        state: the values, or dicts of values; the Tensors stay as they are meanwhile.
        capacity: of a message.

    Yields:
        The chunks of one message each, unless a single value that is no Tensor does not fit. At least one list, which may be empty.
    """
    part: list[StateChunk] = []
    taken = nothing = Capacity(0, 0, 0)
    for chunk in _chunks(state, capacity.size - EACH):
        more = measure(chunk.value)
        if part and not capacity.holds(taken.plus(more)):
            yield part
            part, taken = [], nothing
        part.append(chunk)
        taken = taken.plus(more)
    yield part


def _chunks(state: Mapping[Any, Any], most: int, *outer: Any) -> Iterator[StateChunk]:
    for name, value in state.items():
        path = (*outer, name)
        if isinstance(value, np.ndarray | np.generic):
            value = make(np.asarray(value))
        if value.__class__ is dict and value and not outer:
            yield from _chunks(value, most, name)
        elif not isinstance(value, TensorCore) or _bytes(value) <= most or not isinstance(value._data, np.ndarray):
            yield StateChunk(path, None, value)
        else:
            flat = value._data.reshape(-1)
            step = max(1, most // flat.itemsize)
            for start in range(0, flat.size, step):
                yield StateChunk(path, tuple(value.shape), make(flat[start : start + step]))


def measure(value: Any) -> Capacity:
    """An upper bound on the room that a value takes in a message."""
    if isinstance(value, TensorCore):
        return Capacity(1, EACH, EACH + _bytes(value))
    capacity = Capacity(0, EACH, EACH)
    if isinstance(value, (str, bytes)):
        return capacity.plus(Capacity(0, 4 * len(value), 4 * len(value)))
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        capacity = capacity.plus(measure(each))
    return capacity


def _bytes(tensor: TensorCore) -> int:
    return int(tensor._data.size) * np.dtype(tensor.dtype).itemsize


def join(chunks: Iterable[StateChunk]) -> dict[Any, Any]:
    """Make a state whole.

    Args:
        chunks: all of them, in order.

    Returns:
        The values, or dicts of values, by name.

    Raises:
        ProtocolError: they do not fit together.
    """
    state: dict[Any, Any] = {}
    elements: list[Array] = []
    first, missing = None, 0
    for chunk in chunks:
        value = chunk.value
        if missing == 0 and chunk.shape is not None:
            first, missing, elements = chunk, math.prod(chunk.shape), []
        if first is not None:
            array = value._data if isinstance(value, TensorCore) else None
            if array is None or array.ndim != 1 or not 0 < array.size <= missing or (chunk.path, chunk.shape) != (first.path, first.shape):
                raise malformed(StateChunk.form, f"a chunk of {chunk.path}", f"1 to {missing} elements of {first.path}", "value")
            if value.dtype != first.value.dtype:
                raise malformed(StateChunk.form, f"of dtype {value.dtype}", f"dtype {first.value.dtype} of the chunks before", "value")
            elements.append(array)
            missing -= int(array.size)
            if missing:
                continue
            value, first = make(np.concatenate(elements).reshape(first.shape)), None
        *outer, name = chunk.path
        inner = state.setdefault(outer[0], {}) if outer else state
        if inner.__class__ is not dict:
            raise malformed(StateChunk.form, f"{chunk.path} beside a value of {outer[0]!r}", "one of the two", "path")
        inner[name] = value
    if first is not None:
        raise malformed(StateChunk.form, "the last one", f"{missing} more elements of {first.path}", "value")
    return state


# ---------------------------------------------------------------- the side that has the object


class _OpenStream(NamedTuple):
    #: of the reference to the object
    key: bytes
    #: the chunks of messages still to be sent, or received so far
    parts: deque[list[StateChunk]]
    #: bytes of received chunks
    size: int = 0


class ParameterStreams:
    """The streams that are under way with the objects of one worker. The side that begins one draws a number for it, 16 bytes.

    Args:
        limits: the worker's own.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: oldest first
        self._open: dict[tuple[PeerIdentity, bytes], _OpenStream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def send(self, caller: PeerIdentity, request: StateRequest, head: Any, state: Mapping[Any, Any]) -> StatePart:
        """Begin to send a state.

        Args:
            caller: the reader.
            request: its request.
            head: the values beside the state.
            state: copies of the values by name, or dicts of them.

        Returns:
            The answer, with the first chunks.
        """
        capacity = Capacity(*map(min, Capacity.of(self._limits), request.capacity))
        return self._next(caller, request.number, _OpenStream(request.ref.key, deque(split(state, capacity))), head)

    async def more(self, caller: PeerIdentity, message: ReadMore) -> StatePart:
        """Serve a `ReadMore`."""
        return self._next(caller, message.number, self._take(caller, message.ref, message.number))

    def _next(self, caller: PeerIdentity, number: bytes, stream: _OpenStream, head: Any = None) -> StatePart:
        chunks = stream.parts.popleft()
        if stream.parts:
            self._keep(caller, number, stream)
        return StatePart(chunks, bool(stream.parts), head)

    def put(self, caller: PeerIdentity, message: PutChunks) -> bool:
        """Serve a `PutChunks`."""
        stream = _OpenStream(message.ref.key, deque()) if message.is_first else self._take(caller, message.ref, message.number)
        stream = stream._replace(size=stream.size + sum(EACH + measure(chunk.value).size for chunk in message.chunks))
        if sum(other.size for other in self._open.values()) + stream.size > self._limits.bytes_total:
            raise LimitError(f"a state in several messages: more than {self._limits.bytes_total} bytes, which is the limit (Limits.bytes_total)")
        stream.parts.append(message.chunks)
        self._keep(caller, message.number, stream)
        return True

    def finish(self, caller: PeerIdentity, message: StateChunks) -> dict[Any, Any]:
        """The state of which these are the last chunks."""
        parts = deque[list[StateChunk]]() if message.is_first else self._take(caller, message.ref, message.number).parts
        return join(chunk for part in (*parts, message.chunks) for chunk in part)

    async def end(self, caller: PeerIdentity, message: EndTransfer) -> bool:
        """Serve an `EndTransfer`."""
        self._take(caller, message.ref, message.number)
        return True

    def _take(self, caller: PeerIdentity, ref: RemoteRef, number: bytes) -> _OpenStream:
        stream = self._open.get((caller, number))
        if stream is None or stream.key != ref.key:
            raise DistributedError("a state in several messages: there is no such transfer, or it has been dropped; begin again")
        del self._open[caller, number]
        return stream

    def _keep(self, caller: PeerIdentity, number: bytes, stream: _OpenStream) -> None:
        same = [each for each, other in self._open.items() if other.key == stream.key]
        for each in same[: max(0, len(same) + 1 - OPEN)]:
            del self._open[each]
        self._open[caller, number] = stream

    def forget(self, identity: PeerIdentity) -> None:
        """End the streams of a worker that is lost."""
        self._open = {each: stream for each, stream in self._open.items() if each[0] != tuple(identity)}

    def drop(self, key: bytes) -> None:
        """End the streams of an object that is deleted."""
        self._open = {each: stream for each, stream in self._open.items() if stream.key != key}

    def clear(self) -> None:
        """End all."""
        self._open.clear()


# ---------------------------------------------------------------- the other side


def checked_state(state: Any) -> None:
    """Raise unless this is a dict, as states of modules are.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"load_state_dict: expected a dict of Tensors or arrays by name, found {type(state).__name__}")


async def fetch(worker: Any, ref: RemoteRef, request: type[StateRequest], timeout: float | None) -> tuple[Any, dict[Any, Any]]:
    """Read a state; cancelling changes nothing.

    Args:
        worker: this worker.
        ref: the object.
        request: the class of the request.
        timeout: seconds for all of it; None: the worker's default for each message.

    Returns:
        The values beside the state, and the state: values by name, or dicts of them; Tensors for arrays.
    """
    left, number = _clock(worker, timeout), worker._core.entropy(16)
    async with _ended(worker, ref, number):
        part: StatePart = await ask_library(worker, ref.owner, request(ref, number, (*Capacity.of(worker.limits),)), left())
        head, chunks = part.head, part.chunks
        while part.is_more:
            part = await ask_library(worker, ref.owner, ReadMore(ref, number), left())
            chunks += part.chunks
    return head, join(chunks)


async def store(worker: Any, ref: RemoteRef, request: type[StateChunks], state: Mapping[Any, Any], timeout: float | None, *head: Any) -> None:
    """Load a state. Cancelled, or where the answer is lost, it may have been loaded.

    Args:
        worker: this worker.
        ref: the object.
        request: the class of the last request.
        state: values by name, or dicts of them: arrays, Tensors and plain values.
        timeout: as for `fetch`.
        head: the values beside the state.
    """
    left, number = _clock(worker, timeout), worker._core.entropy(16)
    *parts, last = split(state, Capacity.of(worker.limits))
    async with _ended(worker, ref, number) if parts else contextlib.nullcontext():
        for n, part in enumerate(parts):
            await ask_library(worker, ref.owner, PutChunks(ref, number, n == 0, part), left())
        await ask_library(worker, ref.owner, request(ref, number, not parts, last, *head), left())


async def store_optimizer(worker: Any, ref: RemoteRef, state: Mapping[str, Any], timeout: float | None) -> None:
    """Load the state of an optimizer, as `store` loads others.

    Args:
        worker, ref, timeout: as of `store`.
        state: as ``state_dict`` gives it; numbers of parameters may be texts.
    """
    head = {"taken": 0, "groups": [dict(group) for group in state["param_groups"]]}
    await store(worker, ref, LoadOptimizer, {int(number): each for number, each in state["state"].items()}, timeout, head)


@contextlib.asynccontextmanager
async def _ended(worker: Any, ref: RemoteRef, number: bytes) -> Any:
    """Tell the other side of a stream if it fails here."""
    try:
        yield
    except BaseException:
        worker._core.spawn(_end(worker, ref, number), "stream")
        raise


async def _end(worker: Any, ref: RemoteRef, number: bytes) -> None:
    with contextlib.suppress(DistributedError):  # it has ended, or the other side is out of reach and will notice
        await ask_library(worker, ref.owner, EndTransfer(ref, number), None)


def _clock(worker: Any, timeout: float | None) -> Callable[[], float | None]:
    """Returns the seconds that are left of a timeout, call by call."""
    if timeout is None:
        return lambda: None
    check_number("timeout", timeout, worker.limits.max_deadline, "Limits.max_deadline")
    now = asyncio.get_running_loop().time
    until = now() + timeout
    return lambda: min(max(until - now(), 1e-3), timeout)  # rounding may leave more than all of it
