"""Handshake: two workers prove to each other that they hold a common key, and agree on fresh keys for one connection. Sans-IO.

::

    dialler                                   answerer
       |  hello:  versions, kid, names, nonce,    |
       |          ephemeral key, session | MAC    |
       | ---------------------------------------> |   MAC, receiver and versions are checked first
       |  answer: versions, names, nonce,         |
       |          ephemeral key, session | MAC    |
       | <--------------------------------------- |
       |  finish: MAC                             |
       | ---------------------------------------> |   only now is the dialler proven and may have effects
       |                                          |
       |   records, one AES-256-GCM key each way  |

Note [What protects what]
    The *hello* has a MAC under the pre-shared key, so a stranger costs one MAC and no curve arithmetic; it can be replayed, which gains an
    answer that is of no use: the *finish* needs the ephemeral secret. Answer and finish have MACs under keys derived from both the
    pre-shared key and the Diffie-Hellman secret, over a hash of everything said before: a replayed answer fails by the dialler's nonce, a
    replayed finish by the answerer's, a lowered version or a swapped kid by the transcript. Each message has its own type and its own key,
    so none passes for another when reflected; names of sender and receiver are part of it, so a hello to one worker is no hello to another
    with the same key, nor to its own sender. Recorded traffic stays closed when the pre-shared key leaks later (the ephemeral keys are gone).

    A name is as good as the key: whoever has the key of a principal may use any name under it. Where workers of one principal do not trust
    each other, mutual TLS ties names to certificates: pass `certified_names`.

Note [One refusal]
    Wrong key, unknown kid, wrong name, altered, replayed, oversized or foreign bytes: one error with one text, and not a byte in return,
    so that trying tells nothing. An unknown kid costs the same MAC as a wrong key. Only to a peer whose hello is authentic do we say that
    the versions do not fit. Malformed content under a right MAC is a fault in the peer, hence a `ProtocolError` that may say what is wrong.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Set
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aiograd.distributed.cipher import Open, Seal
from aiograd.distributed.frame import HEADER, PROTOCOL_VERSIONS
from aiograd.distributed.handshake_messages import (
    ID_BYTES,
    NONCE_BYTES,
    RESUME,
    Body,
    ConnectionKeys,
    Message,
    MessageType,
    derive_keys,
    early_mac,
    envelope,
    finish_message,
    split,
    transcript_of,
)
from aiograd.distributed.identity import Identity
from aiograd.distributed.keyring import NAME, Key, Keyring, check_name
from aiograd.distributed.limits import Limits
from aiograd.distributed.transport import Buffer
from aiograd.errors import ArgumentError, AuthenticationError, NameTakenError, ProtocolError, VersionMismatch

#: shorter frames than this are not worth their headers; a peer that asks for them has a fault
MIN_FRAME_BYTES = 64
#: stands in for the key where a kid is unknown, to take the same time
_NOBODY = Key("nobody", bytes(32), "nobody")


class Secured(NamedTuple):
    """What a handshake leads to."""

    peer: Identity
    #: 16 bytes, the same on both sides
    session: bytes
    #: whether `session` is the one that the dialler asked to resume
    resumed: bool
    seal: Seal
    open: Open
    #: the longest frame that both sides take, not counting its header
    frame_bytes: int
    #: the version of the protocol in force
    version: int


def taken(name: str, peer: str) -> NameTakenError:
    """What a worker is told whose name another has."""
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
        name, incarnation: who this worker is; the incarnation is 16 bytes.
        key: the key to prove, whose principal the connection belongs to.
        peer_name: who is expected to answer.
        session: 16 bytes, a session with that peer to go on with; None: a new one.
        entropy: gives unguessable bytes.
        limits: `frame_bytes` is what this side takes.
        certified_names: the names in the peer's verified certificate; None: there is none.
        versions: lowest and highest version of the protocol that is spoken here.

    Raises:
        ArgumentError: a name or an id cannot be used, or `peer_name` is the worker's own.
    """

    __slots__ = ("_certified", "_frame_bytes", "_hello", "_key", "_name", "_peer_name", "_private", "_result", "_session", "_versions")

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
        private = X25519PrivateKey.from_private_bytes(_draw(entropy, 32))
        self._private: X25519PrivateKey | None = private
        body = Body(
            version=0,
            flags=0 if session is None else RESUME,
            frame_bytes=self._frame_bytes,
            nonce=_draw(entropy, NONCE_BYTES),
            ephemeral=private.public_key().public_bytes_raw(),
            incarnation=_id("incarnation", incarnation),
            session=bytes(ID_BYTES) if session is None else _id("session", session),
        )
        hello = envelope(MessageType.HELLO, versions, key.kid, name, peer_name) + body.pack()
        self._hello = hello + early_mac(key, MessageType.HELLO, hello)

    def hello(self) -> bytes:
        """The first message."""
        return self._hello

    def receive(self, message: Buffer) -> bytes:
        """Check the answer; returns the finish message.

        Raises:
            AuthenticationError: the answer proves nothing.
            VersionMismatch: the peer has authentically said that it speaks no version of ours. NameTakenError: that another has this worker's name.
            ProtocolError: the answer is authentic and makes no sense.
        """
        private, self._private = self._private, None  # one attempt: an ephemeral key is used once
        answer = split(message)
        if private is None or answer is None or answer.sender != self._peer_name.encode() or answer.receiver != self._name.encode():
            raise refused()
        if self._certified is not None and self._peer_name not in self._certified:
            raise refused()
        if answer.type == MessageType.REFUSAL:
            expected = early_mac(self._key, MessageType.REFUSAL, hashlib.sha256(self._hello).digest() + answer.authentic)
            if not hmac.compare_digest(answer.mac, expected):
                raise refused()
            if _common(self._versions, answer.versions) is not None:
                raise taken(self._name, self._peer_name)
            raise _mismatch(self._name, self._versions, self._peer_name, answer.versions)
        return self._receive_answer(answer, private)

    def _receive_answer(self, answer: Message, private: X25519PrivateKey) -> bytes:
        body = answer.body()
        if answer.type != MessageType.ANSWER or body is None:
            raise refused()
        transcript = transcript_of(self._hello, answer.authentic)
        keys = _keys(self._key, private, body, transcript)
        if not hmac.compare_digest(answer.mac, hmac.digest(keys.answer, transcript, "sha256")):
            raise refused()
        version = _common(self._versions, answer.versions)
        if version is None or body.version != version:
            raise ProtocolError(f"answer of worker {self._peer_name!r}: it chose version {body.version}, not {version}", code="handshake_version")
        resumed = bool(body.flags & RESUME)
        if resumed and body.session != self._session:
            raise ProtocolError(f"answer of worker {self._peer_name!r}: it resumes a session that was not asked for", code="handshake_session")
        frame_bytes = _agree(self._frame_bytes, body, self._peer_name)
        self._result = Secured(
            Identity(self._peer_name, body.incarnation, self._key.principal),
            body.session,
            resumed,
            Seal(*keys.from_dialler, frame_bytes + HEADER.size),
            Open(*keys.from_answerer, frame_bytes + HEADER.size),
            frame_bytes,
            version,
        )
        return finish_message(keys, transcript)

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self._result is not None

    @property
    def result(self) -> Secured:
        """What was agreed on. The peer is proven; it cannot know that we are until it has the finish message.

        Raises:
            ProtocolError: the handshake is not complete.
        """
        return _completed(self._result)


class Answerer:
    """The side that accepted the connection. `receive` the hello, send what it returns, `receive` the finish; then `result` is there.

    Args:
        name, incarnation: who this worker is; the incarnation is 16 bytes.
        keyring: the keys that are accepted.
        entropy: gives unguessable bytes.
        limits: `frame_bytes` is what this side takes.
        resume: whether there is a session of this id with this peer to go on with. Must change nothing: the hello may be a replay, and the
            peer is proven only when `result` is there.
        new_session: makes the id of a session that is not resumed, 16 bytes; None: drawn from `entropy`.
        is_taken: whether another worker has the name of this one; such a peer is refused, and told so.
        certified_names, versions: as for `Dialler`.

    Raises:
        ArgumentError: the name or the incarnation cannot be used.
    """

    __slots__ = (
        "refusal",
        "_certified", "_entropy", "_frame_bytes", "_incarnation", "_is_taken", "_keyring", "_name", "_new_session", "_resume", "_versions",
        "_expected_finish", "_pending", "_result", "_spent",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        keyring: Keyring,
        entropy: Callable[[int], bytes],
        limits: Limits,
        resume: Callable[[Identity, bytes], bool],
        new_session: Callable[[], bytes] | None = None,
        *,
        is_taken: Callable[[Identity], bool] = lambda peer: False,
        certified_names: Set[str] | None = None,
        versions: tuple[int, int] = PROTOCOL_VERSIONS,
    ) -> None:
        #: set when `receive` raised VersionMismatch or NameTakenError: to be sent before closing, so that the peer learns why
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
        self._expected_finish = b""
        self._spent = False
        self._pending: Secured | None = None
        self._result: Secured | None = None

    def receive(self, message: Buffer) -> bytes | None:
        """Check the hello and return the answer; then check the finish and return None.

        Raises:
            AuthenticationError: the message proves nothing; close without a word.
            VersionMismatch, NameTakenError: the hello is authentic, but there is no common version, or another has the name; send `refusal` and
                close.
            ProtocolError: the message is authentic and makes no sense.
        """
        if not self._spent:
            self._spent = True
            return self._receive_hello(message)
        pending, self._pending = self._pending, None  # an error leaves nothing to go on with
        if pending is None or len(message) != len(self._expected_finish) or not hmac.compare_digest(bytes(message), self._expected_finish):
            raise refused()
        self._result = pending
        return None

    def _receive_hello(self, message: Buffer) -> bytes:
        hello = split(message)
        if hello is None or hello.type != MessageType.HELLO:
            raise refused()
        key = self._keyring.find(hello.kid.decode("latin-1"))
        proven = hmac.compare_digest(hello.mac, early_mac(key or _NOBODY, MessageType.HELLO, hello.authentic))
        sender = hello.sender.decode("latin-1")
        if key is None or not proven or hello.receiver != self._name.encode() or sender == self._name or NAME.fullmatch(sender) is None:
            raise refused()
        if self._certified is not None and sender not in self._certified:
            raise refused()
        version = _common(self._versions, hello.versions)
        body = hello.body()
        is_taken = body is not None and self._is_taken(Identity(sender, body.incarnation, key.principal))
        if version is None or is_taken:
            refusal = envelope(MessageType.REFUSAL, self._versions, key.kid, self._name, sender)
            self.refusal = refusal + early_mac(key, MessageType.REFUSAL, hashlib.sha256(message).digest() + refusal)
            raise _mismatch(self._name, self._versions, sender, hello.versions) if version is None else taken(sender, self._name)
        if body is None:
            raise ProtocolError(f"hello of worker {sender!r}: {len(hello.rest)} bytes after the names are too few or too many", code="handshake_size")
        return self._answer(bytes(message), body, key, sender, version)

    def _answer(self, hello: bytes, theirs: Body, key: Key, sender: str, version: int) -> bytes:
        frame_bytes = _agree(self._frame_bytes, theirs, sender)
        peer = Identity(sender, theirs.incarnation, key.principal)
        resumed = bool(theirs.flags & RESUME) and self._resume(peer, theirs.session)
        if resumed:
            session = theirs.session
        else:
            session = _draw(self._entropy, ID_BYTES) if self._new_session is None else _id("session", self._new_session())
        private = X25519PrivateKey.from_private_bytes(_draw(self._entropy, 32))
        ours = Body(
            version=version,
            flags=RESUME if resumed else 0,
            frame_bytes=self._frame_bytes,
            nonce=_draw(self._entropy, NONCE_BYTES),
            ephemeral=private.public_key().public_bytes_raw(),
            incarnation=self._incarnation,
            session=session,
        )
        answer = envelope(MessageType.ANSWER, self._versions, key.kid, self._name, sender) + ours.pack()
        transcript = transcript_of(hello, answer)
        keys = _keys(key, private, theirs, transcript)
        self._expected_finish = finish_message(keys, transcript)
        self._pending = Secured(
            peer,
            session,
            resumed,
            Seal(*keys.from_answerer, frame_bytes + HEADER.size),
            Open(*keys.from_dialler, frame_bytes + HEADER.size),
            frame_bytes,
            version,
        )
        return answer + hmac.digest(keys.answer, transcript, "sha256")

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self._result is not None

    @property
    def result(self) -> Secured:
        """What was agreed on, with a peer that is proven.

        Raises:
            ProtocolError: the handshake is not complete.
        """
        return _completed(self._result)


def _agree(ours: int, theirs: Body, peer: str) -> int:
    """The longest frame that both take.

    Raises:
        ProtocolError: what the peer says cannot be worked with.
    """
    if theirs.flags & ~RESUME:
        raise ProtocolError(f"handshake of worker {peer!r}: flags {theirs.flags:#x}, expected none but {RESUME:#x}", code="handshake_flags")
    if theirs.frame_bytes < MIN_FRAME_BYTES:
        raise ProtocolError(
            f"handshake of worker {peer!r}: it takes frames of at most {theirs.frame_bytes} bytes, expected {MIN_FRAME_BYTES} or more; raise its "
            "Limits.frame_bytes",
            code="handshake_frame_bytes",
        )
    return min(ours, theirs.frame_bytes)


def _keys(key: Key, private: X25519PrivateKey, theirs: Body, transcript: bytes) -> ConnectionKeys:
    try:
        return derive_keys(key, private, theirs.ephemeral, transcript)
    except ValueError:
        raise refused() from None


def _common(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """The highest version that both speak."""
    highest = min(ours[1], theirs[1])
    return highest if highest >= max(ours[0], theirs[0]) else None


def _mismatch(name: str, ours: tuple[int, int], peer: str, theirs: tuple[int, int]) -> VersionMismatch:
    return VersionMismatch(
        f"handshake with worker {peer!r}: it speaks versions {theirs[0]} to {theirs[1]} of the protocol, this worker ({name!r}) versions "
        f"{ours[0]} to {ours[1]}; upgrade the older one",
        code="version",
    )


def _frame_bytes(limits: Limits) -> int:
    return min(limits.frame_bytes, 0xFFFF_FFFF)


def _id(what: str, value: bytes) -> bytes:
    if len(value) != ID_BYTES:
        raise ArgumentError(f"{what}: expected {ID_BYTES} bytes, got {len(value)}")
    return bytes(value)


def _draw(entropy: Callable[[int], bytes], count: int) -> bytes:
    drawn = entropy(count)
    if len(drawn) != count:  # packing would fill up with zeros, which anybody can guess
        raise ArgumentError(f"drawing {count} random bytes: the transport's entropy gave {len(drawn)}")
    return drawn


def _completed(result: Secured | None) -> Secured:
    if result is None:
        raise ProtocolError("reading the result of a handshake that is not complete; check `done` first", code="handshake_incomplete")
    return result
