"""Identities: peers are found by the name of a worker and the principal that it acts for, never by the name alone.

Note [Names of tenants]
    A name is as good as the key that it is proved with, so each principal has names of its own: "w1" of one and "w1" of another are two
    workers, which may be in different places and of which one may be restarted or lost without the other. All state that a worker keeps of its
    peers (sessions, budgets, URLs, losses) is keyed by `PeerId`. State that belongs to an object with one principal, such as a
    context, is keyed by name within it.
"""

from __future__ import annotations

from typing import NamedTuple


class PeerId(NamedTuple):
    """Another worker, as a principal sees it."""

    principal: str
    name: str


class PeerIdentity(NamedTuple):
    """The proven identity of a peer: a worker's name, 16 bytes that differ each time it is started, and the principal that it acts for."""

    name: str
    incarnation: bytes
    principal: str

    @property
    def peer(self) -> PeerId:
        """The worker, whichever time it was started."""
        return PeerId(self.principal, self.name)
