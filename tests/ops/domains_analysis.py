"""Domains of the special functions, Fourier transforms, windows and functions of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ops.domain import Arguments, Domain, arrays, binary, cases, unary, uniform

Case = Callable[[np.random.Generator], Arguments]


def _dominant(*shape: int) -> Case:
    """Matrices with eigenvalues far apart, real and complex ones."""

    def draw(rng: np.random.Generator) -> Arguments:
        x = uniform(rng, shape, -0.4, 0.4) + np.eye(shape[-1]) * (1.0 + 1.5 * np.arange(shape[-1]))
        if shape[-1] > 2:
            x[..., 0, 1] += 2.0
            x[..., 1, 0] -= 2.0
        return (x,), {}

    return draw


def _power_sums(values: Any) -> Any:
    """Eigenvalues in whichever order: sums of their powers."""
    return tuple(np.sum(values**k, axis=-1) for k in (1, 2, 3))


def _without_phase(out: Any) -> Any:
    values, vectors = out
    size = np.real(vectors * np.conjugate(vectors))
    return *_power_sums(values), np.sum(np.expand_dims(values, -2) * size, axis=-1)


def _parts(out: Any) -> tuple[Any, ...]:
    several = out if isinstance(out, tuple) else (out,)
    return tuple(part(x) for x in several for part in (np.real, np.imag))


def _turned(x: Any) -> tuple[Any]:
    """Complex numbers, also of real ones."""
    return (x * (1.0 - 0.5j),)


def _zeta(shape: tuple[int, ...], order: Any) -> Case:
    return lambda rng: ((np.asarray(order, np.int64), uniform(rng, shape, 0.3, 3.0)), {})


def _of_order(low: float, high: float, *orders: Any) -> Domain:
    """Functions of integer orders and of numbers, over some shapes."""
    pairs = (((3,), orders[0]), ((), orders[-1]), ((2, 3), list(orders[:1]) * 3), ((0,), orders[0]))

    def one(shape: tuple[int, ...], order: Any) -> Case:
        return lambda rng: ((np.asarray(order, np.int64), uniform(rng, shape, low, high)), {})

    return cases(*(one(shape, order) for shape, order in pairs), dtypes=("float64",))


def _betainc(shape: tuple[int, ...], a: Any, b: Any) -> Case:
    return lambda rng: ((np.asarray(a, np.int64), np.asarray(b, np.int64), uniform(rng, shape, 0.1, 0.9)), {})


TRANSFORMS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((4,), {}),
    ((5,), {"norm": "ortho"}),
    ((2, 3), {"axis": 0, "norm": "forward"}),
    ((3, 1), {"axis": -1}),
    ((2, 4, 2), {"axis": 1}),
)

DOMAINS: dict[str, Domain] = {
    "gammaln": unary(0.3, 4.0),
    "gamma": unary(0.4, 3.0),
    "digamma": unary(0.4, 4.0),
    "zeta": cases(_zeta((3,), 2), _zeta((), 3), _zeta((2, 3), [2, 3, 4]), _zeta((0,), 2), dtypes=("float64",)),
    "erfinv": unary(-0.8, 0.8),
    "log_ndtr": unary(-7.0, 3.0),
    "logit": unary(0.1, 0.9, away=(0.3, 0.7), gap=0.01),
    "bessel_i0": unary(-3.0, 3.0),
    "bessel_i1": unary(-3.0, 3.0, away=(0.0,)),
    "bessel_i0e": unary(-3.0, 3.0, away=(0.0,)),
    "bessel_i1e": unary(-3.0, 3.0, away=(0.0,)),
    "bessel_j0": unary(-12.0, 12.0, away=(-8.0, 8.0)),
    "bessel_j1": unary(-12.0, 12.0, away=(-8.0, 0.0, 8.0)),
    "bessel_y0": unary(0.5, 12.0, away=(8.0,)),
    "bessel_y1": unary(0.5, 12.0, away=(8.0,)),
    "bessel_jv": _of_order(0.5, 30.0, 2, 3, 0, 7),
    "bessel_yn": _of_order(1.5, 12.0, 2, 0, 3),
    "bessel_iv": _of_order(0.5, 6.0, 2, 0, 3),
    "bessel_ive": _of_order(0.5, 20.0, 2, 0, 3),
    "bessel_k0": unary(0.4, 5.0),
    "bessel_k1": unary(0.4, 5.0),
    "rgamma": unary(-2.5, 4.0),
    "gammasgn": unary(-2.5, 4.0, away=(-2.0, -1.0, 0.0)),
    "gammainc": _of_order(0.3, 6.0, 2, 1, 4),
    "gammaincc": _of_order(0.3, 6.0, 2, 1, 4),
    "betainc": cases(_betainc((3,), 2, 3), _betainc((), 1, 1), _betainc((2, 3), [1, 2, 3], [4, 2, 1]), _betainc((0,), 2, 2), dtypes=("float64",)),
    "betaincc": cases(_betainc((3,), 2, 3), _betainc((), 1, 1), _betainc((2, 3), [1, 2, 3], [4, 2, 1]), _betainc((0,), 2, 2), dtypes=("float64",)),
    "stdtr": _of_order(-3.0, 3.0, 2, 1, 4),
    "erfcx": unary(-2.0, 4.0),
    "ndtri": unary(0.1, 0.9),
    "exprel": unary(-4.0, 4.0, statics=({}, {"order": 2})),
    "mills_gap": unary(-16.0, -0.1, statics=({}, {"order": 2})),
    "rel_entr": binary((0.2, 3.0), (0.2, 3.0)),
    "fft": cases(*(arrays(shape, **statics) for shape, statics in TRANSFORMS), prepare=_turned, finish=_parts, complex=True, dtypes=()),
    "ifft": cases(*(arrays(shape, **statics) for shape, statics in TRANSFORMS), prepare=_turned, finish=_parts, complex=True, dtypes=()),
    "rfft": cases(*(arrays(shape, **statics) for shape, statics in TRANSFORMS), finish=_parts, dtypes=()),
    "irfft": cases(
        arrays((3,), n=4), arrays((3,), n=5, norm="ortho"), arrays((1,), n=1), arrays((3, 2), n=4, axis=0, norm="forward"), arrays((2, 2), n=2),
        complex=True,
    ),
    "windows": cases(
        arrays((5,), size=2), arrays((5, 2), size=3, axis=0), arrays((2, 7), size=3, step=2), arrays((3,), size=3),
        arrays((2, 3, 2), size=2, axis=-2),
        complex=True,
    ),
    "windows_adjoint": cases(
        arrays((4, 2), shape=(5,), size=2), arrays((3, 2, 3), shape=(5, 2), size=3, axis=0), arrays((2, 3, 3), shape=(2, 7), size=3, step=2),
        complex=True,
    ),
    "eig": cases(_dominant(3, 3), _dominant(2, 2), _dominant(2, 4, 4), finish=lambda out: _parts(_without_phase(out)), dtypes=()),
    "eigvals": cases(_dominant(3, 3), _dominant(2, 2), _dominant(2, 4, 4), finish=lambda out: _parts(_power_sums(out)), dtypes=()),
    "expm": cases(arrays((3, 3)), arrays((2, 2, 2), low=-4.0, high=4.0), arrays((1, 1)), complex=True),
}  # fmt: skip
