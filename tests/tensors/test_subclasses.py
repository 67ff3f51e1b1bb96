"""Subclasses of ndarray, foreign byte orders and foreign memory: what a Tensor may hold, at every door by which an array gets in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError
from aiograd.tensors.core import make
from tests.support import assert_awaiting_raises, assert_raises, leaf

F = nn.functional

MATRIX = np.arange(1.0, 5.0).reshape(2, 2).view(np.matrix)  # its constructor warns
MASKED = np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]], [[True, False], [False, False]])
UNMASKED = np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]])


class WithUnits(np.ndarray):
    """Numbers whose arithmetic is not that of numbers."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return NotImplemented


#: every way in, as a function of an array of shape (2, 2) that returns a Tensor of it
DOORS: dict[str, Callable[[Any], Any]] = {
    "tensor": ag.tensor,
    "tensor of a list": lambda a: ag.tensor([a])[0],
    "asarray": ag.asarray,
    "asarray of a list": lambda a: ag.asarray([a])[0],
    "from_numpy": ag.from_numpy,
    "from_dlpack": ag.from_dlpack,
    "make": make,
    "function": lambda a: ag.add(a, 0.0),
    "reduction": lambda a: ag.sum(a, axis=()),
    "ufunc": lambda a: np.add(a, leaf(np.ones((2, 2)))) - 1.0,
    "numpy function": lambda a: np.concatenate([a, leaf(np.ones((2, 2)))])[:2],
    "reflected ufunc": lambda a: np.add(leaf(np.ones((2, 2))), a) - 1.0,
    "where": lambda a: ag.where(ag.asarray(True), a, leaf(np.ones((2, 2)))),
    "limit": lambda a: ag.clip(ag.zeros((2, 2), dtype=np.float64), a, None),
    "full": lambda a: ag.full((2, 2), a, dtype=np.float64),
    "concat": lambda a: ag.concat([a]),
    "item assignment": lambda a: assigned(a),
    "augmented assignment": lambda a: ag.zeros((2, 2), dtype=np.float64).add_(a),
    "augmented assignment of a list": lambda a: ag.zeros((1, 2, 2), dtype=np.float64).add_([a])[0],
    "index": lambda a: ag.asarray(np.arange(5.0))[a.astype(int)],
    "index of an assignment": lambda a: assigned_at(a.astype(int)),
    "linear": lambda a: F.linear(np.eye(2), a).T,
}  # fmt: skip


def assigned(value: Any) -> ag.Tensor:
    x = ag.zeros((2, 2), dtype=np.float64)
    x[...] = value
    return x


def assigned_at(index: Any) -> ag.Tensor:
    x = ag.zeros(5, dtype=np.float64)
    x[index] = index
    return x[1:].reshape(2, 2)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("array", [MATRIX, UNMASKED], ids=["matrix", "unmasked"])
def test_a_subclass_is_stripped_at_every_door(door: str, array: Any) -> None:
    found = DOORS[door](array)
    assert type(found._data) is np.ndarray
    np.testing.assert_array_equal(found.detach().numpy(), [[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("door", DOORS)
def test_masked_elements_and_arithmetic_of_its_own_are_refused_at_every_door(door: str) -> None:
    assert_raises(ArgumentTypeError, r"can't keep a mask.*\.filled\(\)", lambda: DOORS[door](MASKED))
    if "index" not in door:
        assert_raises((ArgumentTypeError, TypeError), "WithUnits", lambda: DOORS[door](np.ones((2, 2)).view(WithUnits)))


def test_memory_is_shared_where_the_door_promises_it(tmp_path: Path) -> None:
    matrix, mapped = MATRIX.copy(), np.memmap(tmp_path / "values", np.float64, "w+", shape=(3,))
    for array, door in ((matrix, ag.from_numpy), (mapped, ag.from_numpy), (matrix, ag.asarray)):
        x = door(array)
        x[0] = 7.0
        assert np.all(array[0] == 7.0) and type(x.numpy()) is np.ndarray


async def test_products_with_a_matrix_are_elementwise_and_differentiated_so() -> None:
    for product in (lambda x: x * MATRIX, lambda x: MATRIX * x, lambda x: np.multiply(MATRIX, x)):
        x = leaf(np.ones((2, 2)))
        await product(x).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), np.asarray(MATRIX))


def test_numpy_ma_takes_no_tensor_that_requires_grad() -> None:
    x = leaf(np.ones((2, 2)))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: MASKED * x, lambda: UNMASKED + x, lambda: x - MASKED, lambda: np.ma.exp(x), lambda: np.ma.multiply(x, MASKED),
        lambda: np.ma.masked_array(x),
    )  # fmt: skip
    for call in calls:
        assert_raises((GraphError, ArgumentTypeError), "graph|mask", call)
    plain = MASKED * x.detach()
    assert plain.mask.tolist() == MASKED.mask.tolist() and plain[1, 1] == 4.0


class Given(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, gradient: Any) -> Any:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.gradient, None


@pytest.mark.parametrize("create_graph", [False, True])
async def test_gradients_from_outside_are_stripped_or_refused(create_graph: bool) -> None:
    async def gradient(function: Any, *given: Any) -> Any:
        x = leaf(np.ones((2, 2)))
        (found,) = await ag.grad(function(x), [x], *given, create_graph=create_graph)
        return found._data

    found = await gradient(lambda x: x * 2.0, MATRIX)
    assert type(found) is np.ndarray and found.tolist() == [[2.0, 4.0], [6.0, 8.0]]
    found = await gradient(lambda x: Given.apply(x, MATRIX).sum())
    assert type(found) is np.ndarray and found.tolist() == MATRIX.tolist()
    await assert_awaiting_raises(ArgumentTypeError, "mask", gradient(lambda x: x * 2.0, MASKED))
    await assert_awaiting_raises(ArgumentTypeError, "mask", gradient(lambda x: Given.apply(x, MASKED).sum()))


async def test_an_isolated_pass_takes_plain_gradients() -> None:
    def double(x: Any) -> Any:
        return x * 2.0

    context, _ = await ag.parallel.run_isolated_forward(double, leaf(np.ones((2, 2))))
    (found,) = await ag.parallel.run_isolated_backward(double, context, MATRIX)
    assert type(found._data) is np.ndarray and found.tolist() == [[2.0, 4.0], [6.0, 8.0]]


def test_states_with_masked_elements_are_refused(tmp_path: Path) -> None:
    assert_raises(ArgumentTypeError, "mask", lambda: ag.save({"x": MASKED}, tmp_path / "x.safetensors"))
    model = nn.Linear(2, 2)
    assert_raises(ArgumentTypeError, "mask", lambda: model.load_state_dict({"weight": MASKED, "bias": np.zeros(2)}))


def test_lists_of_tensors_with_a_graph_are_refused() -> None:
    x = leaf(np.ones((2, 2)))
    for call in (ag.tensor, ag.asarray, x.new_tensor, ag.nn.Parameter, ag.sum):
        with pytest.raises(GraphError, match=r"aiograd\.stack"):
            call([[x[0, 0], 1.0]])
    with ag.no_grad():
        assert ag.tensor([x[0, 0], 2.0]).tolist() == ag.asarray([x[0, 0], 2.0]).tolist() == [1.0, 2.0]
    assert ag.tensor([x[0, 0].detach(), 2.0]).tolist() == [1.0, 2.0]


# -------------------------------------------------------------------- byte order


def test_arrays_of_foreign_byte_order_become_native() -> None:
    foreign = np.arange(3, dtype=np.dtype(np.float32).newbyteorder())
    made = (ag.tensor(foreign), ag.asarray(foreign), ag.tensor(foreign, dtype=foreign.dtype), ag.zeros(3, dtype=foreign.dtype) + foreign)
    for x in (*made, ag.tensor([0.0, 1.0, 2.0], dtype=foreign.dtype), ag.arange(3).astype(foreign.dtype)):
        assert x.dtype == np.float32 and x.dtype.isnative
        np.testing.assert_array_equal(x.numpy(), [0.0, 1.0, 2.0])
        np.testing.assert_allclose(ag.sigmoid(x).numpy(), 1 / (1 + np.exp(-np.arange(3.0))), rtol=1e-6)
    assert_raises(ArgumentTypeError, "asarray", ag.from_numpy, foreign)
    assert_raises(ArgumentError, "copy", ag.asarray, foreign, copy=False)


def test_made_tensors_hold_numbers_only() -> None:
    for dtype in (object, "U3", [("a", "f4")]):
        assert_raises(ArgumentTypeError, "numbers", ag.zeros, 3, dtype=dtype)


# -------------------------------------------------------------------- DLPack


def test_what_cannot_be_shared_by_dlpack_is_refused_with_the_reason() -> None:
    def fails(error: Exception) -> Any:
        def hand_out(**options: Any) -> Any:
            raise error

        return SimpleNamespace(__dlpack_device__=lambda: (1, 0), __dlpack__=hand_out, dtype="bfloat16")

    for error in (RuntimeError("Unsupported dtype in DLTensor."), BufferError("requires gradient")):
        with pytest.raises(ArgumentTypeError, match=rf"bfloat16 cannot be shared: {error}.*[Cc]ast"):
            ag.from_dlpack(fails(error))
    assert_raises(ArgumentTypeError, "int", ag.from_dlpack, 3)
    assert ag.from_dlpack(np.array([True, False])).tolist() == [True, False]
