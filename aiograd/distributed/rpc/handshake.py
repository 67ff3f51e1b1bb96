"""Handshake: two workers prove to each other that they hold a common key, and agree on fresh keys for one connection. Sans-IO.

::

    dialler                                      answerer
       |  hello:  versions, key id, names,          |
       |          Noise message (psk, e): frame     |
       |          size, incarnation, session | MAC  |
       | -----------------------------------------> |   MAC, receiver and versions are checked first
       |  answer: Noise message (e, ee): version,   |
       |          frame size, incarnation, session  |
       | <----------------------------------------- |
       |  finish: a record without a frame          |
       | -----------------------------------------> |   only now is the dialler proven and may have effects
       |                                            |
       |     records, one AES-256-GCM key each way  |

Note [Protection of the handshake]
    Hello and answer carry the two messages of the Noise pattern NNpsk0 (see `noise`), under a key derived from the pre-shared one. The cleartext
    before the first of them is the prologue: the messages can be decrypted only if the two sides agree on versions, key id and
    names, so a hello to one worker is invalid for another with the same key, and for its own sender. The hello has a MAC too, so that a hello of a
    stranger costs one MAC and no curve arithmetic, and workers of every version can check it. A replayed hello gains the attacker only an answer
    that is of no use: the *finish* needs the ephemeral secret. A replayed answer fails by the dialler's ephemeral key, a replayed finish by the
    answerer's, a lowered version or a swapped key id by the prologue. Each message has its own type and each direction its own key, so nothing
    passes for another when reflected. Records stay closed when the pre-shared key leaks later (the ephemeral keys are gone).

    A name is only as trustworthy as the key: a holder of a principal's key may use any name under it. Where workers of one principal do not trust
    each other, mutual TLS ties names to certificates: pass `certified_names`.

Note [One refusal]
    Wrong key, unknown key id, wrong name, altered, replayed, oversized or foreign bytes: one error with one text, and not a byte in return,
    so that attempts reveal nothing. An unknown key id costs the same MAC as a wrong key. Only a peer with an authentic hello is told that the
    versions do not match. Malformed content of an authentic message is a fault of the peer, hence a `ProtocolError` that may name the fault.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Set
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aiograd.distributed.rpc.cipher import Open, Seal
from aiograd.distributed.rpc.frames import HEADER, PROTOCOL_VERSIONS
from aiograd.distributed.rpc.handshake_messages import (
    ID_BYTES,
    RESUME,
    MessageType,
    Payload,
    body_of,
    envelope,
    mac_of,
    open_envelope,
    prefix,
)
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import NAME, NOBODY, Key, Keyring, check_name
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.noise import HandshakeState
from aiograd.distributed.rpc.pulse import SECRET_BYTES, Pulses
from aiograd.distributed.rpc.transport import Buffer
from aiograd.errors import ArgumentError, AuthenticationError, NameTakenError, ProtocolError, VersionMismatch

#: the smallest accepted frame size: shorter frames are not worth their headers, and a peer that asks for them is faulty
MIN_FRAME_BYTES = 64
#: the label under which a handshake derives the secrets of pulses
PULSES = b"aiograd pulses"


class Secured(NamedTuple):
    """The result of a handshake."""

    peer: PeerIdentity
    #: 16 bytes, the same on both sides
    session: bytes
    #: True if `session` is the one that the dialler asked to resume
    resumed: bool
    seal: Seal
    open: Open
    #: the longest frame that both sides accept, not counting its header
    frame_bytes: int
    #: the version of the protocol in force
    version: int
    pulses: Pulses


def taken(name: str, peer: str) -> NameTakenError:
    """The error for a worker with the name of another worker."""
    return NameTakenError(f"worker {peer!r} is connected to another worker named {name!r}: give each worker of a cluster a name of its own")


def refused() -> AuthenticationError:
    """The one error for every failed proof, see Note [One refusal]. Also fit for a peer that closes in the middle of a handshake."""
    return AuthenticationError(
        "handshake between workers: the other side did not prove that it has a key in common with this worker and means this worker; expected the "
        "same secret under the same key id on both (AIOGRAD_SECRET_FILE, AIOGRAD_SECRET or secret=), and each worker to be known by its own name"
    )


class Dialler:
    """The side that opened the connection. `hello` once, then `receive` once; then `result` is there.

    Args:
        name, incarnation: name and incarnation (16 bytes) of this worker.
        key: the key to prove; the connection belongs to its principal.
        peer_name: name of the worker that is expected to answer.
        session: 16 bytes, id of the session with that peer to resume; None: a new one.
        entropy: gives unguessable bytes.
        limits: `frame_bytes` is the longest frame that this side accepts.
        certified_names: the names in the peer's verified certificate; None: there is none.
        versions: lowest and highest version of the protocol that this side supports.

    Raises:
        ArgumentError: a name or an id cannot be used, or `peer_name` is the worker's own.
    """

    __slots__ = ("_certified", "_frame_bytes", "_hello", "_key", "_name", "_noise", "_peer_name", "_result", "_session", "_versions")

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        key: Key,
        peer_name: str,
        session: bytes | None,
        entropy: Callable[[int], bytes],
        limits: Limits,
        *,
        certified_names: Set[str] | None = None,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
    ) -> None:
        self._name = check_name("name of the worker", name)
        self._peer_name = check_name("name of the peer", peer_name)
        if name == peer_name:
            raise ArgumentError(f"dialling {peer_name!r}: this worker has the same name; expected names that differ")
        self._key = key
        self._session = session
        self._frame_bytes = _frame_bytes(limits)
        self._certified = certified_names
        self._versions = versions
        self._result: Secured | None = None
        said = envelope(MessageType.HELLO, versions, key.kid, name, peer_name)
        payload = Payload(
            version=0,
            flags=0 if session is None else RESUME,
            frame_bytes=self._frame_bytes,
            incarnation=_id("incarnation", incarnation),
            session=bytes(ID_BYTES) if session is None else _id("session", session),
        )
        noise = _noise(said, key)
        said += noise.write_message(payload.pack(), _ephemeral(entropy))
        self._noise: HandshakeState | None = noise
        self._hello = said + mac_of(key, MessageType.HELLO, said)

    def hello(self) -> bytes:
        """The first message."""
        return self._hello

    def receive(self, message: Buffer) -> bytes:
        """Check the answer; returns the finish message.

        Raises:
            AuthenticationError: the answer proves nothing.
            VersionMismatch: an authentic refusal: the peer supports no version of ours. NameTakenError: likewise, another has this worker's name.
            ProtocolError: the answer is authentic and malformed.
        """
        noise, self._noise = self._noise, None  # one attempt: an ephemeral key is used once
        if noise is None or (self._certified is not None and self._peer_name not in self._certified):
            raise refused()
        answer = body_of(MessageType.ANSWER, message)
        if answer is None:
            raise self._reason(message)
        theirs = _read(noise, answer, self._peer_name)
        version = theirs.version
        if not self._versions[0] <= version <= self._versions[1]:
            raise ProtocolError(
                f"answer of worker {self._peer_name!r}: it chose version {version}, expected {self._versions[0]} to {self._versions[1]}",
                code="handshake_version",
            )
        resumed = bool(theirs.flags & RESUME)
        if resumed and theirs.session != self._session:
            raise ProtocolError(f"answer of worker {self._peer_name!r}: it resumes a session that was not asked for", code="handshake_session")
        peer = PeerIdentity(self._peer_name, theirs.incarnation, self._key.principal)
        there, back = noise.split()
        frame_bytes = min(self._frame_bytes, theirs.frame_bytes)
        made = Pulses(noise.export(PULSES, SECRET_BYTES), dialled=True)
        self._result = _secured(peer, theirs.session, resumed, there.key, back.key, frame_bytes, version, made)
        return prefix(MessageType.FINISH) + self._result.seal.seal(())

    def _reason(self, message: Buffer) -> AuthenticationError | VersionMismatch | NameTakenError:
        """The error for a message that is no answer: the reason of an authentic refusal, else the one error."""
        refusal = open_envelope(MessageType.REFUSAL, message)
        if refusal is None or not hmac.compare_digest(refusal.mac, _refusal_mac(self._key, self._hello, refusal.envelope + refusal.body)):
            return refused()
        if _common(self._versions, refusal.versions) is not None:
            return taken(self._name, self._peer_name)
        return _mismatch(self._name, self._versions, self._peer_name, refusal.versions)

    @property
    def done(self) -> bool:
        """True if there is a result."""
        return self._result is not None

    @property
    def result(self) -> Secured:
        """The result. The peer is authenticated; this side is authenticated to the peer only when the peer has the finish message.

        Raises:
            ProtocolError: the handshake is not complete.
        """
        return _completed(self._result)


class Answerer:
    """The side that accepted the connection. `receive` the hello, send the returned answer, `receive` the finish; then `result` is there.

    Args:
        name, incarnation: the identity of this worker; the incarnation is 16 bytes.
        keyring: the keys that are accepted.
        entropy: gives unguessable bytes.
        limits: `frame_bytes` is what this side takes.
        resume: returns True if a session of this id with this peer can be resumed. Must have no effects: the hello may be a replay, and the
            peer is authenticated only when there is a `result`.
        new_session: makes the id of a session that is not resumed, 16 bytes; None: drawn from `entropy`.
        is_taken: returns True if another worker has the peer's name; the peer is then refused, and told so.
        certified_names, versions: as for `Dialler`.

    Raises:
        ArgumentError: the name or the incarnation cannot be used.
    """

    __slots__ = (
        "refusal",
        "_certified", "_entropy", "_frame_bytes", "_incarnation", "_is_taken", "_keyring", "_name", "_new_session", "_resume", "_versions",
        "_pending", "_result", "_spent",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        keyring: Keyring,
        entropy: Callable[[int], bytes],
        limits: Limits,
        resume: Callable[[PeerIdentity, bytes], bool],
        new_session: Callable[[], bytes] | None = None,
        *,
        is_taken: Callable[[PeerIdentity], bool] = lambda peer: False,
        certified_names: Set[str] | None = None,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
    ) -> None:
        #: set when `receive` raised VersionMismatch or NameTakenError: the message to send before closing, so that the peer learns the reason
        self.refusal: bytes | None = None
        self._name = check_name("name of the worker", name)
        self._incarnation = _id("incarnation", incarnation)
        self._keyring = keyring
        self._entropy = entropy
        self._frame_bytes = _frame_bytes(limits)
        self._resume = resume
        self._new_session = new_session
        self._is_taken = is_taken
        self._certified = certified_names
        self._versions = versions
        self._spent = False
        self._pending: Secured | None = None
        self._result: Secured | None = None

    def receive(self, message: Buffer) -> bytes | None:
        """Check the hello and return the answer; then check the finish and return None.

        Raises:
            AuthenticationError: the message proves nothing; close without an answer.
            VersionMismatch, NameTakenError: the hello is authentic, but there is no common version, or another has the name; send `refusal` and
                close.
            ProtocolError: the message is authentic and malformed.
        """
        if not self._spent:
            self._spent = True
            return self._receive_hello(message)
        pending, self._pending = self._pending, None  # an error leaves nothing to go on with
        finish = body_of(MessageType.FINISH, message)
        if pending is None or finish is None:
            raise refused()
        try:
            frame = pending.open.open(finish)
        except AuthenticationError:
            raise refused() from None
        if len(frame):
            raise refused()
        self._result = pending
        return None

    def _receive_hello(self, message: Buffer) -> bytes:
        hello = open_envelope(MessageType.HELLO, message)
        if hello is None:
            raise refused()
        key = self._keyring.find(hello.kid.decode("latin-1"))
        proven = hmac.compare_digest(hello.mac, mac_of(key or NOBODY, MessageType.HELLO, hello.envelope + hello.body))
        sender = hello.sender.decode("latin-1")
        if key is None or not proven or hello.receiver != self._name.encode() or sender == self._name or NAME.fullmatch(sender) is None:
            raise refused()
        if self._certified is not None and sender not in self._certified:
            raise refused()
        version = _common(self._versions, hello.versions)
        if version is None:
            self.refusal = self._refuse(key, sender, message)
            raise _mismatch(self._name, self._versions, sender, hello.versions)
        noise = _noise(hello.envelope, key)
        theirs = _read(noise, hello.body, sender)
        peer = PeerIdentity(sender, theirs.incarnation, key.principal)
        if self._is_taken(peer):
            self.refusal = self._refuse(key, sender, message)
            raise taken(sender, self._name)
        return self._answer(noise, theirs, peer, version)

    def _refuse(self, key: Key, sender: str, hello: Buffer) -> bytes:
        text = envelope(MessageType.REFUSAL, self._versions, key.kid, self._name, sender)
        return text + _refusal_mac(key, hello, text)

    def _answer(self, noise: HandshakeState, theirs: Payload, peer: PeerIdentity, version: int) -> bytes:
        resumed = bool(theirs.flags & RESUME) and self._resume(peer, theirs.session)
        if resumed:
            session = theirs.session
        else:
            session = _draw(self._entropy, ID_BYTES) if self._new_session is None else _id("session", self._new_session())
        ours = Payload(version, RESUME if resumed else 0, self._frame_bytes, self._incarnation, session)
        ephemeral = _ephemeral(self._entropy)
        try:
            answer = noise.write_message(ours.pack(), ephemeral)
        except ValueError:  # the hello's ephemeral key makes the secret predictable
            raise refused() from None
        there, back = noise.split()
        frame_bytes = min(self._frame_bytes, theirs.frame_bytes)
        made = Pulses(noise.export(PULSES, SECRET_BYTES), dialled=False)
        self._pending = _secured(peer, session, resumed, back.key, there.key, frame_bytes, version, made)
        return prefix(MessageType.ANSWER) + answer

    @property
    def done(self) -> bool:
        """True if there is a result."""
        return self._result is not None

    @property
    def result(self) -> Secured:
        """The result; the peer is authenticated.

        Raises:
            ProtocolError: the handshake is not complete.
        """
        return _completed(self._result)


def _noise(prologue: bytes, key: Key) -> HandshakeState:
    return HandshakeState(prologue, key.derive(b"handshake Noise_NNpsk0"))


def _read(noise: HandshakeState, message: bytes, peer: str) -> Payload:
    """The payload of the peer's Noise message.

    Raises:
        AuthenticationError: the message proves nothing.
        ProtocolError: the payload is malformed or unacceptable.
    """
    try:
        text = noise.read_message(message)
    except (InvalidTag, ValueError):
        raise refused() from None
    payload = Payload.unpack(text)
    if payload is None:
        raise ProtocolError(f"handshake of worker {peer!r}: {len(text)} bytes of payload are too few or too many", code="handshake_size")
    if payload.flags & ~RESUME:
        raise ProtocolError(f"handshake of worker {peer!r}: flags {payload.flags:#x}, expected none but {RESUME:#x}", code="handshake_flags")
    if payload.frame_bytes < MIN_FRAME_BYTES:
        raise ProtocolError(
            f"handshake of worker {peer!r}: it takes frames of at most {payload.frame_bytes} bytes, expected {MIN_FRAME_BYTES} or more; raise its "
            "Limits.frame_bytes",
            code="handshake_frame_bytes",
        )
    return payload


def _secured(
    peer: PeerIdentity, session: bytes, resumed: bool, sending: bytes, receiving: bytes, frame_bytes: int, version: int, pulses: Pulses
) -> Secured:
    size = frame_bytes + HEADER.size
    return Secured(peer, session, resumed, Seal(sending, size), Open(receiving, size), frame_bytes, version, pulses)


def _refusal_mac(key: Key, hello: Buffer, text: bytes) -> bytes:
    """The MAC of a refusal, valid for one hello only."""
    return mac_of(key, MessageType.REFUSAL, hashlib.sha256(hello).digest() + text)


def _common(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """The highest version that both speak."""
    highest = min(ours[1], theirs[1])
    return highest if highest >= max(ours[0], theirs[0]) else None


def _mismatch(name: str, ours: tuple[int, int], peer: str, theirs: tuple[int, int]) -> VersionMismatch:
    older = name if ours < theirs else peer
    return VersionMismatch(
        f"handshake with worker {peer!r}: it speaks versions {theirs[0]} to {theirs[1]} of the protocol, this worker ({name!r}) versions "
        f"{ours[0]} to {ours[1]}; upgrade aiograd where worker {older!r} runs",
        code="version",
    )


def _frame_bytes(limits: Limits) -> int:
    return min(limits.frame_bytes, 0xFFFF_FFFF)


def _id(what: str, value: bytes) -> bytes:
    if len(value) != ID_BYTES:
        raise ArgumentError(f"{what}: expected {ID_BYTES} bytes, got {len(value)}")
    return bytes(value)


def _ephemeral(entropy: Callable[[int], bytes]) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_draw(entropy, 32))


def _draw(entropy: Callable[[int], bytes], count: int) -> bytes:
    drawn = entropy(count)
    if len(drawn) != count:  # packing would fill up with zeros, which are easy to guess
        raise ArgumentError(f"drawing {count} random bytes: the transport's entropy gave {len(drawn)}")
    return drawn


def _completed(result: Secured | None) -> Secured:
    if result is None:
        raise ProtocolError("reading the result of a handshake that is not complete; check `done` first", code="handshake_incomplete")
    return result
