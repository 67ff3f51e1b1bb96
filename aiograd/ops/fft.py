"""Discrete Fourier transforms: rows along one axis, and numpy's functions composed of them.

Note [Adjoints]
    The matrix of `fft` is symmetric, so under the holomorphic convention the rule is the transform itself. A transform to or from half a
    spectrum is linear over the reals only, so its rules follow the complex convention themselves: the adjoint of `rfft` fills the other half with
    zeros, the adjoint of `irfft` counts every frequency twice except the first and, for an even length, the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.ops.complexes import conj as conj_row
from aiograd.ops.creation import refuse
from aiograd.ops.indexing import getitem
from aiograd.ops.joining import constant_pad
from aiograd.ops.op import Op, answer, define, implements
from aiograd.ops.shape import checked_axis, roll
from aiograd.running.types import Array

Norm = Literal["backward", "ortho", "forward"]

#: the scaling that makes a transform of one direction the adjoint of one of the other
OTHER_NORM = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def _fft(x: Array, /, axis: int = -1, norm: Norm = "backward") -> Array:
    """The discrete Fourier transform along `axis`; `norm` says which direction divides by the length, as in numpy."""
    return np.fft.fft(x, axis=axis, norm=norm)


def _ifft(x: Array, /, axis: int = -1, norm: Norm = "backward") -> Array:
    """The inverse of `fft`."""
    return np.fft.ifft(x, axis=axis, norm=norm)


def _irfft(x: Array, /, n: int, axis: int = -1, norm: Norm = "backward") -> Array:
    """The real array of length `n` along `axis` with the `rfft` `x` of n // 2 + 1 elements there."""
    if x.shape[axis] != n // 2 + 1:
        raise ArgumentError(f"irfft: {x.shape[axis]} frequencies along axis {axis}, expected {n // 2 + 1} for a result of length {n}")
    return np.fft.irfft(x, n, axis=axis, norm=norm)


def _rfft_vjp(g: Array, x_shape: tuple[int, ...], axis: int, norm: str) -> Array:
    return np.real(ifft(_resized(g, x_shape[axis], axis), axis=axis, norm=OTHER_NORM[norm]))


def _irfft_vjp(g: Array, x_shape: tuple[int, ...], n: int, axis: int, norm: str) -> Array:
    counts = np.full(x_shape[axis], 2.0, g.dtype)
    counts[0] = 1.0
    if n % 2 == 0:
        counts[-1] = 1.0
    axis = checked_axis(axis, len(x_shape))
    return rfft(g, axis=axis, norm=OTHER_NORM[norm]) * counts.reshape((-1,) + (1,) * (len(x_shape) - 1 - axis))


fft: Op = define("fft", _fft, x=lambda g, axis, norm: fft(g, axis=axis, norm=norm), jvp="forward", complex="holomorphic", cost=20.0)
ifft: Op = define("ifft", _ifft, x=lambda g, axis, norm: ifft(g, axis=axis, norm=norm), jvp="forward", complex="holomorphic", cost=20.0)
#: the first half of `fft` of real `x`, the frequencies 0 to n // 2
rfft: Op = define(
    "rfft", lambda x, /, axis=-1, norm="backward": np.fft.rfft(x, axis=axis, norm=norm), x=_rfft_vjp, jvp="forward", complex="explicit", cost=20.0
)
irfft: Op = define("irfft", _irfft, x=_irfft_vjp, jvp="forward", complex="explicit", cost=20.0)


def _resized(x: Array, n: int | None, axis: int) -> Array:
    """`x` cut, or filled with zeros, to `n` elements along `axis`."""
    axis = checked_axis(axis, len(x.shape))
    length = x.shape[axis]
    if n is None or n == length:
        return x
    if n < 1:
        raise ArgumentError(f"fft: n is {n}, expected at least 1")
    if n < length:
        return getitem(x, index=(slice(None),) * axis + (slice(0, n),))
    return constant_pad(x, pad_width=tuple((0, n - length if a == axis else 0) for a in range(len(x.shape))))


def _norm(norm: str | None) -> str:
    if norm not in (None, *OTHER_NORM):
        raise ArgumentError(f"fft: norm is {norm!r}, expected 'backward', 'ortho' or 'forward'")
    return norm or "backward"


# numpy's functions, with numpy's arguments


@implements(np.fft.fft)
def np_fft(a: Array, n: int | None = None, axis: int = -1, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.fft``."""
    refuse("fft.fft", out=out)
    return fft(_resized(a, n, axis), axis=axis, norm=_norm(norm))


@implements(np.fft.ifft)
def np_ifft(a: Array, n: int | None = None, axis: int = -1, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.ifft``."""
    refuse("fft.ifft", out=out)
    return ifft(_resized(a, n, axis), axis=axis, norm=_norm(norm))


@implements(np.fft.rfft)
def np_rfft(a: Array, n: int | None = None, axis: int = -1, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.rfft``."""
    refuse("fft.rfft", out=out)
    return rfft(_resized(a, n, axis), axis=axis, norm=_norm(norm))


@implements(np.fft.irfft)
def np_irfft(a: Array, n: int | None = None, axis: int = -1, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.irfft``."""
    refuse("fft.irfft", out=out)
    length = 2 * (a.shape[checked_axis(axis, len(a.shape))] - 1) if n is None else n
    if length < 1:
        raise ArgumentError(f"fft: n is {length}, expected at least 1")
    return irfft(_resized(a, length // 2 + 1, axis), n=length, axis=axis, norm=_norm(norm))


@implements(np.fft.hfft)
def np_hfft(a: Array, n: int | None = None, axis: int = -1, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.hfft``."""
    return np_irfft(conj_row(a), n, axis, OTHER_NORM[_norm(norm)], out)


@implements(np.fft.ihfft)
def np_ihfft(a: Array, n: int | None = None, axis: int = -1, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.ihfft``."""
    return conj_row(np_rfft(a, n, axis, OTHER_NORM[_norm(norm)], out))


def _sizes(x: Array, s: Any, axes: Any) -> tuple[list[int | None], list[int]]:
    """The lengths (None: as they are) and the axes of a transform over several."""
    ndim = len(x.shape)
    if axes is None:
        axes = range(ndim) if s is None else range(ndim - len(s), ndim)
    chosen = [checked_axis(a, ndim) for a in axes]
    lengths: list[int | None] = [None] * len(chosen) if s is None else [None if n is None or n == -1 else int(n) for n in s]
    if len(lengths) != len(chosen):
        raise ArgumentError(f"fft: {len(lengths)} lengths for {len(chosen)} axes")
    return lengths, chosen


def _over_axes(one: Callable[..., Array], x: Array, s: Any, axes: Any, norm: str | None) -> Array:
    for n, axis in reversed(list(zip(*_sizes(x, s, axes), strict=True))):
        x = one(x, n, axis, norm)
    return x


@implements(np.fft.fftn)
def np_fftn(a: Array, s: Any = None, axes: Any = None, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.fftn``."""
    refuse("fft.fftn", out=out)
    return _over_axes(np_fft, a, s, axes, norm)


@implements(np.fft.ifftn)
def np_ifftn(a: Array, s: Any = None, axes: Any = None, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.ifftn``."""
    refuse("fft.ifftn", out=out)
    return _over_axes(np_ifft, a, s, axes, norm)


@implements(np.fft.rfftn)
def np_rfftn(a: Array, s: Any = None, axes: Any = None, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.rfftn``."""
    refuse("fft.rfftn", out=out)
    lengths, chosen = _sizes(a, s, axes)
    half = np_rfft(a, lengths[-1], chosen[-1], norm)
    return _over_axes(np_fft, half, lengths[:-1], chosen[:-1], norm)


@implements(np.fft.irfftn)
def np_irfftn(a: Array, s: Any = None, axes: Any = None, norm: str | None = None, out: Any = None) -> Array:
    """numpy's ``fft.irfftn``."""
    refuse("fft.irfftn", out=out)
    lengths, chosen = _sizes(a, s, axes)
    whole = _over_axes(np_ifft, a, lengths[:-1], chosen[:-1], norm)
    return np_irfft(whole, lengths[-1], chosen[-1], norm)


def _shifted(x: Array, axes: Any, direction: int) -> Array:
    chosen = tuple(range(len(x.shape))) if axes is None else (axes,) if isinstance(axes, int) else tuple(axes)
    chosen = tuple(checked_axis(a, len(x.shape)) for a in chosen)
    return roll(x, shift=tuple(direction * (x.shape[a] // 2) for a in chosen), axis=chosen)


@implements(np.fft.fftshift)
def np_fftshift(x: Array, axes: Any = None) -> Array:
    """numpy's ``fft.fftshift``."""
    return _shifted(x, axes, 1)


@implements(np.fft.ifftshift)
def np_ifftshift(x: Array, axes: Any = None) -> Array:
    """numpy's ``fft.ifftshift``."""
    return _shifted(x, axes, -1)


answer({
    np.fft.fft2: lambda a, s=None, axes=(-2, -1), norm=None, out=None: np_fftn(a, s, axes, norm, out),
    np.fft.ifft2: lambda a, s=None, axes=(-2, -1), norm=None, out=None: np_ifftn(a, s, axes, norm, out),
    np.fft.rfft2: lambda a, s=None, axes=(-2, -1), norm=None, out=None: np_rfftn(a, s, axes, norm, out),
    np.fft.irfft2: lambda a, s=None, axes=(-2, -1), norm=None, out=None: np_irfftn(a, s, axes, norm, out),
})  # fmt: skip
