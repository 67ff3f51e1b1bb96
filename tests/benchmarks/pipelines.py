"""Pipelines beside what their schedules promise, what actions and halves of backward passes cost, and many calls at once beside calls in turn.

The stages take a known time: they sleep, on the event loop or on a thread of the executor, so that nothing but the runtime and late timers can make
a step longer than the simulation says. How much of that comes from single actions is measured as well: a forward and both halves of a backward are
timed where nothing else runs, and the step is simulated with these times. The time of an action is a step of stages that do next to nothing, divided
by the actions of its schedule.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import parallel, pipeline
from tests.benchmarks.harness import Settings, Table, Timing, goal_cells, interleave, milliseconds, threads

RANKS, MICROBATCHES = 4, 8
#: schedule -> stages per rank
SCHEDULES = {"GPipe": 1, "1F1B": 1, "ZB-H1": 1, "ZBV": 2}

COLUMNS = ["stages, schedule", "simulated ms", "with times alone ms", "step ms min/median", "× alone", "simulated bubble", "bubble", "ratio"]
COLUMNS += ["ideal × 1F1B", "× 1F1B", "target", "", "verdict"]

service = dist.Service()


@service.reference
class Scale(ag.nn.Module):
    """A stage that does next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ag.nn.Parameter(np.ones(4, dtype=np.float32))

    async def forward(self, x: Any) -> Any:
        """The product with the weight."""
        return x * self.weight


@service.reference
class ScaledLoss(Scale):
    """The last stage with the loss."""

    async def forward(self, x: Any, target: Any = None) -> Any:
        """The loss of the product with the weight."""
        return _product(x * self.weight, target)


class Sleep(ag.Function):
    """A sum whose halves take a known time on the event loop: one `seconds` there, one for the gradient of each argument back."""

    @staticmethod
    async def forward(ctx: Any, x: Any, weight: Any, seconds: float) -> Any:
        """The sum, after some time."""
        ctx.seconds = seconds
        await asyncio.sleep(seconds)
        return x + weight

    @staticmethod
    async def backward(ctx: Any, grad: Any) -> Any:
        """The gradients that are needed, each after that time."""
        needs = ctx.needs_input_grad
        await asyncio.sleep(sum(needs[:2]) * ctx.seconds)
        return grad if needs[0] else None, grad.sum() if needs[1] else None, None


class Block(ag.Function):
    """The same on a thread."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, seconds: float) -> Any:
        """The sum, after some time."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradients that are needed, each after that time."""
        needs = ctx.needs_input_grad
        time.sleep(sum(needs[:2]) * ctx.seconds)
        return grad if needs[0] else None, grad.sum() if needs[1] else None, None


def run(settings: Settings) -> Iterator[Table]:
    """Time steps beside their simulation, then actions, halves of backward passes and parallel calls."""
    with threads(1):
        yield ag.run(_halves(settings))
        yield ag.run(_bubbles(settings))
        yield ag.run(_actions(settings))
        yield ag.run(_calls(settings))


def _product(output: Any, target: Any) -> Any:
    return (output * target).sum()


# -------------------------------------------------------------------- halves


async def _halves(settings: Settings) -> Table:
    table = Table(
        "Microseconds of the passes of a stage of n linear layers of 8 with ReLU, batch 8",
        ["layers", "forward", "whole min/median", "inputs min/median", "weights min/median", "both halves × whole", "target", "", "verdict"],
    )
    for layers in (1, 3, 10, 30):
        stage = ag.nn.Sequential(*[layer for _ in range(layers) for layer in (ag.nn.Linear(8, 8), ag.nn.ReLU())])
        timings = {name: Timing() for name in ("forward", "whole", "inputs", "weights")}
        for _ in range(settings.of(400, 2)):
            await _time_halves(stage, timings)
        ratio = (timings["inputs"].minimum + timings["weights"].minimum) / timings["whole"].minimum
        cells = [f"{timing.minimum * 1e6:.0f}/{timing.median * 1e6:.0f}" for timing in list(timings.values())[1:]]
        goals = goal_cells(None if settings.tiny else ratio, 2.2, 2.0)
        table.add(layers, f"{timings['forward'].minimum * 1e6:.0f}", *cells, f"{ratio:.2f}", *goals)
    return table


async def _time_halves(stage: Any, timings: dict[str, Timing]) -> None:
    clock = time.perf_counter
    weights = list(stage.parameters())
    x, grad = ag.ones((8, 8)).requires_grad_(), ag.ones((8, 8))
    started = clock()
    y = stage(x)
    timings["forward"].seconds.append(clock() - started)
    started = clock()
    await pipeline.stage_backward(y, grad, [x])
    timings["whole"].seconds.append(clock() - started)
    y = stage(x)
    started = clock()
    _, groups = await pipeline.stage_backward_input(y, grad, [x], weights)
    timings["inputs"].seconds.append(clock() - started)
    started = clock()
    await pipeline.stage_backward_weight(weights, groups)
    timings["weights"].seconds.append(clock() - started)


# -------------------------------------------------------------------- bubbles


async def _bubbles(settings: Settings) -> Table:
    seconds = 0.002 if settings.tiny else 0.02
    table = Table(
        f"A step of {RANKS} ranks and {MICROBATCHES} microbatches whose F, I and W take {seconds * 1e3:g} ms each",
        COLUMNS,
    )
    costs = pipeline.Costs(forward=seconds, input_backward=seconds, weight_backward=seconds)
    x, target = ag.ones((MICROBATCHES, 4)), ag.ones((MICROBATCHES, 4))
    async with ag.Engine(threads=RANKS):
        for where, make_stage in (("loop", Waiting), ("executor", Blocking)):
            simulated: dict[str, pipeline.Timeline] = {}
            alone: dict[str, float] = {}
            steps: dict[str, Callable[[], Any]] = {}
            for name, per_rank in SCHEDULES.items():
                schedule = pipeline.make_schedule(name, RANKS, MICROBATCHES, per_rank)
                simulated[name] = pipeline.simulate(schedule, costs)
                stages = [make_stage(seconds / per_rank) for _ in range(RANKS * per_rank)]
                times = await _times_alone(stages[0], where, settings)
                alone[name] = pipeline.simulate(schedule, pipeline.Costs(*[per_rank * each for each in times])).duration
                steps[name] = functools.partial(pipeline.Pipeline(stages, schedule, loss_fn=_product).step, x, target)
            timings = await interleave(steps, rounds=settings.of(4, 1), repeats=1, warm=0 if settings.tiny else 1)
            for name, timing in timings.items():
                cells = _bubble_cells(simulated[name], alone[name], timing)
                ideal, found = simulated[name].duration / simulated["1F1B"].duration, timing.minimum / timings["1F1B"].minimum
                goals = goal_cells(found, round(1.05 * ideal, 3), None) if name.startswith("ZB") and not settings.tiny else ["", "", ""]
                table.add(f"{where}, {name}", *cells, f"{ideal:.3f}", f"{found:.3f}", *goals)
    table.notes.append("bubble: the share of a step in which a rank does not compute; ratio: that over the simulated one, ideally 1")
    table.notes.append("× alone: the step over the simulation with the times that F, I and W take where nothing else runs")
    return table


async def _times_alone(stage: Any, where: str, settings: Settings) -> list[float]:
    """Seconds that a forward and both halves of a backward of a stage take, in the middle of several."""
    timings = [Timing() for _ in range(3)]
    weights = list(stage.parameters())
    clock = time.perf_counter
    for _ in range(settings.of(9, 1)):
        x = ag.ones((1, 4)).requires_grad_()
        started = clock()
        y = await stage(x) if where == "loop" else await ag.offload(stage, x)
        timings[0].seconds.append(clock() - started)
        started = clock()
        _, groups = await pipeline.stage_backward_input(y, ag.ones((1, 4)), [x], weights)
        timings[1].seconds.append(clock() - started)
        started = clock()
        await pipeline.stage_backward_weight(weights, groups)
        timings[2].seconds.append(clock() - started)
    return [timing.median for timing in timings]


def _bubble_cells(simulated: pipeline.Timeline, alone: float, timing: Timing) -> list[str]:
    busy = simulated.cost * (1 - simulated.bubble_rate)
    ideal, found = 1 - busy / simulated.duration, 1 - busy / timing.minimum
    steps = [f"{simulated.duration * 1e3:.1f}", f"{alone * 1e3:.1f}", milliseconds(timing), f"{timing.minimum / alone:.3f}"]
    return [*steps, f"{ideal:.1%}", f"{found:.1%}", f"{found / ideal:.2f}"]


class Waiting(ag.nn.Module):
    """A stage that takes a known time on the event loop; its shift gives the first stage too an input half."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.shift = ag.nn.Parameter(np.zeros(4, dtype=np.float32))
        self.weight = ag.nn.Parameter(np.array(0.5, dtype=np.float32))

    async def forward(self, x: Any) -> Any:
        """The shifted sum with the weight."""
        return await Sleep.apply(x + self.shift, self.weight, self.seconds)


class Blocking(Waiting):
    """The same on a thread."""

    def forward(self, x: Any) -> Any:
        """The shifted sum with the weight."""
        return Block.apply(x + self.shift, self.weight, self.seconds)


def _leaves() -> tuple[Any, Any]:
    """A shift, so that the first stage too has an input half, and a weight."""
    return ag.zeros(4).requires_grad_(), ag.tensor(0.5).requires_grad_()


# -------------------------------------------------------------------- actions


async def _actions(settings: Settings) -> Table:
    microbatches = settings.of(32, 4)
    table = Table(
        f"Microseconds per action, stages of one product of 4 floats, {microbatches} microbatches",
        ["where, schedule", "actions", "transfers", "step ms min/median", "µs per action min/median", "the stages alone µs"],
    )
    x, target = ag.ones((microbatches, 4)), ag.ones((microbatches, 4))
    names = [f"stage{i}" for i in range(2)]
    async with dist.LocalCluster(2, names=names, service="tests.benchmarks.pipelines:service") as cluster:
        kinds = zip([*names, names[1]], (Scale, Scale, ScaledLoss), strict=True)
        first, last, loss = [dist.RemoteModule(cluster.driver, name, await cluster.driver.remote(name, kind)) for name, kind in kinds]
        placed = {
            "in process": ([Scale(), Scale()], _product),
            "loopback": ([first, loss], None),
            "loopback, loss in this process": ([first, last], _product),
        }
        for where, (stages, loss_fn) in placed.items():
            for name in ("1F1B", "ZB-H1"):
                schedule = pipeline.make_schedule(name, 2, microbatches)
                async with pipeline.Pipeline(stages, schedule, loss_fn=loss_fn) as pipe:
                    steps = {"step": functools.partial(pipe.step, x, target), "alone": functools.partial(_in_turn, x, target)}
                    timings = await interleave(steps, rounds=settings.of(6, 1), repeats=settings.of(3, 1))
                table.add(f"{where}, {name}", *_per_action(schedule, timings))
    table.notes.append(
        "loss in this process: a third process, with a forward, a backward and two transfers for each microbatch, which are not among the "
        "actions and transfers of the table"
    )
    table.notes.append("actions: F, B, I and W of all ranks; alone: the same forwards and backwards in turn, whole, without a pipeline, per action")
    return table


async def _in_turn(x: Any, target: Any) -> None:
    stages = [Scale(), Scale()]
    for i in range(len(x)):
        y = x[i : i + 1]
        for stage in stages:
            y = await stage(y)
        await _product(y, target[i : i + 1]).backward()


def _per_action(schedule: pipeline.Schedule, timings: dict[str, Timing]) -> list[str]:
    actions = [action for row in schedule.ranks for action in row if action is not None]
    transfers = sum(action.kind.is_send for row in schedule.lower().ranks for action in row if action is not None)
    step, alone = timings["step"], timings["alone"]
    each = f"{step.minimum / len(actions) * 1e6:.0f}/{step.median / len(actions) * 1e6:.0f}"
    return [str(len(actions)), str(transfers), milliseconds(step), each, f"{alone.minimum / len(actions) * 1e6:.0f}"]


# -------------------------------------------------------------------- parallel map


async def _calls(settings: Settings) -> Table:
    seconds, count = 0.002 if settings.tiny else 0.02, 8
    table = Table(
        f"{count} calls of {seconds * 1e3:g} ms forward and {2 * seconds * 1e3:g} ms backward",
        ["calls", "in turn ms min/median", "at once ms min/median", "speed-up", "ideal", "target", "beyond", "verdict"],
    )
    async with ag.Engine(threads=count):
        for where, function in (("waiting", Sleep), ("on threads", Block)):
            steps = {"turn": _one_by_one(function, seconds, count), "once": _at_once(function, seconds, count)}
            timings = await interleave(steps, rounds=settings.of(5, 1), repeats=1)
            speed = timings["turn"].minimum / timings["once"].minimum
            goals = goal_cells(None if settings.tiny else speed, 0.9 * count, None, higher=True)
            table.add(where, *map(milliseconds, timings.values()), f"{speed:.2f}", f"{count}", *goals)
    return table


def _one_by_one(function: Any, seconds: float, count: int) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        for _ in range(count):
            arguments = *_leaves(), seconds
            y = await function.apply(*arguments) if function is Sleep else await ag.offload(function.apply, *arguments)
            await y.sum().backward()

    return step


def _at_once(function: Any, seconds: float, count: int) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        calls = [(*_leaves(), seconds) for _ in range(count)]
        outputs = await parallel.map_with_parallel_backward(function, *calls)
        total = outputs[0][0].sum()
        for (output,) in outputs[1:]:
            total = total + output.sum()
        await total.backward()

    return step
