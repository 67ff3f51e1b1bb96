"""Workers without anything to commit leave a pass with their answer; see Note [Nothing to commit] in `participant`."""

from __future__ import annotations

from typing import Any

import pytest

import aiograd as ag
from aiograd.distributed.kinds import Kind
from aiograd.errors import CommitUnknown
from tests.distributed.passes_kit import Here, Log, Net, Stage, after, before, passes
from tests.distributed.test_commit import LIMITS
from tests.distributed.workers import values, view

pytestmark = pytest.mark.usefixtures("virtual_clock")


async def plain(here: Here, x: Any) -> Any:
    return x * 2.0


async def called_back(here: Here, x: Any) -> Any:
    y = x * 2.0
    y.register_hook(lambda g: ag.graph.queue_callback(lambda: None))
    return y


async def retained(here: Here, x: Any) -> Any:
    y = x * 2.0
    y.retain_grad()
    return y * 3.0


async def onward(here: Here, x: Any) -> Any:
    return (await here.call("c", "plain", x)) * 2.0


def stage() -> Stage:
    found = Stage("abc")
    found.functions |= {f.__name__: f for f in (plain, called_back, retained, onward)}
    return found


def outcomes(worker: Any, ctx: Any) -> list[str]:
    return [str(outcome) for outcome in view(worker, ctx).history.outcomes.values()]


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize(
    ("function", "told"),
    [("plain", []), ("called_back", ["b"]), ("retained", ["b"]), ("weigh", ["b"]), ("onward", ["b", "c"])],
)
async def test_who_has_something_to_commit_is_told_of_the_end(function: str, told: list[str], mode: str) -> None:
    """A worker with a leaf, a callback or a retained gradient is, and so is all that hangs on one that has sent gradients on."""

    s = stage()
    async with s.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", function, s.x)
        log = Log().watch(*opened)
        await ctx.backward(y.sum(), mode=mode)
        assert log.count()["COMMIT"] == len(told)
        assert passes(opened) == [0, 0, 0]
        assert outcomes(opened[0], ctx) == ["committed"]
        assert outcomes(opened[1], ctx) == ["committed" if told else "unknown"], "who has left knows nothing that others could rely on"
        assert opened[1].statistics().passes_committed == 1
        assert s.x in ctx.grads


async def test_who_has_left_is_told_where_others_have_something_to_commit() -> None:
    s = stage()
    async with s.open() as opened, opened[0].context() as ctx:
        a, b, c = opened
        loss = (await a.call("b", "plain", s.x) + await a.call("c", "weigh", s.x)).sum()
        ended: list[list[str]] = []
        with before(b, Kind.COMMIT, lambda: ended.append(outcomes(b, ctx))):
            await ctx.backward(loss)
        assert ended == [["unknown"]], "its part was over before"
        assert outcomes(b, ctx) == outcomes(c, ctx) == ["committed"], "either can tell whoever asks"
        assert values(ctx.grads[s.x]) == values(s.weights["c"] + 2.0)


async def test_nothing_is_in_doubt_where_one_that_has_left_cannot_be_told() -> None:
    board, s = Net(), stage()
    async with s.open(board, idle=False, limits=LIMITS) as opened, opened[0].context() as ctx:
        a, b, c = opened
        loss = (await a.call("b", "plain", s.x) + await a.call("c", "weigh", s.x)).sum()
        with before(b, Kind.COMMIT, lambda: board.kill("b")):
            await ctx.backward(loss)
        assert not ctx.in_doubt and s.weights["c"] in view(c, ctx).grads


async def test_who_has_something_to_commit_and_cannot_be_told_is_in_doubt_all_the_same() -> None:
    board, s = Net(), stage()
    async with s.open(board, idle=False, limits=LIMITS) as opened, opened[0].context() as ctx:
        a, _, c = opened
        loss = (await a.call("b", "plain", s.x) + await a.call("c", "weigh", s.x)).sum()
        with before(c, Kind.COMMIT, lambda: board.kill("c")), pytest.raises(CommitUnknown) as caught:
            await ctx.backward(loss)
        assert caught.value.workers == ("c",) and len(ctx.in_doubt) == 1


async def test_a_pass_that_fails_after_a_worker_has_left_leaves_nothing_there() -> None:
    s = stage()

    def refuse(grad: Any) -> None:
        raise ValueError("no")

    async with s.open() as opened, opened[0].context() as ctx:
        a, b, _ = opened
        y = await a.call("b", "plain", s.x)
        left: list[list[str]] = []
        remove = s.x.register_hook(refuse)
        with after(b, Kind.GRADIENT, lambda: left.append(outcomes(b, ctx))), pytest.raises(ValueError, match="no"):
            await ctx.backward(y.sum(), retain_graph=True)
        assert left == [["unknown"]] and outcomes(b, ctx) == outcomes(a, ctx) == ["aborted"]
        assert s.x not in ctx.grads and passes(opened) == [0, 0, 0]
        remove.remove()
        await ctx.backward(y.sum())
        assert values(ctx.grads[s.x]) == [2.0] * s.x.size
