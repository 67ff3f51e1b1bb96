"""Remote modules: called as if they were here, with parameters, state and mode of the ones that live elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentTypeError, DeadlineError, DistributedError, LimitError, NotExposedError, ReferenceLostError, RemoteError
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import Switchboard
from tests.distributed.workers import leaf, until, values, view, workers
from tests.support import cancel
from tests.toy_device import ToyDevice

service = dist.Service()


@service.reference
class Affine(ag.nn.Module):
    def __init__(self, size: int, device: str = "cpu") -> None:
        self.weight = ag.nn.Parameter(ag.tensor(np.arange(1.0, size + 1, dtype=np.float32)).to(device))
        self.bias = ag.nn.Parameter(ag.tensor(np.zeros(size, np.float32)).to(device))
        self.register_buffer("seen", ag.tensor([0.0]).to(device))

    def forward(self, x: Any, negate: bool = False) -> Any:
        self.seen += 1
        y = x.to(self.weight.device) * self.weight + self.bias
        return -y if negate else y

    def is_training(self) -> bool:
        return self.training


@service.reference
class Waiting(ag.nn.Module):
    def __init__(self) -> None:
        self.inner = Affine(2)

    async def forward(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return self.inner(x) * 2


@service.reference
class Plain:
    pass


async def made(worker: dist.Worker, cls: Any = Affine, *args: Any) -> dist.RemoteModule:
    return dist.RemoteModule(worker, "b", await worker.remote("b", cls, *args))


async def test_a_remote_module_is_called_and_differentiated_like_a_local_one() -> None:
    local = Affine(3)
    async with workers("a", "b", service=service) as (a, b):
        module = await made(a, Affine, 3)
        assert repr(module) == "RemoteModule(Affine on b)"
        async with a.context() as ctx:
            x = leaf(1, 2, 3)
            for y in (await module(x), await module.forward(x, negate=True), await module(x, timeout=5.0)):
                await ctx.backward((y * y).sum())
            here = leaf(1, 2, 3)
            for negate in (False, True, False):
                z = local(here, negate)
                await (z * z).sum().backward()
            assert values(ctx.grads[x]) == values(here.grad)
            there = {values(parameter)[0]: values(grad) for parameter, grad in view(b, ctx).grads.items()}
            assert there == {1.0: values(local.weight.grad), 0.0: values(local.bias.grad)}


async def test_a_module_whose_forward_waits() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, Waiting)
        async with a.context() as ctx:
            x = leaf(1, 1)
            y = await module(x)
            assert values(y) == [2, 4]
            await ctx.backward(y.sum())
            assert values(ctx.grads[x]) == [2, 4]


async def test_parameters_are_references_in_the_modules_order() -> None:
    async with workers("a", "b", service=service) as (a, b):
        module = await made(a, Waiting)
        named = await module.named_parameters()
        assert list(named) == ["inner.weight", "inner.bias"] and all(ref.owner == "b" for ref in named.values())
        assert values(await named["inner.weight"].get()) == [1, 2]
        count = b.statistics().references
        assert await module.parameters() == list(named.values()) and b.statistics().references == count, "asking again takes no more room"
        async with a.context() as ctx:
            weight = await named["inner.weight"].get()
            await ctx.backward((weight * weight).sum())
            (grad,) = view(b, ctx).grads.values()
            assert values(grad) == [2, 4]


async def test_state_goes_to_a_checkpoint_and_back() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, Waiting)
        await module(ag.tensor([1.0, 1.0]))
        state = await module.state_dict()
        assert {path: values(value) for path, value in state.items()} == {
            "inner.weight": [1, 2], "inner.bias": [0, 0], "inner.seen": [1],
        }  # fmt: skip
        assert not any(value.requires_grad for value in state.values())
        await module(ag.tensor([1.0, 1.0]))
        state["inner.weight"] = ag.tensor([5.0, 6.0])
        await module.load_state_dict(state)
        back = await module.state_dict()
        assert values(back["inner.weight"]) == [5, 6] and values(back["inner.seen"]) == [1]
        assert values(await module(ag.tensor([1.0, 1.0]))) == [10, 12]
        await module.load_state_dict({path: value.numpy() for path, value in state.items()} | {"inner.weight": np.array([7.0, 8.0], np.float32)})
        assert values((await module.state_dict())["inner.weight"]) == [7, 8]


async def test_state_that_does_not_fit_changes_nothing() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, Affine, 2)
        before = {path: values(value) for path, value in (await module.state_dict()).items()}
        for state, text in (
            ({"weight": ag.tensor([9.0, 9.0])}, "nothing was loaded.*missing: bias"),
            ({**await module.state_dict(), "weight": ag.tensor([9.0]), "bias": ag.tensor([9.0, 9.0])}, "nothing was loaded.*weight: "),
            ({**await module.state_dict(), "other": ag.tensor([9.0])}, "unexpected: other"),
        ):
            with pytest.raises(RemoteError, match=f"^Error on Node b: .*: load_state_dict of Affine: .*{text}"):
                await module.load_state_dict(state)
        assert {path: values(value) for path, value in (await module.state_dict()).items()} == before


async def test_a_checkpoint_is_of_one_moment() -> None:
    async with workers("a", "b", service=service, board=Switchboard(high_water=1 << 16)) as (a, b):
        module = await made(a, Affine, 1_000_000)
        (local,) = [held.value for held in b._objects.table._held.values()]
        with ag.no_grad():
            local.weight.zero_()
        asking = asyncio.ensure_future(module.state_dict())
        while not asking.done():
            await asyncio.sleep(0)
            with ag.no_grad():
                local.weight.add_(1.0)
        weight = (await asking)["weight"].numpy()
        assert (weight == weight[0]).all() and weight[0] < local.weight.detach().numpy()[0]


SMALL = dist.Limits(message_bytes=40_000, tensors=8)


@service.reference
class Large(ag.nn.Module):
    """More Tensors, and a larger one, than fit into a message."""

    def __init__(self, count: int, size: int) -> None:
        self.layers = ag.nn.ModuleList([Affine(3) for _ in range(count)])
        self.weight = ag.nn.Parameter(ag.tensor(np.arange(size, dtype=np.float32).reshape(-1, 2)))

    def fill(self, value: float) -> None:
        with ag.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


async def test_a_state_that_is_too_large_for_a_message_goes_in_several() -> None:
    async with workers("a", "b", service=service, limits=SMALL) as (a, b):
        module = await a.remote_module("b", Large, 5, 30_000)
        state = await module.state_dict(timeout=10.0)
        local = Large(5, 30_000)
        assert {name: values(value) for name, value in state.items()} == {name: values(value) for name, value in local.state_dict().items()}
        other = await a.remote_module("b", "Large", 5, 30_000)
        await other.ref.call("fill", 3.0)
        await other.load_state_dict(state, timeout=10.0)
        assert {name: values(value) for name, value in (await other.state_dict()).items()} == {name: values(value) for name, value in state.items()}
        bad = {**state, "weight": ag.tensor([1.0])}
        await other.ref.call("fill", 5.0)
        with pytest.raises(RemoteError, match="nothing was loaded"):
            await other.load_state_dict(bad)
        assert {tuple(np.unique(value.numpy())) for name, value in (await other.state_dict()).items() if "seen" not in name} == {(5.0,)}
        transfers = b._objects.streams
        assert len(transfers) == 0, "what is complete is forgotten"
        reading = asyncio.ensure_future(module.state_dict())
        await until(lambda: len(transfers))
        await cancel(reading)
        await until(lambda: not len(transfers))


async def test_a_state_that_takes_too_long_ends_at_its_deadline(virtual_clock: VirtualClock) -> None:
    """Each message takes 0.1 s, and the state is several."""

    board = Switchboard()
    board.latency = 0.1
    async with workers("a", "b", service=service, limits=SMALL, board=board) as (a, b):
        module = await a.remote_module("b", Large, 5, 30_000)
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError):
            await module.state_dict(timeout=0.3)
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.3, abs=0.05)
        await asyncio.sleep(1.0)
        assert len(b._objects.streams) == 0, "what nobody asks for any more is forgotten"
        assert len(await module.state_dict(timeout=60.0)) == len(Large(5, 30_000).state_dict())


async def test_a_large_checkpoint_is_of_one_moment_too() -> None:
    async with workers("a", "b", service=service, limits=SMALL) as (a, b):
        module = await a.remote_module("b", Large, 5, 30_000)
        await module.ref.call("fill", 0.0)
        (local,) = [held.value for held in b._objects.table._held.values()]
        asking = asyncio.ensure_future(module.state_dict())
        while not asking.done():
            await asyncio.sleep(0)
            local.fill(local.weight.numpy()[0, 0] + 1)
        found = {tuple(np.unique(value.numpy())) for name, value in (await asking).items() if "seen" not in name}
        assert len(found) == 1 and all(len(numbers) == 1 for numbers in found), found


async def test_what_is_transferred_for_nobody_any_more_is_dropped() -> None:
    async with workers("a", "b", service=service, limits=SMALL) as (a, b):
        module = await a.remote_module("b", Large, 5, 30_000)
        transfers = b._objects.streams
        ids = [bytes([n] * 16) for n in range(6)]
        for number in ids:
            assert (await a.call("b", "aiograd.module.state_dict", module.ref, number, (8, 4000, 4000)))[1]
        assert len(transfers) == 2, "the oldest make room"
        for number in (ids[0], b"x" * 16):
            with pytest.raises(DistributedError, match="no such transfer"):
                await a.call("b", "aiograd.transfer.more", module.ref, number)
        other = await a.remote_module("b", Affine, 2)
        with pytest.raises(DistributedError, match="no such transfer"):
            await a.call("b", "aiograd.transfer.more", other.ref, ids[-1])
        await module.delete()
        assert len(transfers) == 0
        for is_first in (True, False):
            await a.call("b", "aiograd.transfer.put", other.ref, ids[0], is_first, [(("weight",), None, ag.tensor([1.0]))])
        with pytest.raises(DistributedError, match="no such transfer"):
            await a.call("b", "aiograd.transfer.put", other.ref, ids[1], False, [])
        assert len(transfers) == 1
        await a.aclose()
        await until(lambda: not len(transfers))


async def test_a_state_in_several_messages_is_limited_as_a_whole() -> None:
    async with workers("a", "b", service=service, limits=dist.Limits(bytes_total=100_000)) as (a, b):
        module = await a.remote_module("b", Affine, 2)
        with pytest.raises(LimitError, match="bytes_total"):
            for n in range(10):
                await a.call("b", "aiograd.transfer.put", module.ref, bytes(16), n == 0, [(("x",), None, ag.tensor(np.zeros(5000, np.float32)))])
        assert len(b._objects.streams) == 0


async def test_training_and_evaluation() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, Affine, 2)
        assert await module.ref.call("is_training")
        assert await module.eval() is module and not await module.ref.call("is_training")
        assert await module.train() is module and await module.ref.call("is_training")


async def test_a_module_that_is_deleted_or_is_none() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        module = await made(a, Affine, 2)
        await module.delete()
        await module.delete()
        for use in (module(ag.tensor([1.0, 1.0])), module.parameters(), module.state_dict(), module.train()):
            with pytest.raises(ReferenceLostError):
                await use
        plain = await made(a, Plain)
        with pytest.raises(RemoteError, match=r"<RemoteRef to Plain .* on b> is no module: it has no parameters and state"):
            await plain.state_dict()
        with pytest.raises(NotExposedError, match="Plain has no public method '__call__'"):
            await plain(1)
        for state in (None, 3, []):
            with pytest.raises(ArgumentTypeError, match="load_state_dict: expected a dict of Tensors or arrays by name, found"):
                await module.load_state_dict(state)  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match="the object lives on b, not on c"):
            dist.RemoteModule(a, "c", module.ref)
        with pytest.raises(ArgumentTypeError, match=r"expected what `await worker\.remote"):
            dist.RemoteModule(a, "b", Affine(2))  # type: ignore[arg-type]


async def test_a_module_on_a_device() -> None:
    with ToyDevice() as toy:
        async with workers("a", "b", service=service) as (a, b):
            module = await made(a, Affine, 2, toy.name)
            async with a.context() as ctx:
                x = leaf(1, 1)
                y = await module(x)
                assert y.device == "cpu" and values(y) == [1, 2]
                await ctx.backward(y.sum())
                assert values(ctx.grads[x]) == [1, 2] and {grad.device for grad in view(b, ctx).grads.values()} == {toy.name}
            state = await module.state_dict()
            assert {value.device for value in state.values()} == {"cpu"} and values(state["weight"]) == [1, 2]
            await module.load_state_dict({**state, "weight": ag.tensor([7.0, 8.0])})
            assert values((await module.state_dict())["weight"]) == [7, 8]
            await module.delete()


async def test_states_travel_exactly_whatever_the_encoding() -> None:
    board = Switchboard()
    service = dist.Service()
    service.reference(ag.nn.Linear)
    half = dist.Encoding.FLOAT16
    async with (
        dist.Worker("here", transport=board.transport("here"), encoding=half) as here,
        dist.Worker("there", service=service, transport=board.transport("there"), encoding=half) as there,
    ):
        here.add_peer("there", there.url)
        module = await here.remote_module("there", ag.nn.Linear, 3, 2)
        state = {"weight": ag.tensor(np.full((2, 3), 1 / 3, np.float32)), "bias": ag.tensor(np.full(2, 0.1, np.float32))}
        await module.load_state_dict(state)
        found = await module.state_dict()
        assert all(np.array_equal(found[name].numpy(), value.numpy()) for name, value in state.items())
        rounded = await module(ag.ones((1, 3)))
        assert not np.array_equal(rounded.numpy(), np.full((1, 2), np.float32(1.1)))
