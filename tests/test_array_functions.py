"""The public array functions: names and signatures of the standard, values as numpy has them, Tensors always, gradients through compositions."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.array_functions import public as F
from aiograd.errors import ArgumentError, ArgumentTypeError, DeviceError, ShapeError
from tests import test_everyday_functions as everyday
from tests.support import assert_raises
from tests.tolerance import assert_close
from tests.toy_device import ToyDevice

PUBLIC = [name for name in dir(F) if not name.startswith(("_", "@"))]  # "@": pytest adds these to modules of an installed plugin
X = np.array([[0.3, -1.2, 2.5], [0.9, 0.1, -0.4]])
Y = np.array([[1.1, 0.7, -0.6], [2.0, -1.5, 0.2]])
P = np.abs(X) + 0.5
U = np.clip(X, -0.9, 0.9)
B = np.array([[True, False, True], [False, False, True]])
B2 = np.array([[True, True, False], [False, True, True]])
I1, I2 = np.array([5, 9, 12]), np.array([3, 1, 2])
SQUARE = np.array([[2.0, 0.5, 0.1], [0.5, 1.5, -0.3], [0.1, -0.3, 1.0]])
Z = np.array([1 + 2j, -0.5 - 1j])


# ---- the standard's names and signatures

#: the functions of the Python Array API standard 2024.12, with the parameters it gives them (without annotations)
STANDARD = """
arange(start, /, stop=None, step=1, *, dtype=None, device=None); empty(shape, *, dtype=None, device=None);
empty_like(x, /, *, dtype=None, device=None); eye(n_rows, n_cols=None, /, *, k=0, dtype=None, device=None);
full(shape, fill_value, *, dtype=None, device=None); full_like(x, /, fill_value, *, dtype=None, device=None);
linspace(start, stop, /, num, *, dtype=None, device=None, endpoint=True); meshgrid(*arrays, indexing='xy'); ones(shape, *, dtype=None, device=None);
ones_like(x, /, *, dtype=None, device=None); tril(x, /, *, k=0); triu(x, /, *, k=0); zeros(shape, *, dtype=None, device=None);
zeros_like(x, /, *, dtype=None, device=None); astype(x, dtype, /, *, copy=True, device=None); can_cast(from_, to, /); finfo(type, /);
iinfo(type, /); isdtype(dtype, kind); result_type(*arrays_and_dtypes); abs(x, /); acos(x, /); acosh(x, /); add(x1, x2, /); asin(x, /); asinh(x, /);
atan(x, /); atan2(x1, x2, /); atanh(x, /); bitwise_and(x1, x2, /); bitwise_left_shift(x1, x2, /); bitwise_invert(x, /); bitwise_or(x1, x2, /);
bitwise_right_shift(x1, x2, /); bitwise_xor(x1, x2, /); ceil(x, /); clip(x, /, min=None, max=None); conj(x, /); copysign(x1, x2, /); cos(x, /);
cosh(x, /); divide(x1, x2, /); equal(x1, x2, /); exp(x, /); expm1(x, /); floor(x, /); floor_divide(x1, x2, /); greater(x1, x2, /);
greater_equal(x1, x2, /); hypot(x1, x2, /); imag(x, /); isfinite(x, /); isinf(x, /); isnan(x, /); less(x1, x2, /); less_equal(x1, x2, /); log(x, /);
log1p(x, /); log2(x, /); log10(x, /); logaddexp(x1, x2, /); logical_and(x1, x2, /); logical_not(x, /); logical_or(x1, x2, /);
logical_xor(x1, x2, /); maximum(x1, x2, /); minimum(x1, x2, /); multiply(x1, x2, /); negative(x, /); nextafter(x1, x2, /); not_equal(x1, x2, /);
positive(x, /); pow(x1, x2, /); real(x, /); reciprocal(x, /); remainder(x1, x2, /); round(x, /); sign(x, /); signbit(x, /); sin(x, /); sinh(x, /);
square(x, /); sqrt(x, /); subtract(x1, x2, /); tan(x, /); tanh(x, /); trunc(x, /); take(x, indices, /, *, axis=None);
take_along_axis(x, indices, /, *, axis=-1); matmul(x1, x2, /); matrix_transpose(x, /); tensordot(x1, x2, /, *, axes=2);
vecdot(x1, x2, /, *, axis=-1); broadcast_arrays(*arrays); broadcast_to(x, /, shape); concat(arrays, /, *, axis=0); expand_dims(x, /, axis=0);
flip(x, /, *, axis=None); moveaxis(x, source, destination, /); permute_dims(x, /, axes); repeat(x, repeats, /, *, axis=None);
reshape(x, /, shape, *, copy=None); roll(x, /, shift, *, axis=None); squeeze(x, /, axis); stack(arrays, /, *, axis=0); tile(x, repetitions, /);
unstack(x, /, *, axis=0); argmax(x, /, *, axis=None, keepdims=False); argmin(x, /, *, axis=None, keepdims=False);
count_nonzero(x, /, *, axis=None, keepdims=False); nonzero(x, /); searchsorted(x1, x2, /, *, side='left', sorter=None); where(condition, x1, x2, /);
unique_all(x, /); unique_counts(x, /); unique_inverse(x, /); unique_values(x, /); argsort(x, /, *, axis=-1, descending=False, stable=True);
sort(x, /, *, axis=-1, descending=False, stable=True); cumulative_prod(x, /, *, axis=None, dtype=None, include_initial=False);
cumulative_sum(x, /, *, axis=None, dtype=None, include_initial=False); max(x, /, *, axis=None, keepdims=False);
mean(x, /, *, axis=None, keepdims=False); min(x, /, *, axis=None, keepdims=False); prod(x, /, *, axis=None, dtype=None, keepdims=False);
std(x, /, *, axis=None, correction=0.0, keepdims=False); sum(x, /, *, axis=None, dtype=None, keepdims=False);
var(x, /, *, axis=None, correction=0.0, keepdims=False); all(x, /, *, axis=None, keepdims=False); any(x, /, *, axis=None, keepdims=False);
diff(x, /, *, axis=-1, n=1, prepend=None, append=None); linalg.cholesky(x, /, *, upper=False); linalg.cross(x1, x2, /, *, axis=-1);
linalg.det(x, /); linalg.diagonal(x, /, *, offset=0); linalg.eigh(x, /); linalg.eigvalsh(x, /); linalg.inv(x, /); linalg.matmul(x1, x2, /);
linalg.matrix_norm(x, /, *, keepdims=False, ord='fro'); linalg.matrix_power(x, n, /); linalg.matrix_rank(x, /, *, rtol=None);
linalg.matrix_transpose(x, /); linalg.outer(x1, x2, /); linalg.pinv(x, /, *, rtol=None); linalg.qr(x, /, *, mode='reduced'); linalg.slogdet(x, /);
linalg.solve(x1, x2, /); linalg.svd(x, /, *, full_matrices=True); linalg.svdvals(x, /); linalg.tensordot(x1, x2, /, *, axes=2);
linalg.trace(x, /, *, offset=0, dtype=None); linalg.vecdot(x1, x2, /, *, axis=-1); linalg.vector_norm(x, /, *, axis=None, keepdims=False, ord=2)
""".replace("\n", " ").strip().split("; ")


@pytest.mark.parametrize("wanted", STANDARD)
def test_a_function_of_the_standard_takes_the_arguments_of_the_standard(wanted: str) -> None:
    path, _, parameters = wanted.partition("(")
    function: Any = F
    for name in path.split("."):
        function = getattr(function, name)
    namespace: dict[str, Any] = {}
    exec(f"def f({parameters}: pass", namespace)  # noqa: S102
    standard = list(inspect.signature(namespace["f"]).parameters.values())
    ours = list(inspect.signature(function).parameters.values())
    assert inspect.getdoc(function)
    for position, parameter in enumerate(standard):
        by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
        mine = ours[position] if by_position else next(p for p in ours if p.name == parameter.name)
        assert mine.name == parameter.name
        assert mine.kind in (parameter.kind, parameter.POSITIONAL_OR_KEYWORD), "whoever calls it as the standard says gets through"
        if parameter.default is not parameter.empty:
            assert mine.default == parameter.default
    extra = [p for p in ours if p.name not in {q.name for q in standard}]
    assert all(p.default is not p.empty or p.kind is p.VAR_POSITIONAL for p in extra), "what goes beyond the standard is optional"


def test_everything_public_is_defined_and_documented() -> None:
    namespaces = ("fft", "linalg", "special")
    families = [module for name, module in vars(ag.array_functions).items() if hasattr(module, "__all__") and name not in namespaces]
    listed = [name for module in families for name in module.__all__]
    assert {*listed, *namespaces} == {*PUBLIC} and len(set(listed)) == len(listed)
    for name in PUBLIC:
        value = getattr(F, name)
        if inspect.isfunction(value):
            assert value.__doc__
            assert value.__module__.startswith("aiograd.array_functions") or name in ("array", "manual_seed")


# ---- values

CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}


def _cases() -> None:
    same = (
        "exp exp2 expm1 log1p sin cos tan sinh cosh tanh floor ceil trunc square negative positive sign signbit isfinite isinf isnan cbrt deg2rad "
        "rad2deg sinc"
    ).split()
    for name in same:
        x = U if name == "log1p" else X
        CASES[name] = (lambda name=name, x=x: getattr(F, name)(x)), (lambda name=name, x=x: getattr(np, name)(x))
    for name in "log log2 log10 sqrt reciprocal".split():
        CASES[name] = (lambda name=name: getattr(F, name)(P)), (lambda name=name: getattr(np, name)(P))
    renamed = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "atanh": "arctanh", "abs": "absolute"}
    for name, theirs in renamed.items():
        CASES[name] = (lambda name=name: getattr(F, name)(U)), (lambda theirs=theirs: getattr(np, theirs)(U))
    binary = (
        "add subtract multiply divide floor_divide remainder fmod copysign hypot logaddexp maximum minimum nextafter equal not_equal less "
        "less_equal greater greater_equal"
    ).split()
    for name in binary:
        CASES[name] = (lambda name=name: getattr(F, name)(X, Y)), (lambda name=name: getattr(np, name)(X, Y))
    for name in "logical_and logical_or logical_xor".split():
        CASES[name] = (lambda name=name: getattr(F, name)(B, B2)), (lambda name=name: getattr(np, name)(B, B2))
    for name in "bitwise_and bitwise_or bitwise_xor".split():
        CASES[name] = (lambda name=name: getattr(F, name)(I1, I2)), (lambda name=name: getattr(np, name)(I1, I2))


_cases()
CASES.update(
    {
        "acosh": (lambda: F.acosh(P + 1), lambda: np.arccosh(P + 1)),
        "atan2": (lambda: F.atan2(X, Y), lambda: np.arctan2(X, Y)),
        "pow": (lambda: F.pow(P, Y), lambda: P**Y),
        "rsqrt": (lambda: F.rsqrt(P), lambda: 1 / np.sqrt(P)),
        "xlogy": (lambda: F.xlogy([0.0, 2.0], [0.0, 3.0]), lambda: np.array([0.0, 2 * math.log(3)], np.float32)),
        "erf": (lambda: F.erf(X), lambda: np.vectorize(math.erf)(X)),
        "erfc": (lambda: F.erfc(X), lambda: np.vectorize(math.erfc)(X)),
        "round": (lambda: F.round(X), lambda: np.round(X)),
        "round to decimals": (lambda: F.round(X * 1.23456, decimals=2), lambda: np.round(X * 1.23456, 2)),
        "clip": (lambda: F.clip(X, -0.5, 1.0), lambda: np.clip(X, -0.5, 1.0)),
        "clip by arrays": (lambda: F.clip(X, min=[-1.0, 0.0, 0.0]), lambda: np.clip(X, np.array([-1.0, 0, 0]), None)),
        "nan_to_num": (lambda: F.nan_to_num([math.nan, math.inf], posinf=7.0), lambda: np.array([0, 7], np.float32)),
        "conj": (lambda: F.conj(Z), lambda: np.conj(Z)),
        "real": (lambda: F.real(Z), lambda: Z.real),
        "imag": (lambda: F.imag(Z), lambda: Z.imag),
        "angle": (lambda: F.angle(Z), lambda: np.angle(Z)),
        "sign of complex": (lambda: F.sign(Z), lambda: Z / np.abs(Z)),
        "isclose": (lambda: F.isclose(X, X + 1e-9), lambda: np.isclose(X, X + 1e-9)),
        "logical_not": (lambda: F.logical_not(B), lambda: ~B),
        "bitwise_invert": (lambda: F.bitwise_invert(I1), lambda: ~I1),
        "bitwise_left_shift": (lambda: F.bitwise_left_shift(I1, I2), lambda: I1 << I2),
        "bitwise_right_shift": (lambda: F.bitwise_right_shift(I1, I2), lambda: I1 >> I2),
        "relu": (lambda: F.relu(X), lambda: np.maximum(X, 0)),
        "gelu": (lambda: F.gelu(X), lambda: 0.5 * X * (1 + np.vectorize(math.erf)(X / math.sqrt(2)))),
        "silu": (lambda: F.silu(X), lambda: X / (1 + np.exp(-X))),
        "elu": (lambda: F.elu(X, alpha=0.5), lambda: np.where(X > 0, X, 0.5 * np.expm1(X))),
        "leaky_relu": (lambda: F.leaky_relu(X, negative_slope=0.1), lambda: np.where(X > 0, X, 0.1 * X)),
        "softplus": (lambda: F.softplus(X, beta=2.0), lambda: np.log1p(np.exp(2 * X)) / 2),
        "softsign": (lambda: F.softsign(X), lambda: X / (1 + np.abs(X))),
        "sigmoid": (lambda: F.sigmoid(X), lambda: 1 / (1 + np.exp(-X))),
        "log_sigmoid": (lambda: F.log_sigmoid(X), lambda: -np.log1p(np.exp(-X))),
        "softmax": (lambda: F.softmax(X, axis=0), lambda: np.exp(X) / np.exp(X).sum(0)),
        "log_softmax": (lambda: F.log_softmax(X), lambda: X - np.log(np.exp(X).sum(-1, keepdims=True))),
        "reshape": (lambda: F.reshape(X, (3, -1)), lambda: X.reshape(3, 2)),
        "flatten": (lambda: F.flatten(X), lambda: X.reshape(-1)),
        "permute_dims": (lambda: F.permute_dims(X[None], (2, 0, -2)), lambda: X[None].transpose(2, 0, 1)),
        "transpose": (lambda: F.transpose(X), lambda: X.T),
        "swapaxes": (lambda: F.swapaxes(X[None], 0, 2), lambda: X[None].swapaxes(0, 2)),
        "matrix_transpose": (lambda: F.matrix_transpose(X[None]), lambda: X[None].swapaxes(1, 2)),
        "moveaxis": (lambda: F.moveaxis(X[None], (0, 1), (-1, 0)), lambda: np.moveaxis(X[None], (0, 1), (-1, 0))),
        "squeeze": (lambda: F.squeeze(X[None, :, None], (0, 2)), lambda: X),
        "expand_dims": (lambda: F.expand_dims(X, axis=1), lambda: X[:, None]),
        "broadcast_to": (lambda: F.broadcast_to(X, (4, 2, 3)), lambda: np.broadcast_to(X, (4, 2, 3))),
        "broadcast_arrays": (lambda: F.broadcast_arrays(X, X[0])[1], lambda: np.broadcast_to(X[0], (2, 3))),
        "flip": (lambda: F.flip(X, axis=1), lambda: X[:, ::-1]),
        "roll": (lambda: F.roll(X, (1, 2), axis=(0, 1)), lambda: np.roll(X, (1, 2), (0, 1))),
        "concat": (lambda: F.concat([X, Y], axis=1), lambda: np.concatenate([X, Y], 1)),
        "concat flat": (lambda: F.concat((X, Y[0]), axis=None), lambda: np.concatenate([X, Y[0]], None)),
        "stack": (lambda: F.stack([X, Y], axis=-1), lambda: np.stack([X, Y], -1)),
        "unstack": (lambda: F.unstack(X, axis=1)[2], lambda: X[:, 2]),
        "split": (lambda: F.split(X, 3, axis=1)[1], lambda: X[:, 1:2]),
        "split at": (lambda: F.split(X, [1], axis=1)[1], lambda: X[:, 1:]),
        "tile": (lambda: F.tile(X, (2, 1, 2)), lambda: np.tile(X, (2, 1, 2))),
        "repeat": (lambda: F.repeat(X, 2, axis=0), lambda: np.repeat(X, 2, 0)),
        "repeat each": (lambda: F.repeat(X, ag.tensor([1, 0, 2]), axis=1), lambda: np.repeat(X, [1, 0, 2], 1)),
        "pad": (lambda: F.pad(X, [(1, 0), (0, 2)], value=9.0), lambda: np.pad(X, [(1, 0), (0, 2)], constant_values=9.0)),
        "pad by reflection": (lambda: F.pad(X, 1, mode="reflect"), lambda: np.pad(X, 1, mode="reflect")),
        "diagonal": (lambda: F.diagonal(SQUARE, offset=1), lambda: np.diagonal(SQUARE, 1)),
        "diag of a vector": (lambda: F.diag(X[0], k=-1), lambda: np.diag(X[0], -1)),
        "diag of a matrix": (lambda: F.diag(SQUARE), lambda: np.diag(SQUARE)),
        "clone": (lambda: F.clone(X), lambda: X),
        "tril": (lambda: F.tril(SQUARE, k=1), lambda: np.tril(SQUARE, 1)),
        "triu": (lambda: F.triu(SQUARE), lambda: np.triu(SQUARE)),
        "meshgrid": (lambda: F.meshgrid(X[0], Y[0], indexing="ij")[1], lambda: np.meshgrid(X[0], Y[0], indexing="ij")[1]),
        "sum": (lambda: F.sum(X, axis=[0], keepdims=True), lambda: X.sum(0, keepdims=True)),
        "sum with dtype": (lambda: F.sum(X, dtype=np.float32), lambda: X.astype(np.float32).sum()),
        "prod": (lambda: F.prod(X, axis=1), lambda: X.prod(1)),
        "mean": (lambda: F.mean(X, axis=(0, 1)), lambda: X.mean()),
        "var": (lambda: F.var(X, axis=1, correction=1), lambda: X.var(1, ddof=1)),
        "std": (lambda: F.std(X), lambda: X.std()),
        "max": (lambda: F.max(X, axis=0), lambda: X.max(0)),
        "min": (lambda: F.min(X), lambda: X.min()),
        "median": (lambda: F.median(X, axis=1), lambda: np.median(X, 1)),
        "logsumexp": (lambda: F.logsumexp(X, axis=1), lambda: np.log(np.exp(X).sum(1))),
        "all": (lambda: F.all(B, axis=0), lambda: B.all(0)),
        "any": (lambda: F.any(B, axis=1, keepdims=True), lambda: B.any(1, keepdims=True)),
        "count_nonzero": (lambda: F.count_nonzero(B, axis=0), lambda: np.count_nonzero(B, 0)),
        "cumulative_sum": (lambda: F.cumulative_sum(X, axis=1), lambda: np.cumsum(X, 1)),
        "cumulative_sum from 0": (
            lambda: F.cumulative_sum(X[0], include_initial=True),
            lambda: np.concatenate([[0.0], np.cumsum(X[0])]),
        ),
        "cumulative_prod": (lambda: F.cumulative_prod(X, axis=0), lambda: np.cumprod(X, 0)),
        "cumsum": (lambda: F.cumsum(X), lambda: np.cumsum(X)),
        "cumprod": (lambda: F.cumprod(X, 1), lambda: np.cumprod(X, 1)),
        "diff": (lambda: F.diff(X, n=2), lambda: np.diff(X, n=2)),
        "diff with ends": (lambda: F.diff(X, prepend=Y[:, :1], append=Y), lambda: np.diff(X, prepend=Y[:, :1], append=Y)),
        "where": (lambda: F.where(B, X, Y), lambda: np.where(B, X, Y)),
        "argmax": (lambda: F.argmax(X, axis=1), lambda: X.argmax(1)),
        "argmin": (lambda: F.argmin(X), lambda: X.argmin()),
        "nonzero": (lambda: F.nonzero(B)[1], lambda: B.nonzero()[1]),
        "searchsorted": (lambda: F.searchsorted([1.0, 2.0, 3.0], [2.0, 9.0], side="right"), lambda: np.array([2, 3])),
        "searchsorted by sorter": (lambda: F.searchsorted([3.0, 1.0, 2.0], 2.5, sorter=[1, 2, 0]), lambda: np.array(2)),
        "isin": (lambda: F.isin(I1, [9, 12]), lambda: np.array([False, True, True])),
        "take": (lambda: F.take(X, [2, 0], axis=1), lambda: X[:, [2, 0]]),
        "take of a vector": (lambda: F.take(X[0], ag.tensor([-1])), lambda: X[0][[-1]]),
        "take_along_axis": (lambda: F.take_along_axis(X, np.argsort(X, 1), axis=1), lambda: np.sort(X, 1)),
        "gather": (lambda: F.gather(X, 1, [[0], [2]]), lambda: np.array([[0.3], [-0.4]])),
        "scatter": (lambda: F.scatter(X, [[0], [2]], 9.0, axis=1), lambda: np.array([[9, -1.2, 2.5], [0.9, 0.1, 9]])),
        "scatter_add": (lambda: F.scatter_add([0.0, 0.0], [1, 1, 0], [1.0, 2.0, 4.0]), lambda: np.array([4, 3], np.float32)),
        "scatter_reduce": (lambda: F.scatter_reduce(np.zeros(2), 0, [1, 1], [3.0, 4.0], "amax"), lambda: np.array([0.0, 4.0])),
        "cummax": (lambda: F.cummax(X, axis=1)[0], lambda: np.maximum.accumulate(X, 1)),
        "cummin": (lambda: F.cummin(X, axis=0)[1], lambda: np.array([[0, 0, 0], [0, 0, 1]])),
        "logcumsumexp": (lambda: F.logcumsumexp(X, axis=1), lambda: np.log(np.cumsum(np.exp(X), 1))),
        "index_add": (lambda: F.index_add(np.zeros((2, 3)), [1, 1], X), lambda: np.stack([np.zeros(3), X.sum(0)])),
        "sort": (lambda: F.sort(X, axis=0, descending=True), lambda: -np.sort(-X, 0)),
        "argsort": (lambda: F.argsort(X), lambda: np.argsort(X)),
        "topk": (lambda: F.topk(X, 2, axis=1)[0], lambda: -np.sort(-X, 1)[:, :2]),
        "unique_values": (lambda: F.unique_values([3, 1, 3]), lambda: np.array([1, 3])),
        "unique_counts": (lambda: F.unique_counts([3, 1, 3]).counts, lambda: np.array([1, 2])),
        "unique_inverse": (lambda: F.unique_inverse([[3, 1, 3]]).inverse_indices, lambda: np.array([[1, 0, 1]])),
        "unique_all": (lambda: F.unique_all([3, 1, 3]).indices, lambda: np.array([1, 0])),
        "matmul": (lambda: F.matmul(X, SQUARE), lambda: X @ SQUARE),
        "tensordot": (lambda: F.tensordot(X, Y, axes=([0], [0])), lambda: np.tensordot(X, Y, axes=([0], [0]))),
        "vecdot": (lambda: F.vecdot(X, Y), lambda: (X * Y).sum(-1)),
        "einsum": (lambda: F.einsum("ij,kj->ik", X, Y), lambda: X @ Y.T),
        "dot": (lambda: F.dot(X, SQUARE), lambda: X @ SQUARE),
        "inner": (lambda: F.inner(X, Y), lambda: X @ Y.T),
        "outer": (lambda: F.outer(X[0], Y[0]), lambda: np.outer(X[0], Y[0])),
        "kron": (lambda: F.kron(X, Y), lambda: np.kron(X, Y)),
        "trace": (lambda: F.trace(SQUARE), lambda: np.trace(SQUARE)),
        "linalg.cholesky": (lambda: F.linalg.cholesky(SQUARE, upper=True), lambda: np.linalg.cholesky(SQUARE).T),
        "linalg.cross": (lambda: F.linalg.cross(X, Y), lambda: np.cross(X, Y)),
        "linalg.det": (lambda: F.linalg.det(SQUARE), lambda: np.linalg.det(SQUARE)),
        "linalg.eigh": (lambda: F.linalg.eigh(SQUARE).eigenvalues, lambda: np.linalg.eigvalsh(SQUARE)),
        "linalg.eigvalsh": (lambda: F.linalg.eigvalsh(SQUARE), lambda: np.linalg.eigvalsh(SQUARE)),
        "linalg.inv": (lambda: F.linalg.inv(SQUARE), lambda: np.linalg.inv(SQUARE)),
        "linalg.matrix_norm": (lambda: F.linalg.matrix_norm(X, ord=2), lambda: np.linalg.norm(X, 2)),
        "linalg.matrix_power": (lambda: F.linalg.matrix_power(SQUARE, -2), lambda: np.linalg.matrix_power(SQUARE, -2)),
        "linalg.matrix_rank": (lambda: F.linalg.matrix_rank(np.ones((3, 4))), lambda: np.array(1)),
        "linalg.multi_dot": (lambda: F.linalg.multi_dot([X, SQUARE, Y.T]), lambda: X @ SQUARE @ Y.T),
        "linalg.norm": (lambda: F.linalg.norm(X, ord=1), lambda: np.linalg.norm(X, 1)),
        "linalg.pinv": (lambda: F.linalg.pinv(X), lambda: np.linalg.pinv(X)),
        "linalg.qr": (lambda: F.linalg.qr(X.T).R, lambda: np.linalg.qr(X.T).R),
        "linalg.slogdet": (lambda: F.linalg.slogdet(SQUARE).logabsdet, lambda: np.linalg.slogdet(SQUARE)[1]),
        "linalg.solve": (lambda: F.linalg.solve(SQUARE, X.T), lambda: np.linalg.solve(SQUARE, X.T)),
        "linalg.svd": (lambda: F.linalg.svd(X).S, lambda: np.linalg.svd(X)[1]),
        "linalg.svdvals": (lambda: F.linalg.svdvals(X), lambda: np.linalg.svd(X)[1]),
        "linalg.vector_norm": (lambda: F.linalg.vector_norm(X, axis=1, ord=3), lambda: np.linalg.norm(X, 3, 1)),
    }
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_dtypes_are_those_of_numpy(name: str) -> None:
    ours, theirs = CASES[name]
    result, wanted = ours(), np.asarray(theirs())
    assert isinstance(result, ag.Tensor)
    assert_close(result.numpy(), wanted)


def test_every_function_has_a_case() -> None:
    tested = {name.split(" ")[0] for name in CASES} | set(everyday.CASES) | everyday.ELSEWHERE
    tested |= {f"special.{name}" for name in F.special.__all__}  # against SciPy
    tested |= {f"linalg.{name}" for name in F.linalg.__all__ if hasattr(F, name) and name in tested}
    by_function = {id(inspect.unwrap(operator.attrgetter(name)(F))) for name in tested}
    tested |= {name for name in PUBLIC if id(inspect.unwrap(getattr(F, name))) in by_function}  # other names
    elsewhere = set(
        "zeros ones full empty zeros_like ones_like full_like empty_like arange linspace eye e pi inf nan newaxis astype can_cast finfo iinfo "
        "isdtype result_type allclose array_equal broadcast_shapes linalg".split()
    )
    dtypes = {name for name in PUBLIC if isinstance(getattr(F, name), np.dtype)}
    assert set(PUBLIC) - tested - elsewhere - dtypes == set()
    tested |= {f"linalg.{name}" for name in F.linalg.__all__ if id(inspect.unwrap(getattr(F.linalg, name))) in by_function}
    methods = {f"{home}.{name}" for home in ("linalg", "fft") for name in getattr(F, home).__all__ if not name.endswith("Result")}
    assert methods - tested == set()


# ---- what arguments may be


def test_numbers_lists_and_arrays_become_tensors_of_the_dtype_one_expects() -> None:
    x = ag.tensor([1.0, -2.0], requires_grad=True)
    assert F.exp(1.0).dtype == np.float32, "a number alone has the default dtype"
    assert F.add(1, 2).dtype == np.int64
    assert F.add(x, 2.5).dtype == F.add(2.5, x).dtype == np.float32, "a number follows the array beside it"
    assert F.add(np.ones(2), x).dtype == np.float64
    assert F.add([1.0, 2.0], x).dtype == np.float32
    assert F.maximum(0.0, x).tolist() == [1.0, 0.0]
    assert F.where(x > 0, x, 0.0).dtype == np.float32
    assert F.where(x > 0, 2.5, x.astype(np.float16)).dtype == np.float16
    assert F.where(x > 0, x.astype(np.float64), 1).dtype == np.float64
    assert F.where([True, False], 1.0, 0.0).dtype == np.float32
    assert F.where([True, False], 1, 0).dtype == np.int64
    assert F.subtract(10, x).tolist() == [9.0, 12.0]
    assert all(isinstance(t, ag.Tensor) for t in F.where([0, 3]))


#: functions of a float64 tensor and a number that float32 cannot hold, beside what numpy makes of them
W = np.array([1.0, 2.0, 3.0, 0.1])
FEW = np.array([True, False, True, False])
BESIDE: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "index_fill": (lambda x: x.index_fill(0, np.array([1]), 0.3), [1.0, 0.3, 3.0, 0.1]),
    "index_fill_": (lambda x: x.clone().index_fill_(0, np.array([1]), 0.3), [1.0, 0.3, 3.0, 0.1]),
    "index_copy": (lambda x: x.index_copy(0, [1], [0.3]), [1.0, 0.3, 3.0, 0.1]),
    "index_add": (lambda x: x.index_add(0, [1], [0.3]), [1.0, 2.3, 3.0, 0.1]),
    "copy_": (lambda x: x.clone().copy_([0.3, 0.7, 0.3, 0.7]), [0.3, 0.7, 0.3, 0.7]),
    "setitem": (lambda x: _with(x, [0], [0.3]), [0.3, 2.0, 3.0, 0.1]),
    "masked_fill": (lambda x: x.masked_fill(FEW, 0.3), [0.3, 2.0, 0.3, 0.1]),
    "where": (lambda x: F.where(FEW, x, [0.3, 0.3, 0.3, 0.3]), [1.0, 0.3, 3.0, 0.3]),
    "where of two numbers": (lambda x: F.where(FEW, 0.3, np.float64(0.7)), [0.3, 0.7, 0.3, 0.7]),
    "clip": (lambda x: x.clip([0.3] * 4, None), [1.0, 2.0, 3.0, 0.3]),
    "scatter": (lambda x: F.scatter(x, 0, [1], [0.3]), [1.0, 0.3, 3.0, 0.1]),
    "scatter_reduce": (lambda x: F.scatter_reduce(x, 0, [1], 0.3, "amin"), [1.0, 0.3, 3.0, 0.1]),
    "add": (lambda x: x + [0.3] * 4, W + 0.3),
    "subtract from a list": (lambda x: F.subtract([0.3] * 4, x), 0.3 - W),
    "maximum": (lambda x: F.maximum([0.3] * 4, x), [1.0, 2.0, 3.0, 0.3]),
    "floor_divide": (lambda x: F.floor_divide(x, [0.1] * 4), np.floor_divide(W, 0.1)),
    "equal": (lambda x: F.equal(x, [0.1] * 4), W == 0.1),
    "isin": (lambda x: F.isin(x, [0.1]), W == 0.1),
    "array_equal": (lambda x: ag.tensor(F.array_equal(x, [1.0, 2.0, 3.0, 0.1])), True),
    "searchsorted": (lambda x: F.searchsorted([0.1, 1.0], x, side="right"), [2, 2, 2, 1]),
    "concat": (lambda x: F.concat([x, [0.3]]), [*W, 0.3]),
    "stack": (lambda x: F.stack([x[0], 0.3]), [1.0, 0.3]),
    "np.append": (lambda x: np.append(x, 0.3), [*W, 0.3]),
    "np.kron": (lambda x: np.kron(x, [0.3]), np.kron(W, [0.3])),
    "np.concatenate": (lambda x: np.concatenate([x, [0.3]]), [*W, 0.3]),
    "outer": (lambda x: F.outer(x, [0.3]), np.outer(W, [0.3])),
    "einsum": (lambda x: F.einsum("i,->i", x, 0.3), W * 0.3),
    "matmul": (lambda x: x @ [0.3, 0.0, 0.0, 0.0], 0.3),
    "lerp": (lambda x: F.lerp(x * 0.0, 1.0, [0.3] * 4), [0.3] * 4),
    "addcmul": (lambda x: F.addcmul(0.3, x * 0.0, x), [0.3] * 4),
    "diff": (lambda x: F.diff(x, prepend=0.3), np.diff(W, prepend=0.3)),
    "interp": (lambda x: F.interp(x, [0.0, 4.0], [0.3, 0.3]), [0.3] * 4),
    "trapezoid": (lambda x: F.trapezoid(x, [0.0, 0.3, 0.6, 0.9]), np.trapezoid(W, [0.0, 0.3, 0.6, 0.9])),
    "prelu": (lambda x: ag.nn.functional.prelu(-x, 0.3), -W * 0.3),
    "l1_loss": (lambda x: ag.nn.functional.l1_loss(x, [0.3] * 4, reduction="none"), np.abs(W - 0.3)),
    "scale of a distribution": (lambda x: ag.distributions.Normal(x, 0.3).scale, [0.3] * 4),
    "value of a distribution": (lambda x: ag.distributions.Uniform(x * 0.0 + 0.3, 1.0).log_prob(0.3), [-math.log(0.7)] * 4),
    "full": (lambda x: F.full((2,), np.float64(0.3)), [0.3] * 2),
    "function of a numpy number": (lambda x: F.negative(np.float64(0.3)), -0.3),
}  # fmt: skip


def _with(x: Any, index: Any, value: Any) -> Any:
    changed = x.clone()
    changed[index] = value
    return changed


@pytest.mark.parametrize("name", BESIDE)
def test_numbers_beside_a_float64_tensor_are_not_rounded_to_the_default_dtype(name: str) -> None:
    function, wanted = BESIDE[name]
    found = function(ag.tensor(W))
    assert found.dtype == np.asarray(wanted).dtype
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-15)


def test_numbers_beside_a_float32_tensor_leave_its_dtype() -> None:
    x = ag.tensor(W, dtype=ag.float32)
    for name in ("index_fill", "index_copy", "clip", "add", "stack", "concat", "outer", "lerp", "prelu", "scale of a distribution"):
        assert BESIDE[name][0](x).dtype == np.float32, name


def _clip_in_a_batch(x: Any, *limits: Any) -> Any:
    given = [limit for limit in limits if isinstance(limit, ag.Tensor)]

    def example(x: Any, *some: Any) -> Any:
        rest = iter(some)
        return F.clip(x, *(next(rest) if isinstance(limit, ag.Tensor) else limit for limit in limits))

    return ag.vmap(example)(x, *given)


#: ways of limiting elements
CLIPS: dict[str, Callable[..., Any]] = {
    "clip": F.clip,
    "np.clip": np.clip,
    "clamp_min and clamp_max": lambda x, low, high: x.clamp_min(low).clamp_max(high),
    "compiled": lambda x, low, high: ag.compile(lambda x: F.clip(x, low, high))(x),
    "vmap": _clip_in_a_batch,
    "lists": lambda x, low, high: F.clip(x, [low] * 6, [high] * 6) if isinstance(low, float) else F.clip(x, low, high),
}


KINDS = ("numbers", "tensors", "0-d tensors")


# in a batch every example has limits of its own, so that none are 0-d
@pytest.mark.parametrize(("way", "kind"), [(way, kind) for way in CLIPS for kind in KINDS if way != "vmap" or kind != "0-d tensors"])
async def test_an_element_at_a_limit_gets_the_gradient_whatever_the_limit_is(way: str, kind: str) -> None:
    x = ag.tensor([0.5, 1.0, 1.5, 2.0, 2.5, np.nan], dtype=np.float64, requires_grad=True)
    limits: Any = (1.0, 2.0)
    if kind != "numbers":
        limits = tuple(F.full((6,) if kind == "tensors" else (), limit, dtype=np.float64, requires_grad=True) for limit in limits)
    await CLIPS[way](x, *limits).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    if kind != "numbers":
        assert [float(limit.grad.sum()) for limit in limits] == [1.0, 1.0]


async def test_an_element_at_a_limit_gets_the_gradient_on_a_device() -> None:
    with ToyDevice("toy:clip"):
        x = ag.tensor([0.5, 1.0, 2.0], dtype=np.float64, device="toy:clip", requires_grad=True)
        low = ag.tensor([1.0, 1.0, 1.0], dtype=np.float64, device="toy:clip", requires_grad=True)
        await F.clip(x, low, 2.0).sum().backward()
        assert x.grad.cpu().tolist() == [0.0, 1.0, 1.0] and low.grad.cpu().tolist() == [1.0, 0.0, 0.0]


def test_results_of_numbers_do_not_share_memory_with_later_ones() -> None:
    first = F.reshape(1.5, (1,))
    first += 1.0
    assert F.reshape(1.5, (1,)).tolist() == [1.5]
    assert (ag.tensor([1.0]) * 1.5).tolist() == [1.5]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: F.add("a", 1), ArgumentTypeError),
        (lambda: F.exp("a"), ArgumentTypeError),
        (lambda: F.add(ag.tensor([1.0]), object()), ArgumentTypeError),
        (lambda: F.concat([]), ArgumentError),
        (lambda: F.stack(3), ArgumentTypeError),
        (lambda: F.take(X, [0]), ArgumentError),
        (lambda: F.take(X, np.array([0.5]), axis=0), ArgumentTypeError),
        (lambda: F.permute_dims(X, (0, 0)), ShapeError),
        (lambda: F.matrix_transpose(X[0]), ShapeError),
        (lambda: F.linalg.inv(X), ShapeError),
        (lambda: F.linalg.det(X[0]), ShapeError),
        (lambda: F.vecdot(X, Y, axis=0), ShapeError),
        (lambda: F.where(B, X), ArgumentError),
        (lambda: F.nonzero(1.0), ShapeError),
        (lambda: F.zeros((-1, 2)), ArgumentError),
        (lambda: F.zeros(2.5), ArgumentError),
        (lambda: F.arange(0, 5, 0), ArgumentError),
        (lambda: F.linspace(0.0, 1.0, -2), ArgumentError),
        (lambda: F.searchsorted([1.0], [1.0], side="middle"), ArgumentError),
        (lambda: F.broadcast_shapes((2,), (3,)), ShapeError),
        (lambda: F.isdtype(np.float32, "floaty"), ArgumentError),
        (lambda: F.zeros(2, dtype=np.int64, requires_grad=True), ArgumentTypeError),
        (lambda: F.zeros(2, device="nowhere:0"), DeviceError),
    ],
)
def test_wrong_arguments_end_in_a_typed_error(call: Callable[[], Any], error: type[Exception]) -> None:
    assert_raises(error, None, call)


def test_allclose_and_array_equal() -> None:
    assert F.allclose(X, X + 1e-12)
    assert not F.allclose(X, Y)
    assert F.array_equal([1, 2], [1, 2])
    assert not F.array_equal([1, 2], [1, 2, 3])
    assert not F.array_equal([1, 2], [1, 3])


# ---- creation


def test_constants_have_the_default_dtype_unless_one_is_given() -> None:
    assert F.zeros((2, 3)).dtype == F.ones(2).dtype == F.empty(()).dtype == F.eye(2).dtype == F.linspace(0.0, 1.0, 3).dtype == np.float32
    assert F.zeros(2, dtype=np.float64).dtype == np.float64
    assert F.full(2, 3).dtype == np.int64
    assert F.full(2, True).dtype == np.bool_
    assert F.full(2, 1j).dtype == np.complex64
    assert F.full((2,), 0.5).tolist() == [0.5, 0.5]
    assert F.arange(3).dtype == np.int64
    assert F.arange(3.0).dtype == np.float32
    assert F.linspace(0, 1j, 2).dtype == np.complex64
    assert F.ones_like(X).dtype == np.float64
    assert F.full_like(X, 2.0, dtype=np.float16).dtype == np.float16
    assert F.zeros_like([1, 2]).tolist() == [0, 0]
    assert F.empty_like(X).shape == (2, 3)


async def test_the_default_dtype_follows_the_task() -> None:
    ag.set_default_dtype(np.float64)
    try:
        assert F.zeros(1).dtype == F.full(1, 0.5).dtype == F.arange(2.0).dtype == F.exp(1.0).dtype == np.float64
    finally:
        ag.set_default_dtype(np.float32)


def test_ranges_and_grids() -> None:
    assert F.arange(5).tolist() == [0, 1, 2, 3, 4]
    assert F.arange(1, 7, 2).tolist() == [1, 3, 5]
    assert F.arange(3, 0, -1).tolist() == [3, 2, 1]
    assert F.linspace(0.0, 1.0, 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert F.linspace(0.0, 1.0, 4, endpoint=False).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert F.eye(2, 3, k=1).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_creation_can_ask_for_gradients() -> None:
    for t in (F.zeros(2, requires_grad=True), F.ones_like(X, requires_grad=True), F.arange(2.0, requires_grad=True), F.eye(2, requires_grad=True)):
        assert t.requires_grad
        assert t.is_leaf
    x = ag.tensor(X, requires_grad=True)
    assert not F.zeros_like(x).requires_grad


async def test_creation_on_a_device() -> None:
    with ToyDevice("toy:0"):
        t = F.ones((2, 2), device="toy:0", requires_grad=True)
        assert t.device == "toy:0"
        assert F.zeros_like(t).device == "toy:0"
        wide = await F.astype(t.detach(), np.float64)
        assert F.astype(wide, np.float32, device="cpu").tolist() == [[1, 1], [1, 1]]


def test_reshape_copies_only_when_told_to() -> None:
    x = ag.tensor(X)
    view, copy = F.reshape(x, 6), F.reshape(x, 6, copy=True)
    assert np.shares_memory(view.numpy(), x.numpy())
    assert not np.shares_memory(copy.numpy(), x.numpy())
    assert F.reshape(x, (3, 2), copy=False).shape == (3, 2)
    assert_raises(ArgumentError, "copy", lambda: F.reshape(F.transpose(x), 6, copy=False))


def test_questions_about_dtypes() -> None:
    x = ag.tensor(X)
    assert F.result_type(x, np.float32) == np.float64
    assert F.can_cast(np.float32, np.float64)
    assert not F.can_cast(x, np.float32)
    assert F.isdtype(F.float32, "real floating")
    assert F.isdtype(F.int8, ("bool", "integral"))
    assert not F.isdtype(F.bool, "numeric")
    assert F.isdtype(x.dtype, F.float64)
    assert F.finfo(x).bits == 64
    assert F.iinfo(np.int16).max == 32767
    assert F.astype(x, F.float32).dtype == np.float32
    assert {F.float64: 1}[x.dtype] == 1
    assert (F.pi, F.newaxis) == (math.pi, None)


# ---- the dtype to compute in

#: as numpy's function of an array and a dtype -> ours, and numpy's on a Tensor
WITH_DTYPE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (np.sum, F.sum),
    "sum over an axis": (lambda x, dtype: np.sum(x, axis=1, dtype=dtype), lambda x, dtype: F.sum(x, axis=1, dtype=dtype)),
    "prod": (np.prod, F.prod),
    "cumulative_sum": (
        lambda x, dtype: np.cumulative_sum(x, axis=1, dtype=dtype, include_initial=True),
        lambda x, dtype: F.cumulative_sum(x, axis=1, dtype=dtype, include_initial=True),
    ),
    "cumulative_prod": (
        lambda x, dtype: np.cumulative_prod(x, axis=0, dtype=dtype), lambda x, dtype: F.cumulative_prod(x, axis=0, dtype=dtype),
    ),
    "trace": (np.linalg.trace, F.linalg.trace),
    "trace of two axes": (lambda x, dtype: np.trace(x, dtype=dtype), lambda x, dtype: F.trace(x, dtype=dtype)),
    "cumsum": (np.cumsum, lambda x, dtype: np.cumsum(x, dtype=dtype)),
    "cumprod": (np.cumprod, lambda x, dtype: np.cumprod(x, dtype=dtype)),
    "mean": (np.mean, lambda x, dtype: np.mean(x, dtype=dtype)),
    "reduce": (np.add.reduce, np.add.reduce),
    "accumulate": (np.multiply.accumulate, np.multiply.accumulate),
    "accumulate along an axis": (lambda x, dtype: np.add.accumulate(x, 1, dtype), lambda x, dtype: np.add.accumulate(x, 1, dtype)),
    "ufunc": (lambda x, dtype: np.multiply(x, x, dtype=dtype), lambda x, dtype: np.multiply(x, x, dtype=dtype)),
    "ufunc of a number": (lambda x, dtype: np.add(x, 100, dtype=dtype), lambda x, dtype: np.add(x, 100, dtype=dtype)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64, np.bool_, np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", WITH_DTYPE)
def test_functions_compute_in_the_dtype_that_is_asked_for(name: str, dtype: Any) -> None:
    theirs, ours = WITH_DTYPE[name]
    for x in (np.array([[200, 100], [3, 77]], np.uint8), np.array([[120, -100], [3, -7]], np.int8), np.array([[0.1, 1e-9], [1.0, 1e9]], np.float32)):
        try:
            with np.errstate(all="ignore"):
                wanted = np.asarray(theirs(x, dtype=dtype))
        except TypeError:
            with pytest.raises(ArgumentTypeError):
                ours(ag.tensor(x), dtype=dtype)
            continue
        if x.dtype.kind == "f" and wanted.dtype.kind in "iu":
            continue  # of numbers beyond the range of integers C says nothing
        with np.errstate(all="ignore"):
            found = ours(ag.tensor(x), dtype=dtype)
        assert found.dtype == wanted.dtype == dtype
        tolerance = np.finfo(dtype).eps * 4 if wanted.dtype.kind == "f" else 0
        np.testing.assert_allclose(found.numpy(), wanted, rtol=tolerance)


async def test_gradients_go_back_through_the_dtype_that_is_asked_for() -> None:
    x = ag.tensor(np.array([1.0, 2.0, 3.0], np.float16), requires_grad=True)
    for total in (F.sum(x, dtype=np.float64), F.cumulative_sum(x, dtype=np.float64)[-1], np.add.reduce(x, dtype=np.float64)):
        (gradient,) = await ag.grad(total * 2.0, [x])
        assert gradient.dtype == np.float16 and gradient.tolist() == [2.0, 2.0, 2.0]


def test_ranks_take_a_tolerance_for_each_matrix() -> None:
    stack = np.array([np.diag([1.0, 0.1, 0.01]), np.diag([1.0, 0.5, 0.2]), np.zeros((3, 3))])
    for tolerance in (np.array([0.05, 0.3, 0.0]), np.array([0.3]), 0.05, np.array([[0.05], [0.3]])):
        np.testing.assert_array_equal(F.linalg.matrix_rank(stack, rtol=tolerance).numpy(), np.linalg.matrix_rank(stack, rtol=tolerance))
    assert F.linalg.matrix_rank(stack, rtol=ag.tensor([0.5, 0.3, 0.0])).tolist() == [1, 2, 0]
    for shape in ((0, 3), (3, 0), (2, 0, 3)):
        assert F.linalg.matrix_rank(np.zeros(shape)).tolist() == np.zeros(shape[:-2]).tolist()


# ---- gradients through what is composed here


async def test_gradients_flow_through_compositions() -> None:
    x = ag.tensor(X, requires_grad=True)
    cases: list[tuple[Any, Any]] = [
        (F.sum(F.concat([x, F.multiply(2, x)], axis=None)), np.full_like(X, 3.0)),
        (F.sum(F.einsum("ij,kj->ik", x, Y)), np.broadcast_to(Y.sum(0), X.shape)),
        (F.sum(F.clip(x, -0.5, 1.0)), ((X >= -0.5) & (X <= 1.0)).astype(float)),
        (F.sum(F.where(B, F.square(x), 0.0)), np.where(B, 2 * X, 0)),
        (F.sum(F.repeat(x, 3, axis=1)), np.full_like(X, 3.0)),
        (F.sum(F.take(x, [0, 0, 2], axis=1)), np.array([[2.0, 0, 1], [2, 0, 1]])),
        (F.linalg.vector_norm(x), X / np.linalg.norm(X)),
        (F.sum(F.diff(x, axis=1)), np.array([[-1.0, 0, 1], [-1, 0, 1]])),
        (F.trace(F.matmul(x, F.matrix_transpose(x))), 2 * X),
        (F.sum(F.broadcast_to(x, (5, 2, 3))), np.full_like(X, 5.0)),
        (F.sum(F.stack(F.unstack(x, axis=1)) * F.arange(3).reshape(3, 1)), np.array([[0.0, 1, 2], [0, 1, 2]])),
    ]
    for value, wanted in cases:
        (gradient,) = await ag.grad(value, [x])
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-12)


def test_what_has_no_derivative_records_nothing() -> None:
    x = ag.tensor(X, requires_grad=True)
    for result in (F.floor_divide(x, 2.0), F.argmax(x), F.equal(x, x), F.isnan(x), F.unique_values(x), F.linalg.matrix_rank(x)):
        assert not result.requires_grad
