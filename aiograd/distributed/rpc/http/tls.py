"""TLS: the default context for dialling peers, and the errors for its failures.

Note [Made once]
    Making a context reads the certificate authorities of the system, which takes tens of milliseconds: if each of thirty workers did so at their
    first call, together, their peers would miss their heartbeats. So it is made once per process, on first use, on a thread.

Note [Certificates of TLS 1.3]
    The dialling side has completed its part of the handshake before the peer checks its certificate, and event loops close the connection for a
    refused certificate without giving the reason. So the dialling side only sees a connection that is closed before its first request is answered.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading

from aiograd.distributed.rpc.http.addresses import PeerAddress
from aiograd.distributed.rpc.http.sockets import readable
from aiograd.errors import AddressError, CertificateError, DistributedError

#: the first byte of a TLS connection
HANDSHAKE = b"\x16"
#: the answer of a listener with TLS to a client that does not speak TLS
TLS_WANTED = b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: TLS/1.3\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
#: OpenSSL's codes for a certificate for another host name, and for another address
_MISMATCHES = (62, 64)
#: OpenSSL's reasons for data that is no TLS
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")

_lock = threading.Lock()
_context: ssl.SSLContext | None = None


async def default_context() -> ssl.SSLContext:
    """The context for peers where none was given: the authorities of the system, TLS 1.3. See Note [Made once]. Cancelling abandons the wait."""
    return await asyncio.to_thread(make_context) if _context is None else _context


def make_context() -> ssl.SSLContext:
    """The same, in a thread that may wait for it."""
    global _context
    with _lock:
        if _context is None:
            made = ssl.create_default_context()
            made.minimum_version = ssl.TLSVersion.TLSv1_3
            _context = made
        return _context


def explain(peer: PeerAddress, error: ssl.SSLError) -> DistributedError | None:
    """The error of the dialling side for a failed TLS handshake; None if trying again may help."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _MISMATCHES:
            advice = f"its certificate is not for {peer.host!r} ({error.verify_message}). Use a name of it in the URL, or issue it for this name"
        else:
            advice = (
                f"its certificate is not trusted here ({error.verify_message}). Pass client_ssl= a context that trusts its authority: "
                "ssl.create_default_context(cafile=...)"
            )
        return CertificateError(f"connecting to {peer.url}: {advice}")
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError | ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return None
    if "CERT" in reason or "UNKNOWN_CA" in reason:
        return CertificateError(f"connecting to {peer.url}: it refuses the certificate of this worker, or wants one ({reason}). {_ADVICE}")
    if reason in _NO_TLS:
        return AddressError(f"connecting to {peer.url}: what answers there does not speak TLS. If that is the worker, use http:// in its URL")
    return AddressError(f"connecting to {peer.url}: TLS cannot be agreed on ({reason or error}); expected TLS 1.3 on both sides")


_ADVICE = "Pass client_ssl= a context with a certificate (load_cert_chain) that its authority has issued"


def unanswered(peer: PeerAddress) -> DistributedError:
    """The error for a TLS connection that was closed before an answer, see Note [Certificates of TLS 1.3]."""
    return CertificateError(
        f"connecting to {peer.url}: it hung up after the TLS handshake without an answer, as workers do that want a certificate of who dials and "
        f"get none that they trust. {_ADVICE}; its log says more",
        is_certain=False,
    )


async def speaks_tls(connection: socket.socket) -> bool:
    """Wait for the first byte on a connection, leave it there, and tell whether it begins TLS. Cancelling stops the wait.

    Raises:
        OSError: the connection is broken.
    """
    await readable(connection)
    return connection.recv(1, socket.MSG_PEEK) == HANDSHAKE
