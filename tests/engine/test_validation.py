"""Checks of the gradients that a rule returns: number, type, shape, dtype, device."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.validate import check_outputs, fit
from aiograd.errors import DeviceMismatchError, GradientError
from aiograd.graph import Node
from tests.support import leaf, same


def returning(result: Any, *, asynchronous: bool = False) -> Any:
    """A function of two tensors whose backward returns `result`."""

    class Returning(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            return a * 1

        if asynchronous:

            @staticmethod
            async def backward(ctx: Any, g: Any) -> Any:
                await asyncio.sleep(0)
                return result(g)

        else:

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                return result(g)

    return Returning.apply


async def run(result: Any, x: Any, w: Any, *, asynchronous: bool = False) -> None:
    out = returning(result, asynchronous=asynchronous)(x, w)
    await out.backward(ag.tensor(np.ones(out.shape, out.dtype)))


# -------------------------------------------------------------------- number


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("result", "got"), [(lambda g: g, 1), (lambda g: (g,), 1), (lambda g: (g, g, g), 3), (lambda g: (), 0), (lambda g: None, 1)])
async def test_one_gradient_per_argument(result: Any, got: int, asynchronous: bool) -> None:
    x, w = leaf([1.0]), leaf([1.0])
    with pytest.raises(GradientError, match=f"function ReturningBackward returned an incorrect number of gradients \\(expected 2, got {got}\\)"):
        await run(result, x, w, asynchronous=asynchronous)
    assert x.grad is None and w.grad is None


async def test_further_gradients_of_none_are_tolerated() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    await run(lambda g: (g * 2, g * 3, None, None), x, w)
    same(x.grad, [2.0])
    same(w.grad, [3.0])


async def test_a_list_will_do() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    await run(lambda g: [g * 2, None], x, w)
    same(x.grad, [2.0])
    assert w.grad is None


# -------------------------------------------------------------------- type


@pytest.mark.parametrize("value", [3.0, "g", [1.0], object()])
async def test_a_gradient_is_a_tensor(value: Any) -> None:
    x, w = leaf([1.0]), leaf([1.0])
    with pytest.raises(GradientError, match=f"returned {type(value).__name__} at index 1; expected a Tensor or None"):
        await run(lambda g: (g, value), x, w)
    assert x.grad is None


async def test_a_gradient_for_an_argument_that_needs_none_is_dropped() -> None:
    x = leaf([1.0])
    await run(lambda g: (g, "whatever"), x, ag.tensor([1.0]))
    same(x.grad, [1.0])


async def test_an_array_will_do() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    await run(lambda g: (np.array([5.0]), None), x, w)
    same(x.grad, [5.0])


# -------------------------------------------------------------------- shape


async def test_a_gradient_of_a_shape_that_broadcasts_is_summed_down() -> None:
    x, w = leaf(np.zeros((2, 1))), leaf(3.0)
    big = ag.tensor(np.arange(24.0).reshape(4, 2, 3))
    await run(lambda g: (big, big), x, w)
    same(x.grad, np.arange(24.0).reshape(4, 2, 3).sum(axis=(0, 2)).reshape(2, 1))
    same(w.grad, 276.0)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1,), ()])
async def test_a_gradient_of_another_shape_is_an_error(shape: Any) -> None:
    x, w = leaf([1.0, 2.0]), leaf([1.0])
    bad = ag.tensor(np.ones(shape))
    if shape == (2, 2):
        await run(lambda g: (bad, None), x, w)
        same(x.grad, [2.0, 2.0])
        return
    with pytest.raises(GradientError, match=r"an invalid gradient at index 0 - got \[.*\] but expected shape compatible with \[2\]"):
        await run(lambda g: (bad, None), x, w)
    assert x.grad is None


# -------------------------------------------------------------------- dtype


async def test_a_gradient_is_cast_to_the_dtype_of_the_argument() -> None:
    x, w = leaf([1.0], np.float32), leaf([1.0], np.float64)
    await run(lambda g: (ag.tensor([2.0], dtype=np.float64), ag.tensor([3.0], dtype=np.float16)), x, w)
    assert x.grad.dtype == np.float32 and w.grad.dtype == np.float64
    same(x.grad, [2.0])
    same(w.grad, [3.0])


async def test_a_gradient_of_integers_is_an_error() -> None:
    x, w = leaf([1.0]), leaf([1.0])
    with pytest.raises(GradientError, match="at index 0 - got dtype int64, expected float64: gradients are floating point"):
        await run(lambda g: (ag.tensor([2]), None), x, w)
    assert x.grad is None


@pytest.mark.parametrize("create_graph", [False, True])
async def test_a_complex_gradient_of_a_real_argument_is_an_error_and_the_reverse_is_cast(create_graph: bool) -> None:
    x, w = leaf([1.0]), leaf([1.0 + 1j], np.complex128)
    y = returning(lambda g: (ag.tensor([2.0 + 5j]), ag.tensor([3.0])))(x, w)
    with pytest.raises(GradientError, match="at index 0 - got dtype complex64, expected float64: the argument is real. Return the real part"):
        await ag.grad(y.sum(), [x, w], create_graph=create_graph)
    with pytest.raises(GradientError, match="ReturningBackward returned an invalid gradient at index 0 - got dtype complex128, expected float64"):
        await ag.jvp(lambda x: returning(lambda g: (g * (2.0 + 5j), None))(x, x), x, ag.ones(1, dtype=np.float64))
    assert x.grad is None and w.grad is None
    await run(lambda g: (np.real(ag.tensor([2.0 + 5j])), ag.tensor([3.0])), x, w)
    same(x.grad, [2.0])
    same(w.grad, [3.0 + 0j])


# -------------------------------------------------------------------- device and the pure functions


async def test_a_gradient_on_another_device_is_an_error() -> None:
    class Elsewhere:
        """An array that says it lives somewhere else."""

        __aiograd_device__ = "moon:0"
        shape = (1,)
        dtype = np.dtype(np.float64)

    x, w = leaf([1.0]), leaf([1.0])
    with pytest.raises(DeviceMismatchError, match="ReturningBackward returned a gradient at index 0 on device moon:0; expected cpu"):
        await run(lambda g: (Elsewhere(), None), x, w)
    assert x.grad is None


def test_a_sink_may_return_nothing() -> None:
    assert check_outputs(Node(), None, False) == []
    assert check_outputs(Node([None, None]), (None, None), False) == [None, None]


def test_fit_leaves_what_fits() -> None:
    array = np.ones((2, 3))
    assert fit(array, (2, 3), np.dtype(np.float64), Node(), 0) is array
    assert fit(array, (3,), np.dtype(np.float32), Node(), 0).dtype == np.float32


async def test_an_isolated_node_is_checked_for_number_only() -> None:
    class Isolated(Node):
        def apply(self, grads: Any) -> Any:
            return ("anything",)

    node = Isolated([None])
    node.add_input_metadata((1,), np.float64)
    tensor = ag.tensor([1.0], dtype=np.float64)
    ag.graph.create_gradient_edge(tensor, ag.graph.GradientEdge(node, 0))
    await tensor.backward()
