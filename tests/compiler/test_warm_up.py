"""`warm_up`: a program before the first call, and no trace of it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.compiler.native import tiers
from aiograd.errors import TraceError
from tests.support import assert_awaiting_raises

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


class Training:
    """A model with dropout, running statistics, an optimizer and a schedule; the same numbers for the same seed."""

    def __init__(self) -> None:
        ag.seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = ag.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = ag.optim.StepLR(self.optimizer, 2)
        self.losses: list[Any] = []
        self.calls = 0

        @ag.compile
        async def step(x: Any) -> Any:
            self.optimizer.zero_grad()
            loss = (self.model(x) ** 2).mean()
            await loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.calls += 1
            return loss

        self.step = step

    def state(self) -> list[Any]:
        """All that a step can change."""
        parameters = [*self.model.parameters(), *self.model.buffers()]
        arrays = [tensor.numpy().tobytes() for tensor in parameters]
        grads = [None if tensor.grad is None else tensor.grad.numpy().tobytes() for tensor in self.model.parameters()]
        states = [repr(each.state_dict()) for each in (self.optimizer, self.schedule)]
        versions = [0 if tensor._vc is None else tensor._vc[0] for tensor in parameters]
        return [arrays, grads, versions, states, ag.default_generator().state_dict(), self.calls]

    def identities(self) -> list[int]:
        """Of the objects that hold it."""
        return [id(thing) for thing in (*self.model.parameters(), *[each._data for each in self.model.parameters()], *self.optimizer.param_groups)]


async def test_a_step_is_as_it_was_and_goes_on_as_without() -> None:
    usual = Training()
    expected = [(await usual.step(X)).item() for _ in range(5)]
    end = usual.state()
    warmed = Training()
    before, identities = warmed.state(), warmed.identities()
    await warmed.step.warm_up(X)
    assert warmed.state() == before and warmed.identities() == identities
    statistics = warmed.step.statistics()
    assert (statistics.recordings, statistics.runs, statistics.signatures) == (1, 0, 1)
    assert [(await warmed.step(X)).item() for _ in range(5)] == expected
    assert warmed.state()[:-1] == end[:-1] and (warmed.calls, usual.calls) == (0, 1)  # Python runs while recording only
    assert warmed.step.statistics().recordings == 1 and warmed.step.statistics().runs == 5


async def test_a_step_in_the_middle_of_training() -> None:
    usual, warmed = Training(), Training()
    ag.seed(5)
    expected = [(await usual.step(X)).item() for _ in range(4)]
    ag.seed(5)
    found = [(await warmed.step(X)).item() for _ in range(2)]
    before = warmed.state()
    await warmed.step.warm_up(X[:3])
    await warmed.step.warm_up(X)
    assert warmed.state() == before and warmed.step.statistics().signatures == 2
    assert found + [(await warmed.step(X)).item() for _ in range(2)] == expected
    assert warmed.state() == usual.state()


async def test_a_module_has_its_backward_before_the_first_call() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    compiled = ag.compile(model)
    x = ag.tensor(X, requires_grad=True)
    buffers = [each.numpy().copy() for each in model.buffers()]
    generator = ag.default_generator().state_dict()
    await compiled.warm_up(x)
    assert all((each.numpy() == old).all() for each, old in zip(model.buffers(), buffers, strict=True))
    assert ag.default_generator().state_dict() == generator and x.grad is None and all(p.grad is None for p in model.parameters())
    source = compiled.programs[0].source
    assert "def forward" in source and "def backward" in source
    await compiled(x).sum().backward()
    assert compiled.statistics().recordings == 1 and x.grad is not None and compiled.programs[0].source.count("def backward") <= 2


async def test_a_bound_method() -> None:
    class Model:
        def __init__(self) -> None:
            self.weight = ag.tensor([1.0, 2.0, 3.0, 4.0], dtype=np.float32, requires_grad=True)
            self.seen: list[int] = []

        @ag.compile
        def loss_of(self, x: Any) -> Any:
            self.seen.append(1)
            return (x * self.weight).sum()

    model = Model()
    await model.loss_of.warm_up(X)
    assert model.seen == [] and model.loss_of.statistics().recordings == 1 and model.weight.grad is None
    model.loss_of(X)
    assert model.loss_of.statistics().recordings == 1


async def test_native_functions_are_there_and_the_loop_has_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    if tiers.native_problem() is not None:
        pytest.skip(str(tiers.native_problem()))
    threads = []
    begin = tiers.NativeTier.begin
    monkeypatch.setattr(tiers.NativeTier, "begin", lambda tier: (threads.append(threading.current_thread().name), begin(tier)))

    @ag.compile(tier="auto")
    def f(x: Any) -> Any:
        return ((x * 2.0 + 1.0) * x).sum()

    x = ag.tensor(X, requires_grad=True)
    await f.warm_up(x)
    assert f.programs[0].tier == "native" and len(f.programs[0].native.parts.texts) == 2
    assert threads == ["aiograd-compiler"]
    statistics = f.statistics()
    assert (statistics.native_programs, statistics.native_runs, statistics.runs) == (1, 0, 0) and statistics.compile_seconds > 0
    await f(x).backward()
    assert f.statistics().native_runs == 1
    assert (x.grad.numpy() == X * np.float32(2.0) + np.float32(1.0) + X * np.float32(2.0)).all()


async def test_cancelled_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Any] = []
    monkeypatch.setattr(tiers.compiler, "submit", submitted.append)
    weight = ag.tensor([1.0], requires_grad=True)

    @ag.compile(tier="auto")
    def f(x: Any) -> Any:
        return (x * weight + 1.0).sum()

    task = asyncio.ensure_future(f.warm_up(ag.ones(3)))
    while not submitted and not task.done():
        await asyncio.sleep(0)
    if not submitted:
        pytest.skip("no native programs here")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert weight.grad is None and f.statistics().runs == 0
    for job in submitted:
        job()  # the thread goes on
    await asyncio.sleep(0)
    assert f(ag.ones(3)).item() == 6.0 and f.statistics().native_runs == 1


async def test_cancelled_in_a_step() -> None:
    training = Training()
    before = training.state()
    task = asyncio.ensure_future(training.step.warm_up(X))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert training.state() == before


async def test_what_has_no_program_says_so_and_is_undone() -> None:
    weight = ag.tensor([1.0, 2.0], requires_grad=True)
    seen: list[float] = []

    @ag.compile(on_break="eager")
    async def f(x: Any) -> Any:
        loss = (x * weight).sum()
        await loss.backward()
        seen.append(loss.item())
        return loss

    with pytest.warns(UserWarning, match="runs eagerly"):
        await assert_awaiting_raises(TraceError, r"warm_up\(\): it has no program for this call: .*reads the value", f.warm_up(ag.ones(2)))
    assert weight.grad is None and seen == []


async def test_an_error_of_the_function_is_undone() -> None:
    training = Training()

    @ag.compile
    async def f(x: Any) -> Any:
        await training.model(x).sum().backward()
        training.optimizer.step()
        raise RuntimeError("no further")

    before = training.state()
    with pytest.raises(RuntimeError, match="no further"):
        await f.warm_up(X)
    assert training.state() == before


async def test_a_generator_of_its_own_and_a_container_are_put_back() -> None:
    generator = ag.Generator(7)
    drawn: list[int] = []

    @ag.compile
    def f(x: Any) -> Any:
        drawn.append(1)
        return x + ag.rand(3, generator=generator)

    expected = ag.rand(3, generator=generator.clone()).numpy()
    await f.warm_up(ag.zeros(3))
    assert drawn == []
    assert (f(ag.zeros(3)).numpy() == expected).all() and f.statistics().recordings == 1
