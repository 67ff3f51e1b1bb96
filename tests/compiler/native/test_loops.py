"""numpy's loops called directly have the bits of numpy's functions: rows, sums and products."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.compiler.native.codes import Both, Recorder, assert_same, can_be_native, needs_native, special
from tests.sweeps import swept

pytestmark = [needs_native, pytest.mark.usefixtures("sizes")]

SIZES = (17, 0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 33, 63, 64, 65, 100, 1000, 8191, 8192, 8193, 100_003)
_NAMED = [getattr(np, name) for name in dir(np)]
UFUNCS = list(dict.fromkeys(each for each in _NAMED if isinstance(each, np.ufunc) and each.signature is None and each.nout == 1))


def numbers(dtype: np.dtype[Any], size: int, seed: int, *, tame: bool) -> np.ndarray[Any, Any]:
    if tame:
        drawn = np.random.default_rng(seed).uniform(0.1, 0.9, size)
        return (drawn if dtype.kind in "fc" else drawn * 5 + 1).astype(dtype)
    if dtype.kind != "c":
        return special(dtype, size, seed)
    part = np.dtype(f"f{dtype.itemsize // 2}")
    return np.stack([special(part, size, seed), special(part, size, seed + 5)], -1).view(dtype)[:, 0]


def call_every_ufunc(recorder: Recorder, x: Any, y: Any, one: Any) -> None:
    """Record calls of all ufuncs that take these operands and have a native form."""
    for function in UFUNCS:
        for operands in [(x,)] if function.nin == 1 else [(x, y), (x, one), (one, y)]:
            try:
                recorder.call(function, *operands)
            except (TypeError, ValueError):
                continue
            if not can_be_native(recorder):
                recorder.calls.pop()


@pytest.mark.parametrize("size", swept(SIZES))
@pytest.mark.parametrize("tame", [True, False])
@pytest.mark.parametrize("char", swept("fdFD?bhilqBHILQ", keep=4))
def test_every_ufunc(char: str, tame: bool, size: int) -> None:
    dtype, recorder = np.dtype(char), Recorder()
    arrays = [numbers(dtype, size, 1, tame=tame), numbers(dtype, size, 2, tame=tame), numbers(dtype, 1, 3, tame=tame).reshape(())]
    x, y, one = map(recorder.parameter, arrays)
    call_every_ufunc(recorder, x, y, one)
    assert len(recorder.calls) > 20 or char == "?" or not size
    results = tuple([call.results[0] for call in recorder.calls])
    both = Both(recorder.code(results))
    with np.errstate(all="ignore"):
        found, expected = both.native(*arrays), both.plain(*arrays)
    for one_result, other, call in zip(found, expected, recorder.calls, strict=True):
        assert_same(one_result, other, f"{call.label} of {dtype} {size}")


@pytest.mark.parametrize("shape", swept(map(pytest.param, ((4, 16), (5, 19), (2, 1), (3, 8193), (130, 7), (2, 3, 5))), keep=2), ids=str)
@pytest.mark.parametrize("char", "fd")
def test_every_ufunc_of_rows_with_gaps(char: str, shape: tuple[int, ...]) -> None:
    """Parts of wider arrays: numpy calls its loop for each row."""
    recorder = Recorder()
    wide = [numbers(np.dtype(char), 3 * math.prod(shape), seed, tame=False).reshape(*shape[:-1], 3 * shape[-1]) for seed in (1, 2)]
    arrays = [*wide, numbers(np.dtype(char), 1, 3, tame=False).reshape(())]
    x, y = (recorder.index(recorder.parameter(each), (..., slice(shape[-1], 2 * shape[-1]))) for each in wide)
    one = recorder.parameter(arrays[-1])
    call_every_ufunc(recorder, x, y, one)
    made = [call for call in recorder.calls if call.label]
    assert sum([call.function is np.tanh for call in made]) == 1 and len(made) > 40
    both = Both(recorder.code(tuple([call.results[0] for call in made])))
    with np.errstate(all="ignore"):
        for found, expected, call in zip(both.native(*arrays), both.plain(*arrays), made, strict=True):
            assert_same(found, expected, f"{call.label} of {char}{shape}")


def test_integer_powers_stay_with_numpy() -> None:
    recorder = Recorder()
    recorder.call(np.power, recorder.parameter(np.array([1, 2, 3])), recorder.parameter(np.array([1, 2, 3])))
    assert not can_be_native(recorder)


SUMMED = ((3, 5), (1,), (7,), (8,), (9,), (127,), (128,), (129,), (1000,), (8191,), (8192,), (8193,), (100_003,), (64, 10), (10, 64), (1, 64),
          (64, 1), (200, 3), (9000, 2), (2, 9000), (2, 3, 4), (5, 1, 7), (4, 8, 16), (2, 3, 4, 5))  # fmt: skip


@pytest.mark.parametrize("shape", swept(map(pytest.param, SUMMED), keep=4), ids=str)
@pytest.mark.parametrize("char", ["f", "d", "q"])
def test_sums(char: str, shape: tuple[int, ...]) -> None:
    """Over every set of axes, of an array with its axes in memory in every order."""
    values = (np.random.default_rng(0).standard_normal(shape) * 100).astype(char)
    ran = 0
    for order in itertools.islice(itertools.permutations(range(len(shape))), 6):
        array = np.ascontiguousarray(values.transpose(order)).transpose(np.argsort(order))
        recorder, results, labels = Recorder(), [], []
        x = recorder.parameter(array)
        for count, keepdims in itertools.product(range(len(shape) + 1), (False, True)):
            for axes in itertools.combinations(range(len(shape)), count):
                recorder.call(np.add.reduce, x, axes, None, None, keepdims)
                call = recorder.calls[-1]
                if can_be_native(recorder):
                    results.append(call.results[0])
                    labels.append(f"sum of {char}{shape} in order {order} over {axes}, keepdims={keepdims}")
                else:
                    recorder.calls.pop()
        ran += len(results)
        both = Both(recorder.code(tuple(results)))
        for one, other, label in zip(both.native(array), both.plain(array), labels, strict=True):
            assert_same(one, other, label)
    assert ran > 1


def matrices(rows: int, columns: int, char: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """A matrix of each layout."""
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(char)

    return {
        "in order": drawn(rows, columns), "transposed": drawn(columns, rows).T, "strided": drawn(rows, 2 * columns)[:, ::2],
        "every other row": drawn(2 * rows, columns)[::2], "upwards": drawn(rows, columns)[::-1], "backwards": drawn(rows, columns)[:, ::-1],
        "with gaps": drawn(rows, columns + 3)[:, :columns], "transposed with gaps": drawn(columns, rows + 3)[:, :rows].T,
        "a row repeated": np.broadcast_to(drawn(1, columns), (rows, columns)), "a column repeated": np.broadcast_to(drawn(rows, 1), (rows, columns)),
        "strided both ways": drawn(2 * rows, 2 * columns)[::2, ::2],
    }  # fmt: skip


MULTIPLIED = ((1, 1, 1), (3, 4, 5), (1, 5, 1), (5, 1, 5), (1, 5, 4), (4, 5, 1), (8, 8, 8), (2, 64, 10), (17, 33, 9), (1, 100, 1), (100, 3, 100),
              (1, 1, 7), (7, 1, 1), (130, 70, 65), (1, 300, 300), (300, 300, 1))  # fmt: skip


@pytest.mark.parametrize("sizes", swept(map(pytest.param, MULTIPLIED), keep=2), ids=str)
@pytest.mark.parametrize("char", "fdFD")
def test_products(char: str, sizes: tuple[int, int, int]) -> None:
    """``matmul`` and ``dot`` of matrices of all layouts, and of a matrix with its own transpose."""
    rows, inner, columns = sizes
    ones, others = matrices(rows, inner, char, 1), matrices(inner, columns, char, 2)
    recorder = Recorder()
    lefts, rights = ({name: recorder.parameter(array) for name, array in each.items()} for each in (ones, others))
    pairs = [*itertools.product(lefts.items(), rights.items())]
    for name, left in lefts.items():
        turned = recorder.transposed(left)
        pairs += [((name, left), ("its transpose", turned)), (("its transpose", turned), (name, left))]
    results, labels = [], []
    for ((one_name, one), (other_name, other)), function in itertools.product(pairs, (np.matmul, np.dot)):
        result = recorder.call(function, one, other)
        if can_be_native(recorder):
            results.append(result)
            labels.append(f"{function.__name__} {char}{sizes}: {one_name}, {other_name}")
        else:
            recorder.calls.pop()
    both = Both(recorder.code(tuple(results)))
    arrays = [*ones.values(), *others.values()]
    for one, other, label in zip(both.native(*arrays), both.plain(*arrays), labels, strict=True):
        assert_same(one, other, label)
    assert len(results) > math.prod((len(ones), len(others)))
