"""The name of the worker at a URL, for callers that hold one of its keys.

Note [Asking for a name]
    The handshake needs the name of the worker that is dialled. A program that has only a URL asks for the name first: ``GET /aiograd/name`` with a
    random number and a MAC of it under a key of its own purpose. All other requests get the status 404. A request that was
    recorded and is sent again learns a name that the recorded answer had in the clear. The answer proves nothing; the handshake that follows does.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import ssl

from aiograd.distributed.rpc.http.addresses import parse_url, resolve
from aiograd.distributed.rpc.http.client import HttpClient
from aiograd.distributed.rpc.http.pages import NAME, Page, PageRequest
from aiograd.distributed.rpc.http.tls import default_context
from aiograd.distributed.rpc.keyring import NOBODY, Key, Keyring, check_name
from aiograd.distributed.rpc.transport import unanswered_text
from aiograd.errors import AuthenticationError

_PURPOSE = b"name of the worker"
#: bytes of the random number, and of the answer that are read
NUMBER_BYTES, MOST_BYTES = 16, 256


class NamePage:
    """Tells a worker's name to callers that hold one of its keys. See Note [Asking for a name].

    Args:
        name: of the worker.
        keyring: its keys.
    """

    def __init__(self, name: str, keyring: Keyring) -> None:
        self._name = name
        self._keyring = keyring

    def answer(self, request: PageRequest) -> Page:
        """See `Pages`."""
        words = request.authorization.split(" ")
        if len(words) == 4 and words[0] == "aiograd" and len(words[2]) == 2 * NUMBER_BYTES:
            key = self._keyring.find(words[1])
            expected = _proof(key or NOBODY, words[2])
            if hmac.compare_digest(words[3].encode("utf-8", "replace"), expected.encode()) and key is not None:
                return Page(200, self._name.encode())
        return Page(404, b"not found\n")


async def name_at(url: str, keyring: Keyring, client_ssl: ssl.SSLContext | None = None, *, timeout: float) -> str:
    """The name of the worker at a URL, as it claims. Cancelling closes the connection.

    Args:
        url: of the worker.
        keyring: its default key is proved.
        client_ssl: for ``https``; the system's authorities by default.
        timeout: seconds for all of it.

    Returns:
        The name.

    Raises:
        ArgumentError: it is no URL.
        AuthenticationError: the worker has no such key, is older than this route, or gives no name.
        AddressError, CertificateError, HostRefusedError, OSError, PermissionError: as for `HttpTransport.connect`.
        TimeoutError: not in time.

    >>> keyring = dist.Keyring(bytes(32))
    >>> async with dist.Worker("left", secret=keyring) as worker:
    ...     await name_at(worker.url, keyring, timeout=5.0)
    'left'
    """
    peer = parse_url(url)
    key, number = keyring.key_for(keyring.default_principal), os.urandom(NUMBER_BYTES).hex()
    headers = {"Authorization": f"aiograd {key.kid} {number} {_proof(key, number)}"}
    refused: OSError | None = None
    client = HttpClient()
    try:
        async with asyncio.timeout(timeout):
            context = (client_ssl or await default_context()) if peer.secure else None
            for address in await resolve(peer):
                try:
                    status, text = await client.read(peer, address, NAME, headers, context, MOST_BYTES)
                except OSError as error:
                    refused = refused or error
                    continue
                if status != 200:
                    raise AuthenticationError(
                        f"asking {peer.url} for the name of its worker: status {status}. Expected the same secret there as here "
                        "(AIOGRAD_SECRET_FILE, AIOGRAD_SECRET); a worker of another key or of an older version is asked by its name"
                    )
                return check_name(f"{peer.url}: name of the worker", text.decode("ascii", "replace"))
    except TimeoutError:
        raise TimeoutError(unanswered_text(peer.url, timeout)) from None
    finally:
        await client.aclose()
    raise refused or OSError(f"connecting to {peer.url}: the name has no address")


def _proof(key: Key, number: str) -> str:
    return hmac.digest(key.derive(_PURPOSE), number.encode("utf-8", "replace"), "sha256").hex()
