"""Sealed secrets: a secret on its way to a worker through a scheduler. Both sides agree on a key first, and the secret travels under it.

A scheduler such as Ray keeps arguments of tasks and of actors in tables, logs and memory that others can read. So the worker makes a key pair and
shows the public half; the coordinator makes one of its own, and only that worker can open its message. This keeps the secret from readers of those
tables. It does not protect from a scheduler that puts another key in the place of the worker's: such a scheduler can run any code in the worker
anyway.

Source: X25519 (RFC 7748) with HKDF (RFC 5869) and AES-256-GCM, as HPKE's base mode (RFC 9180) combines them.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aiograd.errors import AuthenticationError

PURPOSE = b"aiograd: the secret of a cluster"
#: each key is used for one message, so the nonce need not differ
NONCE = bytes(12)


class Recipient:
    """The side that is to learn a secret."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        """32 bytes, to be shown to the sender."""
        return self._private.public_key().public_bytes_raw()

    def open(self, sealed: bytes) -> bytes:
        """The secret that `seal` was given.

        Raises:
            AuthenticationError: it was sealed for another worker, or altered.
        """
        sender, message = sealed[:32], sealed[32:]
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(sender))
            return AESGCM(_key(shared, sender, self.public)).decrypt(NONCE, message, PURPOSE)
        except (InvalidTag, ValueError) as error:
            raise AuthenticationError("opening the secret of a cluster: it was sealed for another worker, or altered on the way") from error


def seal(secret: bytes, recipient: bytes) -> bytes:
    """Seal a secret for the owner of the private half of `recipient`."""
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    shared = private.exchange(X25519PublicKey.from_public_bytes(recipient))
    return public + AESGCM(_key(shared, public, recipient)).encrypt(NONCE, secret, PURPOSE)


def _key(shared: bytes, sender: bytes, recipient: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=PURPOSE + sender + recipient).derive(shared)
