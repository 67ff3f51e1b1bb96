"""Chains of element-wise operations become one kernel, with the bits of the single operations, whatever else happens in between."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.expression import MAX_ARRAYS, MAX_OPERATIONS
from aiograd.errors import ShapeError
from tests.support import assert_raises
from tests.tolerance import tolerance


def launches(device: CudaDevice) -> list[str]:
    device.synchronize()
    return list(device.driver.history)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_chain_has_the_bits_of_the_single_operations(dtype: type, device: CudaDevice, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((7, 5)).astype(dtype), rng.standard_normal((5,)).astype(dtype)

    def chain(one_by_one: bool) -> bytes:
        def step(array: CudaArray) -> CudaArray:
            if one_by_one:
                array.flush()
            return array

        a, b = device.from_host(x), device.from_host(y)
        product = step(a * b)
        total = step(product + a)
        scaled = step(np.tanh(step(total * dtype(0.3))))
        return device.to_host(step(scaled * scaled) - step(b * product)).tobytes()

    assert chain(False) == chain(True)


def test_a_chain_is_one_launch_and_what_nobody_holds_is_not_in_memory(device: CudaDevice, rng: np.random.Generator) -> None:
    a = device.from_host(rng.standard_normal((8, 8)).astype(np.float32))
    y = np.exp(-(a * 2 + 1)) / 3
    gc.collect()
    allocations = device.memory_stats()["allocations"]
    device.to_host(y)
    assert len(launches(device)) == 1
    assert device.memory_stats()["allocations"] - allocations <= 2  # the upload's, which may come late, and the result's


def test_an_intermediate_that_is_held_is_written_by_the_same_launch(device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    a = device.from_host(x)
    held = a * 2
    y = np.exp(held) + 1
    found = device.to_host(y)
    assert len(launches(device)) == 1
    np.testing.assert_array_equal(device.to_host(held), x * 2)
    assert len(launches(device)) == 1
    np.testing.assert_allclose(found, np.exp(x * 2) + 1, rtol=tolerance(np.float32))


def test_what_nobody_needs_is_never_computed(device: CudaDevice) -> None:
    a = device.from_host(np.ones(4, np.float32))
    y = np.exp(a)
    del y
    assert launches(device) == []


def test_a_write_to_a_source_comes_after_what_read_it(device: CudaDevice) -> None:
    x = np.arange(6.0)
    a = device.from_host(x)
    before, chained = a + 1, np.sqrt(a * 4)
    view = a[1:4]
    of_view = view * 10
    a[...] = -1.0
    after = a + 1
    np.testing.assert_array_equal(device.to_host(before), x + 1)
    np.testing.assert_array_equal(device.to_host(chained), np.sqrt(x * 4))
    np.testing.assert_array_equal(device.to_host(of_view), x[1:4] * 10)
    np.testing.assert_array_equal(device.to_host(after), np.zeros(6))


def test_a_write_to_a_pending_result_does_not_reach_what_was_made_of_it(device: CudaDevice) -> None:
    a = device.from_host(np.arange(4.0))
    y = a * 2
    z = y + 1
    y[1:] = 100.0
    np.testing.assert_array_equal(device.to_host(z), [1, 3, 5, 7])
    np.testing.assert_array_equal(device.to_host(y), [0, 100, 100, 100])


def test_overlapping_views_are_copied_as_numpy_does(device: CudaDevice) -> None:
    for target, source in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None)), (slice(None), slice(None, None, -1))):
        x = np.arange(9.0)
        a = device.from_host(x)
        a[target] = a[source]
        x[target] = x[source].copy()
        np.testing.assert_array_equal(device.to_host(a), x)


def test_chains_beyond_the_limits_are_cut(device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal(5)
    a, wanted = device.from_host(x), x
    for _ in range(3 * MAX_OPERATIONS):
        a, wanted = a + 0.5, wanted + 0.5
    np.testing.assert_array_equal(device.to_host(a), wanted)
    assert 2 < len(launches(device)) < 6
    many = [rng.standard_normal(5) for _ in range(3 * MAX_ARRAYS)]
    total, wanted = device.from_host(many[0]), many[0]
    for each in many[1:]:
        total, wanted = total + device.from_host(each), wanted + each
    np.testing.assert_array_equal(device.to_host(total), wanted)


@pytest.mark.parametrize("shapes", [((), ()), ((), (3,)), ((0,), (1,)), ((2, 0, 3), ()), ((4, 1), (1, 5)), ((2, 1, 3), (4, 1)), ((1, 1), (1,))])
def test_broadcasting(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: CudaDevice, rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal(shape) for shape in shapes)
    np.testing.assert_array_equal(device.to_host(device.from_host(np.asarray(x)) * device.from_host(np.asarray(y)) + 1), x * y + 1)
    assert_raises(ShapeError, r"\[2, 3\].*\[4\]", lambda: device.from_host(np.ones((2, 3))) + device.from_host(np.ones(4)))


@pytest.mark.parametrize(
    "index",
    [np.s_[::-1], np.s_[:, ::-1], np.s_[::-2, 1::2], np.s_[..., None, ::-1], np.s_[2:0:-1, ::3], np.s_[:, None, :, ::-2], np.s_[1, ::-1]],
)
def test_every_layout_is_read_and_written(index: object, device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 5, 6))
    a = device.from_host(x)
    np.testing.assert_array_equal(device.to_host(a[index] * 2 + a.T.T[index]), x[index] * 3)
    a[index] = a[index] + 1
    x[index] += 1
    np.testing.assert_array_equal(device.to_host(a), x)
    turned = np.swapaxes(a, 0, 2)
    np.testing.assert_array_equal(device.to_host(turned + turned), np.swapaxes(x, 0, 2) * 2)


def test_expressions_of_other_shapes_are_not_taken_in_wrongly(device: CudaDevice, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4))
    row = device.from_host(x[0]) * 2
    np.testing.assert_array_equal(device.to_host(row + device.from_host(x)), x[0] * 2 + x)
    turned = (device.from_host(x) * 2).T
    np.testing.assert_array_equal(device.to_host(turned + 1), (x * 2).T + 1)
    square = device.from_host(np.ascontiguousarray(x[:3, :3])) + 1
    np.testing.assert_array_equal(device.to_host(square + square.T), x[:3, :3] + 1 + (x[:3, :3] + 1).T)
