"""Searches for a schedule that wastes little time with given costs, within given memory.

Note [How it is searched]
    1. All schedules of the literature of the right size, so that the result is as good as the best of them.
    2. For one stage per rank, the heuristic of the zero-bubble paper in all its settings (`rounds`); how many forwards each stage takes ahead
       is then varied by one at a time, as long as that helps.
    3. A greedy one (`greedy`), on each layout; how many microbatches each stage may keep is varied likewise.
    4. The best of all these are improved by moving single actions (`descent`).

    The first to waste no time at all ends the search, and so does a fixed effort, counted in steps timed: the result depends on
    the arguments alone, and takes seconds. Of schedules that take the same time the one that keeps least is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.costs import Costs
from aiograd.pipeline.layout import Layout, stage_layout
from aiograd.pipeline.named import FAMILIES, build_named
from aiograd.pipeline.schedule import Schedule
from aiograd.pipeline.search.descent import descend
from aiograd.pipeline.search.greedy import Gaps, greedily
from aiograd.pipeline.search.machine import FORWARD, INPUT, TOLERANCE, WEIGHT, Machine, Orders
from aiograd.pipeline.search.rounds import SETTINGS, in_rounds

#: steps timed by each of: varying what stages take ahead, varying what they may keep, moving actions. A million takes about half a second.
_EFFORT: Final = 1_500_000
#: how many of the best are improved by moving actions
_IMPROVED: Final = 4


class Candidate(NamedTuple):
    """A schedule that has been found."""

    #: longest span and sum of squares of all
    score: tuple[float, float]
    #: most memory of a rank
    peak: float
    machine: Machine
    orders: Orders
    name: str


def search_schedule(
    ranks: int, microbatches: int, stages_per_rank: int = 1, *, costs: Costs | None = None, memory_limit: float | None = None
) -> Schedule:
    """A schedule that takes little time with given costs, within given memory; see Note [How it is searched].

    It takes no more time than any schedule of the literature that keeps to the limit.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches.
        stages_per_rank: number of stages of each rank. The search chooses how they are laid out.
        costs: what one microbatch costs; None: equal times and free transfers.
        memory_limit: the most activations a rank may keep, in the unit of `costs.activation_memory`; None: no limit.

    Returns:
        A compute-only schedule, the same for the same arguments.

    Raises:
        ArgumentError: a limit that does not hold one microbatch, or numbers that do not fit.
        ArgumentTypeError: values of other types.
    """
    return _Search(ranks, microbatches, stages_per_rank, Costs(1, 1, 1) if costs is None else costs, memory_limit).run()
