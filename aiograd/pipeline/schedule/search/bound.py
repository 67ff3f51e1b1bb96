"""A lower bound on the time of every schedule, so that a search can end when it has found a schedule that attains it.

Note [Three bounds]
    *Work*: a rank has its own to do.

    *Way*: from the first F of a rank to its last W, a microbatch goes to any later stage, that stage does all its F and I one after the other,
    and a microbatch comes back.

    *Memory*, for one stage per rank. Between the first F of a rank and its first I passes at least the time of the way to the last stage and
    back, in which there is nothing else to do than the F that memory lets it take. Likewise between its last F and its last I; there it can do no
    more than the I and W of the microbatches that it keeps at that moment. If memory does not hold all microbatches, these are two different times,
    so the losses in both add up. ZB-H1 meets this bound for the costs in its paper: nothing is faster within the memory of 1F1B.
"""

from __future__ import annotations

import math

from aiograd.pipeline.schedule.search.machine import TOLERANCE, Machine


def lower_bound(machine: Machine) -> float:
    """The largest of the bounds, in the unit of the costs: no orders take less, rounding aside."""
    bound = 0.0
    for rank in range(machine.ranks):
        bound = max(bound, machine.work[rank] + _lost(machine, rank), *_ways(machine, machine.stages_of[rank][0]))
    return bound * (1 + TOLERANCE)


def _ways(machine: Machine, first: int) -> list[float]:
    """The bounds by paths through the stages, from the first stage of a rank and from each later one."""
    bounds = []
    way = 0.0
    for stage in range(first, len(machine.homes)):
        if stage > first:
            way += _there_and_back(machine, stage - 1)
        bounds.append(way + machine.microbatches * sum(machine.time_of(stage)[:2]) + machine.time_of(first)[2])
    return bounds


def _there_and_back(machine: Machine, stage: int) -> float:
    """The time of F and I of a stage, with the transfers to the next and back."""
    forward, inputs, _ = machine.time_of(stage)
    return forward + machine.lag[3 * (stage + 1)] + machine.lag[3 * stage + 1] + inputs


def _lost(machine: Machine, rank: int) -> float:
    """The time that a rank waits for lack of memory."""
    last, microbatches = len(machine.homes) - 1, machine.microbatches
    if last >= machine.ranks or rank == last or machine.limit >= microbatches * machine.whole:
        return 0.0
    most = math.floor(machine.limit / machine.whole)
    forward, inputs, weights = machine.time_of(rank)
    away = sum(_there_and_back(machine, stage) for stage in range(rank, last)) - forward - inputs + sum(machine.time_of(last)[:2])
    possible = 0.0
    for held in range(1, most + 1):
        room = max(0.0, machine.limit - held * machine.whole)
        partial = microbatches if room >= microbatches * machine.partial else math.floor(room / machine.partial)
        possible = max(possible, (held - 1) * (inputs + weights) + partial * weights)
    return max(0.0, away - (most - 1) * forward) + max(0.0, away - possible)
