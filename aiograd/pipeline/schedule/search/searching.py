"""Searches for a schedule that wastes little time with given costs, within given memory.

Note [How it is searched]
    1. All schedules of the literature that have the right size, so that the result is as good as the best of them.
    2. For one stage per rank, the heuristic of the zero-bubble paper (`rounds`); how many forwards each stage takes ahead is then varied by
       one at a time, as long as that helps.
    3. A greedy one (`greedy`) for each layout; how many microbatches each stage may hold is varied likewise.
    4. The best of all these are improved by moving single actions (`descent`).

    The search ends as soon as no time is wasted, or after an effort that is counted in steps timed: the result depends on the arguments
    alone and takes seconds. Of schedules that take the same time the one that keeps least is preferred.

Note [What each phase adds]
    Measured over the 12 cases of the zero-bubble paper's tables (5 and 9) and 80 drawn pipelines: 2 to 8 ranks, 2 to 20 microbatches, 1 to 3 stages
    per rank, even and uneven costs, limits of memory. The schedule found takes longer, by more than 0.1 %, without

    - `rounds`: in 5 of the 12 published cases, by up to 2.6 % (nothing else adds to these); without varying the forwards ahead: in 4, by 0.2 %;
    - `greedy`: in 33 of 41 drawn cases with several stages per rank, 16 of which have no schedule at all then; without varying what stages
      hold: in 11, by up to 32 %;
    - `descent`: in 8 of 24 drawn cases with several stages, by up to 4.8 %, and in 3 of 35 with one, by up to 4.1 %; improving only the best: in 3.

    The bound adds nothing but speed: a search that meets it at once takes 0.03 s in place of 1. Left out, because they add nothing: the
    paper's heuristic in 7 further settings (a forward ahead may put the first backward off, a stage may leave a forward out, W go into all short
    gaps), and a greedy one that fills short gaps only on the rank with the largest bubble: without them no published case changes, and 74 drawn
    ones end between 0.3 % longer and 3.7 % shorter, 0.05 % shorter on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.layout import Layout, stage_layout
from aiograd.pipeline.schedule.named import FAMILIES, build_named
from aiograd.pipeline.schedule.named.row import Size
from aiograd.pipeline.schedule.schedule import Schedule
from aiograd.pipeline.schedule.search.bound import lower_bound
from aiograd.pipeline.schedule.search.descent import descend
from aiograd.pipeline.schedule.search.greedy import greedily
from aiograd.pipeline.schedule.search.machine import FORWARD, INPUT, TOLERANCE, WEIGHT, Machine, Order, Orders
from aiograd.pipeline.schedule.search.rounds import in_rounds

#: steps timed while varying one heuristic, and while moving actions; a million takes about a quarter of a second
_EFFORT: Final = 2_500_000
#: how many of the best are improved by moving actions
_IMPROVED: Final = 4


class _Found(NamedTuple):
    """Orders that keep to the limit of memory."""

    #: longest span, and sum of the squares of all
    score: tuple[float, float]
    #: most memory of a rank
    peak: float
    machine: Machine
    orders: Orders
    name: str


def search_schedule(
    ranks: int, microbatches: int, stages_per_rank: int = 1, *, costs: Costs | None = None, memory_limit: float | None = None
) -> Schedule:
    """A schedule that wastes little time with given costs, within given memory; see Note [How it is searched].

    It takes no more time than any schedule of the literature that keeps to the limit.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches.
        stages_per_rank: number of stages of each rank. How they are laid out is up to the search.
        costs: the costs of one microbatch; None: equal times and free transfers.
        memory_limit: the most activations a rank may keep, in the unit of `costs.activation_memory`; None: no limit.

    Returns:
        A compute-only schedule.

    Raises:
        ArgumentError: numbers that do not fit, or a limit that does not hold a single microbatch.
        ArgumentTypeError: values of other types.
    """
    size = Size.checked(ranks, microbatches, stages_per_rank)
    if costs is not None and not isinstance(costs, Costs):
        raise ArgumentTypeError(f"costs of a search for a pipeline schedule must be Costs(forward, ...), not {type(costs).__name__}")
    if memory_limit is not None and (isinstance(memory_limit, bool) or not isinstance(memory_limit, int | float)):
        raise ArgumentTypeError(f"memory_limit of a pipeline schedule must be a number or None, not {type(memory_limit).__name__}")
    if memory_limit is not None and not memory_limit >= 0:
        raise ArgumentError(f"memory_limit of a pipeline schedule must not be below zero, found {memory_limit}")
    return _Search(size, Costs(1, 1, 1) if costs is None else costs, memory_limit).run()


class _Search:
    def __init__(self, size: Size, costs: Costs, memory_limit: float | None) -> None:
        self.size = size
        self.costs = costs
        self.memory_limit = memory_limit
        layouts: tuple[Layout, ...] = ("loop",) if size.chunks == 1 else ("loop", "v")
        self.machines = {layout: self.machine(layout) for layout in layouts}
        #: no orders of a machine take less time
        self.bounds = {machine: lower_bound(machine) for machine in self.machines.values()}
        machine = self.machines["loop"]
        forwards: Order = [3 * stage + FORWARD for stage in machine.stages_of[0]]
        least = machine.peak([*forwards, *(step + kind for step in reversed(forwards) for kind in (INPUT, WEIGHT))])
        if least > machine.limit:
            raise ArgumentError(
                f"memory_limit={memory_limit} does not hold the activations of one microbatch, {least:g}: no schedule of {size.ranks} ranks with "
                f"{size.chunks} stages each keeps less; raise the limit or make the microbatches smaller"
            )
        self.found: list[_Found] = []

    def machine(self, layout: Layout) -> Machine:
        return Machine(
            stage_layout(self.size.ranks, self.size.stages, layout), self.size.ranks, self.size.microbatches, self.costs, self.memory_limit
        )

    def run(self) -> Schedule:
        for part in (self.literature, self.rounds, self.greedy, self.improve):
            part()
            if self.best.score[0] <= self.bounds[self.best.machine]:
                break
        best = self.best
        return best.machine.schedule_of(best.orders, f"auto ({best.name})").validate()

    @property
    def best(self) -> _Found:
        """The first with least memory among the schedules of least time."""
        least = min(found.score[0] for found in self.found)
        return min((found for found in self.found if found.score[0] <= least * (1 + TOLERANCE)), key=lambda found: found.peak)

    def add(self, machine: Machine, orders: Orders | None, name: str) -> _Found | None:
        """Takes note of orders if they can run within the limit."""
        if orders is None or not machine.fits(orders):
            return None
        timing = machine.time(orders)
        if timing is None:
            return None
        found = _Found(timing.score, max(map(machine.peak, orders)), machine, orders, name)
        self.found.append(found)
        return found

    def literature(self) -> None:
        for family in FAMILIES:
            if not family.check(self.size):
                schedule = build_named(family.name, *self.size)
                if not schedule.is_forward_only:
                    machine = self.machines[family.layout]
                    self.add(machine, machine.orders_of(schedule), family.name)
        if not self.found:  # greedy always finds one
            self.greedy()

    def rounds(self) -> None:
        if self.size.chunks > 1:
            return
        machine = self.machines["loop"]

        def make(ahead: list[int] | None) -> Iterable[Orders | None]:
            return [in_rounds(machine, ahead)]

        self.vary(machine, make, _ahead, "rounds")

    def greedy(self) -> None:
        for layout, machine in self.machines.items():

            def make(caps: list[int] | None, machine: Machine = machine) -> Iterable[Orders | None]:
                return (greedily(machine, short_gaps, caps) for short_gaps in (False, True))

            self.vary(machine, make, _held, f"greedy, {layout}")

    def vary(
        self,
        machine: Machine,
        make: Callable[[list[int] | None], Iterable[Orders | None]],
        measure: Callable[[Machine, Orders], list[int]],
        name: str,
    ) -> None:
        """Note the schedule of a heuristic, then vary its numbers, one per stage, up and down, as long as that helps."""
        end = machine.steps_timed + _EFFORT
        best: _Found | None = None
        for orders in make(None):
            found = self.add(machine, orders, name)
            if found is not None and (best is None or found.score < best.score):
                best = found
        if best is None:
            return
        numbers = measure(machine, best.orders)
        helped = True
        while helped and machine.steps_timed < end and best.score[0] > self.bounds[machine]:
            helped = False
            for stage in range(len(numbers)):
                for change in (1, -1):
                    varied = numbers.copy()
                    varied[stage] += change
                    if not 1 <= varied[stage] <= self.size.microbatches or machine.steps_timed >= end:
                        continue
                    for orders in make(varied):
                        found = self.add(machine, orders, name)
                        if found is not None and found.score < best.score:
                            best, numbers, helped = found, varied, True

    def improve(self) -> None:
        chosen: dict[str, _Found] = {}  # one of each kind, since schedules of one kind end alike
        for found in sorted(self.found, key=lambda found: found.score):
            chosen.setdefault(found.name, found)
        for found in list(chosen.values())[:_IMPROVED]:
            improved = descend(found.machine, found.orders, self.bounds[found.machine], _EFFORT // _IMPROVED)
            self.add(found.machine, improved, found.name)


def _ahead(machine: Machine, orders: Orders) -> list[int]:
    """How many forwards each rank takes before its first input backward."""
    return [next(position for position, step in enumerate(order) if step % 3 == INPUT) for order in orders]


def _held(machine: Machine, orders: Orders) -> list[int]:
    """How many microbatches each stage has at most between F and I."""
    most = [0] * len(machine.homes)
    for order in orders:
        held = [0] * len(machine.homes)
        for step in order:
            held[step // 3] += (step % 3 == FORWARD) - (step % 3 == INPUT)
            most[step // 3] = max(most[step // 3], held[step // 3])
    return most
