"""Schedules that split backwards to fill the bubble with W: ZB-H1 and ZB-H2 with one stage per rank, ZB-V with two.

Source of all three: Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.named.row import Chunk, Family, Row, Size, one_chunk, two_chunks

_F, _I, _W = ActionKind.F, ActionKind.I, ActionKind.W


def zb_h1(rank: int, size: Size) -> Row:
    """1F1B with split backwards and W put off by as many microbatches as there are ranks before: a smaller bubble in the memory of 1F1B.

    2 ranks, 4 microbatches::

        rank 0 | 0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        rank 1 |  .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
    """
    return _one_stage(rank, size.microbatches, size.ranks - rank, rank)


def zb_h2(rank: int, size: Size) -> Row:
    """Like ZB-H1 with about twice the forwards ahead: no bubble at equal times and enough microbatches, for twice the memory of 1F1B.

    2 ranks, 4 microbatches::

        rank 0 | 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1 |  .  1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    return _one_stage(rank, size.microbatches, 2 * (size.ranks - rank) - 1, 2 * rank)


def _one_stage(rank: int, microbatches: int, ahead: int, delay: int) -> Row:
    """`ahead` forwards, then I, W of `delay` microbatches before and F in turn, until nothing is left."""
    stage = Chunk(rank)
    for _ in range(min(ahead, microbatches)):
        yield stage.next(_F)
    for step in range(microbatches):
        yield stage.next(_I)
        if step >= delay:
            yield stage.next(_W)
        if stage.count(_F) < microbatches:
            yield stage.next(_F)
    while stage.count(_W) < microbatches:
        yield stage.next(_W)


def zb_v(rank: int, size: Size) -> Row:
    """Two stages per rank in a V, so that the first rank has the last stage as well: no bubble at equal times in the memory of 1F1B.

    2 ranks, 4 microbatches, 2 stages per rank::

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """
    return (action for action in _zb_v(rank, size) if action.microbatch is not None and action.microbatch < size.microbatches)


def _zb_v(rank: int, size: Size) -> Iterator[Action]:
    """The row of ZB-V with at least the microbatches that fill its pattern; `zb_v` leaves the surplus ones out."""
    full = max(2 * size.ranks - 1, size.microbatches)
    down, up = Chunk(rank), Chunk(size.stages - 1 - rank)
    for _ in range(2 * (size.ranks - rank) - 1):
        yield down.next(_F)
    for _ in range(rank):
        yield up.next(_F)
        yield down.next(_F)
    for _ in range(size.ranks - rank):
        yield from map(up.next, (_F, _I, _W))
    while up.count(_F) < down.count(_F) or down.count(_F) < full:
        if down.count(_F) < full:
            yield down.next(_F)
        yield from map(down.next, (_I, _W))
        yield from map(up.next, (_F, _I, _W))
    for _ in range(rank):
        yield down.next(_I)
        yield up.next(_I)
    for _ in range(size.ranks - rank):
        yield from map(down.next, (_I, _W))
    for chunk in (up, down):
        while chunk.count(_W) < chunk.count(_I):
            yield chunk.next(_W)


ZB_H1: Final = Family("ZB-H1", zb_h1, "loop", one_chunk)
ZB_H2: Final = Family("ZB-H2", zb_h2, "loop", one_chunk)
ZB_V: Final = Family("ZBVZeroBubble", zb_v, "v", two_chunks)
