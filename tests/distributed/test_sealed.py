"""A secret that is sealed for one recipient is opened by that one alone, and only as it was sent."""

from __future__ import annotations

import pytest

from aiograd.distributed.cluster.sealed import Recipient, seal
from aiograd.errors import AuthenticationError

SECRET = bytes(range(32))


def test_the_recipient_alone_opens_it() -> None:
    recipient, other = Recipient(), Recipient()
    sealed = seal(SECRET, recipient.public)
    assert recipient.open(sealed) == SECRET and SECRET not in sealed
    assert seal(SECRET, recipient.public) != sealed, "a new key each time"
    with pytest.raises(AuthenticationError, match="another worker"):
        other.open(sealed)


def test_what_was_altered_is_refused_wherever_that_was() -> None:
    recipient = Recipient()
    sealed = seal(SECRET, recipient.public)
    for i in range(len(sealed)):
        with pytest.raises(AuthenticationError, match="altered"):
            recipient.open(sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :])
    for cut in (b"", sealed[:31], sealed[:32], sealed[:-1], bytes(80)):
        with pytest.raises(AuthenticationError):
            recipient.open(cut)
