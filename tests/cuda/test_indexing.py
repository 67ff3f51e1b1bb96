"""Indexing with arrays on a simulated CUDA device, against numpy: reading, writing (the last value stays), adding (one order), ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.kernels.indexing import CHUNK
from aiograd.cuda.operations import gathering
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError, ShapeError
from aiograd.nn import functional
from aiograd.ops.op import ROWS
from tests.cuda.on_both import DOMAINS, row_agrees
from tests.support import assert_raises
from tests.sweeps import swept

NAMES = (
    "getitem", "getitem_adjoint", "index", "index_adjoint", "setitem", "take", "take_adjoint", "gather", "gather_adjoint", "scatter", "embedding",
    "embedding_grad",
)  # fmt: skip


def picks(rng: np.random.Generator, low: int, high: int, *shape: int) -> np.ndarray:
    return rng.integers(low, high, shape)


_DRAWN = np.random.default_rng(2)
#: shape of the array, index
CASES: list[tuple[tuple[int, ...], Any]] = [
    ((5,), (picks(_DRAWN, -5, 5, 7),)),
    ((5, 3), (picks(_DRAWN, -5, 5, 7),)),
    ((5, 3), (picks(_DRAWN, -5, 5, 0),)),
    ((4, 5, 3), (slice(None), picks(_DRAWN, -5, 5, 2, 3))),
    ((4, 5, 3), (picks(_DRAWN, 0, 4, 6), picks(_DRAWN, -5, 5, 6))),
    ((4, 5, 3), (picks(_DRAWN, 0, 4, 6), slice(None), picks(_DRAWN, -3, 3, 6))),
    ((4, 5, 3), (picks(_DRAWN, 0, 4, 6), Ellipsis, picks(_DRAWN, -3, 3, 6))),
    ((4, 5), (picks(_DRAWN, 0, 4, 6), Ellipsis, picks(_DRAWN, -5, 5, 6))),
    ((4, 5, 3), (1, slice(None), picks(_DRAWN, -3, 3, 6))),
    ((4, 5, 3), (slice(1, 4, 2), picks(_DRAWN, -5, 5, 7), slice(None, None, -1))),
    ((4, 5, 3), (None, picks(_DRAWN, 0, 4, 2, 1), picks(_DRAWN, 0, 5, 1, 3), None)),
    ((4, 5, 3), (slice(None), 2, picks(_DRAWN, -3, 3, 6))),
    ((4, 5, 3), (picks(_DRAWN, 0, 4, 2), None, picks(_DRAWN, 0, 5, 2))),
    ((2, 4, 2, 3), (slice(None), picks(_DRAWN, 0, 4, 5), slice(None), picks(_DRAWN, 0, 3, 5))),
]


def on(device: CudaDevice, index: Any, dtype: type) -> Any:
    return tuple(device.from_host(part.astype(dtype)) if isinstance(part, np.ndarray) else part for part in index)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_rows(name: str, dtype: str, device: CudaDevice) -> None:
    for variety in range(DOMAINS[name].varieties):
        row_agrees(device, name, variety, dtype)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("where", [None, np.int64, np.int32])
@pytest.mark.parametrize("case", swept(range(len(CASES)), keep=15))
def test_indices_of_the_host_and_of_the_device(case: int, where: type | None, device: CudaDevice, rng: np.random.Generator) -> None:
    shape, index = CASES[case]
    here = index if where is None else on(device, index, where)
    for dtype in ("float32", "complex128", "float16", "bool", "int16"):
        x = (rng.standard_normal(shape) * 5).astype(dtype)
        wanted = x[index]
        values = (rng.standard_normal(wanted.shape) * 5).astype(dtype)
        for turned in (False, True):
            a = device.from_host(x.T.copy()).T if turned else device.from_host(x)
            found = a[here]
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_array_equal(device.to_host(found), wanted)
            for value in (values, 1):
                a[here] = device.from_host(value) if value is values else value
                changed = x.copy()
                changed[index] = value
                np.testing.assert_array_equal(device.to_host(a), changed)
                a[...] = device.from_host(x)
    g = rng.standard_normal(x[index].shape)
    total = np.zeros(shape)
    np.add.at(total, index, g)
    found = device.to_host(ROWS["index_adjoint"](device.from_host(g), index=here, shape=shape))
    np.testing.assert_allclose(found, total, rtol=1e-12, atol=1e-12)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int64])
@pytest.mark.parametrize(("rows", "columns", "count"), [(3, 2, 5 * CHUNK), (1, 1, 3 * CHUNK + 7), (40, 3, CHUNK), (7, 5, 2 * CHUNK + 1)])
def test_sums_at_indices_have_one_order(rows: int, columns: int, count: int, dtype: type, device: CudaDevice, rng: np.random.Generator) -> None:
    index, g = picks(rng, -rows, rows, count), (rng.standard_normal((count, columns)) * 8).astype(dtype)
    total = np.zeros((rows, columns))
    np.add.at(total, index, g.astype(np.float64))
    found = [
        device.to_host(ROWS["index_adjoint"](device.from_host(g), index=(where,), shape=(rows, columns)))
        for where in (index, device.from_host(index), device.from_host(index.astype(np.int32)))
    ]
    tolerance = {2: 2e-3, 4: 1e-5, 8: 1e-12}[found[0].itemsize]
    np.testing.assert_allclose(found[0], total, rtol=tolerance, atol=tolerance * 40)
    assert len({each.tobytes() for each in found}) == 1


@pytest.mark.parametrize(("shape", "axis", "count"), [((4, 5), 1, 30), ((4, 5, 3), 1, 40), ((6,), 0, 50), ((4, 5), 0, 3), ((2, 3), -1, 0)])
@pytest.mark.parametrize("columns", [1, 4096])
def test_along_an_axis(
    shape: tuple[int, ...], axis: int, count: int, columns: int, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(gathering, "_COLUMNS", columns)  # both ways of adding and of putting
    length, many = shape[axis], list(shape)
    many[axis] = count
    index, x, g = picks(rng, -length, length, *many), rng.standard_normal(shape), rng.standard_normal(many)
    put = x.copy()
    np.put_along_axis(put, index, g, axis)
    for where in (index, device.from_host(index)):
        np.testing.assert_array_equal(device.to_host(np.take_along_axis(device.from_host(x), where, axis)), np.take_along_axis(x, index, axis))
        adjoint = ROWS["gather_adjoint"](device.from_host(g), where, shape=shape, axis=axis)
        np.testing.assert_allclose(device.to_host(adjoint), ROWS["gather_adjoint"](g, index, shape=shape, axis=axis), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(device.to_host(ROWS["scatter"](device.from_host(x), where, device.from_host(g), axis=axis)), put)
        for a in (device.from_host(x), device.from_host(x.T.copy()).T):
            np.put_along_axis(a, where, device.from_host(g), axis)
            np.testing.assert_array_equal(device.to_host(a), put)


def test_what_broadcasts_along_an_axis(device: CudaDevice, rng: np.random.Generator) -> None:
    x, index = rng.standard_normal((1, 4)), picks(rng, 0, 4, 3, 2)
    found = np.take_along_axis(device.from_host(x), device.from_host(index), 1)
    np.testing.assert_array_equal(device.to_host(found), np.take_along_axis(x, index, 1))
    z = (x + 1j).repeat(3, 0)
    np.testing.assert_array_equal(device.to_host(np.take_along_axis(device.from_host(z), index, 1)), np.take_along_axis(z, index, 1))
    np.testing.assert_array_equal(device.to_host(np.take(device.from_host(x), index)), np.take(x, index))
    np.testing.assert_array_equal(device.to_host(np.take(device.from_host(x), -1, 1)), np.take(x, -1, 1))


def test_masks(device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 3))
    mask = x > 0
    a = device.from_host(x)
    np.testing.assert_array_equal(device.to_host(a[mask]), x[mask])
    np.testing.assert_array_equal(device.to_host(a[mask[:, 0]]), x[mask[:, 0]])
    a[a > 0] = 0.5  # a mask on the device
    x[x > 0] = 0.5
    np.testing.assert_array_equal(device.to_host(a), x)
    row = np.array([True, False, True, True])
    a[device.from_host(row)] = device.from_host(np.arange(3.0))
    x[row] = np.arange(3.0)
    np.testing.assert_array_equal(device.to_host(a), x)
    assert device.statistics().fallbacks == {}


def test_values_that_lie_in_the_array_itself(device: CudaDevice) -> None:
    x = np.arange(8.0)
    a = device.from_host(x)
    a[np.array([1, 2, 3, 4, 5])] = a[:5]
    x[1:6] = x[:5].copy()
    np.testing.assert_array_equal(device.to_host(a), x)


def test_indices_of_the_host_are_checked(device: CudaDevice) -> None:
    a = device.from_host(np.ones((3, 2)))
    assert_raises(IndexRangeError, "from 0 to 3, expected -3 to 2", lambda: a[np.array([0, 3])])
    with pytest.raises(IndexRangeError, match="from -4 to 0"):
        a[np.array([0, -4])] = 1
    assert_raises(IndexRangeError, "along axis 1", lambda: np.take_along_axis(a, np.array([[2], [0], [0]]), 1))
    assert_raises(ArgumentError, "expected 0 to 2", lambda: ROWS["embedding"](a, indices=np.array([-1])))
    assert_raises(ArgumentTypeError, "expected integers", lambda: ROWS["embedding"](a, indices=np.array([0.5])))
    with pytest.raises(ShapeError, match=r"\[3\] into one of shape \[2, 2\]"):
        a[np.array([0, 1])] = np.ones(3)
    assert_raises(IndexError, "too many indices", lambda: a[np.array([0]), 0, 0])
    assert_raises(IndexError, "dtype float64", lambda: a[np.array([0.0])])


def test_indices_of_the_device_that_name_nothing_read_nan_and_write_nothing(device: CudaDevice) -> None:
    x = np.arange(6.0).reshape(3, 2)
    index = device.from_host(np.array([0, 5, -4, -1]))
    nan = [np.nan, np.nan]
    np.testing.assert_array_equal(device.to_host(device.from_host(x)[index]), [[0, 1], nan, nan, [4, 5]])
    np.testing.assert_array_equal(device.to_host(device.from_host(x.astype(np.int32))[index])[1], [-1, -1])
    a = device.from_host(x)
    a[index] = 9.0
    np.testing.assert_array_equal(device.to_host(a), [[9, 9], [2, 3], [9, 9]])
    sums = ROWS["index_adjoint"](device.from_host(np.ones((4, 2))), index=(index,), shape=(3, 2))
    np.testing.assert_array_equal(device.to_host(sums), [[1, 1], [0, 0], [1, 1]])
    both = device.from_host(x)[index, device.from_host(np.array([1, 0, 0, -3]))]
    np.testing.assert_array_equal(device.to_host(both), [1, np.nan, np.nan, np.nan])


async def test_tensors_are_indexed_with_tensors_of_the_device_and_nobody_waits(device: CudaDevice) -> None:
    x = ag.tensor(np.arange(12.0).reshape(4, 3), device="cuda:0", requires_grad=True)
    index = ag.tensor(np.array([0, 2, 2]), device="cuda:0")
    device.thread.submit(lambda: None).result()
    before = device.statistics().downloads
    looked_up = functional.embedding(index, x, padding_idx=0)
    await ((x[index] ** 2).sum() + (x[:, index[:1]] * 3).sum() + looked_up.sum()).backward()
    assert device.statistics().downloads == before
    wanted = np.zeros((4, 3))
    np.add.at(wanted, [0, 2, 2], 2 * np.arange(12.0).reshape(4, 3)[[0, 2, 2]])
    wanted[:, 0] += 3
    wanted[2] += 2
    np.testing.assert_array_equal((await x.grad).numpy(), wanted)
    y = x.detach().clone()
    y[index] = -1.0
    await y
    np.testing.assert_array_equal(y.numpy()[:3], [[-1] * 3, [3, 4, 5], [-1] * 3])
    assert isinstance(y._data, CudaArray)
    assert device.statistics().fallbacks == {}
