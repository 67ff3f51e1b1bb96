"""Compiled functions on a simulated device: the bits, the stream and the launches of the eager functions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.stream import Stream
from tests.cuda import programs
from tests.cuda.programs import TRAINING
from tests.cuda.test_streams import Recorder
from tests.sweeps import swept

STEPS = 3


def compiling(made: list[Any]) -> Any:
    """`programs.train` by compiled functions, which are appended to `made`: a whole step where that is asked for, else the forward."""

    async def train(model: Any, optimizer: Any, x: Any, y: Any, steps: int, *, whole: bool) -> list[Any]:
        def loss_of(x: Any, y: Any) -> Any:
            return ag.nn.functional.cross_entropy(model(x), y)

        if not whole:
            loss_of = ag.compile(loss_of)

        async def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            await loss.backward()
            optimizer.step()
            return loss

        if whole:
            step = ag.compile(step)
        made.append(step if whole else loss_of)
        losses = [(await step(x, y)).detach() for _ in range(STEPS)]
        return [await each for each in (*losses, *(p.detach() for p in model.parameters()))]

    return train


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", swept(sorted(TRAINING), keep=4))
async def test_training_has_the_bits_of_the_eager_one(name: str, whole: bool, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    train = programs.train
    monkeypatch.setattr(programs, "train", lambda model, optimizer, x, y, steps: train(model, optimizer, x, y, STEPS))
    wanted = await TRAINING[name]("cuda:0")
    made: list[Any] = []
    monkeypatch.setattr(programs, "train", functools.partial(compiling(made), whole=whole))
    found = await TRAINING[name]("cuda:0")
    assert [each.numpy().tobytes() for each in found] == [each.numpy().tobytes() for each in wanted]
    (compiled,) = made
    statistics = compiled.statistics()
    assert (statistics.recordings, statistics.runs, statistics.breaks) == (1, STEPS - 1, 0), statistics
    assert compiled.programs[0].device == "cuda:0" and device.statistics().fallbacks == {}


async def test_element_wise_calls_are_put_together_as_ever(device: CudaDevice) -> None:
    def chain(x: Any) -> Any:
        for _ in range(10):
            x = ag.tanh(x * 2 + 1)
        return x

    recorder, counts = Recorder(device), []
    for function in (chain, ag.compile(chain)):
        for number in range(2):
            x = ag.tensor(np.full((3, 4), number, np.float32), device="cuda:0")
            recorder.calls.clear()
            await function(x)
            counts.append(len(recorder.calls))
    assert len(set(counts)) == 1 and counts[0] < 10


async def test_a_pass_runs_on_the_streams_of_the_calls(device: CudaDevice) -> None:
    w = ag.tensor(np.ones((3, 4), np.float32), device="cuda:0", requires_grad=True)

    def loss_of(x: Any) -> Any:
        return (ag.sin(x * w) @ w.T).sum()

    call = ag.compile(loss_of)
    x = ag.tensor(np.full((3, 4), 2, np.float32), device="cuda:0")
    await ag.grad(call(x), [w])
    recorder, side, found = Recorder(device), Stream(), []
    for function in (loss_of, call):
        with side:
            loss = await function(x)
        recorder.calls.clear()
        (grad,) = await ag.grad(loss, [w])
        await grad
        found.append(dict(call for call in recorder.calls if call[0] != "wait"))
    assert list(found[0]) == list(found[1]) and found[0]["gemm"] is found[1]["gemm"] is side.stream_state.handle
