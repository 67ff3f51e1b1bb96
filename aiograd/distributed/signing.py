"""Signatures of plain HTTP requests and responses: who asks, who answers, and that neither was altered or is repeated. Sans-IO.

::

    Authorization: AIOGRAD1 kid=K, sender=S, ts=T, nonce=N, mac=M         the request; T in milliseconds since 1970
    Authentication-Info: AIOGRAD1 nonce=N, mac=M                          the response; N is the request's

The MAC of a request covers its direction, method, path with query, key id, sender, receiver, time, nonce and a hash of its body; that of
a response covers the request's MAC, hence all of that, and status and body. The receiver does not travel: each side puts in its own name,
so a request to one worker fails at another. Time is passed in, as seconds since 1970 by the caller's clock.

Note [Replay]
    A request is taken once. Its nonce is remembered for as long as its time is within `Limits.clock_skew`; when `Limits.nonces` of them
    are remembered, further requests are refused (`Overloaded`), since to forget one would let it be repeated. Only who has a key fills the
    memory. If the clock jumps ahead and back, what was forgotten in between stays refused: nothing older than the oldest time ever
    forgotten is taken.

Note [One refusal]
    None, wrong, expired, foreign, altered and repeated: one error with one text, to be answered by one status and body. The text names
    the clock among what may be wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from aiograd.distributed.keyring import Key, Keyring, check_name
from aiograd.distributed.limits import Limits
from aiograd.distributed.transport import Buffer
from aiograd.errors import ArgumentError, AuthenticationError, Overloaded

SCHEME = "AIOGRAD1"
NONCE_BYTES = 16

#: what the headers look like; their length is bounded by this
_REQUEST = re.compile(
    SCHEME + r" kid=([A-Za-z0-9._-]{1,128}), sender=([A-Za-z0-9._-]{1,128}), ts=([0-9]{1,15}), nonce=([0-9a-f]{32}), mac=([0-9a-f]{64})", re.ASCII
)
_RESPONSE = re.compile(SCHEME + r" nonce=([0-9a-f]{32}), mac=([0-9a-f]{64})", re.ASCII)
_LENGTH = struct.Struct("<I")
#: stands in for the key where a kid is unknown, to take the same time
_NOBODY = Key("nobody", bytes(32), "nobody")


class SignedRequest(NamedTuple):
    """A request as it was signed; the asker keeps it to verify the response, the receiver to sign it."""

    key: Key
    sender: str
    receiver: str
    nonce: bytes
    mac: bytes
    #: value of the Authorization header
    authorization: str


def sign_request(
    key: Key, *, sender: str, receiver: str, method: str, path: str, body: Buffer, now: float, entropy: Callable[[int], bytes]
) -> SignedRequest:
    """Sign a request.

    Args:
        key: whose principal asks.
        sender, receiver: names of the two workers.
        method: as it is sent.
        path: as it is sent, with the query if there is one.
        body: empty where there is none.
        now: seconds since 1970.
        entropy: gives unguessable bytes.

    Raises:
        ArgumentError: a name, `now` or the entropy cannot be used.
    """
    check_name("name of the sender", sender)
    check_name("name of the receiver", receiver)
    nonce = entropy(NONCE_BYTES)
    if len(nonce) != NONCE_BYTES:
        raise ArgumentError(f"drawing {NONCE_BYTES} random bytes: the transport's entropy gave {len(nonce)}")
    milliseconds = int(now * 1000)
    if not 0 <= milliseconds < 10**15:
        raise ArgumentError(f"signing a request at {now} seconds since 1970: expected a clock between 1970 and the year 33658")
    mac = _request_mac(key, method, path, key.kid, sender, receiver, milliseconds, nonce, body)
    header = f"{SCHEME} kid={key.kid}, sender={sender}, ts={milliseconds}, nonce={nonce.hex()}, mac={mac.hex()}"
    return SignedRequest(key, sender, receiver, nonce, mac, header)


class RequestVerifier:
    """Verifies the requests to one worker, and remembers their nonces, see Note [Replay].

    Args:
        name: of this worker.
        keyring: the keys that are accepted.
        limits: `clock_skew` and `nonces`.
    """

    __slots__ = ("_keyring", "_limits", "_name", "_forgotten", "_nonces", "_remembered")

    def __init__(self, name: str, keyring: Keyring, limits: Limits) -> None:
        self._name = check_name("name of the worker", name)
        self._keyring = keyring
        self._limits = limits
        #: nonces by the second of their request, so that a second is forgotten at once
        self._nonces: dict[int, set[bytes]] = {}
        self._remembered = 0
        #: requests of this second and before have been forgotten
        self._forgotten = -1

    @property
    def remembered(self) -> int:
        """Nonces that are remembered."""
        return self._remembered

    def verify(self, authorization: str | None, *, method: str, path: str, body: Buffer, now: float) -> SignedRequest:
        """Who sent this request: `key.principal` and `sender` of the result.

        Args:
            authorization: value of the header; None where there is none.
            method, path, body: as they were received.
            now: seconds since 1970.

        Raises:
            AuthenticationError: it proves nothing, or is too old, too new or repeated; see Note [One refusal].
            Overloaded: there is no room for its nonce.
        """
        header = authorization or ""
        match = _REQUEST.fullmatch(header)
        if match is None:
            raise self._refused()
        kid, sender, ts, nonce_digits, mac_digits = match.groups()
        nonce, milliseconds = bytes.fromhex(nonce_digits), int(ts)
        key = self._keyring.find(kid)
        mac = _request_mac(key or _NOBODY, method, path, kid, sender, self._name, milliseconds, nonce, body)
        if not hmac.compare_digest(mac, bytes.fromhex(mac_digits)) or key is None:
            raise self._refused()
        self._forget(now)
        second = milliseconds // 1000
        if not abs(now - milliseconds / 1000) <= self._limits.clock_skew or second <= self._forgotten:
            raise self._refused()
        nonces = self._nonces.get(second)
        if nonces is not None and nonce in nonces:
            raise self._refused()
        if self._remembered >= self._limits.nonces:
            raise Overloaded(
                f"verifying a request to worker {self._name!r}: {self._remembered} requests of the last moments are remembered, as many as "
                "Limits.nonces allows; try again later",
                retry_after=self._limits.clock_skew,
            )
        self._nonces.setdefault(second, set()).add(nonce)
        self._remembered += 1
        return SignedRequest(key, sender, self._name, nonce, mac, header)

    def _forget(self, now: float) -> None:
        """Drop what is too old to be taken again."""
        expired = int(now - self._limits.clock_skew) - 1  # this second is over, and so is each before it
        if expired > self._forgotten:
            self._forgotten = expired
            for second in [second for second in self._nonces if second <= expired]:
                self._remembered -= len(self._nonces.pop(second))

    def _refused(self) -> AuthenticationError:
        return AuthenticationError(
            f"verifying a request to worker {self._name!r}: expected an {SCHEME} Authorization header, made with a key of this worker, for it "
            f"and this request, once, by a clock within {self._limits.clock_skew:g} s of this worker's; check the secrets and the clocks of both"
        )


def sign_response(request: SignedRequest, *, status: int, body: Buffer) -> str:
    """The value of the Authentication-Info header of the response to a verified request."""
    return f"{SCHEME} nonce={request.nonce.hex()}, mac={_response_mac(request, status, body).hex()}"


def verify_response(request: SignedRequest, authentication_info: str | None, *, status: int, body: Buffer) -> None:
    """Check that the response to a request comes from whom it was sent to, and is its response.

    Args:
        request: as it was signed.
        authentication_info: value of the header; None where there is none.
        status, body: as they were received.

    Raises:
        AuthenticationError: it does not.
    """
    match = _RESPONSE.fullmatch(authentication_info or "")
    if match is not None:
        nonce, mac = (bytes.fromhex(digits) for digits in match.groups())
        if hmac.compare_digest(nonce, request.nonce) & hmac.compare_digest(mac, _response_mac(request, status, body)):
            return
    raise AuthenticationError(
        f"verifying the response of worker {request.receiver!r}: it is not signed for this request; expected an {SCHEME} Authentication-Info header "
        "made with the same key; check that both workers have the same secret"
    )


def _request_mac(key: Key, method: str, path: str, kid: str, sender: str, receiver: str, milliseconds: int, nonce: bytes, body: Buffer) -> bytes:
    fields = [field.encode("utf-8", "surrogatepass") for field in (method, path, kid, sender, receiver, str(milliseconds))]
    return _mac(key, b"http request", [*fields, nonce, hashlib.sha256(body).digest()])


def _response_mac(request: SignedRequest, status: int, body: Buffer) -> bytes:
    return _mac(request.key, b"http response", [request.mac, request.nonce, str(status).encode(), hashlib.sha256(body).digest()])


def _mac(key: Key, purpose: bytes, fields: list[bytes]) -> bytes:
    """A MAC over fields that cannot run into each other, since each goes with its length."""
    return hmac.digest(key.derive(purpose), b"".join(_LENGTH.pack(len(field)) + field for field in fields), "sha256")
