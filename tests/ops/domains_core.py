"""Domains of the rows of `aiograd.ops` other than those of `aiograd.ops.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ops import domains_analysis
from tests.ops.domain import Arguments, Domain, apart, arrays, binary, cases, distinct, unary, uniform

Case = Callable[[np.random.Generator], Arguments]


def _with(first: Case, *more: Any) -> Case:
    """`first` with further positional arguments, constants or functions of the generator."""

    def draw(rng: np.random.Generator) -> Arguments:
        args, kwargs = first(rng)
        return (*args, *(m(rng) if callable(m) else m for m in more)), kwargs

    return draw


def _condition(*shape: int) -> Callable[[np.random.Generator], Any]:
    return lambda rng: rng.integers(0, 2, shape).astype(bool)


def _where(condition: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]) -> Case:
    return lambda rng: ((_condition(*condition)(rng), uniform(rng, first), uniform(rng, second)), {})


def _powers(first: tuple[int, ...], second: tuple[int, ...]) -> Case:
    return lambda rng: ((uniform(rng, first, 0.3, 2.0), uniform(rng, second, -2.0, 3.0)), {})


def _power(exponent: float, low: float = -2.0) -> Case:
    return lambda rng: ((uniform(rng, (2, 3), low, 2.0, away=(0.0,), gap=0.3), exponent), {})


REDUCTIONS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((), {}), ((3,), {}), ((3,), {"axis": 0}), ((2, 3), {}), ((2, 3), {"axis": 1}), ((2, 3), {"axis": -2, "keepdims": True}),
    ((2, 3, 2), {"axis": (0, 2)}), ((2, 3, 2), {"axis": (-1, 0), "keepdims": True}), ((2, 3, 2), {"keepdims": True}), ((1, 1), {"axis": 0}),
)  # fmt: skip
EMPTY: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (((0,), {}), ((2, 0), {"axis": 1}), ((0, 3), {"axis": 1, "keepdims": True}))


def _reductions(draw: Callable[..., Case], *, empty: bool = True, **options: Any) -> Domain:
    return cases(*(draw(shape, **kwargs) for shape, kwargs in REDUCTIONS + (EMPTY if empty else ())), **options)


def _moments(**statics: Any) -> list[Case]:
    return [
        arrays((5,), **statics),
        arrays((3, 4), axis=0, **statics),
        arrays((3, 4), axis=-1, keepdims=True, **statics),
        arrays((2, 3, 2), axis=(0, 1), **statics),
        arrays((2, 3), keepdims=True, **statics),
    ]


def _fixed(shape: tuple[int, ...], index: Any) -> Case:
    return arrays(shape, index=index)


BASIC: tuple[tuple[tuple[int, ...], Any], ...] = (
    ((4,), 1), ((4,), -1), ((4,), slice(1, 3)), ((4,), slice(None, None, -2)), ((3, 4), (slice(None), 2)), ((3, 4), (None, 1, Ellipsis)),
    ((3, 4), (1, 2)), ((2, 3, 4), (Ellipsis, slice(0, 0))), ((2, 3, 4), (slice(None), None, slice(1, None), 3)), ((), ()), ((), (Ellipsis, None)),
)  # fmt: skip
ADVANCED: tuple[tuple[tuple[int, ...], Any], ...] = (
    ((4,), np.array([0, 2, 2, -1])), ((4,), [1, 1]), ((4,), np.array([True, False, True, True])),
    ((3, 4), (np.array([0, 2, 0]), np.array([1, 1, 1]))), ((3, 4), (np.array([[0], [2]]), np.array([1, 3, 1]))),
    ((3, 4), (slice(None), np.array([3, 3, 0]))), ((3, 4), np.array([[1, 1], [0, -1]])),
    ((2, 3, 4), (np.array([1, 1]), slice(None), np.array([0, 0]))), ((2, 3, 4), (slice(0, 1), np.array([2, 2]), np.array([3, 0]))),
    ((2, 3), np.array([[True, False, True], [False, True, True]])), ((2, 3, 2), (Ellipsis, np.array([1, 1, 0]), None)),
    ((3, 2), (np.array([], dtype=int),)), ((30, 2), (slice(None), np.array([1]))), ((30, 4), (slice(None, None, 29), np.array([1, 1]))),
)  # fmt: skip


def _adjoint_of_index(shape: tuple[int, ...], index: Any) -> Case:
    def draw(rng: np.random.Generator) -> Arguments:
        return (uniform(rng, np.zeros(shape)[index].shape),), {"index": index, "shape": shape}

    return draw


def _assignment(shape: tuple[int, ...], value: tuple[int, ...], index: Any) -> Case:
    return lambda rng: ((uniform(rng, shape), uniform(rng, value)), {"index": index})


def _taking(shape: tuple[int, ...], indices: Any, axis: int) -> Case:
    return lambda rng: ((uniform(rng, shape), np.array(indices, dtype=int)), {"axis": axis})


def _take_adjoint(shape: tuple[int, ...], indices: Any, axis: int) -> Case:
    index = np.array(indices, dtype=int)
    return lambda rng: ((uniform(rng, np.take(np.zeros(shape), index, axis).shape), index), {"shape": shape, "axis": axis})


def _gather_adjoint(shape: tuple[int, ...], indices: Any, axis: int) -> Case:
    index = np.array(indices, dtype=int)
    return lambda rng: ((uniform(rng, np.take_along_axis(np.zeros(shape), index, axis).shape), index), {"shape": shape, "axis": axis})


def _extremes(shape: tuple[int, ...], indices: Any, axis: int, largest: bool) -> Case:
    def draw(rng: np.random.Generator) -> Arguments:
        index = np.array(indices, dtype=int)
        values = distinct(rng, (int(np.prod(shape)) + index.size,))
        return (values[index.size :].reshape(shape), values[: index.size].reshape(index.shape), index), {"axis": axis, "largest": largest}

    return draw


SCATTERED: tuple[tuple[tuple[int, ...], Any, int], ...] = (((4,), [0, 3, 3], 0), ((2, 3), [[0, 2], [1, 1]], 1), ((3, 2), [[1, 1]], 0))
CUMULATIVE: tuple[tuple[tuple[int, ...], int], ...] = (((4,), 0), ((2, 3), 1), ((3, 2), 0), ((2, 3, 2), -2), ((0,), 0), ((), -1))
TAKES: tuple[tuple[tuple[int, ...], Any, int], ...] = (
    ((4,), [0, 3, 3], 0), ((4,), 2, 0), ((3, 4), [[1, -1], [1, 0]], 1), ((3, 4), [2, 2], 0), ((2, 3, 2), [0, 0, 2], -2), ((2, 3), [], 1),
)  # fmt: skip
GATHERS: tuple[tuple[tuple[int, ...], Any, int], ...] = (
    ((4,), [0, 3, 3], 0),
    ((2, 3), [[0, 2], [1, 1]], 1),
    ((2, 3), [[1, 0, 1]], 0),
    ((2, 3), [[1, 1]], 1),
    ((2, 2, 2), [[[0, 1]], [[1, 1]]], -2),
)


def _matrices(*shapes: tuple[int, ...], **statics: Any) -> list[Case]:
    """Well-conditioned matrices: a dominant diagonal."""

    def one(shape: tuple[int, ...]) -> Case:
        def draw(rng: np.random.Generator) -> Arguments:
            return (_dominant(rng, shape),), dict(statics)

        return draw

    return [one(shape) for shape in shapes]


def _dominant(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    size = min(shape[-2:])
    return uniform(rng, shape, -0.5, 0.5) + np.eye(*shape[-2:]) * np.resize(1.0 + 0.8 * np.arange(size), shape[-1])


def _systems(left: tuple[int, ...], right: tuple[int, ...]) -> Case:
    return lambda rng: ((_dominant(rng, left), uniform(rng, right)), {})


def _symmetric(x: Any) -> tuple[Any]:
    return ((x + np.conjugate(np.swapaxes(x, -1, -2))) * 0.5,)


def _definite(x: Any) -> tuple[Any]:
    return (np.matmul(x, np.conjugate(np.swapaxes(x, -1, -2))),)


def _signless_eigen(out: Any) -> Any:
    values, vectors = out
    return values, np.real(vectors * np.conjugate(vectors))


def _signless_svd(out: Any) -> Any:
    u, s, vh = out
    size = s.shape[-1]
    both = np.matmul(u[..., :size], vh[..., :size, :])
    return np.real(u * np.conjugate(u))[..., :size], s, np.real(vh * np.conjugate(vh))[..., :size, :], np.real(both), np.imag(both)


def _singular(rng: np.random.Generator) -> Arguments:
    """Of rank 2, for the gradient of a determinant."""
    a, b = uniform(rng, (3, 2)), uniform(rng, (2, 3))
    return (a @ b,), {}


def _einsum(subscripts: str, first: tuple[int, ...], second: tuple[int, ...]) -> Case:
    return arrays(first, second, subscripts=subscripts)


def _with_zeros(shape: tuple[int, ...], zeros: int, **statics: Any) -> Case:
    def draw(rng: np.random.Generator) -> Arguments:
        x = uniform(rng, shape, -1.5, 1.5, away=(0.0,), gap=0.3)
        flat = x.reshape(-1)
        flat[rng.permutation(flat.size)[:zeros]] = 0.0
        return (x,), dict(statics)

    return draw


def _away_from_zero(shape: tuple[int, ...], **statics: Any) -> Case:
    return lambda rng: ((uniform(rng, shape, away=(0.0,), gap=0.2),), dict(statics))


def _angles(shape: tuple[int, ...]) -> Case:
    return arrays(shape, low=-200.0, high=200.0)


def _division(first: tuple[float, float], second: tuple[float, float]) -> Domain:
    """Operands whose quotient keeps clear of integers, where mod jumps."""

    def draw(rng: np.random.Generator, variety: int) -> Arguments:
        shapes = (((3,), (3,)), ((2, 3), (3,)), ((), (2, 2)), ((2, 1), (1, 3)), ((), ()))[variety % 5]
        x2 = uniform(rng, shapes[1], *second)
        whole = rng.integers(int(first[0]), int(first[1]), np.broadcast_shapes(*shapes))
        quotient = whole + uniform(rng, whole.shape, 0.2, 0.8)
        return (np.asarray(quotient * x2), x2), {}

    return Domain(draw, 5)


def _exponents(shape: tuple[int, ...]) -> Case:
    return lambda rng: ((uniform(rng, shape), rng.integers(-2, 3, shape)), {})


#: elementwise functions of one array
_UNARY: dict[str, Domain] = {
    "neg": unary(complex=True),
    "positive": unary(complex=True),
    "square": unary(complex=True),
    "reciprocal": unary(away=(0.0,), gap=0.3, complex=True),
    "sqrt": unary(0.2, 3.0, complex=True),
    "rsqrt": unary(0.2, 3.0, complex=True),
    "cbrt": unary(away=(0.0,), gap=0.3),
    "exp": unary(complex=True),
    "exp2": unary(),
    "expm1": unary(complex=True),
    "log": unary(0.2, 3.0, complex=True),
    "log2": unary(0.2, 3.0, complex=True),
    "log10": unary(0.2, 3.0, complex=True),
    "log1p": unary(-0.7, 3.0, complex=True),
    "sin": unary(complex=True),
    "cos": unary(complex=True),
    "tan": unary(-1.2, 1.2, complex=True),
    "asin": unary(-0.8, 0.8, complex=True),
    "acos": unary(-0.8, 0.8, complex=True),
    "atan": unary(complex=True),
    "sinh": unary(complex=True),
    "cosh": unary(complex=True),
    "tanh": unary(complex=True),
    "tanh_slope": binary(complex=True),
    "tanh_bend": cases(arrays((3,), (3,), (3,)), arrays((2, 3), (3,), (2, 1)), arrays((), (), ()), arrays((2,), (2,), ()), complex=True),
    "asinh": unary(complex=True),
    "acosh": unary(1.3, 3.0, complex=True),
    "atanh": unary(-0.8, 0.8, complex=True),
    "deg2rad": cases(_angles((3,)), _angles(()), _angles((2, 0))),
    "rad2deg": unary(),
    "floor": unary(away=(-2, -1, 0, 1, 2)),
    "ceil": unary(away=(-2, -1, 0, 1, 2)),
    "trunc": unary(away=(-2, -1, 0, 1, 2)),
    "round": unary(away=(-1.5, -0.5, 0.5, 1.5), statics=({},)),
    "abs": unary(away=(0.0,), complex=True),
    "fabs": unary(away=(0.0,)),
    "sign": unary(away=(0.0,)),
    "sgn": unary(away=(0.0,), gap=0.3, complex=True),
    "clamp": unary(away=(-0.5, 0.7), statics=({"min": -0.5, "max": 0.7}, {"min": -0.5}, {"max": 0.7}, {})),
    "nan_to_num": unary(),
    "erf": unary(-3.0, 3.0),
    "erfc": unary(-3.0, 3.0),
    "sigmoid": unary(-5.0, 5.0),
    "log_sigmoid": unary(-5.0, 5.0, away=(0.0,)),
    "softplus": unary(-3.0, 3.0, away=(0.0,), statics=({}, {"beta": 2.5})),
    "sinc": unary(-3.0, 3.0, statics=({}, {"order": 1}, {"order": 3})),
    "relu": unary(away=(0.0,)),
    "gelu": unary(-3.0, 3.0, statics=({}, {"approximate": "tanh"})),
    "silu": unary(-3.0, 3.0),
    "elu": unary(away=(0.0,), statics=({}, {"alpha": 0.3})),
    "leaky_relu": unary(away=(0.0,), statics=({}, {"negative_slope": 0.2})),
    "softsign": unary(away=(0.0,)),
    "clone": unary(complex=True),
    "to_copy": unary(statics=({"dtype": "float64"},), complex=False, dtypes=()),
    "conj": unary(complex=True),
    "real": unary(complex=True),
    "imag": unary(complex=True),
    "angle": unary(away=(0.0,), complex=True),
}

#: elementwise functions of two arrays
_BINARY: dict[str, Domain] = {
    "add": binary(complex=True),
    "sub": binary(complex=True),
    "mul": binary(complex=True),
    "div": binary(away=((), (0.0,)), complex=True),
    "remainder": _division((-3, 3), (0.5, 2.0)),
    "fmod": _division((0, 3), (0.5, 2.0)),
    "divmod": _division((-3, 3), (-2.0, -0.5)),
    "ldexp": cases(_exponents((3,)), _exponents(()), _exponents((2, 2))),
    "pow": cases(
        *(_powers(*pair) for pair in (((3,), (3,)), ((2, 3), (3,)), ((), (2,)), ((2, 1), (1, 3)), ((), ()), ((0,), (0,)))),
        *(_power(exponent) for exponent in (0, 1, 2, 3, -1, -2, 4, 2.0)),
        *(_power(exponent, 0.2) for exponent in (0.5, -0.5, 2.5)),
        complex=True,
    ),
    "float_power": cases(_powers((3,), (3,)), _powers((2, 1), (3,)), _power(3, 0.3), dtypes=("float64",)),
    "atan2": binary((0.3, 2.0), (-2.0, 2.0)),
    "hypot": binary((0.3, 2.0), (-2.0, 2.0)),
    "heaviside": binary(away=((0.0,), ())),
    "nextafter": binary(),
    "copysign": binary(away=((0.0,), (0.0,))),
    "maximum": binary(apart=0.25),
    "minimum": binary(apart=0.25),
    "clamp_min": binary(apart=0.25),
    "clamp_max": binary(apart=0.25),
    "fmax": binary(apart=0.25),
    "fmin": binary(apart=0.25),
    "logaddexp": binary(),
    "logaddexp2": binary(),
    "xlogy": binary((-2.0, 2.0), (0.3, 2.0), away=((0.0,), ())),
    "xlog1py": binary((-2.0, 2.0), (-0.7, 1.0), away=((0.0,), ())),
    "complex": binary(dtypes=()),
    "mask": cases(
        _with(arrays((3,)), _condition(3)),
        _with(arrays((2, 3)), _condition(3)),
        _with(arrays(()), _condition()),
        _with(arrays((1, 3)), _condition(2, 3)),
        complex=True,
    ),
    "where": cases(
        _where((3,), (3,), (3,)), _where((3,), (2, 3), ()), _where((2, 1), (1, 3), (3,)), _where((), (), (2,)), _where((0,), (0,), ()),
        complex=True,
    ),
}

_SHAPE: dict[str, Domain] = {
    "reshape": cases(
        arrays((2, 3), shape=(3, 2)), arrays((2, 3), shape=(-1,)), arrays((), shape=(1, 1)), arrays((0, 2), shape=(2, 0)), arrays((1,), shape=()),
        complex=True,
    ),
    "permute": cases(
        arrays((2, 3)), arrays((2, 3, 4), axes=(2, 0, 1)), arrays((2, 3), axes=(1, 0)), arrays(()), arrays((2, 3, 2), axes=(0, 2, 1)), complex=True
    ),
    "transpose": cases(
        arrays((2, 3)), arrays((2, 3, 4)), arrays((2, 3, 4), axis0=0, axis1=2), arrays((2, 3, 1), axis0=-3, axis1=1), complex=True
    ),
    "expand": cases(
        arrays((3,), shape=(2, 3)), arrays((), shape=(2, 2)), arrays((2, 1), shape=(2, 3)), arrays((1, 3), shape=(4, 2, 3)),
        arrays((2,), shape=(2,)), arrays((1,), shape=(0,)), complex=True,
    ),
    "squeeze": cases(arrays((1, 3, 1)), arrays((1, 3, 1), axis=0), arrays((1, 3, 1), axis=(0, -1)), arrays(()), complex=True),
    "unsqueeze": cases(arrays((3,), axis=0), arrays((2, 3), axis=(0, -1)), arrays((), axis=0), arrays((2, 3), axis=-2), complex=True),
    "flip": cases(arrays((3,)), arrays((2, 3)), arrays((2, 3), axis=-1), arrays((2, 3, 2), axis=(0, 2)), complex=True),
    "roll": cases(
        arrays((4,), shift=1), arrays((2, 3), shift=-2), arrays((2, 3), shift=1, axis=1), arrays((2, 3), shift=(1, -1), axis=(0, 1)), complex=True
    ),
    "tril": cases(arrays((3, 3)), arrays((2, 3, 4), k=1), arrays((3, 2), k=-1), complex=True),
    "triu": cases(arrays((3, 3)), arrays((2, 3, 4), k=1), arrays((3, 2), k=-1), complex=True),
    "diagonal": cases(
        arrays((3, 3)), arrays((2, 3, 4), offset=1), arrays((3, 2, 4), offset=-1, axis1=0, axis2=2), arrays((2, 2), offset=5), complex=True
    ),
    "diagonal_adjoint": cases(
        arrays((3,), shape=(3, 3)), arrays((2, 3), shape=(2, 3, 4), offset=1), arrays((2, 2), shape=(3, 2, 4), offset=-1, axis1=0, axis2=2),
        complex=True,
    ),
    "cat": cases(
        arrays((2, 3), (1, 3)), arrays((2, 3), (2, 1), (2, 0), axis=-1), arrays((3,)), arrays((0,), (2,)), arrays((2, 1, 2), (2, 2, 2), axis=1),
        complex=True,
    ),
    "stack": cases(arrays((3,), (3,)), arrays((2, 3), (2, 3), (2, 3), axis=-1), arrays((), ()), arrays((2, 2), axis=1), complex=True),
    "split": cases(
        arrays((4,), cuts=(1, 3)), arrays((2, 5), cuts=(2, 2), axis=1), arrays((3, 2), cuts=(), axis=-2), arrays((2, 3), cuts=(1,), axis=-1),
        complex=True,
    ),
    "unbind": cases(arrays((3,)), arrays((2, 3), axis=1), arrays((2, 3, 2), axis=-2), complex=True),
    "tile": cases(
        arrays((3,), repetitions=(2,)), arrays((2, 3), repetitions=(2, 1, 2)), arrays((2, 1, 2), repetitions=(3,)), arrays((), repetitions=(2, 2)),
        complex=True,
    ),
    "repeat_interleave": cases(
        arrays((3,), repeats=2, axis=0), arrays((2, 3), repeats=3, axis=-1), arrays((2, 3), repeats=2, axis=0), arrays((2,), repeats=0, axis=0),
        complex=True,
    ),
    "constant_pad": cases(
        arrays((3,), pad_width=((1, 2),)), arrays((2, 3), pad_width=((0, 1), (2, 0)), value=1.5), arrays((), pad_width=()), complex=True
    ),
}

_INDEXING: dict[str, Domain] = {
    "getitem": cases(*(_fixed(*case) for case in BASIC), complex=True),
    "getitem_adjoint": cases(*(_adjoint_of_index(*case) for case in BASIC), complex=True),
    "index": cases(*(_fixed(*case) for case in ADVANCED), complex=True),
    "index_adjoint": cases(*(_adjoint_of_index(*case) for case in ADVANCED), complex=True),
    "setitem": cases(
        _assignment((4,), (), 1),
        _assignment((4,), (2,), slice(1, 3)),
        _assignment((3, 4), (4,), (slice(0, 2), slice(None))),
        _assignment((3, 4), (3, 1), Ellipsis),
        _assignment((3, 4), (1, 1, 2), (1, slice(0, 2))),
        _assignment((4,), (3,), np.array([0, 2, 1])),
        _assignment((4,), (3,), np.array([0, 2, 0])),
        _assignment((4,), (), np.array([0, 2, 0])),
        _assignment((2, 3), (), np.array([[True, False, True], [False, False, True]])),
        _assignment((3, 4), (2,), (slice(None), np.array([1, 3]))),
        _assignment((), (), ()),
        complex=True,
    ),
    "take": cases(*(_taking(*case) for case in TAKES), complex=True),
    "take_adjoint": cases(*(_take_adjoint(*case) for case in TAKES), complex=True),
    "gather": cases(*(_taking(*case) for case in GATHERS), complex=True),
    "gather_adjoint": cases(*(_gather_adjoint(*case) for case in GATHERS), complex=True),
    "scatter": cases(
        _with(_taking((4,), [0, 3], 0), lambda rng: uniform(rng, (2,))),
        _with(_taking((2, 3), [[0, 2], [1, 0]], 1), lambda rng: uniform(rng, (2, 2))),
        _with(_taking((2, 3), [[1, 0, 1]], 0), lambda rng: uniform(rng, ())),
        complex=True,
    ),
    "scatter_extreme": cases(*(_extremes(*case, largest=largest) for largest in (True, False) for case in SCATTERED)),
    "cummax": cases(*(apart(shape, axis=axis) for shape, axis in CUMULATIVE)),
    "cummin": cases(*(apart(shape, axis=axis) for shape, axis in CUMULATIVE)),
    "logcumsumexp": cases(*(arrays(shape, axis=axis) for shape, axis in CUMULATIVE)),
    "sort": cases(
        apart((4,)), apart((2, 3)), apart((2, 3), axis=0, descending=True), apart((2, 3, 2), axis=-2), apart((0,)), apart((3,), stable=False)
    ),
    "topk": cases(apart((5,), k=2), apart((2, 4), k=3, largest=False), apart((4, 2), k=2, axis=0), apart((3,), k=3), apart((3,), k=0)),
}

_REDUCTION: dict[str, Domain] = {
    "sum": _reductions(arrays, complex=True),
    "mean": _reductions(arrays, empty=False, complex=True),
    "var": cases(*_moments(), *_moments(correction=1.0), complex=True),
    "std": cases(*_moments(), *_moments(correction=1.0), complex=True),
    "max": _reductions(apart, empty=False, complex=True),
    "min": _reductions(apart, empty=False, complex=True),
    "logsumexp": _reductions(arrays, empty=False),
    "prod": cases(
        *(arrays(shape, **kwargs) for shape, kwargs in REDUCTIONS + EMPTY),
        *(_with_zeros((2, 3), zeros, **kwargs) for zeros in (1, 2, 3) for kwargs in ({}, {"axis": 1}, {"axis": (1, 0), "keepdims": True})),
        complex=True,
    ),
    "prod_others": cases(
        arrays((4,)), arrays((2, 3)), _with_zeros((4,), 1), _with_zeros((2, 3), 2), _with_zeros((4,), 4), arrays((1,)), complex=True
    ),
    "cumsum": cases(arrays((4,)), arrays((2, 3), axis=0), arrays((2, 3), reverse=True), arrays((0,)), complex=True),
    "cumprod": cases(
        arrays((4,)), arrays((2, 3), axis=0), arrays((2, 3), reverse=True), _with_zeros((5,), 1), _with_zeros((5,), 3),
        _with_zeros((2, 4), 3, axis=-1), complex=True,
    ),
    "shift": cases(
        arrays((4,), axis=0, by=1), arrays((2, 3), axis=1, by=-2, fill=1.0), arrays((2, 3), axis=0, by=5), arrays((3,), axis=-1, by=0), complex=True
    ),
    "linear_scan": cases(
        arrays((4,), (4,)), arrays((2, 3), (2, 3), axis=0), arrays((2, 3), (2, 3), reverse=True), arrays((1,), (1,)), complex=True
    ),
    "vector_norm": cases(
        *(
            _away_from_zero(shape, **kwargs, ord=order)
            for shape, kwargs in REDUCTIONS[:7]
            for order in (2, 1, 3.5)
        ),
        *(apart((2, 5), axis=1, ord=order) for order in (np.inf, -np.inf)),
        apart((5,), ord=0),
        complex=True,
    ),
}

_SQUARE = ((3, 3), (2, 2, 2), (1, 1))
_LINALG: dict[str, Domain] = {
    "matmul": cases(
        *(
            arrays(*pair)
            for pair in (
                ((2, 3), (3, 4)), ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 2, 3), (3, 4)), ((2, 3), (4, 3, 2)), ((3,), (2, 3, 2)),
                ((2, 2, 3), (3,)), ((2, 2, 3), (2, 3, 1)), ((2, 1, 2, 3), (3, 3, 2)), ((1, 2, 3), (2, 3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 3)),
            )
        ),
        complex=True,
    ),
    "vecdot": cases(
        arrays((3,), (3,)), arrays((2, 3), (3,)), arrays((3, 2), (3, 2), axis=-2), arrays((2, 1, 3), (4, 3)), arrays((1, 3), (2, 3)), complex=True
    ),
    "cross": cases(arrays((3,), (3,)), arrays((2, 3), (3,)), arrays((3, 2), (3, 2), axis=-2), arrays((2, 1, 3), (4, 3)), complex=True),
    "einsum": cases(
        _einsum("ab,bc->ac", (2, 3), (3, 2)),
        _einsum("ab,ab->ab", (2, 3), (2, 3)),
        _einsum("a,b->ba", (2,), (3,)),
        _einsum("abc,bcd->da", (2, 2, 3), (2, 3, 2)),
        _einsum("zab,zcb->zca", (2, 2, 3), (2, 2, 3)),
        _einsum("a,a->", (3,), (3,)),
        _einsum(",ab->ba", (), (2, 3)),
        complex=True,
    ),
    "inv": cases(*_matrices(*_SQUARE), complex=True),
    "det": cases(*_matrices(*_SQUARE), complex=True),
    "cofactors": cases(*_matrices(*_SQUARE), complex=True),
    "cofactors_grad": cases(arrays((3, 3), (3, 3)), arrays((2, 2, 2), (2, 2, 2)), arrays((1, 1), (1, 1)), complex=True),
    "slogdet": cases(*_matrices(*_SQUARE)),
    "solve": cases(
        _systems((3, 3), (3, 2)), _systems((3, 3), (3,)), _systems((2, 3, 3), (3, 2)), _systems((2, 2), (4, 2, 3)), _systems((2, 2, 2), (2,)),
        complex=True,
    ),
    "cholesky": cases(*_matrices(*_SQUARE), prepare=_definite, complex=True),
    "eigh": cases(*_matrices(*_SQUARE), prepare=_symmetric, finish=_signless_eigen, complex=True),
    "eigvalsh": cases(*_matrices(*_SQUARE), prepare=_symmetric, complex=True),
    "svd": cases(
        *_matrices((3, 3), (2, 2, 3), (3, 2), (1, 1)), *_matrices((3, 2), (2, 3), (2, 2), full_matrices=True), finish=_signless_svd, complex=True
    ),
    "svdvals": cases(*_matrices((3, 3), (2, 2, 3), (3, 2)), complex=True),
    "qr": cases(*_matrices((3, 3), (4, 2), (2, 4), (2, 3, 3)), complex=True),
    "pinv": cases(*_matrices((3, 3), (4, 2), (2, 2, 3)), complex=True),
}


DOMAINS: dict[str, Domain] = {**_UNARY, **_BINARY, **_SHAPE, **_INDEXING, **_REDUCTION, **_LINALG, **domains_analysis.DOMAINS}
