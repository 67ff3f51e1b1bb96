"""Tensor: making one, its attributes, Python's and numpy's protocols, copies, and what is refused."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError, GraphError, IndexRangeError, NotReadyError, ShapeError
from aiograd.tensors.core import make
from tests.support import assert_raises, leaf
from tests.tolerance import tolerance


def same(tensor: Any, values: Any) -> None:
    np.testing.assert_array_equal(tensor.detach().numpy(), values)


# -------------------------------------------------------------------- making one


def test_tensor_copies_and_asarray_and_from_numpy_share() -> None:
    array = np.array([1.0, 2.0])
    copied, shared, shared_too = ag.tensor(array), ag.asarray(array), ag.from_numpy(array)
    array[0] = 9.0
    assert copied.tolist() == [1.0, 2.0]
    assert shared.tolist() == shared_too.tolist() == [9.0, 2.0]
    assert ag.asarray(array, copy=True).numpy() is not array
    assert not np.shares_memory(ag.asarray(array, dtype=np.float32).numpy(), array)


def test_asarray_of_a_tensor_stays_in_its_graph() -> None:
    y = leaf([1.0]) * 2
    assert ag.asarray(y) is y
    assert ag.asarray(y, dtype=np.float32).requires_grad
    assert ag.asarray(y, copy=True) is not y


def test_tensor_of_a_tensor_is_a_leaf() -> None:
    y = leaf([1.0]) * 2
    z = ag.tensor(y)
    assert not z.requires_grad and z.is_leaf and z.tolist() == [2.0]
    assert ag.tensor(y, dtype=np.float32, requires_grad=True).is_leaf


class Foreign:
    """An array of another library, which numpy cannot read."""

    def __init__(self, error: Exception, requires_grad: bool) -> None:
        self.error, self.requires_grad = error, requires_grad

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no numpy"), TypeError("no numpy")])
def test_arrays_of_other_libraries_that_numpy_cannot_read(error: Exception) -> None:
    for convert in (ag.tensor, ag.asarray):
        for data in (Foreign(error, False), [Foreign(error, False), 1.0]):
            assert_raises(ArgumentTypeError, "making a tensor of a tests.Foreign: expected an array of numbers.*no numpy", convert, data)
        for data in (Foreign(error, True), [[Foreign(error, False), Foreign(error, True)]]):
            assert_raises(GraphError, r"making a tensor of a tests.Foreign: it requires grad.*detach\(\)", convert, data)


def test_nested_lists_may_hold_tensors_arrays_and_numbers() -> None:
    made = ag.tensor([[ag.tensor(1.0), 2], [np.float64(3.0), np.array(4.0)]])
    assert made.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert ag.tensor([]).shape == (0,) and ag.tensor([[], []]).shape == (2, 0)
    assert ag.tensor(5).shape == ()


def test_dlpack_shares_memory_both_ways() -> None:
    t = ag.tensor([1.0, 2.0])
    array = np.from_dlpack(t)
    assert np.shares_memory(array, t.numpy())
    assert t.__dlpack_device__() == array.__dlpack_device__()
    back = ag.from_dlpack(np.arange(3.0))
    assert isinstance(back, ag.Tensor) and back.tolist() == [0.0, 1.0, 2.0]
    assert ag.from_dlpack(t).tolist() == [1.0, 2.0]
    assert_raises(GraphError, "use detach\\(\\) first", lambda: np.from_dlpack(leaf([1.0])))


# -------------------------------------------------------------------- attributes


def test_attributes() -> None:
    t = ag.tensor(np.zeros((2, 3, 4), np.float32))
    assert (t.shape, t.ndim, t.size, t.dtype, t.device) == ((2, 3, 4), 3, 24, np.dtype(np.float32), "cpu")
    assert t.T.shape == (4, 3, 2) and t.mT.shape == (2, 4, 3)
    assert not t.requires_grad and t.is_leaf and t.grad is None and t.grad_fn is None


def test_requires_grad_is_switched_on_leaves_only() -> None:
    x = ag.tensor([1.0])
    assert x.requires_grad_() is x and x.requires_grad
    y = x * 2
    with pytest.raises(GraphError, match="only change requires_grad flags of leaf variables"):
        y.requires_grad = False
    y.requires_grad = True  # it does already
    assert y.requires_grad and not y.is_leaf
    for dtype in (np.int64, np.bool_):
        with pytest.raises(ArgumentTypeError, match="only tensors of floating point and complex dtype can require gradients"):
            ag.tensor([1, 0], dtype=dtype).requires_grad_()


async def test_a_frozen_leaf_keeps_its_gradient_its_hooks_and_its_place_in_graphs() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    seen: list[Any] = []
    x.register_hook(seen.append)
    before, later = (x * 3).sum(), (x * 5).sum()
    x.requires_grad_(False)
    assert x.grad is None and x.is_leaf and not (x * 2).requires_grad
    await before.backward()
    same(x.grad, [3.0, 3.0])
    x.requires_grad_(True)
    await later.backward()
    await (x * 7).sum().backward()
    same(x.grad, [15.0, 15.0])
    assert len(seen) == 3
    x.requires_grad_(False)
    x.grad = None
    assert x.requires_grad_(True).grad is None


async def test_a_frozen_leaf_may_change_its_dtype() -> None:
    module = ag.nn.Linear(2, 1)
    await module(ag.ones(1, 2)).sum().backward()
    module.weight.register_hook(lambda grad: grad * 10)
    module.requires_grad_(False).to(ag.float64)
    module.requires_grad_(True)
    assert module.weight.grad.dtype == np.float64
    await module(ag.ones(1, 2, dtype=ag.float64)).sum().backward()
    same(module.weight.grad, [[11.0, 11.0]])


async def test_a_frozen_leaf_that_changes_its_array_begins_anew() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    x.grad = ag.tensor([5.0, 5.0])
    x.requires_grad_(False)
    old = x._data
    x._data = np.ones(3, np.float32)
    x.grad = None
    x.requires_grad_(True)
    assert x._node is not None and x._node.shape == (3,)
    x.requires_grad_(False)
    assert x.grad is None and old.shape == (2,)


async def test_a_frozen_leaf_that_an_operation_writes_to_keeps_its_gradient() -> None:
    x, factor = ag.tensor([1.0, 2.0], requires_grad=True), leaf([3.0, 4.0])
    before = (x * 2).sum()
    x.grad = ag.tensor([5.0, 5.0])
    x.requires_grad_(False)
    x *= factor
    assert not x.is_leaf and before.requires_grad
    same(x.grad, [5.0, 5.0])
    x.retain_grad()
    await x.sum().backward()
    same(x.grad, [6.0, 6.0])


def test_numpy_is_read_only_where_the_tensor_requires_grad() -> None:
    x = leaf([1.0, 2.0])
    array = x.numpy()
    assert np.shares_memory(array, x.detach().numpy()) and not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 3.0
    plain = ag.tensor([1.0])
    plain.numpy()[0] = 5.0
    assert plain.item() == 5.0


async def test_a_tensor_is_awaited_to_itself() -> None:
    t = leaf([1.0])
    assert await t is t


# -------------------------------------------------------------------- Python's protocols


def test_conversion_to_numbers() -> None:
    t = ag.tensor([[2.5]])
    assert (float(t), int(t), complex(t), bool(t), t.item(), t.tolist()) == (2.5, 2, 2.5 + 0j, True, 2.5, [[2.5]])
    assert math.sqrt(ag.tensor(4.0)) == 2.0
    assert not ag.tensor(0) and ag.tensor(True)
    assert f"{t:.1f}" == "2.5" and format(ag.tensor([1.0]), "") == "tensor([1.])"
    x = leaf(3.0)
    assert float(x) == 3.0 and x.item() == 3.0 and bool(x)


@pytest.mark.parametrize("convert", [float, int, complex, lambda t: t.item(), bool])
def test_only_one_element_converts(convert: Any) -> None:
    for t in (ag.tensor([1.0, 2.0]), ag.tensor([])):
        assert_raises(ShapeError, None, convert, t)


def test_integer_tensors_are_indices() -> None:
    assert operator.index(ag.tensor(3)) == 3 and ["a", "b"][ag.tensor([1])] == "b" and list(range(ag.tensor(2))) == [0, 1]
    for t in (ag.tensor(1.0), ag.tensor([1, 2])):
        assert_raises(TypeError, "only integer tensors of one element", operator.index, t)


def test_length_iteration_and_containment() -> None:
    t = leaf([[1.0, 2.0], [3.0, 4.0]])
    assert len(t) == 2
    first, second = t
    assert first.requires_grad and second.tolist() == [3.0, 4.0]
    assert [row.tolist() for row in reversed(t)] == [[3.0, 4.0], [1.0, 2.0]]  # type: ignore[call-overload]
    assert 3.0 in t and 5.0 not in t
    assert_raises(TypeError, "0-d", lambda: len(ag.tensor(1.0)))
    assert_raises(TypeError, None, lambda: list(ag.tensor(1.0)))


def test_comparison_is_elementwise_and_identity_is_the_hash() -> None:
    a, b = ag.tensor([1.0, 2.0]), ag.tensor([1.0, 3.0])
    same(a == b, [True, False])
    same(a != b, [False, True])
    same(a < b, [False, True])
    same(2.0 >= a, [True, True])
    assert (a == None) is False and (a != None) is True  # noqa: E711 - what Python makes of it is the point
    assert (a == "a") is False
    assert hash(a) == hash(a) and {a: 1}[a] == 1 and len({a, b, a}) == 2
    assert a in [a, b]  # the same object
    x = leaf([1.0])
    assert not (x > 0).requires_grad


def test_repr_shows_values_dtype_and_graph() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    assert repr(ag.tensor([1.0, 2.0])) == "tensor([1., 2.])"
    assert repr(x) == "tensor([1., 2.], requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 4.], grad_fn=<MulBackward>)"
    assert repr(ag.tensor([1], dtype=np.int32)) == "tensor([1], dtype=int32)"
    assert repr(ag.tensor(np.zeros(3))) == "tensor([0., 0., 0.], dtype=float64)"
    assert len(repr(ag.tensor(np.zeros(10**6)))) < 200
    assert repr(ag.tensor(np.zeros((2, 0)))).startswith("tensor([]")


@pytest.mark.parametrize(
    ("operate", "expected"),
    [
        (lambda t: t + 1, [2.0, 4.0]), (lambda t: 1 + t, [2.0, 4.0]), (lambda t: t - 1, [0.0, 2.0]), (lambda t: 1 - t, [0.0, -2.0]),
        (lambda t: t * 2, [2.0, 6.0]), (lambda t: 2 * t, [2.0, 6.0]), (lambda t: t / 2, [0.5, 1.5]), (lambda t: 3 / t, [3.0, 1.0]),
        (lambda t: t**2, [1.0, 9.0]), (lambda t: 2**t, [2.0, 8.0]), (lambda t: t // 2, [0.0, 1.0]), (lambda t: 7 // t, [7.0, 2.0]),
        (lambda t: t % 2, [1.0, 1.0]), (lambda t: 7 % t, [0.0, 1.0]), (lambda t: -t, [-1.0, -3.0]), (lambda t: +t, [1.0, 3.0]),
        (lambda t: abs(-t), [1.0, 3.0]), (lambda t: t @ np.array([1.0, 1.0]), 4.0), (lambda t: np.array([1.0, 1.0]) @ t, 4.0),
        (lambda t: [1.0, 1.0] @ t, 4.0), (lambda t: np.array([1.0, 2.0]) * t, [1.0, 6.0]), (lambda t: np.float64(2.0) * t, [2.0, 6.0]),
        (lambda t: t - [1.0, 1.0], [0.0, 2.0]),
    ],
)  # fmt: skip
def test_operators(operate: Any, expected: Any) -> None:
    for t in (ag.tensor([1.0, 3.0]), leaf([1.0, 3.0])):
        result = operate(t)
        assert isinstance(result, ag.Tensor)
        same(result, expected)


def test_numbers_do_not_change_the_dtype() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        t = ag.tensor([1.0], dtype=dtype)
        for result in (t + 1, 1.5 * t, t**2, t / 3, 1 / t, t - True, np.add(t, 2), np.maximum(t, 0.0)):
            assert result.dtype == dtype
    assert (ag.tensor([1]) / 2).dtype == np.float64 and (ag.tensor([1]) + 1).dtype == np.int64
    assert (ag.tensor([1.0]) * 1j).dtype == np.complex64


def test_bitwise_operators() -> None:
    a, b = ag.tensor([True, False]), ag.tensor([True, True])
    same(a & b, [True, False])
    same(a | b, [True, True])
    same(a ^ b, [False, True])
    same(~a, [False, True])
    for other in (True, [True, True], np.array([True, True])):
        same(other & a, [True, False])
        same(other | a, [True, True])
        same(other ^ a, [False, True])
    n = ag.tensor([1, 6])
    same(n << 2, [4, 24])
    same(n >> 1, [0, 3])
    same(3 << n, [6, 192])
    same(np.array([64, 64]) >> n, [32, 1])
    same([5, 5] & n, [1, 4])
    for operate in (lambda: n << "a", lambda: "a" >> n, lambda: None & n):
        assert_raises(TypeError, None, operate)


async def test_divmod_and_round() -> None:
    x = leaf([5.5, -7.5])
    quotient, rest = divmod(x, 2)
    same(quotient, [2.0, -4.0])
    same(rest, [1.5, 0.5])
    assert not quotient.requires_grad and rest.requires_grad
    await rest.sum().backward()
    same(x.grad, [1.0, 1.0])
    for first, second in (divmod(7, ag.tensor([2, 4])), divmod(np.array([7, 7]), ag.tensor([2, 4]))):
        same(first, [3, 1])
        same(second, [1, 3])
    assert_raises(TypeError, None, divmod, x, "a")
    same(round(x), [6.0, -8.0])
    same(round(leaf([1.25, 1.35]), 1), np.round([1.25, 1.35], 1))
    same(round(ag.tensor([1, 2])), [1, 2])


# -------------------------------------------------------------------- numpy's protocols


async def test_ufuncs_record() -> None:
    x = leaf([0.5, 1.5])
    y = np.multiply(np.exp(x), 2.0)
    assert isinstance(y, ag.Tensor) and y.requires_grad
    await np.add.reduce(y).backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.exp([0.5, 1.5]))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda t: np.add.reduce(t), [5.0, 7.0, 9.0]),
        (lambda t: np.add.reduce(t, axis=1), [6.0, 15.0]),
        (lambda t: np.add.reduce(t, axis=None), 21.0),
        (lambda t: np.multiply.reduce(t, axis=1, keepdims=True), [[6.0], [120.0]]),
        (lambda t: np.maximum.reduce(t), [4.0, 5.0, 6.0]),
        (lambda t: np.add.accumulate(t, axis=1), [[1.0, 3.0, 6.0], [4.0, 9.0, 15.0]]),
        (lambda t: np.add.accumulate(t), [[1.0, 2.0, 3.0], [5.0, 7.0, 9.0]]),
        (lambda t: np.multiply.outer(t[0], t[1]), np.outer([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])),
        (lambda t: np.multiply.outer(np.array([1.0, 2.0]), t[0]), np.outer([1.0, 2.0], [1.0, 2.0, 3.0])),
        (lambda t: np.concatenate([t, np.zeros((1, 3))]), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [0.0, 0.0, 0.0]]),
        (lambda t: np.stack([t[0], t[1]], axis=1), [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]),
        (lambda t: np.where(t > 2, t, 0.0), [[0.0, 0.0, 3.0], [4.0, 5.0, 6.0]]),
        (lambda t: np.sum(t, axis=0), [5.0, 7.0, 9.0]),
        (lambda t: np.mean(t), 3.5),
        (lambda t: np.reshape(t, (3, 2)), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        (lambda t: np.transpose(t), [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]),
        (lambda t: np.einsum("ij->j", t), [5.0, 7.0, 9.0]),
        (lambda t: np.linalg.norm(t), math.sqrt(91.0)),
        (lambda t: np.add(t, t, dtype=np.float32), [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]),
    ],
)
async def test_numpy_functions_record(call: Any, expected: Any) -> None:
    x = leaf([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    y = call(x)
    assert isinstance(y, ag.Tensor) and y.requires_grad
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=tolerance(np.float32))
    await y.sum().backward()
    assert x.grad.shape == x.shape


def test_asarray_of_numpy_refuses_to_drop_a_graph() -> None:
    x = leaf([1.0, 2.0])
    for convert in (np.asarray, np.array, lambda t: np.array([t, t]), lambda t: np.ones(2).dot(np.asarray(t))):
        assert_raises(GraphError, r"use detach\(\).numpy\(\).*list of tensors use aiograd.stack\(\)", convert, x)
    plain = x.detach()
    assert np.shares_memory(np.asarray(plain), plain.numpy())
    assert not np.shares_memory(np.array(plain), plain.numpy())
    assert np.asarray(plain, dtype=np.float32).dtype == np.float32
    with ag.no_grad(), pytest.raises(GraphError):
        np.asarray(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda t, out: np.add(t, t, out=out), lambda t, out: np.add(t, t, where=np.array([True, False])), lambda t, out: operator.iadd(out, t),
        lambda t, out: np.add.at(t, [0], 1.0), lambda t, out: np.add.reduceat(t, [0]), lambda t, out: np.unwrap(t), lambda t, out: np.frexp(t),
    ],
)  # fmt: skip
def test_what_has_no_row_is_refused_instead_of_dropping_the_graph(call: Any) -> None:
    x, out = leaf([1.0, 2.0]), np.zeros(2)
    assert_raises(ArgumentTypeError, None, call, x, out)
    assert out.tolist() == [0.0, 0.0]
    same(x, [1.0, 2.0])


def test_arrays_index_tensors_and_tensors_index_arrays() -> None:
    x = ag.tensor([10.0, 20.0, 30.0])
    same(x[np.array([2, 0])], [30.0, 10.0])
    same(x[ag.tensor([2, 0])], [30.0, 10.0])
    same(x[x > 15], [20.0, 30.0])
    same(x[ag.tensor(1)], 20.0)
    same(x[ag.tensor(1) :], [20.0, 30.0])
    same(x[[ag.tensor(1), 2]], [20.0, 30.0])
    matrix = ag.tensor(np.arange(6.0).reshape(2, 3))
    same(matrix[ag.tensor([1, 0]), ag.tensor([2, 1])], [5.0, 1.0])
    same(matrix[..., ag.tensor([0])], [[0.0], [3.0]])
    same(matrix[None, 1, ::2], [[3.0, 5.0]])
    same(matrix[True], matrix.numpy()[True])
    assert np.arange(3)[ag.tensor(1)] == 1
    np.testing.assert_array_equal(np.arange(3)[ag.tensor([2, 0])], [2, 0])


async def test_indexing_records() -> None:
    x = leaf(np.arange(6.0).reshape(2, 3))
    await (x[1] * 2 + x[ag.tensor([0, 0]), ag.tensor([1, 1])].sum() + x[x > 4].sum() + x[0, 0]).sum().backward()
    same(x.grad, [[3.0, 6.0, 0.0], [2.0, 2.0, 5.0]])


def test_an_index_out_of_range_is_an_index_error() -> None:
    x = leaf([1.0, 2.0])
    for index in (5, -3, (0, 0), "a", 1.5, np.array([7]), ag.tensor([[9]])):
        with pytest.raises(IndexRangeError):
            x[index]
        with pytest.raises(IndexError):
            x[index]


# -------------------------------------------------------------------- copies


async def test_deepcopy_of_a_leaf() -> None:
    x = leaf([1.0, 2.0])
    await (x * 3).sum().backward()
    y = copy.deepcopy(x)
    assert y is not x and y.requires_grad and y.is_leaf and not np.shares_memory(y.numpy(), x.numpy())
    same(y.grad, [3.0, 3.0])
    assert y._node is not x._node
    await (y * 2).sum().backward()
    same(y.grad, [5.0, 5.0])
    same(x.grad, [3.0, 3.0])
    assert not copy.deepcopy(ag.tensor([1])).requires_grad


def test_deepcopy_in_a_structure_keeps_what_is_shared() -> None:
    x = leaf([1.0])
    structure = {"a": x, "b": [x, ag.tensor([2.0])]}
    copied = copy.deepcopy(structure)
    assert copied["a"] is copied["b"][0] and copied["a"] is not x  # type: ignore[index]
    assert copied["b"][1].tolist() == [2.0]  # type: ignore[index]


def test_deepcopy_of_a_result_is_refused() -> None:
    assert_raises(GraphError, "only leaf tensors support deepcopy", lambda: copy.deepcopy(leaf([1.0]) * 2))


async def test_copy_shares_memory() -> None:
    x = leaf([1.0])
    y = copy.copy(x)
    assert y is not x and y.is_leaf and y.requires_grad and np.shares_memory(y.numpy(), x.numpy())
    z = copy.copy(x * 2)
    await z.sum().backward()
    same(x.grad, [2.0])
    assert y.grad is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_is_refused(protocol: int) -> None:
    for t in (ag.tensor([1.0]), leaf([1.0]) * 2):
        assert_raises(ArgumentTypeError, r"tensors cannot be pickled.*aiograd.save", pickle.dumps, t, protocol)
        assert_raises(TypeError, None, pickle.dumps, {"nested": [t]}, protocol)


def test_detach_clone_and_cast() -> None:
    x = leaf([1.0, 2.0])
    assert np.shares_memory(x.detach().numpy(), x.numpy()) and not x.detach().requires_grad
    assert x.clone().requires_grad and not np.shares_memory(x.clone().numpy(), x.numpy())
    assert x.float().dtype == np.float32 and x.float().requires_grad
    assert x.astype(np.float64, copy=False) is x and x.double() is x
    assert x.to("float32").dtype == np.float32 and x.to("cpu") is x and x.to(np.float16).dtype == np.float16


async def test_casts_pass_gradients_back_in_the_old_dtype() -> None:
    x = leaf([1.0, 2.0])
    await (x.float() * 3).sum().backward()
    assert x.grad.dtype == np.float64
    same(x.grad, [3.0, 3.0])


# -------------------------------------------------------------------- data that is not there yet


class Pending:
    """An array on a device that is still computing."""

    __aiograd_device__ = "pending:0"
    shape = (1,)
    dtype = np.dtype(np.float32)
    size = 1
    ndim = 1

    def __aiograd_is_ready__(self) -> bool:
        return False


@pytest.mark.parametrize("read", [bool, float, int, lambda t: t.item(), lambda t: t.numpy(), lambda t: t.tolist(), np.asarray])
async def test_reading_pending_data_within_a_loop_is_an_error(read: Any) -> None:
    t = make(Pending())
    assert_raises(NotReadyError, "`await` the tensor first", read, t)
    assert "pending" in repr(t)


# -------------------------------------------------------------------- shapes as methods


def test_methods_take_shapes_in_both_ways() -> None:
    t = ag.tensor(np.arange(24.0).reshape(2, 3, 4))
    assert t.reshape(6, 4).shape == t.reshape((6, 4)).shape == t.view(6, -1).shape == (6, 4)
    assert t.transpose().shape == (4, 3, 2) and t.transpose(0, 2).shape == (4, 3, 2) and t.transpose(1, 0, 2).shape == (3, 2, 4)
    assert t.permute(2, 0, 1).shape == t.permute((2, 0, 1)).shape == (4, 2, 3)
    assert t.flatten().shape == (24,) and t.flatten(1).shape == (2, 12)
    assert t.unsqueeze(0).squeeze().shape == (2, 3, 4) and t.unsqueeze(-1).shape == (2, 3, 4, 1)
    assert ag.tensor([[1.0]]).expand(3, -1, 4).shape == (3, 1, 4)
    assert ag.tensor([1.0]).expand(3, 4).shape == (3, 4)
    assert t.swapaxes(0, 1).shape == (3, 2, 4)


def test_methods_of_reduction_and_arithmetic() -> None:
    t = ag.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert (t.sum().item(), t.mean().item(), t.prod().item(), t.max().item(), t.min().item()) == (10.0, 2.5, 24.0, 4.0, 1.0)
    same(t.sum(axis=0), [4.0, 6.0])
    same(t.sum(axis=1, keepdims=True), [[3.0], [7.0]])
    assert t.var().item() == 1.25 and t.var(correction=1).item() == pytest.approx(5 / 3)
    assert t.argmax().item() == 3 and t.argmin(axis=1).tolist() == [0, 0]
    assert bool((t > 0).all()) and bool((t > 3).any())
    assert t.norm().item() == pytest.approx(math.sqrt(30))
    same(t.clip(2, 3), [[2.0, 2.0], [3.0, 3.0]])
    same(t.relu(), [[1.0, 2.0], [3.0, 4.0]])
    same(t.cumsum(0), [[1.0, 2.0], [4.0, 6.0]])
    same(t.pow(2), [[1.0, 4.0], [9.0, 16.0]])
    same(t.matmul(t), [[7.0, 10.0], [15.0, 22.0]])
