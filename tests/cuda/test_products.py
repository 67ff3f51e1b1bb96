"""Products of vectors and matrices on a simulated CUDA device, against numpy in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.driver.simulator import SimulatorDriver
from aiograd.cuda.operations import multiplying
from aiograd.errors import ShapeError
from aiograd.ops.op import ROWS
from aiograd.running.devices import register_device, unregister_device
from tests.cuda.library import Library
from tests.support import assert_raises
from tests.tolerance import assert_close, tolerance

FLOATS = ("f4", "f8", "f2")


def draw(shape: tuple[int, ...], dtype: str = "f4", seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng((seed, *shape))
    if dtype[0] == "f":
        return numbers.standard_normal(shape).astype(dtype)
    return numbers.integers(0, 2, shape).astype(dtype) if dtype == "?" else numbers.integers(-9, 9, shape).astype(dtype)


def close(found: CudaArray, wanted: np.ndarray, dtype: str) -> None:
    """By relative norm; `wanted` is in double precision."""
    assert isinstance(found, CudaArray)
    assert (found.shape, found.dtype) == (wanted.shape, np.dtype(dtype))
    ours = found.device.to_host(found).astype(np.float64)
    assert np.linalg.norm(ours - wanted) <= tolerance(dtype) * max(np.linalg.norm(wanted), 1e-300)


def check(device: CudaDevice, function: Callable[..., Any], *arrays: np.ndarray, dtype: str | None = None) -> None:
    """`function` on the device, natively, against itself on the host in double precision."""
    wanted = np.asarray(function(*[array.astype(np.float64) for array in arrays]))
    close(function(*[device.from_host(array) for array in arrays]), wanted, dtype or arrays[0].dtype.str[1:])
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m,k,n", [(16, 8, 8), (17, 9, 7), (1, 6, 5), (6, 7, 1), (3, 1, 4), (1, 1, 1), (33, 17, 9)])
def test_matrices(device: CudaDevice, dtype: str, m: int, k: int, n: int) -> None:
    check(device, np.matmul, draw((m, k), dtype), draw((k, n), dtype, 1))


@pytest.mark.parametrize(
    "first,second",
    [
        ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 3, 5), (5,)), ((5,), (2, 5, 3)), ((2, 4, 5), (5, 3)), ((4, 5), (2, 5, 3)),
        ((2, 1, 4, 5), (3, 5, 6)), ((2, 3, 4, 5), (2, 3, 5, 2)),
    ],
)  # fmt: skip
def test_vectors_and_batches(device: CudaDevice, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    check(device, np.matmul, draw(first), draw(second))


@pytest.mark.parametrize("dtype", ["i4", "i8", "u1", "?"])
@pytest.mark.parametrize("shapes", [((3, 5), (5, 4)), ((2, 3, 5), (5,)), ((2, 1, 3, 2), (3, 2, 4))])
def test_integers_and_booleans_as_numpy_has_them(device: CudaDevice, dtype: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, y = (draw(shape, dtype) for shape in shapes)
    found = np.matmul(device.from_host(x), device.from_host(y))
    np.testing.assert_array_equal(device.to_host(found), np.matmul(x, y), strict=True)
    assert device.statistics().fallbacks == {}


def test_dtypes_are_promoted_and_host_arrays_are_taken(device: CudaDevice) -> None:
    x, y = draw((3, 4), "f4"), draw((4, 2), "f8")
    close(np.matmul(device.from_host(x), y), x.astype(np.float64) @ y, "f8")
    close(np.matmul(x, device.from_host(y)), x.astype(np.float64) @ y, "f8")


def test_integers_wrap_around(device: CudaDevice) -> None:
    x = np.full((2, 3), 200, np.uint8)
    np.testing.assert_array_equal(device.to_host(np.matmul(device.from_host(x), device.from_host(x.T))), x @ x.T, strict=True)


VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x.T, lambda x: x[::2, ::3], lambda x: x[::-1, 1:], lambda x: np.broadcast_to(x[0], x.shape),
    lambda x: np.broadcast_to(x[:, :1], x.shape), lambda x: x.reshape(2, 3, 12).transpose(1, 0, 2).transpose(2, 1, 0)[0],
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_multiplied_where_they_lie(device: CudaDevice, view: Callable[[Any], Any]) -> None:
    x = draw((6, 12))
    for other in (lambda y: np.swapaxes(y, -1, -2), lambda y: np.swapaxes(y.copy(), -1, -2), lambda y: np.swapaxes(y, -1, -2)[:, :1]):
        check(device, lambda x, view=view, other=other: np.matmul(view(x), other(view(x))), x)
        check(device, lambda x, view=view, other=other: np.matmul(np.swapaxes(other(view(x)), 0, 1), np.swapaxes(view(x), 0, 1)), x)


@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_batches_whose_rows_do_not_follow_each_other_times_one_matrix(device: CudaDevice, axes: tuple[int, ...]) -> None:
    check(device, lambda x, y: np.matmul(x.transpose(axes), y[: x.shape[axes[2]]]), draw((3, 2, 4)), draw((4, 5)))
    check(device, lambda x, y: np.matmul(y[:, : x.shape[axes[1]]], x.transpose(axes)), draw((3, 2, 4)), draw((5, 4)))


def test_transposed_operands_and_batches_that_merge_need_no_copy(device: CudaDevice) -> None:
    x, y = device.from_host(draw((2, 3, 4, 5))), device.from_host(draw((2, 3, 6, 5)))
    driver: SimulatorDriver = device.driver  # type: ignore[assignment]
    device.synchronize()
    driver.history.clear()
    one = np.matmul(x, np.swapaxes(y, -1, -2))
    two = np.matmul(x, y[0, 0].T)
    three = np.matmul(x.transpose(0, 2, 1, 3), y.transpose(0, 2, 3, 1)[:, :4])
    four = np.matmul(x[0, 0].T, x[0, 0][:, 0])
    device.synchronize()
    assert driver.history == ["gemm", "gemm", "gemm", "gemv"]
    assert [each.shape for each in (one, two, three, four)] == [(2, 3, 4, 6), (2, 3, 4, 6), (2, 4, 3, 3), (5,)]


@pytest.mark.parametrize("shapes", [((3, 2, 2, 4, 5), (3, 1, 2, 5, 6)), ((3, 1, 2, 4, 5), (3, 2, 1, 5, 6)), ((3, 2, 2, 1, 5), (3, 1, 2, 5, 1))])
def test_batches_of_many_axes_that_do_not_merge(device: CudaDevice, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(device, np.matmul, *[draw(shape) for shape in shapes])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m,k,n", [(3, 200, 3), (1, 700, 1), (2, 300, 1), (1, 300, 3), (3, 131, 2)])
def test_long_sums_are_cut_into_parts_and_have_the_same_bits_every_time(device: CudaDevice, dtype: str, m: int, k: int, n: int) -> None:
    x, y = draw((m, k), dtype), draw((k, n), dtype, 1)
    check(device, np.matmul, x, y)
    check(device, lambda x, y: np.matmul(x.T.copy().T, y), x, y)
    device.synchronize()
    assert "join_parts" in device.driver.history  # type: ignore[attr-defined]
    first, second = (device.to_host(np.matmul(device.from_host(x), device.from_host(y))) for _ in range(2))
    assert first.tobytes() == second.tobytes()


LARGE: Any = type("Device", (), {"properties": type("Properties", (), {"is_simulated": False, "multiprocessors": 132})})
#: what is used on devices: for many rows or columns, few columns, few rows, and neither
TILES = {multiplying.tile_of(LARGE, np.dtype("f4"), m, n, 1) for m, n in ((9999, 9999), (9999, 8), (8, 9999), (99, 99))}


@pytest.mark.parametrize("tile", [pytest.param(tile, marks=pytest.mark.sweep) if number else tile for number, tile in enumerate(sorted(TILES))])
@pytest.mark.parametrize("turned", [False, True])
def test_tiles_of_real_devices(device: CudaDevice, tile: tuple[int, ...], turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(TILES) == 4
    monkeypatch.setattr(multiplying, "tile_of", lambda *args: tile)
    x, y = draw((tile[0] - 3, 2 * tile[2] - 3)), draw((2 * tile[2] - 3, tile[1] + 1))
    if turned:
        check(device, lambda x, y: np.matmul(x.T, y.T), x.T.copy(), y.T.copy())
    else:
        check(device, np.matmul, x, y)


@pytest.mark.parametrize("shapes", [((10, 40), (40,)), ((3, 5000), (5000,)), ((1, 300), (300, 35)), ((70, 9), (9,))])
def test_dots_by_blocks_of_real_devices(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    device = CudaDevice(SimulatorDriver(threads=256))
    check(device, np.matmul, *[draw(shape) for shape in shapes])
    check(device, lambda x, y: np.matmul(x.T.copy().T, y), *[draw(shape) for shape in shapes])
    device.close()


@pytest.mark.parametrize("shapes", [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0)), ((0, 2, 3), (3, 2)), ((0,), (0,))])
def test_nothing_gives_zeros_and_no_kernel(device: CudaDevice, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(device, np.matmul, *[draw(shape) for shape in shapes])


def test_shapes_that_do_not_fit(device: CudaDevice) -> None:
    x = device.from_host(draw((3, 4)))
    assert_raises(ShapeError, r"\[3, 4\] and \[3, 4\]", np.matmul, x, x)
    assert_raises(ShapeError, "leading axes", lambda: np.matmul(device.from_host(draw((2, 3, 4))), device.from_host(draw((3, 4, 2)))))
    assert_raises(ShapeError, "linear: found x", lambda: ROWS["linear"](x, x[:, :3]))


def test_complex_numbers_are_left_to_the_host(device: CudaDevice) -> None:
    x = draw((3, 4)) + 1j * draw((3, 4), seed=1)
    found = np.matmul(device.from_host(x), device.from_host(x.T))
    assert_close(device.to_host(found), x @ x.T)
    assert device.statistics().fallbacks == {"matmul": 1}


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "dot_number": (lambda x: np.dot(x, 2.0), ((2, 3),)),
    "dot_vectors": (np.dot, ((5,), (5,))),
    "dot_matrices": (np.dot, ((3, 5), (5, 2))),
    "dot_many": (np.dot, ((2, 3, 5), (4, 5, 2))),
    "inner": (np.inner, ((3, 5), (2, 4, 5))),
    "outer": (np.outer, ((3, 2), (4,))),
    "linalg_outer": (np.linalg.outer, ((3,), (4,))),
    "vdot": (np.vdot, ((3, 4), (4, 3))),
    "vecdot": (np.vecdot, ((2, 1, 5), (3, 5))),
    "vecdot_axis": (lambda x, y: np.vecdot(x, y, axis=-2), ((2, 5, 3), (5, 3))),
    "linalg_vecdot": (np.linalg.vecdot, ((3, 5), (3, 5))),
    "linalg_matmul": (np.linalg.matmul, ((3, 5), (5, 3))),
    "tensordot": (np.tensordot, ((2, 3, 4), (3, 4, 5))),
    "tensordot_axes": (lambda x, y: np.tensordot(x, y, axes=([0, 2], [1, 0])), ((2, 3, 4), (4, 2, 5))),
    "tensordot_none": (lambda x, y: np.tensordot(x, y, axes=0), ((2, 3), (4,))),
    "einsum_matmul": (lambda x, y: np.einsum("ij,jk->ik", x, y), ((3, 4), (4, 5))),
    "einsum_batch": (lambda x, y: np.einsum("bhld,bhsd->bhls", x, y), ((2, 3, 4, 5), (2, 3, 6, 5))),
    "einsum_turned": (lambda x, y: np.einsum("blhd,bshd->hlbs", x, y), ((2, 4, 3, 5), (2, 6, 3, 5))),
    "einsum_dots": (lambda x, y: np.einsum("...i,...i", x, y), ((2, 3, 4), (3, 4))),
    "einsum_three": (lambda x, y, z: np.einsum("ab,bc,cd->da", x, y, z), ((2, 3), (3, 4), (4, 2))),
    "einsum_product": (lambda x, y: np.einsum("ij,ik->ijk", x, y), ((2, 3), (2, 4))),
    "einsum_sum": (lambda x, y: np.einsum("ijk,j->k", x, y), ((2, 3, 4), (3,))),
}
if hasattr(np, "matvec"):
    FUNCTIONS["matvec"] = (np.matvec, ((2, 3, 4), (1, 4)))
    FUNCTIONS["vecmat"] = (np.vecmat, ((3,), (2, 3, 4)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(device: CudaDevice, name: str) -> None:
    function, shapes = FUNCTIONS[name]
    check(device, function, *[draw(shape, seed=i) for i, shape in enumerate(shapes)])


# ---------------------------------------------------------------- rows, and tensors


@pytest.mark.parametrize("dtype,lead", [("f4", ()), ("f4", (3,)), ("f4", (2, 3)), ("f8", (3,)), ("f2", (3,))])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("depth,outputs", [(4, 5), (140, 2), (4, 1)])
def test_linear(device: CudaDevice, dtype: str, lead: tuple[int, ...], biased: bool, depth: int, outputs: int) -> None:
    arrays = [draw((*lead, depth), dtype), draw((outputs, depth), dtype, 1), *([draw((outputs,), dtype, 2)] if biased else [])]
    check(device, ROWS["linear"], *arrays)


async def gradients(function: Callable[..., Any], arrays: tuple[np.ndarray, ...], place: str | None) -> list[np.ndarray]:
    tensors = [ag.tensor(array, device=place, requires_grad=True) for array in arrays]
    out = function(*tensors)
    weight = np.cos(np.arange(out.size)).reshape(out.shape).astype(arrays[0].dtype)
    await (out * ag.tensor(weight, device=place)).sum().backward()
    return [(await found).to("cpu").numpy() for found in (out.detach(), *[tensor.grad for tensor in tensors])]


@pytest.mark.parametrize(
    "function,shapes",
    [
        (ag.matmul, ((3, 4), (4, 5))), (ag.matmul, ((2, 3, 4), (4, 5))), (ag.matmul, ((3, 4), (2, 4, 5))), (ag.matmul, ((2, 2, 3, 4), (2, 4, 5))),
        (ag.matmul, ((4,), (2, 4, 5))), (ag.matmul, ((2, 3, 4), (4,))), (ag.matmul, ((4,), (4,))),
        (lambda x, y: ag.einsum("bij,bkj->bik", x, y), ((2, 3, 4), (2, 5, 4))), (ROWS["linear"], ((2, 3, 4), (5, 4), (5,))),
        (ROWS["vecdot"], ((2, 4), (2, 4))),
    ],
)  # fmt: skip
async def test_tensors_have_the_gradients_of_the_host(device: CudaDevice, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    arrays = tuple(draw(shape, seed=i) for i, shape in enumerate(shapes))
    ours = await gradients(function, arrays, "cuda:0")
    theirs = await gradients(function, tuple(array.astype(np.float64) for array in arrays), None)
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.shape == wanted.shape
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
    assert device.statistics().fallbacks == {}


# ---------------------------------------------------------------- a library that multiplies


@pytest.fixture
def equipped() -> Iterator[CudaDevice]:
    """``cuda:0`` with a library."""
    device = CudaDevice(Library())
    register_device(device)
    yield device
    unregister_device("cuda:0")
    device.close()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "function,shapes,calls",
    [
        (np.matmul, ((3, 4), (4, 5)), 1),
        (lambda x, y: x.T @ y.T, ((4, 3), (5, 4)), 1),
        (lambda x, y: x[:, 1:3] @ y[::2, ::3], ((4, 3), (4, 7)), 1),
        (np.matmul, ((2, 3, 4), (4, 5)), 1),
        (np.matmul, ((3, 4), (2, 4, 5)), 1),
        (lambda x, y: x.transpose(0, 2, 1, 3) @ y.transpose(0, 2, 3, 1), ((2, 3, 4, 5), (2, 6, 4, 5)), 2),
        (lambda x, y: x.transpose(0, 2, 1, 3) @ y.transpose(0, 2, 3, 1), ((4, 3, 3, 5), (4, 6, 3, 5)), 3),
        (lambda x, y: np.broadcast_to(x[0], (3, 4)) @ y, ((1, 4), (4, 5)), 1),
        (np.matmul, ((3, 4), (4,)), 0),
    ],
)
def test_the_library_is_given_what_it_takes(
    equipped: CudaDevice, dtype: str, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], calls: int
) -> None:
    check(equipped, function, *[draw(shape, dtype, i) for i, shape in enumerate(shapes)])
    assert len(equipped.driver.calls) == calls  # type: ignore[attr-defined]


def test_the_library_and_a_bias(equipped: CudaDevice) -> None:
    check(equipped, ROWS["linear"], draw((3, 4)), draw((5, 4)), draw((5,)))
    x = draw((2, 3), "i4")
    np.testing.assert_array_equal(equipped.to_host(np.matmul(equipped.from_host(x), equipped.from_host(x.T))), x @ x.T)
    assert len(equipped.driver.calls) == 1  # type: ignore[attr-defined]
