"""Send and recv nodes: which there are, what they have as edges and inputs, and what flows through them in backward."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.codec import WireTensor
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    ContextReleasedError,
    GraphFreedError,
    NoGraphError,
    ProtocolError,
    RemoteError,
)
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.passes_kit import Misbehave, Suspend
from tests.distributed.workers import context_here, echo, exposing, leaf, relay, simulate, square, values, view, workers
from tests.support import custom_function

service = exposing(square, relay, echo)


@service.function
async def add(x: Any, y: Any) -> Any:
    return x + y


@service.function
async def pair(x: Any, y: Any) -> Any:
    return x * 2, y * 3


def sent(worker: dist.Worker, ctx: Any) -> list[Any]:
    return list(view(worker, ctx).send_nodes.values())


def received(worker: dist.Worker, ctx: Any) -> list[Any]:
    return list(view(worker, ctx).recv_nodes.values())


# -------------------------------------------------------------------- which nodes there are


async def test_a_message_has_one_node_on_each_side_with_its_differentiable_tensors_in_order() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        x, y, plain = leaf(1, 2), leaf(3), ag.tensor([4.0])
        product = x * 2
        back = await a.call("b", "echo", [product, plain, {"y": y}, product, 5])
        (send,), (recv,) = sent(a, ctx), received(b, ctx)
        assert [edge.node for edge in send.next_edges] == [product.grad_fn, y._node], "plain tensors have no edge, and none has two"
        assert send.num_inputs == recv.num_inputs == 2 and recv.num_outputs == 0
        assert send.edge == recv.edge and (send.peer, recv.peer) == ("b", "a")
        assert [(metadata.shape, metadata.dtype) for metadata in recv.input_metadata] == [((2,), np.float32), ((1,), np.float32)]
        assert recv.input_metadata == send.input_metadata
        (reply,), (arrived,) = sent(b, ctx), received(a, ctx)
        assert {edge.node for edge in reply.next_edges} == {recv} and [edge.input_nr for edge in reply.next_edges] == [0, 1]
        assert back[0].grad_fn is back[2]["y"].grad_fn is arrived and back[0] is back[3] and arrived.edge == reply.edge != send.edge
        assert not back[1].requires_grad
        assert view(a, ctx).send_nodes[send.edge] is send and view(b, ctx).recv_nodes[send.edge] is recv


async def test_message_ids_are_those_of_their_sender_and_never_meet() -> None:
    async with workers("a", "b", "c", service=service) as everybody, everybody[0].context() as ctx:
        a, *_ = everybody
        x = leaf(1)
        for _ in range(5):
            x = await a.call("b", "relay", "c", "square", x)
        edges = {worker.name: [node.edge for node in sent(worker, ctx)] for worker in everybody}
        assert [len(ids) for ids in edges.values()] == [5, 10, 5] and len({edge for ids in edges.values() for edge in ids}) == 20
        for ids in edges.values():
            assert len({edge >> 32 for edge in ids}) == 1, "minted by one worker"
        assert all(0 < edge < 2**63 for ids in edges.values() for edge in ids)


async def test_calls_without_gradients_have_no_nodes() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        y = await a.call("b", "square", ag.tensor([1.0]))
        await a.call("b", "echo", "nothing at all")
        z = await a.call("b", "square", leaf(1).detach())
        assert not y.requires_grad and not z.requires_grad
        assert not sent(a, ctx) and not received(a, ctx) and not sent(b, ctx) and not received(b, ctx)
        assert ctx.known_workers == {"b"}, "the id travels all the same: what runs there belongs to the context"


async def test_only_the_way_that_has_gradients_has_nodes() -> None:
    own = dist.Service()
    weight = leaf(2)
    own.function("forget")(lambda x: x.detach())
    own.function("weigh")(lambda x: x * weight)
    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        await a.call("b", "forget", leaf(1))
        assert [len(each) for each in (sent(a, ctx), received(b, ctx), sent(b, ctx), received(a, ctx))] == [1, 1, 0, 0]
        y = await a.call("b", "weigh", ag.tensor([3.0]))
        assert [len(each) for each in (sent(a, ctx), received(b, ctx), sent(b, ctx), received(a, ctx))] == [1, 1, 1, 1]
        await ctx.backward(y.sum())
        assert values(view(b, ctx).grads[weight]) == [3] and not len(ctx.grads)


async def test_nested_calls_have_a_node_per_message_on_every_worker() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        x = leaf(3)
        y = await a.call("b", "relay", "c", "relay", "a", "square", x)  # a → b → c → a and back
        assert [(len(sent(w, ctx)), len(received(w, ctx))) for w in (a, b, c)] == [(2, 2), (2, 2), (2, 2)]
        assert {(node.peer) for node in sent(b, ctx)} == {"a", "c"}
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [6]


async def test_a_view_that_was_modified_through_its_base_is_sent_as_it_is_now() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(1, 2, 3)
        base = x * 1
        part = base[:2]
        base *= 10
        y = await a.call("b", "square", part)
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [2 * 10 * 10, 2 * 20 * 10, 0]


# -------------------------------------------------------------------- what flows


class Spy:
    """Notes the requests of a worker by kind."""

    def __init__(self, worker: dist.Worker) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        request = worker._core.endpoint.request

        def spied(peer: str, kind: int, value: Any, *rest: Any) -> Any:
            self.seen.append((peer, Kind(kind).name, value))
            return request(peer, kind, value, *rest)

        worker._core.endpoint.request = spied  # type: ignore[method-assign]

    def gradients(self) -> list[Any]:
        """The gradients of each message, None for absent ones."""
        return [[None if grad is None else grad.array for grad in value[3][1]] for _, kind, value in self.seen if kind == "GRADIENT"]


async def test_gradients_that_nobody_needs_travel_as_an_absence() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        spies = [Spy(worker) for worker in (a, b, c)]
        x, y, z = leaf(1), leaf(2), leaf(3)
        p, q = await a.call("b", "pair", x, y)
        r = await a.call("b", "relay", "c", "add", z, z.detach())
        await ctx.backward((q + r).sum(), retain_graph=True)
        there = [grads for spy in spies for grads in spy.gradients()]
        assert [None, np.ones(1)] in [[g if g is None else np.array(g) for g in grads] for grads in there], "one of two results was used"
        assert all(grad is None or grad.any() for grads in there for grad in grads), "and no zeros"
        assert x not in ctx.grads and values(ctx.grads[y]) == [3] and values(ctx.grads[z]) == [1]
        await ctx.backward(p.sum())
        assert values(ctx.grads[x]) == [2] and values(ctx.grads[y]) == [3]


async def test_inputs_that_do_not_matter_have_no_gradient() -> None:
    own = dist.Service()

    @own.function
    async def first(x: Any, y: Any) -> Any:
        return x * 2

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x, y = leaf(1), leaf(1)
        await ctx.backward((await a.call("b", "first", x, y)).sum())
        assert values(ctx.grads[x]) == [2] and y not in ctx.grads


async def test_the_pass_is_over_everywhere_when_it_returns() -> None:
    async with workers("a", "b", "c", service=service) as everybody, everybody[0].context() as ctx:
        a, *_ = everybody
        y = await a.call("b", "relay", "c", "square", leaf(1))
        z = await a.call("c", "square", y)
        await ctx.backward(z.sum())
        for worker in everybody:
            figures = worker.statistics()
            assert (figures.passes, figures.passes_committed, figures.passes_aborted, figures.contexts) == (0, 1, 0, 1)


async def test_completion_waits_for_the_slowest_worker_of_the_tree(virtual_clock: VirtualClock) -> None:
    async def pause(g: Any) -> Any:
        await asyncio.sleep(2.0)
        finished.append(loop.time())
        return g

    finished: list[float] = []
    own = dist.Service()
    weight = leaf(1)
    loop = asyncio.get_running_loop()
    own.function("slow")(lambda x: x * Suspend.apply(weight, pause))
    async with workers("a", "b", "c", services={"b": service, "c": own}) as (a, _, c), a.context() as ctx:
        x = leaf(1)
        y = await a.call("b", "relay", "c", "slow", x)
        began = loop.time()
        await ctx.backward(y.sum())
        assert finished[0] == pytest.approx(began + 2, abs=0.5) and loop.time() >= finished[0]
        assert values(ctx.grads[x]) == [1] and values(view(c, ctx).grads[weight]) == [1]


async def test_a_callee_starts_a_pass_from_a_root_of_its_own() -> None:
    own = dist.Service()
    weight = leaf(5)

    @own.function
    async def loss(x: Any) -> None:
        await context_here().backward((x * weight).sum())

    @own.function
    async def loss_further_on(x: Any) -> None:
        y = await dist.current_worker().call("b", "square", x)
        await context_here().backward(y.sum())

    own.function("square")(lambda x: x * x)
    async with workers("a", "b", "c", service=own) as (a, b, _), a.context() as ctx:
        x = leaf(3)
        await a.call("b", "loss", x * 2)
        assert values(ctx.grads[x]) == [10] and values(view(b, ctx).grads[weight]) == [6]
        await a.call("c", "loss_further_on", x)  # begins on c, goes through b back to c, and ends on a
        assert values(ctx.grads[x]) == [10 + 6]


@pytest.mark.parametrize("mode", ["smart", "fast", "FAST"])
async def test_a_graph_that_is_retained_is_differentiated_again_on_every_worker(mode: str) -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        x = leaf(3)
        y = await a.call("b", "relay", "c", "square", x)
        loss = y.sum()
        for n in (1, 2, 3):
            await ctx.backward(loss, retain_graph=n < 3, mode=mode)
            assert values(ctx.grads[x]) == [6 * n]
        with pytest.raises(RemoteError, match=r"^Error on Node b: Error on Node c: .*: GraphFreedError: Trying to backward") as caught:
            await ctx.backward(loss, mode=mode)
        assert (caught.value.worker, caught.value.type_name) == ("c", GraphFreedError.__name__)
        assert values(ctx.grads[x]) == [18], "nothing was added"
        assert not any(worker.statistics().passes for worker in (a, b, c))
        await ctx.backward((await a.call("b", "square", x)).sum(), mode="smart")
        assert values(ctx.grads[x]) == [24]


class Times(ag.Function):
    @staticmethod
    async def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        await asyncio.sleep(0)
        return x * factor

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return g * ctx.factor, None


async def test_sums_on_every_worker_are_those_of_one_process_to_the_bit() -> None:
    """Four contributions to one parameter, whose sum in single precision depends on their order; every order of recording them."""
    own = dist.Service()
    weight = leaf(1)

    @own.function
    async def same(x: Any) -> Any:
        return x * 1

    async def build(weight: Any, x: Any, order: str, call: Callable[[Any], Any]) -> Any:
        parts = {}
        for kind in order:
            match kind:
                case "A":
                    parts[kind] = await Times.apply(weight, 1e8)
                case "B":
                    parts[kind] = (await call(weight)) * -1e8
                case "C":
                    parts[kind] = weight * 1
                case "D":
                    parts[kind] = (await call(weight * 1)) * 5
        return sum(parts[kind] for kind in sorted(parts)) * x

    @own.function
    async def compute(x: Any, order: str) -> Any:
        return await build(weight, x, order, lambda value: dist.current_worker().call("c", "same", value))

    own.function("relay")(relay)
    sums = set()
    async with workers("a", "b", "c", service=own) as (a, b, _):
        for order in map("".join, itertools.permutations("ABCD")):
            mine = leaf(1)
            y = await build(mine, leaf(1), order, same)
            await y.sum().backward()
            sums.add(values(mine.grad)[0])
            for where, call in ((b, ("b", "compute")), (a, ("b", "relay", "a", "compute"))):
                async with a.context() as ctx:
                    y = await a.call(*call, leaf(1), order)
                    await ctx.backward(y.sum())
                    assert values(view(where, ctx).grads[weight]) == values(mine.grad), (order, where.name)
    assert len(sums) > 2, "the order matters"


@pytest.mark.parametrize("function", ["scale", "hand_over"])
def test_sums_do_not_depend_on_when_calls_are_served(function: str) -> None:
    """Calls made one after the other are served in every order; the sum is that of the order in which they were made."""
    own = dist.Service()
    weight = leaf(1)

    @own.function
    async def scale(x: Any, factor: float, delay: float) -> Any:
        await asyncio.sleep(delay)
        return x * (weight * factor)

    @own.function
    async def hand_over(x: Any, factor: float, delay: float) -> Any:
        await asyncio.sleep(delay)
        return weight

    found = set()

    async def main(delays: tuple[float, ...]) -> None:
        async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
            x = leaf(1)
            factors = (1e8, 5, -1e8, 3)
            y = await asyncio.gather(*(a.call("b", function, x, factor, delay) for factor, delay in zip(factors, delays, strict=True)))
            if function == "hand_over":
                y = [part * factor for part, factor in zip(y, factors, strict=True)]
            await ctx.backward((y[0] + y[1] + y[2] + y[3]).sum())
            found.add(values(view(b, ctx).grads[weight])[0])

    for delays in itertools.permutations((1.0, 2.0, 3.0, 4.0)):
        simulate(functools.partial(main, delays))
    assert found == {8.0}, "((3 - 1e8) + 5) + 1e8 in single precision"


async def test_a_graph_spent_here_says_so_here() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        loss = (await a.call("b", "square", leaf(3) * 1)) * ag.tensor([2.0])
        loss = (loss * loss).sum()
        await ctx.backward(loss)
        with pytest.raises(GraphFreedError, match="a second time"):
            await ctx.backward(loss)


async def test_arguments_of_backward() -> None:
    async with workers("a", "b", service=service) as (a, _):
        async with a.context() as ctx:
            x = leaf(1, 2)
            y = await a.call("b", "square", x)
            for roots, error, text in (
                ((), ArgumentError, "No tensors provided for gradient computation."),
                ((y,), ArgumentError, r"root 0 of shape \[2\] is not a scalar, all roots need to be scalar"),
                ((y.sum(), (y * 1j).sum()), ArgumentTypeError, "root 1 has dtype complex64; expected a real scalar"),
                ((y.sum(), y.detach().sum()), NoGraphError, "requires_grad not set on root 1"),
                ((leaf(1),), NoGraphError, "root 0 does not have a valid gradient function"),
                ((3,), ArgumentTypeError, "root 0 is a int"),
                (([y.sum()],), ArgumentTypeError, "root 0 is a list"),
            ):
                with pytest.raises(error, match=text):
                    ctx.backward(*roots)
            for options in ({"mode": "quick"}, {"mode": None}, {"timeout": 0}, {"timeout": -1.0}):
                with pytest.raises(ArgumentError):
                    ctx.backward(y.sum(), **options)
            assert not a.statistics().passes and not len(ctx.grads)
            await ctx.backward(y.sum().reshape(1, 1), retain_graph=True)
            assert values(ctx.grads[x]) == [2, 4]
        with pytest.raises(ContextReleasedError):
            ctx.backward(y.sum())


async def test_a_local_pass_cannot_cross_workers_and_changes_nothing() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(1)
        y = await a.call("b", "square", x)
        with pytest.raises(ContextError, match=r"differentiating values that came from b .*await ctx.backward\(loss\)"):
            await (y.sum() + x.sum()).backward()
        assert x.grad is None and x not in ctx.grads


async def test_a_purely_local_loss_in_a_context() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(1, 2)
        await ctx.backward((x * x).sum())
        assert values(ctx.grads[x]) == [2, 4] and x.grad is None and not ctx.known_workers
        await (x * x).sum().backward()  # and an ordinary pass goes where it always does
        assert values(x.grad) == [2, 4] and values(ctx.grads[x]) == [2, 4]


async def test_values_of_one_context_are_not_differentiated_in_another() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as first:
        y = await a.call("b", "square", leaf(1))

        async def other() -> None:
            async with a.context() as second:
                z = await a.call("b", "square", leaf(1))
                with pytest.raises(ContextError, match=f"in context {second.id} reaches values that came from b in another context"):
                    await second.backward((y + z).sum())

        await asyncio.create_task(other(), context=contextvars.Context())
        await first.backward(y.sum())


async def test_a_thousand_passes_over_one_graph() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        x = leaf(1)
        loss = (await a.call("b", "square", x)).sum()
        for _ in range(1000):
            await ctx.backward(loss, retain_graph=True)
        assert values(ctx.grads[x]) == [2000] and b.statistics().passes_committed == 1000


# -------------------------------------------------------------------- hooks


async def test_hooks_run_on_every_worker_with_the_context_current() -> None:
    own = dist.Service()
    weight = leaf(2)
    ran: list[tuple[str, Any]] = []

    def note(name: str, *found: Any) -> None:
        context = dist.current_context()
        ran.append((name, dist.current_worker().name, None if context is None else context.id, *found))  # type: ignore[arg-type]

    @own.function
    async def scale(x: Any) -> Any:
        y = x * weight
        y.register_hook(lambda g: note("tensor", values(g)))
        y.grad_fn.register_prehook(lambda gs: note("pre"))
        y.grad_fn.register_hook(lambda gi, go: note("post"))
        return y * 1

    async def after(parameter: Any) -> None:
        assert parameter is weight
        note("accumulated", values(context_here().grads[weight]))

    weight.register_hook(lambda g: note("leaf", values(g)))
    weight.register_post_accumulate_grad_hook(after)
    weight._node.register_prehook(lambda gs: note("leaf pre"))
    weight._node.register_hook(lambda gi, go: note("leaf post"))
    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x = leaf(3)
        x.register_hook(lambda g: note("x", values(g)))
        x.register_post_accumulate_grad_hook(lambda t: note("x accumulated", values(ctx.grads[x])))
        y = await a.call("b", "scale", x)
        y.register_hook(lambda g: note("y", values(g)))
        await ctx.backward(y.sum())
        there = ("b", ctx.id)
        assert [each for each in ran if each[1] == "b"] == [
            ("tensor", *there, [1]), ("pre", *there), ("post", *there),
            ("leaf", *there, [3]), ("leaf pre", *there), ("leaf post", *there), ("accumulated", *there, [3]),
        ]  # fmt: skip
        assert [each for each in ran if each[1] == "a"] == [("y", "a", ctx.id, [1]), ("x", "a", ctx.id, [2]), ("x accumulated", "a", ctx.id, [2])]
        assert weight.grad is None and x.grad is None


async def test_the_context_is_current_in_hooks_also_where_the_pass_was_started_outside_of_its_block() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(3)
        seen: list[Any] = []
        x.register_hook(lambda g: seen.append((dist.current_context(), dist.current_worker())))
        loss = (await a.call("b", "square", x)).sum()
        await asyncio.create_task(ctx.backward(loss), context=contextvars.Context())
        assert seen == [(ctx, a)]


async def test_hooks_change_what_travels() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(3)
        y = await a.call("b", "square", x)
        y.register_hook(lambda g: g * 10)
        y.grad_fn.register_prehook(lambda gs: (gs[0] + 1,))
        x.register_hook(lambda g: -g)
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [-6 * 11]


async def test_a_hook_makes_remote_calls_in_its_context() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        x = leaf(3)
        y = await a.call("b", "square", x)

        async def remote(g: Any) -> Any:
            return (await dist.current_worker().call("b", "echo", g)) * 2

        y.register_hook(remote)
        await ctx.backward(y.sum())
        assert values(ctx.grads[x]) == [12] and b.statistics().contexts == 1


async def test_hooks_on_leaves_run_also_when_their_gradient_is_absent() -> None:
    @custom_function(lambda x, y: x + y)
    def absent(ctx: Any, g: Any) -> Any:
        return g, None

    own = dist.Service()
    weight = leaf(2)
    ran: list[Any] = []
    weight._node.register_prehook(lambda gs: ran.append(("pre", gs)))
    weight._node.register_hook(lambda gi, go: ran.append(("post", go)))

    @own.function
    async def mix(x: Any) -> Any:
        return absent.apply(x, weight)

    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(1)
        await ctx.backward((await a.call("b", "mix", x)).sum())
        assert [name for name, _ in ran] == ["pre", "post"] and all(gs == (None,) for _, gs in ran)
        assert weight not in view(b, ctx).grads and values(ctx.grads[x]) == [1]


async def test_retained_gradients_and_final_callbacks() -> None:
    own = dist.Service()
    kept: list[Any] = []
    called: list[Any] = []

    @own.function
    async def square(x: Any) -> Any:
        y = x * x
        y.retain_grad()
        y.register_hook(lambda g: ag.graph.queue_callback(lambda: called.append((dist.current_worker().name, dist.current_context()))))
        kept.append(y)
        return y * 3

    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(3)
        y = await a.call("b", "square", x)
        y.retain_grad()
        await ctx.backward(y.sum())
        assert values(y.grad) == [1] and values(kept[0].grad) == [3] and values(ctx.grads[x]) == [18]
        assert called == [("b", view(b, ctx))]
        kept.clear()


async def test_an_eager_hook_waits_for_the_commit_in_a_distributed_pass() -> None:
    own = dist.Service()
    weight = leaf(2)
    ran: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda t: ran.append(dist.current_context().grads[t]), eager=True)  # type: ignore[union-attr]

    def boom(g: Any) -> Any:
        raise ValueError("boom")

    own.function("scale")(lambda x: x * weight)
    own.function("explode")(lambda x: Misbehave.apply(x, boom))
    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(3)
        with pytest.raises(RemoteError, match="boom"):
            await ctx.backward((await a.call("b", "scale", await a.call("b", "explode", x))).sum())
        assert ran == [] and weight not in view(b, ctx).grads
        await ctx.backward((await a.call("b", "scale", x)).sum())
        assert [values(grad) for grad in ran] == [[3]]


# -------------------------------------------------------------------- profiling


async def test_the_profiler_of_a_worker_records_what_runs_there_for_others() -> None:
    prof = ag.profiler.profile()
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        b.profiler = prof.recorder
        loss = (await a.call("b", "square", leaf(3))).sum()
        await ctx.backward(loss)
        b.profiler = None
        recorded = [(event.category, event.name) for event in prof.events]
        assert [name for category, name in recorded if category == "forward"] == ["mul"]
        ran = sorted(name for category, name in recorded if category == "backward")
        assert ran == ["GraphRoot", "MulBackward", "RecvNode", "SendNode"]
        assert sum(category == "pass" for category, _ in recorded) == 1
        await ctx.backward((await a.call("b", "square", leaf(3))).sum())
        assert len(prof.events) == len(recorded)


async def test_a_profile_of_the_caller_records_its_own_side() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        with ag.profiler.profile() as prof:
            loss = (await a.call("b", "square", leaf(3))).sum()
            await ctx.backward(loss)
        ran = sorted(event.name for event in prof.events if event.category == "backward")
        assert ran == ["AccumulateGrad", "RecvNode", "SendNode", "SumBackward"]
        assert [event.name for event in prof.events if event.category == "forward"] == ["sum"]


# -------------------------------------------------------------------- peers that do not keep to the rules


async def _one_edge(a: dist.Worker, ctx: Any, function: str = "square") -> int:
    """Have `b` know one send edge to `a`; returns its id."""
    y = await a.call("b", function, leaf(1, 2))
    return y.grad_fn.edge  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda edge, good: (edge + 1, good, 0), "Could not find send function for autograd message id"),
        (lambda edge, good: ("x", good, 0), "malformed GRADIENT: field bundle.edge is 'x' of type str; expected int"),
        (lambda edge, good: (edge, [*good, None], 0), "2 gradients of message .*; expected 1"),
        (lambda edge, good: (edge, [], 0), "0 gradients of message .*; expected 1"),
        (lambda edge, good: (edge, [3.0], 0), r"field bundle.gradients\[0\] is 3.0 of type float; expected WireTensor or None"),
        (lambda edge, good: (edge, [WireTensor(np.ones(3, np.float32), False)], 0), r"is float32 \[3\]; what was sent in forward was float32 \[2\]"),
        (lambda edge, good: (edge, [WireTensor(np.ones(2), False)], 0), r"is float64 \[2\]; what was sent in forward was float32 \[2\]"),
        (lambda edge, good: (edge, tuple(good), 0), "field bundle.gradients is of type tuple; expected list of WireTensor or None"),
        (lambda edge, good: (edge, good), r"field bundle is a tuple of 2 values; expected a tuple \(edge, gradients, recorded_edge\)"),
        (lambda edge, good: [], "field bundle is of type list; expected Bundle"),
    ],
)
async def test_gradients_that_do_not_fit_are_refused(spoil: Callable[[int, Any], Any], text: str) -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        edge = await _one_edge(a, ctx)
        good = [WireTensor(np.ones(2, np.float32), False)]
        await a.endpoint.request("b", Kind.MARK, (ctx.key, "a", 99, [edge]), 5)
        with pytest.raises(ProtocolError, match=text):
            await a.endpoint.request("b", Kind.GRADIENT, (ctx.key, "a", 99, spoil(edge, good), 2, []), 5)
        await a.endpoint.request("b", Kind.ABORT, (ctx.key, "a", 99, "done"), 5)
        assert not b.statistics().passes


async def test_gradients_for_an_edge_that_does_not_take_part_are_refused() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        edge, other = await _one_edge(a, ctx), await _one_edge(a, ctx)
        await a.endpoint.request("b", Kind.MARK, (ctx.key, "a", 99, [edge]), 5)
        bundle = (other, [WireTensor(np.ones(2, np.float32), False)], 0)
        with pytest.raises(ProtocolError, match="which the pass does not wait for"):
            await a.endpoint.request("b", Kind.GRADIENT, (ctx.key, "a", 99, bundle, 2, []), 5)
        await a.endpoint.request("b", Kind.ABORT, (ctx.key, "a", 99, "done"), 5)
        assert not b.statistics().passes


async def test_an_edge_belongs_to_the_worker_it_leads_to() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        edge = await _one_edge(a, ctx)
        await a.call("c", "relay", "b", "square", leaf(1))  # c may use the context, and knows b
        for kind, value in (
            (Kind.MARK, (ctx.key, "c", 1, [edge])),
            (Kind.GRADIENT, (ctx.key, "c", 1, (edge, [WireTensor(np.ones(2, np.float32), False)], 0), 0, [])),
        ):
            with pytest.raises(ProtocolError, match="Could not find send function for autograd message id"):
                await c.endpoint.request("b", kind, value, 5)
        assert not b.statistics().passes and not len(view(b, ctx).grads)
