"""Memory that runs out: at each allocation on the way of a message one request fails or is repeated, and all is in order afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.cluster import LocalCluster
from aiograd.distributed.rpc import cipher, codec, encodings, inbound, loopback, outbound, pacing, reassembly, tensor_table
from aiograd.distributed.rpc.http import channel, framing
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import DistributedError, Overloaded, RemoteError
from tests.distributed.workers import SECRET, double, exposing, settled, simulate, workers

#: where memory is taken whose size depends on what is sent
SITES: list[tuple[ModuleType, str]] = [
    (cipher, "bytearray"),
    (cipher, "np.empty"),
    (codec, "bytearray"),
    (tensor_table, "bytearray"),
    (tensor_table, "np.empty"),
    (encodings, "np.empty"),
    (inbound, "bytearray"),
    (outbound, "bytearray"),
    (reassembly, "bytearray"),
    (reassembly, "np.empty"),
    (loopback, "bytearray"),
    (channel, "bytearray"),
    (framing, "np.empty"),
]


class _Numpy:
    """numpy with another `empty`."""

    def __init__(self, empty: Callable[..., Any]) -> None:
        self.empty = empty

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@dataclass
class Memory:
    """Counts allocations; the one with the number `fails` fails, or of those in one place, `only`."""

    fails: int = 0
    only: str | None = None
    count: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def allocator(self, site: str, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen[site] = self.seen.get(site, 0) + 1
            if self.only is not None and site != self.only:
                return allocate(*args, **kwargs)
            self.count += 1
            if self.count == self.fails:
                raise MemoryError(f"allocation {self.count}, in {site}")
            return allocate(*args, **kwargs)

        return counted

    @contextlib.contextmanager
    def scarce(self) -> Iterator[None]:
        """Count, and let one fail, in this block."""
        with pytest.MonkeyPatch.context() as patch:
            for module, name in SITES:
                site = f"{module.__name__.removeprefix('aiograd.distributed.')}.{name}"
                if name == "bytearray":
                    patch.setattr(module, name, self.allocator(site, bytearray), raising=False)
                else:
                    patch.setattr(module, "np", _Numpy(self.allocator(site, np.empty)))
            yield


service = exposing(double)


def large(size: int) -> ag.Tensor:
    return ag.tensor(np.full(size, 3, np.float32), requires_grad=True)


async def one_pass(a: dist.Worker, peer: str, size: int) -> None:
    """Forward and backward with a tensor of so many elements."""
    async with a.context() as ctx:
        x = large(size)
        y = await a.call(peer, "double", x, timeout=20)
        assert y.shape == (size,) and np.all(y.detach().numpy() == 6)
        await ctx.backward(y.sum(), timeout=20)
        assert np.all(ctx.grads[x].numpy() == 2)


def kind(error: BaseException) -> str:
    return error.type_name if isinstance(error, RemoteError) else type(error).__name__


SIZES = {"small": 4, "one frame": 40_000, "few frames": 140_000}
#: a frame that is decrypted in one go, and a message of several
LIMITS = Limits(frame_bytes=256 << 10)


def run(peer: str, size: int, fails: int, encoding: Any) -> tuple[Memory, str]:
    """One pass in which one allocation fails, and one afterwards; returns what became of the first."""
    memory = Memory(fails)
    outcome = "ok"

    async def main() -> None:
        nonlocal outcome
        options: dict[str, Any] = {"limits": LIMITS, "encoding": encoding, "gradient_encoding": encoding}
        async with workers("a", "b", service=service, **options) as (a, b):
            await a.call("b", "double", ag.tensor([1.0]))  # the handshake is another matter
            with memory.scarce():
                try:
                    await one_pass(a, peer, size)
                except (MemoryError, DistributedError) as error:
                    outcome = kind(error)
            await asyncio.sleep(3)
            await settled(a, b)
            await one_pass(a, peer, size)

    simulate(main)
    return memory, outcome


@pytest.mark.sim
@pytest.mark.parametrize("encoding", [dist.Encoding.PLAIN, dist.Encoding.BLOCK8], ids=["plain", "block8"])
@pytest.mark.parametrize("peer", ["b", "a"])
@pytest.mark.parametrize("size", SIZES)
def test_an_allocation_that_fails_costs_one_request_at_most(size: str, peer: str, encoding: Any) -> None:
    total = run(peer, SIZES[size], 0, encoding)[0].count
    outcomes = [run(peer, SIZES[size], number, encoding) for number in range(1, total + 1)]
    for memory, outcome in outcomes:
        assert memory.count >= memory.fails, "the allocation was not reached"
        assert outcome in ("ok", "MemoryError", "Overloaded"), outcome
    assert len(outcomes) >= 4


@pytest.mark.net
async def test_an_allocation_that_fails_where_bytes_arrive_breaks_a_connection_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, over sockets without shared memory, for what is allocated there, by the longest frames too: connections begin with them."""
    monkeypatch.setattr(pacing, "SMALLEST", LIMITS.frame_bytes)
    options: dict[str, Any] = {"service": service, "secret": SECRET, "limits": replace(LIMITS, shared_bytes=0)}
    async with dist.Worker("a", **options) as a, dist.Worker("b", **options) as b:
        a.add_peer("b", b.url)
        await one_pass(a, "b", 4)
        memory = Memory()
        with memory.scarce():
            await one_pass(a, "b", SIZES["few frames"])
        places = {place: count for place, count in memory.seen.items() if place.startswith(("rpc.http.", "rpc.cipher."))}
        assert {"rpc.http.channel.bytearray", "rpc.cipher.bytearray", "rpc.cipher.np.empty"} <= places.keys()
        reached = set()
        for place in sorted(places, reverse=True):  # the last one is reached on a connection that has not sent yet
            for number in range(1, places[place] + 1):
                memory = Memory(number, place)
                with memory.scarce():
                    try:
                        await one_pass(a, "b", SIZES["few frames"])
                    except (MemoryError, DistributedError) as error:
                        assert kind(error) in ("MemoryError", "Overloaded"), repr(error)
                if memory.count >= number:
                    reached.add(place)
                while any(worker.statistics().contexts or worker.statistics().bytes_held for worker in (a, b)):
                    await asyncio.sleep(0.005)
        assert reached == places.keys()
        await one_pass(a, "b", SIZES["few frames"])


SERVICE = "tests.distributed.memory_service:service"


@pytest.mark.proc
async def test_a_process_with_little_memory_refuses_what_does_not_fit_and_goes_on() -> None:
    async with LocalCluster(1, names=["w"], service=SERVICE) as cluster:
        call = cluster.driver.call
        pid = await call("w", "limit_memory", 32 << 20)
        for _ in range(2):
            with pytest.raises((Overloaded, RemoteError)) as caught:  # the request does not fit
                await call("w", "size", ag.zeros(20_000_000, dtype=ag.float32), timeout=20)
            assert kind(caught.value) in ("Overloaded", "MemoryError")
            with pytest.raises(RemoteError) as caught:  # what the function allocates does not fit
                await call("w", "allocate", 500_000_000)
            assert kind(caught.value).endswith("MemoryError") and caught.value.function == "allocate"
            with pytest.raises(RemoteError) as caught:  # nor does it on a thread
                await call("w", "allocate_on_thread", 500_000_000)
            assert kind(caught.value).endswith("MemoryError")
            assert await call("w", "size", ag.zeros(1000)) == 1000
        assert await call("w", "process") == pid
        assert await call("w", "bytes_held") < 100, "what it holds is this very request"
