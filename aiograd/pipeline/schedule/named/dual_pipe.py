"""DualPipeV: two stages per rank in a V, with a forward and a backward side by side in the steady part."""

from __future__ import annotations

from collections import deque
from typing import Final

from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.named.row import Chunk, Family, Row, Size, two_chunks

_F, _I, _W, _B = ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B


def dual_pipe_v(rank: int, size: Size) -> Row:
    """Forwards of one chunk run beside backwards of the other; the transfers of one are hidden by the computations of the other.

    2 ranks, 4 microbatches, 2 stages per rank::

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3;3B1----  .  3F2;0B0---- 3B2----  .  3F3;0B1---- 3B3---- 0I2 0W2 0I3 0W3
        rank 1 |  .  1F0 2F0 1F1 2F1 1F2 2B0---- 2F2;1B0---- 1F3;2B1---- 2F3;1B1---- 2B2---- 1B2----  .  2I3 1I3 2W3 1W3

    Source: the "cut in half" variant of DeepSeek-AI's DualPipe, 2025.
    """
    rest = size.ranks - 1 - rank
    down, up = Chunk(rank), Chunk(size.stages - 1 - rank)
    delayed: deque[Chunk] = deque()  # stages with a W to come, oldest I first

    def backward(chunk: Chunk, split: bool) -> Action:
        if split:
            delayed.append(chunk)
        else:
            chunk.next(_W)  # a full backward has its W in it
        return chunk.next(_I if split else _B)

    for _ in range(2 * rest):
        yield down.next(_F)
    for _ in range(rank + 1):
        yield down.next(_F)
        yield up.next(_F)
    for _ in range(rest):
        yield backward(up, True)
        yield delayed.popleft().next(_W)
        yield up.next(_F)
    for step in range(size.microbatches - 2 * size.ranks + rank + 1):
        forward, back = down.next(_F), backward(up, False)
        if step == 0 and rest == 0:  # the last rank starts these; side by side, its first backward would hold up all others
            yield forward
            yield back
        else:
            yield Action.overlap(forward, back)
        yield Action.overlap(up.next(_F), backward(down, False))
    for _ in range(rest):
        yield backward(up, False)
        yield Action.overlap(up.next(_F), backward(down, False))
    # Backwards are split from the middle of this part on, half a step later on even ranks.
    half, odd = (rank + 1) // 2, rank % 2
    for step in range(rank + 1):
        yield backward(up, step >= half + 1 - odd)
        yield backward(down, step >= half)
    for _ in range(rest):
        yield delayed.popleft().next(_W)
        yield backward(down, True)
    while delayed:
        yield delayed.popleft().next(_W)


def _check(size: Size) -> str:
    if size.microbatches < 2 * size.ranks:
        return f"needs at least twice as many microbatches as ranks, not {size.microbatches} for {size.ranks} ranks"
    return two_chunks(size)


DUAL_PIPE_V: Final = Family("DualPipeV", dual_pipe_v, "v", _check)
