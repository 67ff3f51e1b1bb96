"""numpy's and PyTorch's functions beyond the standard: values as numpy (or arithmetic) gives them, and gradients by finite differences."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.array_functions import public as F
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError, ShapeError
from tests.support import assert_raises

rng = np.random.default_rng(0)
A = rng.uniform(0.2, 1.8, (3, 4))
B = rng.uniform(0.2, 1.8, (3, 4))
C = rng.uniform(-1.0, 1.0, (2, 3, 4))
V = np.array([0.3, 1.7, 1.1, 0.6])
M = rng.uniform(-0.3, 0.3, (3, 3)) + np.diag([1.0, 2.0, 3.0])
N = np.array([2, 0, 2, 1])
NAN = np.where(A > 1.4, np.nan, A)

Case = tuple[Callable[..., Any], tuple[Any, ...], Any]


def sparse(n: int, offset: int, v: Any) -> Any:
    out = np.zeros((*v.shape[:-1], n, n))
    for i in range(v.shape[-1]):
        out[..., i + max(-offset, 0), i + max(offset, 0)] = v[..., i]
    return out


#: name -> calls: a function of Tensors, the arrays it is given, and the values that are expected
CASES: dict[str, list[Case]] = {
    "var_mean": [(lambda x: F.var_mean(x, 1), (A,), [A.var(1, ddof=1), A.mean(1)]),
                 (lambda x: F.var_mean(x, dim=0, unbiased=False, keepdim=True), (A,), [A.var(0, keepdims=True), A.mean(0, keepdims=True)])],
    "std_mean": [(F.std_mean, (A,), [A.std(ddof=1), A.mean()])],
    "take_along_dim": [(lambda x: F.take_along_dim(x, N[:, None] % 3, dim=0), (A,), np.take_along_axis(A, N[:, None] % 3, 0)),
                       (lambda x: F.take_along_dim(x, N), (A,), A.reshape(-1)[N])],
    "index_add": [(lambda x, y: F.index_add(x, 1, [0, 2], y[:, :2], alpha=2), (A, B), A + 2 * np.stack([B[:, 0], 0 * V[:3], B[:, 1], 0 * V[:3]], 1)),
                  (lambda x, y: F.index_add(x, [2, 2], y[:2]), (A, B), A + np.stack([0 * V, 0 * V, B[0] + B[1]])),
                  (lambda x, y: x.index_add(dim=0, index=[1], source=y[:1], alpha=-1), (A, B), A - np.stack([0 * V, B[0], 0 * V]))],
    "transpose": [(lambda x: F.transpose(x, 0, 1), (A,), A.T), (lambda x: F.transpose(x, -1, 0), (C,), C.swapaxes(0, 2)),
                  (lambda x: F.transpose(x, dim0=0, dim1=1), (C,), C.swapaxes(0, 1))],
    "ravel": [(F.ravel, (A,), A.ravel())],
    "masked_fill": [(lambda x: F.masked_fill(x, A > 1, 0.5), (A,), np.where(A > 1, 0.5, A))],
    "var": [(lambda x: x.var(ddof=1), (A,), A.var(ddof=1)), (lambda x: F.std(x, 0, ddof=1), (A,), A.std(0, ddof=1))],
    "append": [(lambda x, y: F.append(x, y), (A, V), np.append(A, V)), (lambda x, y: F.append(x, y, axis=0), (A, B), np.append(A, B, 0))],
    "atleast_1d": [(F.atleast_1d, (np.array(2.0),), np.array([2.0]))],
    "atleast_2d": [(F.atleast_2d, (V,), V[None])],
    "atleast_3d": [(F.atleast_3d, (V,), V[None, :, None])],
    "block_diag": [(F.block_diag, (M, V, A), np.block([
        [M, np.zeros((3, 8))], [np.zeros((1, 3)), V[None], np.zeros((1, 4))], [np.zeros((3, 7)), A]]))],
    "cartesian_prod": [(F.cartesian_prod, (V, A[0], B[0]), np.array(list(itertools.product(V, A[0], B[0])))), (F.cartesian_prod, (V,), V)],
    "chunk": [(lambda x: F.chunk(x, 3, dim=1), (A,), [A[:, :2], A[:, 2:]])],
    "column_stack": [(lambda x, y: F.column_stack([x, y]), (V, A.T), np.column_stack([V, A.T]))],
    "diag_embed": [(F.diag_embed, (A,), sparse(4, 0, A)), (lambda x: F.diag_embed(x, 2), (A,), sparse(6, 2, A)),
                   (lambda x: F.diag_embed(x, -1, 0, 1), (V,), sparse(5, -1, V))],
    "diagflat": [(F.diagflat, (A,), np.diagflat(A)), (lambda x: F.diagflat(x, 1), (V,), np.diagflat(V, 1))],
    "dsplit": [(lambda x: F.dsplit(x, 2), (C,), np.dsplit(C, 2))],
    "dstack": [(lambda x, y: F.dstack([x, y]), (A, B), np.dstack([A, B]))],
    "fliplr": [(F.fliplr, (A,), A[:, ::-1])],
    "flipud": [(F.flipud, (A,), A[::-1])],
    "hsplit": [(lambda x: F.hsplit(x, 2), (A,), np.hsplit(A, 2)), (lambda x: F.hsplit(x, [1]), (V,), np.hsplit(V, [1]))],
    "hstack": [(lambda x, y: F.hstack([x, y]), (A, B), np.hstack([A, B])), (lambda x, y: F.hstack((x, y)), (V, V), np.hstack([V, V]))],
    "narrow": [(lambda x: F.narrow(x, 1, -2, 2), (A,), A[:, 2:])],
    "partition": [(lambda x: F.partition(x, 2), (V,), np.sort(V))],
    "rollaxis": [(lambda x: F.rollaxis(x, 2), (C,), np.rollaxis(C, 2))],
    "rot90": [(lambda x: F.rot90(x, 3), (A,), np.rot90(A, 3))],
    "select": [(lambda x, y: F.select([x > 1, x > 0.6], [x, y], 0.5), (A, B), np.select([A > 1, A > 0.6], [A, B], 0.5))],
    "sliding_window_view": [(lambda x: F.sliding_window_view(x, (2, 3)), (A,), np.lib.stride_tricks.sliding_window_view(A, (2, 3)))],
    "tensor_split": [(lambda x: F.tensor_split(x, 3), (V,), np.array_split(V, 3)), (lambda x: F.tensor_split(x, (1, 3), dim=1), (A,), np.split(A,
    [1, 3], 1)), (lambda x: F.tensor_split(x, [3, 1]), (V,), np.split(V, [3, 1])),
    (lambda x: np.split(x, [-1, 2], 1), (A,), np.split(A, [-1, 2], 1))],
    "unflatten": [(lambda x: F.unflatten(x, 1, (2, -1)), (A,), A.reshape(3, 2, 2))],
    "unfold": [(lambda x: F.unfold(x, 1, 2, 2), (A,), A.reshape(3, 2, 2)), (lambda x: x.unfold(0, 3, 1), (V,), np.stack([V[:3], V[1:]]))],
    "vsplit": [(lambda x: F.vsplit(x, 3), (A,), np.vsplit(A, 3))],
    "vstack": [(lambda x, y: F.vstack([x, y]), (A, V), np.vstack([A, V]))],
    "addbmm": [(lambda x, y, z: F.addbmm(x, y, z, beta=2, alpha=3), (M, C, C.swapaxes(1, 2)), 2 * M + 3 * (C @ C.swapaxes(1, 2)).sum(0))],
    "addcdiv": [(lambda x, y, z: F.addcdiv(x, y, z, value=2), (A, B, V), A + 2 * B / V)],
    "addcmul": [(lambda x, y, z: F.addcmul(x, y, z, value=2), (A, B, V), A + 2 * B * V)],
    "addmm": [(lambda x, y, z: F.addmm(x, y, z, beta=0.5, alpha=2), (A, M, B), 0.5 * A + 2 * M @ B)],
    "addmv": [(lambda x, y, z: F.addmv(x, y, z), (M[0], A, V), M[0] + A @ V)],
    "addr": [(lambda x, y, z: F.addr(x, y, z, alpha=2), (A, M[0], V), A + 2 * np.outer(M[0], V))],
    "baddbmm": [(lambda x, y, z: F.baddbmm(x, y, z), (M, C, C.swapaxes(1, 2)), M + C @ C.swapaxes(1, 2))],
    "lerp": [(lambda x, y: F.lerp(x, y, 0.3), (A, B), A + 0.3 * (B - A))],
    "aminmax": [(lambda x: F.aminmax(x, dim=1), (A,), [A.min(1), A.max(1)])],
    "bincount": [(lambda w: F.bincount(N, w), (V,), np.bincount(N, V)), (lambda: F.bincount(N, minlength=6), (), np.bincount(N, minlength=6))],
    "cdist": [(F.cdist, (A, B), np.linalg.norm(A[:, None] - B[None], axis=-1)), (lambda x, y: F.cdist(x, y, p=1), (A, B), np.abs(A[:,
    None] - B[None]).sum(-1))],
    "corrcoef": [(F.corrcoef, (A,), np.corrcoef(A))],
    "cov": [(F.cov, (A,), np.cov(A)), (lambda x, w: F.cov(x, correction=0, aweights=w), (A, V), np.cov(A, ddof=0, aweights=V)),
            (lambda x: F.cov(x, fweights=N + 1), (A,), np.cov(A, fweights=N + 1)),
            (lambda x: np.cov(x, aweights=[1.5, 2, 3, 1]), (A,), np.cov(A, aweights=[1.5, 2, 3, 1])),
            (lambda: F.cov(N, aweights=[0.5, 1, 0.5, 1]), (), np.cov(N, aweights=[0.5, 1, 0.5, 1]))],
    "cumulative_trapezoid": [(lambda y: F.cumulative_trapezoid(y, dx=0.5, dim=0), (A,), np.cumsum((A[1:] + A[:-1]) * 0.25, 0))],
    "dist": [(F.dist, (A, B), np.linalg.norm(A - B))],
    "gradient": [(lambda x: F.gradient(x, axis=1), (A,), np.gradient(A, axis=1)), (lambda x, h: F.gradient(x, h, axis=1, edge_order=2), (A,
    np.cumsum(V)),
                 np.gradient(A, np.cumsum(V), axis=1, edge_order=2))],
    "histc": [(lambda: F.histc(A, 4, 0, 2), (), np.histogram(A, 4, (0, 2))[0].astype(float))],
    "interp": [(F.interp, (np.array([-0.5, 0.4, 1.2]), np.array([0.0, 1.0, 3.0]), M[0]), np.interp([-0.5, 0.4, 1.2], [0.0, 1.0, 3.0], M[0]))],
    "nanmean": [(lambda x: F.nanmean(x, 1, True), (NAN,), np.nanmean(NAN, 1, keepdims=True))],
    "nanmedian": [(lambda x: F.nanmedian(x, dim=1), (NAN,), np.nanmedian(NAN, 1))],
    "nanquantile": [(lambda x: F.nanquantile(x, [0.1, 0.7], 1), (NAN,), np.nanquantile(NAN, [0.1, 0.7], 1))],
    "nansum": [(lambda x: F.nansum(x, 0), (NAN,), np.nansum(NAN, 0))],
    "percentile": [(lambda x: F.percentile(x, 30, 0), (A,), np.percentile(A, 30, 0))],
    "quantile": [(lambda x: F.quantile(x, [0.1, 0.5], dim=1, keepdim=True), (A,), np.quantile(A, [0.1, 0.5], 1, keepdims=True)),
                 (lambda x: F.quantile(x, 0.4), (A,), np.quantile(A, 0.4))],
    "trapezoid": [(F.trapezoid, (A, B), np.trapezoid(A, B)), (lambda y: F.trapezoid(y, dx=2.0, axis=0), (A,), np.trapezoid(A, dx=2.0, axis=0))],
    "fmax": [(F.fmax, (A, B), np.fmax(A, B))], "fmin": [(F.fmin, (A, B), np.fmin(A, B))],
    "frac": [(F.frac, (A * 3 - 4,), np.fmod(A * 3 - 4, 1))],
    "heaviside": [(lambda x: F.heaviside(x - 1, 0.5), (A,), np.heaviside(A - 1, 0.5))],
    "logaddexp2": [(F.logaddexp2, (A, B), np.logaddexp2(A, B))],
    "ldexp": [(lambda x: F.ldexp(x, N), (V,), V * 2.0**N), (lambda x: F.ldexp(x, 3), (V,), V * 8), (F.ldexp, (V, V), V * 2.0**V),
              (lambda x: F.ldexp(x, -0.5), (V,), V * 2.0**-0.5), (lambda x: np.ldexp(x, 3), (V,), V * 8)],
    "float_power": [(F.float_power, (A, B), np.float_power(A, B))],
    "gcd": [(lambda: F.gcd(N * 6, 4), (), np.gcd(N * 6, 4))], "lcm": [(lambda: F.lcm(N, 3), (), np.lcm(N, 3))],
    "isposinf": [(lambda: F.isposinf([np.inf, -np.inf, 1.0]), (), np.array([True, False, False]))],
    "isneginf": [(lambda: F.isneginf([np.inf, -np.inf, 1.0]), (), np.array([False, True, False]))],
    "isreal": [(lambda: F.isreal(np.array([1 + 1j, 2])), (), np.array([False, True]))],
    "vdot": [(F.vdot, (A, B), np.vdot(A, B))],
    "convolve": [(F.convolve, (V, M[0]), np.convolve(V, M[0])), (lambda x, y: F.convolve(x, y, "same"), (V, M[0]), np.convolve(V, M[0], "same"))],
    "correlate": [(lambda x, y: F.correlate(x, y, "full"), (V, M[0]), np.correlate(V, M[0], "full"))],
    "unique": [(lambda: F.unique(N, return_inverse=True, return_counts=True), (), np.unique(N, return_inverse=True, return_counts=True))],
    "argwhere": [(lambda: F.argwhere(A > 1), (), np.argwhere(A > 1))],
    "masked_select": [(lambda x: F.masked_select(x, V > 1), (A,), A[:, V > 1].ravel())],
    "index_copy": [(lambda x, y: F.index_copy(x, 1, [2, 0], y), (A, B[:, :2]), np.stack([B[:, 1], A[:, 1], B[:, 0], A[:, 3]], 1))],
    "index_fill": [(lambda x: F.index_fill(x, 1, [2, 0], 5.0), (A,), np.stack([0 * A[:, 1] + 5, A[:, 1], 0 * A[:, 1] + 5, A[:, 3]], 1))],
    "bucketize": [(lambda: F.bucketize(V, np.array([0.5, 1.1])), (), np.digitize(V, [0.5, 1.1], right=True)),
                  (lambda: F.bucketize(V, np.array([0.5, 1.1]), right=True), (), np.digitize(V, [0.5, 1.1]))],
    "kthvalue": [(lambda x: F.kthvalue(x, 2, dim=1)[0], (A,), np.sort(A, 1)[:, 1]), (lambda x: F.kthvalue(x, 1, 0, True)[1], (A,),
    A.argmin(0)[None])],
    "msort": [(F.msort, (A,), np.sort(A, 0))],
    "logspace": [(lambda: F.logspace(0, 2, steps=3, dtype=np.float64), (), np.array([1.0, 10.0, 100.0]))],
    "index_select": [(lambda x: F.index_select(x, 1, [2, 2]), (A,), A[:, [2, 2]])],
    "t": [(F.t, (A,), A.T), (F.t, (V,), V)],
    "complex": [(F.complex, (A, B), A + 1j * B)], "polar": [(F.polar, (A, B), A * np.exp(1j * B))],
    "einsum": [(lambda x, y: F.einsum("ij,jk->ik", [x, y]), (M, A), M @ A), (lambda x, y: F.einsum(x, [0, 1], y, [1, 2], [2, 0]), (M, A), (M @ A).T)],
    "add": [(lambda x, y: F.add(x, y, alpha=3), (A, V), A + 3 * V)], "subtract": [(lambda x, y: F.sub(x, y, alpha=3), (A, V), A - 3 * V)],
    "divide": [(lambda x: F.div(x * 10 - 9, 3.0, rounding_mode="trunc"), (A,), np.trunc((A * 10 - 9) / 3)),
               (lambda x: F.div(x * 10 - 9, 3.0, rounding_mode="floor"), (A,), np.floor((A * 10 - 9) / 3)),
               (lambda: F.div(np.array([-7, 7]), 2, rounding_mode="trunc"), (), np.array([-3, 3]))],
    "linalg.cholesky_solve": [(lambda x, y: F.linalg.cholesky_solve(x, F.linalg.cholesky(y @ y.T)), (A, M), np.linalg.solve(M @ M.T, A)),
                              (lambda x, y: F.linalg.cholesky_solve(x, F.linalg.cholesky(y @ y.T, upper=True), upper=True), (A, M),
                                  np.linalg.solve(M @ M.T, A))],
    "linalg.cond": [(F.linalg.cond, (M,), np.linalg.cond(M))],
    "linalg.eig": [(lambda x: F.abs(F.linalg.eig(x).eigenvectors).sum(), (M,), np.abs(np.linalg.eig(M)[1]).sum())],
    "linalg.eigvals": [(lambda x: (F.linalg.eigvals(x) ** 2).sum(), (M,), (np.linalg.eigvals(M) ** 2 + 0j).sum())],
    "linalg.expm": [(F.linalg.expm, (np.diag(V),), np.diag(np.exp(V))), (F.linalg.matrix_exp, (np.array([[0.0, 2.0], [-2.0, 0.0]]),),
                    np.array([[math.cos(2), math.sin(2)], [-math.sin(2), math.cos(2)]]))],
    "linalg.logdet": [(F.linalg.logdet, (M,), np.log(np.linalg.det(M)))],
    "linalg.lstsq": [(lambda x, y: F.linalg.lstsq(x, y).solution, (A[:, :2], B), np.linalg.lstsq(A[:, :2], B, rcond=None)[0])],
    "linalg.solve_triangular": [
        (lambda x, y: F.linalg.solve_triangular(x, y, upper=True), (M, A), np.linalg.solve(np.triu(M), A)),
        (lambda x, y: F.linalg.solve_triangular(x, y, upper=False, unitriangular=True), (M, A), np.linalg.solve(np.tril(M, -1) + np.eye(3), A)),
        (lambda x, y: F.linalg.solve_triangular(x, y, upper=False, left=False), (M, A.T), A.T @ np.linalg.inv(np.tril(M))),
    ],
    **{f"fft.{name}": [(lambda x, name=name: getattr(F.fft, name)(x), (C[0],), getattr(np.fft, name)(C[0]))]
       for name in "fft fft2 fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftn".split()},
    "fft.fftfreq": [(lambda: F.fft.fftfreq(5, d=0.5, dtype=np.float64), (), np.fft.fftfreq(5, 0.5)), (lambda: F.fft.fftfreq(4, dtype=np.float64),
    (), np.fft.fftfreq(4))],
    "fft.rfftfreq": [(lambda: F.fft.rfftfreq(5, d=0.5, dtype=np.float64), (), np.fft.rfftfreq(5, 0.5))],
}  # fmt: skip
#: these are checked elsewhere: draws, questions, and `special` against SciPy
ELSEWHERE = frozenset("bernoulli manual_seed normal rand rand_like randint randint_like randn randn_like randperm".split())
ELSEWHERE |= frozenset("is_tensor is_floating_point is_complex numel inference_mode array fft special".split())

FLAT = [(name, i) for name, cases in CASES.items() for i in range(len(cases))]


def flatten(result: Any) -> list[Any]:
    return [leaf for part in result for leaf in flatten(part)] if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize(("name", "number"), FLAT)
async def test_values_and_gradients(name: str, number: int) -> None:
    function, arrays, expected = CASES[name][number]
    inputs = tuple(ag.tensor(array, requires_grad=True) for array in arrays)
    for mine, theirs in zip(flatten(function(*inputs)), flatten(expected), strict=True):
        value = np.asarray(theirs)
        assert isinstance(mine, ag.Tensor) and mine.shape == value.shape
        np.testing.assert_allclose(mine.detach().numpy(), value, rtol=1e-12, atol=1e-12)
        assert mine.dtype == value.dtype

    def smooth(*tensors: Any) -> Any:
        return tuple(part for x in flatten(function(*tensors)) if x.dtype.kind in "fc" for part in ((x.real,
            x.imag) if x.dtype.kind == "c" else (x,)))

    plain = [np.isfinite(a).all() for a in arrays]
    if inputs and all(plain) and any(x.requires_grad for x in smooth(*inputs)):
        assert await ag.gradcheck(smooth, inputs)


async def test_gradients_pass_by_nan() -> None:
    x = ag.tensor([[1.0, np.nan, 4.0], [2.0, 3.0, np.nan]], requires_grad=True)
    await (F.nansum(x) + F.nanmean(x, 1).sum() + F.nanmedian(x, 1).sum()).backward()
    assert np.isfinite(x.grad.numpy()[np.isfinite(x.detach().numpy())]).all()
    assert x.grad.numpy()[0, 0] == 1 + 0.5 + 0.5


def test_searchsorted_as_a_method() -> None:
    assert ag.tensor([1.0, 3.0]).searchsorted(ag.tensor([0.5, 3.0]), "right").tolist() == [0, 2]


def test_aliases_are_the_functions() -> None:
    pairs = (
        "cat concat|permute permute_dims|unsqueeze expand_dims|unbind unstack|movedim moveaxis|clamp clip|mul multiply|eq equal|mm matmul|"
        "concatenate concat|power pow|absolute abs|arctan2 atan2|invert bitwise_invert|amax max|ger outer|as_tensor asarray"
    )
    for pair in pairs.split("|"):
        alias, name = pair.split()
        assert inspect.unwrap(getattr(ag, alias)) is inspect.unwrap(getattr(ag, name)), pair
    assert ag.long == np.int64 and ag.float == np.float32 and ag.double == np.float64 and ag.half == np.float16 and ag.int == np.int32
    assert ag.is_tensor(ag.ones(2)) and not ag.is_tensor(np.ones(2)) and ag.numel(A) == 12
    assert ag.is_floating_point(ag.ones(2)) and ag.is_complex(np.ones(2, complex)) and not ag.is_complex(A)
    with ag.inference_mode():
        assert not (ag.ones(2, requires_grad=True) * 2).requires_grad


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: F.quantile(A, 1.5), ArgumentError), (lambda: F.quantile(A, 0.5, method="median"), ArgumentError),
        (lambda: F.quantile(np.ones(0), 0.5), ArgumentError), (lambda: F.block_diag(), ArgumentError), (lambda: F.select([], []), ArgumentError),
        (lambda: F.chunk(A, 0), ArgumentError), (lambda: F.narrow(A, 1, 3, 2), IndexRangeError), (lambda: F.unfold(A, 1, 5), ShapeError),
        (lambda: F.convolve(A, V), ShapeError), (lambda: F.convolve(V, V, "most"), ShapeError), (lambda: F.interp(V, [1.0, 2.0], [1.0]), ShapeError),
        (lambda: F.gradient(A, 1.0, 2.0, 3.0), ArgumentError), (lambda: F.gradient(np.ones((1, 2)), axis=0), ShapeError),
        (lambda: F.div(A, B, rounding_mode="up"), ArgumentError), (lambda: F.histc(A, 0), ArgumentError), (lambda: F.t(C), ShapeError),
        (lambda: F.special.polygamma(-1, A), ArgumentError), (lambda: F.special.gammaln(A + 1j), ArgumentTypeError),
        (lambda: F.special.j0(A + 1j), ArgumentTypeError), (lambda: F.special.erfinv(A + 1j), ArgumentTypeError),
        (lambda: F.fft.fft(N), ArgumentTypeError), (lambda: F.fft.rfft(A + 1j), ArgumentTypeError), (lambda: F.fft.fft(A, n=0), ArgumentError),
        (lambda: F.fft.fft(A, norm="unit"), ArgumentError), (lambda: F.fft.fftn(A, s=(1,), axes=(0, 1)), ArgumentError),
        (lambda: F.fft.fftfreq(0), ArgumentError), (lambda: F.linalg.lstsq(A, V), ShapeError), (lambda: F.linalg.expm(A), ShapeError),
        (lambda: F.randint(0, 5), ArgumentError), (lambda: F.bernoulli(N), ArgumentTypeError), (lambda: F.normal(0.0, -1.0), ArgumentError),
        *((lambda name=name, given=given: F.cov(A, **{name: given}), ArgumentError) for name in ("fweights", "aweights")
          for given in ([1, 2], [[1, 2, 3, 4]], [-1, 1, 1, 1])), (lambda: F.cov(A, fweights=[1.5, 1, 1, 1]), ArgumentError),
        (lambda: F.sum(A, axis=1, dim=1), ArgumentTypeError), (lambda: F.sum(A, 1, dim=1), ArgumentTypeError),
    ],
)  # fmt: skip
def test_wrong_arguments_end_in_a_typed_error(call: Callable[[], Any], error: type[Exception]) -> None:
    assert_raises(error, None, call)


def test_a_complete_qr_of_a_tall_matrix_has_values_and_no_derivative() -> None:
    x = ag.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    q, r = ag.linalg.qr(x, mode="complete")
    assert q.shape == (3, 3) and r.shape == (3, 2)
    np.testing.assert_allclose((q @ r).numpy(), x.numpy())
    assert_raises(ag.errors.NoRuleError, "additional columns are arbitrary", lambda: ag.linalg.qr(x.requires_grad_(), mode="complete"))


@pytest.mark.parametrize(
    ("axis", "call"),
    [
        (3, lambda: F.median(A, 3)), (3, lambda: F.nanmedian(A, 3)), (7, lambda: F.quantile(A, 0.5, 7)), (3, lambda: ag.nn.functional.glu(A, dim=3)),
        (5, lambda: ag.split(A, 2, 5)), (0, lambda: ag.split(1.0, 2)), (5, lambda: F.tensor_split(A, 2, 5)), (2, lambda: F.fft.fftshift(V, axes=2)),
        (2, lambda: F.fft.ifftshift(V, axes=2)), (-1, lambda: F.fft.irfft(1.0)), (5, lambda: F.flatten(A, 5)), (5, lambda: ag.permute(A, (5, 0))),
        (5, lambda: F.repeat(A, N, axis=5)), (2, lambda: F.index_add(A, 2, N, A)), (2, lambda: F.index_copy(A, 2, N, A)),
    ],
)  # fmt: skip
def test_an_axis_that_is_not_there_is_named(axis: int, call: Callable[[], Any]) -> None:
    assert_raises(IndexRangeError, rf"axis {axis} of an array of \d axes: expected", call)


BIG = 10**30


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: F.tensordot(1.0, V), ShapeError, "axes=2, expected 0 to 0"),
        (lambda: F.hstack([]), ArgumentError, r"hstack\(\): expected at least one"),
        (lambda: F.vstack([]), ArgumentError, "at least one"), (lambda: F.dstack([]), ArgumentError, "at least one"),
        (lambda: F.column_stack([]), ArgumentError, "at least one"), (lambda: ag.broadcast_tensors(A, V[:2]), ShapeError, r"\[3, 4\], \[2\] do not"),
        (lambda: F.masked_select(A, V[:2] > 0), ShapeError, "do not broadcast"), (lambda: F.repeat(V, [1, 2]), ShapeError, "expected 4 ints"),
        (lambda: F.repeat(V, [1, 2, -1, 0]), ShapeError, "at least 0"), (lambda: F.bincount([-1]), ArgumentError, "integers from 0 on"),
        (lambda: F.bincount(V), ArgumentError, "a vector of integers"), (lambda: F.bincount([[1]]), ArgumentError, "a vector of integers"),
        (lambda: F.bincount([1, 2], V), ShapeError, "one weight each"), (lambda: F.finfo(ag.int32), ArgumentTypeError, "expected a floating"),
        (lambda: F.iinfo(ag.float32), ArgumentTypeError, "expected an integer"), (lambda: F.zeros(2, dtype="nosuch"), ArgumentTypeError, "nosuch"),
        (lambda: F.arange(0, math.nan), ArgumentError, "Expected finite"), (lambda: F.arange(0, math.inf), ArgumentError, "Expected finite"),
        (lambda: F.arange(3, dtype="nosuch"), ArgumentTypeError, "nosuch"), (lambda: F.logical_xor(A, None), ArgumentTypeError, "is None"),
        (lambda: F.logical_and(None, A), ArgumentTypeError, "is None"), (lambda: F.abs(BIG), ArgumentError, "100 bits does not fit dtype int64"),
        (lambda: F.full((2,), BIG), ArgumentError, "that the value fits"), (lambda: ag.tensor([1]) + BIG, ArgumentError, "does not fit dtype int64"),
        (lambda: ag.tensor([1]) < BIG, ArgumentError, "does not fit dtype int64"), (lambda: ag.tensor(V) * 10**400, ArgumentError, "does not fit"),
        (lambda: F.full_like(N, BIG), ArgumentError, "too large"), (lambda: F.clip(ag.tensor(N), 0, BIG), ArgumentError, "too large"),
        (lambda: F.index_add(1.0, [0, 1], V[:2]), IndexRangeError, "place 0 only"),
        (lambda: F.index_add(V, N, A[:, :1]), ShapeError, r"slices of shape \[3, 1\] into \[4\], expected \[4\]"),
    ],
)  # fmt: skip
def test_errors_of_numpy_become_those_of_the_package(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    assert_raises(error, text, call)


async def test_slices_are_added_at_indices_with_broadcasting_and_its_gradient() -> None:
    for shape in ((4, 2), (1, 2), (2,), (4, 1)):
        x, s = ag.tensor(np.ones((3, 2)), requires_grad=True), ag.tensor(np.ones(shape), requires_grad=True)
        y = F.index_add(x, [2, 0, 2, 1], s, axis=0)
        np.testing.assert_array_equal(y.detach().numpy(), [[2, 2], [2, 2], [3, 3]])
        await (y * y).sum().backward()
        assert s.grad is not None
        wide = np.array([[6, 6], [4, 4], [6, 6], [4, 4]])
        expected = wide if shape == (4, 2) else wide.sum(1, keepdims=True) if shape == (4, 1) else wide.sum(0).reshape(shape)
        np.testing.assert_array_equal(s.grad.numpy(), expected)
