"""Noise_NNpsk0_25519_AESGCM_SHA256, after revision 34 of the Noise Protocol Framework (https://noiseprotocol.org/noise.html). Sans-IO.

::

    NNpsk0:
      -> psk, e
      <- e, ee

Two sides that have a secret in common (the pre-shared key) exchange a message each, get a key for each direction out of it, and know that
they agree on everything said before (the prologue) and in it (the payloads). The classes and methods follow section 5 of the specification, which
gives the reason for each line; only the part for NNpsk0 is here. Payloads, and the trust that each message earns, are for `handshake`.

Note [No plaintext]
    Every message of NNpsk0 mixes a key before its payload, so the state without a key, in which the specification sends payloads in the
    clear, does not occur here. An ephemeral key is mixed into the chaining key besides the hash, as patterns with a pre-shared key require.
    Ephemeral keys thereby serve as the nonces of both sides: with a new one on either side, all keys are new.
"""

from __future__ import annotations

import hashlib
import struct

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

#: as long as a hash, hence the first hash itself
PROTOCOL_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"
#: bytes of a key, of a hash and of a public key
KEY_BYTES = 32

_SHA256 = SHA256()
_NONCE = struct.Struct(">4xQ")


class CipherState:
    """A key, and a counter that makes each nonce new (section 5.1)."""

    __slots__ = ("key", "_count")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._count = 0

    def encrypt_with_ad(self, ad: bytes, plaintext: bytes) -> bytes:
        """The ciphertext and its tag, which depends on `ad` too."""
        ciphertext = AESGCM(self.key).encrypt(_NONCE.pack(self._count), plaintext, ad)
        self._count += 1
        return ciphertext

    def decrypt_with_ad(self, ad: bytes, ciphertext: bytes) -> bytes:
        """The plaintext. After an error the state is as before.

        Raises:
            InvalidTag: the other side has not encrypted this next, with this `ad`.
        """
        plaintext = AESGCM(self.key).decrypt(_NONCE.pack(self._count), ciphertext, ad)
        self._count += 1
        return plaintext


class SymmetricState:
    """The chaining key, into which all secrets go, and the hash of everything said so far (section 5.2)."""

    __slots__ = ("handshake_hash", "_chaining_key", "_cipher")

    def __init__(self) -> None:
        self.handshake_hash = self._chaining_key = PROTOCOL_NAME
        self._cipher: CipherState  # see Note [No plaintext]

    def mix_hash(self, data: bytes) -> None:
        """Have `data` bound to everything that follows."""
        self.handshake_hash = hashlib.sha256(self.handshake_hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        """Have everything that follows encrypted under `secret` too."""
        derived = self._derive(secret, 2)
        self._chaining_key = derived[:KEY_BYTES]
        self._cipher = CipherState(derived[KEY_BYTES:])

    def mix_key_and_hash(self, secret: bytes) -> None:
        """Both, as for a pre-shared key."""
        derived = self._derive(secret, 3)
        self._chaining_key = derived[:KEY_BYTES]
        self.mix_hash(derived[KEY_BYTES:-KEY_BYTES])
        self._cipher = CipherState(derived[-KEY_BYTES:])

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        """A payload, sealed together with everything said before."""
        ciphertext = self._cipher.encrypt_with_ad(self.handshake_hash, plaintext)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        """The other side's payload.

        Raises:
            InvalidTag: the two sides differ in their keys or in the messages before.
        """
        plaintext = self._cipher.decrypt_with_ad(self.handshake_hash, ciphertext)
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[CipherState, CipherState]:
        """Ciphers for what follows the handshake: from its initiator, and to it."""
        derived = self._derive(b"", 2)
        return CipherState(derived[:KEY_BYTES]), CipherState(derived[KEY_BYTES:])

    def export(self, label: bytes, size: int) -> bytes:
        """A secret of the two sides for something else, which tells nothing of the ciphers: HKDF, as `split` uses it, under a label of its own."""
        return HKDF(_SHA256, size, self._chaining_key, label).derive(b"")

    def _derive(self, secret: bytes, count: int) -> bytes:
        return HKDF(_SHA256, count * KEY_BYTES, self._chaining_key, None).derive(secret)


class HandshakeState:
    """One side of one handshake (section 5.3). The initiator writes, then reads; the responder reads, then writes; then both `split`.

    Args:
        prologue: everything that both sides must agree on already; the messages fit only where they do.
        psk: the pre-shared key, 32 bytes used for nothing else.
    """

    __slots__ = ("_symmetric", "_psk", "_is_first", "_ephemeral", "_remote_ephemeral")

    def __init__(self, prologue: bytes, psk: bytes) -> None:
        self._symmetric = SymmetricState()
        self._symmetric.mix_hash(prologue)
        self._psk = psk
        self._is_first = True
        self._ephemeral: X25519PrivateKey
        self._remote_ephemeral: X25519PublicKey

    @property
    def handshake_hash(self) -> bytes:
        """A hash of everything said, the same on both sides."""
        return self._symmetric.handshake_hash

    def write_message(self, payload: bytes, ephemeral: X25519PrivateKey) -> bytes:
        """This side's message.

        Args:
            payload: the content. A holder of the pre-shared key can read the first message's, only the initiator the second one's.
            ephemeral: drawn for this message.

        Raises:
            ValueError: the other side's ephemeral key is one of the few that make the secret predictable.
        """
        self._ephemeral = ephemeral
        public = ephemeral.public_key().public_bytes_raw()
        self._mix(public)
        return public + self._symmetric.encrypt_and_hash(payload)

    def read_message(self, message: bytes) -> bytes:
        """The payload of the other side's message. The first message may be a recording; the second cannot. After an error the handshake has failed.

        Raises:
            InvalidTag, ValueError: it was altered, or made for another handshake or with another key.
        """
        public = message[:KEY_BYTES]
        self._remote_ephemeral = X25519PublicKey.from_public_bytes(public)
        self._mix(public)
        return self._symmetric.decrypt_and_hash(message[KEY_BYTES:])

    def split(self) -> tuple[CipherState, CipherState]:
        """After both messages: the initiator's cipher for sending, and the responder's."""
        return self._symmetric.split()

    def export(self, label: bytes, size: int) -> bytes:
        """After both messages: a secret of so many bytes for another use, the same on both sides."""
        return self._symmetric.export(label, size)

    def _mix(self, public: bytes) -> None:
        """The tokens of a message: psk and e of the first, e and ee of the second."""
        symmetric = self._symmetric
        if self._is_first:
            symmetric.mix_key_and_hash(self._psk)
        symmetric.mix_hash(public)
        symmetric.mix_key(public)
        if not self._is_first:
            symmetric.mix_key(self._ephemeral.exchange(self._remote_ephemeral))
        self._is_first = False
