"""Rows as machine code have the bits of numpy's loops: every row, dtype, layout and size, alone and in one loop with others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aiograd.compiler.native.elementwise import _TABLE, is_exact
from tests.compiler.native.codes import DTYPES, LENGTHS, Both, Recorder, assert_same, can_be_native, needs_native, special
from tests.sweeps import swept

pytestmark = [needs_native, pytest.mark.usefixtures("sizes")]

SHAPES = ((9, 13), (), (0,), (3,), (4,), (16,), (17,), (5, 3), (2, 8), (4, 1, 3), (70,), (3, 0), (33, 4), (2, 3, 40), (8, 64))
MATRICES = ((3, 4), (2, 8), (5, 7), (40, 3))


def layouts(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays that broadcast to a shape, of each layout."""
    count = math.prod(shape)
    found = {"in order": special(dtype, count, seed).reshape(shape), "no axes": special(dtype, 1, seed).reshape(())}
    if len(shape) > 1:
        found["transposed"] = special(dtype, count, seed).reshape(shape[::-1]).T
    if shape:
        found["strided"] = special(dtype, count * 2, seed).reshape(*shape[:-1], shape[-1] * 2)[..., ::2]
        found["backwards"] = special(dtype, count, seed).reshape(shape)[..., ::-1]
        found["column"] = special(dtype, math.prod(shape[:-1]), seed).reshape(*shape[:-1], 1)
        found["row"] = special(dtype, shape[-1], seed)
        found["repeated"] = np.broadcast_to(special(dtype, 1, seed).reshape(()), shape)
    return found


@pytest.mark.parametrize("shape", swept(map(pytest.param, SHAPES)))
@pytest.mark.parametrize("dtype", swept(DTYPES, keep=3), ids=str)
def test_every_row_in_every_layout(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    recorder = Recorder()
    firsts, seconds = layouts(shape, dtype, 1), layouts(shape, dtype, 2)
    ones = {name: recorder.parameter(array) for name, array in firsts.items()}
    others = {name: recorder.parameter(array) for name, array in seconds.items()}
    results, labels = [], []
    for function in _TABLE:
        if not is_exact(function, dtype):
            continue
        pairs = [("in order", name) for name in others] + [(name, "in order") for name in ones] + [(name, name) for name in ones]
        for names in pairs if function.nin == 2 else [(name,) for name in ones]:
            try:
                results.append(recorder.call(function, *[known[name] for known, name in zip((ones, others), names, strict=False)]))
            except TypeError:  # numpy has no such loop either
                continue
            assert can_be_native(recorder), function
            labels.append(f"{function.__name__} of {dtype}{shape} {names}")
    both = Both(recorder.code(tuple(results)))
    with np.errstate(all="ignore"):
        found, expected = both.native(*firsts.values(), *seconds.values()), both.plain(*firsts.values(), *seconds.values())
    assert not both.asked and len(labels) > 50
    for one, other, label in zip(found, expected, labels, strict=True):
        assert_same(one, other, label)


@pytest.mark.parametrize("length", swept(LENGTHS, keep=4))
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_rows_that_share_a_loop(dtype: str, length: int) -> None:
    """Rows one after the other, views and comparisons between them, at every length around the vectors'."""
    recorder = Recorder()
    arrays = [special(np.dtype(dtype), length, seed) for seed in range(3)]
    x, y, z = map(recorder.parameter, arrays)
    product = recorder.call(np.multiply, x, y)
    total = recorder.call(np.add, product, z)
    chosen = recorder.call(np.where, recorder.call(np.greater, total, x), product, 0.5)
    back = recorder.index(total, slice(None, None, -1))
    turned = recorder.call(np.subtract, back, chosen)
    root = recorder.call(np.sqrt, recorder.call(np.absolute, turned))
    some = recorder.call(np.maximum, recorder.index(root, slice(None, None, 2)), recorder.index(z, slice(None, None, 2)))
    wide = recorder.call(np.multiply, recorder.method(some, "reshape", -1, 1), recorder.index(y, slice(0, 3)))
    results = (root, back, [some, None, wide], x, recorder.call(np.negative, recorder.transposed(wide)))
    Both(recorder.code(results)).check(arrays, f"{dtype}{length}")


@pytest.mark.parametrize("length", swept(LENGTHS, keep=4))
def test_conversions(length: int) -> None:
    """Each dtype to each that has defined values for it, by ``astype``."""
    recorder, arrays, results = Recorder(), [], []
    for dtype in DTYPES:
        arrays.append(special(dtype, length))
        x = recorder.parameter(arrays[-1])
        for target in DTYPES:
            if dtype == target or (dtype.kind == "f" and target.kind in "iu"):
                continue
            results.append(recorder.method(x, "astype", target))
            assert can_be_native(recorder), (dtype, target)
    Both(recorder.code(tuple(results))).check(arrays, f"length {length}")


@pytest.mark.parametrize("shape", swept(map(pytest.param, MATRICES)))
@pytest.mark.parametrize("dtype", ["f", "d", "i", "?"])
def test_arrays_put_together(dtype: str, shape: tuple[int, int]) -> None:
    arrays = [special(np.dtype(dtype), math.prod(shape), seed).reshape(shape) for seed in range(2)]
    recorder = Recorder()
    x, y = map(recorder.parameter, arrays)
    results = [recorder.call(function, (x, y, x), axis) for function in (np.concatenate, np.stack) for axis in (0, 1, -1)]
    seen = recorder.call(np.equal, results[0], results[0])
    Both(recorder.code((results, seen))).check(arrays, f"{dtype}{shape}")


@pytest.mark.parametrize("shape", swept(map(pytest.param, MATRICES)))
def test_stores(shape: tuple[int, int]) -> None:
    """Parts are written in order, through overlapping indices; what was read before a store keeps its value."""
    arrays = [special(np.dtype("d"), math.prod(shape), seed).reshape(shape) for seed in range(2)]
    recorder = Recorder()
    x, y = map(recorder.parameter, arrays)
    z = recorder.call(np.add, x, y)
    before = recorder.call(np.multiply, z, 2.0)
    z = recorder.store(z, (slice(None), slice(1, None)), recorder.index(x, (slice(None), slice(None, -1))))
    between = recorder.call(np.negative, z)
    z = recorder.store(z, (slice(1, None),), recorder.index(y, (slice(None, -1),)))
    z = recorder.store(z, (0, 0), 7.0)
    code = recorder.code((before, between, z, recorder.call(np.subtract, z, y)))
    Both(code).check(arrays, f"{shape}")
