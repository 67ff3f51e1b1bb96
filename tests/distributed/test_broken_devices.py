"""Devices that fail under a worker: out of memory, a failed kernel, a context that is poisoned for good. At every kernel of a pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import RemoteError
from tests.distributed.workers import busy, leaf, settled, until, values, view, workers
from tests.toy_device import ToyDevice


class Rig:
    """Functions that compute on a device, with a weight there, and one that does not."""

    def __init__(self, toy: ToyDevice) -> None:
        self.toy = toy
        self.weight = ag.tensor([2.0, 3.0]).to(toy.name).requires_grad_()
        self.service = dist.Service()

        @self.service.function
        async def on_device(x: ag.Tensor) -> ag.Tensor:
            y = x.to(toy.name) * self.weight
            return (y * y + self.weight).sum()

        @self.service.function
        async def on_host(x: ag.Tensor) -> ag.Tensor:
            return (x * 3).sum()


@contextlib.asynccontextmanager
async def rigged(**options: Any) -> AsyncIterator[tuple[ToyDevice, Rig, dist.Worker, dist.Worker]]:
    """A device, and workers that use it, whose weight is there."""
    with ToyDevice(**options) as toy:
        rig = Rig(toy)
        async with workers("a", "b", service=rig.service) as (a, b):
            await rig.weight
            yield toy, rig, a, b


async def one_pass(a: dist.Worker, b: dist.Worker, rig: Rig) -> tuple[Any, ...]:
    """Forward and backward; returns loss and gradients on both workers."""
    async with a.context() as ctx:
        x = leaf(5, 7)
        try:
            y = await a.call("b", "on_device", x, timeout=5)
            await ctx.backward(y * 2, timeout=5)
        except BaseException:
            await until(lambda: not b.statistics().passes)
            assert not [*ctx.grads], "nothing is committed here"
            assert ctx.id not in [each.id for each in b._contexts] or not [*view(b, ctx).grads], "nor there"
            raise
        grad = view(b, ctx).grads[rig.weight]
        return y.tolist(), values(ctx.grads[x]), values((await grad).cpu())


def kernels_of_a_pass() -> int:
    """How many kernels a pass takes, once the weight is there."""

    async def main() -> int:
        async with rigged() as (toy, rig, a, b):
            before = toy.statistics().kernels
            assert await one_pass(a, b, rig) == (10.0**2 + 21.0**2 + 5, [80.0, 252.0], [202.0, 590.0])
            return toy.statistics().kernels - before

    return asyncio.run(main())


KERNELS = kernels_of_a_pass()


def test_a_pass_has_kernels_in_forward_and_in_backward() -> None:
    assert KERNELS >= 8


@pytest.mark.parametrize("kind", ["memory", "error"])
@pytest.mark.parametrize("number", range(1, KERNELS + 1))
async def test_a_kernel_that_fails_fails_its_pass_and_the_worker_goes_on(number: int, kind: Any) -> None:
    async with rigged() as (toy, rig, a, b):
        toy.fail(number, kind)
        with pytest.raises(RemoteError, match=f"^Error on Node b: .*{'out of memory' if kind == 'memory' else 'failed'}, as asked for") as caught:
            await one_pass(a, b, rig)
        assert caught.value.type_name in ("ToyError", "ToyMemoryError", "DeviceError"), caught.value
        await settled(a, b)
        assert await one_pass(a, b, rig) == (546.0, [80.0, 252.0], [202.0, 590.0])


@pytest.mark.parametrize("number", range(1, KERNELS + 1))
async def test_a_poisoned_device_gives_no_numbers_any_more_and_the_host_goes_on(number: int) -> None:
    async with rigged() as (toy, rig, a, b):
        toy.fail(number, "dead")
        for _ in range(3):
            with pytest.raises(RemoteError, match=r"^Error on Node b: "):
                await one_pass(a, b, rig)
        with pytest.raises(RemoteError, match="toy:0 is dead since an earlier kernel failed"):
            await one_pass(a, b, rig)
        assert toy.is_dead and not busy(b)
        async with a.context() as ctx:
            x = leaf(1, 1)
            await ctx.backward(await a.call("b", "on_host", x))
            assert values(ctx.grads[x]) == [3, 3]


async def test_memory_that_is_full_is_an_error_of_the_call_and_what_was_allocated_is_free_again() -> None:
    with ToyDevice(memory=4096) as toy:
        rig = Rig(toy)
        service = rig.service

        @service.function
        async def large(count: int) -> ag.Tensor:
            return ag.zeros(count, dtype=ag.float32).to(toy.name) * 1

        async with workers("a", "b", service=service) as (a, b):
            await one_pass(a, b, rig)
            before = toy.statistics().bytes
            for _ in range(3):
                with pytest.raises(RemoteError, match=r"asked for \d+ bytes, \d+ of 4096 are free") as caught:
                    await a.call("b", "large", 100_000)
                assert caught.value.function == "large"
            assert np.array_equal((await a.call("b", "large", 10)).numpy(), np.zeros(10))
            await one_pass(a, b, rig)
            await until(lambda: toy.statistics().bytes == before, turns=100_000)


async def test_gradients_that_do_not_reach_the_device_fail_the_pass() -> None:
    """They come from the host: the upload may fail, and so may the way back to the host."""
    for name in ("from_host", "multiply"):
        async with rigged() as (toy, _, a, b), a.context() as ctx:
            y = await a.call("b", "on_device", leaf(5, 7))
            toy.fail(name, "memory")
            with pytest.raises(RemoteError, match="out of memory, as asked for"):
                await ctx.backward(y, timeout=5)
            await until(lambda: not b.statistics().passes)
            assert not [*ctx.grads] and not [*view(b, ctx).grads]
