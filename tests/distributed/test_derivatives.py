"""Derivatives of functions with a part on other workers: what crosses crosses whole, or is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.messages.calls import FunctionCall, SentTangent
from aiograd.distributed.rpc.codec import WireTensor
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.errors import ArgumentTypeError, ProtocolError, WorkerLostError
from aiograd.running.devices import known_devices
from aiograd.testing import Faults, SimulatedNetwork, simulated_run
from tests.distributed.workers import SECRET, echo, exposing, square, workers


async def test_an_array_of_a_level_is_refused_where_it_would_be_sent() -> None:
    batch = ag.tensor(np.arange(6.0).reshape(3, 2))
    async with workers("a", "b", service=exposing(square, echo)) as (a, _):

        async def remote(x: Any) -> Any:
            return await a.call("b", "echo", {"k": [x]})

        with pytest.raises(ArgumentTypeError, match=r"calling echo on b: argument 0\['k'\]\[0\] is a tensor of vmap:\d+, shape \[2\], which stand"):
            await ag.vmap(remote)(batch)
        with pytest.raises(ArgumentTypeError, match="Take the part that another worker computes out"):
            await ag.vmap(lambda x: a.call("b", "square", x * 2))(batch)
        assert (await a.call("b", "square", batch)).numpy()[2, 1] == 25, "the connection is as it was"


async def test_gradients_of_a_batch_do_not_cross_and_rows_are_passes_of_their_own() -> None:
    x = ag.tensor([1.0, 2.0, 3.0], requires_grad=True)
    async with workers("a", "b", service=exposing(square)) as (a, _), a.context():

        async def function(x: Any) -> Any:
            return (await a.call("b", "square", x)) * x

        y = await function(x)
        with pytest.raises(ArgumentTypeError, match="stands for more than one value"):
            await ag.vmap(lambda seed: ag.grad(y, [x], seed, retain_graph=True))(ag.tensor(np.eye(3, dtype=np.float32)))
        expected = np.diag(3 * x.detach().numpy() ** 2)
        np.testing.assert_allclose((await ag.jacrev(function, x)).numpy(), expected)
        np.testing.assert_allclose((await ag.jacobian(function, x, chunk_size=2)).numpy(), expected)


async def scaled(x: Any, by: Any) -> Any:
    """Reads a value, and returns one output of each kind."""
    factor = 2.0 if float(x.sum()) > 0 else 3.0
    return {"y": [ag.tanh(x * by) * factor], "n": int(x.size), "shape": ag.tensor([1, 2])}


async def through_c(x: Any) -> Any:
    """A nested call with a tangent in it."""
    return (await dist.current_worker().call("c", "square", x * 3)) + x


async def test_tangents_travel_with_a_call_and_its_reply() -> None:
    x, v = ag.tensor(np.array([0.3, 0.5, -0.1])), ag.tensor(np.array([1.0, -2.0, 0.5]))
    async with workers("a", "b", "c", service=exposing(square, scaled, through_c, echo)) as (a, *_):

        async def function(x: Any) -> Any:
            found = await a.call("b", "scaled", x * 2, by=x)
            assert found["n"] == 3 and found["shape"].tolist() == [1, 2]
            return found["y"][0] * x, await a.call("b", "through_c", x)

        def local(x: Any) -> Any:
            return ag.tanh(x * x * 2) * 2.0 * x, 9 * x * x + x

        found, expected = await ag.jvp(function, x, v), await ag.jvp(local, x, v)
        for mine, theirs in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-12)
        same, (mine, theirs) = await ag.jvp(lambda x: a.call("b", "echo", [x, x.detach()]), x, v)
        assert same[0].tolist() == x.tolist() and mine.tolist() == v.tolist() and theirs.tolist() == [0, 0, 0]


async def test_derivatives_of_derivatives_cross_as_well() -> None:
    x = ag.tensor(np.array([0.3, 0.5]))
    one = ag.tensor(np.ones(2))

    async def cube(x: Any) -> Any:
        return x * x * x

    async with workers("a", "b", service=exposing(cube)) as (a, _):

        async def first(x: Any) -> Any:
            return (await ag.jvp(lambda x: a.call("b", "cube", x), x, one))[1]

        async def second(x: Any) -> Any:
            return (await ag.jvp(first, x, one))[1]

        np.testing.assert_allclose((await second(x)).numpy(), 6 * x.numpy())
        np.testing.assert_allclose((await ag.jvp(second, x, one))[1].numpy(), [6, 6])


async def test_matrices_and_linearize_through_a_call() -> None:
    x = ag.tensor(np.array([0.3, 0.5, -0.1]))
    calls: list[int] = []

    async def counted(x: Any) -> Any:
        calls.append(1)
        return ag.tanh(x) * x.sum()

    async with workers("a", "b", service=exposing(counted)) as (a, _):
        function = lambda x: a.call("b", "counted", x)  # noqa: E731
        expected = (await ag.jacrev(lambda x: ag.tanh(x) * x.sum(), x)).numpy()
        np.testing.assert_allclose((await ag.jacfwd(function, x)).numpy(), expected, rtol=1e-12)
        calls.clear()
        output, push = await ag.linearize(lambda x: function(x * 2), x)
        assert len(calls) == 1
        twice = (await ag.jacrev(lambda x: ag.tanh(2 * x) * x.sum() * 2, x)).numpy()
        for column, unit in zip(twice.T, np.eye(3), strict=True):
            np.testing.assert_allclose((await push(ag.tensor(unit))).numpy(), column, rtol=1e-12)
        np.testing.assert_allclose(output.numpy(), np.tanh(2 * x.numpy()) * x.numpy().sum() * 2)
        assert len(calls) == 4


async def test_a_backward_pass_in_forward_mode_does_not_cross_and_second_derivatives_do() -> None:
    x = ag.tensor(np.array([1.0, 2.0]))
    async with workers("a", "b", service=exposing(square)) as (a, _), a.context():

        async def loss(x: Any) -> Any:
            return (await a.call("b", "square", x)).sum()

        with pytest.raises(ArgumentTypeError, match="stands for more than one value"):
            await ag.jvp(lambda x: ag.value_and_grad(loss, x), x, x)
        value, product = await ag.hvp(loss, x, x)
        assert float(value) == 5 and product.tolist() == [2, 4]
        assert (await ag.hessian(loss, x)).tolist() == [[2, 0], [0, 2]]
        np.testing.assert_allclose((await ag.value_and_grad(loss, x))[1].numpy(), 2 * x.numpy())


async def test_products_that_are_recorded_cross_within_a_context() -> None:
    x, v = ag.tensor(np.array([1.0, 2.0]), requires_grad=True), ag.tensor(np.array([1.0, -1.0]))

    async def cube(x: Any) -> Any:
        return x * x * x

    async with workers("a", "b", service=exposing(cube)) as (a, _), a.context() as ctx:
        _, product = await ag.jvp(lambda x: a.call("b", "cube", x), x, v, create_graph=True)
        np.testing.assert_allclose(product.detach().numpy(), 3 * x.detach().numpy() ** 2 * v.numpy())
        await ctx.backward(product.sum())
        np.testing.assert_allclose(ctx.grads[x].numpy(), 6 * x.detach().numpy() * v.numpy())


class Scale:
    def times(self, x: Any, by: float = 3.0) -> Any:
        return x * x * by


async def test_objects_take_tangents_and_messages_without_room_for_them_refuse() -> None:
    service = exposing(square)
    service.reference(Scale)
    x = ag.tensor(np.array([1.0, 2.0]))
    async with workers("a", "b", service=service) as (a, _):
        ref = await a.remote("b", "Scale")
        _, product = await ag.jvp(lambda x: ref.call("times", x, by=2.0), x, x)
        np.testing.assert_allclose(product.numpy(), 4 * x.numpy() ** 2)

        async def to_all(x: Any) -> Any:
            return (await ref.call_all([ref], "times", x))[0]

        async def posted(x: Any) -> Any:
            await ref.post([x])
            return x

        for function in (to_all, posted):
            with pytest.raises(ArgumentTypeError, match="stands for more than one value"):
                await ag.jvp(function, x, x)


@pytest.mark.parametrize(
    ("tangents", "match"),
    [
        ([SentTangent(0, 1, WireTensor(np.ones(2), False))], "no earlier one"),
        ([SentTangent(0, 0, WireTensor(np.ones(2), False)), SentTangent(0, 0, WireTensor(np.ones(2), False))], "has one already"),
        ([SentTangent(0, 0, WireTensor(np.ones(3), False))], "another shape"),
        ([SentTangent(0, 0, WireTensor(np.ones(2, np.float32), False))], "another shape or dtype"),
        ([SentTangent(0, 0, 3.0)], "no tensors of their own"),
        ([SentTangent(0, 0, [WireTensor(np.ones(2), False)])], "no tensors of their own"),
        ([SentTangent(99, 0, WireTensor(np.ones(2), False))], "at most 16"),
    ],
)
async def test_tangents_that_do_not_fit_are_refused(tangents: Any, match: str) -> None:
    async with workers("a", "b", service=exposing(square)) as (a, b):
        message = FunctionCall("square", [WireTensor(np.array([1.0, 2.0]), False)], {}, False, None, None, tangents)
        with pytest.raises(ProtocolError, match=match):
            await b._calls.on_call(PeerIdentity(a.name, b"i" * 16, "default"), message, 5.0)
        assert not [name for name in known_devices() if name.startswith("jvp")]


@pytest.mark.sim
@pytest.mark.parametrize("lost", ["b", "c"])
def test_a_worker_that_is_lost_is_a_typed_error_and_leaves_nothing(lost: str) -> None:
    network = SimulatedNetwork(0, faults=Faults(latency=(1e-3, 2e-3)))
    x = ag.tensor(np.array([1.0, 2.0]))
    seen: list[str] = []
    own: list[str] = []

    async def slow(x: Any) -> Any:
        seen.append("b")
        return (await dist.current_worker().call("c", "slower", x * 2)) * x

    async def slower(x: Any) -> Any:
        seen.append("c")
        await asyncio.sleep(1.0)
        return x * x

    async def serve(name: str) -> None:
        async with dist.Worker(name, service=exposing(slow, slower), secret=SECRET, transport=network.transport(name)) as worker:
            worker.add_peer("c", "sim://c")
            await asyncio.sleep(1e3)

    async def lead() -> None:
        async with dist.Worker("a", secret=SECRET, transport=network.transport("a")) as a:
            a.add_peer("b", "sim://b")

            async def function(x: Any) -> Any:
                own.append(str(x.device))
                return await a.call("b", "slow", x)

            product = asyncio.create_task(ag.jvp(function, x, x))
            while len(seen) < 2:
                await asyncio.sleep(0.01)
            network.kill(lost)
            with pytest.raises(WorkerLostError, match="Error on Node b: worker 'c' was lost" if lost == "c" else "worker 'b' was lost"):
                await product
            assert own and own[0] not in known_devices()

    async def main() -> None:
        for name in "bc":
            network.spawn(name, serve(name))
        try:
            await network.spawn("a", lead())
        finally:
            for name in "bc":
                network.kill(name)

    simulated_run(main, seed=0)
