"""Schedules in a V that save memory: V-Half and V-Min, with a half and a third of what 1F1B keeps.

Note [Building blocks]
    At equal times each microbatch takes six units on each rank. It is given the same places for F, F, I and I, counted from where it starts,
    and each microbatch starts six units after the one before. How long it stays on a rank decides how many are there at once, so a block
    that turns back early saves memory. Places must not meet modulo six, for which backwards wait a little where the number of ranks asks for
    it. W take free places.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024; without its last step, which reorders the two ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from aiograd.pipeline.schedule.action import ActionKind
from aiograd.pipeline.schedule.named.row import Chunk, Family, Row, Size, two_chunks

_F, _I, _W = ActionKind.F, ActionKind.I, ActionKind.W

#: units per microbatch and rank
_BLOCK = 6


def v_half(rank: int, size: Size) -> Row:
    """Half the memory of 1F1B, and at equal times a bubble between 1F1B's and ZB-H1's.

    2 ranks, 3 microbatches, 2 stages per rank::

        rank 0 | 0F0  .   .  3F0 0F1 3I0 3W0 3F1 0F2  .  0I0 3I1 0W0 3F2 3W1  .  0I1 3I2 0W1 3W2  .  0I2 0W2
        rank 1 |  .  1F0 2F0  .   .  1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1W1  .  2I2 2W2 1I2 1W2
    """
    ranks = size.ranks
    wait = 3 if ranks % 2 == 0 else 0
    return _blocks(rank, size, (2 * rank, 3 * ranks - rank - 2, 3 * ranks + 2 * rank - 1 + wait, 6 * ranks - rank - 2 + wait))


def v_min(rank: int, size: Size) -> Row:
    """A third of the memory of 1F1B, with a smaller bubble at equal times and a larger one where F, I and W differ much.

    2 ranks, 3 microbatches, 2 stages per rank::

        rank 0 | 0F0  .   .  3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2  .  0I2 0W2
        rank 1 |  .  1F0 2F0  .   .  2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    ranks = size.ranks
    wait = 2 if ranks % 3 == 0 else 0
    return _blocks(rank, size, (rank, 2 * ranks - rank - 1, 2 * ranks + rank + wait, 4 * ranks - rank - 1 + wait))


def _blocks(rank: int, size: Size, places: Sequence[int]) -> Row:
    """A row with the actions of each microbatch at fixed places, and W in between."""
    down, up = Chunk(rank), Chunk(size.stages - 1 - rank)
    block = list(zip(places, ((down, _F), (up, _F), (up, _I), (down, _I)), strict=True))
    delayed: deque[Chunk] = deque()
    now = places[0]
    for place, (chunk, kind) in sorted(
        ((place + _BLOCK * microbatch, what) for microbatch in range(size.microbatches) for place, what in block), key=lambda item: item[0]
    ):
        while now < place and delayed:
            yield delayed.popleft().next(_W)
            now += 1
        now = place + 1
        yield chunk.next(kind)
        if kind is _I:
            delayed.append(chunk)
    while delayed:
        yield delayed.popleft().next(_W)


V_HALF: Final = Family("V-Half", v_half, "v", two_chunks)
V_MIN: Final = Family("V-Min", v_min, "v", two_chunks)
