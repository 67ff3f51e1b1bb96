"""numpy's functions on traced arrays: every answer in the table equals numpy's own, and compositions have the right derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.ops import FUNCTIONS, ROWS, UFUNCS
from aiograd.ops.decomposition import cholesky, matrix_power, qr, svd
from aiograd.ops.einsum import einsum, tensordot
from aiograd.ops.elementwise import clip
from aiograd.ops.indexing import index_add, is_basic, scatter_add
from aiograd.ops.joining import concat, pad, repeat
from aiograd.ops.linalg import outer, trace
from aiograd.ops.norms import matrix_norm
from aiograd.ops.scan import cumulative_prod, cumulative_sum
from aiograd.ops.sorting import median
from tests.ops.traced import Traced, check, plain
from tests.support import assert_raises

A = np.random.default_rng(1).uniform(0.2, 2.0, (2, 3))
B = np.random.default_rng(2).uniform(0.2, 2.0, (2, 3))
C = np.random.default_rng(3).uniform(-1.0, 1.0, (3, 2, 2))
M = np.random.default_rng(4).uniform(-1.0, 1.0, (3, 3)) + 2 * np.eye(3)
V = np.random.default_rng(5).uniform(-1.0, 1.0, 3)
S = np.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
Z = A + 1j * B
NAN = np.where(A > 1.5, np.nan, A)
NAN[0, 0] = np.nan
PAIRS = ((V, np.array([1.0, 2.0])), (V[:2], np.array([1.0, 2.0, 0.5, 3.0])), (Z[0], Z[1]))
TURN = np.array([[1.0, 2.0], [-3.0, 0.5]])

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
    """A call to try; every array among the arguments will be traced."""
    return function, args, kwargs


#: in numpy's own way
CALLS: list[Call] = [
    call(np.sum, A), call(np.sum, A, 0), call(np.sum, A, axis=(0, 1), keepdims=True), call(np.sum, A, dtype=np.float32), call(np.mean, A, 1),
    call(np.mean, A, axis=-1, keepdims=True), call(np.prod, A, axis=0), call(np.prod, A), call(np.max, A, 0), call(np.amax, A),
    call(np.min, A, axis=1, keepdims=True), call(np.amin, A, 0), call(np.var, A, axis=1), call(np.var, A, ddof=1),
    call(np.std, A, 0, ddof=1, keepdims=True), call(np.std, A, correction=1), call(np.ptp, A, axis=1), call(np.average, A, axis=1),
    call(np.average, A, weights=B), call(np.average, A, axis=1, weights=V + 2), call(np.median, A), call(np.median, C, axis=(0, 2)),
    call(np.median, A, axis=1, keepdims=True), call(np.all, A > 1), call(np.any, A, axis=0), call(np.argmax, A, axis=1), call(np.argmin, A),
    call(np.count_nonzero, A, axis=0), call(np.cumsum, A), call(np.cumsum, A, axis=1), call(np.cumprod, A, 0), call(np.cumprod, A),
    call(np.diff, A), call(np.diff, A, 2, 1), call(np.diff, A, axis=0, prepend=0.0), call(np.diff, A, append=B), call(np.reshape, A, (3, 2)),
    call(np.reshape, A, -1), call(np.ravel, A), call(np.transpose, A), call(np.transpose, C, (2, 0, 1)), call(np.transpose, C, axes=[0, -1, 1]),
    call(np.swapaxes, C, 0, 2), call(np.moveaxis, C, 0, -1), call(np.moveaxis, C, [0, 1], [1, 2]), call(np.matrix_transpose, C),
    call(np.broadcast_to, V, (2, 3)), call(np.broadcast_to, np.array(2.0), 4), call(np.broadcast_arrays, V, A), call(np.squeeze, C[:1]),
    call(np.expand_dims, V, (0, 2)), call(np.flip, A), call(np.flip, A, 1), call(np.flipud, A), call(np.fliplr, A),
    *(call(np.rot90, A, k) for k in range(-1, 5)), call(np.rot90, C, 1, (2, 1)), call(np.roll, A, 2), call(np.roll, A, (1, -1), (0, 1)),
    call(np.tril, M), call(np.triu, M, 1), call(np.diagonal, C), call(np.diagonal, C, 1, 0, 2), call(np.diag, V), call(np.diag, V, -2),
    call(np.diag, M, 1), call(np.trace, M), call(np.trace, C, 0, 1, 2), call(np.atleast_1d, np.array(1.0)), call(np.atleast_2d, V),
    call(np.atleast_3d, A), call(np.atleast_3d, V), call(np.concatenate, [A, B]), call(np.concatenate, (A, B), axis=1),
    call(np.concatenate, [A, V], axis=None), call(np.stack, [A, B], axis=-1), call(np.vstack, [V, A]), call(np.hstack, [A, B]),
    call(np.hstack, [V, V]), call(np.dstack, [A, B]), call(np.column_stack, [V, M]),
    call(np.column_stack, V), call(np.column_stack, [V, V]), call(np.append, A, V), call(np.append, A, B, axis=0),
    call(np.split, A, 3, axis=1), call(np.split, V, [1]), call(np.array_split, V, 2), call(np.array_split, np.arange(8.0), 3),
    call(np.vsplit, A, 2), call(np.hsplit, A, 3), call(np.hsplit, V, 3), call(np.tile, V, 2), call(np.tile, A, (2, 1)), call(np.repeat, A, 2),
    call(np.repeat, A, 2, axis=1), call(np.repeat, A, [1, 0, 2], axis=1), call(np.pad, A, 1),
    call(np.pad, A, ((0, 1), (2, 0)), constant_values=3.0),
    *(call(np.pad, A, (1, 2), mode=mode) for mode in ("edge", "reflect", "symmetric", "wrap")), call(np.pad, V, 2, "edge"),
    call(np.meshgrid, V, np.arange(2.0)), call(np.meshgrid, V, np.arange(2.0), np.arange(4.0), indexing="ij"), call(np.meshgrid, V, V, sparse=True),
    call(np.where, A > 1, A, 0.0), call(np.where, A > 1), call(np.nonzero, A > 1), call(np.flatnonzero, A > 1), call(np.argwhere, A > 1),
    call(np.clip, A, 0.5, 1.5), call(np.clip, A, None, 1.0), call(np.clip, A, B, 1.5), call(np.nan_to_num, np.array([np.nan, np.inf, 1.0])),
    call(np.nan_to_num, np.array([np.nan, 1.0]), nan=3.0), call(np.round, A, 1), call(np.around, A), call(np.sinc, A - 1),
    call(np.angle, Z, deg=True), call(np.angle, Z), call(np.real, Z), call(np.imag, Z), call(np.real, A), call(np.copy, A), call(np.zeros_like, A),
    call(np.ones_like, A, dtype=np.float32), call(np.full_like, A, 2.0), call(np.zeros_like, A, shape=(2,)), call(np.ones_like, A, shape=4),
    call(np.take, A, [0, 2], axis=1), call(np.take, A, 4), call(np.take, A, np.array([[1, 0]]), 0),
    call(np.take_along_axis, A, np.array([[2], [0]]), 1), call(np.take_along_axis, A, np.array([5, 1]), None),
    call(np.compress, [True, False, True], A, axis=1), call(np.sort, A), call(np.sort, A, axis=0), call(np.sort, A, axis=None),
    call(np.argsort, A, axis=0), call(np.argsort, A, None, kind="stable"), call(np.searchsorted, np.arange(3.0), A),
    call(np.searchsorted, np.arange(3.0), A, side="right"), call(np.isin, A, B), call(np.unique, np.round(A)), call(np.isclose, A, B),
    call(np.allclose, A, A), call(np.array_equal, A, B), call(np.array_equal, A, V), call(np.isposinf, A), call(np.isneginf, A),
    call(np.isreal, A), call(np.iscomplex, A), call(np.real_if_close, A),
    call(np.array_equal, np.array([np.nan]), np.array([np.nan]), equal_nan=True), call(np.shape, A), call(np.ndim, A), call(np.size, A),
    call(np.size, A, 1), call(np.iscomplexobj, A), call(np.isrealobj, Z), call(np.result_type, A, np.float32), call(np.dot, A, V),
    call(np.dot, V, V), call(np.dot, A, 2.0), call(np.dot, A, np.ones((2, 3, 4))), call(np.inner, A, B), call(np.inner, V, V),
    call(np.inner, A, np.ones((2, 2, 3))), call(np.outer, A, V), call(np.vdot, Z, Z), call(np.vdot, A, B), call(np.kron, A, V), call(np.kron, V, M),
    call(np.cross, V, M), call(np.cross, M, V, axisa=0, axisc=0), call(np.tensordot, A, B, 2), call(np.tensordot, A, B, ([1], [1])),
    call(np.tensordot, A, C, 0), call(np.tensordot, A, C, axes=((1,), (0,))), call(np.tensordot, A, M, axes=(1, 0)), call(np.linalg.norm, A),
    call(np.linalg.norm, V, 3), call(np.linalg.norm, A, axis=1), call(np.linalg.norm, A, "nuc"), call(np.linalg.norm, C, 2, (0, 2)),
    call(np.linalg.norm, C, 1, (2, 0), True), call(np.linalg.norm, V, np.inf), call(np.linalg.norm, V, -np.inf), call(np.linalg.norm, V, 0),
    call(np.linalg.norm, Z), call(np.linalg.norm, C), call(np.linalg.vector_norm, A, axis=0, ord=1),
    call(np.linalg.vector_norm, C, axis=(0, 1), keepdims=True),
    *(call(np.linalg.matrix_norm, C, ord=ord, keepdims=True) for ord in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)), call(np.linalg.inv, M),
    call(np.linalg.det, M), call(np.linalg.slogdet, -M), call(np.linalg.solve, M, V), call(np.linalg.solve, M, M), call(np.linalg.cholesky, S),
    call(np.linalg.cholesky, S, upper=True), call(np.linalg.eigvalsh, S), call(np.linalg.eigvalsh, S, "U"), call(np.linalg.eigh, S),
    call(np.linalg.svd, A, full_matrices=False), call(np.linalg.svd, A), call(np.linalg.svd, A, compute_uv=False), call(np.linalg.svdvals, A),
    call(np.linalg.qr, A), call(np.linalg.qr, M, mode="r"), call(np.linalg.pinv, A), call(np.linalg.matrix_power, M, 5),
    call(np.linalg.matrix_power, M, -2), call(np.linalg.matrix_power, M, 0), call(np.linalg.multi_dot, [A, M, V]),
    call(np.linalg.multi_dot, [V, M, M]), call(np.linalg.trace, C, offset=1), call(np.linalg.diagonal, C), call(np.linalg.cross, V, V + 1),
    call(np.linalg.vecdot, A, B), call(np.linalg.outer, V, V), call(np.linalg.tensordot, A, B, axes=2), call(np.linalg.matrix_transpose, C),
    call(np.linalg.matmul, A, M),
    # Fourier transforms
    call(np.fft.fft, Z), call(np.fft.fft, A, 5), call(np.fft.fft, A, 2, 0, "ortho"), call(np.fft.ifft, Z, norm="forward"), call(np.fft.rfft, A),
    call(np.fft.rfft, A, 4, 0, "ortho"), call(np.fft.irfft, Z), call(np.fft.irfft, Z, 5), call(np.fft.irfft, Z, 4, 0), call(np.fft.hfft, Z),
    call(np.fft.hfft, Z, 3, norm="ortho"), call(np.fft.ihfft, A), call(np.fft.fftn, C), call(np.fft.fftn, C, (2, 3), (0, 2)),
    call(np.fft.ifftn, C, axes=(1, 2)), call(np.fft.rfftn, C), call(np.fft.rfftn, C, (4, 2), (1, 0)), call(np.fft.irfftn, C + 0j),
    call(np.fft.irfftn, C + 0j, (3, 3), (0, 1)), call(np.fft.fft2, C), call(np.fft.ifft2, C), call(np.fft.rfft2, C),
    call(np.fft.irfft2, C + 0j, (2, 3)), call(np.fft.fftshift, C), call(np.fft.fftshift, C, 0), call(np.fft.ifftshift, C, (0, 2)),
    # statistics
    *(call(np.quantile, C, [0.0, 0.3, 1.0], method=m) for m in ("linear", "lower", "higher", "midpoint", "nearest")), call(np.quantile, A, 0.25, 1),
    call(np.quantile, C, 0.5, (0, 2), keepdims=True), call(np.percentile, A, [[10.0, 50.0]], axis=0), call(np.quantile, NAN, 0.5, 1),
    call(np.nanquantile, NAN, [0.2, 0.9], 1), call(np.nanpercentile, NAN, 30.0), call(np.nanmedian, NAN, axis=1), call(np.nansum, NAN, 0),
    call(np.nanmean, NAN, axis=1, keepdims=True), call(np.cov, A), call(np.cov, A, B), call(np.cov, A, rowvar=False, bias=True), call(np.cov, V,
    V[::-1]),
    call(np.cov, Z), call(np.cov, A, aweights=np.array([1.0, 2.0, 3.0])), call(np.cov, A, fweights=np.array([1, 2, 3])), call(np.corrcoef, S),
    call(np.corrcoef, V, V[::-1]),
    # calculus
    call(np.gradient, M), call(np.gradient, A, axis=1), call(np.gradient, M, 0.5, np.array([0.0, 1.0, 3.0])), call(np.gradient, M, 2.0, edge_order=2),
    call(np.gradient, V, np.array([0.0, 0.5, 2.0]), edge_order=2), call(np.gradient, A, axis=0), call(np.trapezoid, A), call(np.trapezoid, A, B,
    axis=0),
    call(np.trapezoid, A, dx=0.5), call(np.trapezoid, A, V), call(np.interp, V, np.array([-0.5, 0.0, 0.7]), V), call(np.interp, A, [1.0], [3.0]),
    call(np.interp, A, [0.5, 1.0, 1.2], [3.0, 1.0, 2.0], left=-1.0, right=9.0), call(np.interp, 3 * A, [0.5, 2.5, 1.0], [3.0, 1.0, 2.0], period=2.0),
    call(np.linspace, V, 2.0, 4), call(np.linspace, V, V + 1, 3, False, axis=1), call(np.linspace, A, V, 1), call(np.linspace, V, 1.0, 5,
    retstep=True),
    call(np.convolve, V, np.arange(4.0)), *(call(np.convolve, *pair, mode) for pair in PAIRS for mode in ("full", "same", "valid")),
    *(call(np.correlate, *pair, mode) for pair in PAIRS for mode in ("full", "same", "valid")), call(np.select, [A > 1, A > 0.5], [A, B], 7.0),
    call(np.partition, np.arange(4.0)[::-1], (0, 1, 2, 3)), call(np.rollaxis, C, 2), call(np.rollaxis, C, 0, 3), call(np.rollaxis, C, 1, 1),
    call(np.dsplit, C, 2), call(sliding_window_view, A, 2, 1), call(sliding_window_view, A, (2, 2)), call(sliding_window_view, V, 3),
    call(np.i0, A), call(np.einsum, A, [0, 1], M, [1, 2], [0, 2]), call(np.einsum, M, [0, 0]),
    # matrices
    call(np.linalg.eigvals, TURN), call(np.linalg.eig, TURN), call(np.linalg.cond, M), call(np.linalg.cond, M, -2), call(np.linalg.cond, M, 1),
    call(np.linalg.lstsq, np.ones((4, 2)) + np.eye(4, 2), np.arange(4.0)), call(np.linalg.lstsq, M[:2], V[:2]),
    call(np.linalg.lstsq, M[:, :2], M[:, 1:]),
]  # fmt: skip

if hasattr(np, "cumulative_sum"):  # functions that numpy 2.0 has not
    CALLS += [
        call(np.astype, A, np.float32),
        call(np.cumulative_sum, V, include_initial=True),
        call(np.cumulative_prod, A, axis=1),
        call(np.unstack, A, axis=1),
    ]


def _same(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            _same(a, b)
    elif isinstance(expected, (np.dtype, bool)):
        assert found == expected
    else:
        value = plain(found)
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)
        assert np.shape(value) == np.shape(expected)
        assert np.asarray(value).dtype == np.asarray(expected).dtype or np.asarray(expected).dtype.kind in "iu"


def _traced(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Traced(value)
    return type(value)(_traced(v) for v in value) if isinstance(value, (list, tuple)) and any(isinstance(v, np.ndarray) for v in value) else value


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda i: f"{i}-{CALLS[i][0].__name__}")
def test_numpy_functions_agree_with_numpy(number: int) -> None:
    function, args, kwargs = CALLS[number]
    _same(function(*map(_traced, args), **kwargs), function(*args, **kwargs))


def test_every_answer_in_the_table_is_tried() -> None:
    tried = {function for function, _, _ in CALLS} | {np.einsum, np.empty_like, np.astype, np.bincount}
    assert {f"{f.__module__}.{f.__name__}" for f in set(FUNCTIONS) - tried} == set()


@pytest.mark.parametrize("ufunc", sorted(UFUNCS, key=lambda u: u.__name__), ids=lambda u: u.__name__)
def test_ufuncs_agree_with_numpy(ufunc: np.ufunc) -> None:
    bits = ufunc.__name__.startswith(("bitwise", "invert", "left_shift", "right_shift", "gcd", "lcm"))
    args = [np.array([3, 1, 2])] * ufunc.nin if bits else [np.array([0.2, 0.5, 0.8]) + (ufunc is np.arccosh) + i for i in range(ufunc.nin)]
    if ufunc is np.ldexp:
        args[1] = np.array([1, 0, 2])
    if ufunc is np.matmul:
        args = [M, M]
    expected = ufunc(*args)
    found = ufunc(*map(Traced, args))
    _same(found, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: np.sum(x, where=np.array([True, False, True])), lambda x: np.sum(x, out=np.zeros(())), lambda x: np.max(x, initial=3.0),
        lambda x: np.mean(x, where=False), lambda x: np.concatenate([x, x], out=np.zeros(6)), lambda x: np.clip(x, 0, 1, out=np.zeros(3)),
        lambda x: np.sort(x, order="f"), lambda x: np.einsum("i->", x, out=np.zeros(())), lambda x: np.median(x, overwrite_input=True),
        lambda x: np.take(x, [0], mode="wrap"), lambda x: np.cumsum(x, out=np.zeros(3)), lambda x: np.unique(x, return_index=True),
        lambda x: np.pad(x, 1, stat_length=3),
    ],
)  # fmt: skip
def test_keywords_without_meaning_are_refused(call: Callable[..., Any]) -> None:
    assert_raises(TypeError, "not supported", lambda: call(Traced(V)))


# einsum


EXPRESSIONS: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
    ("ij,jk->ik", ((2, 3), (3, 4))), ("ij,jk", ((2, 3), (3, 4))), ("ij", ((2, 3),)), ("ji", ((2, 3),)), ("ii", ((3, 3),)), ("ii->i", ((3, 3),)),
    ("iij->j", ((2, 2, 3),)), ("ij->", ((2, 3),)), ("i,i->", ((3,), (3,))), ("i,i", ((3,), (3,))), ("i,j->ji", ((2,), (3,))),
    ("bij,bjk->bik", ((2, 2, 3), (2, 3, 2))), ("...ij,...jk->...ik", ((4, 2, 3), (3, 2))), ("...i,...i", ((2, 3), (3,))), ("i...->...", ((2, 3),)),
    ("...", ((2, 3),)), ("ij,kj,k->i", ((2, 3), (4, 3), (4,))), ("a,ab,abc->abc", ((2,), (2, 3), (2, 3, 2))), ("ij,ij,ij->", ((2, 3),) * 3),
    ("ab,cd,ef->ace", ((2, 2),) * 3), ("ij,jk,kl,lm->im", ((2, 3), (3, 2), (2, 3), (3, 2))), (" i j , j k -> k i ", ((2, 3), (3, 4))),
    ("ij,jk->ik", ((1, 3), (3, 4))), ("ij,ij->ij", ((1, 3), (2, 1))), ("...a,...b->...ab", ((2, 1, 3), (4, 2))),
    (",i->i", ((), (3,))), (",->", ((), ())), (",,->", ((), (), ())),
    ("ijk,ikl->ijl", ((0, 2, 3), (0, 3, 2))), ("Ab,bA->", ((2, 3), (3, 2))), ("aab,bcc->ac", ((2, 2, 3), (3, 2, 2))), ("...ii->...", ((2, 3, 3),)),
]  # fmt: skip


@pytest.mark.parametrize(("subscripts", "shapes"), EXPRESSIONS)
def test_einsum(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    rng = np.random.default_rng(len(subscripts))
    operands = [rng.normal(size=shape) for shape in shapes]
    np.testing.assert_allclose(plain(np.einsum(subscripts, *map(Traced, operands))), np.einsum(subscripts, *operands), atol=1e-12)
    check(lambda *xs: (einsum(subscripts, *xs),), operands, rng, second=True, tolerance=1e-5)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "error"),
    [
        ("ij,jk", ((2, 3),), ArgumentError), ("ij", ((2,),), ArgumentError), ("i1", ((2, 3),), ArgumentError), ("i->j", ((2,),), ArgumentError),
        ("ij->ii", ((2, 2),), ArgumentError), ("ij,jk", ((2, 3), (4, 2)), ShapeError), ("ii", ((2, 3),), ShapeError),
        ("ijk...", ((2, 3),), ArgumentError), (3, ((2, 3),), ArgumentTypeError), ("i->->i", ((2,),), ArgumentError),
    ],
)  # fmt: skip
def test_einsum_says_what_is_wrong(subscripts: Any, shapes: tuple[tuple[int, ...], ...], error: type[Exception]) -> None:
    assert_raises(error, "einsum", lambda: einsum(subscripts, *(np.zeros(shape) for shape in shapes)))


# Derivatives of compositions.

COMPOSITIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "median of an even number": (lambda x: median(x), (np.array([3.0, 1.0, 2.0, 5.0]),)),
    "median over axes": (lambda x: median(x, axis=(0, 2)), (C,)),
    "clip between tensors": (lambda x, low, high: clip(x, low, high), (A, B - 0.05, B + 0.15)),
    "pad by reflection": (lambda x: pad(x, ((1, 1), (2, 0)), mode="reflect"), (A,)),
    "repeat by counts": (lambda x: repeat(x, [2, 0, 1], axis=1), (A,)),
    "concat flat": (lambda x, y: concat([x, y], axis=None), (A, V)),
    "index_add": (lambda x, v: index_add(x, np.array([1, 1]), v, axis=0), (A, B)),
    "scatter_add": (lambda x, v: scatter_add(x, np.array([[1, 1], [0, 2]]), v, axis=1), (A, B[:, :2])),
    "cumulative_sum": (lambda x: cumulative_sum(x, axis=1, include_initial=True), (A,)),
    "cumulative_prod": (lambda x: cumulative_prod(x, include_initial=True), (V,)),
    "tensordot": (lambda x, y: tensordot(x, y, axes=((1, 0), (0, 1))), (A, np.ones((3, 2, 2)))),
    "outer": (lambda x, y: outer(x, y), (A, V)),
    "trace": (lambda x: trace(x, offset=1), (C,)),
    "matrix_power": (lambda x: matrix_power(x, 3), (M,)),
    "negative matrix_power": (lambda x: matrix_power(x, -2), (M,)),
    "upper cholesky": (lambda x: cholesky(np.matmul(x, np.transpose(x)), upper=True), (M,)),
    "nuclear norm": (lambda x: matrix_norm(x, ord="nuc"), (A,)),
    "spectral norm": (lambda x: matrix_norm(x, ord=2, keepdims=True), (A,)),
    "least squares": (lambda x, y: np.matmul(np.linalg.pinv(x), y), (A.T, V)),
    "qr": (lambda x: np.square(qr(x).R), (M,)),
    "svd": (lambda x: np.square(svd(x, full_matrices=False).U), (A,)),
    "kron": (lambda x, y: np.kron(x, y), (A, V)),
    "dot": (lambda x, y: np.dot(x, y), (A, np.ones((2, 3, 2)))),
    "multi_dot": (lambda x, y, z: np.linalg.multi_dot([x, y, z]), (V, M, M.T)),
    "cross": (lambda x, y: np.cross(x, y, axisb=0), (M, V)),
    "diff": (lambda x: np.diff(x, 2), (A,)),
    "average": (lambda x, w: np.average(x, axis=1, weights=w), (A, B)),
    "ptp": (lambda x: np.ptp(x, axis=1), (A,)),
    "norm": (lambda x: np.linalg.norm(x, 1, (0, 2)), (C,)),
    "meshgrid": (lambda x, y: np.meshgrid(x, y)[0] * np.meshgrid(x, y)[1], (V, V)),
    "rot90": (lambda x: np.rot90(x, 3), (A,)),
    "indexing": (lambda x: x[np.array([0, 1, 1]), ..., 0] * x[..., 1], (C,)),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_have_the_right_derivatives(name: str) -> None:
    function, inputs = COMPOSITIONS[name]
    assert any(isinstance(x, Traced) for x in [function(*map(Traced, inputs))])
    with np.errstate(divide="ignore"):
        check(lambda *xs: (function(*map(_as_traced, xs)),), inputs, np.random.default_rng(7), second=True, tolerance=1e-5)


def _as_traced(x: Any) -> Any:
    return x if isinstance(x, Traced) else Traced(x)


# Small functions.


def test_basic_indices_are_told_from_advanced_ones() -> None:
    assert all(map(is_basic, (1, np.int64(1), slice(None), None, Ellipsis, (1, None, slice(0, 2)), ())))
    assert not any(map(is_basic, (np.array(1), [0], True, np.bool_(True), (1, [0]), (np.array([1]),))))


@pytest.mark.parametrize("descending", [False, True])
def test_sorting_is_stable_in_both_directions(descending: bool) -> None:
    x = np.array([2.0, 1.0, 2.0, 1.0])
    order = ROWS["argsort"](x, descending=descending)
    np.testing.assert_array_equal(order, [0, 2, 1, 3] if descending else [1, 3, 0, 2])
    np.testing.assert_array_equal(ROWS["sort"](x, descending=descending), x[order])
    values, indices = ROWS["topk"](x, k=3, largest=descending)
    np.testing.assert_array_equal(values, x[order][:3])
    np.testing.assert_array_equal(x[indices], values)
    assert len(set(indices.tolist())) == 3
    assert_raises(ValueError, "topk", lambda: ROWS["topk"](x, k=5))


def test_what_cannot_be_differentiated_is_refused() -> None:
    assert_raises(ArgumentError, "reduced", lambda: qr(np.ones((3, 2)), mode="complete"))
    assert_raises(ArgumentError, "mode", lambda: qr(np.ones((3, 2)), mode="raw"))
    assert_raises(ShapeError, "cross", lambda: ROWS["cross"](np.ones(2), np.ones(2)))
    assert_raises(ValueError, "gelu", lambda: ROWS["gelu"](np.ones(2), approximate="erf"))
    assert_raises(ValueError, "matrix_norm", matrix_norm, M, ord=3)
    assert_raises(ValueError, "cumsum", cumulative_sum, M)
    assert_raises(ValueError, "pad", pad, V, 1, mode="mean")
    assert_raises(ValueError, "split", lambda: np.split(Traced(V), 2))
    assert_raises(ValueError, "where", lambda: np.where(Traced(V > 0), 1.0))
