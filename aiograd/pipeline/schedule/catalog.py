"""Makes schedules: by the name of one of the literature, or searched for given costs."""

from __future__ import annotations

from aiograd.errors import ArgumentError
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.named import build_named
from aiograd.pipeline.schedule.schedule import Schedule
from aiograd.pipeline.schedule.search import search_schedule


def make_schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int = 1, *, costs: Costs | None = None, memory_limit: float | None = None
) -> Schedule:
    """A schedule of the literature, or "auto": the best one found for given costs.

    Args:
        name: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble (ZB1P), ZB-H1, ZB-H2, ZBVZeroBubble (ZBV), V-Half, V-Min,
            DualPipeV, ForwardOnly or auto; upper and lower case alike.
        ranks: number of ranks.
        microbatches: number of microbatches.
        stages_per_rank: number of stages of each rank; those in a V (ZBV, V-Half, V-Min, DualPipeV) need 2.
        costs: the costs of one microbatch, for "auto"; None takes equal times and free transfers. Other schedules do not depend on
            the costs.
        memory_limit: most memory for activations of a rank, in the unit of `costs`, for "auto" only.

    Returns:
        A compute-only schedule, which can run.

    Raises:
        ArgumentError: no schedule has that name, there is none of that size or within that memory, or a limit for one that knows none.
        ArgumentTypeError: values of other types.
    """
    if isinstance(name, str) and name.lower() == "auto":
        return search_schedule(ranks, microbatches, stages_per_rank, costs=costs, memory_limit=memory_limit)
    schedule = build_named(name, ranks, microbatches, stages_per_rank)
    if memory_limit is not None:
        raise ArgumentError(f"the schedule {schedule.name} takes the memory it takes; memory_limit={memory_limit} is for 'auto', which searches one")
    return schedule
