"""Which rank each stage of a pipeline lives on."""

from __future__ import annotations

from typing import Literal, TypeAlias

from aiograd.errors import ArgumentError

Layout: TypeAlias = Literal["loop", "v"]


def stage_layout(ranks: int, stages: int, layout: Layout = "loop") -> tuple[int, ...]:
    """For each stage its rank.

    Args:
        ranks: number of ranks.
        stages: number of stages, a multiple of `ranks`.
        layout: "loop": round and round, stage s on rank s mod ranks; "v": to and fro, so that where it turns two neighbouring stages share a
            rank: 4 stages on 2 ranks are 0, 1, 1, 0.

    Returns:
        For each stage the number of its rank.

    Raises:
        ArgumentError: numbers that do not fit, or no such layout.
    """
    if ranks < 1 or stages < 1 or stages % ranks:
        raise ArgumentError(f"cannot lay {stages} stages out on {ranks} ranks: the number of stages must be a positive multiple of that of ranks")
    if layout == "loop":
        return tuple(stage % ranks for stage in range(stages))
    if layout == "v":
        turns = (divmod(stage, ranks) for stage in range(stages))
        return tuple(place if turn % 2 == 0 else ranks - 1 - place for turn, place in turns)
    raise ArgumentError(f"no layout {layout!r} of stages on ranks: expected 'loop' or 'v'")
