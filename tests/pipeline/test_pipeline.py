"""Pipelines on one loop: what a step and an evaluation give, compared with the same microbatches one after the other."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, MicrobatchError, ModeError, PipelineError, ScheduleError
from aiograd.pipeline import ActionKind, Pipeline, Schedule, Stage, StepRandom, make_schedule
from tests.pipeline.models import (
    LATE_WEIGHTS,
    ONE_FORWARD_ONE_BACKWARD,
    SIZE,
    TURN,
    ZERO_BUBBLE,
    as_serial,
    blocks,
    chunks,
    data,
    gradients,
    mean_square,
    schedule,
    serial,
    values,
)
from tests.support import custom_function
from tests.tolerance import assert_close

NAMED = [
    ("GPipe", 3, 4, 1),
    ("1F1B", 3, 4, 1),
    ("ZB-H1", 3, 4, 1),
    ("ZB-H2", 3, 5, 1),
    ("Interleaved1F1B", 2, 4, 2),
    ("LoopedBFS", 2, 3, 2),
    ("InterleavedZeroBubble", 2, 4, 2),
    ("ZBVZeroBubble", 2, 4, 2),
    ("DualPipeV", 2, 4, 2),
    # one rank alone
    ("GPipe", 1, 3, 1),
    ("1F1B", 1, 3, 1),
    ("ZB-H1", 1, 3, 1),
    ("InterleavedZeroBubble", 1, 2, 3),
    # fewer microbatches than ranks
    ("GPipe", 4, 2, 1),
    # wider
    ("Interleaved1F1B", 4, 8, 4),
    ("InterleavedZeroBubble", 4, 6, 3),
    ("ZBVZeroBubble", 4, 8, 2),
    ("DualPipeV", 3, 7, 2),
    ("ZB-H2", 4, 9, 1),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "per_rank"), NAMED)
async def test_every_named_schedule_gives_the_gradients_of_the_serial_run(name: str, ranks: int, microbatches: int, per_rank: int) -> None:
    batch, alone = data(2 * microbatches + 1), blocks(ranks * per_rank)
    pipe = await as_serial(alone, blocks(ranks * per_rank), make_schedule(name, ranks, microbatches, per_rank), batch)
    with ag.no_grad():
        assert np.array_equal((await pipe.eval(batch[0])).numpy(), await forward(alone, microbatches, batch[0]))


async def forward(stages: Any, microbatches: int, x: Any) -> Any:
    parts = []
    for part in chunks(x, microbatches):
        for stage in stages:
            part = stage(part)
        parts.append(part.detach().numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "order", [LATE_WEIGHTS, TURN, ZERO_BUBBLE.lower(), ZERO_BUBBLE.lower(defer_receives=False), Schedule.from_csv(TURN.to_csv())]
)
@pytest.mark.parametrize("where", ["executor", "loop"])
async def test_schedules_of_ones_own(order: Schedule, where: Any) -> None:
    alone, cut = blocks(order.num_stages), blocks(order.num_stages)
    for module in (*alone, *cut):  # what there is already takes part in the sum from the start
        for parameter in module.parameters():
            parameter.grad = ag.tensor(np.full(parameter.shape, 0.1, np.float32))
    await as_serial(alone, cut, order, data(2 * order.num_microbatches + 1), stages=[Stage(module, where=where) for module in cut])


@pytest.mark.parametrize("optimizer", [ag.optim.SGD, ag.optim.Adam])
async def test_training_over_several_steps(optimizer: Any) -> None:
    alone, cut = blocks(2), blocks(2)
    optimizers = [optimizer([p for module in modules for p in module.parameters()], lr=0.05) for modules in (alone, cut)]
    pipe = Pipeline(cut, ZERO_BUBBLE, loss_fn=mean_square)
    seen = []
    for step in range(4):
        x, target = data(9, seed=step)
        losses = await serial(alone, 4, x, target)
        assert values(await pipe.step(x, target)) == losses
        seen.append(sum(losses))
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert [p.numpy().tobytes() for m in cut for p in m.parameters()] == [p.numpy().tobytes() for m in alone for p in m.parameters()]


async def test_gradients_accumulate_over_steps_and_are_scaled_once() -> None:
    alone, cut = blocks(2), blocks(2)
    pipe = Pipeline(cut, ZERO_BUBBLE, loss_fn=mean_square)
    for seed in range(3):
        x, target = data(8, seed=seed)
        await serial(alone, 4, x, target)
        await pipe.step(x, target)
    assert gradients(cut) == gradients(alone)
    whole = blocks(2)
    for seed in range(3):  # the mean over microbatches of equal size is the mean over the batch
        x, target = data(8, seed=seed)
        await mean_square(whole[1](whole[0](x)), target).backward()
    for mine, other in zip((p for m in cut for p in m.parameters()), (p for m in whole for p in m.parameters()), strict=True):
        np.testing.assert_allclose(mine.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-6)


async def test_losses_that_are_sums_are_not_scaled() -> None:
    def loss_fn(output: Any, target: Any) -> Any:
        return ((output - target) ** 2).sum()

    await as_serial(blocks(2), blocks(2), ZERO_BUBBLE, data(9), loss_fn, scale_gradients=False)


# ---------------------------------------------------------------- what stages exchange


class Pair(ag.nn.Module):
    """Exchanges what is no single floating-point Tensor: None, numbers, integers, one Tensor twice, nested containers, and other shapes each time."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.block = blocks(3)[place]

    def forward(self, x: Any, extra: Any = None) -> Any:
        if self.place == 0:
            y = self.block(x)
            rows = x.shape[0]
            return y, {"none": None, "twice": [y, y], "rows": rows, "order": ag.arange(rows), "unused": y * 2, "fixed": x * 3}
        assert extra["twice"][0] is extra["twice"][1] and extra["none"] is None and extra["rows"] == x.shape[0]
        assert extra["order"].dtype.kind == "i" and not extra["fixed"].requires_grad
        y = self.block(x + extra["twice"][0] * extra["twice"][1])
        if self.place == 1:
            extra = {**extra, "twice": [x, x]}  # an input that goes on to the next stage
            return y[extra["order"]], extra
        return ag.concat([y, extra["fixed"][:1] * 0 + y[:1]], axis=0)[: y.shape[0]]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
async def test_stages_exchange_none_numbers_integers_and_changing_shapes(name: str) -> None:
    await as_serial([Pair(i) for i in range(3)], [Pair(i) for i in range(3)], make_schedule(name, 3, 4), data(11))


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
async def test_gradients_that_are_missing_stay_missing(name: str) -> None:
    class Split(ag.nn.Module):
        def __init__(self) -> None:
            self.used, self.unused = blocks(2)

        def forward(self, x: Any) -> Any:
            return self.used(x), self.unused(x)

    class First(ag.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return x

    alone, cut = ([Split(), First(), blocks(1)[0]] for _ in range(2))
    await as_serial(alone, cut, make_schedule(name, 3, 3), data(6))
    assert cut[0].unused[0].weight.grad is None


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
async def test_a_stage_that_needs_no_gradients(name: str) -> None:
    alone, cut = blocks(3), blocks(3)
    for modules in (alone, cut):
        modules[0].requires_grad_(False)
        modules[2].requires_grad_(False)
    await as_serial(alone, cut, make_schedule(name, 3, 3), data(6))
    assert cut[0][0].weight.grad is None


async def test_a_batch_that_wants_a_gradient() -> None:
    x, target = data(9)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    alone, cut = blocks(2), blocks(2)
    await serial(alone, 4, other, target)
    for pipe in (Pipeline(cut, ZERO_BUBBLE, loss_fn=mean_square), Pipeline(cut, ONE_FORWARD_ONE_BACKWARD, loss_fn=mean_square)):
        mine.grad = None
        await pipe.step(mine, target)
        assert np.array_equal(mine.grad.numpy(), other.grad.numpy())
    with pytest.raises(ArgumentError, match="made by an operation"):
        await pipe.step(mine * 1, target)


@pytest.mark.parametrize(("name", "calls"), [("1F1B", {(False, True): 3, (True, True): 6}), ("ZB-H1", {(False, True): 3 + 6, (True, False): 6})])
async def test_functions_of_ones_own_compute_each_half_once(name: str, calls: dict[Any, int]) -> None:
    asked: collections.Counter[tuple[bool, ...]] = collections.Counter()

    @custom_function(lambda x, weight: x * weight, saves=True)
    async def scale(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        asked[needs] += 1
        await asyncio.sleep(0)
        return grad * weight if needs[0] else None, (grad * x).sum(0) if needs[1] else None

    def modules() -> list[Any]:
        weights = [ag.nn.Parameter(ag.tensor(np.linspace(-1, 2, SIZE, dtype=np.float32) + i)) for i in range(3)]
        made = []
        for weight in weights:
            module = ag.nn.Sequential()
            module.weight = weight
            module.forward = lambda x, weight=weight: scale.apply(x.tanh(), weight)  # type: ignore[method-assign,misc]
            made.append(module)
        return made

    await as_serial(modules(), modules(), make_schedule(name, 3, 3), data(6))
    serial_calls = {(False, True): 3, (True, True): 6}
    assert asked - collections.Counter(serial_calls) == calls  # the first stage's input needs no gradient


class Tied(ag.nn.Module):
    """Uses one weight several times, and shares another with all stages."""

    def __init__(self, shared: Any, place: int) -> None:
        self.shared = shared
        self.inner = blocks(place + 1)[place]

    def forward(self, x: Any) -> Any:
        return self.inner(self.inner(x) @ self.shared) @ self.shared.T


def tied(count: int, as_functions: bool = False) -> tuple[list[Any], list[Any]]:
    shared = ag.nn.Parameter(ag.tensor(np.random.default_rng(5).normal(size=(SIZE, SIZE)).astype(np.float32) * 0.5))
    modules = [Tied(shared, i) for i in range(count)]
    return modules, [module.forward for module in modules] if as_functions else modules


@pytest.mark.parametrize("as_functions", [False, True])
@pytest.mark.parametrize(("name", "per_rank"), [("GPipe", 1), ("1F1B", 1), ("ZB-H1", 1), ("ZBVZeroBubble", 2)])
async def test_weights_that_are_shared(name: str, per_rank: int, as_functions: bool) -> None:
    """Within a stage and between stages: the same for every schedule, whether the stages tell their parameters or not."""
    x, target = data(10)
    results = []
    for order in (make_schedule("1F1B", 2 * per_rank, 5), make_schedule(name, 2, 5, per_rank)):
        modules, stages = tied(2 * per_rank, as_functions)
        await Pipeline(stages, order, loss_fn=mean_square).step(x, target)
        results.append(gradients(modules))
    assert results[0] == results[1]
    alone, _ = tied(2 * per_rank)
    await serial(alone, 5, x, target)
    for mine, other in zip((p for m in modules for p in m.parameters()), (p for m in alone for p in m.parameters()), strict=True):
        np.testing.assert_allclose(mine.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-6)


async def test_random_numbers_are_drawn_in_the_order_of_the_microbatches() -> None:
    def modules() -> list[Any]:
        made = blocks(3)
        return [ag.nn.Sequential(module, ag.nn.Dropout(0.5, generator=ag.Generator(i))) for i, module in enumerate(made)]

    for name in ("GPipe", "1F1B", "ZB-H1"):
        await as_serial(modules(), modules(), make_schedule(name, 3, 6), data(12))


async def test_a_target_of_other_rows_is_refused_and_nothing_is_broadcast() -> None:
    modules = blocks(2)
    pipe = Pipeline(modules, ONE_FORWARD_ONE_BACKWARD, loss_fn=mean_square)
    with pytest.raises(MicrobatchError, match="the target has 6 rows"):
        await pipe.step(data(8)[0], data(6)[1])
    assert not any(gradients(modules))


class Noisy(ag.nn.Module):
    """Drops, some of it in a part that is computed again in backward."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.dropout = ag.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.dropout(ag.checkpoint(lambda y: self.dropout(self.inner(y)), self.dropout(x)))


def noisy_loss(output: Any, target: Any) -> Any:
    return mean_square(ag.nn.functional.dropout(output, 0.5), target)


async def serial_with_noise(stages: Any, microbatches: int, x: Any, target: Any) -> list[float]:
    random = StepRandom()
    losses = []
    for m, (part, wanted) in enumerate(zip(chunks(x, microbatches), chunks(target, microbatches), strict=True)):
        for s, stage in enumerate(stages):
            with random.at(s, m):
                part = stage(part)
        with random.at(None, m):
            loss = noisy_loss(part, wanted)
        await loss.backward(ag.tensor(np.float32(1 / microbatches)))
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "ranks", "microbatches", "per_rank"), NAMED[:9])
async def test_dropout_is_drawn_by_stage_and_microbatch(name: str, ranks: int, microbatches: int, per_rank: int) -> None:
    """The same under every schedule and serially, other numbers in the next step, the same again after the same seed."""
    count = ranks * per_rank
    x, target = data(2 * microbatches + 1)
    order = make_schedule(name, ranks, microbatches, per_rank)
    alone = [Noisy(block) for block in blocks(count)]
    ag.seed(4)
    losses = [await serial_with_noise(alone, microbatches, x, target) for _ in range(2)]
    assert losses[0] != losses[1]
    for where in ("executor", "loop"):
        cut = [Noisy(block) for block in blocks(count)]
        pipe = Pipeline([Stage(module, where=where) for module in cut], order, loss_fn=noisy_loss)
        ag.seed(4)
        assert [values(await pipe.step(x, target)) for _ in range(2)] == losses
        assert gradients(cut) == gradients(alone)
        assert values([ag.default_generator().normal(())]) == values([ag.Generator(4).normal(())]), "a step draws nothing from it"


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_step_that_is_taken_again_draws_the_same_random_numbers(is_cancelled: bool) -> None:
    """Also after an evaluation in between; the step after it has others."""
    x, target = data(5)
    ag.seed(4)
    alone = [Noisy(block) for block in blocks(2)]
    losses = [await serial_with_noise(alone, 2, x, target) for _ in range(2)]
    troubles = [1, 2, 3]
    stepping: asyncio.Task[Any]

    async def troubled(output: Any, target: Any) -> Any:
        if troubles:
            troubles.pop()
            if is_cancelled:
                stepping.cancel()
                await asyncio.sleep(0)
            raise OSError("disk")
        return noisy_loss(output, target)

    async with Pipeline([Noisy(block) for block in blocks(2)], make_schedule("1F1B", 2, 2), loss_fn=troubled) as pipe:
        ag.seed(4)
        while troubles:
            stepping = asyncio.ensure_future(pipe.step(x, target))
            with pytest.raises(asyncio.CancelledError if is_cancelled else PipelineError):
                await stepping
            await pipe.eval(x)
        assert values(await pipe.step(x, target)) == losses[0]
        ag.seed(4)
        assert [values(await pipe.step(x, target)) for _ in range(2)] == losses


async def test_a_step_that_raises_after_its_commit_is_not_taken_again() -> None:
    x, target = data(5)
    ag.seed(4)
    alone = [Noisy(block) for block in blocks(2)]
    losses = [await serial_with_noise(alone, 2, x, target) for _ in range(2)]
    cut = [Noisy(block) for block in blocks(2)]
    async with Pipeline(cut, make_schedule("1F1B", 2, 2), loss_fn=noisy_loss) as pipe:
        ag.seed(4)
        hook = next(cut[0].parameters()).register_post_accumulate_grad_hook(lambda leaf: 1 / 0)
        with pytest.raises(Exception, match="division by zero") as caught:
            await pipe.step(x, target)
        assert getattr(caught.value, "committed", False)
        hook.remove()
        assert values(await pipe.step(x, target)) == losses[1]


@pytest.mark.parametrize("seeded", [lambda: ag.seed(4), lambda: ag.default_generator().load_state_dict(ag.Generator(4).state_dict())])
async def test_a_step_after_one_that_failed_follows_a_new_seed(seeded: Callable[[], Any]) -> None:
    x, target = data(5)
    fails = [True]

    def failing(output: Any, target: Any) -> Any:
        if fails and fails.pop():
            raise OSError("disk")
        return noisy_loss(output, target)

    ag.seed(4)
    losses = [await serial_with_noise([Noisy(block) for block in blocks(2)], 2, x, target) for _ in range(2)]
    async with Pipeline([Noisy(block) for block in blocks(2)], make_schedule("1F1B", 2, 2), loss_fn=failing) as pipe:
        ag.seed(5)
        with pytest.raises(PipelineError, match="disk"):
            await pipe.step(x, target)
        seeded()
        assert [values(await pipe.step(x, target)) for _ in range(2)] == losses


async def test_a_seed_of_a_step_is_two_ints() -> None:
    for wrong in ((1,), (1, -1), (1, 2**63), (True, 1), "ab", (1.0, 2)):
        with pytest.raises(ArgumentError, match="expected two ints"):
            StepRandom(wrong)  # type: ignore[arg-type]


class Once(ag.nn.Module):
    """Uses a weight that all stages share, once."""

    def __init__(self, shared: Any, inner: Any) -> None:
        self.shared = shared
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x) @ self.shared


@pytest.mark.parametrize(("name", "per_rank"), [("GPipe", 1), ("1F1B", 1), ("ZB-H1", 1), ("ZBVZeroBubble", 2)])
async def test_a_weight_of_several_stages_has_the_bits_of_the_serial_run(name: str, per_rank: int) -> None:
    x, target = data(10)
    results = []
    for makes_pipeline in (True, False):
        shared = ag.nn.Parameter(ag.tensor(np.random.default_rng(5).normal(size=(SIZE, SIZE)).astype(np.float32) * 0.5))
        modules = [Once(shared, inner) for inner in blocks(2 * per_rank)]
        for _ in range(2):
            if makes_pipeline:
                await Pipeline(modules, make_schedule(name, 2, 5, per_rank), loss_fn=mean_square).step(x, target)
            else:
                await serial(modules, 5, x, target)
        results.append(gradients(modules))
    assert results[0] == results[1]


@pytest.mark.parametrize("place", [0, 1, "loss"])
async def test_a_forgotten_return_is_named(place: Any) -> None:
    def forgetful(*args: Any) -> Any:
        args[0] * 2

    stages: list[Any] = blocks(2)
    if place != "loss":
        stages[place] = forgetful
    pipe = Pipeline(stages, ONE_FORWARD_ONE_BACKWARD, loss_fn=forgetful if place == "loss" else mean_square)
    expected = "what loss_fn returned is None" if place == "loss" else rf"stage {place} \(.*forgetful\) returned None"
    with pytest.raises(PipelineError, match=rf"{expected}.*Was `return` forgotten"):
        await pipe.step(*data(8))


async def test_stages_and_losses_that_wait() -> None:
    module = blocks(2)

    async def first(x: Any) -> Any:
        await asyncio.sleep(0)
        return module[0](x)

    def second(x: Any) -> Any:  # returns a coroutine from a thread
        async def later() -> Any:
            await asyncio.sleep(0)
            return module[1](x)

        return later()

    async def loss_fn(output: Any, target: Any) -> Any:
        await asyncio.sleep(0)
        return mean_square(output, target)

    x, target = data(9)
    alone = blocks(2)
    losses = await serial(alone, 4, x, target)
    assert values(await Pipeline([first, second], ZERO_BUBBLE, loss_fn=loss_fn).step(x, target)) == losses
    assert gradients(module) == gradients(alone)


async def test_the_last_stage_may_return_the_loss_itself() -> None:
    cut, alone = blocks(2), blocks(2)
    x, target = data(9)
    losses = await serial(alone, 4, x, target)

    class Last(ag.nn.Module):
        def __init__(self) -> None:
            self.inner = cut[1]

        def forward(self, x: Any, target: Any) -> Any:
            return mean_square(self.inner(x), target)

    pipe = Pipeline([cut[0], Last()], ZERO_BUBBLE)
    assert values(await pipe.step(x, target)) == losses
    assert gradients(cut) == gradients(alone)


@pytest.mark.parametrize(
    ("loss_fn", "what"),
    [
        (lambda y, t: y, "has shape"),
        (lambda y, t: 1.0, "is a float"),
        (lambda y, t: ag.tensor(1.0), "does not require grad"),
        (lambda y, t: (y * 1j).sum(), "has dtype complex"),
    ],
)
async def test_what_is_no_loss(loss_fn: Any, what: str) -> None:
    modules = blocks(2)
    with pytest.raises(PipelineError, match=what) as caught:
        await Pipeline(modules, ZERO_BUBBLE, loss_fn=loss_fn).step(*data(8))
    assert (caught.value.stage, caught.value.microbatch, caught.value.action) == (1, 0, "1F0")
    assert gradients(modules) == [None] * 4


# ---------------------------------------------------------------- evaluation, and grad mode


async def test_evaluation_before_and_after_training() -> None:
    modules = blocks(2)
    x, target = data(9)
    pipe = Pipeline(modules, ZERO_BUBBLE, loss_fn=mean_square)
    before = await pipe.eval(x)
    assert before.shape == (9, SIZE) and not before.requires_grad and gradients(modules) == [None] * 4
    await pipe.step(x, target)
    alone = blocks(2)
    await serial(alone, 4, x, target)
    assert gradients(modules) == gradients(alone)
    with ag.no_grad():
        assert np.array_equal((await pipe.eval(x)).numpy(), before.numpy())
    assert gradients(modules) == gradients(alone)


async def test_an_evaluation_that_fails_changes_nothing() -> None:
    modules = blocks(2)
    fails = True

    def last(x: Any) -> Any:
        if fails:
            raise ValueError("not today")
        return modules[1](x)

    x, target = data(9)
    pipe = Pipeline([modules[0], last], ZERO_BUBBLE, loss_fn=mean_square)
    with pytest.raises(PipelineError, match="1F0 failed .*ValueError: not today"):
        await pipe.eval(x)
    fails = False
    await pipe.step(x, target)
    assert all(gradients(modules))


async def test_training_without_grad_mode() -> None:
    pipe = Pipeline(blocks(2), ZERO_BUBBLE, loss_fn=mean_square)
    with ag.no_grad(), pytest.raises(ModeError, match=r"call eval\(\)"):
        await pipe.step(*data(8))
    with pytest.raises(ArgumentError, match=r"forwards only; call eval\(\)"):
        await Pipeline(blocks(2), schedule("0F0 0F1 / 1F0 1F1"), loss_fn=mean_square).step(*data(8))


async def test_results_in_other_forms_are_put_together() -> None:
    pipe = Pipeline([lambda x: x + 1, lambda x: {"y": (x, x * 2), "kind": "sum"}], ZERO_BUBBLE)
    x, _ = data(9)
    result = await pipe.eval(x)
    assert result["kind"] == "sum" and np.array_equal(result["y"][1].numpy(), (x.numpy() + 1) * 2)


# ---------------------------------------------------------------- what a step is given


async def test_batches_that_are_split_already() -> None:
    x, target = data(9)
    alone, cut = blocks(2), blocks(2)
    losses = await serial(alone, 4, x, target)
    pipe = Pipeline(cut, ZERO_BUBBLE, loss_fn=mean_square)
    parts, wanted = chunks(x, 4), chunks(target, 4)
    assert values(await pipe.step(arg_mbs=[(part,) for part in parts], target_mbs=wanted)) == losses
    assert gradients(cut) == gradients(alone)
    assert np.array_equal((await pipe.eval(arg_mbs=[(part,) for part in parts])).numpy(), (await pipe.eval(x)).numpy())
    for wrong in ({"arg_mbs": [(part,) for part in parts[1:]]}, {"arg_mbs": parts}, {"arg_mbs": tuple(parts)}, {"x": x, "target_mbs": wanted}):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            await pipe.step(**wrong)
    with pytest.raises(MicrobatchError):
        await pipe.step(*data(3))


async def test_several_arguments() -> None:
    def first(x: Any, y: Any, *, factor: float, shift: Any) -> Any:
        return x * factor + y + shift

    x, y = data(9)
    module = blocks(1)[0]
    pipe = Pipeline([first, module], ZERO_BUBBLE, loss_fn=mean_square)
    result = await pipe.eval((x, y), factor=2.0, shift=x)
    expected = [module(first(*parts, factor=2.0, shift=parts[0])).detach().numpy() for parts in zip(chunks(x, 4), chunks(y, 4), strict=True)]
    assert np.array_equal(result.numpy(), np.concatenate(expected))
    await pipe.step((x, y), y, factor=2.0, shift=x)


async def test_stages_may_be_told_where_they_are() -> None:
    seen: list[tuple[int, int]] = []

    def stage(x: Any, *, stage_idx: int, mb_idx: int) -> Any:
        seen.append((stage_idx, mb_idx))
        return x

    last = blocks(1)[0]
    pipe = Pipeline([Stage(stage, pass_indices=True), last], schedule("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"), loss_fn=mean_square)
    x, target = data(4)
    await pipe.step(x, target)
    assert seen == [(0, 0), (0, 1)]
    with pytest.raises(ValueError, match="reserves"):
        await pipe.step(x, target, mb_idx=3)
    with pytest.raises(ValueError, match="reserves"):
        Stage(lambda x: x, pass_indices=True)


async def test_weights_outside_of_the_graph() -> None:
    """Their backward is called once per microbatch, whether the schedule has it apart or not."""
    done: list[str] = []
    for order in (ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE):

        def build() -> Any:
            number = len(done)
            done.append(f"built {number}")

            async def run() -> None:
                done.append(f"ran {number}")

            return run

        done.clear()
        modules = blocks(2)
        await Pipeline([modules[0], Stage(modules[1], weight_backward=build)], order, loss_fn=mean_square).step(*data(8))
        assert sorted(done) == sorted(f"{what} {line.split()[1]}" for line in done if line.startswith("built") for what in ("built", "ran"))
        assert len(done) == 8 and (done[0][:5], done[1][:3]) == ("built", "ran" if order is ONE_FORWARD_ONE_BACKWARD else "bui")


async def test_actions_that_others_carry_out() -> None:
    done: list[str] = []

    async def note(action: Any) -> None:
        done.append(str(action))

    modules = blocks(2)
    order = schedule("0F0 0B0 / 1F0 1B0").lower(unshard=True, reduce_gradients=True)
    pipe = Pipeline(modules, order, loss_fn=mean_square)
    await pipe.step(*data(2))
    for kind in (ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD):
        pipe.register_action(kind, note)
    await pipe.step(*data(2))
    assert sorted(done) == ["0REDUCE_GRAD", "0RESHARD", "0UNSHARD", "1REDUCE_GRAD", "1RESHARD", "1UNSHARD"]
    with pytest.raises(ValueError, match="SEND_F"):
        pipe.register_action(ActionKind.SEND_F, note)


# ---------------------------------------------------------------- hooks and order


@pytest.mark.parametrize("order", [ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE])
async def test_hooks_of_leaves_are_called_once_when_everything_is_there(order: Schedule) -> None:
    modules = blocks(2)
    seen: list[Any] = []

    def on_leaf(leaf: Any) -> None:
        seen.append(gradients(modules))

    async def later(leaf: Any) -> None:
        await asyncio.sleep(0)
        seen.append(gradients(modules))

    modules[0][0].weight.register_post_accumulate_grad_hook(on_leaf)
    modules[1][0].bias.register_post_accumulate_grad_hook(later)
    modules[1][0].weight.register_post_accumulate_grad_hook(on_leaf, eager=True)
    await Pipeline(modules, order, loss_fn=mean_square).step(*data(8))
    assert len(seen) == 3 and all(each == gradients(modules) for each in seen)


async def test_a_hook_that_fails_comes_after_the_commit() -> None:
    modules = blocks(2)

    def on_leaf(leaf: Any) -> None:
        raise KeyError("oops")

    modules[0][0].weight.register_post_accumulate_grad_hook(on_leaf)
    with pytest.raises(KeyError) as caught:
        await Pipeline(modules, ZERO_BUBBLE, loss_fn=mean_square).step(*data(8))
    assert caught.value.committed and all(gradients(modules))  # type: ignore[attr-defined]


async def test_steps_of_one_pipeline_take_turns() -> None:
    alone, cut = blocks(2), blocks(2)
    pipe = Pipeline(cut, ZERO_BUBBLE, loss_fn=mean_square)
    batches = [data(8, seed=seed) for seed in range(3)]
    for x, target in batches:
        await serial(alone, 4, x, target)
    await asyncio.gather(*(pipe.step(x, target) for x, target in batches))
    assert gradients(cut) == gradients(alone)


async def test_other_passes_meanwhile_are_not_lost() -> None:
    modules = blocks(2)
    x, target = data(8)

    async def first(part: Any) -> Any:
        if part.shape[0] == 2 and modules[0][0].bias.grad is None:
            await modules[0][0].bias.sum().backward()
        return modules[0](part)

    await Pipeline([first, modules[1]], ONE_FORWARD_ONE_BACKWARD, loss_fn=mean_square).step(x, target)
    alone = blocks(2)
    await serial(alone, 4, x, target)
    assert_close(modules[0][0].bias.grad.numpy(), alone[0][0].bias.grad.numpy() + 1)


async def test_what_was_done_and_when() -> None:
    pipe = Pipeline(blocks(2), ZERO_BUBBLE, loss_fn=mean_square)
    with pytest.raises(ArgumentError):
        _ = pipe.timeline
    await pipe.step(*data(8))
    done = [[str(event.action) for event in pipe.events if event.rank == rank] for rank in range(2)]
    assert done == [[str(action) for action in row] for row in ZERO_BUBBLE.lower().ranks]
    assert pipe.timeline.ranks == 2 and pipe.timeline.cost > 0


def test_stages_and_schedules_that_do_not_fit() -> None:
    for stages, order, options, error in (
        (blocks(3), ZERO_BUBBLE, {}, ArgumentError),
        (blocks(2), "1F1B", {}, ArgumentTypeError),
        (blocks(2), ZERO_BUBBLE, {"loss_fn": 3}, ArgumentTypeError),
        ([1, 2], ZERO_BUBBLE, {}, ArgumentTypeError),
        (blocks(1), schedule("0B0 0F0"), {}, ScheduleError),
    ):
        with pytest.raises(error):
            Pipeline(stages, order, **options)  # type: ignore[arg-type]
    for options in ({"where": "moon"}, {"device": "moon:1"}, {"parameters": [3]}):
        with pytest.raises(ag.errors.AiogradError):
            Stage(blocks(1)[0], **options)  # type: ignore[arg-type]
