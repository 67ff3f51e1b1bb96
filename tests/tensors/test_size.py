"""``x.size`` is numpy's number of elements and PyTorch's method at once."""

from __future__ import annotations

import copy
import enum
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.distributed.payload import Packing
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.tensor_table import TensorTable
from aiograd.distributed.rpc.values import TreeWriter
from aiograd.errors import IndexRangeError
from aiograd.tensors.size import TensorSize
from tests.support import assert_raises

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def x() -> ag.Tensor:
    return ag.tensor(X, requires_grad=True)


def test_called_it_is_the_shape() -> None:
    assert x().size() == (2, 3) and x().size(0) == 2 and x().size(-1) == 3 and x().size(dim=1) == 3
    batch, features = x().size()
    assert (batch, features) == (2, 3) and ag.tensor(1.0).size() == () and ag.zeros(0, 3).size() == (0, 3)


def test_an_axis_that_is_not_there_is_an_index_error() -> None:
    for tensor, axis in ((x(), 2), (x(), -3), (ag.tensor(1.0), 0)):
        assert_raises(IndexRangeError, r"expected an axis that it has", tensor.size, axis)


def test_it_is_the_int_of_numpy() -> None:
    size = x().size
    assert size == 6 and isinstance(size, int) and hash(size) == hash(6) and repr(size) == "6" and f"{size:3d}" == "  6"
    assert x().numel().__class__ is int
    assert {type(result) for result in (size + 1, 2 * size, size // 4, -size, size % 4, abs(size))} == {int}
    assert json.dumps({"size": size}) == '{"size": 6}' and list(range(size)) == [0, 1, 2, 3, 4, 5]
    assert np.zeros(size).shape == (6,) and np.zeros((size, 2)).shape == (6, 2) and np.arange(9)[size] == 6 and "abcdefgh"[size] == "g"
    assert {type(each) for each in (copy.copy(size), copy.deepcopy(size), pickle.loads(pickle.dumps(size)))} == {int}  # noqa: S301


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, n: a / n, lambda a, n: n * a, lambda a, n: n - a, lambda a, n: a**n, lambda a, n: np.add(a, n),
        lambda a, n: np.add(a, n, dtype=np.float32), lambda a, n: np.where(a > 1, a, n), lambda a, n: np.clip(a, 1, n),
        lambda a, n: np.maximum(n, a), lambda a, n: a > n, lambda a, n: a[..., 0] * np.float32(2) * n,
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [x, lambda: X])
def test_it_keeps_the_dtype_as_a_plain_int_does(combine: Callable[[Any, Any], Any], make: Callable[[], Any]) -> None:
    """numpy takes a subclass of int for an array of int64."""
    found, expected = combine(make(), x().size), combine(make(), 6)
    assert found.dtype == expected.dtype and type(found) is type(expected)
    np.testing.assert_array_equal(np.asarray(found.detach() if isinstance(found, ag.Tensor) else found), combine(X, 6))


def test_in_place_and_as_an_argument_it_is_a_plain_int() -> None:
    a = ag.tensor(X)
    a /= a.size
    assert a.dtype == np.float32
    a[0] = a.size
    array = X.copy()
    array /= a.size
    assert array.dtype == np.float32 and a.reshape(a.size).shape == (6,) and a.reshape((a.size, 1)).shape == (6, 1)
    assert ag.where(a > 0, a, a.size).dtype == np.float32 and ag.clip(a, 0, a.size).dtype == np.float32
    assert ag.full((2,), a.size).dtype == np.int64 and ag.tensor([a.size, 1]).dtype == np.int64 and ag.zeros(a.size).shape == (6,)
    assert ag.arange(9)[a.size].item() == 6 and ag.arange(9)[: a.size].shape == (6,) and ag.arange(9)[2 : a.size, None].shape == (4, 1)


def test_an_int_enum_keeps_the_dtype_too() -> None:
    assert (x() * enum.IntEnum("Steps", {"TWO": 2}).TWO).dtype == np.float32  # type: ignore[attr-defined]


def test_a_compiled_function_takes_and_uses_it() -> None:
    @ag.compile
    def mean(a: Any, n: int) -> Any:
        return (a / a.size).sum() + a.reshape(a.size(0), -1).sum() * a.size(-1) + n

    for _ in range(3):
        value = mean(x(), x().size)
        assert value.item() == 53.5 and value.dtype == np.float32
    wide = ag.ones(2, 5)
    for _ in range(2):
        assert mean(wide, wide.size).item() == 61.0


def test_a_message_takes_it_for_an_int() -> None:
    def written(value: object) -> bytes:
        out = bytearray()
        TreeWriter(Limits(), out, TensorTable(Limits())).write(value)
        return bytes(out)

    assert isinstance(x().size, TensorSize) and written((x().size, {"size": x().size})) == written((6, {"size": 6}))
    packed = Packing(False, Encoding.PLAIN, {}).pack([x().size, x().device, (x().size,), {x().device: 1}])
    assert packed == [6, "cpu", (6,), {"cpu": 1}]
    assert [type(packed[0]), type(packed[1]), type(packed[2][0]), *map(type, packed[3])] == [int, str, int, str]
