"""Costs of a pipeline, for simulation and search: times of computations and transfers, and memory of activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias

from aiograd.errors import ArgumentError, ArgumentTypeError

#: one number for a whole rank, or one for each stage
Time: TypeAlias = float | Sequence[float]

_TIMES = ("forward", "input_backward", "weight_backward")


class StageTimes(NamedTuple):
    """How long one stage takes for one microbatch."""

    forward: float
    input_backward: float
    weight_backward: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one microbatch. Times are in any unit, the same for all of them; so is memory.

    Args:
        forward: time of the forward of a whole rank, which its stages share evenly; or, where stages differ, a sequence of the times of each.
        input_backward: time of the backward with respect to inputs, given likewise.
        weight_backward: time of the backward with respect to weights, given likewise.
        communication: time of a transfer between two ranks. Transfers do not keep ranks from computing.
        activation_memory: memory that a whole rank keeps for a microbatch between its forward and its backward. Its stages share it evenly.
        weight_memory: the part of it that remains between the input backward and the weight backward.

    Raises:
        ArgumentTypeError: something that is no number.
        ArgumentError: a number below zero or not finite, or computations that take no time at all.

    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=2)
    >>> costs = ag.pipeline.Costs(forward=1, input_backward=1, weight_backward=1)
    >>> ag.pipeline.simulate(schedule, costs).duration
    9.0
    """

    forward: Time
    input_backward: Time
    weight_backward: Time
    communication: float = 0.0
    activation_memory: float = 1.0
    weight_memory: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _TIMES and isinstance(value, Iterable) and not isinstance(value, str):
                object.__setattr__(self, field.name, tuple(_number(f"{field.name} of stage {stage}", time) for stage, time in enumerate(value)))
            else:
                object.__setattr__(self, field.name, _number(field.name, value))
        if not any(any(time) if isinstance(time, tuple) else time for time in (getattr(self, name) for name in _TIMES)):
            raise ArgumentError("costs of a pipeline in which nothing takes any time: give at least one of forward, input_backward, weight_backward")

    def stage_times(self, stages: int, ranks: int) -> tuple[StageTimes, ...]:
        """The times of each stage.

        Args:
            stages: number of stages of the pipeline.
            ranks: number of ranks they are laid out on.

        Returns:
            One entry for each stage.

        Raises:
            ArgumentError: times given for another number of stages.
        """
        columns = []
        for name in _TIMES:
            time = getattr(self, name)
            column = time if isinstance(time, tuple) else (time * ranks / stages,) * stages
            if len(column) != stages:
                raise ArgumentError(
                    f"{name} has times of {len(column)} stages, and the pipeline has {stages}; give one for each, or one number for a whole rank"
                )
            columns.append(column)
        return tuple(map(StageTimes, *columns))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ArgumentTypeError(f"{name} of a pipeline's costs must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an int
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise ArgumentError(f"{name} of a pipeline's costs must be finite and not below zero, found {number:g}")
    return number
