"""NaN and infinities: carried as they are, and found where they arise if somebody looks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiograd as ag
from aiograd.distributed.rpc.codec import WireTensor
from aiograd.errors import NaNGradientError, RemoteError
from tests.distributed.passes_kit import Misbehave
from tests.distributed.workers import echo, exposing, leaf, relay, settled, simulate, values, view, workers

service = exposing(echo, relay)


@service.function
async def root(x: Any) -> Any:
    return x.sqrt()


def bits(array: Any) -> list[int]:
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}").tolist()  # type: ignore[no-any-return]


SPECIAL = {
    4: [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001],
    8: [0x7FF8000000000000, 0x7FF0000000000001, 0xFFF7FFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x8000000000000000, 1],
}


def patterns(size: int) -> st.SearchStrategy[list[int]]:
    one = st.one_of(st.sampled_from(SPECIAL[size]), st.integers(0, (1 << 8 * size) - 1))
    return st.lists(one, min_size=1, max_size=8)


@pytest.mark.sim
@settings(max_examples=60)
@given(st.sampled_from([4, 8]).flatmap(lambda size: st.tuples(st.just(size), patterns(size), patterns(size))))
def test_any_bits_cross_in_values_and_gradients(drawn: tuple[int, list[int], list[int]]) -> None:
    size, forward, backward = drawn
    count = min(len(forward), len(backward))
    sent = np.array(forward[:count], f"u{size}").view(f"f{size}")
    gradient = np.array(backward[:count], f"u{size}").view(f"f{size}")

    async def main() -> None:
        async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
            plain = await a.call("b", "echo", ag.tensor(sent.copy()))
            assert bits(plain.numpy()) == forward[:count]
            x = ag.tensor(sent.copy(), requires_grad=True)
            y = await a.call("b", "echo", x)
            assert bits(y.detach().numpy()) == forward[:count]
            await ctx.backward(Misbehave.apply(y, lambda g: gradient).sum())
            assert bits(ctx.grads[x].numpy()) == backward[:count]

    with np.errstate(all="ignore"):
        simulate(main)


@pytest.mark.parametrize("path", ["b", "cb", "bcb"])
async def test_anomaly_mode_names_the_node_where_a_nan_arises_on_whatever_worker(path: str) -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c), a.context() as ctx:
        x = leaf(0.0, 1.0)

        async def forward() -> Any:
            match path:
                case "b":
                    return await a.call("b", "root", x)
                case "cb":
                    return await a.call("c", "relay", "b", "root", x)
            return await a.call("b", "echo", await a.call("c", "relay", "b", "root", x))

        loss = (await forward() * ag.tensor([0.0, 1.0])).sum()
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            await ctx.backward(loss, retain_graph=True)
            assert np.isnan(values(ctx.grads[x])[0]), "nobody looked"
            for _ in range(2):
                with pytest.raises(RemoteError, match="Function 'SqrtBackward' returned nan values in its 0th output") as caught, ag.detect_anomaly():
                    await ctx.backward(loss, retain_graph=True)
                assert (caught.value.worker, caught.value.function, caught.value.type_name) == ("b", "SqrtBackward", "NaNGradientError")
            with ag.detect_anomaly(check_nan=False):
                await ctx.backward(loss, retain_graph=True)
            await ctx.backward(loss)  # and the mode is over
        assert not any(worker.statistics().passes for worker in (a, b, c))
    await settled(a, b, c)


async def test_anomaly_mode_names_the_node_of_the_caller_that_made_a_nan() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        x = leaf(0.0, 1.0)
        y = await a.call("b", "echo", x)
        loss = (y.sqrt() * ag.tensor([0.0, 1.0])).sum()
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            with pytest.raises(NaNGradientError, match="SqrtBackward"), ag.detect_anomaly():
                await ctx.backward(loss)
        assert x not in ctx.grads and not b.statistics().passes and not [*view(b, ctx).grads]


async def test_a_peers_gradient_that_is_no_number_is_taken_as_it_is() -> None:
    """It is the peer's business what it computes; what the pass makes of it is exact."""
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(1.0, 2.0)
        y = await a.call("b", "echo", x)
        await ctx.backward((y * ag.tensor([np.inf, np.nan])).sum())
        grads = values(ctx.grads[x])
        assert grads[0] == np.inf and np.isnan(grads[1])
        assert WireTensor(np.array([np.nan]), False).array.dtype == np.float64
