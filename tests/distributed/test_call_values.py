"""Remote calls: what crosses in arguments and results, and how its gradients come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ModifiedError, RemoteError
from tests.distributed.memory import Switchboard
from tests.distributed.workers import leaf, values, view, workers

service = dist.Service()


@service.function
async def echo(value: Any) -> Any:
    return value


@service.function
async def multiply(x: Any, y: Any) -> Any:
    return x * y


@service.function
def square(x: Any) -> Any:
    return x * x


# -------------------------------------------------------------------- values


async def test_plain_values_cross_and_come_back_as_what_they_were() -> None:
    given = [None, True, False, 0, -(2**63), 2**63 - 1, 1.5, float("inf"), 1 - 2j, "", "naïve ∂", b"\x00\xff", [], (), {}, [1, (2, {"a": [3]})]]
    async with workers("a", "b", service=service) as (a, _):
        for to in ("b", "a"):
            back = await a.call(to, "echo", given)
            assert back == given and [type(item) for item in back] == [type(item) for item in given]
            assert type(back[-1][1]) is tuple and back is not given


async def test_arguments_by_position_by_name_and_by_default() -> None:
    own = dist.Service()

    @own.function
    async def weigh(x: ag.Tensor, /, factor: float = 2.0, *more: float, bias: ag.Tensor | None = None, **rest: Any) -> tuple[Any, Any]:
        y = x * factor
        return y if bias is None else y + bias, (more, rest)

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x, bias = leaf(1, 2), leaf(10, 20)
        y, rest = await a.call("b", "weigh", x)
        assert values(y) == [2, 4] and rest == ((), {})
        y, rest = await a.call("b", "weigh", x, 3.0, 4, bias=bias, other={"z": [x]})
        assert values(y) == [13, 26] and rest[0] == (4,) and values(rest[1]["other"]["z"][0]) == [1, 2]
        await ctx.backward((y + rest[1]["other"]["z"][0]).sum())
        assert values(ctx.grads[x]) == [4, 4] and values(ctx.grads[bias]) == [1, 1]


async def test_tensors_in_nested_containers_keep_their_gradients() -> None:
    own = dist.Service()

    @own.function
    async def mix(tree: dict[str, Any]) -> Any:
        (p, q), r = tree["pair"], tree["deep"][0]["r"]
        return {"sum": [p + q], "product": (q * r, "text", 3)}

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        p, q, r = leaf(1), leaf(2), leaf(3)
        back = await a.call("b", "mix", {"pair": (p, q), "deep": [{"r": r}]})
        assert back["product"][1:] == ("text", 3)
        await ctx.backward((back["sum"][0] + back["product"][0]).sum())
        assert [values(ctx.grads[t]) for t in (p, q, r)] == [[1], [1 + 3], [2]]


async def test_the_same_tensor_twice_is_one_tensor_on_the_other_side() -> None:
    own = dist.Service()

    @own.function
    async def same(x: Any, tree: Any) -> Any:
        return x is tree[0], x * tree[0], tree[0]

    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(3)
        is_same, y, z = await a.call("b", "same", x, [x])
        assert is_same
        (recv,) = view(b, ctx).recv_nodes.values()
        assert recv.num_inputs == 1, "sent once, one edge"
        await ctx.backward((y + z).sum())
        assert values(ctx.grads[x]) == [7]


async def test_two_views_of_one_memory_arrive_as_tensors_of_their_own() -> None:
    own = dist.Service()

    @own.function
    async def change(x: Any, y: Any) -> Any:
        x += 1
        return x, y

    async with workers("a", "b", service=own) as (a, _):
        base = ag.tensor([1.0, 2.0, 3.0])
        x, y = await a.call("b", "change", base[:2], base[1:])
        assert values(x) == [2, 3] and values(y) == [2, 3] and values(base) == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "i1", "i4", "i8", "u1", "u8", "?"])
async def test_every_dtype_crosses(dtype: str) -> None:
    async with workers("a", "b", service=service) as (a, _), a.context():
        given = ag.tensor(np.array([[0, 1], [1, 3]], dtype))
        back = await a.call("b", "echo", given)
        assert back.dtype == given.dtype and back.shape == (2, 2) and values(back) == values(given) and not back.requires_grad


async def test_gradients_of_mixed_dtypes_keep_the_dtype_of_each_leaf() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        single, double = leaf(1.5, dtype=np.float32), leaf(2.5, dtype=np.float64)
        product = await a.call("b", "multiply", single, double)
        assert product.dtype == np.float64
        (recv,) = view(b, ctx).recv_nodes.values()
        assert [metadata.dtype for metadata in recv.input_metadata] == [np.float32, np.float64]
        await ctx.backward(product.sum())
        assert (ctx.grads[single].dtype, ctx.grads[double].dtype) == (np.float32, np.float64)
        assert values(ctx.grads[single]) == [2.5] and values(ctx.grads[double]) == [1.5]


async def test_a_complex_tensor_is_differentiated_across_workers() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        z = ag.tensor(np.array([1 + 2j, 3 - 1j]), requires_grad=True)
        w = await a.call("b", "multiply", z, z)
        await ctx.backward(np.abs(w).sum())
        here = ag.tensor(z.detach().numpy(), requires_grad=True)
        await np.abs(here * here).sum().backward()
        np.testing.assert_array_equal(ctx.grads[z].numpy(), here.grad.numpy())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 3)])
async def test_scalars_and_empty_tensors_cross_with_their_gradients(shape: tuple[int, ...]) -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = ag.ones(shape, requires_grad=True)
        y = await a.call("b", "square", x)
        assert y.shape == shape and y.requires_grad
        await ctx.backward(y.sum())
        assert ctx.grads[x].shape == shape and (ctx.grads[x].numpy() == 2).all()


async def test_strided_tensors_cross_with_their_gradients() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        base = ag.tensor(np.arange(12.0).reshape(3, 4), requires_grad=True)
        y = await a.call("b", "square", base.T[::-2])
        np.testing.assert_array_equal(y.detach().numpy(), np.arange(12.0).reshape(3, 4).T[::-2] ** 2)
        await ctx.backward(y.sum())
        expected = np.zeros((3, 4))
        expected.T[::-2] = 2 * np.arange(12.0).reshape(3, 4).T[::-2]
        np.testing.assert_array_equal(ctx.grads[base].numpy(), expected)


async def test_a_large_tensor_crosses_in_pieces() -> None:
    async with workers("a", "b", service=service, board=Switchboard(high_water=1 << 16)) as (a, _), a.context() as ctx:
        x = ag.tensor(np.random.default_rng(3).standard_normal((700, 1000)), requires_grad=True)
        y = await a.call("b", "square", x)
        np.testing.assert_array_equal(y.detach().numpy(), x.detach().numpy() ** 2)
        await ctx.backward(y.sum())
        np.testing.assert_array_equal(ctx.grads[x].numpy(), 2 * x.detach().numpy())


# -------------------------------------------------------------------- results


async def test_an_argument_that_is_returned_unchanged_stays_connected() -> None:
    async with workers("a", "b", service=service) as (a, _), a.context() as ctx:
        x = leaf(1, 2)
        y = await a.call("b", "echo", x)
        assert y is not x and y.requires_grad and not y.is_leaf
        await ctx.backward((y * y).sum())
        assert values(ctx.grads[x]) == [2, 4]


async def test_a_function_may_return_nothing() -> None:
    async with workers("a", "b", service=service) as (a, b), a.context() as ctx:
        assert await a.call("b", "echo", None) is None
        assert await a.call("b", "echo", leaf(1)[:0]) is not None
        own = dist.Service()
        own.function("nothing")(lambda x: None)
        assert len(view(b, ctx).recv_nodes) == 1
    async with workers("a", "b", service=own) as (a, _), a.context():
        assert await a.call("b", "nothing", leaf(1)) is None


async def test_a_parameter_that_is_returned_collects_its_gradient_where_it_lives() -> None:
    own = dist.Service()
    weight = ag.nn.Parameter([2.0, 3.0])
    own.function("weight")(lambda: weight)
    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        w = await a.call("b", "weight")
        assert type(w) is ag.Tensor and w.requires_grad and not w.is_leaf
        again = await a.call("b", "weight")
        await ctx.backward((w * w + again).sum())
        assert len(ctx.grads) == 0 and values(view(b, ctx).grads[weight]) == [5, 7] and weight.grad is None


async def test_only_some_of_several_results_are_used() -> None:
    own = dist.Service()

    @own.function
    async def three(x: Any) -> Any:
        return x * 2, x * 3, x.detach()

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x = leaf(1, 1)
        first, second, third = await a.call("b", "three", x)
        assert (first.requires_grad, second.requires_grad, third.requires_grad) == (True, True, False)
        assert first.grad_fn is second.grad_fn, "one node for one message"
        await ctx.backward(second.sum())
        assert values(ctx.grads[x]) == [3, 3]


async def test_results_may_be_used_several_times() -> None:
    own = dist.Service()

    @own.function
    async def pair(x: Any) -> Any:
        return x * 2, x * 3

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x = leaf(1)
        p, q = await a.call("b", "pair", x)
        r = await a.call("b", "pair", p)
        s = await a.call("b", "pair", q + p)
        await ctx.backward((p * q + q + r[0] + r[1] + s[1]).sum())
        # p = 2x, q = 3x: 12x + 3 + 4 + 6 + 15
        assert values(ctx.grads[x]) == [40]


async def test_received_tensors_may_be_modified_in_place() -> None:
    own = dist.Service()

    @own.function
    async def clobber(x: Any, plain: Any) -> Any:
        plain *= 10
        y = x * 1
        y *= plain
        x += 1
        return y, x, plain

    async with workers("a", "b", service=own) as (a, _), a.context() as ctx:
        x, plain = leaf(1, 2), ag.tensor([3.0, 4.0])
        y, x1, back = await a.call("b", "clobber", x, plain)
        assert values(plain) == [3, 4] and values(x) == [1, 2], "the caller's are others"
        assert values(y) == [30, 80] and values(x1) == [2, 3] and values(back) == [30, 40]
        y *= 2
        await ctx.backward((y + x1).sum())
        assert values(ctx.grads[x]) == [61, 81]


async def test_a_saved_value_that_is_modified_over_there_fails_the_pass_here() -> None:
    own = dist.Service()

    @own.function
    async def spoil(x: Any) -> Any:
        y = x * x
        x += 1
        return y

    async with workers("a", "b", service=own) as (a, b), a.context() as ctx:
        x = leaf(1)
        with pytest.raises(RemoteError, match=r"^Error on Node b: .*modified") as caught:
            await ctx.backward((await a.call("b", "spoil", x)).sum())
        assert caught.value.type_name == ModifiedError.__name__ and caught.value.worker == "b"
        assert x not in ctx.grads and not len(view(b, ctx).grads)
