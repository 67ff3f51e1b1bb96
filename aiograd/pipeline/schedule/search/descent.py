"""Makes a schedule better step by step: looks where a rank waits, and moves one thing so that it does not.

Note [Moves]
    Ranks are looked at from the longest span down, their gaps from the longest down. Moves that may close a gap:

    - something later into it: the next step of each number after it;
    - something earlier into it: the last step of each number before it, since the following steps then come earlier;
    - the awaited step, earlier on its rank, or a W that its rank does before it, after it; or the same for the step that this one awaits, and so on.

    A move may cost memory; W are then done earlier where that makes room. The first move that makes the longest span shorter, or leaves
    it and makes the others shorter, is kept, and the search goes on from there until there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from aiograd.pipeline.schedule.search.machine import TOLERANCE, WEIGHT, Machine, Orders, Timing

#: how far a step that is waited for is moved at once
_FORWARD_BY = (1, 2, 3)


class _Move(NamedTuple):
    rank: int
    #: position to take from, and position to be at afterwards
    source: int
    target: int


def descend(machine: Machine, orders: Orders, bound: float, effort: int) -> Orders:
    """Improves orders; see Note [Moves].

    Args:
        machine: the pipeline.
        orders: the orders of a schedule that the machine can run within its memory.
        bound: a time that is good enough, for all ranks and for one.
        effort: the most steps to time.
    """
    timing = machine.time(orders)
    end = machine.steps_timed + effort
    while timing is not None and max(timing.spans) > bound and machine.steps_timed < end:
        better = _first_better(machine, orders, timing, bound, end)
        if better is None:
            break
        orders, timing = better
    return orders


def _first_better(machine: Machine, orders: Orders, timing: Timing, bound: float, end: int) -> tuple[Orders, Timing] | None:
    span, total = timing.score
    tried: set[_Move] = set()
    for move in _moves(machine, orders, timing, bound):
        if machine.steps_timed >= end:
            return None
        order = orders[move.rank]
        if move in tried or order[move.source] == order[move.target]:
            continue
        tried.add(move)
        moved = order.copy()
        moved.insert(move.target, moved.pop(move.source))
        repaired = machine.repaired(moved)
        if repaired is None:
            continue
        candidate = [*orders[: move.rank], repaired, *orders[move.rank + 1 :]]
        found = machine.time(candidate)
        if found is None:
            continue
        new_span, new_total = found.score
        if new_span < span * (1 - TOLERANCE) or (new_span <= span and new_total < total * (1 - TOLERANCE)):
            return candidate, found
    return None


def _moves(machine: Machine, orders: Orders, timing: Timing, bound: float) -> Iterator[_Move]:
    starts = machine.starts(orders, timing)
    places = [_places(order) for order in orders]
    for rank in sorted(range(machine.ranks), key=lambda rank: -timing.spans[rank]):
        if timing.spans[rank] <= bound:
            return
        gaps = [(_wait(machine, orders, starts, rank, position), position) for position in range(1, len(orders[rank]))]
        for gap, position in sorted(gaps, key=lambda item: (-item[0], item[1])):
            if gap <= TOLERANCE * timing.spans[rank]:
                break
            yield from _into(orders, rank, position)
            yield from _sooner(machine, orders, starts, places, rank, position)


def _into(orders: Orders, rank: int, position: int) -> Iterator[_Move]:
    """Moves of other steps into the gap before a position."""
    order = orders[rank]
    seen = {order[position]}
    for source in range(position + 1, len(order)):
        if order[source] not in seen:
            seen.add(order[source])
            yield _Move(rank, source, position)
    seen.clear()
    for source in range(position - 1, -1, -1):
        if order[source] not in seen:
            seen.add(order[source])
            yield _Move(rank, source, position - 1)


def _sooner(
    machine: Machine, orders: Orders, starts: list[list[float]], places: list[dict[int, list[int]]], rank: int, position: int
) -> Iterator[_Move]:
    """Moves that bring forward the step that the one at a position waits for, the step that this one waits for, and so on."""
    while True:
        step = orders[rank][position]
        source = machine.source[step]
        if source < 0:
            return
        microbatch = places[rank][step].index(position)
        rank = machine.home[source]
        position = places[rank][source][microbatch]
        for by in _FORWARD_BY:
            if position >= by:
                yield _Move(rank, position, position - by)
        needed, delayed = position, False
        while position > 0 and _wait(machine, orders, starts, rank, position) <= TOLERANCE * starts[rank][position]:
            position -= 1
            if orders[rank][position] % 3 == WEIGHT and not delayed:
                delayed = True
                yield _Move(rank, position, needed)


def _wait(machine: Machine, orders: Orders, starts: list[list[float]], rank: int, position: int) -> float:
    """How long a rank waits before a position."""
    if position == 0:
        return 0.0
    return starts[rank][position] - starts[rank][position - 1] - machine.duration[orders[rank][position - 1]]


def _places(order: list[int]) -> dict[int, list[int]]:
    """For each step the positions of its microbatches."""
    places: dict[int, list[int]] = {}
    for position, step in enumerate(order):
        places.setdefault(step, []).append(position)
    return places
