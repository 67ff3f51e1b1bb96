"""Signed HTTP requests: taken once, by whom they are meant for, as they were sent; and their responses likewise."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.keyring import Key, Keyring
from aiograd.distributed.limits import Limits
from aiograd.distributed.signing import RequestVerifier, SignedRequest, sign_request, sign_response, verify_response
from aiograd.errors import ArgumentError, AuthenticationError, Overloaded

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(100, 132))
KEY = Key("k1", SECRET, "default")
NOW = 1_700_000_000.25
SKEW = Limits().clock_skew
REQUEST = {"method": "GET", "path": "/metrics?since=1", "body": b"body"}


GOLDEN = (
    "AIOGRAD1 kid=k1, sender=a, ts=1700000000250, nonce=f5756e7a40f0657a7c7e530b26b02aae, "
    "mac=b33bce25dbc960c851f2075d1de17bcd8d565d8a7efcb77cc9c610065647da86"
)
GOLDEN_RESPONSE = "AIOGRAD1 nonce=f5756e7a40f0657a7c7e530b26b02aae, mac=0f8269b4002fdad47ca9a1f0380964cf5bb777784184f0b75dffeea392fcf1ea"


def two_tenants() -> Keyring:
    keyring = Keyring(SECRET, kid="k1")
    keyring.add("k2", OTHER_SECRET, "other")
    return keyring


def verifier(name: str = "b", limits: Limits | None = None) -> RequestVerifier:
    return RequestVerifier(name, two_tenants(), limits or Limits())


def sign(key: Key = KEY, *, sender: str = "a", receiver: str = "b", now: float = NOW, seed: object = 1, **other) -> SignedRequest:
    entropy = random.Random(f"{seed}").randbytes
    return sign_request(key, sender=sender, receiver=receiver, now=now, entropy=entropy, **{**REQUEST, **other})


def verify(by: RequestVerifier, authorization: str | None, now: float = NOW, **other) -> SignedRequest:
    return by.verify(authorization, now=now, **{**REQUEST, **other})


def assert_refused(by: RequestVerifier, authorization: str | None, now: float = NOW, **other) -> None:
    """Refused with the text that is the same for everything, and not remembered."""
    before = by.remembered
    with pytest.raises(AuthenticationError) as caught:
        verify(by, authorization, now, **other)
    assert by.remembered <= before
    assert str(caught.value) == str(verifier()._refused())


# ---- requests


def test_a_signed_request_is_taken_and_says_who_asks() -> None:
    caller = verify(verifier(), sign().authorization)
    assert (caller.sender, caller.receiver, caller.key.principal) == ("a", "b", "default")
    other = verify(verifier(), sign(two_tenants().key_for("other"), sender="c").authorization)
    assert (other.sender, other.key.principal) == ("c", "other")


def test_the_header_is_what_it_was_when_it_was_published() -> None:
    assert sign().authorization == GOLDEN
    response = sign_response(verify(verifier(), GOLDEN), status=200, body=b"answer")
    assert response == GOLDEN_RESPONSE


WRONG: dict[str, Callable[[], dict]] = {
    "none": lambda: {"authorization": None},
    "empty": lambda: {"authorization": ""},
    "another scheme": lambda: {"authorization": "Bearer " + SECRET.hex()},
    "wrong key": lambda: {"authorization": sign(Key("k1", OTHER_SECRET, "default")).authorization},
    "unknown kid": lambda: {"authorization": sign(Key("k9", SECRET, "default")).authorization},
    "key of zeros under an unknown kid": lambda: {"authorization": sign(Key("k9", bytes(32), "default")).authorization},
    "kid of another principal": lambda: {"authorization": sign(Key("k2", SECRET, "default")).authorization},
    "another receiver": lambda: {"authorization": sign(receiver="c").authorization},
    "another sender": lambda: {"authorization": sign().authorization.replace("sender=a", "sender=c")},
    "altered method": lambda: {"authorization": sign().authorization, "method": "POST"},
    "altered path": lambda: {"authorization": sign().authorization, "path": "/metrics"},
    "altered query": lambda: {"authorization": sign().authorization, "path": "/metrics?since=2"},
    "altered body": lambda: {"authorization": sign().authorization, "body": b"bodY"},
    "no body": lambda: {"authorization": sign().authorization, "body": b""},
    "method and path run together": lambda: {"authorization": sign(method="GET/", path="x").authorization, "method": "GET", "path": "/x"},
    "expired": lambda: {"authorization": sign(now=NOW - SKEW - 1).authorization},
    "from the future": lambda: {"authorization": sign(now=NOW + SKEW + 1).authorization},
    "redated": lambda: {"authorization": re.sub("ts=[0-9]+", f"ts={int(NOW * 1000) + 1}", sign().authorization)},
    "other nonce": lambda: {"authorization": re.sub("nonce=..", "nonce=00", sign().authorization)},
    "a response": lambda: {"authorization": sign_response(sign(), status=200, body=b"body")},
    "oversized": lambda: {"authorization": sign().authorization + " " * 100_000},
    "with a tail": lambda: {"authorization": sign().authorization + "\n"},
    "twice": lambda: {"authorization": sign().authorization + ", " + sign().authorization},
    "upper case": lambda: {"authorization": sign().authorization.upper()},
    "other digits": lambda: {"authorization": sign().authorization.replace("1", "١")},
}


@pytest.mark.parametrize("attack", WRONG)
def test_a_wrong_request_is_refused(attack: str) -> None:
    by = verifier()
    assert_refused(by, **WRONG[attack]())
    assert by.remembered == 0
    assert verify(by, sign().authorization)  # and does no harm


def test_no_character_of_the_header_can_be_altered() -> None:
    header = sign().authorization
    by = verifier()
    for at in range(len(header)):
        for new in "0a ,=\x00é":
            if header[at] != new:
                assert_refused(by, header[:at] + new + header[at + 1 :])
        assert_refused(by, header[:at])


@given(st.text(max_size=300))
def test_any_text_is_refused(text: str) -> None:
    assert_refused(verifier(), text)


def test_the_refusal_names_the_clock_and_no_secret() -> None:
    text = str(verifier()._refused())
    assert "clock" in text and "60 s" in text
    assert SECRET.hex() not in text
    assert SECRET.hex() not in repr(sign()) and repr(SECRET)[2:20] not in repr(sign())
    assert SECRET.hex() not in repr(verifier())


@pytest.mark.parametrize("path", ["/ünï", "/%C3%BC", "/\udcff", "/\ud800", ""])
def test_any_path_can_be_signed(path: str) -> None:
    assert verify(verifier(), sign(path=path).authorization, path=path)


def test_the_longest_names_fit() -> None:
    keyring = Keyring(SECRET, kid="k" * 128)
    request = sign(keyring.key_for("default"), sender="s" * 128, now=999_999_999_999.0)
    assert verify(RequestVerifier("b", keyring, Limits()), request.authorization, now=999_999_999_999.0)


@pytest.mark.parametrize("bad", [{"sender": "a b"}, {"receiver": ""}, {"now": -1.0}, {"now": 1e13}])
def test_what_cannot_be_signed(bad: dict) -> None:
    with pytest.raises(ArgumentError):
        sign(**bad)


def test_short_entropy_is_noticed() -> None:
    with pytest.raises(ArgumentError, match="entropy gave 4"):
        sign_request(KEY, sender="a", receiver="b", method="GET", path="/", body=b"", now=NOW, entropy=lambda count: b"four")


def test_a_removed_key_is_refused() -> None:
    keyring = two_tenants()
    by = RequestVerifier("b", keyring, Limits())
    verify(by, sign(seed=1).authorization)
    keyring.remove("k1")
    assert_refused(by, sign(seed=2).authorization)


# ---- replay and time


def test_a_request_is_taken_once() -> None:
    by = verifier()
    header = sign().authorization
    verify(by, header)
    for later in (0, 1, SKEW, -SKEW):
        assert_refused(by, header, NOW + later)
    assert verify(by, sign(seed=2).authorization)


@pytest.mark.parametrize("off", [-SKEW, -1.0, 0.0, 1.0, SKEW])
def test_clocks_may_differ_by_so_much(off: float) -> None:
    assert verify(verifier(), sign(now=NOW + off).authorization)


def test_nonces_are_forgotten_when_they_cannot_count_again() -> None:
    by = verifier()
    headers = []
    for second in range(300):
        now = NOW + second
        header = sign(now=now - 30 * (second % 3), seed=second).authorization
        headers.append(header)
        verify(by, header, now)
        assert by.remembered <= 40  # a third of them 60 s old, a third 30 s
        for old in headers[::7]:
            assert_refused(by, old, now)
    assert_refused(by, None, NOW + 1000)
    assert_refused(by, sign().authorization, NOW + 1000)
    assert by.remembered == 0


def test_a_clock_that_jumps_does_not_let_a_request_count_twice() -> None:
    by = verifier()
    header = sign().authorization
    verify(by, header)
    for now in (NOW + 3600, NOW, NOW - 3600, NOW, NOW + 3600, NOW + 1):
        assert_refused(by, header, now)
    assert_refused(by, sign(seed="ahead").authorization, NOW + 3600)
    assert_refused(by, sign(seed="fresh").authorization, NOW)  # what came before the jump stays refused
    assert verify(by, sign(seed="later", now=NOW + 3600).authorization, NOW + 3600)


def test_a_clock_that_is_no_number_lets_nothing_in() -> None:
    with pytest.raises((AuthenticationError, ValueError)):
        verify(verifier(), sign().authorization, float("nan"))


def test_there_is_room_for_so_many_nonces_and_none_is_pushed_out() -> None:
    by = verifier(limits=Limits(nonces=5))
    headers = [sign(seed=seed).authorization for seed in range(6)]
    for header in headers[:5]:
        verify(by, header)
    with pytest.raises(Overloaded) as caught:
        verify(by, headers[5])
    assert caught.value.retry_after > 0
    for header in headers[:5]:
        assert_refused(by, header)
    assert_refused(by, sign(OTHER_KEY, seed=9).authorization)  # a stranger learns nothing of it
    later = NOW + 2 * SKEW + 2
    assert verify(by, sign(seed="later", now=later).authorization, later)
    assert by.remembered == 1


OTHER_KEY = Key("k1", OTHER_SECRET, "default")


# ---- responses


def exchange() -> tuple[SignedRequest, SignedRequest]:
    """A request as it was signed and as it was verified."""
    request = sign()
    return request, verify(verifier(), request.authorization)


def test_a_response_to_a_request_is_believed() -> None:
    request, received = exchange()
    for status, body in ((200, b"answer"), (503, b"")):
        verify_response(request, sign_response(received, status=status, body=body), status=status, body=body)


def response_attacks() -> dict[str, tuple[str | None, int, bytes]]:
    _, received = exchange()
    good = sign_response(received, status=200, body=b"answer")
    other = sign(seed=2)
    return {
        "none": (None, 200, b"answer"),
        "empty": ("", 200, b"answer"),
        "altered status": (good, 201, b"answer"),
        "altered body": (good, 200, b"answeR"),
        "to another request": (sign_response(verify(verifier(), other.authorization), status=200, body=b"answer"), 200, b"answer"),
        "to another request, redirected": (
            re.sub("nonce=[0-9a-f]+", f"nonce={received.nonce.hex()}", sign_response(other, status=200, body=b"answer")),
            200,
            b"answer",
        ),
        "to another request with the same nonce": (
            sign_response(verify(verifier(), sign(path="/").authorization, path="/"), status=200, body=b"answer"),
            200,
            b"answer",
        ),
        "wrong key": (sign_response(received._replace(key=OTHER_KEY), status=200, body=b"answer"), 200, b"answer"),
        "the request reflected": (received.authorization, 200, b"body"),
        "the request's MAC": (f"AIOGRAD1 nonce={received.nonce.hex()}, mac={received.mac.hex()}", 200, b"body"),
        "oversized": (good + " " * 1000, 200, b"answer"),
        "with a tail": (good + "\n", 200, b"answer"),
    }


@pytest.mark.parametrize("attack", response_attacks())
def test_a_wrong_response_is_not_believed(attack: str) -> None:
    request, _ = exchange()
    header, status, body = response_attacks()[attack]
    with pytest.raises(AuthenticationError, match="worker 'b'") as caught:
        verify_response(request, header, status=status, body=body)
    assert SECRET.hex() not in str(caught.value)


def test_no_character_of_a_response_can_be_altered() -> None:
    request, received = exchange()
    header = sign_response(received, status=200, body=b"")
    for at in range(len(header)):
        for new in "0f ,=":
            if header[at] != new:
                with pytest.raises(AuthenticationError):
                    verify_response(request, header[:at] + new + header[at + 1 :], status=200, body=b"")
