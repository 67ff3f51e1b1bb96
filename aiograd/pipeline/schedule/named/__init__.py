"""The schedules of the literature, by name.

`single`, `looped`, `zero_bubble`, `v_shape` and `dual_pipe` have one generator each per schedule, with its timetable; Note [Generators] in `row` says
how to read them.
"""

from __future__ import annotations

from typing import Final

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.schedule.layout import stage_layout
from aiograd.pipeline.schedule.named.dual_pipe import DUAL_PIPE_V
from aiograd.pipeline.schedule.named.looped import INTERLEAVED_1F1B, INTERLEAVED_ZERO_BUBBLE, LOOPED_BFS
from aiograd.pipeline.schedule.named.row import Family, Size
from aiograd.pipeline.schedule.named.single import FORWARD_ONLY, GPIPE, ONE_F_ONE_B
from aiograd.pipeline.schedule.named.v_shape import V_HALF, V_MIN
from aiograd.pipeline.schedule.named.zero_bubble import ZB_H1, ZB_H2, ZB_V
from aiograd.pipeline.schedule.schedule import Schedule

FAMILIES: Final = (
    GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, LOOPED_BFS, INTERLEAVED_ZERO_BUBBLE, ZB_H1, ZB_H2, ZB_V, V_HALF, V_MIN, DUAL_PIPE_V, FORWARD_ONLY,
)  # fmt: skip

#: other names in use. PyTorch's two base classes stand for the plainest schedule with one stage and with several stages per rank.
ALIASES: Final = {
    "ZB1P": INTERLEAVED_ZERO_BUBBLE, "ZBV": ZB_V, "ZB-V": ZB_V, "ZBH1": ZB_H1, "ZBH2": ZB_H2, "VHalf": V_HALF, "VMin": V_MIN,
    "PipelineScheduleSingle": GPIPE, "PipelineScheduleMulti": LOOPED_BFS,
}  # fmt: skip

_BY_NAME: Final = {name.lower(): family for name, family in (*((family.name, family) for family in FAMILIES), *ALIASES.items())}


def find_family(name: str) -> Family | None:
    """The named schedule of that name, upper and lower case alike, or None."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"the name of a pipeline schedule is a str such as '1F1B', not {type(name).__name__}")
    return _BY_NAME.get(name.lower())


def build_named(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """A schedule of the literature.

    Args:
        name: such as "1F1B", upper and lower case alike.
        ranks: number of ranks.
        microbatches: number of microbatches.
        stages_per_rank: number of stages of each rank.

    Returns:
        A compute-only schedule.

    Raises:
        ArgumentError: no schedule has that name, or there is none of that size.
        ArgumentTypeError: numbers that are no integers.
    """
    family = find_family(name)
    if family is None:
        raise ArgumentError(f"no pipeline schedule is called {name!r}: there are {', '.join(known.name for known in FAMILIES)} and auto")
    size = Size.checked(ranks, microbatches, stages_per_rank)
    complaint = family.check(size)
    if complaint:
        raise ArgumentError(f"cannot make the schedule {family.name} for {ranks} ranks, {microbatches} microbatches: it {complaint}")
    return Schedule(
        [tuple(family.row(rank, size)) for rank in range(ranks)],
        microbatches=microbatches, stage_to_rank=stage_layout(ranks, size.stages, family.layout), name=family.name,
    )  # fmt: skip
