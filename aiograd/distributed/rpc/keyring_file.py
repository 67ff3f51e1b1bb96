"""Secrets from outside: from text in an environment variable and from files that only the user can read.

Apart from the keyring because it reads files. Never from the command line or a URL: other users see those.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
import warnings

from aiograd.distributed.rpc.keyring import SECRET_BYTES, Keyring
from aiograd.errors import ArgumentError

#: how much of a file is read
FILE_BYTES = 1024
#: the secret of the workers of this process that were given none
_PROCESS_SECRET = secrets.token_bytes(SECRET_BYTES)


def _renew_process_secret() -> None:
    global _PROCESS_SECRET
    _PROCESS_SECRET = secrets.token_bytes(SECRET_BYTES)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_process_secret)


def parse_secret(text: str | bytes, source: str = "secret") -> bytes:
    """The 32 bytes that `text` spells: as 64 hexadecimal digits, as base64 (either alphabet), or raw.

    White space around hexadecimal and base64 text is dropped.

    Args:
        text: the text to parse.
        source: where it was found, for the error.

    Raises:
        ArgumentError: it spells no 32 bytes. The text of the error has its length, not its value.
    """
    try:
        raw = text.encode("ascii") if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        raise _unreadable(source, "characters outside of ASCII") from None  # the original would show them
    if len(raw) == SECRET_BYTES:
        _warn_of_text(raw, source)
        return raw
    stripped = raw.strip()
    if len(stripped) == 2 * SECRET_BYTES:
        try:
            return binascii.unhexlify(stripped)
        except binascii.Error:
            raise _unreadable(source, f"{len(stripped)} characters that are not all hexadecimal digits") from None
    if len(stripped) in (43, 44):  # without and with the padding
        try:
            secret = base64.b64decode(stripped.rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/")) + b"=", validate=True)
        except binascii.Error:
            raise _unreadable(source, f"{len(stripped)} characters that are not all base64") from None
        if len(secret) == SECRET_BYTES:
            return secret
    if len(stripped) == SECRET_BYTES:
        _warn_of_text(stripped, source)
        return stripped
    raise _unreadable(source, f"{len(stripped)} characters")


def read_secret_file(path: str | os.PathLike[str]) -> bytes:
    """The secret in the file at `path`, which must be readable by its owner alone.

    Args:
        path: a regular file (or a link to one) of this user or of root, mode 0600 or 0400.

    Returns:
        The secret's bytes.

    Raises:
        FileNotFoundError: there is no such file. OSError: it cannot be opened.
        ArgumentError: it is no such file, or does not hold a secret.
    """
    # Non-blocking, so that a named pipe cannot hold us; examined by descriptor, so that the file cannot be swapped in between.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        name = os.fspath(path)
        raise FileNotFoundError(
            error.errno,
            f"secret file {name!r}: there is no such file. Make one with `(umask 077; openssl rand -hex {SECRET_BYTES} > {name})`, and copy it to "
            "every machine of the cluster",
        ) from error
    try:
        status = os.fstat(descriptor)
        source = f"secret file {os.fspath(path)!r}"
        if not stat.S_ISREG(status.st_mode):
            raise ArgumentError(f"{source}: expected a regular file")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise ArgumentError(f"{source}: mode is {mode:04o}, so others can use it; expected 0600; draw a new secret and chmod 600 its file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ArgumentError(f"{source}: belongs to user {status.st_uid}, expected {os.geteuid()} (who runs this process) or root")
        return parse_secret(os.read(descriptor, FILE_BYTES), source)
    finally:
        os.close(descriptor)


def _warn_of_text(raw: bytes, source: str) -> None:
    """Warn of 32 letters and digits: taken as they are, they are a passphrase, or half of a secret in hexadecimal."""
    if raw.isalnum():
        warnings.warn(
            f"{source}: {SECRET_BYTES} letters and digits are taken as they are, which are fewer secrets than {SECRET_BYTES} random bytes: were they "
            f"typed, or are they {SECRET_BYTES // 2} bytes in hexadecimal? Make a secret with openssl rand -hex {SECRET_BYTES}",
            stacklevel=4,
        )


def _unreadable(source: str, found: str) -> ArgumentError:
    return ArgumentError(
        f"{source}: expected {SECRET_BYTES} bytes as 64 hexadecimal digits, base64 or raw, got {found}; "
        f"make one with openssl rand -hex {SECRET_BYTES}"
    )


def keyring_of(secret: bytes | str | Keyring | None) -> Keyring:
    """The keyring for a worker's argument `secret`.

    Args:
        secret: 32 bytes, these in hexadecimal or base64 as text, or a Keyring; None takes the file named by ``AIOGRAD_SECRET_FILE``,
            else ``AIOGRAD_SECRET``, else the random secret of this process.

    Raises:
        ArgumentError, ArgumentTypeError: not a secret.
    """
    if isinstance(secret, Keyring):
        return secret
    if secret is None:
        if path := os.environ.get("AIOGRAD_SECRET_FILE"):
            secret = read_secret_file(path)
        elif text := os.environ.get("AIOGRAD_SECRET"):
            secret = parse_secret(text, "AIOGRAD_SECRET")
        else:
            secret = _PROCESS_SECRET
    elif isinstance(secret, str):
        secret = parse_secret(secret, "Worker(secret=...)")
    return Keyring(secret)
