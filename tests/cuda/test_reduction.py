"""Reductions on a simulated device: values, dtypes, layouts, launches, and what is pending computed on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from tests.cuda.on_both import DOMAINS, row_agrees
from tests.sweeps import swept
from tests.tolerance import tolerance

SHAPES = [(), (7,), (301,), (131, 3), (3, 130), (2, 3, 4)]
NUMBERS = (np.sum, np.prod, np.max, np.min, np.mean, np.var, np.std)
TRUTHS = (np.any, np.all, np.count_nonzero)
POSITIONS = (np.argmax, np.argmin)


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(np.asarray(rng.standard_normal(shape)) * (1 if dtype[0] == "f" else 3)).astype(dtype)


def axes_for(shape: tuple[int, ...]) -> list[Any]:
    return [None] if not shape else [None, 0, -1] if len(shape) < 3 else [None, 1, (0, 2), (-1, 1)]


def agree(device: CudaDevice, function: Callable[..., Any], x: np.ndarray, here: CudaArray, **options: Any) -> None:
    """On the device as in numpy, of the dtype that numpy gives, without the host's help."""
    with np.errstate(all="ignore"):
        dtype = np.asarray(function(x, **options)).dtype
        wanted = np.asarray(function(x.astype(np.float64) if x.dtype.kind == "f" else x, **options))
    found = device.to_host(function(here, **options))
    what = f"{function.__name__}, {x.dtype} {x.shape}, {options}"
    assert (found.shape, found.dtype) == (wanted.shape, dtype), what
    most = {"float16": 4e-3, "float32": 1e-5}.get(dtype.name, 1e-12)
    np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=most, atol=most, err_msg=what)
    assert device.statistics().fallbacks == {}, what


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", swept(["f4", "f8", "f2", "i4", "?"], keep=2))
def test_values_and_dtypes(device: CudaDevice, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = drawn(rng, shape, dtype)
    here = device.from_host(x)
    for number, axis in enumerate(axes_for(shape)):
        for function in (*NUMBERS, *TRUTHS):
            if dtype != "?" or function not in (np.var, np.std):
                agree(device, function, x, here, axis=axis, keepdims=bool(number % 2))
    for function in POSITIONS:
        agree(device, function, x, here)
        if shape:
            agree(device, function, x, here, axis=-1)


@pytest.mark.parametrize("dtype", ["u1", "i2", "u8", "i8"])
def test_integers_of_every_width(device: CudaDevice, dtype: str, rng: np.random.Generator) -> None:
    x = drawn(rng, (3, 5), "i8").astype(dtype)
    here = device.from_host(x)
    for function in (np.sum, np.prod, np.max, np.min, np.mean, np.any, np.argmax):
        agree(device, function, x, here, axis=1)
    extremes = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    agree(device, np.max, extremes[::2], device.from_host(extremes[::2]))
    agree(device, np.min, extremes[1:2], device.from_host(extremes[1:2]))


@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.maximum, np.minimum, np.fmax, np.fmin, np.logical_or, np.logical_and])
def test_methods_of_ufuncs(device: CudaDevice, ufunc: np.ufunc, rng: np.random.Generator) -> None:
    x = drawn(rng, (4, 3), "f4")
    x[1, 2] = np.nan
    here = device.from_host(x)
    for options in ({}, {"axis": 1}, {"axis": None, "keepdims": True}):
        found = device.to_host(ufunc.reduce(here, **options))
        np.testing.assert_allclose(found, np.asarray(ufunc.reduce(x, **options)), rtol=tolerance(np.float32))
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("function", [np.max, np.min, np.argmax, np.argmin])
@pytest.mark.parametrize("values", [[1, np.nan, 3, np.nan], [-np.inf, -np.inf], [np.inf, np.inf, np.nan], [2, 5, 5, 2], [-0.0, 0.0]], ids=str)
def test_nan_infinities_and_ties(device: CudaDevice, function: Any, values: list[float]) -> None:
    for x in (np.array(values, np.float32), np.array(values * 40, np.float32)):  # one launch, and two
        np.testing.assert_array_equal(device.to_host(function(device.from_host(x))), function(x))


VIEWS = [lambda x: x.T, lambda x: x[::2, ::-1], lambda x: x[:, 1:2], lambda x: x.transpose(1, 0)[1:], lambda x: x[None, :, None]]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_layouts(device: CudaDevice, view: Any, axis: Any, rng: np.random.Generator) -> None:
    x = drawn(rng, (5, 6), "f4")
    agree(device, np.sum, view(x), view(device.from_host(x)), axis=axis)
    agree(device, np.argmax, view(x), view(device.from_host(x)), axis=axis)


def test_broadcast_arguments(device: CudaDevice, rng: np.random.Generator) -> None:
    x = drawn(rng, (1, 5), "f4")
    for axis in (None, 0, 1):
        agree(device, np.sum, np.broadcast_to(x, (4, 5)), np.broadcast_to(device.from_host(x), (4, 5)), axis=axis)
    whole = drawn(rng, (2, 3, 4), "f4")
    agree(device, np.sum, whole.transpose(2, 0, 1), device.from_host(whole).transpose(2, 0, 1), axis=1)
    agree(device, np.max, whole.transpose(2, 0, 1), device.from_host(whole).transpose(2, 0, 1), axis=(0, 2), keepdims=True)


def test_empty_arrays_and_what_numpy_refuses(device: CudaDevice) -> None:
    x = np.zeros((0, 3), np.float32)
    here = device.from_host(x)
    for function, axis in ((np.sum, 0), (np.prod, None), (np.any, 0), (np.all, 1), (np.count_nonzero, 0), (np.max, 1)):
        agree(device, function, x, here, axis=axis)
    assert np.isnan(device.to_host(np.mean(here, axis=0))).all()
    for wrong in (lambda: np.max(here, axis=0), lambda: np.argmax(here), lambda: np.sum(here, axis=2), lambda: np.sum(here, axis=(0, 0))):
        with pytest.raises(ValueError):  # as numpy: AxisError is one
            wrong()
    target = device.from_host(np.zeros(3, np.float32))
    assert np.sum(here, axis=0, out=target) is target
    np.testing.assert_array_equal(device.to_host(np.sum(device.from_host(np.ones((2, 3), np.float32)), axis=0, dtype=np.float64)), np.full(3, 2.0))


def test_what_is_composed_of_reductions(device: CudaDevice, rng: np.random.Generator) -> None:
    x, w = drawn(rng, (4, 3), "f4"), np.abs(drawn(rng, (3,), "f4"))
    here = device.from_host(x)
    for call in (
        lambda a, v: np.ptp(a, axis=1), lambda a, v: np.average(a, axis=1, weights=v), lambda a, v: np.average(a), lambda a, v: np.linalg.norm(a),
        lambda a, v: np.linalg.norm(a, axis=0), lambda a, v: np.linalg.vector_norm(a, axis=1, ord=1), lambda a, v: np.linalg.matrix_norm(a),
    ):  # fmt: skip
        np.testing.assert_allclose(device.to_host(call(here, device.from_host(w))), call(x, w), rtol=1e-5)
    assert device.statistics().fallbacks == {}


def test_what_has_no_kernel_goes_to_the_host(device: CudaDevice, rng: np.random.Generator) -> None:
    x = drawn(rng, (4, 3), "f4")
    found = np.sum(device.from_host(x), axis=0, where=x > 0)
    np.testing.assert_allclose(device.to_host(found), np.sum(x, axis=0, where=x > 0), rtol=tolerance(np.float32))
    assert device.statistics().fallbacks == {"sum": 1}


# ---------------------------------------------------------------- launches


def test_a_pending_argument_is_computed_in_the_same_launch(device: CudaDevice, rng: np.random.Generator) -> None:
    x, y = drawn(rng, (4, 6), "f4"), drawn(rng, (6,), "f4")
    a, b = device.from_host(x), device.from_host(y)
    found = [np.sum(a * b - 1.0, axis=1), np.mean(np.exp(a), axis=0), np.argmax(a.T * 2, axis=0), np.sum(np.sum(a > 0, axis=0) > 1)]
    device.synchronize()
    assert len(device.driver.history) == 5  # the last is two: a sum, and one of what is made of its results
    wanted = [(x * y - 1).sum(1), np.exp(x).mean(0), np.argmax(x, axis=1), ((x > 0).sum(0) > 1).sum()]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(device.to_host(ours), theirs, rtol=1e-5)


def test_a_pending_argument_that_is_held_is_computed_again_once(device: CudaDevice, rng: np.random.Generator) -> None:
    a = device.from_host(drawn(rng, (4, 6), "f4"))
    held = np.exp(a)
    for _ in range(3):
        np.sum(held)
    device.synchronize()
    assert [name for name in device.driver.history if name == "exp"] == ["exp"]
    assert [name for name in device.driver.history if "of_exp" in name] == ["sum_of_exp_whole"]


def test_the_same_bits_whether_the_argument_was_pending_or_not(device: CudaDevice, rng: np.random.Generator) -> None:
    for shape, axis in (((3, 50), 1), ((50, 3), 0), ((700,), None)):
        a, b = device.from_host(drawn(rng, shape, "f4")), device.from_host(drawn(rng, shape, "f4"))
        for dtype in (np.float32, np.float16):
            fused = np.sum((a * b + a).astype(dtype), axis=axis)
            launched = (a * b + a).astype(dtype)
            launched.flush()
            assert device.to_host(fused).tobytes() == device.to_host(np.sum(launched, axis=axis)).tobytes()


def test_a_write_after_the_reduction_does_not_reach_it(device: CudaDevice) -> None:
    a = device.from_host(np.ones(5, np.float32))
    held = a * 2
    total = np.sum(held)
    a[...] = 7
    assert device.to_host(total) == 10 and device.to_host(np.sum(held)) == 10


def test_half_precision_is_added_in_single(device: CudaDevice) -> None:
    x = np.full(4096, 1.0, np.float16)
    assert device.to_host(np.sum(device.from_host(x))) == 4096
    assert device.to_host(np.mean(device.from_host(np.full(300, 60000, np.float16)))) == 60000


def test_variance_is_two_launches_and_survives_a_large_mean(device: CudaDevice, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((3, 40)) + 1000).astype(np.float32)
    found = np.var(device.from_host(x), axis=1, ddof=1)
    np.testing.assert_allclose(device.to_host(found), x.astype(np.float64).var(1, ddof=1), rtol=1e-4)
    assert len(device.driver.history) == 2


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "max", "min", "logsumexp", "prod", "all", "any", "argmax", "argmin", "count_nonzero"])
def test_rows(device: CudaDevice, name: str) -> None:
    for variety in range(DOMAINS[name].varieties if name in DOMAINS else 0):
        row_agrees(device, name, variety, "float32")
    assert device.statistics().fallbacks == {}


async def test_through_tensors(device: CudaDevice, rng: np.random.Generator) -> None:
    x = drawn(rng, (3, 4), "f4")

    async def gradient(place: str) -> np.ndarray:
        t = ag.tensor(x, device=place, requires_grad=True)
        loss = t.sum(0).max() + t.mean(1).sum() * ag.var(t) + ag.logsumexp(t, axis=1).sum() + (t * t).sum((0, 1))
        await loss.backward()
        return (await t.grad).to("cpu").numpy()

    np.testing.assert_allclose(await gradient("cuda:0"), await gradient("cpu"), rtol=1e-4, atol=1e-5)
    assert device.statistics().fallbacks == {}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_view_over_any_axes(device: CudaDevice, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    x = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-9, 9, shape).astype(data.draw(st.sampled_from(["f4", "f8", "i4"])))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    index = tuple(data.draw(st.sampled_from([slice(None), slice(None, None, -1), slice(None, None, 2), slice(0, 1)])) for _ in shape)
    here, there = device.from_host(x).transpose(order)[index], x.transpose(order)[index]
    axes = tuple(axis for axis in range(len(shape)) if data.draw(st.booleans()))
    function = data.draw(st.sampled_from([np.sum, np.max, np.count_nonzero]))
    if data.draw(st.booleans()):
        here, there = here * 2 + 1, there * 2 + 1
    found = device.to_host(function(here, axis=axes))
    np.testing.assert_array_equal(found, function(there, axis=axes))  # whole numbers: no rounding
