"""Compiled training steps: forward, passes and optimizer's steps as one program, with the bits of the eager function; also when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import GradientError, TraceError
from aiograd.nn import functional as F
from tests.compiler.test_random_programs import Recurrent, Transformer, bits, cnn, mlp
from tests.support import assert_awaiting_raises, cancel
from tests.support import random_leaf as leaf

rng = np.random.default_rng(4)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: ag.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: ag.optim.Adam(p, 0.01),
    "adamw": lambda p: ag.optim.AdamW(p, 0.01),
}


@pytest.mark.one_loop
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("new", [mlp, cnn, Recurrent, Transformer], ids=["mlp", "cnn", "lstm", "transformer"])
async def test_a_hundred_steps(new: Callable[[], Any], optimizer: str) -> None:
    """With clipping whose limit changes, and a schedule that is stepped inside."""

    async def train(compiled: bool) -> list[Any]:
        ag.seed(7)
        model, limit = new(), {"norm": 1.0}
        chosen = OPTIMIZERS[optimizer](model.parameters())
        schedule = ag.optim.StepLR(chosen, 7, 0.9)

        async def step(x: Any, y: Any) -> Any:
            chosen.zero_grad()
            loss = F.cross_entropy(model(x), y)
            await loss.backward()
            norm = ag.optim.clip_grad_norm_(model.parameters(), limit["norm"])
            chosen.step()
            schedule.step()
            return loss, norm

        run = ag.compile(step) if compiled else step
        numbers = np.random.default_rng(0)
        found = []
        for n in range(100):
            limit["norm"] = 0.5 if n % 40 > 20 else 1.0
            found += await run(ag.asarray(numbers.standard_normal((6, 1, 10, 10)).astype(np.float32)), numbers.integers(0, 4, 6))
        if compiled:
            statistics = run.statistics()
            assert not statistics.breaks and statistics.recordings == 2 and statistics.runs == 98, statistics
        return bits(*found, *model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()))

    assert await train(False) == await train(True)


class Case:
    """Everything that a step needs, made anew for the eager and the compiled run."""

    def __init__(self) -> None:
        ag.seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = ag.optim.SGD(self.model.parameters(), 0.1, momentum=0.5)
        self.other = nn.Linear(3, 3)
        self.second = ag.optim.Adam(self.other.parameters(), 0.02)
        self.schedule = ag.optim.StepLR(self.second, 2)
        self.average = ag.optim.ExponentialMovingAverage(self.model, 0.9)
        self.cycle = ag.optim.OneCycleLR(ag.optim.RMSprop(self.model.parameters()), 0.1, total_steps=40)
        self.plateau = ag.optim.ReduceLROnPlateau(self.optimizer, patience=1)
        self.scale = 1.0
        self.frozen = ag.ones(1)
        self.frozen.grad = ag.ones(1)

    def tensors(self) -> list[Any]:
        everything = [*self.model.parameters(), *self.other.parameters(), self.frozen]
        return [*everything, *self.average.module.parameters(), *(p.grad for p in everything)]


async def by_hand(case: Case, x: Any) -> Any:
    loss = (case.model(x) ** 2).mean()
    for p in case.model.parameters():
        p.grad = None
    await loss.backward()
    with ag.no_grad():
        for p in case.model.parameters():
            p -= 0.1 * p.grad
    return loss


async def gradients_in_place(case: Case, x: Any) -> Any:
    case.optimizer.zero_grad()
    loss = (case.model(x) ** 2).mean()
    await loss.backward()
    for p in case.model.parameters():
        p.grad *= 0.5
        p.grad += p.detach() * 0.01
    case.optimizer.step()
    return loss.detach()


async def gradients_given(case: Case, x: Any) -> Any:
    loss = (case.model(x) ** 2).mean()
    grads = await ag.grad(loss, list(case.model.parameters()))
    case.optimizer.step([g * 2.0 for g in grads])
    return loss, grads[0]


async def two_losses(case: Case, x: Any) -> Any:
    made = case.model(x)
    case.second.zero_grad()
    first = (case.other(made.detach()) ** 2).sum()
    await first.backward()
    case.second.step()
    case.schedule.step()
    case.optimizer.zero_grad()
    second = -F.cross_entropy(case.other(made), np.zeros(5, np.int64))
    await second.backward()
    ag.optim.clip_grad_value_(case.model.parameters(), 0.01)
    case.optimizer.step()
    return {"first": first, "second": [second, None]}


async def accumulated(case: Case, x: Any) -> Any:
    case.optimizer.zero_grad(set_to_none=False)
    loss = (case.model(x) ** 2).mean() * case.scale
    await loss.backward(retain_graph=True)
    await (loss * 0.3).backward()
    await case.optimizer.astep()
    after = case.model(x).sum()
    await helper(after)
    return after


async def helper(loss: Any) -> None:
    await loss.backward(ag.asarray(np.float32(2.0)))


async def schedules_and_averages(case: Case, x: Any) -> Any:
    case.optimizer.zero_grad()
    loss = (case.model(x) ** 2).mean()
    await loss.backward()
    case.cycle.optimizer.step()
    case.optimizer.step()
    case.cycle.step()
    case.plateau.step(loss)
    case.average.update_parameters(case.model)
    return loss


async def frozen_gradients(case: Case, x: Any) -> Any:
    frozen = case.frozen
    case.optimizer.zero_grad()
    loss = (case.model(x) * frozen).mean()
    await loss.backward()
    ag.optim.clip_grad_norm_([*case.model.parameters(), frozen], 0.5)
    with ag.no_grad():
        frozen.grad *= 1.5
        frozen -= 0.1 * frozen.grad
    frozen.grad = loss * frozen
    case.optimizer.step()
    return loss * frozen.grad.sum()


STEPS = [frozen_gradients, schedules_and_averages, by_hand, gradients_in_place, gradients_given, two_losses, accumulated]


@pytest.mark.parametrize("function", STEPS, ids=lambda f: f.__name__)
async def test_steps_of_all_kinds_have_the_bits_of_the_eager_ones(function: Any) -> None:
    results = []
    for compiled in (False, True):
        case, found = Case(), []

        async def step(x: Any, case: Case = case) -> Any:
            return await function(case, x)

        run = ag.compile(step) if compiled else step
        numbers = np.random.default_rng(0)
        for n in range(6):
            if n == 3:
                case.optimizer.param_groups[0]["lr"] = 0.01
            result = await run(ag.asarray(numbers.standard_normal((5, 4)).astype(np.float32)))
            found.append(bits(*ag.running.trees.leaves_of(result, ag.Tensor), *case.tensors()))
        results.append(found)
    assert results[0] == results[1]
    statistics = run.statistics()
    assert (statistics.recordings, statistics.runs, statistics.breaks) == (1, 5, 0), statistics


@pytest.mark.parametrize("dynamic", [False, True])
async def test_a_step_without_an_operation_is_a_program(dynamic: bool) -> None:
    @ag.compile(dynamic=dynamic)
    async def same(x: Any) -> Any:
        _ = x * 2
        return {"x": x}

    for n in range(3):
        x = ag.ones(2, 3) * n
        assert (await same(x))["x"] is x or bits((await same(x))["x"]) == bits(x)


class Between:
    """A parameter and the effects between its uses."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(5)
        self.w = ag.tensor(numbers.standard_normal((3, 3)).astype(np.float32), requires_grad=True)
        self.buffer = ag.zeros(3)
        self.norm = nn.BatchNorm1d(3)

    def whole(self, t: Any) -> Any:
        with ag.no_grad():
            self.buffer[...] = self.buffer * 0.5 + t.detach().mean(0)
        return t

    def parts(self, t: Any) -> Any:
        with ag.no_grad():
            self.buffer[1:] += 1.0
            self.buffer.mul_(0.5)
        return t

    def statistics(self, t: Any) -> Any:
        return self.norm(t)

    def loss(self, kind: str, y: Any) -> Any:
        """The parameter is used before, between and after."""
        t = getattr(self, kind)((self.w @ self.w.T).sum(0) * y) + self.w[0].sin()
        return getattr(self, kind)(t).max(1, keepdims=True).mean() + (t * self.w[1]).mean() + self.w.mean()


async def whole_pass(case: Between, kind: str, y: Any) -> None:
    await case.loss(kind, y).backward()


async def passes_that_keep(case: Between, kind: str, y: Any) -> None:
    loss = case.loss(kind, y)
    await loss.backward(retain_graph=True)
    await (loss * 0.3 + case.w.mean()).backward()


async def pass_to_inputs(case: Between, kind: str, y: Any) -> None:
    await case.loss(kind, y).backward(inputs=[case.w])


async def second_derivatives(case: Between, kind: str, y: Any) -> None:
    (g,) = await ag.grad(case.loss(kind, y), [case.w], create_graph=True)
    await ((g * g).sum() + case.w.mean()).backward()


PASSES = [whole_pass, passes_that_keep, pass_to_inputs, second_derivatives]


@pytest.mark.parametrize("kind", ["whole", "parts", "statistics"])
@pytest.mark.parametrize("function", PASSES, ids=lambda f: f.__name__)
async def test_gradients_of_uses_before_and_after_an_effect_are_one_sum_in_the_order_of_the_eager_one(function: Any, kind: str) -> None:
    found = []
    for compiled in (False, True):
        case, numbers = Between(), np.random.default_rng(0)

        async def step(y: Any, case: Between = case) -> None:
            await function(case, kind, y)

        run: Any = ag.compile(step) if compiled else step
        found.append([])
        for _ in range(12):
            case.w.grad = None
            await run(ag.tensor(numbers.standard_normal((5, 3)).astype(np.float32)))
            found[-1] += bits(case.w.grad, case.buffer, *case.norm.buffers())
    assert found[0] == found[1]
    assert run.statistics().breaks == 0


@pytest.mark.parametrize("memory_budget", [None, 1.0])
async def test_a_parameter_has_one_edge_though_memory_is_written_between_its_uses(memory_budget: float | None) -> None:
    case = Between()

    @ag.compile(memory_budget=memory_budget)
    def loss(y: Any) -> Any:
        return case.loss("whole", y)

    for _ in range(12):
        y = leaf(5, 3)
        expected = await ag.grad(case.loss("whole", y) + case.w.sum(), [case.w, y])
        found = loss(y)
        assert bits(*expected) == bits(*await ag.grad(found + case.w.sum(), [case.w, y]))
    assert sorted([node.name for node in found._node.next_nodes]) == ["AccumulateGrad"] * 2 and loss.statistics().breaks == 0


async def test_numbers_that_a_step_finds_by_name_are_never_stale() -> None:
    case, calls = Case(), 0

    @ag.compile
    async def step(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return (x * case.scale).sum()

    x = leaf(3)
    for scale in (1.0, 2.0, 1.0, 2.0):
        case.scale = scale
        assert bits(await step(x)) == bits((x * scale).sum())
    assert calls == 2 == step.statistics().signatures


async def test_it_says_what_it_does() -> None:
    case = Case()
    step = ag.compile(by_hand_of(case))
    for _ in range(2):
        await step(leaf(5, 4))
    (program,) = step.programs
    assert "# await backward(v" in program.source and "loss.backward()" in program.source and "def backward(saved, grads):" in program.source
    names = [statement.op.name for statement in program.statements]
    assert "backward" in names and "in_place_sub" in names and names.count("grad") == 4
    assert "backward" in str(program) and program.dot().count("->") > 5 and program.svg().startswith("<svg")


def by_hand_of(case: Case) -> Any:
    async def step(x: Any) -> Any:
        return await by_hand(case, x)

    return step


# -------------------------------------------------------------------- failing


async def both(make: Callable[[Case], Any], disturb: Callable[[Case, Any], Any]) -> None:
    """The state that a disturbed third call leaves is that of the eager one, and so is that of the fourth."""
    results = []
    for compiled in (False, True):
        case, found = Case(), []
        step = make(case)
        run = ag.compile(step) if compiled else step
        numbers = np.random.default_rng(0)
        inputs = [ag.asarray(numbers.standard_normal((5, 4)).astype(np.float32)) for _ in range(4)]
        for x in inputs[:2]:
            await run(x)
        found.append(await disturb(case, lambda: run(inputs[2])))  # noqa: B023 - called at once
        found.append(bits(*case.tensors()))
        await run(inputs[3])
        found.append(bits(*case.tensors()))
        results.append(found)
        if compiled:
            assert run.statistics().runs >= 2 and not run.statistics().breaks, run.statistics()
    assert results[0] == results[1]


def plain_step(case: Case) -> Any:
    async def step(x: Any) -> Any:
        case.optimizer.zero_grad()
        loss = (case.model(x) ** 2).mean()
        await loss.backward()
        ag.optim.clip_grad_norm_(case.model.parameters(), 1.0, error_if_nonfinite=True)
        case.optimizer.step()
        return loss

    return step


async def test_a_step_that_fails_part_way_leaves_what_the_eager_one_leaves() -> None:
    async def failing_hook(case: Case, call: Any) -> Any:
        def fail(grad: Any) -> None:
            raise ValueError("hook")

        handle = next(iter(case.model.parameters())).register_hook(fail)
        caught = await assert_awaiting_raises(ValueError, "hook", call())
        handle.remove()
        return len(caught.__notes__) > 0

    async def infinite_norm(case: Case, call: Any) -> Any:
        def spoil(grad: Any) -> Any:
            return grad * np.float32(np.inf)

        handle = next(iter(case.model.parameters())).register_hook(spoil)
        with pytest.raises(GradientError, match="norm"), np.errstate(invalid="ignore"):
            await call()
        handle.remove()
        return True

    await both(plain_step, failing_hook)
    await both(plain_step, infinite_norm)


async def test_a_step_that_is_cancelled_during_its_pass_changes_what_the_eager_one_changes() -> None:
    async def cancelled(case: Case, call: Any) -> Any:
        waiting = asyncio.Event()

        async def wait(grad: Any) -> None:
            waiting.set()
            await asyncio.Event().wait()

        handle = next(iter(case.model.parameters())).register_hook(wait)
        running = asyncio.ensure_future(call())
        await waiting.wait()
        await cancel(running)
        handle.remove()
        return [p.grad is None for p in case.model.parameters()]

    await both(plain_step, cancelled)


async def test_a_failure_names_the_line() -> None:
    case = Case()
    step = ag.compile(plain_step(case))
    await step(leaf(5, 4))

    def fail(grad: Any) -> None:
        raise ValueError("hook")

    next(iter(case.model.parameters())).register_hook(fail)
    caught = await assert_awaiting_raises(ValueError, "hook", step(leaf(5, 4)))
    assert any(
        "in the compiled function step, backward at test_steps.py" in note and "await loss.backward()" in note for note in caught.__notes__
    )


# -------------------------------------------------------------------- other awaits


async def sleeps(x: Any) -> Any:
    await asyncio.sleep(0)
    return x * 2


async def waits_long(x: Any) -> Any:
    await asyncio.sleep(1e9)
    return x * 2


async def gathers(x: Any) -> Any:
    loss = (x * 2).sum()
    await asyncio.gather(loss.backward())
    return loss


async def has_a_deadline(x: Any) -> Any:
    loss = (x * 2).sum()
    async with asyncio.timeout(1e9):
        await loss.backward()
    return loss


async def iterates(x: Any) -> Any:
    async for y in values():
        x = x * y
    return x


async def values() -> Any:
    yield 2.0


async def offloads(x: Any) -> Any:
    return await ag.offload(lambda: x * 2)


async def nested(x: Any) -> Any:
    return await sleeps(x)


AWAITS = {
    sleeps: "await asyncio.sleep(0)", waits_long: "await asyncio.sleep(1e9)", gathers: "await asyncio.gather(loss.backward())",
    has_a_deadline: "async with asyncio.timeout(1e9):", iterates: "async for y in values():", offloads: "return await ag.offload(lambda: x * 2)",
    nested: "await asyncio.sleep(0)",
}  # fmt: skip


@pytest.mark.parametrize("function", AWAITS, ids=lambda f: f.__name__)
async def test_another_await_is_an_error_that_names_its_line(function: Any) -> None:
    caught = await assert_awaiting_raises(TraceError, r"test_steps.py:\d+: .* on_break='eager'", ag.compile(function)(leaf(3)))
    assert f"`{AWAITS[function]}`" in str(caught)
    await asyncio.sleep(0)


@pytest.mark.parametrize("function", [f for f in AWAITS if f is not waits_long], ids=lambda f: f.__name__)
async def test_another_await_runs_eagerly_where_that_is_wanted(function: Any) -> None:
    compiled, x = ag.compile(function, on_break="eager"), leaf(3)
    with pytest.warns(UserWarning, match="runs eagerly .* waits for something else than a pass"):
        for _ in range(3):
            assert bits(await compiled(x)) == bits(await function(x))
    statistics = compiled.statistics()
    assert (statistics.runs, statistics.breaks, statistics.eager) == (0, 1, 2), statistics


async def test_lbfgs_runs_eagerly() -> None:
    def new_step() -> Any:
        w = ag.tensor(np.array([1.5, -1.0, 2.0], np.float32), requires_grad=True)
        optimizer = ag.optim.LBFGS([w], max_iter=20)

        async def step(x: Any) -> Any:
            async def closure() -> Any:
                optimizer.zero_grad()
                loss = ((w - x) ** 2).sum()
                await loss.backward()
                return loss

            await optimizer.step(closure)
            return w * 1

        return step

    eager, compiled = new_step(), ag.compile(new_step(), on_break="eager")
    with pytest.warns(UserWarning, match="it steps LBFGS"):
        for n in range(3):
            x = ag.asarray(np.full(3, n, np.float32))
            assert bits(await compiled(x)) == bits(await eager(x))
    assert compiled.statistics().breaks == 1


async def test_a_pass_may_wait() -> None:
    """Hooks that wait while a step is recorded and while it runs."""
    w, order = leaf(3), []

    async def hook(grad: Any) -> Any:
        await asyncio.sleep(0)
        order.append(1)
        return grad * 2

    w.register_hook(hook)

    @ag.compile
    async def step(x: Any) -> Any:
        w.grad = None
        loss = (w * x).sum()
        await loss.backward()
        return loss

    x = leaf(3)
    for n in range(3):
        await step(x)
        assert len(order) == n + 1 and bits(w.grad) == bits(x.detach() * 2)
    assert step.statistics().runs == 2


async def test_many_steps_at_once() -> None:
    w = leaf(8)

    @ag.compile
    async def gradient(x: Any) -> Any:
        (g,) = await ag.grad((ag.tanh(x * w) * x).sum(), [w])
        return g

    inputs = [leaf(8) for _ in range(200)]
    await gradient(inputs[0])
    found = await asyncio.gather(*(gradient(x) for x in inputs))
    for x, g in zip(inputs, found, strict=True):
        assert bits(g) == bits(*await ag.grad((ag.tanh(x * w) * x).sum(), [w]))
    assert gradient.statistics().runs == 200


async def test_methods_modules_and_steps_within_steps() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(3, 3)

        async def forward(self, x: Any) -> Any:
            (g,) = await ag.grad((self.linear(x) ** 2).sum(), [self.linear.weight])
            return g.sum(axis=0) + self.linear(x)

    class Trainer:
        def __init__(self) -> None:
            self.model = Slow()
            self.inner = ag.compile(self.model)

        @ag.compile
        async def step(self, x: Any) -> Any:
            y = (await self.inner(x)).sum()
            await y.backward()
            return y

    trainer, x = Trainer(), leaf(2, 3)
    for _ in range(3):
        for p in trainer.model.parameters():
            p.grad = None
        found = await trainer.step(x)
        grads = bits(*(p.grad for p in trainer.model.parameters()))
        expected = (await trainer.model(x)).sum()
        assert bits(found) == bits(expected)
        assert grads == bits(*await ag.grad(expected, list(trainer.model.parameters())))
    assert Trainer.step.statistics().runs == 2 and trainer.inner.statistics().recordings == 0


async def test_a_function_that_only_acts() -> None:
    case = Case()

    @ag.compile
    def update() -> None:
        case.optimizer.step()
        case.optimizer.zero_grad()

    for n in range(3):
        await (case.model(leaf(5, 4)) ** 2).mean().backward()
        before = bits(*case.model.parameters())
        assert update() is None and bits(*case.model.parameters()) != before
        assert all(p.grad is None for p in case.model.parameters()) and update.statistics().runs == n
