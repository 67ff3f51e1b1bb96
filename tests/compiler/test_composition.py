"""Compiled functions inside of other things: pipelines, parallel maps, checkpoints, workers, custom functions, and each other."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import UnusedInputError
from aiograd.pipeline import Pipeline, make_schedule
from tests.distributed.workers import values, view, workers
from tests.support import bits, cancel
from tests.support import random_leaf as leaf

rng = np.random.default_rng(8)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
async def test_a_stage_of_a_pipeline(schedule: str) -> None:
    """Split backwards included: what a weight needs later comes from the same program."""
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4)]
    x, labels = ag.asarray(rng.standard_normal((8, 8)).astype(np.float32)), np.arange(8) % 4
    parameters = [parameter for module in modules for parameter in module.parameters()]
    found = []
    for stages in (modules, [ag.compile(module.forward) for module in modules]):
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = None
            async with Pipeline(stages, make_schedule(schedule, ranks=3, microbatches=4), loss_fn=nn.functional.cross_entropy) as pipe:
                losses = await pipe.step(x, labels)
            found.append(bits(*losses, *(parameter.grad for parameter in parameters)))
    assert all(each == found[0] for each in found)
    assert all(stage.statistics().runs for stage in stages)


async def test_in_a_parallel_map_a_checkpoint_and_a_custom_function() -> None:
    w = leaf(4)
    f = lambda x: ag.tanh(x * w) * w  # noqa: E731
    compiled = ag.compile(f)

    class Through(ag.Function):
        @staticmethod
        def forward(ctx: Any, function: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return function(x)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return None, g * 2

    inputs = [leaf(4) for _ in range(6)]
    for use in (
        lambda function: _mapped(function, inputs),
        lambda function: asyncio.gather(*(_returned(ag.checkpoint(function, x)) for x in inputs)),
        lambda function: asyncio.gather(*(_returned(Through.apply(function, x)) for x in inputs)),
    ):
        found = []
        for function in (f, compiled, compiled):
            for x in (w, *inputs):
                x.grad = None
            results = await use(function)
            await ag.stack(list(results)).sum().backward()
            found.append(bits(*results, w.grad, *(x.grad for x in inputs)))
        assert found[0] == found[1] == found[2]


async def _mapped(function: Any, inputs: list[Any]) -> list[Any]:
    return [output for (output,) in await ag.parallel.map_with_parallel_backward(function, *((x,) for x in inputs))]


async def _returned(value: Any) -> Any:
    return value


async def test_in_a_function_of_a_worker() -> None:
    w = leaf(3)
    service = dist.Service()
    compiled = ag.compile(lambda x: (ag.exp(x) * w).sum())

    @service.function
    async def loss(x: Any) -> Any:
        return compiled(x)

    async with workers("a", "b", service=service) as (a, b):
        for _ in range(3):
            x = leaf(3)
            async with a.context() as ctx:
                await ctx.backward(await a.call("b", "loss", x))
                (expected,) = await ag.grad((ag.exp(x) * w).sum(), [x])
                assert bits(ctx.grads[x]) == bits(expected) and values(view(b, ctx).grads[w]) == values(ag.exp(x))
    assert (compiled.statistics().runs, compiled.statistics().eager) == (2, 0)


async def test_compiled_functions_call_each_other() -> None:
    w = leaf(4)
    inner = ag.compile(lambda x: ag.tanh(x * w))
    outer = ag.compile(lambda x: (inner(x) + inner(x * 2)).sum())
    eager = lambda x: (ag.tanh(x * w) + ag.tanh(x * 2 * w)).sum()  # noqa: E731
    for _ in range(3):
        x, found = leaf(4), []
        for function in (eager, outer):
            w.grad = x.grad = None
            loss = function(x)
            await loss.backward()
            found.append(bits(loss, w.grad, x.grad))
        assert found[0] == found[1]
    assert outer.statistics().runs == 2 and [s.op.name for s in outer.programs[0].statements].count("tanh") == 2


async def test_a_cancelled_pass_changes_nothing_and_the_next_one_works() -> None:
    w = leaf(4)

    class Waits(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            await asyncio.sleep(0 if hold.is_set() else 3600)
            return g

    hold = asyncio.Event()
    compiled = ag.compile(lambda x: ag.tanh(x * w))
    compiled(leaf(4))
    x = leaf(4)
    loss = compiled(Waits.apply(compiled(x))).sum()
    running = asyncio.ensure_future(loss.backward(retain_graph=True))
    for _ in range(20):
        await asyncio.sleep(0)
    await cancel(running)
    assert w.grad is None and x.grad is None
    hold.set()
    await loss.backward()
    expected = await ag.grad(ag.tanh(ag.tanh(x * w) * w).sum(), [x, w])
    assert bits(x.grad, w.grad) == bits(*expected)


class Root(ag.Function):
    """A function whose backward gives NaN for a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return ag.sqrt(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * np.inf


UNUSED: dict[str, Any] = {
    "unused": lambda x, w: (x * 2.0, Root.apply(w))[:1],
    "unused after a row": lambda x, w: (x * 2.0, Root.apply(w * 3.0) * 2.0)[:1],
    "compared": lambda x, w: (x * (Root.apply(w) * 2.0 > 3.0),),
    "detached": lambda x, w: (x * (Root.apply(w) * 2.0).detach(),),
    "another result": lambda x, w: (y := Root.apply(w), (x * 2.0, y + 1.0))[1],
    "another part's result": lambda x, w: (y := Root.apply(w), x * 2.0, Root.apply(y * (x * x)))[1:],
    "used for shapes": lambda x, w: (x * Root.apply(w).shape[0], w * 1.0),
}


@pytest.mark.parametrize("name", UNUSED)
async def test_a_custom_function_with_a_result_that_is_not_differentiated(name: str) -> None:
    function = UNUSED[name]
    compiled = ag.compile(function)
    for _ in range(3):
        x, w = leaf(4), ag.tensor(np.arange(1.0, 5.0, dtype=np.float32), requires_grad=True)
        found = []
        for call in (function, compiled):
            x.grad = w.grad = None
            first = call(x, w)[0]
            await first.sum().backward(retain_graph=True)
            with pytest.raises(UnusedInputError):
                await ag.grad(first.sum(), [w])
            found.append(bits(x.grad, w.grad))
        assert found[0] == found[1] and w.grad is None
    assert compiled.statistics().runs == 2


async def test_a_pass_goes_where_the_results_lead_that_it_begins_at() -> None:
    def function(x: Any, y: Any) -> Any:
        a, b = x * 2.0, y * 3.0
        return a, b, (a * b).sum()

    compiled = ag.compile(function)
    w, v = ag.tensor(np.arange(1.0, 5.0, dtype=np.float32), requires_grad=True), leaf(4)
    for begins in ([0], [1], [2], [0, 1], [0, 2]):
        for hooks in (False, True):
            found = []
            for call in (function, compiled, compiled):
                w.grad = v.grad = None
                seen: list[Any] = []
                inside = Root.apply(w)
                results = call(inside, v)
                if hooks:
                    results[1].register_hook(lambda grad, seen=seen: seen.append(grad * 1))
                    ag.graph.register_multi_grad_hook([inside, v], lambda grads, seen=seen: seen.extend(grads))
                await sum(results[i].sum() * (i + 1.0) for i in begins).backward()
                found.append((bits(w.grad, v.grad, *seen), w.grad is None))
            assert found[0] == found[1] == found[2]
            assert found[0][1] == (begins == [1])
    assert compiled.statistics().recordings == 1


async def test_rows_that_lead_to_no_result_keep_nothing() -> None:
    w = leaf(4)
    compiled = ag.compile(lambda x: (x * (w * w > 0.5)).sum())
    for _ in range(3):
        x = leaf(4)
        loss = compiled(x)
        with ag.no_grad():
            w *= 0.5
        await loss.backward()
        assert x.grad is not None and w.grad is None
    assert compiled.statistics().runs == 2
