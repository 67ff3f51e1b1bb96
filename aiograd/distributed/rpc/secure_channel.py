"""SecureChannel: a channel after its handshake. Frames go in and come out in the clear; what crosses the channel is sealed.

The two ways to get one are `dial`, a coroutine that connects and runs the dialling side of the handshake, and `ServerHandshake`, which runs the
answering side from the channel's callbacks. A stranger that connects costs a `ServerHandshake` and a timer, no task.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from aiograd.distributed.rpc.cipher import LARGE, Place
from aiograd.distributed.rpc.frame_age import FrameAge, clock
from aiograd.distributed.rpc.frames import HEADER, MAGIC
from aiograd.distributed.rpc.handshake import Answerer, Dialler, Secured
from aiograd.distributed.rpc.pacing import LONGEST, PING, PING_FORM, PONG, FramePacer
from aiograd.distributed.rpc.shared.lane import SharedLane
from aiograd.distributed.rpc.shared.ring import MARK
from aiograd.distributed.rpc.transport import Buffer, Channel, Transport, unanswered_text
from aiograd.errors import AuthenticationError, DistributedError, ProtocolError

#: the longest time that a record holds, ms
LONGEST_MS = 0xFFFF_FFFF
#: seconds in which a peer may read why it is refused, before the channel is closed
PARTING = 0.5


class HandshakeError(AuthenticationError):
    """The peer hung up or kept silent during the handshake. It says nothing on the wire of why, so neither can this."""


class SecureChannel:
    """One authenticated, encrypted connection to a peer.

    Args:
        channel: a channel with a complete handshake.
        secured: the result of the handshake.
        round_trip: seconds that the handshake's message took to be answered.
        answered: True on the dialled side. Its clock begins with its answer, the dialler's clock with the end of the handshake.

    Attributes:
        epoch: when this side's clock began of which frames tell, seconds.
        peer_epoch: when that message came which the peer sent as its clock began.
        frame_bytes: bytes after the header of the next frame, at most; see Note [Slow links] in `pacing`.
        has_room: the channel's last answer: False while not even control frames should be sent.
    """

    __slots__ = (
        "channel", "secured", "round_trip", "epoch", "peer_epoch", "frame_bytes", "has_room",
        "_loop", "_pacer", "_lane", "_seal", "_open", "_on_frame", "_place", "_on_closed", "_on_writable", "_early", "_is_closed", "_why",
        "_is_stopped", "_age", "_next_at", "_timer",
    )  # fmt: skip

    def __init__(self, channel: Channel, secured: Secured, round_trip: float, *, answered: bool = False) -> None:
        self.channel: Channel = channel
        self.secured: Secured = secured
        self.round_trip: float = round_trip
        self._loop = asyncio.get_running_loop()
        self.peer_epoch: float = self._loop.time()
        self.epoch: float = self.peer_epoch - round_trip if answered else self.peer_epoch
        self._pacer = FramePacer(secured.frame_bytes, self.peer_epoch)
        #: the ages of the peer's pings
        self._age = FrameAge(self.peer_epoch, self.peer_epoch)
        self.frame_bytes: int = self._pacer.frame_bytes
        self.has_room: bool = True
        #: True if the sender waits for `on_writable`
        self._is_stopped = False
        #: when the next frame may follow over a busy link, and the timer of it
        self._next_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._seal = secured.seal.seal
        self._open = secured.open.open_in_place
        #: the shared memory of this connection, once it may be needed
        self._lane = None if channel.shared_memory is None else self._make_lane()
        self._on_frame: Callable[[Buffer, memoryview | None], None] | None = None
        self._place: Place = _nowhere
        self._on_closed: Callable[[BaseException | None], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._early: list[Buffer] = []
        self._is_closed = False
        self._why: BaseException | None = None
        channel.pace(self.frame_bytes)
        channel.attach(self._receive, self._closed, self._writable)

    @property
    def heard_at(self) -> float:
        """See `Channel.heard_at`."""
        return self.channel.heard_at

    def start(
        self,
        on_frame: Callable[[Buffer, memoryview | None], None],
        on_closed: Callable[[BaseException | None], None],
        on_writable: Callable[[], None],
        place: Place,
    ) -> None:
        """Set the callbacks.

        Args:
            on_frame: called with each frame: a small one whole and None, a large one as its header and its body (which is not to be kept where it is
                read-only). It may raise a
                `DistributedError`; the channel is closed with it.
            on_closed: called exactly once.
            on_writable: called after `send` returned False.
            place: called with the header of a large frame for a place for its body; see Note [Heads and bodies] in `cipher`.
        """
        self._on_frame, self._on_closed, self._on_writable, self._place = on_frame, on_closed, on_writable, place
        early, self._early = self._early, []
        for record in early:
            self._receive(record)
        if self._is_closed:
            self._report()

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Queue one frame, given in pieces; `flush` follows. False: stop until `on_writable`."""
        lane = self._lane
        if lane is not None:
            if lane.put(parts):
                self.frame_bytes = self.secured.frame_bytes  # memory is no slow link
                self._is_stopped = lane.is_full
                return not self._is_stopped
            lane.flush()
        self._write(parts, more=True)
        self._is_stopped = self._pacer.is_full or not self.has_room
        if self._pacer.rate:
            self._pace(sum(map(len, parts)))
        return not self._is_stopped

    def _pace(self, size: int) -> None:
        """Stop until the next frame may follow one of `size` bytes; see Note [Paced frames] in `pacing`."""
        now = self._loop.time()
        self._next_at = self._pacer.next_at(size, now)
        if self._next_at > now and not self._is_closed:
            self._is_stopped = True
            self._forget_timer()
            self._timer = self._loop.call_at(self._next_at, self._paced)

    def _paced(self) -> None:
        self._next_at = -math.inf  # a timer may be early, by the resolution of the clock
        self._go_on()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def flush(self) -> None:
        """Send what `send` has queued here."""
        if self._lane is not None:
            self._lane.flush()
        self.channel.flush()

    def _make_lane(self) -> SharedLane:
        return SharedLane(self.channel.shared_memory, self.secured.frame_bytes, self._write_record, self._go_on, self.close)

    def _write_record(self, record: bytes) -> None:
        self._write((record,))

    def _write(self, parts: Sequence[Buffer], more: bool = False) -> None:
        size = self._put(parts, more)
        if self._pacer.sent(size) or (size >= LARGE and self._loop.time() >= self._pacer.ping_due):
            self._ping(more)

    def _put(self, parts: Sequence[Buffer], more: bool) -> int:
        """Seal a record and let the channel take it; returns its bytes, 0 where the channel is closed for it."""
        try:
            record = self._seal(parts)
            self.has_room = self.channel.send(record, more)
        except (DistributedError, MemoryError) as error:  # the key has protected enough, or there is no memory: over the next connection, then
            self.has_room = False
            self.close(error)
            return 0
        return len(record)

    def _ping(self, more: bool = False) -> None:
        now = self._loop.time()
        self._pacer.pinged(self._put((PING_FORM.pack(PING, clock(now, self.epoch)),), more), now)

    def _timed(self, record: bytes) -> None:
        """Take a ping of the peer, or its answer to one."""
        now = self._loop.time()
        kind, milliseconds = PING_FORM.unpack(record)
        if kind == PING:
            waited = min(int(1000 * self._age.of(milliseconds, now)), LONGEST_MS)
            self._write((PING_FORM.pack(PONG, waited),))
            self._go_on()
            return
        pacer = self._pacer
        asks_again = pacer.ponged(milliseconds / 1000, now)
        if asks_again is None:
            raise ProtocolError("found an answer to a ping that was not sent; the peer does not follow the protocol", code="pong")
        if self.frame_bytes != pacer.frame_bytes and (self._lane is None or not self._lane.is_open):
            self.frame_bytes = pacer.frame_bytes
            self.channel.pace(self.frame_bytes)
        if asks_again:
            self._ping()
        if pacer.rate and self._next_at > now + LONGEST:
            self._pace(0)  # by what the answer tells of the rate
        self._go_on()

    def close(self, why: BaseException | None = None) -> None:
        """Close the channel; `on_closed` gets `why`. Idempotent."""
        if not self._is_closed:
            self._why = self._why or why
            self.channel.close()

    def _receive(self, record: Buffer) -> None:
        if self._is_closed or self._why is not None:
            return
        if self._on_frame is None:
            self._early.append(bytes(record))  # the channel may use its memory again
            return
        try:
            frame, body = self._open(record, HEADER.size, self._place)
            if body is not None or frame.startswith(MAGIC):
                self._on_frame(frame, body)
            elif frame[:4] in (PING, PONG) and len(frame) == PING_FORM.size:
                self._timed(frame)
            elif frame.startswith(MARK):
                if self._lane is None:
                    self._lane = self._make_lane()
                for header, shared in self._lane.receive(frame):
                    self._on_frame(header, shared)
                    if self._is_closed or self._why is not None:
                        return
            else:
                self._on_frame(frame, None)  # which refuses it
        except (DistributedError, MemoryError) as error:  # the frame comes again over the next connection
            self.close(error)
        except Exception as error:  # a fault of ours must not take the transport down with it, nor go unseen
            self._loop.call_exception_handler({"message": "receiving a frame failed", "exception": error})
            self.close(error)

    def _closed(self, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._forget_timer()
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        self._why = self._why or error
        if self._on_closed is not None:
            self._report()

    def _report(self) -> None:
        on_closed, self._on_closed = self._on_closed, None
        self._on_writable = None
        if on_closed is not None:
            on_closed(self._why)

    def _writable(self) -> None:
        self.has_room = True
        self._go_on()

    def _go_on(self) -> None:
        """Call `on_writable` if the sender was asked to stop, and nothing stands in its way any more."""
        if self._pacer.rate and self._next_at > self._loop.time():
            return
        if self._is_stopped and self._on_writable is not None and self.has_room and not self._pacer.is_full:
            if self._lane is None or not self._lane.is_full:
                self._is_stopped = False
                self._on_writable()


async def dial(transport: Transport, url: str, prepare: Callable[[Channel], Dialler], peer: str, seconds: float) -> SecureChannel:
    """Connect to `url` and prove the identities of both sides.

    Cancelling it closes the channel.

    Args:
        prepare: makes the dialling side of the handshake for a channel.
        peer: the name of the worker expected there, for errors.
        seconds: for all of it.

    Raises:
        ConnectionRefusedError: no process listens there.
        OSError, TimeoutError: it cannot be reached now.
        HandshakeError: it hung up before the handshake was complete.
        AuthenticationError, ProtocolError: its messages do not prove that it is `peer`.
    """
    try:
        async with asyncio.timeout(seconds):
            channel = await transport.connect(url, seconds)
            try:
                return await ClientHandshake(channel, prepare(channel), f"{peer!r} at {url}").result
            except BaseException:
                channel.close()
                raise
    except TimeoutError as error:
        raise error if str(error) else TimeoutError(unanswered_text(url, seconds)) from None


class ClientHandshake:
    """The dialling side of a handshake on one channel."""

    __slots__ = ("result", "_channel", "_dialler", "_whom", "_begun")

    def __init__(self, channel: Channel, dialler: Dialler, whom: str) -> None:
        self._channel = channel
        self._dialler = dialler
        self._whom = whom
        self.result: asyncio.Future[SecureChannel] = asyncio.get_running_loop().create_future()
        self._begun = self.result.get_loop().time()
        channel.attach(self._receive, self._closed, _nothing)
        channel.send(dialler.hello())

    def _receive(self, frame: bytes | memoryview) -> None:
        if self.result.done():
            return
        try:
            finish = self._dialler.receive(frame)
        except DistributedError as error:
            self.result.set_exception(error)
            return
        self._channel.send(finish)
        self.result.set_result(SecureChannel(self._channel, self._dialler.result, self.result.get_loop().time() - self._begun))

    def _closed(self, error: BaseException | None) -> None:
        if self.result.done():
            return
        if isinstance(error, OSError):
            self.result.set_exception(error)
        else:
            self.result.set_exception(
                HandshakeError(
                    f"{self._whom} hung up during the handshake: it may not have the same secret under the same key id (compare AIOGRAD_SECRET_FILE, "
                    "AIOGRAD_SECRET or secret= of both), may be a worker of another name, or may be closing; its log says which"
                )
            )


class ServerHandshake:
    """The answering side of a handshake on one channel.

    Args:
        channel: just accepted.
        answerer: fresh.
        seconds: for the whole handshake, after which the channel is closed.
        done: called exactly once, with the channel, or with None and the reason.
    """

    __slots__ = ("_channel", "_answerer", "_done", "_loop", "_timer", "_answered_at")

    def __init__(
        self,
        channel: Channel,
        answerer: Answerer,
        seconds: float,
        done: Callable[[ServerHandshake, SecureChannel | None, BaseException | None], None],
    ) -> None:
        self._channel = channel
        self._answerer = answerer
        self._done: Callable[[ServerHandshake, SecureChannel | None, BaseException | None], None] | None = done
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._late)
        self._answered_at = 0.0
        channel.attach(self._receive, self._closed, _nothing)

    @property
    def remote(self) -> str:
        """Where the peer is."""
        return self._channel.remote

    @property
    def is_done(self) -> bool:
        """True if the handshake has ended."""
        return self._done is None

    def close(self) -> None:
        """Give up; `done` is called with None."""
        self._end(None, None)

    def _receive(self, frame: bytes | memoryview) -> None:
        if self._done is None:
            return
        try:
            answer = self._answerer.receive(frame)
        except DistributedError as error:
            self._end(None, error, self._answerer.refusal)
            return
        if answer is not None:
            self._answered_at = self._loop.time()
            self._channel.send(answer)
        else:
            self._end(SecureChannel(self._channel, self._answerer.result, self._loop.time() - self._answered_at, answered=True), None)

    def _closed(self, error: BaseException | None) -> None:
        self._end(None, error)

    def _late(self) -> None:
        self._end(None, HandshakeError("the handshake was not completed in time"))

    def _end(self, channel: SecureChannel | None, why: BaseException | None, refusal: bytes | None = None) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._timer.cancel()
        if refusal is not None:
            self._channel.send(refusal)
            self._loop.call_later(PARTING, self._channel.close)  # closing at once might lose it
        elif channel is None:
            self._channel.close()
        done(self, channel, why)


def _nowhere(head: Buffer) -> None:
    """No frame has come yet."""


def _nothing() -> None:
    """Handshake messages are few and short; so there is no waiting for room."""
