"""Noise_NNpsk0_25519_AESGCM_SHA256: public test vectors, and what the two sides must agree on."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from aiograd.distributed.rpc.cipher import Open, Seal
from aiograd.distributed.rpc.noise import PROTOCOL_NAME, CipherState, HandshakeState

PSK = bytes(range(32))
ONE, OTHER = (X25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))


class Vector(NamedTuple):
    """A handshake and the messages after it, which the two sides send in turn."""

    prologue: str
    psk: str
    initiator: str
    responder: str
    #: empty where the source has none
    handshake_hash: str
    #: payload and message
    messages: tuple[tuple[str, str], ...]


FLYNN = (
    "2176657279736563726574766572797365637265747665727973656372657421",
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f",
    "4142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f60",
    "",
)
FLYNN_TRANSPORT = (
    ("79656c6c6f777375626d6172696e65", "6a7b199c69a64cc2ea3c556cf17489fd2ae452d3f3c2a0871cebd327fc31c6"),
    ("7375626d6172696e6579656c6c6f77", "e58d43e0c69d8c15df523586b2c58ca40cb0472b5b3775f1cca807fee28a71"),
)
#: those for this protocol in vectors/cacophony.txt of github.com/haskell-cryptography/cacophony, and in vectors.txt of github.com/flynn/noise
VECTORS = {
    "cacophony": Vector(
        "4a6f686e2047616c74",
        "54686973206973206d7920417573747269616e20706572737065637469766521",
        "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
        "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
        "9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530",
        (
            (
                "4c756477696720766f6e204d69736573",
                "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
            ),
            (
                "4d757272617920526f746862617264",
                "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
            ),
            ("462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
            ("4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
            ("4a65616e2d426170746973746520536179", "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd"),
            ("457567656e2042f6686d20766f6e2042617765726b", "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9"),
        ),
    ),
    "flynn": Vector(
        "",
        *FLYNN,
        (
            ("", "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd1662544833316e6c21d899aec6c5f0c6e85e13"),
            ("", "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466d3ec4419885d86e6d7310fb1d2263afd"),
            *FLYNN_TRANSPORT,
        ),
    ),
    "flynn with payloads": Vector(
        "",
        *FLYNN,
        (
            (
                "746573745f6d73675f30",
                "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254d2f8054fcaf80f34700607e4422560b0626b1bc69e65290f6437",
            ),
            (
                "746573745f6d73675f31",
                "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466e21a3177614fce09f014bde7e996fb8c8300777068e6fd2aa7c4",
            ),
            *FLYNN_TRANSPORT,
        ),
    ),
    "flynn with prologue": Vector(
        "6e6f74736563726574",
        *FLYNN,
        (
            ("", "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd16625486959ba2f588031f633a6c0e54a14ae5"),
            ("", "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466c8783e80be055a8f51e32418393af7cd"),
            *FLYNN_TRANSPORT,
        ),
    ),
    "flynn with both": Vector(
        "6e6f74736563726574",
        *FLYNN,
        (
            (
                "746573745f6d73675f30",
                "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254d2f8054fcaf80f347006e0fc25590a31fd33c4626fe59283ea40",
            ),
            (
                "746573745f6d73675f31",
                "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466e21a3177614fce09f014af55e853ed6b88b0e4628e071b23e905",
            ),
            *FLYNN_TRANSPORT,
        ),
    ),
}


def private(key: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(key))


@pytest.mark.parametrize("name", VECTORS)
def test_public_vectors(name: str) -> None:
    vector = VECTORS[name]
    prologue, psk = bytes.fromhex(vector.prologue), bytes.fromhex(vector.psk)
    initiator, responder = HandshakeState(prologue, psk), HandshakeState(prologue, psk)
    messages = [(bytes.fromhex(payload), bytes.fromhex(message)) for payload, message in vector.messages]
    for writer, reader, ephemeral in ((initiator, responder, vector.initiator), (responder, initiator, vector.responder)):
        payload, message = messages.pop(0)
        assert writer.write_message(payload, private(ephemeral)) == message
        assert reader.read_message(message) == payload
        assert writer.handshake_hash == reader.handshake_hash
    assert initiator.handshake_hash.hex() == vector.handshake_hash or not vector.handshake_hash
    ends = initiator.split(), responder.split()
    directions = [(Seal(ends[side][side].key, 100), Open(ends[1 - side][side].key, 100)) for side in (0, 1)]
    for number, (payload, message) in enumerate(messages):
        assert ends[number % 2][number % 2].encrypt_with_ad(b"", payload) == message
        assert ends[1 - number % 2][number % 2].decrypt_with_ad(b"", message) == payload
        seal, opener = directions[number % 2]
        record = seal.seal([payload])
        assert record == message and opener.open(record) == payload


def handshake(
    prologues: tuple[bytes, bytes] = (b"p", b"p"),
    psks: tuple[bytes, bytes] = (PSK, PSK),
    keys: tuple[X25519PrivateKey, X25519PrivateKey] = (ONE, OTHER),
) -> tuple[bytes, ...]:
    """The keys that both sides end up with, after checking that they are the same."""
    initiator, responder = (HandshakeState(*given) for given in zip(prologues, psks, strict=True))
    responder.read_message(initiator.write_message(b"there", keys[0]))
    initiator.read_message(responder.write_message(b"back", keys[1]))
    ours, theirs = ([state.key for state in side.split()] for side in (initiator, responder))
    assert ours == theirs and len({*ours}) == 2
    return tuple(ours)


def test_keys_depend_on_the_secret_and_on_both_ephemeral_keys() -> None:
    third = X25519PrivateKey.from_private_bytes(bytes([3]) * 32)
    found = [handshake(), handshake(keys=(third, OTHER)), handshake(keys=(ONE, third)), handshake(psks=(bytes(32),) * 2)]
    assert len({key for keys in found for key in keys}) == 2 * len(found)
    assert handshake() == found[0]


@pytest.mark.parametrize("differing", [{"prologues": (b"p", b"q")}, {"prologues": (b"", b"p")}, {"psks": (PSK, bytes(32))}], ids=str)
def test_who_has_another_prologue_or_secret_reads_nothing(differing: dict[str, tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidTag):
        handshake(**differing)


@pytest.mark.parametrize("which", [0, 1])
def test_no_byte_of_a_message_can_be_altered_and_none_be_left_out_or_added(which: int) -> None:
    def sides() -> tuple[HandshakeState, bytes]:
        """Who reads the message, and the message."""
        initiator, responder = HandshakeState(b"p", PSK), HandshakeState(b"p", PSK)
        message = initiator.write_message(b"there", ONE)
        if which:
            responder.read_message(message)
            message = responder.write_message(b"back", OTHER)
        return (initiator if which else responder), message

    reader, message = sides()
    assert reader.read_message(message) == (b"back" if which else b"there")
    altered = [message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :] for at in range(len(message))]
    for wrong in (*altered, *(message[:length] for length in range(len(message))), message + b"\0"):
        reader, _ = sides()
        with pytest.raises((InvalidTag, ValueError)):
            reader.read_message(wrong)


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
def test_a_public_key_that_makes_the_secret_predictable_is_refused(point: bytes) -> None:
    class Weak:
        """Has a public key of small order, and needs no private one."""

        def public_key(self) -> Weak:
            return self

        def public_bytes_raw(self) -> bytes:
            return point

    initiator, responder = HandshakeState(b"p", PSK), HandshakeState(b"p", PSK)
    responder.read_message(initiator.write_message(b"", Weak()))  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        responder.write_message(b"", OTHER)


def test_nonces_count_and_errors_do_not() -> None:
    cipher, reader = CipherState(PSK), CipherState(PSK)
    for number in range(3):
        nonce = bytes(4) + number.to_bytes(8, "big")
        message = cipher.encrypt_with_ad(b"ad", b"text")
        assert message == AESGCM(PSK).encrypt(nonce, b"text", b"ad")
        with pytest.raises(InvalidTag):
            reader.decrypt_with_ad(b"other", message)
        assert reader.decrypt_with_ad(b"ad", message) == b"text"


def test_the_name_says_what_it_is() -> None:
    """It is the first hash as it stands, which holds for names that are as long as a hash."""
    assert PROTOCOL_NAME == b"Noise_NNpsk0_25519_AESGCM_SHA256" and len(PROTOCOL_NAME) == 32
