"""Keyring: the secrets that a worker shares with its peers, and the principal of each.

A key has an id (kid) that travels in the clear, 32 secret bytes that never do, and a principal: the tenant that owns everything opened under it.
Nothing here shows a secret: not in a repr, not in an error.

Note [Rotation]
    Several keys of one principal are accepted side by side; one of them, the primary, is used for dialling. To change a secret without a
    moment in which two workers have no key in common: `add` the new one on every worker (it is accepted, not yet used), `promote` it on
    every worker, `remove` the old one on every worker. A removed key is refused from the next handshake on; connections made with it live
    until they close.

Note [Ids]
    A key that was given no id is named by a fingerprint of its secret (`kid_of`), so two workers that were handed the same 32 bytes agree
    on the id as well. The fingerprint is one-way; like any handshake it lets one test a guess, so secrets must be drawn, not thought up.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError, AuthenticationError

SECRET_BYTES = 32
DEFAULT_PRINCIPAL = "default"
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(what: str, name: str) -> str:
    """`name`, if it can name a worker, a key or a principal.

    Args:
        what: the kind of the name, for the error.

    Raises:
        ArgumentTypeError: it is not a str.
        ArgumentError: it is empty, longer than 128 characters or has characters other than letters, digits, ``.``, ``_`` and ``-``.
    """
    if type(name) is not str:
        raise ArgumentTypeError(f"{what}: expected a str, got {type(name).__name__}")
    if NAME.fullmatch(name) is None:
        raise ArgumentError(f"{what} {name[:128]!r}: expected 1 to 128 characters out of A-Z a-z 0-9 . _ -")
    return name


def check_names(what: str, names: Any) -> tuple[str, ...]:
    """`names` as a tuple, if they can name several workers, each once.

    Args:
        what: the function that got them, for the error.

    Raises:
        ArgumentTypeError, ArgumentError: they cannot.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ArgumentTypeError(f"{what}: expected a list of names of workers, found {type(names).__name__}")
    for name in names:
        check_name(f"{what}: worker name", name)
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ArgumentError(f"{what}: {', '.join(doubled)} stands twice among the names; a worker takes part once")
    return tuple(names)


def check_secret(what: str, secret: bytes) -> bytes:
    """`secret` as bytes, if it has the right type and length.

    Raises:
        ArgumentTypeError, ArgumentError: the secret is not valid; the text names the fault, without the value.
    """
    if not isinstance(secret, bytes | bytearray | memoryview):
        raise ArgumentTypeError(f"{what}: expected {SECRET_BYTES} bytes, got {type(secret).__name__}; text goes through parse_secret")
    secret = bytes(secret)
    if len(secret) != SECRET_BYTES:
        raise ArgumentError(f"{what}: expected {SECRET_BYTES} bytes, got {len(secret)}; draw them with secrets.token_bytes({SECRET_BYTES})")
    return secret


def kid_of(secret: bytes) -> str:
    """The id that a secret gets where none is given, see Note [Ids]."""
    return "key-" + hmac.digest(secret, b"aiograd key id", "sha256")[:8].hex()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Key:
    """One secret, its id and its principal. Compared by identity, so that no comparison takes a time that depends on the secret."""

    kid: str
    secret: bytes
    principal: str

    def __repr__(self) -> str:
        return f"Key(kid={self.kid!r}, principal={self.principal!r})"

    def derive(self, purpose: bytes) -> bytes:
        """A key for one purpose only, so that a tag made for one purpose never passes for another."""
        return hmac.digest(self.secret, b"aiograd " + purpose, "sha256")


#: used in place of the key if a kid is unknown, so that it takes the same time
NOBODY = Key("nobody", bytes(32), "nobody")


class Keyring:
    """The keys that a worker accepts and dials with.

    Args:
        secret: the first key: 32 bytes.
        kid: its id; None: a fingerprint of the secret (both sides must use the same).
        principal: the owner of the key; the principal of calls that name none.

    Raises:
        ArgumentError, ArgumentTypeError: the secret or a name cannot be used.

    >>> keyring = dist.Keyring(bytes(range(32)), kid="may", principal="alice")
    >>> keyring.add("june", bytes(range(1, 33)), "alice", primary=True)
    >>> keyring.default_principal
    'alice'
    """

    __slots__ = ("default_principal", "_keys", "_primary")

    def __init__(self, secret: bytes, *, kid: str | None = None, principal: str = DEFAULT_PRINCIPAL) -> None:
        self.default_principal: str = principal
        self._keys: dict[str, Key] = {}
        self._primary: dict[str, str] = {}
        secret = check_secret("Keyring(secret=...)", secret)
        self.add(kid_of(secret) if kid is None else kid, secret, principal)

    def add(self, kid: str, secret: bytes, principal: str = DEFAULT_PRINCIPAL, *, primary: bool = False) -> None:
        """Accept one more key.

        The first key of a principal is its primary one; later ones only when `primary` is set, see Note [Rotation].

        Args:
            kid: id of the key, the same on both sides.
            secret: 32 bytes, known to no other principal.
            principal: the owner of the key.
            primary: use it for dialling from now on.

        Raises:
            ArgumentError, ArgumentTypeError: a name or the secret cannot be used, the id is taken, or another principal has this secret.
        """
        check_name("key id", kid)
        check_name("principal", principal)
        secret = check_secret(f"secret of key {kid!r}", secret)
        if kid in self._keys:
            raise ArgumentError(f"adding key {kid!r}: this id is taken; remove that key first, or give the new one an id of its own")
        for key in self._keys.values():
            if key.principal != principal and hmac.compare_digest(key.secret, secret):
                raise ArgumentError(
                    f"adding key {kid!r} of principal {principal!r}: key {key.kid!r} of principal {key.principal!r} has the same secret; "
                    "expected a secret per principal, else neither is kept apart from the other"
                )
        self._keys[kid] = Key(kid, secret, principal)
        if primary or principal not in self._primary:
            self._primary[principal] = kid

    def promote(self, kid: str) -> None:
        """Dial with this key for its principal from now on.

        Args:
            kid: id of the key.

        Raises:
            ArgumentError: there is no such key.
        """
        self._primary[self._existing("promoting", kid).principal] = kid

    def remove(self, kid: str) -> None:
        """Refuse this key from now on. If it was the primary one, the newest of its principal takes its place.

        Args:
            kid: id of the key.

        Raises:
            ArgumentError: there is no such key.
        """
        principal = self._existing("removing", kid).principal
        del self._keys[kid]
        if self._primary[principal] == kid:
            rest = [key.kid for key in self._keys.values() if key.principal == principal]
            if rest:
                self._primary[principal] = rest[-1]
            else:
                del self._primary[principal]

    @property
    def principals(self) -> tuple[str, ...]:
        """The principals with a key here, in the order of their first keys."""
        return tuple(self._primary)

    def key_for(self, principal: str) -> Key:
        """The key to dial with on behalf of `principal`.

        Args:
            principal: its name.

        Returns:
            The key.

        Raises:
            AuthenticationError: there is none.
        """
        kid = self._primary.get(principal)
        if kid is None:
            raise AuthenticationError(
                f"looking up the key of principal {principal!r}: there is none; this worker has keys of "
                f"{', '.join(map(repr, self._primary)) or 'none'}; add one to its Keyring"
            )
        return self._keys[kid]

    def find(self, kid: str) -> Key | None:
        """The key with this id, or None.

        Args:
            kid: id of the key.

        Returns:
            The key, or None.
        """
        return self._keys.get(kid)

    def _existing(self, doing: str, kid: str) -> Key:
        key = self._keys.get(kid)
        if key is None:
            raise ArgumentError(f"{doing} key {kid!r}: there is no such key; this keyring has {', '.join(map(repr, self._keys)) or 'none'}")
        return key

    def __repr__(self) -> str:
        return f"Keyring({', '.join(f'{key.kid!r} of {key.principal!r}' for key in self._keys.values())})"
