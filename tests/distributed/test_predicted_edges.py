"""Passes whose initiator knows what takes part without asking; see Note [Predicted edges] in `discovery`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiograd.distributed.autograd.discovery import PREDICTED_EDGES, PREDICTED_NODES
from aiograd.distributed.autograd.exchange import SMART
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.codec import WireTensor
from aiograd.errors import PassAbortedError, ProtocolError, RemoteError, WorkerLostError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.passes_kit import Log, Stage, passes
from tests.distributed.workers import values, view
from tests.tolerance import assert_close

#: the number of operations that are one more than a worker looks at
LONG = PREDICTED_NODES + 1


@pytest.mark.parametrize("count", [1, 7])
async def test_nobody_is_asked_where_results_lead_back_to_the_caller_only(virtual_clock: VirtualClock, count: int) -> None:
    stage = Stage("abc")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b, _ = opened
        y = stage.x
        for step in range(count):
            y = await a.call("bc"[step % 2], "weigh", y)
        await a.call("b", "weigh", stage.x)  # which is not needed
        log = Log().watch(*opened)
        await ctx.backward(y.sum(), retain_graph=True)
        sent = log.count()
        assert sent["MARK"] == 0 and sent["GRADIENT"] >= count and sent["COMMIT"] == min(count, 2)
        await ctx.backward(y.sum())
        assert "MARK" not in log.count()
        assert passes(opened) == [0, 0, 0] and not b.statistics().in_doubt


async def test_others_are_asked_where_a_result_depends_on_a_third_worker() -> None:
    stage = Stage("abc")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b, c = opened
        y = await a.call("b", "onward", stage.x)
        assert y.grad_fn.behind is None
        log = Log().watch(*opened)
        await ctx.backward(y.sum())
        assert log.count()["MARK"] == 2
        assert values(view(c, ctx).grads[stage.weights["c"]]) == values(stage.x)


@pytest.mark.parametrize("count", [PREDICTED_EDGES, PREDICTED_EDGES + 1])
async def test_workers_with_many_edges_are_asked(count: int) -> None:
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        ys = [await a.call("b", "weigh", stage.x) for _ in range(count)]
        log = Log().watch(*opened)
        await ctx.backward(sum(ys[1:], ys[0]).sum())
        assert ("MARK" in log.count()) is (count > PREDICTED_EDGES)
        assert_close(view(b, ctx).grads[stage.weights["b"]].numpy(), stage.x.numpy() * count)


@pytest.mark.parametrize("length", [LONG - 1, LONG])
async def test_a_worker_looks_at_little_before_it_answers(length: int) -> None:
    stage = Stage("ab")

    async def long(here: Any, x: Any) -> Any:
        for _ in range(length - 1):  # and the edge at which x came
            x = x + 1.0
        return x

    stage.functions["long"] = long
    async with stage.open() as opened, opened[0].context() as ctx:
        y = await opened[0].call("b", "long", stage.x)
        assert (y.grad_fn.behind is None) is (length == LONG)
        await ctx.backward(y.sum())
        assert values(ctx.grads[stage.x]) == [1.0] * stage.x.size


async def test_a_graph_that_was_changed_after_the_answer_is_noticed() -> None:
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        y = await a.call("b", "weigh", stage.x)
        z = await a.call("b", "weigh", y)
        (first, second) = view(b, ctx).send_nodes.values()
        second.next_nodes[0].register_hook(lambda *_: None)  # type: ignore[union-attr]
        await ctx.backward(z.sum(), retain_graph=True)
        before = values(ctx.grads[stage.x])
        product = second.next_nodes[0]
        assert product is not None
        product.set_next_edges(product.next_edges)
        await ctx.backward(z.sum(), retain_graph=True)
        assert values(ctx.grads[stage.x]) == [2 * each for each in before], "replaced by what leads to the same"
        product.set_next_edges([(first, 0), *product.next_edges[1:]])
        with pytest.raises(RemoteError, match="leads elsewhere than when it was sent to a"):
            await ctx.backward(z.sum(), retain_graph=True)
        assert passes(opened) == [0, 0] and values(ctx.grads[stage.x]) == [2 * each for each in before]


async def test_only_edges_of_which_that_was_said_start_a_pass_without_a_question() -> None:
    stage = Stage("abc")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b, _ = opened
        y = await a.call("b", "weigh", stage.x)
        z = await a.call("b", "onward", stage.x)
        plain, blind = y.grad_fn.edge, z.grad_fn.edge
        (to_c,) = [edge for edge, send in view(b, ctx).send_nodes.items() if send.peer == "c"]
        gradient = WireTensor(np.ones(stage.x.shape, stage.x.dtype))
        for number, (edge, edges, error, text) in enumerate(
            [
                (blind, [blind], ProtocolError, "nothing was said"),
                (plain, [plain, blind], ProtocolError, "nothing was said"),
                (plain, [to_c], ProtocolError, "Could not find"),
                (plain, [plain, 7], WorkerLostError, "has not sent message 7"),
                (plain, ["x"], ProtocolError, r"malformed GRADIENT: field edges\[0\] is 'x' of type str"),
                (plain, [[plain]], ProtocolError, r"field edges\[0\] is of type list; expected int"),
                (blind, [plain], ProtocolError, "does not wait for"),
                (plain, [], PassAbortedError, "not asked"),
            ]
        ):
            value = (ctx.key, "a", 900 + number, (edge, [gradient], 0), SMART, [], edges)
            with pytest.raises(error, match=text):
                await a.endpoint.request("b", Kind.GRADIENT, value, 5)
            await a.endpoint.request("b", Kind.ABORT, (ctx.key, "a", 900 + number, "it failed"), 5)
            assert passes(opened) == [0, 0, 0]
        await ctx.backward((y + z).sum())


@pytest.mark.parametrize("behind", [[7], ["x"], "text", 5, None], ids=str)
async def test_what_is_said_to_be_behind_a_result_is_checked(behind: Any) -> None:
    stage = Stage("ab")
    async with stage.open() as opened, opened[0].context() as ctx:
        a, b = opened
        on_call = b._core.handlers[Kind.CALL]

        async def lying(*request: Any) -> Any:
            value, edge, *_ = await on_call(*request)
            return value, edge, behind

        b._core.handlers = {**b._core.handlers, Kind.CALL: lying}
        with pytest.raises((ProtocolError, WorkerLostError)):
            await ctx.backward((await a.call("b", "weigh", stage.x)).sum())
        assert passes(opened) == [0, 0]
