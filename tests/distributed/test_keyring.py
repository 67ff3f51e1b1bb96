"""Keys: which one is used, how they are replaced, how they are read, and that nothing shows them."""

from __future__ import annotations

import base64
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.distributed.rpc.keyring import Keyring, kid_of
from aiograd.distributed.rpc.keyring_file import parse_secret, read_secret_file
from aiograd.errors import ArgumentError, ArgumentTypeError, AuthenticationError

ONE, TWO, THREE = (bytes([number]) * 16 + bytes(range(16)) for number in (1, 2, 3))


def shows(secret: bytes, text: str) -> bool:
    """True if `text` has a secret in any spelling, or a good part of one."""
    spellings = [repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode(), base64.urlsafe_b64encode(secret).decode()]
    spellings.append(secret.decode("latin-1"))
    return any(spelling[at : at + 12] in text for spelling in spellings for at in range(0, len(spelling) - 12, 4))


# ---- which key is used


def test_a_single_key_serves_the_default_principal() -> None:
    keyring = Keyring(ONE)
    key = keyring.key_for(keyring.default_principal)
    assert (key.secret, key.principal, keyring.principals) == (ONE, "default", ("default",))
    assert keyring.find(key.kid) is key
    assert keyring.find("another") is None


def test_workers_with_the_same_secret_agree_on_its_id() -> None:
    assert Keyring(ONE).key_for("default").kid == Keyring(bytearray(ONE)).key_for("default").kid == kid_of(ONE)
    assert kid_of(ONE) != kid_of(TWO)


def test_the_first_key_may_have_a_name_and_a_principal() -> None:
    keyring = Keyring(ONE, kid="2025", principal="alice")
    assert keyring.default_principal == "alice"
    assert keyring.key_for("alice").kid == "2025"


def test_an_added_key_is_accepted_and_not_used_until_it_is_promoted() -> None:
    keyring = Keyring(ONE, kid="old")
    keyring.add("new", TWO)
    assert keyring.key_for("default").kid == "old"
    found = keyring.find("new")
    assert found is not None and found.secret == TWO
    keyring.promote("new")
    assert keyring.key_for("default").kid == "new"
    keyring.remove("old")
    assert keyring.find("old") is None
    assert keyring.key_for("default").kid == "new"


def test_a_primary_key_is_used_at_once_and_the_newest_follows_a_removed_one() -> None:
    keyring = Keyring(ONE, kid="one")
    keyring.add("two", TWO)
    keyring.add("three", THREE, primary=True)
    assert keyring.key_for("default").kid == "three"
    keyring.remove("three")
    assert keyring.key_for("default").kid == "two"


def test_principals_are_kept_apart() -> None:
    keyring = Keyring(ONE)
    keyring.add("alice", TWO, "alice")
    assert keyring.principals == ("default", "alice")
    assert keyring.key_for("alice").secret == TWO
    keyring.promote("alice")
    assert keyring.key_for("default").secret == ONE
    keyring.remove("alice")
    assert keyring.principals == ("default",)
    with pytest.raises(AuthenticationError, match=r"principal 'alice'.*'default'"):
        keyring.key_for("alice")
    with pytest.raises(ArgumentError, match=r"principal 'alice'.*same secret"):
        keyring.add("copy", ONE, "alice")
    keyring.add("again", ONE)  # the same principal may know its secret by two names


def test_a_keyring_may_become_empty() -> None:
    keyring = Keyring(ONE, kid="k")
    keyring.remove("k")
    assert keyring.principals == ()
    with pytest.raises(AuthenticationError, match="has keys of none"):
        keyring.key_for("default")


@pytest.mark.parametrize("secret", [b"", ONE[:-1], ONE + b"x", "text", ONE.hex(), 32, None])
def test_what_is_no_secret_is_refused_without_being_shown(secret: object) -> None:
    keyring = Keyring(THREE)
    for make in (lambda: Keyring(secret), lambda: keyring.add("kid", secret)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError) as caught:
            make()
        assert not shows(ONE, str(caught.value))
    assert keyring.find("kid") is None


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "a\n", "é", "a/b", 3, None])
def test_names_that_cannot_travel_are_refused(name: object) -> None:
    keyring = Keyring(ONE)
    for add in (lambda: keyring.add(name, TWO), lambda: keyring.add("kid", TWO, name)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError if not isinstance(name, str) else ArgumentError):
            add()
    assert keyring.principals == ("default",)


def test_ids_are_unique_and_must_be_known() -> None:
    keyring = Keyring(ONE, kid="k")
    with pytest.raises(ArgumentError, match=r"'k'.*taken"):
        keyring.add("k", TWO)
    assert keyring.key_for("default").secret == ONE
    for act in (keyring.remove, keyring.promote):
        with pytest.raises(ArgumentError, match=r"'other'.*'k'"):
            act("other")


def test_nothing_shows_a_secret() -> None:
    keyring = Keyring(ONE, kid="k")
    keyring.add("alice", TWO, "alice")
    key = keyring.key_for("default")
    for text in (repr(key), str(key), f"{key}", repr(keyring), str(keyring), repr([key]), repr(kid_of(ONE))):
        assert not shows(ONE, text) and not shows(TWO, text)
    assert repr(keyring) == "Keyring('k' of 'default', 'alice' of 'alice')"
    assert key != Keyring(ONE, kid="k").key_for("default")


# ---- reading secrets

SPELLINGS: dict[str, Callable[[bytes], str | bytes]] = {
    "raw": lambda secret: secret,
    "hex": lambda secret: secret.hex(),
    "HEX": lambda secret: secret.hex().upper().encode(),
    "base64": lambda secret: base64.b64encode(secret).decode(),
    "urlsafe": lambda secret: base64.urlsafe_b64encode(secret),
    "unpadded": lambda secret: base64.urlsafe_b64encode(secret).decode().rstrip("="),
    "hex line": lambda secret: secret.hex() + "\n",
    "base64 in white space": lambda secret: b" \t" + base64.b64encode(secret) + b"\r\n",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(secret=st.binary(min_size=32, max_size=32))
def test_every_spelling_gives_the_secret(spelling: str, secret: bytes) -> None:
    assert parse_secret(SPELLINGS[spelling](secret)) == secret


def test_a_raw_secret_may_end_a_line() -> None:
    assert parse_secret("abcdefghijklmnopqrstuvwxyz-12345\n") == b"abcdefghijklmnopqrstuvwxyz-12345"


@pytest.mark.parametrize("text", ["abcdefghijklmnopqrstuvwxyz012345", "0123456789abcdef" * 2 + "\n", b"correcthorsebatterystaplecorrect"])
def test_a_secret_of_letters_and_digits_is_taken_with_a_warning(text: str | bytes) -> None:
    """It was typed, or is half of a secret in hexadecimal."""
    with pytest.warns(UserWarning, match=r"32 letters and digits .*openssl rand -hex 32") as told:
        secret = parse_secret(text)
    assert len(secret) == 32 and not any(secret.decode() in str(warning.message) for warning in told)


def test_a_secret_file_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(path))}.*there is no such file\. Make one with .*openssl rand -hex 32"):
        read_secret_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "", ONE.hex()[:-1], ONE.hex() + "0", "!" + ONE.hex()[1:], "g" * 64, "*" * 44, "=" * 44, "é" * 32, "x" * 2000, ONE + b"x",
        base64.b64encode(ONE + b"x").decode(), "!" + base64.b64encode(ONE).decode().rstrip("="),
    ],
)  # fmt: skip
def test_what_spells_no_secret_is_refused_without_being_shown(text: str | bytes) -> None:
    with pytest.raises(ArgumentError, match=r"^AIOGRAD_SECRET: expected 32 bytes") as caught:
        parse_secret(text, "AIOGRAD_SECRET")
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    whole = "".join(traceback.format_exception(caught.value))
    assert not shows(ONE, whole)
    assert not text or str(text)[:8] not in whole


@given(st.one_of(st.binary(max_size=80), st.text(max_size=80)))
def test_reading_a_secret_ends_in_32_bytes_or_an_error(text: str | bytes) -> None:
    try:
        assert len(parse_secret(text)) == 32
    except ArgumentError:
        pass


def secret_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_ones_own_is_read(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, ONE.hex().encode() + b"\n", mode)
    assert read_secret_file(path) == read_secret_file(str(path)) == ONE
    link = tmp_path / "link"  # as orchestrators mount secrets
    link.symlink_to(path)
    assert read_secret_file(link) == ONE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o777])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ArgumentError, match=rf"mode is {mode:04o}.*chmod 600") as caught:
        read_secret_file(secret_file(tmp_path, ONE.hex().encode(), mode))
    assert not shows(ONE, str(caught.value))


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = secret_file(tmp_path, ONE.hex().encode())
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ArgumentError, match="belongs to user"):
        read_secret_file(path)


def test_what_is_no_secret_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_secret_file(tmp_path / "none")
    tmp_path.chmod(0o700)
    with pytest.raises(ArgumentError, match="regular file"):
        read_secret_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ArgumentError, match="regular file"):  # and does not wait for a writer
        read_secret_file(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="characters"):
        read_secret_file(secret_file(tmp_path, b"0" * 100_000))
    with pytest.raises(ArgumentError, match="characters"):
        read_secret_file(secret_file(tmp_path, b""))
