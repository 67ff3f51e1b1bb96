"""Schedules with one stage per rank and whole backwards, and the one without backwards."""

from __future__ import annotations

from itertools import repeat
from typing import Final

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.named.row import Chunk, Family, Row, Size, any_size, one_chunk

_F, _B = ActionKind.F, ActionKind.B


def gpipe(rank: int, size: Size) -> Row:
    """All forwards, then all backwards. Simple, and every rank keeps the activations of all microbatches.

    3 ranks, 4 microbatches::

        rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .   .   .  0B0---- 0B1---- 0B2---- 0B3----
        rank 1 |  .  1F0 1F1 1F2 1F3  .   .   .  1B0---- 1B1---- 1B2---- 1B3----
        rank 2 |  .   .  2F0 2F1 2F2 2F3 2B0---- 2B1---- 2B2---- 2B3----

    Source: Huang et al., "GPipe", 2019.
    """
    wait = size.ranks - 1 - rank
    yield from repeat(None, rank)
    yield from (Action(rank, _F, microbatch) for microbatch in range(size.microbatches))
    yield from repeat(None, 3 * wait)  # a forward and a backward, twice as long, for each rank after this one
    yield from (Action(rank, _B, microbatch) for microbatch in range(size.microbatches))


def one_forward_one_backward(rank: int, size: Size) -> Row:
    """One forward, one backward: a rank goes back as soon as it can, so it keeps activations of at most as many microbatches as ranks.

    3 ranks, 4 microbatches::

        rank 0 | 0F0 0F1 0F2  .   .   .   .  0B0---- 0F3 0B1----  .  0B2----  .  0B3----
        rank 1 |  .  1F0 1F1  .   .  1B0---- 1F2 1B1---- 1F3 1B2----  .  1B3----
        rank 2 |  .   .  2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----

    Source: Narayanan et al., "PipeDream", 2019, with a flush after each batch.
    """
    warm = size.ranks - 1 - rank
    stage = Chunk(rank)
    yield from repeat(None, rank)
    for _ in range(warm):
        yield stage.next(_F)
    yield from repeat(None, 2 * warm)
    for _ in range(size.microbatches - warm):
        yield stage.next(_F)
        yield stage.next(_B)
    for _ in range(warm):
        yield None
        yield stage.next(_B)


def forward_only(rank: int, size: Size) -> Row:
    """Forwards only, for evaluation.

    2 ranks, 3 microbatches, 2 stages per rank::

        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2
        rank 1 |  .  1F0 1F1 1F2 3F0 3F1 3F2
    """
    for stage in range(rank, size.stages, size.ranks):
        for microbatch in range(size.microbatches):
            yield Action(stage, _F, microbatch)


def _check_1f1b(size: Size) -> str:
    if size.microbatches < size.ranks:
        return f"needs at least as many microbatches as ranks, not {size.microbatches} for {size.ranks} ranks"
    return one_chunk(size)


GPIPE: Final = Family("GPipe", gpipe, "loop", one_chunk)
ONE_F_ONE_B: Final = Family("1F1B", one_forward_one_backward, "loop", _check_1f1b)
FORWARD_ONLY: Final = Family("ForwardOnly", forward_only, "loop", any_size)
