"""Handshakes: two workers with a common key agree on keys; nobody else gets anywhere, nor learns why."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.cipher import TAG_BYTES, Seal
from aiograd.distributed.rpc.frames import HEADER, PROTOCOL_VERSIONS
from aiograd.distributed.rpc.handshake import MIN_FRAME_BYTES, Answerer, Dialler, Secured, refused
from aiograd.distributed.rpc.handshake_messages import MESSAGE_BYTES, RESUME, MessageType, Payload, body_of, envelope, mac_of, open_envelope, prefix
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.keyring import Key, Keyring
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.noise import HandshakeState
from aiograd.errors import ArgumentError, ArgumentTypeError, AuthenticationError, NameTakenError, ProtocolError, VersionMismatch

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(100, 132))
LIMITS = Limits()
INCARNATION = {"a": b"a" * 16, "b": b"b" * 16}
SESSION = b"an older session"
#: beginnings of the SHA-256 of hello, answer, finish and a record each way
GOLDEN = ["c7b92929a71b123b", "50c5ae6560b3a518", "23ca19af2c98ece9", "88921f02bd7ae9de", "193ede55e0cd6db7"]


def entropy(seed: object) -> Callable[[int], bytes]:
    return random.Random(f"{seed}").randbytes


def dialler(
    name: str = "a", peer: str = "b", *, key: Key | None = None, session: bytes | None = None, seed: object = 1, limits: Limits = LIMITS, **options
) -> Dialler:
    key = key or Keyring(SECRET).key_for("default")
    return Dialler(name, INCARNATION.get(name, bytes(16)), key, peer, session, entropy(f"dialler {seed}"), limits, **options)


def answerer(
    name: str = "b",
    *,
    keyring: Keyring | None = None,
    resume: Callable[[PeerIdentity, bytes], bool] | None = None,
    seed: object = 1,
    limits: Limits = LIMITS,
    **options,
) -> Answerer:
    keyring = keyring or Keyring(SECRET)
    return Answerer(name, INCARNATION.get(name, bytes(16)), keyring, entropy(f"answerer {seed}"), limits, resume or (lambda *_: False), **options)


def shake(one: Dialler, other: Answerer) -> tuple[Secured, Secured]:
    answer = answer_to(one.hello(), other)
    assert not one.done and not other.done
    finish = one.receive(answer)
    assert one.done and not other.done
    assert other.receive(finish) is None
    assert other.done
    return one.result, other.result


def answer_to(hello: bytes, other: Answerer | None = None) -> bytes:
    answer = (other or answerer()).receive(hello)
    assert answer is not None
    return answer


TEXT = str(refused())


def assert_refused(receive: Callable[[bytes], object], message: bytes) -> None:
    """The message is refused with the one text that says nothing."""
    with pytest.raises(AuthenticationError) as caught:
        receive(message)
    assert str(caught.value) == TEXT
    assert caught.value.__context__ is None or caught.value.__suppress_context__


# ---- success


def test_both_sides_agree() -> None:
    ours, theirs = shake(dialler(), answerer())
    assert ours.peer == PeerIdentity("b", INCARNATION["b"], "default")
    assert theirs.peer == PeerIdentity("a", INCARNATION["a"], "default")
    assert ours.session == theirs.session and len(ours.session) == 16
    assert not ours.resumed and not theirs.resumed
    assert (ours.version, theirs.version) == (PROTOCOL_VERSIONS[1],) * 2
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        for number in range(3):
            assert receiver.open.open(sender.seal.seal([b"frame %d" % number])) == b"frame %d" % number


@pytest.mark.parametrize(("ours", "theirs"), [(1000, 2000), (2000, 1000), (0xFFFF_FFFF, 1 << 20), (0xFFFF_FFFF, 0xFFFF_FFFF)])
def test_the_smaller_frame_is_agreed_on(ours: int, theirs: int) -> None:
    for secured in shake(dialler(limits=Limits(frame_bytes=ours)), answerer(limits=Limits(frame_bytes=theirs))):
        assert secured.frame_bytes == min(ours, theirs, 0xFFFF_FFFF)


def test_a_whole_frame_with_its_header_fits() -> None:
    one, other = shake(dialler(limits=Limits(frame_bytes=1000)), answerer())
    record = one.seal.seal([bytes(HEADER.size), bytes(1000)])
    assert len(record) == HEADER.size + 1000 + TAG_BYTES
    assert other.open.open(record) == bytes(HEADER.size + 1000)


def test_messages_are_what_they_were_when_the_version_was_published() -> None:
    """Workers of one version understand each other: these bytes never change, a change needs a new version."""
    key = Keyring(SECRET, kid="kid").key_for("default")
    one, other = dialler(key=key, session=SESSION), answerer(keyring=Keyring(SECRET, kid="kid"))
    answer = answer_to(one.hello(), other)
    finish = one.receive(answer)
    other.receive(finish)
    records = [one.result.seal.seal([b"there"]), other.result.seal.seal([b"back"])]
    hashes = [hashlib.sha256(message).hexdigest()[:16] for message in (one.hello(), answer, finish, *records)]
    assert hashes == GOLDEN


def test_every_connection_has_its_own_keys() -> None:
    """One key, the same workers, the same session: still no record of one connection opens on another, or in the other direction."""
    connections = [shake(dialler(seed=seed), answerer(seed=seed)) for seed in range(3)]
    ends = [end for connection in connections for end in connection]
    records = [end.seal.seal([b"frame"]) for end in ends]
    assert len({bytes(record) for record in records}) == len(ends)
    opened = []
    for (sender, record), (receiver, end) in itertools.product(enumerate(records), enumerate(ends)):
        try:
            end.open.open(record)
            opened.append((sender, receiver))
        except (AuthenticationError, ProtocolError):  # not made for it, or it has opened its own record already
            pass
    assert opened == [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)]


@pytest.mark.parametrize("side", ["dialler", "answerer"])
def test_entropy_of_either_side_makes_the_keys_new(side: str) -> None:
    """Even where the other side's random numbers repeat, as after a snapshot is restored: ephemeral keys are the nonces."""
    again = {"dialler": dict(one=2, other=1), "answerer": dict(one=1, other=2)}[side]
    first = shake(dialler(seed=1), answerer(seed=1))
    second = shake(dialler(seed=again["one"]), answerer(seed=again["other"]))
    assert_not_open(second[1], first[0].seal.seal([b"x"]))
    assert_not_open(second[0], first[1].seal.seal([b"x"]))


def assert_not_open(end: Secured, record: bytes | memoryview) -> None:
    with pytest.raises(AuthenticationError):
        end.open.open(record)


# ---- sessions


def test_a_session_is_resumed_when_the_answerer_knows_it() -> None:
    asked: list[tuple[PeerIdentity, bytes]] = []

    def resume(peer: PeerIdentity, session: bytes) -> bool:
        asked.append((peer, session))
        return True

    ours, theirs = shake(dialler(session=SESSION), answerer(resume=resume))
    assert asked == [(PeerIdentity("a", INCARNATION["a"], "default"), SESSION)]
    assert ours.resumed and theirs.resumed
    assert ours.session == theirs.session == SESSION


def test_a_session_that_is_not_known_is_replaced() -> None:
    ours, theirs = shake(dialler(session=SESSION), answerer(resume=lambda *_: False))
    assert not ours.resumed and not theirs.resumed
    assert ours.session == theirs.session != SESSION


def test_no_session_is_asked_for_where_none_is_proposed() -> None:
    def resume(peer: PeerIdentity, session: bytes) -> bool:
        raise AssertionError("asked")

    assert not shake(dialler(), answerer(resume=resume))[0].resumed


def test_the_answerer_may_name_sessions_itself() -> None:
    ours, theirs = shake(dialler(), answerer(new_session=lambda: b"0123456789abcdef"))
    assert ours.session == theirs.session == b"0123456789abcdef"
    with pytest.raises(ArgumentError, match="session: expected 16 bytes, got 3"):
        answerer(new_session=lambda: b"abc").receive(dialler().hello())


def test_nothing_is_asked_on_behalf_of_who_proves_nothing() -> None:
    def resume(peer: PeerIdentity, session: bytes) -> bool:
        raise AssertionError("asked")

    hello = bytearray(dialler(session=SESSION).hello())
    hello[-1] ^= 1
    assert_refused(answerer(resume=resume).receive, hello)
    assert_refused(answerer("c", resume=resume).receive, dialler(session=SESSION).hello())


# ---- keys and names that do not fit


def keyring_of(kid: str, secret: bytes, principal: str = "default") -> Keyring:
    return Keyring(secret, kid=kid, principal=principal)


WRONG_HELLOS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no key": lambda: dialler().hello()[:-32] + bytes(32),
    "a key of zeros": lambda: dialler(key=Key("nobody", bytes(32), "default")).hello(),
    "wrong key": lambda: dialler(key=Key("k1", OTHER_SECRET, "default")).hello(),
    "unknown kid": lambda: dialler(key=Key("k9", SECRET, "default")).hello(),
    "kid of another principal": lambda: dialler(key=Key("k2", SECRET, "default")).hello(),
    "secret of another principal": lambda: dialler(key=Key("k1", OTHER_SECRET, "other")).hello(),
    "another receiver": lambda: dialler(peer="c", key=Key("k1", SECRET, "default")).hello(),
    "a longer receiver": lambda: dialler(peer="bb", key=Key("k1", SECRET, "default")).hello(),
    "the receiver's own name": lambda: dialler("b", "a", key=Key("k1", SECRET, "default")).hello(),
    "claims to be the receiver": lambda: forged_hello(sender="b"),
    "a name that is none": lambda: forged_hello(sender="a b"),
    "no name": lambda: forged_hello(sender=""),
    "oversized": lambda: dialler(key=Key("k1", SECRET, "default")).hello() + bytes(MESSAGE_BYTES),
    "authentic and oversized": lambda: forged_hello(more=bytes(MESSAGE_BYTES)),
    "an answer": lambda: forged_hello(kind=MessageType.ANSWER),
    "another magic": lambda: forged_hello(magic=b"AGRD"),
    "no type": lambda: forged_hello(kind=9),
    "ephemeral key of small order": lambda: forged_hello(ephemeral=bytes(32)),
    "ephemeral key of small order, 1": lambda: forged_hello(ephemeral=b"\1" + bytes(31)),
}


def with_public_key(public: bytes, private: X25519PrivateKey | None = None) -> Any:
    """An ephemeral key whose parts do not belong together."""
    exchange = (lambda other: bytes(32)) if private is None else private.exchange
    return SimpleNamespace(public_key=lambda: SimpleNamespace(public_bytes_raw=lambda: public), exchange=exchange)


def noise_of(prologue: bytes, key: Key) -> HandshakeState:
    return HandshakeState(prologue, key.derive(b"handshake Noise_NNpsk0"))


def forged_hello(
    *,
    kind: int = MessageType.HELLO,
    sender: str = "a",
    receiver: str = "b",
    versions: tuple[int, int] = PROTOCOL_VERSIONS,
    more: bytes = b"",
    magic: bytes = b"AGRH",
    ephemeral: bytes | None = None,
    **fields: object,
) -> bytes:
    """A hello of somebody who has the key, and no scruples."""
    key = Key("k1", SECRET, "default")
    payload = Payload(0, 0, 1 << 20, bytes(16), bytes(16))._replace(**fields).pack() + more
    text = magic + envelope(kind, versions, "k1", sender, receiver)[4:]
    private = X25519PrivateKey.from_private_bytes(SECRET) if ephemeral is None else with_public_key(ephemeral)
    text += noise_of(text, key).write_message(payload, private)
    return text + mac_of(key, MessageType.HELLO, text)


def two_tenants() -> Keyring:
    keyring = keyring_of("k1", SECRET)
    keyring.add("k2", OTHER_SECRET, "other")
    return keyring


@pytest.mark.parametrize("attack", WRONG_HELLOS)
def test_a_wrong_hello_is_refused(attack: str) -> None:
    other = answerer(keyring=two_tenants())
    assert_refused(other.receive, WRONG_HELLOS[attack]())
    assert other.refusal is None and not other.done
    # and one cannot try again on the same connection
    assert_refused(other.receive, dialler(key=two_tenants().key_for("default")).hello())


def test_the_forgery_would_pass_if_it_were_right() -> None:
    """Else the tests above would show nothing."""
    assert answerer(keyring=two_tenants()).receive(forged_hello())


def test_a_peer_speaks_for_the_principal_of_its_key() -> None:
    for principal in ("default", "other"):
        _, theirs = shake(dialler(key=two_tenants().key_for(principal)), answerer(keyring=two_tenants()))
        assert theirs.peer.principal == principal


def test_a_wrong_key_costs_the_answerer_no_curve_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = WRONG_HELLOS["wrong key"]()

    monkeypatch.setattr("aiograd.distributed.rpc.handshake.X25519PrivateKey", None)
    assert_refused(answerer(keyring=two_tenants()).receive, hello)


def test_an_unknown_kid_costs_what_a_wrong_key_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    macs = []

    def counted(*arguments: object) -> bytes:
        macs.append(arguments)
        return mac_of(*arguments)

    monkeypatch.setattr("aiograd.distributed.rpc.handshake.mac_of", counted)
    hellos = [WRONG_HELLOS[attack]() for attack in ("wrong key", "unknown kid")]
    counts = []
    for hello in hellos:
        macs.clear()
        assert_refused(answerer(keyring=two_tenants()).receive, hello)
        counts.append(len(macs))
    assert counts == [1, 1]


def test_a_dialler_must_mean_somebody_else() -> None:
    with pytest.raises(ArgumentError, match="same name"):
        dialler("a", "a")


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, None])
def test_names_are_checked_where_they_are_given(name: str) -> None:
    for make in (lambda: dialler(name), lambda: dialler(peer=name), lambda: answerer(name)):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            make()


def test_ids_and_entropy_are_checked_where_they_are_given() -> None:
    key = Keyring(SECRET).key_for("default")
    with pytest.raises(ArgumentError, match="incarnation: expected 16 bytes, got 3"):
        Dialler("a", b"abc", key, "b", None, entropy(1), LIMITS)
    with pytest.raises(ArgumentError, match="session: expected 16 bytes, got 0"):
        Dialler("a", bytes(16), key, "b", b"", entropy(1), LIMITS)
    with pytest.raises(ArgumentError, match="incarnation"):
        Answerer("b", b"", Keyring(SECRET), entropy(1), LIMITS, lambda *_: False)
    with pytest.raises(ArgumentError, match="entropy gave 5"):
        Dialler("a", bytes(16), key, "b", None, lambda count: b"short", LIMITS)


# ---- certificates


@pytest.mark.parametrize(("names", "good"), [(None, True), ({"a", "b"}, True), ({"a.b", "c"}, False), (set(), False)])
def test_certified_names_must_cover_the_claimed_one(names: set[str] | None, good: bool) -> None:
    if good:
        shake(dialler(certified_names=names), answerer(certified_names=names))
        return
    assert_refused(answerer(certified_names=names).receive, dialler().hello())
    assert_refused(dialler(certified_names=names).receive, answer_to(dialler().hello()))


# ---- altered messages


def alterations(message: bytes) -> list[bytes]:
    """Every bit flipped, every type, every length."""
    found = []
    for at in range(len(message)):
        for bit in range(8):
            found.append(message[:at] + bytes([message[at] ^ 1 << bit]) + message[at + 1 :])
    found += [message[:4] + bytes([kind]) + message[5:] for kind in range(256) if kind != message[4]]
    found += [message[:length] for length in range(len(message))]
    found += [message + b"\0", message + message, b"\0" + message]
    return found


def test_no_byte_of_the_hello_can_be_altered() -> None:
    for hello in alterations(dialler(session=SESSION).hello()):
        assert_refused(answerer().receive, hello)


def test_no_byte_of_the_answer_can_be_altered() -> None:
    for altered in alterations(answer_to(dialler().hello())):
        one = dialler()
        assert_refused(one.receive, altered)
        assert not one.done


def test_no_byte_of_the_finish_can_be_altered() -> None:
    one, hello = dialler(), dialler().hello()
    answer = answer_to(hello)
    finish = one.receive(answer)
    for altered in alterations(finish):
        other = answerer()
        assert other.receive(hello) == answer
        assert_refused(other.receive, altered)
        assert not other.done
        assert_refused(other.receive, finish)


@given(st.one_of(st.binary(max_size=400), st.binary(max_size=300).map(lambda tail: b"AGRH" + tail)))
def test_foreign_bytes_are_refused(message: bytes) -> None:
    assert_refused(answerer().receive, message)
    assert_refused(dialler().receive, message)
    other = answerer()
    other.receive(dialler().hello())
    assert_refused(other.receive, message)


def test_messages_may_come_as_any_bytes() -> None:
    for kind in (bytes, bytearray, memoryview):
        one, other = dialler(), answerer()
        other.receive(kind(one.receive(kind(answer_to(kind(one.hello()), other)))))
        assert other.done


# ---- replayed, reflected and relayed messages


def recorded() -> tuple[bytes, bytes, bytes]:
    """The messages of a handshake of an honest pair."""
    one, other = dialler(seed="recorded"), answerer(seed="recorded")
    answer = answer_to(one.hello(), other)
    return one.hello(), answer, one.receive(answer)


def test_a_replayed_hello_leads_nowhere() -> None:
    hello, _, finish = recorded()
    other = answerer(seed="later")
    assert other.receive(hello)  # an answer of no use to who cannot make the finish
    assert_refused(other.receive, finish)
    assert not other.done


def test_a_replayed_answer_is_refused() -> None:
    _, answer, _ = recorded()
    one = dialler(seed="later")
    assert_refused(one.receive, answer)
    assert not one.done


def test_a_message_counts_once() -> None:
    hello, answer, finish = recorded()
    one, other = dialler(), answerer()
    ours = one.receive(other.receive(one.hello()) or b"")
    other.receive(ours)
    for message in (hello, answer, finish, one.hello(), ours):
        assert_refused(other.receive, message)
        assert_refused(one.receive, message)
    assert other.result.open.open(one.result.seal.seal([b"unharmed"])) == b"unharmed"


def test_a_finish_carries_no_frame() -> None:
    one, other = dialler(), answerer()
    one.receive(other.receive(one.hello()) or b"")
    assert_refused(other.receive, prefix(MessageType.FINISH) + bytes(one.result.seal.seal([b"frame"])))
    assert not other.done


def test_a_finish_does_not_come_first_nor_a_hello_twice() -> None:
    hello, answer, finish = recorded()
    for first in (answer, finish):
        assert_refused(answerer().receive, first)
    other = answerer()
    other.receive(hello)
    assert_refused(other.receive, hello)
    assert_refused(other.receive, answer)


def test_messages_reflected_to_their_sender_are_refused() -> None:
    hello, answer, finish = recorded()
    for message in (hello, finish):
        one = dialler(seed="recorded")
        assert_refused(one.receive, message)
    other = answerer(seed="recorded")
    assert other.receive(hello) == answer
    assert_refused(other.receive, answer)
    assert_refused(answerer("a").receive, hello)  # to the sender's own listening side


def test_two_diallers_cannot_be_plugged_together() -> None:
    one, other = dialler("a", "b"), dialler("b", "a")
    assert_refused(one.receive, other.hello())
    assert_refused(other.receive, one.hello())


def test_a_handshake_cannot_be_relayed_to_another_worker() -> None:
    """Same key, but whoever dials b does not get c."""
    assert_refused(answerer("c").receive, dialler("a", "b").hello())
    assert_refused(dialler("a", "b").receive, answer_to(dialler("a", "c").hello(), answerer("c")))


def test_an_answer_to_another_dialler_is_refused() -> None:
    assert_refused(dialler("a", "b").receive, answer_to(dialler("c", "b").hello()))
    answer = answer_to(dialler(key=two_tenants().key_for("other")).hello(), answerer(keyring=two_tenants()))
    assert_refused(dialler(key=two_tenants().key_for("default")).receive, answer)


def test_who_knows_the_key_and_not_the_ephemeral_secret_cannot_join() -> None:
    """The key leaks later: neither recorded traffic nor a handshake in progress is opened with it."""
    hello, answer, finish = recorded()
    parts, message = open_envelope(MessageType.HELLO, hello), body_of(MessageType.ANSWER, answer)
    assert parts is not None and message is not None
    key = Keyring(SECRET).key_for("default")
    payload = noise_of(parts.envelope, key).read_message(parts.body)
    thief = noise_of(parts.envelope, key)
    guess = with_public_key(parts.body[:32], X25519PrivateKey.from_private_bytes(bytes(range(32))))
    assert thief.write_message(payload, guess) == parts.body  # so far they follow
    with pytest.raises(InvalidTag):
        thief.read_message(message)
    forged = prefix(MessageType.FINISH) + bytes(Seal(thief.split()[0].key, 100).seal(()))
    assert len(forged) == len(finish)
    other = answerer(seed="recorded")
    assert other.receive(hello) == answer
    assert_refused(other.receive, forged)


# ---- versions

RANGES = [(low, high) for low in range(1, 5) for high in range(low, 5)]


@pytest.mark.parametrize("ours", RANGES)
@pytest.mark.parametrize("theirs", RANGES)
def test_the_highest_common_version_is_chosen_or_both_learn_why_not(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    one, other = dialler(versions=ours), answerer(versions=theirs)
    common = set(range(ours[0], ours[1] + 1)) & set(range(theirs[0], theirs[1] + 1))
    if common:
        assert [secured.version for secured in shake(one, other)] == [max(common)] * 2
        return
    for receive, mine, other_one in (
        (lambda: other.receive(one.hello()), (theirs, "'b'"), (ours, "'a'")),
        (lambda: one.receive(other.refusal or b""), (ours, "'a'"), (theirs, "'b'")),
    ):
        with pytest.raises(VersionMismatch) as caught:
            receive()
        text = str(caught.value)
        for (low, high), name in (mine, other_one):
            assert f"versions {low} to {high}" in text and name in text
        assert text.endswith(f"upgrade aiograd where worker {'a' if ours < theirs else 'b'!r} runs"), "the same on both sides"
    assert not one.done and not other.done


def refusal() -> bytes:
    other = answerer(versions=(6, 7))
    with pytest.raises(VersionMismatch):
        other.receive(dialler().hello())
    assert other.refusal is not None
    return other.refusal


def test_nobody_else_can_say_that_versions_do_not_fit() -> None:
    for altered in alterations(refusal()):
        one = dialler()
        assert_refused(one.receive, altered)
    assert_refused(dialler(seed="later").receive, refusal())  # a replay
    with pytest.raises(VersionMismatch):
        dialler().receive(refusal())


@pytest.mark.parametrize("options", [{"versions": (7, 9)}, {"is_taken": lambda identity: True}], ids=["versions", "names that are taken"])
def test_what_does_not_fit_is_not_told_to_strangers(options: dict[str, Any]) -> None:
    for attack, hello in WRONG_HELLOS.items():
        if attack.startswith("ephemeral"):
            continue  # authentic, and therefore told
        other = answerer(keyring=two_tenants(), **options)
        assert_refused(other.receive, hello())
        assert other.refusal is None


def test_a_hello_of_a_later_version_may_have_another_body() -> None:
    other = answerer(keyring=two_tenants())
    with pytest.raises(VersionMismatch, match="versions 6 to 7"):
        other.receive(forged_hello(versions=(6, 7), more=b"news"))
    assert other.refusal


V1_HELLO = bytes.fromhex(
    "414752480101010301016b6964616200000000100075cfcb060ec5545dc0677cb3596d8d01918583a828ba4073f86ad67f6b3aa931b5c394277705d458bd2b115f2b6fdbeeed"
    "b6a81a36188bc4d4a761689fcdbf466161616161616161616161616161616100000000000000000000000000000000bb389fd913e09d4bc14da0aedc7a046a62dd0f8dc07afd"
    "03ff5e0c5dea4c123a"
)  # fmt: skip


def test_a_worker_of_version_1_is_told_so() -> None:
    """This is a hello of such a worker."""
    other = answerer(keyring=Keyring(SECRET, kid="kid"))
    with pytest.raises(VersionMismatch, match="'a': it speaks versions 1 to 1 .* this worker .'b'. versions 5 to 5"):
        other.receive(V1_HELLO)
    assert other.refusal is not None
    text, mac = other.refusal[:-32], other.refusal[-32:]
    assert text == b"AGRH\4\5\5\3\1\1kidba"
    assert mac == v1_mac(b"handshake REFUSAL", hashlib.sha256(V1_HELLO).digest() + text)


def test_a_worker_of_version_1_can_tell_that_it_is_older() -> None:
    """It checks what this test checks, and then refuses."""
    one = dialler(key=Key("kid", SECRET, "default"))
    hello = one.hello()
    assert hello.startswith(b"AGRH\1\5\5\3\1\1kidab") and hello[-32:] == v1_mac(b"handshake HELLO", hello[:-32])
    text = b"AGRH\4\1\1\3\1\1kidba"
    with pytest.raises(VersionMismatch, match="'b': it speaks versions 1 to 1 .* this worker .'a'. versions 5 to 5"):
        one.receive(text + v1_mac(b"handshake REFUSAL", hashlib.sha256(hello).digest() + text))


def v1_mac(purpose: bytes, text: bytes) -> bytes:
    return hmac.digest(hmac.digest(SECRET, b"aiograd " + purpose, "sha256"), text, "sha256")


# ---- names that are taken


def test_a_worker_whose_name_another_has_is_told_so() -> None:
    asked: list[PeerIdentity] = []

    def is_taken(identity: PeerIdentity) -> bool:
        asked.append(identity)
        return True

    one, other = dialler(), answerer(is_taken=is_taken)
    with pytest.raises(NameTakenError, match="worker 'b' is connected to another worker named 'a'"):
        other.receive(one.hello())
    assert asked == [PeerIdentity("a", INCARNATION["a"], "default")] and other.refusal is not None
    for altered in alterations(other.refusal):
        assert_refused(dialler().receive, altered)
    assert_refused(dialler(seed="later").receive, other.refusal)  # a replay
    with pytest.raises(NameTakenError, match="give each worker of a cluster a name of its own"):
        one.receive(other.refusal)
    assert not one.done and not other.done


# ---- authentic nonsense


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (lambda: forged_hello(more=b"x"), "handshake_size"),
        (lambda: forged_hello(flags=2), "handshake_flags"),
        (lambda: forged_hello(frame_bytes=MIN_FRAME_BYTES - 1), "handshake_frame_bytes"),
        (lambda: forged_hello(frame_bytes=0), "handshake_frame_bytes"),
    ],
)
def test_an_authentic_hello_that_makes_no_sense(hello: Callable[[], bytes], code: str) -> None:
    other = answerer(keyring=two_tenants())
    with pytest.raises(ProtocolError, match="worker 'a'") as caught:
        other.receive(hello())
    assert caught.value.code == code
    assert_refused(other.receive, hello())


def forged_answer(
    hello: bytes,
    *,
    kind: int = MessageType.ANSWER,
    prologue: bytes | None = None,
    secret: bytes = SECRET,
    more: bytes = b"",
    ephemeral: bytes | None = None,
    **fields: object,
) -> bytes:
    """An answer of somebody who has the key (unless it is another one), and no scruples."""
    key = Key("k1", secret, "default")
    parts = open_envelope(MessageType.HELLO, hello)
    assert parts is not None
    noise = noise_of(prologue or parts.envelope, key)
    try:
        noise.read_message(parts.body)
    except InvalidTag:  # it does not care
        noise._symmetric.mix_hash(parts.body[32:])
    private = X25519PrivateKey.from_private_bytes(OTHER_SECRET) if ephemeral is None else with_public_key(ephemeral)
    payload = Payload(PROTOCOL_VERSIONS[1], 0, 1 << 20, bytes(16), bytes(16))._replace(**fields).pack() + more
    return prefix(kind) + noise.write_message(payload, private)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, None),
        ({"version": PROTOCOL_VERSIONS[1] + 1}, "handshake_version"),
        ({"version": PROTOCOL_VERSIONS[0] - 1}, "handshake_version"),
        ({"version": 0}, "handshake_version"),
        ({"more": b"x"}, "handshake_size"),
        ({"flags": 4}, "handshake_flags"),
        ({"flags": RESUME}, "handshake_session"),
        ({"frame_bytes": 1}, "handshake_frame_bytes"),
    ],
)
def test_an_authentic_answer_that_makes_no_sense(fields: dict[str, int], code: str | None) -> None:
    for session in (None, SESSION):
        one = dialler(session=session)
        answer = forged_answer(one.hello(), **fields)
        if code is None:
            one.receive(answer)
            continue
        with pytest.raises(ProtocolError, match="worker 'b'") as caught:
            one.receive(answer)
        assert caught.value.code == code
        assert not one.done


KID = Keyring(SECRET).key_for("default").kid


@pytest.mark.parametrize(
    "forgery",
    [
        {"secret": OTHER_SECRET},
        {"prologue": envelope(MessageType.HELLO, PROTOCOL_VERSIONS, KID, "a", "c")},
        {"prologue": envelope(MessageType.HELLO, PROTOCOL_VERSIONS, KID, "c", "b")},
        {"prologue": envelope(MessageType.HELLO, (1, 2), KID, "a", "b")},
        {"prologue": envelope(MessageType.HELLO, PROTOCOL_VERSIONS, "k2", "a", "b")},
        {"kind": MessageType.HELLO},
        {"kind": MessageType.FINISH},
        {"more": bytes(MESSAGE_BYTES)},
        {"kind": MessageType.REFUSAL},
        {"ephemeral": bytes(32)},
        {"ephemeral": b"\1" + bytes(31)},
    ],
    ids=lambda forgery: str(forgery)[:60],
)
def test_an_answer_of_another_key_name_version_or_type_is_refused(forgery: dict[str, object]) -> None:
    one = dialler()
    assert_refused(one.receive, forged_answer(one.hello(), **forgery))
    assert_refused(one.receive, forged_answer(one.hello()))  # and one cannot try again on the same connection
    assert not one.done
    again = dialler()
    again.receive(forged_answer(again.hello(), prologue=envelope(MessageType.HELLO, PROTOCOL_VERSIONS, KID, "a", "b")))


def test_there_is_no_result_before_the_end() -> None:
    for side in (dialler(), answerer()):
        with pytest.raises(ProtocolError) as caught:
            side.result  # noqa: B018
        assert caught.value.code == "handshake_incomplete"


# ---- rotation


def test_a_secret_is_changed_without_a_moment_of_refusal() -> None:
    """Two workers go through the steps one after the other; at every point each can dial the other."""
    rings = {"a": keyring_of("old", SECRET), "b": keyring_of("old", SECRET)}

    def check() -> None:
        for one, other in (("a", "b"), ("b", "a")):
            shake(dialler(one, other, key=rings[one].key_for("default")), answerer(other, keyring=rings[other]))

    old = rings["a"].key_for("default")
    check()
    for step in (lambda ring: ring.add("new", OTHER_SECRET), lambda ring: ring.promote("new"), lambda ring: ring.remove("old")):
        for ring in rings.values():
            step(ring)
            check()
    assert_refused(answerer(keyring=rings["b"]).receive, dialler(key=old).hello())


# ---- secrets


def test_nothing_shows_a_secret() -> None:
    one, other = dialler(), answerer()
    ours, theirs = shake(one, other)
    key = one._key
    texts = [repr(value) for value in (one, other, ours, theirs, key, key.derive)]
    for attack in (lambda: answerer(keyring=Keyring(OTHER_SECRET)).receive(dialler().hello()), lambda: dialler().receive(b"")):
        with pytest.raises(AuthenticationError) as caught:
            attack()
        texts += [str(caught.value), repr(caught.value)]
    with pytest.raises(VersionMismatch) as mismatch:
        answerer(versions=(6, 6)).receive(dialler().hello())
    texts.append(str(mismatch.value))
    for text in texts:
        for secret in (SECRET, OTHER_SECRET):
            assert secret.hex() not in text and repr(secret)[2:20] not in text


def test_no_message_has_a_secret_in_it() -> None:
    for message in (*recorded(), refusal()):
        assert SECRET not in message and SECRET[:8] not in message
