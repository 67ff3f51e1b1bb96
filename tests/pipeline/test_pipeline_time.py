"""How long a step takes: with stages that take a known time, as long as the simulation of its schedule says, to the last digit."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.pipeline import Pipeline, Schedule, make_schedule
from aiograd.pipeline.schedule.costs import Costs
from aiograd.pipeline.schedule.simulation import simulate
from aiograd.testing import simulated_run
from tests.pipeline.models import schedule


class Slow(ag.Function):
    """The forward has taken its time before; the backward takes one time to the input and another to the weight."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, times: tuple[float, float]) -> Any:
        ctx.times = times
        return x + weight

    @staticmethod
    async def backward(ctx: Any, grad: Any) -> Any:
        needs = ctx.needs_input_grad
        await asyncio.sleep(sum(time for time, need in zip(ctx.times, needs[:2], strict=True) if need))
        return grad if needs[0] else None, grad.sum() if needs[1] else None, None


class SlowStage(ag.nn.Module):
    """Takes `forward_time` seconds, and the times of a backward to the input and to the weight.

    The input is shifted before, so that the first stage too has an input backward that takes its time: to where the data comes in.
    """

    def __init__(self, forward_time: float, *times: float) -> None:
        self.weight = ag.nn.Parameter(ag.tensor(0.5))
        self.shift = ag.nn.Parameter(ag.tensor(0.5))
        self.forward_time = forward_time
        self.times = times

    async def forward(self, x: Any) -> Any:
        await asyncio.sleep(self.forward_time)
        return Slow.apply(x + self.shift, self.weight, self.times)


def measure(order: Schedule, times: tuple[float, float, float] = (1, 1, 1)) -> tuple[float, Any]:
    """Seconds of a step whose ranks take `times` for forward, input and weight backward of a microbatch; and what was done when."""

    async def main() -> tuple[float, Any]:
        per_rank = order.num_stages // order.num_ranks
        stages = [SlowStage(*(time / per_rank for time in times)) for _ in range(order.num_stages)]
        pipe = Pipeline(stages, order, loss_fn=lambda y: y.sum())
        x = ag.tensor(np.zeros((order.num_microbatches, 1), np.float32))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await pipe.step(x)
        return loop.time() - began, pipe.timeline

    return simulated_run(main).value


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "per_rank"),
    [("GPipe", 3, 4, 1), ("1F1B", 4, 8, 1), ("ZB-H1", 4, 8, 1), ("ZB-H2", 4, 8, 1), ("ZBVZeroBubble", 4, 8, 2), ("Interleaved1F1B", 2, 4, 2)],
)
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 1), (1, 1.25, 0.75)])
def test_a_step_takes_as_long_as_its_schedule(name: str, ranks: int, microbatches: int, per_rank: int, times: tuple[float, float, float]) -> None:
    order = make_schedule(name, ranks, microbatches, per_rank)
    took, timeline = measure(order, times)
    expected = simulate(order, Costs(*times))
    assert took == pytest.approx(expected.duration, rel=1e-12) and timeline.cost == pytest.approx(expected.cost, rel=1e-12)
    for rank in range(ranks):
        done, foreseen = ([event for event in each.events if event.rank == rank and event.action.kind.is_compute] for each in (timeline, expected))
        assert [event.action for event in done] == [event.action for event in foreseen]
        np.testing.assert_allclose([event[2:] for event in done], [event[2:] for event in foreseen], rtol=1e-12, atol=1e-12)


def test_zero_bubble_schedules_save_what_they_promise() -> None:
    took = {name: measure(make_schedule(name, 4, 8, 2 if "V" in name else 1))[0] for name in ("1F1B", "ZB-H1", "ZBVZeroBubble")}
    assert took == {"1F1B": 33, "ZB-H1": 27, "ZBVZeroBubble": 25.5}
    assert round(took["ZB-H1"] / took["1F1B"], 3) == 0.818 and round(took["ZBVZeroBubble"] / took["1F1B"], 3) == 0.773


def test_a_forward_and_a_backward_side_by_side() -> None:
    apart, _ = measure(schedule("0F0 0F1 0B0 0B1"))
    together, _ = measure(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    assert (apart, together) == (6, 5)
