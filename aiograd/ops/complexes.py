"""Rows between the real and the complex numbers.

Note [Convention]
    The gradient of a real loss with respect to ``z = x + iy`` is ``dL/dx + i dL/dy``, PyTorch's convention: the direction of steepest
    ascent. Every rule here follows it by itself.
"""

from __future__ import annotations

import numpy as np

from aiograd.ops.creation import zeros_like
from aiograd.ops.elementwise import conj as conj_array
from aiograd.ops.masking import where
from aiograd.ops.op import define, implements
from aiograd.running.types import Array


def _angle_vjp(g: Array, x: Array) -> Array:
    if x.dtype.kind != "c":
        return zeros_like(g)
    square = np.real(x * np.conjugate(x))
    return g * (1j * x) / where(square == 0, 1, square)


def _angle_jvp(t: Array, x: Array) -> Array | None:
    if x.dtype.kind != "c":
        return None
    square = np.real(x * np.conjugate(x))
    return np.imag(t * np.conjugate(x)) / where(square == 0, 1, square)


def _complex(real: Array, imag: Array, /) -> Array:
    """The complex numbers with these parts.

    Args:
        real, imag: real, of shapes that broadcast.
    """
    out = np.empty(np.broadcast_shapes(np.shape(real), np.shape(imag)), np.result_type(real, imag, np.complex64))
    out.real, out.imag = real, imag
    return out


conj = define("conj", np.conjugate, x=lambda g: conj_array(g), complex="explicit", cost=0.1)
real = define("real", lambda x, /: np.real(x), x=lambda g: g, view=True, jvp="forward", complex="explicit", cost=0.1, numpy=(np.real,))
#: the imaginary part of `x`; zeros where it is real
imag = define(
    "imag", lambda x, /: np.imag(x),
    x=lambda g, x_dtype: g * 1j if x_dtype.kind == "c" else zeros_like(g), view=True, jvp="forward", complex="explicit", cost=0.2, numpy=(np.imag,)
)
angle = define("angle", lambda x, /: np.angle(x), x=_angle_vjp, jvp=_angle_jvp, complex="explicit", cost=8.0)
complex_ = define("complex", _complex, real=lambda g: np.real(g), imag=lambda g: np.imag(g), jvp="linear", complex="explicit", cost=1.0)


@implements(np.angle)
def np_angle(z: Array, deg: bool = False) -> Array:
    """numpy's ``angle``."""
    return np.rad2deg(angle(z)) if deg else angle(z)


@implements(np.real_if_close)
def np_real_if_close(a: Array, tol: float = 100) -> Array:
    """numpy's ``real_if_close``; it reads the imaginary parts."""
    if a.dtype.kind != "c":
        return a
    least = tol * np.finfo(a.dtype).eps if tol > 1 else tol
    return real(a) if np.all(np.absolute(imag(a)) < least) else a
