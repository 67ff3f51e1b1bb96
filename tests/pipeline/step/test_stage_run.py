"""One stage by itself: what it refuses, and mailboxes and coroutines that stand or fall together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError, GraphError, PipelineError, ProtocolError, ShapeError
from aiograd.pipeline import Action, Stage
from aiograd.pipeline.run.mailbox import Mailbox
from aiograd.pipeline.run.messages import received
from aiograd.pipeline.run.together import together
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.schedule.plan import StepPlan
from aiograd.pipeline.step.accumulator import GradientAccumulator
from aiograd.pipeline.step.message import pack
from aiograd.pipeline.step.rank import failure
from aiograd.pipeline.step.stage_run import StageRun
from tests.pipeline.models import ZERO_BUBBLE, blocks, schedule
from tests.support import cancel


def one(rows: int = 2) -> tuple[StageRun, Any]:
    """A stage in the middle, and what it gets."""
    stage = Stage(blocks(1)[0])
    return StageRun(stage, 1, GradientAccumulator({1: stage.leaves()}, 2)), pack(ag.tensor(np.ones((rows, 5), np.float32), requires_grad=True))[0]


async def test_backward_once_and_after_forward() -> None:
    run, message = one()
    grads = [ag.tensor(np.ones((2, 5), np.float32))]
    with pytest.raises(GraphError, match="forward has not been run"):
        await run.backward(0, grads)
    with pytest.raises(GraphError, match="without an I before"):
        await run.backward_weight(0)
    await run.forward(0, message)
    inputs, taken = await run.backward(0, grads)
    assert len(inputs) == 1 and taken == {}
    with pytest.raises(GraphError, match="or its backward has"):
        await run.backward_input(0, grads)
    await run.forward(1, message)
    await run.backward_input(1, grads)
    await run.backward_weight(1)
    with pytest.raises(GraphError, match="without an I before"):
        await run.backward_weight(1)


@pytest.mark.parametrize(
    ("grad", "error", "what"),
    [
        (ag.tensor(np.ones((3, 5), np.float32)), ShapeError, r"shape mismatch: .*output 0 has shape \[3, 5\], the output has \[2, 5\]"),
        (ag.tensor(np.ones((2, 5))), ArgumentTypeError, "dtype mismatch: .* float64, the output has float32"),
        (3.0, ArgumentTypeError, "expected a list of Tensors"),
    ],
)
async def test_gradients_that_are_not_those_of_the_outputs(grad: Any, error: type[Exception], what: str) -> None:
    run, message = one()
    await run.forward(0, message)
    with pytest.raises(error, match=what):
        await run.backward(0, [grad])


async def test_no_gradient_at_all() -> None:
    for halves in (False, True):
        run, message = one()
        await run.forward(0, message)
        assert await (run.backward_input if halves else run.backward)(0, [None]) == ([None], {})
        if halves:
            await run.backward_weight(0)


def test_rows_of_a_plan() -> None:
    plan = StepPlan(ZERO_BUBBLE)
    assert [[str(action) for action in row] for row in plan.evaluation] == [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0F2", "0SEND_F2", "0F3", "0SEND_F3"],
        ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1RECV_F2", "1F2", "1RECV_F3", "1F3"],
    ]
    overlapping = StepPlan(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    assert [str(action) for action in overlapping.evaluation[0]] == ["0F0", "0F1"]
    apart = StepPlan(schedule("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"), loss_apart=True)
    assert apart.stage_to_rank == (0, 1, 2) and len(apart.evaluation) == 2
    assert [str(action) for action in apart.training[2]] == ["2RECV_F0", "2F0", "2B0", "2SEND_B0", "2RECV_F1", "2F1", "2B1", "2SEND_B1"]
    assert not StepPlan(schedule("0F0 / 1F0")).training


def test_how_a_failure_is_worded() -> None:
    error = failure(3, Action.parse("2UNSHARD"), ValueError())  # type: ignore[arg-type]
    assert str(error) == "pipeline action 2UNSHARD failed (stage 2, rank 3): ValueError" and error.microbatch is None


async def test_a_mailbox_gives_each_value_once() -> None:
    box, key = Mailbox(), ("forward", 1, 0)
    waiting = asyncio.ensure_future(box.receive(key))
    await asyncio.sleep(0)
    with pytest.raises(GraphError, match="received twice"):
        await box.receive(key)
    box.put(key, "first")
    box.put(key, "again")
    assert await waiting == "first"
    box.put(key, "again")
    with pytest.raises(GraphError, match="forward of stage 1, microbatch 0, is received twice"):
        await box.receive(key)
    other = ("forward", 1, 1)
    cancelled = asyncio.ensure_future(box.receive(other))
    await asyncio.sleep(0)
    await cancel(cancelled)
    box.put(other, "kept")
    assert await box.receive(other) == "kept"


async def test_whom_a_rank_waits_for() -> None:
    work = PipelineWork(1, [0], False)
    work.stage_to_rank = (0, 1, 2)
    work.outbox.route({"1": (0, SimpleNamespace(owner="a")), "2": (0, SimpleNamespace(owner="b"))})
    #: the last two are of a step after a loss, where any replica may send them
    keys = {("backward", 0, 0): "a", ("returned 2", 0, 0): "b", ("target", 0, 0): None, ("forward", 4, 0): None, ("given 0", 5, 0): None}
    waiting = [asyncio.ensure_future(work.mailboxes[0].receive(key)) for key in keys]
    await asyncio.sleep(0)
    assert [owner for _, owner, _ in work.messages()] == list(keys.values())
    for each in waiting:
        await cancel(each)


def test_values_from_elsewhere_are_checked() -> None:
    x = ag.tensor([1.0])
    assert received("forward", (x, (False,))).args == (x,)
    wrong = [("forward", (x,)), ("forward", (x, [False])), ("forward", (x, (1,))), ("forward", x), ("entry", (x, {})), ("backward", ())]
    for kind, value in wrong:
        with pytest.raises(ProtocolError, match="malformed"):
            received(kind, value)


async def test_together() -> None:
    async def give(value: Any, turns: int = 0) -> Any:
        for _ in range(turns):
            await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value

    assert await together({}) == {} and await together({"a": give(1, 3), "b": give(2)}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="first"):
        await together({"a": give(ValueError("second"), 5), "b": give(ValueError("first"), 1), "c": give(3, 1000)})
    with pytest.raises(PipelineError, match="b of a pipeline was cancelled by its own code, there"):
        await together({"a": give(1, 50), "b": give(asyncio.CancelledError(), 2)}, lambda name: ", there")
    failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(failing.set_exception, KeyError("elsewhere"))
    with pytest.raises(KeyError):
        await together({"a": give(1, 1000)}, failure=failing)
