"""Schedules with several stages per rank, laid out round and round: smaller stages make a smaller bubble, for more transfers."""

from __future__ import annotations

from collections import deque
from typing import Final

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.named.row import Chunk, Family, Row, Size, any_size, even_rounds

_F, _I, _W, _B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B


def looped_bfs(rank: int, size: Size) -> Row:
    """Breadth first: each chunk takes all microbatches before the next one starts, forward and then backward, last microbatch first.

    2 ranks, 2 microbatches, 2 stages per rank::

        rank 0 | 0F0 0F1 2F0 2F1  .   .   .  2B1---- 2B0---- 0B1---- 0B0----
        rank 1 |  .  1F0 1F1 3F0 3F1 3B1---- 3B0---- 1B1---- 1B0----

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.
    """
    stages = range(rank, size.stages, size.ranks)
    for stage in stages:
        for microbatch in range(size.microbatches):
            yield Action(stage, _F, microbatch)
    for stage in reversed(stages):
        for microbatch in reversed(range(size.microbatches)):
            yield Action(stage, _B, microbatch)


def interleaved_1f1b(rank: int, size: Size) -> Row:
    """1F1B over several chunks: a round of microbatches passes through one chunk, then through the next.

    2 ranks, 4 microbatches, 2 stages per rank::

        rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1----  .  2B2----  .  2B3---- 0B2---- 0B3----
        rank 1 |  .  1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 3B3---- 1B2---- 1B3----

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
    """
    total = size.chunks * size.microbatches
    warm = min((size.chunks - 1) * size.round + 2 * (size.ranks - 1 - rank), total)
    chunks = [Chunk(stage) for stage in range(rank, size.stages, size.ranks)]
    for step in range(total + warm):
        if step < total:
            yield chunks[step // size.round % size.chunks].next(_F)
        if step >= warm:
            yield chunks[-1 - (step - warm) // size.round % size.chunks].next(_B)


def interleaved_zero_bubble(rank: int, size: Size) -> Row:
    """Interleaved 1F1B with split backwards: later ranks put their W off and fill the end with them. Known as ZB1P.

    2 ranks, 4 microbatches, 2 stages per rank::

        rank 0 | 0F0 0F1 2F0 2F1  .  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        rank 1 |  .  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2024, with chunks as in PyTorch.
    """
    total = size.chunks * size.microbatches
    warm = min((size.chunks - 1) * size.round + size.ranks - 1 - rank, total)
    chunks = [Chunk(stage) for stage in range(rank, size.stages, size.ranks)]
    delayed: deque[Chunk] = deque()
    for step in range(total + warm):
        if step < total:
            yield chunks[step // size.round % size.chunks].next(_F)
        if step >= warm:
            chunk = chunks[-1 - (step - warm) // size.round % size.chunks]
            yield chunk.next(_I)
            delayed.append(chunk)
            if step - warm >= rank:
                yield delayed.popleft().next(_W)
    while delayed:
        yield delayed.popleft().next(_W)


LOOPED_BFS: Final = Family("LoopedBFS", looped_bfs, "loop", any_size)
INTERLEAVED_1F1B: Final = Family("Interleaved1F1B", interleaved_1f1b, "loop", even_rounds)
INTERLEAVED_ZERO_BUBBLE: Final = Family("InterleavedZeroBubble", interleaved_zero_bubble, "loop", even_rounds)
