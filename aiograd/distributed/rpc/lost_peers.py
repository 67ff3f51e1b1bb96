"""LostPeers: when the silence of each lost peer was over. See Note [Silence is counted once] in `aiograd.coordination.silence`."""

from __future__ import annotations

from aiograd.distributed.rpc.identity import PeerId


class LostPeers:
    """When the silence of each of the peers that were lost last was over.

    Args:
        most: peers that are remembered.
    """

    __slots__ = ("_most", "_over")

    def __init__(self, most: int) -> None:
        self._most = most
        #: oldest first
        self._over: dict[PeerId, float] = {}

    def note(self, peer: PeerId, over: float, *, was_heard: bool) -> None:
        """A session has ended.

        Args:
            peer: the peer.
            over: when its silence is over, from its last frame in that session or, before that, from the moment in which it was dialled.
            was_heard: there was a frame. Dialling alone changes nothing about a peer that was heard, or dialled, before.
        """
        before = self._over.pop(peer, None)
        if before is not None:
            over = max(before, over) if was_heard else before
        elif len(self._over) >= self._most:
            del self._over[next(iter(self._over))]
        self._over[peer] = over

    def over(self, peer: PeerId) -> float | None:
        """When the silence of a peer was over, by sessions that have ended; None: there was none."""
        return self._over.get(peer)
